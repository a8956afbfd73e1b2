"""From a workload to an artifact folder: what goes in, when it is made again, what happens when it cannot be made."""

import json
import multiprocessing
import shutil
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import msgspec
import pytest
import toys

from tilewright.codegen import build, compile
from tilewright.runtime.errors import BuildError
from tilewright.runtime.manifest import file_entry, read_manifest
from tilewright.schedules.spaces import UnsupportedWorkload, get_space
from tilewright.schedules.targets import get_target
from tilewright.schedules.workload import DEFINITION_REVISION, Workload

TARGET = toys.TARGET
TOY = toys.SERIAL


@pytest.fixture
def toy_spaces(monkeypatch, tmp_path):
    """This process's build() sees the toys, and no records but those written to the returned folder."""
    monkeypatch.setattr(build, "get_space", toys.toy_space)
    logs = tmp_path / "logs"
    monkeypatch.setattr(build.recorded_decisions, "__defaults__", (logs,))
    return logs


def write_record(logs: Path, **changes) -> Path:
    path = logs / TARGET / TOY.name / "record.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"decisions": {"scale": 3}, "definition_revision": DEFINITION_REVISION, "trace": []}
    path.write_text(json.dumps(record | changes))
    return path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_an_artifact_is_complete_and_its_manifest_true(toy_spaces, tmp_path):
    done = build.build(TOY, TARGET, root=tmp_path / "out")
    assert (done.fresh, done.origin, done.folder) == (True, "default", tmp_path / "out" / TARGET / TOY.name)
    assert names(done.folder) == {"manifest.json", "module.so", "module.s", "module.tir.py", "record.json"}
    manifest = read_manifest(done.folder)
    assert manifest.files == {name: file_entry(done.folder / name) for name in names(done.folder) - {"manifest.json"}}
    assert (manifest.name, manifest.target, manifest.plan) == (TOY.name, TARGET, {"chunk": 32})
    assert manifest.features == list(get_target(TARGET).features)
    assert json.loads((done.folder / "record.json").read_text())["decisions"] == {"scale": 2}
    assert "write_kv" in (done.folder / "module.tir.py").read_text()
    assert "ymm" in (done.folder / "module.s").read_text()
    assert names(tmp_path / "out" / TARGET) == {TOY.name, "launcher"}  # nothing temporary is left


def test_what_is_up_to_date_is_left_alone_and_what_changed_is_not(toy_spaces, tmp_path):
    root = tmp_path / "out"
    first = build.build(TOY, TARGET, root=root)
    inode = (first.folder / "module.so").stat().st_ino
    assert build.stale([TOY], TARGET, root) == []
    assert not build.build(TOY, TARGET, root=root).fresh
    assert (first.folder / "module.so").stat().st_ino == inode

    write_record(toy_spaces)
    assert build.stale([TOY], TARGET, root) == [TOY]
    tuned = build.build(TOY, TARGET, root=root)
    assert (tuned.fresh, tuned.origin) == (True, "tuned")
    assert read_manifest(tuned.folder).plan == {"chunk": 48}

    (tuned.folder / "module.so").write_bytes(b"damaged")
    assert build.build(TOY, TARGET, root=root).fresh
    assert build.stale([TOY], TARGET, root) == []

    given = build.build(TOY, TARGET, {"scale": 2}, root)
    assert (given.fresh, given.origin) == (True, "given")


def test_equal_inputs_give_equal_bytes(toy_spaces, tmp_path):
    first, second = (build.build(TOY, TARGET, root=tmp_path / name).folder for name in ("a", "b"))
    assert (first / "module.so").read_bytes() == (second / "module.so").read_bytes()
    assert read_manifest(first) == read_manifest(second)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"definition_revision": DEFINITION_REVISION + 1},
            "tune again: tilewright tune write_kv-f32 --target x86-avx2",
        ),
        ({"decisions": {"scale": "much"}}, "record.json: not a record"),
        ({"decisions": None}, "record.json: not a record"),
        ({"decisions": {"scale": 5}}, "tuned decisions are not legal in its space: {'scale': 5}"),
        ({"decisions": {"sclae": 2}}, "tuned decisions are not legal in its space"),
    ],
)
def test_a_record_that_does_not_fit_is_an_error_and_leaves_nothing(toy_spaces, tmp_path, changes, words):
    write_record(toy_spaces, **changes)
    with pytest.raises(BuildError, match=words):
        build.build(TOY, TARGET, root=tmp_path / "out")
    assert not (tmp_path / "out" / TARGET / TOY.name).exists()


def test_a_libm_call_is_refused_by_name(toy_spaces, tmp_path):
    with pytest.raises(BuildError, match="undefined symbols: expected those of libtvm_ffi only, got sin"):
        build.build(toys.LIBM, TARGET, root=tmp_path / "out")
    assert names(tmp_path / "out" / TARGET) == {"launcher"}


def test_a_module_that_needs_an_unserved_tvm_pointer_is_refused(tmp_path):
    source = tmp_path / "foreign.c"
    source.write_text("void *__TVMBackendGetFuncFromEnv;\n")
    library = tmp_path / "foreign.so"
    compile._run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)])
    with pytest.raises(BuildError, match="needs __TVMBackendGetFuncFromEnv, which the launcher does not serve"):
        compile.check_symbols(library)


def test_what_the_compiler_refuses_names_workload_and_decisions(toy_spaces, tmp_path, monkeypatch):
    def refuse(module, target):
        raise RuntimeError("cannot be lowered")

    monkeypatch.setattr(compile, "compile_module", refuse)
    with pytest.raises(BuildError, match="write_kv-f32 for x86-avx2: TVM cannot compile .*cannot be lowered"):
        build.build(TOY, TARGET, root=tmp_path / "out")


def _write_often(source: str, folder: str, fingerprint: str) -> None:
    """One writer of a race: puts a copy of an artifact in place again and again."""
    manifest = msgspec.structs.replace(read_manifest(Path(source)), fingerprint=fingerprint)
    for _ in range(10):
        with build._staging(Path(folder)) as staging:
            for name in manifest.files:
                shutil.copy(Path(source) / name, staging / name)
            build._put_in_place(staging, Path(folder), manifest, "module.so")


@pytest.mark.parametrize("fingerprints", [("same", "same"), ("one", "other")], ids=["equal", "replacing each other"])
def test_builds_that_race_leave_one_whole_artifact(tmp_path, fingerprints):
    source = toys.built() / TARGET / TOY.name
    folder = tmp_path / "out" / TOY.name
    context = multiprocessing.get_context("spawn")
    writers = [
        context.Process(target=_write_often, args=(str(source), str(folder), fingerprint))
        for fingerprint in fingerprints
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
        assert writer.exitcode == 0
    manifest = read_manifest(folder)
    assert manifest.fingerprint in fingerprints
    assert manifest.files == {name: file_entry(folder / name) for name in names(folder) - {"manifest.json"}}
    assert names(folder.parent) == {TOY.name}


def test_failures_of_a_batch_are_all_told_and_stop_nothing(toy_spaces, tmp_path):
    reported = []
    with pytest.raises(BuildError, match=r"1 of 2 workloads for x86-avx2 failed:\nmerge-fp16: ") as caught:
        build.build_all(
            [toys.LIBM, TOY], TARGET, tmp_path, jobs=1, report=lambda result, workload: reported.append(workload)
        )
    assert "got sin" in str(caught.value)
    assert reported == [toys.LIBM, TOY]
    assert build.stale([TOY, toys.LIBM], TARGET, tmp_path) == [toys.LIBM]
    assert [done.fresh for done in build.build_all([TOY], TARGET, tmp_path)] == [False]


def test_worker_processes_report_what_has_no_space(tmp_path):
    missing = [Workload("lightning_decode", dtype, None, 3, 5) for dtype in ("bf16", "f32")]
    with pytest.raises(BuildError, match="lightning_decode-bf16-d3v5") as caught:
        build.build_all(missing, "x86-amx", tmp_path, jobs=2)
    assert "lightning_decode-f32-d3v5" in str(caught.value)


def test_a_compiler_process_that_dies_is_told_for_what_it_left_undone(toy_spaces, tmp_path, monkeypatch):
    class Dying(ThreadPoolExecutor):
        def __init__(self, jobs, mp_context):
            super().__init__(jobs)

        def submit(self, function, *arguments, **options):
            return super().submit(self.die)

        def die(self):
            raise BrokenProcessPool

    monkeypatch.setattr(build, "ProcessPoolExecutor", Dying)
    with pytest.raises(BuildError, match="2 of 2 workloads .*failed:\n.*a compiler process died"):
        build.build_all([TOY, toys.PARALLEL], TARGET, tmp_path)


def test_get_space_names_workload_and_target():
    with pytest.raises(UnsupportedWorkload, match="lightning_decode-f32-d3v5: .*x86-amx"):
        get_space(Workload("lightning_decode", "f32", None, 3, 5), "x86-amx")


def test_fingerprints_follow_sources_decisions_and_target():
    workload, target = Workload("merge", "f32"), get_target(TARGET)
    base = build.fingerprint(workload, target, None)
    assert base == build.fingerprint(workload, target, None)
    others = [
        build.fingerprint(workload, target, {"scale": 2}),
        build.fingerprint(workload, get_target("x86-amx"), None),
        build.fingerprint(Workload("merge", "bf16"), target, None),
    ]
    assert len({base, *others}) == 4


def test_a_source_digest_covers_what_is_imported_and_no_more(monkeypatch, tmp_path):
    def write(name: str, text: str) -> None:
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        build._imports.cache_clear()

    monkeypatch.setattr(build, "_PACKAGE", tmp_path)
    write("schedules/__init__", "")
    write("schedules/a", "from tilewright.schedules import b\nimport os\n")
    write("schedules/b", "def f():\n    from .c import x\n")
    write("schedules/c", "x = 1\n")
    write("schedules/d", "")
    before = build.source_digest("tilewright.schedules.a")
    write("schedules/d", "x = 2\n")
    assert build.source_digest("tilewright.schedules.a") == before
    write("schedules/c", "x = 2\n")
    assert build.source_digest("tilewright.schedules.a") != before
    build._imports.cache_clear()
