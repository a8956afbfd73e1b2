"""The search on the toy problem of search_toy.py: real candidates, real worker processes."""

import json
import os
import shutil
import signal

import msgspec
import pytest
from filelock import FileLock
from search_runs import FAILURES, log_of, run
from search_toy import TARGET, ToyProblem, definition

from tilewright.codegen import records, roofline
from tilewright.codegen.search import space
from tilewright.codegen.search.builder import Builder, root_of
from tilewright.codegen.search.runner import Runner
from tilewright.codegen.search.tune import BUSY
from tilewright.codegen.search.worker import Interrupted


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    log = tmp_path_factory.mktemp("workers") / "log"
    with Builder(1, 60.0, log, lambda: False) as builder, Runner(60.0, log, lambda: False) as runner:
        yield builder, runner


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


def test_a_target_whose_peak_is_unknown_is_still_searched(again, workers, monkeypatch):
    def unknown(self, target):
        raise roofline.RooflineError(f"{target}: its peak cannot be measured")

    monkeypatch.setattr(Runner, "limits", unknown)
    result, text = run(again, ToyProblem(faulty=True), workers, seconds=4.0)
    assert result.record.roofline_percent is None
    assert "peak cannot be measured" in text
    assert "- % of roofline" in text


def test_two_searches_do_not_share_a_folder(tmp_path, workers):
    folder = tmp_path / "work" / TARGET / "toy"
    folder.mkdir(parents=True)
    with FileLock(folder / "lock"):
        result, _ = run(tmp_path, ToyProblem(), workers, trials=1, seconds=4.0)
    assert "another search" in result.error
