"""Bound calls: a planned call like an earlier one runs without Python's checks, one that differs is checked in full."""

import math
from dataclasses import replace

import pytest
import torch
from batches import make_decode_batch, make_paged_batch
from paged_calls import WRONG
from tolerances import PAGED, assert_close

from tilewright.codegen.compile import compile_c
from tilewright.runtime import launcher, paged
from tilewright.runtime.paged import decode_attention, extend_attention
from tilewright.runtime.plan import plan_decode, plan_extend

SIZES = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 8, "head_dim_vo": 8, "device": "cpu"}
SINKS = torch.tensor([0.5, -math.inf, 3.0, -2.0])
OPTIONS = [
    {},
    {"window": 5, "logit_cap": 2.0},
    {"sinks": SINKS, "sm_scale": 0.2},
    {"batch_invariant": True},
]
NAMES = ("q", "k_buffer", "v_buffer", "req_to_token", "req_pool_indices", "seq_lens")


@pytest.fixture(scope="module")
def binder(tmp_path_factory):
    path = tmp_path_factory.mktemp("launcher") / launcher.LIBRARY_NAME
    compile_c(launcher.SOURCE, path)
    return launcher.Launcher(path).bind


@pytest.fixture
def model(use_model, binder, monkeypatch):
    """The model with bound calls; checked mode, which they leave to the full call, is off."""
    monkeypatch.setenv("TILEWRIGHT_CHECK", "0")
    return use_model(binder=binder, min_split=8)


@pytest.fixture
def only_bound(monkeypatch):
    """A function after which a call that is not bound is an error."""

    def refuse(*arguments, **options):
        raise AssertionError("the call was checked in full")

    return lambda: monkeypatch.setattr(paged, "run", refuse)


def again(batch):
    """The same batch in other memory, with other numbers."""
    generator = torch.Generator().manual_seed(7)
    fresh = {name: torch.randn(getattr(batch, name).shape, generator=generator).to(batch.q.dtype)
             for name in ("q", "k_buffer", "v_buffer")}  # fmt: skip
    return replace(batch, **fresh)


@pytest.mark.parametrize("dtype", PAGED)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("given", [True, False], ids=["out", "no out"])
def test_decode(model, only_bound, monkeypatch, dtype, options, given):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    batch = make_decode_batch([90, 1, 7], dtype=dtype)
    plan = plan_decode(batch.seq_lens, **SIZES, batch_invariant=options.get("batch_invariant", False))
    decode_attention(*batch.decode_arguments(), **options, plan=plan, out=batch.out() if given else None)
    assert len(plan.bound) == 1
    only_bound()
    other = again(batch)
    out = other.out() if given else None
    got = decode_attention(*other.decode_arguments(), **options, plan=plan, out=out)
    assert out is None or got is out
    known = {name: value for name, value in options.items() if name != "batch_invariant"}
    assert_close(got, other.expected(decode=True, **known)[0], PAGED[dtype])


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_indices_of_both_types(model, only_bound, index):
    batch = make_decode_batch([9, 1, 7], kv_starts=[0, 3, 2])
    tables = {name: getattr(batch, name).to(index) for name in NAMES[3:]}
    batch = replace(batch, **tables)
    start = torch.tensor([0, 3, 2], dtype=index)
    plan = plan_decode(batch.seq_lens, **SIZES)
    decode_attention(*batch.decode_arguments(), kv_start=start, plan=plan)
    only_bound()
    other = again(batch)
    # Other index tensors of the same sizes are read too.
    other = replace(other, req_to_token=other.req_to_token.clone())
    got = decode_attention(*other.decode_arguments(), kv_start=start.clone(), plan=plan)
    assert_close(got, other.expected(decode=True)[0], PAGED[torch.float32])


def test_new_keys_are_written(model, only_bound):
    batch = make_decode_batch([9, 1, 7])
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    loc = torch.stack(
        [batch.req_to_token[row, n - 1] for row, n in zip(batch.req_pool_indices, [9, 1, 7], strict=True)]
    )
    plan = plan_decode(batch.seq_lens, **SIZES)
    decode_attention(*batch.decode_arguments(), key=key, value=value, loc=loc, plan=plan)
    only_bound()
    other = again(batch)
    got = decode_attention(*other.decode_arguments(), key=key * 2, value=value * 3, loc=loc, plan=plan)
    assert torch.equal(other.k_buffer[loc], key * 2) and torch.equal(other.v_buffer[loc], value * 3)
    assert_close(got, other.expected(decode=True)[0], PAGED[torch.float32])


def test_values_in_the_keys(model, only_bound):
    """MLA: v_buffer is a view of k_buffer and is not written; where it is not, the call is another one."""
    batch = make_decode_batch([9, 1, 7])
    loc, key = batch.req_to_token[batch.req_pool_indices, batch.seq_lens - 1], torch.randn(3, 2, 8)
    plan = plan_decode(batch.seq_lens, **SIZES)

    def call(values):
        arguments = (batch.q, batch.k_buffer, values, *batch.decode_arguments()[3:])
        return decode_attention(*arguments, key=key, value=-key, loc=loc, plan=plan)

    batch.k_buffer = batch.k_buffer.nan_to_num()
    call(batch.k_buffer)
    assert torch.equal(batch.k_buffer[loc], key)
    apart = torch.zeros_like(batch.k_buffer)
    call(apart)
    assert torch.equal(apart[loc], -key)
    assert len(plan.bound) == 1, "of the first one"
    only_bound()
    key = key * 2
    call(batch.k_buffer)
    assert torch.equal(batch.k_buffer[loc], key)


@pytest.mark.parametrize("from_pool", [False, True])
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"causal": False}, {"sinks": SINKS}], ids=str)
def test_extend(model, only_bound, monkeypatch, options, from_pool):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    batch = make_paged_batch([0, 70, 7], [9, 5, 1], from_pool=from_pool)
    planned = {name: options[name] for name in ("window", "causal") if name in options}
    plan = plan_extend(batch.seq_lens, batch.extend_seq_lens, **SIZES, **planned)
    extend_attention(*batch.extend_arguments(), **options, plan=plan)
    assert len(plan.bound) == 1
    only_bound()
    other = replace(batch, q=torch.randn(batch.q.shape), k_buffer=batch.k_buffer.clone())
    out = extend_attention(*other.extend_arguments(), **options, plan=plan)
    assert_close(out, other.expected(decode=False, **options)[0], PAGED[torch.float32])


def test_rows_of_no_request_in_a_new_output_are_zeros(model):
    batch = make_paged_batch([0, 3], [4, 2], from_pool=True)
    batch.extend_seq_lens[0] = 3
    starts = torch.tensor([0, 4])
    plan = plan_extend(batch.seq_lens, batch.extend_seq_lens, starts, **SIZES)
    for _ in range(3):
        out = extend_attention(*batch.extend_arguments(), starts, plan=plan)
        assert (out[3] == 0).all()


@pytest.mark.parametrize("name", [name for name in WRONG if name != "seq_lens: other lengths"])  # of checked mode
def test_a_call_that_differs_is_refused_as_a_first_one(model, name):
    batch = make_decode_batch([5, 3])
    right = {"out": batch.out(), **dict(zip(NAMES, batch.decode_arguments(), strict=True))}
    wrong = right | WRONG[name](right)
    with pytest.raises((ValueError, TypeError)) as first:
        decode_attention(**wrong, plan=plan_decode(batch.seq_lens, **SIZES))
    plan = plan_decode(batch.seq_lens, **SIZES)
    decode_attention(**right, plan=plan)
    assert plan.bound
    with pytest.raises(first.type) as second:
        decode_attention(**wrong, plan=plan)
    assert str(second.value) == str(first.value)


class Strange(torch.Tensor):
    """A subclass may mean anything by its memory."""


@pytest.mark.parametrize(
    "change",
    [
        {"q": lambda t: t.as_subclass(Strange)},
        {"q": lambda t: torch.randn(2, 8, 8)[:, ::2]},
        {"q": torch._neg_view},
        {"k_buffer": lambda t: torch.cat([t, t], 2)[..., :8]},
        {"req_to_token": lambda t: t.long()},
        {"seq_lens": lambda t: t.int()},
        {"window": lambda _: 3},
        {"sinks": lambda _: torch.zeros(4)},
        {"sm_scale": lambda _: 0.1},
        {"logit_cap": lambda _: 1.0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_is_not_alike_takes_the_full_call(model, monkeypatch, change):
    batch = make_decode_batch([5, 3])
    right = dict(zip(NAMES, batch.decode_arguments(), strict=True))
    plan = plan_decode(batch.seq_lens, **SIZES)
    decode_attention(**right, plan=plan)
    full = []
    run = paged.run
    monkeypatch.setattr(paged, "run", lambda *arguments, **options: full.append(1) or run(*arguments, **options))
    decode_attention(**right, plan=plan)
    assert not full
    decode_attention(**right | {name: make(right.get(name)) for name, make in change.items()}, plan=plan)
    assert full


def test_an_output_over_the_query_is_refused(model):
    batch = make_decode_batch([5, 3])
    plan = plan_decode(batch.seq_lens, **SIZES)
    decode_attention(*batch.decode_arguments(), out=batch.out(), plan=plan)
    assert plan.bound
    with pytest.raises(ValueError, match="out: shares memory with q"):
        decode_attention(*batch.decode_arguments(), out=batch.q, plan=plan)


def test_checked_mode_takes_the_full_call(model, monkeypatch):
    batch = make_decode_batch([5, 3])
    plan = plan_decode(batch.seq_lens, **SIZES)
    decode_attention(*batch.decode_arguments(), plan=plan)
    monkeypatch.setenv("TILEWRIGHT_CHECK", "1")
    batch.req_to_token[batch.req_pool_indices[0], 0] = 10**6
    with pytest.raises(ValueError, match="req_to_token"):
        decode_attention(*batch.decode_arguments(), plan=plan)


def test_another_batch_forgets_them(model):
    batch = make_decode_batch([5, 3])
    plan = plan_decode(batch.seq_lens, **SIZES)
    decode_attention(*batch.decode_arguments(), plan=plan)
    assert plan.bound
    plan.update([3, 5])
    assert not plan.bound


def test_a_kernel_that_fails_says_so(model, monkeypatch):
    batch = make_decode_batch([5, 3])
    plan = plan_decode(batch.seq_lens, **SIZES)
    decode_attention(*batch.decode_arguments(), plan=plan)
    batch.k_buffer.fill_(1.0)
    monkeypatch.setattr("abi_model._attend", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        decode_attention(*batch.decode_arguments(), plan=plan)


def test_a_gradient_that_nobody_wants_is_no_difference(model, only_bound):
    batch = make_decode_batch([5, 3])
    plan = plan_decode(batch.seq_lens, **SIZES)
    expected = decode_attention(*batch.decode_arguments(), plan=plan)
    batch.q.requires_grad_()
    with pytest.raises(ValueError, match="q: requires a gradient"):
        decode_attention(*batch.decode_arguments(), plan=plan)
    only_bound()
    with torch.no_grad():
        assert torch.equal(decode_attention(*batch.decode_arguments(), plan=plan), expected)
