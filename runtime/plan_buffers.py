"""The memory of a plan: buffers for its work lists and partial results, and one list put into them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.runtime import gpu_work
from tilewright.runtime.planner import FINE, ITEM_COLUMNS, MERGE_COLUMNS, WorkList

# What modules are reckoned to have at most or at least where buffers are made before the module is known: thread blocks
# on a multiprocessor, keys of an item that is as long as `max_split` allows.
_MOST_CTAS = 8
_SMALLEST_BOUND = 1024


@dataclass
class PlanBuffers:
    """Memory for one work list, allocated by the caller so that addresses never change (graphs, fixed budgets).

    items: [W, 10] int32; rows: [R, 4] int32; part_o: [P, num_qo_heads, head_dim_vo] f32; part_lse: [P, num_qo_heads]
    f32; all dense, on the plan's device. A plan that needs more is refused with the sizes it needs. On a GPU the last R
    of the P rows are no partial states: those of part_lse hold the kernels' counters.

    On a GPU the kernels always get the whole lists, what a batch does not use being padding that they skip: a CUDA
    graph captured with the plan replays with every later batch that `Plan.update` puts in. So ample lists cost time:
    each unused item is a thread block that starts and ends.
    """

    items: Tensor
    rows: Tensor
    part_o: Tensor
    part_lse: Tensor

    @classmethod
    def allocate(
        cls, *, items: int, rows: int, partials: int, num_qo_heads: int, head_dim_vo: int, device: torch.device | str
    ) -> PlanBuffers:
        """Allocate for at most so many items, merged rows and partial rows (at least one of each)."""
        items, rows, partials = max(items, 1), max(rows, 1), max(partials, 1)
        if gpu_work.multiprocessors(torch.empty(0, device=device).device):
            partials += rows
        return cls(
            torch.empty((items, ITEM_COLUMNS), dtype=torch.int32, device=device),
            torch.empty((rows, MERGE_COLUMNS), dtype=torch.int32, device=device),
            torch.empty((partials, num_qo_heads, head_dim_vo), dtype=torch.float32, device=device),
            torch.empty((partials, num_qo_heads), dtype=torch.float32, device=device),
        )

    @classmethod
    def for_decode(
        cls,
        batch: int,
        tokens: int,
        *,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_vo: int,
        device: torch.device | str,
    ) -> PlanBuffers:
        """Allocate for any decode batch on a GPU of at most so many requests.

        `tokens`: keys of all of them together; with more, `batch_invariant` plans are refused, and others leave out the
        splits that a module's `max_split` asks for.
        """
        processors = gpu_work.multiprocessors(torch.empty(0, device=device).device)
        # Besides one a request: pieces that keep all blocks busy, and those of a largest size or at fixed positions.
        pieces = -(-FINE * processors * _MOST_CTAS // num_kv_heads) + tokens // _SMALLEST_BOUND
        return cls.allocate(
            items=batch + pieces,
            rows=min(batch, pieces),
            partials=2 * pieces,
            num_qo_heads=num_qo_heads,
            head_dim_vo=head_dim_vo,
            device=device,
        )

    @property
    def capacity(self) -> tuple[int, int, int]:
        """(items, rows, partials) that fit."""
        counters = self.rows.shape[0] if gpu_work.multiprocessors(self.items.device) else 0
        return self.items.shape[0], self.rows.shape[0], self.part_o.shape[0] - counters


class DeviceWork:
    """One work list on the device: views of buffers, refreshed in place. Empty `items` = nothing to run.

    tasks: as of WorkList.
    """

    __slots__ = ("buffers", "items", "num_items", "part_lse", "part_o", "rows", "tasks")

    def __init__(self, buffers: PlanBuffers) -> None:
        self.buffers = buffers
        self.part_o, self.part_lse = buffers.part_o, buffers.part_lse
        self.items = buffers.items[:0]
        self.rows: Tensor | None = None
        self.num_items, self.tasks = 0, 1

    def fill(self, work: WorkList) -> None:
        """Copy `work` in; it must fit."""
        self.num_items, self.tasks = len(work.items), work.tasks
        self.items = self.buffers.items[: self.num_items]
        self.items.copy_(torch.from_numpy(work.items))
        self.rows = None
        if len(work.rows):
            self.rows = self.buffers.rows[: len(work.rows)]
            self.rows.copy_(torch.from_numpy(work.rows))
