"""Decode calls that are remembered by plans on GPUs, played on the CPU: the same results and the same refusals."""

import pytest
import torch
from batches import make_decode_batch
from tolerances import PAGED, assert_close

from tilewright.runtime import gpu_work, paged_call
from tilewright.runtime.paged import decode_attention
from tilewright.runtime.plan import plan_decode

SIZES = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 8, "head_dim_vo": 8, "device": "cpu"}


@pytest.fixture
def checks(use_model, monkeypatch):
    """Plans are made as for a GPU; a list that grows with every call that goes through the checks."""
    monkeypatch.setattr(gpu_work, "multiprocessors", lambda device: 8)
    monkeypatch.setenv("TILEWRIGHT_CHECK", "0")
    use_model(padding=True)
    seen = []
    sizes = paged_call.sizes
    monkeypatch.setattr(
        paged_call, "sizes", lambda name, *rest: (seen.append(name) if name == "q" else None) or sizes(name, *rest)
    )
    return seen


def call(batch, plan, *, new=False, **options):
    out = None if new else batch.out()
    returned = decode_attention(*batch.decode_arguments(), plan=plan, out=out, **options)
    assert new or returned is out
    return returned


def test_other_queries_of_the_same_pools_are_not_checked_again(checks):
    """New q, out and index tensors of the same form, over steps that move the plan on."""
    batch = make_decode_batch([90, 5, 40])
    plan = plan_decode([88, 3, 38], **SIZES)
    for step in range(3):
        batch.seq_lens = torch.tensor([88, 3, 38]) + step
        plan.update(batch.seq_lens)
        for seed in range(2):
            batch.q = torch.randn(batch.q.shape, generator=torch.Generator().manual_seed(seed))
            batch.req_pool_indices = batch.req_pool_indices.clone()
            for new in (False, True):
                out = call(batch, plan, new=new)
                assert_close(out, batch.expected(decode=True)[0], PAGED[torch.float32])
    assert checks == ["q"]


def test_other_options_pools_and_batches_are_calls_of_their_own(checks):
    batch, other = make_decode_batch([90, 5]), make_decode_batch([90, 5], seed=1)
    plan = plan_decode(batch.seq_lens, **SIZES)
    for _ in range(2):
        for each in (batch, other):
            for options in ({}, {"window": 5}, {"logit_cap": 1.5}, {"sm_scale": 0.2}):
                out = call(each, plan, **options)
                assert_close(out, each.expected(decode=True, **options)[0], PAGED[torch.float32])
    assert len(checks) == 8
    plan.update([7])
    smaller = make_decode_batch([7])
    for _ in range(2):
        assert_close(call(smaller, plan), smaller.expected(decode=True)[0], PAGED[torch.float32])
    assert len(checks) == 9
    with pytest.raises(ValueError, match="plan: made for batch = 1, expected 2"):
        call(batch, plan)


def test_what_does_not_fit_is_refused_as_the_first_time(checks):
    batch = make_decode_batch([90, 5])
    plan = plan_decode(batch.seq_lens, **SIZES)
    call(batch, plan)
    arguments, out = batch.decode_arguments(), batch.out()
    for place, wrong, says in (
        (0, batch.q[:1], "q: got 1 rows"), (0, batch.q[..., :4], "k_buffer: got shape"),
        (0, batch.q.double(), "q: got torch.float64"), (4, batch.req_pool_indices[:1], "seq_lens: got shape"),
        (4, batch.req_pool_indices.float(), "req_pool_indices: got torch.float32"), (5, batch.seq_lens[:1], "seq_lens"),
        (0, batch.q.clone().requires_grad_(), "q: requires a gradient"),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=says):
            decode_attention(*arguments[:place], wrong, *arguments[place + 1 :], plan=plan, out=out)
    with pytest.raises(ValueError, match="out: got shape"):
        decode_attention(*arguments, plan=plan, out=out[:, :2])
    with pytest.raises(ValueError, match=r"out.*dense last dimension"):
        decode_attention(*arguments, plan=plan, out=out.mT.contiguous().mT)
    batch.k_buffer.resize_(batch.k_buffer.shape[0], 1, 8)
    with pytest.raises(ValueError, match="v_buffer: got shape"):
        decode_attention(*arguments, plan=plan, out=out)


def test_calls_in_checked_mode_are_checked_every_time(checks, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CHECK", "1")
    batch = make_decode_batch([90, 5])
    plan = plan_decode(batch.seq_lens, **SIZES)
    call(batch, plan), call(batch, plan)
    assert checks == ["q", "q"] and not plan.calls
