"""Load a module file and connect its parallel loops and workspaces to torch's OpenMP pool (launcher.c).

Only the module's own pointers are written: no symbol is registered with tvm-ffi, so other modules of the process,
loaded before or after, with or without TVM's runtime library, run as if tilewright were not there.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.runtime.bound_call import HEADER, Binder
from tilewright.runtime.errors import IncompatibleModuleError

if TYPE_CHECKING:
    from collections.abc import Callable

    import tvm_ffi

LIBRARY_NAME = "liblauncher.so"
SOURCE = Path(__file__).with_name("launcher.c")
SOURCES = (SOURCE, HEADER)

# The module's pointer -> the launcher's function. A module has those that its code needs, possibly none.
_POINTERS = {
    "__TVMBackendParallelLaunch": "tilewright_launch",
    "__TVMBackendParallelBarrier": "tilewright_barrier",
    "__TVMBackendAllocWorkspace": "tilewright_alloc_workspace",
    "__TVMBackendFreeWorkspace": "tilewright_free_workspace",
}
_FUNCTIONS = (*_POINTERS.values(), "tilewright_cut_next_loop", "tilewright_workspace_bytes", "tilewright_bound_make")
PATCHED_SYMBOLS = frozenset(_POINTERS)
# The mangled name is that of at::get_num_threads().
_OMP_FUNCTIONS = ("GOMP_parallel", "_ZN2at15get_num_threadsEv", "omp_in_parallel")
_FFI_FUNCTIONS = (
    "TVMFFIErrorMoveFromRaised",
    "TVMFFIErrorSetRaised",
    "TVMFFIErrorSetRaisedFromCStr",
    "TVMFFIObjectDecRef",
)


def address_of(library: ctypes.CDLL, name: str) -> int | None:
    """Where a function of a library is; None: it has none of that name."""
    try:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    except AttributeError:
        return None


def _open_loaded(path: Path) -> ctypes.CDLL | None:
    """A handle of a library that is in the process already; None where it is not."""
    try:
        return ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


def openmp_functions() -> list[int]:
    """Addresses of _OMP_FUNCTIONS in torch and in the very OpenMP library that its own kernels run on.

    They are looked up through libtorch_cpu's handle: that covers torch's dependencies and nothing else, so another
    libgomp in the process (xgboost brings one) cannot be taken by mistake.

    Raises:
        IncompatibleModuleError: this torch has no GNU-compatible OpenMP.
    """
    import torch

    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch.so"):
        library = _open_loaded(folder / name)
        found = [] if library is None else [address_of(library, function) for function in _OMP_FUNCTIONS]
        addresses = [address for address in found if address]
        if len(addresses) == len(_OMP_FUNCTIONS):
            return addresses
    raise IncompatibleModuleError(
        f"{folder}: torch {torch.__version__} is not built on an OpenMP library with {', '.join(_OMP_FUNCTIONS)}; "
        "CPU modules run on torch's own threads, install a torch wheel for Linux"
    )


def open_module(path: Path) -> tuple[tvm_ffi.Module, ctypes.CDLL]:
    """The module in a file, and the file as a library, in which its pointers can be written.

    Raises:
        IncompatibleModuleError: the file cannot be opened as a module.
    """
    import tvm_ffi

    try:
        return tvm_ffi.load_module(str(path)), ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except (OSError, RuntimeError) as error:
        raise IncompatibleModuleError(f"{path}: the dynamic linker refuses it: {error}") from error


class Launcher:
    """The launcher library of one artifact root, bound to torch's OpenMP and to libtvm_ffi.

    The file must have been verified: it is executed.
    """

    def __init__(self, path: Path) -> None:
        """Open and bind the library at `path`.

        Raises:
            IncompatibleModuleError: another version; or torch or apache-tvm-ffi lacks a function that it needs.
        """
        from tvm_ffi.libinfo import find_libtvm_ffi

        self.path = path
        self._library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        ffi = ctypes.CDLL(find_libtvm_ffi())
        addresses = openmp_functions()
        for name in _FFI_FUNCTIONS:
            address = address_of(ffi, name)
            if address is None:
                raise IncompatibleModuleError(f"apache-tvm-ffi: {name} is missing from {find_libtvm_ffi()}")
            addresses.append(address)
        table = (ctypes.c_void_p * len(addresses))(*addresses)
        failure = self._library.tilewright_bind(table)
        if failure:
            raise OSError(failure, os.strerror(failure), str(path))
        missing = [name for name in _FUNCTIONS if address_of(self._library, name) is None]
        if missing:
            raise IncompatibleModuleError(
                f"{path}: {', '.join(missing)}: missing, it is of another tilewright; rebuild it"
            )
        self._functions = {pointer: address_of(self._library, name) for pointer, name in _POINTERS.items()}
        self._library.tilewright_workspace_bytes.restype = ctypes.c_int64
        locked = ctypes.PyDLL(str(path))
        self.bind = Binder(locked, ffi).bind
        # The interpreter's lock is kept: letting go of it costs more than the call.
        self.cut_next_loop: Callable[[int], object] = locked.tilewright_cut_next_loop
        """Cut the next parallel loop that the calling thread starts into so many tasks; any number is right."""
        self.cut_next_loop.argtypes, self.cut_next_loop.restype = [ctypes.c_int], None  # type: ignore[attr-defined]

    def workspace_bytes(self) -> int:
        """Bytes of kernel workspace that all threads hold now, in use or cached."""
        return self._library.tilewright_workspace_bytes()

    def load(self, path: Path) -> tvm_ffi.Module:
        """Load the module at `path` and connect it. It stays loaded until the process ends.

        The file must have been verified: it is executed.

        Raises:
            IncompatibleModuleError: the file cannot be opened as a module.
        """
        module, library = open_module(path)
        for pointer, function in self._functions.items():
            try:
                slot = ctypes.c_void_p.in_dll(library, pointer)
            except ValueError:
                continue
            slot.value = function
        return module
