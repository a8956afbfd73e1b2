"""Load a CUDA module and connect its launches to the driver (cuda_launcher.c).

Needs the driver library (libcuda.so.1), which torch's CUDA builds have loaded, and nothing else of CUDA. As with CPU
modules, only the module's own pointers are written: no symbol is registered with tvm-ffi.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.runtime.bound_call import HEADER, Binder
from tilewright.runtime.errors import IncompatibleModuleError
from tilewright.runtime.launcher import address_of, open_module
from tilewright.runtime.manifest import KernelEntry

if TYPE_CHECKING:
    import tvm_ffi

SOURCE = Path(__file__).with_name("cuda_launcher.c")
SOURCES = (SOURCE, HEADER, SOURCE.with_name("gpu_plan.h"))
DRIVER = "libcuda.so.1"
# The module's pointer -> the launcher's function.
_POINTERS = {
    "__TVMFFIEnvModLookupFromImports": "tilewright_cuda_lookup",
    "__TVMFFIFunctionCall": "tilewright_cuda_call",
    "__TVMFFIHandleInitOnce": "tilewright_cuda_once",
}
SERVED_SYMBOLS = frozenset(_POINTERS)
# In the order of Bindings in cuda_launcher.c.
_FFI_FUNCTIONS = ("TVMFFIErrorSetRaisedFromCStr", "TVMFFIEnvGetStream")
_DRIVER_FUNCTIONS = (
    *("cuInit", "cuGetErrorString", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxGetCurrent"),
    *("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"),
    *("cuLaunchKernelEx", "cuThreadExchangeStreamCaptureMode", "cuMemcpyHtoDAsync_v2"),
    "cuEventRecord",
)
# What a manifest says of a kernel -> the letters of cuda_launcher.c.
ARGUMENTS = {"handle": "p", "int64": "l", "int32": "i", "bool": "b", "float32": "f", "float64": "d"}
LAUNCH = {
    **{f"{name}.{axis}": str(3 * n + m) for n, name in enumerate(("blockIdx", "threadIdx", "clusterCtaIdx"))
       for m, axis in enumerate("xyz")},
    "dynamic_shared": "s",
    "programmatic": "P",
    "cooperative": "C",
}  # fmt: skip


class CudaLauncher:
    """The launcher library of CUDA modules, bound to the driver and to libtvm_ffi.

    The file must have been verified: it is executed.
    """

    def __init__(self, path: Path, driver: str | Path = DRIVER) -> None:
        """Open and bind the library at `path`.

        Raises:
            IncompatibleModuleError: there is no driver, or it or apache-tvm-ffi lacks a function.
        """
        from tvm_ffi.libinfo import find_libtvm_ffi

        self.path = path
        try:
            libcuda = ctypes.CDLL(str(driver), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as error:
            raise IncompatibleModuleError(
                f"{driver}: CUDA modules need NVIDIA's driver library, it cannot be opened: {error}"
            ) from None
        self._library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        ffi = ctypes.CDLL(find_libtvm_ffi())
        addresses = []
        for library, what, names in ((ffi, "apache-tvm-ffi", _FFI_FUNCTIONS), (libcuda, "driver", _DRIVER_FUNCTIONS)):
            for name in names:
                address = address_of(library, name)
                if address is None:
                    raise IncompatibleModuleError(f"{what}: {name} is missing; CUDA modules need CUDA 12 or newer")
                addresses.append(address)
        self._library.tilewright_cuda_bind((ctypes.c_void_p * len(addresses))(*addresses))
        self._functions = {pointer: address_of(self._library, name) for pointer, name in _POINTERS.items()}
        if address_of(self._library, "tilewright_bound_make") is None:
            raise IncompatibleModuleError(f"{path}: it is of another tilewright; rebuild it")
        locked = ctypes.PyDLL(str(path))
        binder = Binder(locked, ffi)
        self.bind = binder.bind
        function = locked.tilewright_cuda_plan_function
        function.restype = ctypes.py_object
        self.send: Callable[..., int] | None = function(0) if binder.connected else None
        self.move: Callable[..., int | None] | None = function(1) if binder.connected else None
        self.record: Callable[..., int] | None = function(3) if binder.connected else None
        self.cut: Callable[..., tuple[int, int, int, int] | None] | None = function(2) if binder.connected else None
        self._cubins: list[ctypes.Array] = []

    def cut_next_loop(self, tasks: int) -> None:
        """Nothing: of `launcher.Launcher`, for loops on the CPU."""

    def load(self, path: Path, cubin: bytes, kernels: Mapping[str, KernelEntry]) -> tvm_ffi.Module:
        """Load the host code at `path` and give it its kernels. It stays loaded until the process ends.

        Nothing is put on a device before the first call there. All must have been verified: it is executed.

        Args:
            path: of the module.
            cubin: the machine code of its kernels.
            kernels: how they are launched, from its manifest.

        Raises:
            IncompatibleModuleError: the file cannot be opened as a module, or a kernel wants what no launcher gives.
        """
        names = [name.encode() for name in kernels]
        try:
            arguments = ["".join(ARGUMENTS[item] for item in entry.arguments).encode() for entry in kernels.values()]
            launch = ["".join(LAUNCH[item] for item in entry.launch).encode() for entry in kernels.values()]
        except KeyError as error:
            raise IncompatibleModuleError(
                f"{path}: kernels: got {error}, which this tilewright cannot launch; build the module again"
            ) from None
        module, library = open_module(path)
        image = ctypes.create_string_buffer(cubin, len(cubin))
        self._cubins.append(image)  # the driver reads it at the first call on a device
        texts = ctypes.c_char_p * len(names)
        try:
            context = ctypes.c_void_p.in_dll(library, "__tvm_ffi__library_ctx")
            slots = {pointer: ctypes.c_void_p.in_dll(library, pointer) for pointer in _POINTERS}
        except ValueError as error:
            raise IncompatibleModuleError(f"{path}: not a CUDA module: {error}") from None
        if self._library.tilewright_cuda_add(
            context, image, len(names), texts(*names), texts(*arguments), texts(*launch)
        ):
            raise MemoryError(f"{path}: no memory for its kernels")
        for pointer, slot in slots.items():
            slot.value = self._functions[pointer]
        return module
