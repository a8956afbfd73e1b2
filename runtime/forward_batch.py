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


def served_mode(mode: Any, *, verify: bool = False) -> ForwardMode:
    """The IDLE, DECODE, EXTEND or MIXED, with `verify` also TARGET_VERIFY, that `mode` (ours or upstream's) is.

    Raises:
        NotImplementedError: any other mode, by its name.
    """
    name = getattr(mode, "name", str(mode))
    served = ["IDLE", "DECODE", "EXTEND", "MIXED", *(["TARGET_VERIFY"] if verify else [])]
    if name not in served:
        expected = f"{', '.join(served[:-1])} or {served[-1]}"
        raise NotImplementedError(f"forward_mode {name}: not served yet, expected {expected}")
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
        k_scale_float, v_scale_float: what the numbers of an fp8 pool stand for; None = 1.
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
    k_scale_float: float | None = None
    v_scale_float: float | None = None


def layer_scales(layer: Any) -> tuple[float | None, float | None]:
    """(k_scale, v_scale) of a layer over an fp8 pool as Python floats; None = 1.

    Upstream keeps the floats beside the tensors that checkpoints have: reading those would wait for a GPU.
    """
    k_scale, v_scale = (
        getattr(layer, f"{name}_float", None) or getattr(layer, name, None) for name in ("k_scale", "v_scale")
    )
    return k_scale, v_scale


@dataclass
class VerifyInput:
    """Drafts to verify (`ForwardBatch.spec_info` in TARGET_VERIFY).

    Attributes:
        draft_token_num: new tokens of every request.
        tree_topk: drafts that follow each one; 1 = a chain, which the causal rule serves: the mask is not looked at.
        custom_mask: as `tree_mask` of `tilewright.extend_attention`; None = a chain.
    """

    draft_token_num: int
    tree_topk: int = 1
    custom_mask: Tensor | None = None


@dataclass
class ForwardBatch:
    """One step of a batch.

    Attributes:
        forward_mode: what the step does.
        batch_size: B.
        req_pool_indices: [B] rows of the request table.
        seq_lens: [B] keys, the new tokens included, but for TARGET_VERIFY: without the drafts.
        out_cache_loc: [T] slots of the new tokens.
        seq_lens_cpu: seq_lens on the host where known.
        extend_seq_lens: [B] new tokens (EXTEND, MIXED).
        extend_prefix_lens: [B] cached tokens (EXTEND, MIXED).
        extend_start_loc: [B] first row of each request, None = packed.
        encoder_lens: [B] columns of the encoder at the front of each request's row, None = no encoder.
        encoder_out_cache_loc: slots of new encoder keys.
        spec_info: the drafts (TARGET_VERIFY).
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
    spec_info: Any = None
