"""SGLang's interface over lightning linear attention: `LightningAttentionBackend`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.runtime.backend import AttentionBackend
from tilewright.runtime.forward_batch import served_mode
from tilewright.runtime.lightning import lightning_decode, lightning_extend, slopes


@dataclass
class LightningMetadata:
    """One forward pass, shared by all layers.

    state_indices: [B] int32 slots, -1 = padding. qo_indptr: [B + 1] int32, has_initial_state: [B] bool; None in decode.
    """

    state_indices: Tensor
    qo_indptr: Tensor | None = None
    has_initial_state: Tensor | None = None


class LightningAttentionBackend(AttentionBackend):
    """Lightning attention behind the upstream interface. Serves IDLE, DECODE, EXTEND and MIXED.

    The recurrence is that of `tilewright.lightning_extend` for both `linear_backend` values of a model: "seg_la" scales
    by the layer's scaling, "minimax" models scale q themselves. A request without a cached prefix starts from a zero
    state whatever its slot holds. The state is f32.
    """

    def __init__(self, model_runner: Any) -> None:
        """Take the pools of a model runner, and the slopes of its model.

        Args:
            model_runner: with device, req_to_token_pool (.req_index_to_mamba_index_mapping, .mamba2_layer_cache),
                model_config.hf_config (num_attention_heads or num_linear_key_value_heads, num_hidden_layers; optional
                lightning_layerwise_decay, linear_backend), optional tp_size and tp_rank.

        Raises:
            ValueError: heads that tp_size does not divide, or an unknown linear_backend.
        """
        config = model_runner.model_config.hf_config
        self.device = model_runner.device
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.linear_backend = getattr(config, "linear_backend", "seg_la")
        if self.linear_backend not in ("seg_la", "minimax"):
            raise ValueError(f"linear_backend: got {self.linear_backend!r}, expected 'seg_la' or 'minimax'")
        heads = getattr(config, "num_linear_key_value_heads", None) or config.num_attention_heads
        size, rank = getattr(model_runner, "tp_size", 1), getattr(model_runner, "tp_rank", 0)
        if heads % size:
            raise ValueError(f"tp_size: got {size}, expected a divisor of the {heads} linear-attention heads")
        own = slice(rank * heads // size, (rank + 1) * heads // size)
        layers = config.num_hidden_layers
        layerwise = getattr(config, "lightning_layerwise_decay", True)
        self.slopes = [
            (slopes(heads, layer=layer, num_layers=layers) if layerwise else slopes(heads))[own].to(self.device)
            for layer in range(layers)
        ]
        self.forward_metadata: LightningMetadata | None = None

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Look up the state slots and row offsets of the batch, once for all layers."""
        mode = served_mode(forward_batch.forward_mode)
        if mode.is_idle():
            self.forward_metadata = None
            return
        mapping = self.req_to_token_pool.req_index_to_mamba_index_mapping
        slots = mapping[forward_batch.req_pool_indices.long()].to(torch.int32)
        # Slot 0 is the padding slot: several padded rows may point at it, and none may touch it.
        metadata = LightningMetadata(torch.where(slots == 0, -1, slots))
        if not mode.is_decode():
            self._set_extend(metadata, forward_batch)
        self.forward_metadata = metadata

    def _set_extend(self, metadata: LightningMetadata, forward_batch: Any) -> None:
        lens, prefixes = forward_batch.extend_seq_lens, forward_batch.extend_prefix_lens
        start = getattr(forward_batch, "extend_start_loc", None)
        # MIXED may list the extends only: the requests after them decode, one token each, from their states.
        decodes = len(forward_batch.seq_lens) - len(lens)
        ends = torch.cumsum(lens, 0)
        if start is not None and not torch.equal(start.to(ends.dtype), ends - lens):
            raise ValueError("extend_start_loc: got gaps between requests, expected them packed in order")
        total = ends[-1:] if len(lens) else ends.new_zeros(1)
        tail = total + torch.arange(1, decodes + 1, device=lens.device)
        metadata.qo_indptr = torch.cat((ends.new_zeros(1), ends, tail)).to(torch.int32)
        metadata.has_initial_state = torch.cat((prefixes > 0, prefixes.new_ones(decodes, dtype=torch.bool)))

    def _prepare(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any
    ) -> tuple[LightningMetadata, tuple[Tensor, Tensor, Tensor, Tensor], Tensor, float]:
        """(metadata, (q, k, v, state), slopes, scale) of a layer."""
        metadata = self.forward_metadata
        if metadata is None:
            raise RuntimeError("forward_metadata: call init_forward_metadata(forward_batch) before the first layer")
        if k is None or v is None:
            raise ValueError("k, v: got None, expected tensors (linear attention has no keys to read again)")
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        k = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
        v = v.view(-1, layer.tp_k_head_num, layer.v_head_dim)
        state = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id).temporal
        if state.dtype != torch.float32:
            raise NotImplementedError(f"state pool: got {state.dtype}; only f32 states are served")
        scale = layer.scaling if self.linear_backend == "seg_la" else 1.0
        return metadata, (q, k, v, state), self.slopes[layer.layer_id], scale

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
        """Advance each request's state by one token.

        Args:
            q: [B, H * Dk] or [B, H, Dk].
            k: likewise.
            v: [B, H * Dv] or [B, H, Dv].
            layer: see `AttentionLayer`.
            forward_batch: see `ForwardBatch`.
            save_kv_cache: unused, the state is always carried on.
            kwargs: accepted and unused, as upstream passes some to every backend.

        Returns:
            [B, H * Dv].
        """
        metadata, tensors, rates, scale = self._prepare(q, k, v, layer)
        out = lightning_decode(*tensors, metadata.state_indices, rates, scale=scale)
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

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
        """Advance each request's state by its new tokens; arguments as in `forward_decode` with T rows.

        Returns:
            [T, H * Dv].
        """
        metadata, tensors, rates, scale = self._prepare(q, k, v, layer)
        if metadata.qo_indptr is None:
            raise RuntimeError("forward_metadata: was made for another forward mode, call init_forward_metadata again")
        out = lightning_extend(
            *tensors,
            metadata.state_indices,
            metadata.qo_indptr,
            rates,
            has_initial_state=metadata.has_initial_state,
            scale=scale,
        )
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)
