"""The search for a GPU target, as far as it goes without one: the times alone are made up, by the runner here."""

import json

import pytest
import torch
from click.testing import CliRunner
from search_gpu_toy import FAILURES, GpuToy
from search_runs import Recorder

from tilewright.codegen import cli, cuda_toolchain, records, roofline
from tilewright.codegen.build import build, recorded_decisions
from tilewright.codegen.search import command, problem, space
from tilewright.codegen.search.builder import root_of
from tilewright.codegen.search.problem import RefusedError, WorkloadProblem
from tilewright.codegen.search.progress import Row
from tilewright.codegen.search.runner import Runner
from tilewright.codegen.search.stop import Stop
from tilewright.codegen.search.tune import Options, tune_with
from tilewright.codegen.search.worker import Outcome
from tilewright.schedules.workload import Workload

TARGET = "cuda-sm90a"
needs_compiler = pytest.mark.skipif(not cuda_toolchain.compiler_version(), reason="no CUDA compiler is installed")
GPU = "NVIDIA H200 (9.0), 132 multiprocessors"
DECODE, EXTEND = (Workload.parse(f"paged_{name}-bf16-g4-d128") for name in ("decode", "extend"))


class NoBuilder:
    """Leaves a note of the decisions in the place of a module; a seventh of the candidates spills."""

    def __init__(self, spills=True):
        self.spills = spills
        self.built = []
        self.spilt = 0

    def prepare(self, problem, shared):
        shared.mkdir(parents=True)

    def settle(self):
        pass

    def build(self, problem, candidates, shared, folder, enough):
        for index, decisions in enumerate(candidates):
            self.built.append(dict(decisions))
            if self.spills and sum(decisions.values()) % 7 == 0 and decisions != problem.space().default:
                self.spilt += 1
                yield index, Outcome(reason="refused", detail="8 bytes of local memory a thread")
                continue
            root = root_of(folder, decisions)
            root.mkdir(parents=True, exist_ok=True)
            (root / "decisions.json").write_text(json.dumps(decisions))
            yield index, Outcome()


class MadeUp:
    """A runner whose times are a function of the decisions and of what the planner is told."""

    def environment(self, target):
        return records.Environment("Host CPU (6/207/2)", 16, "3.12.0", {"torch": "2.11.0"}, "2026-01-31", GPU)

    def limits(self, target):
        return roofline.Limits(flops=8e14, bandwidth=4.5e12)

    def work(self, problem, shared):
        return 1e9, 1e9

    def us(self, contestant):
        root, plan = contestant
        decisions = json.loads((root / "decisions.json").read_text())
        values = [*decisions.values(), *plan.values()]
        return 300.0 + sum((number + 1) * abs(value - 3) % 97 for number, value in enumerate(values))

    def measure(self, problem, shared, contestant, best_us):
        return Outcome(self.us(contestant))

    def compare(self, problem, shared, contestants, seconds):
        return [self.us(contestant) for contestant in contestants], 1.0

    def verify(self, problem, shared, contestant):
        return Outcome((0.25, 3))


def search(folder, workload, trials, builder=None):
    options = Options(
        trials=trials, seconds=120.0, seed=3, resume=True, records=folder / "records", work=folder / "work"
    )
    rows = [Row(workload.name, trials)]
    display = Recorder(rows)
    searched = [WorkloadProblem(workload, TARGET)]
    (result,) = tune_with(builder or NoBuilder(), MadeUp(), searched, options, display, rows, Stop())
    assert not result.error, display.text.getvalue()
    return result, display.text.getvalue()


@pytest.mark.parametrize("workload", [DECODE, EXTEND], ids=str)
def test_a_gpu_is_searched_with_the_same_loop_records_and_verdict(workload, tmp_path):
    builder = NoBuilder()
    result, text = search(tmp_path, workload, 24, builder)
    record = records.read(tmp_path / "records", TARGET, workload)
    assert record == result.record
    found = WorkloadProblem(workload, TARGET).space()
    assert all(found.legal(decisions) for decisions in builder.built)
    assert record.trials == 24 and builder.spilt > 0 and record.failures == {"build refused": builder.spilt}
    assert record.us < record.default.us == MadeUp().us(_noted(tmp_path, workload, found, found.default))
    assert record.us == min(timed.us for timed in record.top)
    assert record.roofline_percent == pytest.approx(100 * 1e9 / 4.5e12 * 1e6 / record.us, abs=0.1)
    assert record.environment.gpu == GPU
    assert "heads" in record.problem
    from tvm.s_tir import Schedule, Trace

    schedule = Schedule(space.carrier())
    Trace.apply_json_to_schedule(record.trace, schedule)
    assert space.decisions_of(schedule) == record.decisions
    assert f"{workload.name}: {record.default.us / record.us:.2f}x over the untuned schedule" in text
    summary = (tmp_path / "records" / TARGET / "SUMMARY.csv").read_text().splitlines()
    assert summary[0].split(",")[7] == "device" and GPU in summary[1]


def test_a_search_begins_with_what_was_found_for_other_sizes(tmp_path):
    found, _ = search(tmp_path, DECODE, 16)
    builder = NoBuilder()
    other = Workload.parse("paged_decode-bf16-g8-d128")
    result, _ = search(tmp_path, other, 2, builder)
    assert builder.built[:2] == [WorkloadProblem(other, TARGET).space().default, found.record.decisions]
    assert result.record.decisions == found.record.decisions


def _noted(folder, workload, found, decisions):
    return root_of(folder / "work" / TARGET / workload.name, decisions), found.plan(decisions)


def test_a_resumed_search_measures_only_what_is_new(tmp_path):
    search(tmp_path, DECODE, 12)
    builder = NoBuilder()
    result, text = search(tmp_path, DECODE, 20, builder)
    assert result.record.trials == 20
    assert "set aside" not in text
    log = (tmp_path / "work" / TARGET / DECODE.name / "trials.jsonl").read_text().splitlines()
    assert json.loads(log[0])["gpu"] == GPU and "cpu" not in json.loads(log[0])
    tried = [json.dumps(json.loads(line)["decisions"], sort_keys=True) for line in log[1:]]
    assert len(tried) == len(set(tried)) == 20


@needs_compiler
def test_a_record_is_what_gets_built(tmp_path):
    result, _ = search(tmp_path, DECODE, 8)
    decisions = recorded_decisions(DECODE, TARGET, tmp_path / "records")
    assert decisions == result.record.decisions
    built = build(DECODE, TARGET, decisions, tmp_path / "modules")
    assert json.loads((built.folder / "record.json").read_text())["decisions"] == decisions
    ((_, registers, stack),) = cuda_toolchain.resources(built.folder / "module.cubin")
    assert 0 < registers < 256 and stack == 0


def test_what_spills_is_refused_with_its_numbers(monkeypatch, tmp_path):
    monkeypatch.setattr(cuda_toolchain, "resources", lambda cubin: [("a", 100, 0), ("b", 168, 16)])
    with pytest.raises(RefusedError, match="b: 16 bytes of local memory a thread beside 168 registers"):
        problem._refuse_spills(tmp_path / "module.cubin")


def test_the_cost_model_sees_what_the_planner_is_told():
    found = WorkloadProblem(DECODE, TARGET).space()
    seen = space.features_of(found, found.default)
    assert len(seen) == len(found.choices) + len(found.plan(found.default))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_told():
    outcome = CliRunner().invoke(cli.main, ["tune", DECODE.name, "--target", TARGET])
    assert outcome.exit_code == 1
    assert "cuda-sm90a: cannot be measured here, torch sees no GPU" in outcome.output


def test_the_preset_has_what_the_target_has():
    assert command._preset(TARGET) == [DECODE, EXTEND]
    assert command._preset("cuda-sm80") == [DECODE, EXTEND]
    assert len(command._preset("auto")) == 4


def _gpus_target():
    return TARGET if torch.cuda.get_device_capability() == (9, 0) else "cuda-sm80"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_what_breaks_the_context_or_hangs_costs_a_worker_and_not_the_search(tmp_path):
    toy = GpuToy(_gpus_target())
    options = Options(
        trials=20, seconds=90.0, seed=3, resume=True, records=tmp_path / "records", work=tmp_path / "work"
    )
    rows = [Row(toy.name, options.trials)]
    display = Recorder(rows)
    with Runner(8.0, tmp_path / "log", lambda: False) as runner:
        (result,) = tune_with(NoBuilder(spills=False), runner, [toy], options, display, rows, Stop())
    assert not result.error, display.text.getvalue()
    assert result.record.trials == 6 and result.record.failures == FAILURES
    assert result.record.decisions["times"] == 3
    assert result.record.us < result.record.default.us / 2


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@needs_compiler
def test_a_search_on_a_gpu(tmp_path):
    target = _gpus_target()
    outcome = CliRunner().invoke(
        cli.main,
        ["tune", DECODE.name, "--target", target, "--trials", "4", "--seconds", "60",
         "--out", str(tmp_path / "records"), "--work", str(tmp_path / "work")],
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.output
    record = records.read(tmp_path / "records", target, DECODE)
    assert record.trials == 4 and record.verification.error <= 1
    assert torch.cuda.get_device_name() in record.environment.gpu
