"""The merge of partial states and the KV write."""

import math

import numpy as np
import pytest
import torch
from batches import as_numpy, poisoned
from layouts import EDGES, INDEXES, strided
from paged_calls import check, run, same_bits
from paged_sizes import BOTH, decode_batch
from tolerances import MERGE, PAGED, assert_close, assert_lse_close

from tilewright.runtime import dispatch
from tilewright.runtime.paged import merge_state, merge_states, write_kv
from tilewright.schedules.paged_attention import reference


@pytest.mark.parametrize("dim", [1, 13, 64, 128, 512])
def test_merge(device, dtype, dim):
    """P02: empty states first, last, all, between; NaN in their values stays there."""
    generator = torch.Generator(device).manual_seed(0)
    o = torch.randn(4, 6, 3, dim, generator=generator).to(dtype)
    lse = torch.randn(4, 6, 3, generator=generator) * 20
    lse[:, 0], lse[1:, 1], lse[:3, 2], lse[1:3, 3], lse[0, 4] = (-math.inf,) * 5
    o[lse == -math.inf] = math.nan
    expected = reference.merge(as_numpy(o), as_numpy(lse))
    out, out_lse = merge_states(o, lse)
    assert_close(out, expected[0], MERGE[dtype])
    assert_lse_close(out_lse, expected[1], MERGE[dtype])
    assert (out[0] == 0).all() and (out_lse[0] == -math.inf).all()
    assert torch.equal(out[1], o[0, 1]) and torch.equal(out[2], o[3, 2])
    out, out_lse = merge_state(o[0], lse[0], o[3], lse[3])
    expected = reference.merge(as_numpy(o[::3]), as_numpy(lse[::3]))
    assert_close(out, expected[0], MERGE[dtype])
    assert_lse_close(out_lse, expected[1], MERGE[dtype])


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_results_round_to_nearest_even(name):
    """R13: every value of the type, ties and what lies beside them: the bits of torch's own rounding; NaN stays NaN."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    ulp = (every.abs() * torch.finfo(dtype).eps).clamp(min=torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)
    values = torch.cat([every, every + ulp / 2, every + ulp / 2 * (1 + 2e-3), every + ulp / 2 * (1 - 2e-3)])
    part_o = values.view(1, -1, 64).transpose(0, 1).contiguous()  # [rows, 1 head, 64]
    rows = len(part_o)
    merged = torch.zeros((rows, 4), dtype=torch.int32)
    merged[:, 0] = merged[:, 1] = torch.arange(rows)
    merged[:, 2] = merged[:, 3] = 1
    out, lse = poisoned(rows, 1, 64, dtype=dtype), poisoned(rows, 1)
    dispatch.kernel("merge", name).run(part_o, torch.zeros(rows, 1), merged, torch.full((1,), -math.inf), out, lse)
    expected = (part_o + 0.0).to(dtype)  # a sum of states is never -0
    nan = expected.isnan()
    assert torch.equal(out.isnan(), nan)
    assert same_bits(out[~nan], expected[~nan])


@pytest.mark.parametrize("size", BOTH, ids=str)
def test_prefix_and_suffix_merge_to_one_pass(modules, size):
    """P20: 3072 + 64 keys merged by LSE are one pass over 3136; LSE is that of torch.logsumexp, natural log."""
    modules.use(size)
    batch = decode_batch(size, [3136])
    whole = run(batch, decode=True)
    slots = batch.req_to_token[batch.req_pool_indices[0], :3136].long()
    keys = batch.k_buffer[slots].repeat_interleave(size.group, 1).double()
    scores = torch.einsum("hd,jhd->hj", batch.q[0].double(), keys) * size.dim**-0.5
    assert_lse_close(whole[1], scores.logsumexp(1)[None].numpy(), PAGED[torch.float32])
    parts = [
        run(batch, decode=True, kv_lens=torch.tensor([n]), kv_start=torch.tensor([start]))
        for start, n in ((0, 3072), (3072, 64))
    ]
    merged = merge_state(*parts[0], *parts[1])
    assert_close(merged[0], as_numpy(whole[0]).astype(np.float64), PAGED[torch.float32])
    assert_lse_close(merged[1], as_numpy(whole[1]).astype(np.float64), PAGED[torch.float32])


@pytest.mark.parametrize(("heads", "dim", "dim_vo"), [(2, 128, 128), (3, 13, 55), (1, 576, 512), (1, 1, 1)])
@pytest.mark.parametrize("index", INDEXES)
def test_write(device, dtype, heads, dim, dim_vo, index):
    """P37: -1 is skipped, the last and the first slot are written, guard slots and bytes between rows are not."""
    generator = torch.Generator(device).manual_seed(0)
    k, v = (strided(torch.randn(6, heads, n, generator=generator).to(dtype)) for n in (dim, dim_vo))
    k[1] = v[1] = math.nan  # of the row that is skipped
    before, after = EDGES[device.type]
    pools = [poisoned(12, heads + 1, before + n + after, dtype=dtype) for n in (dim, dim_vo)]
    k_buffer, v_buffer = (pool[1:-1, :heads, before:-after] for pool in pools)
    loc = torch.tensor([9, -1, 0, 7, -1, 3])
    expected = [reference.write(as_numpy(x), as_numpy(b), as_numpy(loc)) for x, b in ((k, k_buffer), (v, v_buffer))]
    write_kv(k, v, k_buffer, v_buffer, INDEXES[index](loc))
    for pool, buffer, wanted in zip(pools, (k_buffer, v_buffer), expected, strict=True):
        np.testing.assert_array_equal(as_numpy(buffer), wanted)
        buffer.fill_(math.nan)
        assert pool.isnan().all(), "memory outside the slots was written"


def test_write_of_duplicates_keeps_whole_rows():
    """P37: of rows with one slot the last wins, whole."""
    k = torch.arange(64.0)[:, None, None].expand(64, 2, 96).contiguous()
    k_buffer, v_buffer = poisoned(2, 2, 96), poisoned(2, 2, 96)
    write_kv(k, k, k_buffer, v_buffer, torch.ones(64, dtype=torch.int32))
    for buffer in (k_buffer, v_buffer):
        assert (buffer[1] == 63).all() and buffer[0].isnan().all()


def test_write_into_an_aliased_pool():
    """V that is a view of K is not written over it."""
    k = torch.randn(3, 1, 576)
    pool = poisoned(5, 1, 576)
    write_kv(k, torch.zeros(3, 1, 512), pool, pool[..., :512], torch.tensor([4, 0, 2]))
    assert torch.equal(pool[[4, 0, 2]], k) and pool[[1, 3]].isnan().all()


@pytest.mark.parametrize("size", BOTH, ids=str)
def test_decode_writes_then_attends(device, modules, dtype, size):
    """The key and value given to decode are seen by its query."""
    modules.use(size)
    batch = decode_batch(size, [5, 64, 3], dtype=dtype)
    expected = batch.expected(decode=True)
    last = batch.req_to_token[batch.req_pool_indices, batch.seq_lens - 1]
    key, value = batch.k_buffer[last.long()].clone(), batch.v_buffer[last.long()].clone()
    batch.k_buffer[last.long()], batch.v_buffer[last.long()] = math.nan, math.nan
    check(batch, expected=expected, decode=True, key=key, value=value, loc=last)
