"""Paged attention on x86 SIMD: how the stages of the definition become loops.

Extend is two register-tiled products per KV chunk, S^T = K Q^T and O = P V: the vector runs over query rows in the
first and over value columns in the second, the other operand is a broadcast scalar, so nothing is transposed but Q,
once per item. Decode has too few query rows for that: the first product runs over the head dim with a horizontal sum
per (key, row), keys and values are converted on the way and never copied.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import s_tir, tirx

from tilewright.schedules.intrinsics.x86 import sums_of_lanes
from tilewright.schedules.lowering import PREFETCH, TRIP
from tilewright.schedules.paged_attention.definition import PagedShape, paged_attention
from tilewright.schedules.spaces import Decisions, Space, UnsupportedWorkload
from tilewright.schedules.spaces.paged_x86_fixed import schedule_general, schedule_merge, schedule_write
from tilewright.schedules.spaces.paged_x86_loops import (
    BUFFER,
    block,
    decompose,
    finish,
    parallel_items,
    row_stages,
    vectorize_last,
)
from tilewright.schedules.targets import Target
from tilewright.schedules.workload import Workload


def schedule_extend(workload: Workload, shape: PagedShape, decisions: dict[str, int], target: Target) -> tirx.PrimFunc:
    """The register-tiled extend kernel (see the module's text)."""
    n, lanes = decisions, target.lanes
    sch = s_tir.Schedule(paged_attention(workload, shape))
    items = parallel_items(sch)
    for name in ("lse_row", "F", "acc"):
        sch.compute_at(block(sch, name), items, preserve_unit_loops=True)

    # acc: chunk, then a register tile of rows x columns that O fills and the monoid folds in.
    row, column, chunk = sch.get_loops(block(sch, "acc"))[-3:]
    row_o, row_i = sch.split(row, [None, n["pv_rows"]])
    column_o, column_i = sch.split(column, [None, n["pv_vectors"] * lanes])
    sch.reorder(chunk, *((row_o, column_o) if n["pv_rows_outer"] else (column_o, row_o)), row_i, column_i)
    tile = column_o if n["pv_rows_outer"] else row_o
    sch.compute_at(block(sch, "O"), tile, preserve_unit_loops=True)
    sch.set_scope(block(sch, "O"), 0, "local")
    o_row, o_column, o_key = sch.get_loops(block(sch, "O"))[-3:]
    o_key_o, o_key_i = sch.split(o_key, [None, n["key_tile"]])
    sch.reorder(o_key_o, o_key_i, o_row, o_column)
    for name in ("Vf", "l", "P", "m", "X"):
        sch.compute_at(block(sch, name), chunk, preserve_unit_loops=True)
    sch.compute_inline(block(sch, "Vg"))

    # X: a tile of keys (gathered once), register tiles of keys x rows inside.
    key, x_row = sch.get_loops(block(sch, "X"))[-2:]
    key_o, key_m, key_i = sch.split(key, [None, n["key_tile"] // n["qk_keys"], n["qk_keys"]])
    x_row_o, x_row_i = sch.split(x_row, [None, n["qk_vectors"] * lanes])
    sch.reorder(key_o, x_row_o, key_m, key_i, x_row_i)
    sch.compute_at(block(sch, "S"), key_m, preserve_unit_loops=True)
    sch.set_scope(block(sch, "S"), 0, "local")
    s_key, s_row, dim = sch.get_loops(block(sch, "S"))[-3:]
    sch.reorder(dim, s_key, s_row)
    sch.compute_at(block(sch, "Kf"), key_o, preserve_unit_loops=True)
    sch.compute_inline(block(sch, "Kg"))
    for name in row_stages(workload):
        sch.compute_at(block(sch, name), items, preserve_unit_loops=True)
    sch.compute_inline(block(sch, "Qg"))
    width = tirx.const(n["qk_vectors"] * lanes, "int64")
    sch.transform_layout(
        block(sch, "Qf"),
        ("write", 0),
        lambda w, h, r, d: (w, h, r // width, d, r % width),
        assume_injective_transform=True,
    )

    vectorize_last(sch, lanes, "Kf", "Vf", "P", "X", "bound_lo", "bound_hi")
    sch.unroll(key_i)
    for unrolled, vector in ((s_key, s_row), (o_row, o_column), (row_i, column_i)):
        sch.unroll(unrolled)
        # One register at a time: LLVM takes vectors of 24 lanes apart into scalars.
        vectors, lane = sch.split(vector, [None, lanes])
        sch.unroll(vectors)
        sch.vectorize(lane)
    # Every stage over the keys of a chunk visits the same tiles: the others hold nothing.
    tiles = [key_o, o_key_o]
    p_key = sch.get_loops(block(sch, "P"))[-3]
    tiles.append(sch.split(p_key, [None, n["key_tile"]])[0])
    for name in ("m", "l"):
        r, t = sch.get_loops(block(sch, name))[-2:]
        tile, t = sch.split(t, [None, n["key_tile"]])
        vectors, lane = sch.split(r, [None, lanes])
        sch.reorder(vectors, tile, t, lane)
        sch.vectorize(lane)
        decompose(sch, name, tile)
        tiles.append(tile)
    decompose(sch, "S", dim)
    decompose(sch, "O", o_key_o)
    decompose(sch, "acc", chunk)
    sch.annotate(chunk, TRIP, "chunks")
    for tile in tiles:
        sch.annotate(tile, TRIP, f"keys:{n['key_tile']}")
    return finish(sch.mod["main"], shape, target.lanes)


def schedule_decode(workload: Workload, shape: PagedShape, decisions: dict[str, int], target: Target) -> tirx.PrimFunc:
    """The streaming decode kernel (see the module's text)."""
    n = decisions
    sch = s_tir.Schedule(paged_attention(workload, shape))
    items = parallel_items(sch)
    for name in ("lse_row", "F", "acc"):
        sch.compute_at(block(sch, name), items, preserve_unit_loops=True)

    lanes, pairs = _row_vectors(workload, target)
    width = pairs * lanes

    def paired(*index: tirx.Expr) -> tuple[tirx.Expr, ...]:
        *outer, last = index
        return *outer, last // width, last % pairs, last % width // pairs

    row, column, chunk = sch.get_loops(block(sch, "acc"))[-3:]
    column, lane, pair = sch.split(column, [None, lanes, pairs])
    sch.reorder(chunk, row, column, pair, lane)
    sch.vectorize(lane)
    sch.compute_at(block(sch, "O"), chunk, preserve_unit_loops=True)
    o_row, o_column, o_key = sch.get_loops(block(sch, "O"))[-3:]
    # A tile of value rows stays in the first-level cache while the register tile walks over its columns.
    o_key_o, o_key_i = sch.split(o_key, [None, n["key_tile"]])
    vectors = n["pv_vectors"] * target.lanes // width
    o_column_o, o_vector, o_lane, o_pair = sch.split(o_column, [None, vectors, lanes, pairs])
    sch.reorder(o_key_o, o_column_o, o_key_i, o_row, o_vector, o_pair, o_lane)
    for name, output in (("O", 0), ("acc", 2)):
        sch.transform_layout(block(sch, name), ("write", output), paired, assume_injective_transform=True)
    for name in ("Vf", "Vg"):
        sch.compute_inline(block(sch, name))
    for name in ("l", "P", "m", "X"):
        sch.compute_at(block(sch, name), chunk, preserve_unit_loops=True)

    *_, dim = sch.get_loops(block(sch, "S"))
    _, lane, _ = sch.split(dim, [None, lanes, pairs])
    partial = sch.rfactor(lane, 5)
    key, x_row = sch.get_loops(block(sch, "X"))[-2:]
    key_o, key_m, key_i = sch.split(key, [None, n["key_tile"] // n["qk_keys"], n["qk_keys"]])
    sch.compute_at(block(sch, "S"), key_m, preserve_unit_loops=True)
    sch.set_scope(block(sch, "S"), 0, "local")
    sch.compute_at(partial, key_m, preserve_unit_loops=True)
    sch.set_scope(partial, 0, "local")
    s_lane, _, _, _, s_key, s_row, dim, s_pair = sch.get_loops(partial)[-8:]
    sch.reorder(dim, s_pair, s_key, s_row, s_lane)
    for name in ("Kf", "Kg"):
        sch.compute_inline(block(sch, name))
    sch.compute_at(block(sch, "slot"), chunk, preserve_unit_loops=True)
    for name in row_stages(workload):
        sch.compute_at(block(sch, name), items, preserve_unit_loops=True)
    sch.compute_inline(block(sch, "Qg"))
    sch.transform_layout(block(sch, "Qf"), ("write", 0), paired, assume_injective_transform=True)

    q_dim, q_lane, q_pair = sch.split(sch.get_loops(block(sch, "Qf"))[-1], [None, lanes, pairs])
    sch.reorder(q_dim, q_pair, q_lane)
    sch.vectorize(q_lane)
    sch.unroll(sch.split(o_key_i, [None, n["pv_unroll"]])[1])
    for loop in (s_pair, s_key, s_row, o_row, o_vector, o_pair, key_i):
        sch.unroll(loop)
    for loop in (s_lane, o_lane):
        sch.vectorize(loop)
    sum_lane, *units, sum_key, sum_row = sch.get_loops(block(sch, "S"))[-6:]
    sch.reorder(*units, sum_key, sum_row, sum_lane)
    intrinsic = sums_of_lanes(int(sch.get(sum_key).extent), int(sch.get(sum_row).extent), lanes)
    for loop in (sum_key, sum_row, sum_lane) if intrinsic is None else ():
        sch.unroll(loop)
    rows = workload.group or 1
    # Few rows are one short vector; LLVM takes vectors whose lanes are no power of two apart.
    short = sch.vectorize if rows in (2, 4, 8, 16) else sch.unroll
    short(x_row)
    tiles = [key_o, o_key_o, sch.split(sch.get_loops(block(sch, "slot"))[-1], [None, n["key_tile"]])[0]]
    p_key, p_row = sch.get_loops(block(sch, "P"))[-2:]
    tile, p_key = sch.split(p_key, [None, n["key_tile"]])
    tiles.append(tile)
    if lanes % rows == 0:  # the rows of several keys fill a vector
        sch.vectorize(sch.fuse(sch.split(p_key, [None, lanes // rows])[1], p_row))
    else:
        short(p_row)
    for name in ("m", "l"):
        r, t = sch.get_loops(block(sch, name))[-2:]
        tile, t = sch.split(t, [None, n["key_tile"]])
        sch.reorder(tile, t, r)
        short(r)
        sch.decompose_reduction(block(sch, name), tile)
        tiles.append(tile)
    sch.decompose_reduction(partial, dim)
    if intrinsic is not None:
        sch.tensorize(sum_key, intrinsic)
    decompose(sch, "O", o_key_o)
    decompose(sch, "acc", chunk)
    sch.annotate(chunk, TRIP, "chunks")
    for tile in tiles:
        sch.annotate(tile, TRIP, f"keys:{n['key_tile']}")
    # Keys are asked for while the first product runs over earlier keys, values while the second does.
    for walk, buffer, distance in ((key_m, "k_buffer", n["prefetch_k"]), (o_column_o, "v_buffer", n["prefetch_v"])):
        sch.annotate(walk, PREFETCH, distance)
        sch.annotate(walk, BUFFER, buffer)
    return finish(sch.mod["main"], shape, target.lanes)


def space(workload: Workload, target: Target) -> Space:
    """The space of a paged operator for vectors (see spaces.get_space)."""
    if workload.operator == "merge":
        return _fixed(lambda: schedule_merge(workload), workload.operator)
    if workload.operator == "write_kv":
        return _fixed(lambda: schedule_write(workload), workload.operator)
    decode = workload.operator == "paged_decode"

    def shaped(build: Callable[..., tirx.PrimFunc]) -> Callable[[Decisions], tirx.PrimFunc]:
        return lambda n: build(workload, PagedShape.of(workload, n["block_q"], n["chunk"]), dict(n), target)

    def plan(n: Decisions) -> dict[str, int]:
        return {
            "block_q": n["block_q"],
            "chunk": n["chunk"],
            "min_split": max(256, n["chunk"]),
            "max_split": n.get("max_split", 0),
        }

    if workload.general:
        choices: Choices = {"block_q": (1,) if decode else (8,), "chunk": (128,), "key_tile": (16,)}
        return _space(workload, choices, {}, lambda _: True, shaped(schedule_general), plan)
    if decode:
        return _space(workload, *_decode_decisions(workload, target), shaped(schedule_decode), plan)
    return _space(workload, *_extend_decisions(workload, target), shaped(schedule_extend), plan)


Choices = dict[str, tuple[int, ...]]


def _decode_decisions(
    workload: Workload, target: Target
) -> tuple[Choices, dict[str, int], Callable[[Decisions], bool]]:
    lanes, pairs = _row_vectors(workload, target)
    step = pairs * lanes // target.lanes  # registers that a row's conversion fills at once
    vectors = tuple(v for v in _divisor_vectors(workload.head_dim_vo, target.lanes) if v % step == 0)
    choices = {
        "block_q": (1,),
        "chunk": (64, 128, 256, 512),
        "key_tile": (16, 32, 64),
        "qk_keys": (1, 2, 4),
        "pv_vectors": vectors,
        "prefetch_k": (0, 8, 16, 32, 64),
        "prefetch_v": (0, 8, 16, 32, 64),
        "pv_unroll": (1, 2),
        "max_split": (0, 512, 1024),
    }
    default = {"chunk": 128, "key_tile": 32, "qk_keys": 1, "pv_vectors": vectors[0]}
    rows = workload.group or 1
    if target.lanes == 16:
        # No search has run there yet: the best of a handful measured by hand on such a machine (docs/benchmarks.md).
        fits = lambda values: max(v for v in values if v == values[0] or v * rows <= target.registers - 2)  # noqa: E731
        default = {"chunk": 256, "key_tile": 16, "qk_keys": fits((1, 2, 4)), "pv_vectors": fits(vectors)}
        default |= {"prefetch_k": 16, "prefetch_v": 16, "max_split": 512}

    def legal(n: Decisions) -> bool:
        # Accumulators that do not fit the registers are spilled in the innermost loop.
        wide = lanes // target.lanes
        registers = max(n["qk_keys"] * rows * wide, n["pv_vectors"] * rows)
        return n["chunk"] % n["key_tile"] == 0 and (
            registers <= target.registers - 2 or (n["qk_keys"] == 1 and n["pv_vectors"] == step)
        )

    return choices, default, legal


def _extend_decisions(
    workload: Workload, target: Target
) -> tuple[Choices, dict[str, int], Callable[[Decisions], bool]]:
    rows = workload.group or 1
    # Rows a block: common multiples of the register tiles below.
    blocks = tuple(m // rows for m in (48, 96, 144, 192, 288, 384) if m % rows == 0)
    vectors = _divisor_vectors(workload.head_dim_vo, target.lanes)
    choices = {
        "block_q": blocks,
        "chunk": (64, 128, 256, 512),
        "key_tile": (16, 32, 64),
        "qk_keys": (2, 4, 8),
        "qk_vectors": (1, 2, 3),
        "pv_rows": (2, 3, 4, 6),
        "pv_vectors": vectors,
        "pv_rows_outer": (0, 1),
    }
    default = {
        "chunk": 128,
        "key_tile": 16,
        "qk_keys": 4,
        "qk_vectors": 1,
        "pv_rows": 4,
        "pv_vectors": vectors[0],
        "pv_rows_outer": 1,
    }

    def legal(n: Decisions) -> bool:
        m = n["block_q"] * rows
        most = target.registers - 4
        fits = n["qk_keys"] * n["qk_vectors"] <= most and n["pv_rows"] * n["pv_vectors"] <= most
        return (
            fits
            and m % n["pv_rows"] == 0
            and m % (n["qk_vectors"] * target.lanes) == 0
            and n["key_tile"] % n["qk_keys"] == 0
        )

    return choices, default, legal


def _row_vectors(workload: Workload, target: Target) -> tuple[int, int]:
    """(lanes, pairs) of decode: elements of a row that are one vector, and into how many vectors a row is sorted.

    With pairs, elements i, i + pairs, i + 2 pairs ... lie in one vector.
    """
    dims = (workload.head_dim_qk, workload.head_dim_vo)
    if workload.kv_dtype is not None:
        # Bytes become halves 16 at a time, in a register of words; as floats they fill one register or two.
        return (16 if all(dim is not None and dim % 16 == 0 for dim in dims) else target.lanes), 1
    # bf16 becomes f32 by a shift of the even elements and a mask of the odd ones.
    even = all(dim is not None and dim % (2 * target.lanes) == 0 for dim in dims)
    return target.lanes, 2 if workload.dtype == "bf16" and even else 1


def _divisor_vectors(columns: int | None, lanes: int) -> tuple[int, ...]:
    """Vectors a register tile may span along `columns`."""
    if columns is None or columns % lanes:
        raise UnsupportedWorkload(
            f"head dims: got {columns}, vector kernels take multiples of {lanes}; build the general module"
        )
    return tuple(v for v in (1, 2, 3, 4) if columns % (v * lanes) == 0)


def _space(
    workload: Workload,
    choices: Choices,
    default: dict[str, int],
    legal: Callable[[Decisions], bool],
    build: Callable[[Decisions], tirx.PrimFunc],
    plan: Callable[[Decisions], dict[str, int]],
) -> Space:
    return Space(
        choices=choices,
        default={name: values[0] for name, values in choices.items()} | default,
        legal=legal,
        module=lambda n: tvm.IRModule({workload.operator: build(n)}),
        plan=plan,
    )


def _fixed(build: Callable[[], tirx.PrimFunc], name: str) -> Space:
    return Space({}, {}, lambda _: True, lambda _: tvm.IRModule({name: build()}), lambda _: {})
