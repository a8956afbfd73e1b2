"""Run AMX code on a machine without AMX: `amx_emulator.c`, built with cc and installed by the fixture `amx_emulator`.

The emulator executes tile instructions from a SIGILL handler: it checks indexing, packing, masks and tile shapes of a
kernel. It says nothing about the AVX-512 code of the real build, about a forgotten permission request or about speed.
On a machine with AMX it is idle once the process has asked for permission.
"""

import ctypes
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("amx_emulator.c")
# -O3 for vectorised dot products; every machine that runs the suite is an x86-64-v3.
COMPILE = ["cc", "-std=gnu11", "-O3", "-march=x86-64-v3", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]

ARCH_PRCTL, ARCH_GET_XCOMP_PERM, XFEATURE_TILE_DATA = 158, 0x1022, 18


@dataclass(frozen=True)
class Counts:
    """What the emulator has done in this process so far."""

    traps: int
    instructions: int


class Emulator:
    """The emulator, taking SIGILL in this process for all its threads until the process ends."""

    def __init__(self, library: Path) -> None:
        self.library = library
        self._lib = ctypes.CDLL(str(library))
        error = self._lib.amx_emulator_install()
        if error:
            raise OSError(error, "amx_emulator_install: sigaction refused")

    def counts(self) -> Counts:
        """Traps taken and tile instructions executed by all threads since the process began."""
        traps, instructions = ctypes.c_uint64(), ctypes.c_uint64()
        self._lib.amx_emulator_counts(ctypes.byref(traps), ctypes.byref(instructions))
        return Counts(traps.value, instructions.value)


def build(folder: Path) -> Path:
    """Compile the emulator into `folder`; the path of the shared library."""
    library = folder / "libamx_emulator.so"
    subprocess.run([*COMPILE, str(SOURCE), "-o", str(library)], check=True)
    return library


def hardware_runs_tiles() -> bool:
    """Whether this process may execute tile instructions on the processor itself: then none of them traps."""
    permitted = ctypes.c_uint64()
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    return syscall(ARCH_PRCTL, ARCH_GET_XCOMP_PERM, ctypes.byref(permitted)) == 0 and bool(
        permitted.value >> XFEATURE_TILE_DATA & 1
    )


@pytest.fixture(scope="session")
def amx_emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    """Tile instructions work in this process from here on. Installed after faulthandler, which still gets the rest."""
    return Emulator(build(tmp_path_factory.mktemp("amx_emulator")))
