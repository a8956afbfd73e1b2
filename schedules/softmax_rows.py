"""Fold softmax states once a row: a pass over scheduled paged attention.

A tuple reducer gives all its components one shape, so the definition's `acc` keeps a row's maximum and sum once per
value column, and a schedule computes the factors of the fold, an exponential, for every element. They depend on the
row only: this pass computes them in a loop over the rows of its own, ahead of the loop that folds the values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import Range
from tvm.ir.expr import Var
from tvm.s_tir import SBlock, SBlockRealize
from tvm.tirx import BufferRegion, IterVar

from tilewright.schedules.lowering import TRIP, substitute
from tilewright.schedules.paged_attention.definition import fold_factors

_SPATIAL, _REDUCE = 0, 2  # IterVar's type codes


def fold_by_row(func: tirx.PrimFunc, *, lanes: int) -> tirx.PrimFunc:
    """Compute the factors of the fold `acc` once a row instead of once an element.

    The loop over chunks must be annotated `TRIP: "chunks"`, and `acc` be decomposed at it. If the fold is done block by
    block of rows, the loop over blocks is annotated `TRIP: "rows"` and the next around the fold's nest.

    Args:
        func: the scheduled function.
        lanes: f32 lanes of a vector register.

    Returns:
        The function with new blocks "acc_rows_init" (ahead of the loop over chunks) and "acc_rows" (in it, ahead of the
        nest of "acc_update"), and "acc_init", "acc_update" for the values alone.
    """
    factors: list[Var] = []

    def block(node: SBlock, mutator: tvm_ffi.StructuralMutator) -> SBlock:
        if node.name_hint == "acc_init":
            return _with_body(node, node.body.seq[-1], [node.writes[-1]])
        if node.name_hint != "root":
            return mutator.default_mutate(node)
        body = mutator.mutate(node.body)
        if not factors:
            raise ValueError("acc: no loop annotated with its chunks folds it")
        return _with_body(node, body, node.writes, [*node.alloc_buffers, *factors])

    def chunks(loop: tirx.For, mutator: tvm_ffi.StructuralMutator) -> tirx.Stmt:
        if dict(loop.annotations).get(TRIP) != "chunks":
            return mutator.default_mutate(loop)
        fold = _Fold(_find(loop.body, "acc_update"), lanes)
        factors.extend(fold.factors)
        return tirx.SeqStmt([fold.rows_init(), _folded(loop, fold, tirx.const(0, "int64"), fold.all_rows)])

    return tvm_ffi.structural_mutate(func, [(SBlock, block), (tirx.For, chunks)])


def _folded(loop: tirx.For, fold: _Fold, first: tirx.Expr, rows: tirx.Expr) -> tirx.For:
    """The loop with the nest over `rows` rows from `first` on put ahead of the fold's nest, in its loop over blocks."""
    statements = list(loop.body.seq) if isinstance(loop.body, tirx.SeqStmt) else [loop.body]
    place = next(i for i, stmt in enumerate(statements) if _find(stmt, "acc_update"))
    nest = statements[place]
    if isinstance(nest, tirx.For) and dict(nest.annotations).get(TRIP) == "rows":
        block_rows = tirx.const(int(rows) // int(nest.extent), "int64")
        statements[place] = _folded(nest, fold, nest.loop_var * block_rows, block_rows)
    else:
        statements[place : place + 1] = [fold.rows(first, rows), _replace(nest, "acc_update", fold.update())]
    body = tirx.SeqStmt(statements) if len(statements) > 1 else statements[0]
    return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations)


class _Fold:
    """The pieces that the block "acc_update" falls into."""

    def __init__(self, realize: SBlockRealize, lanes: int) -> None:
        self._block, self._values, self._lanes = realize.block, list(realize.iter_values), lanes
        self._axes = list(self._block.iter_vars)
        named = {region.source.name: region.source for region in (*self._block.reads, *self._block.writes)}
        self._m, self._l = named["m"], named["l"]
        self._states = [region.source for region in self._block.writes]  # maximum, sum, values
        self.all_rows = self._states[0].shape[2]
        shape = list(self._states[0].shape[:3])
        self.factors = [tirx.decl_buffer(shape, "float32", name=name) for name in ("fold_old", "fold_new")]

    def _nest(
        self,
        name: str,
        body: Any,
        reads: Sequence[BufferRegion],
        writes: Sequence[BufferRegion],
        reduce: bool,
        first: tirx.Expr,
        rows: tirx.Expr,
    ) -> tirx.Stmt:
        """A vectorised loop over `rows` rows, from `first` on, of a block with the axes w, h, r (and the chunk)."""
        spatial = self._axes[:3]
        axes = [IterVar(a.dom, tirx.Var(a.var.name, "int64"), _SPATIAL) for a in spatial]
        chunk = self._axes[4]
        values = [*self._values[:2]]
        if reduce:
            axes.append(IterVar(chunk.dom, tirx.Var(chunk.var.name, "int64"), _REDUCE))
        old = [*(a.var for a in spatial), chunk.var]
        renamed = dict(zip(old, [a.var for a in axes], strict=False))
        width = 1
        if isinstance(rows, tirx.IntImm):
            # LLVM takes vectors whose lanes are no power of two apart.
            width = math.gcd(int(rows), self._lanes)
        outer, lane = (tirx.Var(x, "int64") for x in ("fold_row", "fold_lane"))
        values.append(first + outer * width + lane)
        if reduce:
            values.append(self._values[4])
        block = SBlock(
            axes,
            [substitute(region, renamed) for region in reads],
            [substitute(region, renamed) for region in writes],
            name,
            substitute(body, renamed),
        )
        stmt: tirx.Stmt = SBlockRealize(values, True, block)
        stmt = _loop(
            lane, tirx.const(width, "int64"), stmt, tirx.ForKind.VECTORIZED if width > 1 else tirx.ForKind.SERIAL
        )
        return _loop(outer, tirx.floordiv(rows, width), stmt, tirx.ForKind.SERIAL)

    @property
    def _row(self) -> list[Var]:
        return [axis.var for axis in self._axes[:3]]

    def rows_init(self) -> tirx.Stmt:
        """(-inf, 0): no key yet."""
        zero = tirx.const(0, "int64")
        values = (-tirx.infinity("float32"), tirx.const(0.0, "float32"))
        states = self._states[:2]
        stores = [tirx.BufferStore(s, v, [*self._row, zero]) for s, v in zip(states, values, strict=True)]
        writes = [_point(s, [*self._row, zero]) for s in states]
        return self._nest("acc_rows_init", tirx.SeqStmt(stores), [], writes, False, zero, self.all_rows)

    def rows(self, first: tirx.Expr, rows: tirx.Expr) -> tirx.Stmt:
        """The factors of a chunk's fold, and the new maximum and sum, of `rows` rows from `first` on."""
        zero = tirx.const(0, "int64")
        chunk = self._axes[4].var
        state = [*self._row, zero]
        w, h, r = self._row
        old = tuple(tirx.BufferLoad(s, state) for s in self._states[:2])
        new = tuple(tirx.BufferLoad(s, [w, h, chunk, r]) for s in (self._m, self._l))
        maximum, total, *scales = fold_factors(old, new)
        # The maximum last: everything else reads the old one.
        stores = [tirx.BufferStore(f, s, self._row) for f, s in zip(self.factors, scales, strict=True)]
        stores += [tirx.BufferStore(self._states[1], total, state), tirx.BufferStore(self._states[0], maximum, state)]
        inputs = [_point(s, state) for s in self._states[:2]] + [
            _point(s, [w, h, chunk, r]) for s in (self._m, self._l)
        ]
        outputs = [_point(f, self._row) for f in self.factors] + [_point(s, state) for s in self._states[:2]]
        return self._nest("acc_rows", tirx.SeqStmt(stores), inputs, outputs, True, first, rows)

    def update(self) -> SBlock:
        """The values of a row: what they were by fold_old, and the chunk's O by fold_new."""
        values = self._states[2]
        w, h, r = self._row
        others = {self._m.name, self._l.name, *(state.name for state in self._states)}
        chunk_values, there = next(
            (r.source, [bounds.min for bounds in r.region]) for r in self._block.reads if r.source.name not in others
        )
        # The schedule may have laid the columns out in another order.
        here = [bounds.min for bounds in self._block.writes[2].region]
        old, new = (tirx.BufferLoad(f, [w, h, r]) for f in self.factors)
        value = tirx.BufferLoad(values, here) * old + tirx.BufferLoad(chunk_values, there) * new
        reads = [_point(values, here), _point(chunk_values, there), *(_point(f, [w, h, r]) for f in self.factors)]
        return _with_body(self._block, tirx.BufferStore(values, value, here), [_point(values, here)], reads=reads)


def _loop(var: Var, extent: tirx.Expr, body: tirx.Stmt, kind: int) -> tirx.Stmt:
    return tirx.For(var, tirx.const(0, "int64"), extent, kind, body)


def _point(buffer: Var, indices: Sequence[Any]) -> BufferRegion:
    one = tirx.const(1, "int64")
    return BufferRegion(buffer, [Range.from_min_extent(i, one) for i in indices])


def _with_body(
    node: SBlock,
    body: tirx.Stmt,
    writes: Sequence[BufferRegion],
    alloc_buffers: Sequence[Var] | None = None,
    reads: Sequence[BufferRegion] | None = None,
) -> SBlock:
    return SBlock(
        node.iter_vars,
        node.reads if reads is None else reads,
        writes,
        node.name_hint,
        body,
        node.init,
        node.alloc_buffers if alloc_buffers is None else alloc_buffers,
        node.match_buffers,
        node.annotations,
    )


def _find(stmt: tirx.Stmt, name: str) -> SBlockRealize | None:
    found: list[SBlockRealize] = []

    def visit(realize: SBlockRealize) -> SBlockRealize:
        if realize.block.name_hint == name:
            found.append(realize)
        return realize

    tvm_ffi.structural_map(stmt, (SBlockRealize, visit))
    return found[0] if found else None


def _replace(stmt: tirx.Stmt, name: str, block: SBlock) -> tirx.Stmt:
    return tvm_ffi.structural_map(stmt, (SBlock, lambda node: block if node.name_hint == name else node))
