"""Paged softmax attention: the public functions above the modules (shapes and meanings of the kernels: docs/kernel-abi.md).

Common to all: tensors may have any strides with a dense last dimension (an input whose last dimension is not dense is
copied, an output is refused); index tensors are int32 or int64 with any strides. Wrong shapes, dtypes and devices
raise before anything is written; index values are trusted unless TILEWRIGHT_CHECK=1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tilewright.runtime import checked, env
from tilewright.runtime.arguments import (
    dense_rows,
    dtype_name,
    expect,
    expect_index,
    expect_page_size,
    expect_writable,
    inference_only,
    kernel_window,
    narrow,
    refuse_later_options,
    sizes,
)
from tilewright.runtime.dispatch import kernel
from tilewright.runtime.plan import Plan, PlanBuffers, plan_decode, plan_extend
from tilewright.runtime.planner import OFF

__all__ = [
    "Plan",
    "PlanBuffers",
    "decode_attention",
    "extend_attention",
    "merge_state",
    "merge_states",
    "plan_decode",
    "plan_extend",
    "write_kv",
]

_LOG2E = math.log2(math.e)
_no_sinks: dict[tuple[int, torch.device], Tensor] = {}


def decode_attention(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    *,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    loc: Tensor | None = None,
    kv_start: Tensor | None = None,
    kv_lens: Tensor | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    page_size: int = 1,
    out: Tensor | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    plan: Plan | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend one new token per request to its keys in the pool.

    Key j of request b is slot req_to_token[req_pool_indices[b], kv_start[b] + j]; the token of request b stands at
    position seq_lens[b] - 1 and sees keys 0 .. seq_lens[b] - 1, of which `window` keeps the last.

    Args:
        q: [B, Hq, D], bf16, fp16 or f32; the dtype of every tensor below that is not an index.
        k_buffer: [S, Hk, D], Hq a multiple of Hk.
        v_buffer: [S, Hk, Dv]; may be a view of k_buffer.
        req_to_token: [R, C] slots of the requests' tokens.
        req_pool_indices: [B] rows of req_to_token.
        seq_lens: [B] keys, the current token included; 0 gives a row of zeros. Not read where a plan is given.
        sm_scale: factor of q . k; None = D ** -0.5.
        logit_cap: c > 0 turns a score s into c * tanh(s / c); 0 = off.
        window: visible keys including the query's own; 0 = off.
        sinks: [Hq], dtype of q or f32: a logit (not scaled, not capped) that takes weight and gives no value.
        key: [B, Hk, D] keys of the new tokens, written to slots `loc` before attending; with `value` and `loc`.
        value: [B, Hk, Dv]; not written where v_buffer starts at k_buffer (a view of it).
        loc: [B] slots; -1 is skipped; of rows with the same slot any one wins.
        kv_start: [B] first column of each request in its row of req_to_token; None = 0.
        kv_lens: [B] cross attention: keys 0 .. kv_lens[b] - 1 (seq_lens is ignored); no window. Plan for kv_lens.
        k_scale: None or 1 (fp8 pools are not served yet).
        v_scale: as k_scale.
        page_size: a promise that so many aligned positions are consecutive slots.
        out: [B, Hq, Dv] to write to; None = a new tensor.
        return_lse: also return ln(sum exp(score)) over the visible keys, without the sink.
        batch_invariant: a request's result is bitwise the same in any batch.
        plan: of `plan_decode`; None = made here, which reads seq_lens.

    Returns:
        out, or (out, lse) with lse [B, Hq] f32. A request without keys: out 0, lse -inf.

    Raises:
        ValueError, TypeError: an argument that does not fit; the message names it, what it got and what it takes.
        NotImplementedError: an option that is not served yet.
        MissingModuleError: no built kernel serves the sizes.
    """
    if k_scale is not None or v_scale is not None:
        refuse_later_options(k_scale=k_scale, v_scale=v_scale)
    if torch.compiler.is_compiling():
        from tilewright.runtime import ops

        if key is not None and value is not None and loc is not None:
            ops.write_kv(key, value, k_buffer, v_buffer, loc)
            key = value = loc = None
        return ops.decode_attention(
            q, k_buffer, v_buffer, req_to_token, req_pool_indices, seq_lens,
            sm_scale=sm_scale, logit_cap=logit_cap, window=window, sinks=sinks, kv_start=kv_start, kv_lens=kv_lens,
            page_size=page_size, out=out, return_lse=return_lse, batch_invariant=batch_invariant, plan=plan,
        )  # fmt: skip
    return run(
        None, q, None, None, k_buffer, v_buffer, req_to_token, req_pool_indices, seq_lens, None,
        sm_scale=sm_scale, causal=True, logit_cap=logit_cap, window=window, sinks=sinks, write=(key, value, loc),
        kv_start=kv_start, kv_lens=kv_lens, page_size=page_size, out=out, lse=None, return_lse=return_lse,
        batch_invariant=batch_invariant, plan=plan,
    )  # fmt: skip


def extend_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_buffer: Tensor,
    v_buffer: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor | None = None,
    *,
    sm_scale: float | None = None,
    causal: bool = True,
    logit_cap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    kv_start: Tensor | None = None,
    kv_lens: Tensor | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    page_size: int = 1,
    out: Tensor | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    plan: Plan | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend the new tokens of each request to its prefix in the pool and to one another.

    Request b has prefix = seq_lens[b] - extend_seq_lens[b] keys in the pool (slots as in `decode_attention`) and its new
    tokens in rows extend_start_loc[b] .. of q, k and v; token i stands at position p = prefix + i and sees keys j <= p
    (causal) or all seq_lens[b] keys, of which `window` hides those below p - window + 1.

    Args (others as in `decode_attention`):
        q: [T, Hq, D]; rows of no request are left alone (zeros in a new `out`).
        k: [T, Hk, D] the new keys, or None with v: all keys come from the pool. Only then may a prefix be negative: the
            first tokens then see nothing and give zeros.
        v: [T, Hk, Dv].
        k_buffer: [S, Hk, D]; where every prefix is 0 it is not read and may have other heads and dims than k.
        v_buffer: [S, Hk, Dv]; likewise.
        req_to_token: [R, C].
        req_pool_indices: [B].
        seq_lens: [B] prefix + new tokens. The lengths are not read where a plan is given.
        extend_seq_lens: [B] new tokens, may be 0.
        extend_start_loc: [B] first row of each request; None = packed in order.
        sm_scale: as in decode.
        causal: False = every key of the request is visible (on the past side still bounded by `window`).
        logit_cap: as in decode.
        window: as in decode.
        sinks: as in decode.
        tree_mask: not served yet.
        kv_start: as in decode.
        kv_lens: [B] cross attention: all queries see keys 0 .. kv_lens[b] - 1 of the pool; k and v must be None, no
            window, `causal` and seq_lens are ignored. Plan with seq_lens=kv_lens and causal=False.
        k_scale: as in decode.
        v_scale: as in decode.
        page_size: as in decode.
        out: [T, Hq, Dv] to write to.
        return_lse: as in decode.
        batch_invariant: also the same however the request was cut into chunks.
        plan: of `plan_extend`, with the same causal and window.

    Returns:
        out, or (out, lse) with lse [T, Hq] f32. A query without visible keys: out 0, lse -inf.

    Raises:
        As `decode_attention`.
    """
    refuse_later_options(tree_mask=tree_mask, k_scale=k_scale, v_scale=v_scale)
    if torch.compiler.is_compiling():
        from tilewright.runtime import ops

        return ops.extend_attention(
            q, k, v, k_buffer, v_buffer, req_to_token, req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc,
            sm_scale=sm_scale, causal=causal, logit_cap=logit_cap, window=window, sinks=sinks, kv_start=kv_start,
            kv_lens=kv_lens, page_size=page_size, out=out, return_lse=return_lse, batch_invariant=batch_invariant,
            plan=plan,
        )  # fmt: skip
    if (k is None) != (v is None):
        raise ValueError("k, v: got one of the two, expected both or neither")
    return run(
        extend_seq_lens, q, k, v, k_buffer, v_buffer, req_to_token, req_pool_indices, seq_lens, extend_start_loc,
        sm_scale=sm_scale, causal=causal, logit_cap=logit_cap, window=window, sinks=sinks, write=(None, None, None),
        kv_start=kv_start, kv_lens=kv_lens, page_size=page_size, out=out, lse=None, return_lse=return_lse,
        batch_invariant=batch_invariant, plan=plan,
    )  # fmt: skip


def run(
    extend_seq_lens: Tensor | None,
    q: Tensor,
    k_new: Tensor | None,
    v_new: Tensor | None,
    k_buffer: Tensor,
    v_buffer: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_start_loc: Tensor | None,
    *,
    sm_scale: float | None,
    causal: bool,
    logit_cap: float,
    window: int,
    sinks: Tensor | None,
    write: tuple[Tensor | None, Tensor | None, Tensor | None],
    kv_start: Tensor | None,
    kv_lens: Tensor | None,
    page_size: int,
    out: Tensor | None,
    lse: Tensor | None,
    return_lse: bool,
    batch_invariant: bool,
    plan: Plan | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Both phases (decode: extend_seq_lens None): check, plan where none is given, write new keys, attend, merge.

    What the public functions and the torch.library operators share; `lse` is a tensor to write the LSE to.
    """
    decode = extend_seq_lens is None
    # -- shapes, dtypes, devices
    dtype = dtype_name(q)
    torch_dtype, device = q.dtype, q.device
    tokens, num_qo_heads, dim = sizes("q", q, 3)
    (batch,) = sizes("req_pool_indices", req_pool_indices, 1)
    expect_index("req_pool_indices", req_pool_indices, (batch,), device)
    slots, num_kv_heads, buffer_dim = sizes("k_buffer", k_buffer, 3)
    _, _, dim_vo = sizes("v_buffer", v_buffer, 3)
    from_pool = k_new is None or v_new is None
    new_only = False
    if k_new is not None and v_new is not None:
        buffer_heads, buffer_dim_vo = num_kv_heads, dim_vo
        new_rows, num_kv_heads, _ = sizes("k", k_new, 3)
        _, _, dim_vo = sizes("v", v_new, 3)
        expect("k", k_new, (new_rows, num_kv_heads, dim), torch_dtype, device)
        expect("v", v_new, (new_rows, num_kv_heads, dim_vo), torch_dtype, device)
        new_only = (buffer_heads, buffer_dim, buffer_dim_vo) != (num_kv_heads, dim, dim_vo)
    if new_only:
        expect("k_buffer", k_buffer, tuple(k_buffer.shape), torch_dtype, device)
        expect("v_buffer", v_buffer, tuple(v_buffer.shape), torch_dtype, device)
    else:
        expect("k_buffer", k_buffer, (slots, num_kv_heads, dim), torch_dtype, device)
        expect("v_buffer", v_buffer, (slots, num_kv_heads, dim_vo), torch_dtype, device)
    if not num_kv_heads or not num_qo_heads or num_qo_heads % num_kv_heads:
        raise ValueError(f"q: got {num_qo_heads} heads, expected a multiple of the {num_kv_heads} KV heads")
    expect_index("req_to_token", req_to_token, sizes("req_to_token", req_to_token, 2), device)
    expect_index("seq_lens", seq_lens, (batch,), device)
    if extend_seq_lens is not None:
        expect_index("extend_seq_lens", extend_seq_lens, (batch,), device)
        if extend_start_loc is not None:
            expect_index("extend_start_loc", extend_start_loc, (batch,), device)
    elif tokens != batch:
        raise ValueError(f"q: got {tokens} rows, expected one per request ({batch}, the size of req_pool_indices)")
    if kv_start is not None:
        expect_index("kv_start", kv_start, (batch,), device)
    window = kernel_window(window)
    if kv_lens is not None:
        expect_index("kv_lens", kv_lens, (batch,), device)
        if window != OFF:
            raise ValueError(f"window: got {window} with kv_lens, expected 0 (cross attention has no positions)")
        if k_new is not None:
            raise ValueError("k, v: got tensors with kv_lens, expected None (write the keys first: write_kv)")
        seq_lens, causal = kv_lens, decode
    if sinks is not None:
        expect("sinks", sinks, (num_qo_heads,), sinks.dtype, device)
        if sinks.dtype not in (torch_dtype, torch.float32):
            raise TypeError(f"sinks: got {sinks.dtype}, expected {torch_dtype} or torch.float32")
    key, value, loc = write
    writes = key is not None or value is not None
    if writes:
        if key is None or value is None or loc is None:
            raise ValueError("key, value, loc: got some of them, expected all three or neither key nor value")
        expect("key", key, (batch, num_kv_heads, dim), torch_dtype, device)
        expect("value", value, (batch, num_kv_heads, dim_vo), torch_dtype, device)
        expect_index("loc", loc, (batch,), device)
        expect_writable("k_buffer", k_buffer)
        expect_writable("v_buffer", v_buffer)
    if page_size != 1:
        expect_page_size(page_size)
    if logit_cap < 0:
        raise ValueError(f"logit_cap: got {logit_cap}, expected >= 0 (0 = off)")
    if q.requires_grad or (k_new is not None and k_new.requires_grad) or (v_new is not None and v_new.requires_grad):
        q, k_new, v_new = inference_only("q", q), inference_only("k", k_new), inference_only("v", v_new)

    # -- the plan and the module
    if plan is None:
        plan = _make_plan(
            extend_seq_lens, seq_lens, extend_start_loc, batch_invariant=batch_invariant, causal=causal,
            window=0 if window == OFF else window, dims=(num_qo_heads, num_kv_heads, dim, dim_vo), device=device,
        )  # fmt: skip
    else:
        _expect_plan(plan, decode, batch, (num_qo_heads, num_kv_heads, dim, dim_vo), device, causal, window,
                     batch_invariant)  # fmt: skip
    if plan.tokens > tokens:
        raise ValueError(f"q: got {tokens} rows, expected at least {plan.tokens}, where the last request's rows end")
    if k_new is not None:
        if plan.tokens > k_new.shape[0]:
            raise ValueError(f"k: got {k_new.shape[0]} rows, expected at least {plan.tokens}, as many as q needs")
        if plan.prefixes[0] < 0:
            raise ValueError("extend_seq_lens: got more than seq_lens, expected that only with k=None and v=None")
        if new_only:
            if plan.prefixes[1] > 0:
                raise ValueError(
                    f"k: got heads and dims {list(k_new.shape[1:])}, expected {list(k_buffer.shape[1:])} of k_buffer and "
                    f"{list(v_buffer.shape[1:])} of v_buffer for v (they may differ only where every prefix is 0)"
                )
            k_buffer, v_buffer = k_new, v_new  # never read, but their sizes must agree with k_new
    attend = kernel("paged_decode" if decode else "paged_extend", dtype, num_qo_heads // num_kv_heads, dim, dim_vo)
    assert attend.tiling is not None
    work = plan.work(attend.tiling, window, from_pool)

    # -- outputs
    if out is None:
        new = torch.empty if plan.covered == tokens else torch.zeros
        out = new((tokens, num_qo_heads, dim_vo), dtype=torch_dtype, device=device)
    else:
        expect("out", out, (tokens, num_qo_heads, dim_vo), torch_dtype, device)
        expect_writable("out", out)
    if lse is not None:
        expect("lse", lse, (tokens, num_qo_heads), torch.float32, device)
        expect_writable("lse", lse)
    elif not return_lse:
        lse = plan.scratch_lse(tokens)
    elif plan.covered == tokens:
        lse = torch.empty((tokens, num_qo_heads), dtype=torch.float32, device=device)
    else:
        lse = torch.full((tokens, num_qo_heads), -math.inf, dtype=torch.float32, device=device)

    if env.CHECK.get():
        checked.check_plan("kv_lens" if kv_lens is not None else "seq_lens", seq_lens, plan.lengths.kv_lens)
        if extend_seq_lens is not None:
            checked.check_plan("extend_seq_lens", extend_seq_lens, plan.lengths.q_lens)
            if extend_start_loc is not None:
                checked.check_plan("extend_start_loc", extend_start_loc, plan.lengths.q_starts)
        checked.check_table(
            plan.lengths, req_to_token=req_to_token, req_pool_indices=req_pool_indices, kv_start=kv_start,
            num_slots=slots, page_size=page_size, window=window, from_pool=from_pool,
            length_name="kv_lens" if kv_lens is not None else "seq_lens",
        )  # fmt: skip
        if loc is not None:
            checked.check_loc(loc, slots)

    # -- run
    if key is not None and value is not None and loc is not None and batch:
        _write(dtype, key, value, k_buffer, v_buffer, loc)
    if not work.num_items:
        return (out, lse) if return_lse else out
    scale = dim**-0.5 if sm_scale is None else sm_scale
    if logit_cap:
        cap_log2, scale_over_cap = logit_cap * _LOG2E, scale / logit_cap
    else:
        cap_log2 = scale_over_cap = 0.0
    sinks_f32 = _sinks_off(num_qo_heads, device) if sinks is None else plan.sinks_f32(sinks)
    narrowed = plan.narrowed
    q, k_buffer, v_buffer = dense_rows(q), dense_rows(k_buffer), dense_rows(v_buffer)
    paging = (
        narrowed(req_to_token),
        narrowed(req_pool_indices),
        plan.zeros if kv_start is None else narrowed(kv_start),
        work.items,
        sinks_f32,
        out,
        lse,
        work.part_o,
        work.part_lse,
        scale * _LOG2E,
        cap_log2,
        scale_over_cap,
        window,
        0 if causal else OFF,
    )
    if decode:
        attend.run(q, k_buffer, v_buffer, *paging)
    elif k_new is None or v_new is None:
        attend.run(q, k_buffer, v_buffer, k_buffer, v_buffer, *paging)
    else:
        attend.run(q, k_buffer, v_buffer, dense_rows(k_new), dense_rows(v_new), *paging)
    if work.rows is not None:
        kernel("merge", dtype).run(work.part_o, work.part_lse, work.rows, sinks_f32, out, lse)
    return (out, lse) if return_lse else out


def _make_plan(
    extend_seq_lens: Tensor | None,
    seq_lens: Tensor,
    extend_start_loc: Tensor | None,
    *,
    batch_invariant: bool,
    causal: bool,
    window: int,
    dims: tuple[int, int, int, int],
    device: torch.device,
) -> Plan:
    sizes = dict(zip(("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo"), dims, strict=True))
    if extend_seq_lens is None:
        return plan_decode(seq_lens, device=device, batch_invariant=batch_invariant, **sizes)
    return plan_extend(
        seq_lens,
        extend_seq_lens,
        extend_start_loc,
        device=device,
        causal=causal,
        window=window,
        batch_invariant=batch_invariant,
        **sizes,
    )


def _expect_plan(
    plan: Plan,
    decode: bool,
    batch: int,
    dims: tuple[int, int, int, int],
    device: torch.device,
    causal: bool,
    window: int,
    batch_invariant: bool,
) -> None:
    """A plan must have been made for such a call; the first difference is named."""
    phase = "decode" if decode else "extend"
    if plan.phase != phase:
        raise ValueError(f"plan: made by plan_{plan.phase}, expected one of plan_{phase}")
    if plan.dims != dims:
        names = ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo")
        name, got, wanted = next(row for row in zip(names, plan.dims, dims, strict=True) if row[1] != row[2])
        raise ValueError(f"plan: made for {name} = {got}, expected {wanted}")
    differences = [("batch", plan.batch, batch), ("device", plan.device, device)]
    if not decode:
        differences += [("causal", plan.causal, causal), ("window", plan.window or OFF, window)]
    if batch_invariant:
        differences.append(("batch_invariant", plan.batch_invariant, True))
    for name, got, wanted in differences:
        if got != wanted:
            raise ValueError(f"plan: made for {name} = {got}, expected {wanted}")


def _sinks_off(num_qo_heads: int, device: torch.device) -> Tensor:
    known = _no_sinks.get((num_qo_heads, device))
    if known is None:
        known = torch.full((num_qo_heads,), -math.inf, dtype=torch.float32, device=device)
        _no_sinks[num_qo_heads, device] = known
    return known


def write_kv(
    k: Tensor,
    v: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    loc: Tensor,
    *,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> None:
    """Write new keys and values into the pool: k_buffer[loc[t]] = k[t], v_buffer[loc[t]] = v[t].

    Args:
        k: [T, Hk, D], bf16, fp16 or f32.
        v: [T, Hk, Dv]; not written where v_buffer starts at k_buffer (a view of it, as in MLA).
        k_buffer: [S, Hk, D], written in place.
        v_buffer: [S, Hk, Dv], written in place.
        loc: [T] slots; -1 is skipped; of rows with the same slot any one wins.
        k_scale: None or 1 (fp8 pools are not served yet).
        v_scale: as k_scale.

    Raises:
        ValueError, TypeError, NotImplementedError, MissingModuleError: as `decode_attention`; nothing is written then.
    """
    refuse_later_options(k_scale=k_scale, v_scale=v_scale)
    if torch.compiler.is_compiling():
        from tilewright.runtime import ops

        ops.write_kv(k, v, k_buffer, v_buffer, loc)
        return
    dtype = dtype_name(k)
    tokens, heads, dim = sizes("k", k, 3)
    dim_vo = sizes("v", v, 3)[2]
    slots = sizes("k_buffer", k_buffer, 3)[0]
    expect("v", v, (tokens, heads, dim_vo), k.dtype, k.device)
    expect("k_buffer", k_buffer, (slots, heads, dim), k.dtype, k.device)
    expect("v_buffer", v_buffer, (slots, heads, dim_vo), k.dtype, k.device)
    expect_index("loc", loc, (tokens,), k.device)
    expect_writable("k_buffer", k_buffer)
    expect_writable("v_buffer", v_buffer)
    if env.CHECK.get():
        checked.check_loc(loc, slots)
    if tokens:
        _write(dtype, inference_only("k", k), inference_only("v", v), k_buffer, v_buffer, loc)


def _write(dtype: str, k: Tensor, v: Tensor, k_buffer: Tensor, v_buffer: Tensor, loc: Tensor) -> None:
    write = kernel("write_kv", dtype).run
    loc = narrow(loc)
    write(dense_rows(k), k_buffer, loc)
    if v_buffer.data_ptr() != k_buffer.data_ptr():
        write(dense_rows(v), v_buffer, loc)


def merge_states(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention states over disjoint sets of keys into the state over their union.

    Args:
        o: [N, T, H, Dv] bf16, fp16 or f32: outputs of the N states; not looked at where lse is -inf.
        lse: [N, T, H] f32: their ln(sum exp(score)); -inf = no key.

    Returns:
        (o [T, H, Dv] in o's dtype, lse [T, H] f32); all states empty: (0, -inf).

    Raises:
        ValueError, TypeError, MissingModuleError: as `decode_attention`.
    """
    dtype = dtype_name(o)
    states, tokens, heads, dim = sizes("o", o, 4)
    expect("lse", lse, (states, tokens, heads), torch.float32, o.device)
    if not states:
        raise ValueError("o: got 0 states, expected at least one in dimension 0")
    out = torch.empty((tokens, heads, dim), dtype=o.dtype, device=o.device)
    out_lse = torch.empty((tokens, heads), dtype=torch.float32, device=o.device)
    if torch.compiler.is_compiling():
        from tilewright.runtime import ops

        ops.merge_states(o, lse, out, out_lse)
    else:
        merge_into(dtype, o, lse, out, out_lse)
    return out, out_lse


def merge_into(dtype: str, o: Tensor, lse: Tensor, out: Tensor, out_lse: Tensor) -> None:
    """Run the merge kernel over all tokens; arguments checked by the caller."""
    states, tokens, heads, dim = o.shape
    if not tokens:
        return
    rows = torch.empty((tokens, 4), dtype=torch.int32, device=o.device)
    rows[:, 0] = rows[:, 1] = torch.arange(tokens, dtype=torch.int32, device=o.device)
    rows[:, 2], rows[:, 3] = states, tokens
    part_o = inference_only("o", o).to(torch.float32).contiguous().view(states * tokens, heads, dim)
    part_lse = inference_only("lse", lse).contiguous().view(states * tokens, heads)
    kernel("merge", dtype).run(part_o, part_lse, rows, _sinks_off(heads, o.device), out, out_lse)


def merge_state(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two attention states over disjoint sets of keys, e.g. a cached prefix and what came after it.

    Args:
        o_a: [T, H, Dv].
        lse_a: [T, H] f32, natural log.
        o_b: like o_a.
        lse_b: like lse_a.

    Returns:
        (o [T, H, Dv], lse [T, H]); see `merge_states`.

    Raises:
        ValueError, TypeError, MissingModuleError: as `decode_attention`.
    """
    tokens, heads, dim = sizes("o_a", o_a, 3)
    expect("lse_a", lse_a, (tokens, heads), torch.float32, o_a.device)
    expect("o_b", o_b, (tokens, heads, dim), o_a.dtype, o_a.device)
    expect("lse_b", lse_b, (tokens, heads), torch.float32, o_a.device)
    return merge_states(torch.stack((o_a, o_b)), torch.stack((lse_a, lse_b)))
