"""Calls of the public paged functions on a batch of batches.py, held to the float64 oracle."""

import math

import torch
from tolerances import PAGED, assert_close, assert_lse_close

from tilewright.runtime.paged import decode_attention, extend_attention

ORACLE_OPTIONS = ("sm_scale", "logit_cap", "window", "sinks", "kv_start", "kv_lens", "causal", "extend_start_loc",
                  "tree_mask", "k_scale", "v_scale")  # fmt: skip

# What is wrong with a call, given the arguments of a right one.
WRONG = {
    "q: dtype": lambda a: {"q": a["q"].double()},
    "q: rows": lambda a: {"q": a["q"][:1]},
    "q: gradient": lambda a: {"q": a["q"].clone().requires_grad_()},
    "q: no tensor": lambda a: {"q": a["q"].numpy()},
    "k_buffer: dtype": lambda a: {"k_buffer": a["k_buffer"].half()},
    "k_buffer: heads": lambda a: {"k_buffer": a["k_buffer"][:, :1]},
    "v_buffer: rank": lambda a: {"v_buffer": a["v_buffer"][0]},
    "req_to_token: dtype": lambda a: {"req_to_token": a["req_to_token"].float()},
    "req_pool_indices: batch": lambda a: {"req_pool_indices": a["req_pool_indices"][:1]},
    "seq_lens: other lengths": lambda a: {"seq_lens": a["seq_lens"] + 1},
    "out: shape": lambda a: {"out": a["out"][..., :4]},
    "out: dtype": lambda a: {"out": a["out"].half()},
    "out: shared memory": lambda a: {"out": a["out"][:1].expand_as(a["out"])},
    "out: gradient": lambda a: {"out": a["out"].clone().requires_grad_()},
    "window": lambda a: {"window": -1},
    "logit_cap": lambda a: {"logit_cap": -1.0},
    "sm_scale": lambda a: {"sm_scale": math.nan},
    "sinks": lambda a: {"sinks": torch.zeros(3)},
    "page_size": lambda a: {"page_size": 0},
    "kv_start": lambda a: {"kv_start": torch.zeros(1, dtype=torch.int32)},
    "batch_invariant": lambda a: {"batch_invariant": True},
}


def run(batch, **options):
    """(out, lse) of extend or, for a batch whose requests have one token each and no k, decode."""
    options = {"out": batch.out(), "return_lse": True} | options
    if options.pop("decode", False):
        return decode_attention(*batch.decode_arguments(), **options)
    return extend_attention(*batch.extend_arguments(), **options)


def check(batch, *, expected=None, **options):
    """`run`, held to the oracle."""
    out, lse = run(batch, **options)
    decode = options.get("decode", False)
    if expected is None:
        expected = batch.expected(decode=decode, **{n: options[n] for n in ORACLE_OPTIONS if n in options})
    assert_close(out, expected[0], PAGED[batch.q.dtype])
    assert_lse_close(lse, expected[1], PAGED[batch.q.dtype])
    return out, lse


def same_bits(a, b):
    if isinstance(a, tuple):
        return all(same_bits(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
