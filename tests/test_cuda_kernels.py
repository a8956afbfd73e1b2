"""The built CUDA modules at the kernel interface against float64 on the same GPU: ragged work lists, every option.

What no key, row or table entry of a case uses is NaN (or a slot far outside the pool), so that touching it shows.
"""

import math
from dataclasses import dataclass, field

import pytest
import torch
from tolerances import PAGED, assert_close, assert_lse_close

from tilewright.runtime import store
from tilewright.runtime.errors import MissingModuleError
from tilewright.runtime.planner import OFF
from tilewright.schedules.catalog import MORE_SHAPES, all_workloads
from tilewright.schedules.workload import Workload

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FP8 = torch.float8_e4m3fn
NOWHERE = 2**31 - 1
SIZES = [(128, 4), (64, 3)]
DECODES = [w for w in all_workloads("cuda-sm90a") if w.operator == "paged_decode"]
WIDE = [w for w in DECODES if w.head_dim_qk > 256]
LENGTHS = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300, 1000]


def target():
    major, minor = torch.cuda.get_device_capability()
    return "cuda-sm90a" if (major, minor) == (9, 0) else "cuda-sm80"


@dataclass
class Options:
    """Of one call, as the kernels take them; see docs/kernel-abi.md."""

    scale: float | None = None
    cap: float = 0.0
    window: int = OFF
    lookahead: int = 0
    sinks: list[float] | None = None

    def arguments(self, dim):
        scale = dim**-0.5 if self.scale is None else self.scale
        cap = (self.cap * math.log2(math.e), scale / self.cap) if self.cap else (0.0, 0.0)
        return (scale * math.log2(math.e), *cap, self.window, self.lookahead)


@dataclass
class Case:
    """Requests of (keys, query tokens); query token i stands at position keys - tokens + i.

    pooled: how many of a request's keys lie in the pool, given (keys, tokens). split: keys of an item, 0 = all.
    """

    workload: Workload
    requests: list[tuple[int, int]]
    heads: int = 2
    split: int = 0
    join: bool = False
    latent: bool = False
    pooled: object = lambda keys, tokens: keys
    seed: int = 0
    options: Options = field(default_factory=Options)
    scale_q: float = 1.0
    kv_scales: tuple[float, float] = (0.3, 2.0)  # of keys and values in a pool of e4m3
    general: bool = False  # served by the general module

    def __post_init__(self):
        w = self.workload
        generator = torch.Generator(device="cuda").manual_seed(self.seed)
        dtype, dim, dim_vo, hk = DTYPES[w.dtype], w.head_dim_qk, w.head_dim_vo, self.heads

        def normal(*shape):
            return torch.randn(shape, generator=generator, device="cuda").to(dtype)

        self.module = store.load(Workload(w.operator, w.dtype, None, None, None, w.kv_dtype, w.tree)
                                 if self.general else w, target())  # fmt: skip
        self.block_q = self.module.plan["block_q"]
        pooled = [self.pooled(*r) for r in self.requests]
        fresh = [keys - n for (keys, _), n in zip(self.requests, pooled, strict=True)]
        slots = sum(pooled) + 50
        order = (torch.randperm(slots - 1, generator=torch.Generator().manual_seed(self.seed)) + 1).tolist()
        self.scales = self.kv_scales if w.kv_dtype else ()
        pool_dtype = FP8 if w.kv_dtype else dtype
        self.k_buffer = torch.full((slots, hk, dim), math.nan, device="cuda").to(pool_dtype)
        self.v_buffer = torch.full((slots, hk, dim_vo), math.nan, device="cuda").to(pool_dtype)
        self.k_new = torch.full((sum(fresh) + 3, hk, dim), math.nan, device="cuda", dtype=dtype)
        self.v_new = torch.full((sum(fresh) + 3, hk, dim_vo), math.nan, device="cuda", dtype=dtype)
        batch = len(self.requests)
        self.starts = torch.arange(batch, dtype=torch.int32) % 3
        table = torch.full((batch + 1, max(pooled, default=0) + 5), NOWHERE, dtype=torch.int32)
        self.table_rows = torch.arange(batch, 0, -1, dtype=torch.int32)
        self.new_rows, self.keys, self.values, used = [], [], [], 1
        for b, ((keys, _), n) in enumerate(zip(self.requests, pooled, strict=True)):
            own, order = order[:n], order[n:]
            table[self.table_rows[b], self.starts[b] : self.starts[b] + n] = torch.tensor(own, dtype=torch.int32)
            key, value = normal(keys, hk, dim), normal(keys, hk, dim_vo)
            if w.kv_dtype is not None:
                for x, scale, buffer in zip((key, value), self.kv_scales, (self.k_buffer, self.v_buffer), strict=True):
                    buffer[own] = (x[:n].float() / scale).to(buffer.dtype)
                key, value = (
                    torch.cat((buffer[own].double() * scale, x[n:].double()))
                    for x, scale, buffer in zip(
                        (key, value), self.kv_scales, (self.k_buffer, self.v_buffer), strict=True
                    )
                )
            else:
                self.k_buffer[own], self.v_buffer[own] = key[:n], value[:n]
            self.k_new[used : used + keys - n], self.v_new[used : used + keys - n] = key[n:], value[n:]
            self.new_rows.append(used - n)
            used += keys - n
            self.keys.append(key), self.values.append(value)
        if self.latent:
            assert not w.kv_dtype, "its values would have the scale of keys"
            self.v_buffer, self.values = self.k_buffer[..., :dim_vo], [key[..., :dim_vo] for key in self.keys]
        if w.kv_dtype:
            self.k_buffer, self.v_buffer = self.k_buffer.view(torch.uint8), self.v_buffer.view(torch.uint8)
        self.prefixes = pooled
        # Of new tokens among themselves; between the requests' masks lies what nobody may take for a permission.
        self.masks = [torch.rand(t, max(k - n, 0), generator=torch.Generator().manual_seed(b)) < 0.6
                      for b, ((k, t), n) in enumerate(zip(self.requests, pooled, strict=True))]  # fmt: skip
        flat, starts = [], []
        for mask in self.masks:
            flat.append(torch.ones(5, dtype=torch.uint8))
            starts.append(sum(map(len, flat)))
            flat.append(mask.flatten().to(torch.uint8) * 7)
        self.mask = torch.cat(flat).cuda()
        self.mask_start = torch.tensor(starts, dtype=torch.int32).cuda()
        self.mask_width = torch.tensor([mask.shape[1] for mask in self.masks], dtype=torch.int32).cuda()
        self.req_to_token = table.cuda()
        self.q = normal(sum(t for _, t in self.requests), hk * w.group, dim) * self.scale_q
        # One row more than the kernel is given.
        self.out_rows = torch.full((len(self.q) + 1, hk * w.group, dim_vo), math.nan, device="cuda", dtype=dtype)
        self.lse_rows = torch.full((len(self.q) + 1, hk * w.group), math.nan, device="cuda")
        self.out, self.lse = self.out_rows[:-1], self.lse_rows[:-1]
        sinks = self.options.sinks or [-math.inf]
        self.sinks = torch.tensor((sinks * (hk * w.group))[: hk * w.group], device="cuda")
        self._plan()

    def _plan(self):
        items, rows, partials, first_row, joined = [], [], 0, 0, 0
        for b, (keys, tokens) in enumerate(self.requests):
            for start in range(0, tokens, self.block_q):
                count = min(self.block_q, tokens - start)
                ranges = [(0, keys)]
                if self.split and keys > self.split:
                    ranges = [(i, min(self.split, keys - i)) for i in range(0, keys, self.split)]
                for number, (begin, length) in enumerate(ranges):
                    part = partials + number * count if len(ranges) > 1 else -1
                    first_new = self.prefixes[b] if self.workload.operator == "paged_extend" else 0
                    own = [self.prefixes[b], self.new_rows[b], part, first_new]
                    if self.join and len(ranges) > 1:
                        own = [partials, len(ranges), part, joined + 1]
                    items.append([b, first_row + start, count, begin, length, keys - tokens + start, *own])
                if self.join and len(ranges) > 1:
                    joined += 1
                    partials += len(ranges)
                elif len(ranges) > 1:
                    rows += [[first_row + start + i, partials + i, len(ranges), count] for i in range(count)]
                    partials += len(ranges) * count
            first_row += tokens
        # Padding: skipped whatever its other columns say.
        items.insert(len(items) // 2, [NOWHERE, NOWHERE, 0, 5, 5, 5, 5, 5, NOWHERE, 0])
        items.append([0] * 10)
        rows.append([NOWHERE, NOWHERE, 0, 1])
        self.items = torch.tensor(items, dtype=torch.int32).cuda()
        self.rows = torch.tensor(rows, dtype=torch.int32).cuda()
        heads = self.q.shape[1]
        self.part_o = torch.full((partials + 1 + joined, heads, self.v_buffer.shape[2]), math.nan, device="cuda")
        self.part_lse = torch.full((partials + 1 + joined, heads), math.nan, device="cuda")
        self.part_lse[partials + 1 :] = 0.0  # counters of arrivals

    def run(self):
        extend = self.workload.operator == "paged_extend"
        self.module.function(
            self.q, self.k_buffer, self.v_buffer, *((self.k_new, self.v_new) if extend else ()),
            self.req_to_token, self.table_rows.cuda(), self.starts.cuda(), self.items, self.sinks,
            self.out, self.lse, self.part_o, self.part_lse,
            *((self.mask, self.mask_start, self.mask_width) if self.workload.tree else ()),
            *self.options.arguments(self.q.shape[2]),
            *self.scales,
        )  # fmt: skip
        if len(self.rows) > 1:
            merge = store.load(Workload("merge", self.workload.dtype), target())
            merge.function(self.part_o, self.part_lse, self.rows, self.sinks, self.out, self.lse)
        torch.cuda.synchronize()
        return self.out, self.lse

    def expected(self):
        group, o = self.workload.group, self.options
        outs, lses, row = [], [], 0
        for b, (keys, tokens) in enumerate(self.requests):
            q = self.q[row : row + tokens].double()
            row += tokens
            key = self.keys[b].double().repeat_interleave(group, 1)
            value = self.values[b].double().repeat_interleave(group, 1)
            score = torch.einsum("thd,jhd->thj", q, key) * (q.shape[2] ** -0.5 if o.scale is None else o.scale)
            if o.cap:
                score = o.cap * torch.tanh(score / o.cap)
            position = torch.arange(keys - tokens, keys, device="cuda")[:, None]
            j = torch.arange(keys, device="cuda")
            visible = (j > position - o.window) & (j <= position + o.lookahead)
            if self.workload.tree:
                visible[:, self.prefixes[b] :] &= self.masks[b].cuda()
            score.masked_fill_(~visible[:, None], -math.inf)
            lse = torch.logsumexp(score, -1) if keys else torch.full(q.shape[:2], -math.inf, device="cuda").double()
            total = torch.logaddexp(lse, self.sinks.double())
            weight = torch.exp(score - total[..., None]).nan_to_num(0.0) if not q.isnan().any() else None
            if weight is None:
                weight = torch.exp(score - total[..., None])
            outs.append(torch.einsum("thj,jhe->the", weight, value))
            lses.append(lse)
        return torch.cat(outs).cpu().numpy(), torch.cat(lses).cpu().numpy()

    def check(self):
        out, lse = self.run()
        expected = self.expected()
        assert_close(out, expected[0], PAGED[out.dtype])
        assert_lse_close(lse, expected[1], PAGED[out.dtype])
        assert self.out_rows[-1].isnan().all() and self.lse_rows[-1].isnan().all(), "a row of no request was written"
        return out, lse


def decode(size, dtype, lens, **rest):
    dim, group = size
    return Case(Workload("paged_decode", dtype, group, dim, dim), [(n, 1) for n in lens], **rest)


def extend(size, dtype, requests, **rest):
    dim, group = size
    return Case(Workload("paged_extend", dtype, group, dim, dim), requests, **rest)


OPTIONS = {
    "window-1": Options(window=1),
    "window-5": Options(window=5),
    "window-130": Options(window=130),
    "cap-1": Options(cap=1.0),
    "cap-30": Options(cap=30.0),
    "cap-1e5": Options(cap=1e5),
    "cap-window": Options(cap=20.0, window=70),
    "scale": Options(scale=0.3),
    "scale-negative": Options(scale=-0.05),
    "scale-zero": Options(scale=0.0),
    "not-causal": Options(lookahead=OFF),
    "lookahead-window": Options(lookahead=3, window=40),
    "sinks": Options(sinks=[0.5, -math.inf, 3.0]),
    "sinks-huge": Options(sinks=[200.0, 5.0, -200.0]),
}

EXTENDS = [
    (0, 3),
    (13, 13),
    (1, 1),
    (128, 1),
    (76, 12),
    (17, 17),
    (64, 49),
    (31, 16),
    (300, 150),
    (129, 128),
    (500, 33),
]
POOLED = {
    "pool": lambda keys, tokens: keys,
    "new": lambda keys, tokens: 0,
    "mixed": lambda keys, tokens: max(keys - tokens, 0),
    "odd": lambda keys, tokens: keys // 3,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split", [0, 48, 128])
@pytest.mark.parametrize("size", MORE_SHAPES, ids=str)
def test_decode_lengths(size, dtype, split):
    decode(size, dtype, LENGTHS, split=split).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split", [16, 48, 128])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_pieces_joined_by_the_last(size, dtype, split):
    """As the merge kernel does it, again and again: the counters are left as they were found."""
    case = decode(size, dtype, LENGTHS, split=split, join=True)
    first = case.check()[0].clone()
    for _ in range(3):
        case.out.fill_(math.nan)
        assert torch.equal(case.run()[0], first)
    counters = case.part_lse[len(case.part_lse) - sum(n > split for n in LENGTHS) :]
    assert not counters.view(torch.int32).any()


@pytest.mark.parametrize("workload", [w for w in DECODES if w.kv_dtype], ids=lambda w: w.name)
@pytest.mark.parametrize(("split", "join"), [(0, False), (48, False), (128, True)], ids=["whole", "split", "joined"])
def test_fp8_decode(workload, split, join):
    batch = [(n, 1) for n in LENGTHS]
    Case(workload, batch, split=split, join=join).check()
    # Queries far outside the range of halves.
    for scale in (1e-30, 1e30):
        Case(workload, batch, split=split, join=join, scale_q=scale, options=Options(scale=0.1 / scale)).check()


@pytest.mark.parametrize("option", OPTIONS)
def test_fp8_options(option):
    Case(Workload("paged_decode", "bf16", 4, 128, 128, "fp8_e4m3"), [(n, 1) for n in LENGTHS], split=96,
         options=OPTIONS[option], scale_q=4.0 if "cap" in option else 1.0).check()  # fmt: skip


def test_fp8_codes():
    """All of them are read for what they are: each is the one value of a request."""
    codes = torch.arange(256, dtype=torch.uint8)
    workload = Workload("paged_decode", "bf16", 4, 128, 128, "fp8_e4m3")
    case = Case(workload, [(1, 1)] * 256, heads=1)
    case.k_buffer[:] = 0
    for b in range(256):
        slot = int(case.req_to_token[int(case.table_rows[b]), int(case.starts[b])])
        case.v_buffer[slot] = codes[b]
    out, _ = case.run()
    expected = (codes.view(FP8).float() * case.kv_scales[1]).bfloat16().cuda()[:, None, None].expand(out.shape)
    assert torch.equal(out.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(out.isnan(), expected.isnan())


@pytest.mark.parametrize("workload", WIDE, ids=lambda w: w.name)
@pytest.mark.parametrize("latent", [True, False], ids=["latent", "apart"])
@pytest.mark.parametrize(("split", "join"), [(0, False), (192, False), (64, True)], ids=["whole", "split", "joined"])
def test_wide_decode(workload, latent, split, join):
    latent = latent and workload.head_dim_vo <= workload.head_dim_qk
    for heads in (1, 2):
        Case(workload, [(n, 1) for n in LENGTHS], heads=heads, split=split, join=join, latent=latent).check()


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("latent", [True, False], ids=["latent", "apart"])
def test_wide_options(option, latent):
    Case(WIDE[0], [(n, 1) for n in LENGTHS], heads=1, split=128, join=True, latent=latent, options=OPTIONS[option],
         scale_q=4.0 if "cap" in option else 1.0).check()  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split", [0, 160])
@pytest.mark.parametrize("pooled", POOLED)
@pytest.mark.parametrize("size", MORE_SHAPES, ids=str)
def test_extend_lengths(size, dtype, split, pooled):
    extend(size, dtype, EXTENDS, split=split, pooled=POOLED[pooled], heads=3).check()


# Beside the catalogue, where they have been built: `tilewright build` makes any of them.
BESIDE = [
    "paged_extend-bf16-g8-d80-tree", "paged_extend-bf16-kvfp8-g5-d96", "paged_extend-fp16-kvfp8-g3-d192v128",
    "paged_extend-bf16-g4-d256", "paged_extend-bf16-g22-d576v512", "paged_extend-bf16-g5-d72",
    "paged_extend-bf16-g150-d64", "paged_extend-fp16-kvfp8-g2-d64-tree",
    "paged_extend-bf16-g8-d80", "paged_extend-bf16-g5-d96", "paged_extend-fp16-g1-d192v128",
]  # fmt: skip
KINDS = [
    f"paged_extend-{dtype}-{kind}"
    for dtype in DTYPES
    for kind in ("kvfp8-g4-d128", "g4-d128-tree", "kvfp8-g4-d128-tree")
]
# (head dims, group) of calls that general modules serve.
ANY_SIZE = [(128, 128, 4), (64, 64, 7), (72, 120, 5), (256, 256, 2), (192, 128, 1), (8, 16, 33)]


def _pools(workload):
    # The mask is of new tokens; where they lie is tested by the others.
    return ["mixed"] if workload.tree else list(POOLED)


@pytest.mark.parametrize("name", [*KINDS, *BESIDE])
def test_extend_of_every_kind(name):
    workload = Workload.parse(name)
    try:
        store.load(workload, target())
    except MissingModuleError as error:
        if name in KINDS:
            raise
        pytest.skip(str(error).partition("\n")[0])
    for split in (0, 160):
        for pooled in _pools(workload):
            Case(workload, EXTENDS, split=split, pooled=POOLED[pooled], heads=3).check()
        for option in ("window-130", "cap-window", "not-causal", "lookahead-window", "scale-negative", "sinks"):
            Case(workload, EXTENDS, split=split, pooled=POOLED["mixed"], options=OPTIONS[option],
                 scale_q=4.0 if "cap" in option else 1.0).check()  # fmt: skip


@pytest.mark.parametrize("size", ANY_SIZE, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_general_extend(dtype, size):
    dim, dim_vo, group = size
    for kv_dtype in (None, "fp8_e4m3"):
        if kv_dtype and (dim % 16 or dim_vo % 16):
            continue
        for tree in (False, True):
            workload = Workload("paged_extend", dtype, group, dim, dim_vo, kv_dtype, tree)
            for pooled in _pools(workload):
                Case(workload, EXTENDS, split=160, pooled=POOLED[pooled], general=True).check()
            Case(workload, EXTENDS, pooled=POOLED["mixed"], options=OPTIONS["cap-window"], general=True).check()


def test_every_code_of_fp8():
    """A row of one key is its value: all 256 numbers, scaled exactly, and NaN."""
    case = Case(Workload.parse(KINDS[0]), [(1, 1), (1, 1)], heads=1, kv_scales=(1.0, 0.25))
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").view(2, 1, 128)
    for b in range(2):
        slot = case.req_to_token[int(case.table_rows[b]), int(case.starts[b])]
        case.v_buffer[slot] = codes[b]
    out, _ = case.run()
    want = codes.view(torch.float8_e4m3fn).to(out.dtype) * 0.25
    assert torch.equal(out.nan_to_num(7), want.expand_as(out).nan_to_num(7)) and out.isnan().sum() == 2 * 4


@pytest.mark.parametrize("split", [0, 96], ids=["whole", "split"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("operator", [decode, extend], ids=["decode", "extend"])
def test_options(operator, size, option, split):
    batch = LENGTHS if operator is decode else EXTENDS
    rest = {} if operator is decode else {"pooled": POOLED["mixed"]}
    operator(size, "bf16", batch, split=split, options=OPTIONS[option], scale_q=4.0 if "cap" in option else 1.0,
             **rest).check()  # fmt: skip


@pytest.mark.parametrize("operator", [decode, extend], ids=["decode", "extend"])
def test_nan_query_reaches_its_row_alone(operator):
    size = SIZES[0]
    batch = [15, 64, 300] if operator is decode else [(20, 5), (64, 3), (300, 60)]
    clean = operator(size, "bf16", batch, split=96)
    out, lse = (x.clone() for x in clean.check())
    broken = operator(size, "bf16", batch, split=96)
    broken.q[1, 2] = math.nan
    got, got_lse = broken.run()
    assert got[1, 2].isnan().all() and got_lse[1, 2].isnan()
    got[1, 2], got_lse[1, 2] = out[1, 2], lse[1, 2]
    assert torch.equal(got, out) and torch.equal(got_lse, lse)


@pytest.mark.parametrize("operator", [decode, extend], ids=["decode", "extend"])
def test_keys_outside_the_window_are_not_read(operator):
    """Their slots belong to others by then: NaN there must not show, nor their table entries be followed."""
    batch = [(300, 1)] if operator is decode else [(300, 4), (200, 2)]
    case = operator(
        SIZES[0], "bf16", [n for n, _ in batch] if operator is decode else batch, options=Options(window=20)
    )
    expected = case.check()[0].clone()
    for b, (keys, tokens) in enumerate(batch):
        first = int(case.starts[b])
        gone = keys - tokens - 20 + 1
        slots = case.req_to_token[int(case.table_rows[b]), first : first + gone].long()
        case.k_buffer[slots], case.v_buffer[slots] = math.nan, math.nan
        case.req_to_token[int(case.table_rows[b]), first : first + gone] = NOWHERE
    assert torch.equal(case.run()[0], expected)


def _strided(x):
    """The same values in a view with rows farther apart, aligned to 16 bytes, NaN between."""
    wide = torch.full((x.shape[0], 2, x.shape[1], 2 * x.shape[2]), math.nan, device="cuda", dtype=x.dtype)
    view = wide[:, 1, :, : x.shape[2]]
    view.copy_(x)
    return view


@pytest.mark.parametrize("operator", [decode, extend], ids=["decode", "extend"])
def test_strides_give_the_same_bits(operator):
    case = operator(SIZES[0], "bf16", [70, 3, 200] if operator is decode else [(70, 30), (3, 3), (200, 40)])
    out, lse = (x.clone() for x in case.check())
    for name in ("q", "k_buffer", "v_buffer", "k_new", "v_new", "out"):
        setattr(case, name, _strided(getattr(case, name)))
    case.lse = torch.full((2 * lse.shape[1], lse.shape[0]), math.nan, device="cuda").mT[:, ::2]
    case.req_to_token = case.req_to_token.long().view(torch.int32)[..., ::2]
    got, got_lse = case.run()
    assert torch.equal(got, out) and torch.equal(got_lse, lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 80, 128, 256, 512])
def test_merge(dtype, dim):
    generator = torch.Generator(device="cuda").manual_seed(dim)
    counts, heads = [1, 2, 3, 31, 128, 129, 300], 5
    first, rows = 0, []
    for row, count in enumerate(counts):
        rows.append([len(counts) - row, first, count, 1])
        first += count
    part_o = torch.randn((first, heads, dim), generator=generator, device="cuda")
    part_lse = torch.randn((first, heads), generator=generator, device="cuda") * 5
    part_lse[1], part_o[1] = -math.inf, math.nan
    part_lse[3:6, 2], part_o[3:6, 2] = -math.inf, math.nan
    sinks = torch.tensor([-math.inf, 0.0, 2.0, 9.0, -3.0], device="cuda")
    out = torch.full((len(counts) + 1, heads, dim), math.nan, device="cuda", dtype=DTYPES[dtype])
    lse = torch.full((len(counts) + 1, heads), math.nan, device="cuda")
    module = store.load(Workload("merge", dtype), target())
    module.function(part_o, part_lse, torch.tensor(rows, dtype=torch.int32).cuda(), sinks, out, lse)
    for row, start, count, _ in rows:
        logs, values = part_lse[start : start + count].double(), part_o[start : start + count].double().nan_to_num(0)
        want = torch.logsumexp(logs, 0)
        weight = torch.exp(logs - torch.logaddexp(want, sinks.double())).nan_to_num(0)
        assert_lse_close(lse[row], want.cpu().numpy(), PAGED[DTYPES[dtype]])
        assert_close(out[row], torch.einsum("nh,nhe->he", weight, values).cpu().numpy(), PAGED[DTYPES[dtype]])
    assert out[0].isnan().all() and lse[0].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv(dtype):
    x = torch.randn((70, 3, 80), device="cuda").to(DTYPES[dtype])
    buffer = torch.zeros((200, 2, 3, 96), device="cuda", dtype=DTYPES[dtype])[:, 1, :, :80]
    loc = torch.randperm(200)[:70].to(torch.int32).cuda()
    loc[5] = -1
    expected = buffer.clone()
    expected[loc[loc >= 0].long()] = x[loc >= 0]
    store.load(Workload("write_kv", dtype), target()).function(x, buffer, loc)
    assert torch.equal(buffer, expected)


def test_write_kv_fp8():
    """Every bf16 number, at three scales: what torch makes of it where that saturates."""
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(-1, 2, 128).cuda()
    loc = torch.randperm(300)[: len(x)].to(torch.int32).cuda()
    loc[7] = -1
    for scale in (1.0, 0.03, 20.0):
        buffer = torch.full((300, 2, 160), 1, device="cuda", dtype=torch.uint8)[..., :128]
        store.load(Workload("write_kv", "bf16", kv_dtype="fp8_e4m3"), target()).function(x, buffer, loc, scale)
        codes = (x.float() / scale).clamp(-448, 448).to(FP8).view(torch.uint8)
        expected = torch.full_like(buffer, 1)
        expected[loc[loc >= 0].long()] = codes[loc >= 0]
        nan = expected & 0x7F == 0x7F
        assert torch.equal(buffer & 0x7F == 0x7F, nan)
        assert torch.equal(buffer[~nan], expected[~nan])


def test_catalogue_is_covered():
    """Every paged kernel of the target's catalogue is one that the tests above run."""
    listed = {w for w in all_workloads(target()) if w.operator.startswith("paged")}
    tested = {
        Workload(operator, dtype, group, dim, dim)
        for operator in ("paged_decode", "paged_extend")
        for dtype in DTYPES
        for dim, group in MORE_SHAPES
    }
    kinds = {("fp8_e4m3", False), (None, True), ("fp8_e4m3", True)}
    tested |= {Workload("paged_extend", dtype, 4, 128, 128, *kind) for dtype in DTYPES for kind in kinds}
    tested |= {Workload("paged_extend", dtype, None, None, None, *kind) for dtype in DTYPES
               for kind in kinds | {(None, False)}}  # fmt: skip
    assert listed <= tested | set(WIDE) | {w for w in DECODES if w.kv_dtype}
