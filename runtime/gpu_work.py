"""A plan's work list on a GPU: staged in pinned memory, copied without waiting, padded where a graph replays it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewright.runtime.decode_planner import DecodeWork
from tilewright.runtime.planner import Ints, WorkList

# Copies that may be under way: the host waits only where it is so many plans ahead of the GPU. An event costs as much
# as a copy, so one stands for a group of them.
_SLOTS, _GROUP = 32, 8


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 0 for the CPU."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


class _Slot:
    """One staging area.

    Attributes:
        items, rows: its memory.
        moving: the part that a move of the present list copies: to, from, and from as an array.
    """

    __slots__ = ("items", "items_array", "moving", "rows", "rows_array")

    def __init__(self, items: Tensor, rows: Tensor) -> None:
        on_gpu = items.device.type == "cuda"
        self.items = torch.zeros(items.shape, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self.rows = torch.zeros(rows.shape, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self.items_array, self.rows_array = self.items.numpy(), self.rows.numpy()
        self.moving: tuple[Tensor, Tensor, np.ndarray] | None = None


class GpuWork:
    """One work list on the device, refreshed in place; the attributes of `plan_buffers.DeviceWork`.

    With `fixed` sizes (buffers of the caller) `items` and `rows` are the whole buffers, whatever the batch: what is not
    used is padding (q_len 0, count 0), which the kernels skip. So a captured graph replays with any batch that fits.
    """

    __slots__ = (
        *("_events", "_fixed", "_next", "_slots", "_used", "_work"),
        *("buffers", "items", "num_items", "part_lse", "part_o", "rows", "tasks"),
    )

    def __init__(self, buffers: Any, fixed: bool) -> None:
        self.buffers, self._fixed = buffers, fixed
        self.part_o, self.part_lse = buffers.part_o, buffers.part_lse
        self.part_lse.zero_()  # the counters behind the partial states: every kernel leaves them at 0
        self.items: Tensor = buffers.items[:0]
        self.rows: Tensor | None = None
        self.num_items, self.tasks = 0, 1
        self._slots: list[_Slot] = []
        self._next = 0
        self._events: list[torch.cuda.Event | None] = [None] * (_SLOTS // _GROUP)
        # Rows of the device's lists that may hold something else than padding.
        self._used = buffers.capacity[:2]
        self._work: WorkList | DecodeWork | None = None

    def _slot(self) -> _Slot:
        """A staging area that no copy reads any more."""
        number = self._next
        self._next = (number + 1) % _SLOTS
        if number % _GROUP == 0:
            event = self._events[number // _GROUP]
            if event is not None:
                event.synchronize()
        if number == len(self._slots):
            self._slots.append(_Slot(self.buffers.items, self.buffers.rows))
        return self._slots[number]

    def _sent(self) -> None:
        """Called after the copies of a slot: the last of a group marks when all of them are done."""
        if self._next % _GROUP == 0 and self.items.device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.items.device))
            self._events[(self._next - 1) % _SLOTS // _GROUP] = event

    def fill(self, work: WorkList | DecodeWork) -> None:
        """Put `work` in the place of what is there, on the current stream; it must fit."""
        self._work = work
        slot = self._slot()
        items, rows = len(work.items), len(work.rows)
        slot.items_array[:items], slot.rows_array[:rows] = work.items, work.rows
        if self._fixed:
            slot.items_array[items : self._used[0]], slot.rows_array[rows : self._used[1]] = 0, 0
            end_items, end_rows = max(items, self._used[0]), max(rows, self._used[1])
            self.items, self.rows = self.buffers.items, self.buffers.rows
            self.num_items = self.buffers.items.shape[0]
        else:
            end_items, end_rows = items, rows
            self.items, self.rows = self.buffers.items[:items], self.buffers.rows[:rows] if rows else None
            self.num_items = items
        self._used = (items, rows)
        self.buffers.items[:end_items].copy_(slot.items[:end_items], non_blocking=True)
        if isinstance(work, DecodeWork) and work.joined:
            self.rows = None
        elif end_rows:
            self.buffers.rows[:end_rows].copy_(slot.rows[:end_rows], non_blocking=True)
        for known in self._slots:
            known.moving = None
        self._sent()

    def reaches(self, kv_lens: Ints) -> bool:
        """Whether `move` can serve these lengths."""
        return isinstance(self._work, DecodeWork) and self._work.reaches(kv_lens)

    def move(self, kv_lens: Ints) -> None:
        """Go on to lengths a little greater, on the current stream; splits, rows and padding stay as they are."""
        assert isinstance(self._work, DecodeWork)
        self._work.move(kv_lens)
        slot = self._slot()
        if slot.moving is None:
            items = self._used[0]
            slot.moving = self.buffers.items[:items], slot.items[:items], slot.items_array[:items]
        to, source, array = slot.moving
        np.copyto(array, self._work.items)
        to.copy_(source, non_blocking=True)
        self._sent()


def lengths_on_host(values: Any) -> np.ndarray | None:
    """`values` as they are, as a numpy array of integers; None where that takes a copy or a conversion."""
    if isinstance(values, Tensor):
        if values.device.type != "cpu":
            return None
        values = values.numpy()
    if not isinstance(values, np.ndarray) or values.dtype.kind != "i" or values.ndim != 1:
        return None
    return values
