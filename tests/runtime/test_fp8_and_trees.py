"""fp8 pools and tree masks on the host side: what kernels are given, and the results through the interface's model."""

import math

import pytest
import torch
from batches import PLAN_SIZES, make_decode_batch, make_paged_batch
from paged_calls import check, run, same_bits

from tilewright.runtime.paged import decode_attention, extend_attention, write_kv
from tilewright.runtime.plan import plan_decode, plan_extend

E4M3 = torch.float8_e4m3fn
SCALES = {"k_scale": 0.5, "v_scale": 0.3}
LENS = [5, 19, 0, 33]


def arguments(model, number=-1):
    return model.calls[number][1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_pools(model, dtype):
    batch = make_decode_batch(LENS, dtype=dtype).to_fp8(**SCALES)
    check(batch, decode=True, window=9, logit_cap=2.0, **SCALES)
    batch = make_paged_batch([20, 0, 3], [3, 9, 0], dtype=dtype).to_fp8(**SCALES)
    check(batch, **SCALES)
    batch = make_paged_batch([20, 0, -3], [3, 9, 5], dtype=dtype, from_pool=True).to_fp8(**SCALES)
    check(batch, **SCALES)
    assert all("kvfp8" in name for name in model.names() if name.startswith("paged"))


def test_kernels_get_the_codes_themselves_and_the_scales_last(model):
    batch = make_paged_batch([20, 4], [3, 9], dtype=torch.bfloat16, from_pool=True).to_fp8(**SCALES)
    run(batch, k_scale=torch.tensor(0.5), v_scale=torch.tensor([0.25]))
    q, k_buffer, v_buffer, k_new, v_new, *rest = arguments(model)
    for code, pool in ((k_buffer, batch.k_buffer), (v_buffer, batch.v_buffer)):
        assert code.dtype == torch.uint8 and code.data_ptr() == pool.data_ptr()
    # No new keys: something of their sizes, that holds nothing of a pool.
    assert k_new.dtype == v_new.dtype == q.dtype and len(k_new) == len(v_new) == 1
    assert rest[-2:] == [0.5, 0.25]
    run(batch)
    assert arguments(model)[-2:] == (1.0, 1.0)


def test_a_plan_remembers_no_scale_and_no_mask_of_another_call(model):
    """Layers have scales of their own, and masks of later steps may lie in other memory."""
    batch = make_paged_batch([20, 4], [3, 9], dtype=torch.bfloat16).to_fp8(**SCALES)
    plan = plan_extend(batch.seq_lens, batch.extend_seq_lens, device="cpu", **PLAN_SIZES)
    masks = [batch.tree_mask(seed=seed) for seed in (1, 2)] + [None, batch.tree_mask(whole_rows=True)]
    for scales in (SCALES, {}, {"k_scale": 2.0}, SCALES):
        for mask in masks:
            check(batch, plan=plan, tree_mask=mask, **scales)
    decode = make_decode_batch(LENS, dtype=torch.bfloat16).to_fp8(**SCALES)
    plan = plan_decode(decode.seq_lens, device="cpu", **PLAN_SIZES)
    for scales in (SCALES, {}, {"v_scale": 2.0}, SCALES):
        check(decode, decode=True, plan=plan, **scales)


@pytest.mark.parametrize("from_pool", [False, True])
@pytest.mark.parametrize("whole_rows", [False, True])
@pytest.mark.parametrize("options", [{}, {"window": 4}, {"causal": False}, {"batch_invariant": True}], ids=str)
def test_trees(model, from_pool, whole_rows, options):
    batch = make_paged_batch([20, 0, 3, 7], [3, 9, 0, 6], from_pool=from_pool, kv_starts=[1, 0, 2, 0])
    mask = batch.tree_mask(whole_rows=whole_rows)
    options = options | {"kv_start": batch.kv_start}
    out, _ = check(batch, tree_mask=mask, **options)
    assert not torch.equal(out, run(batch, **options)[0])
    assert all(name.endswith("tree") for name in model.names()[:1])


def test_masks_are_given_as_they_are(model):
    """Rows of new tokens, or of all keys beginning behind the prefix: no copy."""
    batch = make_paged_batch([20, 0, 3], [3, 9, 2])
    mask = batch.tree_mask()
    run(batch, tree_mask=mask)
    given, start, width = arguments(model)[14:17]
    assert given.data_ptr() == mask.data_ptr() and given.dtype == torch.uint8
    assert start.tolist() == [0, 9, 90] and width.tolist() == [3, 9, 2]
    run(batch, tree_mask=batch.tree_mask(whole_rows=True))
    given, start, width = arguments(model)[14:17]
    assert start.tolist() == [20, 69, 69 + 81 + 3] and width.tolist() == [23, 9, 5]


def test_triangles_and_no_mask_are_the_causal_rule(model):
    batch = make_paged_batch([20, 7], [4, 4])
    expected = run(batch)
    assert same_bits(run(batch, tree_mask=torch.ones(2, 4, 4, dtype=torch.bool).tril()), expected)
    assert same_bits(run(batch, tree_mask=None), expected)


def test_written_codes(model):
    k, v = torch.randn(3, 2, 8) * 300, torch.randn(3, 2, 8)
    k[0, 0, 0], k[0, 0, 1], k[0, 0, 2] = math.nan, -0.0, math.inf
    pools = [torch.zeros(5, 2, 8).to(E4M3) for _ in range(2)]
    write_kv(k, v, *pools, torch.tensor([4, -1, 0]), k_scale=0.5, v_scale=0.25)
    assert model.names() == ["write_kv-f32-kvfp8"] * 2
    wanted = (k / 0.5).clamp(-448, 448).to(E4M3)
    assert torch.equal(pools[0].view(torch.uint8)[[4, 0]], wanted.view(torch.uint8)[[0, 2]])
    assert torch.equal(pools[1].float()[[4, 0]], (v / 0.25).to(E4M3).float()[[0, 2]])
    assert (pools[0].view(torch.uint8)[[1, 2, 3]] == 0).all()


def test_decode_writes_codes_first(model):
    batch = make_decode_batch([5, 9]).to_fp8(**SCALES)
    expected = batch.expected(decode=True, **SCALES)
    last = batch.req_to_token[batch.req_pool_indices, batch.seq_lens - 1].long()
    key, value = (
        pool.view(torch.uint8)[last].view(E4M3).float() * scale
        for pool, scale in zip((batch.k_buffer, batch.v_buffer), SCALES.values(), strict=True)
    )
    batch.k_buffer.view(torch.uint8)[last] = 0x7F
    batch.v_buffer.view(torch.uint8)[last] = 0x7F
    check(batch, expected=expected, decode=True, key=key, value=value, loc=last, **SCALES)


def test_pools_that_are_not_read_may_be_fp8(model):
    batch = make_paged_batch([0, 0], [3, 9])
    batch.k_buffer = batch.v_buffer = torch.zeros(4, 1, 24).to(E4M3)
    check(batch, **SCALES)
    assert model.names() == ["paged_extend-f32-g2-d8"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_under_torch_compile(model, backend):
    torch._dynamo.reset()
    batch = make_paged_batch([20, 0], [3, 9]).to_fp8(**SCALES)
    mask = batch.tree_mask()

    def step(mask, *arguments):
        return extend_attention(*arguments, tree_mask=mask, **SCALES) + 0

    got = torch.compile(step, backend=backend, fullgraph=True)(mask, *batch.extend_arguments())
    assert torch.equal(got, extend_attention(*batch.extend_arguments(), tree_mask=mask, **SCALES))
    decode = make_decode_batch(LENS).to_fp8(**SCALES)
    key = torch.randn(4, 2, 8)
    loc = decode.req_to_token[decode.req_pool_indices, (decode.seq_lens - 1).clamp(min=0)].long()

    def write_and_decode(key, *arguments):
        return decode_attention(*arguments, key=key, value=key, loc=loc, **SCALES) + 0

    got = torch.compile(write_and_decode, backend=backend, fullgraph=True)(key, *decode.decode_arguments())
    assert torch.equal(got.nan_to_num(7), write_and_decode(key, *decode.decode_arguments()).nan_to_num(7))
