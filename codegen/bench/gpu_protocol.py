"""How times are taken on a GPU: every contestant's calls in a CUDA graph of its own, replayed in turn.

A graph holds so many calls, over copies of the data larger than the cache, that one replay takes milliseconds: the host
plays no part, and what a call reads is in memory. Each contestant is held to our result before anything is timed.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from tilewright.codegen.bench.protocol import Contest, Contestant, Timing, WrongResultError
from tilewright.codegen.tolerances import Tolerance

REPLAY_US = 2000.0
MOST_CALLS = 400
WARM_UP = 2
_ORDER_SEED = 0


def _once(contestant: Contestant) -> float:
    """Microseconds of one call, roughly; runs it on every copy, as what is captured must have run before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in contestant.calls:
            call.run()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        contestant.calls[0].run()
        end.record(stream)
    torch.cuda.current_stream().wait_stream(stream)
    end.synchronize()
    return 1e3 * begin.elapsed_time(end)


def _clock(contestant: Contestant) -> Callable[[], float]:
    """A function that replays a graph of whole rounds over the copies and returns the microseconds of one call."""
    copies = len(contestant.calls)
    rounds = max(1, min(MOST_CALLS // copies, round(REPLAY_US / max(_once(contestant), 1.0) / copies)))

    def in_turn() -> None:
        for call in contestant.calls:
            call.run()

    sample = replayed(in_turn, rounds)
    return lambda: 1e6 * sample() / copies


def replayed(call: Callable[[], object], number: int) -> Callable[[], float]:
    """A function that replays a graph of `number` calls and returns the seconds of one.

    Args:
        call: has run before.
        number: at least 1.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(number):
            call()

    def sample() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return 1e-3 * begin.elapsed_time(end) / number

    sample()  # the first replay uploads the graph
    return sample


def gpu_name() -> str:
    """The first GPU, e.g. "NVIDIA H200 (9.0), 132 multiprocessors"."""
    found = torch.cuda.get_device_properties(0)
    return f"{found.name} ({found.major}.{found.minor}), {found.multi_processor_count} multiprocessors"


def check(contestants: Sequence[Contestant], tolerance: Tolerance) -> None:
    """Run every contestant once on every copy and compare its one output with ours, on the GPU.

    Args:
        contestants: to be timed.
        tolerance: against an exact result; two results may be twice as far apart.

    Raises:
        WrongResultError: one differs, or has a NaN.
    """
    ours = next(item for item in contestants if item.role == "ours")
    for index, call in enumerate(ours.calls):
        expected = call.outputs(call.run())[0].float()
        size = expected.square().mean().sqrt()
        for other in contestants:
            if other is ours:
                continue
            theirs = other.calls[index]
            error = (theirs.outputs(theirs.run())[0].float() - expected).abs()
            rms = float(error.square().mean().sqrt() / size)
            most = float((error / expected.abs().clamp(min=size)).max())
            if not (rms <= 2 * tolerance.rms and most <= 2 * tolerance.max_abs):
                raise WrongResultError(
                    f"{other.name}: differs from {ours.name} by {rms:.1e} rms and {most:.1e} at most, expected "
                    f"{2 * tolerance.rms:.1e} and {2 * tolerance.max_abs:.1e}; one of the two is wrong"
                )


def measure(contestants: Sequence[Contestant], *, rounds: int, seconds: float) -> Contest:
    """Time the contestants against each other: each round replays the graph of each once, in an order drawn anew.

    Args:
        contestants: of one contest, checked.
        rounds: least number of timed replays of each.
        seconds: least wall clock of all of them together.
    """
    clocks = {item.name: _clock(item) for item in contestants}
    times: dict[str, list[float]] = {name: [] for name in clocks}
    for clock in clocks.values():
        for _ in range(WARM_UP):
            clock()
    draw = random.Random(_ORDER_SEED)
    done, end = 0, time.perf_counter() + seconds
    while done < rounds or time.perf_counter() < end:
        for name in draw.sample(list(clocks), len(clocks)):
            times[name].append(clocks[name]())
        done += 1
    timings = []
    for item in contestants:
        taken = times[item.name]
        low, median, high = statistics.quantiles(taken, n=4, method="inclusive") if len(taken) > 1 else taken * 3
        timings.append(Timing(item.name, item.role, median, low, high, len(taken)))
    return Contest(timings, {})
