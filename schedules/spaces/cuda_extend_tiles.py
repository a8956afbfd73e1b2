"""Sizes of the extend kernel on Hopper: what its tiles, rings and roles take of shared memory and registers."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import tirx

from tilewright.schedules.workload import Workload

ROWS = 64  # of a consumer warpgroup: the height of one wgmma
BLOCK = 64  # columns of a swizzled block: 128 bytes
MULTIPROCESSORS = 132  # of the largest Hopper GPU: thread blocks of a persistent grid
# Registers a thread (producer, consumer) by number of consumers: setmaxnreg deals out what the CTA starts with.
_REGISTERS = {1: (56, 240), 2: (72, 216), 3: (56, 152)}
# What consumers look up of a unit in shared memory.
FIRST, CLEAR_FROM, CLEAR_TO, POSITION, END, TILES, TOKENS, ROW, HEAD, PARTIAL = range(10)
FACTS = 12


def padded(dim: int) -> int:
    """Columns of a row in shared memory: whole blocks."""
    return -(-dim // BLOCK) * BLOCK


def place(row: tirx.Expr, chunk: tirx.Expr, rows: int) -> tirx.Expr:
    """Where the 16-byte chunk of a row lies in a tile of `rows` rows, in elements: swizzled as wgmma reads it."""
    return (chunk // 8) * (rows * BLOCK) + row * BLOCK + ((chunk % 8) ^ (row % 8)) * 8


class Tiles:
    """Everything that follows from a workload and the decisions of its space.

    Attributes:
        group, dim, dim_vo: query heads a KV head, head dims.
        rows, keys, stages: of an item's block, of a tile, of the rings.
        consumers, threads: warpgroups that multiply; threads of a CTA.
        few, many: registers of a thread of the producer and of a consumer.
        k_tile, v_tile, k_ring, v_ring, elements: of shared memory, in 16-bit elements: sizes, where rings begin, all.
        share, turn, held: rows of a tile that a producer warp copies, how many side by side, lookups a lane holds.
        q_full .. unit_empty, barriers: where the mbarriers of each kind begin, and how many there are.
    """

    def __init__(self, workload: Workload, decisions: Mapping[str, int]) -> None:
        self.group = workload.group or 1
        self.dim, self.dim_vo = workload.head_dim_qk or 0, workload.head_dim_vo or 0
        self.rows, self.keys, self.stages = decisions["rows"], decisions["keys"], decisions["stages"]
        self.pingpong, self.persistent = bool(decisions["pingpong"]), bool(decisions["persistent"])
        self.lazy = bool(decisions["lazy"])
        self.consumers = self.rows // ROWS
        self.threads = 128 * (self.consumers + 1)
        self.few, self.many = _REGISTERS[self.consumers]
        self.k_tile, self.v_tile = self.keys * padded(self.dim), self.keys * padded(self.dim_vo)
        self.k_ring = self.rows * padded(self.dim)
        self.v_ring = self.k_ring + self.stages * self.k_tile
        self.elements = self.v_ring + self.stages * self.v_tile
        self.share = self.keys // 4
        chunks = self.dim // 8
        # A producer warp takes `turn` rows of every 4 * turn. Where that is what a pass of the warp copies, rows of a
        # lane are a multiple of eight apart, so that all its chunks have one swizzle and cost no registers.
        self.turn = 32 // chunks if self.dim == self.dim_vo and 32 % chunks == 0 else self.share
        self.held = -(-self.share // 32)
        counts = [self.consumers, self.consumers, *[self.stages] * 4, 2, 2]
        begins = [sum(counts[:i]) for i in range(len(counts) + 1)]
        self.q_full, self.q_empty, self.k_full, self.k_empty, self.v_full, self.v_empty = begins[:6]
        self.unit_full, self.unit_empty, self.barriers = begins[6:]

    def passes(self, dim: int) -> int:
        """16-byte chunks of a tile's rows of `dim` columns that a producer thread copies."""
        return self.share * (dim // 8) // 32

    @property
    def copies_evenly(self) -> bool:
        """Whether the chunks of a tile's rows go round among the producer's lanes."""
        return all(self.share * (dim // 8) % 32 == 0 for dim in (self.dim, self.dim_vo))

    @property
    def fits_registers(self) -> bool:
        """Whether a consumer's scores, values, packed probabilities, state and addresses fit (an estimate)."""
        return self.keys // 2 + self.dim_vo // 2 + self.keys // 4 + 28 <= self.many
