"""Whole searches for tests, with the real display into a string."""

import io
import json

from rich.console import Console
from search_toy import TARGET

from tilewright.codegen.search.progress import Progress, Row
from tilewright.codegen.search.stop import Stop
from tilewright.codegen.search.tune import Options, tune, tune_with

# Of the faulty toy, by reason.
FAILURES = {
    "build failed": 1,
    "build crashed": 1,
    "build timed out": 1,
    "crashed": 1,
    "timed out": 1,
    "wrong result": 1,
}  # fmt: skip


class Recorder(Progress):
    """The real display into a string; calls `on_trial(count)` after each trial."""

    def __init__(self, rows, on_trial=lambda count: None):
        self.text = io.StringIO()
        super().__init__(Console(file=self.text, force_terminal=False, width=200), rows)
        self.on_trial = on_trial

    def update(self, row):
        super().update(row)
        if row.searching and row.trials:
            self.on_trial(row.trials)


def run(folder, problem, workers=None, on_trial=lambda count: None, **changes):
    """One search with its own worker processes, or with `workers` (builder, runner) that stay."""
    fields = {
        "trials": 40, "seconds": 240.0, "seed": 1, "resume": True,
        "records": folder / "records", "work": folder / "work", "build_seconds": 5.0, "run_seconds": 4.0, "builders": 2,
    }  # fmt: skip
    options = Options(**fields | changes)
    rows = [Row(problem.name, options.trials)]
    display = Recorder(rows, on_trial)
    start = tune if workers is None else lambda *arguments: tune_with(*workers, *arguments)
    (result,) = start([problem], options, display, rows, Stop())
    return result, display.text.getvalue()


def log_of(folder):
    lines = (folder / "work" / TARGET / "toy" / "trials.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[1:]]
