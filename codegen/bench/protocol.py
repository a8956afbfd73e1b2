"""How times are taken: contestants called in turn in one process, each held to one result before anything is timed."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch

from tilewright.codegen.tolerances import Tolerance, excess
from tilewright.runtime.errors import Error

ROLES = ("ours", "untuned", "peer")
# A peer whose fastest warm-up call takes this many times the slowest one of another peer cannot be the best: its rounds
# go to the others. Short calls stay whatever they took: they cost no time, and one interruption is many of them.
HOPELESS = 3.0
LONG_US = 20e3
WARM_UP = 3
_ORDER_SEED = 0


class WrongResultError(Error):
    """Two contestants computed different things: their times must not be compared."""


@dataclass(frozen=True)
class Call:
    """One call on one copy of the data.

    Attributes:
        run: what is timed.
        outputs: from what `run` returned to the tensors to compare, in an order and layout common to all contestants.
    """

    run: Callable[[], object]
    outputs: Callable[[object], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Contestant:
    """One way to compute the same thing.

    Attributes:
        name: in the report.
        role: one of ROLES; exactly one of a contest is "ours".
        calls: on copies of the data, used in turn, so that what a call reads is not in a cache from the last one.
        prepare: run before each call, not timed.
    """

    name: str
    role: str
    calls: Sequence[Call]
    prepare: Callable[[], None] = lambda: None


class Timing(msgspec.Struct, frozen=True):
    """Microseconds of one call: median and quartiles of `rounds` calls."""

    name: str
    role: str
    median: float
    low: float
    high: float
    rounds: int

    @property
    def spread(self) -> float:
        """Distance of the quartiles as a share of the median."""
        return (self.high - self.low) / self.median


class Contest(msgspec.Struct, frozen=True):
    """The times of all contestants, taken together; `hopeless`: peers left out, with their best warm-up call."""

    timings: list[Timing]
    hopeless: dict[str, float]

    def of(self, role: str) -> Timing | None:
        """The fastest of a role by median; None where there is none."""
        return min((item for item in self.timings if item.role == role), key=lambda item: item.median, default=None)


def check(contestants: Sequence[Contestant], tolerances: Sequence[Tolerance]) -> None:
    """Run every contestant once on every copy and compare what comes out with ours.

    Args:
        contestants: fresh: calls that change their data in place must not have run.
        tolerances: of each output against an exact result; two results may be twice as far apart.

    Raises:
        WrongResultError: one differs, or has a NaN.
    """
    ours = next(item for item in contestants if item.role == "ours")
    expected = [_run(ours, index) for index in range(len(ours.calls))]
    for other in contestants:
        if other is ours:
            continue
        for index in range(len(other.calls)):
            got = _run(other, index)
            for number, (mine, theirs, tolerance) in enumerate(
                zip(expected[index % len(expected)], got, tolerances, strict=True)
            ):
                error = excess(theirs, mine, tolerance.times(2)) if mine.shape == theirs.shape else float("nan")
                if not error <= 1:
                    raise WrongResultError(
                        f"{other.name}: output {number} {list(theirs.shape)} is {error:.3g} times the tolerance away "
                        f"from that of {ours.name} {list(mine.shape)}, expected at most 1; one of the two is wrong: "
                        "nothing was timed"
                    )


def _run(contestant: Contestant, index: int) -> tuple[torch.Tensor, ...]:
    contestant.prepare()
    call = contestant.calls[index]
    return tuple(tensor.clone() for tensor in call.outputs(call.run()))


def measure(contestants: Sequence[Contestant], *, rounds: int, seconds: float) -> Contest:
    """Time the contestants against each other.

    Every round calls each of them once, in an order drawn anew, so that slow drifts and neighbours hit all alike;
    rounds go on until there are `rounds` of them and `seconds` have passed. WARM_UP calls of each before that are not
    counted.

    Args:
        contestants: of one contest.
        rounds: least number of timed calls of each.
        seconds: least wall clock of all of them together.
    """
    # Each begins with another copy: those who share the data must not find in a cache what the one before has read.
    turns = {id(item): number for number, item in enumerate(contestants)}

    def timed(contestant: Contestant) -> float:
        contestant.prepare()
        call = contestant.calls[turns[id(contestant)] % len(contestant.calls)]
        turns[id(contestant)] += 1
        begin = time.perf_counter_ns()
        call.run()
        return (time.perf_counter_ns() - begin) / 1e3

    warm = {item.name: [timed(item) for _ in range(WARM_UP)] for item in contestants}
    sure = min((max(warm[item.name]) for item in contestants if item.role == "peer"), default=0.0)
    hopeless = {
        item.name: min(warm[item.name])
        for item in contestants
        if item.role == "peer" and min(warm[item.name]) > max(LONG_US, HOPELESS * sure)
    }
    racing = [item for item in contestants if item.name not in hopeless]
    times: dict[str, list[float]] = {item.name: [] for item in racing}
    draw = random.Random(_ORDER_SEED)
    collecting = gc.isenabled()
    gc.disable()
    try:
        done, end = 0, time.perf_counter() + seconds
        while done < rounds or time.perf_counter() < end:
            for contestant in draw.sample(racing, len(racing)):
                times[contestant.name].append(timed(contestant))
            done += 1
    finally:
        if collecting:
            gc.enable()
    return Contest([_summary(item, times[item.name]) for item in racing], hopeless)


def warm(contestants: Sequence[Contestant]) -> Contestant:
    """Ours on one copy of the data only, which stays in the caches that it fits."""
    ours = next(item for item in contestants if item.role == "ours")
    return Contestant(ours.name, ours.role, ours.calls[:1], ours.prepare)


def _summary(contestant: Contestant, times: list[float]) -> Timing:
    low, median, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return Timing(contestant.name, contestant.role, median, low, high, len(times))
