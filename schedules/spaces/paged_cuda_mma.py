"""The decisions of extend by mma.sync, which serves what cuda_extend does not; cuda_extend_mma makes the kernel."""

from __future__ import annotations

import tvm

from tilewright.schedules.spaces import Decisions, Space, UnsupportedWorkload
from tilewright.schedules.spaces.cuda_extend_mma import extend
from tilewright.schedules.spaces.cuda_extend_mma_tiles import Tiles, padded
from tilewright.schedules.targets import Target
from tilewright.schedules.workload import Workload

_CHOICES = {
    "rows": (16, 32, 64, 128),
    "warps": (2, 4, 8, 16),
    "columns": (1, 2, 4),
    "keys": (16, 32, 64, 128),
    "stages": (1, 2, 3, 4),
}
# Untuned: the first that is legal, in the order of _CHOICES.
_DEFAULTS = (
    (128, 4, 1, 128, 2),
    (128, 4, 1, 64, 2),
    (128, 4, 1, 32, 2),
    (128, 8, 1, 64, 2),
    (64, 4, 1, 64, 2),
    (64, 4, 1, 32, 2),
    (64, 8, 2, 32, 2),
    (32, 4, 2, 32, 2),
    (16, 2, 2, 32, 1),
)
_GENERAL_DEFAULTS = ((64, 4, 1, 32, 2), (64, 8, 2, 32, 2), (32, 4, 2, 32, 2))
_REGISTERS = 65536  # of a multiprocessor
_MOST_REGISTERS = 255  # of a thread
_SMALL = 1024  # bytes of shared memory that the system takes of a CTA


def space(workload: Workload, target: Target) -> Space:
    """Decisions: query rows of an item, warps, warps that share rows, keys of a tile, stages of the ring.

    Args:
        workload: operator "paged_extend", 16-bit; fixed sizes of any group, or general: any group and head dims up to
            catalog.GPU_GENERAL_DIM.
        target: of NVIDIA's, sm_80 or later.

    Raises:
        UnsupportedWorkload: rows that are not whole 16 bytes, or more than shared memory holds.
    """
    shared_memory = int(target.tvm["max_shared_memory_per_block"])
    where = f"{workload.name} for {target.name}: head dims"
    dims = (workload.head_dim_qk, workload.head_dim_vo)
    whole = 8 if workload.kv_dtype is None else 16
    if any(dim is not None and dim % whole for dim in dims):
        raise UnsupportedWorkload(f"{where}: expected multiples of {whole} (rows of whole 16 bytes), got {dims}")

    def legal(n: Decisions) -> bool:
        inside = set(n) == set(_CHOICES) and all(n[name] in _CHOICES[name] for name in n)
        return inside and _fits(workload, Tiles.of(workload, n), shared_memory)

    untuned = _GENERAL_DEFAULTS if workload.general else _DEFAULTS
    default = next(filter(legal, (dict(zip(_CHOICES, n, strict=True)) for n in untuned)), None)
    if default is None:
        raise UnsupportedWorkload(f"{where}: queries and tiles of {dims} do not fit into shared memory and registers")

    def plan(n: Decisions) -> dict[str, int]:
        z = Tiles.of(workload, n)
        ctas = _resident(workload, z, shared_memory)
        return {"block_q": z.block_q, "chunk": z.keys, "min_split": max(8 * z.keys, 256), "max_split": 0, "ctas": ctas}

    return Space(
        choices=_CHOICES,
        default=default,
        legal=legal,
        module=lambda n: tvm.IRModule({workload.operator: extend(workload, n)}),
        plan=plan,
    )


def registers(workload: Workload, z: Tiles) -> int:
    """Estimate of a thread's registers: scores, values, state of its rows, addresses."""
    extra = 24 if workload.tree or workload.general else 0
    if workload.kv_dtype is not None:
        extra += max(z.keys - 64, 0) // 16
    return z.blocks * ((z.keys + padded(z.dim_vo)) // z.columns // 2 + 12) + 40 + extra


def _bytes(z: Tiles) -> int:
    return 2 * z.elements + z.side_bytes


def _fits(workload: Workload, z: Tiles, shared_memory: int) -> bool:
    """Whether the parts of a tile are whole products, and a CTA finds the registers and the shared memory."""
    return (
        z.warps % z.columns == 0
        and z.rows * z.columns % (16 * z.warps) == 0
        and z.keys % (16 * z.columns) == 0
        and z.keys <= z.threads
        and padded(z.dim_vo) % (16 * z.columns) == 0
        and registers(workload, z) <= min(_REGISTERS // z.threads, _MOST_REGISTERS + 1)
        and _bytes(z) + _SMALL <= shared_memory
    )


def _resident(workload: Workload, z: Tiles, shared_memory: int) -> int:
    """CTAs that a multiprocessor holds at once."""
    held = min(-(-registers(workload, z) // 8) * 8 + 16, _MOST_REGISTERS + 1)
    by_memory = (shared_memory + _SMALL) // (_bytes(z) + _SMALL)
    return max(min(by_memory, _REGISTERS // (z.threads * held)), 1)
