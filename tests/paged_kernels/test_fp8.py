"""Pools of fp8 e4m3: every code, scales, the quantising write, and the options beside them."""

import itertools
import math

import numpy as np
import pytest
import torch
from batches import as_numpy, poisoned
from layouts import EDGES, INDEXES, strided
from paged_calls import check, run, same_bits
from paged_sizes import GENERAL, SPECIAL, Size, decode_batch, paged_batch

from tilewright.codegen.build import build
from tilewright.codegen.smoke import smoke
from tilewright.runtime import store
from tilewright.runtime.paged import decode_attention, extend_attention, write_kv
from tilewright.schedules.catalog import all_workloads
from tilewright.schedules.paged_attention import reference
from tilewright.schedules.workload import Workload

LOAD = store.load  # the fixtures put another in its place
E4M3 = torch.float8_e4m3fn
BF16 = torch.bfloat16
SCALES = {"k_scale": 0.5, "v_scale": 0.25}
SIZES = [SPECIAL[0], GENERAL[0], GENERAL[3], GENERAL[2], Size(576, 512, 4, 1, aliased=True), GENERAL[6]]


@pytest.fixture(params=[False, True], ids=["denormals", "flushed"])
def flush_denormals(request):
    torch.set_flush_denormal(request.param)
    yield
    torch.set_flush_denormal(False)


def all_codes(*shape):
    return torch.arange(256, dtype=torch.uint8).view(*shape).view(E4M3)


def one_key_each(requests):
    """Paging of requests of one key: request b has slot b."""
    return (torch.arange(requests, dtype=torch.int32)[:, None], torch.arange(requests), torch.ones(requests).long())


def attend(decode, q, k_buffer, v_buffer, **options):
    paging = one_key_each(len(q))
    options["return_lse"] = True
    if decode:
        return decode_attention(q, k_buffer, v_buffer, *paging, **options)
    return extend_attention(q, None, None, k_buffer, v_buffer, *paging, paging[2], **options)


@pytest.mark.parametrize("decode", [True, False], ids=["decode", "extend"])
def test_every_code(device, modules, flush_denormals, decode):
    """All 256 codes as values and as keys, subnormal ones too: of one key, out is the value and lse the score."""
    values = torch.tensor(reference.e4m3_values())
    special = [(128, 4, False)]
    for dim, group, general in special if device.type == "cuda" else [*special, (128, 4, True), (64, 1, True)]:
        modules.use(general=general)
        v_buffer = all_codes(256 // dim, 1, dim)
        q = torch.ones(len(v_buffer), group, dim, dtype=BF16)
        keys = torch.zeros(len(v_buffer), 1, dim, dtype=BF16).to(E4M3)
        out, _ = attend(decode, q, keys, v_buffer, v_scale=0.5)
        wanted = (values / 2).to(BF16).view(-1, 1, dim).expand(out.shape)
        assert torch.equal(out.cpu().nan_to_num(7), wanted.cpu().nan_to_num(7))
        # Each code in another column of its key.
        keys = torch.zeros(256, 1, dim, dtype=BF16)
        keys[torch.arange(256), 0, torch.arange(256) % dim] = all_codes(256).to(BF16)
        q = torch.ones(256, group, dim, dtype=BF16)
        zeros = torch.zeros(256, 1, dim, dtype=BF16).to(E4M3)
        _, lse = attend(decode, q, keys.to(E4M3), zeros, sm_scale=1.0, k_scale=0.5)
        wanted = (values / 2).float()[:, None].expand(lse.shape)
        torch.testing.assert_close(lse.cpu(), wanted.cpu(), rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("options", [
    {}, {"window": 40}, {"logit_cap": 5.0}, {"window": 5, "logit_cap": 2.0, "sm_scale": 0.4},
], ids=lambda o: "-".join(o) or "plain")  # fmt: skip
def test_decode(device, modules, many_threads, size, options):
    """Ragged lengths, whole and split; NaN in slots of nobody; the scales reach scores, caps and outputs."""
    modules.use(size, split=bool(options))
    batch = decode_batch(size, [130, 1, 0, 64, 257], dtype=BF16).to_fp8(**SCALES)
    heads = size.group * size.kv_heads
    sinks = torch.linspace(-2, 2, heads)
    plain = check(batch, decode=True, sinks=sinks, **SCALES, **options)[0]
    assert (run(batch, decode=True, sinks=sinks, **options)[0] - plain).abs().max() > 1e-2, "scales have an effect"


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("from_pool", [False, True], ids=["new keys", "pool"])
@pytest.mark.parametrize("options", [
    {}, {"window": 40}, {"logit_cap": 5.0}, {"causal": False, "sm_scale": 0.4},
], ids=lambda o: "-".join(o) or "plain")  # fmt: skip
def test_extend(device, modules, many_threads, size, from_pool, options):
    """The prefix is of the pool and has scales, new keys are as they are (rounded they would be off by 6 %)."""
    modules.use(size, split=bool(options))
    news = [9, 1, 0, 14]
    batch = paged_batch(size, [129, 40, 7, 0], news, dtype=BF16, from_pool=from_pool).to_fp8(**SCALES)
    sinks = torch.linspace(-2, 2, size.group * size.kv_heads)
    check(batch, sinks=sinks, **SCALES, **options)


@pytest.mark.parametrize("size", [SPECIAL[0], GENERAL[3]], ids=str)
def test_nan_codes_stay_where_they_are(device, modules, size):
    """A NaN key is NaN in the rows that see it, and no other request changes a bit."""
    modules.use(size)
    batch = decode_batch(size, [65, 40], dtype=BF16).to_fp8()
    clean = run(batch, decode=True)
    slot = batch.req_to_token[batch.req_pool_indices[0], 30].long()
    batch.k_buffer.view(torch.uint8)[slot, 0, 3] = 0xFF
    out, lse = run(batch, decode=True)
    group = size.group
    assert out[0, :group].isnan().all() and lse[0, :group].isnan().all()
    assert same_bits((out[0, group:], lse[0, group:]), (clean[0][0, group:], clean[1][0, group:]))
    assert same_bits((out[1], lse[1]), (clean[0][1], clean[1][1]))
    window = run(batch, decode=True, window=5)  # out of sight
    assert window[0].isfinite().all()


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize(("heads", "dim", "dim_vo"), [(2, 128, 128), (3, 13, 55), (1, 1, 1)])
def test_write(device, heads, dim, dim_vo, index):
    """P37 for codes: -1 is skipped, guard slots and bytes between rows are not written."""
    if device.type == "cuda" and dim % 16:
        pytest.skip("rows of whole 16 bytes")
    generator = torch.Generator(device).manual_seed(0)
    k, v = (strided((torch.randn(6, heads, n, generator=generator) * 40).to(BF16)) for n in (dim, dim_vo))
    k[1] = v[1] = math.nan
    before, after = EDGES[device.type]
    pools = [torch.full((12, heads + 1, before + n + after), 0x55, dtype=torch.uint8) for n in (dim, dim_vo)]
    buffers = [pool[1:-1, :heads, before:-after] for pool in pools]
    loc = torch.tensor([9, -1, 0, 7, -1, 3])
    expected = [
        reference.write_fp8(as_numpy(x), as_numpy(b), as_numpy(loc), scale)
        for x, b, scale in zip((k, v), buffers, SCALES.values(), strict=True)
    ]
    write_kv(k, v, *(b.view(E4M3) for b in buffers), INDEXES[index](loc), **SCALES)
    for pool, buffer, wanted in zip(pools, buffers, expected, strict=True):
        np.testing.assert_array_equal(as_numpy(buffer), wanted)
        buffer.fill_(0x55)
        assert (pool == 0x55).all(), "memory outside the slots was written"


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.037, 448.0])
def test_write_rounds_every_number(device, flush_denormals, scale):
    """All bf16 numbers: to nearest, ties to even, at most 448, NaN to NaN, -0 to -0."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16).view(64, 8, 128)
    buffers = [torch.full((64, 8, 128), 0x55, dtype=torch.uint8).view(E4M3) for _ in range(2)]
    write_kv(every, every, *buffers, torch.arange(64), k_scale=scale, v_scale=scale)
    torch.set_flush_denormal(False)
    # torch makes NaN of what lies beyond the largest number.
    wanted = (every.cpu().float() / scale).clamp(-448, 448).to(E4M3)
    codes = buffers[0].cpu().view(torch.uint8)
    assert torch.equal(codes & 0x7F, wanted.view(torch.uint8) & 0x7F)
    sign = torch.signbit(every.cpu()) | wanted.isnan()
    assert torch.equal((codes >= 0x80) | wanted.isnan(), sign)
    assert torch.equal(buffers[0].view(torch.uint8), buffers[1].view(torch.uint8))


def test_codes_of_the_oracle():
    """The oracle's table and its rounding are torch's."""
    values = reference.e4m3_values()
    np.testing.assert_array_equal(torch.arange(256, dtype=torch.uint8).view(E4M3).double().numpy(), values)
    between = np.concatenate([values[:126], (values[:125] + values[1:126]) / 2, [463.0, 448.0, 1e9, math.inf]])
    between = np.concatenate([between, -between])
    wanted = torch.from_numpy(between).clamp(-448, 448).to(E4M3).view(torch.uint8).numpy()
    np.testing.assert_array_equal(reference.e4m3_codes(between), wanted)
    assert reference.e4m3_codes(np.array([math.nan])) & 0x7F == 0x7F


@pytest.mark.parametrize("size", [SPECIAL[0], SIZES[4]], ids=str)
def test_decode_writes_then_attends(device, modules, size):
    """The new key is seen as the pool holds it: rounded."""
    modules.use(size)
    batch = decode_batch(size, [5, 64, 3], dtype=BF16)
    last = batch.req_to_token[batch.req_pool_indices, batch.seq_lens - 1].long()
    key, value = batch.k_buffer[last].clone(), batch.v_buffer[last].clone()
    scales = {"k_scale": 0.3, "v_scale": 0.3} if size.aliased else SCALES
    batch.to_fp8(**scales)
    expected = batch.expected(decode=True, **scales)
    for buffer in (batch.k_buffer, batch.v_buffer):
        buffer.view(torch.uint8)[last] = 0x7F
    check(batch, expected=expected, decode=True, key=key, value=value, loc=last, **scales)


@pytest.mark.parametrize("size", [SPECIAL[0], GENERAL[3]], ids=str)
def test_batch_invariant_chunks_read_the_pool(modules, size):
    """In that mode new keys are written first and read back: any chunks give the same bits."""
    modules.use(size)
    tokens = 70
    whole = paged_batch(size, [0], [tokens], dtype=BF16, from_pool=True).to_fp8(**SCALES)
    expected = run(whole, batch_invariant=True, **SCALES)
    for cuts in ([0, 33, 70], [0, 1, 2, 64, 70]):
        outs = []
        for begin, end in itertools.pairwise(cuts):
            part = paged_batch(size, [0], [tokens], dtype=BF16, from_pool=True).to_fp8(**SCALES)
            part.q, part.seq_lens[0], part.extend_seq_lens[0] = part.q[begin:end], end, end - begin
            outs.append(run(part, batch_invariant=True, **SCALES))
        assert same_bits(tuple(torch.cat(x) for x in zip(*outs, strict=True)), expected)


def test_pool_that_is_not_read_may_be_fp8(modules):
    """Where every prefix is 0 and the pool has other sizes (MLA without absorption), its type means nothing."""
    size = SPECIAL[1]
    modules.use(size)
    batch = paged_batch(size, [0, 0], [7, 30], dtype=BF16)
    batch.k_buffer = torch.zeros(9, 1, 576, dtype=BF16).to(E4M3)
    batch.v_buffer = batch.k_buffer[..., :512]
    check(batch, expected=batch.expected(decode=False), **SCALES)


def test_what_the_catalogue_lacks_is_said_with_its_command(modules):
    batch = decode_batch(SPECIAL[0], [5], dtype=torch.float16).to_fp8()
    assert Workload("paged_decode", "fp16", kv_dtype="fp8_e4m3") not in all_workloads("x86-avx2")
    with pytest.raises(LookupError, match="paged_decode-fp16-kvfp8"):
        run(batch, decode=True)


@pytest.mark.parametrize(
    "workload", [w for w in all_workloads("x86-avx2") if w.kv_dtype or w.tree], ids=lambda w: w.name
)
def test_smoke_runs_of_fp8_and_tree_modules(workload):
    """`tilewright doctor` knows their interface."""
    root = build(workload, "x86-avx2").folder.parent.parent
    assert smoke(LOAD(workload, "x86-avx2", root=root)) <= 1


def test_poisoned_pools_hold_nan():
    """The batches' poison is poison as codes too."""
    batch = decode_batch(SPECIAL[0], [5, 9], dtype=BF16)
    assert poisoned(1).to(E4M3).isnan() and batch.k_buffer.isnan().sum() == batch.to_fp8().k_buffer.isnan().sum() > 0
