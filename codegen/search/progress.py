"""What the user sees while a search runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.table import Table

REFRESH_PER_SECOND = 4


@dataclass
class Row:
    """The state of one workload's search.

    Attributes:
        state: "waiting", "search", "re-measure", "verify", then the result in a few words.
        limit_us: the least time the machine's measured limits allow, None = unknown; flops: of one call.
        deadline: time.monotonic() at which the search ends at the latest.
    """

    workload: str
    budget: int
    state: str = "waiting"
    trials: int = 0
    failures: int = 0
    best_us: float = float("inf")
    flops: float = 0.0
    limit_us: float | None = None
    deadline: float = 0.0
    seconds_per_trial: float = 0.0

    @property
    def searching(self) -> bool:
        """Whether trials are being made now."""
        return self.state == "search"

    def cells(self) -> tuple[str, ...]:
        """Workload, trials, best, GFLOP/s, share of the roofline, failures, time left or state."""
        known = self.best_us != float("inf")
        return (
            self.workload,
            f"{self.trials}/{self.budget}",
            f"{self.best_us:.1f}" if known else "-",
            f"{self.flops / self.best_us * 1e-3:.1f}" if known else "-",
            f"{100 * self.limit_us / self.best_us:.0f}" if known and self.limit_us is not None else "-",
            str(self.failures),
            _clock(self._left()) if self.searching else self.state,
        )

    def _left(self) -> float:
        """Seconds until the trials or the time run out."""
        by_time = max(self.deadline - time.monotonic(), 0.0)
        by_trials = self.seconds_per_trial * max(self.budget - self.trials, 0)
        return min(by_time, by_trials) if self.seconds_per_trial else by_time


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Progress:
    """The display of a run over several workloads.

    Args:
        console: where to; its `is_terminal` decides the form.
        rows: one a workload, in order; the search changes them and calls `update`.
    """

    def __init__(self, console: Console, rows: list[Row]) -> None:
        self._console, self._rows = console, rows
        self._live: Live | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the table while the context lasts."""
        if not self._console.is_terminal:
            yield
            return
        with Live(
            get_renderable=self._table, console=self._console, refresh_per_second=REFRESH_PER_SECOND
        ) as self._live:
            yield
        self._live = None

    def update(self, row: Row) -> None:
        """`row` has changed."""
        if self._live is None:
            workload, trials, best, gflops, roofline, failures, left = row.cells()
            self._console.print(
                f"{workload}  trial {trials}  best {best} us  {gflops} GFLOP/s  {roofline} % of roofline  "
                f"{failures} failed  {'ETA ' if row.searching else ''}{left}",
                markup=False, highlight=False, soft_wrap=True,
            )  # fmt: skip

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        table.add_column("workload", no_wrap=True)
        for name in ("trials", "best us", "GFLOP/s", "% roofline", "failed", "ETA"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self._rows:
            table.add_row(*row.cells())
        return table
