"""One call of paged attention, decode or extend: checks, plan, outputs, launch. The public face is `paged.py`."""

from __future__ import annotations

import math
import operator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewright.runtime import checked, env
from tilewright.runtime.arguments import (
    KV_DTYPE,
    dense_rows,
    dtype_name,
    expect,
    expect_aligned,
    expect_index,
    expect_mask,
    expect_multiple,
    expect_scales,
    expect_writable,
    gpu_rows,
    inference_only,
    kernel_window,
    narrow,
    pages,
    pool_dtype,
    real,
    sizes,
    soft_cap,
)
from tilewright.runtime.dispatch import Kernel, kernel
from tilewright.runtime.gpu_work import GpuWork
from tilewright.runtime.plan import Plan, host_lengths, plan_decode, plan_extend
from tilewright.runtime.plan_buffers import DeviceWork
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
    tree_mask: Tensor | None,
    write: tuple[Tensor, Tensor, Tensor] | None,
    kv_start: Tensor | None,
    kv_lens: Tensor | None,
    k_scale: float,
    v_scale: float,
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
    floats = (q, k_new, v_new, k_buffer, v_buffer, out, lse, sinks, tree_mask, *(write or ()))
    index = (req_to_token, req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc, kv_start, kv_lens)
    options = (sm_scale, causal, logit_cap, window, page_size, batch_invariant, k_scale, v_scale)
    call = looks = None
    if isinstance(plan, Plan):
        try:
            # All that the checks ask of tensors that hold numbers.
            looks = [t if t is None else (t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in floats]
        except AttributeError:
            pass  # no tensor: the checks say which
        else:
            for known_looks, known_index, known_options, known in plan.calls:
                if known_looks == looks and known_options == options and all(map(operator.is_, known_index, index)):
                    call = known
                    break
    if call is None:
        plan, call = _prepare(
            extend_seq_lens, q, k_new, v_new, k_buffer, v_buffer, req_to_token, req_pool_indices, seq_lens,
            extend_start_loc, sm_scale=sm_scale, causal=causal, logit_cap=logit_cap, window=window, sinks=sinks,
            tree_mask=tree_mask, write=write, kv_start=kv_start, kv_lens=kv_lens, k_scale=k_scale, v_scale=v_scale,
            page_size=page_size, out=out, lse=lse, batch_invariant=batch_invariant, plan=plan,
        )  # fmt: skip
        if looks is not None and not call.detach:
            plan.calls.append((looks, index, options, call))
            del plan.calls[:-_REMEMBERED_CALLS]
    assert plan is not None
    attend, work = call.attend, call.work
    if call.detach:
        q, k_buffer, v_buffer = q.detach(), k_buffer.detach(), v_buffer.detach()
        if k_new is not None and v_new is not None:
            k_new, v_new = k_new.detach(), v_new.detach()

    # -- outputs
    tokens, num_qo_heads, _ = call.out_shape
    if out is None:
        new = torch.empty if plan.covered == tokens else torch.zeros
        out = new(call.out_shape, dtype=q.dtype, device=q.device)
    if lse is None:
        if not return_lse:
            lse = plan.scratch_lse(tokens)
        elif plan.covered == tokens:
            lse = torch.empty((tokens, num_qo_heads), dtype=torch.float32, device=q.device)
        else:
            lse = torch.full((tokens, num_qo_heads), -math.inf, dtype=torch.float32, device=q.device)

    from_pool = k_new is None or v_new is None
    if env.CHECK.get():
        if kv_lens is not None:
            seq_lens = kv_lens
        checked.check_plan("kv_lens" if kv_lens is not None else "seq_lens", seq_lens, plan.lengths.kv_lens)
        if extend_seq_lens is not None:
            checked.check_plan("extend_seq_lens", extend_seq_lens, plan.lengths.q_lens)
            if extend_start_loc is not None:
                checked.check_plan("extend_start_loc", extend_start_loc, plan.lengths.q_starts)
        checked.check_table(
            plan.lengths, req_to_token=req_to_token, req_pool_indices=req_pool_indices, kv_start=kv_start,
            num_slots=k_buffer.shape[0], page_size=page_size, window=call.window, from_pool=from_pool,
            length_name="kv_lens" if kv_lens is not None else "seq_lens",
        )  # fmt: skip
        if write is not None:
            checked.check_loc(write[2], k_buffer.shape[0])

    if call.on_gpu:
        if not call.new_only:
            expect_aligned("k_buffer", k_buffer)
            expect_aligned("v_buffer", v_buffer)
        expect_aligned("out", out, 4)

    # -- run
    if write is not None and plan.batch:
        write_rows(call.dtype, *write, k_buffer, v_buffer, k_scale, v_scale)
    if not work.num_items:
        return (out, lse) if return_lse else out
    sinks_f32 = call.no_sinks if sinks is None else plan.sinks_f32(sinks)
    narrowed = plan.narrowed
    if call.new_only:
        assert k_new is not None and v_new is not None
        k_buffer, v_buffer = k_new, v_new  # never read, but their sizes must agree with k_new
    keys: tuple[Tensor, ...] = (k_buffer, v_buffer)
    scales: tuple[float, ...] = ()
    if call.no_new is not None:  # fp8
        keys, scales = (k_buffer.view(torch.uint8), v_buffer.view(torch.uint8)), (k_scale, v_scale)
    if extend_seq_lens is not None:
        keys += (call.no_new or keys) if k_new is None or v_new is None else (k_new, v_new)
    if call.on_gpu:
        q, keys = gpu_rows(q), tuple(gpu_rows(rows) for rows in keys)
    elif not call.dense:
        q, keys = dense_rows(q), tuple(dense_rows(rows) for rows in keys)
    mask: tuple[Tensor, ...] = ()
    if call.mask_rows is not None and tree_mask is not None:
        mask = (tree_mask.reshape(-1).view(torch.uint8), *call.mask_rows)
    attend.cut_next_loop(work.tasks)
    attend.run(
        q,
        *keys,
        narrowed(req_to_token),
        narrowed(req_pool_indices),
        plan.zeros if kv_start is None else narrowed(kv_start),
        work.items,
        sinks_f32,
        out,
        lse,
        work.part_o,
        work.part_lse,
        *mask,
        call.scale_log2,
        call.cap_log2,
        call.scale_over_cap,
        call.window,
        call.lookahead,
        *scales,
    )
    if work.rows is not None:
        kernel("merge", call.dtype, None, None, None, q.device).run(
            work.part_o, work.part_lse, work.rows, sinks_f32, out, lse
        )
    return (out, lse) if return_lse else out


class _Call(NamedTuple):
    """What a call needs besides its tensors: everything that follows from shapes, dtypes, options and the plan.

    detach: an argument requires a gradient. dense: last dimensions of all inputs are. new_only: the buffers are not
    read and may have other sizes than the new keys. no_new: with an fp8 pool, what stands for new keys where there are
    none. mask_rows: mask_start and mask_width. The rest is named as in docs/kernel-abi.md.

    A plan remembers calls (Plan.calls) for later ones that could not be told from them by the checks: index tensors are
    the very same (callers keep theirs for all layers of a step), the other tensors look alike.
    """

    attend: Kernel
    work: DeviceWork | GpuWork
    dtype: str
    out_shape: tuple[int, int, int]
    scale_log2: float
    cap_log2: float
    scale_over_cap: float
    window: int
    lookahead: int
    new_only: bool
    dense: bool
    detach: bool
    no_sinks: Tensor
    on_gpu: bool
    no_new: tuple[Tensor, Tensor] | None
    mask_rows: tuple[Tensor, Tensor] | None


# Layers of a model make the same call on other memory, at most a few kinds of them (with and without a window).
_REMEMBERED_CALLS = 8


def _prepare(
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
    tree_mask: Tensor | None,
    write: tuple[Tensor, Tensor, Tensor] | None,
    kv_start: Tensor | None,
    kv_lens: Tensor | None,
    k_scale: float,
    v_scale: float,
    page_size: int,
    out: Tensor | None,
    lse: Tensor | None,
    batch_invariant: bool,
    plan: Plan | None,
) -> tuple[Plan, _Call]:
    """Check everything but index values, make the plan where none is given, find the module. Nothing is written."""
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
    pool = pool_dtype(k_buffer, torch_dtype)
    if new_only:
        expect("k_buffer", k_buffer, tuple(k_buffer.shape), pool, device)
        expect("v_buffer", v_buffer, tuple(v_buffer.shape), pool, device)
    else:
        expect("k_buffer", k_buffer, (slots, num_kv_heads, dim), pool, device)
        expect("v_buffer", v_buffer, (slots, num_kv_heads, dim_vo), pool, device)
    expect_scales(k_buffer, k_scale, v_scale)
    fp8 = pool is not torch_dtype and not new_only  # a pool that is not read may be of any type
    if not num_kv_heads or not num_qo_heads or num_qo_heads % num_kv_heads:
        raise ValueError(f"q: got {num_qo_heads} heads, expected a multiple of the {num_kv_heads} KV heads")
    if not dim or not dim_vo:
        raise ValueError(f"q, v_buffer: got head dims {dim} and {dim_vo}, expected at least 1")
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
        if tree_mask is not None:
            raise ValueError("tree_mask: got a tensor with kv_lens, expected None (cross attention has no new keys)")
        seq_lens, causal = kv_lens, decode
    if tree_mask is not None:
        expect_mask("tree_mask", tree_mask, device)
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
        page_size = pages(page_size)
    logit_cap = soft_cap(logit_cap)
    scale = dim**-0.5 if sm_scale is None else real("sm_scale", sm_scale, -1e15, 1e15)
    inputs = {"q": q, "k_buffer": k_buffer, "v_buffer": v_buffer}
    if k_new is not None and v_new is not None:
        inputs |= {"k": k_new, "v": v_new}
    for name, tensor in inputs.items():
        inference_only(name, tensor)

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
    if fp8 and k_new is not None and plan.batch_invariant:
        raise ValueError(
            "k, v: got new keys beside an fp8 pool in batch-invariant mode, expected None: write them first "
            "(write_kv), so that a key is the same number in the chunk that brings it and in later ones"
        )
    mask_rows = None if tree_mask is None else _mask_rows(tree_mask, plan)
    name = "paged_decode" if decode else "paged_extend"
    group, kv_dtype = num_qo_heads // num_kv_heads, KV_DTYPE if fp8 else None
    attend = kernel(name, dtype, group, dim, dim_vo, device, kv_dtype, tree_mask is not None)
    assert attend.tiling is not None
    work = plan.work(attend.tiling, window, from_pool)
    if out is not None:
        expect("out", out, (tokens, num_qo_heads, dim_vo), torch_dtype, device)
        expect_writable("out", out)
    if lse is not None:
        expect("lse", lse, (tokens, num_qo_heads), torch.float32, device)
        expect_writable("lse", lse)
    return plan, _Call(
        attend, work, dtype, (tokens, num_qo_heads, dim_vo),
        scale_log2=scale * _LOG2E,
        cap_log2=logit_cap * _LOG2E,
        scale_over_cap=scale / logit_cap if logit_cap else 0.0,
        window=window,
        lookahead=0 if causal else OFF,
        new_only=new_only,
        dense=all(tensor is dense_rows(tensor) for tensor in inputs.values()),
        no_sinks=sinks_off(num_qo_heads, device),
        on_gpu=device.type == "cuda",
        no_new=_no_new_keys(q, num_kv_heads, dim_vo) if fp8 else None,
        mask_rows=mask_rows,
        detach=any(tensor.requires_grad for tensor in (*inputs.values(), sinks, out, lse) if tensor is not None),
    )  # fmt: skip


def _no_new_keys(q: Tensor, num_kv_heads: int, dim_vo: int) -> tuple[Tensor, Tensor]:
    return q.new_zeros((1, num_kv_heads, q.shape[2])), q.new_zeros((1, num_kv_heads, dim_vo))


def _mask_rows(tree_mask: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """(mask_start, mask_width) of the plan's requests: whose new tokens' rows have which columns."""
    keys, new, _ = plan.lengths
    if plan.prefixes[0] < 0:
        raise ValueError("extend_seq_lens: got more than seq_lens, expected no more with a tree_mask")
    numel, among_new, over_all = tree_mask.numel(), int((new * new).sum()), int((new * keys).sum())
    if numel not in (among_new, over_all):
        raise ValueError(
            f"tree_mask: got {numel} elements, expected {among_new} (new x new tokens of each request) or {over_all} "
            "(new tokens x keys of each request)"
        )
    if numel > OFF:
        raise ValueError(f"tree_mask: got {numel} elements, expected at most {OFF}; give new x new tokens only")
    width = new if numel == among_new else keys
    sizes = new * width
    # The kernels' columns are new tokens: those of whole rows come after the prefix's.
    start = np.cumsum(sizes) - sizes + (width - new)
    rows = torch.from_numpy(np.stack((start, width)).astype(np.int32)).to(tree_mask.device)
    return rows[0], rows[1]


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


def write_rows(
    dtype: str,
    k: Tensor,
    v: Tensor,
    loc: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Run the write kernel for K, and for V unless it is a view of K; arguments checked by the caller."""
    fp8 = k_buffer.dtype is not k.dtype
    write = kernel("write_kv", dtype, None, None, None, k.device, KV_DTYPE if fp8 else None).run
    loc = narrow(loc)
    rows = dense_rows
    if k.device.type == "cuda":
        rows = gpu_rows
        whole = 16 if fp8 else 8
        expect_multiple("k", k.shape[2], whole)
        expect_multiple("v", v.shape[2], whole)
        expect_aligned("k_buffer", k_buffer)
        expect_aligned("v_buffer", v_buffer)

    def put(name: str, x: Tensor, buffer: Tensor, scale: float) -> None:
        x = rows(inference_only(name, x))
        if fp8:
            write(x, buffer.view(torch.uint8), loc, scale)
        else:
            write(x, buffer, loc)

    put("k", k, k_buffer, k_scale)
    if v_buffer.data_ptr() != k_buffer.data_ptr():
        put("v", v, v_buffer, v_scale)
