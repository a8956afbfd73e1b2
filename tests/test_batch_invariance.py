"""The batch-invariant mode on real kernels: bitwise the same result alone, in any batch, and in any chunks.

Where requests are split is tested in runtime/test_planner.py; here it is held against the arithmetic of the modules:
those of x86-avx2 and, emulated or on real tiles, of AMX. Split points are closer together than in serving, so that
short requests have several.
"""

import itertools

import pytest
import torch
from amx_modules import BESIDE, EMULATED, TARGETS, module, serving

from tilewright import decode_attention, extend_attention
from tilewright.runtime import planner

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "f32": torch.float32}
KV_HEADS = 2
SPLIT = 512
# Shapes with a module of their own, and one that the general module serves.
SHAPES = {"g4-d128": (4, 128), "g3-d64": (3, 64), "general": (2, 40)}
CASES = [
    *((BESIDE, dtype, shape) for dtype in DTYPES for shape in SHAPES),
    *(pytest.param(*at.values, "bf16", shape, marks=at.marks) for at in TARGETS for shape in ("g4-d128", "g3-d64")),
]


@pytest.fixture(autouse=True)
def close_splits(monkeypatch):
    monkeypatch.setattr(planner, "INVARIANT_SPLIT", SPLIT)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def served(target, request):
    """The public functions run on modules of this target."""
    if target == EMULATED:
        request.getfixturevalue("amx_emulator")
    with serving(target):
        yield


def modules(target, operator, dtype, shape):
    """Build what a call needs."""
    module(f"{operator}-{dtype}-{shape}", target)
    module(f"merge-{dtype}")


class Pool:
    """Keys and values of requests in slots and table columns drawn anew, the rest NaN; new tokens may come apart."""

    def __init__(self, dim, dtype, *, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.dim, self.dtype = dim, dtype

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def layout(self, keys, in_pool):
        """(k_buffer or v_buffer makers' slots, req_to_token, rows, kv_start) for requests of `in_pool` keys each."""
        slots = 1 + torch.randperm(sum(in_pool) + 5, generator=self.generator)
        rows = torch.randperm(len(in_pool) + 1, generator=self.generator)[: len(in_pool)].int()
        start = torch.randint(0, 4, (len(in_pool),), generator=self.generator).int()
        table = torch.zeros((len(in_pool) + 1, max(in_pool) + 4), dtype=torch.int32)
        buffers = [torch.full((len(slots) + 1, KV_HEADS, self.dim), torch.nan, dtype=self.dtype) for _ in range(2)]
        for b, count in enumerate(in_pool):
            own, slots = slots[:count], slots[count:]
            table[rows[b], start[b] : start[b] + count] = own.int()
            for buffer, source in zip(buffers, keys[b], strict=True):
                buffer[own] = source[:count]
        return (*buffers, table, rows), start


def request(pool, group, length):
    """(q [length, Hq, D], (k, v) [length, Hk, D]) of a request."""
    q = pool.draw(length, group * KV_HEADS, pool.dim)
    return q, (pool.draw(length, KV_HEADS, pool.dim), pool.draw(length, KV_HEADS, pool.dim))


@pytest.mark.parametrize("target, dtype, shape", CASES)
def test_decode_alone_and_in_any_batch(served, target, dtype, shape):
    """Casebook P40: first, last or in the middle of a batch, with one thread or several, in other slots."""
    modules(target, "paged_decode", dtype, shape)
    group, dim = SHAPES[shape]
    pool = Pool(dim, DTYPES[dtype], seed=1)
    lengths = [1300, 1, 512, 40, 513, 1031]
    q, kv = zip(*(request(pool, group, n) for n in lengths), strict=True)

    def attend(members, **options):
        arguments, start = pool.layout([kv[b] for b in members], [lengths[b] for b in members])
        queries = torch.stack([q[b][-1] for b in members])
        lens = torch.tensor([lengths[b] for b in members])
        out, lse = decode_attention(
            queries, *arguments, lens, kv_start=start, return_lse=True, batch_invariant=True, **options
        )
        return {b: (out[i], lse[i]) for i, b in enumerate(members)}

    for options in ({}, {"window": 700}, {"logit_cap": 5.0}):
        alone = {b: attend([b], **options)[b] for b in range(len(lengths))}
        for members, threads in (([0, 1, 2, 3, 4, 5], 2), ([5, 3, 0], 1), ([2, 4, 1, 0], 3), ([0], 7)):
            torch.set_num_threads(threads)
            for b, results in attend(members, **options).items():
                for name, got, wanted in zip(("out", "lse"), results, alone[b], strict=True):
                    assert torch.equal(got, wanted), f"{name} of the request of {lengths[b]} keys in {members}"


CUTS = [[0, 700], [0, 1, 700], [0, 512, 700], [0, 37, 38, 511, 513, 699, 700], [0, 300, 640, 700]]


@pytest.mark.parametrize("target, dtype, shape", CASES)
def test_extend_in_any_chunks_and_any_batch(served, target, dtype, shape):
    """A prompt at once, or in chunks whose predecessors are in the pool by then: each token's result is the same."""
    modules(target, "paged_extend", dtype, shape)
    group, dim = SHAPES[shape]
    pool = Pool(dim, DTYPES[dtype], seed=2)
    total = CUTS[0][-1]
    q, kv = request(pool, group, total)
    beside_q, beside_kv = request(pool, group, 90)

    def attend(low, high, *, beside, from_pool, **options):
        """Results of tokens low .. high of the request, after another one where `beside`."""
        keys, lens, new = [kv], [high], [high - low]
        queries, own = [q[low:high]], [[x[low:high] for x in kv]]
        if beside:
            keys, lens, new = [beside_kv, *keys], [90, *lens], [33, *new]
            queries, own = [beside_q[57:], *queries], [[x[57:] for x in beside_kv], *own]
        in_pool = lens if from_pool else [n - m for n, m in zip(lens, new, strict=True)]
        arguments, start = pool.layout(keys, in_pool)
        given = (None, None) if from_pool else (torch.cat([x[i] for x in own]) for i in range(2))
        out, lse = extend_attention(
            torch.cat(queries), *given, *arguments, torch.tensor(lens), torch.tensor(new), kv_start=start,
            return_lse=True, batch_invariant=True, **options,
        )  # fmt: skip
        return out[-(high - low) :], lse[-(high - low) :]

    for options in ({}, {"window": 333}):
        whole = attend(0, total, beside=False, from_pool=False, **options)
        for turn, cuts in enumerate(CUTS):
            torch.set_num_threads(1 + turn % 3)
            pieces = [
                attend(low, high, beside=turn % 2 == 0, from_pool=turn % 3 == 0, **options)
                for low, high in itertools.pairwise(cuts)
            ]
            for name, wanted, *got in zip(("out", "lse"), whole, *pieces, strict=True):
                differ = (torch.cat(got) != wanted).flatten(1).any(1).nonzero().flatten().tolist()
                assert not differ, f"{name} of {len(differ)} tokens, first {differ[0]}, cut at {cuts}, {options}"
