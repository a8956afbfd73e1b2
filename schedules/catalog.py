"""The one list of what is built, tested and listed for each target. Standard library only."""

from __future__ import annotations

from tilewright.schedules.targets import get_target
from tilewright.schedules.workload import DTYPES, Workload

# (head dim, query heads per KV head) that get a kernel of their own; general modules serve every other shape.
PAGED_SHAPES = ((128, 4), (64, 3), (64, 1))
# The same for tiles and GPUs: groups from none to that of the largest models in use.
MORE_SHAPES = (*PAGED_SHAPES, (128, 1), (128, 8), (64, 8))
# Latent attention: one KV head, its values the first 512 of its 576 dims.
LATENT = Workload("paged_decode", "bf16", 16, 576, 512)
# Query heads of latent attention on one GPU: 128 of the largest models, and their slices by tensor parallelism.
LATENT_GROUPS = (16, 32, 64, 128)
LIGHTNING_DIM = 128
_PAGED = ("paged_decode", "paged_extend")
_LIGHTNING = ("lightning_decode", "lightning_extend")

# Pools of fp8, and masks of drafts: what serves every shape, and the shape of most models.
_KV = "fp8_e4m3"
_FP8 = (
    *(Workload(operator, "bf16", 4, 128, 128, _KV) for operator in _PAGED),
    *(Workload(operator, "bf16", kv_dtype=_KV) for operator in (*_PAGED, "write_kv")),
)
_TREE = (
    Workload("paged_extend", "bf16", 4, 128, 128, tree=True),
    *(Workload("paged_extend", dtype, tree=True) for dtype in DTYPES),
    Workload("paged_extend", "bf16", kv_dtype=_KV, tree=True),
)

# On GPUs extend alone has general kernels, for head dims up to this, in whole 16 bytes of a row.
GPU_GENERAL_DIM = 256

# What `make tune` tunes by default: one workload of each kind of kernel that matters.
TUNE_PRESET = (
    Workload("paged_decode", "bf16", 4, 128, 128),
    Workload("paged_extend", "bf16", 4, 128, 128),
    Workload("lightning_extend", "bf16", None, LIGHTNING_DIM, LIGHTNING_DIM),
    Workload("lightning_decode", "bf16", None, LIGHTNING_DIM, LIGHTNING_DIM),
)


def _paged(dtype: str, shapes: tuple[tuple[int, int], ...] = PAGED_SHAPES) -> list[Workload]:
    return [Workload(operator, dtype, group, dim, dim) for operator in _PAGED for dim, group in shapes]


def _everything(dtype: str) -> list[Workload]:
    lightning = [Workload(operator, dtype, None, LIGHTNING_DIM, LIGHTNING_DIM) for operator in _LIGHTNING]
    general = [Workload(operator, dtype) for operator in (*_PAGED, *_LIGHTNING)]
    return [*_paged(dtype), Workload("merge", dtype), Workload("write_kv", dtype), *lightning, *general]


def _gpu_extends(dtype: str) -> list[Workload]:
    """Extend over pools of fp8 and with masks of drafts, and what serves every shape of each."""
    kinds = [(kv_dtype, tree) for kv_dtype in (None, _KV) for tree in (False, True)]
    special = [Workload("paged_extend", dtype, 4, 128, 128, *kind) for kind in kinds[1:]]
    return [*special, *(Workload("paged_extend", dtype, None, None, None, *kind) for kind in kinds)]


def general_of(workload: Workload, device: str) -> Workload | None:
    """The general kernel that serves the workload too, on a "cpu" or "cuda" device; None where there is none."""
    if workload.head_dim_qk is None or workload.head_dim_vo is None:
        return None
    dims = (workload.head_dim_qk, workload.head_dim_vo)
    if device == "cuda":
        whole = 8 if workload.kv_dtype is None else 16
        if workload.operator != "paged_extend" or max(dims) > GPU_GENERAL_DIM or any(dim % whole for dim in dims):
            return None
    return Workload(workload.operator, workload.dtype, kv_dtype=workload.kv_dtype, tree=workload.tree)


def all_workloads(target: str) -> tuple[Workload, ...]:
    """Every workload of the target's catalogue, in the order in which they are listed and built.

    Raises:
        ValueError: no such target.
    """
    family = get_target(target).family
    if family == "cuda":
        # Tensor cores multiply 16-bit numbers.
        fp8 = [Workload("paged_decode", "bf16", group, dim, dim, _KV) for dim, group in ((128, 4), (128, 8), (64, 8))]
        everything = (
            workload
            for dtype in ("bf16", "fp16")
            for workload in (
                *_paged(dtype, MORE_SHAPES),
                *_gpu_extends(dtype),
                *(Workload("paged_decode", dtype, group, 576, 512) for group in LATENT_GROUPS),
                Workload("merge", dtype),
                Workload("write_kv", dtype),
            )
        )
        return (*everything, *fp8, Workload("write_kv", "bf16", kv_dtype=_KV))
    if family == "amx":
        # Tiles multiply bf16 only; what is missing here is served by the modules of x86-avx512, else of x86-avx2.
        return (*_paged("bf16", MORE_SHAPES), LATENT, *_FP8[: len(_PAGED)])
    return (*(workload for dtype in DTYPES for workload in _everything(dtype)), *_FP8, *_TREE)
