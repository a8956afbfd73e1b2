"""The built paged modules through the public functions against the float64 oracle; case ids (P01 ...) are those of
known faults of such kernels. The host side alone is tested in tests/runtime/test_paged.py."""

import itertools
import math
import mmap
import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from batches import as_numpy, make_paged_batch, poisoned
from tolerances import MERGE, PAGED, assert_close, assert_lse_close

from tilewright.codegen.build import build
from tilewright.runtime import dispatch, store
from tilewright.runtime.errors import MissingModuleError
from tilewright.runtime.paged import decode_attention, extend_attention, merge_state, merge_states, write_kv
from tilewright.runtime.plan import PlanBuffers, plan_decode, plan_extend
from tilewright.schedules.catalog import PAGED_SHAPES, all_workloads
from tilewright.schedules.paged_attention import reference

TARGET = "x86-avx2"
ORACLE_OPTIONS = ("sm_scale", "logit_cap", "window", "sinks", "kv_start", "kv_lens", "causal", "extend_start_loc")
REQUESTS = [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 513]


class Size(NamedTuple):
    """Heads and dims of a call. general: served by the general module although a specialised one may be built."""

    dim: int
    dim_vo: int
    group: int
    kv_heads: int
    general: bool = True
    aliased: bool = False

    @property
    def plan(self):
        return {"num_qo_heads": self.group * self.kv_heads, "num_kv_heads": self.kv_heads, "head_dim_qk": self.dim,
                "head_dim_vo": self.dim_vo, "device": "cpu"}  # fmt: skip

    def __str__(self):
        kind = "general" if self.general else "special"
        return f"{kind}-d{self.dim}v{self.dim_vo}-g{self.group}" + ("-aliased" if self.aliased else "")


SPECIAL = [Size(dim, dim, group, 2, general=False) for dim, group in PAGED_SHAPES]
GENERAL = [
    Size(128, 128, 4, 2), Size(13, 13, 5, 1), Size(80, 80, 8, 1), Size(33, 55, 3, 2), Size(192, 128, 1, 3),
    Size(576, 512, 22, 1, aliased=True), Size(1, 1, 1, 1),
]  # fmt: skip
SIZES = [*SPECIAL, *GENERAL]
BOTH = [SPECIAL[1], GENERAL[3]]


@pytest.fixture(params=PAGED, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request):
    return request.param


class Modules:
    """Stands before the store: x86-avx2 modules of this checkout only, built where they are not up to date.

    Attributes:
        general: hide the specialised modules. split: tell the planner that ranges may be cut every 16 keys.
    """

    def __init__(self, load):
        self._load, self.general, self.split = load, False, False

    def use(self, size=None, *, general=False, split=False):
        general = general if size is None else size.general
        if (general, split) != (self.general, self.split):
            self.general, self.split = general, split
            dispatch.kernel.cache_clear()

    def load(self, workload):
        paged = workload.operator.startswith("paged")
        if workload not in all_workloads(TARGET) or (paged and self.general and not workload.general):
            raise MissingModuleError(workload.name)
        root = build(workload, TARGET).folder.parent.parent
        module = self._load(workload, TARGET, root=root)
        plan = module.plan | {"chunk": 16, "min_split": 16} if paged and self.split else module.plan
        return SimpleNamespace(function=module.function, plan=plan)


@pytest.fixture(scope="module")
def loaded():
    dispatch.kernel.cache_clear()
    modules = Modules(store.load)
    yield modules
    dispatch.kernel.cache_clear()


@pytest.fixture(autouse=True)
def modules(loaded, monkeypatch):
    monkeypatch.setattr(store, "load", loaded.load)
    monkeypatch.delenv("TILEWRIGHT_STRICT", raising=False)
    monkeypatch.setenv("TILEWRIGHT_CHECK", "1")
    loaded.use()
    return loaded


@pytest.fixture
def many_threads(monkeypatch):
    """The planner cuts work for 16 threads; the launcher asks torch itself."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def paged_batch(size, prefixes, news, **options):
    batch = make_paged_batch(
        prefixes, news, num_qo_heads=size.group * size.kv_heads, num_kv_heads=size.kv_heads, dim=size.dim,
        dim_vo=size.dim_vo, **options,
    )  # fmt: skip
    if size.aliased:
        batch.v_buffer = batch.k_buffer[..., : size.dim_vo]
        batch.v = None if batch.k is None else batch.k[..., : size.dim_vo]
    return batch


def decode_batch(size, lens, **options):
    return paged_batch(size, [n - 1 for n in lens], [1] * len(lens), from_pool=True, **options)


def run(batch, **options):
    """(out, lse) of extend or, for a batch whose requests have one token each and no k, decode."""
    options = {"out": batch.out(), "return_lse": True} | options
    if options.pop("decode", False):
        return decode_attention(*batch.decode_arguments(), **options)
    return extend_attention(*batch.extend_arguments(), **options)


def check(batch, *, expected=None, **options):
    """`run`, held to the oracle."""
    out, lse = run(batch, **options)
    decode = options.get("decode", False)
    if expected is None:
        expected = batch.expected(decode=decode, **{n: options[n] for n in ORACLE_OPTIONS if n in options})
    assert_close(out, expected[0], PAGED[batch.q.dtype])
    assert_lse_close(lse, expected[1], PAGED[batch.q.dtype])
    return out, lse


def same_bits(a, b):
    if isinstance(a, tuple):
        return all(same_bits(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# ---- lengths


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_decode_lengths(modules, dtype, size):
    """P01, P06, P07, P08, P21, P35: around every tile edge, an empty request; all that is unused is NaN."""
    modules.use(size)
    out, lse = check(decode_batch(size, REQUESTS, dtype=dtype), decode=True)
    assert (out[0] == 0).all() and (lse[0] == -math.inf).all()


@pytest.mark.parametrize("from_pool", [False, True], ids=["new", "pool"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_extend_lengths(modules, dtype, size, from_pool):
    """P01, P07, P21, P35: query blocks of 8, 12, 16 and 48 tokens and one more or less, prefixes at tile edges."""
    modules.use(size)
    prefixes, news = [0, 127, 64, 300, 0, 17, 15, 5], [13, 1, 12, 0, 17, 49 if size.dim <= 80 else 9, 16, 7]
    check(paged_batch(size, prefixes, news, dtype=dtype, from_pool=from_pool))


@pytest.mark.parametrize(("size", "dtype"), [(SPECIAL[2], torch.float32), (SPECIAL[0], torch.bfloat16),
                         (Size(64, 64, 1, 1), torch.float16)], ids=str)  # fmt: skip
@pytest.mark.parametrize("new", [1, 2, 11, 12, 13, 33, 47, 48, 49])
def test_extend_prefix_sweep(modules, size, dtype, new):
    """P22, P23: every prefix around the edges in one batch; requests of one token are no decode."""
    modules.use(size)
    prefixes = [0, 1, 15, 16, 17, 31, 33, 63, 64, 65, 128] if size.group == 1 else [0, 16, 97, 130]
    batch = paged_batch(size._replace(kv_heads=1), prefixes, [new] * len(prefixes), dtype=dtype)
    batch.q *= 4
    check(batch)


def test_partial_blocks_with_peaked_scores():
    """P22: the reported input: 16/4 heads, D 128, prefix 97, extend 37, q times 20, in bf16."""
    batch = paged_batch(Size(128, 128, 4, 4), [97], [37], dtype=torch.bfloat16)
    batch.q *= 20
    check(batch)


@pytest.mark.parametrize("heads", [(5, 1), (6, 1), (7, 1), (28, 4), (24, 1), (48, 2), (48, 8), (64, 4)])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_head_ratios(modules, many_threads, heads, split):
    """P21, P23: head h uses KV head h // ratio, with and without splits, in decode and in a mixed batch."""
    size = Size(64, 64, heads[0] // heads[1], heads[1])
    modules.use(split=split)
    check(decode_batch(size, [70, 3]), decode=True)
    check(paged_batch(size, [69, 0, 6], [1, 11, 1]))


@pytest.mark.parametrize("dim", [16, 40, 46, 48, 72, 96, 100, 112, 160, 256, 512])
def test_head_dims(dtype, dim):
    """P35: dims outside any list of a specialised kernel."""
    check(decode_batch(Size(dim, dim, 2, 1), [5, 33], dtype=dtype), decode=True)
    check(paged_batch(Size(dim, dim, 2, 1), [5, 0], [9, 3], dtype=dtype))


# ---- memory


@pytest.mark.parametrize("size", BOTH, ids=str)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "extend"])
def test_unused_memory_is_not_read(modules, monkeypatch, size, poison, decode):
    """P07, P08, P11, P25: unused slots (padding slot 0 too), spare pages, workspaces and outputs change no bit.

    Table entries past a request's keys point far outside the pool: to touch one would crash.
    """
    modules.use(size)
    options = {"page_size": 4, "dtype": torch.bfloat16, "from_pool": decode}
    batch = paged_batch(size, [12, 15, 39, 511], [1, 1, 1, 1] if decode else [1, 4, 9, 1], **options)
    if math.isinf(poison):
        for buffer in (batch.k_buffer, batch.v_buffer):
            buffer.masked_fill_(buffer.isnan(), poison)
    clean = paged_batch(size, [12, 15, 39, 511], [1, 1, 1, 1] if decode else [1, 4, 9, 1], **options)
    for buffer in (clean.k_buffer, clean.v_buffer):
        buffer.nan_to_num_(0)
    in_pool = batch.seq_lens if decode else batch.seq_lens - batch.extend_seq_lens
    for row, used in zip(batch.req_pool_indices.tolist(), in_pool.tolist(), strict=True):
        batch.req_to_token[row, used:] = 2**31 - 1
    monkeypatch.setenv("TILEWRIGHT_CHECK", "0")
    assert same_bits(run(batch, decode=decode, page_size=4), run(clean, decode=decode, page_size=4))


@pytest.mark.parametrize("size", BOTH, ids=str)
def test_workspace_content_does_not_matter(modules, many_threads, size):
    """P25: partial states start from nothing; a workspace full of NaN gives the bits of one full of zeros."""
    modules.use(size, split=True)
    batch = decode_batch(size, [70, 200, 0])
    results = []
    for content in (0.0, math.nan, 1e30):
        buffers = PlanBuffers.allocate(
            items=99, rows=99, partials=999, num_qo_heads=batch.q.shape[1], head_dim_vo=size.dim_vo, device="cpu"
        )
        buffers.part_o.fill_(content), buffers.part_lse.fill_(content)
        plan = plan_decode(batch.seq_lens, buffers=buffers, **size.plan)
        results.append(check(batch, decode=True, plan=plan))
        assert len(plan.work(*next(iter(plan._work))).items) > 3, "not split"
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


@pytest.mark.parametrize("page_size", [1, 2, 3, 8, 64, 128, 256, 512])
def test_page_sizes(modules, page_size):
    """P26: the same numbers whatever the page size; every key counts (out of V = position is its mean)."""
    for size in BOTH:
        modules.use(size)
        batch = decode_batch(size, [256, page_size, 257], page_size=page_size)
        check(batch, decode=True, page_size=page_size)
        batch.q.zero_()
        for b, n in enumerate(batch.seq_lens.tolist()):
            slots = batch.req_to_token[batch.req_pool_indices[b], :n].long()
            batch.v_buffer[slots] = torch.arange(n, dtype=torch.float32)[:, None, None]
        out, lse = run(batch, decode=True, page_size=page_size)
        for b, n in enumerate(batch.seq_lens.tolist()):
            torch.testing.assert_close(out[b], torch.full_like(out[b], (n - 1) / 2))
            torch.testing.assert_close(lse[b], torch.full_like(lse[b], math.log(n)))


def strided(tensor):
    """The same values in a view whose strides are all odd, at an odd offset, NaN between."""
    base = poisoned(*[size * 2 + 1 for size in tensor.shape[:-1]], tensor.shape[-1] + 3, dtype=tensor.dtype)
    view = base[tuple(slice(1, None, 2) for _ in tensor.shape[:-1])][..., 1 : 1 + tensor.shape[-1]]
    view.copy_(tensor)
    return view


LAYOUTS = {
    "dense": lambda x: x,
    "strided": strided,
    "heads_first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "not_dense": lambda x: torch.stack((x, x), -1)[..., 0],
}


def lay_out(batch, layout):
    """K and V of one row next to each other ("interleaved"), or every float tensor in the given layout."""
    if layout == "interleaved":
        dim = batch.k_buffer.shape[2]
        pool = torch.cat((batch.k_buffer, batch.v_buffer), -1)
        batch.k_buffer, batch.v_buffer = pool[..., :dim], pool[..., dim:]
        return
    for name in ("q", "k", "v", "k_buffer", "v_buffer"):
        value = getattr(batch, name)
        if value is not None:
            setattr(batch, name, LAYOUTS[layout](value))


@pytest.mark.parametrize("size", BOTH, ids=str)
@pytest.mark.parametrize("layout", [*LAYOUTS, "interleaved"][1:])
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "extend"])
def test_layouts_give_the_same_bits(modules, dtype, size, layout, decode):
    """P34, R07, R09: strided and interleaved pools, strided q, k, v and out; nothing around an output is written."""
    modules.use(size)
    batch = paged_batch(size, [4, 60], [1, 1] if decode else [13, 2], dtype=dtype, from_pool=decode)
    expected = run(batch, decode=decode)
    lay_out(batch, layout)
    wide = poisoned(batch.q.shape[0], 2, batch.q.shape[1], size.dim_vo + 3, dtype=dtype)
    out = wide[:, 1, :, 2:-1]
    assert same_bits(run(batch, decode=decode, out=out), expected)
    out.fill_(math.nan)
    assert wide.isnan().all(), "memory around out was written"


def reserved(count, dtype):
    """A tensor over address space that takes memory only where it is touched."""
    no_reserve = 0x4000  # MAP_NORESERVE, which Python 3.10 does not name
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize, flags=flags), dtype=dtype)


@pytest.mark.parametrize("size", BOTH, ids=str)
def test_offsets_beyond_32_bits(modules, size):
    """P27, P29: slots, query rows and output rows 2**31 elements (and 2**32 bytes) apart are addressed in 64 bits."""
    modules.use(size)
    far = 2**31 + 64
    for decode in (True, False):
        batch = paged_batch(size, [2, 3], [1, 1] if decode else [3, 2], from_pool=decode, spare_slots=1)
        expected = run(batch, decode=decode)

        def apart(x):
            view = reserved(far * (x.shape[0] - 1) + x[0].numel(), x.dtype).as_strided(
                x.shape, (far, x.shape[2], 1)
            )  # fmt: skip
            return view.copy_(x)

        for name in ("q", "k", "v", "k_buffer", "v_buffer"):
            if getattr(batch, name) is not None:
                setattr(batch, name, apart(getattr(batch, name)))
        assert same_bits(run(batch, decode=decode, out=apart(batch.out())), expected)


def test_partial_states_beyond_32_bits():
    """P30: the merge reads partial rows whose offset passes 2**31 elements."""
    rows, heads, dim = 2**31 // 512 + 2, 1, 512
    part_o, part_lse = reserved(rows * dim, torch.float32).view(rows, heads, dim), reserved(rows, torch.float32)
    part_o[0], part_o[-1] = 1.0, 3.0
    out, lse = poisoned(1, heads, dim), poisoned(1, heads)
    merged = torch.tensor([[0, 0, 2, rows - 1]], dtype=torch.int32)
    dispatch.kernel("merge", "f32").run(
        part_o, part_lse.view(rows, heads), merged, torch.full((1,), -math.inf), out, lse
    )
    assert (out == 2).all()
    torch.testing.assert_close(lse, torch.full((1, 1), math.log(2)))


INDEXES = {
    "int32": lambda x: x.int(),
    "int64": lambda x: x.long(),
    "int32-strided": lambda x: x.int().repeat_interleave(2, -1)[..., ::2],
    "int64-strided": lambda x: x.long().repeat_interleave(3, -1)[..., ::3],
    "int64-transposed": lambda x: x.long().mT.contiguous().mT if x.dim() > 1 else x.long(),
}
INDEX_NAMES = ("req_to_token", "req_pool_indices", "seq_lens", "extend_seq_lens", "kv_start")


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "extend"])
def test_index_types_give_the_same_bits(modules, index, decode):
    """P32: int32 and int64 with any strides."""
    for size in BOTH:
        modules.use(size)
        batch = paged_batch(size, [4, 60], [1, 1] if decode else [3, 2], from_pool=decode, kv_starts=[1, 3])
        expected = check(batch, decode=decode, kv_start=batch.kv_start)
        for name in INDEX_NAMES:
            setattr(batch, name, INDEXES[index](getattr(batch, name)))
        assert same_bits(run(batch, decode=decode, kv_start=batch.kv_start), expected)


# ---- options


@pytest.mark.parametrize("size", [SPECIAL[0], *BOTH], ids=str)
@pytest.mark.parametrize("options", [
    {"window": 1}, {"window": 5}, {"window": 128}, {"window": 129}, {"logit_cap": 1.0}, {"logit_cap": 30.0},
    {"logit_cap": 50.0}, {"sm_scale": 0.3}, {"window": 33, "logit_cap": 2.0}, {"causal": False},
    {"causal": False, "window": 40},
], ids=lambda o: "-".join(map(str, itertools.chain(*o.items()))))  # fmt: skip
def test_option_has_its_effect(modules, size, options):
    """P15, P16: right with the option and different without; raw scores reach some hundred; one module serves all."""
    modules.use(size)
    batches = [paged_batch(size, [129, 200, 3], [5, 1, 13])]
    if "causal" not in options:
        batches.append(decode_batch(size, [130, 256, 200]))
    for batch, decode in zip(batches, (False, True), strict=False):
        batch.q *= 30 if "logit_cap" in options else 1
        plain = run(batch, decode=decode)[0]
        assert (check(batch, decode=decode, **options)[0] - plain).abs().max() > 1e-3
        assert same_bits(run(batch, decode=decode)[0], plain)


@pytest.mark.parametrize("size", BOTH, ids=str)
def test_window_edge(modules, size):
    """P13: of one-hot keys the one at p - window + 1 is seen, the one before is not; decode and extend agree."""
    modules.use(size)
    for window, keys in ((4, 6), (16, 33), (64, 65), (128, 200)):
        for at, seen in ((keys - window, True), (keys - window - 1, False)):
            for decode in (True, False):
                batch = paged_batch(size, [keys - 1], [1], from_pool=True)
                slots = batch.req_to_token[batch.req_pool_indices[0], :keys].long()
                batch.v_buffer[slots] = 0
                batch.v_buffer[slots[at]] = 1
                out, _ = run(batch, decode=decode, window=window)
                assert bool((out > 0).all()) is seen and bool((out == 0).all()) is not seen


@pytest.mark.parametrize("cap", [1e3, 1e5, 1e20])
def test_large_caps_cost_no_accuracy(modules, cap):
    """P16: a cap far above the scores is the plain softmax, not one of coarse scores."""
    for size in BOTH:
        modules.use(size)
        batch = decode_batch(size, [200, 60])
        batch.q *= 5
        check(batch, decode=True, logit_cap=cap)


def test_cap_comes_before_the_mask(modules):
    """P18: a capped score of a hidden key would be -cap, not nothing: row 0 sees key 0 alone."""
    for size in BOTH:
        modules.use(size)
        batch = paged_batch(size, [0], [8])
        out, _ = check(batch, logit_cap=1.0)
        torch.testing.assert_close(out[0], batch.v[0].repeat_interleave(size.group, 0))


SINKS = {"some": [0.5, -math.inf, 3.0], "none": [-math.inf] * 3, "huge": [200.0, 5.0, -200.0]}


@pytest.mark.parametrize("size", BOTH, ids=str)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("sinks", SINKS)
def test_sinks(modules, many_threads, size, split, sinks):
    """A sink takes weight once (however the keys are split) and is in out, not in lse."""
    modules.use(size, split=split)
    heads = size.group * size.kv_heads
    values = torch.tensor((SINKS[sinks] * heads)[:heads])
    for batch, decode in ((decode_batch(size, [90, 3, 0]), True), (paged_batch(size, [80, 2], [6, 3]), False)):
        plain = run(batch, decode=decode)
        out, lse = check(batch, decode=decode, sinks=values)
        assert same_bits(lse, plain[1])
        assert same_bits(out, plain[0]) is (sinks == "none")


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_queries_before_the_first_key(modules, size):
    """P03, P38: k = v = None and more query tokens than keys: rows without a key are 0 and -inf, V = 1 gives 1."""
    modules.use(size)
    batch = paged_batch(size, [-33, 2, -1, -7], [64 if size.dim <= 80 else 40, 2, 1, 5], from_pool=True)
    batch.seq_lens[3] = 0
    out, lse = check(batch)
    assert (out[:33] == 0).all() and (lse[:33] == -math.inf).all() and (lse[33] > -math.inf).all()


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_cross_attention(modules, dtype, size):
    """P38: kv_lens, from column kv_start on, without a causal rule; an encoder without keys."""
    modules.use(size)
    starts = torch.tensor([3, 0, 2])
    lens = torch.tensor([40, 7, 0])
    check(decode_batch(size, [50, 7, 4], kv_starts=[3, 0, 2], dtype=dtype), decode=True, kv_lens=lens, kv_start=starts)
    batch = paged_batch(size, [40, 4, 1], [3, 9, 2], kv_starts=[3, 0, 2], from_pool=True, dtype=dtype)
    check(batch, kv_lens=lens, kv_start=starts)


@pytest.mark.parametrize("size", BOTH, ids=str)
def test_scores_below_any_sentinel(modules, size):
    """P04: scores of -46341 are no mask: two equal keys share the weight; one such key among large ones has none."""
    modules.use(size)
    for decode in (True, False):
        batch = paged_batch(size, [1], [1], from_pool=True)
        batch.q.fill_(1)
        slots = batch.req_to_token[batch.req_pool_indices[0], :2].long()
        batch.k_buffer[slots], batch.v_buffer[slots] = -46341.0 / size.dim, 1
        out, lse = run(batch, decode=decode, sm_scale=1.0)
        torch.testing.assert_close(out, torch.ones_like(out), rtol=1e-6, atol=0)
        torch.testing.assert_close(lse, torch.full_like(lse, -46341 + math.log(2)), rtol=1e-6, atol=0)
        batch.k_buffer[slots[0]] = 1e4 / size.dim
        batch.v_buffer[slots[1]] = 7
        out, _ = run(batch, decode=decode, sm_scale=1.0)
        assert (out == 1).all()


@pytest.mark.parametrize("size", BOTH, ids=str)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "extend"])
def test_nan_query_gives_its_row_nan(modules, many_threads, dtype, size, decode, split):
    """P09: the row of a NaN query is NaN, lse too (else a merge would drop it); no other row or head changes a bit."""
    modules.use(size, split=split)
    batch = paged_batch(size, [15, 15, 40], [1] * 3 if decode else [1, 5, 3], from_pool=decode, dtype=dtype)
    clean_out, clean_lse = run(batch, decode=decode)
    batch.q[1, 2] = math.nan
    out, lse = run(batch, decode=decode)
    assert out[1, 2].isnan().all() and lse[1, 2].isnan()
    out[1, 2], lse[1, 2] = clean_out[1, 2], clean_lse[1, 2]
    assert same_bits((out, lse), (clean_out, clean_lse))


@pytest.mark.parametrize("size", BOTH, ids=str)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_poison_in_a_hidden_token(modules, size, poison):
    """P39: the key of a token reaches no row that the causal rule or the window hides it from, nor another request.

    Its value is multiplied by weights that are 0, so NaN reaches the hidden rows of the one query block that has rows
    which see it, and those only.
    """
    modules.use(size)
    at = 29
    for options in ({}, {"window": 5}):
        batch = paged_batch(size, [0, 7], [50, 3])
        expected, expected_lse = run(batch, **options)
        hidden = [*range(at), *(range(at + 5, 50) if options else ()), 50, 51, 52]
        key, batch.k[at] = batch.k[at].clone(), poison
        out, lse = run(batch, **options)
        assert same_bits((out[hidden], lse[hidden]), (expected[hidden], expected_lse[hidden]))
        assert not out[at].isfinite().any()
        batch.k[at], batch.v[at] = key, poison
        out, lse = run(batch, **options)
        block_q = dispatch.kernel("paged_extend", "f32", size.group, size.dim, size.dim_vo).tiling.block_q
        first = at // block_q * block_q
        last = -(-(at + options.get("window", 50)) // block_q) * block_q
        safe = [*range(first), *range(last, 50), 50, 51, 52]
        assert same_bits(out[safe], expected[safe]) and same_bits(lse, expected_lse)
        assert not out[at].isfinite().any()


# ---- splits, batches, threads


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_split_equals_whole(modules, many_threads, dtype, size):
    """P20, P21: ranges cut at every 16 keys and merged, against the oracle and the unsplit kernel."""
    batches = [
        (decode_batch(size, [130, 1, 0, 17, 64], dtype=dtype), True),
        (paged_batch(size, [90, 0], [6, 14], dtype=dtype), False),
    ]
    for batch, decode in batches:
        modules.use(size)
        whole = run(batch, decode=decode)
        modules.use(size, split=True)
        if decode:
            plan = plan_decode(batch.seq_lens, **size.plan)
        else:
            plan = plan_extend(batch.seq_lens, batch.extend_seq_lens, **size.plan)
        out, lse = check(batch, decode=decode, plan=plan)
        (work,) = plan._work.values()
        assert work.rows is not None, "not split"
        assert_close(out, as_numpy(whole[0]).astype(np.float64), PAGED[dtype])
        assert_lse_close(lse, as_numpy(whole[1]).astype(np.float64), PAGED[dtype])


@pytest.mark.parametrize("size", BOTH, ids=str)
def test_decode_is_batch_invariant(modules, monkeypatch, dtype, size):
    """P40: a row alone, first and last of a batch of 32, planned for 1, 7, 16 and 64 threads: the same bits."""
    modules.use(size)
    others = [5 * i + 1 for i in range(31)]
    length = 2100  # beyond one fixed split
    alone = decode_batch(size, [length], dtype=dtype, seed=7)
    crowd = decode_batch(size, [length, *others, length], dtype=dtype, seed=8)
    source = alone.req_to_token[alone.req_pool_indices[0], :length].long()
    for at in (0, 32):
        crowd.q[at] = alone.q[0]
        slots = crowd.req_to_token[crowd.req_pool_indices[at], :length].long()
        crowd.k_buffer[slots], crowd.v_buffer[slots] = alone.k_buffer[source], alone.v_buffer[source]
    results = []
    for threads in (1, 7, 16, 64):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        results.append(run(alone, decode=True, batch_invariant=True))
        out, lse = run(crowd, decode=True, batch_invariant=True)
        results += [(out[:1], lse[:1]), (out[32:], lse[32:])]
    assert all(same_bits(result, results[0]) for result in results)


@pytest.mark.parametrize("size", BOTH, ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 70}], ids=["plain", "window"])
def test_extend_is_batch_and_chunk_invariant(modules, monkeypatch, dtype, size, options):
    """P40: the rows of a request alone, beside others, and in chunks (1 + rest, halves): the same bits."""
    modules.use(size)
    new = 61
    batch = paged_batch(size, [0, 200, 0], [new, 3, 9], dtype=dtype)
    whole = run(batch, batch_invariant=True, **options)
    slots = torch.arange(1, new + 1)
    table = slots.int()[None]
    pools = [torch.zeros(new + 1, *x.shape[1:], dtype=dtype).index_copy_(0, slots, x[:new]) for x in (batch.k, batch.v)]
    for threads, cuts in ((1, [0, new]), (16, [0, new]), (2, [0, 1, new]), (7, [0, 30, new]), (1, [0, 8, 48, new])):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for first, last in itertools.pairwise(cuts):
            got = extend_attention(
                batch.q[first:last], batch.k[first:last], batch.v[first:last], *pools, table, torch.tensor([0]),
                torch.tensor([last]), torch.tensor([last - first]), return_lse=True, batch_invariant=True, **options,
            )  # fmt: skip
            assert same_bits(got, (whole[0][first:last], whole[1][first:last])), (threads, first, last)


@pytest.mark.parametrize("size", BOTH, ids=str)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_same_bits_every_time_and_on_any_threads(modules, set_threads, dtype, size, split):
    """Two calls, and one plan run by one thread and by two."""
    modules.use(size, split=split)
    set_threads(2)
    decode, extend = decode_batch(size, [300, 5, 64], dtype=dtype), paged_batch(size, [90, 0], [14, 17], dtype=dtype)
    plans = [
        plan_decode(decode.seq_lens, **size.plan),
        plan_extend(extend.seq_lens, extend.extend_seq_lens, **size.plan),
    ]
    expected = [run(decode, decode=True, plan=plans[0]), run(extend, plan=plans[1])]
    for threads in (2, 1):
        set_threads(threads)
        assert same_bits(run(decode, decode=True, plan=plans[0]), expected[0])
        assert same_bits(run(extend, plan=plans[1]), expected[1])


def test_calls_from_many_python_threads(modules):
    """Calls share no state: eight threads at once give the bits of one after the other."""
    batches = [decode_batch(BOTH[n % 2]._replace(general=False), [300, 5, n + 1], seed=n) for n in range(8)]
    expected = [run(batch, decode=True) for batch in batches]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            results = pool.map(lambda batch: run(batch, decode=True), batches)
            assert all(same_bits(*pair) for pair in zip(results, expected, strict=True))


def test_mixed_batch_of_one_token_slices(modules, many_threads):
    """P23: decodes of 512 and 7 keys beside a fresh request of 33 tokens in one extend, 32/8 and 48/8 heads."""
    for heads in (4, 6):
        size = Size(64, 64, heads, 8)
        batch = paged_batch(size, [200, 0, 6], [1, 17, 1], dtype=torch.bfloat16)
        check(batch)


# ---- every option with every other

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
}


def possible(row):
    """What the interface refuses together is not asked for."""
    decode = row["phase"] == "decode"
    return not (
        (row["cross"] and (row["window"] or row["phase"] == "extend" or not row["causal"]))
        or (decode and (row["start_loc"] or not row["causal"]))
        or (row["layout"] == "interleaved" and row["size"].aliased)
    )


def pairwise(seed):
    """Rows over AXES in which any two values that may stand together do so."""
    generator = random.Random(seed)

    def pairs(row):
        return set(itertools.combinations(row.items(), 2))

    def draw(fixed):
        return {name: fixed.get(name, generator.choice(values)) for name, values in AXES.items()}

    todo = dict.fromkeys(
        (a, b)
        for (first, ones), (second, others) in itertools.combinations(AXES.items(), 2)
        for a in [(first, value) for value in ones]
        for b in [(second, value) for value in others]
    )
    rows = []
    while todo:
        pair = next(iter(todo))
        rows_with_it = list(filter(possible, (draw(dict(pair)) for _ in range(60))))
        if not rows_with_it:  # never possible: 60 draws of two or three free values
            del todo[pair]
            continue
        rows.append(max(rows_with_it, key=lambda row: len(pairs(row) & todo.keys())))
        for known in pairs(rows[-1]):
            todo.pop(known, None)
    return rows


@pytest.mark.parametrize("row", pairwise(2024), ids=lambda row: f"{row['phase']}-{row['size']}")
def test_pairs_of_options(modules, monkeypatch, row):
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
    lay_out(batch, row["layout"])
    lengths = torch.tensor([50, 17, 30, 0]) if row["cross"] else batch.seq_lens
    options = {name: row[name] for name in ("window", "logit_cap", "sm_scale", "batch_invariant", "page_size")}
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
    nobody = np.setdiff1d(np.arange(len(batch.q)), tokens.numpy())
    if out is None:
        expected[0][nobody], expected[1][nobody] = 0, -math.inf
    assert_close(result[0], expected[0], PAGED[row["dtype"]])
    if row["return_lse"]:
        expected[1][nobody] = -math.inf
        assert_lse_close(result[1], expected[1], PAGED[row["dtype"]])


# ---- merge and write


@pytest.mark.parametrize("dim", [1, 13, 64, 128, 512])
def test_merge(dtype, dim):
    """P02: empty states first, last, all, between; NaN in their values stays there."""
    generator = torch.Generator().manual_seed(0)
    o = torch.randn(4, 6, 3, dim, generator=generator).to(dtype)
    lse = torch.randn(4, 6, 3, generator=generator) * 20
    lse[:, 0], lse[1:, 1], lse[:3, 2], lse[1:3, 3], lse[0, 4] = (-math.inf,) * 5
    o[lse == -math.inf] = math.nan
    expected = reference.merge(as_numpy(o), as_numpy(lse))
    out, out_lse = merge_states(o, lse)
    assert_close(out, expected[0], MERGE[dtype])
    assert_lse_close(out_lse, expected[1], MERGE[dtype])
    assert (out[0] == 0).all() and (out_lse[0] == -math.inf).all()
    assert torch.equal(out[1], o[0, 1]) and torch.equal(out[2], o[3, 2])
    out, out_lse = merge_state(o[0], lse[0], o[3], lse[3])
    expected = reference.merge(as_numpy(o[::3]), as_numpy(lse[::3]))
    assert_close(out, expected[0], MERGE[dtype])
    assert_lse_close(out_lse, expected[1], MERGE[dtype])


@pytest.mark.parametrize("size", BOTH, ids=str)
def test_prefix_and_suffix_merge_to_one_pass(modules, size):
    """P20: 3072 + 64 keys merged by LSE are one pass over 3136; LSE is that of torch.logsumexp, natural log."""
    modules.use(size)
    batch = decode_batch(size, [3136])
    whole = run(batch, decode=True)
    slots = batch.req_to_token[batch.req_pool_indices[0], :3136].long()
    keys = batch.k_buffer[slots].repeat_interleave(size.group, 1).double()
    scores = torch.einsum("hd,jhd->hj", batch.q[0].double(), keys) * size.dim**-0.5
    assert_lse_close(whole[1], scores.logsumexp(1)[None].numpy(), PAGED[torch.float32])
    parts = [
        run(batch, decode=True, kv_lens=torch.tensor([n]), kv_start=torch.tensor([start]))
        for start, n in ((0, 3072), (3072, 64))
    ]
    merged = merge_state(*parts[0], *parts[1])
    assert_close(merged[0], as_numpy(whole[0]).astype(np.float64), PAGED[torch.float32])
    assert_lse_close(merged[1], as_numpy(whole[1]).astype(np.float64), PAGED[torch.float32])


@pytest.mark.parametrize(("heads", "dim", "dim_vo"), [(2, 128, 128), (3, 13, 55), (1, 576, 512), (1, 1, 1)])
@pytest.mark.parametrize("index", INDEXES)
def test_write(dtype, heads, dim, dim_vo, index):
    """P37: -1 is skipped, the last and the first slot are written, guard slots and bytes between rows are not."""
    generator = torch.Generator().manual_seed(0)
    k, v = (strided(torch.randn(6, heads, n, generator=generator).to(dtype)) for n in (dim, dim_vo))
    k[1] = v[1] = math.nan  # of the row that is skipped
    pools = [poisoned(12, heads + 1, n + 3, dtype=dtype) for n in (dim, dim_vo)]
    k_buffer, v_buffer = pools[0][1:-1, :heads, 1 : 1 + dim], pools[1][1:-1, :heads, 1 : 1 + dim_vo]
    loc = torch.tensor([9, -1, 0, 7, -1, 3])
    expected = [reference.write(as_numpy(x), as_numpy(b), as_numpy(loc)) for x, b in ((k, k_buffer), (v, v_buffer))]
    write_kv(k, v, k_buffer, v_buffer, INDEXES[index](loc))
    for pool, buffer, wanted in zip(pools, (k_buffer, v_buffer), expected, strict=True):
        np.testing.assert_array_equal(as_numpy(buffer), wanted)
        buffer.fill_(math.nan)
        assert pool.isnan().all(), "memory outside the slots was written"


def test_write_of_duplicates_keeps_whole_rows():
    """P37: of rows with one slot the last wins, whole."""
    k = torch.arange(64.0)[:, None, None].expand(64, 2, 96).contiguous()
    k_buffer, v_buffer = poisoned(2, 2, 96), poisoned(2, 2, 96)
    write_kv(k, k, k_buffer, v_buffer, torch.ones(64, dtype=torch.int32))
    for buffer in (k_buffer, v_buffer):
        assert (buffer[1] == 63).all() and buffer[0].isnan().all()


def test_write_into_an_aliased_pool():
    """V that is a view of K is not written over it."""
    k = torch.randn(3, 1, 576)
    pool = poisoned(5, 1, 576)
    write_kv(k, torch.zeros(3, 1, 512), pool, pool[..., :512], torch.tensor([4, 0, 2]))
    assert torch.equal(pool[[4, 0, 2]], k) and pool[[1, 3]].isnan().all()


@pytest.mark.parametrize("size", BOTH, ids=str)
def test_decode_writes_then_attends(modules, dtype, size):
    """The key and value given to decode are seen by its query."""
    modules.use(size)
    batch = decode_batch(size, [5, 64, 3], dtype=dtype)
    expected = batch.expected(decode=True)
    last = batch.req_to_token[batch.req_pool_indices, batch.seq_lens - 1]
    key, value = batch.k_buffer[last.long()].clone(), batch.v_buffer[last.long()].clone()
    batch.k_buffer[last.long()], batch.v_buffer[last.long()] = math.nan, math.nan
    check(batch, expected=expected, decode=True, key=key, value=value, loc=last)
