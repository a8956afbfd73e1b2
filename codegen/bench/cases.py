"""What is timed: the rows of the table, for each target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewright.codegen.bench import lightning_cases, paged_cases
from tilewright.codegen.bench.machine import cold_bytes
from tilewright.codegen.bench.setups import Case, Roots, Setup, needed
from tilewright.schedules.catalog import TUNE_PRESET
from tilewright.schedules.targets import get_target
from tilewright.schedules.workload import Workload

__all__ = ["CASES", "QUICK", "SERVING", "Case", "Roots", "Setup", "needed", "of_target", "set_up"]


def _paged(operator: str, dtype: str) -> Workload:
    return Workload(operator, dtype, 4, 128, 128)


def _lightning(operator: str, dtype: str) -> Workload:
    return Workload(operator, dtype, None, 128, 128)


CASES = (
    Case(_paged("paged_decode", "f32"), 8, 2048, 8, 1.5),
    Case(_paged("paged_decode", "bf16"), 8, 2048, 8, 1.5),
    Case(_paged("paged_decode", "fp16"), 8, 2048, 8),
    Case(Workload("paged_decode", "bf16", 4, 128, 128, "fp8_e4m3"), 8, 2048, 8),
    Case(_paged("paged_extend", "f32"), 1, 1024, 8, 0.9),
    Case(_paged("paged_extend", "bf16"), 1, 1024, 8, 1.4),
    Case(_paged("paged_extend", "fp16"), 1, 1024, 8),
    Case(_lightning("lightning_extend", "f32"), 1, 2048, 8, 2.0),
    Case(_lightning("lightning_extend", "bf16"), 1, 2048, 8, 2.0),
    Case(_lightning("lightning_decode", "f32"), 16, 1, 8, 1.5),
    Case(_lightning("lightning_decode", "f32"), 16, 1, 32, 1.5),
    Case(_lightning("lightning_decode", "bf16"), 16, 1, 8, 1.5),
    Case(_lightning("lightning_decode", "bf16"), 16, 1, 32, 1.5),
)
# The end of `make tune`: the workloads that it tunes, at the first of their sizes.
QUICK = tuple(next(case for case in CASES if case.workload == workload) for workload in TUNE_PRESET)


def _serving(batch: int, tokens: int, **more: Any) -> Case:
    return Case(_paged("paged_extend" if "prefix" in more else "paged_decode", "bf16"), batch, tokens, 8, **more)


# Large CPUs, as a server uses them: 32 query heads over 8, D 128, and latent attention of 16 heads over one.
SERVING = (
    *(_serving(batch, tokens, required=1.3, share=0.85) for batch, tokens in
      ((1, 4096), (1, 16384), (16, 1024), (16, 4096), (64, 2048))),
    _serving(1, 4096, most_us=150.0, plan_in_call=True),
    *(_serving(batch, tokens, prefix=prefix, required=1.6) for batch, prefix, tokens in
      ((1, 0, 1024), (1, 0, 4096), (4, 2048, 256))),
    Case(Workload("paged_decode", "bf16", 16, 576, 512), 16, 4096, 1, most_us=1200.0),
)  # fmt: skip
SERVING_COLD = 1 << 30


def of_target(target: str | None) -> tuple[Case, ...]:
    """The rows for a target (None: whatever modules a call here takes)."""
    return CASES if target is None or get_target(target).rank <= get_target("x86-avx2").rank else SERVING


def set_up(case: Case, *, roots: Roots | None = None, cold: int | None = None) -> Setup:
    """Make the data and the contestants of a case.

    Args:
        case: what to time.
        roots: has the case's module built from the default schedule; None: no such contestant.
        cold: bytes that the copies of a memory-bound case must exceed; None: enough for this machine's caches, and as
            much as a server's pool has for the rows of SERVING.
    """
    if cold is None:
        cold = SERVING_COLD if case in SERVING else cold_bytes()
    return _MAKERS[case.workload.operator](case, roots, cold)


_MAKERS: dict[str, Callable[[Case, Roots | None, int], Setup]] = {
    "paged_decode": paged_cases.decode,
    "paged_extend": paged_cases.extend,
    "lightning_extend": lightning_cases.extend,
    "lightning_decode": lightning_cases.decode,
}
