"""The passes after scheduling of paged attention on tiles: fold, tile loops, masks, prefetches, counts of each item."""

from __future__ import annotations

import math
from typing import Any

import tvm_ffi
from tvm import DataType, tirx
from tvm.ir.expr import TensorLoad, Var
from tvm.s_tir import SBlock, SBlockRealize

from tilewright.schedules import lowering
from tilewright.schedules.e4m3 import HALF_UNIT
from tilewright.schedules.intrinsics import amx
from tilewright.schedules.lowering import TRIP
from tilewright.schedules.paged_attention.definition import (
    KV_BEGIN,
    KV_LEN,
    NEW_ROW,
    PART,
    POS,
    PREFIX,
    Q_LEN,
    REQUEST,
    PagedShape,
    PageTable,
)
from tilewright.schedules.softmax_rows import fold_by_row
from tilewright.schedules.spaces import Decisions
from tilewright.schedules.tile_loops import walk_together
from tilewright.schedules.vector_math import reinterpret
from tilewright.schedules.workload import Workload

LANES = 16  # f32 lanes of a 512-bit register
VISIBLE = "tilewright.visible"  # on a loop over scores of one tile


def finish(func: tirx.PrimFunc, workload: Workload, shape: PagedShape, decisions: Decisions) -> tirx.PrimFunc:
    """The passes after scheduling: fold by row, masks, prefetches, each item's own numbers of chunks, rows and keys."""
    n = decisions
    if workload.kv_dtype is not None:
        func = tvm_ffi.structural_map(func, (SBlock, lambda block: _rounded_by_bits(block, copies(workload))))
    func = fold_by_row(func, lanes=LANES)
    if n["rows"] == n["block_rows"]:
        func = lowering.in_place(func, "X", "P")
    else:
        func = walk_together(func, ("X", "m_rf_update"), ("P", "P_global_o", "l_rf_update"))
    buffers = {p.name: p for p in func.params}
    items = buffers["items"]
    chunk_keys, block_rows, tile_keys = (
        tirx.const(size, "int64") for size in (n["chunk"], n["block_rows"], max(n["qk_keys"], n["pv_keys"]))
    )
    group = tirx.const(group_of(workload), "int64")
    table = PageTable.of(buffers, chunk_keys)

    def count(kind: str, loops: list[tirx.For]) -> tirx.Expr:
        w = tirx.floordiv(loops[0].loop_var, shape.num_kv_heads)

        def item(column: int) -> tirx.Expr:
            return items[w, column].astype("int64")

        if kind == "rows":
            return tirx.floordiv(item(Q_LEN) * group + (block_rows - 1), block_rows)
        keys = item(KV_LEN) - table.skipped_chunks(w) * chunk_keys
        if kind == "chunks":
            return tirx.floordiv(tirx.max(keys, 0) + (chunk_keys - 1), chunk_keys)
        kinds = {str(dict(loop.annotations).get(TRIP)): loop.loop_var for loop in loops}
        keys = keys - kinds["chunks"] * chunk_keys
        if "rows" in kinds and n["rows"] != n["block_rows"]:
            # What the last token of the block sees, of the chunk's keys.
            token = tirx.floordiv(kinds["rows"] * block_rows + (block_rows - 1), group)
            last = item(POS) + token + buffers["lookahead"].astype("int64") - item(KV_BEGIN)
            keys = tirx.min(keys, last + 1 - table.offset(w, kinds["chunks"], tirx.const(0, "int64")))
        return tirx.max(tirx.floordiv(keys + (tile_keys - 1), tile_keys), 0)

    func = tvm_ffi.structural_mutate(
        func, (tirx.For, lambda loop, mutator: _masked_where_needed(loop, mutator, buffers, table, workload))
    )
    func = lowering.prefetches(func, lambda _, loops: _ask_ahead(buffers, table, workload, n, loops))
    func = amx.product_loops(lowering.trip_counts(func, count, exact=("chunks",)))
    return _bind_item(func, buffers, shape)


def copies(workload: Workload) -> tuple[str, str]:
    """The stages that gather keys and values as bf16: rows as they lie, or what the codes of an fp8 pool stand for.

    Decode's are exact, in units that the scores make up for; in extend, where a row may be of the new tokens, a pool's
    rows have their scale and are rounded to bf16.
    """
    return ("Kf", "Vf") if workload.kv_dtype is not None and workload.operator == "paged_decode" else ("Kg", "Vg")


def _rounded_by_bits(block: SBlock, names: tuple[str, ...]) -> SBlock:
    """Let the blocks of those names round to bf16 by one addition, halves away from zero.

    TVM rounds by an expression that repeats the value, in which a variable must not be bound.
    """
    if block.name_hint not in names:
        return block

    def upper_half(cast: tirx.Cast) -> tirx.Expr:
        if str(cast.ty.dtype) != "bfloat16":
            return cast
        word = lambda value: tirx.const(value, "uint32")  # noqa: E731
        bits = reinterpret("uint32", cast.value) + word(0x8000)
        return reinterpret("bfloat16", tirx.shift_right(bits, word(16)).astype("uint16"))

    return tvm_ffi.structural_map(block, (tirx.Cast, upper_half))


def _bind_item(func: tirx.PrimFunc, buffers: dict[str, Any], shape: PagedShape) -> tirx.PrimFunc:
    """Read an item's columns, table row and start once: LLVM cannot know that no store of the kernel changes them."""

    def visit(loop: tirx.For, mutator: tvm_ffi.StructuralMutator) -> tirx.Stmt:
        if loop.kind != tirx.ForKind.PARALLEL:
            return mutator.default_mutate(loop)
        w = tirx.floordiv(loop.loop_var, shape.num_kv_heads)
        binds: list[tirx.Stmt] = []

        def bind(name: str, value: tirx.Expr) -> Var:
            binds.append(tirx.Bind(tirx.Var(name, "int32"), value))
            return binds[-1].var

        load = lambda name, *indices: tirx.BufferLoad(buffers[name], list(indices))  # noqa: E731
        columns = [bind(f"item_{n}", load("items", w, tirx.const(n, "int64"))) for n in range(PART + 1)]
        request = columns[REQUEST].astype("int64")
        whole = {name: bind(name, load(name, request)) for name in ("req_pool_indices", "kv_start")}

        def bound(access: TensorLoad) -> tirx.Expr:
            name = access.source.name
            if name == "items":
                return columns[int(access.indices[1])]
            return whole.get(name, access)

        return tirx.For(
            loop.loop_var, loop.min, loop.extent, loop.kind,
            tirx.SeqStmt([*binds, tvm_ffi.structural_map(loop.body, (TensorLoad, bound))]),
            loop.thread_binding, loop.annotations,
        )  # fmt: skip

    return tvm_ffi.structural_mutate(func, (tirx.For, visit))


def _masked_where_needed(
    loop: tirx.For,
    mutator: tvm_ffi.StructuralMutator,
    buffers: dict[str, Any],
    table: PageTable,
    workload: Workload,
) -> tirx.Stmt:
    """Leave the masks out for a tile that every row sees whole, where there is no cap either."""
    if VISIBLE not in dict(loop.annotations):
        return mutator.default_mutate(loop)
    loop = tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, loop.body, loop.thread_binding, {})
    at, block, loops = _first_point(loop)
    keys, rows = int(loops[0].extent), math.prod(int(inner.extent) for inner in loops[1:])
    items, w, r = table.items, at["v_w"], at["v_r"]
    group = tirx.const(group_of(workload), "int64")
    token = lambda row: tirx.floordiv(row, group).astype("int32")  # noqa: E731
    first = items[w, KV_BEGIN] + table.offset(w, at["v_c"], at["v_t"]).astype("int32")
    last_seen = tirx.min(items[w, POS] + token(r) + buffers["lookahead"], items[w, KV_BEGIN] + items[w, KV_LEN] - 1)
    whole = tirx.And(
        tirx.And(first > items[w, POS] + token(r + (rows - 1)) - table.window, first + (keys - 1) <= last_seen),
        buffers["cap_log2"] <= 0.0,
    )
    store = block.body
    scores = next(part.source for part in block.reads if part.source.name == "S")
    scale = buffers["scale_log2"]
    if workload.kv_dtype is not None and workload.operator == "paged_decode":
        scale = scale * (buffers["k_scale"] * tirx.const(HALF_UNIT, "float32"))
    scaled = tirx.BufferLoad(scores, store.indices) * scale
    reads = [part for part in block.reads if part.source.same_as(scores)]
    plain = SBlock(
        block.iter_vars, reads, block.writes, "X_whole", tirx.BufferStore(store.buffer, scaled, store.indices)
    )
    # Both ways define loop variables and axes, which a function may do once.
    defined = [*(axis.var for axis in block.iter_vars), *(inner.loop_var for inner in loops)]
    renamed = {var: tirx.Var(var.name, str(var.ty.dtype)) for var in defined}
    unmasked = tvm_ffi.structural_map(loop, (SBlock, lambda _: plain))
    return tirx.IfThenElse(whole, lowering.substitute(unmasked, renamed), loop)


def _first_point(stmt: tirx.Stmt) -> tuple[dict[str, tirx.Expr], SBlock, list[tirx.For]]:
    """The first block in some loops, those loops, and the values of its axes in their first iteration."""
    loops = []
    while not isinstance(stmt, SBlockRealize):
        if isinstance(stmt, tirx.SeqStmt):
            stmt = stmt[0]
        else:
            loops.append(stmt)
            stmt = stmt.body
    start = {loop.loop_var: tirx.const(0, "int64") for loop in loops}
    axes = zip(stmt.block.iter_vars, stmt.iter_values, strict=True)
    return {axis.var.name: lowering.substitute(value, start) for axis, value in axes}, stmt.block, loops


def _ask_ahead(
    buffers: dict[str, Any], table: PageTable, workload: Workload, decisions: Decisions, loops: list[tirx.For]
) -> tirx.Stmt:
    """The prefetches of one iteration of a copy of keys or values."""
    n = decisions
    at, block, _ = _first_point(loops[-1].body)
    w, h, c, t, _ = at.values()
    keys = block.name_hint == copies(workload)[0]

    def row(source: str, offset: tirx.Expr) -> tirx.Stmt:
        position = table.position(w, offset)
        buffer = buffers[f"{source}_buffer"]
        lines = _lines(buffer, table.slot(w, position), h, n["prefetch_level"])
        if workload.operator == "paged_decode":
            return lines
        fresh = position + table.items[w, NEW_ROW].astype("int64")
        return tirx.IfThenElse(
            position < table.items[w, PREFIX].astype("int64"),
            lines,
            _lines(buffers[f"{source}_new"], fresh, h, n["prefetch_level"]),
        )

    hints = []
    for more in range(1 if keys else 2):
        here = table.offset(w, c, t + more)
        if distance := n["prefetch_k" if keys else "prefetch_v"]:
            hints.append(row("k" if keys else "v", here + distance))
        if n["prefetch_across"]:
            hints.append(row("v", here) if keys else row("k", here + table.chunk))
    return _sequence(hints)


def _lines(buffer: Any, row: tirx.Expr, head: tirx.Expr, level: int) -> tirx.Stmt:
    per_line = lowering.CACHE_LINE // DataType(buffer.dtype).itemsize
    columns = range(0, int(buffer.shape[-1]), per_line)
    return _sequence([lowering.prefetch_line(buffer, [row, head, tirx.const(x, "int64")], level) for x in columns])


def _sequence(statements: list[tirx.Stmt]) -> tirx.Stmt:
    """All of them, be they none or one (TVM wants at least two in a SeqStmt)."""
    if len(statements) < 2:
        return statements[0] if statements else tirx.Evaluate(0)
    return tirx.SeqStmt(statements)


def group_of(workload: Workload) -> int:
    """Query heads per KV head of a specialised workload."""
    assert workload.group is not None
    return workload.group
