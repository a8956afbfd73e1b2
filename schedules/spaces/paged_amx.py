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

from typing import Any

import tvm
from tvm import s_tir, tirx

from tilewright.schedules.intrinsics import amx
from tilewright.schedules.lowering import PREFETCH, TRIP
from tilewright.schedules.paged_attention.definition import PagedShape, paged_attention
from tilewright.schedules.spaces import Decisions, Space, UnsupportedWorkload
from tilewright.schedules.spaces.paged_amx_passes import LANES, VISIBLE, copies, finish, group_of
from tilewright.schedules.targets import Target
from tilewright.schedules.workload import Workload

HALVES = 32  # bf16 in one
MOST_GROUP = 64
CHAINS = 4  # vectors whose maxima or sums grow side by side: one alone would wait for its own last step


def space(workload: Workload, target: Target) -> Space:
    """The space of a specialised bf16 kernel.

    Raises:
        UnsupportedWorkload: another dtype, a general kernel, or head dims that do not fill tiles.
    """
    if not workload.operator.startswith("paged") or workload.dtype != "bf16" or workload.general:
        raise UnsupportedWorkload(f"{workload.name} for {target.name}: tiles serve specialised paged attention in bf16")
    group, (dim, dim_vo) = group_of(workload), _dims(workload)
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
    rows = (_filled(group_of(workload)),) if decode else (64, 128, 256, 512, 1024)
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
    gathered = copies(workload)
    for name in gathered:
        other = {"g": "f", "f": "g"}[name[1]]
        sch.compute_inline(sch.get_sblock(name[0] + other))
        if workload.kv_dtype is not None:
            sch.unsafe_set_dtype(sch.get_sblock(name), 0, "bfloat16")
    keys, values = (sch.get_sblock(name) for name in gathered)
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
    return finish(sch.mod["main"], workload, shape, n)


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
    return 1 if workload.operator == "paged_decode" else decisions["rows"] // group_of(workload)


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
