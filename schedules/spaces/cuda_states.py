# mypy: ignore-errors
# (TVMScript is parsed from its text, not run: its names and annotations are not Python's.)
"""The merge of partial softmax states and the KV write for CUDA."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from tilewright.schedules.intrinsics.cuda import (
    PACK,
    await_previous,
    codes,
    copy_vector,
    exp2,
    log2,
    store_word,
    strided,
    warp_max,
    warp_sum,
)
from tilewright.schedules.paged_attention.definition import (
    TVM_DTYPE,
    finite_or_zero,
    natural_lse,
    normaliser,
)
from tilewright.schedules.paged_attention.states import COUNT, FIRST, OUT_ROW, ROW_COLUMNS, STRIDE
from tilewright.schedules.spaces import PROGRAMMATIC
from tilewright.schedules.vector_math import LOG2_E
from tilewright.schedules.workload import Workload

MOST_HEAD_DIM = 512  # values a warp holds in registers
_WARPS = 4  # of a merging CTA, each with every fourth state
_CHUNK = 32 * _WARPS  # states whose weights are worked out at a time


def merge(workload: Workload, hopper: bool) -> tirx.PrimFunc:
    """Merge partial states into whole rows: one CTA an output row and head, which takes the states in parallel.

    Args:
        workload: operator "merge"; its dtype is that of `out`. Head dims: multiples of 4, at most MOST_HEAD_DIM.
        hopper: start beside the end of the kernel before, and wait for it.
    """
    dtype, pack = TVM_DTYPE[workload.dtype], PACK[workload.dtype]
    NW, CHUNK, GROUPS = _WARPS, _CHUNK, MOST_HEAD_DIM // 128
    NEG = float("-inf")

    @T.prim_func
    def merge(
        part_o_: T.handle, part_lse_: T.handle, rows_: T.handle, sinks_: T.handle, out_: T.handle, lse_: T.handle
    ):
        T.func_attr({"global_symbol": "merge", PROGRAMMATIC: hopper})
        P, H, Dv, R, tokens = T.int64(), T.int64(), T.int64(), T.int64(), T.int64()
        o0, o1, l0, l1 = T.int64(), T.int64(), T.int64(), T.int64()
        part_o = T.match_buffer(part_o_, (P, H, Dv), "float32", align=16)
        part_lse = T.match_buffer(part_lse_, (P, H), "float32", align=4)
        rows = T.match_buffer(rows_, (R, ROW_COLUMNS), "int32", align=4)
        sinks = T.match_buffer(sinks_, (H,), "float32", align=4)
        out = T.match_buffer(
            out_,
            (tokens, H, Dv),
            dtype,
            strides=(o0, o1, T.int64(1)),
            align=4,
            layout=strided((tokens, H, Dv), (o0, o1, T.int64(1))),
        )
        lse = T.match_buffer(
            lse_, (tokens, H), "float32", strides=(l0, l1), align=4, layout=strided((tokens, H), (l0, l1))
        )
        T.device_entry()
        h, r = T.cta_id([T.Cast("int32", H), T.Cast("int32", R)])
        tx = T.thread_id([32 * NW])
        weight = T.alloc_buffer((CHUNK,), "float32", scope="shared", align=16)
        tops = T.alloc_buffer((NW,), "float32", scope="shared", align=16)
        sums = T.alloc_buffer((NW,), "float32", scope="shared", align=16)
        values = T.alloc_buffer((NW, MOST_HEAD_DIM), "float32", scope="shared", align=16)
        warp: T.int32 = tx // 32
        lane: T.int32 = tx % 32
        if hopper:
            await_previous()
        count: T.int32 = rows[r, COUNT]
        if count > 0:
            O = T.alloc_local([4 * GROUPS], "float32")
            m = T.alloc_local([1], "float32")  # of all states so far, the same in every thread
            l = T.alloc_local([1], "float32")  # the thread's share of the sum
            state = T.alloc_local([1], "float32")
            top = T.alloc_local([1], "float32")
            keep = T.alloc_local([2], "float32")
            m[0] = T.float32(NEG)
            l[0] = T.float32(0)
            for i in T.unroll(4 * GROUPS):
                O[i] = T.float32(0)

            for c in T.serial((count + (CHUNK - 1)) // CHUNK):
                state[0] = T.float32(NEG)
                if c * CHUNK + tx < count:
                    state[0] = part_lse[
                        T.Cast("int64", rows[r, FIRST])
                        + T.Cast("int64", c * CHUNK + tx) * T.Cast("int64", rows[r, STRIDE]),
                        h,
                    ] * T.float32(LOG2_E)
                top[0] = warp_max(state[0])
                if lane == 0:
                    tops[warp] = top[0]
                T.cuda.cta_sync()
                top[0] = m[0]
                for x in T.unroll(NW):
                    top[0] = T.max(top[0], tops[x])
                keep[0] = exp2(m[0] - finite_or_zero(top[0]))
                m[0] = top[0]
                weight[tx] = exp2(state[0] - finite_or_zero(top[0]))
                l[0] = l[0] * keep[0] + weight[tx]
                for i in T.unroll(4 * GROUPS):
                    O[i] = O[i] * keep[0]
                T.cuda.cta_sync()
                for n in T.serial((T.min(count - c * CHUNK, CHUNK) - warp + (NW - 1)) // NW):
                    # An empty state's values may be anything, NaN too.
                    if weight[n * NW + warp] != T.float32(0):
                        for g in T.unroll(GROUPS):
                            if g * 128 + lane * 4 < T.Cast("int32", Dv):
                                for e in T.vectorized(4):
                                    O[g * 4 + e] = (
                                        O[g * 4 + e]
                                        + weight[n * NW + warp]
                                        * part_o[
                                            T.Cast("int64", rows[r, FIRST])
                                            + T.Cast("int64", c * CHUNK + n * NW + warp)
                                            * T.Cast("int64", rows[r, STRIDE]),
                                            h,
                                            g * 128 + lane * 4 + e,
                                        ]
                                    )
            l[0] = warp_sum(l[0])
            if lane == 0:
                sums[warp] = l[0]
            for g in T.unroll(GROUPS):
                if g * 128 + lane * 4 < T.Cast("int32", Dv):
                    for e in T.unroll(4):
                        values[warp, g * 128 + lane * 4 + e] = O[g * 4 + e]
            T.cuda.cta_sync()
            l[0] = T.float32(0)
            for x in T.unroll(NW):
                l[0] = l[0] + sums[x]
            keep[0] = normaliser(m[0], l[0], sinks[h] * T.float32(LOG2_E), exp2)
            for i in T.serial((T.Cast("int32", Dv) + (64 * NW - 1)) // (64 * NW)):
                if i * 64 * NW + tx * 2 < T.Cast("int32", Dv):
                    O[0] = T.float32(0)
                    O[1] = T.float32(0)
                    for x in T.unroll(NW):
                        O[0] = O[0] + values[x, i * 64 * NW + tx * 2]
                        O[1] = O[1] + values[x, i * 64 * NW + tx * 2 + 1]
                    store_word(
                        out.ptr_to([T.Cast("int64", rows[r, OUT_ROW]), h, i * 64 * NW + tx * 2]),
                        pack(O[0] * keep[0], O[1] * keep[0]),
                    )
            if tx == 0:
                lse[T.Cast("int64", rows[r, OUT_ROW]), h] = natural_lse(m[0], l[0], log2)

    return merge


def write_kv(workload: Workload, hopper: bool) -> tirx.PrimFunc:
    """Copy rows into the slots of a pool, 16 bytes of it a thread; which of several rows for one slot stays is open.

    Args:
        workload: operator "write_kv"; head dims: multiples of 8, of 16 where the pool is of fp8.
        hopper: whether there is an instruction that rounds to fp8.
    """
    dtype = TVM_DTYPE[workload.dtype]
    FP8 = workload.kv_dtype is not None
    pool_dtype, CHUNK = ("uint8", 16) if FP8 else (dtype, 8)
    store_codes = codes(workload.dtype, hopper)
    THREADS = 256

    @T.prim_func
    def write_kv(x_: T.handle, buffer_: T.handle, loc_: T.handle, scale: T.float32):
        T.func_attr({"global_symbol": "write_kv"})
        tokens, slots, H, D = T.int64(), T.int64(), T.int64(), T.int64()
        x0, x1, b0, b1, l0 = T.int64(), T.int64(), T.int64(), T.int64(), T.int64()
        x = T.match_buffer(
            x_,
            (tokens, H, D),
            dtype,
            strides=(x0, x1, T.int64(1)),
            align=16,
            layout=strided((tokens, H, D), (x0, x1, T.int64(1))),
        )
        buffer = T.match_buffer(
            buffer_,
            (slots, H, D),
            pool_dtype,
            strides=(b0, b1, T.int64(1)),
            align=16,
            layout=strided((slots, H, D), (b0, b1, T.int64(1))),
        )
        loc = T.match_buffer(loc_, (tokens,), "int32", strides=(l0,), align=4, layout=strided((tokens,), (l0,)))
        T.device_entry()
        t = T.cta_id([T.Cast("int32", tokens)])
        tx = T.thread_id([THREADS])
        chunks: T.int32 = T.Cast("int32", D // CHUNK)
        slot: T.int32 = loc[t]
        if slot >= 0:
            for i in T.serial((T.Cast("int32", H) * chunks + (THREADS - 1)) // THREADS):
                if i * THREADS + tx < T.Cast("int32", H) * chunks:
                    h: T.int32 = T.truncdiv(i * THREADS + tx, chunks)
                    d: T.int32 = T.truncmod(i * THREADS + tx, chunks) * CHUNK
                    if FP8:
                        store_codes(buffer.ptr_to([T.Cast("int64", slot), h, d]), x.ptr_to([t, h, d]), scale)
                    else:
                        copy_vector(buffer.ptr_to([T.Cast("int64", slot), h, d]), x.ptr_to([t, h, d]))

    return write_kv if FP8 else write_kv.specialize({write_kv.params[-1]: tirx.const(1, "float32")})
