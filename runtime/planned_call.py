"""A decode call that was checked once: what it takes to run it again on other queries, for plans on GPUs.

Layers call with the same plan, table and pools again and again, and checking them costs more than launching the kernel.
A call is remembered by its pools and table (the tensors themselves) and its options; queries, outputs and index tensors
are new in every layer and step, and are compared with those of the checked call by what the checks look at. Calls in
checked mode are not remembered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class PlannedCall:
    """One checked call.

    Args:
        held: k_buffer, v_buffer and req_to_token; held, so that no other tensor can be taken for them.
        q, req_pool_indices, seq_lens, out: of the checked call.
        work: the plan's list for it.
        attend, merge: the kernels.
        table, kv_start, sinks, lse: arguments of theirs, as they take them.
        rest: those of `attend` after the workspaces.
    """

    __slots__ = (
        *("_attend", "_device", "_held", "_kv_start", "_lens", "_lse", "_merge", "_on_gpu"),
        *("_out", "_pools", "_q", "_rest", "_rows", "_sinks", "_table", "_work"),
    )

    def __init__(
        self,
        held: tuple[Tensor, Tensor, Tensor],
        q: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        out: Tensor,
        *,
        work: Any,
        attend: Callable[..., Any],
        merge: Callable[..., Any],
        table: Tensor,
        kv_start: Tensor,
        sinks: Tensor,
        lse: Tensor,
        rest: tuple[Any, ...],
    ) -> None:
        self._held = held
        self._pools = [(tensor, tensor.data_ptr(), tensor.shape) for tensor in held]
        self._q, self._out = ((tensor.shape, tensor.stride(), tensor.dtype) for tensor in (q, out))
        self._rows, self._lens = ((tensor.shape, tensor.dtype) for tensor in (req_pool_indices, seq_lens))
        self._device, self._on_gpu = q.device, q.device.type == "cuda"
        self._work, self._attend, self._merge = work, attend, merge
        self._table, self._kv_start, self._sinks, self._lse, self._rest = table, kv_start, sinks, lse, rest

    def fits(self, q: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, out: Tensor | None) -> bool:
        """Whether a call with these, the same pools, table and options would pass the same checks."""
        device = self._device
        written = () if out is None else ((out, *self._out),)
        for tensor, shape, stride, dtype in ((q, *self._q), *written):
            if (
                tensor.shape != shape
                or tensor.stride() != stride
                or tensor.dtype is not dtype
                or tensor.requires_grad
                or tensor.device != device
                or (self._on_gpu and tensor.data_ptr() & 15)
            ):
                return False
        for tensor, shape, dtype in ((req_pool_indices, *self._rows), (seq_lens, *self._lens)):
            if tensor.shape != shape or tensor.dtype is not dtype or tensor.device != device:
                return False
        # resize_ and set_ leave the tensor what it was.
        for tensor, address, shape in self._pools:
            if tensor.data_ptr() != address or tensor.shape != shape:
                return False
        return True

    def run(self, q: Tensor, rows: Tensor, out: Tensor | None) -> Tensor:
        """Launch it into `out`, None = a new tensor; `rows` are the request rows as the kernel takes them."""
        work = self._work
        if out is None:
            out = q.new_empty(self._out[0])
        if not work.num_items:
            return out
        k_buffer, v_buffer, _ = self._held
        self._attend(
            q, k_buffer, v_buffer, self._table, rows, self._kv_start, work.items, self._sinks, out, self._lse,
            work.part_o, work.part_lse, *self._rest,
        )  # fmt: skip
        if work.rows is not None:
            self._merge(work.part_o, work.part_lse, work.rows, self._sinks, out, self._lse)
        return out
