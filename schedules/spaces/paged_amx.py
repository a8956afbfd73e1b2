"""Paged attention in bf16 on Intel AMX: how the stages of the definition become loops around tile products.

Both products of a KV chunk are `tdpbf16ps`. The scores are S^T = K Q^T: gathered key rows are the left operand as they
lie, Q is laid out in pairs of dimensions once per item. The values are O = P V: the probabilities are rounded to bf16
and transposed on the way (16 x 32 at a time, by shuffles), gathered value rows are interleaved in pairs. A chunk is a
two-pass softmax: all its scores, then maximum, probabilities, values; chunks are folded by the monoid.

Tiles have 16 rows, so a decode item has its query row repeated (the definition repeats the last row of an item) up to a
multiple of the vector length; what the extra rows compute is not stored.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import s_tir, tirx

from tilewright.schedules import lowering
from tilewright.schedules.intrinsics import amx
from tilewright.schedules.lowering import PREFETCH, TRIP
from tilewright.schedules.paged_attention.definition import PagedShape, paged_attention
from tilewright.schedules.spaces import Decisions, Space, UnsupportedWorkload, paged_x86
from tilewright.schedules.targets import Target
from tilewright.schedules.workload import Workload

LANES = 16  # f32 lanes of a 512-bit register
HALVES = 32  # bf16 in one
MOST_ROWS = 256


def space(workload: Workload, target: Target) -> Space:
    """The space of a specialised bf16 kernel.

    Raises:
        UnsupportedWorkload: another dtype, a general kernel, or head dims that do not fill tiles.
    """
    if not workload.operator.startswith("paged") or workload.dtype != "bf16" or workload.general:
        raise UnsupportedWorkload(f"{workload.name} for {target.name}: tiles serve specialised paged attention in bf16")
    group, (dim, dim_vo) = _group(workload), _dims(workload)
    if dim % 32 or dim_vo % 16 or group > MOST_ROWS // 8:
        raise UnsupportedWorkload(
            f"{workload.name} for {target.name}: tiles take head_dim_qk in multiples of 32, head_dim_vo in "
            f"multiples of 16, a group of at most {MOST_ROWS // 8}"
        )

    return Space(
        choices=choices(workload),
        default=default(workload),
        legal=lambda decisions: legal(workload, decisions),
        module=lambda decisions: tvm.IRModule({workload.operator: schedule(workload, decisions)}),
        plan=lambda n: {"block_q": n["block_q"], "chunk": n["chunk"], "min_split": n["chunk"]},
    )


def choices(workload: Workload) -> dict[str, tuple[int, ...]]:
    """The named decisions and their values.

    block_q: query tokens of an item. chunk: keys per softmax chunk. qk_keys, qk_rows: keys and query rows of one
    product of scores (and keys gathered at a time). pv_keys, pv_rows, pv_columns: keys, query rows and value columns
    of one product of values (and value rows gathered and interleaved at a time). prefetch_k, prefetch_v: keys between
    a row's prefetch and its copy, 0 = none.
    """
    group = _group(workload)
    tokens: tuple[int, ...] = (1,)
    if workload.operator == "paged_extend":
        tokens = tuple(n for n in (4, 8, 16, 32, 64, 128) if 16 <= n * group <= MOST_ROWS and n * group % 16 == 0)
    rows = tuple(n for n in (8, 16, 32, 64) if any(_rows(workload, t) % n == 0 for t in tokens))
    return {
        "block_q": tokens,
        "chunk": (128, 256, 512),
        "qk_keys": (16, 32, 64),
        "qk_rows": rows,
        "pv_keys": (32, 64, 128),
        "pv_rows": rows,
        "pv_columns": tuple(n for n in (16, 32, 64) if _dims(workload)[1] % n == 0),
        "prefetch_k": (0, 16, 32, 64),
        "prefetch_v": (0, 16, 32, 64),
    }


def default(workload: Workload) -> dict[str, int]:
    """The untuned schedule."""
    tokens = 1
    if workload.operator == "paged_extend":
        tokens = next(n for n in choices(workload)["block_q"] if n * _group(workload) >= 48)
    rows = next(n for n in (32, 16, 8) if _rows(workload, tokens) % n == 0)
    columns = max(n for n in choices(workload)["pv_columns"] if n <= 32)
    decode = workload.operator == "paged_decode"
    return {
        "block_q": tokens,
        "chunk": 512 if decode else 256,
        "qk_keys": 32,
        "qk_rows": rows,
        "pv_keys": 64,
        "pv_rows": rows,
        "pv_columns": columns,
        "prefetch_k": 32 if decode else 0,
        "prefetch_v": 32 if decode else 0,
    }


def legal(workload: Workload, decisions: Decisions) -> bool:
    """Whether the decisions are values of `choices` that fit each other and the eight tile registers."""
    n = decisions
    values = choices(workload)
    if set(n) != set(values) or any(n[name] not in values[name] for name in n):
        return False
    rows = _rows(workload, n["block_q"])
    if rows % n["qk_rows"] or rows % n["pv_rows"]:
        return False
    return amx.products_fit((n["qk_keys"], n["qk_rows"]), (n["pv_rows"], n["pv_columns"]))


def schedule(workload: Workload, decisions: Decisions) -> tirx.PrimFunc:
    """The kernel for `decisions`."""
    n = decisions
    rows = _rows(workload, n["block_q"])
    dim, dim_vo = _dims(workload)
    lanes = LANES if rows % LANES == 0 else LANES // 2
    # Every stage visits the same tiles of keys, as many as the item has: what lies behind them is never written.
    tile_keys = max(n["qk_keys"], n["pv_keys"])
    shape = _shape(workload, n)
    sch = s_tir.Schedule(paged_attention(workload, shape))
    score, value = sch.get_sblock("S"), sch.get_sblock("O")
    keys, values = sch.get_sblock("Kg"), sch.get_sblock("Vg")
    if workload.operator == "paged_decode":
        sch.compute_inline(sch.get_sblock("slot"))

    # Operands: the casts belong to the products, the copies get the layouts that tiles want.
    for name in ("Qf", "Kf", "Vf"):
        sch.compute_inline(sch.get_sblock(name))
    queries = sch.cache_read(score, 1, "global")
    sch.transform_layout(queries, ("write", 0), lambda w, h, r, d: (w, h, d // 2, r, d % 2))
    probabilities = sch.cache_read(value, 0, "global", consumer_blocks=[value])
    sch.unsafe_set_dtype(probabilities, 0, "bfloat16")
    sch.transform_layout(probabilities, ("write", 0), lambda w, h, c, t, r: (w, h, c, r, t))
    pairs = sch.cache_read(value, 1, "global")
    sch.transform_layout(pairs, ("write", 0), lambda w, h, c, t, e: (w, h, c, t // 2, e, t % 2))

    items = paged_x86.parallel_items(sch)
    for name in ("lse_row", "F", "acc"):
        sch.compute_at(sch.get_sblock(name), items, preserve_unit_loops=True)
    row, column, chunk = sch.get_loops(sch.get_sblock("acc"))[-3:]
    sch.reorder(chunk, row, column)

    sch.compute_at(value, chunk, preserve_unit_loops=True)
    r, e, t = sch.get_loops(value)[-3:]
    pv_tile, pv_step, t = sch.split(t, [None, tile_keys // n["pv_keys"], n["pv_keys"]])
    e_o, e = sch.split(e, [None, n["pv_columns"]])
    r_o, pv_product = sch.split(r, [None, n["pv_rows"]])
    sch.reorder(pv_tile, pv_step, e_o, r_o, pv_product, e, t)
    for block in (pairs, values, probabilities):
        sch.compute_at(block, pv_step, preserve_unit_loops=True)
    for name in ("l", "P", "m", "X"):
        sch.compute_at(sch.get_sblock(name), chunk, preserve_unit_loops=True)

    x_key = sch.get_loops(sch.get_sblock("X"))[-2]
    qk_tile, qk_step, _ = sch.split(x_key, [None, tile_keys // n["qk_keys"], n["qk_keys"]])
    sch.compute_at(score, qk_step, preserve_unit_loops=True)
    sch.compute_at(keys, qk_step, preserve_unit_loops=True)
    for block in (*(sch.get_sblock(name) for name in ("bound_lo", "bound_hi")), queries, sch.get_sblock("Qg")):
        sch.compute_at(block, items, preserve_unit_loops=True)
    qk_product, r, d = sch.get_loops(score)[-3:]
    r_o, r = sch.split(r, [None, n["qk_rows"]])
    sch.reorder(r_o, qk_product, r, d)

    p_key = sch.get_loops(sch.get_sblock("P"))[-2]
    for block, distance in ((keys, n["prefetch_k"]), (values, n["prefetch_v"])):
        sch.annotate(sch.get_loops(block)[-2], PREFETCH, distance)
    _vectorize(sch, HALVES, keys, sch.get_sblock("Qg"))
    _vectorize(sch, HALVES if dim_vo % HALVES == 0 else HALVES // 2, values)
    _vectorize(sch, lanes, *(sch.get_sblock(name) for name in ("P", "X", "bound_lo", "bound_hi")))
    _vectorize(sch, LANES, sch.get_sblock("acc"))
    tiles = [qk_tile, pv_tile, sch.split(p_key, [None, tile_keys])[0]]
    for name in ("m", "l"):
        r, t = sch.get_loops(sch.get_sblock(name))[-2:]
        tile, t = sch.split(t, [None, tile_keys])
        r_o, r = sch.split(r, [None, lanes])
        sch.reorder(tile, r_o, t, r)
        sch.vectorize(r)
        _vectorize(sch, lanes, sch.decompose_reduction(sch.get_sblock(name), tile))
        tiles.append(tile)

    t, _ = sch.get_loops(pairs)[-2:]
    sch.tensorize(sch.split(t, [None, 2])[1], amx.interleave_rows(dim_vo))
    t, r = sch.get_loops(probabilities)[-2:]
    q_r, d = sch.get_loops(queries)[-2:]
    if rows % amx.TILE_ROWS == 0:
        _tensorize(sch, t, HALVES, r, amx.TILE_ROWS, amx.transpose_to_bf16())
        _tensorize(sch, q_r, amx.TILE_ROWS, d, HALVES, amx.interleave_columns())
    else:
        sch.reorder(r, t)
        _vectorize(sch, LANES, probabilities)
        _vectorize(sch, 2, queries)
    init = sch.decompose_reduction(score, qk_product)
    sch.tensorize(sch.get_loops(init)[-2], amx.omitted_init(n["qk_keys"], n["qk_rows"]))
    sch.tensorize(qk_product, amx.bf16_product(n["qk_keys"], n["qk_rows"], dim, fresh=True))
    _vectorize(sch, LANES, sch.decompose_reduction(value, pv_tile))
    sch.tensorize(pv_product, amx.bf16_product(n["pv_rows"], n["pv_columns"], n["pv_keys"]))
    _vectorize(sch, LANES, sch.decompose_reduction(sch.get_sblock("acc"), chunk))

    sch.annotate(chunk, TRIP, "chunks")
    for tile in tiles:
        sch.annotate(tile, TRIP, f"keys:{tile_keys}")
    return paged_x86.finish(lowering.prefetch_rows(sch.mod["main"]), shape, lanes)


def _shape(workload: Workload, decisions: Decisions) -> PagedShape:
    tokens = _rows(workload, decisions["block_q"]) // _group(workload)
    return PagedShape.of(workload, tokens, decisions["chunk"])


def _group(workload: Workload) -> int:
    assert workload.group is not None
    return workload.group


def _dims(workload: Workload) -> tuple[int, int]:
    assert workload.head_dim_qk is not None and workload.head_dim_vo is not None
    return workload.head_dim_qk, workload.head_dim_vo


def _rows(workload: Workload, block_q: int) -> int:
    """Query rows of an item: its tokens times the group, up to whole vectors (8 lanes) and at least one tile."""
    group = _group(workload)
    tokens = block_q
    while tokens * group % 8 or tokens * group < amx.TILE_ROWS:
        tokens += 1
    return tokens * group


def _tensorize(sch: s_tir.Schedule, outer: Any, outer_size: int, inner: Any, inner_size: int, intrinsic: str) -> None:
    """Replace blocks of outer_size x inner_size iterations of a copy's last two loops."""
    outer_o, outer_i = sch.split(outer, [None, outer_size])
    inner_o, inner_i = sch.split(inner, [None, inner_size])
    sch.reorder(outer_o, inner_o, outer_i, inner_i)
    sch.tensorize(outer_i, intrinsic)


def _vectorize(sch: s_tir.Schedule, lanes: int, *blocks: Any) -> None:
    """Vectorise the last loop of each block, `lanes` at a time (they divide its extent)."""
    for block in blocks:
        sch.vectorize(sch.split(sch.get_loops(block)[-1], [None, lanes])[1])
