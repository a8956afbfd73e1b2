"""The machine's measured limits, so that a time can be called a share of what is possible."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tilewright.runtime import features
from tilewright.schedules.targets import get_target

SOURCE = Path(__file__).with_name("roofline.c")
SECONDS, ATTEMPTS = 0.15, 3  # the best attempt counts: other load only ever takes away
BYTES, LEAST_BYTES_PER_THREAD = 512 << 20, 32 << 20  # beyond any last-level cache
# Operands that a core keeps in its second-level cache: a quarter of the 2 MiB that CPUs with AMX have.
TILE_BYTES = 512 << 10
FLAGS = {
    "x86-avx2": ("-march=x86-64-v3",),
    "x86-avx512": ("-march=x86-64-v4",),
    "x86-amx": ("-march=x86-64-v4", "-mamx-tile", "-mamx-bf16"),
}


class RooflineError(RuntimeError):
    """The limits could not be measured; the message has the compiler's words."""


@dataclass(frozen=True)
class Limits:
    """What some cores reach together.

    Attributes:
        flops: f32 fused multiply-adds, flop/s.
        bandwidth: reads from memory, byte/s.
        tiles: products of bf16 tiles whose operands come from the second-level cache, flop/s; None without AMX.
        tile_peak: the same from registers.
    """

    flops: float
    bandwidth: float
    tiles: float | None = None
    tile_peak: float | None = None

    def seconds(self, flops: float, moved: float) -> float:
        """The least time that `flops` operations on `moved` bytes can take, as products of tiles if it has them."""
        return max(flops / (self.tiles or self.flops), moved / self.bandwidth)


@functools.cache
def measure(target: str, threads: int | None = None) -> Limits:
    """Measure this machine with the instructions of `target`; about a second or two, once a process.

    Args:
        target: by name.
        threads: how many work at the same time; None, or more than there are: one for every usable core.

    Raises:
        RooflineError: the C compiler (CC, default cc) is missing or fails, the peak of the target's instructions is not
            known how to measure, or this process cannot execute them.
    """
    if get_target(target).device == "cuda":
        return _gpu()
    if target not in FLAGS:
        raise RooflineError(f"{target}: its peak cannot be measured yet, only that of {', '.join(FLAGS)}")
    missing = features.missing_features(_needed(target))
    if missing:
        raise RooflineError(f"{target}: its peak cannot be measured here: no {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as folder:
        functions = compiled(target, Path(folder))
    flops, reads = functions.tilewright_flops, functions.tilewright_reads
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

    def multiply(operand_bytes: int) -> Callable[[threading.Barrier], float]:
        def work(ready: threading.Barrier) -> float:
            ready.wait()
            return functions.tilewright_tiles(SECONDS, operand_bytes)

        return work

    limits = Limits(flops=_together(compute, threads), bandwidth=_together(read_own, threads))
    if "-mamx-bf16" not in FLAGS[target]:
        return limits
    return dataclasses.replace(
        limits, tiles=_together(multiply(TILE_BYTES), threads), tile_peak=_together(multiply(0), threads)
    )


def _gpu() -> Limits:
    import torch

    from tilewright.codegen.bench.gpu_cases import limits  # which imports this file

    if not torch.cuda.is_available():
        raise RooflineError("torch sees no CUDA device")
    measured = limits()
    torch.cuda.empty_cache()
    return measured


def _needed(target: str) -> tuple[str, ...]:
    """Features of the loops that are timed: no more than their flags let the compiler use."""
    tiles = ("amx_tile", "amx_bf16") if "-mamx-bf16" in FLAGS[target] else ()
    wide = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl") if "-march=x86-64-v4" in FLAGS[target] else ()
    return (*get_target("x86-avx2").features, *wide, *tiles)


def compiled(target: str, folder: Path, *more: str) -> ctypes.CDLL:
    """roofline.c built into `folder` with the flags of the target (and `more`), its functions typed.

    Raises:
        RooflineError: the C compiler is missing or fails.
    """
    library = folder / "roofline.so"
    compiler = os.environ.get("CC", "cc")
    command = [compiler, "-O3", "-shared", "-fPIC", *FLAGS[target], *more, str(SOURCE), "-o", str(library)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise RooflineError(f"{compiler}: no such C compiler; install one or set CC") from error
    except subprocess.CalledProcessError as error:
        raise RooflineError(f"{' '.join(command)} failed: {error.stderr.strip()}") from error
    functions = ctypes.CDLL(str(library))
    signatures: dict[str, list[type]] = {
        "tilewright_flops": [ctypes.c_double],
        "tilewright_reads": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_double],
        "tilewright_tiles": [ctypes.c_double, ctypes.c_size_t],
    }
    for name, arguments in signatures.items():
        if hasattr(functions, name):
            function = getattr(functions, name)
            function.argtypes, function.restype = arguments, ctypes.c_double
    return functions


def _together(work: Callable[[threading.Barrier], float], threads: int) -> float:
    """The most that so many threads reach together; ctypes lets go of Python's lock."""
    ready = threading.Barrier(threads)
    with ThreadPoolExecutor(threads) as pool:
        return max(sum(pool.map(work, [ready] * threads)) for _ in range(ATTEMPTS))
