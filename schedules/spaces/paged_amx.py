"""Paged attention in bf16 on Intel AMX: how the stages of the definition become loops.

Both products of a KV chunk are `tdpbf16ps`. The scores are S^T = K Q^T: gathered key rows are the left operand as they
lie, Q is laid out in pairs of dimensions once per item. The values are O = P V: the probabilities are rounded to bf16
and transposed on the way (16 x 32 at a time, by shuffles), value rows are interleaved in pairs as they are gathered.

An item's query rows are walked in blocks. A chunk of keys is a two-pass softmax for each block: its scores and maxima
tile by tile of keys, then probabilities, their sums and their transposes likewise, so that a tile is in the nearest
cache for all that is done to it, then values. Chunks are folded row by row. Where there are several blocks (extend),
the chunk's keys and values are gathered once for all of them, and a product of values keeps its sums in tile registers
over the whole chunk; where there is one (decode), they are gathered in the loops of the products.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
import tvm_ffi
from tvm import DataType, s_tir, tirx
from tvm.ir.expr import TensorLoad, Var
from tvm.s_tir import SBlock, SBlockRealize

from tilewright.schedules import lowering
from tilewright.schedules.e4m3 import HALF_UNIT
from tilewright.schedules.intrinsics import amx
from tilewright.schedules.lowering import PREFETCH, TRIP
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
    paged_attention,
)
from tilewright.schedules.softmax_rows import fold_by_row
from tilewright.schedules.spaces import Decisions, Space, UnsupportedWorkload
from tilewright.schedules.targets import Target
from tilewright.schedules.tile_loops import walk_together
from tilewright.schedules.vector_math import reinterpret
from tilewright.schedules.workload import Workload

LANES = 16  # f32 lanes of a 512-bit register
HALVES = 32  # bf16 in one
MOST_GROUP = 64
VISIBLE = "tilewright.visible"  # on a loop over scores of one tile
CHAINS = 4  # vectors whose maxima or sums grow side by side: one alone would wait for its own last step


def space(workload: Workload, target: Target) -> Space:
    """The space of a specialised bf16 kernel.

    Raises:
        UnsupportedWorkload: another dtype, a general kernel, or head dims that do not fill tiles.
    """
    if not workload.operator.startswith("paged") or workload.dtype != "bf16" or workload.general:
        raise UnsupportedWorkload(f"{workload.name} for {target.name}: tiles serve specialised paged attention in bf16")
    group, (dim, dim_vo) = _group(workload), _dims(workload)
    if dim % 16 or dim_vo % 16 or group > MOST_GROUP or workload.tree:
        raise UnsupportedWorkload(
            f"{workload.name} for {target.name}: tiles take head dims in multiples of 16, a group of at most "
            f"{MOST_GROUP}, no tree of drafts"
        )

    def plan(n: Decisions) -> dict[str, int]:
        bounds = {"min_split": n["chunk"]}
        if "max_split" in n:
            bounds = {"min_split": min(n["max_split"] or 256, 256), "max_split": n["max_split"]}
        return {"block_q": _tokens(workload, n), "chunk": n["chunk"], **bounds}

    return Space(
        choices=choices(workload),
        default=default(workload),
        legal=lambda decisions: legal(workload, decisions),
        module=lambda decisions: tvm.IRModule({workload.operator: schedule(workload, decisions)}),
        plan=plan,
    )


def choices(workload: Workload) -> dict[str, tuple[int, ...]]:
    """The named decisions and their values.

    rows: query rows of an item (its tokens times the group, filled up). block_rows: of them, those whose softmax is
    done at a time. chunk: keys per softmax chunk. qk_keys, qk_rows: keys and query rows of one product of scores.
    pv_keys, pv_rows, pv_columns: keys, query rows and value columns of one product of values. prefetch_k, prefetch_v:
    keys between a row's prefetch and its copy, 0 = none. prefetch_level: the cache it goes to. prefetch_across: while
    keys are copied, ask for the same chunk's values; while values are, for the next chunk's keys. max_split: see the
    planner. qk_ahead, pv_ahead: products ask for the keys of the next one, and for values so many steps of 32 ahead.
    """
    decode = workload.operator == "paged_decode"
    rows = (_filled(_group(workload)),) if decode else (64, 128, 256, 512, 1024)
    return {
        "rows": rows,
        "block_rows": rows if decode else (16, 32, 64, 128),
        "chunk": (64, 128, 256, 512) if decode else (128, 256, 512),
        "qk_keys": (16, 32, 64),
        "qk_rows": (16, 32),
        "pv_keys": (32, 64, 128) if decode else (32, 64, 128, 256),
        "pv_rows": (16, 32),
        "pv_columns": tuple(n for n in (16, 32, 64) if _dims(workload)[1] % n == 0),
        "prefetch_k": (0, 8, 16, 32, 64),
        "prefetch_v": (0, 8, 16, 32, 64, 128),
        "prefetch_level": (1, 2),
        "prefetch_across": (0, 1),
    } | ({"max_split": (0, 256, 512, 1024)} if decode else {"qk_ahead": (0, 1), "pv_ahead": (0, 1, 2, 4)})


def default(workload: Workload) -> dict[str, int]:
    """The untuned schedule: what the searches of the common shapes found, as far as they agree."""
    common = {
        "qk_rows": 16,
        "pv_keys": 64,
        "pv_rows": 16,
        "prefetch_k": 16,
        "prefetch_level": 2,
    }
    if workload.operator == "paged_decode":
        rows = choices(workload)["rows"][0]
        latent = _dims(workload)[1] < _dims(workload)[0]  # values that are a part of the keys come with them
        return common | {
            "rows": rows,
            "block_rows": rows,
            "chunk": 256,
            "qk_keys": 16,
            "pv_columns": 32 if latent else 16,
            "prefetch_v": 16 if latent else 64,
            "prefetch_across": 0,
            "max_split": 512 if latent else 0,
        }
    dim, dim_vo = _dims(workload)
    return common | {
        "rows": 256,
        "block_rows": 32,
        "chunk": 512,
        "qk_keys": 32,
        "qk_rows": 32 if dim % HALVES == 0 else 16,  # half tiles want registers of their own
        "pv_rows": 32,
        "pv_columns": 32 if dim_vo % 32 == 0 else 16,
        "prefetch_v": 16,
        "prefetch_level": 1,
        "prefetch_across": 1,
        "qk_ahead": 0,
        "pv_ahead": 1,
    }


def legal(workload: Workload, decisions: Decisions) -> bool:
    """Whether the decisions are values of `choices` that fit each other and the eight tile registers."""
    n = decisions
    values = choices(workload)
    if set(n) != set(values) or any(n[name] not in values[name] for name in n):
        return False
    if n["rows"] % n["block_rows"] or n["block_rows"] % n["qk_rows"] or n["block_rows"] % n["pv_rows"]:
        return False
    if n["chunk"] % max(n["qk_keys"], n["pv_keys"]) or _tokens(workload, n) < 1:
        return False
    scores = n["qk_keys"], n["qk_rows"], _dims(workload)[0]
    return amx.products_fit(scores, (n["pv_rows"], n["pv_columns"], n["pv_keys"]))


def schedule(workload: Workload, decisions: Decisions) -> tirx.PrimFunc:
    """The kernel for `decisions`."""
    n = decisions
    rows, block_rows = n["rows"], n["block_rows"]
    dim, dim_vo = _dims(workload)
    one_block = rows == block_rows
    # Every stage visits the same tiles of keys, as many as the item has: what lies behind them is never written.
    tile_keys = max(n["qk_keys"], n["pv_keys"])
    shape = PagedShape.of(workload, _tokens(workload, n), n["chunk"], rows)
    sch = s_tir.Schedule(paged_attention(workload, shape))
    score, value = sch.get_sblock("S"), sch.get_sblock("O")
    if workload.operator == "paged_decode":
        sch.compute_inline(sch.get_sblock("slot"))

    # Operands: the casts belong to the products, the copies get the layouts that tiles want.
    sch.compute_inline(sch.get_sblock("Qf"))
    copies = _copies(workload)
    for name in copies:
        other = {"g": "f", "f": "g"}[name[1]]
        sch.compute_inline(sch.get_sblock(name[0] + other))
        if workload.kv_dtype is not None:
            sch.unsafe_set_dtype(sch.get_sblock(name), 0, "bfloat16")
    keys, values = (sch.get_sblock(name) for name in copies)
    width = n["qk_rows"]
    queries = sch.cache_read(score, 1, "global")
    sch.transform_layout(queries, ("write", 0), lambda w, h, r, d: (w, h, r // width, d // 2, r % width, d % 2))
    probabilities = sch.cache_read(value, 0, "global", consumer_blocks=[value])
    sch.unsafe_set_dtype(probabilities, 0, "bfloat16")
    sch.transform_layout(probabilities, ("write", 0), lambda w, h, c, t, r: (w, h, c, r, t))
    pairs = sch.cache_read(value, 1, "global")
    sch.transform_layout(pairs, ("write", 0), lambda w, h, c, t, e: (w, h, c, t // 2, e, t % 2))
    partial = {name: _side_by_side(sch, name, tile_keys, block_rows) for name in ("m", "l")}

    items = sch.fuse(*sch.get_loops(sch.get_sblock("store")))
    sch.parallel(items)
    for name in ("lse_row", "F", "sink", "acc"):
        sch.compute_at(sch.get_sblock(name), items, preserve_unit_loops=True)
    row, column, chunk = sch.get_loops(sch.get_sblock("acc"))[-3:]
    block, row = sch.split(row, [None, block_rows])
    sch.reorder(chunk, block, row, column)

    sch.compute_at(value, block, preserve_unit_loops=True)
    r, e, t = sch.get_loops(value)[-3:]
    e_o, e = sch.split(e, [None, n["pv_columns"]])
    r_o, pv_product = sch.split(r, [None, n["pv_rows"]])
    if one_block:
        pv_tile, pv_step, t = sch.split(t, [None, tile_keys // n["pv_keys"], n["pv_keys"]])
        sch.reorder(pv_tile, pv_step, e_o, r_o, pv_product, e, t)
        sch.compute_at(probabilities, pv_step, preserve_unit_loops=True)
        sch.compute_at(pairs, pv_step, preserve_unit_loops=True)
    else:
        sch.reorder(e_o, r_o, pv_product, e, t)
        sch.compute_at(probabilities, block, preserve_unit_loops=True)
        sch.compute_at(pairs, chunk, preserve_unit_loops=True)
    for stage in (sch.get_sblock("l"), partial["l"], sch.get_sblock("P"), sch.get_sblock("m"), partial["m"]):
        sch.compute_at(stage, block, preserve_unit_loops=True)
    sch.compute_at(sch.get_sblock("X"), block, preserve_unit_loops=True)

    x_key = sch.get_loops(sch.get_sblock("X"))[-2]
    qk_tile, qk_step, x_key = sch.split(x_key, [None, tile_keys // n["qk_keys"], n["qk_keys"]])
    sch.annotate(x_key, VISIBLE, 1)
    sch.compute_at(score, qk_step, preserve_unit_loops=True)
    sch.compute_at(keys, qk_step if one_block else chunk, preserve_unit_loops=True)
    for stage in (*(sch.get_sblock(name) for name in ("bound_lo", "bound_hi")), queries, sch.get_sblock("Qg")):
        sch.compute_at(stage, items, preserve_unit_loops=True)
    qk_product, r, d = sch.get_loops(score)[-3:]
    r_o, r = sch.split(r, [None, n["qk_rows"]])
    sch.reorder(r_o, qk_product, r, d)

    p_key = sch.get_loops(sch.get_sblock("P"))[-2]
    tiles = [qk_tile, sch.split(p_key, [None, tile_keys])[0]]
    if one_block:
        tiles.append(pv_tile)
    else:
        tile, t = sch.split(sch.get_loops(probabilities)[-2], [None, tile_keys])
        tiles.append(tile)
    key, pair = sch.get_loops(keys)[-2], sch.get_loops(pairs)[-2]
    if not one_block:
        tile, key = sch.split(key, [None, tile_keys])
        tiles.append(tile)
        tile, pair = sch.split(pair, [None, tile_keys])
        tiles.append(tile)
    pair, two = sch.split(pair, [None, 2])
    sch.compute_at(values, pair, preserve_unit_loops=True)
    sch.annotate(key, PREFETCH, 1)
    sch.annotate(pair, PREFETCH, 1)

    for stage, columns in ((keys, dim), (values, dim_vo), (sch.get_sblock("Qg"), dim)):
        _vectorize(sch, HALVES if columns % HALVES == 0 else HALVES // 2, stage)
    if workload.kv_dtype is None:  # the conversion binds variables, which a function may do once
        sch.unroll(sch.get_loops(values)[-3])
    _vectorize(sch, LANES, *(sch.get_sblock(name) for name in ("P", "X", "bound_lo", "bound_hi", "F", "lse_row")))
    for name, chains in partial.items():
        chain, *outer, r, tile, t = sch.get_loops(chains)[-7:]
        vectors, lane = sch.split(r, [None, LANES])
        sch.reorder(*outer, tile, t, chain, vectors, lane)
        for unrolled in (chain, vectors):
            sch.unroll(unrolled)
        sch.vectorize(lane)
        _vectorize(sch, LANES, sch.decompose_reduction(chains, tile))
        tiles.append(tile)
        joined = sch.get_sblock(name)
        _vectorize(sch, LANES, joined)
        _vectorize(sch, LANES, sch.decompose_reduction(joined, sch.get_loops(joined)[-6]))

    sch.tensorize(two, amx.interleave_rows(dim_vo))
    _tensorize(sch, probabilities, (HALVES, amx.TILE_ROWS), amx.transpose_to_bf16())
    depth = HALVES if dim % HALVES == 0 else HALVES // 2
    _tensorize(sch, queries, (amx.TILE_ROWS, depth), amx.interleave_columns(depth))
    init = sch.decompose_reduction(score, qk_product)
    sch.tensorize(sch.get_loops(init)[-2], amx.omitted_init(n["qk_keys"], n["qk_rows"]))
    sch.tensorize(
        qk_product, amx.bf16_product(n["qk_keys"], n["qk_rows"], dim, fresh=True, ahead=bool(n.get("qk_ahead", 0)))
    )
    if one_block:
        init = sch.decompose_reduction(value, pv_tile)
        sch.tensorize(sch.get_loops(init)[-2], amx.zeroed(n["pv_rows"], n["pv_columns"]))
        sch.tensorize(pv_product, amx.bf16_product(n["pv_rows"], n["pv_columns"], n["pv_keys"]))
    else:
        init = sch.decompose_reduction(value, pv_product)
        sch.tensorize(sch.get_loops(init)[-2], amx.omitted_init(n["pv_rows"], n["pv_columns"]))
        sch.tensorize(
            pv_product, amx.bf16_product_over(n["pv_rows"], n["pv_columns"], n["chunk"], tile_keys, n["pv_ahead"])
        )
    _vectorize(sch, LANES, sch.get_sblock("acc"))
    _vectorize(sch, LANES, sch.decompose_reduction(sch.get_sblock("acc"), chunk))

    sch.annotate(chunk, TRIP, "chunks")
    sch.annotate(block, TRIP, "rows")
    for tile in tiles:
        sch.annotate(tile, TRIP, "keys")
    return _finish(sch.mod["main"], workload, shape, n)


def _finish(func: tirx.PrimFunc, workload: Workload, shape: PagedShape, decisions: Decisions) -> tirx.PrimFunc:
    """The passes after scheduling: fold by row, masks, prefetches, each item's own numbers of chunks, rows and keys."""
    n = decisions
    if workload.kv_dtype is not None:
        func = tvm_ffi.structural_map(func, (SBlock, lambda block: _rounded_by_bits(block, _copies(workload))))
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
    group = tirx.const(_group(workload), "int64")
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
    group = tirx.const(_group(workload), "int64")
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
    keys = block.name_hint == _copies(workload)[0]

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


def _copies(workload: Workload) -> tuple[str, str]:
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


def _side_by_side(sch: s_tir.Schedule, name: str, tile_keys: int, block_rows: int) -> Any:
    """Reduce over keys in chains (one, if a block has rows enough) that are joined at the end; the chains' block."""
    chains = max(1, CHAINS * LANES // block_rows)
    key = sch.get_loops(sch.get_sblock(name))[-1]
    _, _, chain = sch.split(key, [None, tile_keys // chains, chains])
    return sch.rfactor(chain, 3)


def _filled(group: int) -> int:
    return -(-group // amx.TILE_ROWS) * amx.TILE_ROWS


def _tokens(workload: Workload, decisions: Decisions) -> int:
    """Most query tokens of an item."""
    return 1 if workload.operator == "paged_decode" else decisions["rows"] // _group(workload)


def _group(workload: Workload) -> int:
    assert workload.group is not None
    return workload.group


def _dims(workload: Workload) -> tuple[int, int]:
    assert workload.head_dim_qk is not None and workload.head_dim_vo is not None
    return workload.head_dim_qk, workload.head_dim_vo


def _tensorize(sch: s_tir.Schedule, copy: Any, sizes: tuple[int, int], intrinsic: str) -> None:
    """Replace blocks of sizes[0] x sizes[1] iterations of a copy's last two loops."""
    outer, inner = sch.get_loops(copy)[-2:]
    outer_o, outer_i = sch.split(outer, [None, sizes[0]])
    inner_o, inner_i = sch.split(inner, [None, sizes[1]])
    sch.reorder(outer_o, inner_o, outer_i, inner_i)
    sch.tensorize(outer_i, intrinsic)


def _vectorize(sch: s_tir.Schedule, lanes: int, *blocks: Any) -> None:
    """Vectorise the last loop of each block, `lanes` at a time (they divide its extent)."""
    for block in blocks:
        sch.vectorize(sch.split(sch.get_loops(block)[-1], [None, lanes])[1])
