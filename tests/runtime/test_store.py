"""Look-up order, choice of target, and everything that must stop a module before it is opened."""

import os
import shutil
import time
from functools import cache
from pathlib import Path

import msgspec
import pytest
import torch
import toys

from tilewright.runtime import features, manifest, store
from tilewright.runtime.errors import (
    BuildError,
    IncompatibleModuleError,
    IntegrityError,
    MissingModuleError,
    UnsupportedTargetError,
)
from tilewright.schedules.targets import get_target
from tilewright.schedules.workload import DEFINITION_REVISION, Workload

_amx_permission = features.amx_permission
WORKLOAD = Workload("paged_decode", "bf16", 4, 128, 128)
AVX2, AMX = "x86-avx2", "x86-amx"


@pytest.fixture(scope="module")
def toy_root() -> Path:
    return toys.built()


@pytest.fixture(autouse=True)
def world(monkeypatch, tmp_path):
    """A process with no modules but those that a test makes, on a CPU with AVX2 and nothing more."""
    for variable in ("MODULE_PATH", "TARGET", "BUILD_POLICY", "STRICT", "LOG"):
        monkeypatch.delenv(f"TILEWRIGHT_{variable}", raising=False)
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "checkout", lambda: tmp_path / "checkout")
    monkeypatch.setattr(store, "_PACKAGE", tmp_path / "package")
    cpu = features.cpu_features() | set(get_target(AVX2).features)
    monkeypatch.setattr(features, "cpu_features", lambda: frozenset(name for name in cpu if "512" not in name))
    monkeypatch.setattr(features, "amx_permission", lambda: False)


def put(root: Path, where: str = AVX2, workload: Workload = WORKLOAD, **changes) -> Path:
    """A well-formed artifact whose module.so is no library: good for everything before dlopen."""
    folder = root / where / workload.name
    folder.mkdir(parents=True)
    (folder / "module.so").write_bytes(b"not a library")
    fields = {
        "schema": manifest.SCHEMA,
        "name": workload.name,
        "target": where,
        "package_version": "0",
        "tvm_version": "0",
        "tvm_ffi_version": "0",
        "definition_revision": DEFINITION_REVISION,
        "features": list(get_target(where).features),
        "files": {"module.so": manifest.file_entry(folder / "module.so")},
        "plan": {"chunk": 16},
        "origin": "default",
        "fingerprint": "",
    }
    (folder / "manifest.json").write_bytes(manifest.encode_manifest(manifest.Manifest(**fields | changes)))
    return folder


def test_roots_are_searched_in_the_documented_order(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_MODULE_PATH", os.pathsep.join([str(tmp_path / "one"), str(tmp_path / "two")]))
    order = [
        *(tmp_path / name for name in ("given", "one", "two")),
        *(
            tmp_path / "cache" / "modules",
            tmp_path / "package" / "_prebuilt",
            tmp_path / "checkout" / "build" / "modules",
        ),
    ]
    assert [folder for _, folder in store.roots(tmp_path / "given")] == order
    for root in reversed(order):
        folder = put(root)
        assert store.find(WORKLOAD, root=tmp_path / "given").found.folder == folder


def test_the_best_usable_target_wins_wherever_it_is(tmp_path):
    near, far = put(tmp_path / "given"), put(tmp_path / "cache" / "modules", AMX)
    search = store.find(WORKLOAD, root=tmp_path / "given")
    assert search.found.folder == near
    assert "no amx_bf16, amx_int8, amx_tile, avx512" in str(search.passed_over[1])
    with features.emulated(*get_target(AMX).features):
        assert store.find(WORKLOAD, root=tmp_path / "given").found.folder == far


def test_a_refused_permission_means_the_next_target_and_one_warning(tmp_path, monkeypatch, caplog):
    """Whatever else is looked for: a serving process says it once."""
    monkeypatch.setattr(features, "cpu_features", lambda: frozenset(get_target(AMX).features))
    monkeypatch.setattr(features, "_request_tiles", lambda: 95)
    monkeypatch.setattr(features, "amx_permission", cache(_amx_permission.__wrapped__))
    workloads = [WORKLOAD, Workload("paged_extend", "bf16", 4, 128, 128)]
    for workload in workloads:
        put(tmp_path, AMX, workload)
        near = put(tmp_path, AVX2, workload)
        for _ in range(2):
            search = store.find(workload, root=tmp_path)
            assert search.found.folder == near
            assert "this process has no amx_bf16, amx_int8, amx_tile" in str(search.passed_over[0])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "refuses tile registers" in caplog.text


def test_the_emulated_target_is_found_by_name_only(tmp_path):
    folder = put(tmp_path, "x86-amx-emulated")
    with features.emulated(*get_target(AMX).features):
        assert store.find(WORKLOAD, root=tmp_path).found is None
        assert store.find(WORKLOAD, "x86-amx-emulated", root=tmp_path).found.folder == folder


def test_the_target_can_be_forced_but_not_its_features(tmp_path, monkeypatch):
    put(tmp_path)
    put(tmp_path, AMX)
    monkeypatch.setenv("TILEWRIGHT_TARGET", AMX)
    search = store.find(WORKLOAD, root=tmp_path)
    assert (search.found, search.state) == (None, "unusable")
    monkeypatch.setenv("TILEWRIGHT_TARGET", "avx2")
    with pytest.raises(UnsupportedTargetError, match="TILEWRIGHT_TARGET: target: got 'avx2', expected one of x86-avx2"):
        store.find(WORKLOAD, root=tmp_path)
    with pytest.raises(UnsupportedTargetError, match="^target: got 'sse'"):
        store.find(WORKLOAD, "sse")


def test_a_missing_module_lists_where_and_the_command(tmp_path):
    put(tmp_path, definition_revision=DEFINITION_REVISION + 1)
    with pytest.raises(MissingModuleError) as caught:
        store.load(WORKLOAD, root=tmp_path)
    message = str(caught.value)
    assert "tilewright build paged_decode-bf16-g4-d128 --target x86-avx2" in message
    assert f"definition revision: expected {DEFINITION_REVISION}, got {DEFINITION_REVISION + 1}" in message
    assert f"{tmp_path / 'cache' / 'modules' / AMX / WORKLOAD.name} (user cache): no module" in message
    assert isinstance(caught.value, LookupError)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"features": ["avx2", "sve"]}, "this process has no sve"),
        ({"definition_revision": 0}, f"definition revision: expected {DEFINITION_REVISION}, got 0"),
        ({"schema": 99}, "manifest schema: expected 1, got 99"),
        ({"name": "merge-f32"}, "expected paged_decode-bf16-g4-d128 for x86-avx2, got merge-f32 for x86-avx2"),
        ({"target": AMX}, "got paged_decode-bf16-g4-d128 for x86-amx"),
    ],
)
def test_an_unusable_artifact_is_passed_over_with_its_reason(tmp_path, changes, words):
    bad, good = put(tmp_path / "given", AVX2, WORKLOAD, **changes), put(tmp_path / "cache" / "modules")
    search = store.find(WORKLOAD, AVX2, root=tmp_path / "given")
    assert search.found.folder == good
    assert words in str(search.passed_over[0]) and str(bad) in str(search.passed_over[0])


@pytest.mark.parametrize("break_it", [
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(b"\xff\x00"),
    lambda path: path.write_text("[1]"),
    lambda path: (path.unlink(), path.mkdir()),
    lambda path: (path.unlink(), path.symlink_to(path.name)),
], ids=["empty", "binary", "other JSON", "folder", "loop of links"])  # fmt: skip
def test_a_manifest_that_cannot_be_read_is_passed_over(tmp_path, break_it):
    bad, good = put(tmp_path / "given"), put(tmp_path / "cache" / "modules")
    break_it(bad / "manifest.json")
    search = store.find(WORKLOAD, AVX2, root=tmp_path / "given")
    assert search.found.folder == good
    assert isinstance(search.passed_over[0].problem, IntegrityError)
    assert str(bad / "manifest.json") in str(search.passed_over[0])


def test_what_should_work_and_does_not_is_told_once_with_its_reason(tmp_path, toy_root, monkeypatch, caplog):
    """Casebook K04. A module for another machine is nothing to warn of."""
    put(tmp_path, AVX2, toys.PARALLEL, definition_revision=0)
    put(tmp_path, AMX, toys.PARALLEL)
    monkeypatch.setenv("TILEWRIGHT_MODULE_PATH", f"{tmp_path}{os.pathsep}{toy_root}")
    with caplog.at_level("WARNING", logger="tilewright"):
        assert store.load(toys.PARALLEL) is store.load(toys.PARALLEL)
    (record,) = caplog.records
    assert str(tmp_path / AVX2) in record.getMessage() and "definition revision: expected" in record.getMessage()


def test_an_apache_tvm_ffi_outside_the_range_is_told(tmp_path, monkeypatch):
    put(tmp_path)
    monkeypatch.setattr(store, "_installed_tvm_ffi", lambda: "0.2.0")
    with pytest.raises(MissingModuleError, match="apache-tvm-ffi: expected 0.1.11 to .*, got 0.2.0; pip install"):
        store.load(WORKLOAD, AVX2, root=tmp_path)


def test_a_damaged_module_is_never_opened(tmp_path, monkeypatch):
    folder = put(tmp_path)
    (folder / "module.so").write_bytes(b"something else")
    monkeypatch.setattr(store, "_get_launcher", lambda artifact: pytest.fail("opened"))
    with pytest.raises(IntegrityError, match="module.so: size: expected 13, got 14"):
        store.load(WORKLOAD, root=tmp_path)
    (folder / "module.so").write_bytes(b"NOT A LIBRARY")
    with pytest.raises(IntegrityError, match="module.so: sha256: expected"):
        store.load(WORKLOAD, root=tmp_path)


def test_a_module_without_its_launcher_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_launchers", {})
    put(tmp_path)
    with pytest.raises(IntegrityError, match="launcher: missing, the modules beside it need it; tilewright build"):
        store.load(WORKLOAD, root=tmp_path)


def test_a_damaged_launcher_is_never_opened(tmp_path, toy_root, monkeypatch):
    monkeypatch.setattr(store, "_launchers", {})
    root = shutil.copytree(toy_root, tmp_path / "copy")
    library = root / AVX2 / "launcher" / "liblauncher.so"
    library.write_bytes(library.read_bytes()[:-1] + b"!")
    with pytest.raises(IntegrityError, match="liblauncher.so: sha256"):
        store.load(toys.PARALLEL, root=root)


def test_what_the_linker_refuses_is_an_incompatible_module(tmp_path, toy_root):
    root = shutil.copytree(toy_root, tmp_path / "copy")
    put(root)
    with pytest.raises(IncompatibleModuleError, match="module.so: the dynamic linker refuses it"):
        store.load(WORKLOAD, root=root)


def test_a_module_under_another_operators_name_is_refused(tmp_path, toy_root):
    root = shutil.copytree(toy_root, tmp_path / "copy")
    folder = root / AVX2 / toys.PARALLEL.name
    data = (folder / "module.so").read_bytes()
    other = put(root)
    (other / "module.so").write_bytes(data)
    entry = manifest.file_entry(other / "module.so")
    changed = msgspec.structs.replace(manifest.read_manifest(other), files={"module.so": entry})
    (other / "manifest.json").write_bytes(manifest.encode_manifest(changed))
    with pytest.raises(IncompatibleModuleError, match="function: expected paged_decode"):
        store.load(WORKLOAD, root=root)


def test_load_gives_a_callable_and_the_same_one_again(toy_root):
    module = store.load(toys.PARALLEL, root=toy_root)
    assert store.load(toys.PARALLEL, root=toy_root) is module
    assert store.load(toys.PARALLEL, AVX2, root=toy_root) is module
    assert (module.workload, module.target, module.plan, module.origin) == (
        toys.PARALLEL,
        AVX2,
        {"chunk": 32},
        "default",
    )
    assert module.path == toy_root / AVX2 / "merge-f32" / "module.so"
    x, out = torch.randn(7, 64), torch.zeros(7, 64)
    module.function(x, out)
    assert torch.equal(out, 2 * x + 1)
    with pytest.raises(ValueError, match="out"):
        module.function(x, out[:3])


def test_loading_a_whole_catalogue_takes_less_than_a_tenth_of_a_second(tmp_path, toy_root):
    """45 modules of a real size: the time of this process's CPU, so that a busy machine does not fail it."""
    for copy in range(15):
        root = shutil.copytree(toy_root, tmp_path / str(copy))
        for toy in toys.TOYS:
            path = root / AVX2 / toy.name / "module.so"
            with path.open("ab") as file:
                file.write(bytes(100_000))
            old = manifest.read_manifest(path.parent)
            new = msgspec.structs.replace(old, files=old.files | {"module.so": manifest.file_entry(path)})
            (path.parent / "manifest.json").write_bytes(manifest.encode_manifest(new))
    store.load(toys.PARALLEL, root=toy_root)  # imports torch and tvm_ffi, which a serving process has
    start = time.process_time()
    for copy in range(15):
        for toy in toys.TOYS:
            store.load(toy, root=tmp_path / str(copy))
    assert time.process_time() - start < 0.1


def test_a_file_replaced_after_loading_is_refused(tmp_path, toy_root):
    root = shutil.copytree(toy_root, tmp_path / "copy")
    store.load(toys.SERIAL, root=root)
    path = root / AVX2 / toys.SERIAL.name / "module.so"
    path.with_suffix(".new").write_bytes(path.read_bytes())
    path.with_suffix(".new").replace(path)
    with pytest.raises(IncompatibleModuleError, match="replaced since this process loaded it"):
        store.load(toys.SERIAL, AVX2, root=root)


def test_policy_missing_builds_and_never_does_not(tmp_path, monkeypatch):
    asked = []

    def build(workload, target, root):
        asked.append((workload, target, root))
        put(tmp_path)

    monkeypatch.setattr(store, "_build", build)
    with pytest.raises(MissingModuleError):
        store.load(WORKLOAD, root=tmp_path)
    assert asked == []
    monkeypatch.setenv("TILEWRIGHT_BUILD_POLICY", "missing")
    with pytest.raises(IntegrityError, match="launcher"):  # found what was built; the launcher is not part of this test
        monkeypatch.setattr(store, "_launchers", {})
        store.load(WORKLOAD, root=tmp_path)
    assert asked == [(WORKLOAD, None, tmp_path)]


def test_a_failed_build_shows_what_the_builder_said(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_BUILD_POLICY", "missing")
    impossible = Workload("lightning_decode", "f32", None, 3, 5)
    with pytest.raises(BuildError, match="lightning_decode-f32-d3v5: .* failed") as caught:
        store.load(impossible, AMX, root=tmp_path)
    assert "x86-amx" in str(caught.value)


# ---- GPUs

SM90, SM80 = "cuda-sm90a", "cuda-sm80"


def gpus(monkeypatch, *capabilities):
    monkeypatch.setattr(features, "visible_gpus", lambda: capabilities)


def test_code_for_gpus_runs_on_its_own_generation():
    assert {"sm_80", "sm_86", "sm_89"} <= features.gpu_features((8, 9)) and "sm_90" not in features.gpu_features((8, 9))
    assert {"sm_90", "sm_90a"} <= features.gpu_features((9, 0)) and "sm_80" not in features.gpu_features((9, 0))
    assert features.missing_features(["sm_90a"], (10, 0)) == ["sm_90a"]
    assert features.missing_features(["sm_80"], (8, 6)) == []


def test_the_device_of_the_tensors_decides(tmp_path, monkeypatch):
    """CPU tensors never take a CUDA module, nor the other way about; of CUDA targets the device's own is taken."""
    gpus(monkeypatch, (9, 0), (8, 6))
    folders = {name: put(tmp_path, name) for name in (AVX2, SM90, SM80)}
    assert store.find(WORKLOAD, root=tmp_path).found.folder == folders[AVX2]
    assert store.find(WORKLOAD, root=tmp_path, capability=(9, 0)).found.folder == folders[SM90]
    assert store.find(WORKLOAD, root=tmp_path, capability=(8, 6)).found.folder == folders[SM80]
    assert store.find(WORKLOAD, SM90, root=tmp_path).found.folder == folders[SM90]
    gpus(monkeypatch)
    search = store.find(WORKLOAD, SM90, root=tmp_path)
    assert search.state == "unusable" and "no visible CUDA device" in str(search.passed_over[0])
    search = store.find(WORKLOAD, SM90, root=tmp_path, capability=(8, 6))
    assert "expected a device that runs sm_90a, got compute capability 8.6" in str(search.passed_over[0])


def test_a_forced_target_is_for_its_own_device(tmp_path, monkeypatch):
    folders = {name: put(tmp_path, name) for name in (AVX2, SM90)}
    monkeypatch.setenv("TILEWRIGHT_TARGET", AVX2)
    assert store.find(WORKLOAD, root=tmp_path, capability=(9, 0)).found.folder == folders[SM90]
    monkeypatch.setenv("TILEWRIGHT_TARGET", SM90)
    assert store.find(WORKLOAD, root=tmp_path).found.folder == folders[AVX2]
    assert [target.name for target in store.candidate_targets()] == [SM90]


def test_a_missing_cuda_module_names_the_command_for_the_device(tmp_path):
    for capability, target in (((9, 0), SM90), ((8, 0), SM80)):
        with pytest.raises(MissingModuleError, match=f"tilewright build {WORKLOAD.name} --target {target}\nlooked at"):
            store.load(WORKLOAD, root=tmp_path, capability=capability)
    with pytest.raises(
        MissingModuleError, match=r"No target is for compute capability 10.0, expected .*cuda-sm90a \(sm_9"
    ):
        store.load(WORKLOAD, root=tmp_path, capability=(10, 0))


def test_a_damaged_cubin_is_never_given_to_the_driver(tmp_path, monkeypatch):
    folder = put(tmp_path, SM90)
    (folder / "module.cubin").write_bytes(b"code")
    read = manifest.read_manifest(folder)
    files = read.files | {"module.cubin": manifest.file_entry(folder / "module.cubin")}
    (folder / "manifest.json").write_bytes(manifest.encode_manifest(msgspec.structs.replace(read, files=files)))
    (folder / "module.cubin").write_bytes(b"evil")

    class Launcher(store.CudaLauncher):
        def __init__(self):
            pass

        def load(self, *arguments):
            pytest.fail("opened")

    monkeypatch.setattr(store, "_get_launcher", lambda artifact: Launcher())
    with pytest.raises(IntegrityError, match="module.cubin: sha256: expected"):
        store.load(WORKLOAD, root=tmp_path, capability=(9, 0))
