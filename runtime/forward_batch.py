"""What a model hands to an attention backend, in SGLang's terms, for use without SGLang.

The backends take any objects with these attributes; SGLang's own ForwardBatch, ForwardMode and RadixAttention do.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any

import numpy as np
from torch import Tensor


class ForwardMode(IntEnum):
    """What a forward pass does. Names and predicates as upstream."""

    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()
    DRAFT_EXTEND = auto()
    DRAFT_EXTEND_V2 = auto()
    SPLIT_PREFILL = auto()
    DLLM_EXTEND = auto()

    def is_decode(self) -> bool:
        """One token per request."""
        return self == ForwardMode.DECODE

    def is_extend(self) -> bool:
        """Any number of new tokens per request, drafts and verification included."""
        return self not in (ForwardMode.DECODE, ForwardMode.IDLE)

    def is_mixed(self) -> bool:
        """Extends with the decodes of the same step among them."""
        return self == ForwardMode.MIXED

    def is_idle(self) -> bool:
        """No request; the pass exists for other ranks."""
        return self == ForwardMode.IDLE

    def is_decode_or_idle(self) -> bool:
        """DECODE or IDLE."""
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)

    def is_target_verify(self) -> bool:
        """Verification of draft tokens."""
        return self == ForwardMode.TARGET_VERIFY


def served_mode(mode: Any) -> ForwardMode:
    """The IDLE, DECODE, EXTEND or MIXED that `mode` (ours or upstream's) is.

    Raises:
        NotImplementedError: any other mode, by its name.
    """
    name = getattr(mode, "name", str(mode))
    if name not in ("IDLE", "DECODE", "EXTEND", "MIXED"):
        raise NotImplementedError(f"forward_mode {name}: not served yet, expected IDLE, DECODE, EXTEND or MIXED")
    return ForwardMode[name]


@dataclass
class AttentionLayer:
    """One attention layer as the backends read it.

    Attributes:
        layer_id: global number of the layer.
        tp_q_head_num, tp_k_head_num: query and KV heads on this rank.
        qk_head_dim, v_head_dim: D and Dv.
        scaling: factor of q . k.
        logit_cap: soft-cap, 0 = off.
        sliding_window_size: keys before the query's own that it sees, -1 = all (one less than our `window`).
        is_cross_attention: keys are the encoder's.
        attn_type: "decoder" or "encoder_only" (no causal rule).
    """

    layer_id: int
    tp_q_head_num: int
    tp_k_head_num: int
    qk_head_dim: int
    v_head_dim: int
    scaling: float
    logit_cap: float = 0.0
    sliding_window_size: int = -1
    is_cross_attention: bool = False
    attn_type: Any = "decoder"


@dataclass
class ForwardBatch:
    """One step of a batch.

    Attributes:
        forward_mode: what the step does.
        batch_size: B.
        req_pool_indices: [B] rows of the request table.
        seq_lens: [B] keys, the new tokens included.
        out_cache_loc: [T] slots of the new tokens.
        seq_lens_cpu: seq_lens on the host where known.
        extend_seq_lens: [B] new tokens (EXTEND, MIXED).
        extend_prefix_lens: [B] cached tokens (EXTEND, MIXED).
        extend_start_loc: [B] first row of each request, None = packed.
        encoder_lens: [B] columns of the encoder at the front of each request's row, None = no encoder.
        encoder_out_cache_loc: slots of new encoder keys.
    """

    forward_mode: Any
    batch_size: int
    req_pool_indices: Tensor
    seq_lens: Tensor
    out_cache_loc: Tensor | None = None
    seq_lens_cpu: Tensor | np.ndarray | None = None
    extend_seq_lens: Tensor | None = None
    extend_prefix_lens: Tensor | None = None
    extend_start_loc: Tensor | None = None
    encoder_lens: Tensor | None = None
    encoder_out_cache_loc: Tensor | None = None
