"""Whether tensors share memory, exactly, whatever their strides and device.

A tensor is seen as runs: its dense inner dimensions are one run of bytes, its outer dimensions say where runs start.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor


class _Runs(NamedTuple):
    """In bytes.

    start: of the first run. length: of each. outer: (stride, count) of the other dimensions, largest stride first.
    nested: each stride passes all that lies inside it, so that no two runs meet.
    """

    start: int
    length: int
    outer: list[tuple[int, int]]
    nested: bool

    @property
    def end(self) -> int:
        return self.start + self.length + sum(stride * (count - 1) for stride, count in self.outer)


def _runs(tensor: Tensor) -> _Runs:
    item = tensor.element_size()
    dims = sorted((stride * item, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    length = item
    while dims and dims[0][0] == length:
        length *= dims.pop(0)[1]
    reach, nested = length, True
    for stride, size in dims:
        nested = nested and stride >= reach
        reach += stride * (size - 1)
    return _Runs(int(tensor.storage_offset()) * item, length, dims[::-1], nested)


def _starts(runs: _Runs) -> np.ndarray:
    starts = np.array([runs.start], np.int64)
    for stride, count in runs.outer:
        starts = (starts[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
    return np.sort(starts)


def _meet(distance: int, first: _Runs, second: _Runs, dim: int = 0) -> bool:
    """Whether runs of two nested tensors of equal strides meet, the second starting `distance` after the first."""
    if dim == len(first.outer):
        return -second.length < distance < first.length
    stride, count = first.outer[dim]
    steps = (min(max(distance // stride + n, 1 - second.outer[dim][1]), count - 1) for n in (0, 1))
    return any(_meet(distance - step * stride, first, second, dim + 1) for step in set(steps))


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether a byte belongs to an element of both, two tensors of one storage."""
    if not a.numel() or not b.numel():
        return False
    first, second = _runs(a), _runs(b)
    if first.end <= second.start or second.end <= first.start:
        return False
    if first.nested and second.nested and [s for s, _ in first.outer] == [s for s, _ in second.outer]:
        return _meet(second.start - first.start, first, second)
    starts, others = _starts(first), _starts(second)
    # The last run of the second tensor that starts before a run of the first ends.
    before = np.searchsorted(others, starts + first.length) - 1
    return bool((others[before] + second.length > starts)[before >= 0].any())


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements share a byte."""
    if tensor.is_contiguous() or not tensor.numel():
        return False
    runs = _runs(tensor)
    return not runs.nested and bool((np.diff(_starts(runs)) < runs.length).any())
