"""Masks of trees of drafts: which new tokens a new token sees."""

import pytest
import torch
from paged_calls import check, run, same_bits
from paged_sizes import GENERAL, SPECIAL, Size, paged_batch

from tilewright.schedules.catalog import all_workloads

SIZES = [SPECIAL[0], GENERAL[0], SPECIAL[1], GENERAL[3], Size(80, 80, 8, 1), Size(576, 512, 4, 1, aliased=True)]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def in_catalogue(request):
    """Tests on a GPU wait for its kernels to be in the catalogue."""
    device = request.getfixturevalue("device") if "device" in request.fixturenames else None
    if device is not None and device.type == "cuda":
        trees = {(w.head_dim_qk, w.group, w.kv_dtype) for w in all_workloads("cuda-sm90a") if w.tree}
        row = request.node.callspec.params
        size = row.get("size", SPECIAL[0])
        if (size.dim, size.group, "fp8_e4m3" if row.get("fp8") else None) not in trees:
            pytest.skip("cuda-sm90a has no such tree kernel in its catalogue yet")


def on(device, size):
    """The dtypes that have kernels of trees for this size."""
    return [BF16] if device.type == "cuda" or not size.general else [BF16, torch.float16, torch.float32]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("whole_rows", [False, True], ids=["new", "whole rows"])
@pytest.mark.parametrize("from_pool", [False, True], ids=["new keys", "pool"])
def test_tree(device, modules, many_threads, size, whole_rows, from_pool):
    """Ragged trees beside prefixes from none to several chunks, whole and split; the mask's two forms."""
    for dtype in on(device, size):
        for split in (False, True):
            modules.use(size, split=split)
            batch = paged_batch(size, [129, 0, 7, 40], [16, 9, 1, 0], dtype=dtype, from_pool=from_pool)
            mask = batch.tree_mask(whole_rows=whole_rows)
            sinks = torch.linspace(-2, 2, size.group * size.kv_heads)
            tree = check(batch, tree_mask=mask, sinks=sinks)
            assert (run(batch, sinks=sinks)[0] - tree[0]).abs().max() > 1e-2, "the mask has an effect"


@pytest.mark.parametrize("size", SIZES[:4], ids=str)
@pytest.mark.parametrize("options", [
    {"window": 5}, {"window": 40, "logit_cap": 3.0}, {"causal": False}, {"batch_invariant": True},
], ids="-".join)  # fmt: skip
def test_options_beside_a_tree(device, modules, size, options):
    modules.use(size)
    batch = paged_batch(size, [60, 0, 7], [16, 9, 30], dtype=BF16, kv_starts=[2, 0, 5])
    check(batch, tree_mask=batch.tree_mask(), kv_start=batch.kv_start, **options)


@pytest.mark.parametrize("size", SIZES[:4], ids=str)
def test_mask_of_a_chain_changes_no_bit(device, modules, size):
    """A triangular mask is the causal rule, and so is one of ones; bool and uint8 of any shape are the same."""
    modules.use(size)
    batch = paged_batch(size, [13, 70], [16, 16], dtype=BF16)
    chain = torch.ones(2, 16, 16, dtype=torch.bool).tril()
    expected = run(batch, tree_mask=chain)
    check(batch, tree_mask=chain)
    for mask in (torch.ones(512, dtype=torch.bool), chain.to(torch.uint8) * 200, chain.flatten(), chain.mT.mT):
        assert same_bits(run(batch, tree_mask=mask), expected)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_tokens_see_nothing_of_other_branches(device, modules, fp8):
    """NaN in one draft's key reaches its descendants and itself alone; a row that sees no new key has its prefix."""
    size = SPECIAL[0]
    modules.use(size, general=fp8)
    batch = paged_batch(size, [20, 5], [16, 3], dtype=BF16)
    if fp8:
        batch.to_fp8()
    mask = batch.tree_mask()
    clean = run(batch, tree_mask=mask)
    seen = mask[:256].view(16, 16)[:, 4]
    assert seen.any() and not seen.all()
    batch.k[4] = float("nan")
    out, lse = run(batch, tree_mask=mask)
    rows = torch.cat([seen, torch.zeros(3, dtype=torch.bool)])
    assert out[rows].isnan().all() and lse[rows].isnan().all()
    assert same_bits((out[~rows], lse[~rows]), (clean[0][~rows], clean[1][~rows]))
    check(batch, tree_mask=torch.zeros_like(mask))


@pytest.mark.parametrize("size", [SPECIAL[0], Size(64, 64, 4, 2)], ids=str)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_fp8_pools_beside_trees(device, modules, size, fp8):
    modules.use(size)
    batch = paged_batch(size, [129, 0, 40], [16, 9, 33], dtype=BF16)
    scales = {"k_scale": 0.5, "v_scale": 0.3} if fp8 else {}
    if fp8:
        batch.to_fp8(**scales)
    check(batch, tree_mask=batch.tree_mask(), **scales)


def test_mask_without_a_new_key(device, modules):
    """A token that sees no key at all gives 0 and -inf."""
    size = SPECIAL[0]
    modules.use(size)
    batch = paged_batch(size, [0, 6], [5, 5], dtype=BF16)
    out, lse = check(batch, tree_mask=torch.zeros(50, dtype=torch.uint8))
    assert (out[:5] == 0).all() and (lse[:5] == -torch.inf).all() and lse[5:].isfinite().all()
