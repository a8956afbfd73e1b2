# mypy: ignore-errors
# (TVMScript is parsed from its text, not run: its names and annotations are not Python's.)
"""Paged decode on tensor cores: one CTA a work item and KV head, the query group as rows of mma.m16n8k16.

Each warp walks tiles of 16 or 32 keys of its own, gathered through the page table into a ring in shared memory (chunk
by chunk, or whole rows by the copy engine), and keeps a softmax state (maximum, sum, values) in registers; the warps'
states are joined at the end. The algebra is the definition's (paged_attention/definition.py); this file says who
computes which part of it.

Keys that the query does not see are never read: the item's range is cut to the visible one first, and what a tile has
beyond it repeats the last visible key with probability 0.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import tirx
from tvm.script import tirx as T

from tilewright.schedules.intrinsics.cuda import (
    HALF_PAIR,
    PACK,
    PAIR_MAX,
    await_previous,
    copy16,
    copy_bulk,
    even_then_odd,
    exp2,
    expect_bytes,
    halves,
    let_next_start,
    load_pair,
    log2,
    quad_max,
    quad_sum,
    range_scale,
    range_unit,
    shuffle,
    store_two,
    store_word,
    tanh,
)
from tilewright.schedules.paged_attention.definition import (
    KV_BEGIN,
    KV_LEN,
    PART,
    POS,
    Q_LEN,
    Q_ROW,
    REQUEST,
    TVM_DTYPE,
    finite_or_zero,
    natural_lse,
    normaliser,
    score,
    visible_bounds,
)
from tilewright.schedules.spaces import PROGRAMMATIC
from tilewright.schedules.spaces.cuda_decode_parts import (
    MMA_TYPE,
    join_pieces,
    layout,
    parameters,
    without_scales,
)
from tilewright.schedules.vector_math import LOG2_E
from tilewright.schedules.workload import Workload

ROWS = 16  # query heads of a CTA


def blocks(workload: Workload) -> int:
    """CTAs of an item and KV head."""
    return -(-workload.group // ROWS)


def shared_elements(workload: Workload, decisions: Mapping[str, int]) -> int:
    """Elements of 16 bits in shared memory: the rings of all warps, in whose place their states are joined."""
    pitch, _ = layout(decisions["bulk"])
    warps, rows = decisions["warps"], min(workload.group, ROWS)
    rings = warps * decisions["stages"] * decisions["keys"] * sum(pitch(dim) for dim in _row_elements(workload))
    return max(rings, 2 * warps * rows * (workload.head_dim_vo + 2) if warps > 1 else 0)


def _row_elements(workload: Workload) -> tuple[int, int]:
    """Elements of 16 bits in a row of keys and in one of values: two codes each where the pool is fp8."""
    per = 2 if workload.kv_dtype else 1
    return workload.head_dim_qk // per, workload.head_dim_vo // per


def decode(workload: Workload, decisions: Mapping[str, int], hopper: bool) -> tirx.PrimFunc:
    """The kernel of docs/kernel-abi.md for one query token an item.

    Args:
        workload: operator "paged_decode", 16-bit, head dims multiples of 8 up to 256; the pool may be of fp8
            (then multiples of 16).
        decisions: `warps` of a CTA, `stages` of a warp's ring, `keys` of a tile (16 or 32), `bulk`: whether rows are
            copied whole (sm_90).
        hopper: whether the kernel may start beside the end of the one before and lets the next do so, and whether there
            is an instruction that converts fp8.
    """
    G, D, Dv = workload.group, workload.head_dim_qk, workload.head_dim_vo
    M = min(G, ROWS)
    HB = blocks(workload)
    NW, NST, TILE = decisions["warps"], decisions["stages"], decisions["keys"]
    BLOCKS, AT_ONCE = TILE // 8, 32 // TILE  # blocks of keys in a tile; tiles whose slots are looked up at once
    dtype, pack = TVM_DTYPE[workload.dtype], PACK[workload.dtype]
    # Codes of fp8 are multiplied as the halves that they are exactly; queries are scaled to the range of halves.
    FP8 = workload.kv_dtype is not None
    kind = MMA_TYPE["fp16" if FP8 else workload.dtype]
    mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    pack_p = PACK["fp16"] if FP8 else pack
    UNIT, low, high = halves(hopper)
    pair_max, half_pair = PAIR_MAX[workload.dtype], HALF_PAIR[workload.dtype]
    HALVES = 1 if G <= 8 else 2  # eight rows each; registers of unused ones stay zero
    early, BULK = hopper, bool(decisions["bulk"])
    pitch, place = layout(BULK)
    KE, VE = _row_elements(workload)
    KROW, VROW = pitch(KE), pitch(VE)
    STAGE = TILE * (KROW + VROW)
    KC, VC = KE // 8, VE // 8  # 16-byte chunks of a row
    CHUNK = 16 if FP8 else 8  # numbers of a chunk
    STEPS = (D + 15) // 16  # products of 16 columns; half of the last may be zeros of the query
    THREADS = 32 * NW
    RING = shared_elements(workload, decisions)
    NEG = float("-inf")

    def depth(lane, e):
        """Which two of 16 columns of a query a lane holds: the order of a dot product is free."""
        return (lane % 4) * 4 + e * 2 if FP8 else e * 8 + (lane % 4) * 2

    # A lane's pair i of neighbouring columns: the index of its first in O, from there to the other's, the column.
    NEXT = 4 if FP8 else 1
    first_of = (lambda i, h: i // 2 * 8 + h * 2 + i % 2) if FP8 else (lambda i, h: i * 4 + h * 2)
    column_of = (
        (lambda i, lane: i // 2 * 16 + (lane % 4) * 4 + i % 2 * 2) if FP8 else (lambda i, lane: i * 8 + (lane % 4) * 2)
    )

    @T.prim_func
    def paged_decode(
        q_: T.handle,
        k_: T.handle,
        v_: T.handle,
        req_to_token_: T.handle,
        req_pool_indices_: T.handle,
        kv_start_: T.handle,
        items_: T.handle,
        sinks_: T.handle,
        out_: T.handle,
        lse_: T.handle,
        part_o_: T.handle,
        part_lse_: T.handle,
        scale_log2: T.float32,
        cap_log2: T.float32,
        scale_over_cap: T.float32,
        window: T.int32,
        lookahead: T.int32,
        k_scale: T.float32,
        v_scale: T.float32,
    ):
        T.func_attr({"global_symbol": "paged_decode", PROGRAMMATIC: early})
        p = T.meta_var(
            parameters(
                workload,
                q_,
                k_,
                v_,
                req_to_token_,
                req_pool_indices_,
                kv_start_,
                items_,
                sinks_,
                out_,
                lse_,
                part_o_,
                part_lse_,
            )
        )
        T.device_entry()
        block, w = T.cta_id([T.Cast("int32", p.heads) * HB, T.Cast("int32", p.W)])
        tx = T.thread_id([THREADS])
        ring = T.alloc_buffer((RING,), dtype, scope="shared.dyn", align=1024)
        barriers = T.alloc_buffer((NW * NST,), "uint64", scope="shared", align=16)
        # Items are written by copies alone, which wait for kernels and kernels for them; all else may be of the kernel
        # before.
        live: T.int32 = p.items[w, Q_LEN]
        q_row: T.int32 = p.items[w, Q_ROW]
        part: T.int32 = p.items[w, PART]
        request: T.int32 = p.items[w, REQUEST]
        end: T.int32 = p.items[w, KV_BEGIN] + p.items[w, KV_LEN]
        first: T.int32 = T.max(p.items[w, KV_BEGIN], visible_bounds(p.items[w, POS], end, window, lookahead)[0] + 1)
        keys: T.int32 = visible_bounds(p.items[w, POS], end, window, lookahead)[1] + 1 - first
        if BULK:
            if tx < NW * NST:
                T.ptx.mbarrier.init.shared.b64(barriers.ptr_to([tx]), T.uint32(1))
        if early:
            await_previous()
        if live > 0:
            hk: T.int32 = block // HB
            head: T.int32 = hk * G + block % HB * ROWS  # the CTA's first query head
            have: T.int32 = T.min(G - block % HB * ROWS, ROWS)
            table_row: T.int64 = T.Cast("int64", p.req_pool_indices[request])
            column: T.int64 = T.Cast("int64", p.kv_start[request]) + T.Cast("int64", first)
            warp: T.int32 = tx // 32
            lane: T.int32 = tx % 32
            tiles: T.int32 = (T.max(keys, 0) + (TILE - 1)) // TILE
            mine: T.int32 = (tiles - warp + (NW - 1)) // NW
            # A call whose logits are not a positive multiple of the products has them transformed first.
            plain: T.bool = T.And(cap_log2 <= T.float32(0), scale_log2 > T.float32(0))
            factor = T.alloc_local([2], "float32")  # of a row's products, whose logits are in units of it
            unit = T.alloc_local([2], "float32")  # of a row's products
            Q = T.alloc_local([STEPS * 4], "uint32")
            S = T.alloc_local([BLOCKS * 4], "float32")
            O = T.alloc_local([Dv // 2], "float32")
            B = T.alloc_local([4], "uint32")
            P = T.alloc_local([BLOCKS * 2], "uint32")
            H = T.alloc_local([2], "uint32")
            m = T.alloc_local([2], "float32")
            l = T.alloc_local([2], "float32")
            top = T.alloc_local([2], "float32")
            shift = T.alloc_local([2], "float32")
            keep = T.alloc_local([2], "float32")
            slot = T.alloc_local([2], "int32")  # of 32 keys each, in one or two tiles
            rows = T.alloc_local([TILE // 4], "int32")
            for h in T.unroll(2):
                m[h] = T.float32(NEG)
                l[h] = T.float32(0)
            for i in T.unroll(Dv // 2):
                O[i] = T.float32(0)
            for i in T.unroll(BLOCKS * 2):
                P[i] = T.uint32(0)

            @T.inline
            def look_up(i, time):
                slot[i] = p.req_to_token[
                    table_row,
                    column
                    + T.Cast(
                        "int64", T.min(((time * AT_ONCE + lane // TILE) * NW + warp) * TILE + lane % TILE, keys - 1)
                    ),
                ]

            @T.inline
            def gather(n):
                if BULK:
                    if n < mine:
                        if lane == 0:
                            expect_bytes(barriers.ptr_to([warp * NST + n % NST]), TILE * (KE + VE) * 2)
                        for r in T.unroll(TILE // 16):
                            # A lane a row: lower lanes of keys, upper ones of values.
                            rows[r] = shuffle(slot[0], n % AT_ONCE * TILE + r * 16 + lane % 16)
                            if lane < 16:
                                copy_bulk(
                                    ring.ptr_to([(warp * NST + n % NST) * STAGE + (r * 16 + lane % 16) * KROW]),
                                    p.k_buffer.ptr_to([T.Cast("int64", rows[r]), hk, 0]),
                                    KE * 2,
                                    barriers.ptr_to([warp * NST + n % NST]),
                                )
                            else:
                                copy_bulk(
                                    ring.ptr_to(
                                        [(warp * NST + n % NST) * STAGE + TILE * KROW + (r * 16 + lane % 16) * VROW]
                                    ),
                                    p.v_buffer.ptr_to([T.Cast("int64", rows[r]), hk, 0]),
                                    VE * 2,
                                    barriers.ptr_to([warp * NST + n % NST]),
                                )
                elif n < mine:
                    # Eight lanes a row: whole lines, and all copies of a row at constant distances.
                    for r in T.unroll(TILE // 4):
                        rows[r] = shuffle(slot[0], n % AT_ONCE * TILE + r * 4 + lane // 8)
                    for r in T.unroll(TILE // 4):
                        for i in T.unroll((KC + 7) // 8):
                            if T.Or(T.bool(KC % 8 == 0), i * 8 + lane % 8 < KC):
                                copy16(
                                    ring.ptr_to(
                                        [
                                            (warp * NST + n % NST) * STAGE
                                            + place(r * 4 + lane // 8, lane % 8, KE)
                                            + i * 64
                                        ]
                                    ),
                                    p.k_buffer.ptr_to([T.Cast("int64", rows[r]), hk, (lane % 8 + i * 8) * CHUNK]),
                                )
                    for r in T.unroll(TILE // 4):
                        for i in T.unroll((VC + 7) // 8):
                            if T.Or(T.bool(VC % 8 == 0), i * 8 + lane % 8 < VC):
                                copy16(
                                    ring.ptr_to(
                                        [
                                            (warp * NST + n % NST) * STAGE
                                            + TILE * KROW
                                            + place(r * 4 + lane // 8, lane % 8, VE)
                                            + i * 64
                                        ]
                                    ),
                                    p.v_buffer.ptr_to([T.Cast("int64", rows[r]), hk, (lane % 8 + i * 8) * CHUNK]),
                                )
                if T.And(n < mine, n % AT_ONCE == AT_ONCE - 1):
                    slot[0] = slot[1]
                    look_up(1, n // AT_ONCE + 2)
                if not BULK:
                    T.ptx.cp.async_.commit_group()

            if mine > 0:
                look_up(0, 0)
                look_up(1, 1)
            for kk in T.unroll(STEPS):
                for e in T.unroll(2):
                    for h in T.unroll(2):
                        Q[kk * 4 + e * 2 + h] = T.uint32(0)
                        if T.And(h * 8 + lane // 4 < have, T.Or(T.bool(D % 16 == 0), kk * 16 + e * 8 < D)):
                            Q[kk * 4 + e * 2 + h] = load_pair(
                                p.q.ptr_to([q_row, head + h * 8 + lane // 4, kk * 16 + depth(lane, e)])
                            )
            if BULK:
                T.ptx.fence.proxy.async_.shared__cta()  # barriers are ready
                T.cuda.cta_sync()
            for s in T.unroll(NST - 1):
                gather(s)
            for h in T.unroll(2):
                unit[h] = T.float32(1)
                if FP8:
                    top[h] = T.float32(0)
                    for i in T.unroll(D // 8):
                        top[h] = pair_max(top[h], Q[i * 2 + h])
                    top[h] = quad_max(top[h])
                    for i in T.unroll(D // 8):
                        Q[i * 2 + h] = half_pair(Q[i * 2 + h], range_scale(top[h]))
                    unit[h] = range_unit(top[h]) * k_scale * T.float32(UNIT)
                factor[h] = T.Select(plain, scale_log2 * unit[h], T.float32(1))

            for n in T.serial(mine):
                T.cuda.warp_sync()
                gather(n + (NST - 1))
                if BULK:
                    T.cuda.mbarrier_wait(barriers.ptr_to([warp * NST + n % NST]), n // NST % 2)
                else:
                    T.ptx.cp.async_.wait_group(NST - 1)
                T.cuda.warp_sync()
                tile: T.int32 = (warp * NST + n % NST) * STAGE
                for i in T.unroll(BLOCKS * 4):
                    S[i] = T.float32(0)
                for kk in T.unroll((KC + 1) // 2):
                    for k in T.unroll(TILE // 16):
                        T.ptx["ldmatrix.sync.aligned.m8n8.x4.shared.b16"](
                            B[0],
                            B[1],
                            B[2],
                            B[3],
                            ring.ptr_to(
                                [
                                    tile
                                    + place(
                                        k * 16 + (lane // 16) * 8 + lane % 8,
                                        T.min(kk * 2 + (lane // 8) % 2, KC - 1),
                                        KE,
                                    )
                                ]
                            ),
                        )
                        for nb in T.unroll(2):
                            if FP8:
                                for c in T.unroll(2):
                                    if kk * 2 + c < KC:
                                        H[0] = low(B[nb * 2 + c])
                                        H[1] = high(B[nb * 2 + c])
                                        T.ptx[mma](
                                            *[S[(k * 2 + nb) * 4 + i] for i in range(4)],
                                            *[Q[(kk * 2 + c) * 4 + i] for i in (0, 1, 2, 3)],
                                            H[0],
                                            H[1],
                                            *[S[(k * 2 + nb) * 4 + i] for i in range(4)],
                                        )
                            else:
                                T.ptx[mma](
                                    *[S[(k * 2 + nb) * 4 + i] for i in range(4)],
                                    *[Q[kk * 4 + i] for i in (0, 1, 2, 3)],
                                    B[nb * 2],
                                    B[nb * 2 + 1],
                                    *[S[(k * 2 + nb) * 4 + i] for i in range(4)],
                                )
                if T.Not(plain):
                    for nb in T.unroll(BLOCKS):
                        for e in T.unroll(2 * HALVES):
                            S[nb * 4 + e] = score(
                                S[nb * 4 + e] * unit[e // 2], scale_log2, cap_log2, scale_over_cap, tanh
                            )
                offset: T.int32 = (n * NW + warp) * TILE + (lane % 4) * 2
                if (n * NW + warp) * TILE + TILE > keys:
                    for nb in T.unroll(BLOCKS):
                        for e in T.unroll(2 * HALVES):
                            S[nb * 4 + e] = T.Select(offset + nb * 8 + e % 2 < keys, S[nb * 4 + e], T.float32(NEG))
                for h in T.unroll(HALVES):
                    top[h] = m[h]
                    for nb in T.unroll(BLOCKS):
                        top[h] = T.max(top[h], T.max(S[nb * 4 + h * 2], S[nb * 4 + h * 2 + 1]))
                    top[h] = quad_max(top[h])
                    shift[h] = finite_or_zero(top[h]) * factor[h]
                    keep[h] = exp2(m[h] * factor[h] - shift[h])
                    m[h] = top[h]
                    l[h] = l[h] * keep[h]
                    for nb in T.unroll(BLOCKS):
                        for e in T.unroll(2):
                            S[nb * 4 + h * 2 + e] = exp2(S[nb * 4 + h * 2 + e] * factor[h] - shift[h])
                            l[h] = l[h] + S[nb * 4 + h * 2 + e]
                        P[nb * 2 + h] = pack_p(S[nb * 4 + h * 2], S[nb * 4 + h * 2 + 1])
                    for i in T.unroll(Dv // 8):
                        O[i * 4 + h * 2] = O[i * 4 + h * 2] * keep[h]
                        O[i * 4 + h * 2 + 1] = O[i * 4 + h * 2 + 1] * keep[h]
                for k in T.unroll(TILE // 16):
                    for jj in T.unroll((VC + 1) // 2):
                        T.ptx["ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"](
                            B[0],
                            B[1],
                            B[2],
                            B[3],
                            ring.ptr_to(
                                [
                                    tile
                                    + TILE * KROW
                                    + place(
                                        k * 16 + ((lane // 8) % 2) * 8 + lane % 8,
                                        T.min(jj * 2 + lane // 16, VC - 1),
                                        VE,
                                    )
                                ]
                            ),
                        )
                        for nb in T.unroll(2):
                            if FP8:
                                # A chunk holds 16 columns: the even ones are a product, and the odd ones.
                                if jj * 2 + nb < VC:
                                    for e in T.unroll(2):
                                        B[nb * 2 + e] = even_then_odd(B[nb * 2 + e])
                                    for c in T.unroll(2):
                                        for e in T.unroll(2):
                                            H[e] = low(B[nb * 2 + e]) if c == 0 else high(B[nb * 2 + e])
                                        T.ptx[mma](
                                            *[O[((jj * 2 + nb) * 2 + c) * 4 + i] for i in range(4)],
                                            P[k * 4 + 0],
                                            P[k * 4 + 1],
                                            P[k * 4 + 2],
                                            P[k * 4 + 3],
                                            H[0],
                                            H[1],
                                            *[O[((jj * 2 + nb) * 2 + c) * 4 + i] for i in range(4)],
                                        )
                            elif jj * 2 + nb < VC:
                                T.ptx[mma](
                                    *[O[(jj * 2 + nb) * 4 + i] for i in range(4)],
                                    P[k * 4 + 0],
                                    P[k * 4 + 1],
                                    P[k * 4 + 2],
                                    P[k * 4 + 3],
                                    B[nb * 2],
                                    B[nb * 2 + 1],
                                    *[O[(jj * 2 + nb) * 4 + i] for i in range(4)],
                                )
            T.ptx.cp.async_.wait_all()
            if early:
                let_next_start()
            for h in T.unroll(HALVES):
                l[h] = quad_sum(l[h])
                m[h] = m[h] * factor[h]  # base-2 logits from here on

            @T.inline
            def finish(row, maximum, total):
                keep[0] = normaliser(
                    maximum,
                    total,
                    T.Select(part < 0, p.sinks[head + row] * T.float32(LOG2_E), T.float32(NEG)),
                    exp2,
                ) * (v_scale * T.float32(UNIT) if FP8 else T.float32(1))
                keep[1] = natural_lse(maximum, total, log2)

            if NW == 1:
                for h in T.unroll(HALVES):
                    if h * 8 + lane // 4 < have:
                        finish(h * 8 + lane // 4, m[h], l[h])
                        if part < 0:
                            for i in T.unroll(Dv // 8):
                                store_word(
                                    p.out.ptr_to([q_row, head + h * 8 + lane // 4, column_of(i, lane)]),
                                    pack(O[first_of(i, h)] * keep[0], O[first_of(i, h) + NEXT] * keep[0]),
                                )
                            if lane % 4 == 0:
                                p.lse[q_row, head + h * 8 + lane // 4] = keep[1]
                        else:
                            for i in T.unroll(Dv // 8):
                                store_two(
                                    p.part_o.ptr_to([part, head + h * 8 + lane // 4, column_of(i, lane)]),
                                    O[first_of(i, h)] * keep[0],
                                    O[first_of(i, h) + NEXT] * keep[0],
                                )
                            if lane % 4 == 0:
                                p.part_lse[part, head + h * 8 + lane // 4] = keep[1]
            else:
                # The rings are read no more: the warps' states take their place.
                states = T.decl_buffer((NW, M, Dv), "float32", data=ring.data, scope="shared.dyn")
                sums = T.decl_buffer((NW, M, 2), "float32", data=ring.data, elem_offset=NW * M * Dv, scope="shared.dyn")
                T.cuda.cta_sync()
                for h in T.unroll(HALVES):
                    if h * 8 + lane // 4 < have:
                        for i in T.unroll(Dv // 8):
                            for e in T.unroll(2):
                                states[warp, h * 8 + lane // 4, column_of(i, lane) + e] = O[first_of(i, h) + e * NEXT]
                        if lane % 4 == 0:
                            sums[warp, h * 8 + lane // 4, 0] = m[h]
                            sums[warp, h * 8 + lane // 4, 1] = l[h]
                T.cuda.cta_sync()
                for i in T.serial((have * (Dv // 2) + THREADS - 1) // THREADS):
                    if i * THREADS + tx < have * (Dv // 2):
                        row: T.int32 = (i * THREADS + tx) // (Dv // 2)
                        e: T.int32 = (i * THREADS + tx) % (Dv // 2) * 2
                        top[0] = T.float32(NEG)
                        for x in T.unroll(NW):
                            top[0] = T.max(top[0], sums[x, row, 0])
                        top[1] = T.float32(0)
                        O[0] = T.float32(0)
                        O[1] = T.float32(0)
                        for x in T.unroll(NW):
                            shift[0] = exp2(sums[x, row, 0] - finite_or_zero(top[0]))
                            top[1] = top[1] + sums[x, row, 1] * shift[0]
                            O[0] = O[0] + states[x, row, e] * shift[0]
                            O[1] = O[1] + states[x, row, e + 1] * shift[0]
                        finish(row, top[0], top[1])
                        if part < 0:
                            store_word(p.out.ptr_to([q_row, head + row, e]), pack(O[0] * keep[0], O[1] * keep[0]))
                            if e == 0:
                                p.lse[q_row, head + row] = keep[1]
                        else:
                            store_two(p.part_o.ptr_to([part, head + row, e]), O[0] * keep[0], O[1] * keep[0])
                            if e == 0:
                                p.part_lse[part, head + row] = keep[1]
            join_pieces(p, w, tx, THREADS, head, have, Dv, pack, 1)

    return paged_decode if FP8 else without_scales(paged_decode)
