"""Valid ragged inputs for every searched operator, with expected results in float64.

Imports torch, never tvm. Everything is made from a fixed seed: the same workload always gets the same data. Pools are
larger than what is used, their slots are permuted, and what no request may read is NaN.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from tilewright.codegen.tolerances import LIGHTNING, LIGHTNING_STATE, PAGED, excess, lse_error, worst
from tilewright.runtime import store
from tilewright.runtime.plan import plan_decode, plan_extend
from tilewright.runtime.planner import OFF, Tiling
from tilewright.runtime.pool_memory import pool_zeros
from tilewright.schedules.catalog import all_workloads
from tilewright.schedules.targets import get_target
from tilewright.schedules.workload import Workload

OPERATORS = ("paged_decode", "paged_extend", "lightning_decode", "lightning_extend")
SEED = 20260
LISTED = 12  # requests whose lengths are given one by one
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "f32": torch.float32}


class Case(Protocol):
    """One input with its expected result, for any candidate of a problem.

    Attributes:
        flops, bytes: of one call, the least that the operator needs.
        device: where the tensors are: "cpu" or "cuda".
    """

    flops: float
    bytes: float

    @property
    def device(self) -> str:
        """See the class."""

    def bind(self, root: Path, plan: Mapping[str, int]) -> Callable[[], object]:
        """A function without arguments that runs the candidate built into `root` on this input, all of the operator.

        Work that a caller does once for many calls (planning) is done here, not in the function. On a GPU the function
        can be captured in a graph, once it has run.
        """

    def poison(self) -> None:
        """Fill every output and workspace with NaN and restore what a call changes in place."""

    def error(self) -> float:
        """How far the outputs are off, as a share of the tolerance: right means <= 1; NaN means wrong."""


@dataclass(frozen=True)
class Paged:
    """Lengths of a paged batch: (prefix, new tokens) of each request, and the number of KV heads."""

    requests: tuple[tuple[int, int], ...]
    kv_heads: int


@dataclass(frozen=True)
class Mix:
    """Several batches as one case, each so many times: what is found must serve them all."""

    parts: tuple[tuple[int, Paged], ...]


@dataclass(frozen=True)
class Lightning:
    """Lengths of a lightning batch: tokens of each request, and the number of heads."""

    tokens: tuple[int, ...]
    heads: int


# What is timed. Ragged, about as much data as docs/performance's tables: decode 8 x 2048 keys, extend 1024 new tokens.
MEASURED: dict[str, Paged | Lightning] = {
    "paged_decode": Paged(tuple((n - 1, 1) for n in (2048, 1537, 2571, 1790, 2306, 1025, 3071, 2036)), 8),
    "paged_extend": Paged(((0, 771), (515, 253)), 4),
    "lightning_extend": Lightning((1537, 511), 8),
    "lightning_decode": Lightning((1,) * 16, 32),
}
# The same for AVX-512 and tiles, which are found on machines of many cores: about the sizes of a server.
MEASURED_ON_SERVERS: dict[str, Paged | Lightning] = {
    "paged_decode": Paged(
        tuple((n - 1, 1) for n in (2048, 1537, 2571, 1790, 2306, 1025, 3071, 2036, 4096, 601, 1200, 2900)), 8
    ),
    "paged_extend": Paged(((0, 1024), (2048, 256)), 8),
}


def _spread(count: int, mean: int) -> list[int]:
    """So many lengths from half to one and a half times the mean."""
    return [round(mean * (0.5 + (index + 0.5) / count)) for index in range(count)]


# GPUs: a full one of mixed lengths, a half-full one of equal lengths, one long context, a short one (decode); long
# prompts, chunks after a prefix (extend). Counts give each about the same share of the time. Both kinds of lengths:
# schedules that are best for mixed ones alone lost a tenth on equal ones.
MEASURED_ON_GPU: dict[str, Mix] = {
    "paged_decode": Mix(
        (
            (1, Paged(tuple((n - 1, 1) for n in _spread(64, 4096)), 8)),
            (2, Paged(((4095, 1),) * 16, 8)),
            (3, Paged(((32767, 1),), 8)),
            (4, Paged(((4095, 1),), 8)),
        )
    ),
    "paged_extend": Mix(
        (
            (1, Paged(((0, 8192),), 8)),
            (1, Paged(tuple(zip(_spread(8, 4096), _spread(8, 512), strict=True)), 8)),
        )
    ),
}
# Latent attention: one KV head, whose values are the first columns of its keys.
MEASURED_LATENT = Paged(tuple((n - 1, 1) for n in (4096, 3573, 4571, 3790, 4306, 2025, 6071, 4036) * 2), 1)
# Of KV pools that are read in turn, where the keys must come from memory: several times the last cache.
COLD_BYTES = {"server": 1 << 30, "gpu": 256 << 20}
# What a winner must get right: around tile edges, empty requests, one token, no prefix, odd heads.
VERIFIED: dict[str, tuple[Paged | Lightning, ...]] = {
    "paged_decode": (
        Paged(((0, 1), (1, 1), (15, 1), (16, 1), (62, 1), (63, 1), (64, 1)), 1),
        Paged(((1299, 1),), 2),
        Paged(((7, 1), (511, 1), (512, 1), (128, 1), (255, 1)), 3),
    ),
    "paged_extend": (
        Paged(((0, 1), (0, 15), (0, 16), (0, 17), (5, 31), (0, 33)), 1),
        Paged(((97, 37), (0, 130), (64, 64)), 2),
        Paged(((700, 1), (0, 0), (33, 97)), 1),
    ),
    "lightning_extend": (
        Lightning((1, 0, 15, 16, 17, 63, 64, 65), 2),
        Lightning((257,), 3),
        Lightning((31, 127, 129), 1),
    ),
    "lightning_decode": (Lightning((1,), 1), Lightning((1,) * 5, 3), Lightning((1,) * 17, 2)),
}


def check_operator(workload: Workload) -> None:
    """Raises ValueError unless the workload's operator is one that has cases and its sizes are static."""
    if workload.tree:
        raise ValueError(f"{workload.name}: there is nothing to search; a tree's kernel is built as it is by default")
    if workload.operator not in OPERATORS or workload.general:
        raise ValueError(
            f"{workload.name}: there is nothing to search; expected a specialised workload of {', '.join(OPERATORS)}"
        )


def companions(workload: Workload, target: str) -> list[tuple[Workload, str]]:
    """Other kernels that a call of the operator needs, with the targets that have them."""
    if not workload.operator.startswith("paged"):
        return []
    merge = Workload("merge", workload.dtype)
    return [(merge, target if merge in all_workloads(target) else "x86-avx2")]


def describe(workload: Workload, target: str) -> str:
    """The measured case in words."""
    lengths = _lengths(workload, target)
    if isinstance(lengths, Mix):
        return "; ".join(f"{times} times {_sizes(workload, part)}" for times, part in lengths.parts)
    if isinstance(lengths, Paged):
        return f"{_sizes(workload, lengths)}; page size 1, permuted"
    return f"tokens {', '.join(map(str, lengths.tokens))}; {lengths.heads} heads; permuted slots"


def _sizes(workload: Workload, lengths: Paged) -> str:
    heads = f"{(workload.group or 1) * lengths.kv_heads}/{lengths.kv_heads} heads"
    if len(lengths.requests) <= LISTED:
        return f"(prefix + new tokens) {', '.join(f'{prefix}+{new}' for prefix, new in lengths.requests)}; {heads}"
    total = sum(prefix + new for prefix, new in lengths.requests)
    new = sum(new for _, new in lengths.requests)
    return f"{len(lengths.requests)} requests of {total} tokens, {new} of them new, evenly spread; {heads}"


def measured(workload: Workload, target: str, shared: Path) -> Case:
    """The representative case. `shared`: the artifact root that holds the workload's `companions`."""
    return _case(workload, target, shared, _lengths(workload, target), SEED)


def verified(workload: Workload, target: str, shared: Path) -> list[Case]:
    """The ragged cases that a winner is held to, expected results from the oracles of `schedules`."""
    cases = enumerate(VERIFIED[workload.operator], 1)
    return [_case(workload, target, shared, lengths, SEED + index, oracle=True) for index, lengths in cases]


def _lengths(workload: Workload, target: str) -> Paged | Mix | Lightning:
    family = get_target(target).family
    if family == "cuda":
        mix = MEASURED_ON_GPU[workload.operator]
        one_head = tuple((times, replace(part, kv_heads=1)) for times, part in mix.parts)
        return Mix(one_head) if _is_latent(workload) else mix
    if not _of_servers(target):
        return MEASURED[workload.operator]
    if _is_latent(workload):
        return MEASURED_LATENT
    return MEASURED_ON_SERVERS.get(workload.operator, MEASURED[workload.operator])


def _of_servers(target: str) -> bool:
    where = get_target(target)
    return where.family == "amx" or (where.family == "x86" and where.lanes == 16)


def _cold_bytes(target: str) -> int:
    """Bytes of pools that calls take in turn; 0 = one pool."""
    if get_target(target).family == "cuda":
        return COLD_BYTES["gpu"]
    return COLD_BYTES["server"] if _of_servers(target) else 0


def _is_latent(workload: Workload) -> bool:
    return workload.operator == "paged_decode" and (workload.head_dim_vo or 0) < (workload.head_dim_qk or 0)


def _case(
    workload: Workload, target: str, shared: Path, lengths: Paged | Mix | Lightning, seed: int, oracle: bool = False
) -> Case:
    if isinstance(lengths, Mix):
        parts = [
            (times, PagedCase(workload, target, shared, part, seed + index, oracle=oracle))
            for index, (times, part) in enumerate(lengths.parts)
        ]
        return MixedCase(parts)
    if isinstance(lengths, Paged):
        return PagedCase(workload, target, shared, lengths, seed, oracle=oracle)
    return LightningCase(workload, target, lengths, seed, oracle=oracle)


def _f64(tensor: torch.Tensor) -> np.ndarray:
    """For the oracles: float64 holds every value of every type exactly."""
    return tensor.double().cpu().numpy()


class PagedCase:
    """Paged decode or causal extend: a `Case`.

    Decode reads its keys, the current token's too, from the pool; extend reads the prefix from the pool and the new
    tokens from k_new and v_new. On the CPUs of servers and on GPUs decode is timed with cold pools: calls take
    copies of the pool in turn. (What an extend of these sizes touches is larger than a GPU's cache.)
    """

    def __init__(
        self, workload: Workload, target: str, shared: Path, lengths: Paged, seed: int, *, oracle: bool
    ) -> None:
        self._workload, self._target, self._shared, self._lengths = workload, target, shared, lengths
        dim, dim_v, group = workload.head_dim_qk or 0, workload.head_dim_vo or 0, workload.group or 1
        heads, kv_heads, dtype = group * lengths.kv_heads, lengths.kv_heads, DTYPES[workload.dtype]
        self._decode = workload.operator == "paged_decode"
        self.device = device = get_target(target).device
        draw = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=draw, device=device).to(dtype)

        def shuffled(count: int) -> torch.Tensor:
            return torch.randperm(count, generator=draw, device=device)

        tokens = sum(new for _, new in lengths.requests)
        pooled = [prefix + new if self._decode else prefix for prefix, new in lengths.requests]
        slots = sum(pooled) + 64
        self._q = normal(tokens, heads, dim)
        self._k_buffer = pool_zeros((slots, kv_heads, dim), dtype, device).fill_(math.nan)
        latent = _is_latent(workload)
        if latent:
            self._v_buffer = self._k_buffer[..., :dim_v]
        else:
            self._v_buffer = pool_zeros((slots, kv_heads, dim_v), dtype, device).fill_(math.nan)
        self._scales: tuple[float, ...] = (0.75, 0.5) if workload.kv_dtype else ()
        self._k_new, self._v_new = self._k_buffer, self._v_buffer
        if not self._decode:
            self._k_new, self._v_new = normal(tokens, kv_heads, dim), normal(tokens, kv_heads, dim_v)
        batch = len(lengths.requests)
        self._req_to_token = torch.zeros((batch + 3, max(pooled) + 5), dtype=torch.int32, device=device)
        self._req_pool_indices = shuffled(batch + 3)[:batch].to(torch.int32)
        free = shuffled(slots)
        self._sinks = torch.full((heads,), -math.inf, device=device)
        self._out = torch.empty((tokens, heads, dim_v), dtype=dtype, device=device)
        self._lse = torch.empty((tokens, heads), device=device)
        self._part_o, self._part_lse = torch.empty(0), torch.empty(0)
        self._scale = dim**-0.5
        self._expected = torch.empty((tokens, heads, dim_v), dtype=torch.float64, device=device)
        self._expected_lse = torch.empty((tokens, heads), dtype=torch.float64, device=device)
        rows_of_table = self._req_pool_indices.tolist()

        row = pairs = keys_read = 0
        for index, ((prefix, new), length) in enumerate(zip(lengths.requests, pooled, strict=True)):
            mine, free = free[:length], free[length:]
            self._k_buffer[mine] = normal(length, kv_heads, dim)
            if not latent:
                self._v_buffer[mine] = normal(length, kv_heads, dim_v)
            if self._scales:
                for pool, scale in zip((self._k_buffer, self._v_buffer), self._scales, strict=True):
                    pool[mine] = _codes(pool[mine], scale).to(dtype) * scale  # exact: so few bits fit bf16
            self._req_to_token[rows_of_table[index], :length] = mine.to(torch.int32)
            if not oracle:
                rows = slice(row, row + new)
                keys, values = self._k_buffer[mine], self._v_buffer[mine]
                if not self._decode:
                    keys, values = torch.cat((keys, self._k_new[rows])), torch.cat((values, self._v_new[rows]))
                expected = causal_attention(self._q[rows], keys, values, self._scale)
                self._expected[rows], self._expected_lse[rows] = expected
            row += new
            pairs += prefix * new + new * (new + 1) // 2
            keys_read += prefix + new
        if oracle:
            self._ask_oracle()
        self.flops = 2.0 * pairs * heads * (dim + dim_v)
        row = dim if latent else dim + dim_v
        pools: tuple[torch.Tensor, ...] = (self._k_buffer, self._v_buffer)
        if self._scales:
            codes = (_codes(pool, scale) for pool, scale in zip(pools, self._scales, strict=True))
            pools = tuple(code.view(torch.uint8) for code in codes)
        self.bytes = float(keys_read * kv_heads * row * pools[0].itemsize)
        self.bytes += float(tokens * heads * (dim + dim_v) * dtype.itemsize)
        self._pools = [pools]
        if self._decode and not oracle:
            for _ in range(math.ceil(_cold_bytes(target) / self.bytes) - 1):
                k, v = (pool_zeros(pool.shape, pool.dtype, device).copy_(pool) for pool in pools)
                self._pools.append((k, k[..., :dim_v] if latent else v))
        # One order for all candidates: in turns of their own they would follow each other through warm pools.
        self._next_pool = itertools.cycle(self._pools).__next__

    def _ask_oracle(self) -> None:
        from tilewright.schedules.paged_attention import reference

        requests = self._lengths.requests
        out, lse = reference.extend(
            _f64(self._q),
            None if self._decode else _f64(self._k_new),
            None if self._decode else _f64(self._v_new),
            _f64(self._k_buffer),
            _f64(self._v_buffer),
            self._req_to_token.cpu().numpy(),
            self._req_pool_indices.cpu().numpy(),
            np.array([prefix + new for prefix, new in requests]),
            np.array([new for _, new in requests]),
        )
        self._expected, self._expected_lse = (torch.from_numpy(x).to(self.device) for x in (out, lse))

    def bind(self, root: Path, plan: Mapping[str, int]) -> Callable[[], object]:
        """See `Case`."""
        kernel = store.load(self._workload, self._target, root=root).function
        (merge_workload, merge_target), *_ = companions(self._workload, self._target)
        merge = store.load(merge_workload, merge_target, root=self._shared).function
        new = np.array([new for _, new in self._lengths.requests])
        keys = np.array([prefix + new for prefix, new in self._lengths.requests])
        heads, dim_v = self._out.shape[1:]
        sizes: dict[str, Any] = {
            "num_qo_heads": heads,
            "num_kv_heads": self._lengths.kv_heads,
            "head_dim_qk": self._q.shape[-1],
            "head_dim_vo": dim_v,
            "device": self.device,
        }
        planned = plan_decode(keys, **sizes) if self._decode else plan_extend(keys, new, **sizes)
        work = planned.work(Tiling(**plan), OFF, self._decode)
        # Behind the partial states there may be counters, which are 0 between calls.
        states = work.buffers.capacity[2]
        self._part_o, self._part_lse = work.part_o[:states], work.part_lse[:states]
        keys_new = () if self._decode else (self._k_new, self._v_new)
        arguments = (
            *keys_new,
            self._req_to_token, self._req_pool_indices, planned.zeros, work.items, self._sinks,
            self._out, self._lse, work.part_o, work.part_lse,
            self._scale * math.log2(math.e), 0.0, 0.0, OFF, 0, *self._scales,
        )  # fmt: skip

        def call() -> None:
            kernel(self._q, *self._next_pool(), *arguments)
            if work.rows is not None:
                merge(work.part_o, work.part_lse, work.rows, self._sinks, self._out, self._lse)

        return call

    def poison(self) -> None:
        """See `Case`."""
        for tensor in (self._out, self._lse, self._part_o, self._part_lse):
            tensor.fill_(math.nan)

    def error(self) -> float:
        """See `Case`."""
        tolerance = PAGED[self._out.dtype]
        return worst(
            excess(self._out, self._expected, tolerance), lse_error(self._lse, self._expected_lse) / tolerance.lse
        )


def _codes(numbers: torch.Tensor, scale: float) -> torch.Tensor:
    return (numbers.float() / scale).to(torch.float8_e4m3fn)


def causal_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense bottom-right causal attention of one request in float64: out and natural-log LSE.

    Args:
        q: [T, Hq, D], T <= N.
        keys: [N, Hk, D] in order of position.
        values: [N, Hk, Dv].
        scale: of the scores.
    """
    tokens, heads, _ = q.shape
    group = heads // keys.shape[1]
    exact: dict[str, Any] = {"dtype": torch.float64, "device": q.device}
    out, lse = torch.empty((tokens, heads, values.shape[-1]), **exact), torch.empty((tokens, heads), **exact)
    hidden = torch.ones((tokens, len(keys)), dtype=torch.bool, device=q.device).triu(len(keys) - tokens + 1)
    for head in range(heads):
        score = (q[:, head].double() @ keys[:, head // group].double().T * scale).masked_fill_(hidden, -math.inf)
        lse[:, head] = torch.logsumexp(score, -1)
        out[:, head] = torch.exp(score - lse[:, head, None]) @ values[:, head // group].double()
    return out, lse


class MixedCase:
    """Several cases, each so many times in a call: a `Case`."""

    def __init__(self, parts: list[tuple[int, PagedCase]]) -> None:
        self._parts = parts
        self.device = parts[0][1].device
        self.flops = sum(times * part.flops for times, part in parts)
        self.bytes = sum(times * part.bytes for times, part in parts)

    def bind(self, root: Path, plan: Mapping[str, int]) -> Callable[[], object]:
        """See `Case`."""
        calls = [(times, part.bind(root, plan)) for times, part in self._parts]

        def call() -> None:
            for times, run in calls:
                for _ in range(times):
                    run()

        return call

    def poison(self) -> None:
        """See `Case`."""
        for _, part in self._parts:
            part.poison()

    def error(self) -> float:
        """See `Case`: the worst of them."""
        return worst(*(part.error() for _, part in self._parts))


class LightningCase:
    """Lightning decode or extend, every second request with an initial state: a `Case`."""

    device = "cpu"

    def __init__(self, workload: Workload, target: str, lengths: Lightning, seed: int, *, oracle: bool) -> None:
        self._workload, self._target = workload, target
        dim, dim_v, heads = workload.head_dim_qk or 0, workload.head_dim_vo or 0, lengths.heads
        self._decode = workload.operator == "lightning_decode"
        dtype, batch, tokens = DTYPES[workload.dtype], len(lengths.tokens), sum(lengths.tokens)
        draw = torch.Generator().manual_seed(seed)
        self._q = torch.randn((tokens, heads, dim), generator=draw).to(dtype)
        self._k = (torch.randn((tokens, heads, dim), generator=draw) * dim**-0.5).to(dtype)
        self._v = torch.randn((tokens, heads, dim_v), generator=draw).to(dtype)
        self._initial = torch.full((batch + 2, heads, dim, dim_v), math.nan)
        self._indices = torch.randperm(batch + 2, generator=draw)[:batch].to(torch.int32)
        has_state = [self._decode or index % 2 == 1 for index in range(batch)]
        self._has_state = torch.tensor(has_state, dtype=torch.int32)
        self._starts = torch.tensor([0, *np.cumsum(lengths.tokens)], dtype=torch.int32)
        self._slopes = 2.0 ** (-8 * torch.arange(1, heads + 1, dtype=torch.float32) / heads)
        self._scale = dim**-0.5
        self._out = torch.empty((tokens, heads, dim_v), dtype=dtype)

        touched = [index for index in range(batch) if lengths.tokens[index]]
        for index in range(batch):
            if has_state[index]:
                self._initial[self._indices[index]] = torch.randn((heads, dim, dim_v), generator=draw)
        self._touched = self._indices[touched].long()
        self._state = self._initial.clone()
        self._expected = torch.empty((tokens, heads, dim_v), dtype=torch.float64)
        self._expected_state = self._initial.double()
        if oracle:
            self._ask_oracle()
        else:
            for index in touched:
                rows, slot = slice(int(self._starts[index]), int(self._starts[index + 1])), int(self._indices[index])
                start = self._expected_state[slot] if has_state[index] else torch.zeros_like(self._expected_state[slot])
                self._expected[rows], self._expected_state[slot] = recurrence(
                    self._q[rows], self._k[rows], self._v[rows], start, self._slopes, self._scale
                )
        self.flops = 4.0 * tokens * heads * dim * dim_v
        moved = tokens * heads * 2 * (dim + dim_v) * dtype.itemsize
        states = len(touched) + sum(has_state[index] for index in touched)
        self.bytes = float(moved + states * heads * dim * dim_v * 4)

    def _ask_oracle(self) -> None:
        from tilewright.schedules.lightning_attention import reference

        out, state = reference.extend(
            _f64(self._q),
            _f64(self._k),
            _f64(self._v),
            _f64(self._initial),
            self._indices.numpy(),
            self._starts.numpy(),
            _f64(self._slopes),
            has_initial_state=self._has_state.numpy(),
        )
        self._expected, self._expected_state = torch.from_numpy(out), torch.from_numpy(state)

    def bind(self, root: Path, plan: Mapping[str, int]) -> Callable[[], object]:
        """See `Case`."""
        kernel = store.load(self._workload, self._target, root=root).function
        head = (self._q, self._k, self._v, self._state, self._indices)
        middle = () if self._decode else (self._has_state, self._starts)
        arguments = (*head, *middle, self._slopes, self._out, self._scale)
        return lambda: kernel(*arguments)

    def poison(self) -> None:
        """See `Case`."""
        self._out.fill_(math.nan)
        self._state.copy_(self._initial)

    def error(self) -> float:
        """See `Case`; also whether a slot was touched that must not be."""
        untouched = torch.ones(len(self._state), dtype=torch.bool)
        untouched[self._touched] = False
        same = torch.equal(self._state[untouched].nan_to_num(7), self._initial[untouched].nan_to_num(7))
        state, expected = self._state[self._touched], self._expected_state[self._touched]
        return worst(
            excess(self._out, self._expected, LIGHTNING[self._out.dtype]),
            excess(state, expected, LIGHTNING_STATE[self._out.dtype]),
            0.0 if same else math.inf,
        )


def recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: torch.Tensor, slopes: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lightning attention of one request in float64, token by token: out [T, H, Dv] and the final state [H, Dk, Dv].

    Args:
        q: [T, H, Dk].
        k: [T, H, Dk].
        v: [T, H, Dv].
        state: [H, Dk, Dv] float64.
        slopes: [H].
        scale: of the outputs.
    """
    decay = torch.exp(-slopes.double())[:, None, None]
    out = torch.empty(v.shape, dtype=torch.float64)
    for token in range(len(q)):
        state = decay * state + k[token].double()[:, :, None] * v[token].double()[:, None, :]
        out[token] = scale * (q[token].double()[:, None, :] @ state)[:, 0]
    return out, state
