"""Decode plans in C (gpu_plan.h) held to the planner's numpy, over a driver that only remembers: no GPU is needed."""

import subprocess
from pathlib import Path

import cuda_toy
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tilewright.codegen.compile import compile_c
from tilewright.runtime import cuda_launcher
from tilewright.runtime.decode_planner import DecodeWork
from tilewright.runtime.planner import OFF, Tiling

pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch has no exchange interface of DLPack"
)


@pytest.fixture(scope="module")
def launcher(tmp_path_factory) -> cuda_launcher.CudaLauncher:
    folder = tmp_path_factory.mktemp("launcher")
    source = Path(cuda_toy.__file__).with_name("fake_cuda.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(folder / "libfake.so"), str(source)], check=True)
    compile_c(cuda_launcher.SOURCE, folder / "liblauncher.so")
    return cuda_launcher.CudaLauncher(folder / "liblauncher.so", folder / "libfake.so")


lengths = st.one_of(
    st.lists(st.integers(0, 300), max_size=40),
    st.lists(st.sampled_from([0, 1, 2047, 2048, 2049, 5000, 70000]), max_size=70),
    st.builds(lambda n, size: [size] * n, st.integers(0, 300), st.integers(0, 9000)),
)
tilings = st.builds(
    Tiling, st.just(1), st.sampled_from([1, 8, 32, 48]), st.sampled_from([0, 1, 20, 256]),
    st.sampled_from([0, 8, 40, 1024]), st.just(1), st.sampled_from([1, 2]), st.sampled_from([0, 1]),
)  # fmt: skip
BATCH = {
    "lens": lengths,
    "tiling": tilings,
    "window": st.sampled_from([OFF, 1, 33, 4000]),
    "heads": st.sampled_from([1, 2, 8]),
    "workers": st.sampled_from([1, 64, 132, 264]),
    "invariant": st.booleans(),
}


def both(launcher, lens, tiling, window, heads, workers, invariant):
    options = {"window": window, "num_kv_heads": heads, "workers": workers, "batch_invariant": invariant}
    kv_lens = np.array(lens, np.int64)
    return DecodeWork(kv_lens, tiling, **options), DecodeWork(kv_lens, tiling, **options, cut=launcher.cut)


@settings(max_examples=400, deadline=None)
@given(**BATCH)
@example(lens=[65536, 500, 500], tiling=Tiling(1, 32, 256), window=OFF, heads=8, workers=264, invariant=False)
def test_cut(launcher, lens, tiling, window, heads, workers, invariant):
    expected, got = both(launcher, lens, tiling, window, heads, workers, invariant)
    assert np.array_equal(got.items, expected.items)
    assert np.array_equal(got.rows, expected.rows)
    assert got.partials == expected.partials
    for grown in (0, 1, 7, 31, 32, 1000):
        kv_lens = np.array(lens, np.int64) + grown
        assert got.reaches(kv_lens) == expected.reaches(kv_lens)


@settings(max_examples=200, deadline=None)
@given(**BATCH, step=st.integers(-1, 40), from_c=st.booleans())
def test_move(launcher, lens, tiling, window, heads, workers, invariant, step, from_c):
    expected, got = both(launcher, lens, tiling, window, heads, workers, invariant)
    if not from_c:
        got, _ = both(launcher, lens, tiling, window, heads, workers, invariant)
    kv_lens = np.array(lens, np.int64) + step
    before = got.items.copy()
    pinned, device = np.full_like(got.items, -7), np.zeros_like(got.items)
    error = launcher.move(kv_lens, *got.arrays, 0, device.ctypes.data, pinned.ctypes.data)
    if not expected.reaches(kv_lens):
        assert error is None
        assert np.array_equal(got.items, before) and (pinned == -7).all()
        return
    assert error is not None
    expected.move(kv_lens)
    assert np.array_equal(got.items, expected.items)
    assert np.array_equal(pinned, expected.items)


def test_what_is_no_array_is_refused(launcher):
    with pytest.raises(TypeError):
        launcher.move(1, 2, 3)
    with pytest.raises((TypeError, BufferError)):
        launcher.move(*[None] * 7, 0, 0, 0)


def test_other_numbers_of_requests_are_not_reached(launcher):
    work = DecodeWork(
        np.array([5, 6]), Tiling(1, 8, 16), window=OFF, num_kv_heads=1, workers=4, batch_invariant=False,
        cut=launcher.cut,
    )  # fmt: skip
    pinned = np.zeros_like(work.items)
    assert launcher.move(np.array([5]), *work.arrays, 0, 0, pinned.ctypes.data) is None
