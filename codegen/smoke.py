"""Run a loaded module once on tiny inputs and compare with plain torch: does it load, link and compute on this machine?

Not a test of the kernel (tests/ does that); it shows broken installations (`tilewright doctor`, `make test-abi`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from tilewright.runtime.errors import Error
from tilewright.runtime.store import Module
from tilewright.schedules.workload import Workload

if TYPE_CHECKING:
    import torch

_LOG2E = math.log2(math.e)
# Error of one rounding of the result plus that of a bf16 P in the product, relative to values of size one.
_TOLERANCE = {"bf16": 3e-2, "fp16": 4e-3, "f32": 1e-4}


class SmokeError(Error):
    """A module ran and computed something wrong: it must not be used on this machine."""


def smoke(module: Module) -> float:
    """Call the module once; return the largest absolute error.

    Raises:
        SmokeError: the result is off by more than rounding can explain.
    """
    import torch

    generator = torch.Generator().manual_seed(1)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "f32": torch.float32}[module.workload.dtype]
    pairs = _RUNS[module.workload.operator](module, dtype, generator)
    error = max(float((got.double() - want.double()).abs().nan_to_num(nan=math.inf).max()) for got, want in pairs)
    tolerance = _TOLERANCE[module.workload.dtype]
    if error > tolerance:
        raise SmokeError(
            f"{module.path}: smoke run: expected an error of at most {tolerance:g}, got {error:g}; "
            "this CPU or library set computes it wrongly: build the module again on this machine and report it"
        )
    return error


Pairs = list[tuple["torch.Tensor", "torch.Tensor"]]


def _dims(workload: Workload) -> tuple[int, int]:
    return workload.head_dim_qk or 64, workload.head_dim_vo or 64


def _int32(*rows: object) -> torch.Tensor:
    import torch

    return torch.tensor(rows, dtype=torch.int32)


def _paged(module: Module, dtype: torch.dtype, generator: torch.Generator) -> Pairs:
    """One request of five keys in shuffled slots, two KV heads; extend: two query tokens at its end."""
    import torch

    dim, dim_vo = _dims(module.workload)
    group, heads, keys, slots = module.workload.group or 2, 2, 5, 8
    tokens = 1 if module.workload.operator == "paged_decode" else min(2, module.plan.get("block_q", 1))
    q = torch.randn(tokens, group * heads, dim, generator=generator).to(dtype)
    k = torch.randn(slots, heads, dim, generator=generator).to(dtype)
    v = torch.randn(slots, heads, dim_vo, generator=generator).to(dtype)
    table = torch.randperm(slots, generator=generator)[:keys]
    out = torch.zeros(tokens, group * heads, dim_vo, dtype=dtype)
    lse = torch.zeros(tokens, group * heads)
    items = _int32([0, 0, tokens, 0, keys, keys - tokens, keys, 0, -1, 0])
    scale = dim**-0.5
    module.function(
        *(q, k, v),
        *(() if module.workload.operator == "paged_decode" else (k, v)),
        *(table.to(torch.int32)[None], _int32(0), _int32(0), items),
        *(torch.full((group * heads,), -math.inf), out, lse),
        *(torch.zeros(1, group * heads, dim_vo), torch.zeros(1, group * heads)),
        *(scale * _LOG2E, 0.0, 0.0, 2**30, 0),
    )
    keys64, values64 = (x[table].double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("thd,jhd->thj", q.double(), keys64) * scale
    position = torch.arange(keys - tokens, keys)[:, None, None]
    scores = scores.masked_fill(torch.arange(keys) > position, -math.inf)
    return [(out, torch.einsum("thj,jhd->thd", scores.softmax(-1), values64)), (lse, scores.logsumexp(-1))]


def _merge(module: Module, dtype: torch.dtype, generator: torch.Generator) -> Pairs:
    """The states of weight 1 and 3 of two heads."""
    import torch

    parts = torch.randn(2, 2, 64, generator=generator)
    logs = torch.tensor([[0.0, 0.0], [math.log(3.0)] * 2])
    out, lse = torch.zeros(1, 2, 64, dtype=dtype), torch.zeros(1, 2)
    module.function(parts, logs, _int32([0, 0, 2, 1]), torch.full((2,), -math.inf), out, lse)
    return [(out, (parts[0] + 3 * parts[1])[None] / 4), (lse, torch.full((1, 2), math.log(4.0)))]


def _write_kv(module: Module, dtype: torch.dtype, generator: torch.Generator) -> Pairs:
    """Three rows, one of them skipped."""
    import torch

    x = torch.randn(3, 2, 64, generator=generator).to(dtype)
    buffer = torch.zeros(4, 2, 64, dtype=dtype)
    module.function(x, buffer, _int32(2, -1, 0))
    return [(buffer, torch.stack([x[2], torch.zeros_like(x[0]), x[0], torch.zeros_like(x[0])]))]


def _lightning(module: Module, dtype: torch.dtype, generator: torch.Generator) -> Pairs:
    """Two heads; decode: one token of one request, extend: three."""
    import torch

    decode = module.workload.operator == "lightning_decode"
    dim, dim_vo = _dims(module.workload)
    tokens, heads, scale = 1 if decode else 3, 2, dim**-0.5
    q, k, v = (torch.randn(tokens, heads, size, generator=generator).to(dtype) for size in (dim, dim, dim_vo))
    state = torch.randn(2, heads, dim, dim_vo, generator=generator) / dim**0.5
    slopes = torch.tensor([0.5, 0.125])
    want_state, want = state[1].double(), []
    for t in range(tokens):
        want_state = want_state * torch.exp(-slopes.double())[:, None, None] + torch.einsum(
            "hd,he->hde", k[t].double(), v[t].double()
        )
        want.append(scale * torch.einsum("hd,hde->he", q[t].double(), want_state))
    untouched = state[0].clone()
    out = torch.zeros(tokens, heads, dim_vo, dtype=dtype)
    extend = () if decode else (_int32(1), _int32(0, tokens))
    module.function(q, k, v, state, _int32(1), *extend, slopes, out, scale)
    # The state's entries are sums of products of size one, out's are sqrt(dim) times less: one tolerance for both.
    return [(out, torch.stack(want)), (state[1] / dim**0.5, want_state / dim**0.5), (state[0], untouched)]


_RUNS: dict[str, Callable[[Module, torch.dtype, torch.Generator], Pairs]] = {
    "paged_decode": _paged,
    "paged_extend": _paged,
    "merge": _merge,
    "write_kv": _write_kv,
    "lightning_decode": _lightning,
    "lightning_extend": _lightning,
}
