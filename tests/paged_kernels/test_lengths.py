"""Paged kernels against the float64 oracle: lengths around every tile edge, head ratios, head dims. Ids such as P01
name known faults of such kernels."""

import math

import pytest
import torch
from paged_calls import check
from paged_sizes import SIZES, SPECIAL, Size, decode_batch, paged_batch

REQUESTS = [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 513]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_decode_lengths(device, modules, dtype, size):
    """P01, P06, P07, P08, P21, P35: around every tile edge, an empty request; all that is unused is NaN."""
    modules.use(size)
    out, lse = check(decode_batch(size, REQUESTS, dtype=dtype), decode=True)
    assert (out[0] == 0).all() and (lse[0] == -math.inf).all()


@pytest.mark.parametrize("from_pool", [False, True], ids=["new", "pool"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_extend_lengths(device, modules, dtype, size, from_pool):
    """P01, P07, P21, P35: query blocks of 8, 12, 16 and 48 tokens and one more or less, prefixes at tile edges."""
    modules.use(size)
    prefixes, news = [0, 127, 64, 300, 0, 17, 15, 5], [13, 1, 12, 0, 17, 49 if size.dim <= 80 else 9, 16, 7]
    check(paged_batch(size, prefixes, news, dtype=dtype, from_pool=from_pool))


@pytest.mark.parametrize(("size", "dtype"), [(SPECIAL[2], torch.float32), (SPECIAL[0], torch.bfloat16),
                         (Size(64, 64, 1, 1), torch.float16)], ids=str)  # fmt: skip
@pytest.mark.parametrize("new", [1, 2, 11, 12, 13, 33, 47, 48, 49])
def test_extend_prefix_sweep(device, modules, size, dtype, new):
    """P22, P23: every prefix around the edges in one batch; requests of one token are no decode."""
    modules.use(size)
    prefixes = [0, 1, 15, 16, 17, 31, 33, 63, 64, 65, 128] if size.group == 1 else [0, 16, 97, 130]
    batch = paged_batch(size._replace(kv_heads=1), prefixes, [new] * len(prefixes), dtype=dtype)
    batch.q *= 4
    check(batch)


def test_partial_blocks_with_peaked_scores():
    """P22: the reported input: 16/4 heads, D 128, prefix 97, extend 37, q times 20, in bf16."""
    batch = paged_batch(Size(128, 128, 4, 4), [97], [37], dtype=torch.bfloat16)
    batch.q *= 20
    check(batch)


@pytest.mark.parametrize("heads", [(5, 1), (6, 1), (7, 1), (28, 4), (24, 1), (48, 2), (48, 8), (64, 4)])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_head_ratios(modules, many_threads, heads, split):
    """P21, P23: head h uses KV head h // ratio, with and without splits, in decode and in a mixed batch."""
    size = Size(64, 64, heads[0] // heads[1], heads[1])
    modules.use(split=split)
    check(decode_batch(size, [70, 3]), decode=True)
    check(paged_batch(size, [69, 0, 6], [1, 11, 1]))


@pytest.mark.parametrize("dim", [16, 40, 46, 48, 72, 96, 100, 112, 160, 256, 512])
def test_head_dims(dtype, dim):
    """P35: dims outside any list of a specialised kernel."""
    check(decode_batch(Size(dim, dim, 2, 1), [5, 33], dtype=dtype), decode=True)
    check(paged_batch(Size(dim, dim, 2, 1), [5, 0], [9, 3], dtype=dtype))
