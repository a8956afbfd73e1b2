"""Turn the lengths of a batch into the work items of the attention kernels: numpy only, no loop over requests.

An item is one block of query tokens of one request over one range of keys (docs/kernel-abi.md has the columns). The
kernels run `items x KV heads` independent units, handed out in the order of the list, a few neighbours at a time; this
file decides the ranges and how many units make a task so that every thread is busy: a range is trimmed to what its rows
can see, and split only where whole ranges would leave threads waiting. What was split is put together by `rows`, the
list of the merge kernel.

The cost of a unit is its number of keys and a constant: a kernel computes all rows of its block, however few are used.
"""

from __future__ import annotations

import heapq
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

OFF = 2**30
"""The kernels' value of `window` and `lookahead` for "no bound"."""

# Columns of an item, in the kernels' order.
REQUEST, Q_ROW, Q_LEN, KV_BEGIN, KV_LEN, POS, PREFIX, NEW_ROW, PART, FIRST_NEW = range(10)
ITEM_COLUMNS = 10
# What decode has in columns of its own where a module joins pieces: the first and the number of the pieces of the
# item's row, and 1 + the number of the row's counter.
FIRST_PIECE, PIECES, COUNTER = PREFIX, NEW_ROW, FIRST_NEW
MERGE_COLUMNS = 4  # out row, first partial row, count, stride between partial rows

# Split positions of the batch-invariant mode: multiples of so many keys (rounded up to whole blocks and chunks). Long
# enough that merging is noise, short enough that one long context still feeds many threads.
INVARIANT_SPLIT = 2048
# The same for extend on GPUs, where a batch has many blocks of queries, and merging their states costs more.
GPU_INVARIANT_SPLIT = 8192
# A unit this many times smaller than a thread's share can be left to the end of the list without showing.
FINE = 8
# What a unit costs besides its keys (query rows in, output rows out), in keys.
UNIT_KEYS = 16
# What another piece of a unit costs a GPU, in keys of its thread blocks: a state is written, read and merged.
PIECE_KEYS = 400
# Work lists whose longest thread has at most this multiple of the mean are good enough not to be split further.
BALANCED = 1.1
FULL_ROUNDS = 1.02  # the same on GPUs

Ints = NDArray[np.int64]


class Tiling(NamedTuple):
    """What the planner must know of a module (its manifest's `plan`)."""

    block_q: int
    chunk: int
    min_split: int
    max_split: int = 0
    """Most keys of an item, 0 = no bound: heads of one short range are worked on while its pages are in reach."""
    ctas: int = 1
    """On a GPU: thread blocks of the module for each multiprocessor."""
    blocks: int = 1
    """On a GPU: thread blocks of an item and KV head, each with some of its query heads."""
    joins: int = 0
    """On a GPU, 1: the last piece of a row that is done joins them all (decode); 0: the merge kernel does."""


class Lengths(NamedTuple):
    """A batch on the host, int64 [B] each.

    kv_lens: keys of the request, the new tokens' own included. q_lens: new (query) tokens. q_starts: row of the first.
    Query token i of request b stands at position kv_lens[b] - q_lens[b] + i, which may be negative.
    """

    kv_lens: Ints
    q_lens: Ints
    q_starts: Ints


class WorkList(NamedTuple):
    """items int32 [W, 10], costliest first; rows int32 [R, 4]; partials: rows of the partial workspace in use.

    tasks: into how many tasks of neighbouring units a loop over the items and heads is best cut; any number is right.
    """

    items: NDArray[np.int32]
    rows: NDArray[np.int32]
    partials: int
    tasks: int = 1


def _offsets(counts: Ints) -> Ints:
    """Exclusive prefix sum."""
    return np.cumsum(counts) - counts


def _expand(counts: Ints) -> tuple[Ints, Ints]:
    """(owner, index within owner) of every element when owner i has counts[i] elements."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - _offsets(counts)[owner]


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below `value`."""
    return -(-value // multiple) * multiple


def _longest_thread(unit_costs: Ints, units: int, threads: int, mean: float) -> float:
    """Load of the busiest thread when every cost, `units` times over, goes out longest first.

    Only units above mean / FINE are dealt (fewer than FINE * threads exist); the rest fills what they leave.
    """
    large = np.sort(unit_costs[unit_costs > mean / FINE])[::-1]
    loads = [0] * threads
    for cost in np.repeat(large, units).tolist():
        heapq.heapreplace(loads, loads[0] + cost)
    return max(*loads, mean)


def makespan(unit_costs: Ints, units: int, workers: int, mean: float) -> float:
    """The same for workers in their hundreds, in a few passes over the costs: the smaller of two upper bounds.

    Rounds of one unit a worker, each as long as its longest unit: exact for equal units. And a unit begins when the
    units before it are done at the latest, spread evenly: close where lengths differ.
    """
    costs = np.sort(unit_costs)[::-1]
    rounds = float(costs.take(_round_starts(len(costs), units, workers)).sum())
    if rounds <= BALANCED * mean:
        return max(rounds, mean)
    spread = (np.cumsum(costs) * units - costs) / workers + costs
    return max(min(rounds, float(spread.max())), float(costs[0]), mean)


@lru_cache(maxsize=256)
def _round_starts(costs: int, units: int, workers: int) -> Ints:
    """Which cost each round of makespan begins with."""
    return np.arange(0, costs * units, workers) // units


def _pieces(lengths: Ints, size: Ints, min_split: int) -> Ints:
    """Number of pieces of `size` keys, none below min_split: a shorter rest goes to the piece before it."""
    counts = np.maximum(-(-lengths // size), 1)
    short = (counts > 1) & (lengths - (counts - 1) * size < min_split)
    return counts - short


def _whole(lengths: Ints) -> tuple[Ints, Ints]:
    return np.maximum(lengths, 1), np.ones_like(lengths)


def even_pieces(lengths: Ints, limit: Ints | int, tiling: Tiling) -> tuple[Ints, Ints]:
    """(piece size, number of pieces) of about one size each, none above `limit` but for a short rest."""
    smallest = round_up(max(tiling.min_split, 1), tiling.chunk)
    even = -(-lengths // np.maximum(-(-lengths // limit), 1))
    size = np.maximum(-(-even // tiling.chunk) * tiling.chunk, smallest)
    return size, _pieces(lengths, size, tiling.min_split)


def _piece_lengths(lengths: Ints, size: Ints, counts: Ints) -> Ints:
    owner, index = _expand(counts)
    rest = lengths - (counts - 1) * size
    return np.where(index == counts[owner] - 1, rest[owner], size[owner])


def _tasks(unit_costs: Ints, units: int, threads: int) -> int:
    """Tasks of as many units as a thread does in an eighth of the even share, of one where single units take longer.

    Tasks are taken costliest first by whoever is free, so no thread is later than the others by more than one task, and
    by less than the largest unit where those go first.
    """
    if not len(unit_costs):
        return 1
    share = float(unit_costs.sum()) * units / threads / FINE
    step = max(int(share / unit_costs.max()), 1)
    return -(-len(unit_costs) * units // step)


def _balance(lengths: Ints, tiling: Tiling, num_kv_heads: int, threads: int, gpu: bool) -> tuple[Ints, Ints]:
    """(piece size in keys, number of pieces) of every query block, so that the threads end together.

    Tries whole blocks first, then pieces of at most a share of a thread's work that shrinks until the estimate is
    balanced; the coarsest good answer wins, for every split costs a partial state and a merge.
    """
    costs = lengths + UNIT_KEYS
    mean = float(costs.sum()) * num_kv_heads / threads
    smallest = round_up(max(tiling.min_split, 1), tiling.chunk)
    longest = max(round_up(tiling.max_split, tiling.chunk), smallest) if tiling.max_split else 0
    best = even_pieces(lengths, np.full_like(lengths, longest), tiling) if longest else _whole(lengths)
    if threads == 1 or not len(costs) or costs.max() <= mean / FINE:
        return best
    if gpu:
        return _fill_rounds(lengths, best, mean, tiling, num_kv_heads, threads)

    def busiest(size: Ints, counts: Ints) -> float:
        costs = _piece_lengths(lengths, size, counts) + UNIT_KEYS
        return _longest_thread(costs, num_kv_heads, threads, mean)

    best_load = busiest(*best)
    share = 1
    while best_load > BALANCED * mean and share <= FINE:
        limit = max(round_up(int(mean / share), tiling.chunk), smallest)
        pieces = even_pieces(lengths, np.full_like(lengths, min(limit, longest) if longest else limit), tiling)
        load = busiest(*pieces)
        if load < best_load:
            best, best_load = pieces, load
        share *= 2
    return best


def _fill_rounds(
    lengths: Ints, best: tuple[Ints, Ints], mean: float, tiling: Tiling, num_kv_heads: int, workers: int
) -> tuple[Ints, Ints]:
    """The same for a GPU, whose hundreds of workers take units in rounds: only the last round must come out even.

    Whole blocks, as long as they fill rounds, and what is left in pieces that fill a few short rounds more; or all in
    pieces of at most a share of a worker's work.
    """

    def load(size: Ints, counts: Ints) -> float:
        costs = _piece_lengths(lengths, size, counts) + UNIT_KEYS
        pieces = int(counts[counts > 1].sum()) * num_kv_heads
        return makespan(costs, num_kv_heads, workers, mean) + pieces * PIECE_KEYS / workers

    best_load = load(*best)
    if best_load <= mean * FULL_ROUNDS:
        return best
    order = np.argsort(-lengths, kind="stable")
    rounds = len(lengths) * num_kv_heads // workers
    for kept in {rounds * workers // num_kv_heads, max(rounds - 1, 0) * workers // num_kv_heads, 0}:
        rest = order[kept:]
        left = float((lengths[rest] + UNIT_KEYS).sum()) * num_kv_heads / workers
        for parts in (1, 2, 3, 4, 6, 8):
            limit = np.full_like(lengths, max(int(lengths.max()), 1))
            limit[rest] = max(int(left / parts), 1)
            pieces = even_pieces(lengths, limit, tiling)
            if (found := load(*pieces)) < best_load:
                best, best_load = pieces, found
    return best


def make_work(
    lengths: Lengths,
    tiling: Tiling,
    *,
    causal: bool,
    window: int,
    from_pool: bool,
    num_kv_heads: int,
    threads: int,
    batch_invariant: bool,
    gpu: bool = False,
) -> WorkList:
    """Plan one batch.

    Args:
        lengths: the batch; a request without query tokens gets no item, every query token is in exactly one block.
        tiling: the module's parameters.
        causal: whether a query sees no key after its own position.
        window: visible keys including the query's own; OFF = all.
        from_pool: whether all keys come from the buffers; else those from the first query's position on are new rows.
        num_kv_heads: heads that run as units of their own.
        threads: workers to keep busy; no range depends on them when batch_invariant.
        batch_invariant: cut query blocks and key ranges at fixed positions of the request, so that neither the rest
            of the batch, nor the threads, nor how the request was chunked changes what is added to what.
        gpu: the threads are the hundreds of thread blocks that a GPU runs at once.
    """
    block_q, chunk, min_split = tiling.block_q, tiling.chunk, tiling.min_split
    first_pos = lengths.kv_lens - lengths.q_lens
    # Positions of a block are [first + k * block_q, ...): fixed multiples of block_q where invariant.
    lead = first_pos % block_q if batch_invariant else np.zeros_like(first_pos)
    counts = np.where(lengths.q_lens > 0, -(-(lengths.q_lens + lead) // block_q), 0)
    request, block = _expand(counts)
    nominal = block * block_q - lead[request]
    offset = np.maximum(nominal, 0)
    q_len = np.minimum(lengths.q_lens[request], nominal + block_q) - offset
    pos = first_pos[request] + offset
    kv_len = lengths.kv_lens[request]

    # The range that the block's rows can see; where invariant, that the whole block could see on the past side.
    oldest = first_pos[request] + (nominal if batch_invariant else offset)
    low = np.minimum(np.maximum(oldest - window + 1, 0), kv_len)
    high = np.maximum(np.minimum(pos + q_len, kv_len), low) if causal else kv_len

    if batch_invariant:
        # A multiple of block_q, so that all rows of a block end in the same piece and take the same way.
        longest = GPU_INVARIANT_SPLIT if gpu else INVARIANT_SPLIT
        fixed = round_up(max(longest, min_split), int(np.lcm(chunk, block_q)))
        base = low // fixed * fixed
        size = np.full_like(low, fixed)
        pieces = np.where(high > low, -(-(high - base) // fixed), 1)
    else:
        base = low
        size, pieces = _balance(high - low, tiling, num_kv_heads, threads, gpu)

    split = pieces > 1
    any_split = bool(split.any())
    owner, index = _expand(pieces) if any_split else (slice(None), np.zeros_like(pieces))
    begin = np.maximum(base[owner] + index * size[owner], low[owner])
    end = np.where(index == pieces[owner] - 1, high[owner], base[owner] + (index + 1) * size[owner])
    partial_rows = np.where(split, pieces * q_len, 0)
    first_partial = _offsets(partial_rows)
    q_row = lengths.q_starts[request] + offset

    items = np.zeros((len(begin), ITEM_COLUMNS), np.int32)
    items[:, REQUEST] = request[owner]
    items[:, Q_ROW] = q_row[owner]
    items[:, Q_LEN] = q_len[owner]
    items[:, KV_BEGIN] = begin
    items[:, KV_LEN] = end - begin
    items[:, POS] = pos[owner]
    if from_pool:
        items[:, PREFIX] = OFF
    else:
        items[:, PREFIX] = first_pos[request][owner]
        items[:, NEW_ROW] = (lengths.q_starts - first_pos)[request][owner]
    items[:, FIRST_NEW] = first_pos[request][owner]
    items[:, PART] = np.where(split[owner], first_partial[owner] + index * q_len[owner], -1)
    order = np.argsort(begin - end, kind="stable")
    tasks = _tasks(end - begin + UNIT_KEYS, num_kv_heads, threads)

    if not any_split:
        return WorkList(items[order], np.empty((0, MERGE_COLUMNS), np.int32), 0, tasks)
    which = np.flatnonzero(split)
    block_of, token = _expand(q_len[which])
    block_of = which[block_of]
    rows = np.empty((len(block_of), MERGE_COLUMNS), np.int32)
    rows[:, 0] = q_row[block_of] + token
    rows[:, 1] = first_partial[block_of] + token
    rows[:, 2] = pieces[block_of]
    rows[:, 3] = q_len[block_of]
    return WorkList(items[order], rows, int(partial_rows.sum()), tasks)
