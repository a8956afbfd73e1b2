"""How far a kernel may be from its float64 oracle: the one table, a reason for every row, and the one way to measure.

Tests, the search, the benchmarks and the smoke runs all judge by it. Keys are the dtypes of the inputs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch


class Tolerance(NamedTuple):
    """What `errors` and `lse_error` may give at most.

    Attributes:
        rms: root mean square of all errors. max_abs: the largest one. Both are shares, see `errors`.
        lse: largest error of an LSE, in nats, see `lse_error`; 0 where the operator has none.
    """

    rms: float
    max_abs: float
    lse: float = 0.0

    def times(self, factor: float) -> Tolerance:
        """So many times as much, e.g. 2 for two results each of which may be off."""
        return Tolerance(*(factor * limit for limit in self))


PAGED = {
    # f32 sums of some thousand products of N(0, 1) and a polynomial exp2 good to about 2e-7: a few ulp of 6e-8 each.
    torch.float32: Tolerance(rms=2e-6, max_abs=2e-5, lse=2e-5),
    # One rounding of the output (2**-8 = 4e-3 at most, 1.7e-3 rms) and at most one of the probabilities.
    torch.bfloat16: Tolerance(rms=4e-3, max_abs=2.5e-2, lse=2e-3),
    # As bf16 with 2**-11.
    torch.float16: Tolerance(rms=5e-4, max_abs=4e-3, lse=3e-4),
}
MERGE = {
    # Two or more f32 states, one exp2 and a division.
    torch.float32: Tolerance(rms=5e-7, max_abs=5e-6, lse=2e-6),
    # The same, rounded once to bf16: 1.7e-3 rms, more over few values; bf16 states are exact inputs here.
    torch.bfloat16: Tolerance(rms=2.5e-3, max_abs=1.6e-2, lse=2e-6),
    # The same, rounded once to fp16.
    torch.float16: Tolerance(rms=3e-4, max_abs=2e-3, lse=2e-6),
}
LIGHTNING = {
    # f32 sums within a chunk and an f32 state carried over chunks.
    torch.float32: Tolerance(rms=5e-6, max_abs=1e-4),
    # One rounding of the output; products of bf16 are exact in f32, scores may be rounded once to bf16.
    torch.bfloat16: Tolerance(rms=5e-3, max_abs=4e-2),
    # As bf16 with 2**-11.
    torch.float16: Tolerance(rms=7e-4, max_abs=6e-3),
}
LIGHTNING_STATE = {
    # The state is f32 whatever the inputs; they are exact.
    torch.float32: Tolerance(rms=5e-6, max_abs=1e-4),
    # A chunk's decayed keys may be rounded to bf16 before the product.
    torch.bfloat16: Tolerance(rms=4e-3, max_abs=4e-2),
    # The same in fp16.
    torch.float16: Tolerance(rms=5e-4, max_abs=6e-3),
}
# Logits of the demo's model, max_abs in absolute units.
LOGITS = {
    # f32 rounding through 30 layers: 1e-6 to 3e-6 and 1e-4 between two dense orders of summation, scores are around 8.
    torch.float32: Tolerance(rms=1e-5, max_abs=1e-3),
    # Each layer rounds to bf16, cached keys too: 1.5e-2 to 3e-2 and 1.0 between two dense orders of summation.
    torch.bfloat16: Tolerance(rms=6e-2, max_abs=2.0),
}

Values = torch.Tensor | np.ndarray


def _doubles(actual: Values, expected: Values) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in float64, which holds every value of every dtype exactly, on the device of `actual`."""
    got, wanted = (
        (values.detach() if isinstance(values, torch.Tensor) else torch.from_numpy(np.asarray(values))).double()
        for values in (actual, expected)
    )
    if got.shape != wanted.shape:
        raise ValueError(f"actual: got shape {list(got.shape)}, expected {list(wanted.shape)}")
    return got, wanted.to(got.device)


def errors(actual: Values, expected: Values) -> tuple[float, float]:
    """(root mean square, largest) of the errors; NaN where the two are not NaN in the same places.

    An error is a share of the root mean square of the expected values of its own row (first dimension: a token, a
    request): the first rows of a causal result average few values and are many times larger than the last. A row that
    is almost zero beside the others (its sums cancel) is measured by a tenth of their size, and for the largest error
    a value far above its row by itself (it is rounded accordingly). Expected zeros everywhere allow no error at all.

    Raises:
        ValueError: the shapes differ.
    """
    got, wanted = _doubles(actual, expected)
    known = ~wanted.isnan()
    if bool((known == got.isnan()).any()):
        return math.nan, math.nan
    if not bool(known.any()):
        return 0.0, 0.0
    count = known.reshape(len(known), -1).sum(1)
    squares = torch.where(known, wanted, 0.0).reshape(len(known), -1).square().sum(1)
    typical = math.sqrt(float(squares.sum()) / int(count.sum()))
    difference = (got - wanted).abs()[known]
    if typical == 0:
        return (math.inf, math.inf) if bool(difference.any()) else (0.0, 0.0)
    row = (squares / count.clamp(min=1)).sqrt().clamp(min=typical / 10)
    size = row.reshape(-1, *[1] * (wanted.dim() - 1)).expand_as(wanted)[known]
    largest = (difference / torch.maximum(size, wanted[known].abs())).max()
    return float((difference / size).square().mean().sqrt()), float(largest)


def lse_error(actual: Values, expected: Values) -> float:
    """Largest error of natural-log LSEs: absolute up to 10 nats, a tenth of the relative one beyond.

    NaN where the two are not -inf, or not NaN, in the same places.

    Raises:
        ValueError: the shapes differ.
    """
    got, wanted = _doubles(actual, expected)
    finite = wanted.isfinite()
    same = (got == wanted) | (got.isnan() & wanted.isnan()) | (finite & got.isfinite())
    if not bool(same.all()):
        return math.nan
    share = (got - wanted).abs()[finite] / (wanted[finite].abs() / 10).clamp(min=1)
    return float(share.max()) if share.numel() else 0.0


def excess(actual: Values, expected: Values, tolerance: Tolerance) -> float:
    """`errors` as a share of what is tolerated, the greater of the two: right means <= 1; NaN is wrong."""
    rms, largest = errors(actual, expected)
    return worst(rms / tolerance.rms, largest / tolerance.max_abs)


def worst(*shares: float) -> float:
    """The greatest; NaN if any is."""
    return math.nan if any(math.isnan(share) for share in shares) else max(shares)
