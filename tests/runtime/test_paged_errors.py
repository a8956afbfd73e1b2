"""What the public paged functions refuse, and how they say it."""

import math

import pytest
import torch
from batches import make_decode_batch, make_paged_batch
from paged_calls import check

from tilewright.runtime.paged import decode_attention, extend_attention, write_kv

WRONG = [
    ("q", lambda x: x[0], ValueError, r"q: got shape \[4, 8\]"),
    ("q", lambda x: None, TypeError, "q: got NoneType"),
    ("q", lambda x: x[:1], ValueError, "q: got 1 rows, expected one per request"),
    ("q", lambda x: x[:, :3], ValueError, "q: got 3 heads, expected a multiple of the 2 KV heads"),
    ("q", lambda x: x.double(), TypeError, "q: got torch.float64"),
    ("q", lambda x: x.half(), TypeError, "k_buffer: got torch.float32, expected torch.float16"),
    ("q", lambda x: x[..., :7], ValueError, r"k_buffer: got shape \[22, 2, 8\], expected \[22, 2, 7\]"),
    ("q", lambda x: x.requires_grad_(), ValueError, "q: requires a gradient"),
    ("k_buffer", lambda x: x.to(torch.float8_e5m2), NotImplementedError, "k_buffer: got torch.float8_e5m2; .*e4m3fn"),
    ("k_buffer", lambda x: x.to(torch.float8_e4m3fn), TypeError, "v_buffer: got torch.float32.*float8_e4m3fn"),
    ("v_buffer", lambda x: x.to(torch.float8_e4m3fn), TypeError, "v_buffer: got torch.float8_e4m3fn.*float32"),
    ("k_buffer", lambda x: x.requires_grad_(), ValueError, "k_buffer: requires a gradient"),
    ("k_buffer", lambda x: x.to("meta"), ValueError, "k_buffer: got device meta"),
    ("k_buffer", lambda x: x.numpy(), TypeError, "k_buffer: got ndarray"),
    ("v_buffer", lambda x: x[:-1], ValueError, "v_buffer: got shape"),
    ("v_buffer", lambda x: x[:, :1], ValueError, "v_buffer: got shape"),
    ("req_to_token", lambda x: x[0], ValueError, "req_to_token: got shape"),
    ("req_to_token", lambda x: x.short(), TypeError, "req_to_token: got torch.int16"),
    ("req_pool_indices", lambda x: x[:1], ValueError, "seq_lens: got shape"),
    ("req_pool_indices", lambda x: x.float(), TypeError, "req_pool_indices: got torch.float32"),
    ("seq_lens", lambda x: x[:, None], ValueError, "seq_lens: got shape"),
    ("q", lambda x: x.to("meta"), NotImplementedError, "q: got device meta"),
    ("q", lambda x: x.to_sparse(), TypeError, "q: got layout torch.sparse_coo"),
    ("v_buffer", lambda x: x.to_sparse(), TypeError, "v_buffer: got layout torch.sparse_coo"),
    ("req_to_token", lambda x: x.to_sparse(), TypeError, "req_to_token: got layout torch.sparse_coo"),
    ("q", lambda x: x[..., :0], ValueError, "k_buffer: got shape"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "error", "message"), WRONG, ids=[row[3] for row in WRONG])
def test_wrong_tensors(model, name, change, error, message):
    batch = make_decode_batch([5, 9])
    setattr(batch, name, change(getattr(batch, name)))
    with pytest.raises(error, match=message):
        decode_attention(*batch.decode_arguments())
    assert model.calls == []


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"window": -1}, ValueError, "window: got -1"),
    ({"logit_cap": -1.0}, ValueError, "logit_cap: got -1"),
    ({"page_size": 0}, ValueError, "page_size: got 0"),
    ({"k_scale": 0.5}, ValueError, "k_scale: got 0.5 with a pool of torch.float32"),
    ({"v_scale": 2.0}, ValueError, "v_scale: got 2.0 with a pool of torch.float32"),
    ({"k_scale": 0.0}, ValueError, "k_scale: got 0.0, expected 1e-15 <= k_scale"),
    ({"v_scale": math.nan}, ValueError, "v_scale: got nan"),
    ({"k_scale": [1]}, TypeError, "k_scale: got"),
    ({"k_scale": torch.ones(2)}, ValueError, r"k_scale: got shape \[2\], expected one number"),
    ({"v_scale": torch.ones(1, device="meta")}, ValueError, "v_scale: got a tensor on meta, expected a Python float"),
    ({"sinks": torch.zeros(3)}, ValueError, "sinks: got shape"),
    ({"sinks": torch.zeros(4, dtype=torch.float16)}, TypeError, "sinks: got torch.float16"),
    ({"out": torch.zeros(2, 4, 7)}, ValueError, "out: got shape"),
    ({"out": torch.zeros(2, 4, 8).half()}, TypeError, "out: got torch.float16"),
    ({"kv_start": torch.zeros(3, dtype=torch.int32)}, ValueError, "kv_start: got shape"),
    ({"kv_lens": torch.ones(2, dtype=torch.int32), "window": 2}, ValueError, "window"),
    ({"key": torch.zeros(2, 2, 8)}, ValueError, "key, value, loc"),
    ({"page_size": 2**70}, ValueError, "page_size: got 1180591620717411303424"),
    ({"page_size": 2.0}, TypeError, "page_size: got 2.0, expected an integer"),
    ({"logit_cap": torch.ones(2)}, TypeError, "logit_cap: got tensor.*expected a number"),
    ({"batch_invariant": "no"}, TypeError, "batch_invariant: got 'no', expected True or False"),
    ({"out": [1]}, TypeError, "out: got list"),
    ({"out": torch.zeros(999).as_strided((2, 4, 8), (8, 8, 1))}, ValueError, "out: got strides.*memory of its own"),
    ({"out": torch._neg_view(torch.zeros(2, 4, 8))}, ValueError, "out: got a negated view"),
    ({"window": 1.5}, TypeError, "window: got 1.5, expected an integer"),
    ({"window": None}, TypeError, "window: got None, expected an integer"),
    ({"logit_cap": math.nan}, ValueError, "logit_cap: got nan"),
    ({"logit_cap": math.inf}, ValueError, "logit_cap: got inf"),
    ({"logit_cap": 1e-40}, ValueError, r"logit_cap: got 1e-40.* or 0 \(off\)"),
    ({"logit_cap": None}, TypeError, "logit_cap: got None, expected a number"),
    ({"sm_scale": math.nan}, ValueError, "sm_scale: got nan"),
    ({"sm_scale": 1e39}, ValueError, "sm_scale: got 1e\\+39"),
    ({"sm_scale": "x"}, TypeError, "sm_scale: got 'x', expected a number"),
    ({"sinks": [0.0] * 4}, TypeError, "sinks: got list"),
    ({"plan": "x"}, TypeError, "plan: got str, expected a Plan of plan_decode"),
    ({"kv_lens": torch.tensor([-1, 2])}, ValueError, "kv_lens: got values -1"),
    ({"out": torch.zeros(1, 4, 8).expand(2, 4, 8)}, ValueError, "out: got strides.*memory of its own"),
    ({"out": torch.zeros(2, 4, 8, requires_grad=True)}, ValueError, "out: requires a gradient"),
])  # fmt: skip
def test_wrong_options(model, options, error, message):
    with pytest.raises(error, match=message):
        decode_attention(*make_decode_batch([5, 9]).decode_arguments(), **options)
    assert model.calls == []


def test_dims_of_nothing(model):
    batch = make_decode_batch([5], dim=0)
    with pytest.raises(ValueError, match="head dims 0 and 0"):
        decode_attention(*batch.decode_arguments())
    assert model.calls == []


def test_causal_is_a_boolean(model):
    for value in ("false", 0, None):
        with pytest.raises(TypeError, match="causal: got .*, expected True or False"):
            extend_attention(*make_paged_batch([5], [4]).extend_arguments(), causal=value)
    assert model.calls == []


@pytest.mark.parametrize("name", ["q", "k", "v", "k_buffer", "v_buffer"])
@pytest.mark.parametrize("shared", [0, 1, 64])
def test_out_shares_no_memory_with_what_is_read(model, name, shared):
    """What a query sees must not depend on which item was written first; a neighbour in one storage is no overlap."""
    batch = make_paged_batch([5], [4])
    values = getattr(batch, name)
    storage = torch.zeros(values.numel() + 4 * 4 * 8)
    setattr(batch, name, storage[: values.numel()].view(values.shape).copy_(values))
    out = storage[values.numel() - shared :][: 4 * 4 * 8].view(4, 4, 8)
    if not shared:
        check(batch, out=out)
        return
    with pytest.raises(ValueError, match=f"out: shares memory with {name}"):
        extend_attention(*batch.extend_arguments(), out=out)
    assert model.calls == []


@pytest.mark.parametrize("name", ["q", "k_buffer", "v_buffer"])
def test_out_of_decode_shares_no_memory_with_what_is_read(model, name):
    batch = make_decode_batch([5, 9], num_qo_heads=2)
    with pytest.raises(ValueError, match=f"out: shares memory with {name}"):
        decode_attention(*batch.decode_arguments(), out=getattr(batch, name)[:2])
    assert model.calls == []


def test_rows_of_a_pool_are_not_moved_within_it(model):
    """Rows that are read while others are written would arrive twice; V over part of K would be K no more."""
    pool, other = torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    loc = torch.arange(4, 9)
    for k, v, name in ((pool[3:8], other[3:8].clone(), "k"), (pool[3:8].clone(), other[3:8], "v")):
        with pytest.raises(ValueError, match=f"buffer: shares memory with {name}"):
            write_kv(k, v, pool, other, loc)
    wide = torch.zeros(9, 2, 12)
    with pytest.raises(ValueError, match="v_buffer: shares memory with k_buffer"):
        write_kv(pool[3:8], pool[3:8], wide[..., :8], wide[..., 4:], loc)
    batch = make_decode_batch([5, 9])
    with pytest.raises(ValueError, match="k_buffer: shares memory with k"):
        decode_attention(*batch.decode_arguments(), key=batch.k_buffer[:2], value=batch.v_buffer[:2].clone(),
                         loc=torch.tensor([1, 2]))  # fmt: skip
    assert model.calls == []


@pytest.mark.parametrize("name", ["q", "k", "v", "k_buffer", "v_buffer"])
def test_negated_views_count_as_their_values(model, name):
    """Such a view (`x.conj().imag`) has the memory of -x."""
    batch = make_paged_batch([5], [4])
    expected = batch.expected(decode=False)
    setattr(batch, name, torch._neg_view(-getattr(batch, name)))
    assert getattr(batch, name).is_neg()
    check(batch, expected=expected)


@pytest.mark.parametrize(("mask", "error", "message"), [
    (torch.ones(16), TypeError, "tree_mask: got torch.float32, expected torch.bool or torch.uint8"),
    ([True] * 16, TypeError, "tree_mask: got list"),
    (torch.ones(16, dtype=torch.bool, device="meta"), ValueError, "tree_mask: got device meta"),
    (torch.ones(17, dtype=torch.bool), ValueError,
     r"tree_mask: got 17 elements, expected 25 \(new x new .*\) or 75 \(new tokens x keys"),
])  # fmt: skip
def test_wrong_masks(model, mask, error, message):
    batch = make_paged_batch([5, 10], [4, 3])
    with pytest.raises(error, match=message):
        extend_attention(*batch.extend_arguments(), tree_mask=mask)
    assert model.calls == []


def test_masks_where_they_have_no_meaning(model):
    batch = make_paged_batch([5, -2], [4, 3], from_pool=True)
    with pytest.raises(ValueError, match="extend_seq_lens: got more than seq_lens, expected no more with a tree_mask"):
        extend_attention(*batch.extend_arguments(), tree_mask=torch.ones(25, dtype=torch.bool))
    with pytest.raises(ValueError, match="tree_mask: got a tensor with kv_lens"):
        extend_attention(*batch.extend_arguments(), tree_mask=torch.ones(25, dtype=torch.bool),
                         kv_lens=torch.tensor([3, 1]))  # fmt: skip
    assert model.calls == []


def test_new_keys_beside_an_fp8_pool_in_batch_invariant_mode(model):
    """A key would be another number in the chunk that brings it than in the next."""
    batch = make_paged_batch([5], [4])
    batch.k_buffer, batch.v_buffer = (x.to(torch.float8_e4m3fn) for x in (batch.k_buffer, batch.v_buffer))
    with pytest.raises(ValueError, match=r"k, v: got new keys beside an fp8 pool.*write_kv"):
        extend_attention(*batch.extend_arguments(), batch_invariant=True)
    assert model.calls == []


def test_half_of_k_v(model):
    batch = make_paged_batch([5], [4])
    batch.v = None
    with pytest.raises(ValueError, match="k, v: got one of the two"):
        extend_attention(*batch.extend_arguments())


def test_checked_mode_names_the_bad_index(model):
    """Casebook P12: refused before anything runs."""

    def fails(message, change, **options):
        batch = make_decode_batch([5, 9])
        change(batch)
        with pytest.raises(ValueError, match=message):
            decode_attention(*batch.decode_arguments(), **options)

    def put(name, where, value):
        def change(batch):
            getattr(batch, name)[where] = value

        return change

    def slot(value):
        def change(batch):
            batch.req_to_token[batch.req_pool_indices[1], 3] = value

        return change

    fails(r"req_to_token\[\d+, 3\] \(request 1\): got 999", slot(999))
    fails(r"req_to_token\[\d+, 3\] \(request 1\): got -1", slot(-1))
    fails(r"req_pool_indices\[0\]: got 4", put("req_pool_indices", 0, 4))
    fails(r"seq_lens\[1\]: got 13, expected at most", put("seq_lens", 1, 13))
    fails(r"seq_lens: got values -3", put("seq_lens", 1, -3))
    fails(r"kv_start\[0\]: got -1", lambda _: None, kv_start=torch.tensor([-1, 0]))
    fails(r"seq_lens\[1\].*kv_start", lambda _: None, kv_start=torch.tensor([0, 9]))
    fails(r"page_size: got 4, but keys", lambda _: None, page_size=4)
    fails(r"loc\[0\]: got 99", lambda _: None, key=torch.ones(2, 2, 8), value=torch.ones(2, 2, 8),
          loc=torch.tensor([99, 1]))  # fmt: skip
    assert model.calls == []
    hidden = make_decode_batch([5, 9])
    hidden.req_to_token[hidden.req_pool_indices[1], 3] = 999
    decode_attention(*hidden.decode_arguments(), window=5)  # key 3 is out of sight: may be anything
    with pytest.raises(ValueError, match="req_to_token"):
        decode_attention(*hidden.decode_arguments(), window=6)
