"""`tilewright bench --target` of a GPU."""

from __future__ import annotations

import shlex
import sys

import click
import torch

from tilewright.codegen.bench import gpu_cases, gpu_peers, machine, report
from tilewright.codegen.records import current_environment
from tilewright.runtime import store
from tilewright.schedules.catalog import all_workloads

ROUNDS, SECONDS = 20, 1.0


def bench(
    target: str, chosen: list[gpu_cases.GpuCase], *, with_costs: bool, rounds: int | None, seconds: float | None
) -> report.Report:
    """Time the chosen cases on the first GPU, and what a call costs the host.

    Raises:
        click.ClickException: no GPU, or modules are missing or not for it.
    """
    if not torch.cuda.is_available():
        raise click.ClickException(f"{target}: torch sees no CUDA device")
    offered = set(all_workloads(target))
    skipped = {case.name: f"{target} has no such kernel" for case in chosen if case.workload not in offered}
    chosen = [case for case in chosen if case.workload in offered]
    needed = dict.fromkeys(item for case in (*chosen, gpu_cases.CASES[0]) for item in gpu_cases.needed(case.workload))
    found = {workload: store.find(workload, target).found for workload in needed}
    missing = [workload.name for workload, artifact in found.items() if artifact is None]
    if missing:
        raise click.ClickException(
            f"{len(missing)} modules are missing or cannot run here; build them: tilewright build {' '.join(missing)} "
            f"--target {target} (tilewright list --target {target} --verbose says more)"
        )
    limits, canary, rows = gpu_cases.limits(), machine.Canary(), []
    with torch.no_grad():
        for case in chosen:
            click.echo(f"{case.name} ...", err=True)
            artifact = found[case.workload]
            assert artifact is not None
            setup, contest = gpu_cases.time_case(
                case, rounds=rounds or ROUNDS, seconds=SECONDS if seconds is None else seconds
            )
            rows.append(
                report.Row(
                    name=case.name,
                    target=target,
                    origin=artifact.manifest.origin,
                    memory=setup.memory,
                    flops=setup.flops,
                    bytes=setup.bytes,
                    limit_us=1e6 * limits.seconds(setup.flops, setup.bytes),
                    required=case.required,
                    most_us=case.most_us,
                    contest=contest,
                )
            )
            del setup
            torch.cuda.empty_cache()
        costs = []
        if with_costs:
            costs = gpu_cases.costs() + gpu_cases.balance_costs(rounds=rounds or ROUNDS, seconds=SECONDS)
    return report.Report(
        command=shlex.join(["tilewright", *sys.argv[1:]]),
        machine=gpu_cases.describe(),
        environment=current_environment(),
        threads=torch.get_num_threads(),
        flops=limits.flops,
        bandwidth=limits.bandwidth,
        others=canary.others(),
        rows=rows,
        costs=costs,
        skipped=skipped | gpu_peers.left_out,
        product="bf16 matrix product",
    )
