"""The kernel interface (docs/kernel-abi.md) executed literally: every operator, slowly, of the same arguments.

It is the executable form of the document: the planner's items run through it against the oracles, and it stands in for
modules where a test is about the host side. float64 inside, rounded once to the output's dtype; f32 partial states.
Each function asserts what the document promises about its arguments.
"""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from tilewright.runtime.errors import MissingModuleError
from tilewright.schedules.workload import Workload


def _dense(tensor: Tensor, shape: tuple, dtype: torch.dtype) -> None:
    assert tensor.is_contiguous(), "dense"
    assert tensor.dtype == dtype
    assert tuple(tensor.shape) == tuple(shape), (tuple(tensor.shape), shape)


def _strided(tensor: Tensor, shape: tuple, dtype: torch.dtype) -> None:
    assert tensor.stride(-1) == 1 or tensor.shape[-1] <= 1, "dense last dimension"
    assert tensor.dtype == dtype
    assert tuple(tensor.shape) == tuple(shape), (tuple(tensor.shape), shape)


def _index(tensor: Tensor, shape: tuple) -> None:
    assert tensor.dtype == torch.int32
    assert tuple(tensor.shape) == tuple(shape), (tuple(tensor.shape), shape)


def _softmax(scores: Tensor, values: Tensor, sink: float) -> tuple[Tensor, float]:
    """(sum p v / (sum p + sink weight), lse without the sink) of visible scores [n] and values [n, Dv]."""
    if len(scores) == 0:
        return torch.zeros(values.shape[1], dtype=torch.float64), -math.inf
    top = scores.max()
    weights = torch.exp2(scores - top)
    total = weights.sum()
    with_sink = total + (0.0 if sink == -math.inf else 2.0 ** (sink * math.log2(math.e) - float(top)))
    return weights @ values / with_sink, float((top + torch.log2(total)) * math.log(2))


def _pool(buffer: Tensor, scale: float | None) -> Tensor:
    """The numbers of a pool; those of an fp8 pool are codes with a scale."""
    if scale is None:
        return buffer
    assert buffer.dtype == torch.uint8
    return buffer.view(torch.float8_e4m3fn).double() * scale


def _attend(
    q, k_buffer, v_buffer, k_new, v_new, req_to_token, req_pool_indices, kv_start, items, sinks, out, lse, part_o,
    part_lse, scale_log2, cap_log2, scale_over_cap, window, lookahead, k_scale=None, v_scale=None, *, mask=None,
    mask_start=None, mask_width=None, block_q, padding, decode=False,
):  # fmt: skip
    tokens, hq, dim = q.shape
    slots, hk, _ = k_buffer.shape
    dim_vo, batch, partials = v_buffer.shape[2], len(req_pool_indices), len(part_o)
    group = hq // hk
    dtype = q.dtype
    assert group * hk == hq
    _strided(q, (tokens, hq, dim), dtype)
    pool_dtype = dtype if k_scale is None else torch.uint8
    _strided(k_buffer, (slots, hk, dim), pool_dtype)
    _strided(v_buffer, (slots, hk, dim_vo), pool_dtype)
    _strided(k_new, (len(k_new), hk, dim), dtype)
    _strided(v_new, (len(k_new), hk, dim_vo), dtype)
    _index(req_to_token, tuple(req_to_token.shape))
    _index(req_pool_indices, (batch,))
    _index(kv_start, (batch,))
    _dense(items, (len(items), 10), torch.int32)
    _dense(sinks, (hq,), torch.float32)
    _strided(out, (tokens, hq, dim_vo), dtype)
    _strided(lse, (tokens, hq), torch.float32)
    _dense(part_o, (partials, hq, dim_vo), torch.float32)
    _dense(part_lse, (partials, hq), torch.float32)
    assert partials >= 1 and len(items) >= 1
    if mask is not None:
        _dense(mask, (len(mask),), torch.uint8)
        _index(mask_start, (batch,))
        _index(mask_width, (batch,))
    k_pool, v_pool = _pool(k_buffer, k_scale), _pool(v_buffer, v_scale)
    for request, q_row, q_len, kv_begin, kv_len, pos, six, seven, part, nine in items.tolist():
        if padding and q_len == 0:
            continue
        prefix, new_row, first_new = (math.inf, 0, 0) if decode else (six, seven, nine)
        first, pieces, counted = (six, seven, nine) if decode and padding else (0, 0, 0)
        assert 1 <= q_len <= block_q and kv_begin >= 0 and kv_len >= 0
        for i in range(q_len):
            position = pos + i
            keys = [j for j in range(kv_begin, kv_begin + kv_len) if position - window < j <= position + lookahead]
            if mask is not None:
                assert prefix in (first_new, 2**30)
                row = int(mask_start[request]) + (position - first_new) * int(mask_width[request])
                for j in keys:
                    assert j < first_new or 0 <= row + j - first_new < len(mask)
                keys = [j for j in keys if j < first_new or mask[row + j - first_new]]
            table = req_to_token[int(req_pool_indices[request])]
            rows_k, rows_v = [], []
            for j in keys:
                if j < prefix:
                    slot = int(table[int(kv_start[request]) + j])
                    assert 0 <= slot < slots, slot
                    rows_k.append(k_pool[slot])
                    rows_v.append(v_pool[slot])
                else:
                    assert 0 <= j + new_row < len(k_new)
                    rows_k.append(k_new[j + new_row])
                    rows_v.append(v_new[j + new_row])
            for h in range(hq):
                if keys:
                    key = torch.stack([row[h // group].double() for row in rows_k])
                    value = torch.stack([row[h // group].double() for row in rows_v])
                else:
                    key, value = torch.zeros(0, dim).double(), torch.zeros(0, dim_vo).double()
                raw = key @ q[q_row + i, h].double()
                scores = cap_log2 * torch.tanh(scale_over_cap * raw) if cap_log2 else scale_log2 * raw
                row_out, row_lse = _softmax(scores, value, float(sinks[h]) if part < 0 else -math.inf)
                if part < 0:
                    out[q_row + i, h], lse[q_row + i, h] = row_out.to(dtype), row_lse
                else:
                    assert part + i < partials
                    part_o[part + i, h], part_lse[part + i, h] = row_out.float(), row_lse
        if counted:  # the last piece of the row joins all
            assert first <= part < first + pieces <= partials - counted
            counter = part_lse.view(torch.int32)[partials - counted, :1]
            assert 0 <= counter < pieces
            counter += 1
            if counter == pieces:
                counter.zero_()
                row = torch.tensor([[q_row, first, pieces, 1]], dtype=torch.int32)
                merge(part_o, part_lse, row, sinks, out, lse)


def merge(part_o, part_lse, rows, sinks, out, lse, padding=False):
    """`merge` of the interface."""
    partials, heads, dim = part_o.shape
    _dense(part_o, (partials, heads, dim), torch.float32)
    _dense(part_lse, (partials, heads), torch.float32)
    _dense(rows, (len(rows), 4), torch.int32)
    _dense(sinks, (heads,), torch.float32)
    _strided(out, (len(out), heads, dim), out.dtype)
    _strided(lse, (len(out), heads), torch.float32)
    for row, first, count, stride in rows.tolist():
        if padding and count == 0:
            continue
        assert count > 0
        for h in range(heads):
            states = [first + s * stride for s in range(count)]
            live = [s for s in states if part_lse[s, h] != -math.inf]
            scores = torch.tensor([float(part_lse[s, h]) for s in live], dtype=torch.float64) * math.log2(math.e)
            values = torch.stack([part_o[s, h] for s in live]).double() if live else torch.zeros(0, dim).double()
            row_out, row_lse = _softmax(scores, values, float(sinks[h]))
            out[row, h], lse[row, h] = row_out.to(out.dtype), row_lse


def write_kv(x, buffer, loc, scale=None):
    """`write_kv` of the interface."""
    _strided(x, (len(x), *buffer.shape[1:]), x.dtype)
    _strided(buffer, tuple(buffer.shape), x.dtype if scale is None else torch.uint8)
    if scale is not None:
        # torch makes NaN of what lies beyond the largest number.
        x = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    _index(loc, (len(x),))
    for t, slot in enumerate(loc.tolist()):
        if slot >= 0:
            buffer[slot] = x[t]


def lightning_extend(q, k, v, state, state_indices, has_initial_state, qo_indptr, slopes, out, scale):
    """`lightning_extend` of the interface."""
    tokens, heads, dim = q.shape
    batch = len(state_indices)
    _strided(q, (tokens, heads, dim), q.dtype)
    _strided(k, (tokens, heads, dim), q.dtype)
    _strided(v, (tokens, heads, v.shape[2]), q.dtype)
    _strided(out, tuple(v.shape), q.dtype)
    assert state.dtype == torch.float32 and state.shape[1:] == (heads, dim, v.shape[2])
    _index(state_indices, (batch,))
    _dense(has_initial_state, (batch,), torch.int32)
    _index(qo_indptr, (batch + 1,))
    _dense(slopes, (heads,), torch.float32)
    decay = torch.exp(-slopes.double())[:, None, None]
    for b in range(batch):
        first, last, slot = int(qo_indptr[b]), int(qo_indptr[b + 1]), int(state_indices[b])
        if slot < 0:
            out[first:last] = 0
            continue
        if first == last:
            continue
        s = state[slot].double() if has_initial_state[b] else torch.zeros_like(state[slot]).double()
        for t in range(first, last):
            s = decay * s + k[t].double()[:, :, None] * v[t].double()[:, None, :]
            out[t] = (scale * torch.einsum("hd,hde->he", q[t].double(), s)).to(out.dtype)
        state[slot] = s.float()


def lightning_decode(q, k, v, state, state_indices, slopes, out, scale):
    """`lightning_decode` of the interface."""
    batch = len(q)
    ones = torch.ones(batch, dtype=torch.int32)
    lightning_extend(
        q, k, v, state, state_indices, ones, torch.arange(batch + 1, dtype=torch.int32), slopes, out, scale
    )


class ModelStore:
    """`load(workload)` over this model: some specialised sizes, and a general module for everything.

    calls: (workload name, arguments) of every kernel call so far.
    padding: as on a GPU, padding in the lists is skipped; else there must be none.
    joins: decode joins the pieces of a row itself, as on a GPU.
    """

    def __init__(
        self, *, block_q: int = 4, chunk: int = 8, min_split: int = 16, general: bool = True, special: bool = True,
        padding: bool = False, joins: int = 0,
    ) -> None:  # fmt: skip
        self.padding, self.joins = padding, joins
        self.plan = {"block_q": block_q, "chunk": chunk, "min_split": min_split}
        self.general, self.special = general, special
        self.calls: list[tuple[str, tuple]] = []

    def names(self) -> list[str]:
        """Workloads called so far, in order."""
        return [name for name, _ in self.calls]

    def load(self, workload: Workload) -> SimpleNamespace:
        """As `tilewright.runtime.store.load`."""
        if (workload.general and not self.general) or (not workload.general and workload.group and not self.special):
            raise MissingModuleError(f"{workload.name}: not in the model")
        plan = {}
        if workload.operator == "paged_decode":
            plan = self.plan | {"block_q": 1} | ({"joins": 1} if self.joins else {})

            def function(q, k_buffer, v_buffer, *rest):
                none = q.new_empty(0, k_buffer.shape[1], q.shape[2]), q.new_empty(0, *v_buffer.shape[1:])
                _attend(q, k_buffer, v_buffer, *none, *rest, block_q=1, padding=self.padding, decode=True)

        elif workload.operator == "paged_extend":
            plan = self.plan

            def function(*arguments):
                mask = {}
                if workload.tree:  # between the tensors and the scalars
                    mask = dict(zip(("mask", "mask_start", "mask_width"), arguments[14:17], strict=True))
                    arguments = (*arguments[:14], *arguments[17:])
                assert len(arguments) == (21 if workload.kv_dtype else 19)
                _attend(*arguments, **mask, block_q=self.plan["block_q"], padding=self.padding)

        else:
            function = {
                "merge": partial(merge, padding=self.padding),
                "write_kv": write_kv,
                "lightning_extend": lightning_extend,
                "lightning_decode": lightning_decode,
            }[workload.operator]

        def counted(*arguments):
            self.calls.append((workload.name, arguments))
            function(*arguments)

        return SimpleNamespace(function=counted, plan=plan, workload=workload, cut_next_loop=lambda tasks: None)
