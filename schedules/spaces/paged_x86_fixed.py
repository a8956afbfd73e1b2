"""The paged kernels of vectors that have nothing to decide: the general ones, the merge of states, the KV write."""

from __future__ import annotations

from tvm import s_tir, tirx

from tilewright.schedules import lowering
from tilewright.schedules.lowering import TRIP
from tilewright.schedules.paged_attention import states
from tilewright.schedules.paged_attention.definition import PagedShape, paged_attention
from tilewright.schedules.spaces.paged_x86_loops import block, finish, parallel_items, row_stages
from tilewright.schedules.targets import Target
from tilewright.schedules.workload import Workload


def schedule_general(workload: Workload, shape: PagedShape, decisions: dict[str, int], target: Target) -> tirx.PrimFunc:
    """Any head dims and group: loops whose innermost dimension is dense, left to LLVM's vectoriser."""
    sch = s_tir.Schedule(paged_attention(workload, shape))
    items = parallel_items(sch)
    if workload.operator == "paged_decode":
        sch.compute_inline(block(sch, "slot"))
    for name in ("lse_row", "F", "acc"):
        sch.compute_at(block(sch, name), items, preserve_unit_loops=True)
    row, column, chunk = sch.get_loops(block(sch, "acc"))[-3:]
    sch.reorder(chunk, row, column)
    for name in ("O", "Vf", "l", "P", "m", "X", "S", "Kf"):
        sch.compute_at(block(sch, name), chunk, preserve_unit_loops=True)
    for name in row_stages(workload):
        sch.compute_at(block(sch, name), items, preserve_unit_loops=True)
    for name in ("Vg", "Kg", "Qg"):
        sch.compute_inline(block(sch, name))
    # Query rows are the vector dimension of the first product, value columns of the second.
    sch.transform_layout(
        block(sch, "Qf"), ("write", 0), lambda w, h, r, d: (w, h, d, r), assume_injective_transform=True
    )
    # Every stage visits the same tiles of keys; reductions get their innermost loop over what is dense in memory.
    tile = decisions["key_tile"]
    axes_of = {"S": "key row dim", "m": "row key", "l": "row key", "O": "row column key"}
    inner_of = {"S": "key dim row", "m": "key row", "l": "key row", "O": "key row column"}
    for name in ("Kf", "Vf", "S", "X", "m", "P", "l", "O"):
        axes = axes_of.get(name, "key other").split()
        loops = dict(zip(axes, sch.get_loops(block(sch, name))[-len(axes) :], strict=True))
        outer, loops["key"] = sch.split(loops["key"], [None, tile])
        if name in inner_of:
            sch.reorder(outer, *(loops[axis] for axis in inner_of[name].split()))
            sch.decompose_reduction(block(sch, name), outer)
        sch.annotate(outer, TRIP, f"keys:{tile}")
    sch.decompose_reduction(block(sch, "acc"), chunk)
    sch.annotate(chunk, TRIP, "chunks")
    return finish(sch.mod["main"], shape, target.lanes)


def schedule_merge(workload: Workload) -> tirx.PrimFunc:
    """Parallel over rows and heads; a row's own number of states."""
    sch = s_tir.Schedule(states.merge(workload))
    r, h = sch.get_loops(block(sch, "store"))
    fused = sch.fuse(r, h)
    sch.parallel(fused)
    sch.compute_inline(block(sch, "V"))
    for name in ("lse_row", "F", "acc", "total", "A", "M", "L"):
        sch.compute_at(block(sch, name), fused, preserve_unit_loops=True)
    column, state = sch.get_loops(block(sch, "acc"))[-2:]
    sch.reorder(state, column)
    for name in ("acc", "total", "A", "M", "L"):
        loop = state if name == "acc" else sch.get_loops(block(sch, name))[-1]
        sch.annotate(loop, TRIP, "states")
        if name in ("acc", "total", "M"):
            sch.decompose_reduction(block(sch, name), loop)
    func = sch.mod["main"]
    buffers = {p.name: p for p in func.params}
    heads = buffers["sinks"].shape[0]

    def count(_: str, loops: list[tirx.For]) -> tirx.Expr:
        return buffers["rows"][tirx.floordiv(loops[0].loop_var, heads), states.COUNT].astype("int64")

    return lowering.trip_counts(func, count, exact=("states",))


def schedule_write(workload: Workload) -> tirx.PrimFunc:
    """Parallel over heads, tokens in order: of several rows for one slot the last is whole, never a mixture."""
    sch = s_tir.Schedule(states.write_kv(workload))
    token, head = sch.get_loops(block(sch, "store"))
    sch.reorder(head, token)
    sch.parallel(head)
    return sch.mod["main"]
