"""What the devices of this machine can run: CPU features by their Linux names, AMX permission included, and GPU code.

Nothing runs at import.
"""

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


Capability = tuple[int, int]
"""Compute capability of an NVIDIA GPU, e.g. (9, 0)."""


def gpu_features(capability: Capability) -> frozenset[str]:
    """The machine code that a GPU runs: of its own generation up to its own version, and that for exactly itself."""
    major, minor = capability
    return frozenset(f"sm_{major}{version}" for version in range(minor + 1)) | {f"sm_{major}{minor}a"}


@cache
def visible_gpus() -> tuple[Capability, ...]:
    """Compute capabilities of the GPUs that torch sees, in its order; none without torch or without CUDA."""
    try:
        import torch
    except ImportError:
        return ()
    if not torch.cuda.is_available():
        return ()
    return tuple(torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))


def missing_features(required: Iterable[str], capability: Capability | None = None) -> list[str]:
    """Those of `required` that cannot be executed, sorted. Asks for AMX, or for GPUs, only where it matters.

    Args:
        required: CPU features, or GPU code ("sm_90a").
        capability: of the GPU that is to run the code; None: any visible one.
    """
    required = frozenset(required)
    if any(name.startswith("sm_") for name in required):
        gpus = visible_gpus() if capability is None else (capability,)
        return min((sorted(required - gpu_features(gpu)) for gpu in gpus), key=len, default=sorted(required))
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
