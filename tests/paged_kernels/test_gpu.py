"""What only a GPU has: streams, graphs with plans refreshed in place, several devices, nothing that waits."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from paged_calls import check, run, same_bits
from paged_sizes import SPECIAL, decode_batch, paged_batch
from tolerances import PAGED, assert_close

import tilewright
from tilewright.runtime.backend import PagedAttentionBackend
from tilewright.runtime.forward_batch import AttentionLayer, ForwardBatch, ForwardMode
from tilewright.runtime.paged import decode_attention, extend_attention, write_kv
from tilewright.runtime.plan import plan_decode, plan_extend
from tilewright.runtime.plan_buffers import PlanBuffers
from tilewright.runtime.pools import ReqToTokenPool, TokenToKVPool

SIZE = SPECIAL[0]
pytestmark = [pytest.mark.cuda, pytest.mark.parametrize("device", ["cuda"], indirect=True)]


@pytest.fixture(autouse=True)
def on_gpu(device, modules, monkeypatch):
    """Every test here runs on a GPU, as in serving: checked mode would read lengths back."""
    monkeypatch.setenv("TILEWRIGHT_CHECK", "0")
    modules.use(SIZE)


def decode_buffers(batch=8, tokens=1 << 16):
    return PlanBuffers.for_decode(
        batch, tokens, num_qo_heads=SIZE.group * SIZE.kv_heads, num_kv_heads=SIZE.kv_heads, head_dim_vo=SIZE.dim_vo,
        device="cuda",
    )  # fmt: skip


def captured(call):
    """A graph of the call, recorded after one run of it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def put(into, batch):
    """Copy another batch of as many requests into the tensors of a captured call."""
    for name in ("q", "k_buffer", "v_buffer", "req_to_token", "req_pool_indices"):
        to, values = getattr(into, name), getattr(batch, name)
        assert values.shape[0] <= to.shape[0] and values.dim() == to.dim()
        to[tuple(slice(0, n) for n in values.shape)].copy_(values)


def test_a_captured_decode_replays_with_later_batches():
    """From short to split contexts and back, and step by step, with the plan alone refreshed between replays."""
    lens = [3000, 1, 64, 700]
    static = decode_batch(SIZE, [8000] * 4)
    plan = plan_decode([8000] * 4, buffers=decode_buffers(), **SIZE.plan)
    out = static.out()
    graph = captured(lambda: decode_attention(*static.decode_arguments(), plan=plan, out=out))
    for new in (
        [3, 1, 64, 70],
        lens,
        [8000] * 4,
        *([n + step for n in lens] for step in range(1, 40, 3)),
        [0, 0, 5, 1],
    ):
        batch = decode_batch(SIZE, new, seed=sum(new))
        put(static, batch)
        plan.update(static.seq_lens, seq_lens_cpu=np.array(new))
        out.fill_(math.nan)
        graph.replay()
        assert_close(out, batch.expected(decode=True)[0], PAGED[batch.q.dtype])


def test_a_captured_extend_replays_with_later_batches():
    static = paged_batch(SIZE, [4000, 4000], [200, 200])
    plan = plan_extend(
        static.seq_lens, static.extend_seq_lens, **SIZE.plan,
        buffers=PlanBuffers.allocate(items=600, rows=800, partials=9000, num_qo_heads=SIZE.group * SIZE.kv_heads,
                                     head_dim_vo=SIZE.dim_vo, device="cuda"),
    )  # fmt: skip
    out = static.out()
    graph = captured(lambda: extend_attention(*static.extend_arguments(), plan=plan, out=out))
    for prefixes, news in (([0, 0], [200, 200]), ([3000, 5], [1, 399]), ([17, 4000], [300, 100])):
        batch = paged_batch(SIZE, prefixes, news)
        put(static, batch)
        static.k.copy_(batch.k), static.v.copy_(batch.v)
        plan.update(None, seq_lens_cpu=batch.seq_lens.cpu(), extend_seq_lens=batch.extend_seq_lens.cpu())
        out.fill_(math.nan)
        graph.replay()
        assert_close(out, batch.expected(decode=False)[0], PAGED[batch.q.dtype])


def test_a_captured_write():
    k, pool = torch.randn(3, 2, 128).bfloat16(), torch.zeros(9, 2, 128).bfloat16()
    loc = torch.tensor([4, -1, 8])
    graph = captured(lambda: write_kv(k, k, pool, pool.clone(), loc))
    loc.copy_(torch.tensor([-1, 2, 3])), pool.zero_()
    graph.replay()
    assert torch.equal(pool[[2, 3]], k[1:]) and not pool[[0, 1, 4, 5, 6, 7, 8]].any()


def test_work_follows_the_current_stream():
    """R10: the kernel waits for what its own stream does before it, on a stream that is not the default one."""
    batch = decode_batch(SIZE, [900, 70])
    expected = run(batch, decode=True)
    q, out = batch.q.clone(), batch.out()
    plan = plan_decode(batch.seq_lens, **SIZE.plan)
    batch.q.zero_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        batch.q.copy_(q)
        decode_attention(*batch.decode_arguments(), plan=plan, out=out)
        result = out.clone()
    stream.synchronize()
    assert same_bits(result, expected[0])


def test_a_planned_call_neither_waits_nor_allocates():
    batch = decode_batch(SIZE, [9000, 70])
    plan, out = plan_decode(batch.seq_lens, **SIZE.plan), batch.out()
    decode_attention(*batch.decode_arguments(), plan=plan, out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(8):
            plan.update(batch.seq_lens, seq_lens_cpu=torch.tensor([9000 - step, 70 + step], device="cpu"))
            decode_attention(*batch.decode_arguments(), plan=plan, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_many_steps_ahead_of_the_gpu():
    """The staging areas are used again only when their copies are done."""
    lens = np.array([3000, 64])
    batch = decode_batch(SIZE, (lens + 30).tolist())
    plan = plan_decode(lens, **SIZE.plan)
    decode_attention(*batch.decode_arguments(), plan=plan)
    torch.cuda._sleep(100_000_000)
    outs = []
    for step in range(30):
        plan.update(None, seq_lens_cpu=lens + step)
        outs.append(decode_attention(*batch.decode_arguments(), plan=plan))
    for step, out in enumerate(outs):
        batch.seq_lens = torch.from_numpy(lens + step).cuda()
        assert_close(out, batch.expected(decode=True)[0], PAGED[batch.q.dtype])


def test_lengths_on_the_gpu_alone():
    batch = decode_batch(SIZE, [300, 5])
    plan = plan_decode([1, 1], **SIZE.plan)
    plan.update(batch.seq_lens)
    check(batch, decode=True, plan=plan)


def test_empty_batches():
    batch = decode_batch(SIZE, [])
    out, lse = decode_attention(*batch.decode_arguments(), return_lse=True)
    assert out.shape == (0, SIZE.group * SIZE.kv_heads, SIZE.dim_vo) and lse.shape == out.shape[:2]
    assert extend_attention(*paged_batch(SIZE, [5, 0], [0, 0]).extend_arguments()).shape[0] == 0


def test_every_device_has_its_own():
    """The tensors decide, whichever device is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    batch = decode_batch(SIZE, [300, 5])
    expected = run(batch, decode=True)
    there = batch.placed(torch.device("cuda:1"))
    out = decode_attention(*there.decode_arguments())
    assert out.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    assert same_bits(out.to("cuda:0"), expected[0])
    with pytest.raises(ValueError, match="k_buffer: got device cuda:0, expected cuda:1"):
        decode_attention(there.q, *batch.decode_arguments()[1:])


def test_what_gpus_do_not_serve_is_told():
    batch = decode_batch(SIZE, [5])
    with pytest.raises(NotImplementedError, match="float32 tensors on cuda:0"):
        decode_attention(*decode_batch(SIZE, [5], dtype=torch.float32).decode_arguments())
    with pytest.raises(
        tilewright.MissingModuleError, match="tilewright build paged_decode-bf16-g11-d128 --target cuda-"
    ):
        decode_attention(*decode_batch(SIZE._replace(group=11), [5]).decode_arguments())
    with pytest.raises(ValueError, match="k_buffer: got rows at address .* multiples of 16 bytes"):
        wide = torch.zeros(*batch.k_buffer.shape[:2], 129, dtype=torch.bfloat16)
        decode_attention(batch.q, wide[..., 1:], *batch.decode_arguments()[2:])
    with pytest.raises(ValueError, match="req_to_token: got device cpu, expected cuda:0"):
        decode_attention(*batch.decode_arguments()[:3], batch.req_to_token.cpu(), *batch.decode_arguments()[4:])
    x, state = torch.zeros(1, 2, 128).bfloat16(), torch.zeros(1, 2, 128, 128)
    with pytest.raises(NotImplementedError, match="lightning_decode: got tensors on cuda:0"):
        tilewright.lightning_decode(x, x, x, state, torch.zeros(1, dtype=torch.int32), torch.zeros(2))


class Server:
    """A backend over pools full of keys, and the static tensors of its graphs: two layers, one with a window."""

    def __init__(self, requests, longest):
        heads = SIZE.group * SIZE.kv_heads
        table, pool = ReqToTokenPool(requests, longest, "cuda"), torch.randperm(requests * longest) + 1
        table.req_to_token[1:] = pool.view(requests, longest)
        kv = TokenToKVPool(
            requests * longest,
            layer_num=2,
            head_num=SIZE.kv_heads,
            head_dim=SIZE.dim,
            dtype=torch.bfloat16,
            device="cuda",
        )
        for buffer in kv.k_buffer + kv.v_buffer:
            buffer.normal_()
        self.backend = PagedAttentionBackend(
            SimpleNamespace(device="cuda", req_to_token_pool=table, token_to_kv_pool=kv)
        )
        self.layers = [
            AttentionLayer(n, heads, SIZE.kv_heads, SIZE.dim, SIZE.dim, SIZE.dim**-0.5, sliding_window_size=window)
            for n, window in enumerate((-1, 99))
        ]
        self.table = table.req_to_token
        self.qkv = [torch.empty(requests, n * SIZE.dim, dtype=torch.bfloat16) for n in (heads, *[SIZE.kv_heads] * 2)]
        ones = torch.ones(requests, dtype=torch.int64)
        self.batch = ForwardBatch(
            ForwardMode.DECODE, requests, torch.arange(requests) + 1, ones, ones.clone(), seq_lens_cpu=ones.cpu()
        )

    def load(self, lens):
        """Another step of these lengths in the static tensors."""
        for x in self.qkv:
            x.normal_()
        self.batch.seq_lens.copy_(torch.tensor(lens)), self.batch.seq_lens_cpu.copy_(torch.tensor(lens, device="cpu"))
        self.batch.out_cache_loc.copy_(self.table[self.batch.req_pool_indices, torch.tensor(lens) - 1])

    def forward(self):
        return [self.backend.forward(*self.qkv, layer, self.batch) for layer in self.layers]


def test_a_captured_backend_decodes_as_an_eager_one():
    """Keys written and attended to in one graph, steps that grow and batches anew: the eager forward's results."""
    lens = [3000, 1, 64, 700]
    server = Server(len(lens), 4096)
    backend = server.backend
    backend.init_cuda_graph_state(4, 4)
    server.load([1] * 4)
    backend.init_forward_metadata_out_graph(server.batch, in_capture=True)
    outs = []
    graph = captured(lambda: outs.append(server.forward()))
    for step in (*([n + grown for n in lens] for grown in range(12)), [1, 4096, 4000, 7], [2, 2, 2, 2]):
        server.load(step)
        backend.init_forward_metadata_out_graph(server.batch)
        graph.replay()
        got = [out.clone() for out in outs[-1]]
        backend.init_forward_metadata(server.batch)
        for out, eager in zip(got, server.forward(), strict=True):
            assert_close(out, eager.cpu().double().numpy(), PAGED[torch.bfloat16])
