# mypy: ignore-errors
# (TVMScript is parsed from its text, not run: its names and annotations are not Python's.)
"""The products and the softmax of extend by mma.sync: what a warp makes of a tile, in registers."""

from __future__ import annotations

from types import SimpleNamespace

from tvm.script import tirx as T

from tilewright.schedules.intrinsics.cuda import PACK, exp2, quad_max, store_word, warp_any
from tilewright.schedules.paged_attention.definition import finite_or_zero
from tilewright.schedules.spaces.cuda_extend_mma_tiles import Tiles, place
from tilewright.schedules.workload import Workload

_MMA_TYPE = {"bf16": "bf16", "fp16": "f16"}


def products(workload: Workload, z: Tiles) -> SimpleNamespace:
    """Statements of a warp, `r` being what the kernel has declared.

    `scores` fills S of its rows and of its keys of the tile in `stage`; `softmax` folds S, by then transformed and
    masked, into the state (m, l, O) of its rows and leaves the probabilities; `values` adds their products with the
    warp's columns of the tile's values to O. Where warps share rows, all of the CTA must call.
    """
    BM, BN, CW, MT, DM, DVM = z.rows, z.keys, z.columns, z.blocks, z.dim, z.dim_vo
    KEYS, DO, STEP, VALUES, SHARED = z.warp_keys, z.warp_values, z.step, z.values, z.shared
    SN, ON = KEYS // 2, DO // 2  # accumulator registers of 16 rows
    GENERAL, pack = workload.general, PACK[workload.dtype]
    PART_DO = 64 if GENERAL else DO  # columns of values that are there, or are not, together
    steps = T.serial if GENERAL else T.unroll
    mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{_MMA_TYPE[workload.dtype]}.{_MMA_TYPE[workload.dtype]}.f32"
    ldmatrix = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
    ldmatrix_trans = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"

    @T.inline
    def scores(r, stage, D):
        for i in T.unroll(MT * SN):
            r.S[i] = T.float32(0)
        for block in steps((D + (STEP - 1)) // STEP):
            for kk in T.unroll(STEP // 16):
                for t in T.unroll(MT):
                    T.ptx[ldmatrix](
                        *[r.A[t * 4 + i] for i in range(4)],
                        r.smem.ptr_to(
                            [place(r.band + t * 16 + r.lane % 16, block * (STEP // 8) + kk * 2 + r.lane // 16, DM)]
                        ),
                    )
                for nn in T.unroll(KEYS // 16):
                    T.ptx[ldmatrix](
                        *[r.B[i] for i in range(4)],
                        r.smem.ptr_to(
                            [
                                stage
                                + place(
                                    r.cw * KEYS + nn * 16 + r.lane // 16 * 8 + r.lane % 8,
                                    block * (STEP // 8) + kk * 2 + r.lane // 8 % 2,
                                    DM,
                                )
                            ]
                        ),
                    )
                    for t in T.unroll(MT):
                        for h in T.unroll(2):
                            T.ptx[mma](
                                *[r.S[t * SN + (nn * 2 + h) * 4 + i] for i in range(4)],
                                *[r.A[t * 4 + i] for i in range(4)],
                                r.B[h * 2],
                                r.B[h * 2 + 1],
                                *[r.S[t * SN + (nn * 2 + h) * 4 + i] for i in range(4)],
                            )

    @T.inline
    def softmax(r):
        for t in T.unroll(MT):
            for h in T.unroll(2):
                r.top[t * 2 + h] = r.m[t * 2 + h]
                for n in T.unroll(KEYS // 8):
                    for e in T.unroll(2):
                        r.top[t * 2 + h] = T.max(r.top[t * 2 + h], r.S[t * SN + n * 4 + h * 2 + e])
                r.top[t * 2 + h] = quad_max(r.top[t * 2 + h])
        if CW > 1:
            for i in T.unroll(2 * MT):
                if r.lane % 4 == 0:
                    r.shares[r.cw * BM + r.band + i * 8 + r.lane // 4] = r.top[i]
            T.cuda.cta_sync()
            for i in T.unroll(2 * MT):
                for x in T.unroll(CW):
                    r.top[i] = T.max(r.top[i], r.shares[x * BM + r.band + i * 8 + r.lane // 4])
        for t in T.unroll(MT):
            # Later tiles seldom raise a maximum.
            if warp_any(T.Cast("int32", T.Or(r.top[t * 2] > r.m[t * 2], r.top[t * 2 + 1] > r.m[t * 2 + 1]))):
                for h in T.unroll(2):
                    r.keep[h] = exp2(r.m[t * 2 + h] * r.factor - finite_or_zero(r.top[t * 2 + h]) * r.factor)
                    r.m[t * 2 + h] = r.top[t * 2 + h]
                    r.l[t * 2 + h] = r.l[t * 2 + h] * r.keep[h]
                    for i in T.unroll(ON // 4):
                        for e in T.unroll(2):
                            r.O[t * ON + i * 4 + h * 2 + e] = r.O[t * ON + i * 4 + h * 2 + e] * r.keep[h]
            for h in T.unroll(2):
                r.shift[0] = finite_or_zero(r.m[t * 2 + h]) * r.factor
                for n in T.unroll(KEYS // 8):
                    for e in T.unroll(2):
                        r.S[t * SN + n * 4 + h * 2 + e] = exp2(r.S[t * SN + n * 4 + h * 2 + e] * r.factor - r.shift[0])
                        r.l[t * 2 + h] = r.l[t * 2 + h] + r.S[t * SN + n * 4 + h * 2 + e]
            for i in T.unroll(KEYS // 4):
                r.P[t * (KEYS // 4) + i] = pack(r.S[t * SN + i * 2], r.S[t * SN + i * 2 + 1])
        if CW > 1:
            for t in T.unroll(MT):
                for i in T.unroll(KEYS // 4):
                    store_word(
                        r.smem.ptr_to(
                            [
                                SHARED
                                + place(r.band + t * 16 + i % 2 * 8 + r.lane // 4, r.cw * (KEYS // 8) + i // 2, BN)
                                + r.lane % 4 * 2
                            ]
                        ),
                        r.P[t * (KEYS // 4) + i],
                    )
            T.cuda.cta_sync()

    @T.inline
    def values(r, stage, Dv):
        for block in T.unroll(DO // PART_DO):
            if not GENERAL or r.cw * DO + block * PART_DO < Dv:
                for kk in T.unroll(BN // 16):
                    for t in T.unroll(MT):
                        if CW > 1:
                            T.ptx[ldmatrix](
                                *[r.A[t * 4 + i] for i in range(4)],
                                r.smem.ptr_to(
                                    [SHARED + place(r.band + t * 16 + r.lane % 16, kk * 2 + r.lane // 16, BN)]
                                ),
                            )
                        else:
                            for i in T.unroll(4):
                                r.A[t * 4 + i] = r.P[t * (KEYS // 4) + kk * 4 + i]
                    for jj in T.unroll(PART_DO // 16):
                        c: T.int32 = r.cw * (DO // 8) + block * (PART_DO // 8) + jj * 2 + r.lane // 16
                        T.ptx[ldmatrix_trans](
                            *[r.B[i] for i in range(4)],
                            r.smem.ptr_to([stage + VALUES + place(kk * 16 + r.lane % 16, c, DVM)]),
                        )
                        for t in T.unroll(MT):
                            for h in T.unroll(2):
                                o: T.int32 = t * ON + block * (PART_DO // 2) + (jj * 2 + h) * 4
                                T.ptx[mma](
                                    *[r.O[o + i] for i in range(4)],
                                    *[r.A[t * 4 + i] for i in range(4)],
                                    r.B[h * 2],
                                    r.B[h * 2 + 1],
                                    *[r.O[o + i] for i in range(4)],
                                )

    return SimpleNamespace(scores=scores, softmax=softmax, values=values)
