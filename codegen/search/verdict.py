"""What becomes of a search: its record is written, or the one that another machine made is kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from tilewright.codegen import records

TIE = 0.02  # a record from elsewhere gives way only to what is faster by more than this


@dataclass(frozen=True)
class Finals:
    """The finalists' undisturbed times, measured in turns.

    Attributes:
        best: the fastest that the oracle accepts. default: the untuned schedule.
        top: the fastest few that were not refused, best first.
        old: the schedule of the record there was; None where it has none or does not run here.
        verification: of the best. spread: median over undisturbed time, how busy the machine was.
    """

    best: records.Timed
    default: records.Timed
    top: list[records.Timed]
    old: records.Timed | None
    verification: records.Verification
    spread: float


@dataclass
class Result:
    """What became of one workload: a record kept or written, or the `error` that prevented it."""

    workload: str
    record: records.Record | None = None
    error: str = ""
    message: str = ""


def decide(finals: Finals, record: records.Record, old: records.Record | None, root: Path) -> tuple[Result, float]:
    """Write `record`, or keep the `old` one that another machine made and whose schedule is still as fast here.

    Args:
        finals: what was measured.
        record: of the best finalist.
        old: the record there was, if it is of these definitions.
        root: of tuning_logs.

    Returns:
        the result, and how many times as fast as the untuned schedule what it holds is.
    """
    name, best, default = record.workload, finals.best, finals.default
    here = ""
    if old is not None and not old.environment.same_machine(record.environment):
        if finals.old is not None and finals.old.us <= best.us * (1 + TIE):
            message = (
                f"{name}: the record made on {old.environment.device} is kept: its schedule is still the fastest here "
                f"({finals.old.us:.1f} us, untuned {default.us:.1f} us)"
            )
            return Result(name, old, message=message), default.us / finals.old.us
        us = None if finals.old is None else finals.old.us
        record = msgspec.structs.replace(record, replaced=records.Replaced(old.decisions, us, old.environment))
        here = "does not run here" if us is None else f"{us:.1f} us here"
        here = f"; it replaces the record made on {old.environment.device} ({here})"
    path = records.write(root, record)
    if best.decisions == default.decisions:
        message = (
            f"{name}: nothing was gained: after {record.trials} trials the untuned schedule is still the fastest "
            f"({default.us:.1f} us)"
        )
    else:
        gain = f"{default.us / best.us:.2f}x over the untuned schedule"
        message = f"{name}: {gain} ({best.us:.1f} us, untuned {default.us:.1f} us); {path}"
    return Result(name, record, message=message + here), default.us / best.us
