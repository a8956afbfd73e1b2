"""Calls of the public paged functions on a batch of batches.py, held to the float64 oracle."""

import torch
from tolerances import PAGED, assert_close, assert_lse_close

from tilewright.runtime.paged import decode_attention, extend_attention

ORACLE_OPTIONS = ("sm_scale", "logit_cap", "window", "sinks", "kv_start", "kv_lens", "causal", "extend_start_loc",
                  "tree_mask", "k_scale", "v_scale")  # fmt: skip


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
