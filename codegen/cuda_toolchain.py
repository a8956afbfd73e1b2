"""NVIDIA's compiler and disassemblers from PyPI (the `cuda` extra): no GPU, driver or toolkit on the building machine.

TVM compiles CUDA source to machine code only in a process that has its CUDA runtime loaded, which wants a driver
library, and looks for headers where a toolkit would have them. Both are hidden here.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tilewright.runtime.errors import BuildError

INSTALL = "pip install 'tilewright[cuda]'"
COMPILER_PACKAGE = "nvidia-cuda-nvrtc"
# What the runtime library takes from the driver. Compiling calls none of them; each says "no device" (100).
_DRIVER_FUNCTIONS = (
    *("cuDeviceGetName", "cuFuncSetAttribute", "cuGetErrorName", "cuGetErrorString", "cuLaunchKernelEx"),
    *("cuModuleGetFunction", "cuModuleLoadData", "cuModuleUnload", "cuTensorMapEncodeTiled"),
)
_DRIVER = "libcuda.so.1"
_NVCC_VARIABLES = {"TVM_CUDA_COMPILE_MODE": "nvrtc"}


@dataclass(frozen=True)
class Kernel:
    """One kernel of a built module, as the disassembler shows it.

    Attributes:
        name: of the kernel.
        registers: of a thread.
        stack: bytes of local memory a thread; what is not 0 is spilled or indexed at run time.
        instructions: the mnemonics of its machine code in order, e.g. "HMMA.16816.F32.BF16", predicates left out.
    """

    name: str
    registers: int
    stack: int
    instructions: tuple[str, ...]


def compiler_version() -> str:
    """Version of the compiler package; "" where it is not installed."""
    try:
        return version(COMPILER_PACKAGE)
    except PackageNotFoundError:
        return ""


@cache
def toolkit() -> Path:
    """Folder of the toolkit's PyPI packages, with `include`, `lib` and `bin`.

    Raises:
        BuildError: one is missing.
    """
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        folder = Path(root) / "cu13"
        needed = ("include/cuda_runtime.h", "include/cccl", "include/crt", "lib/libcudart.so.13", "lib/libnvrtc.so.13")
        if all((folder / name).exists() for name in needed) and _has_bindings():
            return folder
    raise BuildError(f"CUDA targets: expected the CUDA compiler of the cuda extra, it is not installed: {INSTALL}")


def check_installed() -> None:
    """Raises BuildError, with the command that installs it, where the compiler is missing."""
    toolkit()


def _has_bindings() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings.nvrtc") is not None
    except ModuleNotFoundError:
        return False


@cache
def _load_runtime() -> None:
    """Load TVM's CUDA runtime into this process, over a stub where there is no driver."""
    import tvm  # noqa: F401  the runtime library finds libtvm_runtime loaded
    from tvm.base import _LOADED_LIBS
    from tvm.libinfo import package_lib_paths

    if "tvm_runtime_cuda" in _LOADED_LIBS:
        return
    # A library's needs are met by what has the wanted name and is loaded already, wherever it came from.
    try:
        ctypes.CDLL(_DRIVER, ctypes.RTLD_GLOBAL)
    except OSError:
        _load_stub_driver()
    ctypes.CDLL(str(toolkit() / "lib" / "libcudart.so.13"), ctypes.RTLD_GLOBAL)
    library = next(path / "libtvm_runtime_cuda.so" for path in package_lib_paths() if path.is_dir())
    try:
        _LOADED_LIBS["tvm_runtime_cuda"] = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise BuildError(f"{library}: TVM's CUDA runtime does not load: {error}") from error


def _load_stub_driver() -> None:
    from tilewright.codegen.compile import compile_c

    with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
        source, library = Path(folder) / "driver.c", Path(folder) / _DRIVER
        source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in _DRIVER_FUNCTIONS))
        compile_c(source, library, soname=_DRIVER, exported=True)
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


@contextmanager
def toolchain() -> Iterator[None]:
    """While the context lasts, `tvm.compile` for a CUDA target makes machine code in this process.

    Raises:
        BuildError: the cuda extra is not installed.
    """
    packages = toolkit()
    _load_runtime()
    with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
        root = Path(folder)
        (root / "targets" / "x86_64-linux").mkdir(parents=True)
        for link in (root / "include", root / "targets" / "x86_64-linux" / "include"):
            link.symlink_to(packages / "include")
        changed = {"CUDA_PATH": folder, **_NVCC_VARIABLES}
        before = {name: os.environ.get(name) for name in changed}
        os.environ.update(changed)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


# ---- reading machine code ----


def kernels(cubin: Path) -> list[Kernel]:
    """Disassemble the kernels of a built module's machine code.

    Raises:
        BuildError: a disassembler of the cuda extra is missing or failed.
    """
    usage = _run_tool("cuobjdump", "--dump-resource-usage", str(cubin))
    assembly = _run_tool("nvdisasm", str(cubin))
    found = []
    for name, resources in re.findall(r"Function (\S+?):\s*\n\s*(.*)", usage):
        numbers = dict(re.findall(r"([A-Z]+)(?:\[\d+\])?:(\d+)", resources))
        section = assembly.split(f".section\t.text.{name},", 1)[1].split("\n.section", 1)[0]
        code = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9._a-z]*)", section)
        found.append(Kernel(name, int(numbers["REG"]), int(numbers["STACK"]), tuple(code)))
    return found


def _run_tool(name: str, *arguments: str) -> str:
    tool = toolkit() / "bin" / name
    if not tool.is_file():
        found = shutil.which(name)
        if found is None:
            raise BuildError(f"{name}: not found; {INSTALL}")
        tool = Path(found)
    done = subprocess.run(
        [str(tool), *arguments], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise BuildError(f"{name} failed ({done.returncode}): {done.stderr}{done.stdout}")
    return done.stdout
