"""What the compiler made of the kernels: the instructions of every built x86-avx2 module."""

import re
import subprocess
from functools import cache
from typing import NamedTuple

import pytest

from tilewright.codegen.build import build
from tilewright.codegen.compile import LIBC_FUNCTIONS
from tilewright.runtime.manifest import MODULE_NAME
from tilewright.schedules.catalog import all_workloads

TARGET = "x86-avx2"
WORKLOADS = all_workloads(TARGET)
SPECIALISED = [w for w in WORKLOADS if w.operator.startswith("paged") and not w.general]


class Instruction(NamedTuple):
    address: int
    name: str
    operands: str


def library(workload):
    return build(workload, TARGET).folder / MODULE_NAME


@cache
def disassembled(workload):
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(library(workload))], capture_output=True, text=True, check=True
    ).stdout
    found = re.findall(r"^ +([0-9a-f]+):\t(\S+)[ \t]*(.*)$", text, re.MULTILINE)
    assert found, "objdump printed no instruction"
    return [Instruction(int(address, 16), name, operands) for address, name, operands in found]


def innermost_loops(code):
    """Bodies of the loops (a jump back and what it jumps over) that hold no other loop."""
    place = {instruction.address: n for n, instruction in enumerate(code)}
    spans = []
    for end, (address, name, operands) in enumerate(code):
        target = operands.split(" ")[0]
        if name.startswith("j") and re.fullmatch("[0-9a-f]+", target) and int(target, 16) <= address:
            spans.append((place[int(target, 16)], end))
    return [
        code[start : end + 1]
        for start, end in spans
        if not any((a, b) != (start, end) and start <= a and b <= end for a, b in spans)
    ]


def fused(code):
    """Multiply-adds of eight floats; the compiler takes the form (132, 213, 231) by which operand it needs again."""
    return [i for i in code if re.fullmatch(r"vfmadd\d+ps", i.name) and "%ymm" in i.operands]


def stores(code):
    """Vectors of eight floats that are written to memory."""
    return [i for i in code if i.name.startswith("vmov") and re.match(r"%ymm\d+,.*\(", i.operands)]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_nothing_is_called_outside(workload):
    """No libm (nor any other) function but those of libtvm_ffi and the block moves of libc."""
    text = subprocess.run(
        ["nm", "-D", "--undefined-only", "--format=posix", str(library(workload))],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    needed = {line.split()[0].partition("@")[0] for line in text.splitlines() if line.split()[1] == "U"}
    assert needed, "not even an error could be raised"
    assert {name for name in needed - LIBC_FUNCTIONS if not name.startswith("TVMFFI")} == set()


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_instructions_of_the_target(workload):
    """Any x86-64-v3 processor runs it: no 512-bit or masked register, no bf16 instruction, no tile."""
    for instruction in disassembled(workload):
        assert not re.search(r"%zmm|%k[0-7]|%tmm|%[xy]mm(1[6-9]|2\d|3[01])\b", instruction.operands), instruction
        assert not re.match(r"v?dpbf16ps|vcvtne2?ps2bf16|tile|tdp", instruction.name), instruction


@pytest.mark.parametrize("workload", SPECIALISED, ids=lambda w: w.name)
def test_both_products_are_register_tiles(workload):
    """Q K and P V are innermost loops of fused multiply-adds on full vectors that accumulate in registers.

    Decode's first product ends in sums within vectors, which may pass through memory.
    """
    loops = innermost_loops(disassembled(workload))
    # The other chains of multiply-adds, of exp2 and tanh, round to an integer.
    products = [loop for loop in loops if len(fused(loop)) >= 4 and not any("round" in i.name for i in loop)]
    assert len(products) >= 2, [len(fused(loop)) for loop in loops]
    tiles = [loop for loop in products if not stores(loop)]
    assert len(tiles) >= (2 if workload.operator == "paged_extend" else 1), [len(stores(loop)) for loop in products]


@pytest.mark.parametrize("workload", SPECIALISED, ids=lambda w: w.name)
def test_half_types_are_widened_eight_at_a_time(workload):
    """bf16 is the upper half of an f32: zero-extend and shift; fp16 has an instruction; f32 needs neither."""
    widening = {"bf16": {"vpmovzxwd", "vpslld"}, "fp16": {"vcvtph2ps"}, "f32": set()}[workload.dtype]
    names = {i.name for i in disassembled(workload) if "%ymm" in i.operands}
    assert widening <= names
    assert not names & ({"vpmovzxwd", "vcvtph2ps"} - widening)
