"""The public functions as torch.library operators, so that torch.compile sees them as opaque.

All are out-variants: they return nothing, and the schema says what they write. Eager code does not come here; the
public functions call these wrappers only while a graph is traced. A plan enters a graph as its number (`Plan.handle`):
the graph must not outlive the plan.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewright.runtime import lightning, paged, paged_call
from tilewright.runtime.arguments import dtype_name
from tilewright.runtime.plan import Plan

_NO_PLAN = -1
_library = torch.library.Library("tilewright", "DEF")
_PAGED_OPTIONS = (
    "Tensor? sinks, Tensor? kv_start, Tensor? kv_lens, Tensor(a!) out, Tensor(b!)? lse, float? sm_scale, "
    "float logit_cap, int window, float k_scale, float v_scale, int page_size, bool batch_invariant, int plan"
)


def _define(name: str, arguments: str):
    """Register the decorated function as the operator `name`; its fake does nothing (outputs are arguments)."""
    _library.define(f"{name}({arguments}) -> ()")

    def register(function):
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"tilewright::{name}", lambda *_, **__: None, lib=_library)
        return function

    return register


def _plan(handle: int) -> Plan | None:
    if handle == _NO_PLAN:
        return None
    plan = Plan.by_handle.get(handle)
    if plan is None:
        raise ValueError(f"plan: number {handle} is gone, expected the plan to live as long as the compiled graph")
    return plan


@_define(
    "decode_attention",
    "Tensor q, Tensor k_buffer, Tensor v_buffer, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, "
    + _PAGED_OPTIONS,
)
def _decode_attention(
    q, k_buffer, v_buffer, req_to_token, req_pool_indices, seq_lens, sinks, kv_start, kv_lens, out, lse, sm_scale,
    logit_cap, window, k_scale, v_scale, page_size, batch_invariant, plan,
):  # fmt: skip
    paged_call.run(
        None, q, None, None, k_buffer, v_buffer, req_to_token, req_pool_indices, seq_lens, None, sm_scale=sm_scale,
        causal=True, logit_cap=logit_cap, window=window, sinks=sinks, tree_mask=None, write=None, kv_start=kv_start,
        kv_lens=kv_lens, k_scale=k_scale, v_scale=v_scale, page_size=page_size, out=out, lse=lse, return_lse=False,
        batch_invariant=batch_invariant, plan=_plan(plan),
    )  # fmt: skip


@_define(
    "extend_attention",
    "Tensor q, Tensor? k, Tensor? v, Tensor k_buffer, Tensor v_buffer, Tensor req_to_token, Tensor req_pool_indices, "
    "Tensor seq_lens, Tensor extend_seq_lens, Tensor? extend_start_loc, Tensor? tree_mask, bool causal, "
    + _PAGED_OPTIONS,
)
def _extend_attention(
    q, k, v, k_buffer, v_buffer, req_to_token, req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc, tree_mask,
    causal, sinks, kv_start, kv_lens, out, lse, sm_scale, logit_cap, window, k_scale, v_scale, page_size,
    batch_invariant, plan,
):  # fmt: skip
    paged_call.run(
        extend_seq_lens, q, k, v, k_buffer, v_buffer, req_to_token, req_pool_indices, seq_lens, extend_start_loc,
        sm_scale=sm_scale, causal=causal, logit_cap=logit_cap, window=window, sinks=sinks, tree_mask=tree_mask,
        write=None, kv_start=kv_start, kv_lens=kv_lens, k_scale=k_scale, v_scale=v_scale, page_size=page_size, out=out,
        lse=lse, return_lse=False, batch_invariant=batch_invariant, plan=_plan(plan),
    )  # fmt: skip


_define(
    "write_kv",
    "Tensor k, Tensor v, Tensor(a!) k_buffer, Tensor(b!) v_buffer, Tensor loc, *, float k_scale=1.0, float v_scale=1.0",
)(paged.write_kv)


@_define("merge_states", "Tensor o, Tensor lse, Tensor(a!) out, Tensor(b!) out_lse")
def _merge_states(o, lse, out, out_lse):
    paged.merge_into(dtype_name(o), o, lse, out, out_lse)


@_define(
    "lightning_extend",
    "Tensor q, Tensor k, Tensor v, Tensor(a!) state, Tensor state_indices, Tensor qo_indptr, Tensor slopes, "
    "Tensor? has_initial_state, float? scale, Tensor(b!) out",
)
def _lightning_extend(q, k, v, state, state_indices, qo_indptr, slopes, has_initial_state, scale, out):
    lightning.lightning_extend(
        q, k, v, state, state_indices, qo_indptr, slopes, has_initial_state=has_initial_state, scale=scale, out=out
    )


@_define(
    "lightning_decode",
    "Tensor q, Tensor k, Tensor v, Tensor(a!) state, Tensor state_indices, Tensor slopes, float? scale, Tensor(b!) out",
)
def _lightning_decode(q, k, v, state, state_indices, slopes, scale, out):
    lightning.lightning_decode(q, k, v, state, state_indices, slopes, scale=scale, out=out)


# ---- what the public functions call while a graph is traced: allocate, then the operator


def _outputs(q: Tensor, v: Tensor, out: Tensor | None, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    # Rows of no request stay as they are here, and only the operator knows which: start from what they are to be.
    if out is None:
        out = q.new_zeros((q.shape[0], q.shape[1], v.shape[2]))
    lse = None
    if return_lse:
        lse = torch.full((q.shape[0], q.shape[1]), -math.inf, dtype=torch.float32, device=q.device)
    return out, lse


def decode_attention(
    q, k_buffer, v_buffer, req_to_token, req_pool_indices, seq_lens, *, sm_scale, logit_cap, window, sinks, kv_start,
    kv_lens, k_scale, v_scale, page_size, out, return_lse, batch_invariant, plan,
):  # fmt: skip
    """`paged.decode_attention` in a graph (the new keys already written)."""
    out, lse = _outputs(q, v_buffer, out, return_lse)
    torch.ops.tilewright.decode_attention(
        q, k_buffer, v_buffer, req_to_token, req_pool_indices, seq_lens, sinks, kv_start, kv_lens, out, lse, sm_scale,
        logit_cap, window, k_scale, v_scale, page_size, batch_invariant, _NO_PLAN if plan is None else plan.handle,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def extend_attention(
    q, k, v, k_buffer, v_buffer, req_to_token, req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc, *,
    sm_scale, causal, logit_cap, window, sinks, tree_mask, kv_start, kv_lens, k_scale, v_scale, page_size, out,
    return_lse, batch_invariant, plan,
):  # fmt: skip
    """`paged.extend_attention` in a graph."""
    out, lse = _outputs(q, v_buffer if v is None else v, out, return_lse)
    torch.ops.tilewright.extend_attention(
        q, k, v, k_buffer, v_buffer, req_to_token, req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc,
        tree_mask, causal, sinks, kv_start, kv_lens, out, lse, sm_scale, logit_cap, window, k_scale, v_scale, page_size,
        batch_invariant, _NO_PLAN if plan is None else plan.handle,
    )  # fmt: skip
    return (out, lse) if return_lse else out


write_kv = torch.ops.tilewright.write_kv
merge_states = torch.ops.tilewright.merge_states
lightning_extend = torch.ops.tilewright.lightning_extend
lightning_decode = torch.ops.tilewright.lightning_decode
