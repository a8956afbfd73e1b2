"""The decisions of the paged operators on NVIDIA GPUs; cuda_decode, cuda_extend and cuda_states make the kernels."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import tirx

from tilewright.schedules.spaces import Decisions, Space, UnsupportedWorkload, cuda_decode, cuda_extend, cuda_states
from tilewright.schedules.spaces.cuda_extend_tiles import ROWS, Tiles
from tilewright.schedules.targets import Target
from tilewright.schedules.workload import Workload

_STATES: dict[str, Callable[[Workload, bool], tirx.PrimFunc]] = {
    "merge": cuda_states.merge,
    "write_kv": cuda_states.write_kv,
}
# Untuned extend: the first that is legal of (rows, keys, stages, pingpong).
_EXTEND_DEFAULTS = ((192, 80, 2, 0), (128, 128, 2, 1), (128, 96, 2, 1), (128, 64, 2, 1), (64, 64, 2, 0), (64, 48, 2, 0))
_BUSY_WARPS = 4  # of decode, whose loads in flight saturate a multiprocessor's share of the memory
_SMALL = 1024  # bytes of shared memory beside the rings: barriers, and what the system takes of a CTA


def space(workload: Workload, target: Target) -> Space:
    """The space of a specialised kernel in 16 bits.

    Raises:
        UnsupportedWorkload: f32, a general kernel, or sizes that do not fill the tensor cores' operands.
    """
    where = f"{workload.name} for {target.name}"
    if workload.dtype == "f32":
        raise UnsupportedWorkload(f"{where}: tensor cores multiply bf16 and fp16, got f32")
    if workload.operator in _STATES:
        make = _STATES[workload.operator]
        return Space(
            choices={},
            default={},
            legal=lambda decisions: not decisions,
            module=lambda decisions: tvm.IRModule({workload.operator: make(workload, _hopper(target))}),
            plan=lambda decisions: {},
        )
    if workload.general:
        raise UnsupportedWorkload(f"{where}: expected a fixed group and head dims, got a general kernel")
    dims = (workload.head_dim_qk or 0, workload.head_dim_vo or 0)
    if any(dim % 16 or dim > 256 for dim in dims):
        raise UnsupportedWorkload(f"{where}: head dims: expected multiples of 16 up to 256, got {dims}")
    if workload.operator == "paged_decode":
        return _decode(workload, target, where)
    return _extend(workload, target, where)


def _decode(workload: Workload, target: Target, where: str) -> Space:
    """Decisions: warps of a CTA, stages of a warp's ring, fewest and most keys of an item."""
    if (workload.group or 0) > cuda_decode.MOST_GROUP:
        raise UnsupportedWorkload(
            f"{where}: group: expected at most {cuda_decode.MOST_GROUP} query heads a KV head, got {workload.group}"
        )
    choices = {
        "warps": (1, 2, 4, 8),
        "stages": (2, 3, 4, 6),
        "min_split": (128, 256, 512),
        "max_split": (0, 2048, 4096, 8192),
    }

    def legal(n: Decisions) -> bool:
        if not _inside(n, choices):
            return False
        return cuda_decode.ring_elements(workload, n["warps"], n["stages"]) * 2 + _SMALL <= _shared_memory(target)

    return Space(
        choices=choices,
        default={"warps": 2, "stages": 3, "min_split": 256, "max_split": 0},
        legal=legal,
        module=lambda n: tvm.IRModule({workload.operator: cuda_decode.decode(workload, n, _hopper(target))}),
        plan=lambda n: {
            "block_q": 1,
            "chunk": cuda_decode.TILE * n["warps"],
            "min_split": n["min_split"],
            "max_split": n["max_split"],
            "ctas": _resident(target, n["warps"], cuda_decode.ring_elements(workload, n["warps"], n["stages"]) * 2),
        },
    )


def _resident(target: Target, warps: int, ring: int) -> int:
    """Thread blocks of decode for each multiprocessor: enough to keep the memory busy, where it has room for them.

    More would fit, but each would only be slower, and the planner would cut contexts finer for them.
    """
    return max(min((_shared_memory(target) + _SMALL) // (ring + _SMALL), _BUSY_WARPS // warps), 1)


def _extend(workload: Workload, target: Target, where: str) -> Space:
    """Decisions: query rows of an item, keys of a tile, stages of the rings, whether consumers take turns."""
    if not _hopper(target):
        raise UnsupportedWorkload(f"{where}: extend needs warpgroup products (sm_90a)")
    group = workload.group or 1
    if group > ROWS:
        raise UnsupportedWorkload(f"{where}: group: expected at most {ROWS}, got {group}")
    choices = {
        "rows": (64, 128, 192),
        "keys": (48, 64, 80, 96, 112, 128, 144, 160, 176),
        "stages": (2, 3),
        "pingpong": (0, 1),
        "persistent": (0, 1),
        "lazy": (0, 1),
    }

    def legal(n: Decisions) -> bool:
        if not _inside(n, choices) or (n["pingpong"] and n["rows"] != 2 * ROWS):
            return False
        tiles = Tiles(workload, n)
        fits = tiles.elements * 2 + _SMALL <= _shared_memory(target)
        return fits and tiles.copies_evenly and tiles.fits_registers

    default = next(
        n
        for rows, keys, stages, pingpong in _EXTEND_DEFAULTS
        if legal(n := {"rows": rows, "keys": keys, "stages": stages, "pingpong": pingpong, "persistent": 1, "lazy": 1})
    )
    return Space(
        choices=choices,
        default=default,
        legal=legal,
        module=lambda n: tvm.IRModule({workload.operator: cuda_extend.extend(workload, n)}),
        plan=lambda n: {"block_q": n["rows"] // group, "chunk": n["keys"], "min_split": 8 * n["keys"], "max_split": 0},
    )


def _inside(n: Decisions, choices: dict[str, tuple[int, ...]]) -> bool:
    return set(n) == set(choices) and all(n[name] in choices[name] for name in n)


def _shared_memory(target: Target) -> int:
    return int(target.tvm["max_shared_memory_per_block"])


def _hopper(target: Target) -> bool:
    return target.features == ("sm_90a",)
