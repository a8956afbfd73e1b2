"""The merge of partial softmax states and the KV write, as tensor expressions. Arguments: docs/kernel-abi.md."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import te, tirx
from tvm.ir.expr import Var

from tilewright.schedules import lowering
from tilewright.schedules.e4m3 import e4m3_of
from tilewright.schedules.paged_attention.definition import (
    TVM_DTYPE,
    finite_or_zero,
    i64,
    loop,
    natural_lse,
    normaliser,
    region,
)
from tilewright.schedules.vector_math import LOG2_E, exp2, f32, negative_infinity
from tilewright.schedules.workload import Workload

# Columns of `rows`.
OUT_ROW, FIRST, COUNT, STRIDE = range(4)
ROW_COLUMNS = 4


def merge(workload: Workload) -> tirx.PrimFunc:
    """Merge partial states into whole rows: their values weighted by 2**(lse - greatest lse).

    Args:
        workload: operator "merge"; its dtype is that of `out`.

    Returns:
        An s_tir function with the blocks L (states' LSE in base 2, -inf where empty), V (their values, 0 where empty),
        M (greatest L), A (weights), total (of the weights), acc (weighted values), F (normaliser), lse_row and store.
    """
    dtype = TVM_DTYPE[workload.dtype]
    P, H, Dv, R, T = (
        tirx.Var(name, "int64") for name in ("partials", "num_heads", "head_dim_vo", "num_rows", "num_tokens")
    )
    part_o = te.placeholder((P, H, Dv), "float32", name="part_o")
    part_lse = te.placeholder((P, H), "float32", name="part_lse")
    rows = te.placeholder((R, i64(ROW_COLUMNS)), "int32", name="rows")
    sinks = te.placeholder((H,), "float32", name="sinks")
    out = te.placeholder((T, H, Dv), dtype, name="out")
    lse = te.placeholder((T, H), "float32", name="lse")

    def state(r: tirx.Expr, s: tirx.Expr) -> tirx.Expr:
        return rows[r, FIRST].astype("int64") + s * rows[r, STRIDE].astype("int64")

    # P bounds the number of states of a row; the kernel runs the row's own number (lowering.TRIP).
    L = te.compute((R, H, P), lambda r, h, s: part_lse[state(r, s), h] * f32(LOG2_E), name="L")
    V = te.compute(
        (R, H, P, Dv),
        lambda r, h, s, e: tirx.if_then_else(L[r, h, s] == negative_infinity(), f32(0.0), part_o[state(r, s), h, e]),
        name="V",
    )
    # All states of a row are at hand, so their weights come first: no state is rescaled.
    s_m, s_t, s_o = (te.reduce_axis((i64(0), P), name) for name in ("s_m", "s_t", "s_o"))
    M = te.compute((R, H), lambda r, h: te.max(L[r, h, s_m], axis=s_m), name="M")
    A = te.compute((R, H, P), lambda r, h, s: exp2(L[r, h, s] - finite_or_zero(M[r, h])), name="A")
    total = te.compute((R, H), lambda r, h: te.sum(A[r, h, s_t], axis=s_t), name="total")
    acc = te.compute((R, H, Dv), lambda r, h, e: te.sum(A[r, h, s_o] * V[r, h, s_o, e], axis=s_o), name="acc")
    F = te.compute((R, H), lambda r, h: normaliser(M[r, h], total[r, h], sinks[h] * f32(LOG2_E)), name="F")
    lse_row = te.compute((R, H), lambda r, h: natural_lse(M[r, h], total[r, h]), name="lse_row")

    func = te.create_prim_func([part_o, part_lse, rows, sinks, out, lse, acc, F, lse_row])

    def store(buffers: Mapping[str, Var], axes: Mapping[str, Var]) -> lowering.Block:
        r, h = axes["r"], axes["h"]
        e = tirx.Var("e", "int64")
        row = buffers["rows"][r, OUT_ROW].astype("int64")
        value = buffers["acc"][r, h, e] * buffers["F"][r, h]
        stmt = tirx.SeqStmt(
            [
                tirx.BufferStore(buffers["lse"], buffers["lse_row"][r, h], [row, h]),
                loop(e, Dv, tirx.BufferStore(buffers["out"], value.astype(dtype), [row, h, e])),
            ]
        )
        reads = [
            region(buffers["acc"], [(r, 1), (h, 1), (0, Dv)]),
            region(buffers["F"], [(r, 1), (h, 1)]),
            region(buffers["lse_row"], [(r, 1), (h, 1)]),
            region(buffers["rows"], [(r, 1), (0, ROW_COLUMNS)]),
        ]
        writes = [region(buffers["out"], [(0, T), (h, 1), (0, Dv)]), region(buffers["lse"], [(0, T), (h, 1)])]
        return stmt, reads, writes

    func = lowering.append_block(func, "store", ("acc", "F", "lse_row"), {"r": R, "h": H}, store)
    func = lowering.strided_parameters(func, {"out": True, "lse": False})
    return func.with_attr("global_symbol", workload.operator)


def write_kv(workload: Workload) -> tirx.PrimFunc:
    """Copy rows into the slots of a pool: buffer[loc[t]] = x[t], or e4m3(x[t] / scale); slot -1 is skipped.

    Args:
        workload: operator "write_kv".

    Returns:
        An s_tir function with the one block `store` over tokens and heads.
    """
    dtype = TVM_DTYPE[workload.dtype]
    T, S, H, D = (tirx.Var(name, "int64") for name in ("num_tokens", "slots", "num_heads", "head_dim"))
    x = te.placeholder((T, H, D), dtype, name="x")
    fp8 = workload.kv_dtype is not None
    buffer = te.placeholder((S, H, D), "uint8" if fp8 else dtype, name="buffer")
    loc = te.placeholder((T,), "int32", name="loc")
    scale = tirx.Var("scale", "float32")
    func = te.create_prim_func([x, buffer, loc, *([scale] if fp8 else ())])

    def store(buffers: Mapping[str, Var], axes: Mapping[str, Var]) -> lowering.Block:
        t, h = axes["t"], axes["h"]
        d = tirx.Var("d", "int64")
        slot = buffers["loc"][t]
        value = buffers["x"][t, h, d]
        if fp8:
            value = e4m3_of(value.astype("float32") / scale)
        copy = tirx.BufferStore(buffers["buffer"], value, [slot.astype("int64"), h, d])
        stmt = tirx.IfThenElse(slot >= 0, loop(d, D, copy), None)
        reads = [region(buffers["x"], [(t, 1), (h, 1), (0, D)]), region(buffers["loc"], [(t, 1)])]
        return stmt, reads, [region(buffers["buffer"], [(0, S), (h, 1), (0, D)])]

    func = lowering.append_block(func, "store", (), {"t": T, "h": H}, store)
    func = lowering.strided_parameters(func, {"x": True, "buffer": True, "loc": False})
    return func.with_attr("global_symbol", workload.operator)


__all__ = ["COUNT", "merge", "write_kv"]
