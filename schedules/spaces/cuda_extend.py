# mypy: ignore-errors
# (TVMScript is parsed from its text, not run: its names and annotations are not Python's.)
"""Paged extend on Hopper: units of a work item and KV head, warpgroup products (wgmma) over gathered tiles.

The first warpgroup of a CTA gathers tiles of keys and values through the page table (or from the new rows) by cp.async
into swizzled rings in shared memory; every other one owns 64 rows (query tokens times group) and keeps scores, values
and the softmax state in registers. Rings are handed over by mbarriers. While one product of values runs, the next
scores are on their way; with `pingpong` two consumers take turns at the tensor cores so that one's exponentials hide
behind the other's products. With `persistent` a CTA goes from unit to unit: keys and queries of the next are gathered
while consumers finish the last. The algebra is the definition's (paged_attention/definition.py).

Keys that no row of the item sees are never read: a tile repeats the first or last visible key in their place, with
probability 0.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import tirx
from tvm.script import tirx as T

from tilewright.schedules.intrinsics.cuda import (
    COPY_BATCH,
    PACK,
    address,
    arrive_if,
    await_phase,
    copy16,
    reread,
    shared_address,
    shuffle,
    strided,
    tile_address,
    tile_descriptor,
)
from tilewright.schedules.paged_attention.definition import (
    ITEM_COLUMNS,
    KV_BEGIN,
    KV_LEN,
    NEW_ROW,
    PART,
    POS,
    PREFIX,
    Q_LEN,
    Q_ROW,
    REQUEST,
    TVM_DTYPE,
    visible_bounds,
)
from tilewright.schedules.spaces.cuda_extend_gather import MIXED, NEW, POOL, gather, look_up
from tilewright.schedules.spaces.cuda_extend_softmax import fold, rescale, store
from tilewright.schedules.spaces.cuda_extend_tiles import (
    CLEAR_FROM,
    CLEAR_TO,
    END,
    FACTS,
    FIRST,
    HEAD,
    MULTIPROCESSORS,
    PARTIAL,
    POSITION,
    ROW,
    ROWS,
    TILES,
    TOKENS,
    Tiles,
    place,
)
from tilewright.schedules.workload import Workload

_WGMMA_TYPE = {"bf16": "bf16", "fp16": "f16"}
# Barriers of `pingpong`, one for each consumer's turn; 1 + n is the consumers' own.
_TURNS = 4


def odd(number: tirx.Expr) -> tirx.Expr:
    """0 or 1 as an int32: the phase of a barrier, the half of a pair."""
    return T.Cast("int32", number % T.uint32(2))


def extend(workload: Workload, decisions: Mapping[str, int]) -> tirx.PrimFunc:
    """The kernel of docs/kernel-abi.md for blocks of query tokens.

    Args:
        workload: operator "paged_extend", 16-bit, head dims multiples of 16 and at most 256.
        decisions: `rows` of an item (64 a consumer), `keys` of a tile, `stages` of the rings, `pingpong`, `persistent`,
            and `lazy`: whether values are scaled anew only where a row's maximum has grown by a lot.
    """
    z = Tiles(workload, decisions)
    G, D, Dv, BM, BN = z.group, z.dim, z.dim_vo, z.rows, z.keys
    NC, NST, CTAS = z.consumers, z.stages, MULTIPROCESSORS
    dtype, pack, kind = TVM_DTYPE[workload.dtype], PACK[workload.dtype], _WGMMA_TYPE[workload.dtype]
    NS, NO = BN // 2, Dv // 2  # accumulator registers of a thread
    QB, KB = BM * 8, BN * 8  # 16-byte units from one block of columns to the next
    KC = D // 8  # 16-byte chunks of a row
    mma_s = f"wgmma.mma_async.sync.aligned.m64n{BN}k16.f32.{kind}.{kind}"
    mma_o = f"wgmma.mma_async.sync.aligned.m64n{Dv}k16.f32.{kind}.{kind}"
    find, gather_k, gather_v = look_up(z), gather(z, D, 0), gather(z, Dv, 1)
    softmax, scale_values, write = fold(z), rescale(z), store(z, workload.dtype)

    @T.prim_func
    def paged_extend(
        q_: T.handle,
        k_: T.handle,
        v_: T.handle,
        k_new_: T.handle,
        v_new_: T.handle,
        req_to_token_: T.handle,
        req_pool_indices_: T.handle,
        kv_start_: T.handle,
        items_: T.handle,
        sinks_: T.handle,
        out_: T.handle,
        lse_: T.handle,
        part_o_: T.handle,
        part_lse_: T.handle,
        scale_log2: T.float32,
        cap_log2: T.float32,
        scale_over_cap: T.float32,
        window: T.int32,
        lookahead: T.int32,
    ):
        T.func_attr({"global_symbol": "paged_extend", "tirx.launch_bounds_min_blocks_per_sm": 1})
        tokens, heads, slots, fresh, table_rows, table_columns, requests, W, partials = (
            T.int64(),
            T.int64(),
            T.int64(),
            T.int64(),
            T.int64(),
            T.int64(),
            T.int64(),
            T.int64(),
            T.int64(),
        )
        q0, q1, k0, k1, v0, v1, kn0, kn1, vn0, vn1, o0, o1, l0, l1, t0, t1, i0, s0 = (
            T.int64(),
            T.int64(),
            T.int64(),
            T.int64(),
            T.int64(),
            T.int64(),
            T.int64(),
            T.int64(),
            T.int64(),
            T.int64(),
            T.int64(),
            T.int64(),
            T.int64(),
            T.int64(),
            T.int64(),
            T.int64(),
            T.int64(),
            T.int64(),
        )
        q = T.match_buffer(
            q_,
            (tokens, heads * G, D),
            dtype,
            strides=(q0, q1, 1),
            align=16,
            layout=strided((tokens, heads * G, D), (q0, q1, 1)),
        )
        k_buffer = T.match_buffer(
            k_, (slots, heads, D), dtype, strides=(k0, k1, 1), align=16, layout=strided((slots, heads, D), (k0, k1, 1))
        )
        v_buffer = T.match_buffer(
            v_,
            (slots, heads, Dv),
            dtype,
            strides=(v0, v1, 1),
            align=16,
            layout=strided((slots, heads, Dv), (v0, v1, 1)),
        )
        k_new = T.match_buffer(
            k_new_,
            (fresh, heads, D),
            dtype,
            strides=(kn0, kn1, 1),
            align=16,
            layout=strided((fresh, heads, D), (kn0, kn1, 1)),
        )
        v_new = T.match_buffer(
            v_new_,
            (fresh, heads, Dv),
            dtype,
            strides=(vn0, vn1, 1),
            align=16,
            layout=strided((fresh, heads, Dv), (vn0, vn1, 1)),
        )
        req_to_token = T.match_buffer(
            req_to_token_,
            (table_rows, table_columns),
            "int32",
            strides=(t0, t1),
            align=4,
            layout=strided((table_rows, table_columns), (t0, t1)),
        )
        req_pool_indices = T.match_buffer(
            req_pool_indices_, (requests,), "int32", strides=(i0,), align=4, layout=strided((requests,), (i0,))
        )
        kv_start = T.match_buffer(
            kv_start_, (requests,), "int32", strides=(s0,), align=4, layout=strided((requests,), (s0,))
        )
        items = T.match_buffer(items_, (W, ITEM_COLUMNS), "int32", align=4)
        sinks = T.match_buffer(sinks_, (heads * G,), "float32", align=4)
        out = T.match_buffer(
            out_,
            (tokens, heads * G, Dv),
            dtype,
            strides=(o0, o1, 1),
            align=4,
            layout=strided((tokens, heads * G, Dv), (o0, o1, 1)),
        )
        lse = T.match_buffer(
            lse_,
            (tokens, heads * G),
            "float32",
            strides=(l0, l1),
            align=4,
            layout=strided((tokens, heads * G), (l0, l1)),
        )
        part_o = T.match_buffer(part_o_, (partials, heads * G, Dv), "float32", align=16)
        part_lse = T.match_buffer(part_lse_, (partials, heads * G), "float32", align=4)
        T.device_entry()
        cta = T.cta_id([CTAS if z.persistent else T.Cast("int32", heads) * T.Cast("int32", W)])
        tx = T.thread_id([z.threads])
        smem = T.alloc_buffer((z.elements,), dtype, scope="shared.dyn", align=1024)
        bars = T.alloc_buffer((z.barriers,), "uint64", scope="shared", align=8)
        # What consumers must know of a unit: registers are scarce, they look it up where they need it.
        facts = T.alloc_buffer((2, FACTS), "int32", scope="shared", align=16)
        # Address, stride from row to row and from head to head, in bytes, of k_buffer, v_buffer, k_new and v_new: held
        # in registers they would not leave the producer enough of them.
        sources = T.alloc_buffer((4, 3), "int64", scope="shared", align=16)
        if tx == 0:
            sources[0, 0] = address(k_buffer.ptr_to([0, 0, 0]))
            sources[0, 1] = k0 * 2
            sources[0, 2] = k1 * 2
            sources[1, 0] = address(v_buffer.ptr_to([0, 0, 0]))
            sources[1, 1] = v0 * 2
            sources[1, 2] = v1 * 2
            sources[2, 0] = address(k_new.ptr_to([0, 0, 0]))
            sources[2, 1] = kn0 * 2
            sources[2, 2] = kn1 * 2
            sources[3, 0] = address(v_new.ptr_to([0, 0, 0]))
            sources[3, 1] = vn0 * 2
            sources[3, 2] = vn1 * 2
            for i in T.unroll(NC):
                T.ptx.mbarrier.init.shared.b64(bars.ptr_to([z.q_full + i]), T.uint32(128))
                T.ptx.mbarrier.init.shared.b64(bars.ptr_to([z.q_empty + i]), T.uint32(4))
            for i in T.unroll(NST):
                T.ptx.mbarrier.init.shared.b64(bars.ptr_to([z.k_full + i]), T.uint32(128))
                T.ptx.mbarrier.init.shared.b64(bars.ptr_to([z.k_empty + i]), T.uint32(4 * NC))
                T.ptx.mbarrier.init.shared.b64(bars.ptr_to([z.v_full + i]), T.uint32(128))
                T.ptx.mbarrier.init.shared.b64(bars.ptr_to([z.v_empty + i]), T.uint32(4 * NC))
            for i in T.unroll(2):
                T.ptx.mbarrier.init.shared.b64(bars.ptr_to([z.unit_full + i]), T.uint32(1))
                T.ptx.mbarrier.init.shared.b64(bars.ptr_to([z.unit_empty + i]), T.uint32(4 * NC))
        T.ptx.fence.proxy.async_.shared__cta()
        T.cuda.cta_sync()
        if tx < 128:
            T.ptx["setmaxnreg.dec.sync.aligned.u32"](z.few)
            units: T.int32 = T.Cast("int32", heads) * T.Cast("int32", W)
            tiles_done: T.uint32 = T.uint32(0)
            units_done: T.uint32 = T.uint32(0)
            queries_done: T.uint32 = T.uint32(0)
            lane: T.int32 = tx % 32
            warp: T.int32 = tx // 32
            held = T.alloc_local([z.held], "int32")
            ahead = T.alloc_local([z.held], "int32")
            rows = T.alloc_local([max(z.passes(D), z.passes(Dv))], "int32")
            addresses = T.alloc_local([COPY_BATCH], "int64")
            for turn in T.serial((units + (CTAS - 1)) // CTAS if z.persistent else 1):
                # There and back again: lists are sorted by cost, so that every block gets as much as the others.
                unit: T.int32 = turn * CTAS + T.Select(turn % 2 == 0, cta, CTAS - 1 - cta) if z.persistent else cta
                w: T.int32 = T.min(unit, units - 1) // T.Cast("int32", heads)
                hk: T.int32 = T.min(unit, units - 1) % T.Cast("int32", heads)
                if T.And(unit < units, items[w, Q_LEN] > 0):
                    q_len: T.int32 = items[w, Q_LEN]
                    pos: T.int32 = items[w, POS]
                    end: T.int32 = items[w, KV_BEGIN] + items[w, KV_LEN]
                    seen: T.int32 = T.max(items[w, KV_BEGIN], visible_bounds(pos, end, window, lookahead)[0] + 1)
                    last: T.int32 = visible_bounds(pos + q_len - 1, end, window, lookahead)[1]
                    # Tiles begin at whole tiles from the item's first key, wherever its rows begin to see: then a row
                    # is added up in the same parts whatever rows and tensors it is worked on with.
                    first: T.int32 = items[w, KV_BEGIN] + (seen - items[w, KV_BEGIN]) // BN * BN
                    tiles: T.int32 = T.Select(seen <= last, (last - first) // BN + 1, 0)
                    prefix: T.int32 = items[w, PREFIX]
                    new_row: T.int32 = items[w, NEW_ROW]
                    table_row: T.int64 = T.Cast("int64", req_pool_indices[items[w, REQUEST]])
                    column: T.int64 = T.Cast("int64", kv_start[items[w, REQUEST]])
                    at: T.int32 = odd(units_done)
                    T.cuda.mbarrier_wait(bars.ptr_to([z.unit_empty + at]), odd(units_done // T.uint32(2)) ^ 1)
                    if tx == 0:
                        facts[at, FIRST] = first
                        # Tiles from clear_from to before clear_to are seen whole by every row.
                        facts[at, CLEAR_FROM] = (
                            T.max(visible_bounds(pos + q_len - 1, end, window, lookahead)[0] - first + BN, 0) // BN
                        )
                        facts[at, CLEAR_TO] = T.max(visible_bounds(pos, end, window, lookahead)[1] + 1 - first, 0) // BN
                        facts[at, POSITION] = pos
                        facts[at, END] = end
                        facts[at, TILES] = tiles
                        facts[at, TOKENS] = q_len
                        facts[at, ROW] = items[w, Q_ROW]
                        facts[at, HEAD] = hk
                        facts[at, PARTIAL] = items[w, PART]
                        T.ptx.mbarrier.arrive.shared.b64(bars.ptr_to([z.unit_full + at]))

                    units_done = units_done + T.uint32(1)
                    if tiles > 0:
                        find(
                            *(ahead, first, seen, last, prefix, new_row),
                            *(req_to_token, table_row, column, lane, warp),
                        )
                    for j in T.serial(tiles):
                        slot: T.int32 = T.Cast("int32", tiles_done % T.uint32(NST))
                        parity: T.int32 = odd(tiles_done // T.uint32(NST)) ^ 1
                        begin: T.int32 = first + j * BN
                        kind: T.int32 = T.Select(
                            T.min(begin + (BN - 1), last) < prefix,
                            POOL,
                            T.Select(T.max(begin, seen) < prefix, MIXED, NEW),
                        )
                        T.cuda.mbarrier_wait(bars.ptr_to([z.k_empty + slot]), parity)
                        for i in T.unroll(z.held):
                            held[i] = ahead[i]
                        gather_k(
                            *(smem.ptr_to([z.k_ring + slot * z.k_tile]), kind, prefix - begin),
                            *(sources, hk, held, rows, addresses, lane, warp),
                        )
                        T.ptx.cp.async_.mbarrier.arrive.noinc.shared__cta.b64(bars.ptr_to([z.k_full + slot]))
                        if j == 0:
                            # The queries follow the first keys, which find room before the last unit is done with its.
                            for cw in T.serial(NC):
                                T.cuda.mbarrier_wait(bars.ptr_to([z.q_empty + cw]), odd(queries_done) ^ 1)
                                thread: T.int32 = reread(tx)
                                for i in T.serial(ROWS * KC // 128):
                                    r: T.int32 = cw * ROWS + (i * 128 + thread) // KC
                                    c: T.int32 = (i * 128 + thread) % KC
                                    copy16(
                                        smem.ptr_to([place(r, c, BM)]),
                                        q.ptr_to([items[w, Q_ROW] + T.min(r // G, q_len - 1), hk * G + r % G, c * 8]),
                                    )
                                T.ptx.cp.async_.mbarrier.arrive.noinc.shared__cta.b64(bars.ptr_to([z.q_full + cw]))
                            queries_done = queries_done + T.uint32(1)
                        if j + 1 < tiles:
                            find(
                                *(ahead, begin + BN, seen, last, prefix, new_row),
                                *(req_to_token, table_row, column, lane, warp),
                            )
                        T.cuda.mbarrier_wait(bars.ptr_to([z.v_empty + slot]), parity)
                        gather_v(
                            *(smem.ptr_to([z.v_ring + slot * z.v_tile]), kind, prefix - begin),
                            *(sources, hk, held, rows, addresses, lane, warp),
                        )
                        T.ptx.cp.async_.mbarrier.arrive.noinc.shared__cta.b64(bars.ptr_to([z.v_full + slot]))
                        tiles_done = tiles_done + T.uint32(1)
            at: T.int32 = odd(units_done)
            T.cuda.mbarrier_wait(bars.ptr_to([z.unit_empty + at]), odd(units_done // T.uint32(2)) ^ 1)
            if tx == 0:
                facts[at, TOKENS] = 0
                T.ptx.mbarrier.arrive.shared.b64(bars.ptr_to([z.unit_full + at]))
            T.ptx.cp.async_.wait_group(0)
        else:
            T.ptx["setmaxnreg.inc.sync.aligned.u32"](z.many)
            tid: T.int32 = tx % 128
            # The same in all lanes, as the compiler can see: what follows from it stays in uniform registers.
            cw: T.int32 = shuffle(tx // 128 - 1, 0)
            lane: T.int32 = tx % 32
            barrier: T.uint32 = shared_address(bars.ptr_to([0]))
            row0: T.int32 = cw * ROWS + (tid // 32) * 16 + lane // 4
            plain: T.bool = T.And(cap_log2 <= T.float32(0), scale_log2 > T.float32(0))
            factor: T.float32 = T.Select(plain, scale_log2, T.float32(1))
            S = T.alloc_local([NS], "float32")
            O = T.alloc_local([NO], "float32")
            P = T.alloc_local([BN // 4], "uint32")
            m = T.alloc_local([2], "float32")
            l = T.alloc_local([2], "float32")
            keep = T.alloc_local([2], "float32")
            units_done: T.uint32 = T.uint32(0)
            queries_done: T.uint32 = T.uint32(0)
            # Of the keys' ring: next tile's stage and how often it was gone through, and the same of the values'.
            slot: T.int32 = 0
            parity: T.int32 = 0
            v_slot: T.int32 = 0
            v_parity: T.int32 = 0
            dq: T.uint32 = tile_address(smem.ptr_to([0])) + T.Cast("uint32", cw * (ROWS * 8)) + T.uint32(1 << 16)
            dk: T.uint32 = tile_address(smem.ptr_to([z.k_ring])) + T.uint32(1 << 16)
            dv: T.uint32 = tile_address(smem.ptr_to([z.v_ring])) + T.uint32(KB << 16)

            @T.inline
            def gemm_s(slot):
                for kk in T.unroll(D // 16):
                    T.ptx[mma_s](
                        *[S[i] for i in range(NS)],
                        tile_descriptor(dq + T.uint32((kk // 4) * QB + (kk % 4) * 2)),
                        tile_descriptor(
                            dk + T.Cast("uint32", slot * (z.k_tile * 2 // 16)) + T.uint32((kk // 4) * KB + (kk % 4) * 2)
                        ),
                        kk != 0,
                        1,
                        1,
                        0,
                        0,
                    )
                T.ptx.wgmma.commit_group.sync.aligned()

            @T.inline
            def gemm_o(slot):
                for kk in T.unroll(BN // 16):
                    T.ptx[mma_o](
                        *[O[i] for i in range(NO)],
                        P[kk * 4],
                        P[kk * 4 + 1],
                        P[kk * 4 + 2],
                        P[kk * 4 + 3],
                        tile_descriptor(dv + T.Cast("uint32", slot * (z.v_tile * 2 // 16)) + T.uint32(kk * 128)),
                        T.bool(True),
                        1,
                        1,
                        1,
                    )
                T.ptx.wgmma.commit_group.sync.aligned()

            @T.inline
            def round_p():
                for i in T.unroll(BN // 4):
                    P[i] = pack(S[i * 2], S[i * 2 + 1])

            if z.pingpong and cw == 1:
                T.ptx.bar.arrive(T.uint32(_TURNS), T.uint32(256))
            await_phase(barrier + T.Cast("uint32", (z.unit_full + 0) * 8), 0)
            go: T.int32 = facts[0, TOKENS]
            while go > 0:
                at: T.int32 = odd(units_done)
                tiles: T.int32 = facts[at, TILES]
                clear_from: T.int32 = facts[at, CLEAR_FROM]
                clear_to: T.int32 = facts[at, CLEAR_TO]
                for i in T.unroll(2):
                    m[i] = T.float32(float("-inf"))
                    l[i] = T.float32(0)
                for i in T.unroll(NO):
                    O[i] = T.float32(0)
                if tiles > 0:
                    await_phase(barrier + T.Cast("uint32", (z.q_full + cw) * 8), odd(queries_done))
                    queries_done = queries_done + T.uint32(1)
                    await_phase(barrier + T.Cast("uint32", (z.k_full + slot) * 8), parity)
                    T.ptx.fence.proxy.async_.shared__cta()
                    if z.pingpong:
                        T.ptx.bar.sync(T.Cast("uint32", _TURNS + cw), T.uint32(256))
                    T.ptx.wgmma.fence.sync.aligned()
                    gemm_s(slot)
                    if z.pingpong:
                        T.ptx.bar.arrive(T.Cast("uint32", _TURNS + 1 - cw), T.uint32(256))
                    T.ptx.wgmma.wait_group.sync.aligned(0)
                    arrive_if(barrier + T.Cast("uint32", (z.k_empty + slot) * 8), lane == 0)
                    arrive_if(barrier + T.Cast("uint32", (z.q_empty + cw) * 8), T.And(lane == 0, tiles == 1))
                    parity = T.Select(slot == NST - 1, parity ^ 1, parity)
                    slot = T.Select(slot == NST - 1, 0, slot + 1)
                    softmax(
                        *(S, m, l, keep, 0, at, facts, clear_from, clear_to),
                        *(row0, lane, plain, factor),
                        (scale_log2, cap_log2, scale_over_cap, window, lookahead),
                    )
                    round_p()
                    for j in T.serial(tiles - 1):
                        # The values were asked for before these keys.
                        await_phase(barrier + T.Cast("uint32", (z.k_full + slot) * 8), parity)
                        await_phase(barrier + T.Cast("uint32", (z.v_full + v_slot) * 8), v_parity)
                        T.ptx.fence.proxy.async_.shared__cta()
                        if z.pingpong:
                            T.ptx.bar.sync(T.Cast("uint32", _TURNS + cw), T.uint32(256))
                        T.ptx.wgmma.fence.sync.aligned()
                        gemm_s(slot)
                        gemm_o(v_slot)
                        if z.pingpong:
                            T.ptx.bar.arrive(T.Cast("uint32", _TURNS + 1 - cw), T.uint32(256))
                        T.ptx.wgmma.wait_group.sync.aligned(1)
                        arrive_if(barrier + T.Cast("uint32", (z.k_empty + slot) * 8), lane == 0)
                        arrive_if(barrier + T.Cast("uint32", (z.q_empty + cw) * 8), T.And(lane == 0, j == tiles - 2))
                        parity = T.Select(slot == NST - 1, parity ^ 1, parity)
                        slot = T.Select(slot == NST - 1, 0, slot + 1)
                        softmax(
                            *(S, m, l, keep, j + 1, at, facts, clear_from, clear_to),
                            *(row0, lane, plain, factor),
                            (scale_log2, cap_log2, scale_over_cap, window, lookahead),
                        )
                        T.ptx.wgmma.wait_group.sync.aligned(0)
                        arrive_if(barrier + T.Cast("uint32", (z.v_empty + v_slot) * 8), lane == 0)
                        v_parity = T.Select(v_slot == NST - 1, v_parity ^ 1, v_parity)
                        v_slot = T.Select(v_slot == NST - 1, 0, v_slot + 1)
                        scale_values(O, keep)
                        round_p()
                    await_phase(barrier + T.Cast("uint32", (z.v_full + v_slot) * 8), v_parity)
                    T.ptx.fence.proxy.async_.shared__cta()
                    if z.pingpong:
                        T.ptx.bar.sync(T.Cast("uint32", _TURNS + cw), T.uint32(256))
                    T.ptx.wgmma.fence.sync.aligned()
                    gemm_o(v_slot)
                    if z.pingpong:
                        T.ptx.bar.arrive(T.Cast("uint32", _TURNS + 1 - cw), T.uint32(256))
                    T.ptx.wgmma.wait_group.sync.aligned(0)
                    arrive_if(barrier + T.Cast("uint32", (z.v_empty + v_slot) * 8), lane == 0)
                    v_parity = T.Select(v_slot == NST - 1, v_parity ^ 1, v_parity)
                    v_slot = T.Select(v_slot == NST - 1, 0, v_slot + 1)
                write(*(O, m, l, at, facts, row0, lane, factor, sinks), *(out, lse, part_o, part_lse))
                T.cuda.warp_sync()
                arrive_if(barrier + T.Cast("uint32", (z.unit_empty + at) * 8), lane == 0)
                units_done = units_done + T.uint32(1)
                await_phase(
                    barrier + T.Cast("uint32", (z.unit_full + odd(units_done)) * 8),
                    odd(units_done // T.uint32(2)),
                )
                go = facts[odd(units_done), TOKENS]

    return paged_extend
