"""Plans: reused, refreshed, refused where they do not fit."""

import itertools

import pytest
import torch
from batches import PLAN_SIZES, make_decode_batch, make_paged_batch
from paged_calls import check

from tilewright.runtime.paged import decode_attention, extend_attention
from tilewright.runtime.plan import plan_decode, plan_extend
from tilewright.runtime.plan_buffers import PlanBuffers


def test_plan_is_reused_and_calls_plan_nothing(model):
    batch = make_decode_batch([5, 40, 0])
    plan = plan_decode(batch.seq_lens, device="cpu", **PLAN_SIZES)
    out = batch.out()
    pointers = set()
    for _ in range(2):
        check(batch, decode=True, plan=plan)
        decode_attention(*batch.decode_arguments(), out=out, plan=plan)
        arguments = model.calls[-1][1]
        pointers.add(tuple(a.data_ptr() for a in arguments if isinstance(a, torch.Tensor)))
    assert len(pointers) == 1, "a call with plan= and out= allocates nothing"
    check(batch, decode=True, plan=plan, window=3)  # another window: another list, the first stays
    check(batch, decode=True, plan=plan)


def test_plan_update(model):
    first, second = make_decode_batch([5, 40]), make_decode_batch([9, 3, 77, 1])
    plan = plan_decode(first.seq_lens, device="cpu", **PLAN_SIZES)
    check(first, decode=True, plan=plan)
    plan.update(second.seq_lens)
    check(second, decode=True, plan=plan)
    one, two = make_paged_batch([5], [4]), make_paged_batch([0, 20], [7, 3])
    plan = plan_extend(one.seq_lens, one.extend_seq_lens, device="cpu", **PLAN_SIZES)
    check(one, plan=plan)
    plan.update(two.seq_lens, extend_seq_lens=two.extend_seq_lens)
    check(two, plan=plan)
    with pytest.raises(ValueError, match="extend_seq_lens"):
        plan.update(two.seq_lens)


def test_plan_buffers_keep_addresses_and_refuse_what_does_not_fit(model):
    buffers = PlanBuffers.allocate(items=3, rows=1, partials=1, num_qo_heads=4, head_dim_vo=8, device="cpu")
    first, second = make_decode_batch([5, 4]), make_decode_batch([9, 3, 7])
    plan = plan_decode(first.seq_lens, device="cpu", buffers=buffers, **PLAN_SIZES)
    check(first, decode=True, plan=plan)
    plan.update(second.seq_lens)
    check(second, decode=True, plan=plan)
    assert model.calls[-1][1][6].data_ptr() == buffers.items.data_ptr()
    with pytest.raises(ValueError, match=r"buffers: too small.*got \(3, 1, 1\), needed \(4, 0, 0\)"):
        plan.update(torch.tensor([1, 2, 3, 4]))
    check(second, decode=True, plan=plan)
    with pytest.raises(ValueError, match="make another plan"):
        decode_attention(*second.decode_arguments(), plan=plan, window=2)
    with pytest.raises(ValueError, match=r"buffers.part_o: got \[1, 4, 8\]"):
        plan_decode(first.seq_lens, device="cpu", buffers=buffers, **(PLAN_SIZES | {"head_dim_vo": 6}))


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
    plan = plan_extend(batch.seq_lens, batch.extend_seq_lens, device="cpu", **(PLAN_SIZES | change))
    with pytest.raises(ValueError, match=f"plan: made for {message}"):
        extend_attention(*batch.extend_arguments(), plan=plan)


def test_plan_of_another_batch_or_phase(model):
    batch = make_paged_batch([5], [4])
    decode = plan_decode([9], device="cpu", **PLAN_SIZES)
    with pytest.raises(ValueError, match="made by plan_decode"):
        extend_attention(*batch.extend_arguments(), plan=decode)
    with pytest.raises(ValueError, match="batch = 2, expected 1"):
        extend_attention(*batch.extend_arguments(), plan=plan_extend([9, 1], [4, 1], device="cpu", **PLAN_SIZES))
    with pytest.raises(ValueError, match=r"seq_lens\[0\]: got 9, expected the length that the plan"):
        extend_attention(*batch.extend_arguments(), plan=plan_extend([8], [4], device="cpu", **PLAN_SIZES))
    with pytest.raises(ValueError, match="batch_invariant"):
        decode_attention(*make_decode_batch([9]).decode_arguments(), plan=decode, batch_invariant=True)
    with pytest.raises(ValueError, match="q: got 4 rows, expected at least 6"):
        extend_attention(*batch.extend_arguments(), plan=plan_extend([9], [6], device="cpu", **PLAN_SIZES))


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"seq_lens": [-1]}, ValueError, "seq_lens: got values -1"),
    ({"seq_lens": [[1]]}, ValueError, "seq_lens: got shape"),
    ({"seq_lens": [[1], [1, 2]]}, ValueError, "seq_lens: got shape"),
    ({"seq_lens": 5}, ValueError, r"seq_lens: got shape \[\], expected \[B\]"),
    ({"seq_lens": [1.5]}, TypeError, "seq_lens: got float64"),
    ({"seq_lens": None}, TypeError, "seq_lens: got object"),
    ({"seq_lens": torch.ones(2, dtype=torch.bfloat16)}, TypeError, "seq_lens: got torch.bfloat16"),
    ({"seq_lens": torch.ones(2, device="meta").int()}, TypeError, "seq_lens: got .* on meta"),
    ({"num_qo_heads": 3}, ValueError, "num_qo_heads: got 3, expected a multiple"),
    ({"num_qo_heads": 4.0}, TypeError, "num_qo_heads: got 4.0, expected an integer"),
    ({"head_dim_qk": 0}, ValueError, "head_dim_qk: got 0"),
    ({"head_dim_vo": None}, TypeError, "head_dim_vo: got None, expected an integer"),
    ({"device": "gpu0"}, ValueError, "device: got 'gpu0'"),
    ({"device": "meta"}, NotImplementedError, "device: got meta"),
    ({"batch_invariant": "yes"}, TypeError, "batch_invariant: got 'yes'"),
    ({"buffers": 3}, TypeError, "buffers: got int, expected PlanBuffers"),
])  # fmt: skip
def test_plan_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        plan_decode(**({"seq_lens": [4], "device": "cpu"} | PLAN_SIZES | arguments))


def test_plan_of_more_rows_than_items_can_name():
    with pytest.raises(ValueError, match="extend_seq_lens: got rows up to 3221225469"):
        plan_extend([2**30 - 1] * 3, [2**30 - 1] * 3, device="cpu", **PLAN_SIZES)


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
