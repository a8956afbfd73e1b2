"""Lightning attention on x86 vectors: register-tiled products over packed panels, parallel over heads and columns.

What makes it fast, all visible in the assembly: every product is accumulated in a "local" buffer of rows x panel floats
that lives in vector registers over the whole reduction (8 to 12 of the 16 ymm), each step is one broadcast per row and
one load per panel vector, and there is no horizontal sum. Panels are packed, so the B operand of a product is one
contiguous stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call
from tvm.s_tir import Schedule

from tilewright.schedules.lightning_attention import definition
from tilewright.schedules.lowering import TRIP, strided_parameters, trip_counts
from tilewright.schedules.spaces import Decisions, Space, UnsupportedWorkload
from tilewright.schedules.targets import Target
from tilewright.schedules.workload import Workload

CAUSAL = "tilewright.causal"

# Which dimension may be assumed dense: the innermost one of the tensors, none of the index vectors.
_EXTEND_STRIDES = dict.fromkeys(("q", "k", "v", "out", "state", "state_out"), True) | dict.fromkeys(
    ("state_indices", "has_initial_state", "qo_indptr"), False
)
_DECODE_STRIDES = dict.fromkeys(("q", "k", "v", "out", "state", "state_out"), True) | {"state_indices": False}

_EXTEND_CHOICES: dict[str, tuple[int, ...]] = {
    "chunk": (32, 48, 64, 96, 128),  # tokens served by products at once; more = fewer state passes, more score work
    "panel": (8, 16, 32),  # columns of a register tile
    "rows": (2, 3, 4, 6, 8),  # token rows of a register tile: scores and outputs
    "state_rows": (2, 3, 4, 6, 8),  # state rows of a register tile
    "unroll": (1, 2, 4),  # reduction steps per loop iteration
    "columns": (32, 64, 128),  # state columns per work item: fewer = more parallel work, scores computed again for each
}
_EXTEND_DEFAULT = {"chunk": 64, "panel": 16, "rows": 4, "state_rows": 4, "unroll": 1, "columns": 128}
_EXTEND_GENERAL = {"chunk": 32, "panel": 16, "rows": 4, "state_rows": 1, "unroll": 1}

_DECODE_CHOICES: dict[str, tuple[int, ...]] = {
    "panel": (8, 16, 32, 64),  # columns of a register tile
    "rows": (1, 2, 4, 8),  # state rows walked together: one pass over the output sums for so many rows
}
_DECODE_DEFAULT = {"panel": 32, "rows": 2}
_DECODE_GENERAL = {"panel": 16, "rows": 1}


def space(workload: Workload, target: Target) -> Space:
    """The space of a lightning workload; general workloads have one legal point.

    Raises:
        UnsupportedWorkload: not a lightning operator.
    """
    if workload.operator == "lightning_extend":
        choices, default, general = dict(_EXTEND_CHOICES), dict(_EXTEND_DEFAULT), _EXTEND_GENERAL
        make, legal = _extend, _extend_legal
    elif workload.operator == "lightning_decode":
        choices, default, general = dict(_DECODE_CHOICES), dict(_DECODE_DEFAULT), _DECODE_GENERAL
        make, legal = _decode, _decode_legal
    else:
        raise UnsupportedWorkload(f"{workload.name}: lightning_x86 serves the lightning operators only")

    dk, dv = workload.head_dim_qk, workload.head_dim_vo
    if dk is None or dv is None:
        any_dk, any_dv = tirx.Var("dk", "int64"), tirx.Var("dv", "int64")
        return Space(
            choices={},
            default={},
            legal=lambda decisions: not decisions,
            module=lambda decisions: tvm.IRModule(
                {workload.operator: make(workload.dtype, any_dk, any_dv, general, target.lanes)}
            ),
            plan=lambda decisions: {},
        )
    # Columns are split only into equal parts; a head dim that none of the sizes divides has one part.
    if "columns" in choices:
        parts = tuple(n for n in choices["columns"] if dv % n == 0) or (dv,)
        choices["columns"], default["columns"] = parts, parts[-1]
    return Space(
        choices=choices,
        default=default,
        legal=lambda decisions: legal(decisions, dk, dv, target),
        module=lambda decisions: tvm.IRModule(
            {workload.operator: make(workload.dtype, dk, dv, decisions, target.lanes)}
        ),
        plan=lambda decisions: {},
    )


def _extend_legal(decisions: Decisions, dk: int, dv: int, target: Target) -> bool:
    chunk, panel, columns = decisions["chunk"], decisions["panel"], decisions["columns"]
    vectors = -(-panel // target.lanes)
    return (
        chunk % panel == 0
        and chunk % decisions["rows"] == 0
        and dk % decisions["state_rows"] == 0
        and (columns % panel == 0 or columns == dv)
        and dk % decisions["unroll"] == 0
        # Accumulators, one panel of B and a broadcast must fit in the registers, or they spill in the inner loop.
        and all(4 <= decisions[rows] * vectors <= target.registers - 4 for rows in ("rows", "state_rows"))
    )


def _decode_legal(decisions: Decisions, dk: int, dv: int, target: Target) -> bool:
    return dk % decisions["rows"] == 0 and (dv % decisions["panel"] == 0 or decisions["panel"] <= target.lanes)


def _extend(dtype: str, dk: definition.Size, dv: definition.Size, decisions: Decisions, lanes: int) -> tirx.PrimFunc:
    panel, unroll = decisions["panel"], decisions["unroll"]
    columns = decisions.get("columns")
    func = definition.lightning_extend(
        dtype, dk, dv, chunk=decisions["chunk"], panel=panel, columns=None if columns == dv else columns
    )
    sch = Schedule(strided_parameters(func, _EXTEND_STRIDES))
    block = sch.get_sblock
    full_panels = isinstance(dv, int) and dv % panel == 0
    sch.parallel(sch.fuse(*sch.get_loops(block("sequence"))))
    _vectorize_split(sch, "decay", lanes)
    p, j, e = sch.get_loops(block("v_gather"))
    sch.reorder(j, p, e)  # row by row, as the tokens lie in memory
    for name in ("load", "store", "v_gather"):
        if full_panels:
            sch.vectorize(sch.get_loops(block(name))[-1])
    if isinstance(dk, int) and dk % lanes == 0:
        for name in ("q_gather", "k_gather", "k_decay"):
            _vectorize_split(sch, name, lanes)
        p, i, d = sch.get_loops(block("q_turn"))
        (i, lane), (d, inner) = sch.split(i, [None, lanes]), sch.split(d, [None, lanes])
        sch.reorder(p, i, d, inner, lane)
        sch.unroll(inner)
        sch.vectorize(lane)

    j, p, i = sch.get_loops(block("score"))
    tiles = _tile(sch, "score", ["raw"], p, j, i, decisions["rows"], unroll, vector=True)
    sch.annotate(tiles, TRIP, "scores")
    i, p, e = sch.get_loops(block("out"))
    _tile(sch, "out", ["inter", "intra"], p, i, e, decisions["rows"], unroll, vector=full_panels)
    p, d, e = sch.get_loops(block("carry"))
    _tile(sch, "carry", ["update"], p, d, e, decisions["state_rows"], unroll, vector=True)

    def below_diagonal(kind: str, loops: list[tirx.For]) -> tirx.Expr:
        """Tiles of keys that some row of a panel sees; `intra` reads no score of the others."""
        rows = decisions["rows"]
        return (loops[-1].loop_var * panel + panel + rows - 1) // rows

    return trip_counts(causal_loops(definition.in_place(sch.mod["main"])), below_diagonal)


def _vectorize_split(sch: Schedule, name: str, lanes: int) -> None:
    sch.vectorize(sch.split(sch.get_loops(sch.get_sblock(name))[-1], [None, lanes])[1])


def _tile(
    sch: Schedule,
    consumer: str,
    products: Sequence[str],
    panel: object,
    row: object,
    lane: object,
    rows: int,
    unroll: int,
    vector: bool,
) -> object:
    """Compute `products` in registers, a tile of `rows` x one panel at a time, where `consumer` uses them.

    Returns:
        The loop over the tiles of a panel.
    """
    outer, inner = sch.split(row, [None, rows])
    sch.reorder(panel, outer, inner, lane)
    depth = len(sch.get_loops(sch.get_sblock(consumer))) - 2
    for name in products:
        block = sch.get_sblock(name)
        sch.compute_at(block, outer)
        sch.set_scope(block, 0, "local")
        *spatial, k = sch.get_loops(block)[depth:]
        if name == "intra":
            # Steps of one tile height: the last one is the diagonal, see causal_loops.
            k, step = sch.split(k, [None, rows])
            sch.annotate(k, CAUSAL, 1)
        else:
            k, step = sch.split(k, [None, unroll])
        sch.reorder(k, step, *spatial)
        sch.unroll(step)
        for loop in spatial[:-1]:
            sch.unroll(loop)
        sch.vectorize(spatial[-1])
        sch.decompose_reduction(block, k)
    sch.unroll(inner)
    if vector:
        sch.vectorize(lane)
    return outer


def causal_loops(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Cut the reductions over keys at the diagonal: half of their work, and exact for non-finite later tokens.

    A loop annotated CAUSAL runs over key tiles as high as the row tile that encloses it. Tiles before the row tile's
    own lie below the diagonal, so their condition is true; the row tile's own is the last, and once its two loops are
    unrolled the condition is a constant for each product. Tiles after it are all zero.
    """
    enclosing: list[tirx.For] = []

    def visit(loop: tirx.For, mutator: tvm_ffi.StructuralMutator) -> tirx.Stmt:
        annotations = {str(key): value for key, value in dict(loop.annotations).items()}
        if annotations.pop(CAUSAL, None) is None:
            enclosing.append(loop)
            loop = mutator.default_mutate(loop)
            enclosing.pop()
            return loop
        row_tile = enclosing[-1].loop_var
        below = tvm_ffi.structural_map(loop.body, (Call, _condition_holds))
        diagonal = tvm_ffi.structural_map(
            loop.body, (tirx.Var, lambda var: row_tile if var.same_as(loop.loop_var) else var)
        )
        return tirx.SeqStmt(
            [tirx.For(loop.loop_var, loop.min, row_tile, loop.kind, below, loop.thread_binding, annotations), diagonal]
        )

    return tvm_ffi.structural_mutate(func, (tirx.For, visit))


def _condition_holds(call: Call) -> tirx.Expr:
    return call.args[1] if call.op.name == "prim.if_then_else" else call


def _decode(dtype: str, dk: definition.Size, dv: definition.Size, decisions: Decisions, lanes: int) -> tirx.PrimFunc:
    panel = decisions["panel"]
    func = definition.lightning_decode(dtype, dk, dv, panel=panel)
    sch = Schedule(strided_parameters(func, _DECODE_STRIDES))
    block = sch.get_sblock
    full_panels = isinstance(dv, int) and dv % panel == 0
    sch.parallel(sch.fuse(*sch.get_loops(block("token"))))
    if isinstance(dk, int) and dk % lanes == 0:
        for name in ("q_gather", "k_gather"):
            _vectorize_split(sch, name, lanes)
    # One pass over the state: a tile of it is loaded, renewed, stored and multiplied by q while it is in registers.
    d, p, e = sch.get_loops(block("fresh"))
    outer, inner = sch.split(d, [None, decisions["rows"]])
    sch.reorder(outer, p, inner, e)
    for name in ("store", "read"):
        sch.reverse_compute_at(block(name), p, preserve_unit_loops=True)
    sch.set_scope(block("fresh"), 0, "local")
    rows, lane = sch.get_loops(block("store"))[-2:]
    columns, step = sch.get_loops(block("read"))[-2:]
    sch.reorder(step, columns)
    for loop in (inner, rows, step):
        sch.unroll(loop)
    sch.vectorize(columns)
    if full_panels:
        for loop in (e, lane, sch.get_loops(block("v_gather"))[-1], sch.get_loops(block("out"))[-1]):
            sch.vectorize(loop)
    sch.decompose_reduction(block("read"), outer)
    return definition.in_place(sch.mod["main"])
