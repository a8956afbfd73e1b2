"""Let stages that walk the same tiles of keys walk them together: a pass over scheduled paged attention.

A schedule moves a producer into its consumer's loop, never two consumers of one stage into one loop: maximum and
scores, or sums and rounded probabilities, are loops one behind the other, and what the first leaves has gone from the
nearest cache when the next comes for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock

from tilewright.schedules.lowering import TRIP, substitute


def walk_together(func: tirx.PrimFunc, *groups: Sequence[str]) -> tirx.PrimFunc:
    """Make one loop over tiles of keys out of the loops of each group.

    Args:
        func: the scheduled function. In the body of its loop annotated `TRIP: "rows"`, each block named is in a
            statement of its own: loops of one iteration around a loop annotated `TRIP: "keys"`, and ahead of that,
            where the stage reduces over keys, its start.
        groups: names of blocks in the order of their statements. The loop takes the place of the first, each tile's
            stages in that order. Sound where a tile of a later stage needs nothing but that tile of the earlier ones.

    Returns:
        The function; what a group alone reads of a stage shrinks to one tile when buffers are compacted.

    Raises:
        ValueError: a block is not where it should be.
    """

    def visit(loop: tirx.For, mutator: tvm_ffi.StructuralMutator) -> tirx.Stmt:
        if dict(loop.annotations).get(TRIP) != "rows":
            return mutator.default_mutate(loop)
        statements = list(loop.body.seq)
        for group in groups:
            places = [_place(statements, name) for name in group]
            starts: list[tirx.Stmt] = []
            parts = [_tile_loop(statements[place], starts) for place in places]
            first = parts[0]
            bodies = [first.body] + [substitute(part.body, {part.loop_var: first.loop_var}) for part in parts[1:]]
            together = tirx.For(
                first.loop_var, first.min, first.extent, first.kind, tirx.SeqStmt(bodies), None, first.annotations
            )
            for place in places:
                statements[place] = None
            statements[places[0]] = tirx.SeqStmt([*starts, together]) if starts else together
            statements = [statement for statement in statements if statement is not None]
        return tirx.For(
            loop.loop_var,
            loop.min,
            loop.extent,
            loop.kind,
            tirx.SeqStmt(statements),
            loop.thread_binding,
            loop.annotations,
        )

    return tvm_ffi.structural_mutate(func, (tirx.For, visit))


def _place(statements: Sequence[tirx.Stmt], name: str) -> int:
    """The statement that holds the block."""
    for place, statement in enumerate(statements):
        found: list[str] = []

        def visit(block: SBlock, found: list[str] = found) -> SBlock:
            found.append(block.name_hint)
            return block

        tvm_ffi.structural_map(statement, (SBlock, visit))
        if name in found:
            return place
    raise ValueError(f"walk_together: no statement of the loop over rows holds the block {name}")


def _tile_loop(statement: tirx.Stmt, starts: list[tirx.Stmt]) -> tirx.For:
    """The statement's loop over tiles; what comes ahead of it is added to `starts`."""
    at: dict[tirx.Var, tirx.Expr] = {}
    while True:
        if isinstance(statement, tirx.SeqStmt):
            *ahead, statement = list(statement.seq)
            starts += [substitute(part, at) for part in ahead]
        if not isinstance(statement, tirx.For):
            raise ValueError(f"walk_together: expected loops around a loop over tiles of keys, got {statement}")
        if dict(statement.annotations).get(TRIP) == "keys":
            return substitute(statement, at)
        if not (isinstance(statement.extent, tirx.IntImm) and int(statement.extent) == 1):
            raise ValueError(f"walk_together: expected loops of one iteration, got {statement}")
        at[statement.loop_var] = tirx.const(0, str(statement.loop_var.ty.dtype))
        statement = statement.body
