"""What is in built modules: the instructions meant are there, nothing else is called."""

import re
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tilewright.codegen.build import build, recorded_decisions
from tilewright.runtime.manifest import MODULE_NAME
from tilewright.schedules.catalog import all_workloads
from tilewright.schedules.spaces import get_space
from tilewright.schedules.targets import get_target
from tilewright.schedules.workload import Workload

# Compilers call these for plain loops; every process has them.
LIBC = {"memcpy", "memmove", "memset"}
AVX2 = all_workloads("x86-avx2")
SPECIALISED = [w for w in AVX2 if w.operator.startswith("paged") and not w.general]
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
    # The emulated twin has the schedules of the real modules.
    decisions = recorded_decisions(workload, "x86-amx") if get_target(target).family == "amx" else None
    return build(workload, target, decisions or get_space(workload, target).default).folder / MODULE_NAME


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
        assert count["prefetcht0"] + count["prefetcht1"] >= 2, "rows of K and V are asked for ahead"


def tile_faults(library: Path) -> tuple[set[str], int]:
    """What breaks the rule that tiles are configured where they are used and released before anyone else runs there.

    Follows every path through the code that uses tiles, from the entries whose address is taken (the body of a parallel
    loop has no symbol): (faults, number of tile instructions on those paths).
    """
    lines = disassemble(library)
    found = (re.match(r" +([0-9a-f]+):\t(\S+)[ \t]*(.*)$", line) for line in lines)
    code = [Instruction(int(m[1], 16), m[2], m[3]) for m in found if m]
    place = {instruction.address: n for n, instruction in enumerate(code)}
    taken = {int(m[1], 16) for i in code if i.name == "lea" and (m := re.search(r"# ([0-9a-f]+) <", i.operands))}
    todo = [(place[address], False) for address in taken if address in place]
    seen: set[tuple[int, bool]] = set()
    faults = set()
    while todo:
        n, configured = todo.pop()
        while (n, configured) not in seen:
            seen.add((n, configured))
            address, name, operands = code[n]
            if name == "ldtilecfg":
                configured = True
            elif name == "tilerelease":
                configured = False
            elif name.startswith(("tile", "tdp")) and not configured:
                faults.add(f"{address:x}: {name} without a configuration")
            elif name.startswith("ret"):
                if configured:
                    faults.add(f"{address:x}: returns with its tiles configured")
                break
            elif name.startswith("j"):
                target = re.match(r"[0-9a-f]+ <", operands)
                if target is None:
                    faults.add(f"{address:x}: {name} {operands}: cannot be followed")
                    break
                todo.append((place[int(target[0][:-2], 16)], configured))
                if name == "jmp":
                    break
            n += 1
    return faults, len({n for n, _ in seen if code[n].name.startswith(("tile", "tdp"))})


@pytest.mark.parametrize("target", ["x86-amx", "x86-amx-emulated"])
@pytest.mark.parametrize("name", AMX)
def test_tiles_are_configured_at_entry_and_released_at_exit(name, target):
    """The kernel finds its own configuration whatever ran before, and oneDNN's next use of tiles none of ours."""
    library = built(name, target)
    faults, visited = tile_faults(library)
    assert not faults
    count = mnemonics(disassemble(library))
    # All but ldtilecfg itself, whose name begins otherwise.
    assert visited == sum(n for name, n in count.items() if name.startswith(("tile", "tdp"))), "every one was visited"


# ---- x86-avx512


@pytest.mark.parametrize("name", ["paged_decode-bf16-g4-d128", "paged_extend-f32-g3-d64", "lightning_extend-bf16-d128"])
def test_avx512_modules(name):
    library = built(name, "x86-avx512")
    lines = disassemble(library)
    wide = sum("zmm" in line for line in lines)
    assert wide > sum("ymm" in line for line in lines), "512-bit vectors carry the work"
    assert not any(re.search(r"\s(tile|tdp|ldtilecfg)", line) for line in lines)
    assert {name for name in undefined(library) if not name.startswith("TVMFFI")} <= LIBC, "libm or another library"


# ---- x86-avx2


class Instruction(NamedTuple):
    address: int
    name: str
    operands: str


@cache
def disassembled(workload):
    """Every instruction of the workload's x86-avx2 module."""
    text = "\n".join(disassemble(build(workload, "x86-avx2").folder / MODULE_NAME))
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


@pytest.mark.parametrize("workload", AVX2, ids=lambda w: w.name)
def test_nothing_is_called_outside(workload):
    """No libm (nor any other) function but those of libtvm_ffi and the block moves of libc."""
    needed = undefined(build(workload, "x86-avx2").folder / MODULE_NAME)
    assert needed, "not even an error could be raised"
    assert {name for name in needed - LIBC if not name.startswith("TVMFFI")} == set()


@pytest.mark.parametrize("workload", AVX2, ids=lambda w: w.name)
def test_instructions_of_the_target(workload):
    """Any x86-64-v3 processor runs it: no 512-bit or masked register, no bf16 instruction, no tile."""
    for instruction in disassembled(workload):
        assert not re.search(r"%zmm|%k[0-7]|%tmm|%[xy]mm(1[6-9]|2\d|3[01])\b", instruction.operands), instruction
        assert not re.match(r"v?dpbf16ps|vcvtne2?ps2bf16|tile|tdp", instruction.name), instruction


@pytest.mark.parametrize("workload", SPECIALISED, ids=lambda w: w.name)
def test_both_products_are_register_tiles(workload):
    """Q K and P V are innermost loops of fused multiply-adds on full vectors that accumulate in registers.

    Decode's loops are short, so the compiler may unroll one whole: a product then stands in no innermost loop, or a
    tile of keys is straight code with its accumulators stored at the end. One query row and one key at a time, as a
    search may decide, is a tile of a single accumulator.
    """
    code = disassembled(workload)
    extend = workload.operator == "paged_extend"
    least = 4 if extend or workload.group > 1 else 1
    # The other chains of multiply-adds, of exp2 and tanh, round to an integer.
    products = [
        loop
        for loop in innermost_loops(code)
        if len(fused(loop)) >= least and not any("round" in instruction.name for instruction in loop)
    ]
    most_stores = 0 if extend else 1 / 4  # of the multiply-adds
    tiles = [loop for loop in products if len(stores(loop)) <= most_stores * len(fused(loop))]
    assert len(tiles) >= (2 if extend else 1), [len(stores(loop)) for loop in products]
    assert len(products) >= 2 or len(fused(code)) >= len(fused(products[0])) + workload.head_dim_qk // 8


@pytest.mark.parametrize("workload", [w for w in SPECIALISED if not w.kv_dtype], ids=lambda w: w.name)
def test_half_types_are_widened_eight_at_a_time(workload):
    """bf16 is the upper half of an f32; fp16 has an instruction; f32 needs neither.

    Extend zero-extends and shifts; decode shifts the even elements of a row and masks the odd ones, without a shuffle.
    """
    bf16 = {"vpslld", "vpblendw" if workload.operator == "paged_decode" else "vpmovzxwd"}
    widening = {"bf16": bf16, "fp16": {"vcvtph2ps"}, "f32": set()}[workload.dtype]
    names = {i.name for i in disassembled(workload) if "%ymm" in i.operands}
    assert widening <= names
    foreign = {"bf16": {"vcvtph2ps"}, "fp16": {"vpmovzxwd"}, "f32": {"vpmovzxwd", "vcvtph2ps"}}[workload.dtype]
    assert not names & foreign
    if workload.operator == "paged_decode" and workload.group > 1:
        products = [loop for loop in innermost_loops(disassembled(workload)) if len(fused(loop)) >= 8]
        assert not any(i.name.startswith(("vpinsr", "vpmovzx")) for loop in products for i in loop)


@pytest.mark.parametrize("workload", [w for w in AVX2 if w.kv_dtype and not w.general], ids=lambda w: w.name)
def test_codes_are_converted_in_vectors(workload):
    """fp8 codes become floats, and floats codes, by integer operations on vectors: no table, nothing lane by lane."""
    code = disassembled(workload)
    names = {i.name for i in code if re.search("%[xy]mm", i.operands)}
    table = {"vpgatherdd", "vgatherdps", "vpinsrb", "vpextrb"}
    if workload.operator == "write_kv":  # a shuffle brings four bytes together
        assert any(i.name == "vdivps" and "%ymm" in i.operands for i in code)
    else:
        table.add("vpshufb")
        width = "%ymm" if workload.operator == "paged_decode" else "%[xy]mm"
        assert any(i.name == "vpmovsxbw" and re.search(width, i.operands) for i in code)
        assert {"vpsllw", "vpaddw", "vpxor"} <= names and any(i.name == "vcvtph2ps" for i in code)
    assert not names & table
