"""The planner of decode batches on GPUs: every visible key in one item, from step to step; and plans that use it."""

import itertools
import time

import numpy as np
import pytest
import torch
from batches import make_decode_batch, make_paged_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import PAGED, assert_close, assert_lse_close

from tilewright.runtime import gpu_work
from tilewright.runtime.decode_planner import DecodeWork
from tilewright.runtime.paged import decode_attention, extend_attention
from tilewright.runtime.plan import decode_lengths, plan_decode, plan_extend
from tilewright.runtime.plan_buffers import PlanBuffers
from tilewright.runtime.planner import FIRST_NEW, OFF, Tiling, _longest_thread, make_work

SIZES = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 8, "head_dim_vo": 8}


def work_of(lens, tiling=Tiling(1, 8, 16), **options):  # noqa: B008
    defaults = {"window": OFF, "num_kv_heads": 2, "workers": 64, "batch_invariant": False}
    return DecodeWork(np.array(lens, np.int64), tiling, **(defaults | options))


def assert_covers(work, lens, window=OFF):
    """The items of each request are ranges end to end over all that it sees; the merge rows name their states."""
    pieces = {b: [] for b in range(len(lens))}
    merges = {row: (first, count, stride) for row, first, count, stride in work.rows.tolist()}
    counters = set()
    for request, row, q_len, begin, count, pos, first, many, part, counter in work.items.tolist():
        assert (row, q_len, pos) == (request, 1, lens[request] - 1)
        pieces[request].append((begin, begin + count, part))
        if not work.joined or part < 0:
            assert counter == 0
        else:
            assert (first, many) == merges[row][:2]
            counters.add((counter, row))
    if work.joined:
        assert sorted(counter for counter, _ in counters) == list(range(1, len(work.rows) + 1))
    states = []
    for request, length in enumerate(lens):
        ranges = sorted(pieces[request])
        assert ranges[0][0] <= max(length - window, 0) and ranges[-1][1] == length
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
        parts = [part for *_, part in ranges]
        if len(ranges) == 1:
            assert parts == [-1] and request not in merges
        else:
            first, count, stride = merges.pop(request)
            assert parts == [first + s * stride for s in range(count)]
            states += parts
    assert not merges and sorted(states) == list(range(work.partials))


batches = st.lists(st.integers(0, 300), max_size=6)
tilings = st.builds(
    Tiling,
    block_q=st.just(1),
    chunk=st.sampled_from([1, 8, 16]),
    min_split=st.sampled_from([1, 8, 20]),
    max_split=st.sampled_from([0, 8, 40]),
    ctas=st.just(1),
    blocks=st.sampled_from([1, 2]),
    joins=st.sampled_from([0, 1]),
)


@settings(max_examples=200, deadline=None)
@given(
    lens=batches,
    tiling=tilings,
    window=st.sampled_from([OFF, 1, 33]),
    heads=st.integers(1, 3),
    workers=st.sampled_from([1, 7, 64, 500]),
    invariant=st.booleans(),
    steps=st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), max_size=6),
)
def test_items_cover_every_key_once_from_step_to_step(lens, tiling, window, heads, workers, invariant, steps):
    lens = np.array(lens, np.int64)
    options = {"window": window, "num_kv_heads": heads, "workers": workers, "batch_invariant": invariant}
    work = work_of(lens, tiling, **options)
    assert work.items.dtype == work.rows.dtype == np.int32
    assert_covers(work, lens.tolist(), window)
    planned, longest = lens, work.items[:, 4].max(initial=0)
    for step in steps:
        lens = lens + step[: len(lens)]
        if not work.reaches(lens):
            break
        work.move(lens)
        assert_covers(work, lens.tolist(), window)
        assert (lens - planned <= tiling.chunk).all() or invariant
        assert not tiling.max_split or invariant or work.items[:, 4].max(initial=0) <= max(longest, tiling.max_split)


@settings(max_examples=100, deadline=None)
@given(lens=st.lists(st.integers(0, 9000), max_size=6), window=st.sampled_from([OFF, 33, 3000]), step=st.integers(1, 9))
def test_batch_invariant_items_are_those_of_the_shared_planner(lens, window, step):
    """Fixed splits: the same items, also after steps, so the same bits whatever the batch and the past."""
    lens, tiling = np.array(lens, np.int64), Tiling(1, 64, 128)

    def shared(lens):
        return make_work(decode_lengths(lens), tiling, causal=True, window=window, from_pool=True, num_kv_heads=2,
                         threads=7, batch_invariant=True)  # fmt: skip

    def same(work, expected):
        # The last column is extend's.
        items, wanted = (sorted(list_.items[:, :FIRST_NEW].tolist()) for list_ in (work, expected))
        return items == wanted and np.array_equal(work.rows, expected.rows)

    work = work_of(lens, tiling, window=window, batch_invariant=True)
    assert same(work, shared(lens))
    lens = lens + step
    if work.reaches(lens):
        work.move(lens)
        assert same(work, shared(lens))


def test_lengths_out_of_reach():
    work = work_of([50, 3])
    assert work.reaches(np.array([50, 3])) and work.reaches(np.array([58, 3], np.int32))
    for lens in ([49, 3], [59, 3], [50], [50, 3, 1]):
        assert not work.reaches(np.array(lens))
    invariant = work_of([2040, 2049], Tiling(1, 64, 128), batch_invariant=True)
    assert invariant.reaches(np.array([2048, 2060])) and not invariant.reaches(np.array([2049, 2060]))


@pytest.mark.parametrize(("lens", "split"), [
    ([2048] * 256, False), ([4096] * 64, False), ([4096] * 16, True), ([32768], True), ([500] * 255 + [130000], True),
    (np.random.default_rng(0).integers(1, 8192, 256).tolist(), False),
], ids=["b256", "b64", "b16", "one", "tail", "ragged"])  # fmt: skip
def test_the_workers_end_together(lens, split):
    """132 multiprocessors of two blocks, eight heads: within 12 % of the even share, split only where that needs it."""
    work = work_of(lens, Tiling(1, 64, 128), num_kv_heads=8, workers=264)
    assert (work.partials > 0) == split
    mean = sum(lens) * 8 / 264
    assert _longest_thread(work.items[:, 4].astype(np.int64), 8, 264, mean) <= 1.12 * mean


def test_planning_is_quick():
    """A pathology guard; the costs are measured by `tilewright bench host`."""
    lens = np.random.default_rng(0).integers(1, 8192, 256)
    times = []
    for _ in range(50):
        begin = time.perf_counter()
        work = work_of(lens, Tiling(1, 64, 128), num_kv_heads=8, workers=264)
        middle = time.perf_counter()
        work.move(lens + 1)
        times.append((middle - begin, time.perf_counter() - middle))
    assert min(t for t, _ in times) < 500e-6 and min(t for _, t in times) < 100e-6


# ---- plans on a GPU, played on the CPU


@pytest.fixture(params=[0, 1], ids=["merged", "joined"])
def gpu(request, use_model, monkeypatch):
    """Plans are made as for a GPU of eight multiprocessors; the kernels skip padding and may join pieces themselves."""
    monkeypatch.setattr(gpu_work, "multiprocessors", lambda device: 8)
    return use_model(padding=True, joins=request.param)


def check(batch, decode=True, **options):
    call, arguments = (decode_attention, batch.decode_arguments()) if decode else (
        extend_attention, batch.extend_arguments())  # fmt: skip
    out, lse = call(*arguments, out=batch.out(), return_lse=True, **options)
    expected = batch.expected(decode=decode)
    assert_close(out, expected[0], PAGED[batch.q.dtype])
    assert_lse_close(lse, expected[1], PAGED[batch.q.dtype])


def buffers_of(items=40, rows=8, partials=60):
    return PlanBuffers.allocate(items=items, rows=rows, partials=partials, num_qo_heads=4, head_dim_vo=8, device="cpu")


@pytest.mark.parametrize("fixed", [False, True], ids=["own", "buffers"])
def test_a_plan_follows_a_growing_batch(gpu, fixed):
    """Sixty steps with lengths on the host in every form; addresses and sizes stay where buffers were given."""
    lens = np.array([90, 3, 0, 17])
    plan = plan_decode(lens, device="cpu", buffers=buffers_of() if fixed else None, **SIZES)
    addresses, filled = set(), []
    for step in range(60):
        batch = make_decode_batch(lens.tolist(), seed=step)
        check(batch, plan=plan)
        (work,) = plan._work.values()
        filled.append(work._work)
        assert (work.rows is None) == gpu.joins
        rows = work.buffers.rows if work.rows is None else work.rows
        addresses.add((work.items.data_ptr(), len(work.items), rows.data_ptr(), len(rows)))
        lens = lens + np.array([1, 1, 1, step % 2])
        form = [lambda x: x, torch.from_numpy, lambda x: torch.from_numpy(x.astype(np.int32)), np.ndarray.tolist]
        plan.update(None, seq_lens_cpu=form[step % 4](lens))
    moved = sum(a is b for a, b in itertools.pairwise(filled))
    assert 20 < moved < 59, "lists were neither only moved nor only made anew"
    assert not fixed or len(addresses) == 1


def test_buffers_are_padded(gpu):
    """A smaller batch leaves nothing of a greater one; the kernels get whole buffers, captured sizes hold."""
    plan = plan_decode([90, 3, 60], device="cpu", buffers=buffers_of(), **SIZES)
    check(make_decode_batch([90, 3, 60]), plan=plan)
    (work,) = plan._work.values()
    assert work.items.shape == (40, 10) and work.num_items == 40
    if gpu.joins:
        assert work.rows is None and (work.items[:, 9] > 0).any()
    else:
        assert work.rows.shape == (8, 4) and (work.rows[:, 2] > 0).any()
    plan.update([5, 0])
    assert (work.items[2:] == 0).all() and (gpu.joins or (work.rows == 0).all())
    check(make_decode_batch([5, 0]), plan=plan)
    plan.update([])
    assert (work.items == 0).all()
    with pytest.raises(ValueError, match=r"buffers: too small.*\(40, 8, 60\), needed"):
        plan.update([90] * 9)


def test_extend_plans_are_padded_too(gpu):
    plan = plan_extend([59, 12], [9, 12], device="cpu", buffers=buffers_of(rows=16), **SIZES)
    check(make_paged_batch([50, 0], [9, 12]), decode=False, plan=plan)
    (work,) = plan._work.values()
    plan.update([7], extend_seq_lens=[3])
    check(make_paged_batch([4], [3]), decode=False, plan=plan)
    assert work.items.shape == (40, 10) and (work.items[1:] == 0).all()


def test_lists_of_several_windows_move_together(gpu):
    batch = make_decode_batch([90, 30])
    plan = plan_decode(batch.seq_lens, device="cpu", **SIZES)
    for step in range(20):
        batch = make_decode_batch([90 + step, 30 + step], seed=step)
        for window in (0, 33, 5):
            out = decode_attention(*batch.decode_arguments(), window=window, plan=plan)
            assert_close(out, batch.expected(decode=True, window=window)[0], PAGED[torch.float32])
        plan.update(batch.seq_lens + 1)
    assert len(plan._work) == 3


def test_buffers_for_decode_hold_any_batch(gpu):
    buffers = PlanBuffers.for_decode(6, 6 * 10**5, num_qo_heads=4, num_kv_heads=2, head_dim_vo=8, device="cpu")
    plan = plan_decode([1], device="cpu", buffers=buffers, **SIZES)
    plan.work(Tiling(1, 8, 16, 1024, ctas=8), OFF, True)
    generator = np.random.default_rng(0)
    for _ in range(300):
        scale = 10.0 ** generator.integers(1, 6, 6)
        plan.update((generator.random(6) * scale).astype(np.int64)[: generator.integers(0, 7)])
