"""SGLang's attention-backend interface over paged attention: `AttentionBackend` and `PagedAttentionBackend`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewright.runtime.arguments import E4M3
from tilewright.runtime.forward_batch import ForwardMode, layer_scales, served_mode
from tilewright.runtime.paged import decode_attention, extend_attention, write_kv
from tilewright.runtime.plan import Plan, host_lengths, plan_decode, plan_extend
from tilewright.runtime.plan_buffers import PlanBuffers

_FILL = 1


class AttentionBackend:
    """What every backend inherits: upstream's attributes with its defaults, and the dispatch by forward mode.

    A subclass fills `forward_metadata` in `init_forward_metadata_out_graph` (host code allowed, once per forward,
    before layer 0) and implements `forward_decode` and `forward_extend`.
    """

    prefill_attention_backend_str: str | None = None
    decode_attention_backend_str: str | None = None
    needs_cpu_seq_lens = True
    forward_metadata: Any = None
    attn_backend_list: list[AttentionBackend] | None = None
    data_type: torch.dtype | None = None
    kv_cache_dtype: torch.dtype | None = None
    kv_index_translator: Any = None
    supports_ragged_verify_graph = False
    use_captured_forward_metadata_for_breakable_cuda_graph = False
    supports_full_cuda_graph_chunked_prefix = False
    extend_dummy_seqs_capped_by_req_pool = False
    prefill_cuda_graph_max_batch_size: int | None = None
    prefer_eager_mixed_prefill_under_dp_attention = False
    skips_prefill_metadata_on_idle_dp_rank = False
    supports_prefill_cuda_graph_max_context_size = False
    folds_encoder_swa_replay = False
    dllm_attention: Any = None
    verify_mask: Any = None
    _verifies = False

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare one forward pass."""
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """The part that may run host code."""

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """The part that is recorded in a graph."""

    def support_triton(self) -> bool:
        """Whether write helpers may use Triton kernels beside this backend."""
        return False

    def on_after_cuda_graph_warmup(self) -> None:
        """Between the warm-up forward and the capture of a graph."""

    def get_indexer_metadata(self, layer_id: int, forward_batch: Any) -> Any:
        """None: sparse indexers are not served."""
        return None

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Run one layer by the batch's mode.

        Returns:
            [T, Hq * Dv] in q's dtype; uninitialised where the mode is IDLE.

        Raises:
            NotImplementedError: a mode that is not served; the message names it.
        """
        mode = served_mode(forward_batch.forward_mode, verify=self._verifies)
        if mode.is_idle():
            return q.new_empty((q.shape[0], layer.tp_q_head_num * layer.v_head_dim))
        run = self.forward_decode if mode.is_decode() else self.forward_extend
        return run(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Run a layer for one new token per request."""
        raise NotImplementedError(f"{type(self).__name__}.forward_decode")

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Run a layer for any number of new tokens per request."""
        raise NotImplementedError(f"{type(self).__name__}.forward_extend")


@dataclass
class PagedMetadata:
    """One forward pass: the lengths on the host, and the plans that its layers share (made by the first that asks).

    graph: the pass is captured, and these plans serve every replay of the graph. seq_lens, extend_seq_lens: of a pass
    that verifies drafts, which the batch's own do not count; tree_mask: theirs, None = chains.
    """

    mode: ForwardMode
    kv_lens: np.ndarray
    q_lens: np.ndarray | None = None
    q_starts: np.ndarray | None = None
    encoder_lens: np.ndarray | None = None
    plans: dict[tuple, Plan] = field(default_factory=dict)
    graph: bool = False
    seq_lens: Tensor | None = None
    extend_seq_lens: Tensor | None = None
    tree_mask: Tensor | None = None

    def lens(self, cross: bool) -> np.ndarray | None:
        """Keys of each request that a layer sees."""
        return self.encoder_lens if cross else self.kv_lens


class PagedAttentionBackend(AttentionBackend):
    """Paged softmax attention behind the upstream interface, on every target.

    Serves IDLE, DECODE, EXTEND, MIXED and TARGET_VERIFY (chains and trees of drafts); pools of bf16, fp16, f32 and
    float8_e4m3fn with the layers' scales; sliding windows, soft-cap, sinks, cross attention, encoder-only layers,
    layers that share another layer's KV (k = v = None). Follows the upstream CPU backend, with its faults mended: the
    cap applies in extend too, empty rows are zeros, windows are exact, save_kv_cache=False is honoured in decode.

    With `batch_invariant` and an fp8 pool, extends read the new keys back from the pool, as later chunks will.
    """

    _verifies = True

    def __init__(self, model_runner: Any, *, batch_invariant: bool = False) -> None:
        """Take the pools of a model runner.

        Args:
            model_runner: with device, req_to_token_pool (.req_to_token) and token_to_kv_pool (.get_key_buffer,
                .get_value_buffer by layer_id).
            batch_invariant: a request's results are bitwise the same in any batch.

        Raises:
            NotImplementedError: a pool with separate sliding-window slots.
        """
        self.device = model_runner.device
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.page_size = getattr(self.token_to_kv_pool, "page_size", 1)
        self.batch_invariant = batch_invariant
        self.forward_metadata: PagedMetadata | None = None
        self._graphs: dict[int, PagedMetadata] = {}
        if hasattr(self.token_to_kv_pool, "translate_loc_from_full_to_swa"):
            raise NotImplementedError("token_to_kv_pool: a pool with separate sliding-window slots is not served yet")

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare one forward pass that is not a graph's."""
        self.forward_metadata = self._read(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing to allocate yet: each batch size gets its plans in the warm-up before its capture."""
        self._graphs.clear()

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Keys of the requests that pad a batch to the size of a graph."""
        return _FILL

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before the capture of a graph (a warm-up forward must follow, which makes its plans), and before each replay.

        Raises:
            NotImplementedError: capture of another mode than DECODE.
        """
        mode = served_mode(forward_batch.forward_mode, verify=self._verifies)
        known = self._graphs.get(forward_batch.batch_size) if mode.is_decode() and not in_capture else None
        metadata = self._read(forward_batch)
        if in_capture and metadata is not None:
            if not mode.is_decode():
                raise NotImplementedError(f"forward_mode {mode.name}: only DECODE is captured in graphs yet")
            metadata.graph = True
            self._graphs[forward_batch.batch_size] = metadata
        elif known is not None and metadata is not None:
            known.kv_lens, known.encoder_lens = metadata.kv_lens, metadata.encoder_lens
            for (*_, cross, _), plan in known.plans.items():
                plan.update(None, seq_lens_cpu=known.lens(cross))
            metadata = known
        self.forward_metadata = metadata

    def _read(self, forward_batch: Any) -> PagedMetadata | None:
        """The lengths of the batch, once for all layers; None: there is nothing to run."""
        mode = served_mode(forward_batch.forward_mode, verify=self._verifies)
        if mode.is_idle():
            return None
        seq_lens_cpu = getattr(forward_batch, "seq_lens_cpu", None)
        kv_lens = host_lengths("seq_lens", forward_batch.seq_lens if seq_lens_cpu is None else seq_lens_cpu)
        metadata = PagedMetadata(mode, kv_lens)
        if mode.is_target_verify():
            self._read_drafts(metadata, forward_batch)
        elif not mode.is_decode():
            metadata.q_lens = host_lengths("extend_seq_lens", forward_batch.extend_seq_lens, len(kv_lens))
            start = getattr(forward_batch, "extend_start_loc", None)
            if start is not None:
                metadata.q_starts = host_lengths("extend_start_loc", start, len(kv_lens))
        encoder_lens = getattr(forward_batch, "encoder_lens", None)
        if encoder_lens is not None:
            metadata.encoder_lens = host_lengths("encoder_lens", encoder_lens, len(kv_lens))
        return metadata

    def _read_drafts(self, metadata: PagedMetadata, forward_batch: Any) -> None:
        """Every request has draft_token_num new tokens, which seq_lens does not count."""
        drafts = getattr(forward_batch, "spec_info", None)
        if drafts is None:
            raise ValueError("spec_info: got None, expected the drafts to verify (forward_mode TARGET_VERIFY)")
        count, batch = drafts.draft_token_num, len(metadata.kv_lens)
        metadata.kv_lens = metadata.kv_lens + count
        metadata.q_lens = np.full(batch, count, np.int64)
        metadata.seq_lens = forward_batch.seq_lens + count
        metadata.extend_seq_lens = torch.full_like(forward_batch.seq_lens, count)
        mask = getattr(drafts, "custom_mask", None)
        # Upstream's names of one thing, by the kind of drafts.
        topk = getattr(drafts, "tree_topk", getattr(drafts, "topk", None))
        if topk != 1 and mask is not None and mask.numel():
            metadata.tree_mask = mask

    def _plan(self, layer: Any, *, cross: bool, causal: bool, window: int) -> Plan:
        metadata = self.forward_metadata
        if metadata is None:
            raise RuntimeError("forward_metadata: call init_forward_metadata(forward_batch) before the first layer")
        decode = metadata.mode.is_decode()
        sizes = {
            "num_qo_heads": layer.tp_q_head_num,
            "num_kv_heads": layer.tp_k_head_num,
            "head_dim_qk": layer.qk_head_dim,
            "head_dim_vo": layer.v_head_dim,
        }
        # In decode the window is the call's: layers with and without one share a plan, but for a graph's, which has
        # one list.
        key: tuple[Any, ...]
        if metadata.graph:
            key = (*sizes.values(), cross, window)
        else:
            key = (*sizes.values(), cross) if decode else (*sizes.values(), cross, causal, window)
        plan = metadata.plans.get(key)
        if plan is None:
            lens = metadata.lens(cross)
            common: dict[str, Any] = {"device": self.device, "batch_invariant": self.batch_invariant, **sizes}
            if metadata.graph:
                slots = self.token_to_kv_pool.get_key_buffer(layer.layer_id).shape[0]
                memory = {name: size for name, size in sizes.items() if name != "head_dim_qk"}
                common["buffers"] = PlanBuffers.for_decode(len(metadata.kv_lens), slots, device=self.device, **memory)
            if decode:
                plan = plan_decode(lens, **common)
            else:
                plan = plan_extend(lens, metadata.q_lens, metadata.q_starts, causal=causal, window=window, **common)
            metadata.plans[key] = plan
        return plan

    def _run(
        self,
        decode: bool,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        sinks: Tensor | None,
    ) -> Tensor:
        if (k is None) != (v is None):
            raise ValueError("k, v: got one of the two, expected both or neither")
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        k_buffer = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        v_buffer = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        cross = layer.is_cross_attention
        encoder_lens = getattr(forward_batch, "encoder_lens", None)
        if cross and encoder_lens is None:
            raise ValueError("encoder_lens: got None, expected the encoder's lengths (a cross-attention layer)")
        if k is not None and v is not None:
            k = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
            v = v.view(-1, layer.tp_k_head_num, layer.v_head_dim)
        fp8 = k_buffer.dtype is E4M3
        k_scale, v_scale = layer_scales(layer) if fp8 else (None, None)
        if k is not None and v is not None:
            if save_kv_cache:
                loc = forward_batch.encoder_out_cache_loc if cross else forward_batch.out_cache_loc
                write_kv(k, v, k_buffer, v_buffer, loc, k_scale=k_scale, v_scale=v_scale)
                if fp8 and self.batch_invariant:
                    k = v = None  # read back as later chunks will
        causal = not cross and str(getattr(layer.attn_type, "value", layer.attn_type)) != "encoder_only"
        window = layer.sliding_window_size + 1
        common: dict[str, Any] = {
            "sm_scale": layer.scaling,
            "logit_cap": layer.logit_cap,
            "window": 0 if cross else max(window, 0),
            "sinks": sinks,
            "kv_start": None if cross else encoder_lens,
            "kv_lens": encoder_lens if cross else None,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "page_size": self.page_size if encoder_lens is None else 1,
            "batch_invariant": self.batch_invariant,
        }
        plan = self._plan(layer, cross=cross, causal=causal, window=common["window"])
        metadata = self.forward_metadata
        assert metadata is not None
        seq_lens = forward_batch.seq_lens if metadata.seq_lens is None else metadata.seq_lens
        paging = (self.req_to_token, forward_batch.req_pool_indices, seq_lens)
        if decode:
            out = decode_attention(q, k_buffer, v_buffer, *paging, plan=plan, **common)
        else:
            if cross:
                k = v = None  # written above; queries see the encoder's keys only
            news, start = metadata.extend_seq_lens, None
            if news is None:
                news, start = forward_batch.extend_seq_lens, getattr(forward_batch, "extend_start_loc", None)
            out = extend_attention(
                q, k, v, k_buffer, v_buffer, *paging, news, start, causal=causal,
                tree_mask=None if cross else metadata.tree_mask, plan=plan, **common,
            )  # fmt: skip
        assert isinstance(out, Tensor)
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        sinks: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Write the new keys (where save_kv_cache and given), then attend one token per request.

        Args:
            q: [B, Hq * D] or [B, Hq, D].
            k: [B, Hk * D] or [B, Hk, D], or None with v: the keys are in the pool.
            v: [B, Hk * Dv] or [B, Hk, Dv].
            layer: see `AttentionLayer`.
            forward_batch: see `ForwardBatch`.
            save_kv_cache: whether to write k and v; what is not written is not seen.
            sinks: [Hq].
            kwargs: accepted and unused, as upstream passes some to every backend.

        Returns:
            [B, Hq * Dv].
        """
        return self._run(True, q, k, v, layer, forward_batch, save_kv_cache, sinks)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        sinks: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Write the new keys (where save_kv_cache and given), then attend new tokens to prefix and one another.

        Arguments as in `forward_decode`, with T rows. New keys are read from k and v themselves, written or not.

        Returns:
            [T, Hq * Dv].
        """
        return self._run(False, q, k, v, layer, forward_batch, save_kv_cache, sinks)
