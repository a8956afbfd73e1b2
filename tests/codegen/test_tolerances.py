"""The measure that every result is judged by: it must not pass what is wrong."""

import math

import numpy as np
import pytest
import torch

from tilewright.codegen.tolerances import PAGED, Tolerance, errors, excess, lse_error


def test_a_row_is_measured_by_its_own_size():
    expected = np.concatenate([np.full((1, 4, 8), 5.0), np.ones((3, 4, 8))])
    wrong = expected.copy()
    wrong[2, 1, 3] += 0.1
    assert errors(wrong, expected) == pytest.approx((0.1 / math.sqrt(expected.size), 0.1))


def test_a_row_of_almost_nothing_is_measured_by_a_tenth_of_all():
    expected = np.concatenate([np.full((1, 4, 8), 1e-9), np.ones((3, 4, 8))])
    wrong = expected.copy()
    wrong[0, 1, 3] += 0.1
    assert errors(wrong, expected)[1] == pytest.approx(1 / math.sqrt(3 / 4))


def test_a_value_above_its_row_is_measured_by_itself():
    expected = np.full((1, 1, 100), 0.01)
    expected[..., 7] = 10
    wrong = expected.copy()
    wrong[..., 7] += 0.02
    assert errors(wrong, expected)[1] == pytest.approx(0.002)


@pytest.mark.parametrize("break_it", [
    lambda x: x.__setitem__((0, 0), math.nan), lambda x: x.__setitem__((0, 0), math.inf),
    lambda x: x.__imul__(-1), lambda x: x.__setitem__(0, 0),
], ids=["nan", "inf", "sign", "zeros"])  # fmt: skip
def test_what_is_wrong_never_passes(break_it):
    expected = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = expected.clone()
    assert excess(got, expected, PAGED[torch.bfloat16]) == 0
    break_it(got)
    assert not excess(got, expected, PAGED[torch.bfloat16]) <= 1


def test_nan_that_is_expected_passes_and_missing_nan_does_not():
    expected = np.ones((2, 3))
    expected[1, 1] = math.nan
    assert errors(expected, expected) == (0, 0)
    assert all(math.isnan(error) for error in errors(np.ones((2, 3)), expected))
    nothing = np.full((2, 3), math.nan)
    assert errors(nothing, nothing) == (0, 0)


def test_zeros_allow_no_error_and_nothing_has_none():
    assert errors(np.full((2, 3), 1e-30), np.zeros((2, 3))) == (math.inf, math.inf)
    assert errors(np.zeros((2, 3)), np.zeros((2, 3))) == (0, 0)
    assert errors(np.zeros((0, 3)), np.zeros((0, 3))) == (0, 0)


def test_shapes_must_agree():
    for measure in (errors, lse_error):
        with pytest.raises(ValueError, match=r"got shape \[1, 3\], expected \[2, 3\]"):
            measure(np.zeros((1, 3)), np.zeros((2, 3)))


def test_lse_is_measured_in_nats_and_minus_infinity_must_stand_where_it_is_expected():
    expected = np.array([-math.inf, 0.0, 1000.0])
    assert lse_error(np.array([-math.inf, 1e-3, 1000.0]), expected) == pytest.approx(1e-3)
    assert lse_error(np.array([-math.inf, 0, 1001.0]), expected) == pytest.approx(1e-2)
    for wrong in ([0.0, 0, 1000], [-math.inf, math.nan, 1000], [math.inf, 0, 1000], [-math.inf, 0, math.inf]):
        assert math.isnan(lse_error(np.array(wrong), expected))


def test_two_results_may_be_twice_as_far_apart():
    assert Tolerance(1, 2, 3).times(2) == Tolerance(2, 4, 6)
