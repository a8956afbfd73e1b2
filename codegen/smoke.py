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

    from tilewright.codegen.tolerances import Tolerance

_LOG2E = math.log2(math.e)


class SmokeError(Error):
    """A module ran and computed something wrong: it must not be used on this machine."""


def smoke(module: Module) -> float:
    """Call the module once; return the largest error as a share of the tolerance.

    Raises:
        SmokeError: the result is off by more than rounding can explain.
    """
    import torch

    from tilewright.codegen.tolerances import worst

    generator = torch.Generator().manual_seed(1)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "f32": torch.float32}[module.workload.dtype]
    error = worst(*_RUNS[module.workload.operator](module, dtype, generator))
    if not error <= 1:
        raise SmokeError(
            f"{module.path}: smoke run: expected an error of at most 1 times the tolerance, got {error:g}; "
            "this CPU or library set computes it wrongly: build the module again on this machine and report it"
        )
    return error


def _dims(workload: Workload) -> tuple[int, int]:
    return workload.head_dim_qk or 64, workload.head_dim_vo or 64


def _int32(*rows: object) -> torch.Tensor:
    import torch

    return torch.tensor(rows, dtype=torch.int32)


def _exact(got: torch.Tensor, want: torch.Tensor) -> float:
    return 0.0 if got.equal(want) else math.inf


def _state_errors(
    out: torch.Tensor, lse: torch.Tensor, want: torch.Tensor, want_lse: torch.Tensor, tolerance: Tolerance
) -> list[float]:
    from tilewright.codegen.tolerances import excess, lse_error

    return [excess(out, want, tolerance), lse_error(lse, want_lse) / tolerance.lse]


def _paged(module: Module, dtype: torch.dtype, generator: torch.Generator) -> list[float]:
    """One request of five keys in shuffled slots, two KV heads; extend: two query tokens at its end.

    Tree: neither of the two sees the other.
    """
    import torch

    from tilewright.codegen.tolerances import PAGED

    dim, dim_vo = _dims(module.workload)
    group, heads, keys, slots = module.workload.group or 2, 2, 5, 8
    tokens = 1 if module.workload.operator == "paged_decode" else min(2, module.plan.get("block_q", 1))
    q = torch.randn(tokens, group * heads, dim, generator=generator).to(dtype)
    k = torch.randn(slots, heads, dim, generator=generator).to(dtype)
    v = torch.randn(slots, heads, dim_vo, generator=generator).to(dtype)
    pools, scales = (k, v), ()
    if module.workload.kv_dtype is not None:
        scales = (0.5, 0.25)
        codes = [(x.float() / scale).to(torch.float8_e4m3fn) for x, scale in zip((k, v), scales, strict=True)]
        pools = tuple(x.view(torch.uint8) for x in codes)
        k, v = (x.float() * scale for x, scale in zip(codes, scales, strict=True))
    table = torch.randperm(slots, generator=generator)[:keys]
    out = torch.zeros(tokens, group * heads, dim_vo, dtype=dtype)
    lse = torch.zeros(tokens, group * heads)
    first_new = keys - tokens
    items = _int32([0, 0, tokens, 0, keys, first_new, keys, 0, -1, first_new])
    scale = dim**-0.5
    mask = torch.eye(tokens, dtype=torch.uint8) if module.workload.tree else None
    module.function(
        *(q, *pools),
        *(() if module.workload.operator == "paged_decode" else (k.to(dtype), v.to(dtype))),
        *(table.to(torch.int32)[None], _int32(0), _int32(0), items),
        *(torch.full((group * heads,), -math.inf), out, lse),
        *(torch.zeros(1, group * heads, dim_vo), torch.zeros(1, group * heads)),
        *(() if mask is None else (mask.flatten(), _int32(0), _int32(tokens))),
        *(scale * _LOG2E, 0.0, 0.0, 2**30, 0, *scales),
    )
    keys64, values64 = (x[table].double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("thd,jhd->thj", q.double(), keys64) * scale
    position = torch.arange(keys - tokens, keys)[:, None, None]
    scores = scores.masked_fill(torch.arange(keys) > position, -math.inf)
    if mask is not None:
        scores[:, :, first_new:] = scores[:, :, first_new:].masked_fill(mask[:, None] == 0, -math.inf)
    wanted = torch.einsum("thj,jhd->thd", scores.softmax(-1), values64)
    return _state_errors(out, lse, wanted, scores.logsumexp(-1), PAGED[dtype])


def _merge(module: Module, dtype: torch.dtype, generator: torch.Generator) -> list[float]:
    """The states of weight 1 and 3 of two heads."""
    import torch

    from tilewright.codegen.tolerances import MERGE

    parts = torch.randn(2, 2, 64, generator=generator)
    logs = torch.tensor([[0.0, 0.0], [math.log(3.0)] * 2])
    out, lse = torch.zeros(1, 2, 64, dtype=dtype), torch.zeros(1, 2)
    module.function(parts, logs, _int32([0, 0, 2, 1]), torch.full((2,), -math.inf), out, lse)
    wanted = (parts[0].double() + 3 * parts[1].double())[None] / 4
    return _state_errors(out, lse, wanted, torch.full((1, 2), math.log(4.0), dtype=torch.float64), MERGE[dtype])


def _write_kv(module: Module, dtype: torch.dtype, generator: torch.Generator) -> list[float]:
    """Three rows, one of them skipped."""
    import torch

    x = torch.randn(3, 2, 64, generator=generator).to(dtype)
    if module.workload.kv_dtype is not None:
        buffer = torch.zeros(4, 2, 64, dtype=torch.uint8)
        module.function(x, buffer, _int32(2, -1, 0), 0.5)
        x = (x.float() / 0.5).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        buffer = torch.zeros(4, 2, 64, dtype=dtype)
        module.function(x, buffer, _int32(2, -1, 0))
    return [_exact(buffer, torch.stack([x[2], torch.zeros_like(x[0]), x[0], torch.zeros_like(x[0])]))]


def _lightning(module: Module, dtype: torch.dtype, generator: torch.Generator) -> list[float]:
    """Two heads; decode: one token of one request, extend: three."""
    import torch

    from tilewright.codegen.tolerances import LIGHTNING, LIGHTNING_STATE, excess

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
    return [
        excess(out, torch.stack(want), LIGHTNING[dtype]),
        excess(state[1:], want_state[None], LIGHTNING_STATE[dtype]),
        _exact(state[0], untouched),
    ]


# Each gives the errors of its results as shares of what is tolerated.
_RUNS: dict[str, Callable[[Module, torch.dtype, torch.Generator], list[float]]] = {
    "paged_decode": _paged,
    "paged_extend": _paged,
    "merge": _merge,
    "write_kv": _write_kv,
    "lightning_decode": _lightning,
    "lightning_extend": _lightning,
}
