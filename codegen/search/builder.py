"""Builds candidates in processes that import TVM once (MetaSchedule's own builder starts new ones for every batch)."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tilewright.codegen.search.problem import Decisions, Problem
from tilewright.codegen.search.worker import Outcome, Pool


class Builder:
    """A context manager; see `Pool` for `log` and `interrupted`.

    Args:
        workers: processes; each compiles with one thread.
        seconds: a build that takes longer is given up.
    """

    def __init__(self, workers: int, seconds: float, log: Path, interrupted: Callable[[], bool]) -> None:
        self._seconds = seconds
        environment = {"OMP_NUM_THREADS": "1", "TVM_NUM_THREADS": "1"}
        self._pool = Pool(workers, _import_compiler, log, environment, interrupted)

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, *details: object) -> None:
        self._pool.__exit__(*details)

    def settle(self) -> None:
        """Wait until no process is importing its compiler: that would disturb a measurement."""
        self._pool.settle()

    def prepare(self, problem: Problem, shared: Path) -> None:
        """Build what the problem's candidates share.

        Raises:
            RuntimeError: it cannot be built.
        """
        for _, outcome in self._pool.map(_prepare, [(problem, shared)], self._seconds):
            if outcome.reason:
                raise RuntimeError(f"{problem.name}: what its candidates share cannot be built: {outcome.detail}")

    def build(
        self, problem: Problem, candidates: Sequence[Decisions], shared: Path, folder: Path, enough: Callable[[], bool]
    ) -> Iterator[tuple[int, Outcome]]:
        """Build each candidate into `root_of(folder, candidate)`; yield (index, outcome) as they end.

        An artifact that is there already is used again. Once `enough()`, the rest is left out.
        """
        tasks = [(problem, dict(decisions), shared, root_of(folder, decisions)) for decisions in candidates]
        return self._pool.map(_build, tasks, self._seconds, enough)


def root_of(folder: Path, decisions: Mapping[str, int]) -> Path:
    """The artifact root of a candidate below the work folder of its problem."""
    digest = hashlib.sha256(json.dumps(dict(decisions), sort_keys=True).encode()).hexdigest()
    return folder / "candidates" / digest[:16]


def _import_compiler() -> None:
    from tilewright.codegen.search import space  # noqa: F401


def _prepare(problem: Problem, shared: Path) -> None:
    problem.prepare(shared)


def _build(problem: Problem, decisions: Decisions, shared: Path, root: Path) -> None:
    if root.exists():
        return
    root.parent.mkdir(parents=True, exist_ok=True)
    unfinished = root.with_name(f"{root.name}.{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        problem.build(decisions, shared, unfinished)
        unfinished.rename(root)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
