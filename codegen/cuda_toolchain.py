"""NVIDIA's compiler and disassemblers: from PyPI (the `cuda` extra), or those of a toolkit that is installed.

The building machine needs no GPU and no driver.

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

from tilewright.runtime import env
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


@dataclass(frozen=True)
class Toolkit:
    """The parts of one CUDA toolkit of version 13.

    Attributes:
        include: folder of the headers, with `cccl` and `crt` in it.
        libraries: folder of the compiler and CUDA's runtime.
        programs: folder of the disassemblers.
        version: of the compiler.
    """

    include: Path
    libraries: Path
    programs: Path
    version: str


_NEEDED = ("include/cuda_runtime.h", "include/cccl", "include/crt")
_LIBRARIES = ("libcudart.so.13", "libnvrtc.so.13")


def compiler_version() -> str:
    """Version of the compiler that builds would use; "" where there is none."""
    try:
        return toolkit().version
    except BuildError:
        return ""


def toolkit() -> Toolkit:
    """The toolkit in the folder that TILEWRIGHT_CUDA_TOOLKIT names, else that of the cuda extra.

    Raises:
        BuildError: it is not installed, or a part of it is missing.
    """
    return _toolkit(env.CUDA_TOOLKIT.get())


@cache
def _toolkit(folder: Path | None) -> Toolkit:
    if not _has_bindings():
        raise BuildError(f"CUDA targets: expected the package cuda-bindings, it is not installed: {INSTALL}")
    if folder is not None:
        return _installed(folder)
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        base = Path(root) / "cu13"
        if all((base / name).exists() for name in (*_NEEDED, *(f"lib/{name}" for name in _LIBRARIES))):
            try:
                return Toolkit(base / "include", base / "lib", base / "bin", version(COMPILER_PACKAGE))
            except PackageNotFoundError:
                continue
    raise BuildError(
        f"CUDA targets: expected the CUDA compiler of the cuda extra, it is not installed: {INSTALL} "
        f"(or name an installed toolkit of version 13: {env.CUDA_TOOLKIT.name}=/usr/local/cuda)"
    )


def _installed(folder: Path) -> Toolkit:
    where = f"{env.CUDA_TOOLKIT.name}: {folder}: expected a CUDA toolkit of version 13"
    missing = [name for name in _NEEDED if not (folder / name).exists()]
    if missing:
        raise BuildError(f"{where}, it has no {', '.join(missing)}")
    for libraries in (folder / "lib64", folder / "lib"):
        if all((libraries / name).exists() for name in _LIBRARIES):
            # In a toolkit the file's own name ends in the full version: libnvrtc.so.13.0.88.
            found = (libraries / "libnvrtc.so.13").resolve().name.partition(".so.")[2]
            return Toolkit(folder / "include", libraries, folder / "bin", f"{found} in {folder}")
    raise BuildError(f"{where}, neither lib64 nor lib has {' and '.join(_LIBRARIES)}")


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
    folder = toolkit().libraries
    # The compiler looks for its builtins by name alone, when it compiles.
    builtins = [path.name for path in folder.glob("libnvrtc-builtins.so.13.*")]
    for name in (*builtins, *_LIBRARIES):
        ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
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
        BuildError: there is no toolkit (see `toolkit`).
    """
    include = toolkit().include
    _load_runtime()
    with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
        root = Path(folder)
        (root / "targets" / "x86_64-linux").mkdir(parents=True)
        for link in (root / "include", root / "targets" / "x86_64-linux" / "include"):
            link.symlink_to(include)
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
    assembly = _run_tool("nvdisasm", str(cubin))
    found = []
    for name, registers, stack in resources(cubin):
        section = assembly.split(f".section\t.text.{name},", 1)[1].split("\n.section", 1)[0]
        code = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9._a-z]*)", section)
        found.append(Kernel(name, registers, stack, tuple(code)))
    return found


def resources(cubin: Path) -> list[tuple[str, int, int]]:
    """(name, registers of a thread, bytes of local memory of a thread) of each kernel of a built module.

    Raises:
        BuildError: cuobjdump is missing or failed.
    """
    usage = _run_tool("cuobjdump", "--dump-resource-usage", str(cubin))
    found = []
    for name, text in re.findall(r"Function (\S+?):\s*\n\s*(.*)", usage):
        numbers = dict(re.findall(r"([A-Z]+)(?:\[\d+\])?:(\d+)", text))
        found.append((name, int(numbers["REG"]), int(numbers["STACK"])))
    return found


def _run_tool(name: str, *arguments: str) -> str:
    tool = toolkit().programs / name
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
