"""Measures candidates in a worker process that loads them as a server would: the runtime, the launcher, no TVM.

A result is checked before it is timed. One process at a time measures, with nothing else of ours running. Calls on a
GPU are timed as replays of a graph of them, between two of the device's own time stamps.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tilewright.codegen import records, roofline
from tilewright.codegen.bench.inputs import Case
from tilewright.codegen.search.problem import Problem
from tilewright.codegen.search.worker import Outcome, Pool
from tilewright.runtime import features
from tilewright.schedules.targets import get_target

# One trial: samples of at least SAMPLE_SECONDS each, at least MIN_SAMPLES, until MEASURE_SECONDS or MAX_SAMPLES.
SAMPLE_SECONDS = 1e-3
MEASURE_SECONDS = 0.25
MIN_SAMPLES, MAX_SAMPLES = 5, 60
PREPARE_SECONDS = 180.0  # for inputs and float64 references
HOPELESS = 4.0  # times the best: such a candidate is not worth more than one sample

if TYPE_CHECKING:
    from tilewright.codegen.search.remote import Address, Remote

Contestant = tuple[Path, dict[str, int]]


class WrongResultError(RuntimeError):
    """A candidate computes something else than the reference."""

    reason = "wrong result"


class Runner:
    """A context manager around one worker; see `Pool` for `log` and `interrupted`.

    Args:
        seconds: a candidate that takes longer to check and time is killed.
        address: of the tracker that knows the machine which measures; None: this one.

    Raises:
        WorkerError: no such tracker.
    """

    def __init__(
        self, seconds: float, log: Path, interrupted: Callable[[], bool], address: Address | None = None
    ) -> None:
        self._seconds = seconds
        self._pool: Pool | Remote
        if address is None:
            self._pool = Pool(1, _import_runtime, log, {}, interrupted)
        else:
            from tilewright.codegen.search.remote import Remote

            self._pool = Remote(address, _import_runtime, interrupted)
        self._prepared: tuple[Problem, Path] | None = None
        self._machine: dict[str, tuple[records.Environment, roofline.Limits | str]] = {}

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *details: object) -> None:
        self._pool.__exit__(*details)

    def environment(self, target: str) -> records.Environment:
        """Of the machine that measures."""
        return self._described(target)[0]

    def limits(self, target: str) -> roofline.Limits:
        """What the machine that measures reaches with the target's instructions; measured once.

        Raises:
            roofline.RooflineError: they could not be measured.
        """
        limits = self._described(target)[1]
        if isinstance(limits, str):
            raise roofline.RooflineError(limits)
        return limits

    def _described(self, target: str) -> tuple[records.Environment, roofline.Limits | str]:
        if target not in self._machine:
            self._machine[target] = self._value(self._one(_describe, (target,), PREPARE_SECONDS))
        return self._machine[target]

    def work(self, problem: Problem, shared: Path) -> tuple[float, float]:
        """Flops and bytes of one call of the measured case (which this prepares)."""
        flops, moved = self._value(self._one(_work, (problem, shared), PREPARE_SECONDS))
        self._prepared = (problem, shared)
        return flops, moved

    def measure(self, problem: Problem, shared: Path, contestant: Contestant, best_us: float) -> Outcome:
        """Check and time one candidate; the outcome's value is its undisturbed microseconds."""
        self._prepare(problem, shared)
        outcome = self._one(_measure, (problem, shared, contestant, best_us), self._seconds)
        return outcome

    def compare(
        self, problem: Problem, shared: Path, contestants: Sequence[Contestant], seconds: float
    ) -> tuple[list[float], float]:
        """Time the contestants in one process, in turns, for `seconds` in all.

        Returns:
            undisturbed microseconds of each; spread: the greatest ratio of a median to an undisturbed time.
        """
        self._prepare(problem, shared)
        task = (problem, shared, list(contestants), seconds)
        times, spread = self._value(self._one(_compare, task, seconds + self._seconds * len(contestants)))
        return times, spread

    def verify(self, problem: Problem, shared: Path, contestant: Contestant) -> Outcome:
        """Hold a candidate against the oracle; its value: (worst error as a share of the tolerance, cases)."""
        return self._one(_verify, (problem, shared, contestant), PREPARE_SECONDS)

    def _prepare(self, problem: Problem, shared: Path) -> None:
        """Make the measured case in a worker that has started anew, outside of any candidate's time."""
        if self._prepared != (problem, shared):
            self.work(problem, shared)

    def _one(self, function: Callable[..., object], task: tuple[object, ...], seconds: float) -> Outcome:
        outcome = next(outcome for _, outcome in self._pool.map(function, [task], seconds))
        if outcome.reason:
            if outcome.reason not in ("crashed", "timed out"):  # after those it has restarted
                self._pool.restart()  # a candidate may have written anywhere, or broken a GPU's context
            self._prepared = None
        return outcome

    def _value(self, outcome: Outcome) -> Any:
        if outcome.reason:
            raise RuntimeError(f"the runner {outcome.reason}: {outcome.detail}")
        return outcome.value


def _import_runtime() -> None:
    import torch  # noqa: F401


def _describe(target: str) -> tuple[records.Environment, roofline.Limits | str]:
    missing = features.missing_features(get_target(target).features)
    if missing:
        raise RuntimeError(f"{target}: cannot be measured on this machine, it does not run {', '.join(missing)}")
    environment = records.current_environment()
    if get_target(target).device == "cuda":
        from tilewright.codegen.bench.gpu_protocol import gpu_name

        environment = msgspec.structs.replace(environment, gpu=gpu_name())
    try:
        return environment, roofline.measure(target)
    except roofline.RooflineError as error:
        return environment, str(error)


@functools.lru_cache(maxsize=1)
def _measured(problem: Problem, shared: Path) -> Case:
    return problem.measured(shared)


def _work(problem: Problem, shared: Path) -> tuple[float, float]:
    case = _measured(problem, shared)
    return case.flops, case.bytes


def _checked(case: Case, contestant: Contestant) -> tuple[Callable[[], object], float]:
    """The bound candidate and the error of its first call; raises WrongResultError."""
    root, plan = contestant
    call = case.bind(root, plan)
    return call, _error(case, call)


def _clock(device: str, call: Callable[[], object], number: int) -> Callable[[], float]:
    """A function that makes `number` calls and returns the seconds of one."""
    if device == "cuda":
        from tilewright.codegen.bench.gpu_protocol import replayed

        return replayed(call, number)

    def sample() -> float:
        started = time.perf_counter()
        for _ in range(number):
            call()
        return (time.perf_counter() - started) / number

    return sample


def _undisturbed(samples: list[float]) -> float:
    """The tenth percentile of the samples.

    Other load only ever adds time, in steps as long as a scheduler's: on a shared machine the median measures the
    neighbours. The very least sample may have had a clock that nobody else got.
    """
    return sorted(samples)[len(samples) // 10]


def _measure(problem: Problem, shared: Path, contestant: Contestant, best_us: float) -> float:
    case = _measured(problem, shared)
    call, _ = _checked(case, contestant)
    warm = _clock(case.device, call, 1)()
    if warm * 1e6 > HOPELESS * best_us:
        return warm * 1e6
    number = max(1, math.ceil(SAMPLE_SECONDS / warm))
    sample = _clock(case.device, call, number)
    samples = [warm] if number == 1 else []
    end = time.perf_counter() + MEASURE_SECONDS
    while len(samples) < MIN_SAMPLES or (time.perf_counter() < end and len(samples) < MAX_SAMPLES):
        samples.append(sample())
    return _undisturbed(samples) * 1e6


def _compare(
    problem: Problem, shared: Path, contestants: Sequence[Contestant], seconds: float
) -> tuple[list[float], float]:
    case = _measured(problem, shared)
    calls = [_checked(case, contestant)[0] for contestant in contestants]
    numbers = [max(1, math.ceil(SAMPLE_SECONDS / _clock(case.device, call, 1)())) for call in calls]
    clocks = [_clock(case.device, call, number) for call, number in zip(calls, numbers, strict=True)]
    samples: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    turn = 0
    while turn < MIN_SAMPLES or (time.perf_counter() < end and turn < 10 * MAX_SAMPLES):
        # Forward and backward in turn: nobody always follows the same neighbour.
        order = range(len(calls)) if turn % 2 == 0 else range(len(calls) - 1, -1, -1)
        for index in order:
            samples[index].append(clocks[index]())
        turn += 1
    spread = max(statistics.median(values) / _undisturbed(values) for values in samples)
    return [_undisturbed(values) * 1e6 for values in samples], spread


def _verify(problem: Problem, shared: Path, contestant: Contestant) -> tuple[float, int]:
    cases, worst = _verified(problem, shared), 0.0
    for case in cases:
        call, error = _checked(case, contestant)
        # Twice: a kernel may leave behind what its next call stumbles over.
        worst = max(worst, error, _error(case, call))
    return worst, len(cases)


def _error(case: Case, call: Callable[[], object]) -> float:
    case.poison()
    call()
    error = case.error()
    if not error <= 1:
        raise WrongResultError(f"error {error:.3g} times the tolerance")
    return error


@functools.lru_cache(maxsize=1)
def _verified(problem: Problem, shared: Path) -> list[Case]:
    return problem.verified(shared)
