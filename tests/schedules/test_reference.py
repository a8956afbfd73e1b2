"""The oracle itself: held to torch, to scipy-free identities and to hand-made cases."""

import math

import numpy as np
import pytest
import torch
from batches import as_numpy, make_decode_batch, make_paged_batch

from tilewright.schedules.paged_attention import reference

ATOL = 1e-12


def dense_keys(batch, b):
    """Keys and values of request b in order, [n, Hk, D]."""
    start = 0 if batch.kv_start is None else int(batch.kv_start[b])
    slots = batch.req_to_token[batch.req_pool_indices[b], start : start + int(batch.seq_lens[b])].long()
    return batch.k_buffer[slots].double(), batch.v_buffer[slots].double()


@pytest.mark.parametrize(("num_qo_heads", "num_kv_heads"), [(2, 2), (6, 2), (5, 1)])
def test_equals_sdpa(num_qo_heads, num_kv_heads):
    batch = make_paged_batch(
        [0, 3, 7], [5, 4, 1], num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, dim_vo=5, from_pool=True
    )
    out, lse = batch.expected(decode=False)
    row = 0
    for b, new in enumerate(batch.extend_seq_lens.tolist()):
        keys, values = dense_keys(batch, b)
        total = len(keys)
        q = batch.q[row : row + new].double().transpose(0, 1)
        keys, values = (x.transpose(0, 1).repeat_interleave(num_qo_heads // num_kv_heads, 0) for x in (keys, values))
        mask = torch.ones(new, total, dtype=torch.bool).tril(total - new)
        expected = torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        np.testing.assert_allclose(out[row : row + new], expected.transpose(0, 1).numpy(), atol=ATOL)
        scores = (q @ keys.transpose(1, 2) / math.sqrt(8)).masked_fill(~mask, -math.inf)
        np.testing.assert_allclose(lse[row : row + new], scores.logsumexp(-1).T.numpy(), atol=ATOL)
        row += new


def test_weights_sum_to_one_and_to_less_with_a_sink():
    batch = make_decode_batch([9, 4])
    batch.v_buffer.fill_(1.0)
    np.testing.assert_allclose(batch.expected(decode=True)[0], 1.0, atol=ATOL)
    plain, lse = batch.expected(decode=True)
    sinks = np.array([-1.0, 0.0, 2.0, -math.inf])
    out, lse_with = batch.expected(decode=True, sinks=sinks)
    np.testing.assert_allclose(out, (1 / (1 + np.exp(sinks - lse)))[..., None] * plain, atol=ATOL)
    np.testing.assert_array_equal(lse, lse_with)


def test_the_same_in_any_page_order():
    first = make_paged_batch([5, 9], [3, 2], seed=1)
    order = torch.randperm(len(first.k_buffer) - 1) + 1
    moved = torch.cat((torch.zeros(1, dtype=torch.long), order))
    second = make_paged_batch([5, 9], [3, 2], seed=1)
    second.k_buffer[moved], second.v_buffer[moved] = first.k_buffer.clone(), first.v_buffer.clone()
    second.req_to_token = moved[first.req_to_token.long()].int()
    for one, two in zip(first.expected(decode=False), second.expected(decode=False), strict=True):
        np.testing.assert_array_equal(one, two)


def test_new_keys_equal_keys_from_the_pool():
    pool = make_paged_batch([4, 0], [3, 2], from_pool=True)
    keys, values = (torch.cat([dense_keys(pool, b)[x][p:] for b, p in ((0, 4), (1, 0))]).float() for x in (0, 1))
    out = reference.extend(*map(as_numpy, (pool.q, keys, values, *pool.extend_arguments()[3:])))
    for one, two in zip(out, pool.expected(decode=False), strict=True):
        np.testing.assert_array_equal(one, two)


def test_decode_is_the_last_row_of_extend():
    batch = make_paged_batch([4], [3], from_pool=True)
    out, lse = batch.expected(decode=False, window=2, logit_cap=1.5)
    batch.q = batch.q[-1:]
    last, last_lse = batch.expected(decode=True, window=2, logit_cap=1.5)
    np.testing.assert_array_equal(out[-1:], last)
    np.testing.assert_array_equal(lse[-1:], last_lse)


@pytest.mark.parametrize("window", [1, 2, 4])
def test_window_counts_the_query_itself(window):
    """Casebook P13: key p - window + 1 is visible, key p - window is not."""
    batch = make_decode_batch([6])
    slots = batch.req_to_token[batch.req_pool_indices[0], :6].long()
    batch.q.zero_()
    batch.v_buffer[slots] = torch.eye(6, 8)[:, None, :].expand(6, 2, 8).contiguous()
    out, lse = batch.expected(decode=True, window=window)
    np.testing.assert_allclose(out[0, 0, :6], [0] * (6 - window) + [1 / window] * window, atol=ATOL)
    np.testing.assert_allclose(lse, math.log(window), atol=ATOL)


def test_window_without_causal_bounds_the_past_only():
    batch = make_paged_batch([2], [3], from_pool=True)
    batch.q.zero_()
    _, lse = batch.expected(decode=False, causal=False, window=2)
    np.testing.assert_allclose(np.exp(lse[:, 0]), [4, 3, 2], atol=ATOL)


def test_cap_comes_before_the_mask():
    """Casebook P16, P18."""
    batch = make_paged_batch([0], [8], from_pool=True)
    batch.q *= 50
    out, _ = batch.expected(decode=False, logit_cap=1.0)
    keys, values = dense_keys(batch, 0)
    np.testing.assert_allclose(out[0, 0], values[0, 0].numpy(), atol=ATOL)
    scores = torch.tanh(batch.q[7, 0].double() @ keys[:, 0].T / math.sqrt(8))
    np.testing.assert_allclose(out[7, 0], (scores.softmax(0) @ values[:, 0]).numpy(), atol=ATOL)
    assert np.abs(out - batch.expected(decode=False)[0]).max() > 0.1


def test_scale():
    batch = make_decode_batch([7])
    expected = batch.expected(decode=True, sm_scale=0.25)
    batch.q *= 0.25 * math.sqrt(8)
    np.testing.assert_allclose(batch.expected(decode=True)[0], expected[0], atol=1e-6)


def test_empty_rows():
    """Casebook P01, P03: zeros and -inf, also for the rows before the first key."""
    out, lse = make_decode_batch([0, 3]).expected(decode=True, sinks=np.zeros(4))
    assert (out[0] == 0).all() and (lse[0] == -math.inf).all() and np.isfinite(lse[1]).all()
    batch = make_paged_batch([-2], [5], from_pool=True)
    out, lse = batch.expected(decode=False)
    assert (out[:2] == 0).all() and (lse[:2] == -math.inf).all() and np.isfinite(lse[2:]).all()


def test_very_negative_scores_are_scores():
    """Casebook P04."""
    batch = make_decode_batch([2], num_qo_heads=2, dim=128)
    batch.q.fill_(-64.0)
    batch.k_buffer.fill_(64.0)
    batch.v_buffer.fill_(1.0)
    out, lse = batch.expected(decode=True)
    np.testing.assert_allclose(out, 1.0)
    np.testing.assert_allclose(lse, -64 * 64 * 128 / math.sqrt(128) + math.log(2))


def test_kv_start_and_kv_lens():
    batch = make_decode_batch([5, 3], kv_starts=[2, 0])
    full = batch.expected(decode=True)
    cross = reference.decode(
        *map(as_numpy, batch.decode_arguments()), kv_start=as_numpy(batch.kv_start), kv_lens=np.array([5, 3])
    )
    np.testing.assert_array_equal(full[0], cross[0])
    moved = make_decode_batch([5, 3], kv_starts=[2, 0])
    moved.kv_start, moved.req_to_token = None, moved.req_to_token.clone()
    row = moved.req_pool_indices[0]
    moved.req_to_token[row] = torch.roll(moved.req_to_token[row], -2)
    np.testing.assert_array_equal(moved.expected(decode=True)[0], full[0])
    longer = make_paged_batch([0], [4], from_pool=True)
    _, lse = longer.expected(decode=False, kv_lens=np.array([2]), sm_scale=0.0)
    np.testing.assert_allclose(lse, math.log(2))


def test_nan_query_gives_a_nan_row_and_nan_behind_the_mask_gives_none():
    """Casebook P07, P09, P39."""
    batch = make_decode_batch([4, 4])
    batch.q[0, 1] = math.nan
    out, lse = batch.expected(decode=True)
    assert np.isnan(out[0, 1]).all() and np.isnan(lse[0, 1])
    assert np.isfinite(np.delete(out.reshape(8, -1), 1, 0)).all()
    causal = make_paged_batch([0], [8])
    causal.k[7], causal.v[7] = math.nan, math.nan
    assert np.isfinite(causal.expected(decode=False)[0][:7]).all()


def test_merge_equals_one_pass_and_ignores_empty_states():
    """Casebook P02, P20."""
    batch = make_decode_batch([30, 12])
    whole, whole_lse = batch.expected(decode=True)
    states = [
        reference.decode(*map(as_numpy, batch.decode_arguments()), kv_start=np.full(2, low), kv_lens=np.array(lens))
        for low, lens in ((0, [10, 10]), (10, [20, 2]), (0, [0, 0]))
    ]
    states[2][0][:] = math.nan
    out, lse = reference.merge(*(np.stack(part) for part in zip(*states, strict=True)))
    np.testing.assert_allclose(out, whole, atol=ATOL)
    np.testing.assert_allclose(lse, whole_lse, atol=ATOL)
    out, lse = reference.merge(np.full((2, 1, 1, 4), math.nan), np.full((2, 1, 1), -math.inf))
    assert (out == 0).all() and (lse == -math.inf).all()


def test_write_skips_minus_one():
    buffer, x = np.zeros((4, 1, 2)), np.arange(6.0).reshape(3, 1, 2)
    result = reference.write(x, buffer, np.array([2, -1, 0]))
    np.testing.assert_array_equal(result[:, 0], [[4, 5], [0, 0], [0, 1], [0, 0]])
    assert (buffer == 0).all()
