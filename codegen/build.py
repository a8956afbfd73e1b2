"""Workload -> artifact folder: decisions from the record or the default schedule, compiled, put in place at once."""

from __future__ import annotations

import ast
import hashlib
import json
import multiprocessing
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import tilewright
from tilewright.codegen.cuda_toolchain import compiler_version
from tilewright.runtime import cuda_launcher, launcher
from tilewright.runtime.errors import BuildError, Error
from tilewright.runtime.manifest import (
    LAUNCHER,
    MANIFEST_NAME,
    MODULE_NAME,
    SCHEMA,
    Manifest,
    encode_manifest,
    file_entry,
    read_manifest,
    verify_file,
)
from tilewright.runtime.store import default_root
from tilewright.schedules.spaces import PROGRAMMATIC, Decisions, get_space, space_module
from tilewright.schedules.targets import Target, get_target
from tilewright.schedules.workload import DEFINITION_REVISION, Workload

if TYPE_CHECKING:
    import tvm

_PACKAGE = Path(__file__).parent.parent
LOGS = _PACKAGE / "tuning_logs"
# Each worker holds the compiler (5 s to import, 0.4 GB), so few and long-lived.
JOBS = 2


@dataclass(frozen=True)
class Built:
    """What became of one workload.

    Attributes:
        workload: that was asked for.
        folder: the artifact.
        fresh: False: it was up to date and nothing was compiled.
        origin: of its decisions: "tuned", "default" or "given".
    """

    workload: Workload
    folder: Path
    fresh: bool
    origin: str


def recorded_decisions(workload: Workload, target: str, logs: Path = LOGS) -> dict[str, int] | None:
    """The decisions of the committed record, None where there is no record.

    Raises:
        BuildError: the record is unreadable or of another definition revision.
    """
    path = logs / target / workload.name / "record.json"
    try:
        record = json.loads(path.read_bytes())
        decisions = {str(name): int(value) for name, value in record["decisions"].items()}
        revision = record.get("definition_revision", DEFINITION_REVISION)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BuildError(f"{path}: not a record: {error!r}; delete it or tune again") from error
    if revision != DEFINITION_REVISION:
        raise BuildError(
            f"{path}: definition revision: expected {DEFINITION_REVISION}, got {revision}; "
            f"tune again: tilewright tune {workload.name} --target {target}"
        )
    return decisions


def _chosen(
    workload: Workload, target: Target, decisions: Decisions | None, untuned: bool
) -> tuple[str, dict[str, int] | None]:
    """Origin and decisions without asking the space (which would import the compiler): None = its default."""
    if decisions is not None:
        return "given", dict(decisions)
    recorded = None if untuned else recorded_decisions(workload, target.name)
    return ("default", None) if recorded is None else ("tuned", recorded)


# ---- fingerprints: what a module was made of ----


def _source_file(module: str) -> Path | None:
    base = _PACKAGE.joinpath(*module.split(".")[1:])
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


@cache
def _imports(module: str) -> frozenset[str]:
    """The modules of ours that a module's source names in import statements."""
    path = _source_file(module)
    if path is None:
        return frozenset()
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            names.update({origin, *(f"{origin}.{alias.name}" for alias in node.names)})
    return frozenset(name for name in names if name.startswith("tilewright.") and _source_file(name))


def source_digest(module: str) -> str:
    """sha256 over the source of a module and of everything of ours that it imports, directly or not."""
    seen: set[str] = set()
    todo = {module}
    while todo:
        name = todo.pop()
        seen.add(name)
        todo |= _imports(name) - seen
    digest = hashlib.sha256()
    for name in sorted(seen):
        path = _source_file(name)
        digest.update(name.encode() + b"\0" + (path.read_bytes() if path else b"") + b"\0")
    return digest.hexdigest()


def _digest(parts: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def fingerprint(workload: Workload, target: Target, decisions: Mapping[str, int] | None) -> str:
    """sha256 of all that decides what the module does. Does not import the compiler. None: the space's default."""
    return _digest(
        {
            "schema": SCHEMA,
            "workload": workload.key,
            "target": asdict(target),
            "decisions": decisions,
            "sources": [
                source_digest(space_module(workload, target)),
                source_digest(f"{__package__}.compile"),
                *([source_digest(f"{__package__}.cuda_export")] if target.device == "cuda" else []),
            ],
            "versions": [
                version("apache-tvm"),
                version("apache-tvm-ffi"),
                *([compiler_version()] if target.device == "cuda" else []),
            ],
        }
    )


def _up_to_date(folder: Path, expected: str, library: str) -> bool:
    try:
        manifest = read_manifest(folder)
        verify_file(folder, manifest, library)
    except (FileNotFoundError, NotADirectoryError, Error):
        return False
    return manifest.fingerprint == expected


# ---- artifact folders ----


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`; gone afterwards unless it was put in place."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = folder.parent / f".{folder.name}.{os.getpid()}.{secrets.token_hex(4)}"
    staging.mkdir()
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _put_in_place(staging: Path, folder: Path, manifest: Manifest, library: str) -> None:
    """Write the manifest, make everything durable, rename the folder. Losing the race to an equal build is success."""
    (staging / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
    for path in (*staging.iterdir(), staging):
        _sync(path)
    while True:
        try:
            staging.rename(folder)
            break
        except OSError as error:
            if not folder.is_dir():
                raise BuildError(f"{folder}: cannot be written: {error}") from error
        if _up_to_date(folder, manifest.fingerprint, library):
            return
        # Outdated or damaged. Processes that have loaded it keep their mapping.
        with _staging(folder) as aside:
            try:
                folder.rename(aside / "old")
            except FileNotFoundError:
                continue
    _sync(folder.parent)


def _manifest(name: str, target: Target, staging: Path, **rest: object) -> Manifest:
    fields = {
        "schema": SCHEMA,
        "name": name,
        "target": target.name,
        "package_version": tilewright.__version__,
        "tvm_ffi_version": version("apache-tvm-ffi"),
        "definition_revision": DEFINITION_REVISION,
        "files": {path.name: file_entry(path) for path in sorted(staging.iterdir())},
    }
    return Manifest(**fields | rest)  # type: ignore[arg-type]


def _programmatic(function: tvm.tirx.PrimFunc) -> bool:
    return bool(function.attrs is not None and PROGRAMMATIC in function.attrs and function.attrs[PROGRAMMATIC])


def build_launcher(target: str, root: Path | None = None, *, force: bool = False) -> Path:
    """Build the launcher (for OpenMP or CUDA) into the target's folder unless it is up to date; the library's path.

    Raises:
        BuildError: the C compiler is missing or failed.
    """
    from tilewright.codegen.compile import compile_c

    where = get_target(target)
    folder = (default_root() if root is None else Path(root)) / target / LAUNCHER
    code, *included = cuda_launcher.SOURCES if where.device == "cuda" else launcher.SOURCES
    mark = _digest(
        {
            "schema": SCHEMA,
            "revision": DEFINITION_REVISION,
            "source": [hashlib.sha256(path.read_bytes()).hexdigest() for path in (code, *included)],
            "compiler": source_digest(f"{__package__}.compile"),
        }
    )
    if force or not _up_to_date(folder, mark, launcher.LIBRARY_NAME):
        with _staging(folder) as staging:
            compile_c(code, staging / launcher.LIBRARY_NAME)
            manifest = _manifest(
                LAUNCHER, where, staging, tvm_version="", features=[], plan={}, origin="given", fingerprint=mark
            )
            _put_in_place(staging, folder, manifest, launcher.LIBRARY_NAME)
    return folder / launcher.LIBRARY_NAME


def build(
    workload: Workload,
    target: str,
    decisions: Decisions | None = None,
    root: Path | None = None,
    *,
    force: bool = False,
    untuned: bool = False,
) -> Built:
    """Make the artifact `<root>/<target>/<workload>/` (and the launcher beside it) unless it is up to date.

    Args:
        workload: what to build.
        target: for which target, by name.
        decisions: of the schedule; None: those of the committed record, else the space's default.
        root: where; None: `build/modules` of a checkout, else the user cache.
        force: build even what is up to date.
        untuned: leave the committed record aside.

    Raises:
        BuildError: the record or the decisions are not legal, or compiling or linking failed.
        UnsupportedWorkload: the target has no space for the workload.
    """
    where = get_target(target)
    base = default_root() if root is None else Path(root)
    folder = base / target / workload.name
    origin, chosen = _chosen(workload, where, decisions, untuned)
    mark = fingerprint(workload, where, chosen)
    build_launcher(target, base)
    if not force and _up_to_date(folder, mark, MODULE_NAME):
        return Built(workload, folder, False, origin)

    from tilewright.codegen.compile import compile_module, export
    from tilewright.codegen.cuda_export import export_cuda

    space = get_space(workload, target)
    final = dict(space.default) if chosen is None else chosen
    known = set(final) == set(space.choices) and all(final[name] in space.choices[name] for name in final)
    if (space.choices and not known) or not space.legal(final):
        raise BuildError(
            f"{workload.name} for {target}: {origin} decisions are not legal in its space: {final}; "
            f"tune again (tilewright tune {workload.name} --target {target}) or delete the record"
        )
    try:
        module = space.module(final)
        executable = compile_module(module, where)
    except Exception as error:  # whatever TVM raises: its errors have no common base
        raise BuildError(f"{workload.name} for {target}: TVM cannot compile decisions {final}: {error}") from error
    with _staging(folder) as staging:
        kernels = {}
        if where.device == "cuda":
            kernels = export_cuda(executable, staging, programmatic=_programmatic(module[workload.operator]))
            (staging / "module.cu").write_text(executable.mod.imports[0].inspect_source())
        else:
            export(executable, staging / MODULE_NAME)
            (staging / "module.s").write_text(executable.mod.inspect_source("asm"))
        (staging / "module.tir.py").write_text(module.script())
        record = {
            "workload": workload.name,
            "target": target,
            "definition_revision": DEFINITION_REVISION,
            "origin": origin,
            "decisions": final,
        }
        (staging / "record.json").write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        manifest = _manifest(
            workload.name,
            where,
            staging,
            tvm_version=version("apache-tvm"),
            features=list(where.features),
            plan=space.plan(final),
            origin=origin,
            fingerprint=mark,
            kernels=kernels,
        )
        _put_in_place(staging, folder, manifest, MODULE_NAME)
    return Built(workload, folder, True, origin)


def stale(
    workloads: Iterable[Workload], target: str, root: Path | None = None, *, untuned: bool = False
) -> list[Workload]:
    """Those whose artifact is missing, damaged or made from other sources, decisions or versions. No compiler."""
    where = get_target(target)
    base = default_root() if root is None else Path(root)
    return [
        workload
        for workload in workloads
        if not _up_to_date(
            base / target / workload.name,
            fingerprint(workload, where, _chosen(workload, where, None, untuned)[1]),
            MODULE_NAME,
        )
    ]


def build_all(
    workloads: Iterable[Workload],
    target: str,
    root: Path | None = None,
    *,
    force: bool = False,
    untuned: bool = False,
    jobs: int = JOBS,
    report: Callable[[Built | Error | ValueError, Workload], None] = lambda result, workload: None,
) -> list[Built]:
    """Build many workloads with `jobs` worker processes; what is up to date starts none.

    Args:
        workloads: what to build.
        target: for which target.
        root: as for build().
        force: as for build().
        untuned: as for build().
        jobs: processes, each with a compiler of its own.
        report: called in this process with each result (or error) as it comes.

    Raises:
        BuildError: some could not be built; all others were. The message lists each with its cause.
    """
    workloads = list(workloads)
    base = default_root() if root is None else Path(root)
    build_launcher(target, base)
    todo = workloads if force else stale(workloads, target, base, untuned=untuned)
    results: list[Built] = []
    failures: list[str] = []

    def note(result: Built | Error | ValueError, workload: Workload) -> None:
        report(result, workload)
        if isinstance(result, Built):
            results.append(result)
        else:
            failures.append(f"{workload.name}: {result}")

    fresh = set(todo)
    for workload in workloads:
        if workload not in fresh:
            folder = base / target / workload.name
            note(Built(workload, folder, False, read_manifest(folder).origin), workload)
    if len(todo) == 1 or (todo and jobs == 1):
        for workload in todo:
            try:
                note(build(workload, target, None, base, force=force, untuned=untuned), workload)
            except (Error, ValueError) as error:
                note(error, workload)
    elif todo:
        # Spawned: a forked child of a process with running OpenMP threads may hang.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(jobs, len(todo)), mp_context=context) as pool:
            futures = {
                pool.submit(build, item, target, None, base, force=force, untuned=untuned): item for item in todo
            }
            for future in as_completed(futures):
                try:
                    note(future.result(), futures[future])
                except BrokenProcessPool:
                    note(BuildError("not built: a compiler process died (out of memory? --jobs 1)"), futures[future])
                except (Error, ValueError) as error:
                    note(error, futures[future])
    if failures:
        raise BuildError(f"{len(failures)} of {len(workloads)} workloads for {target} failed:\n" + "\n".join(failures))
    return results
