"""`tilewright tune`. Everything heavy is imported when the command runs."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tilewright.schedules.catalog import TUNE_PRESET, all_workloads
from tilewright.schedules.targets import TARGETS
from tilewright.schedules.workload import Workload, WorkloadError

if TYPE_CHECKING:
    from tilewright.codegen.search.remote import Address
    from tilewright.codegen.search.tune import Options

DEFAULT_TRIALS = 256
DEFAULT_SECONDS = 300
INTERRUPTED = 130
MOST_BUILDERS = 16  # 0.4 GB each, and a batch has no more candidates


@click.command(name="tune")
@click.argument("workloads", nargs=-1, metavar="[WORKLOAD]...")
@click.option(
    "--target", default="auto", show_default=True, metavar="NAME",
    help="Target, a GPU's too (cuda-sm90a), or auto: the best this CPU runs.",
)  # fmt: skip
@click.option(
    "--trials", default=DEFAULT_TRIALS, show_default=True, type=click.IntRange(1),
    help="Candidates a workload, those of a resumed search included.",
)  # fmt: skip
@click.option(
    "--seconds", default=DEFAULT_SECONDS, show_default=True, type=click.FloatRange(1),
    envvar="TUNE_SECONDS", show_envvar=True,
    help="Wall clock for all workloads together; whichever of trials or seconds ends first.",
)  # fmt: skip
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of the proposals.")
@click.option("--resume/--fresh", default=True, show_default=True, help="Go on from earlier trials, or set them aside.")
@click.option(
    "--runner", type=click.Choice(["local", "rpc"]), default="local", show_default=True,
    help="Where candidates are measured: here, or on a machine that runs `tilewright measure`.",
)  # fmt: skip
@click.option("--tracker", metavar="HOST:PORT", help="With --runner rpc: the tracker that knows the measuring machine.")
@click.option("--key", help="With --runner rpc: the kind of machine, as its `tilewright measure` names it.")
@click.option(
    "--out", default="tuning_logs", show_default=True, type=click.Path(path_type=Path), help="Root of the records."
)
@click.option(
    "--work", default="build/tune", show_default=True, type=click.Path(path_type=Path), help="Root of the working logs."
)
def command(
    workloads: tuple[str, ...],
    target: str,
    trials: int,
    seconds: float,
    seed: int,
    resume: bool,
    runner: str,
    tracker: str | None,
    key: str | None,
    out: Path,
    work: Path,
) -> None:
    """Search for the fastest schedules of WORKLOADs on this machine.

    Without a WORKLOAD: the preset that `make tune` tunes, as far as the target has such kernels. A workload's name says
    what it computes, e.g. paged_decode-bf16-g4-d128; `tilewright list` shows those of the catalogue, and any of the
    same form may be given.
    """
    try:
        chosen = [Workload.parse(name) for name in workloads] or _preset(target)
    except WorkloadError as error:
        raise click.UsageError(str(error)) from error
    address = _address(runner, tracker, key, target)
    targets = [target if address else choose_target(workload, target) for workload in chosen]
    check_installed("tvm", "xgboost")

    from rich.console import Console

    from tilewright.codegen import cuda_toolchain
    from tilewright.codegen.bench import inputs
    from tilewright.codegen.search.problem import WorkloadProblem
    from tilewright.codegen.search.progress import Progress, Row
    from tilewright.codegen.search.stop import Stop
    from tilewright.codegen.search.tune import Options, tune
    from tilewright.codegen.search.worker import Interrupted, WorkerError

    if any(TARGETS[name].device == "cuda" for name in targets):
        cuda_toolchain.check_installed()
    for workload in chosen:
        try:
            inputs.check_operator(workload)
        except ValueError as error:
            raise click.UsageError(str(error)) from error
    options = Options(
        trials=trials,
        seconds=seconds,
        seed=seed,
        resume=resume,
        records=out,
        work=work,
        builders=min(len(os.sched_getaffinity(0)), MOST_BUILDERS),
        measure_at=address,
    )
    again = resume_command(chosen, target, options)
    click.echo(f"{again}\ntargets: {', '.join(sorted(set(targets)))}")
    rows = [Row(workload.name, trials) for workload in chosen]
    progress = Progress(Console(), rows)
    try:
        with progress.shown():
            problems = [WorkloadProblem(workload, name) for workload, name in zip(chosen, targets, strict=True)]
            results = tune(problems, options, progress, rows, Stop())
    except Interrupted:
        click.echo(f"stopped; all trials so far are in {work}. Go on with:\n  {again}")
        sys.exit(INTERRUPTED)
    except WorkerError as error:
        raise click.ClickException(str(error)) from error
    if len(results) > 1:
        click.echo("")
        for result in results:
            click.echo(result.message or f"{result.workload}: {result.error}")
    if any(result.error for result in results):
        sys.exit(1)


def _address(runner: str, tracker: str | None, key: str | None, target: str) -> Address | None:
    """Of the tracker; None where candidates are measured here.

    Raises:
        click.UsageError: options that do not go together.
    """
    from tilewright.codegen.search.remote import Address

    if runner == "local":
        if tracker or key:
            raise click.UsageError("--tracker, --key: need --runner rpc")
        return None
    if not tracker or not key:
        raise click.UsageError("--runner rpc: needs --tracker HOST:PORT and --key KEY")
    if target not in TARGETS:
        raise click.UsageError(f"--target: got {target!r}, expected with --runner rpc one of {', '.join(TARGETS)}")
    try:
        return Address.parse(tracker, key)
    except ValueError as error:
        raise click.UsageError(f"--tracker: {error}") from None


def _preset(target: str) -> list[Workload]:
    return [workload for workload in TUNE_PRESET if target not in TARGETS or workload in all_workloads(target)]


def choose_target(workload: Workload, name: str) -> str:
    """The target called `name`; for "auto" the best one that this CPU runs and that has such kernels.

    Raises:
        click.UsageError: no such target.
        click.ClickException: this CPU cannot run it, or none serves.
    """
    from tilewright.runtime.features import missing_features

    if name != "auto":
        if name not in TARGETS:
            raise click.UsageError(f"--target: got {name!r}, expected auto or one of {', '.join(TARGETS)}")
        missing = missing_features(TARGETS[name].features)
        if missing and TARGETS[name].device == "cuda":
            raise click.ClickException(f"{name}: cannot be measured here, torch sees no GPU that runs its code")
        if missing:
            raise click.ClickException(
                f"{name}: cannot be measured here, this CPU has no {', '.join(missing)}; use --target auto"
            )
        return name

    def kind(workload: Workload) -> tuple[object, ...]:
        return workload.operator, workload.dtype, workload.kv_dtype, workload.tree

    usable = [
        target
        for target in TARGETS.values()
        if target.packaged
        and target.device == "cpu"
        and not missing_features(target.features)
        and any(kind(other) == kind(workload) for other in all_workloads(target.name))
    ]
    if not usable:
        raise click.ClickException(f"{workload.name}: this CPU runs no target that has such kernels")
    return max(usable, key=lambda target: target.rank).name


def resume_command(workloads: Sequence[Workload], target: str, options: Options) -> str:
    """The shell command that continues a search with these `tune.Options`."""
    words = ["tilewright", "tune", *(workload.name for workload in workloads), "--target", target]
    words += ["--trials", str(options.trials), "--seconds", f"{options.seconds:.15g}", "--seed", str(options.seed)]
    if options.measure_at is not None:
        where = options.measure_at
        words += ["--runner", "rpc", "--tracker", f"{where.host}:{where.port}", "--key", where.key]
    words += ["--resume", "--out", str(options.records), "--work", str(options.work)]
    return shlex.join(words)


def check_installed(*packages: str) -> None:
    """Raises click.ClickException where one of these packages of the tune extra is missing."""
    from importlib.util import find_spec

    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise click.ClickException(f"{' and '.join(missing)}: not installed; pip install 'tilewright[tune]'")
