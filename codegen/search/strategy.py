"""Which candidates to measure next: MetaSchedule's evolutionary search with its XGBoost cost model, as ask and tell.

The loop that builds and measures is ours (`tune.py`), so that a trial can be shown, stopped and recorded one by one.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections.abc import Iterable, Mapping

import numpy as np
import tvm
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.cost_model.xgb_model import XGBConfig

from tilewright.codegen.search import space as spaces
from tilewright.schedules.spaces import Space

WARMUP = 16  # candidates measured before the cost model is trusted
POPULATION = 256  # decisions only, no schedule: a generation costs a fraction of a second
UNLIMITED = 10**6
ENUMERABLE = 1 << 14

Key = tuple[int, ...]


class Evolution:
    """Proposes decisions and learns from their times. The same seed and times give the same proposals.

    Nothing is proposed twice, and nothing that was told. NumPy's global generator is seeded, because the cost model
    draws from it.
    """

    def __init__(self, space: Space, seed: int, batch: int) -> None:
        self._space, self._batch = space, batch
        self._told: dict[Key, float | None] = {}
        self._random = random.Random(seed)
        np.random.seed(seed)  # noqa: NPY002  what ms.cost_model draws from
        logger = logging.getLogger("tilewright.search.metaschedule")
        logger.setLevel(logging.ERROR)
        logging.getLogger("tvm.s_tir.meta_schedule").setLevel(logging.ERROR)
        self._context = ms.TuneContext(
            mod=spaces.carrier(),
            target=tvm.target.Target({"kind": "llvm", "num-cores": 1}),
            space_generator=spaces.space_generator(space),
            search_strategy=ms.search_strategy.EvolutionarySearch(
                population_size=POPULATION,
                init_measured_ratio=0.3,
                init_min_unmeasured=min(batch, POPULATION // 2),
                genetic_num_iters=3,
                genetic_mutate_prob=0.85,
                eps_greedy=0.1,
            ),
            task_name="search",
            num_threads=1,  # more would share out the random states by timing, and wait for Python's lock anyway
            rand_state=seed + 1,
            logger=logger,
        )
        self._database = ms.database.MemoryDatabase()
        self._workload = self._database.commit_workload(self._context.mod)
        self._arguments = ms.arg_info.ArgInfo.from_prim_func(self._context.mod[spaces.FUNCTION])
        self._cost_model = ms.cost_model.XGBModel(
            extractor=spaces.feature_extractor(space),
            config=XGBConfig(max_depth=4, nthread=1, seed=seed),
            num_warmup_samples=WARMUP,
            early_stopping_rounds=20,
            adaptive_training=False,
        )
        self._context.pre_tuning(
            max_trials=UNLIMITED,
            num_trials_per_iter=batch,
            design_spaces=self._context.generate_design_space(),
            database=self._database,
            cost_model=self._cost_model,
        )
        self._exhausted = False

    def ask(self, count: int) -> list[dict[str, int]]:
        """Up to `count` new legal decisions, the most promising first; [] once the space holds no more."""
        proposed: dict[Key, dict[str, int]] = {}
        if len(self._told) >= WARMUP:
            for decisions in self._evolve():
                if len(proposed) < count and self._key(decisions) not in self._told:
                    proposed[self._key(decisions)] = decisions
        # The first generation, and what evolution leaves over in a nearly exhausted space.
        for decisions in self._sample(count - len(proposed), proposed):
            proposed[self._key(decisions)] = decisions
        return list(proposed.values())

    def tell(self, trials: Iterable[tuple[Mapping[str, int], float | None]]) -> None:
        """Learn the seconds of measured decisions; None = the candidate failed."""
        new = {self._key(decisions): seconds for decisions, seconds in trials}
        if not new:
            return
        self._told |= new
        good = [seconds for seconds in self._told.values() if seconds is not None]
        # A failure is ignored by the model: only a finite, clearly bad time teaches it to keep away.
        penalty = 8 * min(good) if good else 1.0
        candidates, results = [], []
        for key, seconds in new.items():
            schedule = Schedule(self._context.mod)
            spaces.sample(schedule, self._space, dict(zip(self._space.choices, key, strict=True)))
            candidate = ms.MeasureCandidate(schedule, self._arguments)
            candidates.append(candidate)
            results.append(ms.runner.RunnerResult([penalty if seconds is None else seconds], None))
            if seconds is not None:
                record = ms.database.TuningRecord(
                    schedule.trace, self._workload, [seconds], self._context.target, self._arguments
                )
                self._database.commit_tuning_record(record)
        self._cost_model.update(self._context, candidates, results)

    def _evolve(self) -> list[dict[str, int]]:
        """One generation of the evolutionary search, as decisions."""
        if self._exhausted:
            return []
        candidates = self._context.generate_measure_candidates()
        if candidates is None:
            self._exhausted = True
            return []
        # It counts the results it is told of; what we told the database and the model is what it learns from.
        self._context.search_strategy.notify_runner_results(
            candidates, [ms.runner.RunnerResult([1.0], None) for _ in candidates]
        )
        return [spaces.decisions_of(candidate.sch) for candidate in candidates]

    def _sample(self, count: int, taken: Mapping[Key, object]) -> list[dict[str, int]]:
        """Up to `count` random legal decisions that were neither told nor `taken`."""
        if count <= 0:
            return []
        choices = list(self._space.choices.values())
        points: Iterable[Key]
        if math.prod(map(len, choices)) <= ENUMERABLE:
            points = [key for key in itertools.product(*choices) if key not in self._told and key not in taken]
            self._random.shuffle(points)
        else:
            points = (tuple(self._random.choice(values) for values in choices) for _ in range(ENUMERABLE))
        found: dict[Key, dict[str, int]] = {}
        for key in points:
            decisions = dict(zip(self._space.choices, key, strict=True))
            if key not in self._told and key not in taken and self._space.legal(decisions):
                found[key] = decisions
                if len(found) == count:
                    break
        return list(found.values())

    def _key(self, decisions: Mapping[str, int]) -> Key:
        return tuple(decisions[name] for name in self._space.choices)
