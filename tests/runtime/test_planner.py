"""The planner: every visible (query, key) pair in exactly one item, whatever the batch."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.runtime.planner import FINE, FIRST_NEW, INVARIANT_SPLIT, OFF, UNIT_KEYS, Lengths, Tiling, make_work


def lengths_of(pairs, gaps=None):
    """Lengths of (prefix, new) pairs, requests `gaps[b]` rows apart."""
    prefix, new = np.array(pairs, np.int64).reshape(-1, 2).T
    gaps = np.zeros(len(new), np.int64) if gaps is None else np.array(gaps, np.int64)
    return Lengths(np.maximum(prefix + new, 0), new, np.cumsum(new) - new + np.cumsum(gaps))


def plan(lengths, tiling=Tiling(4, 8, 16), **options):  # noqa: B008
    defaults = {
        "causal": True, "window": OFF, "from_pool": False, "num_kv_heads": 1, "threads": 4, "batch_invariant": False,
    }  # fmt: skip
    return make_work(lengths, tiling, **(defaults | options))


def visible_pairs(lengths, causal, window):
    """By the definition: (query row, key position) of every pair that must be computed."""
    pairs = Counter()
    for kv, new, start in zip(*lengths, strict=True):
        for i in range(new):
            position = kv - new + i
            for j in range(kv):
                if (j <= position or not causal) and j > position - window:
                    pairs[int(start + i), j] += 1
    return pairs


def computed_pairs(work, causal, window):
    """By the items, read as the kernels read them."""
    pairs = Counter()
    for _, row, q_len, begin, count, pos, *_ in work.items.tolist():
        for i in range(q_len):
            for j in range(begin, begin + count):
                if j > pos + i - window and j <= pos + i + (0 if causal else OFF):
                    pairs[row + i, j] += 1
    return pairs


batches = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 12)), max_size=5)
tilings = st.builds(
    Tiling,
    st.sampled_from([1, 3, 4, 16]),
    st.sampled_from([1, 8, 16]),
    st.sampled_from([1, 8, 20]),
    st.sampled_from([0, 8, 40]),
)


@settings(max_examples=100, deadline=None)
@given(
    batch=batches,
    gap=st.integers(0, 2),
    tiling=tilings,
    causal=st.booleans(),
    window=st.sampled_from([OFF, 1, 5, 33]),
    heads=st.integers(1, 3),
    threads=st.sampled_from([1, 2, 7, 64]),
    invariant=st.booleans(),
)
def test_items_cover_every_visible_pair_once(batch, gap, tiling, causal, window, heads, threads, invariant):
    lengths = lengths_of(batch, [gap] * len(batch))
    work = plan(lengths, tiling, causal=causal, window=window, num_kv_heads=heads, threads=threads,
                batch_invariant=invariant)  # fmt: skip
    assert computed_pairs(work, causal, window) == visible_pairs(lengths, causal, window)
    items = work.items
    assert items.dtype == work.rows.dtype == np.int32
    assert ((items[:, 2] >= 1) & (items[:, 2] <= tiling.block_q)).all()
    assert (items[:, 4] >= 0).all() and (items[:, 3] + items[:, 4] <= lengths.kv_lens[items[:, 0]]).all()
    # Every query row has its items, an empty one too, so that it is written; one that is not split has exactly one.
    rows = {int(s + i) for _, n, s in zip(*lengths, strict=True) for i in range(n)}
    direct = Counter(r + i for _, r, n, *rest in items.tolist() if rest[5] == -1 for i in range(n))
    merged = Counter(work.rows[:, 0].tolist())
    assert direct + merged == Counter(rows)


@settings(max_examples=100, deadline=None)
@given(batch=batches, tiling=tilings, threads=st.sampled_from([2, 7, 64]), window=st.sampled_from([OFF, 33]))
def test_splits_and_merge_rows(batch, tiling, threads, window):
    work = plan(lengths_of(batch), tiling, threads=threads, window=window)
    written = Counter()
    by_row = {}
    for _, row, q_len, begin, count, *rest in work.items.tolist():
        part = rest[3]
        for i in range(q_len):
            if part >= 0:
                written[part + i] += 1
                by_row.setdefault(row + i, []).append((begin, count, part + i))
    assert written == Counter(range(work.partials)), "every partial row is written by exactly one item"
    for row, first, count, stride in work.rows.tolist():
        pieces = sorted(by_row.pop(row))
        assert [part for *_, part in pieces] == [first + s * stride for s in range(count)]
        assert count > 1
        for begin, length, _ in pieces[:-1]:
            assert (begin - pieces[0][0]) % tiling.chunk == 0 and length % tiling.chunk == 0
        assert all(length >= tiling.min_split for _, length, _ in pieces), "splits smaller than worth making"
    assert not by_row, "a split row is merged"


def test_costliest_first():
    work = plan(lengths_of([(5, 1), (60, 1), (20, 3)]), threads=1)
    costs = work.items[:, 4].tolist()
    assert costs == sorted(costs, reverse=True), "a kernel computes all rows of a block, however few are used"


def test_decode_keeps_whole_what_balances():
    """Casebook P43: splits only where threads would wait."""
    decode = Tiling(1, 256, 512)
    even = plan(lengths_of([(2047, 1)] * 8), decode, num_kv_heads=8, threads=2)
    assert len(even.items) == 8 and even.partials == 0
    heads_suffice = plan(lengths_of([(16383, 1)]), decode, num_kv_heads=8, threads=2)
    assert len(heads_suffice.items) == 1
    alone = plan(lengths_of([(16383, 1)]), decode, num_kv_heads=1, threads=4)
    assert len(alone.items) == 4


@pytest.mark.parametrize("threads", [4, 16, 64])
def test_one_long_context_among_short_ones_is_split(threads):
    """Casebook P43 (c): the busiest thread has little more than the mean, and the short ones stay whole."""
    lengths = lengths_of([(127, 1)] * 31 + [(131071, 1)])
    work = plan(lengths, Tiling(1, 256, 512), num_kv_heads=2, threads=threads)
    assert (work.items[work.items[:, 0] < 31][:, 8] == -1).all()
    assert len(work.items) <= 31 + 8 * threads
    loads = [0] * threads
    for cost in np.repeat(work.items[:, 4], 2).tolist():
        loads[loads.index(min(loads))] += cost
    assert max(loads) <= 1.15 * sum(loads) / threads


@pytest.mark.parametrize("pairs", [[(4096, 512)] * 8, [(30000, 512)], [(100, 700)] * 16, [(0, 8192)]], ids=str)
def test_gpu_rounds_come_out_even(pairs):
    """Units dealt out there and back again, as the extend kernel takes them: no worker has much more than the mean."""
    tiling, heads, workers = Tiling(48, 80, 640), 8, 132
    work = plan(lengths_of(pairs), tiling, num_kv_heads=heads, threads=workers, gpu=True)
    costs = np.repeat(work.items[:, 4] + UNIT_KEYS, heads)
    loads = np.zeros(workers)
    for turn, begin in enumerate(range(0, len(costs), workers)):
        units = costs[begin : begin + workers]
        loads[: len(units)] += units if turn % 2 == 0 else 0
        loads[workers - len(units) :] += units[::-1] if turn % 2 else 0
    assert loads.max() <= 1.1 * loads.mean()
    assert len(work.rows) <= 0.15 * work.items[work.items[:, 8] < 0, 2].sum() or len(pairs) == 1, "few are merged"


# What the kernels of the packaged targets have been built with, or like it.
SHAPES = {
    "decode": Tiling(1, 512, 512),
    "short decode": Tiling(1, 128, 256, 512),
    "extend": Tiling(16, 256, 256),
    "wide extend": Tiling(128, 512, 512),
}
MIXED = {
    "one long": [(65535, 1)] + [(499, 1)] * 64,
    "one long last": [(499, 1)] * 64 + [(65535, 1)],
    "two thousand new": [(0, 2000)] + [(999, 1)] * 40,
    "two thousand new, long decodes": [(0, 2000)] + [(3999, 1)] * 40,
    "every length": [(n, 1) for n in range(100, 9000, 97)],
    "chunks of prefill": [(n, 256) for n in range(0, 30000, 2000)],
}


def busiest(work, heads, threads):
    """(load of the busiest thread, even share, largest task) when the launcher runs it as in runtime/launcher.c.

    Runs of ceil(units / tasks) neighbouring units go in order to the thread that is free first. A unit costs its keys,
    and what it costs besides.
    """
    costs = np.repeat(work.items[:, 4] + UNIT_KEYS, heads)
    step = -(-len(costs) // work.tasks)
    runs = [int(costs[first : first + step].sum()) for first in range(0, len(costs), step)]
    loads = [0] * threads
    for cost in runs:
        loads[loads.index(min(loads))] += cost
    return max(loads), sum(runs) / threads, max(runs)


@pytest.mark.parametrize("threads", [2, 3, 15, 16])
@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MIXED)
def test_mixed_batches_keep_every_thread_busy(name, shape, heads, threads):
    """Casebook P43: within 1.25 of the same work evenly split, splits and all."""
    tiling, lengths = SHAPES[shape], lengths_of(MIXED[name])
    work = plan(lengths, tiling, num_kv_heads=heads, threads=threads)
    longest, share, _ = busiest(work, heads, threads)
    assert longest <= 1.15 * share
    whole = plan(lengths, tiling, num_kv_heads=heads, threads=1)
    assert share * threads <= 1.05 * busiest(whole, heads, 1)[0], "splits add little work"
    assert len(work.items) <= len(whole.items) + 8 * threads, "and few partial states"


@settings(max_examples=300, deadline=None)
@given(
    batch=st.lists(
        st.tuples(st.sampled_from([0, 10, 500, 4000, 65536]), st.sampled_from([1, 1, 7, 300, 2000])),
        min_size=1, max_size=40,
    ),
    shape=st.sampled_from(list(SHAPES)),
    heads=st.sampled_from([1, 2, 8]),
    threads=st.sampled_from([1, 2, 3, 15, 16, 64]),
)  # fmt: skip
def test_no_thread_waits_long(batch, shape, heads, threads):
    """Whatever the batch: at most pieces of the least size above the even share, where those are large."""
    tiling = SHAPES[shape]
    work = plan(lengths_of(batch), tiling, num_kv_heads=heads, threads=threads)
    longest, share, run = busiest(work, heads, threads)
    smallest = max(tiling.min_split, tiling.chunk) + tiling.min_split + UNIT_KEYS
    assert longest <= max(1.2 * share, share + smallest)
    assert run <= max(share / FINE, work.items[:, 4].max() + UNIT_KEYS), "a task of several units is a short one"


def test_alike_units_go_out_in_runs_of_neighbours():
    """A task a unit would cost more than it saves where there are thousands alike."""
    work = plan(lengths_of([(499, 1)] * 256), SHAPES["decode"], num_kv_heads=8, threads=16)
    assert work.tasks == 8 * 16
    assert plan(lengths_of([(3, 1)]), num_kv_heads=8, threads=16).tasks == 8
    assert plan(lengths_of([]), threads=16).tasks == 1


@pytest.mark.parametrize("threads", [16, 32])
def test_one_request_keeps_all_threads_busy(threads):
    """Casebook P43 (b): 16384 keys, 32/8 heads, more threads than KV heads."""
    work = plan(lengths_of([(16383, 1)]), Tiling(1, 256, 512), num_kv_heads=8, threads=threads)
    units = len(work.items) * 8
    assert units >= threads and work.items[:, 4].max() * -(-units // threads) <= 1.15 * 16384 * 8 / threads


def test_work_grows_with_the_tokens_and_not_with_the_longest_request():
    """Casebook P43 (a): a long prefill beside 31 single tokens costs what the two cost apart."""

    def cost(news):
        work = plan(lengths_of([(0, new) for new in news]), Tiling(16, 64, 256), threads=8)
        return len(work.items), int((work.items[:, 2] * work.items[:, 4]).sum())

    both, long, short = cost([1] * 31 + [4096]), cost([4096]), cost([1] * 31)
    assert both[1] == long[1] + short[1] and both[0] <= long[0] + short[0]
    assert short == (31, 31)


def test_empty_request_gets_an_item_and_no_tokens_get_none():
    work = plan(lengths_of([(-1, 1), (0, 0), (3, 2)]))
    assert sorted(work.items[:, 0].tolist()) == [0, 2]
    assert work.items[work.items[:, 0] == 0][0, 4] == 0
    assert len(plan(lengths_of([])).items) == 0


def test_negative_prefix_sees_bottom_right():
    lengths = Lengths(np.array([3]), np.array([5]), np.array([0]))
    work = plan(lengths, from_pool=True)
    assert computed_pairs(work, True, OFF) == Counter([(2, 0), (3, 0), (3, 1), (4, 0), (4, 1), (4, 2)])
    assert work.items[:, 2].sum() == 5


def test_new_rows_and_prefix_columns():
    work = plan(lengths_of([(6, 2), (3, 1)], [1, 2]), threads=1)
    by_request = {int(item[0]): item for item in work.items}
    # key j >= prefix is row j + new_row of k_new; the first new key of a request is its first query row.
    for request, (prefix, start) in enumerate([(6, 1), (3, 5)]):
        assert by_request[request][6] == prefix
        assert prefix + by_request[request][7] == start
    assert (plan(lengths_of([(6, 2)]), from_pool=True).items[:, 6] == OFF).all()


@settings(max_examples=40, deadline=None)
@given(requests=batches, from_pool=st.booleans(), invariant=st.booleans())
def test_first_new_token_of_every_item(requests, from_pool, invariant):
    """Masks are found by it, wherever the keys are and however blocks and ranges were cut."""
    lengths = lengths_of(requests)
    work = plan(lengths, from_pool=from_pool, batch_invariant=invariant)
    first = lengths.kv_lens - lengths.q_lens
    assert (work.items[:, FIRST_NEW] == first[work.items[:, 0]]).all()
    token = work.items[:, 5] - work.items[:, FIRST_NEW]
    assert ((token >= 0) & (token + work.items[:, 2] <= lengths.q_lens[work.items[:, 0]])).all()


def ranges_of_row(work, row):
    """(key range, written directly) of the items of a query row, as positions."""
    return sorted(
        (begin, begin + count, rest[3] == -1)
        for _, first, q_len, begin, count, *rest in work.items.tolist()
        if first <= row < first + q_len
    )


@settings(max_examples=60, deadline=None)
@given(
    others=batches,
    threads=st.sampled_from([1, 2, 64]),
    cut=st.integers(1, 4499),
    window=st.sampled_from([OFF, 700, 2500]),
    block_q=st.sampled_from([1, 3, 16]),
)
def test_batch_invariant_split_points(others, threads, cut, window, block_q):
    """Casebook P40: which keys meet in an item does not depend on the rest of the batch, threads or chunking."""
    tiling, total = Tiling(block_q, 64, 128), 4500
    split = {1: INVARIANT_SPLIT, 3: 2112, 16: INVARIANT_SPLIT}[block_q]  # whole chunks and whole blocks
    options = {"batch_invariant": True, "window": window}
    alone = plan(lengths_of([(0, total)]), tiling, threads=3, **options)
    second = plan(lengths_of([*others, (cut, total - cut)]), tiling, threads=threads, **options)
    base = sum(new for _, new in others)
    for position in {cut, min(cut + 1, total - 1), total - 1, min(max(cut, split), total - 1)}:
        one, two = ranges_of_row(alone, position), ranges_of_row(second, base + position - cut)
        seen = [[(low, min(high, position + 1), direct) for low, high, direct in each] for each in (one, two)]
        assert seen[0] == seen[1]
        assert all(low % split == 0 for low, *_ in one[1:])
