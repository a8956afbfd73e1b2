"""Graphs of the paged backend, played on the CPU: a capture is the list of kernel calls, a replay makes them again."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from batches import as_numpy
from tolerances import PAGED, assert_close

from tilewright.runtime import gpu_work
from tilewright.runtime.backend import PagedAttentionBackend
from tilewright.runtime.forward_batch import AttentionLayer, ForwardBatch, ForwardMode
from tilewright.runtime.pools import ReqToTokenPool, TokenToKVPool
from tilewright.schedules.paged_attention import reference
from tilewright.schedules.workload import Workload

HQ, HK, D = 4, 2, 8
LAYERS = [AttentionLayer(n, HQ, HK, D, D, D**-0.5, sliding_window_size=window) for n, window in enumerate((-1, 6))]
MAX_LEN, BATCH = 120, 3


@pytest.fixture
def model(use_model, monkeypatch):
    monkeypatch.setattr(gpu_work, "multiprocessors", lambda device: 8)
    monkeypatch.setenv("TILEWRIGHT_CHECK", "0")
    return use_model(padding=True)


class Engine:
    """Pools full of keys, a table whose row r holds request r's slots, and the static tensors of a graph."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.generator = generator
        self.req_to_token_pool = ReqToTokenPool(BATCH, MAX_LEN)
        self.token_to_kv_pool = TokenToKVPool(BATCH * MAX_LEN, layer_num=2, head_num=HK, head_dim=D,
                                              dtype=torch.float32)  # fmt: skip
        slots = 1 + torch.randperm(BATCH * MAX_LEN, generator=generator)
        self.table = self.req_to_token_pool.req_to_token
        self.table[1:] = slots.view(BATCH, MAX_LEN)
        for buffer in self.token_to_kv_pool.k_buffer + self.token_to_kv_pool.v_buffer:
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
        self.backend = PagedAttentionBackend(SimpleNamespace(device="cpu", **vars(self)))
        self.qkv = [torch.empty(BATCH, heads * D) for heads in (HQ, HK, HK)]
        self.batch = ForwardBatch(
            ForwardMode.DECODE, BATCH, torch.arange(1, BATCH + 1), torch.ones(BATCH, dtype=torch.int64),
            torch.zeros(BATCH, dtype=torch.int64), seq_lens_cpu=torch.ones(BATCH, dtype=torch.int64),
        )  # fmt: skip
        self.load([1] * BATCH)

    def load(self, lens):
        """Put a batch of these lengths, all but the last token cached, into the static tensors."""
        for x in self.qkv:
            x.copy_(torch.randn(x.shape, generator=self.generator))
        rows = self.batch.req_pool_indices
        self.batch.seq_lens.copy_(torch.tensor(lens)), self.batch.seq_lens_cpu.copy_(torch.tensor(lens))
        self.batch.out_cache_loc.copy_(self.table[rows, torch.tensor(lens) - 1])

    def forward(self):
        return [self.backend.forward(*self.qkv, layer, self.batch) for layer in LAYERS]

    def check(self, outs, lens):
        for layer, out in zip(LAYERS, outs, strict=True):
            pool = [buffers[layer.layer_id] for buffers in (self.token_to_kv_pool.k_buffer,
                                                            self.token_to_kv_pool.v_buffer)]  # fmt: skip
            wanted, _ = reference.decode(
                as_numpy(self.qkv[0]).reshape(BATCH, HQ, D), *map(as_numpy, pool), as_numpy(self.table),
                np.arange(1, BATCH + 1), np.array(lens), window=max(layer.sliding_window_size + 1, 0),
            )  # fmt: skip
            assert_close(out.view(BATCH, HQ, D), wanted, PAGED[torch.float32])


def test_a_captured_decode_serves_later_batches(model):
    """Warm-up, capture, replays with other lengths, an eager batch between; memory and sizes stay."""
    engine = Engine()
    backend = engine.backend
    backend.init_cuda_graph_state(BATCH, BATCH)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    backend.init_forward_metadata_out_graph(engine.batch, in_capture=True)
    engine.forward()
    plans = list(backend.forward_metadata.plans.values())
    assert len(plans) == 2, "one for each window"
    backend.on_after_cuda_graph_warmup()
    before = len(model.calls)
    outs = engine.forward()
    captured = model.calls[before:]
    assert list(backend.forward_metadata.plans.values()) == plans
    for lens in ([1, 1, 1], [120, 3, 60], *([100 + n, 20 + n, 1] for n in range(9)), [7, 120, 120]):
        engine.load(lens)
        backend.init_forward_metadata_out_graph(engine.batch)
        for out in outs:
            out.fill_(math.nan)
        for name, arguments in captured:
            model.load(Workload.parse(name)).function(*arguments)
        engine.check(outs, lens)
        backend.init_forward_metadata(engine.batch)
        engine.check(engine.forward(), lens)
    assert {name for name, _ in captured} >= {"merge-f32", "write_kv-f32"}


def test_only_decode_is_captured(model):
    engine = Engine()
    engine.batch.forward_mode = ForwardMode.EXTEND
    engine.batch.extend_seq_lens = torch.ones(BATCH, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match="forward_mode EXTEND: only DECODE is captured"):
        engine.backend.init_forward_metadata_out_graph(engine.batch, in_capture=True)
