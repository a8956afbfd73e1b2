"""Which module serves a call: the specialised one of its sizes, else the general one, which says so once."""

from __future__ import annotations

import logging
from functools import cache

import torch

from tilewright.runtime import env, store
from tilewright.runtime.errors import IntegrityError, MissingModuleError
from tilewright.runtime.planner import Tiling
from tilewright.schedules.catalog import general_of
from tilewright.schedules.workload import Workload

_log = logging.getLogger("tilewright")


CPU = torch.device("cpu")


class Kernel:
    """A loaded module as the calls use it.

    Attributes:
        run: the function (docs/kernel-abi.md). tiling: the planner's parameters, None where the operator has none.
        cut_next_loop, bind: as of store.Module.
    """

    __slots__ = ("bind", "cut_next_loop", "run", "tiling")

    def __init__(self, module: store.Module) -> None:
        self.run = module.function
        plan = module.plan
        try:
            self.tiling = Tiling(**plan) if plan else None
        except TypeError:
            raise IntegrityError(
                f"{module.path.parent}: manifest: plan: got {plan}, expected {', '.join(Tiling._fields)}; "
                "build it again"
            ) from None
        self.cut_next_loop, self.bind = module.cut_next_loop, module.bind


@cache
def kernel(
    operator: str,
    dtype: str,
    group: int | None = None,
    head_dim_qk: int | None = None,
    head_dim_vo: int | None = None,
    device: torch.device = CPU,
    kv_dtype: str | None = None,
    tree: bool = False,
) -> Kernel:
    """The kernel for these sizes, types and options on this device; remembered for the life of the process.

    Raises:
        MissingModuleError: neither a specialised nor a general module is there, or only the general one and
            TILEWRIGHT_STRICT=1. On GPUs general modules serve extend alone, up to catalog.GPU_GENERAL_DIM.
        NotImplementedError: no target serves the operator, the dtype or the device.
    """
    workload = Workload(operator, dtype, group, head_dim_qk, head_dim_vo, kv_dtype, tree)
    if device.type == "cuda":
        if operator.startswith("lightning"):
            raise NotImplementedError(f"{operator}: got tensors on {device}; lightning attention runs on CPUs only yet")
        if dtype == "f32":
            raise NotImplementedError(
                f"{operator}: got float32 tensors on {device}, expected bfloat16 or float16 (tensor cores)"
            )
    elif device.type != "cpu":
        raise NotImplementedError(f"device: got {device}, expected tensors on the CPU or on a CUDA device")

    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None

    def load(workload: Workload) -> store.Module:
        return store.load(workload) if capability is None else store.load(workload, capability=capability)

    try:
        return Kernel(load(workload))
    except MissingModuleError as error:
        general = general_of(workload, device.type)
        if general is None or env.STRICT.get():
            raise
        try:
            module = load(general)
        except MissingModuleError:
            raise error from None  # what it names is what serves best
        unusable = "".join(f"\nnot usable: {item}" for item in error.unusable)
    where = "" if capability is None else f" --target {store.buildable_target(capability=capability)}"
    _log.warning(
        "%s has no module of its own: the general one serves it, correct but not tuned; build it with: "
        "tilewright build %s%s%s",
        workload.name,
        workload.name,
        where,
        unusable,
    )
    return Kernel(module)
