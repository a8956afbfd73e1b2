"""The float64 oracle of lightning attention: the recurrence, token by token, as its definition reads.

numpy in, numpy out; nothing is shared with the kernels. Meanings are those of `tilewright.lightning_extend` and
`tilewright.lightning_decode`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def step(state: Array, q: Array, k: Array, v: Array, slope: float, scale: float) -> tuple[Array, Array]:
    """One token of one head.

    Args:
        state: [Dk, Dv] before the token.
        q: [Dk], and k likewise.
        k: [Dk].
        v: [Dv].
        slope: decay a token, in nats.
        scale: factor of the output.

    Returns:
        (out [Dv], state [Dk, Dv] after the token).
    """
    state = math.exp(-slope) * state + np.outer(k, v)
    return scale * (q @ state), state


def extend(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    state: NDArray,
    state_indices: NDArray,
    qo_indptr: NDArray,
    slopes: NDArray,
    *,
    has_initial_state: NDArray | None = None,
    scale: float | None = None,
) -> tuple[Array, Array]:
    """Extend ragged requests.

    Args:
        q: [T, H, Dk], and k likewise.
        k: [T, H, Dk].
        v: [T, H, Dv].
        state: [slots, H, Dk, Dv].
        state_indices: [B]; -1 = out rows 0, no state touched.
        qo_indptr: [B + 1].
        slopes: [H].
        has_initial_state: [B]; 0 = from a zero state; None = all true.
        scale: None = Dk ** -0.5.

    Returns:
        (out [T, H, Dv], NaN where no row is written; the state pool afterwards).
    """
    tokens, heads, dim = q.shape
    scale = dim**-0.5 if scale is None else scale
    out = np.full((tokens, heads, v.shape[2]), math.nan)
    pool = state.astype(np.float64)
    for b, slot in enumerate(state_indices):
        rows = range(qo_indptr[b], qo_indptr[b + 1])
        for h in range(heads):
            fresh = has_initial_state is not None and not has_initial_state[b]
            current = np.zeros(pool.shape[2:]) if fresh or slot < 0 else pool[slot, h]
            for t in rows:
                if slot < 0:
                    out[t, h] = 0
                    continue
                query, key, value = (x[t, h].astype(np.float64) for x in (q, k, v))
                out[t, h], current = step(current, query, key, value, float(slopes[h]), scale)
            if slot >= 0 and len(rows) > 0:
                pool[slot, h] = current
    return out, pool


def decode(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    state: NDArray,
    state_indices: NDArray,
    slopes: NDArray,
    *,
    scale: float | None = None,
) -> tuple[Array, Array]:
    """One token per request: extend of B requests of length 1, arguments and results as there."""
    indptr = np.arange(len(state_indices) + 1)
    return extend(q, k, v, state, state_indices, indptr, slopes, scale=scale)
