"""Paged kernels and memory: what is unused, how tensors and pools are laid out, offsets beyond 32 bits, index types."""

import math
import mmap

import pytest
import torch
from batches import poisoned
from layouts import EDGES, INDEX_NAMES, INDEXES, LAYOUTS, lay_out
from paged_calls import check, run, same_bits
from paged_sizes import BOTH, decode_batch, paged_batch

from tilewright.runtime import dispatch
from tilewright.runtime.plan import plan_decode
from tilewright.runtime.plan_buffers import PlanBuffers


@pytest.mark.parametrize("size", BOTH, ids=str)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "extend"])
def test_unused_memory_is_not_read(device, modules, monkeypatch, size, poison, decode):
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
def test_workspace_content_does_not_matter(device, modules, many_threads, size):
    """P25: partial states start from nothing; a workspace full of NaN gives the bits of one full of zeros."""
    modules.use(size, split=True)
    batch = decode_batch(size, [70, 200, 0])
    results = []
    for content in (0.0, math.nan, 1e30):
        buffers = PlanBuffers.allocate(
            items=99, rows=99, partials=999, num_qo_heads=batch.q.shape[1], head_dim_vo=size.dim_vo, device=device
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


@pytest.mark.parametrize("size", BOTH, ids=str)
@pytest.mark.parametrize("layout", [*LAYOUTS, "interleaved"][1:])
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "extend"])
def test_layouts_give_the_same_bits(device, modules, dtype, size, layout, decode):
    """P34, R07, R09: strided and interleaved pools, strided q, k, v and out; nothing around an output is written."""
    modules.use(size)
    batch = paged_batch(size, [4, 60], [1, 1] if decode else [13, 2], dtype=dtype, from_pool=decode)
    expected = run(batch, decode=decode)
    lay_out(batch, layout)
    before, after = EDGES[device.type]
    wide = poisoned(batch.q.shape[0], 2, batch.q.shape[1], before + size.dim_vo + after, dtype=dtype)
    out = wide[:, 1, :, before:-after]
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
