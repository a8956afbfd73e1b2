"""The manifest of an artifact folder: what was built, from what, for which CPUs and libraries; the hash of each file.

An artifact is `<root>/<target>/<name>/` with `manifest.json` and the files that it lists. It is written and replaced as
one folder, so the manifest is complete in itself: no index has to be kept in step with it. The launcher library is an
artifact of its own (name "launcher").
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path

import msgspec

from tilewright.runtime.errors import IncompatibleModuleError, IntegrityError

SCHEMA = 1
MANIFEST_NAME = "manifest.json"
MODULE_NAME = "module.so"
CUBIN_NAME = "module.cubin"
LAUNCHER = "launcher"

# The tvm-ffi releases that load and run modules built with the pinned compiler: `make test-abi` proves both ends.
TVM_FFI_MIN = (0, 1, 11)
TVM_FFI_MAX = (0, 1, 15)


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of the artifact: sha256 in lower-case hex and size in bytes."""

    sha256: str
    size: int


class KernelEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a GPU kernel of a module is launched.

    Attributes:
        arguments: the dtype of each ("handle" is a pointer).
        launch: what the host code passes after them, in order: sizes such as "blockIdx.x" or "threadIdx.x", then
            "dynamic_shared" (bytes of shared memory); "programmatic" and "cooperative" are ways to launch, not values.
    """

    arguments: list[str]
    launch: list[str]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All that the store must know before it opens a module.

    Attributes:
        schema: of this file, SCHEMA.
        name: the workload's name, or "launcher".
        target: one of schedules.targets.
        package_version: of the tilewright that built it.
        tvm_version: of the compiler ("" for the launcher).
        tvm_ffi_version: apache-tvm-ffi at build time.
        definition_revision: schedules.workload.DEFINITION_REVISION then.
        features: what the device must be able to run, or the module must not be opened: CPU features, named as in
            /proc/cpuinfo, or the GPU code that it holds ("sm_90a").
        files: name -> hash and size of every other file of the folder.
        plan: what the planner must know (`block_q`, `chunk`, `min_split`, `max_split`).
        origin: of the decisions: "tuned" (a record), "default" (the untuned schedule), "given" (by the builder).
        fingerprint: sha256 of what the build read: sources, decisions, compiler version.
        kernels: of a CUDA module: what its cubin holds, by name.
    """

    schema: int
    name: str
    target: str
    package_version: str
    tvm_version: str
    tvm_ffi_version: str
    definition_revision: int
    features: list[str]
    files: dict[str, FileEntry]
    plan: dict[str, int]
    origin: str
    fingerprint: str
    kernels: dict[str, KernelEntry] = {}


class _Header(msgspec.Struct):
    schema: int


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an artifact folder.

    Raises:
        FileNotFoundError: the folder has none, so it is no artifact.
        IntegrityError: it is not a manifest; the message names the path inside the JSON.
        IncompatibleModuleError: it is of another schema.
    """
    path = folder / MANIFEST_NAME
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise IntegrityError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        schema = msgspec.json.decode(data, type=_Header).schema
        if schema != SCHEMA:
            raise IncompatibleModuleError(
                f"{path}: manifest schema: expected {SCHEMA}, got {schema}; build it again with this tilewright"
            )
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as error:
        raise IntegrityError(f"{path}: not a manifest: {error}; delete the folder and build it again") from error
    for name in manifest.files:
        if Path(name).name != name or name in (MANIFEST_NAME, "..", "."):
            raise IntegrityError(f"{path}: files: expected plain file names, got {name!r}")
    return manifest


def encode_manifest(manifest: Manifest) -> bytes:
    """The JSON of a manifest: keys of dictionaries sorted, indented, newline-ended."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=1) + b"\n"


def file_entry(path: Path) -> FileEntry:
    """Hash and size of a file as it is now."""
    data = path.read_bytes()
    return FileEntry(sha256=hashlib.sha256(data).hexdigest(), size=len(data))


def verify_file(folder: Path, manifest: Manifest, name: str) -> Path:
    """Check one file of the artifact against its manifest and give its path.

    Raises:
        IntegrityError: it is not listed, missing, or not the file that was built.
    """
    path = folder / name
    expected = manifest.files.get(name)
    if expected is None:
        raise IntegrityError(
            f"{folder / MANIFEST_NAME}: files: {name} is not listed; delete the folder and build it again"
        )
    try:
        actual = file_entry(path)
    except FileNotFoundError:
        raise IntegrityError(f"{path}: missing, the manifest lists it; delete the folder and build it again") from None
    except OSError as error:
        raise IntegrityError(f"{path}: cannot be read: {error.strerror}") from error
    for what in ("size", "sha256"):
        want, got = getattr(expected, what), getattr(actual, what)
        if want != got:
            raise IntegrityError(
                f"{path}: {what}: expected {want}, got {got}; the file was altered or cut short: delete {folder} "
                "and build or install it again"
            )
    return path


@cache
def release(version: str) -> tuple[int, int, int]:
    """The release numbers of a version string: "0.1.14.post1" -> (0, 1, 14)."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if match is None:
        raise ValueError(f"version: got {version!r}, expected e.g. '0.1.14'")
    return int(match[1]), int(match[2]), int(match[3] or 0)


def check_tvm_ffi(installed: str) -> None:
    """Whether the installed apache-tvm-ffi is one that is proven to run the modules.

    Raises:
        IncompatibleModuleError: it is not; the message gives the range and the command.
    """
    if not TVM_FFI_MIN <= release(installed) <= TVM_FFI_MAX:
        low, high = (".".join(map(str, version)) for version in (TVM_FFI_MIN, TVM_FFI_MAX))
        raise IncompatibleModuleError(
            f"apache-tvm-ffi: expected {low} to {high}, got {installed}; "
            f"pip install 'apache-tvm-ffi>={low},<={high}.post99' (the range that is tested to run built modules)"
        )
