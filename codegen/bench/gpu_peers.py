"""The same operators by others on a GPU: torch's attention on data gathered beforehand, FlashInfer where installed.

Every function gives what there is, by name, as calls that can be captured in a graph. What does not run here (a backend
that refuses the sizes, a package that is not installed) is left out, and `left_out` says why.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from tilewright.codegen.bench.protocol import Call

_BACKENDS = {"sdpa flash": SDPBackend.FLASH_ATTENTION, "sdpa cudnn": SDPBackend.CUDNN_ATTENTION}
_WORKSPACE = 256 << 20

left_out: dict[str, str] = {}


def _tensor(returned: object) -> Tensor:
    assert isinstance(returned, Tensor)
    return returned


def _working(forms: dict[str, Call]) -> dict[str, Call]:
    """Those that run; the others' reasons go to `left_out`."""
    kept = {}
    for name, form in forms.items():
        try:
            form.run()
            torch.cuda.synchronize()
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            left_out[name] = str(error).strip().splitlines()[-1]
        else:
            kept[name] = form
    return kept


@cache
def _flashinfer() -> Any:
    try:
        import flashinfer
    except ImportError:
        left_out["flashinfer"] = "not installed (pip install flashinfer-python)"
        return None
    return flashinfer


@cache
def _workspace() -> Tensor:
    return torch.zeros(_WORKSPACE, dtype=torch.uint8, device="cuda")


def _run(wrapper: Any, q: Tensor, pool: tuple[Tensor, ...]) -> Call:
    """A planned FlashInfer call into an output of its own."""
    out = torch.empty_like(q)
    return Call(lambda: wrapper.run(q, pool, out=out), lambda _: (out,))


def version() -> str:
    """Of FlashInfer, "" where it is not installed."""
    module = _flashinfer()
    return "" if module is None else f"FlashInfer {module.__version__}"


def decode(
    q: Tensor, keys: Tensor, values: Tensor, pool: tuple[Tensor, Tensor] | None, table: Tensor
) -> dict[str, Call]:
    """One token per request over equal contexts, q [B, Hq, D]: out [B, Hq, Dv].

    keys and values are [B, Hk, N, D], gathered; pool is [S, Hk, D] twice, of which table [B, N] are the slots; None: it
    is of another type than q, and peers that read pages are left out.
    """
    batch, heads, dim = q.shape
    kv_heads, tokens = keys.shape[1], keys.shape[2]
    grouped = q.view(batch, kv_heads, heads // kv_heads, dim)

    def sdpa(backend: SDPBackend) -> Call:
        def run() -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(grouped, keys, values)

        return Call(run, lambda out: (_tensor(out).reshape(batch, heads, -1),))

    forms = {name: sdpa(backend) for name, backend in _BACKENDS.items()}
    flashinfer = _flashinfer()
    if flashinfer is not None and pool is not None:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(), "NHD", use_tensor_cores=True)
        counts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * tokens
        wrapper.plan(
            counts, table.flatten().int(), torch.ones(batch, dtype=torch.int32, device="cuda"), heads, kv_heads, dim, 1,
            q_data_type=q.dtype, kv_data_type=q.dtype,
        )  # fmt: skip
        paged = tuple(x.unsqueeze(1) for x in pool)
        forms["flashinfer decode, tensor cores"] = _run(wrapper, q, paged)
    return _working(forms)


def latent(
    q: Tensor, keys: Tensor, values: Tensor, pool: tuple[Tensor, Tensor] | None, table: Tensor
) -> dict[str, Call]:
    """As `decode` where the one KV head's values [B, 1, N, Dv] are the first dims of its keys [B, 1, N, D]."""
    batch, heads, dim = q.shape
    dense, dim_vo, scale = keys[:, 0], values.shape[3], q.shape[2] ** -0.5

    def products() -> Tensor:
        scores = torch.bmm(q, dense.transpose(1, 2)).float() * scale
        return torch.bmm(scores.softmax(-1).to(q.dtype), dense[..., :dim_vo])

    forms = {"torch bmm": Call(products, lambda out: (_tensor(out),))}
    flashinfer = _flashinfer()
    if flashinfer is not None and pool is not None:
        counts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        tokens = keys.shape[2]
        parts = pool[0][..., :dim_vo], pool[0][..., dim_vo:]
        for backend in ("fa2", "fa3"):
            wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(_workspace(), backend=backend)
            wrapper.plan(
                counts, counts * tokens, table.flatten().int(),
                torch.full((batch,), tokens, dtype=torch.int32, device="cuda"), heads, dim_vo, dim - dim_vo, 1, False,
                scale, q.dtype, q.dtype,
            )  # fmt: skip
            out = torch.empty(batch, heads, dim_vo, dtype=q.dtype, device="cuda")
            run = partial(wrapper.run, q[..., :dim_vo], q[..., dim_vo:], *parts, out=out)
            forms[f"flashinfer MLA {backend}"] = Call(run, lambda written: (_tensor(written),))
    return _working(forms)


def extend(
    q: Tensor, keys: Tensor, values: Tensor, pool: tuple[Tensor, Tensor], table: Tensor, prefix: int
) -> dict[str, Call]:
    """Causal attention of equal requests over a prefix and themselves, q [B * T, Hq, D]: out [B * T, Hq, Dv].

    keys, values [B, Hk, prefix + T, D]; pool and table as in `decode`, of all prefix + T keys.
    """
    batch, kv_heads, total, dim = keys.shape
    heads, tokens = q.shape[1], total - prefix
    queries = q.view(batch, tokens, heads, dim).transpose(1, 2).contiguous()
    options: dict[str, Any] = {"attn_mask": causal_lower_right(tokens, total)} if prefix else {"is_causal": True}

    def sdpa(backend: SDPBackend) -> Call:
        def run() -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(queries, keys, values, enable_gqa=True, **options)

        return Call(run, lambda out: (_tensor(out).transpose(1, 2).reshape(batch * tokens, heads, -1),))

    forms = {name: sdpa(backend) for name, backend in _BACKENDS.items()}
    flashinfer = _flashinfer()
    if flashinfer is not None:
        steps = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        paged = tuple(x.unsqueeze(1) for x in pool)
        for backend in ("fa2", "fa3"):
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(), "NHD", backend=backend)
            wrapper.plan(
                steps * tokens, steps * total, table.flatten().int(),
                torch.ones(batch, dtype=torch.int32, device="cuda"), heads, kv_heads, dim, 1, causal=True,
                q_data_type=q.dtype, kv_data_type=q.dtype,
            )  # fmt: skip
            forms[f"flashinfer {backend}"] = _run(wrapper, q, paged)
    return _working(forms)
