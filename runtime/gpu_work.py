"""A plan's work list on a GPU: staged in pinned memory, copied without waiting, padded where a graph replays it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewright.runtime import store
from tilewright.runtime.cuda_launcher import CudaLauncher
from tilewright.runtime.decode_planner import DecodeWork
from tilewright.runtime.planner import Ints, WorkList

# Copies that may be under way: the host waits only where it is so many plans ahead of the GPU. An event costs as much
# as a copy, so one stands for a group of them.
_SLOTS, _GROUP = 32, 8
_kept: list[_Slot] = []


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 0 for the CPU."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def cutter(device: torch.device) -> Callable[..., tuple[int, int, int, int] | None] | None:
    """`DecodeWork`'s rules in C; None: no CUDA module is loaded yet."""
    launcher = store.cuda_launcher() if device.type == "cuda" else None
    return None if launcher is None else launcher.cut


class _Slot:
    """One staging area: memory for items and rows, as tensors, as arrays and as addresses."""

    __slots__ = ("items", "items_address", "items_array", "rows", "rows_address", "rows_array")

    def __init__(self, items: Tensor, rows: Tensor) -> None:
        on_gpu = items.device.type == "cuda"
        self.items = torch.zeros(items.shape, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self.rows = torch.zeros(rows.shape, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self.items_array, self.rows_array = self.items.numpy(), self.rows.numpy()
        self.items_address, self.rows_address = self.items.data_ptr(), self.rows.data_ptr()


class GpuWork:
    """One work list on the device, refreshed in place; the attributes of `plan_buffers.DeviceWork`.

    With `fixed` sizes (buffers of the caller) `items` and `rows` are the whole buffers, whatever the batch: what is not
    used is padding (q_len 0, count 0), which the kernels skip. So a captured graph replays with any batch that fits.
    """

    __slots__ = (
        *("_device", "_events", "_fixed", "_items_address", "_launcher", "_next", "_rows_address", "_slots"),
        *("_used", "_work"),
        *("buffers", "items", "num_items", "part_lse", "part_o", "rows", "tasks"),
    )

    def __init__(self, buffers: Any, fixed: bool) -> None:
        self._launcher: CudaLauncher | None = None
        self.buffers, self._fixed = buffers, fixed
        self.part_o, self.part_lse = buffers.part_o, buffers.part_lse
        self.part_lse.zero_()  # the counters behind the partial states: every kernel leaves them at 0
        self.items: Tensor = buffers.items[:0]
        self.rows: Tensor | None = None
        self.num_items, self.tasks = 0, 1
        self._device = self.items.device.index if self.items.device.type == "cuda" else -1
        self._items_address, self._rows_address = buffers.items.data_ptr(), buffers.rows.data_ptr()
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
        if self._next % _GROUP or self._device < 0:
            return
        group = (self._next - 1) % _SLOTS // _GROUP
        event, launcher = self._events[group], self._launcher
        if event is None or launcher is None or launcher.record is None:
            event = self._events[group] = event or torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.items.device))
        else:
            self._expect_none(launcher.record(self._device, event.cuda_event))

    def fill(self, work: WorkList | DecodeWork) -> None:
        """Put `work` in the place of what is there, on the current stream; it must fit."""
        # A list that is made once goes by torch, whose allocator then knows until when the staging area is read.
        self._launcher = store.cuda_launcher() if self._device >= 0 and self._work is not None else None
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
        self._copy(self._items_address, slot.items_address, self.buffers.items, slot.items, end_items)
        if isinstance(work, DecodeWork) and work.joined:
            self.rows = None
        elif end_rows:
            self._copy(self._rows_address, slot.rows_address, self.buffers.rows, slot.rows, end_rows)
        self._sent()

    def _copy(self, to: int, source: int, to_rows: Tensor, source_rows: Tensor, count: int) -> None:
        launcher = self._launcher
        if launcher is None or launcher.send is None:
            to_rows[:count].copy_(source_rows[:count], non_blocking=True)
        elif count:
            self._expect_none(launcher.send(self._device, to, source, count * to_rows.shape[1] * 4))

    def _expect_none(self, error: int) -> None:
        if error:
            raise RuntimeError(f"{self.items.device}: copying a plan's work list failed with CUDA error {error}")

    def __del__(self) -> None:
        """Give staging areas back when no copy reads them any more: of the launcher's copies torch does not know."""
        if self._launcher is None or sys.is_finalizing():
            return
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError:  # a capture is under way: they are never given back
            _kept.extend(self._slots)

    def reaches(self, kv_lens: Ints) -> bool:
        """Whether `move` can serve these lengths."""
        return isinstance(self._work, DecodeWork) and self._work.reaches(kv_lens)

    def move(self, kv_lens: Ints) -> None:
        """Go on to lengths a little greater, on the current stream; splits, rows and padding stay as they are."""
        assert isinstance(self._work, DecodeWork)
        self._work.move(kv_lens)
        slot = self._slot()
        items = self._used[0]
        slot.items_array[:items] = self._work.items
        self._copy(self._items_address, slot.items_address, self.buffers.items, slot.items, items)
        self._sent()

    def moved(self, kv_lens: Ints) -> bool:
        """`move` where the list reaches these lengths, in one step; False: it does not, and is as it was."""
        if self._device >= 0 and self._launcher is None:
            self._launcher = store.cuda_launcher()
        launcher, work = self._launcher, self._work
        if launcher is None or launcher.move is None or not isinstance(work, DecodeWork):
            if not self.reaches(kv_lens):
                return False
            self.move(kv_lens)
            return True
        kv_lens = np.ascontiguousarray(kv_lens, np.int64)
        number = self._next
        slot = self._slot()
        error = launcher.move(kv_lens, *work.arrays, self._device, self._items_address, slot.items_address)
        if error is None:
            self._next = number
            return False
        if error:
            self._expect_none(error)
        self._sent()
        return True


def lengths_on_host(values: Any) -> np.ndarray | None:
    """`values` as they are, as a numpy array of integers; None where that takes a copy or a conversion."""
    if isinstance(values, Tensor):
        if values.device.type != "cpu":
            return None
        values = values.numpy()
    if not isinstance(values, np.ndarray) or values.dtype.kind != "i" or values.ndim != 1:
        return None
    return values
