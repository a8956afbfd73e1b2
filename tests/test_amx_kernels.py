"""Paged attention kernels for AMX against float64: the kernel interface, case by case.

Anywhere under the emulator, on modules built from the decisions of x86-amx for a processor without AVX-512
(x86-amx-emulated); on a machine with AMX on the modules of x86-amx itself (`pytest -m amx`).
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from amx_emulator import hardware_runs_tiles
from amx_modules import EMULATED, REAL, TARGETS, module, serving
from batches import make_decode_batch, make_paged_batch
from tolerances import PAGED, assert_close, assert_lse_close

from tilewright import decode_attention, extend_attention
from tilewright.runtime import features, store
from tilewright.schedules.spaces import UnsupportedWorkload, get_space
from tilewright.schedules.targets import get_target
from tilewright.schedules.workload import Workload

OFF = 2**30
TOLERANCE = PAGED[torch.bfloat16]

DECODE = ["paged_decode-bf16-g4-d128", "paged_decode-bf16-g3-d64", "paged_decode-bf16-g1-d64"]
EXTEND = [
    "paged_extend-bf16-g4-d128",
    "paged_extend-bf16-g3-d64",
    "paged_extend-bf16-g1-d64",
    "paged_extend-bf16-g2-d64v96",
]
# Decisions away from the default that change the structure: key tiles of the two products that differ either way, a
# chunk of a single tile, other register blocks, no or other prefetch.
OTHERS = [
    ("paged_decode-bf16-g4-d64", {"chunk": 128, "qk_keys": 16, "pv_keys": 128, "pv_columns": 64, "prefetch_k": 0}),
    ("paged_decode-bf16-g4-d64", {"chunk": 64, "qk_keys": 64, "pv_keys": 32, "pv_columns": 16, "prefetch_across": 1}),
    ("paged_extend-bf16-g4-d64", {"chunk": 128, "rows": 64, "block_rows": 16, "qk_rows": 16, "pv_rows": 16}),
    ("paged_extend-bf16-g4-d64", {"rows": 128, "block_rows": 64, "qk_keys": 16, "pv_keys": 128, "pv_rows": 16}),
    ("paged_extend-bf16-g4-d64", {"rows": 64, "block_rows": 64, "prefetch_k": 64, "prefetch_v": 16}),
    (
        "paged_extend-bf16-g4-d64",
        {"rows": 64, "prefetch_level": 1, "prefetch_k": 8, "prefetch_across": 1, "pv_ahead": 4},
    ),
    # All eight tile registers, in two shapes.
    ("paged_extend-bf16-g3-d64", {"qk_rows": 32, "qk_keys": 32, "pv_rows": 16, "pv_columns": 64, "qk_ahead": 1}),
]


@dataclass
class Kernel:
    """A loaded module and what its planner must know."""

    workload: Workload
    function: Callable[..., None]
    block_q: int
    chunk: int

    @property
    def extend(self) -> bool:
        return self.workload.operator == "paged_extend"


@pytest.fixture(scope="session", params=TARGETS)
def target(request):
    """The process may load modules of this target."""
    if request.param == REAL:
        yield REAL
    else:
        request.getfixturevalue("amx_emulator")
        with features.emulated(*get_target(EMULATED).features):
            yield EMULATED


def load(name: str, target: str, changes: dict[str, int] | None = None, root: Path | None = None) -> Kernel:
    """Build (unless it is up to date) and load a module from the decisions of x86-amx, `changes` applied."""
    loaded = module(name, target, changes, root)
    return Kernel(loaded.workload, loaded.function, loaded.plan["block_q"], loaded.plan["chunk"])


@pytest.fixture(params=DECODE)
def decode(request, target) -> Kernel:
    return load(request.param, target)


@pytest.fixture(params=EXTEND)
def extend(request, target) -> Kernel:
    return load(request.param, target)


@pytest.fixture(params=[DECODE[0], EXTEND[0]])
def kernel(request, target) -> Kernel:
    return load(request.param, target)


@dataclass
class Batch:
    """Requests of `lens` keys, the first `prefix` of each in the pool, the others new. Everything unused is NaN."""

    kernel: Kernel
    lens: list[int]
    prefix: list[int]
    seed: int = 0
    kv_heads: int = 2
    query_scale: float = 1.0
    keys: list[torch.Tensor] = field(init=False)  # per request [len, Hk, D]
    values: list[torch.Tensor] = field(init=False)

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)
        work, heads = self.kernel.workload, self.kv_heads
        normal = lambda *shape: torch.randn(shape, generator=generator).bfloat16()  # noqa: E731
        self.keys = [normal(n, heads, work.head_dim_qk) for n in self.lens]
        self.values = [normal(n, heads, work.head_dim_vo) for n in self.lens]
        slots = sum(self.prefix) + 9
        order = 1 + torch.randperm(slots - 1, generator=generator)
        # K and V of a slot are neighbours in one allocation: rows of the pool are strided.
        pool = torch.full((slots, heads, work.head_dim_qk + work.head_dim_vo), math.nan).bfloat16()
        self.k_buffer, self.v_buffer = pool[..., : work.head_dim_qk], pool[..., work.head_dim_qk :]
        batch = len(self.lens)
        self.table = torch.zeros((batch + 2, max(self.lens) + 9), dtype=torch.int32)
        self.pool_index = torch.randperm(batch + 2, generator=generator)[:batch].int()
        self.kv_start = torch.randint(0, 5, (batch,), generator=generator).int()
        self.k_new = torch.full((sum(self.lens) - sum(self.prefix) + 1, heads, work.head_dim_qk), math.nan).bfloat16()
        self.v_new = torch.full((len(self.k_new), heads, work.head_dim_vo), math.nan).bfloat16()
        self.first_new, row = [], 0
        for b, (length, prefix) in enumerate(zip(self.lens, self.prefix, strict=True)):
            own, order = order[:prefix], order[prefix:]
            start = int(self.kv_start[b])
            self.table[self.pool_index[b], start : start + prefix] = own.int()
            self.k_buffer[own], self.v_buffer[own] = self.keys[b][:prefix], self.values[b][:prefix]
            self.k_new[row : row + length - prefix] = self.keys[b][prefix:]
            self.v_new[row : row + length - prefix] = self.values[b][prefix:]
            self.first_new.append(row)
            row += length - prefix
        self.normal = normal

    def item(self, request, q_row, q_len, kv, pos, part=-1):
        """One row of `items`; kv = (begin, len)."""
        prefix = self.prefix[request]
        return [request, q_row, q_len, *kv, pos, prefix, self.first_new[request] - prefix, part, 0]

    def decode_items(self, split=OFF):
        """One item a request, or partial ones of `split` keys for the longer."""
        items, part = [], itertools.count()
        for b, length in enumerate(self.lens):
            whole = length <= split
            for begin in range(0, length, split):
                keys = (begin, min(split, length - begin))
                items.append(self.item(b, b, 1, keys, length - 1, -1 if whole else next(part)))
        return items

    def extend_items(self, split=OFF, causal=True):
        """Items of block_q query tokens, the last of a request shorter; split by keys if asked for."""
        items, row, part = [], 0, 0
        for b, (length, prefix) in enumerate(zip(self.lens, self.prefix, strict=True)):
            for first in range(prefix, length, self.kernel.block_q):
                tokens = min(self.kernel.block_q, length - first)
                keys = first + tokens if causal else length
                for begin in range(0, keys, split):
                    item = self.item(
                        b, row, tokens, (begin, min(split, keys - begin)), first, -1 if split == OFF else part
                    )
                    items.append(item)
                    part += tokens
                row += tokens
        return items


@dataclass
class Options:
    window: int = OFF
    lookahead: int = 0
    cap: float = 0.0
    sinks: torch.Tensor | None = None


def outputs(batch, items):
    """q and poisoned results; q, out and lse are strided views."""
    work = batch.kernel.workload
    heads = batch.kv_heads * work.group
    tokens = max(item[1] + item[2] for item in items)
    partials = max([1, *(item[8] + item[2] for item in items)])
    q = (batch.normal(tokens, heads, work.head_dim_qk + 3) * batch.query_scale).bfloat16()[..., 3:]
    out = torch.full((tokens, 2, heads, work.head_dim_vo), math.nan).bfloat16()[:, 1]
    lse = torch.full((heads, tokens), math.nan).T
    part_o, part_lse = (
        torch.full((partials, heads, work.head_dim_vo), math.nan),
        torch.full((partials, heads), math.nan),
    )
    return q, [out, lse, part_o, part_lse]


def call(batch, items, q, results, options):
    work = batch.kernel.workload
    sinks = torch.full((q.shape[1],), -math.inf) if options.sinks is None else options.sinks
    sm_scale, log2_e = work.head_dim_qk**-0.5, math.log2(math.e)
    buffers = [batch.k_buffer, batch.v_buffer, *((batch.k_new, batch.v_new) if batch.kernel.extend else ())]
    tables = [batch.table, batch.pool_index, batch.kv_start, torch.tensor(items, dtype=torch.int32), sinks]
    scalars = [sm_scale * log2_e, options.cap * log2_e, sm_scale / options.cap if options.cap else 0.0]
    batch.kernel.function(q, *buffers, *tables, *results, *scalars, options.window, options.lookahead)


def expected(batch, items, q, results, options):
    """What the interface promises, in float64, as numpy; rows that no item writes are NaN."""
    out, lse, part_o, part_lse = (np.full(r.shape, np.nan) for r in results)
    group = batch.kernel.workload.group
    for request, q_row, q_len, begin, length, pos, _, _, part, _ in items:
        keys, values = (x[request][begin : begin + length].double().numpy() for x in (batch.keys, batch.values))
        j = np.arange(begin, begin + length)
        for i, h in itertools.product(range(q_len), range(q.shape[1])):
            visible = (j > pos + i - options.window) & (j <= pos + i + options.lookahead)
            score = keys[visible, h // group] @ q[q_row + i, h].double().numpy() * q.shape[2] ** -0.5
            if options.cap:
                score = options.cap * np.tanh(score / options.cap)
            top = score.max(initial=-np.inf)
            weights = np.exp(score - top) if len(score) else score
            sink = 0.0 if part >= 0 or options.sinks is None else np.exp(float(options.sinks[h]) - top)
            row = weights @ values[visible, h // group]
            row_out = row / (weights.sum() + sink) if len(score) else row * 0
            row_lse = top + np.log(weights.sum()) if len(score) else -np.inf
            target, log, at = (out, lse, q_row + i) if part < 0 else (part_o, part_lse, part + i)
            target[at, h], log[at, h] = row_out, row_lse
    return out, lse, part_o, part_lse


def check(batch, items, options=None, q=None):
    """Run the items and compare everything written and everything left alone; the results."""
    options = options or Options()
    made, results = outputs(batch, items)
    q = made if q is None else q
    call(batch, items, q, results, options)
    out, lse, part_o, part_lse = expected(batch, items, q, results, options)
    assert_close(results[0], out, TOLERANCE)
    assert_close(results[2], part_o, TOLERANCE, "part_o")
    assert_lse_close(results[1], lse, TOLERANCE)
    assert_lse_close(results[3], part_lse, TOLERANCE)
    return q, results


def decode_batch(kernel, **options):
    lens = [5, 1, 31, 32, 33, 64, 127, kernel.chunk, kernel.chunk + 1]
    return Batch(kernel, lens, lens, **options)


def extend_batch(kernel, **options):
    chunk = kernel.chunk
    return Batch(kernel, [5, 1, 33, 70, chunk + 3, 65], [0, 0, 20, 0, chunk, 64], **options)


def batch_and_items(kernel, **options):
    batch = (extend_batch if kernel.extend else decode_batch)(kernel, **options)
    return batch, (batch.extend_items if kernel.extend else batch.decode_items)()


# ---- decode ----


def test_decode(decode):
    batch = decode_batch(decode)
    check(batch, batch.decode_items())


@pytest.mark.parametrize("window", [1, 7, 40])
def test_decode_window(decode, window):
    batch = decode_batch(decode)
    check(batch, batch.decode_items(), Options(window=window))


def test_decode_cap(decode):
    batch = decode_batch(decode, query_scale=8.0)
    check(batch, batch.decode_items(), Options(cap=5.0))


def test_decode_splits_and_sinks(decode):
    batch = decode_batch(decode)
    sinks = torch.linspace(-2, 3, batch.kv_heads * decode.workload.group)
    check(batch, batch.decode_items(split=48), Options(sinks=sinks))


def test_decode_items_of_no_visible_key(decode):
    batch = Batch(decode, [9, 9, 30], [9, 9, 30])
    items = [
        batch.item(0, 0, 1, (0, 0), 8),
        batch.item(1, 1, 1, (0, 0), 8, part=0),
        batch.item(2, 2, 1, (3, 20), 29, part=1),
    ]
    check(batch, items, Options(window=7, sinks=torch.zeros(2 * decode.workload.group)))


# ---- extend ----


def test_extend(extend):
    batch = extend_batch(extend)
    check(batch, batch.extend_items())


@pytest.mark.parametrize("window", [1, 7, 40])
def test_extend_window(extend, window):
    batch = extend_batch(extend)
    check(batch, batch.extend_items(), Options(window=window))


def test_extend_cap_and_sinks(extend):
    batch = extend_batch(extend, query_scale=8.0)
    sinks = torch.linspace(-2, 3, batch.kv_heads * extend.workload.group)
    check(batch, batch.extend_items(), Options(cap=5.0, sinks=sinks))


def test_extend_not_causal(extend):
    batch = extend_batch(extend)
    check(batch, batch.extend_items(causal=False), Options(lookahead=OFF))


def test_extend_splits(extend):
    batch = extend_batch(extend)
    check(batch, batch.extend_items(split=48))


# ---- both ----


@pytest.mark.parametrize("name, changes", OTHERS)
def test_other_decisions(target, tmp_path, name, changes):
    batch, items = batch_and_items(load(name, target, changes, tmp_path))
    for window in (OFF, 40):
        check(batch, items, Options(window=window))


def test_options_change_the_result(kernel):
    batch, items = batch_and_items(kernel, query_scale=8.0)
    q, plain = check(batch, items)
    heads = q.shape[1]
    for options in (Options(window=7), Options(cap=5.0), Options(sinks=torch.full((heads,), 2.0))):
        assert not torch.equal(check(batch, items, options, q)[1][0], plain[0])


def test_an_item_does_not_depend_on_the_others(kernel):
    batch, items = batch_and_items(kernel)
    q, together = check(batch, items)
    for item in items[::3]:
        _, alone = outputs(batch, items)
        call(batch, [item], q, alone, Options())
        rows = slice(item[1], item[1] + item[2])
        assert torch.equal(alone[0][rows], together[0][rows])
        assert torch.equal(alone[1][rows], together[1][rows])


def test_a_nan_query_spoils_its_own_row_only(kernel):
    batch, items = batch_and_items(kernel)
    q, clean = check(batch, items)
    spoilt = q.clone()
    spoilt[2, 1] = math.nan
    _, results = outputs(batch, items)
    call(batch, items, spoilt, results, Options())
    assert results[0][2, 1].isnan().all() and results[1][2, 1].isnan()
    for before, after in zip(clean[:2], results[:2], strict=True):
        before[2, 1] = after[2, 1] = 0
        assert torch.equal(before, after)


def test_tile_instructions_ran(kernel, amx_emulator):
    batch, items = batch_and_items(kernel)
    q, results = outputs(batch, items)
    before = amx_emulator.counts()
    call(batch, items, q, results, Options())
    if not hardware_runs_tiles():
        assert amx_emulator.counts().instructions > before.instructions + 100


# ---- through the public functions ----


@pytest.fixture
def preferred(target):
    """The target's modules first, then those of x86-avx2."""
    for name in ("merge-bf16", "write_kv-bf16"):
        module(name)
    with serving(target):
        yield target


def test_decode_attention(preferred):
    load(DECODE[0], preferred)
    batch = make_decode_batch([1, 40, 700], num_qo_heads=8, num_kv_heads=2, dim=128, dtype=torch.bfloat16)
    out, lse = decode_attention(*batch.decode_arguments(), window=600, return_lse=True)
    wanted, wanted_lse = batch.expected(decode=True, window=600)
    assert_close(out, wanted, TOLERANCE)
    assert_lse_close(lse, wanted_lse, TOLERANCE)


def test_extend_attention(preferred):
    load(EXTEND[0], preferred)
    batch = make_paged_batch([0, 33, 300], [40, 17, 5], num_qo_heads=8, num_kv_heads=2, dim=128, dtype=torch.bfloat16)
    out, lse = extend_attention(*batch.extend_arguments(), logit_cap=20.0, return_lse=True)
    wanted, wanted_lse = batch.expected(decode=False, logit_cap=20.0)
    assert_close(out, wanted, TOLERANCE)
    assert_lse_close(lse, wanted_lse, TOLERANCE)


def test_the_store_never_chooses_the_emulated_target(target):
    assert EMULATED not in [candidate.name for candidate in store.candidate_targets()]


# ---- the space ----

NAMES = [*DECODE, *EXTEND]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", [REAL, EMULATED])
def test_space_is_consistent(name, where):
    pytest.importorskip("tvm")
    space = get_space(Workload.parse(name), where)
    assert set(space.default) == set(space.choices)
    assert all(space.default[key] in values for key, values in space.choices.items())
    assert space.legal(space.default)
    assert not space.legal({**space.default, "chunk": 3})
    assert not space.legal({key: value for key, value in space.default.items() if key != "chunk"})
    plan = space.plan(space.default)
    assert plan["chunk"] == space.default["chunk"] and (plan["block_q"] == 1) == name.startswith("paged_decode")


def test_both_targets_get_the_same_schedule():
    tvm = pytest.importorskip("tvm")
    spaces = [get_space(Workload.parse(DECODE[0]), where) for where in (REAL, EMULATED)]
    tvm.ir.assert_structural_equal(*(space.module(space.default) for space in spaces))


@pytest.mark.parametrize(
    "name",
    [
        "paged_decode-f32-g4-d128",
        "paged_decode-bf16-general",
        "paged_decode-bf16-g4-d72",
        "paged_extend-bf16-g4-d64v24",
        "merge-bf16",
    ],
)
def test_unsupported_workloads(name):
    pytest.importorskip("tvm")
    with pytest.raises(UnsupportedWorkload, match=f"{name} for x86-amx"):
        get_space(Workload.parse(name), "x86-amx")
