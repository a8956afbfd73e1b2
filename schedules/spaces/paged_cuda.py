"""The decisions of the paged operators on NVIDIA GPUs; cuda_decode, cuda_extend and cuda_states make the kernels."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import tirx

from tilewright.schedules.spaces import (
    Decisions,
    Space,
    UnsupportedWorkload,
    cuda_decode,
    cuda_decode_wide,
    cuda_extend,
    cuda_states,
)
from tilewright.schedules.spaces.cuda_extend_tiles import ROWS, Tiles
from tilewright.schedules.spaces.paged_cuda_mma import space as mma_space
from tilewright.schedules.targets import Target
from tilewright.schedules.workload import Workload

_STATES: dict[str, Callable[[Workload, bool], tirx.PrimFunc]] = {
    "merge": cuda_states.merge,
    "write_kv": cuda_states.write_kv,
}
# Untuned extend: the first that is legal of (rows, keys, stages, pingpong).
_EXTEND_DEFAULTS = ((192, 80, 2, 0), (128, 128, 2, 1), (128, 96, 2, 1), (128, 64, 2, 1), (64, 64, 2, 0), (64, 48, 2, 0))
# What extend does by the warpgroup products of Hopper; cuda_extend_mma does the rest.
_WARPGROUP_DIMS, _WARPGROUP_MOST_GROUP = range(64, 193, 16), 64
_BUSY_WARPS = 8  # of decode, whose loads in flight saturate a multiprocessor's share of the memory
_MOST_WARPS = 16  # of a multiprocessor, by the registers that decode takes
# The largest head dim of which one warp can hold all, and up to which it does so with registers to spare.
_NARROW, _COMFORTABLE = 256, 192
_SMALL = 1024  # bytes of shared memory beside the rings: barriers, and what the system takes of a CTA


def space(workload: Workload, target: Target) -> Space:
    """The space of a kernel in 16 bits.

    Raises:
        UnsupportedWorkload: f32, a general kernel but of extend, or sizes that the operator's kernel does not take.
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
    if workload.operator == "paged_extend" and not _warpgroups(workload, target):
        return mma_space(workload, target)
    if workload.general:
        raise UnsupportedWorkload(f"{where}: expected a fixed group and head dims, got a general kernel")
    dims = (workload.head_dim_qk or 0, workload.head_dim_vo or 0)
    decode = workload.operator == "paged_decode"
    whole = all(dim % 16 == 0 for dim in dims)
    wide = decode and (max(dims) > _NARROW or (max(dims) > _COMFORTABLE and whole and not workload.kv_dtype))
    if wide and workload.kv_dtype:
        raise UnsupportedWorkload(f"{where}: head dims: expected at most {_NARROW} with an fp8 pool, got {dims}")
    most = (cuda_decode_wide.MOST_HEAD_DIM_QK, cuda_decode_wide.MOST_HEAD_DIM_VO) if wide else (_NARROW, _NARROW)
    multiple = 8 if decode and not wide and not workload.kv_dtype else 16
    if any(dim % multiple or dim > limit for dim, limit in zip(dims, most, strict=True)):
        raise UnsupportedWorkload(f"{where}: head dims: expected multiples of {multiple} up to {most}, got {dims}")
    if wide:
        return _wide_decode(workload, target)
    if workload.operator == "paged_decode":
        return _decode(workload, target, where)
    return _extend(workload, target, where)


def _decode(workload: Workload, target: Target, where: str) -> Space:
    """Decisions: warps, stages of a ring, fewest and most keys of an item, keys of a tile, CTAs of a multiprocessor."""
    choices = {
        "warps": (1, 2, 4, 8),
        "stages": (2, 3, 4, 6),
        "min_split": (128, 256, 512),
        "max_split": (0, 2048, 4096, 8192),
        "keys": (16, 32),
        "bulk": (0, 1),
        "ctas": (1, 2, 3, 4, 6, 8),
    }

    def legal(n: Decisions) -> bool:
        if not _inside(n, choices) or (n["bulk"] and not _hopper(target)):
            return False
        used = cuda_decode.shared_elements(workload, n) * 2
        if used + _SMALL > _shared_memory(target):
            return False
        return n["ctas"] <= _resident(target, n["warps"], used, _MOST_WARPS)

    def begin(warps: int, stages: int) -> dict[str, int]:
        n = {"warps": warps, "stages": stages, "min_split": 512, "max_split": 0, "keys": 16, "bulk": 0}
        return n | {"ctas": _resident(target, warps, cuda_decode.shared_elements(workload, n) * 2)}

    return Space(
        choices=choices,
        default=next(n for size in ((8, 2), (4, 3), (4, 2), (2, 3), (2, 2), (1, 2)) if legal(n := begin(*size))),
        legal=legal,
        module=lambda n: tvm.IRModule({workload.operator: cuda_decode.decode(workload, n, _hopper(target))}),
        plan=lambda n: {
            "block_q": 1,
            "chunk": n["keys"] * n["warps"],
            "min_split": n["min_split"],
            "max_split": n["max_split"],
            "ctas": n["ctas"],
            "blocks": cuda_decode.blocks(workload),
            "joins": 1,
        },
    )


def _wide_decode(workload: Workload, target: Target) -> Space:
    """Decisions: stages of the ring, fewest keys of an item."""
    choices = {
        "warps": (4, 8),
        "stages": (2, 3, 4, 6),
        "min_split": (256, 512, 1024),
        "max_split": (0,),
        "bulk": (0, 1),
    }

    def legal(n: Decisions) -> bool:
        if not _inside(n, choices) or (n["bulk"] and not _hopper(target)):
            return False
        return cuda_decode_wide.shared_elements(workload, n) * 2 + _SMALL <= _shared_memory(target)

    rest = {"min_split": 512, "max_split": 0, "bulk": 0}
    return Space(
        choices=choices,
        default=next(
            n for w, s in ((8, 6), (8, 4), (8, 3), (8, 2), (4, 2)) if legal(n := rest | {"warps": w, "stages": s})
        ),
        legal=legal,
        module=lambda n: tvm.IRModule({workload.operator: cuda_decode_wide.decode(workload, n, _hopper(target))}),
        plan=lambda n: {
            "block_q": 1,
            "chunk": cuda_decode_wide.KEYS * n["warps"],
            "min_split": n["min_split"],
            "max_split": n["max_split"],
            "ctas": _resident(target, n["warps"], cuda_decode_wide.shared_elements(workload, n) * 2),
            "blocks": cuda_decode_wide.blocks(workload),
            "joins": 1,
        },
    )


def _resident(target: Target, warps: int, used: int, most_warps: int = _BUSY_WARPS) -> int:
    """Thread blocks of decode for each multiprocessor, as many as it has room for (one at least) of `most_warps`.

    Those beyond what keeps the memory busy are only slower each, and the planner cuts contexts finer for them.
    """
    return max(min((_shared_memory(target) + _SMALL) // (used + _SMALL), most_warps // warps), 1)


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


def _warpgroups(workload: Workload, target: Target) -> bool:
    """Whether extend is made by cuda_extend, which is faster, or by cuda_extend_mma, which takes everything."""
    plain = workload.kv_dtype is None and not workload.tree and (workload.group or 0) <= _WARPGROUP_MOST_GROUP
    dims = {workload.head_dim_qk, workload.head_dim_vo}
    return _hopper(target) and plain and dims <= set(_WARPGROUP_DIMS)


def _inside(n: Decisions, choices: dict[str, tuple[int, ...]]) -> bool:
    return set(n) == set(choices) and all(n[name] in choices[name] for name in n)


def _shared_memory(target: Target) -> int:
    return int(target.tvm["max_shared_memory_per_block"])


def _hopper(target: Target) -> bool:
    return target.features == ("sm_90a",)
