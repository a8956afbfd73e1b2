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

from tvm import tirx
from tvm.script import tirx as T

from tilewright.schedules.intrinsics.cuda import (
    PACK,
    WIDEN,
    address,
    copy16,
    copy16_from,
    exp2,
    log2,
    quad_max,
    quad_sum,
    store_two,
    store_word,
    store_zeros,
    tanh,
    warp_any,
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
    finite_or_zero,
    masked,
    natural_lse,
    normaliser,
    score,
    sees_new,
    visible_bounds,
)
from tilewright.schedules.spaces.cuda_parameters import paged_buffers
from tilewright.schedules.vector_math import LOG2_E
from tilewright.schedules.workload import Workload

MOST_DIM = 256  # of a general kernel
_MMA_TYPE = {"bf16": "bf16", "fp16": "f16"}
_NOTES = TABLE_ROW, COLUMN, FRESH, OUT_ROW, WHOLE, ROWS, FIRST, SPLIT, NEW_BEGIN, LAST, ALL_LO, ALL_HI, MASKED = range(
    13
)
# Addresses that a thread looks up before it starts the copies from them: each would wait for its own otherwise.
_COPIES = 8


def padded(dim: tirx.Expr | int) -> tirx.Expr | int:
    """Columns that products go over: whole steps of 16."""
    return (dim + 15) // 16 * 16


def pitch(dim: int) -> int:
    """Elements from one row of a tile in shared memory to the next."""
    return padded(dim) if padded(dim) % 64 == 0 else padded(dim) + 8


def place(row: tirx.Expr, chunk: tirx.Expr, dim: int) -> tirx.Expr:
    """Where the 16-byte chunk of a row lies in a tile, in elements: eight rows' chunks never share a bank."""
    if padded(dim) % 64 == 0:
        return row * padded(dim) + (chunk ^ (row % 8)) * 8
    return row * pitch(dim) + chunk * 8


def most_dims(workload: Workload) -> tuple[int, int]:
    """Head dims that a kernel has room for."""
    return (MOST_DIM, MOST_DIM) if workload.general else (workload.head_dim_qk, workload.head_dim_vo)


def block_q(workload: Workload, decisions: Mapping[str, int]) -> int:
    """Most query tokens of an item; where their rows are more than a CTA's, several CTAs share them."""
    return decisions["rows"] if workload.general else max(decisions["rows"] // workload.group, 1)


def ring_elements(workload: Workload, decisions: Mapping[str, int]) -> int:
    """Elements of 16 bits in dynamic shared memory: queries, the ring, probabilities that warps share."""
    keys, dims = decisions["keys"], most_dims(workload)
    ring = decisions["stages"] * keys * sum(pitch(dim) for dim in dims)
    shared = decisions["rows"] * pitch(keys) if decisions["columns"] > 1 else 0
    return decisions["rows"] * pitch(dims[0]) + ring + shared


def side_bytes(decisions: Mapping[str, int]) -> int:
    """Bytes of shared memory besides: addresses of rows, maxima and sums that warps share."""
    words = len(_NOTES) + decisions["rows"] * (decisions["columns"] + 1)
    return 32 * (decisions["keys"] + 1) + (words + 1) // 2 * 8


def extend(workload: Workload, decisions: Mapping[str, int]) -> tirx.PrimFunc:
    """The kernel of docs/kernel-abi.md for blocks of query tokens.

    Args:
        workload: operator "paged_extend", 16-bit, head dims multiples of 8.
        decisions: `rows` of an item, `warps` of a CTA, `columns` (warps that share rows), `keys` of a tile, `stages`
            of the ring. A warp has rows * columns / warps rows, a multiple of 16.
    """
    DM, DVM = most_dims(workload)
    BM, NW, CW, BN, NST = (decisions[name] for name in ("rows", "warps", "columns", "keys", "stages"))
    THREADS, MT = 32 * NW, BM * CW // (16 * NW)
    KEYS, DO = BN // CW, padded(DVM) // CW  # of a warp
    FP8, TREE, GENERAL = workload.kv_dtype is not None, workload.tree, workload.general
    steps = T.serial if GENERAL else T.unroll  # over sizes that a workload may leave open
    # Columns that products go over at a time, zeros beyond the head dim; all of a warp's values where their number is
    # known.
    STEP, PART_DO = (64, 64) if GENERAL else (16, DO)

    def batches(count):
        # Unrolled, each copy's place is worked out once for all tiles and held in registers.
        return T.unroll(count) if isinstance(count, int) and count <= 2 else T.serial(count)

    dtype, pack = TVM_DTYPE[workload.dtype], PACK[workload.dtype]
    mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{_MMA_TYPE[workload.dtype]}.{_MMA_TYPE[workload.dtype]}.f32"
    ldmatrix = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
    ldmatrix_trans = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
    widen = WIDEN[workload.dtype]
    RING, VALUES, STAGE = BM * pitch(DM), BN * pitch(DM), BN * (pitch(DM) + pitch(DVM))
    SHARED = RING + NST * STAGE  # where the probabilities begin
    SN, ON = KEYS // 2, DO // 2  # accumulator registers of 16 rows
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
        ROW_BLOCKS = T.meta_var((block_q(workload, decisions) * G + (BM - 1)) // BM)
        T.device_entry()
        bx, w = T.cta_id([T.Cast("int32", p.heads) * ROW_BLOCKS, T.Cast("int32", p.num_items)])
        tx = T.thread_id([THREADS])
        smem = T.alloc_buffer((SHARED + (BM * pitch(BN) if CW > 1 else 0),), dtype, scope="shared.dyn", align=1024)
        # Addresses of the rows of two tiles, keys and then values; of the head's first row in all four tensors.
        rows = T.alloc_buffer((side_bytes(decisions) // 8,), "int64", scope="shared", align=16)
        # What is used once a tile, more than registers hold: what _NOTES lists, then positions of the rows.
        notes = T.decl_buffer((len(_NOTES) + BM,), "int32", data=rows.data, elem_offset=8 * BN + 8, scope="shared")
        shares = T.decl_buffer(
            (CW * BM,), "float32", data=rows.data, elem_offset=8 * BN + 8 + len(_NOTES) + BM, scope="shared"
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
            addresses = T.alloc_local([_COPIES], "int64")
            at = T.alloc_local([2], "int32")
            to_row = T.alloc_local([_COPIES], "int32")
            to_chunk = T.alloc_local([_COPIES], "int32")

            @T.inline
            def look_up(j):
                # Row of the tile's key number tx in its tensors.
                if j < tiles and tx < BN:
                    if j < old_tiles:
                        held[0] = p.req_to_token[
                            T.Cast("int64", notes[TABLE_ROW]),
                            T.Cast("int64", notes[COLUMN])
                            + T.Cast("int64", T.min(notes[FIRST] + j * BN + tx, notes[SPLIT] - 1)),
                        ]
                    else:
                        held[0] = T.min(notes[NEW_BEGIN] + j * BN + tx, notes[LAST]) + notes[FRESH]

            @T.inline
            def note(j):
                if j < tiles and tx < BN:
                    row: T.int64 = T.Cast("int64", held[0])
                    if j < old_tiles:
                        rows[j % 2 * (2 * BN) + tx] = rows[4 * BN] + row * p.row_bytes["k_buffer"]
                        rows[j % 2 * (2 * BN) + BN + tx] = rows[4 * BN + 1] + row * p.row_bytes["v_buffer"]
                    else:
                        rows[j % 2 * (2 * BN) + tx] = rows[4 * BN + 2] + row * p.row_bytes["k_new"]
                        rows[j % 2 * (2 * BN) + BN + tx] = rows[4 * BN + 3] + row * p.row_bytes["v_new"]

            @T.inline
            def copy(table, to, chunks, dim, step):
                # `chunks` of every row of a tile to every step-th place: each thread takes every THREADS-th.
                if GENERAL:
                    # Row and chunk of the next copy, moved on without a division.
                    at[0] = tx // chunks
                    at[1] = tx % chunks
                    for _ in T.serial((BN * chunks + (THREADS * _COPIES - 1)) // (THREADS * _COPIES)):
                        for i in T.unroll(_COPIES):
                            to_row[i] = at[0]
                            to_chunk[i] = at[1]
                            at[0] = at[0] + THREADS // chunks
                            at[1] = at[1] + THREADS % chunks
                            if at[1] >= chunks:
                                at[0] = at[0] + 1
                                at[1] = at[1] - chunks
                            addresses[i] = rows[table + T.min(to_row[i], BN - 1)]
                        for i in T.unroll(_COPIES):
                            if to_row[i] < BN:
                                copy16_from(
                                    smem.ptr_to([to + place(to_row[i], to_chunk[i] * step, dim)]),
                                    addresses[i] + T.Cast("int64", to_chunk[i] * 16),
                                )
                else:
                    for begin in batches((BN * chunks + (THREADS * _COPIES - 1)) // (THREADS * _COPIES)):
                        for i in T.unroll(_COPIES):
                            if (begin * _COPIES + i) * THREADS + tx < BN * chunks:
                                addresses[i] = rows[table + ((begin * _COPIES + i) * THREADS + tx) // chunks]
                        for i in T.unroll(_COPIES):
                            if (begin * _COPIES + i) * THREADS + tx < BN * chunks:
                                n: T.int32 = ((begin * _COPIES + i) * THREADS + tx) // chunks
                                c: T.int32 = ((begin * _COPIES + i) * THREADS + tx) % chunks
                                copy16_from(
                                    smem.ptr_to([to + place(n, c * step, dim)]),
                                    addresses[i] + T.Cast("int64", c * 16),
                                )

            @T.inline
            def gather(j):
                if j < tiles:
                    if FP8:
                        # Sixteen numbers of the pool wait in the place of the first eight that they become.
                        if j < old_tiles:
                            copy(j % 2 * (2 * BN), RING + j % NST * STAGE, D // 16, DM, 2)
                            copy(j % 2 * (2 * BN) + BN, RING + j % NST * STAGE + VALUES, Dv // 16, DVM, 2)
                        else:
                            copy(j % 2 * (2 * BN), RING + j % NST * STAGE, D // 8, DM, 1)
                            copy(j % 2 * (2 * BN) + BN, RING + j % NST * STAGE + VALUES, Dv // 8, DVM, 1)
                    else:
                        copy(j % 2 * (2 * BN), RING + j % NST * STAGE, D // 8, DM, 1)
                        copy(j % 2 * (2 * BN) + BN, RING + j % NST * STAGE + VALUES, Dv // 8, DVM, 1)
                T.ptx.cp.async_.commit_group()

            @T.inline
            def convert(to, chunks, dim):
                # What this thread has copied itself, so that nobody is waited for.
                for i in batches((BN * chunks + (THREADS - 1)) // THREADS):
                    if i * THREADS + tx < BN * chunks:
                        n: T.int32 = (i * THREADS + tx) // chunks
                        c: T.int32 = (i * THREADS + tx) % chunks * 2
                        widen(
                            smem.ptr_to([to + place(n, c, dim)]),
                            smem.ptr_to([to + place(n, c + 1, dim)]),
                            smem.ptr_to([to + place(n, c, dim)]),
                        )

            @T.inline
            def scores(stage):
                for i in T.unroll(MT * SN):
                    S[i] = T.float32(0)
                for block in steps((D + (STEP - 1)) // STEP):
                    for kk in T.unroll(STEP // 16):
                        for t in T.unroll(MT):
                            T.ptx[ldmatrix](
                                *[A[t * 4 + i] for i in range(4)],
                                smem.ptr_to(
                                    [place(band + t * 16 + lane % 16, block * (STEP // 8) + kk * 2 + lane // 16, DM)]
                                ),
                            )
                        for nn in T.unroll(KEYS // 16):
                            T.ptx[ldmatrix](
                                *[B[i] for i in range(4)],
                                smem.ptr_to(
                                    [
                                        stage
                                        + place(
                                            cw * KEYS + nn * 16 + lane // 16 * 8 + lane % 8,
                                            block * (STEP // 8) + kk * 2 + lane // 8 % 2,
                                            DM,
                                        )
                                    ]
                                ),
                            )
                            for t in T.unroll(MT):
                                for h in T.unroll(2):
                                    T.ptx[mma](
                                        *[S[t * SN + (nn * 2 + h) * 4 + i] for i in range(4)],
                                        *[A[t * 4 + i] for i in range(4)],
                                        B[h * 2],
                                        B[h * 2 + 1],
                                        *[S[t * SN + (nn * 2 + h) * 4 + i] for i in range(4)],
                                    )

            @T.inline
            def hide(j):
                begin: T.int32 = T.Select(j < old_tiles, notes[FIRST] + j * BN, notes[NEW_BEGIN] + j * BN)
                final: T.int32 = T.Select(j < old_tiles, notes[SPLIT] - 1, notes[LAST])
                edge: T.bool = T.Or(begin + (BN - 1) > T.min(notes[ALL_HI], final), begin <= notes[ALL_LO])
                if T.Or(edge, T.And(TREE, begin + (BN - 1) >= notes[MASKED])):
                    for t in T.unroll(MT):
                        for h in T.unroll(2):
                            stands: T.int32 = notes[len(_NOTES) + band + t * 16 + h * 8 + lane // 4]
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

            @T.inline
            def softmax():
                for t in T.unroll(MT):
                    for h in T.unroll(2):
                        top[t * 2 + h] = m[t * 2 + h]
                        for n in T.unroll(KEYS // 8):
                            for e in T.unroll(2):
                                top[t * 2 + h] = T.max(top[t * 2 + h], S[t * SN + n * 4 + h * 2 + e])
                        top[t * 2 + h] = quad_max(top[t * 2 + h])
                if CW > 1:
                    for i in T.unroll(2 * MT):
                        if lane % 4 == 0:
                            shares[cw * BM + band + i * 8 + lane // 4] = top[i]
                    T.cuda.cta_sync()
                    for i in T.unroll(2 * MT):
                        for x in T.unroll(CW):
                            top[i] = T.max(top[i], shares[x * BM + band + i * 8 + lane // 4])
                for t in T.unroll(MT):
                    # Later tiles seldom raise a maximum.
                    if warp_any(T.Cast("int32", T.Or(top[t * 2] > m[t * 2], top[t * 2 + 1] > m[t * 2 + 1]))):
                        for h in T.unroll(2):
                            keep[h] = exp2(m[t * 2 + h] * factor - finite_or_zero(top[t * 2 + h]) * factor)
                            m[t * 2 + h] = top[t * 2 + h]
                            l[t * 2 + h] = l[t * 2 + h] * keep[h]
                            for i in T.unroll(ON // 4):
                                for e in T.unroll(2):
                                    O[t * ON + i * 4 + h * 2 + e] = O[t * ON + i * 4 + h * 2 + e] * keep[h]
                    for h in T.unroll(2):
                        shift[0] = finite_or_zero(m[t * 2 + h]) * factor
                        for n in T.unroll(KEYS // 8):
                            for e in T.unroll(2):
                                S[t * SN + n * 4 + h * 2 + e] = exp2(S[t * SN + n * 4 + h * 2 + e] * factor - shift[0])
                                l[t * 2 + h] = l[t * 2 + h] + S[t * SN + n * 4 + h * 2 + e]
                    for i in T.unroll(KEYS // 4):
                        P[t * (KEYS // 4) + i] = pack(S[t * SN + i * 2], S[t * SN + i * 2 + 1])
                if CW > 1:
                    for t in T.unroll(MT):
                        for i in T.unroll(KEYS // 4):
                            store_word(
                                smem.ptr_to(
                                    [
                                        SHARED
                                        + place(band + t * 16 + i % 2 * 8 + lane // 4, cw * (KEYS // 8) + i // 2, BN)
                                        + lane % 4 * 2
                                    ]
                                ),
                                P[t * (KEYS // 4) + i],
                            )
                    T.cuda.cta_sync()

            @T.inline
            def values(stage):
                for block in T.unroll(DO // PART_DO):
                    if not GENERAL or cw * DO + block * PART_DO < Dv:
                        for kk in T.unroll(BN // 16):
                            for t in T.unroll(MT):
                                if CW > 1:
                                    T.ptx[ldmatrix](
                                        *[A[t * 4 + i] for i in range(4)],
                                        smem.ptr_to(
                                            [SHARED + place(band + t * 16 + lane % 16, kk * 2 + lane // 16, BN)]
                                        ),
                                    )
                                else:
                                    for i in T.unroll(4):
                                        A[t * 4 + i] = P[t * (KEYS // 4) + kk * 4 + i]
                            for jj in T.unroll(PART_DO // 16):
                                c: T.int32 = cw * (DO // 8) + block * (PART_DO // 8) + jj * 2 + lane // 16
                                T.ptx[ldmatrix_trans](
                                    *[B[i] for i in range(4)],
                                    smem.ptr_to([stage + VALUES + place(kk * 16 + lane % 16, c, DVM)]),
                                )
                                for t in T.unroll(MT):
                                    for h in T.unroll(2):
                                        o: T.int32 = t * ON + block * (PART_DO // 2) + (jj * 2 + h) * 4
                                        T.ptx[mma](
                                            *[O[o + i] for i in range(4)],
                                            *[A[t * 4 + i] for i in range(4)],
                                            B[h * 2],
                                            B[h * 2 + 1],
                                            *[O[o + i] for i in range(4)],
                                        )

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
                    notes[len(_NOTES) + i * THREADS + tx] = pos + T.min(row0 + i * THREADS + tx, q_rows - 1) // G
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
                    r: T.int32 = T.min(row0 + n, q_rows - 1)
                    copy16(
                        smem.ptr_to([place(n, c, DM)]), p.q.ptr_to([p.items[w, Q_ROW] + r // G, hk * G + r % G, c * 8])
                    )
            for j in T.unroll(NST - 1):
                look_up(j)
                note(j)
                T.cuda.cta_sync()
                gather(j)
            look_up(NST - 1)
            note(NST - 1)
            for j in T.serial(tiles):
                stage: T.int32 = RING + j % NST * STAGE
                if NST == 1:
                    T.cuda.cta_sync()
                    gather(j)
                T.ptx.cp.async_.wait_group(max(NST - 2, 0))
                if FP8:
                    if j < old_tiles:
                        convert(stage, D // 16, DM)
                        convert(stage + VALUES, Dv // 16, DVM)
                T.cuda.cta_sync()
                look_up(j + NST)
                if NST > 1:
                    gather(j + (NST - 1))
                scores(stage)
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
                softmax()
                values(stage)
                note(j + NST)
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
                    r: T.int32 = row0 + band + t * 16 + h * 8 + lane // 4
                    if r < notes[ROWS]:
                        keep[0] = normaliser(
                            m[t * 2 + h] * factor,
                            l[t * 2 + h],
                            T.Select(whole, p.sinks[hk * G + r % G] * T.float32(LOG2_E), T.float32(NEG)),
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
                                        p.out.ptr_to([row + r // G, hk * G + r % G, e]),
                                        pack(
                                            O[t * ON + i * 4 + h * 2] * keep[0], O[t * ON + i * 4 + h * 2 + 1] * keep[0]
                                        ),
                                    )
                                else:
                                    store_two(
                                        p.part_o.ptr_to([row + r // G, hk * G + r % G, e]),
                                        O[t * ON + i * 4 + h * 2] * keep[0],
                                        O[t * ON + i * 4 + h * 2 + 1] * keep[0],
                                    )
                        if cw == 0 and lane % 4 == 0:
                            if whole:
                                p.lse[row + r // G, hk * G + r % G] = keep[1]
                            else:
                                p.part_lse[row + r // G, hk * G + r % G] = keep[1]

    absent = (() if TREE else ("mask", "mask_start", "mask_width")) + (() if FP8 else ("k_scale", "v_scale"))
    return paged_extend.specialize(**dict.fromkeys(absent))
