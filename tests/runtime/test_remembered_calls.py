"""Checks that a plan remembers: a call like an earlier one is not checked again, one that differs is, and as before."""

import math

import pytest
import torch
from batches import make_decode_batch
from tolerances import PAGED, assert_close, assert_lse_close

from tilewright.runtime.paged import decode_attention
from tilewright.runtime.plan import plan_decode

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
