"""Checked mode (TILEWRIGHT_CHECK=1): index values, read on the host before anything is launched or written.

The kernels trust their indices. In checked mode a wrong one is a ValueError naming the argument, the place and the
value; nothing has been written then. Padding that no kernel reads (table entries past a request's keys, prefix entries
that a window hides, slots of new rows) may hold anything.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from tilewright.runtime.planner import OFF, Lengths


def _host(index: Tensor) -> np.ndarray:
    return index.detach().cpu().numpy().astype(np.int64)


def _first(name: str, values: np.ndarray, bad: np.ndarray, expected: str) -> None:
    if bad.any():
        where = tuple(int(part) for part in np.argwhere(bad)[0])
        place = ", ".join(map(str, where))
        raise ValueError(f"{name}[{place}]: got {int(values[where])}, expected {expected}")


def check_table(
    lengths: Lengths,
    *,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    kv_start: Tensor | None,
    num_slots: int,
    page_size: int,
    window: int,
    from_pool: bool,
    length_name: str,
) -> None:
    """Every key that would be read from the buffers: its table row, column, slot, and the promise of page_size."""
    requests, width = req_to_token.shape
    rows = _host(req_pool_indices)
    _first("req_pool_indices", rows, (rows < 0) | (rows >= requests), f"0..{requests - 1}, a row of req_to_token")
    start = np.zeros_like(rows) if kv_start is None else _host(kv_start)
    _first("kv_start", start, start < 0, ">= 0")
    first_pos = lengths.kv_lens - lengths.q_lens
    # Keys [low, high) of each request come from the buffers.
    high = lengths.kv_lens if from_pool else first_pos
    high = np.where(lengths.q_lens > 0, high, 0)
    low = np.clip(first_pos - window + 1, 0, high)
    _first(length_name, lengths.kv_lens, start + high > width, f"at most {width} - kv_start, the width of req_to_token")
    columns = np.arange(width)
    visible = (columns >= (start + low)[:, None]) & (columns < (start + high)[:, None])
    table = _host(req_to_token[req_pool_indices.long()]) if len(rows) else np.zeros((0, width), np.int64)
    bad = visible & ((table < 0) | (table >= num_slots))
    if bad.any():
        request, column = (int(part) for part in np.argwhere(bad)[0])
        raise ValueError(
            f"req_to_token[{rows[request]}, {column}] (request {request}): got {table[request, column]}, "
            f"expected 0..{num_slots - 1}, a slot of k_buffer"
        )
    if page_size > 1:
        _check_pages(table, visible, start, page_size)


def _check_pages(table: np.ndarray, visible: np.ndarray, start: np.ndarray, page_size: int) -> None:
    position = np.arange(table.shape[1])[None, :] - start[:, None]
    same_page = visible[:, 1:] & visible[:, :-1] & (position[:, 1:] % page_size != 0)
    broken = same_page & (table[:, 1:] != table[:, :-1] + 1)
    if broken.any():
        request, column = (int(part) for part in np.argwhere(broken)[0])
        raise ValueError(
            f"page_size: got {page_size}, but keys {column - start[request]} and {column - start[request] + 1} of "
            f"request {request} are in slots {table[request, column]} and {table[request, column + 1]}"
        )


def check_loc(loc: Tensor, num_slots: int) -> None:
    """Slots to write: -1 (skipped) or in range. The same slot twice is allowed: the last row wins."""
    values = _host(loc)
    _first("loc", values, (values < -1) | (values >= num_slots), f"-1 or 0..{num_slots - 1}, a slot of k_buffer")


def check_plan(name: str, given: Tensor, planned: np.ndarray) -> None:
    """A plan must have been made for these very lengths."""
    values = _host(given)
    _first(name, values, values != planned, "the length that the plan was made for")


def check_states(state_indices: Tensor, num_slots: int) -> None:
    """State slots: -1 or in range, and no slot twice (two requests would race on it)."""
    values = _host(state_indices)
    _first("state_indices", values, (values < -1) | (values >= num_slots), f"-1 or 0..{num_slots - 1}, a slot of state")
    used, counts = np.unique(values[values >= 0], return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"state_indices: slot {used[counts > 1][0]} occurs twice, expected one request per state")


def check_slopes(slopes: Tensor) -> None:
    """Decay rates: a negative one grows without bound, and what is no number makes every state one."""
    values = slopes.detach().cpu().numpy()
    bad = ~((values >= 0) & np.isfinite(values))
    if bad.any():
        head = int(np.flatnonzero(bad)[0])
        raise ValueError(f"slopes[{head}]: got {values[head]:g}, expected a finite decay rate >= 0")


def check_indptr(qo_indptr: Tensor, tokens: int) -> None:
    """Query row offsets: not decreasing, within q."""
    values = _host(qo_indptr)
    _first("qo_indptr", values, (values < 0) | (values > tokens) | (values > OFF), f"0..{tokens}, a row of q")
    if (np.diff(values) < 0).any():
        at = int(np.flatnonzero(np.diff(values) < 0)[0])
        raise ValueError(f"qo_indptr[{at + 1}]: got {values[at + 1]} after {values[at]}, expected no decrease")
