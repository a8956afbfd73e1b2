"""What one search is about: how its candidates are built and what they are measured on.

A `Problem` is used in three places: `space()` by the search and the builder workers, `build()` by the builder workers,
the cases by the runner worker alone, which never imports tvm. Problems travel to the workers by pickle.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tilewright.codegen.bench import inputs
from tilewright.codegen.bench.inputs import Case
from tilewright.runtime.manifest import CUBIN_NAME, LAUNCHER
from tilewright.schedules.spaces import Space, get_space
from tilewright.schedules.targets import get_target
from tilewright.schedules.workload import Workload

Decisions = Mapping[str, int]


class RefusedError(RuntimeError):
    """A candidate that is not worth measuring."""

    reason = "refused"


class Problem(Protocol):
    """See the module. Equal problems must hash equal: workers remember spaces and cases by problem.

    Attributes:
        name: the workload's name, of the folders and the progress display.
        key: the workload's key; target: the target's name; description: the measured case in words.
    """

    @property
    def name(self) -> str:
        """See the class."""

    @property
    def key(self) -> str:
        """See the class."""

    @property
    def target(self) -> str:
        """See the class."""

    @property
    def description(self) -> str:
        """See the class."""

    def __hash__(self) -> int: ...

    def fingerprint(self) -> str:
        """Changes whenever the same decisions may mean other code: trials of another one are not resumed."""

    def space(self) -> Space:
        """The decisions and what they mean."""

    def prepare(self, shared: Path) -> None:
        """Build once what every candidate needs beside itself, into the root `shared`."""

    def build(self, decisions: Decisions, shared: Path, root: Path) -> None:
        """Build one candidate into the artifact root `root`, a folder of its own (not there yet).

        Raises:
            RefusedError: what the compiler made of it is not worth measuring.
        """

    def measured(self, shared: Path) -> Case:
        """The representative case that is timed."""

    def verified(self, shared: Path) -> list[Case]:
        """Several ragged cases, expected results from the float64 oracle."""


@dataclass(frozen=True)
class WorkloadProblem:
    """The `Problem` of one workload of the catalogue on one target.

    Args:
        workload: what is searched; must have cases (`inputs.OPERATORS`).
        target: for which target, by name.
    """

    workload: Workload
    target: str

    @property
    def name(self) -> str:  # noqa: D102  see Problem
        return self.workload.name

    @property
    def key(self) -> str:  # noqa: D102
        return self.workload.key

    @property
    def description(self) -> str:  # noqa: D102
        return inputs.describe(self.workload, self.target)

    def fingerprint(self) -> str:
        """Of the sources that the modules are made of and the compiler's versions."""
        from tilewright.codegen.build import fingerprint

        return fingerprint(self.workload, get_target(self.target), None)

    def space(self) -> Space:
        """The workload's space on the target."""
        return get_space(self.workload, self.target)

    def prepare(self, shared: Path) -> None:
        """Build the launcher and, for paged operators, the merge kernel."""
        from tilewright.codegen.build import build, build_launcher

        build_launcher(self.target, shared)
        for other, target in inputs.companions(self.workload, self.target):
            build(other, target, dict(get_space(other, target).default), shared)

    def build(self, decisions: Decisions, shared: Path, root: Path) -> None:
        """Build as `tilewright build` does; the launcher is linked from `shared`."""
        from tilewright.codegen.build import build

        launcher = Path(self.target) / LAUNCHER
        shutil.copytree(shared / launcher, root / launcher, copy_function=os.link)
        built = build(self.workload, self.target, decisions, root)
        if get_target(self.target).device == "cuda":
            _refuse_spills(built.folder / CUBIN_NAME)

    def measured(self, shared: Path) -> Case:
        """See `inputs.measured`."""
        return inputs.measured(self.workload, self.target, shared)

    def verified(self, shared: Path) -> list[Case]:
        """See `inputs.verified`."""
        return inputs.verified(self.workload, self.target, shared)


def _refuse_spills(cubin: Path) -> None:
    """A kernel whose registers do not hold what it works on keeps it in memory, between every two instructions."""
    from tilewright.codegen.cuda_toolchain import resources

    for name, registers, stack in resources(cubin):
        if stack:
            raise RefusedError(f"{name}: {stack} bytes of local memory a thread beside {registers} registers")
