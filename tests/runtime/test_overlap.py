"""Shared memory, held to bytes counted one by one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.runtime.overlap import overlap, overlaps_itself


def bytes_of(tensor):
    """The offset of every byte of every element, one by one."""
    offsets = np.array([tensor.storage_offset()])
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        offsets = (offsets[:, None] + np.arange(size) * stride).ravel()
    return (offsets[:, None] * tensor.element_size() + np.arange(tensor.element_size())).ravel().tolist()


@st.composite
def views(draw, base):
    rank = draw(st.integers(0, 4))
    shape = [draw(st.integers(0, 4)) for _ in range(rank)]
    stride = [draw(st.integers(0, 20)) for _ in range(rank)]
    view = base if draw(st.booleans()) else base.view(torch.int16)
    reach = sum(max(size - 1, 0) * step for size, step in zip(shape, stride, strict=True))
    return view.as_strided(shape, stride, draw(st.integers(0, view.numel() - 1 - reach)))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_views_of_one_storage(data):
    base = torch.zeros(400, dtype=torch.int32)
    a, b = data.draw(views(base)), data.draw(views(base))
    assert overlap(a, b) is bool(set(bytes_of(a)) & set(bytes_of(b)))
    assert overlaps_itself(a) is (len(set(bytes_of(a))) < len(bytes_of(a)))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_views_of_equal_strides(data):
    """Parts of one allocation, as interleaved pools are: decided without listing their rows."""
    base = torch.zeros(6, 5, 8)
    parts = []
    for _ in range(2):
        cuts = [sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2))) for size in base.shape]
        parts.append(base[tuple(slice(*cut) for cut in cuts)])
    assert overlap(*parts) is bool(set(bytes_of(parts[0])) & set(bytes_of(parts[1])))


@pytest.mark.timeout(10)
def test_a_large_interleaved_pool_takes_no_time():
    pool = torch.empty((100_000, 8, 128), dtype=torch.int8)
    for _ in range(1000):
        assert not overlap(pool[..., :64], pool[..., 64:])
