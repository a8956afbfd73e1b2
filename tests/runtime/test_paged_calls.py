"""The public paged functions above the executable interface: options, views, writes, merges."""

import math
import time

import numpy as np
import pytest
import torch
from batches import PLAN_SIZES, as_numpy, make_decode_batch, make_paged_batch, poisoned
from layouts import INDEX_NAMES, INDEXES, LAYOUTS, strided
from paged_calls import check
from tolerances import MERGE, PAGED, assert_close, assert_lse_close

from tilewright.runtime import dispatch
from tilewright.runtime.paged import decode_attention, extend_attention, merge_state, merge_states, write_kv
from tilewright.runtime.plan import plan_decode, plan_extend
from tilewright.schedules.paged_attention import reference

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
    check(make_decode_batch(LENGTHS, dtype=dtype, dim_vo=6), decode=True, **options)


@pytest.mark.parametrize("options", [*OPTIONS, {"causal": False}, {"causal": False, "window": 4}],
                         ids=lambda o: "-".join(o) or "plain")  # fmt: skip
@pytest.mark.parametrize("from_pool", [False, True])
def test_extend(model, options, from_pool):
    check(make_paged_batch([0, 50, 7, 3], [9, 5, 0, 1], dim_vo=6, from_pool=from_pool), **options)


def test_split_contexts_are_merged(use_model, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    model = use_model(chunk=8, min_split=8)
    check(make_decode_batch([90, 3, 0]), decode=True, sinks=torch.tensor([0.5, -math.inf, 3.0, -2.0]))
    check(make_paged_batch([80, 2], [6, 3]), sinks=torch.tensor([0.5, -math.inf, 3.0, -2.0]))
    assert model.names().count("merge-f32") == 2


def test_sinks_in_the_dtype_of_q(model):
    sinks = torch.nn.Parameter(torch.tensor([0.5, -1.0, 3.0, -2.0], dtype=torch.bfloat16))
    batch = make_decode_batch([5, 9], dtype=torch.bfloat16)
    plan = plan_decode(batch.seq_lens, device="cpu", **PLAN_SIZES)
    check(batch, decode=True, sinks=sinks, plan=plan)
    with torch.no_grad():
        sinks += 2  # a remembered conversion must not be served
    check(batch, decode=True, sinks=sinks, plan=plan)


def test_option_has_an_effect(model):
    """Casebook P15, P16: an option that is dropped would agree with the plain call."""
    batch = make_decode_batch([40, 40])
    plain = decode_attention(*batch.decode_arguments())
    for options in OPTIONS[1:5]:
        assert (decode_attention(*batch.decode_arguments(), **options) - plain).abs().max() > 1e-3


def test_negative_prefix_only_without_new_keys(model):
    """Casebook P03."""
    out, lse = check(make_paged_batch([-3, 2, -1], [5, 2, 1], from_pool=True))
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
    check(self_attention, decode=True, kv_start=self_attention.kv_start, window=4)
    check(make_paged_batch([5, 9], [3, 2], kv_starts=[3, 1]), kv_start=torch.tensor([3, 1]))
    encoder = make_decode_batch([6, 30, 0])
    lens = torch.tensor([4, 30, 0])
    check(encoder, decode=True, kv_lens=lens)
    batch = make_paged_batch([7, 25], [3, 6], from_pool=True)
    lens = torch.tensor([4, 30])
    check(batch, kv_lens=lens)
    plan = plan_extend(lens, batch.extend_seq_lens, causal=False, device="cpu", **PLAN_SIZES)
    check(batch, kv_lens=lens, plan=plan)
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


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "dense"])
def test_strided_views(model, layout):
    """Casebook P34, R07, R09."""
    change = LAYOUTS[layout]
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


@pytest.mark.parametrize("index", INDEXES.values(), ids=INDEXES)
def test_index_types(model, index):
    """Casebook P32."""
    batch = make_paged_batch([4, 30], [3, 2], kv_starts=[1, 0])
    for name in INDEX_NAMES:
        setattr(batch, name, index(getattr(batch, name)))
    check(batch, kv_start=batch.kv_start)


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
    check(batch, decode=True, expected=expected, key=key, value=value, loc=loc)
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


def test_scales_of_one_are_served(model):
    batch = make_decode_batch([5])
    assert torch.equal(
        decode_attention(*batch.decode_arguments(), k_scale=1.0, v_scale=1), decode_attention(*batch.decode_arguments())
    )


def test_page_size_promise_kept(model):
    check(make_decode_batch([1, 7, 8, 9, 33], page_size=4, kv_starts=[0, 1, 2, 3, 4]), decode=True, page_size=4,
                 kv_start=torch.tensor([0, 1, 2, 3, 4]))  # fmt: skip


def test_host_overhead(monkeypatch):
    """One decode call at batch 1 with plan= and out= costs the host little (best of rounds, a wide bound)."""
    batch = make_decode_batch([5], num_qo_heads=32, num_kv_heads=8, dim=128, dtype=torch.bfloat16)
    kernel = dispatch.Kernel.__new__(dispatch.Kernel)
    kernel.run, kernel.tiling = (lambda *_: None), dispatch.Tiling(1, 256, 512)
    kernel.cut_next_loop, kernel.bind = (lambda _: None), (lambda *_: None)
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
