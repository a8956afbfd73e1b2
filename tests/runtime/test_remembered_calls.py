"""Checks that a plan remembers: a call like an earlier one is not checked again, one that differs is, and as before."""

import pytest
import torch
from batches import make_decode_batch
from paged_calls import WRONG
from tolerances import PAGED, assert_close, assert_lse_close

from tilewright.runtime.paged import decode_attention
from tilewright.runtime.plan import plan_decode


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
