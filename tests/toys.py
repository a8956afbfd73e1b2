"""Small kernels under the names of real workloads: what build, store and launcher are tested with.

`python tests/toys.py ROOT` builds them in a process of its own, so that the test process and the serving processes that
it starts need no compiler. All compute out = 2 x + 1 on f32 [n, 64]; what differs is how.
"""

import hashlib
import subprocess
import sys
import types
from functools import cache
from pathlib import Path

from tilewright.schedules.spaces import Space
from tilewright.schedules.workload import Workload

TARGET = "x86-avx2"
PARALLEL = Workload("merge", "f32")  # merge(x, out)
SERIAL = Workload("write_kv", "f32")  # write_kv(x, out)
WORKSPACE = Workload(
    "merge", "bf16"
)  # merge(x, out, size): each row through a workspace of `size` floats, a multiple of 64
LIBM = Workload("merge", "fp16")  # calls libm: must be refused
TOYS = (PARALLEL, SERIAL, WORKSPACE)


def toy_module(workload: Workload, scale: int = 2):
    import tvm
    from tvm import te
    from tvm.s_tir import Schedule

    name = workload.operator
    rows = te.var("n", dtype="int64")
    x = te.placeholder((rows, 64), "float32", name="x")
    if workload == WORKSPACE:
        size = te.var("size", dtype="int64")
        wide = te.compute((rows, size), lambda i, j: x[i, j % 64] * scale, name="wide")
        out = te.compute((rows, 64), lambda i, j: (wide[i, j] + wide[i, size - 64 + j]) * 0.5 + 1.0, name="out")
        function = te.create_prim_func([x, out, size])
    else:
        middle = (lambda i, j: te.sin(x[i, j])) if workload == LIBM else (lambda i, j: x[i, j] * scale)
        wide = te.compute((rows, 64), middle, name="wide")
        out = te.compute((rows, 64), lambda i, j: wide[i, j] + 1.0, name="out")
        function = te.create_prim_func([x, out])
    schedule = Schedule(tvm.IRModule({name: function.with_attr("global_symbol", name)}))
    row, _ = schedule.get_loops(schedule.get_sblock("out", func_name=name))
    if workload != SERIAL:
        schedule.parallel(row)
    schedule.compute_at(schedule.get_sblock("wide", func_name=name), row, preserve_unit_loops=True)
    return schedule.mod


def toy_space(workload: Workload, target: object = None) -> Space:
    return Space(
        choices={"scale": (2, 3)},
        default={"scale": 2},
        legal=lambda decisions: decisions["scale"] in (2, 3),
        module=lambda decisions: toy_module(workload, decisions["scale"]),
        plan=lambda decisions: {"chunk": 16 * decisions["scale"]},
    )


def install() -> None:
    """Put the toys in place of the real x86 spaces of this process."""
    module = types.ModuleType("tilewright.schedules.spaces.paged_x86")
    module.space = toy_space  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module


@cache
def built() -> Path:
    """A root with TOYS for TARGET, kept between runs; built in a process of its own. Copy it to change it."""
    here = Path(__file__).resolve()
    root = here.parent.parent / "build" / "toys" / hashlib.sha256(here.read_bytes()).hexdigest()[:16]
    done = subprocess.run([sys.executable, str(here), str(root)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return root


if __name__ == "__main__":
    install()
    from tilewright.codegen.build import build

    for toy in TOYS:
        build(toy, TARGET, root=Path(sys.argv[1]))
