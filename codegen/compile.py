"""One scheduled IRModule -> one shared library that keeps the promises of docs/kernel-abi.md.

What this file does is part of every module's fingerprint: a change here rebuilds all of them.
"""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.runtime.errors import BuildError
from tilewright.runtime.launcher import PATCHED_SYMBOLS
from tilewright.schedules.targets import Target

if TYPE_CHECKING:
    import tvm

# -Bsymbolic: a foreign module opened with RTLD_GLOBAL would otherwise take over our backend pointers and functions.
LINK_OPTIONS = ("-Wl,-Bsymbolic", "-Wl,-z,relro", "-Wl,-z,noexecstack")
# LLVM makes these of plain loops; every process has them.
LIBC_FUNCTIONS = frozenset({"memcpy", "memmove", "memset"})
PIPELINE = "tilewright"


def tvm_target(target: Target) -> tvm.target.Target:
    """TVM's object for one of our targets."""
    import tvm

    return tvm.target.Target(
        {key: list(value) if isinstance(value, list) else value for key, value in target.tvm.items()}
    )


def compile_module(module: tvm.IRModule, target: Target) -> tvm.runtime.Executable:
    """Compile functions for a target: scheduled ones for a CPU, kernels written out in full for a GPU.

    Raises:
        BuildError: the target is a GPU and its compiler is not installed.
    """
    import tvm

    where = tvm_target(target)
    if target.device == "cuda":
        from tilewright.codegen.cuda_toolchain import toolchain

        with toolchain(), where:
            return tvm.compile(module, target=where, tir_pipeline="tirx")
    _register_pipeline()
    with where:
        return tvm.compile(module, target=where, tir_pipeline=PIPELINE)


@cache
def _register_pipeline() -> None:
    """TVM's default pipeline for schedules, and a pass of ours over what it has lowered."""
    import tvm
    from tvm import tirx
    from tvm.s_tir.pipeline import default_s_tir_pipeline
    from tvm.tirx.compilation_pipeline import register_tir_pipeline

    from tilewright.schedules import lowering

    def pipeline() -> tuple[tvm.transform.Pass, ...]:
        lowered, host, device = default_s_tir_pipeline()
        rows = tirx.transform.prim_func_pass(
            lambda func, *_: lowering.deinterleave(func, ("k_buffer", "v_buffer")), opt_level=0
        )
        return tvm.ir.transform.Sequential([lowered, rows]), host, device

    register_tir_pipeline(PIPELINE, pipeline)


def export(executable: tvm.runtime.Executable, path: Path) -> None:
    """Link the executable into a shared library at `path` and check what it needs from its process.

    Raises:
        BuildError: no C compiler, the linker failed, or the library needs more than libtvm_ffi and the launcher give.
    """
    try:
        executable.export_library(str(path), options=list(LINK_OPTIONS))
    except (RuntimeError, ValueError, OSError) as error:
        raise BuildError(f"{path}: cannot be linked (is there a C compiler, cc?): {error}") from error
    check_symbols(path)


def check_symbols(path: Path, served: frozenset[str] = PATCHED_SYMBOLS) -> None:
    """Refuse a library that would not load, or not run, in a process without TVM.

    Args:
        path: of the library.
        served: the pointers that its launcher fills in.

    Raises:
        BuildError: it wants a foreign function (libm's, for one) or has a TVM pointer that the launcher does not serve.
    """
    wanted, defined = set(), set()
    for line in _run(["nm", "-D", "--format=posix", str(path)]).splitlines():
        name, kind = line.split()[:2]
        if kind == "U":
            wanted.add(name.partition("@")[0])
        else:
            defined.add(name)
    foreign = sorted(name for name in wanted - LIBC_FUNCTIONS if not name.startswith("TVMFFI"))
    if foreign:
        raise BuildError(
            f"{path}: undefined symbols: expected those of libtvm_ffi only, got {', '.join(foreign)}; "
            "write the function as a tensor expression (schedules/vector_math.py)"
        )
    unserved = sorted(name for name in defined if name.startswith("__TVM") and name not in served)
    if unserved:
        raise BuildError(f"{path}: needs {', '.join(unserved)}, which the launcher does not serve")


def link(objects: Path, path: Path) -> None:
    """Link one object file of the compiler into a shared library.

    Raises:
        BuildError: the linker is missing or failed; the message holds what it said.
    """
    _run(["cc", "-shared", "-fPIC", *LINK_OPTIONS, "-o", str(path), str(objects)])


def compile_c(source: Path, path: Path, *, soname: str = "", exported: bool = False) -> None:
    """Compile one C file without dependencies into a shared library.

    Args:
        source: the C file.
        path: the library to make.
        soname: name under which other libraries ask for it.
        exported: whether functions that do not say so are visible outside.

    Raises:
        BuildError: the compiler is missing or failed; the message holds what it said.
    """
    options = [*(() if exported else ("-fvisibility=hidden",)), *((f"-Wl,-soname,{soname}",) if soname else ())]
    _run(["cc", "-std=gnu11", "-O2", "-shared", "-fPIC", *options, "-Wall", "-o", str(path), str(source)])


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise BuildError(
            f"{command[0]}: not found; install a C compiler and binutils (package build-essential)"
        ) from None
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed ({done.returncode}):\n{done.stderr}")
    return done.stdout
