"""The command line: what it prints, what it exits with."""

import json

import pytest
import torch
import toys
from click.testing import CliRunner

from tilewright.codegen import cli, doctor, smoke
from tilewright.runtime import env, store
from tilewright.runtime.store import Module
from tilewright.schedules.catalog import TUNE_PRESET, all_workloads
from tilewright.schedules.targets import TARGETS
from tilewright.schedules.workload import Workload


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run the command in a world without modules; returns click's result."""
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "checkout", lambda: tmp_path / "checkout")
    return lambda *arguments: CliRunner().invoke(cli.main, arguments)


def test_help_lists_the_commands_that_exist(run):
    result = run("--help")
    assert result.exit_code == 0
    for name in ("build", "doctor", "env", "list"):
        assert f"\n  {name} " in result.output
    assert run("no-such-command").exit_code == 2


def test_rooms_are_imported_on_demand(run, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "ROOMS", {"ghost": "no_such_room.command"})
    assert "ghost" not in run("--help").output
    assert run("ghost").exit_code == 2


def test_list_shows_every_workload_and_its_state(run):
    result = run("list")
    assert result.exit_code == 0
    count = sum(len(all_workloads(name)) for name, target in TARGETS.items() if target.packaged)
    assert result.output.splitlines()[-1] == f"{count} missing"
    assert len(result.output.splitlines()) == count + 1


def test_list_in_json_says_where_a_module_would_come_from(run, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_MODULE_PATH", str(toys.built()))
    rows = {row["workload"]: row for row in json.loads(run("list", "--target", toys.TARGET, "--json").output)}
    assert list(rows) == [workload.name for workload in all_workloads(toys.TARGET)]
    assert rows["merge-f32"]["state"] == "ready"
    assert rows["merge-f32"]["layer"] == "TILEWRIGHT_MODULE_PATH"
    assert rows["merge-f32"]["folder"] == str(toys.built() / toys.TARGET / "merge-f32")
    assert rows["merge-fp16"]["state"] == "missing"
    missing = json.loads(run("list", "--target", toys.TARGET, "--json", "--missing").output)
    assert [row["workload"] for row in missing] == [name for name, row in rows.items() if row["state"] == "missing"]
    verbose = run("list", "--target", toys.TARGET, "--verbose").output
    assert f"loads {toys.built() / toys.TARGET / 'merge-f32'}" in verbose


def test_build_wants_names_or_all_and_knows_names(run):
    assert "name workloads, or give --all" in run("build").output
    assert "(not both)" in run("build", "merge-f32", "--all").output
    result = run("build", "paged_decode-bf16-g4-d128v128")
    assert result.exit_code == 2
    assert "did you mean 'paged_decode-bf16-g4-d128'?" in result.output
    assert "expected one of" in run("build", "matmul-f32").output


def test_a_dry_run_builds_nothing(run, tmp_path):
    result = run(
        "build", "merge-f32", "--target", "x86-avx2", "--target", "x86-amx", "--dry-run", "--root", str(tmp_path / "r")
    )
    assert result.exit_code == 0, result.output
    assert result.output.count("  merge-f32") == 2
    assert not (tmp_path / "r").exists()


def test_a_failed_build_is_one_message_and_exit_code_1(run, tmp_path):
    result = run("build", "lightning_decode-f32-d3v5", "--target", "x86-amx", "--root", str(tmp_path / "r"))
    assert result.exit_code == 1
    assert "lightning_decode-f32-d3v5: FAILED" in result.output
    assert "Error: 1 of 1 workloads for x86-amx failed:" in result.output
    assert "Traceback" not in result.output


def test_env_prints_every_variable_and_refuses_a_wrong_value(run, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_STRICT", "1")
    result = run("env")
    assert result.exit_code == 0
    assert [line.split("=")[0] for line in result.output.splitlines()[::2]] == [item.name for item in env.VARIABLES]
    assert "TILEWRIGHT_STRICT=1" in result.output
    monkeypatch.setenv("TILEWRIGHT_STRICT", "yes")
    result = run("env")
    assert result.exit_code == 1
    assert "TILEWRIGHT_STRICT: got 'yes', expected 0 or 1" in result.output


def test_doctor_fails_without_modules_and_says_what_to_do(run):
    result = run("doctor")
    assert result.exit_code == 1
    assert "tilewright build --all" in result.output
    report = json.loads(run("doctor", "--json").output)
    assert not report["healthy"]
    assert {check["name"] for check in report["checks"] if check["state"] == "fail"} == {"modules"}


def test_doctor_finds_a_module_that_computes_wrongly(run, monkeypatch):
    """The toys load and run, but are no merge."""
    monkeypatch.setenv("TILEWRIGHT_MODULE_PATH", str(toys.built()))
    result = run("doctor")
    assert result.exit_code == 1
    assert "run merge-f32" in result.output


def correct_merge(part_o, part_lse, rows, sinks, out, lse):
    row, first, count, stride = rows[0].tolist()
    index = torch.arange(first, first + count * stride, stride)
    out[row] = (part_lse[index].softmax(0)[..., None] * part_o[index]).sum(0).to(out.dtype)
    lse[row] = part_lse[index].logsumexp(0)


def test_a_smoke_run_accepts_right_and_refuses_wrong_results(tmp_path):
    workload = Workload("merge", "f32")

    def module(function):
        return Module(function, {}, workload, "x86-avx2", tmp_path / "module.so", "default")

    assert smoke.smoke(module(correct_merge)) <= 1

    def wrong(*arguments):
        correct_merge(*arguments)
        arguments[4].mul_(1.001)

    with pytest.raises(smoke.SmokeError, match="smoke run: expected .* at most 1 times the tolerance, got [0-9]{3}"):
        smoke.smoke(module(wrong))

    def empty(*arguments):
        arguments[4].fill_(torch.nan)

    with pytest.raises(smoke.SmokeError, match="got nan"):
        smoke.smoke(module(empty))


def test_doctor_counts_openmp_libraries():
    assert [path for path in doctor.openmp_libraries() if "libgomp" in path]


def test_the_catalogue_has_what_it_promises():
    avx2 = all_workloads("x86-avx2")
    assert len(set(avx2)) == len(avx2) == 52
    assert sum(workload.general for workload in avx2) == 18
    assert set(TUNE_PRESET) <= set(avx2)
    assert all(Workload.parse(workload.name) == workload for workload in avx2)
    tiled = set(all_workloads("x86-amx"))
    assert tiled == set(all_workloads("x86-amx-emulated"))
    paged = {w for w in avx2 if w.operator.startswith("paged") and w.dtype == "bf16" and not w.general}
    assert {w for w in paged if not w.tree} <= tiled
    assert {w.dtype for w in tiled} == {"bf16"} and not any(w.general for w in tiled)
