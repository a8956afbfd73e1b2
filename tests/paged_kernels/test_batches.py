"""One result however the work is cut: splits, batches, chunks, threads."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from batches import as_numpy
from paged_calls import check, run, same_bits
from paged_sizes import BOTH, SIZES, Size, decode_batch, paged_batch
from tolerances import PAGED, assert_close, assert_lse_close

from tilewright.runtime.paged import extend_attention
from tilewright.runtime.plan import plan_decode, plan_extend
from tilewright.runtime.planner import PART, Q_LEN


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_split_equals_whole(device, modules, many_threads, dtype, size):
    """P20, P21: ranges cut at every 16 keys and merged, against the oracle and the unsplit kernel."""
    batches = [
        (decode_batch(size, [130, 1, 0, 17, 64], dtype=dtype), True),
        (paged_batch(size, [90, 0], [6, 14], dtype=dtype), False),
    ]
    for batch, decode in batches:
        modules.use(size)
        whole = run(batch, decode=decode)
        modules.use(size, split=True)
        if decode:
            plan = plan_decode(batch.seq_lens, **size.plan)
        else:
            plan = plan_extend(batch.seq_lens, batch.extend_seq_lens, **size.plan)
        out, lse = check(batch, decode=decode, plan=plan)
        (work,) = plan._work.values()
        assert (work.items[work.items[:, Q_LEN] > 0, PART] >= 0).any(), "not split"
        assert_close(out, as_numpy(whole[0]).astype(np.float64), PAGED[dtype])
        assert_lse_close(lse, as_numpy(whole[1]).astype(np.float64), PAGED[dtype])


@pytest.mark.parametrize("size", BOTH, ids=str)
def test_decode_is_batch_invariant(device, modules, monkeypatch, dtype, size):
    """P40: a row alone, first and last of a batch of 32, planned for 1, 7, 16 and 64 threads: the same bits."""
    modules.use(size)
    others = [5 * i + 1 for i in range(31)]
    length = 2100  # beyond one fixed split
    alone = decode_batch(size, [length], dtype=dtype, seed=7)
    crowd = decode_batch(size, [length, *others, length], dtype=dtype, seed=8)
    source = alone.req_to_token[alone.req_pool_indices[0], :length].long()
    for at in (0, 32):
        crowd.q[at] = alone.q[0]
        slots = crowd.req_to_token[crowd.req_pool_indices[at], :length].long()
        crowd.k_buffer[slots], crowd.v_buffer[slots] = alone.k_buffer[source], alone.v_buffer[source]
    results = []
    for threads in (1, 7, 16, 64):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        results.append(run(alone, decode=True, batch_invariant=True))
        out, lse = run(crowd, decode=True, batch_invariant=True)
        results += [(out[:1], lse[:1]), (out[32:], lse[32:])]
    assert all(same_bits(result, results[0]) for result in results)


@pytest.mark.parametrize("size", BOTH, ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 70}], ids=["plain", "window"])
def test_extend_is_batch_and_chunk_invariant(device, modules, monkeypatch, dtype, size, options):
    """P40: the rows of a request alone, beside others, and in chunks: the same bits."""
    modules.use(size)
    new = 61
    batch = paged_batch(size, [0, 200, 0], [new, 3, 9], dtype=dtype)
    whole = run(batch, batch_invariant=True, **options)
    slots = torch.arange(1, new + 1)
    table = slots.int()[None]
    pools = [torch.zeros(new + 1, *x.shape[1:], dtype=dtype).index_copy_(0, slots, x[:new]) for x in (batch.k, batch.v)]
    chunked = ((2, [0, 1, new]), (7, [0, 30, new]), (1, [0, 8, 48, new]))
    for threads, cuts in ((1, [0, new]), (16, [0, new]), *chunked):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for first, last in itertools.pairwise(cuts):
            got = extend_attention(
                batch.q[first:last], batch.k[first:last], batch.v[first:last], *pools, table, torch.tensor([0]),
                torch.tensor([last]), torch.tensor([last - first]), return_lse=True, batch_invariant=True, **options,
            )  # fmt: skip
            assert same_bits(got, (whole[0][first:last], whole[1][first:last])), (threads, first, last)


@pytest.mark.parametrize("size", BOTH, ids=str)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_same_bits_every_time_and_on_any_threads(modules, set_threads, dtype, size, split):
    """Two calls, and one plan run by one thread and by two."""
    modules.use(size, split=split)
    set_threads(2)
    decode, extend = decode_batch(size, [300, 5, 64], dtype=dtype), paged_batch(size, [90, 0], [14, 17], dtype=dtype)
    plans = [
        plan_decode(decode.seq_lens, **size.plan),
        plan_extend(extend.seq_lens, extend.extend_seq_lens, **size.plan),
    ]
    expected = [run(decode, decode=True, plan=plans[0]), run(extend, plan=plans[1])]
    for threads in (2, 1):
        set_threads(threads)
        assert same_bits(run(decode, decode=True, plan=plans[0]), expected[0])
        assert same_bits(run(extend, plan=plans[1]), expected[1])


def test_calls_from_many_python_threads(modules):
    """Calls share no state: eight threads at once give the bits of one after the other."""
    batches = [decode_batch(BOTH[n % 2]._replace(general=False), [300, 5, n + 1], seed=n) for n in range(8)]
    expected = [run(batch, decode=True) for batch in batches]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            results = pool.map(lambda batch: run(batch, decode=True), batches)
            assert all(same_bits(*pair) for pair in zip(results, expected, strict=True))


def test_mixed_batch_of_one_token_slices(modules, many_threads):
    """P23: decodes of 512 and 7 keys beside a fresh request of 33 tokens in one extend, 32/8 and 48/8 heads."""
    for heads in (4, 6):
        size = Size(64, 64, heads, 8)
        batch = paged_batch(size, [200, 0, 6], [1, 17, 1], dtype=torch.bfloat16)
        check(batch)
