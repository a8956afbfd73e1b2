"""The public paged functions above the executable interface: plans, options, views, errors."""

import itertools
import logging
import math
import time

import numpy as np
import pytest
import torch
from batches import as_numpy, make_decode_batch, make_paged_batch, poisoned
from tolerances import MERGE, PAGED, assert_close, assert_lse_close

import tilewright
from tilewright.runtime import dispatch
from tilewright.runtime.paged import decode_attention, extend_attention, merge_state, merge_states, write_kv
from tilewright.runtime.plan import PlanBuffers, plan_decode, plan_extend
from tilewright.schedules.paged_attention import reference

SIZES = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 8, "head_dim_vo": 8}


def check_decode(batch, *, expected=None, **options):
    """Run decode into poisoned outputs and hold it to the oracle."""
    out, lse = decode_attention(*batch.decode_arguments(), out=batch.out(), return_lse=True, **options)
    names = ("sm_scale", "logit_cap", "window", "sinks", "kv_start", "kv_lens")
    wanted = expected or batch.expected(decode=True, **{name: options[name] for name in names if name in options})
    assert_close(out, wanted[0], PAGED[batch.q.dtype])
    assert_lse_close(lse, wanted[1], PAGED[batch.q.dtype])
    return out, lse


def check_extend(batch, **options):
    out, lse = extend_attention(*batch.extend_arguments(), out=batch.out(), return_lse=True, **options)
    names = ("sm_scale", "logit_cap", "window", "sinks", "kv_start", "kv_lens", "causal", "extend_start_loc")
    wanted = batch.expected(decode=False, **{name: options[name] for name in names if name in options})
    assert_close(out, wanted[0], PAGED[batch.q.dtype])
    assert_lse_close(lse, wanted[1], PAGED[batch.q.dtype])
    return out, lse


LENGTHS = [0, 1, 7, 8, 9, 70]
OPTIONS = [
    {},
    {"sm_scale": 0.2},
    {"logit_cap": 1.5},
    {"window": 5},
    {"window": 33, "logit_cap": 2.0, "sinks": torch.tensor([0.5, -math.inf, 3.0, -2.0])},
    {"batch_invariant": True},
]


@pytest.mark.parametrize("dtype", PAGED)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_decode(model, dtype, options):
    check_decode(make_decode_batch(LENGTHS, dtype=dtype, dim_vo=6), **options)


@pytest.mark.parametrize("options", [*OPTIONS, {"causal": False}, {"causal": False, "window": 4}],
                         ids=lambda o: "-".join(o) or "plain")  # fmt: skip
@pytest.mark.parametrize("from_pool", [False, True])
def test_extend(model, options, from_pool):
    check_extend(make_paged_batch([0, 50, 7, 3], [9, 5, 0, 1], dim_vo=6, from_pool=from_pool), **options)


def test_split_contexts_are_merged(use_model, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    model = use_model(chunk=8, min_split=8)
    check_decode(make_decode_batch([90, 3, 0]), sinks=torch.tensor([0.5, -math.inf, 3.0, -2.0]))
    check_extend(make_paged_batch([80, 2], [6, 3]), sinks=torch.tensor([0.5, -math.inf, 3.0, -2.0]))
    assert model.names().count("merge-f32") == 2


def test_sinks_in_the_dtype_of_q(model):
    sinks = torch.nn.Parameter(torch.tensor([0.5, -1.0, 3.0, -2.0], dtype=torch.bfloat16))
    batch = make_decode_batch([5, 9], dtype=torch.bfloat16)
    plan = plan_decode(batch.seq_lens, device="cpu", **SIZES)
    check_decode(batch, sinks=sinks, plan=plan)
    with torch.no_grad():
        sinks += 2  # a remembered conversion must not be served
    check_decode(batch, sinks=sinks, plan=plan)


def test_option_has_an_effect(model):
    """Casebook P15, P16: an option that is dropped would agree with the plain call."""
    batch = make_decode_batch([40, 40])
    plain = decode_attention(*batch.decode_arguments())
    for options in OPTIONS[1:5]:
        assert (decode_attention(*batch.decode_arguments(), **options) - plain).abs().max() > 1e-3


def test_negative_prefix_only_without_new_keys(model):
    """Casebook P03."""
    out, lse = check_extend(make_paged_batch([-3, 2, -1], [5, 2, 1], from_pool=True))
    assert (out[:3] == 0).all() and (lse[:3] == -math.inf).all()
    batch = make_paged_batch([0], [5])
    batch.seq_lens -= 2
    with pytest.raises(ValueError, match=r"extend_seq_lens.*k=None"):
        extend_attention(*batch.extend_arguments())


def test_new_keys_with_other_heads_need_empty_prefixes(model):
    """The pool of an absorbed MLA model beside expanded keys."""
    batch = make_paged_batch([0, 0], [3, 2])
    expected = batch.expected(decode=False)
    pool = poisoned(9, 1, 24)
    arguments = list(batch.extend_arguments())
    arguments[3:5] = pool, pool[..., :16]
    out = extend_attention(*arguments)
    assert_close(out, expected[0], PAGED[torch.float32])
    prefixed = list(make_paged_batch([2, 0], [3, 2]).extend_arguments())
    prefixed[3:5] = pool, pool[..., :16]
    with pytest.raises(ValueError, match="every prefix is 0"):
        extend_attention(*prefixed)


def test_extend_start_loc_and_rows_of_no_request(model):
    packed = make_paged_batch([4, 9], [3, 2])
    rows = torch.tensor([1, 2, 3, 6, 7])
    spread = make_paged_batch([4, 9], [3, 2])
    spread.q, spread.k, spread.v = (torch.full((9, *x.shape[1:]), math.nan) for x in (packed.q, packed.k, packed.v))
    for name in "qkv":
        getattr(spread, name)[rows] = getattr(packed, name)
    start = torch.tensor([1, 6])
    expected = extend_attention(*packed.extend_arguments(), return_lse=True)
    out, lse = extend_attention(*spread.extend_arguments(), start, out=spread.out(), return_lse=True)
    assert torch.equal(out[rows], expected[0]) and torch.equal(lse[rows], expected[1])
    rest = [0, 4, 5, 8]
    assert out[rest].isnan().all(), "rows of no request in a given out are left alone"
    out, lse = extend_attention(*spread.extend_arguments(), start, return_lse=True)
    assert (out[rest] == 0).all() and (lse[rest] == -math.inf).all()
    with pytest.raises(ValueError, match="extend_start_loc"):
        extend_attention(*spread.extend_arguments(), torch.tensor([1, 3]))
    with pytest.raises(ValueError, match="q: got 9 rows, expected at least 11"):
        extend_attention(*spread.extend_arguments(), torch.tensor([1, 9]))


def test_encoder_offset_and_cross_attention(model):
    """Casebook P38."""
    self_attention = make_decode_batch([5, 70, 0], kv_starts=[3, 0, 2])
    check_decode(self_attention, kv_start=self_attention.kv_start, window=4)
    check_extend(make_paged_batch([5, 9], [3, 2], kv_starts=[3, 1]), kv_start=torch.tensor([3, 1]))
    encoder = make_decode_batch([6, 30, 0])
    lens = torch.tensor([4, 30, 0])
    check_decode(encoder, kv_lens=lens)
    batch = make_paged_batch([7, 25], [3, 6], from_pool=True)
    lens = torch.tensor([4, 30])
    check_extend(batch, kv_lens=lens)
    plan = plan_extend(lens, batch.extend_seq_lens, causal=False, device="cpu", **SIZES)
    check_extend(batch, kv_lens=lens, plan=plan)
    with pytest.raises(ValueError, match="window"):
        extend_attention(*batch.extend_arguments(), kv_lens=lens, window=3)
    with pytest.raises(ValueError, match="k, v"):
        extend_attention(*make_paged_batch([2], [3]).extend_arguments(), kv_lens=torch.tensor([2]))


def test_no_request_and_no_token(model):
    batch = make_decode_batch([])
    out, lse = decode_attention(*batch.decode_arguments(), return_lse=True)
    assert out.shape == (0, 4, 8) and lse.shape == (0, 4)
    batch = make_paged_batch([5, 0], [0, 0])
    assert extend_attention(*batch.extend_arguments()).shape == (0, 4, 8)
    assert model.calls == []


def strided(tensor):
    """The same values in a view whose strides are all odd, at an odd offset."""
    base = torch.full([size * 2 + 1 for size in tensor.shape[:-1]] + [tensor.shape[-1] + 3], math.nan).to(tensor.dtype)
    view = base[tuple(slice(1, None, 2) for _ in tensor.shape[:-1])][..., 1 : 1 + tensor.shape[-1]]
    view.copy_(tensor)
    return view


@pytest.mark.parametrize("layout", ["rows", "heads_first", "not_dense"])
def test_strided_views(model, layout):
    """Casebook P34, R07, R09."""
    change = {
        "rows": strided,
        "heads_first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        "not_dense": lambda x: torch.stack((x, x), -1)[..., 0],
    }[layout]
    batch = make_paged_batch([4, 30], [3, 2])
    expected = extend_attention(*batch.extend_arguments())
    for name in ("q", "k", "v", "k_buffer", "v_buffer"):
        setattr(batch, name, change(getattr(batch, name)))
    assert torch.equal(extend_attention(*batch.extend_arguments()), expected)
    out = change(batch.out())
    if layout == "not_dense":
        with pytest.raises(ValueError, match=r"out.*dense last dimension"):
            extend_attention(*batch.extend_arguments(), out=out)
    else:
        extend_attention(*batch.extend_arguments(), out=out)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("index", [
    lambda x: x.int(), lambda x: x.long(), lambda x: x.int().repeat_interleave(2, -1)[..., ::2],
    lambda x: x.long().repeat_interleave(3, -1)[..., ::3], lambda x: x.long().mT.contiguous().mT if x.dim() > 1 else x,
], ids=["int32", "int64", "int32-strided", "int64-strided", "int64-transposed"])  # fmt: skip
def test_index_types(model, index):
    """Casebook P32."""
    batch = make_paged_batch([4, 30], [3, 2], kv_starts=[1, 0])
    for name in ("req_to_token", "req_pool_indices", "seq_lens", "extend_seq_lens", "kv_start"):
        setattr(batch, name, index(getattr(batch, name)))
    check_extend(batch, kv_start=batch.kv_start)


def test_decode_writes_the_new_keys_first(model):
    batch = make_decode_batch([5, 9, 3])
    expected = batch.expected(decode=True)
    last = torch.stack([
        batch.req_to_token[row, n - 1] for row, n in zip(batch.req_pool_indices, batch.seq_lens, strict=True)
    ]).long()  # fmt: skip
    key, value = batch.k_buffer[last].clone(), batch.v_buffer[last].clone()
    key[2] = math.nan  # slot -1: skipped, the key of request 2 is in the pool already
    batch.k_buffer[last[:2]], batch.v_buffer[last[:2]] = math.nan, math.nan
    loc = torch.tensor([int(last[0]), int(last[1]), -1])
    check_decode(batch, expected=expected, key=key, value=value, loc=loc)
    with pytest.raises(ValueError, match="key, value, loc"):
        decode_attention(*batch.decode_arguments(), key=key, value=value)


def test_write_kv(model):
    """Casebook P37."""
    k, v = torch.randn(5, 2, 8), torch.randn(5, 2, 6)
    loc = torch.tensor([3, -1, 7, 0, 5])
    k_buffer, v_buffer = strided(poisoned(9, 2, 8)), poisoned(9, 2, 6)
    expected = [reference.write(*map(as_numpy, (x, b, loc))) for x, b in ((k, k_buffer), (v, v_buffer))]
    write_kv(k, v, k_buffer, v_buffer, loc)
    for buffer, wanted in zip((k_buffer, v_buffer), expected, strict=True):
        np.testing.assert_array_equal(as_numpy(buffer), wanted)
    shared = poisoned(9, 2, 8)
    write_kv(k, torch.zeros(5, 2, 6), shared, shared[..., :6], loc)
    assert torch.equal(shared[loc[loc >= 0]], k[loc >= 0]), "V is not written over the K it is a view of"
    before = k_buffer.clone()
    for bad in (9, -2):
        with pytest.raises(ValueError, match=rf"loc\[1\]: got {bad}"):
            write_kv(k, v, k_buffer, v_buffer, torch.tensor([1, bad, 2, 4, 5]))
    with pytest.raises(ValueError, match="loc: got shape"):
        write_kv(k, v, k_buffer, v_buffer, loc[:4])
    with pytest.raises(TypeError, match="k: got list"):
        write_kv([1], v, k_buffer, v_buffer, loc)
    with pytest.raises(ValueError, match=r"v_buffer: got strides \[0, 6, 1\]"):
        write_kv(k, v, k_buffer, poisoned(1, 2, 6).expand(9, 2, 6), loc)
    assert torch.equal(before.nan_to_num(7), k_buffer.nan_to_num(7)), "nothing is written on error"


@pytest.mark.parametrize("dtype", MERGE)
def test_merge_states(model, dtype):
    """Casebook P02, P20."""
    o, lse = torch.randn(3, 4, 2, 8).to(dtype), torch.randn(3, 4, 2)
    lse[1, 0], lse[:, 1], lse[1:, 2], lse[:2, 3] = -math.inf, -math.inf, -math.inf, -math.inf
    o[(lse == -math.inf)] = math.nan
    expected = reference.merge(as_numpy(o), as_numpy(lse))
    out, out_lse = merge_states(o, lse)
    assert_close(out, expected[0], MERGE[dtype])
    assert_lse_close(out_lse, expected[1], MERGE[dtype])
    pair, pair_lse = merge_state(o[0], lse[0], o[2], lse[2])
    expected = reference.merge(as_numpy(o[::2]), as_numpy(lse[::2]))
    assert_close(pair, expected[0], MERGE[dtype])
    assert_lse_close(pair_lse, expected[1], MERGE[dtype])


def test_merge_of_nothing(model):
    """No token: empty results; no state, head or dimension: refused."""
    out, lse = merge_states(torch.zeros(2, 0, 3, 4), torch.zeros(2, 0, 3))
    assert out.shape == (0, 3, 4) and lse.shape == (0, 3)
    for shape in ((0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)):
        with pytest.raises(ValueError, match="o: got"):
            merge_states(torch.zeros(shape), torch.zeros(shape[:3]))
    with pytest.raises(TypeError, match="o: got list"):
        merge_states([1], torch.zeros(1, 1, 1))


# ---- plans


def test_plan_is_reused_and_calls_plan_nothing(model):
    batch = make_decode_batch([5, 40, 0])
    plan = plan_decode(batch.seq_lens, device="cpu", **SIZES)
    out = batch.out()
    pointers = set()
    for _ in range(2):
        check_decode(batch, plan=plan)
        decode_attention(*batch.decode_arguments(), out=out, plan=plan)
        arguments = model.calls[-1][1]
        pointers.add(tuple(a.data_ptr() for a in arguments if isinstance(a, torch.Tensor)))
    assert len(pointers) == 1, "a call with plan= and out= allocates nothing"
    check_decode(batch, plan=plan, window=3)  # another window: another list, the first stays
    check_decode(batch, plan=plan)


def test_plan_update(model):
    first, second = make_decode_batch([5, 40]), make_decode_batch([9, 3, 77, 1])
    plan = plan_decode(first.seq_lens, device="cpu", **SIZES)
    check_decode(first, plan=plan)
    plan.update(second.seq_lens)
    check_decode(second, plan=plan)
    one, two = make_paged_batch([5], [4]), make_paged_batch([0, 20], [7, 3])
    plan = plan_extend(one.seq_lens, one.extend_seq_lens, device="cpu", **SIZES)
    check_extend(one, plan=plan)
    plan.update(two.seq_lens, extend_seq_lens=two.extend_seq_lens)
    check_extend(two, plan=plan)
    with pytest.raises(ValueError, match="extend_seq_lens"):
        plan.update(two.seq_lens)


def test_plan_buffers_keep_addresses_and_refuse_what_does_not_fit(model):
    buffers = PlanBuffers.allocate(items=3, rows=1, partials=1, num_qo_heads=4, head_dim_vo=8, device="cpu")
    first, second = make_decode_batch([5, 4]), make_decode_batch([9, 3, 7])
    plan = plan_decode(first.seq_lens, device="cpu", buffers=buffers, **SIZES)
    check_decode(first, plan=plan)
    plan.update(second.seq_lens)
    check_decode(second, plan=plan)
    assert model.calls[-1][1][6].data_ptr() == buffers.items.data_ptr()
    with pytest.raises(ValueError, match=r"buffers: too small.*got \(3, 1, 1\), needed \(4, 0, 0\)"):
        plan.update(torch.tensor([1, 2, 3, 4]))
    check_decode(second, plan=plan)
    with pytest.raises(ValueError, match="make another plan"):
        decode_attention(*second.decode_arguments(), plan=plan, window=2)
    with pytest.raises(ValueError, match=r"buffers.part_o: got \[1, 4, 8\]"):
        plan_decode(first.seq_lens, device="cpu", buffers=buffers, **(SIZES | {"head_dim_vo": 6}))


@pytest.mark.parametrize(("change", "message"), [
    ({"num_qo_heads": 8}, "num_qo_heads = 8, expected 4"),
    ({"num_kv_heads": 1}, "num_kv_heads = 1, expected 2"),
    ({"head_dim_qk": 16}, "head_dim_qk = 16, expected 8"),
    ({"head_dim_vo": 16}, "head_dim_vo = 16, expected 8"),
    ({"causal": False}, "causal = False, expected True"),
    ({"window": 7}, "window = 7, expected"),
])  # fmt: skip
def test_plan_that_does_not_fit(model, change, message):
    batch = make_paged_batch([5], [4])
    plan = plan_extend(batch.seq_lens, batch.extend_seq_lens, device="cpu", **(SIZES | change))
    with pytest.raises(ValueError, match=f"plan: made for {message}"):
        extend_attention(*batch.extend_arguments(), plan=plan)


def test_plan_of_another_batch_or_phase(model):
    batch = make_paged_batch([5], [4])
    decode = plan_decode([9], device="cpu", **SIZES)
    with pytest.raises(ValueError, match="made by plan_decode"):
        extend_attention(*batch.extend_arguments(), plan=decode)
    with pytest.raises(ValueError, match="batch = 2, expected 1"):
        extend_attention(*batch.extend_arguments(), plan=plan_extend([9, 1], [4, 1], device="cpu", **SIZES))
    with pytest.raises(ValueError, match=r"seq_lens\[0\]: got 9, expected the length that the plan"):
        extend_attention(*batch.extend_arguments(), plan=plan_extend([8], [4], device="cpu", **SIZES))
    with pytest.raises(ValueError, match="batch_invariant"):
        decode_attention(*make_decode_batch([9]).decode_arguments(), plan=decode, batch_invariant=True)
    with pytest.raises(ValueError, match="q: got 4 rows, expected at least 6"):
        extend_attention(*batch.extend_arguments(), plan=plan_extend([9], [6], device="cpu", **SIZES))


@pytest.mark.parametrize(("arguments", "message"), [
    ({"seq_lens": [-1]}, "seq_lens: got values -1"),
    ({"seq_lens": [[1]]}, "seq_lens: got shape"),
    ({"num_qo_heads": 3}, "num_qo_heads: got 3, expected a multiple"),
    ({"head_dim_qk": 0}, "head_dim_qk: got 0"),
])  # fmt: skip
def test_plan_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_decode(**({"seq_lens": [4], "device": "cpu"} | SIZES | arguments))
    with pytest.raises(TypeError, match=r"seq_lens: got float"):
        plan_decode([1.5], device="cpu", **SIZES)


# ---- errors


WRONG = [
    ("q", lambda x: x[0], ValueError, r"q: got shape \[4, 8\]"),
    ("q", lambda x: None, TypeError, "q: got NoneType"),
    ("q", lambda x: x[:1], ValueError, "q: got 1 rows, expected one per request"),
    ("q", lambda x: x[:, :3], ValueError, "q: got 3 heads, expected a multiple of the 2 KV heads"),
    ("q", lambda x: x.double(), TypeError, "q: got torch.float64"),
    ("q", lambda x: x.half(), TypeError, "k_buffer: got torch.float32, expected torch.float16"),
    ("q", lambda x: x[..., :7], ValueError, r"k_buffer: got shape \[22, 2, 8\], expected \[22, 2, 7\]"),
    ("q", lambda x: x.requires_grad_(), ValueError, "q: requires a gradient"),
    ("k_buffer", lambda x: x.to(torch.float8_e4m3fn), NotImplementedError, "k_buffer.*fp8"),
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
    ({"k_scale": 0.5}, NotImplementedError, "k_scale"),
    ({"v_scale": 2.0}, NotImplementedError, "v_scale"),
    ({"sinks": torch.zeros(3)}, ValueError, "sinks: got shape"),
    ({"sinks": torch.zeros(4, dtype=torch.float16)}, TypeError, "sinks: got torch.float16"),
    ({"out": torch.zeros(2, 4, 7)}, ValueError, "out: got shape"),
    ({"out": torch.zeros(2, 4, 8).half()}, TypeError, "out: got torch.float16"),
    ({"kv_start": torch.zeros(3, dtype=torch.int32)}, ValueError, "kv_start: got shape"),
    ({"kv_lens": torch.ones(2, dtype=torch.int32), "window": 2}, ValueError, "window"),
    ({"key": torch.zeros(2, 2, 8)}, ValueError, "key, value, loc"),
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


def test_tree_mask_and_half_of_k_v(model):
    batch = make_paged_batch([5], [4])
    with pytest.raises(NotImplementedError, match="tree_mask"):
        extend_attention(*batch.extend_arguments(), tree_mask=torch.ones(16, dtype=torch.bool))
    batch.v = None
    with pytest.raises(ValueError, match="k, v: got one of the two"):
        extend_attention(*batch.extend_arguments())


def test_scales_of_one_are_served(model):
    batch = make_decode_batch([5])
    assert torch.equal(
        decode_attention(*batch.decode_arguments(), k_scale=1.0, v_scale=1), decode_attention(*batch.decode_arguments())
    )


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


def test_page_size_promise_kept(model):
    check_decode(make_decode_batch([1, 7, 8, 9, 33], page_size=4, kv_starts=[0, 1, 2, 3, 4]), page_size=4,
                 kv_start=torch.tensor([0, 1, 2, 3, 4]))  # fmt: skip


# ---- which module


def test_general_module_serves_with_one_warning(use_model, caplog):
    model = use_model(special=False)
    batch = make_decode_batch([5])
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        decode_attention(*batch.decode_arguments())
        decode_attention(*batch.decode_arguments())
    assert model.names() == ["paged_decode-f32-general"] * 2
    (record,) = caplog.records
    assert "paged_decode-f32-g2-d8" in record.getMessage() and "tilewright build" in record.getMessage()


def test_strict_refuses_the_general_module(use_model, monkeypatch):
    use_model(special=False)
    monkeypatch.setenv("TILEWRIGHT_STRICT", "1")
    with pytest.raises(tilewright.MissingModuleError, match="paged_decode-f32-g2-d8"):
        decode_attention(*make_decode_batch([5]).decode_arguments())


def test_no_module_at_all(use_model):
    use_model(special=False, general=False)
    with pytest.raises(tilewright.MissingModuleError):
        decode_attention(*make_decode_batch([5]).decode_arguments())


def test_batch_invariant_items(use_model, monkeypatch):
    """Casebook P40: the items of a request are the same alone and in any company, at any thread count."""
    columns = []
    for threads, others in itertools.product((1, 8), ([], [3, 500])):
        model = use_model(chunk=8, min_split=8)
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        batch = make_decode_batch([*others, 2100], num_qo_heads=1, num_kv_heads=1, dim=2)
        plan = plan_decode(batch.seq_lens, num_qo_heads=1, num_kv_heads=1, head_dim_qk=2, head_dim_vo=2, device="cpu",
                           batch_invariant=True)  # fmt: skip
        decode_attention(*batch.decode_arguments(), plan=plan, batch_invariant=True)
        items = model.calls[0][1][6]
        columns.append(sorted(items[items[:, 0] == len(others)][:, 3:6].tolist()))
    assert all(each == columns[0] for each in columns) and len(columns[0]) == 2


def test_host_overhead(monkeypatch):
    """One decode call at batch 1 with plan= and out= costs the host little (best of rounds, a wide bound)."""
    batch = make_decode_batch([5], num_qo_heads=32, num_kv_heads=8, dim=128, dtype=torch.bfloat16)
    kernel = dispatch.Kernel.__new__(dispatch.Kernel)
    kernel.run, kernel.tiling = (lambda *_: None), dispatch.Tiling(1, 256, 512)
    kernel.cut_next_loop = lambda _: None
    monkeypatch.setattr("tilewright.runtime.paged_call.kernel", lambda *_: kernel)
    plan = plan_decode(batch.seq_lens, num_qo_heads=32, num_kv_heads=8, head_dim_qk=128, head_dim_vo=128, device="cpu")
    arguments, out = batch.decode_arguments(), batch.out()
    best = {}
    for forget in (True, False):
        rounds = []
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(50):
                if forget:
                    plan.calls.clear()
                decode_attention(*arguments, out=out, plan=plan)
            rounds.append((time.perf_counter() - start) / 50)
        best[forget] = min(rounds)
    assert best[False] < 60e-6, f"{best[False] * 1e6:.1f} us"
    assert best[False] < 0.8 * best[True], "checks that an earlier call has passed are not made again"


# What is wrong with a call, given the arguments of a right one.
WRONG = {
    "q: dtype": lambda a: {"q": a["q"].double()},
    "q: rows": lambda a: {"q": a["q"][:1]},
    "q: gradient": lambda a: {"q": a["q"].clone().requires_grad_()},
    "q: no tensor": lambda a: {"q": a["q"].numpy()},
    "k_buffer: dtype": lambda a: {"k_buffer": a["k_buffer"].half()},
    "k_buffer: heads": lambda a: {"k_buffer": a["k_buffer"][:, :1]},
    "v_buffer: rank": lambda a: {"v_buffer": a["v_buffer"][0]},
    "req_to_token: dtype": lambda a: {"req_to_token": a["req_to_token"].float()},
    "req_pool_indices: batch": lambda a: {"req_pool_indices": a["req_pool_indices"][:1]},
    "seq_lens: other lengths": lambda a: {"seq_lens": a["seq_lens"] + 1},
    "out: shape": lambda a: {"out": a["out"][..., :4]},
    "out: dtype": lambda a: {"out": a["out"].half()},
    "out: shared memory": lambda a: {"out": a["out"][:1].expand_as(a["out"])},
    "out: gradient": lambda a: {"out": a["out"].clone().requires_grad_()},
    "window": lambda a: {"window": -1},
    "logit_cap": lambda a: {"logit_cap": -1.0},
    "sm_scale": lambda a: {"sm_scale": math.nan},
    "sinks": lambda a: {"sinks": torch.zeros(3)},
    "page_size": lambda a: {"page_size": 0},
    "kv_start": lambda a: {"kv_start": torch.zeros(1, dtype=torch.int32)},
    "batch_invariant": lambda a: {"batch_invariant": True},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_remembered_call_is_refused_as_a_first_one(model, name):
    batch = make_decode_batch([5, 3])
    names = ("q", "k_buffer", "v_buffer", "req_to_token", "req_pool_indices", "seq_lens")
    right = {"out": batch.out(), **dict(zip(names, batch.decode_arguments(), strict=True))}
    wrong = right | WRONG[name](right)

    def planned():
        return plan_decode(batch.seq_lens, num_qo_heads=4, num_kv_heads=2, head_dim_qk=8, head_dim_vo=8, device="cpu")

    with pytest.raises((ValueError, TypeError)) as first:
        decode_attention(**wrong, plan=planned())
    plan = planned()
    decode_attention(**right, plan=plan)
    decode_attention(**right, plan=plan)
    assert len(plan.calls) == 1, "remembered once"
    with pytest.raises(first.type) as second:
        decode_attention(**wrong, plan=plan)
    assert str(second.value) == str(first.value)


def test_a_plan_remembers_the_calls_of_a_few_kinds_of_layers(model):
    batch = make_decode_batch([5, 3])
    plan = plan_decode(batch.seq_lens, num_qo_heads=4, num_kv_heads=2, head_dim_qk=8, head_dim_vo=8, device="cpu")
    for _ in range(3):
        for window in range(20):
            out, lse = decode_attention(*batch.decode_arguments(), window=window, return_lse=True, plan=plan)
            wanted, wanted_lse = batch.expected(decode=True, window=window)
            assert_close(out, wanted, PAGED[torch.float32])
            assert_lse_close(lse, wanted_lse, PAGED[torch.float32])
    assert 1 < len(plan.calls) < 20
    plan.update(batch.seq_lens)
    assert not plan.calls, "they hold for the lengths they were made with"
