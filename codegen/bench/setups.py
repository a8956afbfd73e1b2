"""What a row of the bench is made of: its case, its contestants, and the two roots that they take modules from."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilewright.codegen.bench import peers
from tilewright.codegen.bench.inputs import SEED
from tilewright.codegen.bench.protocol import Call, Contestant
from tilewright.codegen.tolerances import Tolerance
from tilewright.runtime import env
from tilewright.runtime.dispatch import CPU, kernel
from tilewright.runtime.pool_memory import pool_zeros
from tilewright.schedules.workload import Workload


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        workload: the kernel.
        batch: requests.
        tokens: keys of each request (paged_decode), new tokens of each (extends), 1 (lightning_decode).
        heads: KV heads (paged) or heads (lightning).
        required: how many times as fast as the best peer the kernel must be; None: nothing was promised.
        prefix: keys of each request in the pool before the new tokens (paged_extend).
        share: of the machine's limit that the kernel must reach. most_us: the longest that a call may take.
        plan_in_call: our call makes its plan, as the first layer's does; else the plan is given.
    """

    workload: Workload
    batch: int
    tokens: int
    heads: int
    required: float | None = None
    prefix: int = 0
    share: float | None = None
    most_us: float | None = None
    plan_in_call: bool = False

    @property
    def sizes(self) -> str:
        """Readable and without spaces, e.g. "8x2048-h32/8", "4x2048+256-h32/8", "16x1-h8"."""
        heads = f"{self.heads * self.workload.group}/{self.heads}" if self.workload.group else str(self.heads)
        prefix = f"{self.prefix}+" if self.prefix else ""
        return f"{self.batch}x{prefix}{self.tokens}-h{heads}" + ("-planning" if self.plan_in_call else "")

    @property
    def name(self) -> str:
        """Workload and sizes: what a filter is matched against."""
        return f"{self.workload.name} {self.sizes}"


@dataclass(frozen=True)
class Setup:
    """A case with its data, ready to be timed.

    Attributes:
        contestants: ours, ours from the untuned root where one is given, the peers.
        tolerances: of the outputs to compare.
        flops, bytes: of one call, the least that the operator needs.
        memory: in words: what is read from memory, what may come from a cache.
    """

    contestants: list[Contestant]
    tolerances: tuple[Tolerance, ...]
    flops: float
    bytes: float
    memory: str


def needed(workload: Workload) -> list[Workload]:
    """The modules that a case calls."""
    return [workload, Workload("merge", workload.dtype)] if workload.group else [workload]


class Roots:
    """Lets the public functions of this process take their modules from a second root, call by call.

    A context: afterwards the process is as it was. One at a time.
    """

    def __init__(self, untuned: Path) -> None:
        self._untuned = untuned

    def __enter__(self) -> Roots:
        self._given = env.MODULE_PATH.raw
        return self

    def __exit__(self, *_: object) -> None:
        self._set_path(self._given)
        kernel.cache_clear()

    @staticmethod
    def _set_path(path: str) -> None:
        if path:
            os.environ[env.MODULE_PATH.name] = path
        else:
            os.environ.pop(env.MODULE_PATH.name, None)

    def select(self, workload: Workload, *, untuned: bool) -> None:
        """From now on the untuned root's modules win, or those that any process would load.

        The dispatcher's memory is filled again, so that the next call finds its kernels as a serving process does.
        """
        self._set_path(os.pathsep.join(filter(None, (str(self._untuned), self._given))) if untuned else self._given)
        kernel.cache_clear()
        for item in needed(workload):
            sizes = (item.group, item.head_dim_qk, item.head_dim_vo)
            # As the calls ask for them: what is remembered goes by the arguments given.
            options = (item.kv_dtype, item.tree) if item.operator.startswith("paged") else ()
            kernel(item.operator, item.dtype, *sizes, CPU, *options)


def copies(data: int, cold: int) -> int:
    """How many of `data` bytes; at least two, so that contestants on the same copies are never on the same one."""
    return max(2, cold // data + 1)


def first(returned: object) -> tuple[Tensor, ...]:
    """`Call.outputs` of a call that returns its only output."""
    assert isinstance(returned, Tensor)
    return (returned,)


def ours(case: Case, roots: Roots | None, calls: Callable[[], list[Call]]) -> list[Contestant]:
    """Our contestant, and the same with the untuned module: the same function, plan and outputs of its own."""
    if roots is None:
        return [Contestant("tilewright", "ours", calls())]
    return [
        Contestant("tilewright", "ours", calls(), lambda: roots.select(case.workload, untuned=False)),
        Contestant("tilewright untuned", "untuned", calls(), lambda: roots.select(case.workload, untuned=True)),
    ]


def peer_forms(forms: list[dict[str, peers.Form]], outputs: Callable[[object], tuple[Tensor, ...]]) -> list[Contestant]:
    """One contestant for each form; `forms` has one dictionary a copy."""

    def call(run: peers.Form) -> Call:
        return Call(run, outputs)

    return [Contestant(name, "peer", [call(copy[name]) for copy in forms]) for name in forms[0]]


def draw(seed: int = SEED) -> Callable[..., Tensor]:
    """A function from sizes to normal numbers, f32, the same in every run."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator)


def pooled(values: Tensor) -> Tensor:
    """A dense copy in the memory that the project's KV pool uses; ours and torch's data get the same."""
    return pool_zeros(values.shape, values.dtype).copy_(values)
