"""`tilewright bench`. Everything heavy is imported when the command runs."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tilewright.schedules.targets import TARGETS

if TYPE_CHECKING:
    from tilewright.codegen.bench.cases import Case, Roots
    from tilewright.codegen.bench.report import Report, Row
    from tilewright.codegen.roofline import Limits
    from tilewright.runtime.store import Artifact

ROUNDS, SECONDS = 20, 5.0
QUICK_ROUNDS, QUICK_SECONDS = 7, 2.0
COST_ROUNDS = 500
COSTS = "host"


@click.command(name="bench", context_settings={"show_default": True})
@click.option(
    "--target",
    help="Rows for this target, on its modules: a server's workloads where it is beyond x86-avx2; a GPU's on the first "
    "GPU there is.  "
    "[default: x86-avx2's rows on whatever modules a call takes here]",
)
@click.option(
    "--vllm",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The _C library of vLLM's CPU build.  [default: that of an installed package]",
)
@click.argument("filters", nargs=-1, metavar="[FILTER]...")
@click.option("--quick", is_flag=True, help="The workloads that `make tune` tunes, fewer rounds, no host costs.")
@click.option(
    "--rounds", type=click.IntRange(2), help=f"Least rounds a row.  [default: {ROUNDS}, quick {QUICK_ROUNDS}]"
)
@click.option(
    "--seconds",
    type=click.FloatRange(0),
    help=f"Least seconds of a row.  [default: {SECONDS:g}, quick {QUICK_SECONDS:g}]",
)
@click.option("--threads", type=click.IntRange(1), help="Threads of torch's pool.  [default: torch's own choice]")
@click.option("--untuned/--no-untuned", default=True, help="Time the untuned default schedules too, where a record is.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write everything here too.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print a section for docs/benchmarks.md instead.")
@click.option("--list", "only_list", is_flag=True, help="Only print the names that filters are matched against.")
def command(
    filters: tuple[str, ...],
    target: str | None,
    vllm: Path | None,
    quick: bool,
    rounds: int | None,
    seconds: float | None,
    threads: int | None,
    untuned: bool,
    json_file: Path | None,
    as_markdown: bool,
    only_list: bool,
) -> None:
    """Time our kernels beside torch and vLLM on the same data, in one process; how: docs/benchmarks.md.

    FILTER keeps the rows whose name contains it, e.g. decode-bf16; "host" stands for the costs of a call.
    """
    import torch

    from tilewright.codegen.bench import batches, cases, machine, overhead, report, vllm_peer
    from tilewright.codegen.records import current_environment
    from tilewright.runtime import env

    if target is not None:
        if target in TARGETS and TARGETS[target].device == "cuda":
            _bench_gpu(target, filters, rounds, seconds, json_file, as_markdown, only_list)
            return
        _expect_target(target)
    chosen = [case for case in (cases.QUICK if quick else cases.of_target(target)) if _kept(case.name, filters)]
    with_costs = not quick and _kept(COSTS, filters)
    if only_list:
        click.echo("\n".join([case.name for case in chosen] + [COSTS] * with_costs))
        return
    if not chosen and not with_costs:
        raise click.UsageError(f"no row's name contains {' or '.join(filters)}; see tilewright bench --list")
    if env.CHECK.get():
        raise click.UsageError(f"{env.CHECK.name}=1: checked mode is not what is to be timed; unset it")
    if threads is not None:
        torch.set_num_threads(threads)
    rounds = rounds or (QUICK_ROUNDS if quick else ROUNDS)
    seconds = (QUICK_SECONDS if quick else SECONDS) if seconds is None else seconds

    if vllm is not None:
        vllm_peer.load(vllm)
    skipped: dict[str, str] = {}
    if target is not None:
        chosen, skipped = _of_target(chosen, target)
        if not chosen and not with_costs:
            raise click.ClickException("; ".join(f"{name}: {reason}" for name, reason in skipped.items()))
    found = _find(chosen)
    tuned = [case for case in chosen if untuned and found[case].manifest.origin != "default"]
    root = _build_untuned({case.workload.name: found[case].target.name for case in tuned}) if tuned else None
    limits = _limits({artifact.target.name for artifact in found.values()}, torch.get_num_threads())
    main_limits = limits.get(target) if target in limits else next(iter(limits.values()), None)
    canary = machine.Canary()
    rows, costs = [], []
    with torch.no_grad(), cases.Roots(root) if root else nullcontext() as roots:
        for case in chosen:
            click.echo(f"{case.name} ...", err=True)
            both = roots if case in tuned else None
            rows.append(_row(case, found[case], both, limits.get(found[case].target.name), rounds, seconds))
        if with_costs:
            click.echo("costs of a call ...", err=True)
            costs = overhead.call_costs(rounds=COST_ROUNDS, seconds=min(1.0, seconds))
            costs.append(overhead.alternation_cost(rounds=COST_ROUNDS))
            few, brief = min(rounds, QUICK_ROUNDS), min(seconds, QUICK_SECONDS)
            costs += [*batches.invariance_costs(few, brief), *batches.balance_costs(few, brief)]
            costs.append(overhead.load_cost())
    outcome = report.Report(
        command=shlex.join(["tilewright", *sys.argv[1:]]),
        machine=machine.describe(),
        environment=current_environment(),
        threads=torch.get_num_threads(),
        flops=main_limits.flops if main_limits else None,
        bandwidth=main_limits.bandwidth if main_limits else None,
        tiles=main_limits.tiles if main_limits else None,
        tile_peak=main_limits.tile_peak if main_limits else None,
        skipped=skipped,
        others=canary.others(),
        rows=rows,
        costs=costs,
    )
    _deliver(outcome, json_file, as_markdown)


def _bench_gpu(
    target: str,
    filters: tuple[str, ...],
    rounds: int | None,
    seconds: float | None,
    json_file: Path | None,
    as_markdown: bool,
    only_list: bool,
) -> None:
    from tilewright.codegen.bench import gpu_cases, gpu_command

    chosen = [case for case in gpu_cases.CASES if _kept(case.name, filters)]
    with_costs = _kept(COSTS, filters)
    if only_list:
        click.echo("\n".join([case.name for case in chosen] + [COSTS] * with_costs))
        return
    outcome = gpu_command.bench(target, chosen, with_costs=with_costs, rounds=rounds, seconds=seconds)
    _deliver(outcome, json_file, as_markdown)


def _deliver(outcome: Report, json_file: Path | None, as_markdown: bool) -> None:
    from tilewright.codegen.bench import report

    if json_file is not None:
        json_file.write_text(outcome.to_json())
    if as_markdown:
        click.echo(report.markdown(outcome))
    else:
        report.show(outcome)


def _kept(name: str, filters: tuple[str, ...]) -> bool:
    return not filters or any(part in name for part in filters)


def _find(chosen: list[Case]) -> dict[Case, Artifact]:
    """The module that a call of each case would use.

    Raises:
        click.ClickException: some are missing. A general module in their place would say nothing about them.
    """
    from tilewright.codegen.bench import cases
    from tilewright.runtime import store

    needed = dict.fromkeys(workload for case in chosen for workload in cases.needed(case.workload))
    found = {workload: store.find(workload).found for workload in needed}
    missing = [workload.name for workload, artifact in found.items() if artifact is None]
    if missing:
        raise click.ClickException(
            f"{len(missing)} modules are missing; build them: tilewright build {' '.join(missing)}"
        )
    return {case: artifact for case in chosen if (artifact := found[case.workload]) is not None}


def _build_untuned(targets: dict[str, str]) -> Path:
    """Build the named workloads from their default schedules into a root of their own; the root.

    In a process of its own: the compiler's libraries must not be in the one that is timed.

    Raises:
        click.ClickException: there is no compiler, or it failed.
    """
    from importlib.util import find_spec

    from tilewright.runtime import store

    if find_spec("tvm") is None:
        raise click.ClickException(
            "apache-tvm: not installed, and the untuned schedules must be built: "
            "pip install 'tilewright[tune]', or leave them out with --no-untuned"
        )
    root = store.default_root().parent / "untuned"
    names = defaultdict(list)
    for name, target in targets.items():
        names[target].append(name)
    for target, workloads in names.items():
        arguments = ["build", *workloads, "--target", target, "--untuned", "--root", str(root)]
        click.echo(shlex.join(["tilewright", *arguments]), err=True)
        done = subprocess.run(
            [sys.executable, "-m", "tilewright.codegen.cli", *arguments], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise click.ClickException(f"the untuned schedules cannot be built:\n{done.stdout}{done.stderr}")
    return root


def _expect_target(target: str) -> None:
    """Refuse a target that there is not or that cannot run here.

    Raises:
        click.ClickException
    """
    from tilewright.runtime import features
    from tilewright.schedules.targets import get_target

    try:
        missing = features.missing_features(get_target(target).features)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    if missing:
        raise click.ClickException(f"{target}: cannot run here: no {', '.join(missing)}")


def _of_target(chosen: list[Case], target: str) -> tuple[list[Case], dict[str, str]]:
    """(rows whose kernel a call here takes from a module of the target, the others with the reason)."""
    from tilewright.runtime import store

    kept, skipped = [], {}
    for case in chosen:
        found = store.find(case.workload).found
        if found is None or found.target.name != target:
            instead = f"a call takes that of {found.target.name}" if found else "there is none for another target"
            build = f"{store.build_command(case.workload.name, target)}, where its space serves the workload"
            skipped[case.name] = f"no module for {target}, {instead}; build it: {build}"
        else:
            kept.append(case)
    return kept, skipped


def _limits(targets: set[str], threads: int) -> dict[str, Limits]:
    """The machine's limits with the instructions of each target that they are known for."""
    from tilewright.codegen import roofline

    try:
        return {target: roofline.measure(target, threads) for target in sorted(targets) if target in roofline.FLAGS}
    except roofline.RooflineError as error:
        raise click.ClickException(str(error)) from error


def _row(
    case: Case, artifact: Artifact, roots: Roots | None, limits: Limits | None, rounds: int, seconds: float
) -> Row:
    from tilewright.codegen.bench import cases, protocol, report

    setup = cases.set_up(case, roots=roots)
    protocol.check(setup.contestants, setup.tolerances)
    contest = protocol.measure(setup.contestants, rounds=rounds, seconds=seconds)
    warm = None
    if any(len(item.calls) > 1 for item in setup.contestants):
        again = protocol.warm(setup.contestants)
        warm = protocol.measure([again], rounds=rounds, seconds=min(1.0, seconds)).timings[0]
    return report.Row(
        name=case.name,
        target=artifact.target.name,
        origin=artifact.manifest.origin,
        memory=setup.memory,
        flops=setup.flops,
        bytes=setup.bytes,
        limit_us=1e6 * limits.seconds(setup.flops, setup.bytes) if limits is not None else None,
        required=case.required,
        contest=contest,
        share=case.share,
        most_us=case.most_us,
        warm=warm,
    )
