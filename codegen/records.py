"""tuning_logs: what a search found, as small reviewable JSON files, and the table generated from them.

`<root>/<target>/<workload>/record.json` holds one `Record`; `<root>/<target>/SUMMARY.csv` one row a record. Imports
neither tvm nor torch, so that reading a record costs nothing. Format and trust: tuning_logs/README.md.
"""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import tempfile
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from tilewright.schedules.workload import DEFINITION_REVISION, Workload

SCHEMA = 1
RECORD_FILE = "record.json"
SUMMARY_FILE = "SUMMARY.csv"
TOP = 3


class RecordError(ValueError):
    """A record that cannot be read or written; the message names the file, what is wrong and the remedy."""


class StaleRecordError(RecordError):
    """A record made for another revision of the definitions: its decisions mean nothing any more."""


class Timed(msgspec.Struct, forbid_unknown_fields=True):
    """Decisions and the undisturbed microseconds of one call of the representative problem."""

    decisions: dict[str, int]
    us: float


class Verification(msgspec.Struct, forbid_unknown_fields=True):
    """How far the winner was from the float64 oracle.

    `error`: the worst over `cases` ragged inputs, as a share of the tolerance (at most 1 = within it everywhere).
    """

    error: float
    cases: int


class Environment(msgspec.Struct, forbid_unknown_fields=True):
    """Where and with what the times were measured.

    `date` is the UTC day, ISO 8601; `gpu` names the device of a GPU's records, None where the CPU was measured.
    """

    cpu: str
    cores: int
    python: str
    versions: dict[str, str]
    date: str
    gpu: str | None = None

    @property
    def device(self) -> str:
        """The name of what was measured."""
        return self.gpu or self.cpu

    def same_machine(self, other: Environment) -> bool:
        """Whether times of the two are comparable at all: same GPU, or same CPU model and number of usable cores."""
        if self.gpu or other.gpu:
            return self.gpu == other.gpu
        return (self.cpu, self.cores) == (other.cpu, other.cores)


class Replaced(msgspec.Struct, forbid_unknown_fields=True):
    """The record of another machine that this one took the place of.

    `us`: its schedule's time here, measured beside the winner; None where it does not run here.
    """

    decisions: dict[str, int]
    us: float | None
    environment: Environment


class Record(msgspec.Struct, forbid_unknown_fields=True):
    """The outcome of one search.

    Attributes:
        schema: format of this file, `SCHEMA`.
        workload, key, definition_revision, target: what was searched (`schedules.workload.Workload`).
        problem: the representative problem that was timed, in words; flops and bytes of one call of it.
        decisions, us: the schedule that is kept, and its undisturbed microseconds; default: the untuned one; top: the
            best few, best first. All measured interleaved in one process.
        roofline_percent: of the machine's limit, min(compute, bandwidth) for flops and bytes; None = not measured.
        trials: candidates measured; failures: how many of them failed, by reason.
        curve: [trial, best us so far] at each improvement (times of the search itself, not interleaved).
        trace: the decisions as a MetaSchedule trace.
        spread: greatest ratio of a finalist's median sample to its undisturbed time; well above 1 = a busy machine.
        replaced: set where a record of another machine gave way to this one.
    """

    schema: int
    workload: str
    key: str
    definition_revision: int
    target: str
    problem: str
    flops: float
    bytes: float
    decisions: dict[str, int]
    us: float
    default: Timed
    top: list[Timed]
    roofline_percent: float | None
    trials: int
    failures: dict[str, int]
    seed: int
    curve: list[tuple[int, float]]
    verification: Verification
    trace: Any
    environment: Environment
    spread: float
    replaced: Replaced | None = None


def current_environment() -> Environment:
    """This machine, interpreter and the versions that shape a measurement."""
    versions = {}
    for package in ("apache-tvm", "apache-tvm-ffi", "torch", "xgboost"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return Environment(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        python=platform.python_version(),
        versions=versions,
        date=datetime.now(timezone.utc).date().isoformat(),
    )


def _cpu_model() -> str:
    """The processor's name, with family, model and stepping: hypervisors shorten the name to e.g. "AMD EPYC"."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    numbers = "/".join(fields.get(name, "?") for name in ("cpu family", "model", "stepping"))
    return f"{fields.get('model name', platform.machine())} ({numbers})"


def path_of(root: Path, target: str, workload: str) -> Path:
    """Where the record of `workload` (its name) lies below `root`."""
    return root / target / workload / RECORD_FILE


def read(root: Path, target: str, workload: Workload) -> Record | None:
    """The record of `workload`, or None where there is none.

    Raises:
        RecordError: the file is not a record of this workload and target.
        StaleRecordError: it is, for another revision of the definitions.
    """
    path = path_of(root, target, workload.name)
    if not path.exists():
        return None
    record = load(path)
    if (record.workload, record.target) != (workload.name, target):
        raise RecordError(
            f"{path}: is a record of {record.workload} for {record.target}, expected {workload.name} for {target}; "
            "move it to its own folder"
        )
    if record.definition_revision != DEFINITION_REVISION or record.key != workload.key:
        raise StaleRecordError(
            f"{path}: made for revision {record.definition_revision} of the definitions, now {DEFINITION_REVISION}; "
            f"run `tilewright tune {workload.name} --target {target}`"
        )
    return record


def load(path: Path) -> Record:
    """The record in one file, whatever it is of.

    Raises:
        RecordError: not JSON, not a record, or of another schema.
    """
    try:
        data = json.loads(path.read_text())
        if isinstance(data, dict) and data.get("schema") != SCHEMA:
            raise RecordError(f"{path}: schema {data.get('schema')!r}, expected {SCHEMA}; run `tilewright tune` again")
        return msgspec.convert(data, Record)
    except (json.JSONDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise RecordError(
            f"{path}: not a tuning record ({error}); restore it or run `tilewright tune` again"
        ) from error


def dumps(record: Record) -> str:
    """The file's text: sorted keys, one line a field, newline-ended."""
    data = msgspec.to_builtins(record)
    if data["replaced"] is None:
        del data["replaced"]
    for environment in (data["environment"], data.get("replaced", {}).get("environment", {})):
        if environment.get("gpu", "") is None:
            del environment["gpu"]
    lines = [f"  {json.dumps(key)}: {json.dumps(data[key], sort_keys=True)}" for key in sorted(data)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write(root: Path, record: Record) -> Path:
    """Write `record` atomically, replacing what is there, and regenerate its target's summary; the record's path.

    Raises:
        RecordError: its workload or target is not a plain file name.
    """
    workload = record.workload
    if not all(name and Path(name).name == name for name in (workload, record.target)):
        raise RecordError(f"record: workload {workload!r} and target {record.target!r} must be plain names")
    path = path_of(root, record.target, workload)
    write_text(path, dumps(record))
    write_summary(root, record.target)
    return path


def write_summary(root: Path, target: str) -> Path:
    """Generate `<root>/<target>/SUMMARY.csv` from the records that lie there, in order of name; its path."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(
        ("workload", "us", "default_us", "gain", "roofline_percent", "trials", "failures", "device", "cores", "date")
    )
    for path in sorted((root / target).glob(f"*/{RECORD_FILE}")):
        record = load(path)
        roofline = "" if record.roofline_percent is None else f"{record.roofline_percent:.0f}"
        environment = record.environment
        table.writerow(
            (
                record.workload,
                f"{record.us:.1f}",
                f"{record.default.us:.1f}",
                f"{record.default.us / record.us:.2f}",
                roofline,
                record.trials,
                sum(record.failures.values()),
                environment.device,
                environment.cores,
                environment.date,
            )
        )
    return write_text(root / target / SUMMARY_FILE, text.getvalue())


def write_text(path: Path, text: str) -> Path:
    """Write a whole file atomically: a reader or a crash sees the old one or the new one. Makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path
