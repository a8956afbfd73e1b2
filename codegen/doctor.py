"""`tilewright doctor`: is this machine, this installation and this set of modules able to serve?"""

from __future__ import annotations

import platform
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import msgspec

import tilewright
from tilewright.codegen.smoke import smoke
from tilewright.runtime import features, store
from tilewright.runtime.errors import Error
from tilewright.runtime.manifest import check_tvm_ffi
from tilewright.schedules.catalog import all_workloads
from tilewright.schedules.targets import TARGETS
from tilewright.schedules.workload import Workload

State = Literal["ok", "note", "fail"]
_LIBRARIES = ("torch", "numpy", "apache-tvm-ffi")
_BUILD_LIBRARIES = ("apache-tvm", "xgboost")


class Check(msgspec.Struct, frozen=True):
    """One finding: "ok", "note" (works, but know this) or "fail" (serving would not work)."""

    name: str
    state: State
    detail: str


def examine() -> list[Check]:
    """Every check, in the order in which a failure explains the ones after it. Does not raise for what it finds."""
    return [check for group in (_system, _cpu, _gpus, _libraries, _threads, _modules) for check in group()]


def _guarded(name: str, action: Callable[[], str]) -> Check:
    try:
        return Check(name, "ok", action())
    except Exception as error:  # a finding, whatever it is: the report must go on
        return Check(name, "fail", str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}")


def _system() -> list[Check]:
    linux = platform.system() == "Linux" and platform.machine() == "x86_64"
    detail = f"tilewright {tilewright.__version__}, Python {platform.python_version()}, {platform.platform()}"
    return [Check("system", "ok" if linux else "fail", detail + ("" if linux else "; expected Linux on x86_64"))]


def _cpu() -> list[Check]:
    checks = []
    usable = 0
    for target in store.candidate_targets(device="cpu"):
        missing = features.missing_features(target.features)
        usable += not missing
        detail = f"cannot run here: no {', '.join(missing)}" if missing else "runs here"
        checks.append(Check(f"target {target.name}", "note" if missing else "ok", detail))
    if not usable:
        checks.append(
            Check("targets", "fail", "no target runs on this CPU; expected at least AVX2 with FMA (x86-64-v3)")
        )
    if "amx_tile" in features.cpu_features():
        granted = features.amx_permission()
        detail = "granted" if granted else "the kernel refuses tile data (arch_prctl); expected Linux 5.16 or newer"
        checks.append(Check("AMX permission", "ok" if granted else "fail", detail))
    else:
        checks.append(Check("AMX permission", "note", "not asked for: the CPU has no tiles"))
    return checks


def _gpus() -> list[Check]:
    """The GPUs that torch sees, what runs on them, and the modules that they would take."""
    gpus = features.visible_gpus()
    if not gpus:
        return [Check("GPU", "note", "none that torch sees: CUDA targets cannot run here (they can be built)")]
    checks = []
    targets = store.candidate_targets(device="cuda")
    for index, capability in enumerate(gpus):
        name = f"cuda:{index}, compute capability {capability[0]}.{capability[1]}"
        usable = [item.name for item in targets if not features.missing_features(item.features, capability)]
        detail = f"runs {', '.join(usable)}" if usable else "no target is for it"
        checks.append(Check(name, "ok" if usable else "note", detail))
    for capability in dict.fromkeys(gpus):
        target = store.buildable_target(capability=capability)
        workloads = all_workloads(target)
        missing = [item.name for item in workloads if store.find(item, capability=capability).found is None]
        detail = f"{len(workloads) - len(missing)} of {len(workloads)}: {target}"
        if missing:
            detail += f"; {len(missing)} missing; build them: tilewright build --all --target {target}"
        checks.append(Check("GPU modules", "note" if missing else "ok", detail))
    return checks


def _libraries() -> list[Check]:
    checks = []
    for name in _LIBRARIES + _BUILD_LIBRARIES:
        try:
            checks.append(Check(name, "ok", version(name)))
        except PackageNotFoundError:
            needed = name in _LIBRARIES
            detail = "not installed" + ("" if needed else ": modules can be loaded but not built (extra 'tune')")
            checks.append(Check(name, "fail" if needed else "note", detail))
    installed = next(check for check in checks if check.name == "apache-tvm-ffi")
    if installed.state == "ok":

        def in_range() -> str:
            check_tvm_ffi(installed.detail)
            return "in the tested range"

        checks.append(_guarded("apache-tvm-ffi version", in_range))
    return checks


def _threads() -> list[Check]:
    def openmp() -> str:
        import torch

        from tilewright.runtime.launcher import openmp_functions

        openmp_functions()
        return f"{torch.get_num_threads()} threads of torch's pool"

    check = _guarded("OpenMP", openmp)
    libraries = sorted(openmp_libraries())
    if len(libraries) > 1:
        return [check, Check("OpenMP libraries", "note", f"more than one in the process: {', '.join(libraries)}")]
    return [check]


def openmp_libraries() -> set[str]:
    """Paths of the OpenMP libraries that are mapped into this process."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return set()
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count(" ") >= 5 and "/" in line}
    return {path for path in paths if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))}


def _modules() -> list[Check]:
    """Load and run what the store would choose for every workload of the catalogue."""
    checks = []
    chosen: Counter[str] = Counter()
    ran = 0
    on_cpu = [target.name for target in TARGETS.values() if target.device == "cpu"]
    workloads = dict.fromkeys(item for name in on_cpu for item in all_workloads(name))
    missing = []
    for workload in workloads:
        found = store.find(workload).found
        if found is None:
            missing.append(workload.name)
            continue
        chosen[f"{found.target.name} {found.manifest.origin} ({found.layer})"] += 1
        check = _guarded(f"run {workload.name}", partial(_run, workload))
        ran += check.state == "ok"
        if check.state != "ok":
            checks.append(check)
    for name, count in sorted(chosen.items()):
        checks.append(Check("modules", "ok", f"{count} of {len(workloads)}: {name}"))
    if missing:
        remedy = "build them: tilewright build --all"
        where = ", ".join(str(folder) for _, folder in store.roots())
        checks.append(
            Check(
                "modules",
                "note" if chosen else "fail",
                f"{len(missing)} of {len(workloads)} missing; {remedy}; looked in {where}",
            )
        )
    if ran:
        checks.append(Check("smoke runs", "ok", f"{ran} modules compute what torch computes"))
    return checks


def _run(workload: Workload) -> str:
    return f"error {smoke(store.load(workload)):.2f} of what is tolerated"


def render(checks: list[Check]) -> str:
    """The findings as aligned lines."""
    width = max(len(check.name) for check in checks)
    return "\n".join(f"{check.state:<5} {check.name:<{width}}  {check.detail}" for check in checks)


def healthy(checks: list[Check]) -> bool:
    """Whether nothing failed."""
    return all(check.state != "fail" for check in checks)


def to_json(checks: list[Check]) -> str:
    """The findings and what a bug report needs."""
    report = {
        "healthy": healthy(checks),
        "checks": checks,
        "cpu_features": sorted(features.cpu_features()),
        "executable": sys.executable,
    }
    return msgspec.json.format(msgspec.json.encode(report), indent=1).decode()
