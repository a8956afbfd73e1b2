# mypy: ignore-errors
# (TVMScript is parsed from its text, not run: its names and annotations are not Python's.)
"""Paged extend on tensor cores that multiply warp by warp (mma.m16n8k16): every GPU from sm_80 on, every head dim.

One CTA takes the query rows (tokens times group) of a work item and one KV head. All warps gather tiles of keys and
values by cp.async into a ring in shared memory, while tiles gathered before are multiplied. A warp owns some of the
rows; where the values of a row are too many for a warp's registers, several warps (`columns`) share rows: each takes
a part of a tile's keys for the scores and a part of the columns for the values, and the probabilities pass through
shared memory. The algebra is the definition's (paged_attention/definition.py).

Keys that no row of the item sees are never read: the item's range is cut to the visible one, and what a tile has
beyond it repeats the last visible key with probability 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

from tvm import tirx
from tvm.script import tirx as T

from tilewright.schedules.intrinsics.cuda import (
    PACK,
    address,
    copy16,
    exp2,
    log2,
    quad_sum,
    store_two,
    store_word,
    store_zeros,
    tanh,
)
from tilewright.schedules.paged_attention.definition import (
    FIRST_NEW,
    KV_BEGIN,
    KV_LEN,
    NEW_ROW,
    PART,
    POS,
    PREFIX,
    Q_LEN,
    Q_ROW,
    REQUEST,
    TVM_DTYPE,
    masked,
    natural_lse,
    normaliser,
    score,
    sees_new,
    visible_bounds,
)
from tilewright.schedules.spaces.cuda_extend_mma_gather import COPIES, gathering
from tilewright.schedules.spaces.cuda_extend_mma_products import products
from tilewright.schedules.spaces.cuda_extend_mma_tiles import (
    ALL_HI,
    ALL_LO,
    COLUMN,
    FIRST,
    FRESH,
    LAST,
    MASKED,
    NEW_BEGIN,
    NOTES,
    OUT_ROW,
    ROWS,
    SPLIT,
    TABLE_ROW,
    WHOLE,
    Tiles,
    place,
)
from tilewright.schedules.spaces.cuda_parameters import paged_buffers
from tilewright.schedules.vector_math import LOG2_E
from tilewright.schedules.workload import Workload


def extend(workload: Workload, decisions: Mapping[str, int]) -> tirx.PrimFunc:
    """The kernel of docs/kernel-abi.md for blocks of query tokens.

    Args:
        workload: operator "paged_extend", 16-bit, head dims multiples of 8.
        decisions: `rows` of an item, `warps` of a CTA, `columns` (warps that share rows), `keys` of a tile, `stages`
            of the ring. A warp has rows * columns / warps rows, a multiple of 16.
    """
    z = Tiles.of(workload, decisions)
    tile, warp = gathering(workload, z), products(workload, z)
    BM, BN, CW, NST, MT, THREADS, DM = z.rows, z.keys, z.columns, z.stages, z.blocks, z.threads, z.dim
    KEYS, DO, STEP, RING, STAGE = z.warp_keys, z.warp_values, z.step, z.ring, z.stage
    SN, ON = KEYS // 2, DO // 2  # accumulator registers of 16 rows
    FP8, TREE = workload.kv_dtype is not None, workload.tree
    steps = T.serial if workload.general else T.unroll
    dtype, pack = TVM_DTYPE[workload.dtype], PACK[workload.dtype]
    NEG = float("-inf")

    @T.jit
    def paged_extend(
        q: T.handle,
        k_buffer: T.handle,
        v_buffer: T.handle,
        k_new: T.handle,
        v_new: T.handle,
        req_to_token: T.handle,
        req_pool_indices: T.handle,
        kv_start: T.handle,
        items: T.handle,
        sinks: T.handle,
        out: T.handle,
        lse: T.handle,
        part_o: T.handle,
        part_lse: T.handle,
        mask: T.Optional(T.handle),
        mask_start: T.Optional(T.handle),
        mask_width: T.Optional(T.handle),
        scale_log2: T.float32,
        cap_log2: T.float32,
        scale_over_cap: T.float32,
        window: T.int32,
        lookahead: T.int32,
        k_scale: T.Optional(T.float32),
        v_scale: T.Optional(T.float32),
    ):
        T.func_attr({"global_symbol": "paged_extend"})
        p = T.meta_var(
            paged_buffers(
                workload,
                {
                    "q": q,
                    "k_buffer": k_buffer,
                    "v_buffer": v_buffer,
                    "k_new": k_new,
                    "v_new": v_new,
                    "req_to_token": req_to_token,
                    "req_pool_indices": req_pool_indices,
                    "kv_start": kv_start,
                    "items": items,
                    "sinks": sinks,
                    "out": out,
                    "lse": lse,
                    "part_o": part_o,
                    "part_lse": part_lse,
                    "mask": mask,
                    "mask_start": mask_start,
                    "mask_width": mask_width,
                },
            )
        )
        G, D, Dv = T.meta_var((p.group, p.dim, p.dim_vo))
        # CTAs that share an item's rows of one KV head.
        ROW_BLOCKS = T.meta_var((z.block_q * G + (BM - 1)) // BM)
        T.device_entry()
        bx, w = T.cta_id([T.Cast("int32", p.heads) * ROW_BLOCKS, T.Cast("int32", p.num_items)])
        tx = T.thread_id([THREADS])
        smem = T.alloc_buffer((z.elements,), dtype, scope="shared.dyn", align=1024)
        # Addresses of the rows of two tiles, keys and then values; of the head's first row in all four tensors.
        rows = T.alloc_buffer((z.side_bytes // 8,), "int64", scope="shared", align=16)
        # What is used once a tile, more than registers hold: what NOTES lists, then positions of the rows.
        notes = T.decl_buffer((len(NOTES) + BM,), "int32", data=rows.data, elem_offset=8 * BN + 8, scope="shared")
        shares = T.decl_buffer(
            (CW * BM,), "float32", data=rows.data, elem_offset=8 * BN + 8 + len(NOTES) + BM, scope="shared"
        )
        if p.items[w, Q_LEN] * G > bx % ROW_BLOCKS * BM:
            hk: T.int32 = bx // ROW_BLOCKS
            row0: T.int32 = bx % ROW_BLOCKS * BM
            q_rows: T.int32 = p.items[w, Q_LEN] * G
            pos: T.int32 = p.items[w, POS]
            low_pos: T.int32 = pos + row0 // G
            top_pos: T.int32 = pos + T.min(row0 + (BM - 1), q_rows - 1) // G
            end: T.int32 = p.items[w, KV_BEGIN] + p.items[w, KV_LEN]
            first: T.int32 = T.max(p.items[w, KV_BEGIN], visible_bounds(low_pos, end, window, lookahead)[0] + 1)
            last: T.int32 = visible_bounds(top_pos, end, window, lookahead)[1]
            # Keys of the pool and new keys have tiles of their own.
            split: T.int32 = T.max(first, T.min(p.items[w, PREFIX], last + 1))
            old_tiles: T.int32 = (split - first + (BN - 1)) // BN
            tiles: T.int32 = old_tiles + (T.max(last + 1 - split, 0) + (BN - 1)) // BN
            lane: T.int32 = tx % 32
            band: T.int32 = tx // 32 // CW * (16 * MT)  # first row of the warp
            cw: T.int32 = tx // 32 % CW
            plain: T.bool = T.And(cap_log2 <= T.float32(0), scale_log2 > T.float32(0))
            factor: T.float32 = T.Select(plain, scale_log2, T.float32(1))
            S = T.alloc_local([MT * SN], "float32")
            O = T.alloc_local([MT * ON], "float32")
            P = T.alloc_local([MT * (KEYS // 4)], "uint32")
            A = T.alloc_local([MT * 4], "uint32")
            B = T.alloc_local([4], "uint32")
            m = T.alloc_local([2 * MT], "float32")
            l = T.alloc_local([2 * MT], "float32")
            keep = T.alloc_local([2], "float32")
            top = T.alloc_local([2 * MT], "float32")
            shift = T.alloc_local([1], "float32")
            held = T.alloc_local([1], "int32")
            addresses = T.alloc_local([COPIES], "int64")
            at = T.alloc_local([2], "int32")
            to_row = T.alloc_local([COPIES], "int32")
            to_chunk = T.alloc_local([COPIES], "int32")

            r = T.meta_var(
                SimpleNamespace(
                    smem=smem,
                    rows=rows,
                    notes=notes,
                    shares=shares,
                    S=S,
                    O=O,
                    P=P,
                    A=A,
                    B=B,
                    m=m,
                    l=l,
                    keep=keep,
                    top=top,
                    shift=shift,
                    held=held,
                    addresses=addresses,
                    at=at,
                    to_row=to_row,
                    to_chunk=to_chunk,
                    tx=tx,
                    lane=lane,
                    band=band,
                    cw=cw,
                    tiles=tiles,
                    old_tiles=old_tiles,
                    factor=factor,
                )
            )

            @T.inline
            def hide(j):
                begin: T.int32 = T.Select(j < old_tiles, notes[FIRST] + j * BN, notes[NEW_BEGIN] + j * BN)
                final: T.int32 = T.Select(j < old_tiles, notes[SPLIT] - 1, notes[LAST])
                edge: T.bool = T.Or(begin + (BN - 1) > T.min(notes[ALL_HI], final), begin <= notes[ALL_LO])
                if T.Or(edge, T.And(TREE, begin + (BN - 1) >= notes[MASKED])):
                    for t in T.unroll(MT):
                        for h in T.unroll(2):
                            stands: T.int32 = notes[len(NOTES) + band + t * 16 + h * 8 + lane // 4]
                            lo: T.int32 = visible_bounds(stands, final + 1, window, lookahead)[0]
                            hi: T.int32 = visible_bounds(stands, final + 1, window, lookahead)[1]
                            for n in T.unroll(KEYS // 8):
                                for e in T.unroll(2):
                                    key: T.int32 = begin + cw * KEYS + n * 8 + lane % 4 * 2 + e
                                    S[t * SN + n * 4 + h * 2 + e] = masked(S[t * SN + n * 4 + h * 2 + e], key, lo, hi)
                                    if TREE:
                                        # There may be no mask for keys that the row does not see anyway.
                                        if T.And(key > lo, key <= hi):
                                            if T.Not(
                                                sees_new(
                                                    p.mask,
                                                    p.mask_start[p.items[w, REQUEST]],
                                                    p.mask_width[p.items[w, REQUEST]],
                                                    stands - notes[MASKED],
                                                    key,
                                                    notes[MASKED],
                                                )
                                            ):
                                                S[t * SN + n * 4 + h * 2 + e] = T.float32(NEG)

            if tx == 0:
                rows[4 * BN] = address(p.k_buffer.ptr_to([0, hk, 0]))
                rows[4 * BN + 1] = address(p.v_buffer.ptr_to([0, hk, 0]))
                rows[4 * BN + 2] = address(p.k_new.ptr_to([0, hk, 0]))
                rows[4 * BN + 3] = address(p.v_new.ptr_to([0, hk, 0]))
                notes[TABLE_ROW] = p.req_pool_indices[p.items[w, REQUEST]]
                notes[COLUMN] = p.kv_start[p.items[w, REQUEST]]
                notes[FRESH] = p.items[w, NEW_ROW]
                notes[OUT_ROW] = T.Select(p.items[w, PART] < 0, p.items[w, Q_ROW], p.items[w, PART])
                notes[WHOLE] = T.Cast("int32", p.items[w, PART] < 0)
                notes[ROWS] = q_rows
                notes[FIRST] = first
                notes[SPLIT] = split
                notes[MASKED] = p.items[w, FIRST_NEW]
                notes[NEW_BEGIN] = split - old_tiles * BN
                notes[LAST] = last
                # A tile that lies in (all_lo, all_hi] is seen whole by every row.
                notes[ALL_LO] = visible_bounds(top_pos, end, window, lookahead)[0]
                notes[ALL_HI] = visible_bounds(low_pos, end, window, lookahead)[1]
            for i in T.serial((BM + (THREADS - 1)) // THREADS):
                if i * THREADS + tx < BM:
                    notes[len(NOTES) + i * THREADS + tx] = pos + T.min(row0 + i * THREADS + tx, q_rows - 1) // G
            T.cuda.cta_sync()
            for i in T.unroll(2 * MT):
                m[i] = T.float32(NEG)
                l[i] = T.float32(0)
            for i in T.unroll(MT * ON):
                O[i] = T.float32(0)
            for c in steps((D + (STEP - 1)) // STEP * (STEP // 8) - D // 8):
                # What products read beyond the head dim.
                for i in T.serial((BM + (THREADS - 1)) // THREADS):
                    if i * THREADS + tx < BM:
                        store_zeros(smem.ptr_to([place(i * THREADS + tx, D // 8 + c, DM)]))
                for i in T.serial((NST * BN + (THREADS - 1)) // THREADS):
                    if i * THREADS + tx < NST * BN:
                        n: T.int32 = i * THREADS + tx
                        store_zeros(smem.ptr_to([RING + n // BN * STAGE + place(n % BN, D // 8 + c, DM)]))
            for i in T.serial((BM * (D // 8) + (THREADS - 1)) // THREADS):
                if i * THREADS + tx < BM * (D // 8):
                    n: T.int32 = (i * THREADS + tx) // (D // 8)
                    c: T.int32 = (i * THREADS + tx) % (D // 8)
                    own: T.int32 = T.min(row0 + n, q_rows - 1)
                    copy16(
                        smem.ptr_to([place(n, c, DM)]),
                        p.q.ptr_to([p.items[w, Q_ROW] + own // G, hk * G + own % G, c * 8]),
                    )
            for j in T.unroll(NST - 1):
                tile.look_up(r, p, j)
                tile.note(r, p, j)
                T.cuda.cta_sync()
                tile.gather(r, j, D, Dv)
            tile.look_up(r, p, NST - 1)
            tile.note(r, p, NST - 1)
            for j in T.serial(tiles):
                stage: T.int32 = RING + j % NST * STAGE
                if NST == 1:
                    T.cuda.cta_sync()
                    tile.gather(r, j, D, Dv)
                T.ptx.cp.async_.wait_group(max(NST - 2, 0))
                if FP8:
                    if j < old_tiles:
                        tile.convert(r, stage, D // 16, DM)
                        tile.convert(r, stage + z.values, Dv // 16, z.dim_vo)
                T.cuda.cta_sync()
                tile.look_up(r, p, j + NST)
                if NST > 1:
                    tile.gather(r, j + (NST - 1), D, Dv)
                warp.scores(r, stage, D)
                if FP8:
                    if j < old_tiles:
                        for i in T.unroll(MT * SN):
                            S[i] = S[i] * k_scale
                    elif j == old_tiles:
                        # Values were multiples of the pool's scale so far.
                        for i in T.unroll(MT * ON):
                            O[i] = O[i] * v_scale
                if T.Not(plain):
                    for i in T.unroll(MT * SN):
                        S[i] = score(S[i], scale_log2, cap_log2, scale_over_cap, tanh)
                hide(j)
                warp.softmax(r)
                warp.values(r, stage, Dv)
                tile.note(r, p, j + NST)
            T.ptx.cp.async_.wait_all()
            for i in T.unroll(2 * MT):
                l[i] = quad_sum(l[i])
            if CW > 1:
                T.cuda.cta_sync()
                for i in T.unroll(2 * MT):
                    if lane % 4 == 0:
                        shares[cw * BM + band + i * 8 + lane // 4] = l[i]
                T.cuda.cta_sync()
                for i in T.unroll(2 * MT):
                    l[i] = T.float32(0)
                    for x in T.unroll(CW):
                        l[i] = l[i] + shares[x * BM + band + i * 8 + lane // 4]
            row: T.int32 = notes[OUT_ROW]
            whole: T.bool = notes[WHOLE] != 0
            for t in T.unroll(MT):
                for h in T.unroll(2):
                    own: T.int32 = row0 + band + t * 16 + h * 8 + lane // 4
                    if own < notes[ROWS]:
                        keep[0] = normaliser(
                            m[t * 2 + h] * factor,
                            l[t * 2 + h],
                            T.Select(whole, p.sinks[hk * G + own % G] * T.float32(LOG2_E), T.float32(NEG)),
                            exp2,
                        )
                        if FP8:
                            if tiles <= old_tiles:
                                keep[0] = keep[0] * v_scale
                        keep[1] = natural_lse(m[t * 2 + h] * factor, l[t * 2 + h], log2)
                        for i in T.unroll(ON // 4):
                            e: T.int32 = cw * DO + i * 8 + lane % 4 * 2
                            if e < Dv:
                                if whole:
                                    store_word(
                                        p.out.ptr_to([row + own // G, hk * G + own % G, e]),
                                        pack(
                                            O[t * ON + i * 4 + h * 2] * keep[0], O[t * ON + i * 4 + h * 2 + 1] * keep[0]
                                        ),
                                    )
                                else:
                                    store_two(
                                        p.part_o.ptr_to([row + own // G, hk * G + own % G, e]),
                                        O[t * ON + i * 4 + h * 2] * keep[0],
                                        O[t * ON + i * 4 + h * 2 + 1] * keep[0],
                                    )
                        if cw == 0 and lane % 4 == 0:
                            if whole:
                                p.lse[row + own // G, hk * G + own % G] = keep[1]
                            else:
                                p.part_lse[row + own // G, hk * G + own % G] = keep[1]

    absent = (() if TREE else ("mask", "mask_start", "mask_width")) + (() if FP8 else ("k_scale", "v_scale"))
    return paged_extend.specialize(**dict.fromkeys(absent))
