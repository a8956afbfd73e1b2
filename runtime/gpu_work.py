"""A plan's work list on a GPU: staged in pinned memory, copied without waiting, padded where a graph replays it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewright.runtime.decode_planner import DecodeWork
from tilewright.runtime.planner import Ints, WorkList

# Copies that may be under way: the host waits only where it is so many plans ahead of the GPU.
_SLOTS = 4


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 0 for the CPU."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


class _Slot:
    """One staging area and the event after its last copy."""

    __slots__ = ("event", "items", "items_tensor", "rows", "rows_tensor")

    def __init__(self, items: Tensor, rows: Tensor) -> None:
        on_gpu = items.device.type == "cuda"
        self.items_tensor = torch.zeros(items.shape, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self.rows_tensor = torch.zeros(rows.shape, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self.items, self.rows = self.items_tensor.numpy(), self.rows_tensor.numpy()
        self.event: torch.cuda.Event | None = None


class GpuWork:
    """One work list on the device, refreshed in place; the attributes of `plan.DeviceWork`.

    With `fixed` sizes (buffers of the caller) `items` and `rows` are the whole buffers, whatever the batch: what is not
    used is padding (q_len 0, count 0), which the kernels skip. So a captured graph replays with any batch that fits.
    """

    __slots__ = ("_fixed", "_next", "_slots", "_used", "_work", "buffers", "items", "num_items", "part_lse", "part_o",
                 "rows")  # fmt: skip

    def __init__(self, buffers: Any, fixed: bool) -> None:
        self.buffers, self._fixed = buffers, fixed
        self.part_o, self.part_lse = buffers.part_o, buffers.part_lse
        self.items: Tensor = buffers.items[:0]
        self.rows: Tensor | None = None
        self.num_items = 0
        self._slots: list[_Slot] = []
        self._next = 0
        # Rows of the device's lists that may hold something else than padding.
        self._used = buffers.capacity[:2]
        self._work: WorkList | DecodeWork | None = None

    def _slot(self) -> _Slot:
        """A staging area that no copy reads any more."""
        if len(self._slots) < _SLOTS:
            self._slots.append(_Slot(self.buffers.items, self.buffers.rows))
            return self._slots[-1]
        self._next = (self._next + 1) % _SLOTS
        slot = self._slots[self._next]
        if slot.event is not None:
            slot.event.synchronize()
        return slot

    def _sent(self, slot: _Slot) -> None:
        if self.items.device.type == "cuda":
            if slot.event is None:
                slot.event = torch.cuda.Event()
            slot.event.record(torch.cuda.current_stream(self.items.device))

    def fill(self, work: WorkList | DecodeWork) -> None:
        """Put `work` in the place of what is there, on the current stream; it must fit."""
        self._work = work
        slot = self._slot()
        items, rows = len(work.items), len(work.rows)
        slot.items[:items], slot.rows[:rows] = work.items, work.rows
        if self._fixed:
            slot.items[items : self._used[0]], slot.rows[rows : self._used[1]] = 0, 0
            end_items, end_rows = max(items, self._used[0]), max(rows, self._used[1])
            self.items, self.rows = self.buffers.items, self.buffers.rows
            self.num_items = self.buffers.items.shape[0]
        else:
            end_items, end_rows = items, rows
            self.items, self.rows = self.buffers.items[:items], self.buffers.rows[:rows] if rows else None
            self.num_items = items
        self._used = (items, rows)
        self.buffers.items[:end_items].copy_(slot.items_tensor[:end_items], non_blocking=True)
        if end_rows:
            self.buffers.rows[:end_rows].copy_(slot.rows_tensor[:end_rows], non_blocking=True)
        self._sent(slot)

    def reaches(self, kv_lens: Ints) -> bool:
        """Whether `move` can serve these lengths."""
        return isinstance(self._work, DecodeWork) and self._work.reaches(kv_lens)

    def move(self, kv_lens: Ints) -> None:
        """Go on to lengths a little greater, on the current stream; splits, rows and padding stay as they are."""
        assert isinstance(self._work, DecodeWork)
        self._work.move(kv_lens)
        items = self._used[0]
        slot = self._slot()
        slot.items[:items] = self._work.items
        self.buffers.items[:items].copy_(slot.items_tensor[:items], non_blocking=True)
        self._sent(slot)


def lengths_on_host(values: Any) -> np.ndarray | None:
    """`values` as they are, as a numpy array of integers; None where that takes a copy or a conversion."""
    if isinstance(values, Tensor):
        if values.device.type != "cpu":
            return None
        values = values.numpy()
    if not isinstance(values, np.ndarray) or values.dtype.kind != "i" or values.ndim != 1:
        return None
    return values
