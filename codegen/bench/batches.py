"""Costs of batches against one another: mixed lengths over even ones, the batch-invariant mode over the default."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

import tilewright
from tilewright.codegen.bench.inputs import DTYPES
from tilewright.codegen.bench.overhead import DECODE, KV_HEADS, Cost
from tilewright.codegen.bench.protocol import Call, Contestant, measure
from tilewright.runtime.dispatch import kernel
from tilewright.runtime.plan import Plan
from tilewright.runtime.planner import KV_LEN, OFF
from tilewright.runtime.pool_memory import pool_zeros

REQUIRED_BALANCE = 1.25
# (keys in the pool before the new tokens, new tokens) of each request.
MIXED_DECODE = [(65535, 1)] + [(499, 1)] * 64
MIXED_EXTEND = [(0, 2000)] + [(999, 1)] * 40
Lengths = list[tuple[int, int]]


class Pool:
    """Keys and values of `slots` tokens, for calls on random ones of them."""

    def __init__(self, slots: int) -> None:
        self.dim, dtype = DECODE.head_dim_qk or 0, DTYPES[DECODE.dtype]
        self.heads = (DECODE.group or 1) * KV_HEADS
        self.keys, self.values = (pool_zeros((slots, KV_HEADS, self.dim), dtype).normal_() for _ in range(2))
        self.order = torch.randperm(slots).int()

    def attention(
        self, operator: str, lengths: Lengths, *, invariant: bool = False
    ) -> tuple[Plan, Callable[[], object]]:
        """The plan and a call of "decode" or "extend" for requests of these lengths, all keys in the pool."""
        prefixes, news = (torch.tensor(column, dtype=torch.int32) for column in zip(*lengths, strict=True))
        lens, rows = prefixes + news, torch.arange(len(lengths), dtype=torch.int32)
        table = torch.zeros((len(lengths), int(lens.max())), dtype=torch.int32)
        for row, own in zip(table, self.order[: int(lens.sum())].split(lens.tolist()), strict=True):
            row[: len(own)] = own
        q = torch.randn(int(news.sum()), self.heads, self.dim).to(self.keys.dtype)
        sizes: dict[str, Any] = {"num_qo_heads": self.heads, "num_kv_heads": KV_HEADS, "device": "cpu"}
        sizes |= {"head_dim_qk": self.dim, "head_dim_vo": self.dim, "batch_invariant": invariant}
        call: Callable[..., object]
        if operator == "decode":
            plan = tilewright.plan_decode(lens, **sizes)
            call = partial(tilewright.decode_attention, q, self.keys, self.values, table, rows, lens)
        else:
            plan = tilewright.plan_extend(lens, news, **sizes)
            call = partial(tilewright.extend_attention, q, None, None, self.keys, self.values, table, rows, lens, news)
        return plan, partial(call, out=torch.empty_like(q), plan=plan, batch_invariant=invariant)


def even(plan: Plan, operator: str) -> Lengths:
    """Requests alike that cost what the plan's batch costs: as many as it has items, of their mean number of keys."""
    attend = kernel(f"paged_{operator}", DECODE.dtype, DECODE.group, DECODE.head_dim_qk, DECODE.head_dim_vo)
    assert attend.tiling is not None
    items = plan.work(attend.tiling, OFF, True).items.numpy()
    tokens, keys = attend.tiling.block_q, round(float(np.mean(items[:, KV_LEN])))
    return [(max(keys - tokens, 0), min(tokens, keys))] * len(items)


def _ratio(
    name: str,
    run: Callable[[], object],
    base: Callable[[], object],
    rounds: int,
    seconds: float,
    required: float | None,
) -> Cost:
    contestants = [
        Contestant(which, "untuned", [Call(call, lambda _: ())]) for which, call in (("", run), ("base", base))
    ]
    time, other = measure(contestants, rounds=rounds, seconds=seconds).timings
    median, low, high = (quartile / other.median for quartile in (time.median, time.low, time.high))
    return Cost(name, median, low, high, "x", required)


def balance_costs(
    rounds: int, seconds: float, *, decode: Lengths = MIXED_DECODE, extend: Lengths = MIXED_EXTEND
) -> list[Cost]:
    """Time of a mixed batch over that of the same work in even pieces: what waiting for the longest request costs."""
    titles = {
        "decode": "decode of one 65536 beside 64 of 500 keys, over the same work evenly split",
        "extend": "extend by 2000 beside 40 single tokens, over the same work evenly split",
    }
    costs = []
    for operator, lengths in (("decode", decode), ("extend", extend)):
        pool = Pool(2 * sum(map(sum, lengths)))
        plan, mixed = pool.attention(operator, lengths)
        alike = even(plan, operator)
        pool = pool if sum(map(sum, alike)) <= len(pool.order) else Pool(sum(map(sum, alike)))
        _, split = pool.attention(operator, alike)
        costs.append(_ratio(titles[operator], mixed, split, rounds, seconds, REQUIRED_BALANCE))
    return costs


def invariance_costs(rounds: int, seconds: float) -> list[Cost]:
    """Time of the batch-invariant mode over that of the default, 4 requests."""
    costs = []
    for operator, lengths in (("decode", [(2047, 1)] * 4), ("extend", [(1920, 128)] * 4)):
        pool = Pool(sum(map(sum, lengths)))
        (_, default), (_, invariant) = (pool.attention(operator, lengths, invariant=mode) for mode in (False, True))
        name = f"batch-invariant {operator} over the default, 4 requests of 2048 keys"
        costs.append(_ratio(name, invariant, default, rounds, seconds, None))
    return costs
