"""The machine's measured limits, so that a time can be called a share of what is possible."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("roofline.c")
SECONDS, ATTEMPTS = 0.15, 3  # the best attempt counts: other load only ever takes away
BYTES, LEAST_BYTES_PER_THREAD = 512 << 20, 32 << 20  # beyond any last-level cache
FLAGS = {"x86-avx2": ("-march=x86-64-v3",)}


class RooflineError(RuntimeError):
    """The limits could not be measured; the message has the compiler's words."""


@dataclass(frozen=True)
class Limits:
    """f32 fused multiply-add peak (flop/s) and memory read bandwidth (byte/s) of some cores together."""

    flops: float
    bandwidth: float

    def seconds(self, flops: float, moved: float) -> float:
        """The least time that `flops` operations on `moved` bytes can take."""
        return max(flops / self.flops, moved / self.bandwidth)


@functools.cache
def measure(target: str, threads: int | None = None) -> Limits:
    """Measure this machine with the instructions of `target`; about a second, once a process.

    Args:
        target: by name.
        threads: how many work at the same time; None, or more than there are: one for every usable core.

    Raises:
        RooflineError: the C compiler (CC, default cc) is missing or fails, or the peak of the target's instructions is
            not known how to measure.
    """
    if target not in FLAGS:
        raise RooflineError(f"{target}: its peak cannot be measured yet, only that of {', '.join(FLAGS)}")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "roofline.so"
        command = [
            os.environ.get("CC", "cc"),
            "-O3",
            "-shared",
            "-fPIC",
            *FLAGS[target],
            str(SOURCE),
            "-o",
            str(library),
        ]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise RooflineError(f"{command[0]}: no such C compiler; install one or set CC") from error
        except subprocess.CalledProcessError as error:
            raise RooflineError(f"{' '.join(command)} failed: {error.stderr.strip()}") from error
        functions = ctypes.CDLL(str(library))
    flops, reads = functions.tilewright_flops, functions.tilewright_reads
    flops.argtypes, flops.restype = [ctypes.c_double], ctypes.c_double
    reads.argtypes, reads.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_double], ctypes.c_double

    usable = len(os.sched_getaffinity(0))
    threads = min(threads or usable, usable)
    block_bytes = max(BYTES // threads, LEAST_BYTES_PER_THREAD) // 256 * 256

    def read_own(ready: threading.Barrier) -> float:
        block = bytearray(block_bytes + 64)
        address = ctypes.addressof(ctypes.c_char.from_buffer(block))
        ctypes.memset(address, 1, len(block))  # real pages, of this thread's memory node
        ready.wait()
        return reads(address + -address % 64, block_bytes, SECONDS)

    def compute(ready: threading.Barrier) -> float:
        ready.wait()
        return flops(SECONDS)

    return Limits(flops=_together(compute, threads), bandwidth=_together(read_own, threads))


def _together(work: Callable[[threading.Barrier], float], threads: int) -> float:
    """The most that so many threads reach together; ctypes lets go of Python's lock."""
    ready = threading.Barrier(threads)
    with ThreadPoolExecutor(threads) as pool:
        return max(sum(pool.map(work, [ready] * threads)) for _ in range(ATTEMPTS))
