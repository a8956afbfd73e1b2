"""What each target adds to a definition: the decisions of the search and how they become a schedule.

One file per operator family and target family, `<family>_<target family>.py` (`paged_x86.py`, `paged_amx.py`);
each has `space(workload, target) -> Space` and may import tvm; parts of it may lie in files beside it. This file does
not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewright.schedules.targets import Target, get_target
from tilewright.schedules.workload import Workload

if TYPE_CHECKING:
    import tvm

Decisions = Mapping[str, int]
# Attribute of a GPU function whose kernel may be launched before the kernel before it has ended: it waits by itself.
PROGRAMMATIC = "tilewright.programmatic"

FAMILIES = {
    "paged_decode": "paged",
    "paged_extend": "paged",
    "merge": "paged",
    "write_kv": "paged",
    "lightning_decode": "lightning",
    "lightning_extend": "lightning",
}


class UnsupportedWorkload(ValueError):
    """The target has no space for the workload; the message names both and why."""


@dataclass(frozen=True)
class Space:
    """What a target adds to a definition.

    Attributes:
        choices: the named decisions of the search and their values, never an empty tuple; {} = one legal point.
        default: the untuned schedule; one of `choices` for each name.
        legal: cheap; combinations for which it is False are never built.
        module: decisions -> the scheduled, symbolic functions (tvm.IRModule), ready for tvm.compile.
        plan: decisions -> what the planner must know of the module (`block_q`, `chunk`, `min_split`, `max_split`), {}
        where nothing.
    """

    choices: Mapping[str, tuple[int, ...]]
    default: Decisions
    legal: Callable[[Decisions], bool]
    module: Callable[[Decisions], tvm.IRModule]
    plan: Callable[[Decisions], dict[str, int]]


def space_module(workload: Workload, target: Target) -> str:
    """Full name of the Python module that holds the workload's space."""
    return f"{__name__}.{FAMILIES[workload.operator]}_{target.family}"


def get_space(workload: Workload, target_name: str) -> Space:
    """The workload's space on the target.

    Raises:
        UnsupportedWorkload: the target has none.
        ValueError: no such target.
    """
    target = get_target(target_name)
    name = space_module(workload, target)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise UnsupportedWorkload(f"{workload.name}: target {target_name} has no kernels of this family") from None
    return module.space(workload, target)
