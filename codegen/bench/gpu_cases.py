"""What is timed on a GPU: decode and extend at serving sizes over a token table in random order; costs of a call."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tilewright
from tilewright.codegen.bench import gpu_peers, gpu_protocol
from tilewright.codegen.bench.inputs import DTYPES, SEED
from tilewright.codegen.bench.overhead import Cost
from tilewright.codegen.bench.protocol import Call, Contest, Contestant
from tilewright.codegen.bench.setups import Setup
from tilewright.codegen.roofline import Limits
from tilewright.codegen.tolerances import PAGED
from tilewright.runtime.dispatch import kernel
from tilewright.schedules.catalog import LATENT
from tilewright.schedules.workload import Workload

DECODE = Workload("paged_decode", "bf16", 4, 128, 128)
FP8_DECODE = Workload("paged_decode", "bf16", 4, 128, 128, "fp8_e4m3")
EXTEND = Workload("paged_extend", "bf16", 4, 128, 128)
KV_HEADS = 8
LIMIT_BYTES, LIMIT_SIDE = 4 << 30, 8192
BURST = 8
REQUIRED_PLAN_US, REQUIRED_STEP_US, REQUIRED_CALL_US, REQUIRED_BALANCE = 60.0, 10.0, 8.0, 1.15


@dataclass(frozen=True)
class GpuCase:
    """One row of the table.

    Attributes:
        workload: the kernel.
        batch: requests.
        prefix: keys of each in the pool, without the new ones (extend).
        tokens: keys of each (decode) or new tokens of each (extend).
        kv_heads: KV heads; of one whose values have fewer dims than its keys they are the first of the keys' (latent).
        required: how many times as fast as the best peer the kernel must be; None: nothing was promised.
        most_us: and how long it may take.
    """

    workload: Workload
    batch: int
    tokens: int
    prefix: int = 0
    kv_heads: int = KV_HEADS
    required: float | None = 1.0
    most_us: float | None = None

    @property
    def name(self) -> str:
        """Workload and sizes, e.g. "paged_extend-bf16-g4-d128 8x(4096+512)-h32/8"."""
        tokens = f"({self.prefix}+{self.tokens})" if self.prefix else str(self.tokens)
        heads = self.kv_heads * (self.workload.group or 1)
        return f"{self.workload.name} {self.batch}x{tokens}-h{heads}/{self.kv_heads}"

    @property
    def latent(self) -> bool:
        """Whether values are views of keys."""
        return self.workload.head_dim_qk != self.workload.head_dim_vo


CASES = (
    GpuCase(DECODE, 1, 4096, most_us=9),
    GpuCase(DECODE, 1, 32768, most_us=36),
    GpuCase(DECODE, 16, 4096),
    GpuCase(DECODE, 64, 4096),
    GpuCase(DECODE, 256, 2048),
    GpuCase(LATENT, 64, 4096, kv_heads=1, most_us=76),
    GpuCase(FP8_DECODE, 64, 4096),
    GpuCase(EXTEND, 1, 8192),
    GpuCase(EXTEND, 4, 4096),
    GpuCase(EXTEND, 8, 512, 4096),
)


MIXED = CASES[3]


def needed(workload: Workload) -> list[Workload]:
    """The modules that a case calls."""
    return [workload, Workload("merge", workload.dtype)]


def cold_bytes() -> int:
    """How much a contestant's copies must hold together for every call to read memory, not the L2 cache."""
    return 4 * torch.cuda.get_device_properties(0).L2_cache_size


def describe() -> str:
    """One line: GPU, driver's CUDA, versions."""
    properties = torch.cuda.get_device_properties(0)
    versions = ", ".join(filter(None, (f"torch {torch.__version__}", gpu_peers.version())))
    return (
        f"{properties.name}, {properties.multi_processor_count} multiprocessors, "
        f"L2 {properties.L2_cache_size >> 20} MiB; {versions}; CUDA-graph replays"
    )


def limits() -> Limits:
    """Matrix product and memory bandwidth (the better of a copy and a read), measured now."""

    def fastest(call: Callable[[], object]) -> float:
        times = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return min(times)

    side = LIMIT_SIDE
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    flops = 2.0 * side**3 / fastest(lambda: torch.matmul(a, b, out=product))
    data = torch.zeros(LIMIT_BYTES // 4, device="cuda")
    other = torch.empty_like(data)
    copied, read = fastest(lambda: other.copy_(data)), fastest(data.sum)
    return Limits(flops, max(2 * LIMIT_BYTES / copied, LIMIT_BYTES / read))


def set_up(case: GpuCase) -> Setup:
    """Make the data and the contestants of a case."""
    workload, batch, prefix, tokens, kv_heads = case.workload, case.batch, case.prefix, case.tokens, case.kv_heads
    decode, fp8 = workload.operator == "paged_decode", workload.kv_dtype is not None
    dim, dim_vo, group = workload.head_dim_qk or 0, workload.head_dim_vo or 0, workload.group or 1
    heads, dtype, total = group * kv_heads, DTYPES[workload.dtype], prefix + tokens
    pool_dtype = torch.float8_e4m3fn if fp8 else dtype
    torch.manual_seed(SEED)
    queries = batch if decode else batch * tokens
    size = batch * total * kv_heads * (dim if case.latent else dim + dim_vo) * pool_dtype.itemsize
    copies = max(2, cold_bytes() // size + 1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype)

    table = torch.randperm(batch * total, device="cuda").view(batch, total)
    req_to_token, rows = table.int(), torch.arange(batch, device="cuda", dtype=torch.int32)
    lens = torch.full((batch,), total, device="cuda", dtype=torch.int32)
    news = torch.full((batch,), tokens, device="cuda", dtype=torch.int32)
    sizes: dict[str, Any] = {
        "num_qo_heads": heads, "num_kv_heads": kv_heads, "head_dim_qk": dim, "head_dim_vo": dim_vo, "device": "cuda"
    }  # fmt: skip
    plan = tilewright.plan_decode(lens, **sizes) if decode else tilewright.plan_extend(lens, news, **sizes)
    q, out = normal(queries, heads, dim), torch.empty(queries, heads, dim_vo, device="cuda", dtype=dtype)
    ours: list[Call] = []
    theirs: dict[str, list[Call]] = {}
    for _ in range(copies):
        k = normal(batch * total, kv_heads, dim).to(pool_dtype)
        v = k[..., :dim_vo] if case.latent else normal(batch * total, kv_heads, dim_vo).to(pool_dtype)
        paging = (k, v, req_to_token, rows, lens)
        keys, values = (x.to(dtype)[table].transpose(1, 2).contiguous() for x in (k, v))
        call: Callable[..., object]
        if decode:
            call = partial(tilewright.decode_attention, q, *paging, out=out, plan=plan)
            peers = gpu_peers.latent if case.latent else gpu_peers.decode
            found = peers(q, keys, values, None if fp8 else (k, v), table)
        else:
            new = table[:, prefix:].flatten()
            call = partial(tilewright.extend_attention, q, k[new], v[new], *paging, news, out=out, plan=plan)
            found = gpu_peers.extend(q, keys, values, (k, v), table, prefix)
        ours.append(Call(call, lambda _: (out,)))
        for name, peer in found.items():
            theirs.setdefault(name, []).append(peer)
    visible = batch * (tokens * prefix + tokens * (tokens + 1) / 2) if not decode else float(batch * tokens)
    return Setup(
        [Contestant("tilewright", "ours", ours), *(Contestant(name, "peer", calls) for name, calls in theirs.items())],
        (PAGED[dtype],),
        2.0 * visible * heads * (dim + dim_vo),
        float(size + q.nbytes + out.nbytes),
        f"{copies} copies in turn",
    )


def time_case(case: GpuCase, *, rounds: int, seconds: float) -> tuple[Setup, Contest]:
    """The setup and the contest of a case."""
    setup = set_up(case)
    gpu_protocol.check(setup.contestants, setup.tolerances[0])
    return setup, gpu_protocol.measure(setup.contestants, rounds=rounds, seconds=seconds)


def mixed_lengths(requests: int, tokens: int) -> np.ndarray:
    """[requests] lengths drawn evenly from 1 to 2 * tokens - 1, in pairs that hold 2 * tokens keys together."""
    half = np.random.default_rng(SEED).integers(1, 2 * tokens, requests // 2)
    return np.concatenate([half, 2 * tokens - half])


def balance_costs(*, rounds: int, seconds: float) -> list[Cost]:
    """Ratios of decode times: mixed lengths over equal ones, the batch-invariant mode over the default."""
    requests, tokens = MIXED.batch, MIXED.tokens
    total, heads, dim = requests * tokens, (DECODE.group or 1) * KV_HEADS, DECODE.head_dim_qk or 0
    dtype = DTYPES[DECODE.dtype]
    k, v = (torch.randn(total, KV_HEADS, dim, device="cuda", dtype=dtype) for _ in range(2))
    q, rows = torch.randn(requests, heads, dim, device="cuda", dtype=dtype), torch.arange(requests, device="cuda")
    order = torch.randperm(total, device="cuda", dtype=torch.int32)

    def contestant(name: str, lens: np.ndarray, invariant: bool) -> Contestant:
        table = torch.zeros(requests, int(lens.max()), device="cuda", dtype=torch.int32)
        for row, own in zip(table, order.split(lens.tolist()), strict=True):
            row[: len(own)] = own
        plan = tilewright.plan_decode(
            lens, num_qo_heads=heads, num_kv_heads=KV_HEADS, head_dim_qk=dim, head_dim_vo=dim, device="cuda",
            batch_invariant=invariant,
        )  # fmt: skip
        out = torch.empty_like(q)
        call = partial(
            tilewright.decode_attention, q, k, v, table, rows, torch.from_numpy(lens).cuda(), out=out, plan=plan,
            batch_invariant=invariant,
        )  # fmt: skip
        return Contestant(name, "ours", [Call(call, lambda _: (out,))])

    equal, mixed = np.full(requests, tokens), mixed_lengths(requests, tokens)
    contest = gpu_protocol.measure(
        [
            contestant("equal", equal, False),
            contestant("mixed", mixed, False),
            contestant("invariant", equal, True),
            contestant("mixed invariant", mixed, True),
        ],
        rounds=rounds, seconds=seconds,
    )  # fmt: skip
    times = {timing.name: timing for timing in contest.timings}

    def over(name: str, base: str, text: str) -> Cost:
        one, other = times[name], times[base].median
        return Cost(text, one.median / other, one.low / other, one.high / other, "x", REQUIRED_BALANCE)

    sizes = f"{requests} requests of 1 to {2 * tokens - 1} keys"
    return [
        over("mixed", "equal", f"decode of {sizes}, over as many keys in equal lengths"),
        over("invariant", "equal", f"batch-invariant decode over the default, {requests} requests of {tokens} keys"),
        over("mixed invariant", "mixed", f"batch-invariant decode over the default, {sizes}"),
    ]


def costs(rounds: int = 100) -> list[Cost]:
    """The host's share: planning 256 requests anew and a step on, a planned call, its kernel alone.

    Each is timed BURST times in a row, as layers and steps follow each other, after the GPU has gone idle.
    """
    batch, heads, dim = 256, (DECODE.group or 1) * KV_HEADS, DECODE.head_dim_qk or 0
    generator = np.random.default_rng(SEED)
    lens = [generator.integers(1, 4096, batch) for _ in range(2)]
    slots = 4200
    q = torch.randn(batch, heads, dim, device="cuda", dtype=DTYPES[DECODE.dtype])
    k, v = (torch.randn(slots, KV_HEADS, dim, device="cuda", dtype=q.dtype) for _ in range(2))
    table = torch.zeros(1, slots, device="cuda", dtype=torch.int32)
    rows, on_gpu = torch.zeros(batch, device="cuda", dtype=torch.int32), torch.zeros(batch, device="cuda").int()
    out = torch.empty_like(q)
    plan = tilewright.plan_decode(
        lens[0], num_qo_heads=heads, num_kv_heads=KV_HEADS, head_dim_qk=dim, head_dim_vo=dim, device="cuda"
    )

    def call() -> object:
        return tilewright.decode_attention(q, k, v, table, rows, on_gpu, out=out, plan=plan)

    call()
    turn = 0

    def anew() -> None:
        nonlocal turn
        turn += 1
        plan.update(None, seq_lens_cpu=lens[turn % 2])

    grown = lens[0].copy()

    def step() -> None:
        np.add(grown, 1, out=grown)
        plan.update(None, seq_lens_cpu=grown)

    def planned(first: Callable[[], object], timed: Callable[[], object], name: str, required: float | None) -> Cost:
        times = []
        for _ in range(rounds):
            first()
            torch.cuda.synchronize()
            begin = time.perf_counter_ns()
            for _ in range(BURST):
                timed()
            times.append((time.perf_counter_ns() - begin) / 1e3 / BURST)
        low, median, high = statistics.quantiles(times, n=4, method="inclusive")
        return Cost(name, median, low, high, "us", required)

    def back() -> None:
        grown[:] = lens[0]
        plan.update(None, seq_lens_cpu=lens[1])
        plan.update(None, seq_lens_cpu=lens[0])

    result = [
        planned(lambda: None, anew, "plan of 256 requests, made anew", REQUIRED_PLAN_US),
        planned(back, step, "plan of 256 requests, lengths grown by one", REQUIRED_STEP_US),
        planned(lambda: None, call, "decode call, plan and out= given", REQUIRED_CALL_US),
    ]
    attend = kernel("paged_decode", DECODE.dtype, DECODE.group, dim, dim, q.device)
    assert attend.tiling is not None
    work = plan.work(attend.tiling, 2**30, True)
    arguments = (
        q, k, v, table, rows, plan.zeros, work.items, torch.full((heads,), -math.inf, device="cuda"), out,
        torch.empty(batch, heads, device="cuda"), work.part_o, work.part_lse, dim**-0.5 * math.log2(math.e), 0.0, 0.0,
        2**30, 0,
    )  # fmt: skip
    kernel_name = "of it: the attention kernel alone through tvm-ffi"
    return [*result, planned(lambda: None, lambda: attend.run(*arguments), kernel_name, None)]
