"""The command of the search: arguments, target, resuming, display, limits of the machine."""

import io
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from rich.console import Console
from search_toy import TARGET

from tilewright.codegen import roofline
from tilewright.codegen.search import command
from tilewright.codegen.search.progress import Progress, Row
from tilewright.codegen.search.tune import Options
from tilewright.schedules.targets import TARGETS
from tilewright.schedules.workload import Workload


def test_the_roofline_is_the_slower_of_the_two_limits():
    limits = roofline.Limits(flops=1e9, bandwidth=1e8)
    assert limits.seconds(1e9, 1e7) == 1.0
    assert limits.seconds(1e7, 1e9) == 10.0


def test_the_machine_is_measured():
    limits = roofline.measure(TARGET)
    assert 1e9 < limits.flops < 1e14
    assert 1e8 < limits.bandwidth < 1e13
    assert roofline.measure(TARGET) is limits


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CC", "no-such-cc")
    with pytest.raises(roofline.RooflineError, match="no-such-cc"):
        roofline.measure.__wrapped__(TARGET)


def test_the_table_of_a_terminal_shows_every_column():
    rows = [Row("toy", 10, state="search", trials=3, failures=1, best_us=50.0, flops=1e6, limit_us=25.0)]
    text = io.StringIO()
    display = Progress(Console(file=text, force_terminal=True, width=120), rows)
    with display.shown():
        display.update(rows[0])
    for shown in ("workload", "% roofline", "ETA", "3/10", "50.0", "20.0", "50", "0:00"):
        assert shown in text.getvalue()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["paged_decode-bf16-g4"], "give all"),
        (["merge-bf16"], "nothing to search"),
        (["paged_decode-bf16-general"], "nothing to search"),
        (["--target", "x87"], "expected auto or one of"),
        (["--trials", "0"], "trials"),
    ],
)
def test_wrong_arguments_of_the_command_are_explained(arguments, says):
    outcome = CliRunner().invoke(command.command, arguments)
    assert outcome.exit_code == 2
    assert says in outcome.output


def test_auto_takes_the_best_target_that_has_such_kernels(monkeypatch):
    decode = Workload("paged_decode", "bf16", 4, 128, 128)
    able = {"x86-avx2"}
    names = {target.features: name for name, target in TARGETS.items()}
    monkeypatch.setattr(
        "tilewright.runtime.features.missing_features",
        lambda features: () if names[features] in able else ("amx_tile",),
    )
    assert command.choose_target(decode, "auto") == "x86-avx2"
    with pytest.raises(click.ClickException, match="no amx_tile"):
        command.choose_target(decode, "x86-amx")
    able.add("x86-amx")
    assert command.choose_target(decode, "auto") == "x86-amx"
    assert command.choose_target(Workload("paged_decode", "f32", 4, 128, 128), "auto") == "x86-avx2"
    able.clear()
    with pytest.raises(click.ClickException, match="runs no target"):
        command.choose_target(decode, "auto")


def test_the_command_that_resumes_is_complete():
    options = Options(
        trials=64, seconds=300.0, seed=7, resume=False, records=Path("tuning logs"), work=Path("build/tune"), builders=2
    )
    text = command.resume_command([Workload("paged_decode", "bf16", 4, 128, 128)], TARGET, options)
    assert text == (
        "tilewright tune paged_decode-bf16-g4-d128 --target x86-avx2 --trials 64 --seconds 300 --seed 7 --resume "
        "--out 'tuning logs' --work build/tune"
    )
