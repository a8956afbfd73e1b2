"""What the schedules of paged attention for vectors share: their loops, and the passes after scheduling."""

from __future__ import annotations

from typing import Any

from tvm import DataType, s_tir, tirx

from tilewright.schedules import lowering
from tilewright.schedules.lowering import TRIP
from tilewright.schedules.paged_attention.definition import KV_LEN, PagedShape, PageTable
from tilewright.schedules.softmax_rows import fold_by_row
from tilewright.schedules.workload import Workload

BUFFER = "tilewright.prefetch_buffer"


def block(sch: s_tir.Schedule, name: str) -> Any:
    """The block of that name."""
    return sch.get_sblock(name)


def parallel_items(sch: s_tir.Schedule) -> Any:
    """Items and KV heads as one parallel loop, outermost; `finish` reads its variable."""
    sch.compute_inline(block(sch, "sink"))
    w, h = sch.get_loops(block(sch, "store"))
    fused = sch.fuse(w, h)
    sch.parallel(fused)
    return fused


def row_stages(workload: Workload) -> tuple[str, ...]:
    """The blocks that are computed once an item for its query rows."""
    return ("bound_lo", "bound_hi", *(("token",) if workload.tree else ()), "Qf")


def vectorize_last(sch: s_tir.Schedule, lanes: int, *names: str) -> None:
    """Make the innermost loops of blocks vectors, of one register each where they are longer."""
    for name in names:
        last = sch.get_loops(block(sch, name))[-1]
        extent = sch.get(last).extent
        if int(extent) > lanes and int(extent) % lanes == 0:
            last = sch.split(last, [None, lanes])[1]
        sch.vectorize(last)


def decompose(sch: s_tir.Schedule, name: str, loop: Any) -> None:
    """Initialise a reduction ahead of `loop`, with vectors."""
    init = sch.decompose_reduction(block(sch, name), loop)
    last = sch.get_loops(init)[-1]
    if sch.get(last).kind == tirx.ForKind.SERIAL:
        sch.vectorize(last)


def finish(func: tirx.PrimFunc, shape: PagedShape, lanes: int) -> tirx.PrimFunc:
    """The passes after scheduling: the fold of chunks, each item's own number of chunks and key tiles, prefetch."""
    func = fold_by_row(func, lanes=lanes)
    buffers = {p.name: p for p in func.params}
    chunk_keys = tirx.const(shape.chunk, "int64")
    table = PageTable.of(buffers, chunk_keys)

    def item(loops: list[tirx.For]) -> tuple[tirx.Expr, tirx.Expr]:
        heads = shape.num_kv_heads
        return tirx.floordiv(loops[0].loop_var, heads), tirx.floormod(loops[0].loop_var, heads)

    def chunk_var(loops: list[tirx.For]) -> tirx.Expr:
        return next(loop.loop_var for loop in loops if dict(loop.annotations).get(TRIP) == "chunks")

    def count(kind: str, loops: list[tirx.For]) -> tirx.Expr:
        w, _ = item(loops)
        keys = buffers["items"][w, KV_LEN].astype("int64") - table.skipped_chunks(w) * chunk_keys
        if kind == "chunks":
            return tirx.floordiv(tirx.max(keys, 0) + (chunk_keys - 1), chunk_keys)
        tile = int(kind.split(":")[1])
        return tirx.floordiv(keys - chunk_var(loops) * chunk_keys + (tile - 1), tirx.const(tile, "int64"))

    def hint(distance: int, loops: list[tirx.For]) -> tirx.Stmt:
        w, h = item(loops)
        # The annotated loop divides the work on a tile of keys, and so the rows of the tile `distance` keys ahead.
        tiles = next(loop for loop in reversed(loops) if str(dict(loop.annotations).get(TRIP)).startswith("keys"))
        tile = int(str(dict(tiles.annotations)[TRIP]).split(":")[1])
        steps = int(loops[-1].extent)
        keys = -(-tile // steps)
        t = tirx.Var("t_prefetch", "int64")
        step = tirx.floormod(loops[-1].loop_var, tirx.const(tile // keys, "int64"))
        offset = table.offset(w, chunk_var(loops), tiles.loop_var * tile + step * keys + t)
        row = table.slot(w, table.position(w, offset + distance))
        buffer = buffers[str(dict(loops[-1].annotations)[BUFFER])]
        per_line = lowering.CACHE_LINE // DataType(buffer.dtype).itemsize
        columns = range(0, int(buffer.shape[-1]), per_line)
        lines = [lowering.prefetch_line(buffer, [row, h, tirx.const(x, "int64")]) for x in columns]
        zero = tirx.const(0, "int64")
        return tirx.For(t, zero, tirx.const(keys, "int64"), tirx.ForKind.UNROLLED, tirx.SeqStmt(lines))

    return lowering.trip_counts(lowering.prefetches(func, hint), count, exact=("chunks",))
