"""The `tilewright` command: parses, calls, prints. Heavy libraries are imported inside the commands only."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path

import click

import tilewright
from tilewright.runtime.errors import Error
from tilewright.schedules.targets import TARGETS

# Commands with rooms of their own: `command` of these modules of tilewright.codegen, which must import quickly.
ROOMS = {"tune": "search.command", "measure": "search.measure", "bench": "bench.command", "demo": "demo.command"}


class RoomGroup(click.Group):
    """A group whose commands in ROOMS are imported on demand; errors of ours become one message and exit code 1."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Own commands and the rooms that exist."""
        here = Path(__file__).parent
        rooms = [name for name, room in ROOMS.items() if here.joinpath(*room.split(".")).with_suffix(".py").is_file()]
        return sorted([*super().list_commands(ctx), *rooms])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """An own command, or the one of a room."""
        own = super().get_command(ctx, cmd_name)
        if own is not None or cmd_name not in self.list_commands(ctx):
            return own
        return importlib.import_module(f"tilewright.codegen.{ROOMS[cmd_name]}").command

    def invoke(self, ctx: click.Context) -> object:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except Error as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=RoomGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(tilewright.__version__, prog_name="tilewright")
def main() -> None:
    """Attention kernels found by a compiler's search: tune, build, inspect."""


@main.command("list")
@click.option("--target", type=click.Choice(list(TARGETS)), help="This target only; default: every packaged one.")
@click.option("--missing", is_flag=True, help="Only what has no usable module.")
@click.option("--verbose", is_flag=True, help="Also where each was looked for and why it was passed over.")
@click.option("--json", "as_json", is_flag=True, help="One JSON list for machines.")
def list_command(target: str | None, missing: bool, verbose: bool, as_json: bool) -> None:
    """What is in the catalogue, what is built, and from where it would be loaded."""
    from tilewright.runtime import store
    from tilewright.schedules.catalog import all_workloads

    names = [target] if target else [item.name for item in store.candidate_targets()]
    pairs = [(workload, name) for name in names for workload in all_workloads(name)]
    looked = [(workload, name, store.find(workload, name)) for workload, name in pairs]
    if as_json:
        rows = [
            {
                "workload": workload.name,
                "target": name,
                "state": search.state,
                "origin": search.found.manifest.origin if search.found else None,
                "layer": search.found.layer if search.found else None,
                "folder": str(search.found.folder) if search.found else None,
                "passed_over": [str(reason) for reason in search.passed_over],
            }
            for workload, name, search in looked
            if not (missing and search.found)
        ]
        click.echo(json.dumps(rows, indent=1))
        return
    width = max((len(workload.name) for workload, _, _ in looked), default=0)
    for workload, name, search in looked:
        if missing and search.found:
            continue
        detail = f"  {search.found.manifest.origin} ({search.found.layer})" if search.found else ""
        click.echo(f"{workload.name:<{width}}  {name:<9}  {search.state}{detail}")
        if verbose:
            for line in [f"loads {search.found.folder}"] if search.found else []:
                click.echo(f"    {line}")
            for reason in search.passed_over:
                click.echo(f"    {reason}")
    states = Counter(search.state for _, _, search in looked)
    click.echo(", ".join(f"{count} {state}" for state, count in sorted(states.items())))


@main.command("build")
@click.argument("workloads", nargs=-1, metavar="[WORKLOAD]...")
@click.option("--all", "everything", is_flag=True, help="Every workload of the target's catalogue.")
@click.option(
    "--target",
    "targets",
    type=click.Choice([*TARGETS, "auto"]),
    multiple=True,
    default=["auto"],
    help="May be given more than once; auto: the best that runs on this machine.",
)
@click.option(
    "--root", type=click.Path(file_okay=False, path_type=Path), help="Where; default: build/modules or the user cache."
)
@click.option("--force", is_flag=True, help="Build even what is up to date.")
@click.option("--untuned", is_flag=True, help="Leave the committed records aside; needs a --root of its own.")
@click.option("--jobs", type=click.IntRange(1), default=2, show_default=True, help="Compiler processes (0.5 GB each).")
@click.option("--dry-run", is_flag=True, help="Only say what would be built.")
def build_command(
    workloads: tuple[str, ...],
    everything: bool,
    targets: tuple[str, ...],
    root: Path | None,
    force: bool,
    untuned: bool,
    jobs: int,
    dry_run: bool,
) -> None:
    """Compile modules from the committed records, or from the untuned default where there is none.

    WORKLOAD is a name such as paged_decode-bf16-g4-d128 (see `tilewright list`); any legal name may be given, also one
    outside the catalogue.
    """
    from tilewright.codegen import build
    from tilewright.runtime import store
    from tilewright.schedules.catalog import all_workloads
    from tilewright.schedules.workload import Workload, WorkloadError

    if bool(workloads) == everything:
        raise click.UsageError("name workloads, or give --all (not both)")
    if untuned and root is None:
        raise click.UsageError(
            "--untuned: give a --root; in the default one they would take the place of the tuned modules"
        )
    try:
        named = [Workload.parse(name) for name in workloads]
    except WorkloadError as error:
        raise click.UsageError(str(error)) from error
    base = root or store.default_root()
    for target in dict.fromkeys(store.buildable_target() if name == "auto" else name for name in targets):
        todo = list(all_workloads(target)) if everything else named
        pending = todo if force else build.stale(todo, target, base, untuned=untuned)
        click.echo(f"{target}: {len(pending)} of {len(todo)} to build in {base / target}")
        if dry_run:
            for workload in pending:
                click.echo(f"  {workload.name}")
            continue
        count = 0

        def report(result: build.Built | Exception, workload: Workload, total: int = len(pending)) -> None:
            nonlocal count
            if isinstance(result, build.Built) and not result.fresh:
                return
            count += 1
            outcome = result.origin if isinstance(result, build.Built) else "FAILED"
            click.echo(f"  {count}/{total} {workload.name}: {outcome}")

        build.build_all(todo, target, base, force=force, untuned=untuned, jobs=jobs, report=report)


@main.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for a bug report.")
@click.pass_context
def doctor_command(ctx: click.Context, as_json: bool) -> None:
    """Check CPU, libraries and modules, run every module once; exit code 1 on trouble."""
    from tilewright.codegen import doctor

    checks = doctor.examine()
    click.echo(doctor.to_json(checks) if as_json else doctor.render(checks))
    if not doctor.healthy(checks):
        ctx.exit(1)


@main.command("env")
def env_command() -> None:
    """The TILEWRIGHT_* variables, their values and meanings."""
    from tilewright.runtime import env

    for variable in env.VARIABLES:
        click.echo(f"{variable.name}={variable.raw}")
        click.echo(f"    {variable.doc}")
        variable.get()


if __name__ == "__main__":
    main()
