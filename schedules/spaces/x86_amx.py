"""Paged attention on Intel AMX, bf16."""

from __future__ import annotations

from typing import Any

from tvm import s_tir, tirx

from tilewright.schedules.intrinsics import amx
from tilewright.schedules.lowering import TRIP
from tilewright.schedules.paged_attention.definition import PagedShape, paged_attention
from tilewright.schedules.spaces import x86_paged
from tilewright.schedules.workload import Workload

LANES = 16


def schedule(workload: Workload, shape: PagedShape, decisions: dict[str, int]) -> tirx.PrimFunc:
    n = decisions
    M = shape.block_q * shape.group
    sch = s_tir.Schedule(paged_attention(workload, shape))
    for name in ("Qf", "Kf", "Vf"):
        sch.compute_inline(sch.get_sblock(name))
    O = sch.get_sblock("O")
    Pb = sch.cache_read(O, 0, "global", consumer_blocks=[O])
    sch.unsafe_set_dtype(Pb, 0, "bfloat16")
    sch.transform_layout(Pb, ("write", 0), lambda w, h, c, t, r: (w, h, c, r, t))
    Vp = sch.cache_read(O, 1, "global")
    sch.transform_layout(Vp, ("write", 0), lambda w, h, c, t, e: (w, h, c, t // 2, e, t % 2))
    sch.transform_layout(sch.get_sblock("Qg"), ("write", 0), lambda w, h, r, d: (w, h, d // 2, r, d % 2))

    items = x86_paged._parallel_items(sch)
    for name in ("lse_row", "F", "acc"):
        sch.compute_at(sch.get_sblock(name), items, preserve_unit_loops=True)
    row, column, chunk = sch.get_loops(sch.get_sblock("acc"))[-3:]
    sch.reorder(chunk, row, column)
    sch.compute_at(O, chunk, preserve_unit_loops=True)
    r, e, t = sch.get_loops(O)[-3:]
    t0, t1 = sch.split(t, [None, n["pv_keys"]])
    e0, e1 = sch.split(e, [None, n["pv_columns"]])
    r0, r1 = sch.split(r, [None, n["pv_rows"]])
    sch.reorder(t0, e0, r0, r1, e1, t1)
    sch.compute_at(Vp, t0, preserve_unit_loops=True)
    sch.compute_at(sch.get_sblock("Vg"), t0, preserve_unit_loops=True)
    sch.compute_at(Pb, t0, preserve_unit_loops=True)
    for name in ("l", "P", "m", "X"):
        sch.compute_at(sch.get_sblock(name), chunk, preserve_unit_loops=True)
    key, x_row = sch.get_loops(sch.get_sblock("X"))[-2:]
    key_o, key_i = sch.split(key, [None, n["qk_keys"]])
    S = sch.get_sblock("S")
    sch.compute_at(S, key_o, preserve_unit_loops=True)
    sch.compute_at(sch.get_sblock("Kg"), key_o, preserve_unit_loops=True)
    for name in ("bound_lo", "bound_hi", "Qg"):
        sch.compute_at(sch.get_sblock(name), items, preserve_unit_loops=True)
    s_t, s_r, s_d = sch.get_loops(S)[-3:]
    s_r0, s_r1 = sch.split(s_r, [None, n["qk_rows"]])
    sch.reorder(s_r0, s_t, s_r1, s_d)

    def vec(name, lanes):
        last = sch.get_loops(sch.get_sblock(name))[-1]
        if int(sch.get(last).extent) > lanes:
            last = sch.split(last, [None, lanes])[1]
        sch.vectorize(last)

    vec("Kg", 32)
    vec("Vg", 32)
    for name in ("P", "X", "bound_lo", "bound_hi"):
        vec(name, LANES)
    vec("acc", LANES)
    p_key = sch.get_loops(sch.get_sblock("P"))[-2 if M <= LANES else -3]
    tiles = {sch.split(p_key, [None, n["qk_keys"]])[0]: "qk_keys", key_o: "qk_keys", t0: "pv_keys"}
    for name in ("m", "l"):
        r, t = sch.get_loops(sch.get_sblock(name))[-2:]
        tile, t = sch.split(t, [None, n["qk_keys"]])
        sch.reorder(tile, t, r)
        if M > LANES:
            r = sch.split(r, [None, LANES])[1]
        sch.vectorize(r)
        x86_paged._decompose(sch, name, tile)
        tiles[tile] = "qk_keys"
    # interleave
    v_t, v_e = sch.get_loops(Vp)[-2:]
    sch.tensorize(sch.split(v_t, [None, 2])[1], amx.interleave_rows(shape.head_dim_vo))
    init = sch.decompose_reduction(S, s_t)
    sch.tensorize(sch.get_loops(init)[-2], amx.omitted_init(n["qk_keys"], n["qk_rows"]))
    sch.tensorize(s_t, amx.bf16_product(n["qk_keys"], n["qk_rows"], shape.head_dim_qk, fresh=True))
    init = sch.decompose_reduction(O, t0)
    sch.vectorize(sch.split(sch.get_loops(init)[-1], [None, LANES])[1])
    sch.tensorize(r1, amx.bf16_product(n["pv_rows"], n["pv_columns"], n["pv_keys"]))
    x86_paged._decompose(sch, "acc", chunk)
    sch.annotate(chunk, TRIP, "chunks")
    for loop, kind in tiles.items():
        sch.annotate(loop, TRIP, f"keys:{n[kind]}")
    return x86_paged._trips(sch, shape)
