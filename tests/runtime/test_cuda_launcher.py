"""The launcher of CUDA modules over a driver that only remembers (fake_cuda.c): no GPU is needed."""

import ctypes
import struct
import subprocess
import sys
from pathlib import Path

import cuda_toy
import msgspec
import pytest
import torch
import tvm_ffi

from tilewright.codegen.build import build_launcher
from tilewright.codegen.cuda_export import parse_cuda_module
from tilewright.runtime import manifest
from tilewright.runtime.cuda_launcher import CudaLauncher
from tilewright.runtime.errors import BuildError, IncompatibleModuleError

TARGET = "cuda-sm90a"
claimed = []


class Launch(ctypes.Structure):
    _fields_ = (
        ("device", ctypes.c_int64), ("stream", ctypes.c_int64), ("function", ctypes.c_int64),
        ("attributes", ctypes.c_int64), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint), ("values", ctypes.c_uint64 * 8),
    )  # fmt: skip


class Driver:
    """The fake driver: `launches` so far, and its counters."""

    def __init__(self, path: Path) -> None:
        self.path, self.library = path, ctypes.CDLL(str(path))
        (ctypes.c_int * 8).in_dll(self.library, "fake_arguments")[:4] = [8, 8, 8, 4]

    def number(self, name: str) -> ctypes.c_int:
        return ctypes.c_int.in_dll(self.library, f"fake_{name}")

    @property
    def launches(self) -> list[Launch]:
        return list((Launch * 64).in_dll(self.library, "fake_launches")[: self.number("num_launches").value])


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> Driver:
    path = tmp_path_factory.mktemp("driver") / "libfake_cuda.so"
    source = Path(cuda_toy.__file__).with_name("fake_cuda.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(path), str(source)], check=True)
    return Driver(path)


@pytest.fixture(scope="module")
def launcher(driver, tmp_path_factory) -> CudaLauncher:
    return CudaLauncher(build_launcher(TARGET, tmp_path_factory.mktemp("launcher")), driver.path)


@pytest.fixture(scope="module")
def merge(launcher):
    folder = cuda_toy.built()
    kernels = msgspec.json.decode((folder / "kernels.json").read_bytes(), type=dict[str, manifest.KernelEntry])
    module = launcher.load(folder / "module.so", (folder / "module.cubin").read_bytes(), kernels)
    return module["merge"]


def tensor(address, rows=5, device=0):
    claimed.append(cuda_toy.Claimed(address, rows, device))
    return tvm_ffi.from_dlpack(claimed[-1])


def test_a_launch_reaches_the_driver_as_the_host_code_means_it(merge, driver):
    before = len(driver.launches)
    merge(tensor(0x1000), tensor(0x2000), 1.5)
    (launch,) = driver.launches[before:]
    assert (list(launch.grid), list(launch.block), launch.shared, launch.attributes) == ([5, 1, 1], [64, 1, 1], 0, 0)
    out, x, rows, scale = launch.values[:4]
    assert (out, x, rows) == (0x2000, 0x1000, 5)
    assert struct.unpack("<f", struct.pack("<I", scale)) == (1.5,)


def test_the_tensors_device_decides_and_has_its_own_code(merge, driver):
    """One context and one copy of the code a device, loaded at its first launch, in relaxed capture mode."""
    first = len(driver.launches)
    for device in (3, 1, 3, 0, 1):
        merge(tensor(0x1000, device=device), tensor(0x2000, device=device), 1.0)
    launches = driver.launches[first:]
    assert [launch.device for launch in launches] == [3, 1, 3, 0, 1]
    assert [launch.function for launch in launches] == [1100 + launch.device + 1 for launch in launches]
    assert driver.number("loads").value == len({launch.device for launch in driver.launches})
    assert driver.number("num_modes").value == 2 * driver.number("loads").value
    current = ctypes.c_void_p()
    driver.library.cuCtxGetCurrent(ctypes.byref(current))
    assert not current.value, "the thread's context is left as it was"


def test_work_goes_to_the_stream_of_tvm_ffi(merge, driver):
    with ffi_stream(0x77, device=0):
        merge(tensor(0x1000), tensor(0x2000), 1.0)
    assert driver.launches[-1].stream == 0x77
    merge(tensor(0x1000), tensor(0x2000), 1.0)
    assert driver.launches[-1].stream == 0


def ffi_stream(address, device):
    return tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", device), address)


def test_an_empty_grid_is_nothing_to_do(merge, driver):
    before = len(driver.launches)
    merge(tensor(0x1000, rows=0), tensor(0x2000, rows=0), 1.0)
    assert len(driver.launches) == before


def test_the_drivers_refusal_is_an_error_with_its_words(merge, driver):
    driver.number("fail").value = 700
    with pytest.raises(
        RuntimeError, match="merge_kernel: cuLaunchKernelEx on device 0 failed with 700: the fake driver"
    ):
        merge(tensor(0x1000), tensor(0x2000), 1.0)
    merge(tensor(0x1000), tensor(0x2000), 1.0)


def test_tensors_of_the_cpu_are_refused_by_name(merge):
    with pytest.raises(ValueError, match=r"(?s)x.device_type.*expected cuda"):
        merge(torch.zeros(5, 64), torch.zeros(5, 64), 1.0)


def test_a_missing_driver_is_told(launcher):
    with pytest.raises(IncompatibleModuleError, match="libnothing.so.1: CUDA modules need NVIDIA's driver library"):
        CudaLauncher(launcher.path, "libnothing.so.1")
    with pytest.raises(IncompatibleModuleError, match="driver: cuInit is missing"):
        CudaLauncher(launcher.path, launcher.path)


def test_a_kernel_that_no_launcher_serves_is_told(launcher):
    kernel = manifest.KernelEntry(["handle"], ["warpIdx.x"])
    with pytest.raises(IncompatibleModuleError, match=r"module.so: kernels: got 'warpIdx.x'"):
        launcher.load(cuda_toy.built() / "module.so", b"", {"merge_kernel": kernel})


def test_other_formats_of_the_compiler_are_refused():
    for data in (b"", struct.pack("<Q", 3) + b"ptx", struct.pack("<Q", 5) + b"cubin" + struct.pack("<Q", 1)):
        with pytest.raises(BuildError):
            parse_cuda_module(data)


def test_nothing_of_cuda_is_needed_to_import():
    """Nor does the store ask for a driver before it has a CUDA module to load."""
    code = (
        "import tilewright, sys; from tilewright.runtime import store, dispatch, plan, paged, backend\n"
        "assert not [name for name in open('/proc/self/maps').read().split() if 'libcuda.so' in name]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
