"""Paged softmax attention: the public functions above the modules (the kernels: docs/kernel-abi.md).

Common to all: tensors may have any strides with a dense last dimension (an input whose last dimension is not dense is
copied, an output is refused); index tensors are int32 or int64 with any strides. Wrong shapes, dtypes and devices
raise before anything is written; index values are trusted unless TILEWRIGHT_CHECK=1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.runtime import checked, env
from tilewright.runtime.arguments import (
    dtype_name,
    expect,
    expect_apart,
    expect_index,
    expect_multiple,
    expect_scales,
    expect_writable,
    flag,
    inference_only,
    pool_dtype,
    pool_scale,
    sizes,
)
from tilewright.runtime.dispatch import kernel
from tilewright.runtime.paged_call import run, sinks_off, write_rows
from tilewright.runtime.plan import Plan, plan_decode, plan_extend
from tilewright.runtime.plan_buffers import PlanBuffers

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
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
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
        k_buffer: [S, Hk, D], Hq a multiple of Hk; or torch.float8_e4m3fn, whose numbers stand for k_scale times
            themselves.
        v_buffer: [S, Hk, Dv]; may be a view of k_buffer; float8_e4m3fn where k_buffer is.
        req_to_token: [R, C] slots of the requests' tokens.
        req_pool_indices: [B] rows of req_to_token.
        seq_lens: [B] keys, the current token included; 0 gives a row of zeros. Not read where a plan is given.
        sm_scale: factor of q . k; None = D ** -0.5.
        logit_cap: c > 0 turns a score s into c * tanh(s / c); 0 = off.
        window: visible keys including the query's own; 0 = off.
        sinks: [Hq], dtype of q or f32: a logit (not scaled, not capped) that takes weight and gives no value.
        key: [B, Hk, D] keys of the new tokens, written to slots `loc` before attending (see `write_kv`); with `value`
            and `loc`.
        value: [B, Hk, Dv]; not written where v_buffer starts at k_buffer (a view of it).
        loc: [B] slots; -1 is skipped; of rows with the same slot the last wins. Not looked at without a key.
        kv_start: [B] first column of each request in its row of req_to_token; None = 0.
        kv_lens: [B] cross attention: keys 0 .. kv_lens[b] - 1 (seq_lens is ignored); no window. Plan for kv_lens.
        k_scale: > 0, of the keys in an fp8 pool: a number, or a CPU tensor of one element; None = 1.
        v_scale: the same for values.
        page_size: a promise that so many aligned positions are consecutive slots.
        out: [B, Hq, Dv] to write to, in memory that no other argument uses; None = a new tensor.
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
    k_scale = 1.0 if k_scale is None else pool_scale("k_scale", k_scale)
    v_scale = 1.0 if v_scale is None else pool_scale("v_scale", v_scale)
    if not torch.compiler.is_compiling() and type(plan) is Plan and plan.bound and not return_lse:
        again = plan.new_out(q) if out is None else out
        for bound in plan.bound:
            if bound(
                q, None, None, k_buffer, v_buffer, again, sinks, key, value, loc, req_to_token, req_pool_indices,
                seq_lens, None, None, kv_start, kv_lens, sm_scale, True, logit_cap, window, page_size, batch_invariant,
                k_scale, v_scale,
            ):  # fmt: skip
                assert again is not None
                return again
    batch_invariant = flag("batch_invariant", batch_invariant)
    write = None
    if key is not None or value is not None:
        if key is None or value is None or loc is None:
            raise ValueError("key, value, loc: got some of them, expected all three or neither key nor value")
        write = (key, value, loc)
    if torch.compiler.is_compiling():
        from tilewright.runtime import ops

        if write is not None:
            ops.write_kv(key, value, k_buffer, v_buffer, loc, k_scale=k_scale, v_scale=v_scale)
        return ops.decode_attention(
            q, k_buffer, v_buffer, req_to_token, req_pool_indices, seq_lens,
            sm_scale=sm_scale, logit_cap=logit_cap, window=window, sinks=sinks, kv_start=kv_start, kv_lens=kv_lens,
            k_scale=k_scale, v_scale=v_scale, page_size=page_size, out=out, return_lse=return_lse,
            batch_invariant=batch_invariant, plan=plan,
        )  # fmt: skip
    if write is not None:
        _expect_pools_apart(key, value, k_buffer, v_buffer)
    if out is not None:
        expect_apart("out", out, q=q)
        if env.CHECK.get():  # a microsecond of a call that takes twenty
            expect_apart("out", out, k_buffer=k_buffer, v_buffer=v_buffer)
    return run(
        None, q, None, None, k_buffer, v_buffer, req_to_token, req_pool_indices, seq_lens, None,
        sm_scale=sm_scale, causal=True, logit_cap=logit_cap, window=window, sinks=sinks, tree_mask=None, write=write,
        kv_start=kv_start, kv_lens=kv_lens, k_scale=k_scale, v_scale=v_scale, page_size=page_size, out=out, lse=None,
        return_lse=return_lse, batch_invariant=batch_invariant, plan=plan,
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
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    page_size: int = 1,
    out: Tensor | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    plan: Plan | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend the new tokens of each request to its prefix in the pool and to one another.

    Request b has prefix = seq_lens[b] - extend_seq_lens[b] keys in the pool (slots as in `decode_attention`) and its
    new tokens in rows extend_start_loc[b] .. of q, k and v; token i stands at position p = prefix + i and sees keys
    j <= p (causal) or all seq_lens[b] keys, of which `window` hides those below p - window + 1.

    Args (others as in `decode_attention`):
        q: [T, Hq, D]; rows of no request are left alone (zeros in a new `out`).
        k: [T, Hk, D] the new keys, or None with v: all keys come from the pool. Only then may a prefix be negative: the
            first tokens then see nothing and give zeros. New keys are seen as they are, whatever the pool's dtype.
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
        tree_mask: bool or uint8, which new keys a new token sees, besides the rules above (the prefix is not masked):
            of each request in turn [new, new], or [new, seq_lens] whose first columns are not looked at. Any shape of
            so many elements. Drafts in an order in which a token's ancestors come before it need nothing else.
        kv_start: as in decode.
        kv_lens: [B] cross attention: all queries see keys 0 .. kv_lens[b] - 1 of the pool; k and v must be None, no
            window, `causal` and seq_lens are ignored. Plan with seq_lens=kv_lens and causal=False.
        k_scale: as in decode.
        v_scale: as in decode.
        page_size: as in decode.
        out: as in decode, [T, Hq, Dv].
        return_lse: as in decode.
        batch_invariant: also the same however the request was cut into chunks. With an fp8 pool k and v must be None:
            write the new keys first (`write_kv`), so that a key is the same number to all chunks.
        plan: of `plan_extend`, with the same causal and window.

    Returns:
        out, or (out, lse) with lse [T, Hq] f32. A query without visible keys: out 0, lse -inf.

    Raises:
        As `decode_attention`.
    """
    k_scale = 1.0 if k_scale is None else pool_scale("k_scale", k_scale)
    v_scale = 1.0 if v_scale is None else pool_scale("v_scale", v_scale)
    if not torch.compiler.is_compiling() and type(plan) is Plan and plan.bound and tree_mask is None and not return_lse:
        again = plan.new_out(q) if out is None else out
        for bound in plan.bound:
            if bound(
                q, k, v, k_buffer, v_buffer, again, sinks, None, None, None, req_to_token, req_pool_indices, seq_lens,
                extend_seq_lens, extend_start_loc, kv_start, kv_lens, sm_scale, causal, logit_cap, window, page_size,
                batch_invariant, k_scale, v_scale,
            ):  # fmt: skip
                assert again is not None
                return again
    if (k is None) != (v is None):
        raise ValueError("k, v: got one of the two, expected both or neither")
    causal, batch_invariant = flag("causal", causal), flag("batch_invariant", batch_invariant)
    if torch.compiler.is_compiling():
        from tilewright.runtime import ops

        return ops.extend_attention(
            q, k, v, k_buffer, v_buffer, req_to_token, req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc,
            sm_scale=sm_scale, causal=causal, logit_cap=logit_cap, window=window, sinks=sinks, tree_mask=tree_mask,
            kv_start=kv_start, kv_lens=kv_lens, k_scale=k_scale, v_scale=v_scale, page_size=page_size, out=out,
            return_lse=return_lse, batch_invariant=batch_invariant, plan=plan,
        )  # fmt: skip
    if out is not None:
        expect_apart("out", out, q=q, k=k, v=v, k_buffer=k_buffer, v_buffer=v_buffer)
    return run(
        extend_seq_lens, q, k, v, k_buffer, v_buffer, req_to_token, req_pool_indices, seq_lens, extend_start_loc,
        sm_scale=sm_scale, causal=causal, logit_cap=logit_cap, window=window, sinks=sinks, tree_mask=tree_mask,
        write=None, kv_start=kv_start, kv_lens=kv_lens, k_scale=k_scale, v_scale=v_scale, page_size=page_size, out=out,
        lse=None, return_lse=return_lse, batch_invariant=batch_invariant, plan=plan,
    )  # fmt: skip


def write_kv(
    k: Tensor,
    v: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    loc: Tensor,
    *,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> None:
    """Write new keys and values into the pool: k_buffer[loc[t]] = k[t], v_buffer[loc[t]] = v[t].

    A pool of torch.float8_e4m3fn gets k / k_scale and v / v_scale, rounded to the nearest number (ties to even), at
    most 448 in magnitude; NaN stays NaN.

    Args:
        k: [T, Hk, D], bf16, fp16 or f32; no part of a pool (clone rows to move them within one).
        v: [T, Hk, Dv]; not written where v_buffer starts at k_buffer (a view of it, as in MLA).
        k_buffer: [S, Hk, D], written in place.
        v_buffer: [S, Hk, Dv], written in place.
        loc: [T] slots; -1 is skipped; of rows with the same slot the last wins.
        k_scale: > 0, of an fp8 pool: a number, or a CPU tensor of one element; None = 1.
        v_scale: the same for values.

    Raises:
        ValueError, TypeError, NotImplementedError, MissingModuleError: as `decode_attention`; nothing is written then.
    """
    k_scale, v_scale = pool_scale("k_scale", k_scale), pool_scale("v_scale", v_scale)
    if torch.compiler.is_compiling():
        from tilewright.runtime import ops

        ops.write_kv(k, v, k_buffer, v_buffer, loc, k_scale=k_scale, v_scale=v_scale)
        return
    dtype = dtype_name(k, "k")
    tokens, heads, dim = sizes("k", k, 3)
    dim_vo = sizes("v", v, 3)[2]
    slots = sizes("k_buffer", k_buffer, 3)[0]
    expect("v", v, (tokens, heads, dim_vo), k.dtype, k.device)
    pool = pool_dtype(k_buffer, k.dtype)
    expect("k_buffer", k_buffer, (slots, heads, dim), pool, k.device)
    expect("v_buffer", v_buffer, (slots, heads, dim_vo), pool, k.device)
    expect_scales(k_buffer, k_scale, v_scale)
    expect_index("loc", loc, (tokens,), k.device)
    expect_writable("k_buffer", k_buffer)
    expect_writable("v_buffer", v_buffer)
    _expect_pools_apart(k, v, k_buffer, v_buffer)
    if env.CHECK.get():
        checked.check_loc(loc, slots)
    if tokens:
        write_rows(dtype, k, v, loc, k_buffer, v_buffer, k_scale, v_scale)


def _expect_pools_apart(k: Tensor | None, v: Tensor | None, k_buffer: Tensor, v_buffer: Tensor) -> None:
    """New rows and both pools share no memory, but for a v_buffer that starts where k_buffer does."""
    expect_apart("k_buffer", k_buffer, k=k, v=v)
    if k_buffer.data_ptr() != v_buffer.data_ptr():
        expect_apart("v_buffer", v_buffer, k=k, v=v, k_buffer=k_buffer)


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
    dtype = dtype_name(o, "o")
    states, tokens, heads, dim = sizes("o", o, 4)
    expect("lse", lse, (states, tokens, heads), torch.float32, o.device)
    if not states:
        raise ValueError("o: got 0 states, expected at least one in dimension 0")
    if not heads or not dim:
        raise ValueError(f"o: got shape {list(o.shape)}, expected at least one head and dimension")
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
    if o.device.type == "cuda":
        expect_multiple("o", dim, 4)
    rows = torch.empty((tokens, 4), dtype=torch.int32, device=o.device)
    rows[:, 0] = rows[:, 1] = torch.arange(tokens, dtype=torch.int32, device=o.device)
    rows[:, 2], rows[:, 3] = states, tokens
    part_o = inference_only("o", o).to(torch.float32).contiguous().view(states * tokens, heads, dim)
    part_lse = inference_only("lse", lse).contiguous().view(states * tokens, heads)
    kernel("merge", dtype, device=o.device).run(part_o, part_lse, rows, sinks_off(heads, o.device), out, out_lse)


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
