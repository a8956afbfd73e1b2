"""What each option of the paged kernels means, and extreme scores: windows, caps, masks, sinks, NaN."""

import itertools
import math

import pytest
import torch
from paged_calls import check, run, same_bits
from paged_sizes import BOTH, SIZES, SPECIAL, decode_batch, paged_batch

from tilewright.runtime import dispatch


@pytest.mark.parametrize("size", [SPECIAL[0], *BOTH], ids=str)
@pytest.mark.parametrize("options", [
    {"window": 1}, {"window": 5}, {"window": 128}, {"window": 129}, {"logit_cap": 1.0}, {"logit_cap": 30.0},
    {"logit_cap": 50.0}, {"sm_scale": 0.3}, {"window": 33, "logit_cap": 2.0}, {"causal": False},
    {"causal": False, "window": 40},
], ids=lambda o: "-".join(map(str, itertools.chain(*o.items()))))  # fmt: skip
def test_option_has_its_effect(device, modules, size, options):
    """P15, P16: right with the option and different without; raw scores reach some hundred; one module serves all."""
    modules.use(size)
    batches = [paged_batch(size, [129, 200, 3], [5, 1, 13])]
    if "causal" not in options:
        batches.append(decode_batch(size, [130, 256, 200]))
    for batch, decode in zip(batches, (False, True), strict=False):
        batch.q *= 30 if "logit_cap" in options else 1
        plain = run(batch, decode=decode)[0]
        assert (check(batch, decode=decode, **options)[0] - plain).abs().max() > 1e-3
        assert same_bits(run(batch, decode=decode)[0], plain)


@pytest.mark.parametrize("size", BOTH, ids=str)
def test_window_edge(device, modules, size):
    """P13: of one-hot keys the one at p - window + 1 is seen, the one before is not; decode and extend agree."""
    modules.use(size)
    for window, keys in ((4, 6), (16, 33), (64, 65), (128, 200)):
        for at, seen in ((keys - window, True), (keys - window - 1, False)):
            for decode in (True, False):
                batch = paged_batch(size, [keys - 1], [1], from_pool=True)
                slots = batch.req_to_token[batch.req_pool_indices[0], :keys].long()
                batch.v_buffer[slots] = 0
                batch.v_buffer[slots[at]] = 1
                out, _ = run(batch, decode=decode, window=window)
                assert bool((out > 0).all()) is seen and bool((out == 0).all()) is not seen


@pytest.mark.parametrize("cap", [1e3, 1e5, 1e20])
def test_large_caps_cost_no_accuracy(modules, cap):
    """P16: a cap far above the scores is the plain softmax, not one of coarse scores."""
    for size in BOTH:
        modules.use(size)
        batch = decode_batch(size, [200, 60])
        batch.q *= 5
        check(batch, decode=True, logit_cap=cap)


def test_cap_comes_before_the_mask(modules):
    """P18: a capped score of a hidden key would be -cap, not nothing: row 0 sees key 0 alone."""
    for size in BOTH:
        modules.use(size)
        batch = paged_batch(size, [0], [8])
        out, _ = check(batch, logit_cap=1.0)
        torch.testing.assert_close(out[0], batch.v[0].repeat_interleave(size.group, 0))


SINKS = {"some": [0.5, -math.inf, 3.0], "none": [-math.inf] * 3, "huge": [200.0, 5.0, -200.0]}


@pytest.mark.parametrize("size", BOTH, ids=str)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("sinks", SINKS)
def test_sinks(device, modules, many_threads, size, split, sinks):
    """A sink takes weight once (however the keys are split) and is in out, not in lse."""
    modules.use(size, split=split)
    heads = size.group * size.kv_heads
    values = torch.tensor((SINKS[sinks] * heads)[:heads])
    for batch, decode in ((decode_batch(size, [90, 3, 0]), True), (paged_batch(size, [80, 2], [6, 3]), False)):
        plain = run(batch, decode=decode)
        out, lse = check(batch, decode=decode, sinks=values)
        assert same_bits(lse, plain[1])
        assert same_bits(out, plain[0]) is (sinks == "none")


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_queries_before_the_first_key(device, modules, size):
    """P03, P38: k = v = None and more query tokens than keys: rows without a key are 0 and -inf, V = 1 gives 1."""
    modules.use(size)
    batch = paged_batch(size, [-33, 2, -1, -7], [64 if size.dim <= 80 else 40, 2, 1, 5], from_pool=True)
    batch.seq_lens[3] = 0
    out, lse = check(batch)
    assert (out[:33] == 0).all() and (lse[:33] == -math.inf).all() and (lse[33] > -math.inf).all()


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_cross_attention(device, modules, dtype, size):
    """P38: kv_lens, from column kv_start on, without a causal rule; an encoder without keys."""
    modules.use(size)
    starts = torch.tensor([3, 0, 2])
    lens = torch.tensor([40, 7, 0])
    check(decode_batch(size, [50, 7, 4], kv_starts=[3, 0, 2], dtype=dtype), decode=True, kv_lens=lens, kv_start=starts)
    batch = paged_batch(size, [40, 4, 1], [3, 9, 2], kv_starts=[3, 0, 2], from_pool=True, dtype=dtype)
    check(batch, kv_lens=lens, kv_start=starts)


@pytest.mark.parametrize("size", BOTH, ids=str)
def test_scores_below_any_sentinel(modules, size):
    """P04: scores of -46341 are no mask: two equal keys share the weight; one such key among large ones has none."""
    modules.use(size)
    for decode in (True, False):
        batch = paged_batch(size, [1], [1], from_pool=True)
        batch.q.fill_(1)
        slots = batch.req_to_token[batch.req_pool_indices[0], :2].long()
        batch.k_buffer[slots], batch.v_buffer[slots] = -46341.0 / size.dim, 1
        out, lse = run(batch, decode=decode, sm_scale=1.0)
        torch.testing.assert_close(out, torch.ones_like(out), rtol=1e-6, atol=0)
        torch.testing.assert_close(lse, torch.full_like(lse, -46341 + math.log(2)), rtol=1e-6, atol=0)
        batch.k_buffer[slots[0]] = 1e4 / size.dim
        batch.v_buffer[slots[1]] = 7
        out, _ = run(batch, decode=decode, sm_scale=1.0)
        assert (out == 1).all()


@pytest.mark.parametrize("size", BOTH, ids=str)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "extend"])
def test_nan_query_gives_its_row_nan(device, modules, many_threads, dtype, size, decode, split):
    """P09: the row of a NaN query is NaN, lse too (else a merge would drop it); no other row or head changes a bit."""
    modules.use(size, split=split)
    batch = paged_batch(size, [15, 15, 40], [1] * 3 if decode else [1, 5, 3], from_pool=decode, dtype=dtype)
    clean_out, clean_lse = run(batch, decode=decode)
    batch.q[1, 2] = math.nan
    out, lse = run(batch, decode=decode)
    assert out[1, 2].isnan().all() and lse[1, 2].isnan()
    out[1, 2], lse[1, 2] = clean_out[1, 2], clean_lse[1, 2]
    assert same_bits((out, lse), (clean_out, clean_lse))


@pytest.mark.parametrize("size", BOTH, ids=str)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_poison_in_a_hidden_token(modules, size, poison):
    """P39: the key of a token reaches no row that the causal rule or the window hides it from, nor another request.

    Its value is multiplied by weights that are 0, so NaN reaches the hidden rows of the one query block that has rows
    which see it, and those only.
    """
    modules.use(size)
    at = 29
    for options in ({}, {"window": 5}):
        batch = paged_batch(size, [0, 7], [50, 3])
        expected, expected_lse = run(batch, **options)
        hidden = [*range(at), *(range(at + 5, 50) if options else ()), 50, 51, 52]
        key, batch.k[at] = batch.k[at].clone(), poison
        out, lse = run(batch, **options)
        assert same_bits((out[hidden], lse[hidden]), (expected[hidden], expected_lse[hidden]))
        assert not out[at].isfinite().any()
        batch.k[at], batch.v[at] = key, poison
        out, lse = run(batch, **options)
        block_q = dispatch.kernel("paged_extend", "f32", size.group, size.dim, size.dim_vo).tiling.block_q
        first = at // block_q * block_q
        last = -(-(at + options.get("window", 50)) // block_q) * block_q
        safe = [*range(first), *range(last, 50), 50, 51, 52]
        assert same_bits(out[safe], expected[safe]) and same_bits(lse, expected_lse)
        assert not out[at].isfinite().any()
