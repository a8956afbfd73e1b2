# mypy: ignore-errors
# (TVMScript is parsed from its text, not run: its names and annotations are not Python's.)
"""Paged decode for head dims beyond 256, latent attention among them: the warps of a CTA share each tile of keys.

One CTA works on an item, a KV head and up to 16 of its query heads (rows of mma.m16n8k16). A tile of keys, eight a
warp, comes through the page table into a ring in shared memory. Each warp scores its eight; the probabilities go
through shared memory; then each warp multiplies all of them with its own columns of the values, so that no warp holds
more than its share of the output. Where values are a view of the keys (latent attention) the tile of keys is that of
the values too and is read once; else the values' tile is the next of the ring.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import tirx
from tvm.script import tirx as T

from tilewright.schedules.intrinsics.cuda import (
    PACK,
    await_previous,
    copy16,
    copy_bulk,
    exp2,
    expect_bytes,
    let_next_start,
    load_pair,
    log2,
    quad_max,
    quad_sum,
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
from tilewright.schedules.spaces.cuda_decode_parts import MMA_TYPE, join_pieces, layout, parameters
from tilewright.schedules.vector_math import LOG2_E
from tilewright.schedules.workload import Workload

ROWS = 16  # query heads of a CTA
KEYS = 8  # of a tile that a warp scores: the columns of one mma
MOST_HEAD_DIM_QK, MOST_HEAD_DIM_VO = 576, 512  # what a thread has registers for
_CHAINS = 4  # accumulators of a score, as one product waits for the one before


def blocks(workload: Workload) -> int:
    """CTAs of an item and KV head."""
    return -(-workload.group // ROWS)


def shared_elements(workload: Workload, decisions: Mapping[str, int]) -> int:
    """Elements of 16 bits in shared memory: the ring, the probabilities, the warps' maxima and sums."""
    warps = decisions["warps"]
    pitch, _ = layout(decisions["bulk"])
    row = max(pitch(workload.head_dim_qk), pitch(workload.head_dim_vo))
    return decisions["stages"] * KEYS * warps * row + ROWS * _p_pitch(warps) + 2 * warps * ROWS * 2


def _p_pitch(warps: int) -> int:
    """Elements from one row of probabilities to the next, without bank conflicts."""
    return KEYS * warps + 8


def decode(workload: Workload, decisions: Mapping[str, int], hopper: bool) -> tirx.PrimFunc:
    """The kernel of docs/kernel-abi.md for one query token an item.

    Args:
        workload: operator "paged_decode", 16-bit, head dims multiples of 16 up to MOST_HEAD_DIM_QK and
            MOST_HEAD_DIM_VO, any group.
        decisions: `warps` of a CTA, `stages` of the ring, `bulk`: whether rows are copied whole (sm_90).
        hopper: whether the kernel may start beside the end of the one before, and lets the next.
    """
    G, D, Dv = workload.group, workload.head_dim_qk, workload.head_dim_vo
    NW, NST, HB = decisions["warps"], decisions["stages"], blocks(workload)
    TILE, P_PITCH = KEYS * NW, _p_pitch(NW)
    dtype, pack = TVM_DTYPE[workload.dtype], PACK[workload.dtype]
    mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{MMA_TYPE[workload.dtype]}.{MMA_TYPE[workload.dtype]}.f32"
    early, BULK = hopper, bool(decisions["bulk"])
    pitch, place = layout(BULK)
    STAGE = TILE * max(pitch(D), pitch(Dv))
    KC, VC = D // 8, Dv // 8  # 16-byte chunks of a row
    COLUMNS = -(-(Dv // 16) // NW)  # blocks of 16 columns of the values that a warp has
    EVEN = Dv % (16 * NW) == 0
    STEPS = D // 16
    THREADS = 32 * NW
    P_AT = NST * STAGE
    NEG = float("-inf")

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
        ring = T.alloc_buffer((shared_elements(workload, decisions),), dtype, scope="shared.dyn", align=1024)
        barriers = T.alloc_buffer((NST,), "uint64", scope="shared", align=16)
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
            if tx < NST:
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
            # Tiles of the ring that one tile of keys takes: one where the values are the keys' first columns.
            apart: T.int32 = T.if_then_else(p.viewed, 0, 1)
            loads: T.int32 = ((T.max(keys, 0) + (TILE - 1)) // TILE) << apart
            plain: T.bool = T.And(cap_log2 <= T.float32(0), scale_log2 > T.float32(0))
            factor: T.float32 = T.Select(plain, scale_log2, T.float32(1))
            Q = T.alloc_local([STEPS * 4], "uint32")
            S = T.alloc_local([4 * _CHAINS], "float32")
            O = T.alloc_local([COLUMNS * 8], "float32")
            B = T.alloc_local([4], "uint32")
            P = T.alloc_local([4], "uint32")
            m = T.alloc_local([2], "float32")
            l = T.alloc_local([2], "float32")
            top = T.alloc_local([2], "float32")
            shift = T.alloc_local([2], "float32")
            keep = T.alloc_local([2], "float32")
            slot = T.alloc_local([2], "int32")  # of the warp's eight keys in four tiles each, one for each lane
            rows = T.alloc_local([2], "int32")
            maxima = T.decl_buffer(
                (NW, ROWS), "float32", data=ring.data, elem_offset=(P_AT + ROWS * P_PITCH) // 2, scope="shared.dyn"
            )
            sums = T.decl_buffer(
                (NW, ROWS),
                "float32",
                data=ring.data,
                elem_offset=(P_AT + ROWS * P_PITCH) // 2 + NW * ROWS,
                scope="shared.dyn",
            )
            for h in T.unroll(2):
                m[h] = T.float32(NEG)
                l[h] = T.float32(0)
            for i in T.unroll(COLUMNS * 8):
                O[i] = T.float32(0)

            @T.inline
            def look_up(i, four):
                slot[i] = p.req_to_token[
                    table_row,
                    column + T.Cast("int64", T.min((four * 4 + lane // 8) * TILE + warp * 8 + lane % 8, keys - 1)),
                ]

            @T.inline
            def gather(j):
                if BULK:
                    if j < loads:
                        # A lane a row, whose slot it holds.
                        if tx == 0:
                            expect_bytes(
                                barriers.ptr_to([j % NST]), T.if_then_else(j & apart == 0, TILE * D * 2, TILE * Dv * 2)
                            )
                        if lane // 8 == (j >> apart) % 4:
                            if j & apart == 0:
                                copy_bulk(
                                    ring.ptr_to([j % NST * STAGE + (warp * 8 + lane % 8) * pitch(D)]),
                                    p.k_buffer.ptr_to([T.Cast("int64", slot[0]), hk, 0]),
                                    D * 2,
                                    barriers.ptr_to([j % NST]),
                                )
                            else:
                                copy_bulk(
                                    ring.ptr_to([j % NST * STAGE + (warp * 8 + lane % 8) * pitch(Dv)]),
                                    p.v_buffer.ptr_to([T.Cast("int64", slot[0]), hk, 0]),
                                    Dv * 2,
                                    barriers.ptr_to([j % NST]),
                                )
                elif j < loads:
                    # Eight lanes a row: whole lines, and all copies of a row at constant distances.
                    for r in T.unroll(2):
                        rows[r] = shuffle(slot[0], (j >> apart) % 4 * 8 + r * 4 + lane // 8)
                    if j & apart == 0:
                        for r in T.unroll(2):
                            for i in T.unroll((KC + 7) // 8):
                                if T.Or(T.bool(KC % 8 == 0), i * 8 + lane % 8 < KC):
                                    copy16(
                                        ring.ptr_to(
                                            [
                                                j % NST * STAGE
                                                + warp * 8 * pitch(D)
                                                + place(r * 4 + lane // 8, lane % 8, D)
                                                + i * 64
                                            ]
                                        ),
                                        p.k_buffer.ptr_to([T.Cast("int64", rows[r]), hk, lane % 8 * 8 + i * 64]),
                                    )
                    else:
                        for r in T.unroll(2):
                            for i in T.unroll((VC + 7) // 8):
                                if T.Or(T.bool(VC % 8 == 0), i * 8 + lane % 8 < VC):
                                    copy16(
                                        ring.ptr_to(
                                            [
                                                j % NST * STAGE
                                                + warp * 8 * pitch(Dv)
                                                + place(r * 4 + lane // 8, lane % 8, Dv)
                                                + i * 64
                                            ]
                                        ),
                                        p.v_buffer.ptr_to([T.Cast("int64", rows[r]), hk, lane % 8 * 8 + i * 64]),
                                    )
                if T.And(j < loads, T.And(j & apart == apart, (j >> apart) % 4 == 3)):
                    slot[0] = slot[1]
                    look_up(1, (j >> apart) // 4 + 2)
                if not BULK:
                    T.ptx.cp.async_.commit_group()

            if loads > 0:
                look_up(0, 0)
                look_up(1, 1)
            for kk in T.unroll(STEPS):
                for e in T.unroll(2):
                    for h in T.unroll(2):
                        Q[kk * 4 + e * 2 + h] = T.uint32(0)
                        if h * 8 + lane // 4 < have:
                            Q[kk * 4 + e * 2 + h] = load_pair(
                                p.q.ptr_to([q_row, head + h * 8 + lane // 4, kk * 16 + e * 8 + (lane % 4) * 2])
                            )

            if BULK:
                T.ptx.fence.proxy.async_.shared__cta()  # barriers are ready
                T.cuda.cta_sync()
            for s in T.unroll(NST - 1):
                gather(s)
            for j in T.serial(loads):
                if BULK:
                    T.cuda.mbarrier_wait(barriers.ptr_to([j % NST]), j // NST % 2)
                else:
                    T.ptx.cp.async_.wait_group(NST - 2)
                T.cuda.cta_sync()
                gather(j + (NST - 1))
                tile: T.int32 = j % NST * STAGE
                n: T.int32 = j >> apart
                if j & apart == 0:
                    for i in T.unroll(4 * _CHAINS):
                        S[i] = T.float32(0)
                    for kk in T.unroll((STEPS + 1) // 2):
                        # Two steps of 16 columns of this warp's eight keys; a last odd one takes two chunks.
                        T.ptx["ldmatrix.sync.aligned.m8n8.x4.shared.b16"](
                            B[0],
                            B[1],
                            B[2],
                            B[3],
                            ring.ptr_to(
                                [tile + warp * 8 * pitch(D) + place(lane % 8, T.min(kk * 4 + lane // 8, KC - 1), D)]
                            ),
                        )
                        for half in T.unroll(2):
                            if kk * 2 + half < STEPS:
                                T.ptx[mma](
                                    *[S[(kk * 2 + half) % _CHAINS * 4 + i] for i in range(4)],
                                    *[Q[(kk * 2 + half) * 4 + i] for i in (0, 1, 2, 3)],
                                    B[half * 2],
                                    B[half * 2 + 1],
                                    *[S[(kk * 2 + half) % _CHAINS * 4 + i] for i in range(4)],
                                )
                    for c in T.unroll(_CHAINS - 1):
                        for i in T.unroll(4):
                            S[i] = S[i] + S[(c + 1) * 4 + i]
                    if T.Not(plain):
                        for e in T.unroll(4):
                            S[e] = score(S[e], scale_log2, cap_log2, scale_over_cap, tanh)
                    if n * TILE + TILE > keys:
                        for e in T.unroll(4):
                            S[e] = T.Select(n * TILE + warp * 8 + (lane % 4) * 2 + e % 2 < keys, S[e], T.float32(NEG))
                    for h in T.unroll(2):
                        top[h] = quad_max(T.max(S[h * 2], S[h * 2 + 1]))
                        if lane % 4 == 0:
                            maxima[warp, h * 8 + lane // 4] = top[h]
                    T.cuda.cta_sync()
                    for h in T.unroll(2):
                        top[h] = m[h]
                        for x in T.unroll(NW):
                            top[h] = T.max(top[h], maxima[x, h * 8 + lane // 4])
                        shift[h] = finite_or_zero(top[h]) * factor
                        keep[h] = exp2(m[h] * factor - shift[h])
                        m[h] = top[h]
                        l[h] = l[h] * keep[h]
                        for e in T.unroll(2):
                            S[h * 2 + e] = exp2(S[h * 2 + e] * factor - shift[h])
                            l[h] = l[h] + S[h * 2 + e]
                        store_word(
                            ring.ptr_to([P_AT + (h * 8 + lane // 4) * P_PITCH + warp * 8 + (lane % 4) * 2]),
                            pack(S[h * 2], S[h * 2 + 1]),
                        )
                        for i in T.unroll(COLUMNS * 2):
                            O[i * 4 + h * 2] = O[i * 4 + h * 2] * keep[h]
                            O[i * 4 + h * 2 + 1] = O[i * 4 + h * 2 + 1] * keep[h]
                    T.cuda.cta_sync()
                if j & apart == apart:
                    for k in T.unroll(TILE // 16):
                        T.ptx["ldmatrix.sync.aligned.m8n8.x4.shared.b16"](
                            P[0],
                            P[1],
                            P[2],
                            P[3],
                            ring.ptr_to([P_AT + (lane % 16) * P_PITCH + k * 16 + lane // 16 * 8]),
                        )
                        for c in T.unroll(COLUMNS):
                            if T.Or(T.bool(EVEN), warp * COLUMNS + c < Dv // 16):
                                T.ptx["ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"](
                                    B[0],
                                    B[1],
                                    B[2],
                                    B[3],
                                    ring.ptr_to(
                                        [
                                            tile
                                            + T.if_then_else(
                                                apart == 0,
                                                place(
                                                    k * 16 + ((lane // 8) % 2) * 8 + lane % 8,
                                                    (warp * COLUMNS + c) * 2 + lane // 16,
                                                    D,
                                                ),
                                                place(
                                                    k * 16 + ((lane // 8) % 2) * 8 + lane % 8,
                                                    (warp * COLUMNS + c) * 2 + lane // 16,
                                                    Dv,
                                                ),
                                            )
                                        ]
                                    ),
                                )
                                for nb in T.unroll(2):
                                    T.ptx[mma](
                                        *[O[(c * 2 + nb) * 4 + i] for i in range(4)],
                                        P[0],
                                        P[1],
                                        P[2],
                                        P[3],
                                        B[nb * 2],
                                        B[nb * 2 + 1],
                                        *[O[(c * 2 + nb) * 4 + i] for i in range(4)],
                                    )
            T.ptx.cp.async_.wait_all()
            if early:
                let_next_start()
            # Each warp has summed its own keys.
            for h in T.unroll(2):
                l[h] = quad_sum(l[h])
                m[h] = m[h] * factor  # base-2 logits from here on
                if lane % 4 == 0:
                    sums[warp, h * 8 + lane // 4] = l[h]
            T.cuda.cta_sync()
            for h in T.unroll(2):
                l[h] = T.float32(0)
                for x in T.unroll(NW):
                    l[h] = l[h] + sums[x, h * 8 + lane // 4]
                if h * 8 + lane // 4 < have:
                    keep[0] = normaliser(
                        m[h],
                        l[h],
                        T.Select(part < 0, p.sinks[head + h * 8 + lane // 4] * T.float32(LOG2_E), T.float32(NEG)),
                        exp2,
                    )
                    keep[1] = natural_lse(m[h], l[h], log2)
                    for i in T.unroll(COLUMNS * 2):
                        if T.Or(T.bool(EVEN), warp * COLUMNS + i // 2 < Dv // 16):
                            if part < 0:
                                store_word(
                                    p.out.ptr_to(
                                        [
                                            q_row,
                                            head + h * 8 + lane // 4,
                                            warp * COLUMNS * 16 + i * 8 + (lane % 4) * 2,
                                        ]
                                    ),
                                    pack(O[i * 4 + h * 2] * keep[0], O[i * 4 + h * 2 + 1] * keep[0]),
                                )
                            else:
                                store_two(
                                    p.part_o.ptr_to(
                                        [
                                            part,
                                            head + h * 8 + lane // 4,
                                            warp * COLUMNS * 16 + i * 8 + (lane % 4) * 2,
                                        ]
                                    ),
                                    O[i * 4 + h * 2] * keep[0],
                                    O[i * 4 + h * 2 + 1] * keep[0],
                                )
                    if T.And(warp == 0, lane % 4 == 0):
                        if part < 0:
                            p.lse[q_row, head + h * 8 + lane // 4] = keep[1]
                        else:
                            p.part_lse[part, head + h * 8 + lane // 4] = keep[1]
            join_pieces(p, w, tx, THREADS, head, have, Dv, pack, 4)

    return paged_decode
