"""Lightning attention in eager torch, as well as it can be written there: what `make bench` compares with.

All work in f32 inside (matrix products of half types are slower on CPUs without them, and less exact) and update the
state in place without gathering it, which a serving loop could not even do.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNKS = (32, 64, 128, 256)  # the bench takes the fastest


def extend_batched(q: Tensor, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor, scale: float, chunk: int) -> Tensor:
    """One request, all chunks at once but for the recurrence: few and large operations.

    Args:
        q: [T, H, Dk], T a multiple of `chunk`; k likewise.
        k: [T, H, Dk].
        v: [T, H, Dv].
        state: [H, Dk, Dv] f32, updated in place.
        slopes: [H] f32.
        scale: factor of the output.
        chunk: tokens a chunk.

    Returns:
        out [T, H, Dv] in v's dtype.
    """
    count, heads = q.shape[0] // chunk, q.shape[1]
    qc, kc, vc = (x.float().transpose(0, 1).reshape(heads, count, chunk, x.shape[2]) for x in (q, k, v))
    mask, rows, keys, whole = _weights(slopes, chunk)
    updates = (kc * keys[:, None]).transpose(-1, -2) @ vc
    before = torch.empty_like(updates)
    for c in range(count):
        before[:, c] = state
        torch.addcmul(updates[:, c], state, whole, out=state)
    out = (qc @ kc.transpose(-1, -2)).mul_(mask[:, None]) @ vc + (qc * rows[:, None]) @ before
    return out.mul_(scale).reshape(heads, -1, v.shape[2]).transpose(0, 1).to(v.dtype)


def extend_looped(q: Tensor, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor, scale: float, chunk: int) -> Tensor:
    """The same chunk by chunk, batched over heads: operands stay in cache. Arguments and result as `extend_batched`."""
    qh, kh, vh = (x.transpose(0, 1).float() for x in (q, k, v))
    mask, rows, keys, whole = _weights(slopes, chunk)
    mask, rows = mask * scale, rows * scale
    out = torch.empty_like(v)
    for first in range(0, q.shape[0], chunk):
        qc, kc, vc = (x[:, first : first + chunk] for x in (qh, kh, vh))
        intra = torch.bmm(torch.bmm(qc, kc.transpose(1, 2)).mul_(mask), vc)
        out[first : first + chunk] = torch.baddbmm(intra, qc * rows, state).transpose(0, 1)
        torch.baddbmm(state * whole, (kc * keys).transpose(1, 2), vc, out=state)
    return out


def _weights(slopes: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Decays of a chunk: [H, chunk, chunk] of key j in row i, [H, chunk, 1] of rows and of keys, [H, 1, 1] of all."""
    steps = torch.arange(chunk, dtype=torch.float32)
    distance = steps[:, None] - steps[None, :]
    slope = slopes[:, None, None]
    mask = torch.where(distance >= 0, torch.exp(-slope * distance.clamp(min=0)), 0.0)
    rows, keys = torch.exp(-slope * (steps + 1)[:, None]), torch.exp(-slope * (chunk - 1 - steps)[:, None])
    return mask, rows, keys, torch.exp(-slope * chunk)


def decode_bmm(q: Tensor, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor, scale: float) -> Tensor:
    """One token per request by batched products.

    Args:
        q: [B, H, Dk], and k likewise.
        k: [B, H, Dk].
        v: [B, H, Dv].
        state: [B, H, Dk, Dv] f32, updated in place.
        slopes: [H] f32.
        scale: factor of the output.

    Returns:
        out [B, H, Dv] in v's dtype.
    """
    batch, heads, dk, dv = state.shape
    state.mul_(torch.exp(-slopes)[:, None, None])
    flat = state.view(-1, dk, dv)
    flat.baddbmm_(k.reshape(-1, dk, 1).float(), v.reshape(-1, 1, dv).float())
    return torch.bmm(q.reshape(-1, 1, dk).float() * scale, flat).view(batch, heads, dv).to(v.dtype)


def decode_addcmul(q: Tensor, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor, scale: float) -> Tensor:
    """The same with an elementwise update. Arguments and result as `decode_bmm`."""
    state.mul_(torch.exp(-slopes)[:, None, None]).addcmul_(k[..., None].float(), v[..., None, :].float())
    return ((q.float() * scale)[..., None, :] @ state).squeeze(-2).to(v.dtype)
