"""A small problem for the tests of the search: a matrix product with fast, slow and failing schedules.

A module of its own, because the workers import it.
"""

import ctypes
import json
import math
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from tilewright.schedules.spaces import Space
from tilewright.schedules.targets import get_target

N = 96
TARGET = "x86-avx2"
GOOD, BUILD_FAILS, BUILD_CRASHES, BUILD_HANGS, CRASHES, HANGS, WRONG, LIES = range(8)
# The points (tile, vector) of the faulty problem that go wrong, each in its own way.
FAULTS = {
    (4, 1): BUILD_FAILS,
    (8, 1): BUILD_CRASHES,
    (16, 1): BUILD_HANGS,
    (4, 8): CRASHES,
    (8, 8): HANGS,
    (4, 16): WRONG,
}


def fault(decisions, faulty):
    return FAULTS.get((decisions["tile"], decisions["vector"]), GOOD) if faulty else GOOD


def definition():
    from tvm import te

    a, b = (te.placeholder((N, N), "float32", name=name) for name in "ab")
    k = te.reduce_axis((0, N), "k")
    return te.create_prim_func([a, b, te.compute((N, N), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="c")])


@dataclass(frozen=True)
class ToyProblem:
    """faulty: with the FAULTS, over 11 legal points; else sound and with 3 decisions.

    lies: everything but the default is right in the measured case only.
    broken: the default does not build.
    """

    faulty: bool = False
    lies: bool = False
    broken: bool = False
    key: str = "0" * 64
    name: str = "toy"
    target: str = TARGET
    description: str = f"{N} x {N} x {N}"
    code: str = "1"

    def fingerprint(self):
        return self.code

    def space(self):
        choices = {"tile": (1, 4, 8, 16), "vector": (1, 8, 16)}
        if not self.faulty:
            choices = {"tile": (1, 2, 4, 6, 8, 12, 16), "vector": (1, 2, 4, 8, 16), "inner": (1, 2, 4, 8)}

        def module(decisions):
            import tvm
            from tvm.s_tir import Schedule

            if fault(decisions, self.faulty) == BUILD_FAILS or self.broken:
                raise ValueError("this candidate cannot be scheduled")
            if fault(decisions, self.faulty) == BUILD_CRASHES:
                os.kill(os.getpid(), signal.SIGSEGV)
            if fault(decisions, self.faulty) == BUILD_HANGS:
                time.sleep(600)
            schedule = Schedule(definition())
            block = schedule.get_sblock("c")
            i, j, k = schedule.get_loops(block)
            io, ii = schedule.split(i, [None, decisions["tile"]])
            jo, ji = schedule.split(j, [None, decisions["vector"]])
            ko, ki = schedule.split(k, [None, decisions.get("inner", 1)])
            schedule.reorder(io, jo, ko, ki, ii, ji)
            schedule.unroll(ii)
            schedule.vectorize(ji)
            schedule.decompose_reduction(block, ko)
            return tvm.IRModule({"toy": schedule.mod["main"].with_attr("global_symbol", "toy")})

        def plan(decisions):
            honest = not self.lies or decisions["vector"] == 1
            return {"fault": fault(decisions, self.faulty) if honest else LIES}

        return Space(
            choices=choices,
            default={name: values[0] for name, values in choices.items()},
            legal=lambda decisions: decisions["tile"] * decisions["vector"] <= 128,
            module=module,
            plan=plan,
        )

    def prepare(self, shared):
        shared.mkdir(parents=True, exist_ok=True)

    def build(self, decisions, shared, root):
        from tilewright.codegen.compile import compile_module, export

        with (shared.parent.parent / "builds.log").open("a") as log:
            log.write(json.dumps(decisions) + "\n")
        module = self.space().module(decisions)
        root.mkdir()
        export(compile_module(module, get_target(TARGET)), root / "module.so")

    def measured(self, shared):
        return ToyCase(0)

    def verified(self, shared):
        return [ToyCase(1), ToyCase(2)]


class ToyCase:
    flops, bytes = 2.0 * N**3, 12.0 * N**2
    device = "cpu"

    def __init__(self, seed):
        import torch

        self.seed = seed
        draw = torch.Generator().manual_seed(seed)
        self.a, self.b = (torch.randn((N, N), generator=draw) for _ in range(2))
        self.c = torch.empty((N, N))
        self.expected = self.a.double() @ self.b.double()

    def bind(self, root: Path, plan):
        import tvm_ffi

        kernel = tvm_ffi.load_module(str(root / "module.so"))["toy"]

        def call():
            if plan["fault"] == CRASHES:
                ctypes.string_at(0)
            if plan["fault"] == HANGS:
                time.sleep(600)
            kernel(self.a, self.b, self.c)
            if plan["fault"] == WRONG or (plan["fault"] == LIES and self.seed):
                self.c[3, 5] += 1

        return call

    def poison(self):
        self.c.fill_(math.nan)

    def error(self):
        return float((self.c - self.expected).abs().max()) / 1e-3


def nothing():
    pass


def refuse():
    raise ImportError("no such compiler")


def pid(_):
    return os.getpid()


def sleep(seconds):
    time.sleep(seconds)
