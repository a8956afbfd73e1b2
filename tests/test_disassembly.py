"""What is in built modules: the instructions meant are there, nothing else is called."""

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tilewright.codegen.build import build, recorded_decisions
from tilewright.schedules.catalog import all_workloads
from tilewright.schedules.spaces import get_space
from tilewright.schedules.workload import Workload

# Compilers call these for plain loops; every process has them.
LIBC = {"memcpy", "memmove", "memset"}
AMX = ["paged_decode-bf16-g4-d128", "paged_decode-bf16-g3-d64", "paged_extend-bf16-g4-d128"]


def disassemble(library: Path) -> list[str]:
    """Lines of objdump, instructions and labels."""
    command = ["objdump", "--disassemble", "--no-show-raw-insn", str(library)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def mnemonics(lines: list[str]) -> Counter[str]:
    found = (re.match(r"\s*[0-9a-f]+:\s+(\w+)", line) for line in lines)
    return Counter(match.group(1) for match in found if match)


def undefined(library: Path) -> set[str]:
    """Functions that the library wants from its process."""
    text = subprocess.run(["nm", "-D", "--undefined-only", str(library)], check=True, capture_output=True, text=True)
    return {name.partition("@")[0] for kind, name in map(str.split, text.stdout.splitlines()) if kind == "U"}


def built(name: str, target: str) -> Path:
    workload = Workload.parse(name)
    decisions = recorded_decisions(workload, "x86-amx") or get_space(workload, target).default
    return build(workload, target, decisions).folder / "module.so"


def test_amx_list_names_workloads_of_the_catalogue():
    assert set(AMX) <= {workload.name for workload in all_workloads("x86-amx")}


@pytest.mark.parametrize("target", ["x86-amx", "x86-amx-emulated"])
@pytest.mark.parametrize("name", AMX)
def test_amx_modules(name, target):
    library = built(name, target)
    lines = disassemble(library)
    count = mnemonics(lines)
    assert count["tdpbf16ps"] >= 8 and count["tileloadd"] >= 8 and count["tilezero"] >= 1
    # At the entry of a worker, and again behind the calls that allocate an item's workspaces: never per chunk of keys.
    assert count["ldtilecfg"] <= 2 and count["tilerelease"] == 1
    assert {name for name in undefined(library) if not name.startswith("TVMFFI")} <= LIBC, "libm or another library"
    assert any("zmm" in line for line in lines) == (target == "x86-amx"), "AVX-512 in the real build alone"
    if target == "x86-amx" and name.endswith("g4-d128"):
        # Loops over keys are vectors along memory; operands are transposed and interleaved by shuffles (rows of whole
        # tiles). An item's normaliser gathers (vgatherdps), once.
        assert not set(count) & {"vgatherqps", "vpgatherqd", "vpgatherdd", "vscatterqps", "vpinsrw", "vpextrw"}
    if name.startswith("paged_decode"):
        assert count["prefetcht0"] >= 2, "rows of K and V are asked for ahead"
