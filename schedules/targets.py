"""The targets: how TVM is to compile for each, and what a CPU must have to run the result. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

# What LLVM may emit for x86-64-v3, in the kernel's names ("abm" is LZCNT).
_V3 = ("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "popcnt", "sse4_1", "sse4_2", "ssse3")
# What it may emit for x86-64-v4 besides.
_V4 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
# What it may emit for Sapphire Rapids from arithmetic code, besides v3.
_SAPPHIRE_RAPIDS = (
    *_V4,
    *(
        "avx512ifma",
        "avx512vbmi",
        "avx512_vbmi2",
        "avx512_vnni",
        "avx512_bitalg",
        "avx512_vpopcntdq",
        "avx512_bf16",
        "avx512_fp16",
        "avx_vnni",
    ),
    *("gfni", "vaes", "vpclmulqdq"),
)
_AMX = ("amx_tile", "amx_bf16", "amx_int8")


@dataclass(frozen=True)
class Target:
    """A kind of CPU or GPU that modules are built for.

    Attributes:
        name: in paths, records, manifests and on the command line.
        family: which spaces schedule for it: "x86" (vectors), "amx" (tiles) or "cuda" (tensor cores).
        tvm: the dictionary that tvm.target.Target takes.
        features: what must be usable before a module of it is opened: /proc/cpuinfo names, or the one name "sm_90a"
            (code for exactly this compute capability) or "sm_80" (for this and later ones of the same generation).
        rank: the store prefers the greater.
        lanes: f32 lanes of a vector register.
        registers: vector registers that there are.
        packaged: False: for tests only, never put in a package and never chosen by the store.
    """

    name: str
    family: str
    tvm: dict[str, Any] = field(hash=False)
    features: tuple[str, ...]
    rank: int
    lanes: int = 8
    registers: int = 16
    packaged: bool = True

    @property
    def device(self) -> str:
        """The type of the tensors that its modules take, as torch names it: "cpu" or "cuda"."""
        return "cuda" if self.tvm["kind"] == "cuda" else "cpu"


def _cuda(arch: str, shared_memory: int) -> dict[str, Any]:
    return {"kind": "cuda", "arch": arch, "max_shared_memory_per_block": shared_memory, "host": {"kind": "llvm"}}


_ALL = (
    Target("x86-avx2", "x86", {"kind": "llvm", "mcpu": "x86-64-v3"}, _V3, rank=10),
    Target(
        "x86-avx512",
        "x86",
        {"kind": "llvm", "mcpu": "x86-64-v4", "mattr": ["-prefer-256-bit"]},
        (*_V3, *_V4),
        rank=20,
        lanes=16,
        registers=32,
    ),
    Target(
        "x86-amx",
        "amx",
        {"kind": "llvm", "mcpu": "sapphirerapids", "mattr": ["-prefer-256-bit"]},
        (*_V3, *_SAPPHIRE_RAPIDS, *_AMX),
        rank=30,
        lanes=16,
        registers=32,
    ),
    # The schedules of x86-amx without AVX-512, so that an emulator of the tile instructions can run them anywhere.
    Target(
        "x86-amx-emulated",
        "amx",
        {"kind": "llvm", "mcpu": "x86-64-v3", "mattr": ["+amx-tile", "+amx-bf16", "+amx-int8"]},
        (*_V3, *_AMX),
        rank=0,
        packaged=False,
    ),
    Target("cuda-sm90a", "cuda", _cuda("sm_90a", shared_memory=232448), ("sm_90a",), rank=30),
    # As much shared memory as every GPU of the generation has (8.6 and 8.9 have less than 8.0).
    Target("cuda-sm80", "cuda", _cuda("sm_80", shared_memory=101376), ("sm_80",), rank=20),
)
TARGETS: Mapping[str, Target] = MappingProxyType({target.name: target for target in _ALL})


def get_target(name: str) -> Target:
    """The target of that name.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    try:
        return TARGETS[name]
    except KeyError:
        raise ValueError(f"target: got {name!r}, expected one of {', '.join(TARGETS)}") from None
