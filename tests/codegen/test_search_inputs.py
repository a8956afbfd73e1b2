"""What the search times and verifies candidates with."""

import math

import pytest
import torch
from search_toy import TARGET

from tilewright.codegen.bench import inputs
from tilewright.codegen.bench.inputs import Mix, Paged
from tilewright.schedules.workload import Workload


@pytest.mark.parametrize("operator", inputs.OPERATORS)
def test_the_two_references_agree(operator, tmp_path):
    """The timed case is too large for the oracle's loops: its own float64 reference is held to the oracle here."""
    workload = Workload(operator, "f32", 2 if operator.startswith("paged") else None, 16, 16)
    for lengths in inputs.VERIFIED[operator]:
        oracle, dense = (inputs._case(workload, TARGET, tmp_path, lengths, 3, oracle=slow) for slow in (True, False))
        for name in (
            ("_expected", "_expected_lse") if operator.startswith("paged") else ("_expected", "_expected_state")
        ):
            torch.testing.assert_close(
                getattr(oracle, name), getattr(dense, name), rtol=1e-9, atol=1e-12, equal_nan=True
            )


@pytest.mark.parametrize("operator", ["paged_decode", "paged_extend"])
def test_pools_of_codes_hold_the_numbers_of_the_references(operator, tmp_path):
    """What the kernel is given, times the scales, is what the expected results were computed from."""
    workload = Workload(operator, "bf16", 2, 16, 16, "fp8_e4m3")
    for lengths in inputs.VERIFIED[operator]:
        oracle, dense = (inputs._case(workload, TARGET, tmp_path, lengths, 3, oracle=slow) for slow in (True, False))
        torch.testing.assert_close(oracle._expected, dense._expected, rtol=1e-9, atol=1e-12, equal_nan=True)
        for code, scale, numbers in zip(
            dense._pools[0], dense._scales, (dense._k_buffer, dense._v_buffer), strict=True
        ):
            assert code.dtype == torch.uint8 and scale != 1
            torch.testing.assert_close(
                code.view(torch.float8_e4m3fn).double() * scale, numbers.double(), rtol=0, atol=0, equal_nan=True
            )


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("operator", inputs.OPERATORS)
def test_the_inputs_know_right_from_wrong(operator, dtype, tmp_path):
    workload = Workload(operator, dtype, 4 if operator.startswith("paged") else None, 64, 64)
    for case in inputs.verified(workload, TARGET, tmp_path):
        case.poison()
        assert math.isnan(case.error())
        case._out.copy_(case._expected)
        if operator.startswith("paged"):
            case._lse.copy_(case._expected_lse)
        else:
            case._state.copy_(case._expected_state)
        assert case.error() <= 1
        case._out[-1, 0, 3] += 0.25
        assert case.error() > 1


def test_trees_are_not_searched():
    with pytest.raises(ValueError, match="paged_extend-bf16-g4-d128-tree: there is nothing to search"):
        inputs.check_operator(Workload("paged_extend", "bf16", 4, 128, 128, tree=True))


def test_a_mix_runs_each_batch_so_often_and_is_right_where_all_are(monkeypatch, tmp_path):
    workload = Workload("paged_decode", "bf16", 4, 64, 64)
    mix = Mix(((2, Paged(((16, 1), (0, 1)), 2)), (3, Paged(((7, 1),), 1))))
    case = inputs._case(workload, TARGET, tmp_path, mix, 5)
    runs = []
    monkeypatch.setattr(inputs.PagedCase, "bind", lambda part, root, plan: lambda: runs.append(part))
    case.bind(tmp_path, {"chunk": 16})()
    first, second = runs[0], runs[-1]
    assert runs == [first, first, second, second, second] and first is not second
    assert (case.flops, case.bytes) == (2 * first.flops + 3 * second.flops, 2 * first.bytes + 3 * second.bytes)
    case.poison()
    for part in (first, second):
        assert math.isnan(case.error())
        part._out.copy_(part._expected)
        part._lse.copy_(part._expected_lse)
    assert case.error() <= 1


@pytest.mark.parametrize("operator", ["paged_decode", "paged_extend"])
def test_gpus_get_several_batches(operator):
    workload = Workload(operator, "bf16", 4, 128, 128)
    mix = inputs._lengths(workload, "cuda-sm90a")
    assert len(mix.parts) > 1 and all(times > 0 for times, _ in mix.parts)
    assert len(inputs.describe(workload, "cuda-sm90a").split("; ")) == 2 * len(mix.parts)
    latent = inputs._lengths(Workload("paged_decode", "bf16", 16, 576, 512), "cuda-sm90a")
    assert {part.kv_heads for _, part in latent.parts} == {1}
