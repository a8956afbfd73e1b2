"""What a table must say of the machine: its name, its last-level cache, and whether others were working on it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from tilewright.codegen.records import current_environment

_CACHES = Path("/sys/devices/system/cpu")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# Where the kernel does not say: more than most have.
ASSUMED_CACHE = 64 << 20


def last_level_cache() -> int | None:
    """Bytes of all last-level caches that the usable cores see together; None where the kernel does not say."""
    found: dict[str, tuple[int, int]] = {}
    for core in os.sched_getaffinity(0):
        levels = []
        for index in (_CACHES / f"cpu{core}" / "cache").glob("index*"):
            try:
                level = int((index / "level").read_text())
                size = (index / "size").read_text().strip()
                shared = (index / "shared_cpu_list").read_text().strip()
                levels.append((level, int(size[:-1]) * _UNITS[size[-1]], shared))
            except (OSError, ValueError, KeyError):
                continue
        if levels:
            level, size_bytes, shared = max(levels)
            found[shared] = (level, size_bytes)
    return sum(size_bytes for _, size_bytes in found.values()) or None


def cold_bytes() -> int:
    """How much a contestant's copies must hold together for every call to read memory, not a cache."""
    return 2 * (last_level_cache() or ASSUMED_CACHE)


def describe() -> str:
    """One line: processor, threads, versions, date."""
    here = current_environment()
    cache = last_level_cache()
    return (
        f"{here.cpu}, {torch.get_num_threads()} threads on {here.cores} cores, last-level cache "
        + (f"{cache / 2**20:.0f} MiB" if cache else f"unknown (taken as {ASSUMED_CACHE >> 20} MiB)")
        + f"; torch {here.versions.get('torch', '?')}, Python {here.python}; {here.date}"
    )


class Canary:
    """Notices what else ran on the CPUs since it was made."""

    def __init__(self) -> None:
        self._begin = self._state()

    @staticmethod
    def _state() -> tuple[float, float, float]:
        """Wall clock, CPU seconds that the whole machine was busy, CPU seconds of this process and its children."""
        fields = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        user, nice, system, _idle, _iowait, interrupt, soft_interrupt, steal = fields
        busy = (user + nice + system + interrupt + soft_interrupt + steal) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy, sum(os.times()[:4])

    def others(self) -> float:
        """CPUs that others kept busy on average (the hypervisor's share included); below 0.1 means undisturbed."""
        wall, busy, own = (now - before for now, before in zip(self._state(), self._begin, strict=True))
        return max(0.0, busy - own) / max(wall, 1e-9)
