"""The search on the toy problem of search_toy.py: real candidates, real worker processes."""

import io
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import msgspec
import pytest
import torch
from click.testing import CliRunner
from filelock import FileLock
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))  # the workers inherit it
from search_toy import TARGET, ToyProblem, definition, nothing, pid, refuse

from tilewright.codegen import records, roofline
from tilewright.codegen.bench import inputs
from tilewright.codegen.search import command, space, strategy
from tilewright.codegen.search.builder import Builder, root_of
from tilewright.codegen.search.progress import Progress, Row
from tilewright.codegen.search.runner import Runner
from tilewright.codegen.search.trials import Trial, Trials
from tilewright.codegen.search.tune import BUSY, Options, Stop, tune, tune_with
from tilewright.codegen.search.worker import Interrupted, Pool, WorkerError
from tilewright.schedules.spaces import Space
from tilewright.schedules.targets import TARGETS
from tilewright.schedules.workload import Workload

FAILURES = {
    "build failed": 1,
    "build crashed": 1,
    "build timed out": 1,
    "crashed": 1,
    "timed out": 1,
    "wrong result": 1,
}  # fmt: skip


class Recorder(Progress):
    """The real display into a string; calls `on_trial(count)` after each trial."""

    def __init__(self, rows, on_trial=lambda count: None):
        self.text = io.StringIO()
        super().__init__(Console(file=self.text, force_terminal=False, width=200), rows)
        self.on_trial = on_trial

    def update(self, row):
        super().update(row)
        if row.searching and row.trials:
            self.on_trial(row.trials)


def run(folder, problem, workers=None, on_trial=lambda count: None, **changes):
    """One search with its own worker processes, or with `workers` (builder, runner) that stay."""
    fields = {
        "trials": 40, "seconds": 240.0, "seed": 1, "resume": True,
        "records": folder / "records", "work": folder / "work", "build_seconds": 5.0, "run_seconds": 4.0, "builders": 2,
    }  # fmt: skip
    options = Options(**fields | changes)
    rows = [Row(problem.name, options.trials)]
    display = Recorder(rows, on_trial)
    start = tune if workers is None else lambda *arguments: tune_with(*workers, *arguments)
    (result,) = start([problem], options, display, rows, Stop())
    return result, display.text.getvalue()


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    log = tmp_path_factory.mktemp("workers") / "log"
    with Builder(1, 60.0, log, lambda: False) as builder, Runner(60.0, log, lambda: False) as runner:
        yield builder, runner


def log_of(folder):
    lines = (folder / "work" / TARGET / "toy" / "trials.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[1:]]


def built(folder):
    return [
        tuple(json.loads(line).values()) for line in (folder / "work" / TARGET / "builds.log").read_text().splitlines()
    ]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """One complete search over the faulty space: (folder, result, what was printed)."""
    folder = tmp_path_factory.mktemp("faulty")
    return folder, *run(folder, ToyProblem(faulty=True))


@pytest.fixture
def again(faulty, tmp_path):
    """A copy of that search's folders, to go on from; few seconds, as nothing is left to try."""
    shutil.copytree(faulty[0], tmp_path, dirs_exist_ok=True)
    return tmp_path


# ---- the whole loop


def test_failing_candidates_are_counted_and_do_not_stop_the_search(faulty):
    folder, result, text = faulty
    assert not result.error
    assert result.record.failures == FAILURES
    assert result.record.trials == 11  # all legal points: 12 less (16, 16)
    reasons = {(row["decisions"]["tile"], row["decisions"]["vector"]): row["reason"] for row in log_of(folder)}
    assert reasons[8, 1] == "build crashed"
    assert reasons[4, 16] == "wrong result"
    assert "trial 11/40" in text
    assert "6 failed" in text


def test_the_record_says_what_was_found(faulty):
    folder, result, _ = faulty
    record = records.load(records.path_of(folder / "records", TARGET, "toy"))
    assert record == result.record
    assert record.default.decisions == {"tile": 1, "vector": 1}
    assert record.us < record.default.us / 2  # scalar against vector code
    assert reasonless(folder, record.decisions)
    assert record.top[0] == records.Timed(record.decisions, record.us)
    assert [timed.us for timed in record.top] == sorted(timed.us for timed in record.top)
    assert record.curve[0][0] == 1
    assert [us for _, us in record.curve] == sorted((us for _, us in record.curve), reverse=True)
    assert 0 <= record.verification.error <= 1
    assert record.verification.cases == 2
    assert record.spread >= 1
    assert ("the machine was busy" in faulty[2]) == (record.spread > BUSY)
    from tvm.s_tir import Schedule, Trace

    schedule = Schedule(definition())  # the trace replays on the definition
    Trace.apply_json_to_schedule(record.trace, schedule)
    assert space.decisions_of(schedule) == record.decisions
    assert "toy," in (folder / "records" / TARGET / "SUMMARY.csv").read_text()


def reasonless(folder, decisions):
    return next(row["reason"] for row in log_of(folder) if row["decisions"] == decisions) == ""


def test_only_candidates_that_may_still_win_are_kept_on_disk(faulty):
    folder, _, _ = faulty
    work = folder / "work" / TARGET / "toy"
    kept = {root_of(work, row["decisions"]) for row in log_of(folder) if not row["reason"]}
    assert set((work / "candidates").iterdir()) == kept


def test_resume_measures_nothing_again(again, workers):
    before = built(again)
    result, text = run(again, ToyProblem(faulty=True), workers, seconds=4.0)
    assert built(again) == before
    assert len(log_of(again)) == 11
    assert result.record.trials == 11
    assert result.record.failures == FAILURES
    assert "set aside" not in text


def test_other_code_starts_anew_and_says_so(again, workers):
    result, text = run(again, ToyProblem(faulty=True, code="2"), workers, trials=1, seconds=4.0)
    assert "set aside" in text
    assert "another code" in text
    assert [row["decisions"] for row in log_of(again)] == [{"tile": 1, "vector": 1}]
    assert len((again / "work" / TARGET / "toy" / "trials.old.jsonl").read_text().splitlines()) == 12
    # The record of this machine is a finalist: what it knew is not lost by a short search.
    assert result.record.us < result.record.default.us / 2


def test_a_winner_that_the_oracle_refuses_is_not_kept(again, workers):
    result, text = run(again, ToyProblem(faulty=True, lies=True), workers, seconds=4.0)
    assert "refused by the oracle" in text
    assert result.record.decisions["vector"] == 1
    assert "nothing was gained" in result.message
    assert result.record.us == result.record.default.us


def elsewhere(record, decisions):
    environment = msgspec.structs.replace(record.environment, cpu="another CPU")
    return msgspec.structs.replace(record, decisions=decisions, us=1e-3, environment=environment)


def test_a_record_of_another_machine_stays_if_it_is_still_the_fastest_here(again, workers):
    old = records.load(records.path_of(again / "records", TARGET, "toy"))
    path = records.write(again / "records", elsewhere(old, old.decisions))
    before = path.read_bytes()
    result, _ = run(again, ToyProblem(faulty=True), workers, seconds=4.0)
    if "is kept" not in result.message:  # another schedule was ahead by more than a tie in this run
        assert result.record.replaced.us > result.record.us
    else:
        assert path.read_bytes() == before


def test_a_record_of_another_machine_gives_way_to_what_is_faster_here(again, workers):
    old = records.load(records.path_of(again / "records", TARGET, "toy"))
    records.write(again / "records", elsewhere(old, old.default.decisions))
    result, _ = run(again, ToyProblem(faulty=True), workers, seconds=4.0)
    assert "replaces the record made on another CPU" in result.message
    written = records.load(records.path_of(again / "records", TARGET, "toy"))
    assert written.replaced.environment.cpu == "another CPU"
    assert written.replaced.decisions == old.default.decisions
    assert written.us < written.replaced.us


def test_ctrl_c_keeps_the_trials_and_resume_completes(tmp_path, workers):
    def press(count):
        if count == 6:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted):
        run(tmp_path, ToyProblem(), on_trial=press, builders=1)
    assert signal.getsignal(signal.SIGINT) is before
    kept = log_of(tmp_path)
    assert 6 <= len(kept) <= 8
    assert not (tmp_path / "records").exists()
    result, _ = run(tmp_path, ToyProblem(), workers, trials=24)
    rows = log_of(tmp_path)
    assert rows[: len(kept)] == kept
    assert len(rows) == 24
    assert len({json.dumps(row["decisions"]) for row in rows}) == 24
    assert result.record.us < result.record.default.us / 2


def test_a_default_that_fails_is_an_error_of_its_workload(tmp_path, workers):
    result, text = run(tmp_path, ToyProblem(broken=True), workers, trials=1, seconds=4.0)
    assert "untuned schedule failed (build failed): this candidate cannot be scheduled" in result.error
    assert result.record is None
    assert result.error in text
    assert not (tmp_path / "records").exists()


# ---- what to try next


def points(**values):
    return Space(
        choices=values,
        default={name: options[0] for name, options in values.items()},
        legal=lambda decisions: decisions.get("a", 1) * decisions.get("d", 1) <= 128,
        module=lambda decisions: None,
        plan=lambda decisions: {},
    )


WIDE = {
    "a": (1, 2, 4, 8, 16, 32),
    "b": (1, 2, 3, 4, 5, 6, 7, 8),
    "c": (0, 1, 2),
    "d": (1, 2, 4, 8, 16),
    "e": tuple(range(10)),
}


def seconds_of(decisions):
    """A made-up time with its least, 1 ms, at a=8 b=6 c=1 d=4 e=7; c=2 fails."""
    if decisions["c"] == 2:
        return None
    distance = 0.2 * abs(math.log2(decisions["a"]) - 3) + 0.1 * abs(decisions["b"] - 6) + 0.3 * (decisions["c"] == 0)
    return 1e-3 * (1 + distance + 0.15 * abs(math.log2(decisions["d"]) - 2) + 0.05 * abs(decisions["e"] - 7))


def simulate(seed, trials, known=()):
    evolution = strategy.Evolution(points(**WIDE), seed, 16)
    evolution.tell(known)
    rows = list(known)
    while len(rows) < trials:
        new = [(decisions, seconds_of(decisions)) for decisions in evolution.ask(16)]
        evolution.tell(new)
        rows += new
    return rows


def test_the_search_nears_the_optimum_of_7200_points_in_80_trials():
    for seed in range(2):
        rows = simulate(seed, 80)
        assert min(seconds for _, seconds in rows if seconds) <= 1.11e-3  # the best 0.3 % of the space
        late = rows[48:]
        assert sum(seconds is None for _, seconds in late) <= len(late) / 4  # a third of the space fails


def test_a_seed_fixes_the_proposals():
    first = simulate(5, 48)
    assert simulate(5, 48) == first
    assert simulate(6, 16) != first[:16]


def test_nothing_is_proposed_twice_or_illegal_also_after_resuming():
    known = simulate(7, 32)
    rows = simulate(7, 64, known)
    assert rows[:32] == known
    assert len({tuple(decisions.values()) for decisions, _ in rows}) == len(rows)
    assert all(decisions["a"] * decisions["d"] <= 128 for decisions, _ in rows)


def test_a_small_space_is_tried_in_full_and_then_ends():
    small = points(a=(1, 64, 128), d=(1, 2, 3))
    evolution = strategy.Evolution(small, 0, 16)
    seen = []
    while proposed := evolution.ask(4):
        evolution.tell((decisions, 1e-3 * decisions["d"]) for decisions in proposed)
        seen += [tuple(decisions.values()) for decisions in proposed]
    assert sorted(seen) == [(a, d) for a, d in itertools.product((1, 64, 128), (1, 2, 3)) if a * d <= 128]


# ---- the trial log


def test_trials_survive_a_line_cut_short(tmp_path):
    identity = {"key": "k", "code": "c"}
    trials = Trials(tmp_path, identity, resume=True)
    trials.append(Trial({"a": 1}, 5.0))
    trials.append(Trial({"a": 2}, None, "crashed", "SIGSEGV"))
    path = tmp_path / "trials.jsonl"
    path.write_text(path.read_text() + '{"decisions": {"a": 3}, "us"')
    again = Trials(tmp_path, identity, resume=True)
    assert again.done == trials.done
    again.append(Trial({"a": 4}, 4.0))
    assert Trials(tmp_path, identity, resume=True).done == again.done
    assert again.failures() == {"crashed": 1}
    assert again.curve() == [(1, 5.0), (3, 4.0)]


def test_a_fresh_start_sets_the_old_trials_aside(tmp_path):
    Trials(tmp_path, {"key": "k"}, resume=True).append(Trial({"a": 1}, 5.0))
    fresh = Trials(tmp_path, {"key": "k"}, resume=False)
    assert fresh.done == []
    assert "fresh start" in fresh.note
    assert '"a": 1' in (tmp_path / "trials.old.jsonl").read_text()


# ---- worker processes


def test_workers_persist_between_calls(tmp_path):
    with Pool(1, nothing, tmp_path / "log", {}, lambda: False) as pool:
        pids = [outcome.value for _ in range(3) for _, outcome in pool.map(pid, [(0,), (1,)], 30)]
    assert len(pids) == 6
    assert len(set(pids)) == 1


def test_a_worker_that_cannot_start_is_not_a_failing_candidate(tmp_path):
    with (
        Pool(1, refuse, tmp_path / "log", {}, lambda: False) as pool,
        pytest.raises(WorkerError, match="no such compiler"),
    ):
        list(pool.map(pid, [(0,)], 30))
    assert "no such compiler" in (tmp_path / "log").read_text()


def test_a_hanging_worker_ends_with_a_killed_parent(tmp_path):
    program = (
        "import sys; from pathlib import Path; import search_toy as toy\n"
        "from tilewright.codegen.search.worker import Pool\n"
        "pool = Pool(1, toy.nothing, Path(sys.argv[1]), {}, lambda: False)\n"
        "print(next(pool.map(toy.pid, [(0,)], 60))[1].value, flush=True)\n"
        "list(pool.map(toy.sleep, [(600,)], 600))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command_line = [sys.executable, "-c", program, str(tmp_path / "log")]
    with subprocess.Popen(command_line, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        parent.kill()
    end = time.monotonic() + 20
    while (state := state_of(child)) not in ("", "Z") and time.monotonic() < end:
        time.sleep(0.05)
    assert state in ("", "Z")  # gone, or dead and not yet collected


def state_of(process):
    """The letter of the process's state, "" where there is no such process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


# ---- limits, display, inputs, command


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


def test_a_target_whose_peak_is_unknown_is_still_searched(again, workers, monkeypatch):
    monkeypatch.delitem(roofline.FLAGS, TARGET)
    roofline.measure.cache_clear()
    result, text = run(again, ToyProblem(faulty=True), workers, seconds=4.0)
    assert result.record.roofline_percent is None
    assert "peak cannot be measured" in text
    assert "- % of roofline" in text
    roofline.measure.cache_clear()


def test_the_table_of_a_terminal_shows_every_column():
    rows = [Row("toy", 10, state="search", trials=3, failures=1, best_us=50.0, flops=1e6, limit_us=25.0)]
    text = io.StringIO()
    display = Progress(Console(file=text, force_terminal=True, width=120), rows)
    with display.shown():
        display.update(rows[0])
    for shown in ("workload", "% roofline", "ETA", "3/10", "50.0", "20.0", "50", "0:00"):
        assert shown in text.getvalue()


@pytest.mark.parametrize("operator", inputs.OPERATORS)
def test_the_two_references_agree(operator, tmp_path):
    """The timed case is too large for the oracle's loops: its own float64 reference is held to the oracle here."""
    workload = Workload(operator, "f32", 2 if operator.startswith("paged") else None, 16, 16)
    for lengths in inputs.VERIFIED[operator]:
        oracle, dense = (inputs._case(workload, TARGET, tmp_path, lengths, 3, oracle=slow) for slow in (True, False))
        for name in (
            ("_expected", "_expected_lse") if operator.startswith("paged") else ("_expected", "_expected_state")
        ):
            torch.testing.assert_close(
                getattr(oracle, name), getattr(dense, name), rtol=1e-9, atol=1e-12, equal_nan=True
            )


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("operator", inputs.OPERATORS)
def test_the_inputs_know_right_from_wrong(operator, dtype, tmp_path):
    workload = Workload(operator, dtype, 4 if operator.startswith("paged") else None, 64, 64)
    for case in inputs.verified(workload, TARGET, tmp_path):
        case.poison()
        assert math.isnan(case.error())
        case._out.copy_(case._expected)
        if operator.startswith("paged"):
            case._lse.copy_(case._expected_lse)
        else:
            case._state.copy_(case._expected_state)
        assert case.error() <= 1
        case._out[-1, 0, 3] += 0.25
        assert case.error() > 1


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


def test_two_searches_do_not_share_a_folder(tmp_path, workers):
    folder = tmp_path / "work" / TARGET / "toy"
    folder.mkdir(parents=True)
    with FileLock(folder / "lock"):
        result, _ = run(tmp_path, ToyProblem(), workers, trials=1, seconds=4.0)
    assert "another search" in result.error


def test_the_command_that_resumes_is_complete():
    options = Options(
        trials=64, seconds=300.0, seed=7, resume=False, records=Path("tuning logs"), work=Path("build/tune"), builders=2
    )
    text = command.resume_command([Workload("paged_decode", "bf16", 4, 128, 128)], TARGET, options)
    assert text == (
        "tilewright tune paged_decode-bf16-g4-d128 --target x86-avx2 --trials 64 --seconds 300 --seed 7 --resume "
        "--out 'tuning logs' --work build/tune"
    )
