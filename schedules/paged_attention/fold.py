"""The fold of chunk states, row by row: a pass over a scheduled kernel.

The definition folds chunks with a reducer over (maximum, sum, value), and a reducer's results share one shape: maximum
and sum are replicated over the value columns, and every element pays for an exponential. The copies are equal by
construction, so this pass keeps one maximum and sum a row, computes a row's two weights once, and leaves two multiplies
and an add to each element.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi
from tvm import tirx
from tvm.ir.expr import TensorLoad, Var
from tvm.s_tir import SBlock, SBlockRealize
from tvm.tirx import BufferRegion

from tilewright.schedules.lowering import substitute
from tilewright.schedules.paged_attention.definition import finite_or_zero, region
from tilewright.schedules.vector_math import exp2, f32, negative_infinity

MAXIMUM, SUM, VALUE = "acc.v0", "acc.v1", "acc.v2"
INIT, UPDATE = "acc_init", "acc_update"


def fold_by_row(func: tirx.PrimFunc, lanes: int, columns: int) -> tirx.PrimFunc:
    """Replace the blocks `acc_init` and `acc_update` of a scheduled paged attention (see the module).

    Args:
        func: its `acc` is decomposed at the loop over chunks, so both blocks stand in loops over rows and columns.
        lanes: rows whose weights are computed at a time; divides the rows of those loops.
        columns: value columns at a time; divides their number.

    Raises:
        ValueError: the loops are others.
    """
    allocated = {buffer.name: buffer for buffer in func.body.block.alloc_buffers}
    by_row = allocated[VALUE].shape[:-1]
    names = (MAXIMUM, SUM, "acc.kept", "acc.added")
    rows = {name: tirx.decl_buffer(list(by_row), "float32", name=name) for name in names}
    old = {name: allocated[name] for name in (MAXIMUM, SUM)}

    def nest(loop: tirx.For, mutator: tvm_ffi.StructuralMutator) -> tirx.Stmt:
        loops = [loop]
        while isinstance(loops[-1].body, tirx.For):
            loops.append(loops[-1].body)
        inner = loops[-1].body
        if isinstance(inner, SBlockRealize) and inner.block.name_hint in (INIT, UPDATE):
            return _folded(loops, inner, rows, allocated, lanes, columns)
        body = mutator.mutate(loop.body)
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations)

    def load(access: TensorLoad) -> TensorLoad:
        name = access.source.name
        if name in old and access.source.same_as(old[name]):
            return tirx.BufferLoad(rows[name], list(access.indices)[:-1])
        return access

    def block(found: SBlock) -> SBlock:
        def one_a_row(part: BufferRegion) -> BufferRegion:
            name = part.source.name
            if name in old and part.source.same_as(old[name]):
                return BufferRegion(rows[name], list(part.region)[:-1])
            return part

        buffers = [b for b in found.alloc_buffers if not any(b.same_as(gone) for gone in old.values())]
        if len(buffers) != len(found.alloc_buffers):
            buffers += rows.values()
        reads, writes = ([one_a_row(part) for part in parts] for parts in (found.reads, found.writes))
        return SBlock(
            found.iter_vars, reads, writes, found.name_hint, found.body, found.init,
            buffers, found.match_buffers, found.annotations,
        )  # fmt: skip

    func = tvm_ffi.structural_mutate(func, (tirx.For, nest))
    return tvm_ffi.structural_map(tvm_ffi.structural_map(func, (TensorLoad, load)), (SBlock, block))


def _folded(
    loops: Sequence[tirx.For],
    realize: SBlockRealize,
    rows: dict[str, Var],
    allocated: dict[str, Var],
    lanes: int,
    columns: int,
) -> tirx.Stmt:
    """What takes the place of one nest of the reducer: a block of its own loops."""
    name = realize.block.name_hint
    axes = {axis.var.name: value for axis, value in zip(realize.block.iter_vars, realize.iter_values, strict=True)}
    width = int(allocated[VALUE].shape[-1])
    if name == INIT:
        first, count = tirx.const(0, "int64"), int(allocated[VALUE].shape[-2])
    else:
        along = [loop for loop in loops if _uses(axes["v_r"], loop.loop_var)]
        if len(along) != 1:
            raise ValueError(f"{name}: expected one loop over rows, then those over columns, got {loops[0]}")
        first, count = substitute(axes["v_r"], {along[0].loop_var: tirx.const(0, "int64")}), int(along[0].extent)
    if count % lanes or width % columns:
        raise ValueError(f"{name}: {count} rows and {width} columns, {lanes} and {columns} at a time")
    # Loops of one iteration lie around those over rows.
    units = {loop.loop_var: tirx.const(0, "int64") for loop in loops if int(loop.extent) == 1}
    lead = [substitute(axes[axis], units) for axis in ("v_w", "v_h")]
    chunk = [substitute(axes["v_c"], units)] if name == UPDATE else []
    r_o, r_i, r, e_o, e_i = (tirx.Var(f"fold_{x}", "int64") for x in ("r_o", "r_i", "r", "e_o", "e_i"))
    row = [*lead, first + r_o * lanes + r_i]
    value = [*lead, first + r, e_o * columns + e_i]

    stores: list[tirx.Stmt]
    if name == INIT:
        stores = [
            tirx.BufferStore(rows[MAXIMUM], negative_infinity(), row),
            tirx.BufferStore(rows[SUM], f32(0.0), row),
        ]
        update = f32(0.0)
        reads: list[BufferRegion] = []
    else:
        of_chunk = {n: tirx.BufferLoad(allocated[n], [*lead, *chunk, row[-1]]) for n in ("m", "l")}
        most, total, kept, added = (tirx.BufferLoad(buffer, row) for buffer in rows.values())
        greatest = tirx.Select(most > of_chunk["m"], most, of_chunk["m"])
        stores = [
            # The maximum last: the others read the old one.
            tirx.BufferStore(rows["acc.kept"], exp2(most - finite_or_zero(greatest)), row),
            tirx.BufferStore(rows["acc.added"], exp2(of_chunk["m"] - finite_or_zero(greatest)), row),
            tirx.BufferStore(rows[SUM], total * kept + of_chunk["l"] * added, row),
            tirx.BufferStore(rows[MAXIMUM], greatest, row),
        ]
        kept, added = (tirx.BufferLoad(rows[n], value[:-1]) for n in ("acc.kept", "acc.added"))
        part = tirx.BufferLoad(allocated["O"], [*lead, *chunk, *value[-2:]])
        update = tirx.BufferLoad(allocated[VALUE], value) * kept + part * added
        reads = [region(allocated[n], [*((i, 1) for i in (*lead, *chunk)), (first, count)]) for n in ("m", "l")]
        reads.append(region(allocated["O"], [*((i, 1) for i in (*lead, *chunk)), (first, count), (0, width)]))
    of_rows = [(lead[0], 1), (lead[1], 1), (first, count)]
    writes = [*(region(buffer, of_rows) for buffer in rows.values()), region(allocated[VALUE], [*of_rows, (0, width)])]
    body = tirx.SeqStmt([
        _loop(r_o, count // lanes, _loop(r_i, lanes, tirx.SeqStmt(stores), vector=True)),
        _loop(r, count, _loop(e_o, width // columns, _loop(e_i, columns, tirx.BufferStore(allocated[VALUE], update, value), vector=True))),
    ])
    if name == UPDATE:
        reads += writes
    return SBlockRealize([], True, SBlock([], reads, writes, f"fold_{name}", body))


def _loop(var: Var, extent: int, body: tirx.Stmt, *, vector: bool = False) -> tirx.Stmt:
    kind = tirx.ForKind.VECTORIZED if vector else tirx.ForKind.SERIAL
    return tirx.For(var, tirx.const(0, "int64"), tirx.const(extent, "int64"), kind, body)


def _uses(value: tirx.Expr, var: Var) -> bool:
    found = []

    def visit(used: Var) -> Var:
        if used.same_as(var):
            found.append(used)
        return used

    tvm_ffi.structural_map(value, (Var, visit))
    return bool(found)
