"""How far a kernel may be from its float64 oracle: the one table, a reason for every row.

rms: root mean square of the error over that of the expected values. max_abs: largest error over the expected value or,
where that is greater, the root mean square of all (a row of few keys has outputs far above it, rounded accordingly).
lse: largest absolute error of an LSE, in nats.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch


class Tolerance(NamedTuple):
    rms: float
    max_abs: float
    lse: float


PAGED = {
    # f32 sums of some thousand products of N(0, 1) and a polynomial exp2 good to about 2e-7: a few ulp of 6e-8 each.
    torch.float32: Tolerance(rms=2e-6, max_abs=2e-5, lse=2e-5),
    # One rounding of the output (2**-9 = 2e-3 at most, 1.2e-3 rms) and at most one of the probabilities.
    torch.bfloat16: Tolerance(rms=4e-3, max_abs=2.5e-2, lse=2e-3),
    # As bf16 with 2**-12.
    torch.float16: Tolerance(rms=5e-4, max_abs=4e-3, lse=3e-4),
}
MERGE = {
    # Two or more f32 states, one exp2 and a division.
    torch.float32: Tolerance(rms=5e-7, max_abs=5e-6, lse=2e-6),
    # The same, rounded once to bf16; states that were bf16 themselves are exact inputs here.
    torch.bfloat16: Tolerance(rms=2e-3, max_abs=1.6e-2, lse=2e-6),
    # The same, rounded once to fp16.
    torch.float16: Tolerance(rms=3e-4, max_abs=2e-3, lse=2e-6),
}
LIGHTNING = {
    # f32 sums within a chunk and an f32 state carried over chunks.
    torch.float32: Tolerance(rms=5e-6, max_abs=1e-4, lse=0.0),
    # One rounding of the output; products of bf16 are exact in f32, scores may be rounded once to bf16.
    torch.bfloat16: Tolerance(rms=5e-3, max_abs=4e-2, lse=0.0),
    # As bf16 with 2**-12.
    torch.float16: Tolerance(rms=7e-4, max_abs=6e-3, lse=0.0),
}
LIGHTNING_STATE = {
    # The state is f32 whatever the inputs; they are exact.
    torch.float32: Tolerance(rms=5e-6, max_abs=1e-4, lse=0.0),
    # A chunk's decayed keys may be rounded to bf16 before the product.
    torch.bfloat16: Tolerance(rms=4e-3, max_abs=4e-2, lse=0.0),
    # The same in fp16.
    torch.float16: Tolerance(rms=5e-4, max_abs=6e-3, lse=0.0),
}
# Logits of the demo's model, max_abs in absolute units.
LOGITS = {
    # f32 rounding through 30 layers: 1e-6 to 3e-6 and 1e-4 between two dense orders of summation, scores are around 8.
    torch.float32: Tolerance(rms=1e-5, max_abs=1e-3, lse=0.0),
    # Each layer rounds to 2**-9, cached keys too: 1.5e-2 to 3e-2 and 1.0 between two dense orders of summation.
    torch.bfloat16: Tolerance(rms=6e-2, max_abs=2.0, lse=0.0),
}


def assert_close(got: torch.Tensor, expected: np.ndarray, tolerance: Tolerance, what: str = "out") -> None:
    """`got` is finite exactly where `expected` is, and within the row's rms and max_abs."""
    actual = got.detach().double().cpu().numpy()
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    assert np.array_equal(np.isnan(actual), np.isnan(expected)), f"{what}: NaN in other places than expected"
    known = ~np.isnan(expected)
    error, wanted = np.abs(actual - expected)[known], expected[known]
    if wanted.size == 0:
        return
    size = float(np.sqrt(np.mean(wanted**2)))
    if size == 0:
        assert error.max() == 0, f"{what}: expected zeros, got {error.max()}"
        return
    rms, worst = float(np.sqrt(np.mean(error**2))) / size, float((error / np.maximum(np.abs(wanted), size)).max())
    assert rms <= tolerance.rms, f"{what}: relative rms error {rms:.2e}, allowed {tolerance.rms:.2e}"
    assert worst <= tolerance.max_abs, f"{what}: largest relative error {worst:.2e}, allowed {tolerance.max_abs:.2e}"


def assert_lse_close(got: torch.Tensor, expected: np.ndarray, tolerance: Tolerance) -> None:
    """The same -inf and NaN, and within the row's lse (absolute up to 10 nats, relative to that beyond)."""
    actual = got.detach().double().cpu().numpy()
    assert actual.shape == expected.shape, f"lse: shape {actual.shape}, expected {expected.shape}"
    assert np.array_equal(np.isneginf(actual), np.isneginf(expected)), "lse: -inf in other places than expected"
    assert np.array_equal(np.isnan(actual), np.isnan(expected)), "lse: NaN in other places than expected"
    finite = np.isfinite(expected)
    if finite.any():
        error = np.abs(actual[finite] - expected[finite]) / np.maximum(np.abs(expected[finite]) / 10, 1)
        assert error.max() <= tolerance.lse, f"lse: error {error.max():.2e}, allowed {tolerance.lse:.2e}"
