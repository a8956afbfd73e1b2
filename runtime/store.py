"""Find, verify and load built modules: everything between a workload and a function that may be called.

Tensors of a device type take modules of its targets only. For each target, from the best usable one down, these roots
are searched in order: the `root` given to the call; the folders of TILEWRIGHT_MODULE_PATH; the user cache;
`tilewright/_prebuilt` of an installed wheel; `build/modules` of a checkout. The first artifact that
this process can use wins. Nothing is opened with dlopen before its hash, size, schema, versions, definition revision
and CPU features (for a GPU: the code that it runs) have been checked.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import platformdirs

from tilewright.runtime import env, features
from tilewright.runtime.cuda_launcher import CudaLauncher
from tilewright.runtime.errors import (
    BuildError,
    Error,
    IncompatibleModuleError,
    IntegrityError,
    MissingModuleError,
    UnsupportedTargetError,
)
from tilewright.runtime.features import Capability
from tilewright.runtime.launcher import LIBRARY_NAME, Launcher
from tilewright.runtime.manifest import (
    CUBIN_NAME,
    LAUNCHER,
    MODULE_NAME,
    Manifest,
    check_tvm_ffi,
    read_manifest,
    verify_file,
)
from tilewright.schedules.targets import TARGETS, Target, get_target
from tilewright.schedules.workload import DEFINITION_REVISION, Workload

_PACKAGE = Path(__file__).parent.parent


@dataclass(frozen=True)
class Artifact:
    """A folder whose manifest this process can use. Its files are not verified yet.

    Attributes:
        workload: what it computes.
        target: what it was built for.
        folder: where it is.
        layer: which root it was found in, in words.
        manifest: of the folder.
    """

    workload: Workload
    target: Target
    folder: Path
    layer: str
    manifest: Manifest


@dataclass(frozen=True)
class PassedOver:
    """A place that was looked at without success.

    Attributes:
        folder: where the artifact would be.
        layer: which root that is, in words.
        problem: why it cannot be used (names the file); None: there is no artifact.
    """

    folder: Path
    layer: str
    problem: Error | None

    @property
    def faulty(self) -> bool:
        """Whether there is an artifact that ought to work here: its target is one for this machine."""
        target = TARGETS[self.folder.parent.name]
        return self.problem is not None and not features.missing_features(target.features)

    def __str__(self) -> str:
        return f"{self.folder} ({self.layer}): no module" if self.problem is None else f"({self.layer}) {self.problem}"


@dataclass(frozen=True)
class Search:
    """The outcome of a look-up: the artifact that won, or None, and what was passed over before it, in order."""

    found: Artifact | None
    passed_over: tuple[PassedOver, ...]

    @property
    def state(self) -> str:
        """In a word: "ready"; "unusable": there are artifacts, but none that this process can use; "missing"."""
        if self.found is not None:
            return "ready"
        return "unusable" if any(item.problem for item in self.passed_over) else "missing"


@dataclass(frozen=True)
class Module:
    """A loaded kernel.

    Attributes:
        function: call it with the positional arguments of docs/kernel-abi.md.
        plan: what the planner must know of it.
        workload: what it computes.
        target: the name of the target that it was built for.
        path: the loaded file.
        origin: of its decisions: "tuned", "default" or "given".
        cut_next_loop: says into how many tasks the next call of this thread had best cut its loop.
        bind: makes bound calls of this and other modules of the device type (bound_call.Binder.bind).
    """

    function: Callable[..., Any]
    plan: dict[str, int]
    workload: Workload
    target: str
    path: Path
    origin: str
    cut_next_loop: Callable[[int], object] = lambda tasks: None
    bind: Callable[..., Callable[..., bool] | None] = lambda *described: None


@cache
def checkout() -> Path | None:
    """The root of the source checkout that this package is imported from; None for an installed wheel."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / "pyproject.toml").is_file() else None


def user_cache() -> Path:
    """The user's folder of built modules (TILEWRIGHT_CACHE_DIR or the platform's)."""
    folder = env.CACHE_DIR.get()
    return (folder if folder is not None else Path(platformdirs.user_cache_dir("tilewright"))) / "modules"


def default_root() -> Path:
    """Where `tilewright build` writes: `build/modules` of a checkout, else the user cache."""
    root = checkout()
    return user_cache() if root is None else root / "build" / "modules"


def roots(root: Path | None = None) -> list[tuple[str, Path]]:
    """Layer name and folder of every place that is searched, first wins."""
    source = checkout()
    return [
        *([] if root is None else [("given", Path(root))]),
        *((env.MODULE_PATH.name, folder) for folder in env.MODULE_PATH.get()),
        ("user cache", user_cache()),
        ("installed", _PACKAGE / "_prebuilt"),
        *([] if source is None else [("checkout", source / "build" / "modules")]),
    ]


def candidate_targets(target: str | None = None, device: str | None = None) -> list[Target]:
    """The targets to look for, best first: the one named, or every packaged one of the device type.

    TILEWRIGHT_TARGET names the one for its own device type.

    Args:
        target: the only one.
        device: "cpu" or "cuda"; None: all, those of CPUs first.

    Raises:
        UnsupportedTargetError: the name is not that of a target.
    """
    name = target or env.TARGET.get()
    try:
        only = get_target(name) if name else None
    except ValueError as error:
        raise UnsupportedTargetError(str(error) if target else f"{env.TARGET.name}: {error}") from None
    if only is not None and (target or device in (None, only.device)):
        return [only]
    packaged = [item for item in TARGETS.values() if item.packaged and device in (None, item.device)]
    return sorted(packaged, key=lambda item: (item.device, -item.rank))


@cache
def _installed_tvm_ffi() -> str:
    return version("apache-tvm-ffi")


def check_manifest(
    folder: Path, manifest: Manifest, name: str, target: Target, capability: Capability | None = None
) -> None:
    """Whether this process can use an artifact, as far as its manifest tells.

    Args:
        folder: of the artifact.
        manifest: of the folder.
        name: that it should have.
        target: that it should be for.
        capability: of the GPU that is to run it; None: any visible one.

    Raises:
        IntegrityError: the manifest is of another artifact.
        IncompatibleModuleError: other definition revision, apache-tvm-ffi outside the range, CPU features missing, or
            GPU code that the device does not run.
    """
    if (manifest.name, manifest.target) != (name, target.name):
        raise IntegrityError(
            f"{folder}: manifest: expected {name} for {target.name}, got {manifest.name} for {manifest.target}; "
            "the folder was copied or renamed: build it again"
        )
    if manifest.definition_revision != DEFINITION_REVISION:
        raise IncompatibleModuleError(
            f"{folder}: definition revision: expected {DEFINITION_REVISION}, got {manifest.definition_revision}; "
            f"{build_command(name, target.name)}"
        )
    check_tvm_ffi(_installed_tvm_ffi())
    missing = features.missing_features(manifest.features, capability)
    if missing and target.device == "cuda":
        gpus = features.visible_gpus() if capability is None else (capability,)
        got = ", ".join(f"{major}.{minor}" for major, minor in gpus)
        raise IncompatibleModuleError(
            f"{folder}: GPU code: expected a device that runs {', '.join(manifest.features)}, got "
            + (f"compute capability {got}" if gpus else "no visible CUDA device")
        )
    if missing:
        raise IncompatibleModuleError(
            f"{folder}: CPU features: expected {', '.join(manifest.features)}, this process has no {', '.join(missing)}"
        )


def build_command(name: str, target: str) -> str:
    """The shell command that builds a module."""
    return f"tilewright build {name} --target {target}"


def _look(
    workload: Workload, target: str | None, root: Path | None, capability: Capability | None
) -> Iterator[Artifact | PassedOver]:
    layers = roots(root)
    for candidate in _candidates(target, capability):
        for layer, base in layers:
            folder = base.joinpath(candidate.name, workload.name)
            try:
                manifest = read_manifest(folder)
                check_manifest(folder, manifest, workload.name, candidate, capability)
            except (FileNotFoundError, NotADirectoryError):
                yield PassedOver(folder, layer, None)
            except Error as error:
                yield PassedOver(folder, layer, error)
            else:
                yield Artifact(workload, candidate, folder, layer, manifest)


def _candidates(target: str | None, capability: Capability | None) -> list[Target]:
    return candidate_targets(target, None if target else "cpu" if capability is None else "cuda")


def find(
    workload: Workload,
    target: str | None = None,
    *,
    root: Path | None = None,
    capability: Capability | None = None,
) -> Search:
    """Look for the best artifact that serves the workload in this process. Opens and builds nothing.

    Args:
        workload: what is to be computed, exactly: a general module is found only by its own workload.
        target: consider this target only; None: TILEWRIGHT_TARGET, or the best usable one.
        root: a folder that is searched before all others.
        capability: compute capability of the GPU that holds the tensors; None: they are on the CPU, or, with a CUDA
            `target`, on any visible GPU.

    Raises:
        UnsupportedTargetError: the name is not that of a target.
    """
    passed_over: list[PassedOver] = []
    for item in _look(workload, target, root, capability):
        if isinstance(item, Artifact):
            return Search(item, tuple(passed_over))
        passed_over.append(item)
    return Search(None, tuple(passed_over))


_lock = threading.RLock()
_cache: dict[tuple, Module] = {}
_modules: dict[Path, tuple[tuple[int, int, int], Module]] = {}
_launchers: dict[str, Launcher | CudaLauncher] = {}


def load(
    workload: Workload,
    target: str | None = None,
    *,
    root: Path | None = None,
    capability: Capability | None = None,
) -> Module:
    """The callable module that serves the workload; the same object for the same question.

    Arguments as for find().

    Raises:
        MissingModuleError: none that this process can use; the message lists what was looked at and what builds it.
        IntegrityError: the one that was found is damaged.
        IncompatibleModuleError: the one that was found cannot be opened.
        UnsupportedTargetError: the name is not that of a target.
        BuildError: TILEWRIGHT_BUILD_POLICY asked for a build, and it failed.
    """
    surroundings = (env.MODULE_PATH.raw, env.CACHE_DIR.raw, env.TARGET.raw, features.declared())
    question = (workload, target, root, capability, *surroundings)
    module = _cache.get(question)
    if module is None:
        with _lock:
            module = _cache.get(question)
            if module is None:
                module = _cache[question] = _load(_find_or_build(workload, target, root, capability))
    return module


def _find_or_build(
    workload: Workload, target: str | None, root: Path | None, capability: Capability | None
) -> Artifact:
    policy = env.BUILD_POLICY.get()
    search = find(workload, target, root=root, capability=capability)
    if policy == "always" or (policy == "missing" and search.found is None):
        if capability is not None:
            target = buildable_target(target, capability)
        _build(workload, search.found.target.name if search.found else target, root)
        search = find(workload, target, root=root, capability=capability)
    if search.found is None:
        raise _missing(workload, target, capability, search)
    logger = env.get_logger("store")
    for item in search.passed_over:
        logger.log(logging.WARNING if item.faulty else logging.DEBUG, "%s: passed over %s", workload.name, item)
    logger.info("%s: %s from %s (%s)", workload.name, search.found.target.name, search.found.folder, search.found.layer)
    return search.found


def _missing(
    workload: Workload, target: str | None, capability: Capability | None, search: Search
) -> MissingModuleError:
    best = buildable_target(target, capability)
    lines = "".join(f"\n  {item}" for item in search.passed_over)
    remedy = f"Build it: {build_command(workload.name, best)}"
    if capability is not None and features.missing_features(get_target(best).features, capability):
        served = ", ".join(f"{item.name} ({', '.join(item.features)})" for item in candidate_targets(device="cuda"))
        remedy = f"No target is for compute capability {capability[0]}.{capability[1]}, expected one of {served}"
    error = MissingModuleError(f"{workload.name}: no usable module. {remedy}\nlooked at:{lines}")
    error.unusable = tuple(str(item) for item in search.passed_over if item.faulty)
    return error


def buildable_target(target: str | None = None, capability: Capability | None = None) -> str:
    """The best target whose modules would run here (on such a GPU, if one is given); the worst one if none would."""
    targets = _candidates(target, capability)
    usable = [item for item in targets if not features.missing_features(item.features, capability)]
    return (usable or targets[-1:])[0].name


def _build(workload: Workload, target: str | None, root: Path | None) -> None:
    """Build in a process of its own, so that the compiler never enters this one."""
    name = buildable_target(target)
    command = [sys.executable, "-m", "tilewright.codegen.cli", "build", workload.name, "--target", name]
    if root is not None:
        command += ["--root", str(root)]
    env.get_logger("store").warning("%s: building it for %s as %s asks", workload.name, name, env.BUILD_POLICY.name)
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise BuildError(
            f"{workload.name}: {' '.join(command)} failed ({done.returncode}):\n{done.stdout}{done.stderr}"
        )


def _load(artifact: Artifact) -> Module:
    folder, manifest = artifact.folder, artifact.manifest
    path = verify_file(folder, manifest, MODULE_NAME)
    status = path.stat()
    identity = (status.st_dev, status.st_ino, status.st_mtime_ns)
    known = _modules.get(path)
    if known is not None:
        # The dynamic linker knows libraries by path: it would hand out the old code for the new file.
        if known[0] != identity:
            raise IncompatibleModuleError(
                f"{path}: replaced since this process loaded it; start a new process to use it"
            )
        return known[1]
    launcher = _get_launcher(artifact)
    if isinstance(launcher, CudaLauncher):
        loaded = launcher.load(path, verify_file(folder, manifest, CUBIN_NAME).read_bytes(), manifest.kernels)
    else:
        loaded = launcher.load(path)
    try:
        function = loaded[artifact.workload.operator]
    except AttributeError:
        raise IncompatibleModuleError(
            f"{path}: function: expected {artifact.workload.operator}, the module has none of that name; "
            f"{build_command(manifest.name, manifest.target)}"
        ) from None
    module = Module(
        function, dict(manifest.plan), artifact.workload, manifest.target, path, manifest.origin,
        launcher.cut_next_loop, launcher.bind,
    )  # fmt: skip
    _modules[path] = (identity, module)
    return module


def cuda_launcher() -> CudaLauncher | None:
    """The process's launcher of CUDA modules; None: no such module is loaded yet."""
    found = _launchers.get("cuda")
    return found if isinstance(found, CudaLauncher) else None


def _get_launcher(artifact: Artifact) -> Launcher | CudaLauncher:
    """The process's launcher for a device type: the one beside the first module that was loaded (all are alike)."""
    device = artifact.target.device
    if device not in _launchers:
        folder = artifact.folder.parent / LAUNCHER
        try:
            manifest = read_manifest(folder)
        except FileNotFoundError:
            raise IntegrityError(
                f"{folder}: missing, the modules beside it need it; "
                f"{build_command(artifact.workload.name, artifact.target.name)}"
            ) from None
        check_manifest(folder, manifest, LAUNCHER, artifact.target)
        kind = CudaLauncher if device == "cuda" else Launcher
        _launchers[device] = kind(verify_file(folder, manifest, LIBRARY_NAME))
    return _launchers[device]
