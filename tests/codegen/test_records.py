import csv
import json

import msgspec
import pytest

from tilewright.codegen import records
from tilewright.schedules.workload import DEFINITION_REVISION, Workload

WORKLOAD = Workload("paged_decode", "bf16", 4, 128, 128)
TARGET = "x86-avx2"


def make(workload=WORKLOAD, **changes):
    fields = {
        "schema": records.SCHEMA,
        "workload": workload.name,
        "key": workload.key,
        "definition_revision": DEFINITION_REVISION,
        "target": TARGET,
        "problem": "8 requests",
        "flops": 1e9,
        "bytes": 2e8,
        "decisions": {"tile": 4, "chunk": 64},
        "us": 1000.0,
        "default": records.Timed({"tile": 1, "chunk": 16}, 1500.0),
        "top": [records.Timed({"tile": 4, "chunk": 64}, 1000.0)],
        "roofline_percent": 61.5,
        "trials": 40,
        "failures": {"wrong result": 1, "build timed out": 2},
        "seed": 3,
        "curve": [(1, 1500.0), (7, 1000.0)],
        "verification": records.Verification(0.3, 3),
        "spread": 1.04,
        "trace": [[["GetSBlock", [], ["root", "main"], ["b0"]]], []],
        "environment": records.Environment("Some CPU (1/2/3)", 2, "3.11.0", {"torch": "2.13.0"}, "2025-01-31"),
    }
    return records.Record(**fields | changes)


def test_round_trip(tmp_path):
    record = make(replaced=records.Replaced({"tile": 2}, None, make().environment))
    path = records.write(tmp_path, record)
    assert path == tmp_path / TARGET / WORKLOAD.name / "record.json"
    assert records.read(tmp_path, TARGET, WORKLOAD) == record
    assert records.read(tmp_path, TARGET, Workload("paged_decode", "f32", 4, 128, 128)) is None


def test_the_text_is_plain_sorted_and_newline_ended(tmp_path):
    text = records.write(tmp_path, make()).read_text()
    assert text.endswith("}\n")
    data = json.loads(text)
    assert list(data) == sorted(data)
    assert list(data["decisions"]) == ["chunk", "tile"]
    assert "replaced" not in data
    assert text.count("\n") == len(data) + 2  # a line a field: reviewable differences
    assert records.dumps(records.load(tmp_path / TARGET / WORKLOAD.name / "record.json")) == text


def test_summary_is_generated_from_what_is_there(tmp_path):
    other = Workload("lightning_decode", "bf16", None, 128, 128)
    records.write(tmp_path, make())
    records.write(tmp_path, make(other, us=500.0, roofline_percent=None))
    summary = tmp_path / TARGET / "SUMMARY.csv"
    rows = list(csv.DictReader(summary.open()))
    assert [(row["workload"], row["gain"], row["failures"], row["roofline_percent"]) for row in rows] == [
        (other.name, "3.00", "3", ""),
        (WORKLOAD.name, "1.50", "3", "62"),
    ]
    (tmp_path / TARGET / other.name / "record.json").unlink()
    records.write_summary(tmp_path, TARGET)
    assert [row["workload"] for row in csv.DictReader(summary.open())] == [WORKLOAD.name]


def test_a_failed_write_keeps_the_old_record(tmp_path, monkeypatch):
    path = records.write(tmp_path, make())
    before = path.read_bytes()
    monkeypatch.setattr(records.os, "fsync", lambda handle: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        records.write(tmp_path, make(us=1.0))
    assert path.read_bytes() == before
    assert [item.name for item in path.parent.iterdir()] == ["record.json"]


@pytest.mark.parametrize("name", ["../outside", "a/b", ""])
def test_names_that_are_not_plain_are_refused(tmp_path, name):
    with pytest.raises(records.RecordError, match="plain names"):
        records.write(tmp_path, msgspec.structs.replace(make(), workload=name))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data.pop("decisions"), "decisions"),
        (lambda data: data.update(us="fast"), "us"),
        (lambda data: data.update(schema=99), "schema 99"),
        (lambda data: data.update(surprise=1), "surprise"),
        (lambda data: data["decisions"].update(tile=None), "decisions"),
    ],
)
def test_what_is_not_a_record_is_refused(tmp_path, change, says):
    path = records.write(tmp_path, make())
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(records.RecordError, match=says) as caught:
        records.read(tmp_path, TARGET, WORKLOAD)
    assert str(path) in str(caught.value)


def test_a_truncated_record_is_refused(tmp_path):
    path = records.write(tmp_path, make())
    path.write_text(path.read_text()[:-20])
    with pytest.raises(records.RecordError, match="not a tuning record"):
        records.read(tmp_path, TARGET, WORKLOAD)


def test_a_record_in_the_wrong_folder_is_refused(tmp_path):
    other = Workload("paged_decode", "f32", 4, 128, 128)
    text = records.write(tmp_path, make()).read_text()
    path = records.path_of(tmp_path, TARGET, other.name)
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(records.RecordError, match=f"expected {other.name}"):
        records.read(tmp_path, TARGET, other)


def test_a_record_of_another_revision_is_stale(tmp_path):
    records.write(tmp_path, make(definition_revision=DEFINITION_REVISION + 1))
    with pytest.raises(records.StaleRecordError, match="tilewright tune"):
        records.read(tmp_path, TARGET, WORKLOAD)


def test_current_environment_names_the_machine():
    environment = records.current_environment()
    assert environment.cores >= 1
    assert "torch" in environment.versions
    assert environment.same_machine(msgspec.structs.replace(environment, date="1999-01-01"))
    assert not environment.same_machine(msgspec.structs.replace(environment, cpu="another"))


def test_a_gpu_is_part_of_the_environment_and_makes_times_comparable(tmp_path):
    on_cpu = make().environment
    on_gpu = msgspec.structs.replace(on_cpu, gpu="Some GPU (9.0)")
    assert on_cpu.device == "Some CPU (1/2/3)" and on_gpu.device == "Some GPU (9.0)"
    assert on_gpu.same_machine(msgspec.structs.replace(on_gpu, cpu="another", cores=64))
    assert not on_gpu.same_machine(msgspec.structs.replace(on_gpu, gpu="another"))
    assert not on_gpu.same_machine(on_cpu) and not on_cpu.same_machine(on_gpu)
    record = make(environment=on_gpu, replaced=records.Replaced({"tile": 2}, 5.0, on_gpu))
    assert records.load(records.write(tmp_path, record)) == record
    assert ",Some GPU (9.0),2," in (tmp_path / TARGET / "SUMMARY.csv").read_text()
    assert "gpu" not in records.dumps(make(replaced=records.Replaced({"tile": 2}, 5.0, on_cpu)))
