"""What a call costs besides its arithmetic: the host's work, the launch, and loading every module in a new process.

`python -m tilewright.codegen.bench.overhead` is that new process: it loads and prints one line of JSON.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec
import torch

import tilewright
from tilewright.codegen.bench.inputs import DTYPES
from tilewright.codegen.bench.protocol import Call, Contestant, check, measure
from tilewright.codegen.tolerances import PAGED
from tilewright.runtime import store
from tilewright.runtime.dispatch import kernel
from tilewright.runtime.planner import OFF
from tilewright.schedules.catalog import all_workloads
from tilewright.schedules.targets import TARGETS
from tilewright.schedules.workload import Workload

DECODE = Workload("paged_decode", "bf16", 4, 128, 128)
KV_HEADS = 8
PROCESSES = 5
REQUIRED_CALL_US, REQUIRED_ALTERNATION_US, REQUIRED_LOAD_MS = 40.0, 30.0, 100.0
_REPEATS = 10


class Cost(msgspec.Struct, frozen=True):
    """One cost beside what it may be (None: nothing was promised): median and quartiles in `unit`."""

    name: str
    median: float
    low: float
    high: float
    unit: str
    required: float | None = None

    @property
    def verdict(self) -> str:
        """In a word: "ok", "short", or "" where nothing is required."""
        return "" if self.required is None else "ok" if self.median < self.required else "short"


def call_costs(*, rounds: int, seconds: float) -> list[Cost]:
    """A decode call of one request with one key, planned, with out=; and its kernel alone, given the same tensors.

    With one key the kernel has next to nothing to compute: the first is an upper bound of the host's work, the second
    of tvm-ffi's argument passing and of starting the threads.
    """
    group, dim, dtype = DECODE.group or 1, DECODE.head_dim_qk or 0, DTYPES[DECODE.dtype]
    heads = group * KV_HEADS
    q, out, bare_out = (torch.randn(1, heads, dim).to(dtype) for _ in range(3))
    keys, values = (torch.randn(1, KV_HEADS, dim).to(dtype) for _ in range(2))
    table, zero, one = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.ones(1).int()
    plan = tilewright.plan_decode(
        [1], num_qo_heads=heads, num_kv_heads=KV_HEADS, head_dim_qk=dim, head_dim_vo=dim, device="cpu"
    )
    attend = kernel("paged_decode", DECODE.dtype, group, dim, dim)
    assert attend.tiling is not None
    work = plan.work(attend.tiling, OFF, True)
    arguments = (
        q, keys, values, table, zero, zero, work.items, torch.full((heads,), -math.inf), bare_out,
        torch.empty(1, heads), work.part_o, work.part_lse, dim**-0.5 * math.log2(math.e), 0.0, 0.0, OFF, 0,
    )  # fmt: skip

    def public() -> object:
        return tilewright.decode_attention(q, keys, values, table, zero, one, out=out, plan=plan)

    contestants = [
        Contestant("decode call", "ours", [Call(public, lambda _: (out,))]),
        Contestant("kernel call", "untuned", [Call(lambda: attend.run(*arguments), lambda _: (bare_out,))]),
    ]
    check(contestants, (PAGED[dtype],))
    timings = measure(contestants, rounds=rounds, seconds=seconds).timings
    names = {
        "decode call": "decode call, batch 1, 1 key, plan and out= given",
        "kernel call": "of it: launch (the kernel alone through tvm-ffi)",
    }
    required = {"decode call": REQUIRED_CALL_US}
    return [Cost(names[item.name], item.median, item.low, item.high, "us", required.get(item.name)) for item in timings]


def alternation_cost(*, rounds: int) -> Cost:
    """A kernel and a torch operator in turn, on both of which all threads work, over the two each by itself.

    Differences of medians of rounds that call the kernel, the operator and the pair, in an order drawn anew.
    """
    group, dim, dtype = DECODE.group or 1, DECODE.head_dim_qk or 0, DTYPES[DECODE.dtype]
    batch, tokens = 8, 64
    q = torch.randn(batch, group * KV_HEADS, dim).to(dtype)
    keys, values = (torch.randn(batch * tokens, KV_HEADS, dim).to(dtype) for _ in range(2))
    table, rows = torch.arange(batch * tokens, dtype=torch.int32).view(batch, tokens), torch.arange(batch).int()
    lengths = torch.full((batch,), tokens, dtype=torch.int32)
    plan = tilewright.plan_decode(
        lengths, num_qo_heads=q.shape[1], num_kv_heads=KV_HEADS, head_dim_qk=dim, head_dim_vo=dim, device="cpu"
    )
    out, x, y = torch.empty_like(q), torch.randn(1 << 18), torch.randn(1 << 18)

    def kernel_call() -> object:
        return tilewright.decode_attention(q, keys, values, table, rows, lengths, out=out, plan=plan)

    def operator() -> object:
        return torch.add(x, y, out=x)

    def repeated(*calls: Callable[[], object]) -> Callable[[], object]:
        # A pair's time must not depend on what came before it: each contestant repeats itself.
        def run() -> None:
            for _ in range(_REPEATS):
                for call in calls:
                    call()

        return run

    contestants = [
        Contestant(name, "untuned", [Call(repeated(*calls), lambda _: ())])
        for name, calls in (("kernel", (kernel_call,)), ("torch", (operator,)), ("pair", (kernel_call, operator)))
    ]
    times = {item.name: item for item in measure(contestants, rounds=max(rounds // _REPEATS, 2), seconds=0).timings}

    def over(quartile: str) -> float:
        alone = times["kernel"].median + times["torch"].median
        return (getattr(times["pair"], quartile) - alone) / _REPEATS

    name = "a kernel and a torch operator in turn, over the two alone"
    return Cost(name, over("median"), over("low"), over("high"), "us", REQUIRED_ALTERNATION_US)


def load_cost(processes: int = PROCESSES) -> Cost:
    """Verify and load every module that the store has, each time in a new process; torch and tvm-ffi are imported."""
    runs = [
        json.loads(
            subprocess.run(
                [sys.executable, "-m", "tilewright.codegen.bench.overhead"], check=True, capture_output=True, text=True
            ).stdout
        )
        for _ in range(processes)
    ]
    times = [run["ms"] for run in runs]
    low, median, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return Cost(f"cold load of all {runs[0]['modules']} modules", median, low, high, "ms", REQUIRED_LOAD_MS)


def _load_all() -> dict[str, float]:
    """Load what serves each workload of the catalogue; what is not built does not count."""
    import tvm_ffi  # noqa: F401

    workloads = list(dict.fromkeys(item for name in TARGETS for item in all_workloads(name)))
    ready = [item for item in workloads if store.find(item).found is not None]
    begin = time.perf_counter()
    for item in ready:
        store.load(item)
    return {"ms": 1e3 * (time.perf_counter() - begin), "modules": len(ready)}


if __name__ == "__main__":
    print(json.dumps(_load_all()))
