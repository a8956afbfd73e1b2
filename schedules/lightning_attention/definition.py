"""Lightning attention: the recurrence S_t = exp(-a) S_(t-1) + k_t^T v_t, out_t = scale q_t S_t, per request and head.

Each operator's algebra stands here once, for every target, without a schedule: blocks over named axes that a space
splits, moves and vectorises. It is TVMScript and not TE because TE has neither the sequential recurrence over chunks
nor data-dependent trip counts. Every scope has one writer per buffer, which is what lets schedule primitives apply, so
the definitions are functional: they read an old state and write a new one. `in_place` makes the two one afterwards.

The maths, the reasons for its form and a picture of the layouts are in README.md beside this file.
"""

from __future__ import annotations

from typing import TypeAlias

import tvm_ffi
from tvm import s_tir, tirx
from tvm.script import tirx as T

from tilewright.schedules.vector_math import LOG2_E, exp2, f32

TVM_DTYPE = {"bf16": "bfloat16", "fp16": "float16", "f32": "float32"}

Size: TypeAlias = "int | tirx.Var"


def weight(slope: tirx.Expr, tokens: tirx.Expr) -> tirx.Expr:
    """exp(-slope * tokens), the decay over `tokens` >= 0 tokens, in f32."""
    return exp2(slope * f32(-LOG2_E) * tirx.Cast("float32", tokens))


def weight_rest(slope: tirx.Expr, tokens: tirx.Expr) -> tirx.Expr:
    """What `weight` lost to rounding: weight + weight_rest is exp(-slope * tokens) to far better than f32.

    A state is multiplied by a weight once a chunk or token, so a rounding of the weight compounds over the whole
    request where the state lives long. Zero for decays below 0.7, which forget faster than an error can compound.
    """
    x = slope * f32(-1.0) * tirx.Cast("float32", tokens)
    series = f32(1 / 5040)
    for factorial in (720, 120, 24, 6, 2, 1):
        series = series * x + f32(1 / factorial)
    return tirx.Select(x > f32(-0.35), x * series - (weight(slope, tokens) - f32(1.0)), f32(0.0))


def lightning_extend(
    dtype: str, dk: Size, dv: Size, *, chunk: int, panel: int, columns: int | None = None
) -> tirx.PrimFunc:
    """Chunked extend over ragged requests.

    Args:
        dtype: of q, k, v and out, a key of TVM_DTYPE.
        dk: head dim of q and k, a number or an int64 variable.
        dv: head dim of v and out.
        chunk: tokens that are served by matrix products at once; a multiple of `panel` and of 8.
        panel: width of the panels that all intermediate tensors are cut into: the contiguous dimension.
        columns: columns of the state that are one independent piece of work, a multiple of `panel`; None = all.

    Returns:
        The function of docs/kernel-abi.md with one more parameter, `state_out`, before `scale`: see `in_place`.
        Blocks, outermost first: sequence (b, h, g) > decay, load, chunk (c), store; inside chunk: q_gather (i, d),
        k_gather (j, d), v_gather (p, j, e), k_decay (j, d), q_turn (p, i, d), rest, raw (j, p, i | d),
        score (j, p, i), inter (i, p, e | d), intra (i, p, e | j), out (i, p, e), update (p, d, e | j),
        carry (p, d, e).
    """
    io_dtype = TVM_DTYPE[dtype]
    width = dv if columns is None else columns
    groups = 1 if columns is None else tirx.ceildiv(dv, columns)
    panels = tirx.ceildiv(width, panel)
    row_panels = chunk // panel
    chunks = 2**31 // chunk  # bound of the chunk index: positions are int32
    table = 2 * chunk + 8  # weight of t tokens at chunk + t, for t in [-chunk, chunk]; those below 0 are never used

    @T.prim_func(s_tir=True)
    def lightning_extend(
        q_handle: T.handle,
        k_handle: T.handle,
        v_handle: T.handle,
        state_handle: T.handle,
        state_indices_handle: T.handle,
        has_initial_state_handle: T.handle,
        qo_indptr_handle: T.handle,
        slopes_handle: T.handle,
        out_handle: T.handle,
        state_out_handle: T.handle,
        scale: T.float32,
    ):
        T.func_attr({"global_symbol": "lightning_extend", "tirx.noalias": True})
        tokens, heads, slots, batch = T.int64(), T.int64(), T.int64(), T.int64()
        q = T.match_buffer(q_handle, (tokens, heads, dk), io_dtype)
        k = T.match_buffer(k_handle, (tokens, heads, dk), io_dtype)
        v = T.match_buffer(v_handle, (tokens, heads, dv), io_dtype)
        state = T.match_buffer(state_handle, (slots, heads, dk, dv), "float32")
        state_indices = T.match_buffer(state_indices_handle, (batch,), "int32")
        has_initial_state = T.match_buffer(has_initial_state_handle, (batch,), "int32")
        qo_indptr = T.match_buffer(qo_indptr_handle, (batch + 1,), "int32")
        slopes = T.match_buffer(slopes_handle, (heads,), "float32")
        out = T.match_buffer(out_handle, (tokens, heads, dv), io_dtype)
        state_out = T.match_buffer(state_out_handle, (slots, heads, dk, dv), "float32")
        for b, h, g in T.grid(batch, heads, groups):
            with T.sblock("sequence"):
                vb, vh, vg = T.axis.remap("SSS", [b, h, g])
                decay = T.sblock_alloc_buffer((table,), "float32")
                carry = T.sblock_alloc_buffer((panels, dk, panel), "float32")
                for t in range(table):
                    with T.sblock("decay"):
                        vn = T.axis.spatial(table, t)
                        decay[vn] = weight(slopes[vh], T.max(vn - chunk, 0))
                for p, d, e in T.grid(panels, dk, panel):
                    with T.sblock("load"):
                        vp, vd, ve = T.axis.remap("SSS", [p, d, e])
                        carry[vp, vd, ve] = T.if_then_else(
                            state_indices[vb] >= 0 and has_initial_state[vb] != 0 and vg * width + vp * panel + ve < dv,
                            state[state_indices[vb], vh, vd, vg * width + vp * panel + ve],
                            T.float32(0),
                        )
                for c in range((qo_indptr[vb + 1] - qo_indptr[vb] + (chunk - 1)) // chunk):
                    with T.sblock("chunk"):
                        vc = T.axis.opaque(chunks, c)
                        qc = T.sblock_alloc_buffer((chunk, dk), "float32")
                        qt = T.sblock_alloc_buffer((row_panels, dk, panel), "float32")
                        kc = T.sblock_alloc_buffer((chunk, dk), "float32")
                        kd = T.sblock_alloc_buffer((chunk, dk), "float32")
                        vt = T.sblock_alloc_buffer((panels, chunk, panel), "float32")
                        raw = T.sblock_alloc_buffer((row_panels, chunk, panel), "float32")
                        score = T.sblock_alloc_buffer((row_panels, chunk, panel), "float32")
                        inter = T.sblock_alloc_buffer((chunk, panels, panel), "float32")
                        intra = T.sblock_alloc_buffer((chunk, panels, panel), "float32")
                        update = T.sblock_alloc_buffer((panels, dk, panel), "float32")
                        rest = T.sblock_alloc_buffer((1,), "float32")
                        carry_out = T.sblock_alloc_buffer((panels, dk, panel), "float32")
                        # Rows beyond the request are zero: their memory may hold anything, and 0 * NaN is NaN.
                        for i, d in T.grid(chunk, dk):
                            with T.sblock("q_gather"):
                                vi, vd = T.axis.remap("SS", [i, d])
                                qc[vi, vd] = T.if_then_else(
                                    vc * chunk + vi < qo_indptr[vb + 1] - qo_indptr[vb],
                                    T.Cast("float32", q[qo_indptr[vb] + vc * chunk + vi, vh, vd]),
                                    T.float32(0),
                                )
                        for j, d in T.grid(chunk, dk):
                            with T.sblock("k_gather"):
                                vj, vd = T.axis.remap("SS", [j, d])
                                kc[vj, vd] = T.if_then_else(
                                    vc * chunk + vj < qo_indptr[vb + 1] - qo_indptr[vb],
                                    T.Cast("float32", k[qo_indptr[vb] + vc * chunk + vj, vh, vd]),
                                    T.float32(0),
                                )
                        for p, j, e in T.grid(panels, chunk, panel):
                            with T.sblock("v_gather"):
                                vp, vj, ve = T.axis.remap("SSS", [p, j, e])
                                vt[vp, vj, ve] = T.if_then_else(
                                    vc * chunk + vj < qo_indptr[vb + 1] - qo_indptr[vb]
                                    and vg * width + vp * panel + ve < dv,
                                    T.Cast(
                                        "float32", v[qo_indptr[vb] + vc * chunk + vj, vh, vg * width + vp * panel + ve]
                                    ),
                                    T.float32(0),
                                )
                        for j, d in T.grid(chunk, dk):
                            with T.sblock("k_decay"):
                                vj, vd = T.axis.remap("SS", [j, d])
                                kd[vj, vd] = (
                                    kc[vj, vd]
                                    * decay[
                                        chunk
                                        + T.max(
                                            T.min(chunk, qo_indptr[vb + 1] - qo_indptr[vb] - vc * chunk) - 1 - vj, 0
                                        )
                                    ]
                                )
                        for p, i, d in T.grid(row_panels, panel, dk):
                            with T.sblock("q_turn"):
                                vp, vi, vd = T.axis.remap("SSS", [p, i, d])
                                qt[vp, vd, vi] = qc[vp * panel + vi, vd]
                        for z in range(1):
                            with T.sblock("rest"):
                                vz = T.axis.spatial(1, z)
                                rest[vz] = weight_rest(
                                    slopes[vh], T.min(chunk, qo_indptr[vb + 1] - qo_indptr[vb] - vc * chunk)
                                )
                        for j, p, i, d in T.grid(chunk, row_panels, panel, dk):
                            with T.sblock("raw"):
                                vj, vp, vi, vd = T.axis.remap("SSSR", [j, p, i, d])
                                with T.init():
                                    raw[vp, vj, vi] = T.float32(0)
                                raw[vp, vj, vi] = raw[vp, vj, vi] + kc[vj, vd] * qt[vp, vd, vi]
                        for j, p, i in T.grid(chunk, row_panels, panel):
                            with T.sblock("score"):
                                vj, vp, vi = T.axis.remap("SSS", [j, p, i])
                                score[vp, vj, vi] = T.Select(
                                    vj <= vp * panel + vi,
                                    raw[vp, vj, vi] * decay[chunk + vp * panel + vi - vj],
                                    T.float32(0),
                                )
                        for i, p, e, d in T.grid(chunk, panels, panel, dk):
                            with T.sblock("inter"):
                                vi, vp, ve, vd = T.axis.remap("SSSR", [i, p, e, d])
                                with T.init():
                                    inter[vi, vp, ve] = T.float32(0)
                                inter[vi, vp, ve] = inter[vi, vp, ve] + qc[vi, vd] * carry[vp, vd, ve]
                        for i, p, e, j in T.grid(chunk, panels, panel, chunk):
                            with T.sblock("intra"):
                                vi, vp, ve, vj = T.axis.remap("SSSR", [i, p, e, j])
                                with T.init():
                                    intra[vi, vp, ve] = T.float32(0)
                                # The score of later tokens is 0; the condition keeps their NaN and infinities out.
                                intra[vi, vp, ve] = intra[vi, vp, ve] + T.if_then_else(
                                    vj <= vi, score[vi // panel, vj, vi % panel] * vt[vp, vj, ve], T.float32(0)
                                )
                        for i, p, e in T.grid(chunk, panels, panel):
                            with T.sblock("out"):
                                vi, vp, ve = T.axis.remap("SSS", [i, p, e])
                                if (
                                    vc * chunk + vi < qo_indptr[vb + 1] - qo_indptr[vb]
                                    and vg * width + vp * panel + ve < dv
                                ):
                                    out[qo_indptr[vb] + vc * chunk + vi, vh, vg * width + vp * panel + ve] = T.Cast(
                                        io_dtype,
                                        T.Select(
                                            state_indices[vb] >= 0,
                                            scale * (intra[vi, vp, ve] + decay[chunk + 1 + vi] * inter[vi, vp, ve]),
                                            T.float32(0),
                                        ),
                                    )
                        for p, d, e, j in T.grid(panels, dk, panel, chunk):
                            with T.sblock("update"):
                                vp, vd, ve, vj = T.axis.remap("SSSR", [p, d, e, j])
                                with T.init():
                                    update[vp, vd, ve] = T.float32(0)
                                update[vp, vd, ve] = update[vp, vd, ve] + kd[vj, vd] * vt[vp, vj, ve]
                        for p, d, e in T.grid(panels, dk, panel):
                            with T.sblock("carry"):
                                vp, vd, ve = T.axis.remap("SSS", [p, d, e])
                                carry_out[vp, vd, ve] = decay[
                                    chunk + T.min(chunk, qo_indptr[vb + 1] - qo_indptr[vb] - vc * chunk)
                                ] * carry[vp, vd, ve] + (rest[0] * carry[vp, vd, ve] + update[vp, vd, ve])
                for p, d, e in T.grid(panels, dk, panel):
                    with T.sblock("store"):
                        vp, vd, ve = T.axis.remap("SSS", [p, d, e])
                        if (
                            state_indices[vb] >= 0
                            and qo_indptr[vb + 1] > qo_indptr[vb]
                            and vg * width + vp * panel + ve < dv
                        ):
                            state_out[state_indices[vb], vh, vd, vg * width + vp * panel + ve] = carry[vp, vd, ve]

    return lightning_extend


def lightning_decode(dtype: str, dk: Size, dv: Size, *, panel: int) -> tirx.PrimFunc:
    """One token per request.

    Args:
        dtype: of q, k, v and out, a key of TVM_DTYPE.
        dk: head dim of q and k, a number or an int64 variable.
        dv: head dim of v and out.
        panel: width of the panels that rows of the state are walked in.

    Returns:
        The function of docs/kernel-abi.md with one more parameter, `state_out`, before `scale`: see `in_place`.
        Blocks: token (b, h) > q_gather (d), k_gather (d), v_gather (p, e), weights, step (once, or never for
        slot -1), out (p, e); inside step: fresh (d, p, e), store (d, p, e), read (p, e | d).
    """
    io_dtype = TVM_DTYPE[dtype]
    panels = tirx.ceildiv(dv, panel)

    @T.prim_func(s_tir=True)
    def lightning_decode(
        q_handle: T.handle,
        k_handle: T.handle,
        v_handle: T.handle,
        state_handle: T.handle,
        state_indices_handle: T.handle,
        slopes_handle: T.handle,
        out_handle: T.handle,
        state_out_handle: T.handle,
        scale: T.float32,
    ):
        T.func_attr({"global_symbol": "lightning_decode", "tirx.noalias": True})
        heads, slots, batch = T.int64(), T.int64(), T.int64()
        q = T.match_buffer(q_handle, (batch, heads, dk), io_dtype)
        k = T.match_buffer(k_handle, (batch, heads, dk), io_dtype)
        v = T.match_buffer(v_handle, (batch, heads, dv), io_dtype)
        state = T.match_buffer(state_handle, (slots, heads, dk, dv), "float32")
        state_indices = T.match_buffer(state_indices_handle, (batch,), "int32")
        slopes = T.match_buffer(slopes_handle, (heads,), "float32")
        out = T.match_buffer(out_handle, (batch, heads, dv), io_dtype)
        state_out = T.match_buffer(state_out_handle, (slots, heads, dk, dv), "float32")
        for b, h in T.grid(batch, heads):
            with T.sblock("token"):
                vb, vh = T.axis.remap("SS", [b, h])
                qf = T.sblock_alloc_buffer((dk,), "float32")
                kf = T.sblock_alloc_buffer((dk,), "float32")
                vf = T.sblock_alloc_buffer((panels, panel), "float32")
                weights = T.sblock_alloc_buffer((2,), "float32")
                sums = T.sblock_alloc_buffer((panels, panel), "float32")
                for d in range(dk):
                    with T.sblock("q_gather"):
                        vd = T.axis.spatial(dk, d)
                        qf[vd] = T.Cast("float32", q[vb, vh, vd])
                for d in range(dk):
                    with T.sblock("k_gather"):
                        vd = T.axis.spatial(dk, d)
                        kf[vd] = T.Cast("float32", k[vb, vh, vd])
                for p, e in T.grid(panels, panel):
                    with T.sblock("v_gather"):
                        vp, ve = T.axis.remap("SS", [p, e])
                        vf[vp, ve] = T.if_then_else(
                            vp * panel + ve < dv, T.Cast("float32", v[vb, vh, vp * panel + ve]), T.float32(0)
                        )
                for z in range(2):
                    with T.sblock("weights"):
                        vz = T.axis.spatial(2, z)
                        weights[vz] = T.Select(vz == 0, weight(slopes[vh], 1), weight_rest(slopes[vh], 1))
                for s in range(T.min(state_indices[vb] + 1, 1)):
                    with T.sblock("step"):
                        T.axis.opaque(1, s)
                        T.reads(
                            state_indices[vb],
                            state[state_indices[vb], vh, 0:dk, 0:dv],
                            qf[0:dk],
                            kf[0:dk],
                            vf[0:panels, 0:panel],
                            weights[0:2],
                        )
                        T.writes(state_out[state_indices[vb], vh, 0:dk, 0:dv], sums[0:panels, 0:panel])
                        fresh = T.sblock_alloc_buffer((dk, panels, panel), "float32")
                        for d, p, e in T.grid(dk, panels, panel):
                            with T.sblock("fresh"):
                                vd, vp, ve = T.axis.remap("SSS", [d, p, e])
                                fresh[vd, vp, ve] = T.if_then_else(
                                    vp * panel + ve < dv,
                                    weights[0] * state[state_indices[vb], vh, vd, vp * panel + ve]
                                    + (
                                        weights[1] * state[state_indices[vb], vh, vd, vp * panel + ve]
                                        + kf[vd] * vf[vp, ve]
                                    ),
                                    T.float32(0),
                                )
                        for d, p, e in T.grid(dk, panels, panel):
                            with T.sblock("store"):
                                vd, vp, ve = T.axis.remap("SSS", [d, p, e])
                                if vp * panel + ve < dv:
                                    state_out[state_indices[vb], vh, vd, vp * panel + ve] = fresh[vd, vp, ve]
                        for p, e, d in T.grid(panels, panel, dk):
                            with T.sblock("read"):
                                vp, ve, vd = T.axis.remap("SSR", [p, e, d])
                                with T.init():
                                    sums[vp, ve] = T.float32(0)
                                sums[vp, ve] = sums[vp, ve] + qf[vd] * fresh[vd, vp, ve]
                for p, e in T.grid(panels, panel):
                    with T.sblock("out"):
                        vp, ve = T.axis.remap("SS", [p, e])
                        if vp * panel + ve < dv:
                            out[vb, vh, vp * panel + ve] = T.Cast(
                                io_dtype, T.Select(state_indices[vb] >= 0, scale * sums[vp, ve], T.float32(0))
                            )

    return lightning_decode


def in_place(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Make every buffer `x_out` one with the buffer `x`, parameter or workspace, after scheduling.

    Sound because every element of the old state is read for the last time by the block that writes the same element
    of the new one: a schedule must keep `carry` behind `out`, and must not tile the two sides of a pair differently.
    """
    buffers = {p.name: p for p in func.params if tirx.is_buffer_var(p)}

    def collect(block: s_tir.SBlock, mutator: tvm_ffi.StructuralMutator) -> s_tir.SBlock:
        buffers.update((b.name, b) for b in block.alloc_buffers)
        return mutator.default_mutate(block)

    tvm_ffi.structural_mutate(func, (s_tir.SBlock, collect))
    pairs = [(new, buffers[name[:-4]]) for name, new in buffers.items() if name.endswith("_out")]

    def gone(buffer: tirx.Var) -> bool:
        return any(buffer.same_as(new) for new, _ in pairs)

    def drop(block: s_tir.SBlock, mutator: tvm_ffi.StructuralMutator) -> s_tir.SBlock:
        block = mutator.default_mutate(block)
        return s_tir.SBlock(
            block.iter_vars,
            block.reads,
            block.writes,
            block.name_hint,
            block.body,
            block.init,
            [b for b in block.alloc_buffers if not gone(b)],
            block.match_buffers,
            block.annotations,
        )

    def replace(var: tirx.Var) -> tirx.Var:
        return next((old for new, old in pairs if var.same_as(new)), var)

    body = tvm_ffi.structural_mutate(func.body, (s_tir.SBlock, drop))
    merged = tirx.PrimFunc([p for p in func.params if not gone(p)], body, func.ret_type, func.attrs)
    return tvm_ffi.structural_map(merged, (tirx.Var, replace))
