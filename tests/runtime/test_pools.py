"""The pools of our own: reserved zeroes, all or nothing, no double return."""

import pytest
import torch

from tilewright.runtime.forward_batch import AttentionLayer
from tilewright.runtime.pool_memory import pool_zeros
from tilewright.runtime.pools import HybridReqToTokenPool, ReqToTokenPool, StatePool, TokenToKVPool


def test_request_rows():
    pool = ReqToTokenPool(3, 16)
    assert pool.req_to_token.shape == (4, 16) and pool.req_to_token.dtype == torch.int32
    rows = pool.alloc(3)
    assert sorted(rows) == [1, 2, 3] and pool.available_size() == 0
    assert pool.alloc(1) is None
    pool.write((rows[0], slice(0, 3)), torch.tensor([5, 6, 7]))
    assert pool.req_to_token[rows[0], :3].tolist() == [5, 6, 7]
    pool.free(rows[1])
    assert pool.alloc(1) == [rows[1]]
    with pytest.raises(ValueError, match="request rows"):
        pool.free([rows[0], rows[0]])
    with pytest.raises(ValueError, match="request rows"):
        pool.free(0)


@pytest.mark.parametrize("page_size", [1, 4])
def test_token_slots(page_size):
    pool = TokenToKVPool(
        8, layer_num=2, head_num=2, head_dim=4, v_head_dim=3, dtype=torch.bfloat16, page_size=page_size
    )
    assert pool.get_key_buffer(1).shape == (8 + page_size, 2, 4)
    assert pool.get_value_buffer(1).shape == (8 + page_size, 2, 3)
    slots = pool.alloc(8)
    assert sorted(slots.tolist()) == list(range(page_size, 8 + page_size)), "the first page is reserved"
    pages = slots.view(-1, page_size)
    assert (pages[:, 0] % page_size == 0).all() and (pages.diff(dim=1) == 1).all()
    assert pool.alloc(page_size) is None
    pool.free(slots[:4])
    assert pool.available_size() == 4 and sorted(pool.alloc(4).tolist()) == sorted(slots[:4].tolist())
    with pytest.raises(ValueError):
        pool.free(torch.zeros(page_size, dtype=torch.int64))
    pool.free(slots)
    with pytest.raises(ValueError, match="slots"):
        pool.free(slots)


def test_pages_are_whole():
    with pytest.raises(ValueError, match="size: got 6"):
        TokenToKVPool(6, layer_num=1, head_num=1, head_dim=2, dtype=torch.float32, page_size=4)
    pool = TokenToKVPool(8, layer_num=1, head_num=1, head_dim=2, dtype=torch.float32, page_size=4)
    with pytest.raises(ValueError, match="need_size: got 3"):
        pool.alloc(3)
    slots = pool.alloc(4)
    with pytest.raises(ValueError, match="part of a page"):
        pool.free(slots[:3])
    assert pool.available_size() == 4


def test_writing_a_layer(model):
    pool = TokenToKVPool(4, layer_num=2, head_num=2, head_dim=4, dtype=torch.float32)
    layer = AttentionLayer(1, 4, 2, 4, 4, 0.5)
    k, v = torch.randn(2, 2, 4), torch.randn(2, 2, 4)
    pool.set_kv_buffer(layer, torch.tensor([3, -1]), k, v)
    keys, values = pool.get_kv_buffer(1)
    assert torch.equal(keys[3], k[0]) and torch.equal(values[3], v[0])
    assert not keys[:3].any() and not pool.get_key_buffer(0).any()


def test_states_come_and_go_with_requests():
    states = StatePool(2, layer_ids=[0, 3], head_num=2, head_dim=4, v_head_dim=5)
    assert states.layer(3).temporal.shape == (3, 2, 4, 5) and states.layer(3).temporal.dtype == torch.float32
    with pytest.raises(ValueError, match="layer_id: got 1"):
        states.layer(1)
    pool = HybridReqToTokenPool(4, 8, states)
    rows = pool.alloc(2)
    assert sorted(pool.req_index_to_mamba_index_mapping[rows].tolist()) == [1, 2]
    assert pool.alloc(1) is None and pool.available_size() == 2, "no state slot left: no row is taken"
    pool.free(rows[0])
    assert pool.req_index_to_mamba_index_mapping[rows[0]] == 0 and states.available_size() == 1
    assert pool.alloc(1) is not None
    assert pool.mamba2_layer_cache(0) is states.layer(0)


@pytest.mark.parametrize("shape", [(3, 2, 8), (3000, 8, 64), (0, 2, 8)])
def test_pool_memory_is_dense_zeros_and_its_own(shape):
    first, second = (pool_zeros(shape, torch.bfloat16) for _ in range(2))
    assert first.shape == shape and first.is_contiguous() and first.dtype is torch.bfloat16
    assert not first.any()
    first.fill_(1)
    assert not second.any()


def test_large_pools_begin_at_a_huge_page():
    assert pool_zeros((3 << 20,), torch.float32).data_ptr() % (2 << 20) == 0
