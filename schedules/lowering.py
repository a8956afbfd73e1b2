"""Passes that a schedule cannot express, applied to PrimFuncs before `tvm.compile`.

None of them changes what is computed for valid inputs: they state how parameters lie in memory and how often a loop runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tvm_ffi
from tvm import DataType, tirx
from tvm.ir.expr import Var

TRIP = "tilewright.trip"


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


def trip_counts(func: tirx.PrimFunc, count: Callable[[str, list[tirx.For]], tirx.Expr]) -> tirx.PrimFunc:
    """Give annotated loops data-dependent extents.

    A schedule needs loops of static or symbolic extent; a loop annotated `sch.annotate(loop, TRIP, kind)` gets the extent
    min(extent, count(kind, enclosing loops, outermost first)). Sound only where the iterations cut off compute nothing that
    is read later, which the caller states by annotating.
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
            extent = tirx.min(extent, count(str(kind), list(enclosing)).astype(str(extent.dtype)))
        return tirx.For(loop.loop_var, loop.min, extent, loop.kind, body, loop.thread_binding, annotations)

    return tvm_ffi.structural_mutate(func, (tirx.For, visit))
