"""The working log of a search: every candidate measured, one JSON line each, in a git-ignored folder.

The single truth from which a search resumes: MetaSchedule's database and cost model are filled from it. A line cut
short by a power loss is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tilewright.codegen.records import write_text

FILE = "trials.jsonl"


@dataclass(frozen=True)
class Trial:
    """One measured candidate: its microseconds, or why there are none.

    Attributes:
        reason: "" or a short class of failure ("wrong result", "build timed out", ...); detail: for people.
    """

    decisions: dict[str, int]
    us: float | None
    reason: str = ""
    detail: str = ""


class Trials:
    """The log of one problem in one folder.

    Args:
        folder: where the file lies; made if missing.
        identity: what the times depend on (machine, workload, code). A log of another identity is set aside.
        resume: False starts anew and sets the old log aside.

    Attributes:
        note: why an existing log was set aside, "" if it was not.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], resume: bool) -> None:
        self._path = folder / FILE
        self.done: list[Trial] = []
        self.note = ""
        lines = self._path.read_text().splitlines(keepends=True) if self._path.exists() else []
        if lines and not resume:
            self._set_aside("a fresh start was asked for")
        elif lines:
            header = _parse(lines[0])
            different = sorted(key for key in identity if header is None or header.get(key) != identity[key])
            if different:
                self._set_aside(f"it was made with another {', '.join(different)}")
            else:
                self.done = [Trial(**row) for line in lines[1:] if (row := _parse(line)) is not None]
        text = [
            json.dumps(dict(identity), sort_keys=True),
            *(json.dumps(asdict(trial), sort_keys=True) for trial in self.done),
        ]
        write_text(self._path, "".join(f"{line}\n" for line in text))

    def _set_aside(self, why: str) -> None:
        old = self._path.with_suffix(".old.jsonl")
        self._path.replace(old)
        self.note = f"earlier trials were set aside as {old}: {why}"

    def append(self, trial: Trial) -> None:
        """Add one trial; on disk when this returns, but for a power loss."""
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(trial), sort_keys=True) + "\n")
        self.done.append(trial)

    @property
    def best_us(self) -> float:
        """The least time so far, infinite without one."""
        return min((trial.us for trial in self.done if trial.us is not None), default=float("inf"))

    def best(self, count: int) -> list[Trial]:
        """The `count` fastest, fastest first."""
        return sorted((trial for trial in self.done if trial.us is not None), key=lambda trial: trial.us or 0.0)[:count]

    def failures(self) -> dict[str, int]:
        """How many failed, by reason."""
        counts: dict[str, int] = {}
        for trial in self.done:
            if trial.reason:
                counts[trial.reason] = counts.get(trial.reason, 0) + 1
        return counts

    def curve(self) -> list[tuple[int, float]]:
        """(number of the trial, its time) wherever the best improved."""
        points: list[tuple[int, float]] = []
        for number, trial in enumerate(self.done, 1):
            if trial.us is not None and (not points or trial.us < points[-1][1]):
                points.append((number, round(trial.us, 1)))
        return points


def _parse(line: str) -> dict[str, Any] | None:
    """A complete line's object; None for one that was cut short."""
    try:
        value = json.loads(line) if line.endswith("\n") else None
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
