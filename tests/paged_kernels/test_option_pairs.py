"""Every option of the paged kernels with every other."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from batches import as_numpy
from layouts import INDEX_NAMES, INDEXES, LAYOUTS, lay_out, strided
from paged_calls import ORACLE_OPTIONS, run
from paged_sizes import SIZES, SPECIAL, paged_batch
from tolerances import PAGED, assert_close, assert_lse_close

from tilewright.runtime.plan import plan_decode, plan_extend
from tilewright.schedules.catalog import all_workloads
from tilewright.schedules.workload import Workload

AXES = {
    "phase": ["decode", "extend", "pool"],
    "dtype": list(PAGED),
    "size": SIZES,
    "window": [0, 1, 5, 40, 300],
    "logit_cap": [0.0, 1.5, 30.0],
    "sinks": [None, "f32", "dtype of q"],
    "sm_scale": [None, 0.3],
    "causal": [True, False],
    "kv_start": [False, True],
    "cross": [False, True],
    "batch_invariant": [False, True],
    "page_size": [1, 4, 16],
    "index": list(INDEXES),
    "layout": [*LAYOUTS, "interleaved"],
    "split": [False, True],
    "plan": [False, True],
    "out": ["new", "given", "strided"],
    "return_lse": [False, True],
    "start_loc": [False, True],
    "fp8": [False, True],
    "tree": [None, "new", "whole rows"],
}
# What a device has kernels for, whatever the size where there are general ones.
CATALOGUE = {"cpu": all_workloads("x86-avx2"), "cuda": all_workloads("cuda-sm90a")}
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "f32"}


def served(row, device):
    """Whether there is a kernel for fp8 pools or tree masks of this row."""
    kind = ("paged_decode" if row["phase"] == "decode" else "paged_extend", NAMES[row["dtype"]])
    size = row["size"]
    shape = (None,) * 3 if device == "cpu" else (size.group, size.dim, size.dim_vo)
    wanted = Workload(*kind, *shape, "fp8_e4m3" if row["fp8"] else None, row["tree"] is not None)
    return wanted in CATALOGUE[device]


def possible(row, device):
    """What the interface refuses together, and what the catalogue has no kernel for, is not asked for."""
    decode = row["phase"] == "decode"
    if row["tree"] and (decode or row["cross"]):
        return False
    if row["fp8"] and row["batch_invariant"] and row["phase"] == "extend":
        return False
    return served(row, device) and not (
        (row["cross"] and (row["window"] or row["phase"] == "extend" or not row["causal"]))
        or (decode and (row["start_loc"] or not row["causal"]))
        or (row["layout"] == "interleaved" and row["size"].aliased)
    )


GPU_AXES = AXES | {"dtype": [torch.bfloat16, torch.float16], "size": SPECIAL}


def pairwise(seed, axes, device):
    """Rows over `axes` in which any two values that may stand together do so."""
    generator = random.Random(seed)

    def pairs(row):
        return set(itertools.combinations(row.items(), 2))

    def draw(fixed):
        return {name: fixed.get(name, generator.choice(values)) for name, values in axes.items()}

    todo = dict.fromkeys(
        (a, b)
        for (first, ones), (second, others) in itertools.combinations(axes.items(), 2)
        for a in [(first, value) for value in ones]
        for b in [(second, value) for value in others]
    )
    rows = []
    while todo:
        pair = next(iter(todo))
        rows_with_it = [row for row in (draw(dict(pair)) for _ in range(60)) if possible(row, device)]
        if not rows_with_it:  # never possible: 60 draws of two or three free values
            del todo[pair]
            continue
        rows.append(max(rows_with_it, key=lambda row: len(pairs(row) & todo.keys())))
        for known in pairs(rows[-1]):
            todo.pop(known, None)
    return rows


ROWS = [
    *(pytest.param("cpu", row, id=f"{row['phase']}-{row['size']}") for row in pairwise(2024, AXES, "cpu")),
    *(pytest.param("cuda", row, id=f"cuda-{row['phase']}-{row['size']}", marks=pytest.mark.cuda)
      for row in pairwise(2025, GPU_AXES, "cuda")),
]  # fmt: skip


@pytest.mark.parametrize(("device", "row"), ROWS, indirect=["device"])
def test_pairs_of_options(device, modules, monkeypatch, row):
    """P15, P16, P38: no option is dropped or disturbed because another one is on."""
    size, decode = row["size"], row["phase"] == "decode"
    if row["split"]:
        monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    modules.use(size, split=row["split"])
    starts = [2, 0, 9, 1] if row["kv_start"] else None
    news = [1, 1, 1, 1] if decode else [1, 14, 0, 5]
    batch = paged_batch(
        size, [69, 16, 40, -1 if decode else 0], news, dtype=row["dtype"], from_pool=row["phase"] != "extend",
        kv_starts=starts, page_size=row["page_size"],
    )  # fmt: skip
    scales = {"k_scale": 0.5, "v_scale": 0.3} if row["fp8"] else {}
    if row["fp8"]:
        batch.to_fp8(**scales)
    lay_out(batch, row["layout"])
    lengths = torch.tensor([50, 17, 30, 0]) if row["cross"] else batch.seq_lens
    options = {name: row[name] for name in ("window", "logit_cap", "sm_scale", "batch_invariant", "page_size")}
    options |= scales
    if row["tree"]:
        options["tree_mask"] = batch.tree_mask(whole_rows=row["tree"] == "whole rows")
    options["kv_start"] = batch.kv_start
    options["kv_lens"] = INDEXES[row["index"]](lengths) if row["cross"] else None
    if row["sinks"]:
        heads = batch.q.shape[1]
        sinks = (torch.arange(heads) % 5 - 2.0).masked_fill(torch.arange(heads) % 4 == 3, -math.inf)
        options["sinks"] = sinks if row["sinks"] == "f32" else sinks.to(row["dtype"])
    if not decode:
        options["causal"] = row["causal"]
    tokens = torch.arange(sum(news))
    if row["start_loc"]:
        # Requests in the reverse order with a row of nobody before each.
        start = torch.tensor([21, 6, 5, 0])
        tokens = torch.cat([start[b] + torch.arange(n) for b, n in enumerate(news)])
        for name in ("q", "k", "v"):
            packed = getattr(batch, name)
            if packed is not None:
                spread = torch.full((23, *packed.shape[1:]), math.nan, dtype=packed.dtype)
                spread[tokens] = packed
                setattr(batch, name, spread)
        options["extend_start_loc"] = INDEXES[row["index"]](start)
    oracle = {name: value for name, value in options.items() if name in ORACLE_OPTIONS and value is not None}
    expected = batch.expected(decode=decode, **oracle)
    for name in INDEX_NAMES:
        if getattr(batch, name) is not None:
            setattr(batch, name, INDEXES[row["index"]](getattr(batch, name)))
    options["kv_start"] = batch.kv_start
    if row["plan"]:
        common = size.plan | {"batch_invariant": row["batch_invariant"]}
        options["plan"] = (
            plan_decode(lengths, **common)
            if decode
            else plan_extend(
                lengths,
                batch.extend_seq_lens,
                options.get("extend_start_loc"),
                causal=row["causal"] and not row["cross"],
                window=row["window"],
                **common,
            )
        )
    out = {"new": None, "given": batch.out(), "strided": strided(batch.out())}[row["out"]]
    result = run(batch, decode=decode, out=out, return_lse=row["return_lse"], **options)
    result = result if row["return_lse"] else (result, None)
    nobody = np.setdiff1d(np.arange(len(batch.q)), as_numpy(tokens))
    if out is None:
        expected[0][nobody], expected[1][nobody] = 0, -math.inf
    assert_close(result[0], expected[0], PAGED[row["dtype"]])
    if row["return_lse"]:
        expected[1][nobody] = -math.inf
        assert_lse_close(result[1], expected[1], PAGED[row["dtype"]])
