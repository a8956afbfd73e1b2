# mypy: ignore-errors
# (TVMScript is parsed from its text, not run: its names and annotations are not Python's.)
"""How the warps of extend by mma.sync gather tiles: rows by the page table, copied by cp.async, fp8 made 16-bit."""

from __future__ import annotations

from types import SimpleNamespace

from tvm.script import tirx as T

from tilewright.schedules.intrinsics.cuda import WIDEN, copy16_from
from tilewright.schedules.spaces.cuda_extend_mma_tiles import (
    COLUMN,
    FIRST,
    FRESH,
    LAST,
    NEW_BEGIN,
    SPLIT,
    TABLE_ROW,
    Tiles,
    place,
)
from tilewright.schedules.workload import Workload

# Addresses that a thread looks up before it starts the copies from them: each would wait for its own otherwise.
COPIES = 8


def gathering(workload: Workload, z: Tiles) -> SimpleNamespace:
    """Statements by which all threads of a CTA bring tile j into its stage, `r` being what the kernel has declared.

    In this order, each for later tiles than the next: `look_up` finds the row of one key a thread in its tensor,
    `note` puts the rows' addresses into shared memory, `gather` starts the copies, `convert` makes 16-bit numbers of
    what the thread itself has copied from a pool of fp8 (nobody is waited for).
    """
    BN, NST, THREADS, DM, DVM = z.keys, z.stages, z.threads, z.dim, z.dim_vo
    RING, VALUES, STAGE = z.ring, z.values, z.stage
    FP8, GENERAL = workload.kv_dtype is not None, workload.general
    widen = WIDEN[workload.dtype]

    def batches(count: object) -> object:
        # Unrolled, each copy's place is worked out once for all tiles and held in registers.
        return T.unroll(count) if isinstance(count, int) and count <= 2 else T.serial(count)

    @T.inline
    def look_up(r, p, j):
        # Row of the tile's key number tx in its tensors.
        if j < r.tiles and r.tx < BN:
            if j < r.old_tiles:
                r.held[0] = p.req_to_token[
                    T.Cast("int64", r.notes[TABLE_ROW]),
                    T.Cast("int64", r.notes[COLUMN])
                    + T.Cast("int64", T.min(r.notes[FIRST] + j * BN + r.tx, r.notes[SPLIT] - 1)),
                ]
            else:
                r.held[0] = T.min(r.notes[NEW_BEGIN] + j * BN + r.tx, r.notes[LAST]) + r.notes[FRESH]

    @T.inline
    def note(r, p, j):
        if j < r.tiles and r.tx < BN:
            row: T.int64 = T.Cast("int64", r.held[0])
            if j < r.old_tiles:
                r.rows[j % 2 * (2 * BN) + r.tx] = r.rows[4 * BN] + row * p.row_bytes["k_buffer"]
                r.rows[j % 2 * (2 * BN) + BN + r.tx] = r.rows[4 * BN + 1] + row * p.row_bytes["v_buffer"]
            else:
                r.rows[j % 2 * (2 * BN) + r.tx] = r.rows[4 * BN + 2] + row * p.row_bytes["k_new"]
                r.rows[j % 2 * (2 * BN) + BN + r.tx] = r.rows[4 * BN + 3] + row * p.row_bytes["v_new"]

    @T.inline
    def copy(r, table, to, chunks, dim, step):
        # `chunks` of every row of a tile to every step-th place: each thread takes every THREADS-th.
        if GENERAL:
            # Row and chunk of the next copy, moved on without a division.
            r.at[0] = r.tx // chunks
            r.at[1] = r.tx % chunks
            for _ in T.serial((BN * chunks + (THREADS * COPIES - 1)) // (THREADS * COPIES)):
                for i in T.unroll(COPIES):
                    r.to_row[i] = r.at[0]
                    r.to_chunk[i] = r.at[1]
                    r.at[0] = r.at[0] + THREADS // chunks
                    r.at[1] = r.at[1] + THREADS % chunks
                    if r.at[1] >= chunks:
                        r.at[0] = r.at[0] + 1
                        r.at[1] = r.at[1] - chunks
                    r.addresses[i] = r.rows[table + T.min(r.to_row[i], BN - 1)]
                for i in T.unroll(COPIES):
                    if r.to_row[i] < BN:
                        copy16_from(
                            r.smem.ptr_to([to + place(r.to_row[i], r.to_chunk[i] * step, dim)]),
                            r.addresses[i] + T.Cast("int64", r.to_chunk[i] * 16),
                        )
        else:
            for begin in batches((BN * chunks + (THREADS * COPIES - 1)) // (THREADS * COPIES)):
                for i in T.unroll(COPIES):
                    if (begin * COPIES + i) * THREADS + r.tx < BN * chunks:
                        r.addresses[i] = r.rows[table + ((begin * COPIES + i) * THREADS + r.tx) // chunks]
                for i in T.unroll(COPIES):
                    if (begin * COPIES + i) * THREADS + r.tx < BN * chunks:
                        n: T.int32 = ((begin * COPIES + i) * THREADS + r.tx) // chunks
                        c: T.int32 = ((begin * COPIES + i) * THREADS + r.tx) % chunks
                        copy16_from(
                            r.smem.ptr_to([to + place(n, c * step, dim)]),
                            r.addresses[i] + T.Cast("int64", c * 16),
                        )

    @T.inline
    def gather(r, j, D, Dv):
        if j < r.tiles:
            if FP8:
                # Sixteen numbers of the pool wait in the place of the first eight that they become.
                if j < r.old_tiles:
                    copy(r, j % 2 * (2 * BN), RING + j % NST * STAGE, D // 16, DM, 2)
                    copy(r, j % 2 * (2 * BN) + BN, RING + j % NST * STAGE + VALUES, Dv // 16, DVM, 2)
                else:
                    copy(r, j % 2 * (2 * BN), RING + j % NST * STAGE, D // 8, DM, 1)
                    copy(r, j % 2 * (2 * BN) + BN, RING + j % NST * STAGE + VALUES, Dv // 8, DVM, 1)
            else:
                copy(r, j % 2 * (2 * BN), RING + j % NST * STAGE, D // 8, DM, 1)
                copy(r, j % 2 * (2 * BN) + BN, RING + j % NST * STAGE + VALUES, Dv // 8, DVM, 1)
        T.ptx.cp.async_.commit_group()

    @T.inline
    def convert(r, to, chunks, dim):
        # What this thread has copied itself, so that nobody is waited for.
        for i in batches((BN * chunks + (THREADS - 1)) // THREADS):
            if i * THREADS + r.tx < BN * chunks:
                n: T.int32 = (i * THREADS + r.tx) // chunks
                c: T.int32 = (i * THREADS + r.tx) % chunks * 2
                widen(
                    r.smem.ptr_to([to + place(n, c, dim)]),
                    r.smem.ptr_to([to + place(n, c + 1, dim)]),
                    r.smem.ptr_to([to + place(n, c, dim)]),
                )

    return SimpleNamespace(look_up=look_up, note=note, gather=gather, convert=convert)
