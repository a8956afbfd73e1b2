"""The planner of decode batches on GPUs: the same items as planner.py makes, for thousands of workers, in microseconds.

A decode step is planned before every forward pass, so its cost is latency. One query token per request leaves little to
decide (which ranges to split), and between two steps lengths grow by one: `DecodeWork` then only moves the ends of the
ranges, for as many steps as leave the split sound.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from tilewright.runtime.planner import (
    BALANCED,
    COUNTER,
    FINE,
    FIRST_PIECE,
    INVARIANT_SPLIT,
    ITEM_COLUMNS,
    KV_BEGIN,
    KV_LEN,
    MERGE_COLUMNS,
    OFF,
    PART,
    PIECES,
    POS,
    PREFIX,
    Q_LEN,
    Q_ROW,
    REQUEST,
    Ints,
    Tiling,
    even_pieces,
    makespan,
    round_up,
)

_NO_ROWS = np.empty((0, MERGE_COLUMNS), np.int32)


@lru_cache(maxsize=64)
def _counting(batch: int) -> Ints:
    numbers = np.arange(batch)
    numbers.flags.writeable = False
    return numbers


class DecodeWork:
    """The items of one decode batch on the host, made once and then moved on from step to step.

    Attributes:
        items: int32 [W, 10], costliest first. rows: int32 [R, 4]. partials: as in planner.WorkList.
        joined: the module joins pieces itself; `rows` tells which rows have a counter, the merge kernel gets none.
    """

    __slots__ = (
        "_kv_len",
        "_last",
        "_last_begin",
        "_lens",
        "_pos",
        "_request",
        "_room",
        "items",
        "joined",
        "partials",
        "rows",
    )

    def __init__(
        self,
        kv_lens: Ints,
        tiling: Tiling,
        *,
        window: int,
        num_kv_heads: int,
        workers: int,
        batch_invariant: bool,
    ) -> None:
        """Plan a batch.

        Args:
            kv_lens: [B] int64 keys of each request, the new token's own included.
            tiling: the module's parameters.
            window: visible keys including the query's own; OFF = all.
            num_kv_heads: heads that run as units of their own.
            workers: units that the device runs at once; not looked at when batch_invariant.
            batch_invariant: split at fixed positions, as planner.make_work does.
        """
        self.joined = bool(tiling.joins)
        lengths = kv_lens if window >= OFF else np.minimum(kv_lens, window)
        low = 0 if window >= OFF else kv_lens - lengths
        base: Ints | int = low
        if batch_invariant:
            fixed = round_up(max(INVARIANT_SPLIT, tiling.min_split), tiling.chunk)
            base = low // fixed * fixed
            counts = np.maximum(-(-(kv_lens - base) // fixed), 1)
            size: Ints = np.full_like(counts, fixed)
            split = bool(counts.max(initial=1) > 1)
            room = (base + counts * fixed if window >= OFF else kv_lens) - kv_lens
        else:
            size, counts, split = _pieces(lengths, tiling, num_kv_heads * tiling.blocks, workers)
            room = np.full(len(kv_lens), tiling.chunk)
        self._lens = kv_lens.copy()
        # Where the last piece of each request stands in the list, None = request i's in the place of i in _request.
        self._last: Ints | None = None
        self._last_begin: Ints | int
        if split:
            self._split(base, low, size, counts)
        else:
            order = np.argsort(-lengths, kind="stable")  # longest first
            self._fill(order, low if isinstance(low, int) else low[order], kv_lens[order])
            self.items[:, PART] = -1
            self.rows = _NO_ROWS
            self.partials = 0
        if tiling.max_split and not batch_invariant:
            last = kv_lens - self._last_begin if split else lengths
            room = np.minimum(np.maximum(tiling.max_split - last, 0), tiling.chunk)
        self._room = room.astype(np.uint64)

    def _split(self, base: Ints | int, low: Ints | int, size: Ints, counts: Ints) -> None:
        batch = len(counts)
        after = np.cumsum(counts)
        owner = np.repeat(_counting(batch), counts)
        first = after - counts
        index = _counting(int(after[-1])) - first[owner]
        begin = index * size[owner]
        if isinstance(base, np.ndarray):
            begin = np.maximum(begin + base[owner], low[owner])  # type: ignore[index]
        ends = begin.copy()
        ends[:-1] = begin[1:]
        ends[after - 1] = self._lens
        order = np.argsort(begin - ends, kind="stable")
        # Requests in one piece have no partial state: number those of the others in a row.
        many = counts > 1
        partial = np.cumsum(np.where(many, counts, 0)) - counts
        part = np.where(many[owner], partial[owner] + index, -1)
        self._fill(owner[order], begin[order], ends[order])
        self.items[:, PART] = part[order]
        place = np.empty_like(order)
        place[order] = _counting(len(order))
        self._last = place[after - 1]
        self._last_begin = begin[after - 1]
        which = np.flatnonzero(many)
        if self.joined:
            own = owner[order]
            self.items[:, FIRST_PIECE], self.items[:, PIECES] = partial[own], counts[own]
            self.items[:, COUNTER] = np.where(many, np.cumsum(many), 0)[own]
        self.rows = np.empty((len(which), MERGE_COLUMNS), np.int32)
        self.rows[:, 0] = which
        self.rows[:, 1] = partial[which]
        self.rows[:, 2] = counts[which]
        self.rows[:, 3] = 1
        self.partials = int(counts[which].sum())

    def _fill(self, request: Ints, begin: Ints | int, ends: Ints) -> None:
        self.items = items = np.zeros((len(request), ITEM_COLUMNS), np.int32)
        items[:, REQUEST] = request
        items[:, Q_ROW] = request
        items[:, Q_LEN] = 1
        items[:, KV_BEGIN] = begin
        items[:, PREFIX] = OFF
        self._request, self._last_begin = request, begin
        self._kv_len, self._pos = items[:, KV_LEN], items[:, POS]
        self._kv_len[:] = ends - begin
        self._pos[:] = self._lens[request] - 1

    def reaches(self, kv_lens: Ints) -> bool:
        """Whether `move` can serve these lengths ([B] int64): each at or a little past the planned one."""
        return len(kv_lens) == len(self._lens) and not ((kv_lens - self._lens).view(np.uint64) > self._room).any()

    def move(self, kv_lens: Ints) -> None:
        """Move the ends of the ranges to lengths that `reaches` said yes to; splits and rows stay as they are.

        A window's ranges keep their beginnings: the kernels hide what it has passed.
        """
        ends = kv_lens.take(self._request)
        np.subtract(ends, 1, out=self._pos, casting="unsafe")
        if self._last is None:
            np.subtract(ends, self._last_begin, out=self._kv_len, casting="unsafe")
        else:
            self._kv_len[self._last] = kv_lens - self._last_begin


def _pieces(lengths: Ints, tiling: Tiling, num_kv_heads: int, workers: int) -> tuple[Ints, Ints, bool]:
    """(piece size, number of pieces, whether any is split): the coarsest cut under which the workers end together."""
    total = int(lengths.sum())
    mean = total * num_kv_heads / workers
    smallest = round_up(max(tiling.min_split, 1), tiling.chunk)
    bound = max(round_up(tiling.max_split, tiling.chunk), smallest) if tiling.max_split else OFF
    longest = int(lengths.max(initial=0))
    best = (lengths, np.ones_like(lengths), False)
    best_load = float("inf")
    if longest <= bound:
        best_load = makespan(lengths, num_kv_heads, workers, mean) if longest > mean / FINE else mean
    share = 1
    while best_load > BALANCED * mean and share <= FINE:
        limit = min(max(round_up(int(mean / share), tiling.chunk), smallest), bound)
        if limit >= longest and best_load < float("inf"):
            share *= 2
            continue
        size, counts = even_pieces(lengths, limit, tiling)
        load = makespan(_costs(lengths, size, counts), num_kv_heads, workers, mean)
        if load < best_load:
            best, best_load = (size, counts, True), load
        if limit == smallest:
            break
        share *= 2
    return best


def _costs(lengths: Ints, size: Ints, counts: Ints) -> Ints:
    """Lengths of all pieces."""
    costs = np.repeat(size, counts)
    costs[np.cumsum(counts) - 1] = lengths - (counts - 1) * size
    return costs
