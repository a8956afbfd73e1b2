"""The same operators in plain torch: what an engineer without kernels of their own would call.

Every function gives the forms that torch offers, by name, as calls without arguments; which is the fastest is decided
by the bench. They are given what they like best for nothing: keys and values already gathered in their own dense
layout, decay tables and slices ready.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tilewright.runtime.arguments import DTYPES

Form = Callable[[], object]
CHUNKS = (64, 128, 256)


def decode(q: Tensor, keys: Tensor, values: Tensor) -> dict[str, Form]:
    """Attention of one token per request, q [B, Hq, D], keys [B, Hk, N, D], values [B, Hk, N, Dv]: out [B, Hq, Dv]."""
    batch, heads, dim = q.shape
    out = (batch, heads, values.shape[3])
    single = q.view(batch, heads, 1, dim)
    grouped = q.view(batch, keys.shape[1], heads // keys.shape[1], dim)
    return {
        "sdpa enable_gqa": lambda: scaled_dot_product_attention(single, keys, values, enable_gqa=True).reshape(out),
        "sdpa group as rows": lambda: scaled_dot_product_attention(grouped, keys, values).reshape(out),
    }


def extend(q: Tensor, keys: Tensor, values: Tensor) -> dict[str, Form]:
    """Causal attention of new tokens, q [B, Hq, T, D], keys and values [B, Hk, P + T, D]: out [B, Hq, T, D].

    Where there is a prefix (P > 0) causality is a mask. So it is in the third form, which packs the group into the
    query rows as decode does: torch then computes the hidden half too.
    """
    batch, heads, tokens, dim = q.shape
    kv_heads, length = keys.shape[1:3]
    group = heads // kv_heads
    many_keys, many_values = (x.repeat_interleave(group, 1) for x in (keys, values))
    rows = q.reshape(batch, kv_heads, group * tokens, dim)
    row_mask = _causal_mask(tokens, length, group)
    causal = {"is_causal": True} if length == tokens else {"attn_mask": row_mask[:tokens]}
    return {
        "sdpa enable_gqa": lambda: scaled_dot_product_attention(q, keys, values, enable_gqa=True, **causal),
        "sdpa expanded": lambda: scaled_dot_product_attention(q, many_keys, many_values, **causal),
        "sdpa group as rows, mask": lambda: scaled_dot_product_attention(
            rows, keys, values, attn_mask=row_mask
        ).view_as(q),
    }


@lru_cache(1)  # copies of a row share it: it can be larger than their keys
def _causal_mask(tokens: int, length: int, repeats: int) -> Tensor:
    return torch.ones((tokens, length), dtype=torch.bool).tril(length - tokens).repeat(repeats, 1)


def lightning_decode(q: Tensor, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor, scale: float) -> dict[str, Form]:
    """One step of the recurrence, q, k, v [B, H, D], state [B, H, Dk, Dv] f32 updated in place: out [B, H, Dv]."""
    batch, heads, dim = q.shape
    dim_v = v.shape[2]
    decay = torch.exp(-slopes).view(1, heads, 1, 1)

    def outer() -> Tensor:
        state.mul_(decay).add_(k.float().unsqueeze(-1) * v.float().unsqueeze(-2))
        return (torch.matmul(q.float().unsqueeze(-2), state) * scale).squeeze(-2).to(q.dtype)

    flat = state.view(batch * heads, dim, dim_v)

    def batched() -> Tensor:
        state.mul_(decay)
        flat.baddbmm_(k.float().view(-1, dim, 1), v.float().view(-1, 1, dim_v))
        return (torch.bmm(q.float().view(-1, 1, dim), flat) * scale).view(batch, heads, dim_v).to(q.dtype)

    return {"torch outer product": outer, "torch baddbmm": batched}


def lightning_extend(q: Tensor, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor, scale: float) -> dict[str, Form]:
    """The chunked form of one request, q, k, v [H, T, D], state [H, Dk, Dv] f32 updated in place: out [H, T, Dv].

    One form for each chunk of CHUNKS that divides T and each type that the products are computed in.
    """
    tokens = q.shape[1]
    return {
        f"torch chunk {chunk}, {name} products": _chunked(q, k, v, state, slopes, scale, chunk, compute)
        for chunk in CHUNKS
        if tokens % chunk == 0
        for compute, name in {torch.float32: "f32", q.dtype: DTYPES[q.dtype]}.items()
    }


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor, scale: float, chunk: int, compute: torch.dtype
) -> Form:
    """Products within all chunks of all heads at once; only the states go from chunk to chunk."""
    heads, tokens, dim = q.shape
    dim_v, count = v.shape[2], tokens // chunk
    position = torch.arange(chunk, dtype=torch.float32)
    rate = slopes.view(heads, 1, 1, 1)
    distance = position[:, None] - position
    within = torch.where(distance < 0, 0.0, torch.exp(-rate * distance.clamp(min=0)) * scale).to(compute)
    since_start = (torch.exp(-rate * (position[:, None] + 1)) * scale).to(compute)
    to_end = torch.exp(-rate * (chunk - 1 - position[:, None])).to(compute)
    over_chunk = torch.exp(-slopes * chunk).view(heads, 1, 1)
    before = torch.empty((heads, count, dim, dim_v))

    def run() -> Tensor:
        queries, keys = (x.view(heads, count, chunk, dim).to(compute) for x in (q, k))
        values = v.view(heads, count, chunk, dim_v).to(compute)
        out = (queries @ keys.transpose(-1, -2)).mul_(within) @ values
        added = ((keys * to_end).transpose(-1, -2) @ values).float()
        for index in range(count):
            before[:, index] = state
            state.mul_(over_chunk).add_(added[:, index])
        out += (queries * since_start) @ before.to(compute)
        return out.view(heads, tokens, dim_v).to(q.dtype)

    return run
