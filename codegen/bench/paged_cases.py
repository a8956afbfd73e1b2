"""Paged attention in the bench: our call through the public functions beside torch and vLLM on the same keys.

A row has one pool and many tables: every call takes the next table, so that no call finds in a cache what it reads.
Peers get as many copies of their own form of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import tilewright
from tilewright.codegen.bench import peers, vllm_peer
from tilewright.codegen.bench.inputs import DTYPES, SEED
from tilewright.codegen.bench.protocol import Call, Contestant
from tilewright.codegen.bench.setups import (
    Case,
    Roots,
    Setup,
    copies,
    draw,
    first,
    ours,
    peer_forms,
    pooled,
)
from tilewright.codegen.tolerances import PAGED
from tilewright.runtime.pool_memory import pool_zeros

_BASE = 1 << 22
# A call of extend reads little beside what it computes: more copies would only take memory, and time to be checked.
MOST_EXTEND_COPIES = 8


def _sizes(case: Case) -> tuple[int, int, int, int, torch.dtype]:
    """(Hq, Hk, D, Dv, dtype)."""
    workload = case.workload
    heads = (workload.group or 1) * case.heads
    return heads, case.heads, workload.head_dim_qk or 0, workload.head_dim_vo or 0, DTYPES[workload.dtype]


def _filled(base: Tensor, offset: int, *shape: int) -> Tensor:
    """A pool of normal numbers, `base` over and over from an offset on: drawing a gigabyte would take the longest."""
    pool = pool_zeros(shape, base.dtype)
    flat = pool.view(-1)
    for begin in range(0, flat.numel(), len(base) - offset):
        count = min(len(base) - offset, flat.numel() - begin)
        flat[begin : begin + count] = base[offset : offset + count]
    return pool


def _base(dtype: torch.dtype) -> Tensor:
    # An odd length: no two slots of a pool hold the same row.
    return draw()(_BASE + 12345).to(dtype)


def decode(case: Case, roots: Roots | None, cold: int) -> Setup:
    """One token per request; keys in slots drawn at random, for torch gathered and for vLLM paged beforehand."""
    heads, kv_heads, dim, dim_v, dtype = _sizes(case)
    batch, tokens = case.batch, case.tokens
    latent = kv_heads == 1 and dim_v < dim  # the values are the first dimensions of the keys
    fp8 = case.workload.kv_dtype is not None
    row_bytes = kv_heads * (dim + (0 if latent else dim_v)) * (1 if fp8 else dtype.itemsize)
    count = copies(batch * tokens * row_bytes, cold)
    slots = count * batch * tokens
    base = _base(torch.float8_e4m3fn if fp8 else dtype)
    k_buffer = _filled(base, 0, slots, kv_heads, dim)
    v_buffer = k_buffer[..., :dim_v] if latent else _filled(base, 977, slots, kv_heads, dim_v)
    q = draw()(batch, heads, dim).to(dtype)
    tables = torch.randperm(slots, generator=torch.Generator().manual_seed(SEED)).view(count, batch, tokens)
    rows, seq_lens = torch.arange(batch, dtype=torch.int32), torch.full((batch,), tokens, dtype=torch.int32)

    def calls() -> list[Call]:
        plan = None
        if not case.plan_in_call:
            plan = tilewright.plan_decode(
                seq_lens, num_qo_heads=heads, num_kv_heads=kv_heads, head_dim_qk=dim, head_dim_vo=dim_v, device="cpu"
            )
        out = torch.empty((batch, heads, dim_v), dtype=dtype)
        attend = partial(tilewright.decode_attention, q, k_buffer, v_buffer)
        return [
            Call(partial(attend, table.to(torch.int32), rows, seq_lens, out=out, plan=plan), first) for table in tables
        ]

    def gathered(pool: Tensor, table: Tensor) -> Tensor:
        # torch attends to the same numbers in the type of the queries: it has no attention over fp8.
        rows = pool.view(torch.uint8)[table].view(pool.dtype).to(dtype) if fp8 else pool[table]
        return pooled(rows.transpose(1, 2))

    forms = []
    for table in tables:
        keys = gathered(k_buffer, table)
        forms.append(peers.decode(q, keys, keys[..., :dim_v] if latent else gathered(v_buffer, table)))
    contestants = [*ours(case, roots, calls), *peer_forms(forms, first)]
    if case.workload.dtype == "bf16" and not fp8 and vllm_peer.load():
        if latent:
            call = vllm_peer.latent_decode(q, k_buffer[tables].view(count * batch, tokens, dim), dim_v, dim**-0.5)
            contestants.append(_vllm("latent", vllm_peer.LATENT_PAGE, call, count))
        else:

            def pairs() -> Iterator[tuple[Tensor, Tensor]]:
                return ((k_buffer[slots], v_buffer[slots]) for slots in tables.view(-1, tokens))

            contestants += _vllm_forms(q, 1, tokens, count, pairs)
    return Setup(
        contestants,
        (PAGED[dtype],),
        2.0 * batch * tokens * heads * (dim + dim_v),
        float(batch * tokens * row_bytes + (q.numel() + batch * heads * dim_v) * dtype.itemsize),
        f"cold: a KV pool of {slots * row_bytes / 1e6:.0f} MB, each of {count} calls reads another "
        f"{batch * tokens * row_bytes / 1e6:.0f} MB of it in random order",
    )


def extend(case: Case, roots: Roots | None, cold: int) -> Setup:
    """Causal; the prefix in slots drawn at random, the new tokens' keys and values their own."""
    heads, kv_heads, dim, dim_v, dtype = _sizes(case)
    batch, tokens, prefix = case.batch, case.tokens, case.prefix
    length = prefix + tokens
    row_bytes = kv_heads * (dim + dim_v) * dtype.itemsize
    count = min(copies(batch * length * row_bytes, cold), MOST_EXTEND_COPIES)
    base = _base(dtype)
    slots = max(count * batch * prefix, cold // row_bytes) if prefix else 1
    k_buffer, v_buffer = _filled(base, 0, slots, kv_heads, dim), _filled(base, 977, slots, kv_heads, dim_v)
    k_new = _filled(base, 1999, count, batch * tokens, kv_heads, dim)
    v_new = _filled(base, 3001, count, batch * tokens, kv_heads, dim_v)
    q = draw()(batch * tokens, heads, dim).to(dtype)
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(SEED))
    tables = order[: count * batch * prefix].view(count, batch, prefix)
    rows = torch.arange(batch, dtype=torch.int32)
    lengths, news = (torch.full((batch,), n, dtype=torch.int32) for n in (length, tokens))

    def calls() -> list[Call]:
        plan = tilewright.plan_extend(
            lengths, news, num_qo_heads=heads, num_kv_heads=kv_heads, head_dim_qk=dim, head_dim_vo=dim_v, device="cpu"
        )
        out = torch.empty((batch * tokens, heads, dim_v), dtype=dtype)

        def call(turn: int) -> Call:
            # Where nothing is in the pool the table is not read, but it has the columns that a serving table has.
            table = tables[turn] if prefix else torch.zeros((batch, length))
            return Call(
                partial(
                    tilewright.extend_attention, q, k_new[turn], v_new[turn], k_buffer, v_buffer, table.to(torch.int32),
                    rows, lengths, news, out=out, plan=plan,
                ),
                first,
            )  # fmt: skip

        return [call(turn) for turn in range(count)]

    def whole(pool: Tensor, new: Tensor, turn: int) -> Tensor:
        """Keys or values of a copy's requests, [B, L, Hk, D]."""
        return torch.cat([pool[tables[turn]], new[turn].view(batch, tokens, kv_heads, -1)], 1)

    def by_head(rows_first: Tensor) -> Tensor:
        return rows_first.transpose(1, 2).contiguous()

    def outputs(returned: object) -> tuple[Tensor, ...]:
        assert isinstance(returned, Tensor)
        return (returned.transpose(1, 2).reshape(batch * tokens, heads, dim_v),)

    queries = by_head(q.view(batch, tokens, heads, dim))
    forms = [
        peers.extend(queries, by_head(whole(k_buffer, k_new, turn)), by_head(whole(v_buffer, v_new, turn)))
        for turn in range(count)
    ]
    contestants = [*ours(case, roots, calls), *peer_forms(forms, outputs)]
    if case.workload.dtype == "bf16" and vllm_peer.load():

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for turn in range(count):
                yield from zip(whole(k_buffer, k_new, turn), whole(v_buffer, v_new, turn), strict=True)

        contestants += _vllm_forms(q, tokens, length, count, pairs)
    return Setup(
        contestants,
        (PAGED[dtype],),
        2.0 * batch * heads * (dim + dim_v) * (prefix * tokens + tokens * (tokens + 1) / 2),
        float(batch * length * row_bytes + (q.numel() + batch * tokens * heads * dim_v) * dtype.itemsize),
        f"bound by arithmetic: {count} copies of {batch * length * row_bytes / 1e6:.0f} MB of keys and values in turn"
        + (f", prefixes in random order in a pool of {slots * row_bytes / 1e6:.0f} MB" if prefix else ""),
    )


def _vllm_forms(
    q: Tensor, new: int, length: int, count: int, pairs: Callable[[], Iterator[tuple[Tensor, Tensor]]]
) -> list[Contestant]:
    batch = len(q) // new
    found = []
    for isa, page in vllm_peer.kinds():
        cache = vllm_peer.PagedCache.fill(isa, page, count * batch, pairs())
        found.append(_vllm(isa, page, cache.attention(q, new, length, q.shape[2] ** -0.5), count))
    return found


def _vllm(kind: str, page: int, call: Callable[[int], Callable[[], Tensor]], count: int) -> Contestant:
    """Its name tells that it has an easier table than ours: pages of so many tokens."""
    calls = [Call(call(turn), first) for turn in range(count)]
    return Contestant(f"vLLM {kind}, pages of {page}", "peer", calls)
