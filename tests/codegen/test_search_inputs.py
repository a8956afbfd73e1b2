"""What the search times and verifies candidates with."""

import math

import pytest
import torch
from search_toy import TARGET

from tilewright.codegen.bench import inputs
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
