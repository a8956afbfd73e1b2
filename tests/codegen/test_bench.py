"""The bench at tiny sizes: what it compares, what it prints, what it refuses. No time is judged."""

import dataclasses
import json
import math
import shutil
import time

import msgspec
import pytest
import torch
from click.testing import CliRunner

from tilewright.codegen import build, cli
from tilewright.codegen.bench import cases, command, machine, report, setups
from tilewright.codegen.bench.protocol import (
    WARM_UP,
    Call,
    Contest,
    Contestant,
    Timing,
    WrongResultError,
    check,
    measure,
)
from tilewright.codegen.records import current_environment
from tilewright.codegen.tolerances import Tolerance
from tilewright.runtime import dispatch, env, store
from tilewright.schedules.workload import Workload

TARGET = "x86-avx2"
TINY = {
    "paged_decode": (2, 65, 2),
    "paged_extend": (1, 130, 2),
    "lightning_extend": (1, 128, 2),
    "lightning_decode": (3, 1, 2),
}
EXACT = Tolerance(1e-6, 1e-6)


def tiny(case):
    batch, tokens, heads = TINY[case.workload.operator]
    return dataclasses.replace(case, batch=batch, tokens=tokens, heads=heads)


def ready(case):
    """The case at a tiny size, its modules built (in `make test` they are)."""
    for workload in cases.needed(case.workload):
        build.build(workload, TARGET)
    return tiny(case)


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    dispatch.kernel.cache_clear()
    yield
    dispatch.kernel.cache_clear()


@pytest.mark.parametrize("case", list({case.workload: case for case in cases.CASES}.values()), ids=lambda c: c.name)
def test_all_forms_of_a_case_compute_the_same(case):
    setup = cases.set_up(ready(case), cold=1 << 10)
    assert sum(item.role == "ours" for item in setup.contestants) == 1
    assert sum(item.role == "peer" for item in setup.contestants) >= 2
    check(setup.contestants, setup.tolerances)
    best = measure(setup.contestants, rounds=2, seconds=0).of("peer")
    assert best is not None and best.median > 0


def test_memory_bound_cases_go_round_copies_that_exceed_what_is_asked():
    case = ready(next(case for case in cases.CASES if case.workload.operator == "lightning_decode"))
    state_bytes = 3 * 2 * 128 * 128 * 4
    setup = cases.set_up(case, cold=5 * state_bytes)
    assert {len(item.calls) for item in setup.contestants} == {6}
    assert f"6 state pools of {state_bytes / 1e6:.0f} MB" in setup.memory
    assert machine.cold_bytes() >= 2 * (machine.last_level_cache() or 0) > 0


def test_flops_and_bytes_are_those_of_the_operator():
    decode = cases.set_up(ready(next(c for c in cases.CASES if c.workload.operator == "paged_decode")), cold=1)
    assert decode.flops == 2 * 65 * 8 * 4 * 128
    assert decode.bytes == (2 * 65 * 2 + 2 * 8) * 2 * 128 * 4
    extend = cases.set_up(ready(next(c for c in cases.CASES if c.workload.operator == "paged_extend")), cold=1)
    assert extend.flops == sum(range(1, 131)) * 8 * 4 * 128


def constant(name, role, *values):
    return Contestant(
        name, role, [Call(lambda v=v: v, lambda returned: (torch.tensor([[returned, 1.0]]),)) for v in values]
    )


@pytest.mark.parametrize("wrong", [1.5, math.nan, math.inf])
def test_a_wrong_peer_is_caught(wrong):
    ours, right = constant("ours", "ours", 1.0, 1.0), constant("right", "peer", 1.0)
    check([ours, right], (EXACT,))
    for values in ((wrong,), (1.0, wrong)):
        with pytest.raises(WrongResultError, match="liar: output 0"):
            check([right, constant("liar", "peer", *values), ours], (EXACT,))


def test_a_result_of_another_shape_is_wrong():
    ours = Contestant("ours", "ours", [Call(lambda: None, lambda _: (torch.ones(2, 3),))])
    broadcast = Contestant("thin", "peer", [Call(lambda: None, lambda _: (torch.ones(1, 3),))])
    with pytest.raises(WrongResultError, match=r"thin: output 0 \[1, 3\]"):
        check([ours, broadcast], (EXACT,))


@pytest.mark.parametrize("operator", ["paged_decode", "lightning_extend", "lightning_decode"])
def test_a_wrong_peer_fails_the_command(operator, monkeypatch, tmp_path):
    case = ready(next(case for case in cases.CASES if case.workload.operator == operator))
    form = operator.removeprefix("paged_")
    honest = getattr(setups.peers, form)

    def lying(*arguments):
        forms = honest(*arguments)
        name = list(forms)[-1]
        return forms | {name: lambda run=forms[name]: run() * 1.05}

    monkeypatch.setattr(setups.peers, form, lying)
    monkeypatch.setattr(cases, "CASES", (case,))
    path = tmp_path / "times.json"
    result = CliRunner().invoke(cli.main, ["bench", operator, "--json", str(path)])
    assert result.exit_code == 1
    assert "times the tolerance away" in result.output
    assert not path.exists()


def test_rounds_are_fair():
    order = []
    contestants = [
        Contestant(
            name,
            role,
            [Call(lambda name=name, copy=copy: order.append((name, copy)), lambda _: ()) for copy in range(3)],
            lambda name=name: order.append((name, "prepared")),
        )
        for name, role in (("a", "ours"), ("b", "peer"), ("c", "peer"))
    ]
    contest = measure(contestants, rounds=40, seconds=0)
    assert [(item.name, item.rounds) for item in contest.timings] == [("a", 40), ("b", 40), ("c", 40)]
    assert contest.hopeless == {}
    calls = order[1::2]
    assert order[::2] == [(name, "prepared") for name, _ in calls]
    timed = calls[3 * WARM_UP :]
    rounds = [timed[i : i + 3] for i in range(0, len(timed), 3)]
    assert all({name for name, _ in round_} == {"a", "b", "c"} for round_ in rounds)
    assert len({tuple(name for name, _ in round_) for round_ in rounds}) == 6
    assert [copy for name, copy in calls if name == "b"][:7] == [1, 2, 0, 1, 2, 0, 1]


def test_rounds_go_on_until_the_time_is_over_and_hopeless_peers_do_not_race():
    nap = Contestant("ours", "ours", [Call(lambda: time.sleep(0.001), lambda _: ())])
    quick = Contestant("quick", "peer", [Call(lambda: time.sleep(0.001), lambda _: ())])
    slow = Contestant("slow", "peer", [Call(lambda: time.sleep(0.2), lambda _: ())])
    begin = time.monotonic()
    contest = measure([nap, quick, slow], rounds=2, seconds=0.2)
    assert time.monotonic() - begin > 0.2
    assert [item.name for item in contest.timings] == ["ours", "quick"]
    assert contest.timings[0].rounds == contest.timings[1].rounds > 2
    assert contest.hopeless["slow"] >= 200e3


def row(name="w", ours=100.0, required=1.5, untuned=None, peer=200.0, origin="tuned"):
    timings = [Timing("tilewright", "ours", ours, ours, ours, 9), Timing("slow form", "peer", 9e9, 9e9, 9e9, 9)]
    timings.append(Timing("best form", "peer", peer, peer, peer * 1.5, 9))
    if untuned is not None:
        timings.append(Timing("tilewright untuned", "untuned", untuned, untuned, untuned, 9))
    return report.Row(name, TARGET, origin, "warm", 2e5, 1e5, 25.0, required, Contest(timings, {}))


def outcome(*rows, others=0.0):
    return report.Report("tilewright bench", "a machine", current_environment(), 2, 1e11, 1e10, others, list(rows), [])


def test_a_row_says_what_it_means():
    cell = dict(zip(report.COLUMNS, report.cells(row(untuned=130.0)), strict=True))
    assert cell == {
        "workload": "w", "us": "100~", "quartiles": "100-100", "warm us": "", "GB/s": "1.0", "TFLOP/s": "0.002",
        "% of limit": "25", "best peer": "best form", "peer us": "200", "ratio": "2.00", "required": "1.5x", "": "ok",
        "untuned us": "130", "gain": "1.30",
    }  # fmt: skip
    assert row(peer=149.0).verdict == "short"
    assert row(required=None).verdict == ""
    assert report.cells(row(origin="default"))[-2:] == ("no record", "")


def test_every_promise_of_a_row_must_be_kept():
    promised = msgspec.structs.replace
    slow = row()
    assert promised(slow, share=0.2).verdict == "ok" and promised(slow, share=0.3).verdict == "short"
    assert promised(slow, most_us=100.0).verdict == "ok" and promised(slow, most_us=99.0).verdict == "short"
    assert promised(slow, share=0.2, limit_us=None).verdict == "short", "a share of an unknown limit"
    every = promised(slow, share=0.85, most_us=150.0, warm=Timing("w", "ours", 42.0, 42.0, 42.0, 9))
    cell = dict(zip(report.COLUMNS, report.cells(every), strict=True))
    assert (cell["required"], cell[""], cell["warm us"]) == ("1.5x, 85%, 150 us", "short", "42")


def test_the_gain_is_the_median_of_the_rows_with_a_record():
    rows = [row(untuned=110.0), row(untuned=300.0), row(untuned=140.0), row(origin="default")]
    assert outcome(*rows).median_gain == 1.4
    assert outcome(rows[-1]).median_gain is None
    assert "1.40 on the median of 3 workloads" in report.plain(outcome(*rows))


def test_a_busy_machine_is_named():
    assert "others kept 0.5 CPUs busy" in report.plain(outcome(row(), others=0.5))
    assert "others kept" not in report.plain(outcome(row()))


def test_the_command_prints_a_plain_table_and_writes_json(monkeypatch, tmp_path):
    chosen = tuple(ready(case) for case in cases.CASES if case.workload.dtype == "f32")
    monkeypatch.setattr(cases, "CASES", chosen)
    monkeypatch.setattr(machine, "cold_bytes", lambda: 1)
    monkeypatch.setattr(cases, "cold_bytes", lambda: 1)
    path = tmp_path / "times.json"
    arguments = ["bench", "paged_decode", "lightning_decode", "--rounds", "2", "--seconds", "0", "--no-untuned"]
    result = CliRunner().invoke(cli.main, [*arguments, "--json", str(path)])
    assert result.exit_code == 0, result.output
    header = next(line for line in result.stdout.splitlines() if line.startswith("workload"))
    assert header.split() == " ".join(report.COLUMNS).split()
    assert "paged_extend" not in result.stdout
    data = json.loads(path.read_text())
    assert [item["name"] for item in data["rows"]] == [c.name for c in chosen if "decode" in c.workload.operator]
    first = data["rows"][0]
    times = {item["name"]: item["median"] for item in first["contest"]["timings"]}
    assert first["ratio"] == pytest.approx(times[first["best_peer"]] / times["tilewright"])
    assert first["best_peer"] in ("sdpa enable_gqa", "sdpa group as rows")
    assert data["flops"] > 0 and data["bandwidth"] > 0 and data["threads"] == torch.get_num_threads()

    result = CliRunner().invoke(cli.main, [*arguments, "--markdown"])
    assert "| " + " | ".join(report.COLUMNS) + " |" in result.stdout
    assert machine.describe() in result.stdout


def test_names_that_fit_nothing_and_checked_mode_are_refused(monkeypatch):
    assert "see tilewright bench --list" in CliRunner().invoke(cli.main, ["bench", "nothing-like-this"]).output
    server = CliRunner().invoke(cli.main, ["bench", "--list", "--target", "x86-avx2", "decode-bf16"]).output
    assert "paged_decode-bf16-g4-d128 8x2048-h32/8" in server
    listed = CliRunner().invoke(cli.main, ["bench", "--list"]).output.splitlines()
    assert listed == [*(case.name for case in cases.CASES), command.COSTS]
    quick = CliRunner().invoke(cli.main, ["bench", "--list", "--quick"]).output.splitlines()
    assert len(quick) == 4 and set(quick) < set(listed)
    monkeypatch.setenv("TILEWRIGHT_CHECK", "1")
    assert "TILEWRIGHT_CHECK=1" in CliRunner().invoke(cli.main, ["bench"]).output


def test_missing_modules_are_named_with_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "checkout", lambda: tmp_path / "checkout")
    result = CliRunner().invoke(cli.main, ["bench", "paged_decode-f32"])
    assert result.exit_code == 1
    assert "tilewright build paged_decode-f32-g4-d128 merge-f32" in result.output


def test_the_untuned_contestant_runs_the_other_root_and_the_process_is_as_before(tmp_path, monkeypatch):
    case = ready(next(case for case in cases.CASES if case.workload.operator == "lightning_decode"))
    usual = build.default_root()
    for name in (case.workload.name, "launcher"):
        shutil.copytree(usual / TARGET / name, tmp_path / TARGET / name)
    loaded = []
    real = store.load
    monkeypatch.setattr(dispatch.store, "load", lambda workload: loaded.append(real(workload)) or loaded[-1])
    with cases.Roots(tmp_path) as roots:
        setup = cases.set_up(case, roots=roots, cold=1)
        check(setup.contestants, setup.tolerances)
        for contestant in setup.contestants[:2]:
            loaded.clear()
            contestant.prepare()
            assert [item.path.is_relative_to(tmp_path) for item in loaded] == [contestant.role == "untuned"]
            contestant.calls[0].run()
            assert len(loaded) == 1, "the timed call finds its kernel in the dispatcher's memory"
    assert not env.MODULE_PATH.raw


def test_untuned_builds_leave_the_record_aside(monkeypatch, tmp_path):
    workload = Workload("lightning_decode", "f32", None, 128, 128)
    build.build(workload, TARGET, root=build.default_root())
    assert build.stale([workload], TARGET) == []
    monkeypatch.setattr(build, "recorded_decisions", lambda *_: {"no_such_decision": 1})
    assert build.stale([workload], TARGET) == [workload]
    origins = [build._chosen(workload, build.get_target(TARGET), None, untuned)[0] for untuned in (False, True)]
    assert origins == ["tuned", "default"]
    result = CliRunner().invoke(cli.main, ["build", workload.name, "--untuned"])
    assert result.exit_code == 2 and "--untuned: give a --root" in result.output
