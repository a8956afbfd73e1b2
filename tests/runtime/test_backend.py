"""The backends behind the upstream interface: a small continuous batch against the oracles."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from batches import as_numpy
from tolerances import LIGHTNING, LIGHTNING_STATE, PAGED, assert_close

from tilewright.runtime.backend import AttentionBackend, PagedAttentionBackend
from tilewright.runtime.forward_batch import AttentionLayer, ForwardBatch, ForwardMode
from tilewright.runtime.lightning import slopes
from tilewright.runtime.lightning_backend import LightningAttentionBackend
from tilewright.runtime.plan import plan_decode
from tilewright.runtime.pools import HybridReqToTokenPool, ReqToTokenPool, StatePool, TokenToKVPool
from tilewright.schedules.paged_attention import reference

HQ, HK, D, DV = 4, 2, 8, 6


def layer(layer_id=0, **options):
    return AttentionLayer(layer_id, HQ, HK, D, DV, D**-0.5, **options)


class Server:
    """The least of a serving engine: pools, a backend, and dense copies of all keys as the truth."""

    def __init__(self, backend=PagedAttentionBackend, layers=2, encoder=()):
        self.req_to_token_pool = ReqToTokenPool(6, 64)
        self.token_to_kv_pool = TokenToKVPool(128, layer_num=layers, head_num=HK, head_dim=D, v_head_dim=DV,
                                              dtype=torch.float32)  # fmt: skip
        for buffer in self.token_to_kv_pool.k_buffer + self.token_to_kv_pool.v_buffer:
            buffer.fill_(math.nan)
        self.backend = backend(SimpleNamespace(device="cpu", **vars(self)))
        self.generator = torch.Generator().manual_seed(0)
        self.rows: list[int] = []
        self.lens: list[int] = []
        self.encoder = list(encoder)

    def random(self, *shape):
        return torch.randn(shape, generator=self.generator)

    def admit(self, count):
        self.rows += self.req_to_token_pool.alloc(count)
        self.lens += [0] * count

    def batch(self, news, mode):
        """A ForwardBatch of news[b] new tokens for every running request; slots are allocated and in the table."""
        total = sum(news)
        loc = self.token_to_kv_pool.alloc(total)
        loc = loc[torch.randperm(total, generator=self.generator)]
        prefixes, start = list(self.lens), 0
        for b, new in enumerate(news):
            first = (self.encoder[b] if self.encoder else 0) + self.lens[b]
            self.req_to_token_pool.write((self.rows[b], slice(first, first + new)), loc[start : start + new])
            start += new
            self.lens[b] += new
        batch = ForwardBatch(mode, len(news), torch.tensor(self.rows), torch.tensor(self.lens), loc)
        if mode != ForwardMode.DECODE:
            batch.extend_seq_lens = torch.tensor(news, dtype=torch.int32)
            batch.extend_prefix_lens = torch.tensor(prefixes, dtype=torch.int32)
        if self.encoder:
            batch.encoder_lens = torch.tensor(self.encoder)
        return batch

    def run(self, batch, one, *, expect=True, save=True, k=None, v=None, **options):
        """Random q, k, v through the backend; the oracle reads the pool that the call should have written."""
        rows = batch.out_cache_loc.shape[0]
        q = self.random(rows, HQ * D)
        k = self.random(rows, HK * D) if k is None else k
        v = self.random(rows, HK * DV) if v is None else v
        pool = [b[one.layer_id] for b in (self.token_to_kv_pool.k_buffer, self.token_to_kv_pool.v_buffer)]
        before = [as_numpy(buffer).copy() for buffer in pool]
        loc = as_numpy(batch.out_cache_loc)
        out = self.backend.forward(q, k, v, one, batch, save_kv_cache=save, **options)
        assert out.shape == (rows, HQ * DV) and out.dtype == q.dtype
        new = [as_numpy(k).reshape(rows, HK, D), as_numpy(v).reshape(rows, HK, DV)]
        written = [reference.write(x, buffer, loc) for x, buffer in zip(new, before, strict=True)]
        for buffer, wanted in zip(pool, written if save else before, strict=True):
            np.testing.assert_array_equal(as_numpy(buffer), wanted)
        if expect:
            window = one.sliding_window_size + 1
            news = as_numpy(batch.extend_seq_lens) if batch.extend_seq_lens is not None else np.ones(len(q), int)
            wanted = reference.extend(
                as_numpy(q).reshape(rows, HQ, D), None, None, *written,
                as_numpy(self.req_to_token_pool.req_to_token), np.array(self.rows), np.array(self.lens), news,
                sm_scale=one.scaling, logit_cap=one.logit_cap, window=max(window, 0),
                causal=one.attn_type == "decoder", kv_start=np.array(self.encoder) if self.encoder else None,
                sinks=as_numpy(options.get("sinks")),
            )[0]  # fmt: skip
            assert_close(out.view(rows, HQ, DV), wanted, PAGED[torch.float32])
        return out


LAYERS = [layer(0), layer(1, sliding_window_size=3, logit_cap=1.5)]


def test_continuous_batch(model):
    """Requests arrive, extend in chunks, decode together, leave; two layers, one with window and cap."""
    server = Server()
    server.admit(2)
    sinks = torch.tensor([0.3, -1.0, 2.0, -math.inf])
    for news, mode in (
        ([5, 3], ForwardMode.EXTEND),
        ([4, 7], ForwardMode.EXTEND),
        ([1, 1], ForwardMode.DECODE),
        ([1, 6], ForwardMode.MIXED),
    ):
        batch = server.batch(news, mode)
        server.backend.init_forward_metadata(batch)
        for one in LAYERS:
            server.run(batch, one, sinks=sinks)
    server.req_to_token_pool.free(server.rows.pop(0))
    server.lens.pop(0)
    server.admit(3)
    batch = server.batch([1, 9, 0, 2], ForwardMode.MIXED)
    server.backend.init_forward_metadata(batch)
    for one in LAYERS:
        server.run(batch, one)


def test_layers_share_one_plan(model, monkeypatch):
    made = []
    monkeypatch.setattr(
        "tilewright.runtime.backend.plan_decode", lambda *a, **k: made.append(1) or plan_decode(*a, **k)
    )
    server = Server(layers=3)
    server.admit(2)
    batch = server.batch([4, 2], ForwardMode.EXTEND)
    server.backend.init_forward_metadata(batch)
    for one in (layer(0), layer(1), layer(2)):
        server.run(batch, one)
    assert len(server.backend.forward_metadata.plans) == 1
    batch = server.batch([1, 1], ForwardMode.DECODE)
    server.backend.init_forward_metadata(batch)
    for one in (layer(0), layer(1), layer(2, sliding_window_size=2)):
        server.run(batch, one)
    assert made == [1]


def test_lengths_on_the_host_are_used(model):
    server = Server()
    server.admit(1)
    batch = server.batch([4], ForwardMode.EXTEND)
    batch.seq_lens_cpu = batch.seq_lens.clone()
    server.backend.init_forward_metadata(batch)
    server.run(batch, layer())


def test_save_kv_cache_false_writes_nothing(model):
    server = Server()
    server.admit(1)
    batch = server.batch([4], ForwardMode.EXTEND)
    server.backend.init_forward_metadata(batch)
    server.run(batch, layer(), save=False)  # attends the new keys all the same
    server.run(batch, layer())
    batch = server.batch([1], ForwardMode.DECODE)
    server.backend.init_forward_metadata(batch)
    # The new token's own key was not written: the poison in its slot is what decode must show.
    assert server.run(batch, layer(), save=False, expect=False).isnan().all()


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE])
def test_layers_that_share_the_keys_of_another(model, mode):
    """k = v = None (casebook P38): the same output as the layer that wrote them."""
    server = Server()
    server.admit(2)
    batch = server.batch([3, 1], ForwardMode.EXTEND)
    server.backend.init_forward_metadata(batch)
    server.run(batch, layer())
    if mode == ForwardMode.DECODE:
        batch = server.batch([1, 1], mode)
        server.backend.init_forward_metadata(batch)
        server.run(batch, layer())
    q = server.random(batch.out_cache_loc.shape[0], HQ, D)
    news = [1, 1] if mode == ForwardMode.DECODE else [3, 1]
    out = server.backend.forward(q, None, None, layer(), batch)
    wanted = reference.extend(*map(as_numpy, (
        q, None, None, *server.token_to_kv_pool.get_kv_buffer(0), server.req_to_token_pool.req_to_token,
        batch.req_pool_indices, batch.seq_lens, torch.tensor(news),
    )))[0]  # fmt: skip
    assert_close(out.view(-1, HQ, DV), wanted, PAGED[torch.float32])


def test_encoder_only_layers_see_all_keys(model):
    server = Server()
    server.admit(2)
    batch = server.batch([5, 3], ForwardMode.EXTEND)
    server.backend.init_forward_metadata(batch)
    server.run(batch, layer(attn_type="encoder_only"))
    server.run(batch, layer(attn_type=SimpleNamespace(value="encoder_only")), expect=False)
    assert len(server.backend.forward_metadata.plans) == 1


def test_cross_attention(model):
    """Encoder columns come first in the rows: cross layers see only them, self layers only what follows."""
    server = Server(encoder=(4, 6))
    server.admit(2)
    encoder_loc = server.token_to_kv_pool.alloc(10)
    for row, columns in zip(server.rows, encoder_loc.split([4, 6]), strict=True):
        server.req_to_token_pool.write((row, slice(0, len(columns))), columns)
    k, v = server.random(10, HK * D), server.random(10, HK * DV)
    cross = layer(1, is_cross_attention=True)
    for step, (news, mode) in enumerate([([3, 2], ForwardMode.EXTEND), ([1, 1], ForwardMode.DECODE)]):
        batch = server.batch(news, mode)
        server.backend.init_forward_metadata(batch)
        server.run(batch, LAYERS[0])
        q = server.random(sum(news), HQ * D)
        if step == 0:
            batch.encoder_out_cache_loc = encoder_loc
            out = server.backend.forward(q, k, v, cross, batch)
        else:
            out = server.backend.forward(q, None, None, cross, batch)
        keys, values = server.token_to_kv_pool.get_kv_buffer(1)
        assert torch.equal(keys[encoder_loc].view(10, -1), k)
        wanted = reference.extend(
            *map(as_numpy, (q.view(-1, HQ, D), None, None, keys, values, server.req_to_token_pool.req_to_token)),
            np.array(server.rows), np.array(server.lens), np.array(news), kv_lens=np.array([4, 6]),
        )[0]  # fmt: skip
        assert_close(out.view(-1, HQ, DV), wanted, PAGED[torch.float32])
    with pytest.raises(ValueError, match="encoder_lens"):
        batch.encoder_lens = None
        server.backend.forward(q, None, None, cross, batch)


def test_idle(model):
    server = Server()
    batch = ForwardBatch(ForwardMode.IDLE, 0, torch.zeros(0), torch.zeros(0))
    server.backend.init_forward_metadata(batch)
    out = server.backend.forward(torch.zeros(0, HQ * D), None, None, layer(), batch)
    assert out.shape == (0, HQ * DV)
    assert model.calls == []


@pytest.mark.parametrize("name", ["DRAFT_EXTEND", "SPLIT_PREFILL", "DLLM_EXTEND"])
def test_modes_not_served(model, name):
    server = Server()
    for mode in (ForwardMode[name], SimpleNamespace(name=name)):
        batch = ForwardBatch(mode, 1, torch.ones(1), torch.ones(1))
        with pytest.raises(NotImplementedError, match=name):
            server.backend.init_forward_metadata(batch)
        with pytest.raises(NotImplementedError, match=name):
            server.backend.forward(torch.zeros(1, HQ * D), None, None, layer(), batch)


def test_metadata_is_needed_and_belongs_to_the_mode(model):
    server = Server()
    server.admit(1)
    batch = server.batch([1], ForwardMode.DECODE)
    with pytest.raises(RuntimeError, match="init_forward_metadata"):
        server.run(batch, layer())
    server.backend.init_forward_metadata(batch)
    batch.forward_mode, batch.extend_seq_lens = ForwardMode.EXTEND, torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="plan_decode"):
        server.backend.forward(*(torch.zeros(1, n) for n in (HQ * D, HK * D, HK * DV)), layer(), batch)


def test_pools_that_are_not_served(model):
    pool = SimpleNamespace(translate_loc_from_full_to_swa=None)
    runner = SimpleNamespace(device="cpu", req_to_token_pool=ReqToTokenPool(1, 4), token_to_kv_pool=pool)
    with pytest.raises(NotImplementedError, match="sliding-window slots"):
        PagedAttentionBackend(runner)
    server = Server()
    server.token_to_kv_pool.k_buffer[0] = server.token_to_kv_pool.k_buffer[0].to(torch.float8_e5m2)
    server.admit(1)
    batch = server.batch([1], ForwardMode.DECODE)
    server.backend.init_forward_metadata(batch)
    with pytest.raises(NotImplementedError, match="k_buffer: got torch.float8_e5m2"):
        server.backend.forward(*(torch.zeros(1, n) for n in (HQ * D, HK * D, HK * DV)), layer(), batch)


def test_base_class_leaves_the_phases_open():
    backend = AttentionBackend()
    for mode in (ForwardMode.DECODE, ForwardMode.EXTEND):
        with pytest.raises(NotImplementedError, match=r"AttentionBackend\.forward"):
            backend.forward(torch.zeros(1, 1), None, None, layer(), SimpleNamespace(forward_mode=mode))


# ---- lightning

H, DK = 4, 8


def test_slopes():
    assert slopes(4).tolist() == [2**-2, 2**-4, 2**-6, 2**-8]
    assert slopes(6).tolist()[4:] == [2**-1, 2**-3]
    torch.testing.assert_close(slopes(8, layer=3, num_layers=7), slopes(8) * (0.5 + 1e-5))
    torch.testing.assert_close(slopes(2, layer=6, num_layers=7), slopes(2) * 1e-5, rtol=1e-4, atol=0)
    torch.testing.assert_close(slopes(2, layer=0, num_layers=1), slopes(2) * (1 + 1e-5))
    with pytest.raises(ValueError, match="layer: got 7"):
        slopes(2, layer=7, num_layers=7)


def runner(states, **config):
    config = {"num_attention_heads": H, "num_hidden_layers": 3} | config
    return SimpleNamespace(
        device="cpu",
        req_to_token_pool=HybridReqToTokenPool(6, 16, states),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(**config)),
    )


def recurrence(state, q, k, v, rates, scale):
    """Token by token in float64; (outputs, final state)."""
    decay, outs = np.exp(-as_numpy(rates).astype(np.float64))[:, None, None], []
    for t in range(len(q)):
        state = decay * state + np.einsum("hd,he->hde", k[t].double(), v[t].double())
        outs.append(scale * np.einsum("hd,hde->he", q[t].double(), state))
    return outs, state


@pytest.mark.parametrize("linear_backend", ["seg_la", "minimax"])
def test_lightning_batch(model, linear_backend):
    """Chunked extends, a decode, a mixed step: outputs and states equal the recurrence (casebook L08, L13)."""
    states = StatePool(4, layer_ids=[0, 2], head_num=H, head_dim=DK, v_head_dim=DK)
    for one in (0, 2):
        states.layer(one).temporal.fill_(1e3)  # what other requests left behind
    run = runner(states, linear_backend=linear_backend)
    backend = LightningAttentionBackend(run)
    one = AttentionLayer(2, H, H, DK, DK, 0.25)
    rows = run.req_to_token_pool.alloc(3)
    slots = run.req_to_token_pool.req_index_to_mamba_index_mapping[rows].tolist()
    true = [np.zeros((H, DK, DK))] * 3
    lens = [0, 0, 0]
    rates, scale = slopes(H, layer=2, num_layers=3), 0.25 if linear_backend == "seg_la" else 1.0
    generator = torch.Generator().manual_seed(0)
    for news, mode in (
        ([5, 1, 3], ForwardMode.EXTEND),
        ([2, 0, 4], ForwardMode.EXTEND),
        ([1, 1, 1], ForwardMode.DECODE),
        ([4, 1, 1], ForwardMode.MIXED),
    ):
        prefixes, lens = lens, [a + b for a, b in zip(lens, news, strict=True)]
        batch = ForwardBatch(mode, 3, torch.tensor(rows), torch.tensor(lens))
        if mode != ForwardMode.DECODE:
            listed = 1 if mode == ForwardMode.MIXED else 3  # MIXED may list the extends only
            batch.extend_seq_lens = torch.tensor(news[:listed], dtype=torch.int32)
            batch.extend_prefix_lens = torch.tensor(prefixes[:listed], dtype=torch.int32)
        backend.init_forward_metadata(batch)
        q, k, v = (torch.randn(sum(news), H * DK, generator=generator) for _ in range(3))
        out = backend.forward(q, k, v, one, batch)
        assert out.shape == (sum(news), H * DK)
        q, k, v = (x.view(-1, H, DK) for x in (q, k, v))
        wanted, start = [], 0
        for b, new in enumerate(news):
            part = slice(start, start + new)
            outs, true[b] = recurrence(true[b], q[part], k[part], v[part], rates, scale)
            wanted += outs
            start += new
        assert_close(out.view(-1, H, DK), np.array(wanted), LIGHTNING[torch.float32])
        for b in range(3):
            assert_close(states.layer(2).temporal[slots[b]], true[b], LIGHTNING_STATE[torch.float32])
    others = [slot for slot in range(5) if slot not in slots]
    assert (states.layer(2).temporal[others] == 1e3).all() and (states.layer(0).temporal == 1e3).all()


def test_lightning_padding_rows(model):
    """Padded rows of a decode batch point at table row 0: zeros, and no state is touched (casebook L11)."""
    states = StatePool(2, layer_ids=[0], head_num=H, head_dim=DK)
    run = runner(states)
    backend = LightningAttentionBackend(run)
    (row,) = run.req_to_token_pool.alloc(1)
    batch = ForwardBatch(ForwardMode.DECODE, 3, torch.tensor([row, 0, 0]), torch.tensor([1, 1, 1]))
    backend.init_forward_metadata(batch)
    out = backend.forward(*(torch.ones(3, H * DK) for _ in range(3)), AttentionLayer(0, H, H, DK, DK, 1.0), batch)
    assert (out[1:] == 0).all() and (out[0] != 0).all()
    assert not states.layer(0).temporal[0].any()


def test_each_backend_refuses_the_layers_of_the_other(model):
    """Casebook L21, as far as it goes without a hybrid of the two: layers 1 and 2 are linear, 0 is not."""
    states = StatePool(2, layer_ids=[1, 2], head_num=H, head_dim=DK)
    run = runner(states)
    linear = LightningAttentionBackend(run)
    (row,) = run.req_to_token_pool.alloc(1)
    batch = ForwardBatch(ForwardMode.DECODE, 1, torch.tensor([row]), torch.tensor([1]))
    linear.init_forward_metadata(batch)
    tensors = [torch.ones(1, H * DK) for _ in range(3)]
    for one in (1, 2):
        linear.forward(*tensors, AttentionLayer(one, H, H, DK, DK, 1.0), batch)
    for one in (0, 3, -1):
        with pytest.raises(ValueError, match=rf"layer_id: got {one}, expected .*\[1, 2\]"):
            linear.forward(*tensors, AttentionLayer(one, H, H, DK, DK, 1.0), batch)
    paged = Server(layers=1)
    paged.admit(1)
    batch = paged.batch([1], ForwardMode.DECODE)
    paged.backend.init_forward_metadata(batch)
    for one in (1, -1):
        with pytest.raises(ValueError, match=f"layer_id: got {one}, expected 0..0"):
            paged.backend.forward(*(torch.zeros(1, n) for n in (HQ * D, HK * D, HK * DV)), layer(one), batch)


def test_lightning_heads_of_a_rank(model):
    """Casebook L18."""
    states = StatePool(2, layer_ids=[0], head_num=2, head_dim=DK)
    run = runner(states, num_linear_key_value_heads=8, lightning_layerwise_decay=False)
    run.tp_size, run.tp_rank = 4, 1
    assert torch.equal(LightningAttentionBackend(run).slopes[1], slopes(8)[2:4])
    run.tp_size = 3
    with pytest.raises(ValueError, match="tp_size: got 3"):
        LightningAttentionBackend(run)


def test_lightning_refusals(model):
    states = StatePool(2, layer_ids=[0], head_num=H, head_dim=DK)
    with pytest.raises(ValueError, match="linear_backend"):
        LightningAttentionBackend(runner(states, linear_backend="other"))
    run = runner(states)
    backend = LightningAttentionBackend(run)
    (row,) = run.req_to_token_pool.alloc(1)
    batch = ForwardBatch(ForwardMode.DECODE, 1, torch.tensor([row]), torch.tensor([1]))
    one = AttentionLayer(0, H, H, DK, DK, 1.0)
    tensors = [torch.ones(1, H * DK) for _ in range(3)]
    with pytest.raises(RuntimeError, match="init_forward_metadata"):
        backend.forward(*tensors, one, batch)
    backend.init_forward_metadata(batch)
    with pytest.raises(ValueError, match="k, v"):
        backend.forward(tensors[0], None, None, one, batch)
    states.layer(0).temporal = states.layer(0).temporal.bfloat16()
    with pytest.raises(NotImplementedError, match="f32 states"):
        backend.forward(*tensors, one, batch)
    with pytest.raises(NotImplementedError, match="TARGET_VERIFY"):
        backend.init_forward_metadata(ForwardBatch(ForwardMode.TARGET_VERIFY, 1, torch.ones(1), torch.ones(1)))
