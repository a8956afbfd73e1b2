# mypy: ignore-errors
# (TVMScript is parsed from its text, not run: its names and annotations are not Python's.)
"""The producer of the extend kernel: copies the rows of a tile into its stage of a ring."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from tilewright.schedules.intrinsics.cuda import copy_row16, copy_rows, moved, shuffle
from tilewright.schedules.spaces.cuda_extend_tiles import BLOCK, Tiles, place

POOL, MIXED, NEW = range(3)
"""Where the keys of a tile are: all in the pool, or some, or all among the new rows."""


def look_up(z: Tiles) -> Callable[..., None]:
    """Statements that find the rows of a tile in their tensors: `ahead` gets those of other keys in each lane.

    The tile begins at key `begin`; keys before `seen` and after `last` are not looked at, the next that is stands for
    them. Keys below `prefix` are in the pool, by the page table; key j of others is row j + new_row of the new rows.
    """

    @T.inline
    def find(ahead, begin, seen, last, prefix, new_row, req_to_token, table_row, column, lane, warp):
        for i in T.unroll(z.held):
            n: T.int32 = (i * 32 + lane) // z.turn * (4 * z.turn) + warp * z.turn + (i * 32 + lane) % z.turn
            key: T.int32 = T.min(T.max(begin + n, seen), last)
            if key < prefix:
                ahead[i] = req_to_token[table_row, column + T.Cast("int64", key)]
            else:
                ahead[i] = key + new_row

    return find


def gather(z: Tiles, dim: int, source: int) -> Callable[..., None]:
    """Statements that copy a tile's rows of `dim` columns by cp.async; the rows are those that `held` has of each lane.

    Of `sources`, tensor `source` is the pool's and `source + 2` that of the new rows. `kind` says where the tile's keys
    are; of a mixed one the first `old` are in the pool. `rows` and `addresses` are registers to work with.
    """
    C, PASSES, BN, TURN = dim // 8, z.passes(dim), z.keys, z.turn

    @T.inline
    def copy(to, kind, old, sources, hk, held, rows, addresses, lane, warp):
        # All rows before the first copy: a shuffle between copies would make each wait for the one before.
        for i in T.unroll(PASSES):
            rows[i] = shuffle(held[i * 32 // C // 32], (i * 32 + lane) // C % 32)
        if kind == MIXED:
            for i in T.unroll(PASSES):
                n: T.int32 = (i * 32 + lane) // C
                row: T.int32 = n // TURN * (4 * TURN) + warp * TURN + n % TURN
                which: T.int32 = source + T.Select(row < old, 0, 2)
                copy_row16(
                    moved(to, place(row, (i * 32 + lane) % C, BN) * 2),
                    sources[which, 0] + T.Cast("int64", hk) * sources[which, 2],
                    sources[which, 1],
                    rows[i],
                    (i * 32 + lane) % C * 16,
                )
        else:
            start: T.int64 = sources[source + kind, 0] + T.Cast("int64", hk) * sources[source + kind, 2]
            stride: T.int64 = sources[source + kind, 1]
            if TURN < z.share:
                copy_rows(
                    4 * TURN * BLOCK * 2,
                    moved(to, place(warp * TURN + lane // C, lane % C, BN) * 2),
                    start + T.Cast("int64", lane % C * 16),
                    stride,
                    [rows[i] for i in range(PASSES)],
                    addresses,
                )
            else:
                for i in T.unroll(PASSES):
                    copy_row16(
                        moved(to, place(warp * TURN + (i * 32 + lane) // C, (i * 32 + lane) % C, BN) * 2),
                        start,
                        stride,
                        rows[i],
                        (i * 32 + lane) % C * 16,
                    )

    return copy
