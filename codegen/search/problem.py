"""What one search is about: how its candidates are built and what they are measured on.

A `Problem` and what it returns are used in three places: `space()` by the search and the builder workers, `build()` by the
builder workers, the cases by the runner worker alone, which never imports tvm. Problems travel to the workers by pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tilewright.codegen.search.space import Space

Decisions = Mapping[str, int]


class Case(Protocol):
    """One input with its expected result, for any candidate of a problem.

    Attributes:
        flops, bytes: of one call, the least that the operator needs; used of the measured case only.
    """

    flops: float
    bytes: float

    def bind(self, root: Path, plan: Mapping[str, int]) -> Callable[[], object]:
        """A function without arguments that runs the candidate built into `root` on this input, all of the operator.

        Work that a caller does once for many calls (planning) is done here, not in the function.
        """

    def poison(self) -> None:
        """Fill every output and workspace with NaN."""

    def error(self) -> float:
        """The outputs' distance from the expected ones as a share of the tolerance: right means <= 1; NaN means wrong."""


class Problem(Protocol):
    """See the module. Equal problems must hash equal: workers remember spaces and cases by problem.

    Attributes:
        name: the workload's name, of the folders and the progress display.
        key: the workload's key; target: the target's name; description: the measured case in words.
    """

    @property
    def name(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def description(self) -> str: ...

    def __hash__(self) -> int: ...

    def fingerprint(self) -> str:
        """Changes whenever the same decisions may mean other code: trials of another one are not resumed."""

    def space(self) -> Space:
        """The decisions and what they mean."""

    def prepare(self, shared: Path) -> None:
        """Build once what every candidate needs beside itself, into the root `shared`."""

    def build(self, decisions: Decisions, root: Path) -> None:
        """Build one candidate into the artifact root `root`, a folder of its own."""

    def measured(self, shared: Path) -> Case:
        """The representative case that is timed."""

    def verified(self, shared: Path) -> list[Case]:
        """Several ragged cases, expected results from the float64 oracle."""
