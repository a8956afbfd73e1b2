"""A small CUDA module, and tensors that only claim to be on a GPU: what the launcher is tested with, over fake_cuda.c.

`python tests/cuda_toy.py FOLDER` builds it (apache-tvm and the cuda extra), in a process of its own as in toys.py.
"""

import ctypes
import hashlib
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve()


def build(folder: Path) -> None:
    """out = scale * x + 1 on f32 [n, 64] as `merge(x, out, scale)`: a thread block of 64 for each row."""
    import msgspec
    import tvm
    from tvm import te
    from tvm.s_tir import Schedule

    from tilewright.codegen.compile import tvm_target
    from tilewright.codegen.cuda_export import export_cuda
    from tilewright.codegen.cuda_toolchain import toolchain
    from tilewright.schedules.targets import get_target

    rows, scale = te.var("n", dtype="int64"), te.var("scale", dtype="float32")
    x = te.placeholder((rows, 64), "float32", name="x")
    out = te.compute((rows, 64), lambda i, j: x[i, j] * scale + 1.0, name="out")
    schedule = Schedule(
        tvm.IRModule({"merge": te.create_prim_func([x, out, scale]).with_attr("global_symbol", "merge")})
    )
    row, column = schedule.get_loops(schedule.get_sblock("out", func_name="merge"))
    schedule.bind(row, "blockIdx.x")
    schedule.bind(column, "threadIdx.x")
    target = tvm_target(get_target("cuda-sm90a"))
    with toolchain(), target:
        executable = tvm.compile(schedule.mod, target=target)
    folder.mkdir(parents=True, exist_ok=True)
    kernels = export_cuda(executable, folder, programmatic=False)
    (folder / "kernels.json").write_bytes(msgspec.json.encode(kernels))


@cache
def built() -> Path:
    """The folder of the module, kept between runs."""
    folder = HERE.parent.parent / "build" / "toys" / f"cuda-{hashlib.sha256(HERE.read_bytes()).hexdigest()[:16]}"
    if not (folder / "kernels.json").is_file():
        done = subprocess.run([sys.executable, str(HERE), str(folder)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device", ctypes.c_int32),
        ("rank", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
    )  # fmt: skip


class Claimed:
    """A dense f32 [rows, 64] tensor at an address of CUDA device `device` that nothing may touch.

    It must outlive what is made of it: there is no deleter.
    """

    def __init__(self, address: int, rows: int, device: int = 0) -> None:
        self._sizes = (ctypes.c_int64 * 2)(rows, 64), (ctypes.c_int64 * 2)(64, 1)
        self._managed = _Tensor(address, 2, device, 2, 2, 32, 1, *self._sizes, 0, None, None)
        self._device = device

    def __dlpack__(self, **_: object) -> object:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self._managed), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._device


if __name__ == "__main__":
    build(Path(sys.argv[1]))
    print(json.dumps({"built": sys.argv[1]}))
