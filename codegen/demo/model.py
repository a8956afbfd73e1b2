"""A Llama in plain torch that leaves attention, and so the KV cache, to a backend with SGLang's interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from tilewright.runtime.forward_batch import AttentionLayer


class Attention(Protocol):
    """What the model asks of an attention backend; `PagedAttentionBackend` and `SDPABackend` both answer."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare for one forward of the whole model: called once, before layer 0."""

    def forward(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        """Keep k [T, Hk, D] and v [T, Hk, Dv] of these tokens, then attend q [T, Hq, D]: returns [T, Hq * Dv]."""


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a Llama, as the model file names them."""

    num_layers: int
    hidden: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    rope_base: float
    rms_eps: float
    context_len: int


@dataclass(frozen=True)
class LlamaBlock:
    """The weights of one layer, [out, in] each; projections that read the same input are stacked into one."""

    attn_norm: torch.Tensor
    qkv: torch.Tensor
    attn_out: torch.Tensor
    ffn_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Llama:
    """RMSNorm, rotary embedding over interleaved pairs, grouped-query attention, SwiGLU, tied embeddings."""

    def __init__(self, config: LlamaConfig, embedding: torch.Tensor, blocks: list[LlamaBlock], norm: torch.Tensor):
        """Take embedding [vocab, hidden], blocks and norm [hidden] as they are; the model computes in their dtype."""
        self.config = config
        self.embedding = embedding
        self.blocks = blocks
        self.norm = norm
        c = config
        self.layers = [
            AttentionLayer(i, c.num_qo_heads, c.num_kv_heads, c.head_dim, c.head_dim, c.head_dim**-0.5)
            for i in range(c.num_layers)
        ]
        frequencies = c.rope_base ** -(torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim)
        angles = torch.outer(torch.arange(c.context_len, dtype=torch.float64), frequencies)
        self.rotation = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)  # [context, D / 2]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights, activations and KV cache."""
        return self.embedding.dtype

    @torch.inference_mode()
    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention, forward_batch: Any
    ) -> torch.Tensor:
        """Run the layers over the tokens of a whole batch.

        Args:
            tokens: int64 [T], the new tokens of all requests, one request after the other.
            positions: int64 [T], the place of each in its own sequence.
            attention: the backend that keeps the KV cache and attends.
            forward_batch: passed through to the backend.

        Returns:
            The normalised hidden states [T, hidden]; `logits` makes scores of the rows that are wanted.
        """
        c = self.config
        attention.init_forward_metadata(forward_batch)
        rotation = self.rotation[positions].unsqueeze(1)
        split = [c.num_qo_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim]
        x = F.embedding(tokens, self.embedding)
        for layer, w in zip(self.layers, self.blocks, strict=True):
            q, k, v = F.linear(self._normalised(x, w.attn_norm), w.qkv).split(split, dim=-1)
            q, k, v = (t.unflatten(-1, (-1, c.head_dim)) for t in (q, k, v))
            o = attention.forward(rotate(q, rotation), rotate(k, rotation), v, layer, forward_batch)
            x = x + F.linear(o, w.attn_out)
            gate, up = F.linear(self._normalised(x, w.ffn_norm), w.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, w.down)
        return self._normalised(x, self.norm)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Score every token of the vocabulary: hidden [N, hidden] to f32 [N, vocab]."""
        return F.linear(hidden, self.embedding).float()

    def _normalised(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self.config.hidden,), weight, self.config.rms_eps)


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Turn the pairs (x[2i], x[2i + 1]) of x [T, H, D] by rotation, complex64 [T, 1, D / 2], in f32; dtype is kept."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)
