"""The lightning oracle against closed forms, and against itself where the maths says two calls are one."""

import math

import numpy as np
import pytest

from tilewright.schedules.lightning_attention import reference

RNG = np.random.default_rng(0)


def inputs(tokens, heads=2, dk=5, dv=3, slots=3):
    q, k = (RNG.standard_normal((tokens, heads, dk)) for _ in range(2))
    return q, k, RNG.standard_normal((tokens, heads, dv)), RNG.standard_normal((slots, heads, dk, dv))


@pytest.mark.parametrize("slope", [0.0, 0.25, 5.0])
def test_equals_the_unrolled_sum(slope):
    """out_t = scale q_t (exp(-a (t + 1)) S + sum_(j <= t) exp(-a (t - j)) k_j^T v_j), the quadratic form."""
    q, k, v, state = inputs(9)
    out, after = reference.extend(q, k, v, state, np.array([1]), np.array([0, 9]), np.full(2, slope), scale=0.5)
    for h in range(2):
        for t in range(9):
            expected = math.exp(-slope * (t + 1)) * q[t, h] @ state[1, h]
            for j in range(t + 1):
                expected = expected + math.exp(-slope * (t - j)) * np.dot(q[t, h], k[j, h]) * v[j, h]
            np.testing.assert_allclose(out[t, h], 0.5 * expected, rtol=1e-12)
        total = math.exp(-slope * 9) * state[1, h]
        total = total + sum(math.exp(-slope * (8 - j)) * np.outer(k[j, h], v[j, h]) for j in range(9))
        np.testing.assert_allclose(after[1, h], total, rtol=1e-12)


def test_no_decay_of_ones_counts_tokens():
    ones = np.ones((7, 1, 1))
    out, after = reference.extend(
        ones, ones, ones, np.zeros((1, 1, 1, 1)), np.array([0]), np.array([0, 7]), np.zeros(1), scale=1.0
    )
    assert out[:, 0, 0].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert after.item() == 7


def test_decode_is_extend_by_one_token():
    q, k, v, state = inputs(3)
    slots, slopes = np.array([2, -1, 0]), np.array([0.1, 1.0])
    out, after = reference.decode(q, k, v, state, slots, slopes)
    for b, slot in enumerate(slots):
        if slot < 0:
            assert (out[b] == 0).all()
            continue
        one, one_after = reference.extend(
            q[b : b + 1], k[b : b + 1], v[b : b + 1], state, np.array([slot]), np.array([0, 1]), slopes
        )
        np.testing.assert_array_equal(out[b], one[0])
        np.testing.assert_array_equal(after[slot], one_after[slot])
    np.testing.assert_array_equal(after[1], state[1])


def test_what_is_not_touched():
    """Slot -1, a request of length 0, rows after the last request, slots of no request."""
    q, k, v, state = inputs(8, slots=4)
    state[2] = math.nan
    out, after = reference.extend(
        q, k, v, state, np.array([-1, 1, 3]), np.array([0, 2, 2, 6]), np.ones(2),
        has_initial_state=np.array([1, 0, 0]),
    )  # fmt: skip
    assert (out[:2] == 0).all()
    assert np.isfinite(out[2:6]).all()
    assert np.isnan(out[6:]).all()
    np.testing.assert_array_equal(after[:3], state[:3])
    assert not np.array_equal(after[3], state[3])


def test_stale_slot_is_ignored_without_initial_state():
    q, k, v, state = inputs(4)
    state[1] = math.nan
    arguments = (np.array([1]), np.array([0, 4]), np.ones(2))
    out, after = reference.extend(q, k, v, state, *arguments, has_initial_state=np.array([0]))
    state[1] = 0
    expected, expected_after = reference.extend(q, k, v, state, *arguments)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(after, expected_after)
