import hashlib
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.runtime.errors import IncompatibleModuleError, IntegrityError
from tilewright.runtime.manifest import (
    MANIFEST_NAME,
    SCHEMA,
    TVM_FFI_MAX,
    TVM_FFI_MIN,
    FileEntry,
    Manifest,
    check_tvm_ffi,
    encode_manifest,
    file_entry,
    read_manifest,
    release,
    verify_file,
)

names = st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=1, max_size=12)
manifests = st.builds(
    Manifest,
    schema=st.just(SCHEMA),
    name=names,
    target=names,
    package_version=names,
    tvm_version=st.text(max_size=8),
    tvm_ffi_version=names,
    definition_revision=st.integers(0, 1000),
    features=st.lists(names, max_size=4),
    files=st.dictionaries(
        names, st.builds(FileEntry, sha256=st.text(max_size=64), size=st.integers(0, 2**40)), max_size=4
    ),
    plan=st.dictionaries(names, st.integers(0, 2**31), max_size=3),
    origin=st.sampled_from(["tuned", "default", "given"]),
    fingerprint=names,
)


@given(manifests)
def test_what_is_written_is_read(tmp_path_factory, manifest):
    folder = tmp_path_factory.mktemp("artifact")
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
    assert read_manifest(folder) == manifest


@given(manifests)
def test_encoding_does_not_depend_on_the_order_of_files(manifest):
    shuffled = msgspec.structs.replace(manifest, files=dict(reversed(manifest.files.items())))
    assert encode_manifest(shuffled) == encode_manifest(manifest)


@pytest.fixture
def artifact(tmp_path):
    """A folder with one file and a manifest; the manifest as a dictionary, and a function that writes it."""
    (tmp_path / "module.so").write_bytes(b"code")
    manifest = Manifest(
        schema=SCHEMA,
        name="merge-f32",
        target="x86-avx2",
        package_version="0",
        tvm_version="0",
        tvm_ffi_version="0",
        definition_revision=1,
        features=[],
        files={"module.so": file_entry(tmp_path / "module.so")},
        plan={},
        origin="default",
        fingerprint="",
    )
    fields = json.loads(encode_manifest(manifest))

    def write(**changes):
        (tmp_path / MANIFEST_NAME).write_text(json.dumps(fields | changes))
        return tmp_path

    write()
    return tmp_path, fields, write


def test_file_entry_is_sha256_and_size(artifact):
    folder, _, _ = artifact
    assert file_entry(folder / "module.so") == FileEntry(sha256=hashlib.sha256(b"code").hexdigest(), size=4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"definition_revision": "1"}, r"Expected `int`, got `str` - at `\$.definition_revision`"),
        ({"files": {"module.so": {"sha256": ""}}}, r"missing required field `size` - at `\$.files\[...\]`"),
        ({"unknown": 1}, "unknown field `unknown`"),
        ({"plan": {"chunk": 1.5}}, r"Expected `int`, got `float` - at `\$.plan\[...\]`"),
        ({"files": {"../module.so": {"sha256": "", "size": 0}}}, "expected plain file names, got '../module.so'"),
    ],
)
def test_a_malformed_manifest_says_where(artifact, changes, words):
    folder, _, write = artifact
    write(**changes)
    with pytest.raises(IntegrityError, match=words) as caught:
        read_manifest(folder)
    assert str(folder / MANIFEST_NAME) in str(caught.value)


def test_no_json_is_an_integrity_error(artifact):
    folder, _, _ = artifact
    (folder / MANIFEST_NAME).write_bytes(b'{"schema": 1, "na')
    with pytest.raises(IntegrityError, match="delete the folder and build it again"):
        read_manifest(folder)


def test_another_schema_is_told_before_its_fields_are_read(artifact):
    folder, _, _ = artifact
    (folder / MANIFEST_NAME).write_text(json.dumps({"schema": SCHEMA + 1, "everything": "else"}))
    with pytest.raises(IncompatibleModuleError, match=f"expected {SCHEMA}, got {SCHEMA + 1}"):
        read_manifest(folder)


def test_files_are_verified_by_size_hash_and_presence(artifact):
    folder, _, _ = artifact
    manifest = read_manifest(folder)
    assert verify_file(folder, manifest, "module.so") == folder / "module.so"
    (folder / "module.so").write_bytes(b"cod")
    with pytest.raises(IntegrityError, match="size: expected 4, got 3"):
        verify_file(folder, manifest, "module.so")
    (folder / "module.so").write_bytes(b"CODE")
    with pytest.raises(IntegrityError, match="sha256: expected"):
        verify_file(folder, manifest, "module.so")
    (folder / "module.so").unlink()
    with pytest.raises(IntegrityError, match="missing, the manifest lists it"):
        verify_file(folder, manifest, "module.so")
    with pytest.raises(IntegrityError, match="other.so is not listed"):
        verify_file(folder, manifest, "other.so")


def test_tvm_ffi_range():
    text = [".".join(map(str, version)) for version in (TVM_FFI_MIN, TVM_FFI_MAX)]
    for version in (*text, text[1] + ".post9"):
        check_tvm_ffi(version)
    for version in ("0.1.10", "0.1.99", "1.0"):
        with pytest.raises(
            IncompatibleModuleError, match=f"expected {text[0]} to {text[1]}, got {version}; pip install"
        ):
            check_tvm_ffi(version)
    assert release("0.1.14.post1") == (0, 1, 14)
    with pytest.raises(ValueError, match="expected e.g."):
        release("main")
