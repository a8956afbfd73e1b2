"""What this machine's CPU can do: the Linux names of its features, AMX permission included. Nothing runs at import."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tilewright.runtime.env import get_logger

_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18

_emulated: frozenset[str] = frozenset()


def parse_cpuinfo(text: str) -> frozenset[str]:
    """The feature names of the first processor in /proc/cpuinfo (Linux masks what its cores do not share)."""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


@cache
def cpu_features() -> frozenset[str]:
    """Names as in /proc/cpuinfo ("avx2", "f16c", "avx512f", "amx_bf16", ...); empty where there is no such file."""
    try:
        return parse_cpuinfo(Path("/proc/cpuinfo").read_text())
    except OSError:
        return frozenset()


def _request_tiles() -> int:
    """arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA): 0 or the errno. The process and its threads have it from then on."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    arguments = (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    return 0 if libc.syscall(*(ctypes.c_long(value) for value in arguments)) == 0 else ctypes.get_errno()


@cache
def amx_permission() -> bool:
    """Ask the kernel, once per process, to let this process use the AMX tile registers; a refusal is logged.

    It covers every thread and is inherited by fork (not by exec), so the cached answer stays true in children.
    """
    if platform.machine() != "x86_64" or "amx_tile" not in cpu_features():
        return False
    error = _request_tiles()
    if error:
        get_logger("features").warning(
            "AMX: the kernel refuses tile registers to this process (arch_prctl: %s): AMX modules are not used. "
            "Linux 5.16 or newer grants them, unless signal stacks are too small for them or a sandbox forbids it",
            os.strerror(error),
        )
    return not error


def usable_features() -> frozenset[str]:
    """What a kernel may execute here: the CPU's features (AMX only with permission) and the emulated ones."""
    features = cpu_features()
    if not amx_permission():
        features = frozenset(name for name in features if not name.startswith("amx_"))
    return features | _emulated


def missing_features(required: Iterable[str]) -> list[str]:
    """Those of `required` that this process cannot execute, sorted. Asks for AMX only where it matters."""
    required = frozenset(required)
    if required <= cpu_features() and not any(name.startswith("amx_") for name in required):
        return []
    return sorted(required - usable_features())


def declared() -> frozenset[str]:
    """The features that `emulated` has declared just now."""
    return _emulated


@contextmanager
def emulated(*names: str) -> Iterator[None]:
    """Declare features that an emulator provides for the duration of the block (for tests; not thread-local)."""
    global _emulated  # noqa: PLW0603
    before = _emulated
    _emulated = before | frozenset(names)
    try:
        yield
    finally:
        _emulated = before
