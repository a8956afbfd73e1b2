"""Lightning linear attention: the public functions above the modules, and the slopes that models use.

Per request and head, with a = slopes[h] >= 0:  S_t = exp(-a) S_(t-1) + k_t^T v_t,  out_t = scale * q_t S_t.
The state pool is f32 and updated in place. Nothing divides the sum, so outputs grow with the length where decays are
slow: what a 16-bit dtype cannot hold becomes +-inf (fp16 from 65520 on) in `out`, never in the state.
Common rules for tensors: see `tilewright.runtime.paged`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewright.runtime import checked, env
from tilewright.runtime.arguments import (
    dense_rows,
    dtype_name,
    expect,
    expect_apart,
    expect_index,
    expect_writable,
    inference_only,
    narrow,
    real,
    sizes,
)
from tilewright.runtime.dispatch import kernel

__all__ = ["lightning_decode", "lightning_extend", "slopes"]


def slopes(num_heads: int, *, layer: int | None = None, num_layers: int | None = None) -> Tensor:
    """The decay rates a[h] of the lightning models, f32 [num_heads] on the CPU.

    2 ** (-8 (h + 1) / n) for n heads, a power of two; other n take those of the next lower power of two, then every
    second one of twice as many. With `layer` (0 .. num_layers - 1, all layers of the model counted) scaled by
    1 - layer / (num_layers - 1) + 1e-5: deeper layers forget less. Tensor parallelism slices the result by rank.

    Raises:
        ValueError: num_heads < 1, or a layer that is not one of num_layers.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads: got {num_heads}, expected at least 1")
    power = 2 ** math.floor(math.log2(num_heads))
    rates = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    rates += [2 ** (-8 * (head + 1) / (2 * power)) for head in range(0, 2 * power, 2)][: num_heads - power]
    factor = 1.0
    if layer is not None:
        if num_layers is None or not 0 <= layer < num_layers:
            raise ValueError(f"layer: got {layer} of num_layers = {num_layers}, expected 0 <= layer < num_layers")
        factor = 1.0 + 1e-5 - (layer / (num_layers - 1) if num_layers > 1 else 0.0)
    return torch.tensor([rate * factor for rate in rates], dtype=torch.float32)


def lightning_extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    state_indices: Tensor,
    qo_indptr: Tensor,
    slopes: Tensor,
    *,
    has_initial_state: Tensor | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Run the recurrence over the new tokens of each request, from its state and into it.

    Args:
        q: [T, H, Dk], bf16, fp16 or f32.
        k: [T, H, Dk].
        v: [T, H, Dv].
        state: [slots, H, Dk, Dv] f32, only the slot stride free; slot state_indices[b] is updated in place.
        state_indices: [B] slots, no slot twice; -1: no state is touched and the request's rows of out are 0.
        qo_indptr: [B + 1] first row of each request; a request without tokens is skipped. Rows past qo_indptr[B]
            are left alone (zeros in a new `out`).
        slopes: [H] f32 decay rates >= 0.
        has_initial_state: [B] bool or integer: 0 = start from zeros whatever the slot holds; None = all true.
        scale: None = Dk ** -0.5.
        out: [T, H, Dv] to write to, in memory that no other argument uses; None = a new tensor.

    Returns:
        out.

    Raises:
        ValueError, TypeError: an argument that does not fit; the message names it. MissingModuleError: not built.
    """
    if torch.compiler.is_compiling():
        from tilewright.runtime import ops

        out = q.new_zeros((q.shape[0], q.shape[1], v.shape[2])) if out is None else out
        ops.lightning_extend(q, k, v, state, state_indices, qo_indptr, slopes, has_initial_state, scale, out)
        return out
    dtype, scale = _expect_common(q, k, v, state, state_indices, slopes, scale, out)
    (batch,) = state_indices.shape
    expect_index("qo_indptr", qo_indptr, (batch + 1,), q.device)
    if has_initial_state is None:
        has_initial_state = torch.ones(batch, dtype=torch.int32, device=q.device)
    else:
        sizes("has_initial_state", has_initial_state, 1)
        if has_initial_state.dtype not in (torch.bool, torch.int32, torch.int64):
            raise TypeError(f"has_initial_state: got {has_initial_state.dtype}, expected bool, int32 or int64")
        expect("has_initial_state", has_initial_state, (batch,), has_initial_state.dtype, q.device)
        has_initial_state = has_initial_state.ne(0).to(torch.int32)
    if env.CHECK.get():
        checked.check_states(state_indices, state.shape[0])
        checked.check_indptr(qo_indptr, q.shape[0])
    if out is None:
        out = q.new_zeros((q.shape[0], q.shape[1], v.shape[2]))
    if batch and q.shape[0]:
        lengths = (has_initial_state, narrow(qo_indptr))
        _launch("lightning_extend", dtype, q, k, v, state, state_indices, lengths, slopes, out, scale)
    return out


def lightning_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    state_indices: Tensor,
    slopes: Tensor,
    *,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Run one step of the recurrence for each request; arguments as in `lightning_extend` with T = B.

    Args:
        q: [B, H, Dk].
        k: [B, H, Dk].
        v: [B, H, Dv].
        state: [slots, H, Dk, Dv] f32, updated in place.
        state_indices: [B] slots, no slot twice; -1: no state is touched, the row of out is 0.
        slopes: [H] f32.
        scale: None = Dk ** -0.5.
        out: [B, H, Dv].

    Returns:
        out.

    Raises:
        As `lightning_extend`.
    """
    if torch.compiler.is_compiling():
        from tilewright.runtime import ops

        out = q.new_empty((q.shape[0], q.shape[1], v.shape[2])) if out is None else out
        ops.lightning_decode(q, k, v, state, state_indices, slopes, scale, out)
        return out
    dtype, scale = _expect_common(q, k, v, state, state_indices, slopes, scale, out)
    if state_indices.shape[0] != q.shape[0]:
        raise ValueError(f"state_indices: got shape {list(state_indices.shape)}, expected [{q.shape[0]}], one per row")
    if env.CHECK.get():
        checked.check_states(state_indices, state.shape[0])
    if out is None:
        out = torch.empty((q.shape[0], q.shape[1], v.shape[2]), dtype=q.dtype, device=q.device)
    if q.shape[0]:
        _launch("lightning_decode", dtype, q, k, v, state, state_indices, (), slopes, out, scale)
    return out


def _launch(
    operator: str,
    dtype: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    state_indices: Tensor,
    lengths: tuple[Tensor, ...],
    slopes: Tensor,
    out: Tensor,
    scale: float,
) -> None:
    """Run the kernel of these sizes; `lengths` is what extend has besides."""
    q, k, v = (dense_rows(inference_only(name, rows)) for name, rows in (("q", q), ("k", k), ("v", v)))
    rates = inference_only("slopes", slopes).contiguous()
    run = kernel(operator, dtype, None, q.shape[2], v.shape[2], q.device).run
    run(q, k, v, state, narrow(state_indices), *lengths, rates, out, scale)


def _expect_common(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    state_indices: Tensor,
    slopes: Tensor,
    scale: float | None,
    out: Tensor | None,
) -> tuple[str, float]:
    """Check what both phases share; the workload's dtype and the scale."""
    dtype = dtype_name(q)
    device = q.device
    tokens, heads, dim = sizes("q", q, 3)
    dim_vo = sizes("v", v, 3)[2]
    slots = sizes("state", state, 4)[0]
    (batch,) = sizes("state_indices", state_indices, 1)
    expect("k", k, (tokens, heads, dim), q.dtype, device)
    expect("v", v, (tokens, heads, dim_vo), q.dtype, device)
    if not heads or not dim or not dim_vo:
        raise ValueError(f"q, v: got {heads} heads of dims {dim} and {dim_vo}, expected at least 1 of each")
    expect("state", state, (slots, heads, dim, dim_vo), torch.float32, device)
    if state.shape[0] and not state[0].is_contiguous():
        raise ValueError(f"state: got strides {list(state.stride())}, expected dense slots (only the first is free)")
    expect_writable("state", state)
    expect_apart("state", state, q=q, k=k, v=v)
    expect_index("state_indices", state_indices, (batch,), device)
    expect("slopes", slopes, (heads,), torch.float32, device)
    if out is not None:
        expect("out", out, (tokens, heads, dim_vo), q.dtype, device)
        expect_writable("out", out)
        expect_apart("out", out, q=q, k=k, v=v, state=state)
    if env.CHECK.get():
        checked.check_slopes(slopes)
    return dtype, dim**-0.5 if scale is None else real("scale", scale, -1e30, 1e30)
