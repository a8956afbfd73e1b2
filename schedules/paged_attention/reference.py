"""The float64 oracle of paged attention: loops over requests, tokens, heads and keys as the definition reads.

numpy in, numpy out; nothing is shared with the kernels or the planner. Meanings are those of
`tilewright.decode_attention` and `tilewright.extend_attention`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def attend_row(
    query: Array, keys: list[Array], values: list[Array], dim_vo: int, *, scale: float, cap: float, sink: float
) -> tuple[Array, float]:
    """One query over the keys that it sees.

    Args:
        query: [D].
        keys: of [D] each; may be empty.
        values: of [Dv] each.
        dim_vo: Dv.
        scale: factor of q . k.
        cap: soft-cap, 0 = off.
        sink: logit of the sink, -inf = none.

    Returns:
        (out [Dv], lse): zeros and -inf where there is no key.
    """
    out = np.zeros(dim_vo)
    if not keys:
        return out, -math.inf
    scores = []
    for key in keys:
        score = scale * float(np.dot(query, key))
        scores.append(cap * math.tanh(score / cap) if cap > 0 else score)
    top = max(scores)
    if math.isnan(sum(scores)):
        return np.full(dim_vo, math.nan), math.nan
    total = sum(math.exp(score - top) for score in scores)
    # A sink far above every score leaves the values no weight: exp would overflow where the quotient is 0.
    shift = max(top, sink)
    denominator = sum(math.exp(score - shift) for score in scores) + (math.exp(sink - shift) if sink > -math.inf else 0)
    for score, value in zip(scores, values, strict=True):
        out += math.exp(score - shift) / denominator * value
    return out, top + math.log(total)


def extend(
    q: NDArray,
    k_new: NDArray | None,
    v_new: NDArray | None,
    k_buffer: NDArray,
    v_buffer: NDArray,
    req_to_token: NDArray,
    req_pool_indices: NDArray,
    seq_lens: NDArray,
    extend_seq_lens: NDArray,
    extend_start_loc: NDArray | None = None,
    *,
    sm_scale: float | None = None,
    causal: bool = True,
    logit_cap: float = 0.0,
    window: int = 0,
    sinks: NDArray | None = None,
    kv_start: NDArray | None = None,
    kv_lens: NDArray | None = None,
    tree_mask: list[NDArray] | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[Array, Array]:
    """Attention of new tokens over prefix and new keys.

    Args:
        q: [T, Hq, D].
        k_new: [N, Hk, D] new keys, or None: all keys come from the buffers.
        v_new: [N, Hk, Dv].
        k_buffer: [S, Hk, D].
        v_buffer: [S, Hk, Dv].
        req_to_token: [R, C].
        req_pool_indices: [B].
        seq_lens: [B] prefix + new; the prefix may be negative where k_new is None.
        extend_seq_lens: [B].
        extend_start_loc: [B], None = packed.
        sm_scale: None = D ** -0.5.
        causal: keys after the query are hidden.
        logit_cap: 0 = off.
        window: 0 = off.
        sinks: [Hq] or None.
        kv_start: [B] or None.
        kv_lens: [B]: cross attention over these many keys, no causal rule.
        tree_mask: for each request [new, new]: which new keys a new token may see; None = all.
        k_scale: what the buffer's keys are multiplied by.
        v_scale: what its values are multiplied by.

    Returns:
        out [T, Hq, Dv] and lse [T, Hq], float64; NaN in rows that belong to no request.
    """
    tokens, num_qo_heads, dim = q.shape
    num_kv_heads = (k_buffer if k_new is None else k_new).shape[1]
    dim_vo = (v_buffer if v_new is None else v_new).shape[2]
    scale = dim**-0.5 if sm_scale is None else sm_scale
    out = np.full((tokens, num_qo_heads, dim_vo), math.nan)
    lse = np.full((tokens, num_qo_heads), math.nan)
    packed = 0
    for b in range(len(seq_lens)):
        new = int(extend_seq_lens[b])
        start = packed if extend_start_loc is None else int(extend_start_loc[b])
        packed += new
        prefix = int(seq_lens[b]) - new
        column = 0 if kv_start is None else int(kv_start[b])
        for i in range(new):
            position = prefix + i
            if kv_lens is not None:
                visible = list(range(int(kv_lens[b])))
            else:
                visible = [
                    j
                    for j in range(int(seq_lens[b]))
                    if (not causal or j <= position) and (window == 0 or j > position - window)
                ]
            if tree_mask is not None:
                visible = [j for j in visible if j < prefix or tree_mask[b][i, j - prefix]]
            for h in range(num_qo_heads):
                head = h // (num_qo_heads // num_kv_heads)
                keys, values = [], []
                for j in visible:
                    if k_new is None or v_new is None or j < prefix:
                        slot = int(req_to_token[int(req_pool_indices[b]), column + j])
                        keys.append(k_scale * k_buffer[slot, head].astype(np.float64))
                        values.append(v_scale * v_buffer[slot, head].astype(np.float64))
                    else:
                        keys.append(k_new[start + j - prefix, head].astype(np.float64))
                        values.append(v_new[start + j - prefix, head].astype(np.float64))
                out[start + i, h], lse[start + i, h] = attend_row(
                    q[start + i, h].astype(np.float64),
                    keys,
                    values,
                    dim_vo,
                    scale=scale,
                    cap=logit_cap,
                    sink=-math.inf if sinks is None else float(sinks[h]),
                )
    return out, lse


def decode(
    q: NDArray,
    k_buffer: NDArray,
    v_buffer: NDArray,
    req_to_token: NDArray,
    req_pool_indices: NDArray,
    seq_lens: NDArray,
    *,
    kv_lens: NDArray | None = None,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    window: int = 0,
    sinks: NDArray | None = None,
    kv_start: NDArray | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[Array, Array]:
    """Attention of one token per request, the last of its seq_lens[b] keys; arguments as in `extend`.

    Returns:
        out [B, Hq, Dv] and lse [B, Hq], float64.
    """
    return extend(
        q,
        None,
        None,
        k_buffer,
        v_buffer,
        req_to_token,
        req_pool_indices,
        seq_lens,
        np.ones(len(q), np.int64),
        sm_scale=sm_scale,
        logit_cap=logit_cap,
        window=window,
        sinks=sinks,
        kv_start=kv_start,
        kv_lens=kv_lens,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def merge(o: NDArray, lse: NDArray) -> tuple[Array, Array]:
    """The state over the union of the keys of N states.

    Args:
        o: [N, T, H, Dv]; ignored where lse is -inf.
        lse: [N, T, H], natural log.

    Returns:
        out [T, H, Dv] and lse [T, H], float64; zeros and -inf where all states are empty.
    """
    states, tokens, heads, dim = o.shape
    out, out_lse = np.zeros((tokens, heads, dim)), np.full((tokens, heads), -math.inf)
    for t in range(tokens):
        for h in range(heads):
            full = [n for n in range(states) if lse[n, t, h] > -math.inf]
            if not full:
                continue
            top = max(float(lse[n, t, h]) for n in full)
            total = sum(math.exp(float(lse[n, t, h]) - top) for n in full)
            for n in full:
                out[t, h] += math.exp(float(lse[n, t, h]) - top) / total * o[n, t, h].astype(np.float64)
            out_lse[t, h] = top + math.log(total)
    return out, out_lse


def write(x: NDArray, buffer: NDArray, loc: NDArray) -> NDArray:
    """A copy of buffer [S, H, D] with buffer[loc[t]] = x[t]; loc -1 is skipped."""
    result = buffer.copy()
    for t in range(len(x)):
        if int(loc[t]) >= 0:
            result[int(loc[t])] = x[t]
    return result


def e4m3_values() -> Array:
    """[256]: the number of each e4m3fn code; sign, four exponent bits of bias 7, three of the mantissa."""
    values = np.zeros(256)
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        value = math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)
        if code & 0x7F == 0x7F:
            value = math.nan
        values[code] = -value if code & 0x80 else value
    return values


def e4m3_codes(x: NDArray) -> NDArray[np.uint8]:
    """The code nearest to each number, ties to the even code; the largest code beyond it; NaN gives 0x7f or 0xff."""
    numbers = e4m3_values()[:0x7F]
    codes = np.zeros(x.shape, np.uint8)
    for place, value in np.ndenumerate(x.astype(np.float64)):
        distance = np.abs(numbers - abs(value)) if abs(value) < 448 else np.abs(numbers - 448)
        nearest = np.flatnonzero(distance == distance.min()) if not math.isnan(value) else np.array([0x7F])
        code = nearest[nearest % 2 == 0][0] if len(nearest) > 1 else nearest[0]
        codes[place] = code | (0x80 if np.signbit(value) else 0)
    return codes


def write_fp8(x: NDArray, buffer: NDArray, loc: NDArray, scale: float) -> NDArray:
    """As `write` into a pool of e4m3 codes (uint8) with a scale; the quotient is of float32."""
    return write(e4m3_codes(x.astype(np.float32) / np.float32(scale)), buffer, loc)
