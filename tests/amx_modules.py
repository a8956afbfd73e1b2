"""Which modules the AMX tests run on: emulated ones anywhere; the real ones, mark `amx`, where the CPU has tiles.

Without a compiler (a serving machine) the modules are those that have been built before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from tilewright.runtime import dispatch, features, store
from tilewright.runtime.errors import MissingModuleError
from tilewright.schedules.targets import get_target
from tilewright.schedules.workload import Workload

EMULATED, REAL, BESIDE = "x86-amx-emulated", "x86-amx", "x86-avx2"
TARGETS = [pytest.param(EMULATED), pytest.param(REAL, marks=pytest.mark.amx)]
COMPILER = find_spec("tvm") is not None


def module(
    name: str, target: str = BESIDE, changes: dict[str, int] | None = None, root: Path | None = None
) -> store.Module:
    """Build a module unless it is up to date, and load it.

    AMX modules are made from the decisions of x86-amx, `changes` applied. Where there is no compiler the test is
    skipped unless the module is there.
    """
    workload = Workload.parse(name)
    if COMPILER:
        from tilewright.codegen.build import build, recorded_decisions
        from tilewright.schedules.spaces import get_space

        decisions = None
        if target != BESIDE:
            space = get_space(workload, target)
            decisions = {**(recorded_decisions(workload, REAL) or space.default), **(changes or {})}
            assert space.legal(decisions)
        build(workload, target, decisions, root)
    elif changes:
        pytest.skip("no compiler: other decisions than the committed ones cannot be built")
    try:
        return store.load(workload, target, root=root)
    except MissingModuleError as error:
        if COMPILER:
            raise
        pytest.skip(f"no compiler: {error}")


@contextmanager
def serving(target: str) -> Iterator[None]:
    """The public functions take this target's modules first, then those of x86-avx2, as on a machine with AMX."""
    emulated = get_target(target).features if target == EMULATED else ()
    choice = [get_target(name) for name in dict.fromkeys((target, BESIDE))]
    with pytest.MonkeyPatch.context() as patch, features.emulated(*emulated):
        patch.setattr(store, "candidate_targets", lambda *_: choice)
        dispatch.kernel.cache_clear()
        try:
            yield
        finally:
            dispatch.kernel.cache_clear()
