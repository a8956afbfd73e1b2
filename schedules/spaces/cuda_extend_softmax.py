# mypy: ignore-errors
# (TVMScript is parsed from its text, not run: its names and annotations are not Python's.)
"""A consumer of the extend kernel between its products: the softmax of a tile's scores, and what a unit writes."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from tilewright.schedules.intrinsics.cuda import (
    PACK,
    any_lane,
    exp2,
    log2,
    quad_max,
    quad_sum,
    store_two,
    store_word,
    tanh,
)
from tilewright.schedules.paged_attention.definition import (
    finite_or_zero,
    masked,
    natural_lse,
    normaliser,
    score,
    visible_bounds,
)
from tilewright.schedules.spaces.cuda_extend_tiles import (
    END,
    FIRST,
    HEAD,
    PARTIAL,
    POSITION,
    ROW,
    TOKENS,
    Tiles,
)
from tilewright.schedules.vector_math import LOG2_E

LAG = 8.0
"""Binary digits by which a row's running maximum may stay behind with `lazy`: sums grow by 2**8 at most."""


def fold(z: Tiles) -> Callable[..., None]:
    """Statements that turn the scores S of tile j into probabilities and take them into the state (m, l).

    `keep` becomes what the values of earlier tiles must be multiplied with; row0 is the thread's first row of two.
    """
    NS, BN, G = z.keys // 2, z.keys, z.group

    @T.inline
    def softmax(S, m, l, keep, j, unit, facts, clear_from, clear_to, row0, lane, plain, factor, options):
        if T.Not(plain):
            for i in T.unroll(NS):
                S[i] = score(S[i], options[0], options[1], options[2], tanh)
        if T.Or(j < clear_from, j >= clear_to):
            # Bounds as offsets from the thread's first key; each is looked at only where it cuts into the tile.
            begin: T.int32 = facts[unit, FIRST] + j * BN + (lane % 4) * 2
            for h in T.unroll(2):
                position: T.int32 = facts[unit, POSITION] + T.min((row0 + h * 8) // G, facts[unit, TOKENS] - 1)
                lo: T.int32 = visible_bounds(position, facts[unit, END], options[3], options[4])[0] - begin
                hi: T.int32 = visible_bounds(position, facts[unit, END], options[3], options[4])[1] - begin
                if j >= clear_to:
                    for i in T.unroll(NS // 4):
                        for e in T.unroll(2):
                            S[i * 4 + h * 2 + e] = masked(S[i * 4 + h * 2 + e], i * 8 + e, T.int32(-1), hi)
                if j < clear_from:
                    for i in T.unroll(NS // 4):
                        for e in T.unroll(2):
                            S[i * 4 + h * 2 + e] = masked(S[i * 4 + h * 2 + e], i * 8 + e, lo, T.int32(BN))
        # Two chains a row, both rows at a time: one after the other the instructions would wait for each other.
        top = T.alloc_local([4], "float32")
        total = T.alloc_local([4], "float32")
        shift = T.alloc_local([2], "float32")
        for h in T.unroll(2):
            top[h * 2] = T.max(m[h], S[h * 2])
            top[h * 2 + 1] = S[h * 2 + 1]
        for i in T.unroll(NS // 4 - 1):
            for n in T.unroll(4):
                top[n] = T.max(top[n], S[i * 4 + 4 + n])
        for h in T.unroll(2):
            top[h * 2] = quad_max(T.max(top[h * 2], top[h * 2 + 1]))
        for h in T.unroll(2):
            if z.lazy:
                top[h * 2 + 1] = T.Select((top[h * 2] - m[h]) * factor > T.float32(LAG), top[h * 2], m[h])
                shift[h] = finite_or_zero(top[h * 2 + 1]) * factor
                # Exactly 1 where nothing changes; the difference of two roundings would not be.
                keep[h] = T.Select(top[h * 2 + 1] == m[h], T.float32(1), exp2(m[h] * factor - shift[h]))
                m[h] = top[h * 2 + 1]
            else:
                shift[h] = finite_or_zero(top[h * 2]) * factor
                keep[h] = exp2(m[h] * factor - shift[h])
                m[h] = top[h * 2]
        for n in T.unroll(4):
            S[n] = exp2(S[n] * factor - shift[n // 2])
            total[n] = S[n]
        for i in T.unroll(NS // 4 - 1):
            for n in T.unroll(4):
                S[i * 4 + 4 + n] = exp2(S[i * 4 + 4 + n] * factor - shift[n // 2])
                total[n] = total[n] + S[i * 4 + 4 + n]
        for h in T.unroll(2):
            l[h] = l[h] * keep[h] + (total[h * 2] + total[h * 2 + 1])

    return softmax


def rescale(z: Tiles) -> Callable[..., None]:
    """Statements that multiply the values O of earlier tiles with `keep`; with `lazy` only where a row needs it."""
    NO = z.dim_vo // 2

    @T.inline
    def multiply(O, keep):
        for i in T.unroll(NO // 4):
            for e in T.unroll(2):
                O[i * 4 + e] = O[i * 4 + e] * keep[0]
                O[i * 4 + 2 + e] = O[i * 4 + 2 + e] * keep[1]

    @T.inline
    def where_needed(O, keep):
        if z.lazy:
            # Multiplying with 1 changes no bit, so what other rows of the warp need shows in none.
            if any_lane(T.Or(keep[0] != T.float32(1), keep[1] != T.float32(1))):
                multiply(O, keep)
        else:
            multiply(O, keep)

    return where_needed


def store(z: Tiles, dtype: str) -> Callable[..., None]:
    """Statements that write a unit's rows: out and lse, or the partial state."""
    NO, G, pack = z.dim_vo // 2, z.group, PACK[dtype]

    @T.inline
    def write(O, m, l, unit, facts, row0, lane, factor, sinks, out, lse, part_o, part_lse):
        for h in T.unroll(2):
            total: T.float32 = quad_sum(l[h])
            r: T.int32 = row0 + h * 8
            head: T.int32 = facts[unit, HEAD] * G + r % G
            part: T.int32 = facts[unit, PARTIAL]
            if r < facts[unit, TOKENS] * G:
                sink: T.float32 = T.Select(part < 0, sinks[head] * T.float32(LOG2_E), T.float32(float("-inf")))
                norm: T.float32 = normaliser(m[h] * factor, total, sink, exp2)
                logarithm: T.float32 = natural_lse(m[h] * factor, total, log2)
                if part < 0:
                    row: T.int32 = facts[unit, ROW] + r // G
                    for i in T.unroll(NO // 4):
                        store_word(
                            out.ptr_to([row, head, i * 8 + (lane % 4) * 2]),
                            pack(O[i * 4 + h * 2] * norm, O[i * 4 + h * 2 + 1] * norm),
                        )
                    if lane % 4 == 0:
                        lse[row, head] = logarithm
                else:
                    for i in T.unroll(NO // 4):
                        store_two(
                            part_o.ptr_to([part + r // G, head, i * 8 + (lane % 4) * 2]),
                            O[i * 4 + h * 2] * norm,
                            O[i * 4 + h * 2 + 1] * norm,
                        )
                    if lane % 4 == 0:
                        part_lse[part + r // G, head] = logarithm

    return write
