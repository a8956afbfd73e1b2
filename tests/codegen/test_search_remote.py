"""Measuring through RPC: tracker, measuring machine and search are three processes of this machine."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from search_runs import FAILURES, log_of, run
from search_toy import TARGET, ToyProblem

from tilewright.codegen import cli
from tilewright.codegen.search import remote, runner
from tilewright.codegen.search.remote import Address
from tilewright.codegen.search.worker import Interrupted, WorkerError

KEY = "toys"


@pytest.fixture(scope="module")
def address():
    """Of a tracker, as TVM starts it, with one measuring machine, as `tilewright measure` starts it."""
    from tvm.rpc.tracker import Tracker

    tracker = Tracker(host="127.0.0.1", port=9300, port_end=9399, silent=True)
    where = f"127.0.0.1:{tracker.port}"
    paths = os.pathsep.join([*sys.path, str(Path(__file__).parent.parent)])  # the toy's module too
    machine = subprocess.Popen(
        [sys.executable, "-m", "tilewright.codegen.cli", "measure", "--tracker", where, "--key", KEY],
        env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert f"measuring for {KEY} at 127.0.0.1:" in machine.stdout.readline()
    yield Address.parse(where, KEY)
    machine.send_signal(signal.SIGINT)
    assert machine.wait(30) == 0
    tracker.terminate()


def test_a_search_is_measured_elsewhere_with_its_failures(address, tmp_path):
    result, text = run(tmp_path, ToyProblem(faulty=True), measure_at=address)
    assert not result.error, text
    assert result.record.failures == FAILURES
    assert len(log_of(tmp_path)) == result.record.trials == 11
    assert result.record.us < result.record.default.us / 2
    assert result.record.verification.cases == 2


def test_a_real_candidate_is_shipped_with_its_launcher_and_measured(address, tmp_path):
    outcome = CliRunner().invoke(
        cli.main,
        ["tune", "lightning_decode-f32-d64", "--target", TARGET, "--trials", "2", "--seconds", "20", "--runner", "rpc",
         "--tracker", f"{address.host}:{address.port}", "--key", KEY,
         "--out", str(tmp_path / "records"), "--work", str(tmp_path / "work")],
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.output
    assert f"--runner rpc --tracker {address.host}:{address.port} --key {KEY}" in outcome.output
    assert (tmp_path / "records" / TARGET / "lightning_decode-f32-d64" / "record.json").is_file()


def test_other_sources_there_are_told(address, monkeypatch):
    monkeypatch.setattr(remote, "_sources", lambda: "others")
    with pytest.raises(WorkerError, match="on the measuring machine: its tilewright has other sources"):
        runner.Runner(5.0, Path(), lambda: False, address).environment(TARGET)


def test_a_target_that_the_machine_does_not_run_is_told(address):
    with runner.Runner(5.0, Path(), lambda: False, address) as there:
        with pytest.raises(RuntimeError, match="cuda-sm90a: cannot be measured on this machine"):
            there.environment("cuda-sm90a")


def test_waiting_for_a_machine_ends_when_asked(address):
    with runner.Runner(5.0, Path(), lambda: False, address):  # the only machine is taken
        with pytest.raises(Interrupted):
            runner.Runner(5.0, Path(), lambda: True, address)


def test_no_tracker_is_told():
    outcome = CliRunner().invoke(cli.main, ["measure", "--tracker", "127.0.0.1:1", "--key", KEY])
    assert outcome.exit_code == 1 and "--tracker: 127.0.0.1:1: " in outcome.output
    with pytest.raises(WorkerError, match="tracker 127.0.0.1:1: "):
        runner.Runner(5.0, Path(), lambda: False, Address("127.0.0.1", 1, KEY))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tracker", "here:1"], "need --runner rpc"),
        (["--runner", "rpc", "--key", "k"], "needs --tracker HOST:PORT and --key KEY"),
        (["--runner", "rpc", "--key", "k", "--tracker", "here"], "got 'here', expected HOST:PORT"),
        (["--runner", "rpc", "--key", "k", "--tracker", "here:1", "--target", "auto"], "--target: got 'auto'"),
    ],
)
def test_options_that_do_not_go_together_are_explained(arguments, says):
    target = [] if "--target" in arguments else ["--target", TARGET]
    outcome = CliRunner().invoke(cli.main, ["tune", "paged_decode-bf16-g4-d128", *target, *arguments])
    assert outcome.exit_code == 2
    assert says in outcome.output
