"""Passes that a schedule cannot express, applied to PrimFuncs before `tvm.compile`.

None of them changes what is computed for valid inputs: they state how parameters lie in memory, how often a loop runs
and what to fetch ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import tvm_ffi
from tvm import DataType, tirx
from tvm.ir import Range
from tvm.ir.expr import TensorLoad, Var
from tvm.s_tir import SBlock, SBlockRealize
from tvm.tirx import BufferRegion, IterVar

# A block's statement, what it reads and what it writes; made from the buffers and the axes by name.
Block = tuple[tirx.Stmt, list[BufferRegion], list[BufferRegion]]
BlockBody = Callable[[Mapping[str, Var], Mapping[str, Var]], Block]

Node = TypeVar("Node")

TRIP = "tilewright.trip"
PREFETCH = "tilewright.prefetch"
CACHE_LINE = 64  # bytes


def strided_parameters(func: tirx.PrimFunc, parameters: Mapping[str, bool]) -> tirx.PrimFunc:
    """Let parameter buffers have any strides and element alignment.

    Args:
        func: a function with compact buffer parameters, before scheduling.
        parameters: name of the buffer -> whether its last dimension is dense (stride 1, so that it can be vectorised).
            Buffers not named stay compact; all get element alignment.

    Returns:
        The function over buffers with symbolic int64 strides; a stride is bound from each call's tensor.
    """
    replacement = {}
    for parameter in func.params:
        if not tirx.is_buffer_var(parameter):
            continue
        shape = [tirx.const(int(n), "int64") if isinstance(n, tirx.IntImm) else n for n in parameter.shape]
        strides = None
        if parameter.name in parameters:
            strides = [tirx.Var(f"{parameter.name}_stride_{axis}", "int64") for axis in range(len(shape))]
            if parameters[parameter.name]:
                strides[-1] = tirx.const(1, "int64")
        replacement[parameter.name] = tirx.decl_buffer(
            shape,
            parameter.dtype,
            name=parameter.name,
            strides=strides,
            data_alignment=DataType(parameter.dtype).itemsize,
        )
    missing = set(parameters) - set(replacement)
    if missing:
        raise ValueError(f"parameters: {func} has no buffer parameter {', '.join(sorted(missing))}")
    originals = {p.name: p for p in func.params if p.name in replacement}

    def replace(var: Var) -> Var:
        original = originals.get(var.name)
        return replacement[var.name] if original is not None and var.same_as(original) else var

    return tvm_ffi.structural_map(func, (Var, replace))


def trip_counts(
    func: tirx.PrimFunc, count: Callable[[str, list[tirx.For]], tirx.Expr], *, exact: Sequence[str] = ()
) -> tirx.PrimFunc:
    """Give annotated loops data-dependent extents.

    A schedule needs loops of static or symbolic extent; a loop annotated `sch.annotate(loop, TRIP, kind)` gets the
    extent min(extent, count(kind, enclosing loops, outermost first)), or the count alone where the kind is in `exact`
    (the schedule's extent was a stand-in). Sound only where the iterations cut off compute nothing that is read
    later, which the caller states by annotating.
    """
    enclosing: list[tirx.For] = []

    def visit(loop: tirx.For, mutator: tvm_ffi.StructuralMutator) -> tirx.For:
        annotations = {str(key): value for key, value in dict(loop.annotations).items()}
        kind = annotations.pop(TRIP, None)
        enclosing.append(loop)
        body = mutator.mutate(loop.body)
        enclosing.pop()
        extent = loop.extent
        if kind is not None:
            wanted = count(str(kind), list(enclosing)).astype(str(extent.ty.dtype))
            extent = wanted if str(kind) in exact else tirx.min(extent, wanted)
        return tirx.For(loop.loop_var, loop.min, extent, loop.kind, body, loop.thread_binding, annotations)

    return tvm_ffi.structural_mutate(func, (tirx.For, visit))


def prefetches(func: tirx.PrimFunc, hint: Callable[[int, list[tirx.For]], tirx.Stmt]) -> tirx.PrimFunc:
    """Begin each iteration of loops annotated `sch.annotate(loop, PREFETCH, distance)` with a software prefetch.

    `hint(distance, loops)` makes the statement; the last of `loops`, outermost first, is the annotated one. Distance
    0 = none.
    """
    enclosing: list[tirx.For] = []

    def visit(loop: tirx.For, mutator: tvm_ffi.StructuralMutator) -> tirx.For:
        annotations = {str(key): value for key, value in dict(loop.annotations).items()}
        distance = int(annotations.pop(PREFETCH, 0))
        enclosing.append(loop)
        body = mutator.mutate(loop.body)
        if distance:
            body = tirx.SeqStmt([hint(distance, list(enclosing)), body])
        enclosing.pop()
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, annotations)

    return tvm_ffi.structural_mutate(func, (tirx.For, visit))


def prefetch_line(buffer: Var, indices: Sequence[tirx.Expr], level: int = 1) -> tirx.Stmt:
    """Ask for the cache line of one element, into the cache of that level (1 or 2) and those behind it."""
    zero, locality, data = (tirx.const(value, "int32") for value in (0, 4 - level, 1))
    address = tirx.address_of(tirx.BufferLoad(buffer, list(indices)))
    return tirx.Evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch", address, zero, locality, data))


def deinterleave(func: tirx.PrimFunc, parameters: Sequence[str]) -> tirx.PrimFunc:
    """Load every second element of a row as one vector and a shuffle: TVM makes scalar loads of it otherwise.

    Runs on lowered code, where vectors are ramps. A ramp of stride 2 begins at an element that is even or odd within
    its row, as the constant term of its index says; both take the same vector, of which LLVM makes a shift and a mask
    where the elements are bf16. Sound where rows have an even number of elements.

    Args:
        func: a lowered function.
        parameters: names of the buffers whose rows are read so.
    """

    def visit(load: TensorLoad, mutator: tvm_ffi.StructuralMutator) -> tirx.Expr:
        index = load.indices[-1]
        if load.source.name not in parameters or not isinstance(index, tirx.Ramp) or not _is(index.stride, 2):
            return mutator.default_mutate(load)
        odd = _constant_term(index.base) % 2
        lanes, one = int(index.lanes), tirx.const(1, str(index.base.ty.dtype))
        row = tirx.BufferLoad(load.source, [*load.indices[:-1], tirx.Ramp(index.base - odd, one, 2 * lanes)])
        return tirx.Shuffle([row], [tirx.const(2 * lane + odd, "int32") for lane in range(lanes)])

    return tvm_ffi.structural_mutate(func, (TensorLoad, visit))


def _is(value: tirx.Expr, number: int) -> bool:
    return isinstance(value, tirx.IntImm) and int(value) == number


def _constant_term(index: tirx.Expr) -> int:
    if isinstance(index, tirx.IntImm):
        return int(index)
    if isinstance(index, tirx.Add):
        return _constant_term(index.a) + _constant_term(index.b)
    return 0


def in_place(func: tirx.PrimFunc, source: str, target: str) -> tirx.PrimFunc:
    """Let a stage overwrite what it reads: the buffer `target` becomes `source`.

    Sound where each element of `target` is computed from the same element of `source` alone, which nothing reads
    afterwards. Both are buffers of the function's own, of one shape and type.
    """
    buffers = {buffer.name: buffer for buffer in func.body.block.alloc_buffers}
    kept, gone = buffers[source], buffers[target]
    func = tvm_ffi.structural_map(func, (Var, lambda var: kept if var.same_as(gone) else var))
    root = func.body.block
    allocated = [kept, *(buffer for buffer in root.alloc_buffers if not buffer.same_as(kept))]
    root = SBlock(
        root.iter_vars, root.reads, root.writes, root.name_hint, root.body, root.init,
        allocated, root.match_buffers, root.annotations,
    )  # fmt: skip
    return tirx.PrimFunc(func.params, SBlockRealize([], True, root), func.ret_type, func.attrs)


def substitute(node: Node, values: Mapping[Var, tirx.Expr]) -> Node:
    """The expression, statement or region with variables replaced."""
    return tvm_ffi.structural_map(node, (Var, lambda var: values.get(var, var)))


def append_block(
    func: tirx.PrimFunc,
    name: str,
    internal: Sequence[str],
    extents: Mapping[str, tirx.Expr | int],
    body: BlockBody,
) -> tirx.PrimFunc:
    """Append one opaque block that consumes results of the function and writes parameters where it likes.

    Tensor expressions write dense outputs only; a scatter into the caller's rows is such a block.

    Args:
        func: an s_tir function whose parameters named in `internal` are outputs.
        name: of the block.
        internal: these parameters become buffers of the function's own.
        extents: the block's data-parallel axes, outermost first.
        body: called with the buffers by name and the axes by name; gives the block's statement, what it reads and
        writes.
    """
    buffers = {p.name: p for p in func.params if tirx.is_buffer_var(p)}
    computed = isinstance(func.body, SBlockRealize)  # else there are parameters only
    root = func.body.block if computed else SBlock([], [], [], "root", func.body)
    loops = {axis: tirx.Var(f"{name}_{axis}", "int64") for axis in extents}
    axes = {axis: tirx.Var(f"v_{axis}", "int64") for axis in extents}
    stmt, reads, writes = body(buffers, axes)
    data_parallel = 0  # IterVar's type code
    block = SBlock(
        [IterVar(_range(extent), axes[axis], data_parallel) for axis, extent in extents.items()],
        reads,
        writes,
        name,
        stmt,
    )
    nest: tirx.Stmt = SBlockRealize(list(loops.values()), True, block)
    for axis in reversed(list(extents)):
        bounds = _range(extents[axis])
        nest = tirx.For(loops[axis], bounds.min, bounds.extent, tirx.ForKind.SERIAL, nest)
    new_root = SBlock(
        root.iter_vars,
        root.reads,
        root.writes,
        root.name_hint,
        tirx.SeqStmt([root.body, nest]) if computed else nest,
        root.init,
        [*root.alloc_buffers, *(buffers[n] for n in internal)],
        root.match_buffers,
        root.annotations,
    )
    parameters = [p for p in func.params if not (tirx.is_buffer_var(p) and p.name in internal)]
    return tirx.PrimFunc(parameters, SBlockRealize([], True, new_root), func.ret_type, func.attrs)


def _range(extent: tirx.Expr | int) -> Range:
    zero = tirx.const(0, "int64")
    return Range.from_min_extent(zero, tirx.const(extent, "int64") if isinstance(extent, int) else extent)
