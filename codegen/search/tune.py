"""The search of workloads: propose, build, measure, learn; then measure again, verify and record the winner."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from tilewright.codegen import records, roofline
from tilewright.codegen.search.builder import Builder, root_of
from tilewright.codegen.search.problem import Problem
from tilewright.codegen.search.progress import Progress, Row
from tilewright.codegen.search.remote import Address
from tilewright.codegen.search.runner import Runner
from tilewright.codegen.search.stop import Stop
from tilewright.codegen.search.trials import Trial, Trials
from tilewright.codegen.search.verdict import Finals, Result, decide
from tilewright.codegen.search.worker import Interrupted, WorkerError
from tilewright.schedules.targets import get_target
from tilewright.schedules.workload import DEFINITION_REVISION

BATCH = 16  # candidates between two rounds of learning
FINALISTS = 8
NEIGHBOURS = 8  # records of other sizes that a search begins with
FINAL_SHARE, LEAST_FINAL_SECONDS = 0.15, 6.0  # of a workload's time, for measuring again and verifying
COMPARE_SECONDS = 12.0
BUSY = 1.3  # spread of the samples above which the times mean little


class TuneError(RuntimeError):
    """A workload that cannot be searched: its untuned schedule does not build, run or verify."""


@dataclass(frozen=True)
class Options:
    """One run of the search.

    Attributes:
        trials: candidates a workload, earlier ones of a resumed search included.
        seconds: for all workloads together, whichever ends first.
        seed: of the proposals. resume: go on from the working logs.
        records: root of tuning_logs. work: root of the working logs and candidates, may be deleted between runs.
        build_seconds, run_seconds: a candidate that takes longer is killed.
        builders: processes that build.
        measure_at: the tracker of the machine that measures; None: this machine.
    """

    trials: int
    seconds: float
    seed: int
    resume: bool
    records: Path
    work: Path
    build_seconds: float = 120.0
    run_seconds: float = 30.0
    builders: int = 1
    measure_at: Address | None = None


def tune(
    problems: Sequence[Problem], options: Options, progress: Progress, rows: Sequence[Row], stop: Stop
) -> list[Result]:
    """Search each problem in turn and write its record; one result a problem.

    The time is shared fairly: each problem gets its part of what is left when it starts. `rows` are the progress rows
    of the problems, in order.

    Raises:
        Interrupted: the user asked to stop; every trial made so far is in the working logs.
        WorkerError: the worker processes do not start.
    """
    log = options.work / "workers.log"
    with (
        stop.on_signals(),
        Builder(options.builders, options.build_seconds, log, stop) as builder,
        Runner(options.run_seconds, log, stop, options.measure_at) as runner,
    ):
        return tune_with(builder, runner, problems, options, progress, rows, stop)


def tune_with(
    builder: Builder,
    runner: Runner,
    problems: Sequence[Problem],
    options: Options,
    progress: Progress,
    rows: Sequence[Row],
    stop: Stop,
) -> list[Result]:
    """`tune` with workers that the caller keeps (and that are asked with `stop`, or never stop)."""
    results = []
    end = time.monotonic() + options.seconds
    for index, (problem, row) in enumerate(zip(problems, rows, strict=True)):
        now = time.monotonic()
        deadline = now + max(end - now, 0.0) / (len(problems) - index)
        try:
            results.append(_Search(problem, options, progress, row, stop, builder, runner, deadline).run())
        except (Interrupted, WorkerError):
            raise
        except (RuntimeError, ValueError, OSError) as error:
            row.state = "failed"
            progress.update(row)
            progress.note(f"{problem.name}: {error}")
            results.append(Result(problem.name, error=str(error)))
    return results


@dataclass
class _Search:
    """The search of one problem. `deadline` is for all of it (time.monotonic)."""

    problem: Problem
    options: Options
    progress: Progress
    row: Row
    stop: Stop
    builder: Builder
    runner: Runner
    deadline: float
    _batch_seconds: list[float] = field(default_factory=list)

    def run(self) -> Result:
        """Search, measure again, verify, record."""
        folder = self.options.work / self.problem.target / self.problem.name
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(folder / "lock", timeout=0):
                return self._run(folder)
        except Timeout:
            raise TuneError(f"another search works in {folder}; wait for it or give another --work") from None

    def _run(self, folder: Path) -> Result:
        from tilewright.codegen.search import strategy  # imports tvm

        problem, options = self.problem, self.options
        started = time.monotonic()
        self.folder, self.shared = folder, folder / "shared"
        self.space = problem.space()
        self.environment = self.runner.environment(problem.target)
        self.old = self._old_record()
        self.trials = Trials(self.folder, self._identity(), options.resume)
        if self.trials.note:
            self.progress.note(f"{problem.name}: {self.trials.note}")
            shutil.rmtree(self.folder / "candidates", ignore_errors=True)
        # Shared parts and leftovers may be of older code: only the candidates of this very log are used again.
        shutil.rmtree(self.shared, ignore_errors=True)
        self.builder.prepare(problem, self.shared)
        self.builder.settle()
        self.flops, self.bytes = self.runner.work(problem, self.shared)
        self.limit_us = None
        try:
            self.limit_us = self.runner.limits(problem.target).seconds(self.flops, self.bytes) * 1e6
        except roofline.RooflineError as error:
            self.progress.note(f"{problem.name}: no share of the roofline is shown: {error}")
        self.search_until = self.deadline - max(FINAL_SHARE * (self.deadline - started), LEAST_FINAL_SECONDS)
        self.row.state, self.row.flops, self.row.limit_us = "search", self.flops, self.limit_us
        self.row.deadline = self.search_until
        self._show()

        default = dict(self.space.default)
        self._measure_first([default, *self._recorded()])
        failed = next((trial for trial in self.trials.done if trial.decisions == default and trial.reason), None)
        if failed is not None:
            raise TuneError(f"the untuned schedule failed ({failed.reason}): {failed.detail}")
        evolution = strategy.Evolution(self.space, options.seed, BATCH)
        evolution.tell((trial.decisions, _seconds(trial)) for trial in self.trials.done)
        while not self._enough():
            if self.stop():
                raise Interrupted
            proposed = evolution.ask(self._batch())
            if not proposed:
                break
            evolution.tell((trial.decisions, _seconds(trial)) for trial in self._measure(proposed))
        return self._conclude(default)

    # ---- the trials

    def _identity(self) -> dict[str, object]:
        found = self.environment
        machine = {"gpu": found.gpu} if found.gpu else {"cpu": found.cpu, "cores": found.cores}
        return {
            "schema": 1,
            "key": self.problem.key,
            "target": self.problem.target,
            "code": self.problem.fingerprint(),
            **machine,
        }

    def _recorded(self) -> list[dict[str, int]]:
        """Good places to start from: the record's best few, and what was found for other sizes of the operator."""
        if not self.options.resume:
            return []
        own = [] if self.old is None else [self.old.decisions, *(timed.decisions for timed in self.old.top)]
        operator = self.problem.name.split("-", 1)[0]
        others = (self.options.records / self.problem.target).glob(f"{operator}-*/{records.RECORD_FILE}")
        found = [records.load(path).decisions for path in sorted(others)]
        distinct = [decisions for index, decisions in enumerate(found) if decisions not in found[:index]]
        return [*filter(self._valid, own), *[*filter(self._valid, distinct)][:NEIGHBOURS]]

    def _valid(self, decisions: dict[str, int]) -> bool:
        choices = self.space.choices
        inside = decisions.keys() == choices.keys() and all(value in choices[name] for name, value in decisions.items())
        return inside and self.space.legal(decisions)

    def _measure_first(self, candidates: list[dict[str, int]]) -> None:
        done = [trial.decisions for trial in self.trials.done]
        new: list[dict[str, int]] = []
        for decisions in candidates:
            if decisions not in done and decisions not in new:
                new.append(decisions)
        if not done:
            self._measure(new[:1], at_any_cost=True)  # the yardstick comes first and in any case
            new = new[1:]
        self._measure(new[: max(self.options.trials - len(self.trials.done), 0)])

    def _enough(self) -> bool:
        return len(self.trials.done) >= self.options.trials or time.monotonic() >= self.search_until

    def _batch(self) -> int:
        """How many candidates to take on: a full batch, or what still fits."""
        count = min(BATCH, self.options.trials - len(self.trials.done))
        if self.row.seconds_per_trial:
            left = self.search_until - time.monotonic()
            count = min(count, max(round(left / self.row.seconds_per_trial), self.options.builders))
        return max(count, 1)

    def _measure(self, candidates: Sequence[dict[str, int]], at_any_cost: bool = False) -> list[Trial]:
        """Build the candidates in parallel and measure them one by one.

        On this machine's CPU nothing else runs meanwhile; a GPU or another machine does not feel what still builds.
        """
        if not candidates:
            return []
        started, before = time.monotonic(), len(self.trials.done)
        enough = (lambda: False) if at_any_cost else (lambda: time.monotonic() >= self.search_until)
        apart = get_target(self.problem.target).device == "cuda" or self.options.measure_at is not None
        built = []
        for index, outcome in self.builder.build(self.problem, candidates, self.shared, self.folder, enough):
            if outcome.reason:
                reason = outcome.reason if outcome.reason in ("crashed", "timed out", "refused") else "failed"
                self._add(Trial(candidates[index], None, f"build {reason}", outcome.detail))
            elif not apart:
                built.append(index)
            elif not enough():
                self._time(candidates[index])
        self.builder.settle()  # one that crashed has started anew
        for index in sorted(built):
            if enough():
                break
            self._time(candidates[index])
        self._forget_losers()
        new = self.trials.done[before:]
        if new:
            self._batch_seconds.append((time.monotonic() - started) / len(new))
            self.row.seconds_per_trial = statistics.median(self._batch_seconds[-3:])
        return new

    def _time(self, decisions: dict[str, int]) -> None:
        outcome = self.runner.measure(self.problem, self.shared, self._contestant(decisions), self.trials.best_us)
        if outcome.reason:
            reason = outcome.reason if outcome.reason in ("crashed", "timed out", "wrong result") else "failed"
            detail = outcome.detail if reason != "failed" else f"{outcome.reason}: {outcome.detail}"
            self._add(Trial(decisions, None, reason, detail))
        else:
            self._add(Trial(decisions, float(outcome.value)))

    def _contestant(self, decisions: dict[str, int]) -> tuple[Path, dict[str, int]]:
        return root_of(self.folder, decisions), self.space.plan(decisions)

    def _add(self, trial: Trial) -> None:
        self.trials.append(trial)
        self._show()

    def _show(self, state: str = "") -> None:
        self.row.state = state or self.row.state
        self.row.trials, self.row.best_us = len(self.trials.done), self.trials.best_us
        self.row.failures = sum(self.trials.failures().values())
        self.progress.update(self.row)

    def _forget_losers(self) -> None:
        """Delete the artifacts that can no longer be among the finalists."""
        keep = {root_of(self.folder, trial.decisions) for trial in self.trials.best(FINALISTS)}
        keep.add(root_of(self.folder, dict(self.space.default)))
        for root in (self.folder / "candidates").iterdir():
            if root not in keep:
                shutil.rmtree(root)

    # ---- the end

    def _conclude(self, default: dict[str, int]) -> Result:
        """Measure the finalists again beside the default (and the record there is), verify the fastest, record it."""
        finalists = [trial.decisions for trial in self.trials.best(FINALISTS)]
        for decisions in (
            default,
            *([self.old.decisions] if self.old is not None and self._valid(self.old.decisions) else []),
        ):
            if decisions not in finalists:
                finalists.append(decisions)
        self._show("re-measure")
        failed = {
            index
            for index, outcome in self.builder.build(self.problem, finalists, self.shared, self.folder, lambda: False)
            if outcome.reason
        }
        finalists = [decisions for index, decisions in enumerate(finalists) if index not in failed]
        if default not in finalists:
            raise TuneError("the untuned schedule no longer builds; see the log of the workers")
        self.builder.settle()
        finalists, times = self._compare(finalists)
        if default not in finalists:
            raise TuneError("the untuned schedule no longer runs; see the log of the workers")
        contestants = [self._contestant(decisions) for decisions in finalists]
        order = sorted(range(len(finalists)), key=lambda index: times[index])

        self._show("verify")
        wrong = []
        for winner in order:
            outcome = self.runner.verify(self.problem, self.shared, contestants[winner])
            if not outcome.reason:
                break
            wrong.append(winner)
            self.progress.note(
                f"{self.problem.name}: {finalists[winner]} was fast ({times[winner]:.1f} us) and is refused by the "
                f"oracle ({outcome.reason}: {outcome.detail})"
            )
        else:
            raise TuneError("no finalist agrees with the oracle, the untuned schedule neither")
        error, cases = outcome.value
        right = [index for index in order if index not in wrong]
        timed = {index: records.Timed(finalists[index], round(times[index], 1)) for index in order}
        finals = Finals(
            best=timed[winner],
            default=timed[finalists.index(default)],
            top=[timed[index] for index in right[: records.TOP]],
            old=next((timed[i] for i in order if self.old is not None and finalists[i] == self.old.decisions), None),
            verification=records.Verification(float(f"{error:.3g}"), cases),
            spread=self.spread,
        )
        return self._finish(*decide(finals, self._record_of(finals), self.old, self.options.records))

    def _record_of(self, finals: Finals) -> records.Record:
        from tilewright.codegen.search import space  # imports tvm

        return records.Record(
            schema=records.SCHEMA,
            workload=self.problem.name,
            key=self.problem.key,
            definition_revision=DEFINITION_REVISION,
            target=self.problem.target,
            problem=self.problem.description,
            flops=self.flops,
            bytes=self.bytes,
            decisions=finals.best.decisions,
            us=finals.best.us,
            default=finals.default,
            top=finals.top,
            roofline_percent=None if self.limit_us is None else round(100 * self.limit_us / finals.best.us, 1),
            trials=len(self.trials.done),
            failures=self.trials.failures(),
            seed=self.options.seed,
            curve=self.trials.curve(),
            verification=finals.verification,
            trace=space.plain_trace(space.scheduled(self.space, finals.best.decisions)),
            environment=self.environment,
            spread=finals.spread,
        )

    def _compare(self, finalists: list[dict[str, int]]) -> tuple[list[dict[str, int]], list[float]]:
        """The finalists' undisturbed microseconds, measured in turns; those that fail (now) are left out."""
        for attempt in range(2):
            contestants = [self._contestant(decisions) for decisions in finalists]
            seconds = min(COMPARE_SECONDS, max((self.deadline - time.monotonic()) / 2, 1.0))
            try:
                times, spread = self.runner.compare(self.problem, self.shared, contestants, seconds)
                self.spread = round(spread, 2)
                return finalists, times
            except RuntimeError:
                if attempt:
                    raise
                outcomes = [self.runner.measure(self.problem, self.shared, item, 0.0) for item in contestants]
                finalists = [item for item, outcome in zip(finalists, outcomes, strict=True) if not outcome.reason]
        raise AssertionError("unreachable")

    def _finish(self, result: Result, gain: float) -> Result:
        self._show(f"{gain:.2f}x")
        self.progress.note(result.message)
        if self.spread > BUSY:
            self.progress.note(
                f"{self.problem.name}: the machine was busy (median {self.spread:.1f} x the undisturbed time): "
                "search again on an idle one before trusting these times"
            )
        return result

    def _old_record(self) -> records.Record | None:
        """The record there is, if it is of these definitions."""
        path = records.path_of(self.options.records, self.problem.target, self.problem.name)
        if not path.exists():
            return None
        record = records.load(path)
        if record.key != self.problem.key or record.definition_revision != DEFINITION_REVISION:
            self.progress.note(f"{path}: is of other definitions and will be replaced")
            return None
        return record


def _seconds(trial: Trial) -> float | None:
    return None if trial.us is None else trial.us * 1e-6
