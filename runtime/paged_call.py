"""One call of paged attention, decode or extend: checks, plan, outputs, launch. The public face is `paged.py`."""

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
    expect_aligned,
    expect_index,
    expect_multiple,
    expect_page_size,
    expect_writable,
    gpu_rows,
    inference_only,
    kernel_window,
    narrow,
    real,
    sizes,
)
from tilewright.runtime.dispatch import kernel
from tilewright.runtime.plan import Plan, host_lengths, plan_decode, plan_extend
from tilewright.runtime.planned_call import PlannedCall
from tilewright.runtime.planner import OFF

_LOG2E = math.log2(math.e)
_no_sinks: dict[tuple[int, torch.device], Tensor] = {}


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
    write: tuple[Tensor, Tensor, Tensor] | None,
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

    What the public functions and the torch.library operators share; `lse` is a tensor to write the LSE to,
    `write` the (key, value, loc) of decode.
    """
    decode = extend_seq_lens is None
    simple = decode and sinks is None and write is None and kv_start is None and kv_lens is None and lse is None
    given: tuple[Any, ...] | None = None
    if simple and not return_lse and isinstance(plan, Plan) and plan.on_gpu:
        given = (k_buffer, v_buffer, req_to_token)
        options = (sm_scale, logit_cap, window, page_size, batch_invariant)
        known = plan.calls.get((*map(id, given), *options))
        if known is not None and known.fits(q, req_pool_indices, seq_lens, out):
            return known.run(q, plan.narrowed(req_pool_indices), out)

    # -- shapes, dtypes, devices
    dtype = dtype_name(q)
    torch_dtype, device = q.dtype, q.device
    on_gpu = device.type == "cuda"
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
        sizes("sinks", sinks, 1)
        expect("sinks", sinks, (num_qo_heads,), sinks.dtype, device)
        if sinks.dtype not in (torch_dtype, torch.float32):
            raise TypeError(f"sinks: got {sinks.dtype}, expected {torch_dtype} or torch.float32")
    if write is not None:
        key, value, loc = write
        expect("key", key, (batch, num_kv_heads, dim), torch_dtype, device)
        expect("value", value, (batch, num_kv_heads, dim_vo), torch_dtype, device)
        expect_index("loc", loc, (batch,), device)
        expect_writable("k_buffer", k_buffer)
        expect_writable("v_buffer", v_buffer)
    if page_size != 1:
        expect_page_size(page_size)
    # Bounds within which the quotient and the products below are f32 numbers.
    if logit_cap != 0:
        logit_cap = real("logit_cap", logit_cap, 1e-20, 1e20, note=" or 0 (off)")
    scale = dim**-0.5 if sm_scale is None else real("sm_scale", sm_scale, -1e15, 1e15)
    q = inference_only("q", q)
    k_buffer, v_buffer = inference_only("k_buffer", k_buffer), inference_only("v_buffer", v_buffer)
    if k_new is not None and v_new is not None:
        k_new, v_new = inference_only("k", k_new), inference_only("v", v_new)

    # -- the plan and the module
    if plan is None:
        if kv_lens is not None:
            host_lengths("kv_lens", kv_lens, batch)  # the plan would blame seq_lens
        plan = _make_plan(
            extend_seq_lens, seq_lens, extend_start_loc, batch_invariant=batch_invariant, causal=causal,
            window=0 if window == OFF else window, dims=(num_qo_heads, num_kv_heads, dim, dim_vo), device=device,
        )  # fmt: skip
    else:
        _expect_plan(plan, decode, batch, (num_qo_heads, num_kv_heads, dim, dim_vo), device, causal, window,
                     batch_invariant)  # fmt: skip
    if plan.tokens > tokens:
        raise ValueError(f"q: got {tokens} rows, expected at least {plan.tokens}, where the last request's rows end")
    if k_new is not None and v_new is not None:
        if plan.tokens > k_new.shape[0]:
            raise ValueError(f"k: got {k_new.shape[0]} rows, expected at least {plan.tokens}, as many as q needs")
        if plan.prefixes[0] < 0:
            raise ValueError("extend_seq_lens: got more than seq_lens, expected that only with k=None and v=None")
        if new_only:
            if plan.prefixes[1] > 0:
                raise ValueError(
                    f"k: got heads and dims {list(k_new.shape[1:])}, expected {list(k_buffer.shape[1:])} of k_buffer "
                    f"and {list(v_buffer.shape[1:])} of v_buffer for v (they may differ only where every prefix is 0)"
                )
            k_buffer, v_buffer = k_new, v_new  # never read, but their sizes must agree with k_new
    operator = "paged_decode" if decode else "paged_extend"
    attend = kernel(operator, dtype, num_qo_heads // num_kv_heads, dim, dim_vo, device)
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

    check = env.CHECK.get()
    if check:
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
        if write is not None:
            checked.check_loc(write[2], slots)

    if on_gpu:
        expect_aligned("k_buffer", k_buffer)
        expect_aligned("v_buffer", v_buffer)
        expect_aligned("out", out, 4)

    # -- run
    if write is not None and batch:
        write_rows(dtype, *write, k_buffer, v_buffer)
    if not work.num_items:
        return (out, lse) if return_lse else out
    if logit_cap:
        cap_log2, scale_over_cap = logit_cap * _LOG2E, scale / logit_cap
    else:
        cap_log2 = scale_over_cap = 0.0
    sinks_f32 = sinks_off(num_qo_heads, device) if sinks is None else plan.sinks_f32(sinks)
    narrowed = plan.narrowed
    k_buffer, v_buffer = dense_rows(k_buffer), dense_rows(v_buffer)
    rows = gpu_rows if on_gpu else dense_rows
    plain_q, q = q, rows(q)
    rest = (scale * _LOG2E, cap_log2, scale_over_cap, window, 0 if causal else OFF)
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
        *rest,
    )
    if decode:
        attend.run(q, k_buffer, v_buffer, *paging)
    elif k_new is None or v_new is None:
        attend.run(q, k_buffer, v_buffer, k_buffer, v_buffer, *paging)
    else:
        attend.run(q, k_buffer, v_buffer, rows(k_new), rows(v_new), *paging)
    if work.rows is not None:
        kernel("merge", dtype, None, None, None, device).run(work.part_o, work.part_lse, work.rows, sinks_f32, out, lse)
    if given is not None and not check and q is plain_q and k_buffer is given[0] and v_buffer is given[1]:
        plan.calls[(*map(id, given), *options)] = PlannedCall(
            (k_buffer, v_buffer, req_to_token), q, req_pool_indices, seq_lens, out, work=work, attend=attend.run,
            merge=kernel("merge", dtype, None, None, None, device).run, table=narrowed(req_to_token),
            kv_start=plan.zeros, sinks=sinks_f32, lse=lse, rest=rest,
        )  # fmt: skip
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
    num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo = dims
    if extend_seq_lens is None:
        return plan_decode(
            seq_lens,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim_qk=head_dim_qk,
            head_dim_vo=head_dim_vo,
            device=device,
            batch_invariant=batch_invariant,
        )
    return plan_extend(
        seq_lens,
        extend_seq_lens,
        extend_start_loc,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=head_dim_qk,
        head_dim_vo=head_dim_vo,
        device=device,
        causal=causal,
        window=window,
        batch_invariant=batch_invariant,
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
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: got {type(plan).__name__}, expected a Plan of plan_{phase}")
    if plan.phase != phase:
        raise ValueError(f"plan: made by plan_{plan.phase}, expected one of plan_{phase}")
    if plan.dims != dims:
        names = ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo")
        name, size, needed = next(row for row in zip(names, plan.dims, dims, strict=True) if row[1] != row[2])
        raise ValueError(f"plan: made for {name} = {size}, expected {needed}")
    differences: list[tuple[str, object, object]] = [("batch", plan.batch, batch), ("device", plan.device, device)]
    if not decode:
        differences += [("causal", plan.causal, causal), ("window", plan.window or OFF, window)]
    if batch_invariant:
        differences.append(("batch_invariant", plan.batch_invariant, True))
    for name, got, wanted in differences:
        if got != wanted:
            raise ValueError(f"plan: made for {name} = {got}, expected {wanted}")


def sinks_off(num_qo_heads: int, device: torch.device) -> Tensor:
    """The [num_qo_heads] f32 sinks of a call without any: -inf."""
    known = _no_sinks.get((num_qo_heads, device))
    if known is None:
        known = torch.full((num_qo_heads,), -math.inf, dtype=torch.float32, device=device)
        _no_sinks[num_qo_heads, device] = known
    return known


def write_rows(dtype: str, k: Tensor, v: Tensor, loc: Tensor, k_buffer: Tensor, v_buffer: Tensor) -> None:
    """Run the write kernel for K, and for V unless it is a view of K; arguments checked by the caller."""
    write = kernel("write_kv", dtype, None, None, None, k.device).run
    loc = narrow(loc)
    rows = dense_rows
    if k.device.type == "cuda":
        rows = gpu_rows
        expect_multiple("k", k.shape[2], 8)
        expect_multiple("v", v.shape[2], 8)
        expect_aligned("k_buffer", k_buffer)
        expect_aligned("v_buffer", v_buffer)
    write(rows(inference_only("k", k)), k_buffer, loc)
    if v_buffer.data_ptr() != k_buffer.data_ptr():
        write(rows(inference_only("v", v)), v_buffer, loc)
