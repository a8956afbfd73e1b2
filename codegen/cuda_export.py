"""A compiled CUDA executable -> module.so (host code), module.cubin (machine code) and how its kernels are launched.

TVM's own export would embed the cubin in a form that only TVM's CUDA runtime loads; ours is loaded by
runtime/cuda_launcher.py through the driver alone.
"""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.runtime.cuda_launcher import ARGUMENTS, LAUNCH, SERVED_SYMBOLS
from tilewright.runtime.errors import BuildError
from tilewright.runtime.manifest import CUBIN_NAME, MODULE_NAME, KernelEntry

if TYPE_CHECKING:
    import tvm

# TVM's names of what a launch needs besides sizes -> ours.
_TAGS = {
    "tirx.use_dyn_shared_memory": "dynamic_shared",
    "tirx.use_programtic_dependent_launch": "programmatic",
    "tirx.use_cooperative_launch": "cooperative",
}
_CODES = {0: "int", 1: "uint", 2: "float", 3: "handle", 6: "bool"}


class _Reader:
    """TVM's stream format: little-endian, sizes of 8 bytes before texts and lists."""

    def __init__(self, data: bytes) -> None:
        self._data, self.position = data, 0

    def take(self, count: int) -> bytes:
        part = self._data[self.position : self.position + count]
        if len(part) != count:
            raise BuildError("the compiler's CUDA module ends early: not the format of the pinned apache-tvm")
        self.position += count
        return part

    def size(self) -> int:
        (value,) = struct.unpack("<Q", self.take(8))
        if value > len(self._data):
            raise BuildError("the compiler's CUDA module has an impossible size: not the format of the pinned TVM")
        return value

    def text(self) -> str:
        return self.take(self.size()).decode()


def _dtype(data: bytes) -> str:
    code, bits, lanes = struct.unpack("<BBH", data)
    kind = _CODES.get(code, str(code))
    name = kind if kind in ("handle", "bool") else ("int" if kind == "uint" else kind) + str(bits)
    if lanes != 1 or name not in ARGUMENTS:
        raise BuildError(f"kernel argument: got {kind}{bits}x{lanes}, expected one of {', '.join(ARGUMENTS)}")
    return name


def _launch(tag: str) -> str:
    name = _TAGS.get(tag, tag)
    if name not in LAUNCH:
        raise BuildError(f"launch parameter: got {tag}, expected one of {', '.join([*LAUNCH, *_TAGS])}")
    return name


def parse_cuda_module(data: bytes) -> tuple[bytes, dict[str, KernelEntry]]:
    """(cubin, kernels) of TVM's serialised CUDA module.

    Raises:
        BuildError: not machine code in the format of the pinned compiler, or a kernel that cannot be launched.
    """
    reader = _Reader(data)
    form = reader.text()
    if form != "cubin":
        raise BuildError(f"CUDA code: got {form!r}, expected 'cubin', as NVRTC makes it (the cuda extra)")
    kernels = {}
    for _ in range(reader.size()):
        name = reader.text()
        if reader.text() != name:
            raise BuildError(f"{name}: listed under two names: not the format of the pinned apache-tvm")
        arguments = [_dtype(reader.take(4)) for _ in range(reader.size())]
        launch = [_launch(reader.text()) for _ in range(reader.size())]
        extra = struct.unpack(f"<{(count := reader.size())}i", reader.take(4 * count))
        if any(extra):
            raise BuildError(f"{name}: takes a tensor map, which the launcher does not make")
        # TVM passes sizes in the order of their tags, and the shared memory after all of them.
        launch.sort(key="dynamic_shared".__eq__)
        kernels[name] = KernelEntry(arguments, launch)
    cubin = reader.take(reader.size())
    if cubin[:4] != b"\x7fELF" or reader.position != len(data):
        raise BuildError("the compiler's CUDA module holds no cubin: not the format of the pinned apache-tvm")
    return cubin, kernels


def _device_module(executable: tvm.runtime.Executable) -> bytes:
    """The serialised CUDA module of an executable."""
    import tvm

    imports = [module.kind for module in executable.mod.imports]
    if imports != ["cuda"]:
        raise BuildError(f"device code: got {imports}, expected one CUDA module")
    packed = tvm.get_global_func("runtime.ModulePackImportsToTensor")(executable.mod).numpy().tobytes()
    # Before it: the sizes and lists of the import tree, then the kinds "_lib" and "cuda" and the module's length.
    mark = struct.pack("<Q", 4) + b"_lib" + struct.pack("<Q", 4) + b"cuda"
    start = packed.find(mark)
    if start < 0:
        raise BuildError("the compiler packs its modules in another way: not the pinned apache-tvm")
    reader = _Reader(packed[start + len(mark) :])
    return reader.take(reader.size())


def export_cuda(executable: tvm.runtime.Executable, folder: Path, *, programmatic: bool) -> dict[str, KernelEntry]:
    """Write module.so and module.cubin into `folder`; how the kernels are launched belongs into the manifest.

    Args:
        executable: what compile_module made.
        folder: where.
        programmatic: whether its kernels may be launched before the kernel before has ended (TVM has no way to say so).

    Raises:
        BuildError: no C compiler, or the compiler made what the launcher does not serve.
    """
    from tilewright.codegen.compile import check_symbols, link

    cubin, kernels = parse_cuda_module(_device_module(executable))
    if programmatic:
        kernels = {
            name: KernelEntry(entry.arguments, [*entry.launch, "programmatic"]) for name, entry in kernels.items()
        }
    with tempfile.TemporaryDirectory(prefix="tilewright-") as scratch:
        host = Path(scratch) / "host.o"
        executable.mod.write_to_file(str(host), "o")
        link(host, folder / MODULE_NAME)
    check_symbols(folder / MODULE_NAME, SERVED_SYMBOLS)
    (folder / CUBIN_NAME).write_bytes(cubin)
    return kernels
