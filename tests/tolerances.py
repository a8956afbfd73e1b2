"""Asserts by the one table of tolerances, `tilewright.codegen.tolerances`; its rows are named again for the tests."""

from __future__ import annotations

import numpy as np
import torch

from tilewright.codegen.tolerances import (
    LIGHTNING,
    LIGHTNING_STATE,
    LOGITS,
    MERGE,
    PAGED,
    Tolerance,
    errors,
    lse_error,
)

__all__ = ["LIGHTNING", "LIGHTNING_STATE", "LOGITS", "MERGE", "PAGED", "Tolerance", "assert_close", "assert_lse_close"]


def assert_close(got: torch.Tensor, expected: np.ndarray, tolerance: Tolerance, what: str = "out") -> None:
    """`got` is NaN exactly where `expected` is, and within the row's rms and max_abs."""
    rms, largest = errors(got, expected)
    assert rms <= tolerance.rms, f"{what}: rms error {rms:.2e}, allowed {tolerance.rms:.2e}"
    assert largest <= tolerance.max_abs, f"{what}: largest error {largest:.2e}, allowed {tolerance.max_abs:.2e}"


def assert_lse_close(got: torch.Tensor, expected: np.ndarray, tolerance: Tolerance) -> None:
    """The same -inf and NaN, and within the row's lse."""
    error = lse_error(got, expected)
    assert error <= tolerance.lse, f"lse: error {error:.2e}, allowed {tolerance.lse:.2e}"
