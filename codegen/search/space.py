"""A `Space` as MetaSchedule sees it: named decisions on the root block of a function, and nothing else.

Each decision is one `sample_categorical` whose value is annotated on the root block. No schedule is applied here: a
builder worker reads the decisions and schedules the symbolic functions with true integers (`Space.module`). That keeps
a trace to two instructions a decision and makes it impossible for the recorded decisions to differ from the code,
which branching in Python on a sampled value silently does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import te
from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms

from tilewright.schedules.spaces import Space

PREFIX = "tilewright."
FUNCTION = "main"


def carrier() -> tvm.IRModule:
    """The module that MetaSchedule's context gets: a function whose root block takes the annotations.

    Not the definition itself: MetaSchedule describes a candidate's arguments, and knows neither symbolic shapes nor
    scalar parameters. The trace replays on the definition all the same, for it names nothing but the root block.
    """
    x = te.placeholder((1,), "float32", name="x")
    function = te.create_prim_func([x, te.compute((1,), lambda i: x[i] + 1.0, name="y")])
    return tvm.IRModule({FUNCTION: function.with_attr("global_symbol", FUNCTION)})


def sample(schedule: Schedule, space: Space, decisions: Mapping[str, int] | None = None) -> None:
    """Sample every decision of `space` (or take those given) and annotate it on the root block."""
    root = schedule.get_sblock("root", func_name=FUNCTION)
    for name, values in space.choices.items():
        chosen = None if decisions is None else values.index(decisions[name])
        value = schedule.sample_categorical(list(values), [1.0 / len(values)] * len(values), chosen)
        schedule.annotate(root, PREFIX + name, value)


def decisions_of(schedule: Schedule) -> dict[str, int]:
    """The decisions annotated by `sample`."""
    annotations = schedule.mod[FUNCTION].body.block.annotations
    return {str(key)[len(PREFIX) :]: int(value) for key, value in annotations.items() if str(key).startswith(PREFIX)}


def scheduled(space: Space, decisions: Mapping[str, int]) -> Schedule:
    """The carrier with the given decisions; its trace is what a record keeps."""
    schedule = Schedule(carrier())
    sample(schedule, space, decisions)
    return schedule


def plain_trace(schedule: Schedule) -> Any:
    """The schedule's trace as plain JSON values (TVM's own `as_json` holds boxed integers)."""

    def plain(value: Any) -> Any:
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, (list, tuple, tvm.ir.Array)):
            return [plain(item) for item in value]
        if hasattr(value, "value"):  # IntImm, FloatImm
            value = value.value
        return float(value) if isinstance(value, float) else int(value) if isinstance(value, int) else str(value)

    return plain(schedule.trace.as_json())


def space_generator(space: Space) -> ms.space_generator.ScheduleFn:
    """MetaSchedule's design space over `space`, with our own postprocessor and mutator and none of its defaults."""
    return ms.space_generator.ScheduleFn(
        lambda schedule: sample(schedule, space),
        sch_rules=[],
        postprocs=[_Legal(space)],
        mutator_probs={_Mutate(): 1.0},
    )


def features_of(space: Space, decisions: Mapping[str, int]) -> list[float]:
    """What the cost model sees of a candidate: log2(1 + value) of each decision and of what the planner is told."""
    plan = space.plan(decisions)
    values = [*(decisions[name] for name in space.choices), *(plan[name] for name in sorted(plan))]
    return [math.log2(1 + abs(value)) for value in values]


@derived_object
class _Legal(ms.postproc.PyPostproc):
    """Rejects combinations that `Space.legal` rules out, before anything is built."""

    def __init__(self, space: Space) -> None:
        super().__init__()
        self.space = space

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        pass

    def apply(self, sch: Schedule) -> bool:
        return bool(self.space.legal(decisions_of(sch)))

    def clone(self) -> ms.postproc.PyPostproc:
        return _Legal(self.space)


@derived_object
class _Mutate(ms.mutator.PyMutator):
    """Changes one decision: mostly to a neighbouring value (values are listed in order), sometimes to any."""

    def __init__(self) -> None:
        super().__init__()

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        pass

    def apply(self, trace: Any, seed: int) -> Any:
        draw = random.Random(int(seed))
        free = [i for i in trace.insts if i.kind.name == "SampleCategorical" and len(i.attrs[0]) > 1]
        if not free:
            return None
        instruction = draw.choice(free)
        old, count = int(trace.get_decision(instruction)), len(instruction.attrs[0])
        near = [index for index in (old - 1, old + 1) if 0 <= index < count]
        new = draw.choice(near if draw.random() < 0.5 else [index for index in range(count) if index != old])
        return trace.with_decision(instruction, new, remove_postproc=True)

    def clone(self) -> ms.mutator.PyMutator:
        return _Mutate()


@derived_object
class _Features(ms.feature_extractor.PyFeatureExtractor):
    """One row a candidate (rows of one candidate would be summed)."""

    def __init__(self, space: Space) -> None:
        super().__init__()
        self.space = space

    def extract_from(self, context: ms.TuneContext, candidates: Sequence[ms.MeasureCandidate]) -> list[Any]:
        rows = (features_of(self.space, decisions_of(candidate.sch)) for candidate in candidates)
        return [tvm.runtime.tensor(np.array([row], "float32")) for row in rows]


def feature_extractor(space: Space) -> ms.feature_extractor.PyFeatureExtractor:
    """The cost model's view of `space`."""
    return _Features(space)
