"""What is timed: workloads at fixed sizes, our call through the public functions beside torch on the same data."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import tilewright
from tilewright.codegen.bench import peers
from tilewright.codegen.bench.inputs import DTYPES, SEED
from tilewright.codegen.bench.machine import cold_bytes
from tilewright.codegen.bench.protocol import Call, Contestant
from tilewright.codegen.tolerances import LIGHTNING, LIGHTNING_STATE, PAGED, Tolerance
from tilewright.runtime import env
from tilewright.runtime.dispatch import CPU, kernel
from tilewright.runtime.lightning import slopes as model_slopes
from tilewright.runtime.pool_memory import pool_zeros
from tilewright.schedules.catalog import TUNE_PRESET
from tilewright.schedules.workload import Workload


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        workload: the kernel.
        batch: requests.
        tokens: keys of each request (paged_decode), new tokens of each (extends; no prefix), 1 (lightning_decode).
        heads: KV heads (paged) or heads (lightning).
        required: how many times as fast as the best peer the kernel must be; None: nothing was promised.
    """

    workload: Workload
    batch: int
    tokens: int
    heads: int
    required: float | None = None

    @property
    def sizes(self) -> str:
        """Readable and without spaces, e.g. "8x2048-h32/8", "16x1-h8"."""
        heads = f"{self.heads * self.workload.group}/{self.heads}" if self.workload.group else str(self.heads)
        return f"{self.batch}x{self.tokens}-h{heads}"

    @property
    def name(self) -> str:
        """Workload and sizes: what a filter is matched against."""
        return f"{self.workload.name} {self.sizes}"


def _paged(operator: str, dtype: str) -> Workload:
    return Workload(operator, dtype, 4, 128, 128)


def _lightning(operator: str, dtype: str) -> Workload:
    return Workload(operator, dtype, None, 128, 128)


CASES = (
    Case(_paged("paged_decode", "f32"), 8, 2048, 8, 1.5),
    Case(_paged("paged_decode", "bf16"), 8, 2048, 8, 1.5),
    Case(_paged("paged_decode", "fp16"), 8, 2048, 8),
    Case(_paged("paged_extend", "f32"), 1, 1024, 8, 0.9),
    Case(_paged("paged_extend", "bf16"), 1, 1024, 8, 1.4),
    Case(_paged("paged_extend", "fp16"), 1, 1024, 8),
    Case(_lightning("lightning_extend", "f32"), 1, 2048, 8, 2.0),
    Case(_lightning("lightning_extend", "bf16"), 1, 2048, 8, 2.0),
    Case(_lightning("lightning_decode", "f32"), 16, 1, 8, 1.5),
    Case(_lightning("lightning_decode", "f32"), 16, 1, 32, 1.5),
    Case(_lightning("lightning_decode", "bf16"), 16, 1, 8, 1.5),
    Case(_lightning("lightning_decode", "bf16"), 16, 1, 32, 1.5),
)
# The end of `make tune`: the workloads that it tunes, at the first of their sizes.
QUICK = tuple(next(case for case in CASES if case.workload == workload) for workload in TUNE_PRESET)


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
            kernel(item.operator, item.dtype, item.group, item.head_dim_qk, item.head_dim_vo, CPU)


def _copies(data: int, cold: int) -> int:
    """How many of `data` bytes; at least two, so that contestants on the same copies are never on the same one."""
    return max(2, cold // data + 1)


def _rotated(calls: list[Call], by: int) -> list[Call]:
    by %= len(calls)
    return calls[by:] + calls[:by]


def _first(returned: object) -> tuple[Tensor, ...]:
    assert isinstance(returned, Tensor)
    return (returned,)


def set_up(case: Case, *, roots: Roots | None = None, cold: int | None = None) -> Setup:
    """Make the data and the contestants of a case.

    Args:
        case: what to time.
        roots: has the case's module built from the default schedule; None: no such contestant.
        cold: bytes that the copies of a memory-bound case must exceed; None: enough for this machine's caches.
    """
    make = _MAKERS[case.workload.operator]
    return make(case, roots, cold_bytes() if cold is None else cold)


def _ours(case: Case, roots: Roots | None, calls: Callable[[], list[Call]]) -> list[Contestant]:
    """Our contestant, and the same with the untuned module: the same function, plan and outputs of its own."""
    if roots is None:
        return [Contestant("tilewright", "ours", calls())]
    return [
        Contestant("tilewright", "ours", calls(), lambda: roots.select(case.workload, untuned=False)),
        Contestant(
            "tilewright untuned", "untuned", _rotated(calls(), 1), lambda: roots.select(case.workload, untuned=True)
        ),
    ]


def _peers(forms: list[dict[str, peers.Form]], outputs: Callable[[object], tuple[Tensor, ...]]) -> list[Contestant]:
    """One contestant for each form; `forms` has one dictionary a copy."""

    def call(run: peers.Form) -> Call:
        return Call(run, outputs)

    return [
        Contestant(name, "peer", _rotated([call(copy[name]) for copy in forms], turn))
        for turn, name in enumerate(forms[0])
    ]


def _draw(seed: int = SEED) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator)


def _pooled(values: Tensor) -> Tensor:
    """A dense copy in the memory that the project's KV pool uses; ours and torch's data get the same."""
    return pool_zeros(values.shape, values.dtype).copy_(values)


def _paged_decode(case: Case, roots: Roots | None, cold: int) -> Setup:
    """One token per request; every request's keys in slots drawn at random, for torch gathered beforehand."""
    workload, batch, tokens, kv_heads = case.workload, case.batch, case.tokens, case.heads
    dim, dim_v, heads = workload.head_dim_qk or 0, workload.head_dim_vo or 0, (workload.group or 1) * kv_heads
    dtype, normal = DTYPES[workload.dtype], _draw()
    slots = batch * tokens
    table = torch.randperm(slots, generator=torch.Generator().manual_seed(SEED)).view(batch, tokens)
    q = normal(batch, heads, dim).to(dtype)
    k_buffer, v_buffer = normal(slots, kv_heads, dim).to(dtype), normal(slots, kv_heads, dim_v).to(dtype)
    k_buffer, v_buffer = _pooled(k_buffer), _pooled(v_buffer)
    moved = float((k_buffer.numel() + v_buffer.numel() + q.numel() + batch * heads * dim_v) * dtype.itemsize)
    copies = _copies(slots * kv_heads * (dim + dim_v) * dtype.itemsize, cold)
    pools = [(k_buffer, v_buffer), *((_pooled(k_buffer), _pooled(v_buffer)) for _ in range(copies - 1))]
    rows, req_to_token = torch.arange(batch, dtype=torch.int32), table.to(torch.int32)
    seq_lens = torch.full((batch,), tokens, dtype=torch.int32)

    def calls() -> list[Call]:
        plan = tilewright.plan_decode(
            seq_lens, num_qo_heads=heads, num_kv_heads=kv_heads, head_dim_qk=dim, head_dim_vo=dim_v, device="cpu"
        )
        out = torch.empty((batch, heads, dim_v), dtype=dtype)

        def call(keys: Tensor, values: Tensor) -> Call:
            return Call(
                lambda: tilewright.decode_attention(q, keys, values, req_to_token, rows, seq_lens, out=out, plan=plan),
                _first,
            )

        return [call(*pool) for pool in pools]

    def gathered(pool: Tensor) -> Tensor:
        return _pooled(pool[table].transpose(1, 2))

    forms = [peers.decode(q, gathered(keys), gathered(values)) for keys, values in pools]
    return Setup(
        [*_ours(case, roots, calls), *_peers(forms, _first)],
        (PAGED[DTYPES[workload.dtype]],),
        2.0 * slots * heads * (dim + dim_v),
        moved,
        f"cold: {copies} KV pools of {(k_buffer.nbytes + v_buffer.nbytes) / 1e6:.0f} MB in turn",
    )


def _paged_extend(case: Case, roots: Roots | None, cold: int) -> Setup:
    """Causal, no prefix: keys and values are the new tokens' own."""
    del cold  # bound by arithmetic: the same data every time
    workload, batch, tokens, kv_heads = case.workload, case.batch, case.tokens, case.heads
    if batch != 1:
        raise ValueError(f"batch: got {batch}, expected 1 (torch's causal form takes one length)")
    dim, dim_v, heads = workload.head_dim_qk or 0, workload.head_dim_vo or 0, (workload.group or 1) * kv_heads
    dtype, normal = DTYPES[workload.dtype], _draw()
    q, k = normal(tokens, heads, dim).to(dtype), normal(tokens, kv_heads, dim).to(dtype)
    v = normal(tokens, kv_heads, dim_v).to(dtype)
    k_buffer, v_buffer = torch.zeros((1, kv_heads, dim), dtype=dtype), torch.zeros((1, kv_heads, dim_v), dtype=dtype)
    req_to_token, row = torch.zeros((1, tokens), dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    lengths = torch.tensor([tokens], dtype=torch.int32)

    def calls() -> list[Call]:
        plan = tilewright.plan_extend(
            lengths, lengths, num_qo_heads=heads, num_kv_heads=kv_heads, head_dim_qk=dim, head_dim_vo=dim_v,
            device="cpu",
        )  # fmt: skip
        out = torch.empty((tokens, heads, dim_v), dtype=dtype)
        return [
            Call(
                lambda: tilewright.extend_attention(
                    q, k, v, k_buffer, v_buffer, req_to_token, row, lengths, lengths, out=out, plan=plan
                ),
                _first,
            )
        ]

    def by_head(x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous()

    def outputs(returned: object) -> tuple[Tensor, ...]:
        assert isinstance(returned, Tensor)
        return (returned[0].transpose(0, 1),)

    return Setup(
        [*_ours(case, roots, calls), *_peers([peers.extend(by_head(q), by_head(k), by_head(v))], outputs)],
        (PAGED[DTYPES[workload.dtype]],),
        tokens * (tokens + 1.0) * heads * (dim + dim_v),
        float((q.numel() + k.numel() + v.numel() + tokens * heads * dim_v) * dtype.itemsize),
        "warm: bound by arithmetic",
    )


def _lightning_data(case: Case, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
    """q, k, v [tokens, H, D]; states [B, H, Dk, Dv]; slopes; scale."""
    workload, dtype, normal = case.workload, DTYPES[case.workload.dtype], _draw()
    dim, dim_v = workload.head_dim_qk or 0, workload.head_dim_vo or 0
    q, v = normal(tokens, case.heads, dim).to(dtype), normal(tokens, case.heads, dim_v).to(dtype)
    k = (normal(tokens, case.heads, dim) * dim**-0.5).to(dtype)
    return q, k, v, normal(case.batch, case.heads, dim, dim_v), model_slopes(case.heads), dim**-0.5


def _lightning_extend(case: Case, roots: Roots | None, cold: int) -> Setup:
    """One request with an initial state."""
    del cold  # bound by arithmetic: the same data every time
    if case.batch != 1:
        raise ValueError(f"batch: got {case.batch}, expected 1 (the chunked torch form takes one length)")
    q, k, v, state, slopes, scale = _lightning_data(case, case.tokens)
    slot, indptr = torch.zeros(1, dtype=torch.int32), torch.tensor([0, case.tokens], dtype=torch.int32)

    def calls() -> list[Call]:
        mine, out = state.clone(), torch.empty_like(v)
        return [
            Call(
                lambda: tilewright.lightning_extend(q, k, v, mine, slot, indptr, slopes, scale=scale, out=out),
                lambda returned: (*_first(returned), mine[0]),
            )
        ]

    queries, keys, values = (x.transpose(0, 1).contiguous() for x in (q, k, v))
    contestants = _ours(case, roots, calls)
    for name in peers.lightning_extend(queries, keys, values, state[0], slopes, scale):
        mine = state[0].clone()
        run = peers.lightning_extend(queries, keys, values, mine, slopes, scale)[name]

        def outputs(returned: object, mine: Tensor = mine) -> tuple[Tensor, ...]:
            assert isinstance(returned, Tensor)
            return returned.transpose(0, 1), mine

        contestants.append(Contestant(name, "peer", [Call(run, outputs)]))
    return Setup(
        contestants,
        (LIGHTNING[DTYPES[case.workload.dtype]], LIGHTNING_STATE[DTYPES[case.workload.dtype]]),
        4.0 * q.numel() * v.shape[2],
        float(sum(x.nbytes for x in (q, k, v, v)) + 2 * state.nbytes),
        "warm: bound by arithmetic",
    )


def _lightning_decode(case: Case, roots: Roots | None, cold: int) -> Setup:
    """One token per request; states in slots drawn at random, for torch gathered beforehand."""
    batch = case.batch
    q, k, v, state, slopes, scale = _lightning_data(case, batch)
    copies = _copies(state.nbytes, cold)
    slots = torch.randperm(batch, generator=torch.Generator().manual_seed(SEED))
    indices = slots.to(torch.int32)

    def calls() -> list[Call]:
        out = torch.empty_like(v)

        def call(pool: Tensor) -> Call:
            return Call(
                lambda: tilewright.lightning_decode(q, k, v, pool, indices, slopes, scale=scale, out=out),
                lambda returned: (*_first(returned), pool[slots]),
            )

        return [call(state[slots.argsort()]) for _ in range(copies)]

    contestants = _ours(case, roots, calls)
    for name in peers.lightning_decode(q, k, v, state, slopes, scale):
        own = [state.clone() for _ in range(copies)]
        theirs = [
            Call(
                peers.lightning_decode(q, k, v, mine, slopes, scale)[name],
                lambda returned, mine=mine: (*_first(returned), mine),  # type: ignore[misc]
            )
            for mine in own
        ]
        contestants.append(Contestant(name, "peer", theirs))
    return Setup(
        contestants,
        (LIGHTNING[DTYPES[case.workload.dtype]], LIGHTNING_STATE[DTYPES[case.workload.dtype]]),
        4.0 * q.numel() * v.shape[2],
        float(sum(x.nbytes for x in (q, k, v, v)) + 2 * state.nbytes),
        f"cold: {copies} state pools of {state.nbytes / 1e6:.0f} MB in turn",
    )


_MAKERS: dict[str, Callable[[Case, Roots | None, int], Setup]] = {
    "paged_decode": _paged_decode,
    "paged_extend": _paged_extend,
    "lightning_extend": _lightning_extend,
    "lightning_decode": _lightning_decode,
}
