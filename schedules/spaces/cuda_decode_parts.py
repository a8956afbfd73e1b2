# mypy: ignore-errors
# (TVMScript is parsed from its text, not run: its names and annotations are not Python's.)
"""What the decode kernels for CUDA share: their parameters, and how the pieces of a split row are joined."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from tilewright.schedules.intrinsics.cuda import (
    address,
    arrived_last,
    exp2,
    load_fresh,
    load_fresh_four,
    log2,
    store_word,
    strided,
)
from tilewright.schedules.paged_attention.definition import (
    ITEM_COLUMNS,
    Q_ROW,
    TVM_DTYPE,
    finite_or_zero,
    natural_lse,
    normaliser,
)
from tilewright.schedules.vector_math import LOG2_E
from tilewright.schedules.workload import Workload

# Columns of an item that decode has for itself: the first and the number of the pieces of its row, and 1 + the number
# of the row's counter, 0 where the merge kernel joins them.
FIRST_PIECE, PIECES, COUNTER = 6, 7, 9
MMA_TYPE = {"bf16": "bf16", "fp16": "f16"}
_NEG = float("-inf")
_UNDER_WAY = {1: 8, 4: 4}  # columns of a thread -> pieces of each that it loads at a time


def layout(bulk: bool) -> tuple[Callable[[int], int], Callable[..., tirx.Expr]]:
    """(pitch, place) of a tile in shared memory, where chunks of 16 bytes of eight rows never share a bank.

    pitch(dim): elements of 16 bits from one row to the next. place(row, chunk, dim): where a chunk of a row lies.

    Args:
        bulk: whether rows are copied whole, not chunk by chunk: then they are an odd number of chunks apart.
    """

    def pitch(dim: int) -> int:
        return dim if dim % 64 == 0 and not bulk else dim + 8

    def place(row: tirx.Expr, chunk: tirx.Expr, dim: int) -> tirx.Expr:
        return row * pitch(dim) + ((chunk ^ (row % 8)) if pitch(dim) == dim else chunk) * 8

    return pitch, place


class Parameters(NamedTuple):
    """The tensors of docs/kernel-abi.md by their names there.

    heads, W, partials: KV heads, items, rows of the partial states. viewed: whether values are the keys' first columns.
    """

    q: tirx.Var
    k_buffer: tirx.Var
    v_buffer: tirx.Var
    req_to_token: tirx.Var
    req_pool_indices: tirx.Var
    kv_start: tirx.Var
    items: tirx.Var
    sinks: tirx.Var
    out: tirx.Var
    lse: tirx.Var
    part_o: tirx.Var
    part_lse: tirx.Var
    heads: tirx.Var
    W: tirx.Var
    partials: tirx.Var
    viewed: tirx.Expr


def parameters(workload: Workload, *handles: tirx.Var) -> Parameters:
    """Declare the tensors of the decode function under construction, whose handles these are in call order."""
    G, D, Dv, dtype = workload.group, workload.head_dim_qk, workload.head_dim_vo, TVM_DTYPE[workload.dtype]
    pool_dtype = "uint8" if workload.kv_dtype else dtype
    names = ("tokens", "heads", "slots", "table_rows", "table_columns", "requests", "W", "partials")
    tokens, heads, slots, table_rows, columns, requests, W, partials = (tirx.Var(name, "int64") for name in names)
    strides = {}

    def tensor(name, handle, shape, dtype="float32", align=4, free=0):
        """With free strides in the first `free` dimensions, dense in the others."""
        extra = {}
        if free:
            own = [tirx.Var(f"{name}_{axis}", "int64") for axis in range(free)] + [1] * (len(shape) - free)
            extra = {"strides": own, "layout": strided(tuple(shape), tuple(own))}
            strides[name] = own
        buffer = T.match_buffer(handle, shape, dtype, align=align, **extra)
        IRBuilder.name(name, buffer)
        return buffer

    q, k, v, table, pool, start, items, sinks, out, lse, part_o, part_lse = handles
    tensors = (
        tensor("q", q, (tokens, heads * G, D), dtype, free=2),
        tensor("k_buffer", k, (slots, heads, D), pool_dtype, 16, free=2),
        tensor("v_buffer", v, (slots, heads, Dv), pool_dtype, 16, free=2),
        tensor("req_to_token", table, (table_rows, columns), "int32", free=2),
        tensor("req_pool_indices", pool, (requests,), "int32", free=1),
        tensor("kv_start", start, (requests,), "int32", free=1),
        tensor("items", items, (W, ITEM_COLUMNS), "int32"),
        tensor("sinks", sinks, (heads * G,)),
        tensor("out", out, (tokens, heads * G, Dv), dtype, free=2),
        tensor("lse", lse, (tokens, heads * G), free=2),
        tensor("part_o", part_o, (partials, heads * G, Dv), align=16),
        tensor("part_lse", part_lse, (partials, heads * G)),
    )
    of_k, of_v = strides["k_buffer"], strides["v_buffer"]
    same_memory = address(tensors[1].ptr_to([0, 0, 0])) == address(tensors[2].ptr_to([0, 0, 0]))
    same_rows = tirx.And(of_k[0] == of_v[0], tirx.Or(of_k[1] == of_v[1], heads == 1))
    viewed = tirx.all(tirx.const(Dv <= D, "bool"), same_memory, same_rows)
    return Parameters(*tensors, heads, W, partials, viewed)


def without_scales(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A decode function of a pool that is not of fp8: its last two parameters, the scales, are 1."""
    return func.specialize({scale: tirx.const(1, "float32") for scale in func.params[-2:]})


@T.inline
def join_pieces(p, w, tx, threads: int, head, have, Dv: int, pack, columns: int):
    """Statements that end the kernel of a piece: the CTA that comes last joins all pieces of its row.

    p: the Parameters. head, have: the CTA's first query head and their number. columns: how many groups of four columns
    a thread has under way at a time (a key of _UNDER_WAY). Every thread of the CTA runs them.
    """
    if p.items[w, COUNTER] > 0:
        first: T.int32 = p.items[w, FIRST_PIECE]
        pieces: T.int32 = p.items[w, PIECES]
        if arrived_last(p.part_lse.ptr_to([p.partials - p.items[w, COUNTER], head]), pieces) != 0:
            several = T.meta_var(_UNDER_WAY[columns])
            weight = T.alloc_local([columns * several], "float32")
            values = T.alloc_local([columns * several * 4], "float32")
            sum = T.alloc_local([columns * 4], "float32")
            m = T.alloc_local([columns + 1], "float32")
            l = T.alloc_local([columns], "float32")
            keep = T.alloc_local([1], "float32")
            for i in T.serial((have * (Dv // 4) + threads * columns - 1) // (threads * columns)):
                for u in T.unroll(columns):
                    m[u] = T.float32(_NEG)
                    l[u] = T.float32(0)
                    for x in T.unroll(4):
                        sum[u * 4 + x] = T.float32(0)
                for c in T.serial((pieces + (several - 1)) // several):
                    # All loads of a round are under way together. None of the states is garbage: an empty one is 0.
                    for u in T.unroll(columns):
                        for n in T.unroll(several):
                            weight[u * several + n] = T.float32(_NEG)
                            for x in T.unroll(4):
                                values[(u * several + n) * 4 + x] = T.float32(0)
                            if T.And((i * columns + u) * threads + tx < have * (Dv // 4), c * several + n < pieces):
                                weight[u * several + n] = load_fresh(
                                    p.part_lse.ptr_to(
                                        [
                                            first + c * several + n,
                                            head + ((i * columns + u) * threads + tx) // (Dv // 4),
                                        ]
                                    )
                                ) * T.float32(LOG2_E)
                                load_fresh_four(
                                    values.ptr_to([(u * several + n) * 4]),
                                    p.part_o.ptr_to(
                                        [
                                            first + c * several + n,
                                            head + ((i * columns + u) * threads + tx) // (Dv // 4),
                                            ((i * columns + u) * threads + tx) % (Dv // 4) * 4,
                                        ]
                                    ),
                                )
                    for u in T.unroll(columns):
                        m[columns] = m[u]
                        for n in T.unroll(several):
                            m[columns] = T.max(m[columns], weight[u * several + n])
                        keep[0] = exp2(m[u] - finite_or_zero(m[columns]))
                        m[u] = m[columns]
                        l[u] = l[u] * keep[0]
                        for x in T.unroll(4):
                            sum[u * 4 + x] = sum[u * 4 + x] * keep[0]
                        for n in T.unroll(several):
                            weight[u * several + n] = exp2(weight[u * several + n] - finite_or_zero(m[u]))
                            l[u] = l[u] + weight[u * several + n]
                            for x in T.unroll(4):
                                sum[u * 4 + x] = (
                                    sum[u * 4 + x] + weight[u * several + n] * values[(u * several + n) * 4 + x]
                                )
                for u in T.unroll(columns):
                    if (i * columns + u) * threads + tx < have * (Dv // 4):
                        row: T.int32 = head + ((i * columns + u) * threads + tx) // (Dv // 4)
                        e: T.int32 = ((i * columns + u) * threads + tx) % (Dv // 4) * 4
                        keep[0] = normaliser(m[u], l[u], p.sinks[row] * T.float32(LOG2_E), exp2)
                        for x in T.unroll(2):
                            store_word(
                                p.out.ptr_to([p.items[w, Q_ROW], row, e + 2 * x]),
                                pack(sum[u * 4 + 2 * x] * keep[0], sum[u * 4 + 2 * x + 1] * keep[0]),
                            )
                        if e == 0:
                            p.lse[p.items[w, Q_ROW], row] = natural_lse(m[u], l[u], log2)
