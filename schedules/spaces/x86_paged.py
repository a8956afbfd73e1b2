"""Paged attention on x86 SIMD: how the stages of the definition become loops.

Extend is two register-tiled products per KV chunk, S^T = K Q^T and O = P V: the vector runs over query rows in the first and
over value columns in the second, the other operand is a broadcast scalar, so nothing is transposed but Q, once per item.
Decode has too few query rows for that: the first product runs over the head dim with a horizontal sum per (key, row), keys and
values are converted on the way and never copied.
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir, tirx

from tilewright.schedules import lowering
from tilewright.schedules.lowering import TRIP
from tilewright.schedules.paged_attention.definition import KV_BEGIN, KV_LEN, POS, PagedShape, paged_attention
from tilewright.schedules.workload import Workload

LANES = 8  # f32 lanes of a 256-bit register


def schedule_extend(workload: Workload, shape: PagedShape, decisions: dict[str, int]) -> tirx.PrimFunc:
    """The register-tiled extend kernel (see the module's text)."""
    n = decisions
    sch = s_tir.Schedule(paged_attention(workload, shape))
    items = _parallel_items(sch)
    for name in ("lse_row", "F", "acc"):
        sch.compute_at(_block(sch, name), items, preserve_unit_loops=True)

    # acc: chunk, then a register tile of rows x columns that O fills and the monoid folds in.
    row, column, chunk = sch.get_loops(_block(sch, "acc"))[-3:]
    row_o, row_i = sch.split(row, [None, n["pv_rows"]])
    column_o, column_i = sch.split(column, [None, n["pv_vectors"] * LANES])
    sch.reorder(chunk, *((row_o, column_o) if n["pv_rows_outer"] else (column_o, row_o)), row_i, column_i)
    tile = column_o if n["pv_rows_outer"] else row_o
    sch.compute_at(_block(sch, "O"), tile, preserve_unit_loops=True)
    sch.set_scope(_block(sch, "O"), 0, "local")
    o_row, o_column, o_key = sch.get_loops(_block(sch, "O"))[-3:]
    o_key_o, o_key_i = sch.split(o_key, [None, n["key_tile"]])
    sch.reorder(o_key_o, o_key_i, o_row, o_column)
    for name in ("Vf", "l", "P", "m", "X"):
        sch.compute_at(_block(sch, name), chunk, preserve_unit_loops=True)
    sch.compute_inline(_block(sch, "Vg"))

    # X: a tile of keys (gathered once), register tiles of keys x rows inside.
    key, x_row = sch.get_loops(_block(sch, "X"))[-2:]
    key_o, key_m, key_i = sch.split(key, [None, n["key_tile"] // n["qk_keys"], n["qk_keys"]])
    x_row_o, x_row_i = sch.split(x_row, [None, n["qk_vectors"] * LANES])
    sch.reorder(key_o, x_row_o, key_m, key_i, x_row_i)
    sch.compute_at(_block(sch, "S"), key_m, preserve_unit_loops=True)
    sch.set_scope(_block(sch, "S"), 0, "local")
    s_key, s_row, dim = sch.get_loops(_block(sch, "S"))[-3:]
    sch.reorder(dim, s_key, s_row)
    sch.compute_at(_block(sch, "Kf"), key_o, preserve_unit_loops=True)
    sch.compute_inline(_block(sch, "Kg"))
    for name in ("bound_lo", "bound_hi", "Qf"):
        sch.compute_at(_block(sch, name), items, preserve_unit_loops=True)
    sch.compute_inline(_block(sch, "Qg"))
    width = tirx.const(n["qk_vectors"] * LANES, "int64")
    sch.transform_layout(
        _block(sch, "Qf"), ("write", 0), lambda w, h, r, d: (w, h, r // width, d, r % width), assume_injective_transform=True
    )

    _vectorize_last(sch, "Kf", "Vf", "P", "X", "bound_lo", "bound_hi")
    sch.unroll(key_i)
    for name, unrolled, lanes in (("S", s_key, s_row), ("O", o_row, o_column)):
        del name
        sch.unroll(unrolled)
        sch.vectorize(lanes)
    sch.unroll(row_i)
    sch.vectorize(column_i)
    # Every stage over the keys of a chunk visits the same tiles: the others hold nothing.
    tiles = [key_o, o_key_o]
    p_key = sch.get_loops(_block(sch, "P"))[-3]
    tiles.append(sch.split(p_key, [None, n["key_tile"]])[0])
    for name in ("m", "l"):
        r, t = sch.get_loops(_block(sch, name))[-2:]
        tile, t = sch.split(t, [None, n["key_tile"]])
        sch.reorder(tile, t, r)
        sch.vectorize(r)
        _decompose(sch, name, tile)
        tiles.append(tile)
    _decompose(sch, "S", dim)
    _decompose(sch, "O", o_key_o)
    _decompose(sch, "acc", chunk)
    sch.annotate(chunk, TRIP, "chunks")
    for tile in tiles:
        sch.annotate(tile, TRIP, f"keys:{n['key_tile']}")
    return _trips(sch, shape)


def _block(sch: s_tir.Schedule, name: str) -> Any:
    return sch.get_sblock(name)


def _parallel_items(sch: s_tir.Schedule) -> Any:
    w, h = sch.get_loops(_block(sch, "store"))
    fused = sch.fuse(w, h)
    sch.parallel(fused)
    return fused


def _vectorize_last(sch: s_tir.Schedule, *names: str) -> None:
    for name in names:
        last = sch.get_loops(_block(sch, name))[-1]
        extent = sch.get(last).extent
        if int(extent) > LANES and int(extent) % LANES == 0:
            last = sch.split(last, [None, LANES])[1]
        sch.vectorize(last)


def _decompose(sch: s_tir.Schedule, name: str, loop: Any) -> None:
    init = sch.decompose_reduction(_block(sch, name), loop)
    last = sch.get_loops(init)[-1]
    if sch.get(last).kind == tirx.ForKind.SERIAL:
        sch.vectorize(last)


def _trips(sch: s_tir.Schedule, shape: PagedShape) -> tirx.PrimFunc:
    """Run each item's own number of chunks, and of key tiles in its last chunk."""
    func = lowering.inline_reducer_bindings(sch.mod["main"])
    items = next(p for p in func.params if p.name == "items")
    window = next(p for p in func.params if p.name == "window")
    chunk_keys = tirx.const(shape.chunk, "int32")

    def count(kind: str, enclosing: list[tirx.For]) -> tirx.Expr:
        w = tirx.floordiv(enclosing[0].loop_var, shape.num_kv_heads)
        before = tirx.max(items[w, POS] - window + 1 - items[w, KV_BEGIN], 0)
        keys = tirx.max(items[w, KV_LEN] - tirx.floordiv(before, chunk_keys) * chunk_keys, 0)
        if kind == "chunks":
            return tirx.floordiv(keys + (chunk_keys - 1), chunk_keys)
        tile = int(kind.split(":")[1])
        chunk = next(loop.loop_var for loop in enclosing if dict(loop.annotations).get(TRIP) == "chunks")
        left = keys - chunk.astype("int32") * chunk_keys
        return tirx.floordiv(left + (tile - 1), tirx.const(tile, "int32"))

    return lowering.trip_counts(func, count)
