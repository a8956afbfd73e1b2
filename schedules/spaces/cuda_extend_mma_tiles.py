"""Sizes and places of the tiles of extend by mma.sync, as they follow from a workload and its decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvm import tirx

from tilewright.schedules.catalog import GPU_GENERAL_DIM
from tilewright.schedules.workload import Workload

# What the kernel notes in shared memory: numbers that are used once a tile, more than registers hold.
NOTES = range(13)
TABLE_ROW, COLUMN, FRESH, OUT_ROW, WHOLE, ROWS, FIRST, SPLIT, NEW_BEGIN, LAST, ALL_LO, ALL_HI, MASKED = NOTES


def padded(dim: int) -> int:
    """Columns that products go over: whole steps of 16."""
    return -(-dim // 16) * 16


def pitch(dim: int) -> int:
    """Elements from one row of a tile in shared memory to the next."""
    return padded(dim) if padded(dim) % 64 == 0 else padded(dim) + 8


def place(row: tirx.Expr, chunk: tirx.Expr, dim: int) -> tirx.Expr:
    """Where the 16-byte chunk of a row lies in a tile, in elements: eight rows' chunks never share a bank."""
    if padded(dim) % 64 == 0:
        return row * padded(dim) + (chunk ^ (row % 8)) * 8
    return row * pitch(dim) + chunk * 8


@dataclass(frozen=True)
class Tiles:
    """Sizes of one kernel.

    Attributes:
        rows: query rows (tokens times group) of a CTA. warps: of a CTA. columns: warps that share rows.
        keys: of a tile. stages: of the ring of tiles.
        dim, dim_vo: head dims that there is room for. group: None in a general kernel.
    """

    rows: int
    warps: int
    columns: int
    keys: int
    stages: int
    dim: int
    dim_vo: int
    group: int | None

    @staticmethod
    def of(workload: Workload, decisions: Mapping[str, int]) -> Tiles:
        """Of a workload and the decisions of its space."""
        dims = (workload.head_dim_qk or GPU_GENERAL_DIM, workload.head_dim_vo or GPU_GENERAL_DIM)
        return Tiles(**decisions, dim=dims[0], dim_vo=dims[1], group=workload.group)

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return 32 * self.warps

    @property
    def blocks(self) -> int:
        """Blocks of 16 rows that a warp has."""
        return self.rows * self.columns // (16 * self.warps)

    @property
    def warp_keys(self) -> int:
        """Keys of a tile for which a warp works out scores."""
        return self.keys // self.columns

    @property
    def warp_values(self) -> int:
        """Columns of the values that a warp adds up."""
        return padded(self.dim_vo) // self.columns

    @property
    def block_q(self) -> int:
        """Most query tokens of an item; where their rows are more than a CTA's, several CTAs share them."""
        return self.rows if self.group is None else max(self.rows // self.group, 1)

    @property
    def step(self) -> int:
        """Columns that the scores go over at a time: beyond the head dim there are zeros."""
        return 64 if self.group is None else 16

    @property
    def ring(self) -> int:
        """Where the ring begins, in elements of shared memory; the queries lie before it."""
        return self.rows * pitch(self.dim)

    @property
    def values(self) -> int:
        """Where a stage's values begin in it; its keys lie before them."""
        return self.keys * pitch(self.dim)

    @property
    def stage(self) -> int:
        """Elements of a stage."""
        return self.values + self.keys * pitch(self.dim_vo)

    @property
    def shared(self) -> int:
        """Where the probabilities begin that warps share."""
        return self.ring + self.stages * self.stage

    @property
    def elements(self) -> int:
        """Elements of 16 bits in dynamic shared memory."""
        return self.shared + (self.rows * pitch(self.keys) if self.columns > 1 else 0)

    @property
    def side_bytes(self) -> int:
        """Bytes of shared memory besides: addresses of rows, notes, positions of rows, what warps share."""
        words = len(NOTES) + self.rows * (self.columns + 1)
        return 32 * (self.keys + 1) + (words + 1) // 2 * 8
