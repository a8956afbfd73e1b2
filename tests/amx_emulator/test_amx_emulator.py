"""Each tile instruction, in each form, against numpy; what hardware refuses must not be emulated."""

import ctypes
import itertools
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from amx_emulator import COMPILE, hardware_runs_tiles

pytestmark = pytest.mark.skipif(
    hardware_runs_tiles(), reason="this process runs tile instructions on the processor itself"
)

REGISTERS = ["rax", "rbx", "rcx", "rdx", "rsi", "rdi", "rbp", *(f"r{n}" for n in range(8, 16))]
PRODUCTS = {
    "tdpbf16ps": (2, 0x5C),
    "tdpfp16ps": (3, 0x5C),
    "tdpbssd": (3, 0x5E),
    "tdpbsud": (2, 0x5E),
    "tdpbusd": (1, 0x5E),
    "tdpbuud": (0, 0x5E),
}
OPERANDS = [(0, 1, 2), (7, 6, 5), (3, 0, 7), (4, 5, 1)]


def product(name: str, d: int, a: int, b: int) -> str:
    """A dot product as bytes: assemblers older than the instruction take it too."""
    prefix, opcode = PRODUCTS[name]
    return f".byte 0xc4, 0xe2, {(~b & 15) << 3 | prefix:#x}, {opcode:#x}, {0xC0 | d << 3 | a:#x}"


def addressing_forms() -> dict[str, tuple[str, str, str, int, int]]:
    """Name -> (instruction, base, index, scale, displacement): every register in both roles, every displacement."""
    forms = [(base, "rax" if base != "rax" else "r14", 1, 0) for base in REGISTERS]
    forms += [("rbx" if index != "rbx" else "r13", index, 2, -8) for index in REGISTERS]
    forms += [
        (base, "r12", scale, disp)
        for base, scale, disp in itertools.product(("rcx", "r13"), (1, 2, 4, 8), (0, 127, -128, 128, -4096))
    ]
    return {
        f"form_{n}_{op}": (op, *form)
        for n, form in enumerate(forms)
        for op in ("tileloadd", "tileloaddt1", "tilestored")
    }


def addressing_function(op: str, base: str, index: str, scale: int, disp: int) -> str:
    """f(address, stride / scale): `op` on tile 2 through that form; all registers that matter are saved."""
    operand = f"{disp if disp else ''}(%{base},%{index},{scale})"
    save = ["rbx", "rbp", "r12", "r13", "r14", "r15"]
    return "\n".join(
        [f"push %{r}" for r in save]
        + ["push %rdi", "push %rsi", f"pop %{index}", f"pop %{base}"]
        + [f"tilestored %tmm2, {operand}" if op == "tilestored" else f"{op} {operand}, %tmm2"]
        + [f"pop %{r}" for r in reversed(save)]
    )


def functions() -> dict[str, str]:
    """Assembly bodies by name; arguments arrive in rdi and rsi."""
    bodies = {
        "ldtilecfg": "ldtilecfg (%rdi)",
        "sttilecfg": "sttilecfg (%rdi)",
        "tilerelease": "tilerelease",
        "ldtilecfg_disp8_of_rsp": "mov %rsp, %rax\n lea 64(%rdi), %rsp\n ldtilecfg -64(%rsp)\n mov %rax, %rsp",
        "ldtilecfg_disp32_of_r12": "push %r12\n lea -4096(%rdi), %r12\n ldtilecfg 4096(%r12)\n pop %r12",
        "ldtilecfg_scaled_without_base": "lea -64(%rdi), %rax\n shr $1, %rax\n ldtilecfg 64(,%rax,2)",
        "ldtilecfg_rip": "ldtilecfg full(%rip)",
        "sttilecfg_disp8_of_r13": "push %r13\n lea -8(%rdi), %r13\n sttilecfg 8(%r13)\n pop %r13",
        "zero_ud2_store": "tilezero %tmm0\n ud2\n tilestored %tmm0, (%rdi,%rsi,1)",
        "two_together": "tilezero %tmm3\n tilezero %tmm4",
        "one_apart_from_one": "tilezero %tmm3\n nop\n tilezero %tmm4",
        "load_without_sib": ".byte 0xc4, 0xe2, 0x7b, 0x4b, 0x07",
        "ud2": "ud2",
        "vvvv_in_tilezero": ".byte 0xc4, 0xe2, 0x73, 0x49, 0xc0",
        "tilezero_of_tile_8": ".byte 0xc4, 0x62, 0x7b, 0x49, 0xc0",
    }
    for t in range(8):
        bodies |= {
            f"tilezero_{t}": f"tilezero %tmm{t}",
            f"tileloadd_{t}": f"tileloadd (%rdi,%rsi,1), %tmm{t}",
            f"tilestored_{t}": f"tilestored %tmm{t}, (%rdi,%rsi,1)",
        }
    for name, (d, a, b) in itertools.product(PRODUCTS, OPERANDS):
        bodies[f"{name}_{d}{a}{b}"] = product(name, d, a, b)
    for d, a, b in ((0, 0, 1), (0, 1, 0), (1, 0, 0)):
        bodies[f"tdpbf16ps_{d}{a}{b}"] = product("tdpbf16ps", d, a, b)
    bodies |= {name: addressing_function(*form) for name, form in addressing_forms().items()}
    return bodies


# A handler that was there first: it counts, steps over a fault of two bytes (ud2) and ignores raised signals.
EARLIER_HANDLER = r"""
#define _GNU_SOURCE
#include <signal.h>
#include <string.h>
#include <ucontext.h>
static volatile int count;
static void handler(int n, siginfo_t *info, void *frame) {
  (void)n; count++;
  if (info->si_code > 0) ((ucontext_t *)frame)->uc_mcontext.gregs[REG_RIP] += 2;
}
int earlier_handler_install(void) {
  struct sigaction action; memset(&action, 0, sizeof action);
  action.sa_sigaction = handler; action.sa_flags = SA_SIGINFO;
  return sigaction(SIGILL, &action, NULL);
}
int earlier_handler_count(void) { return count; }
int raise_sigill(void) { return raise(SIGILL); }
"""


def config(rows, row_bytes, palette=1, start_row=0, reserved=0) -> bytes:
    """A configuration of 64 bytes; `rows` and `row_bytes` of tiles 0.. (16 at most)."""
    pad = lambda values: [*values] + [0] * (16 - len(values))  # noqa: E731
    return struct.pack("<BB14B16H16B", palette, start_row, reserved, *[0] * 13, *pad(row_bytes), *pad(rows))


FULL = config([16] * 8, [64] * 8)


@pytest.fixture(scope="module")
def program_path(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("program")
    text = [".section .rodata", ".balign 64", "full: .byte " + ",".join(map(str, FULL)), ".text"]
    for name, body in functions().items():
        text += [f".globl {name}", f".type {name}, @function", f"{name}:", body, "ret"]
    text.append('.section .note.GNU-stack,"",@progbits')
    (folder / "program.s").write_text("\n".join(text) + "\n")
    (folder / "earlier.c").write_text(EARLIER_HANDLER)
    subprocess.run([*COMPILE, "program.s", "earlier.c", "-o", "program.so"], cwd=folder, check=True)
    return folder / "program.so"


class Tiles:
    """Single tile instructions on the calling thread's registers, with numpy arrays as memory."""

    def __init__(self, program):
        self.program = program

    def call(self, name, address=0, stride=0):
        function = getattr(self.program, name)
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int64], None
        function(address, stride)

    def configure(self, data: bytes, instruction="ldtilecfg"):
        self._config = ctypes.create_string_buffer(data, 64)
        self.call(instruction, ctypes.addressof(self._config))

    def stored_config(self, instruction="sttilecfg") -> bytes:
        data = ctypes.create_string_buffer(b"\xff" * 64, 64)
        self.call(instruction, ctypes.addressof(data))
        return data.raw

    def load(self, t, array):
        self.call(f"tileloadd_{t}", array.ctypes.data, array.strides[0])

    def store(self, t, array):
        self.call(f"tilestored_{t}", array.ctypes.data, array.strides[0])
        return array


@pytest.fixture
def tiles(amx_emulator, program_path):
    tiles = Tiles(ctypes.CDLL(str(program_path)))
    yield tiles
    tiles.call("tilerelease")


@pytest.fixture
def rng():
    return np.random.default_rng(42)


def random_bytes(rng, rows=16, columns=64):
    return rng.integers(0, 256, (rows, columns), dtype=np.uint8)


# ---- configuration ----


@pytest.mark.parametrize(
    "form", ["ldtilecfg", "ldtilecfg_disp8_of_rsp", "ldtilecfg_disp32_of_r12", "ldtilecfg_scaled_without_base"]
)
def test_sttilecfg_returns_what_was_configured(tiles, form):
    wanted = config([16, 1, 7], [64, 4, 36])
    tiles.configure(wanted, form)
    assert tiles.stored_config() == wanted
    assert tiles.stored_config("sttilecfg_disp8_of_r13") == wanted


def test_configuration_relative_to_the_program_counter(tiles):
    tiles.call("ldtilecfg_rip")
    assert tiles.stored_config() == FULL


@pytest.mark.parametrize("release", ["tilerelease", "palette 0"])
def test_released_state_stores_zeros(tiles, release):
    tiles.configure(FULL)
    if release == "tilerelease":
        tiles.call("tilerelease")
    else:
        tiles.configure(config([16], [64], palette=0))
    assert tiles.stored_config() == bytes(64)


def test_configuring_zeroes_every_tile(tiles, rng):
    tiles.configure(FULL)
    for t in range(8):
        tiles.load(t, random_bytes(rng))
    tiles.configure(FULL)
    for t in range(8):
        assert not tiles.store(t, random_bytes(rng)).any()


# ---- loads, stores, zero ----


@pytest.mark.parametrize("rows, columns", [(16, 64), (1, 64), (16, 4), (7, 36), (15, 63), (1, 1)])
@pytest.mark.parametrize("t", [0, 7])
def test_load_and_store_touch_the_configured_bytes_only(tiles, rng, t, rows, columns):
    tiles.configure(config([rows] * 8, [columns] * 8))
    source, target = random_bytes(rng, 18, 80), random_bytes(rng, 18, 80)
    wanted = target.copy()
    wanted[1 : 1 + rows, 3 : 3 + columns] = source[1 : 1 + rows, 3 : 3 + columns]
    tiles.load(t, source[1:, 3:])
    tiles.store(t, target[1:, 3:])
    np.testing.assert_array_equal(target, wanted)


def test_negative_and_zero_strides(tiles, rng):
    tiles.configure(FULL)
    source = random_bytes(rng)
    tiles.load(1, source[::-1])
    np.testing.assert_array_equal(tiles.store(1, np.empty_like(source)), source[::-1])
    tiles.call("tileloadd_1", source.ctypes.data, 0)
    np.testing.assert_array_equal(tiles.store(1, np.empty_like(source)), np.broadcast_to(source[0], source.shape))


@pytest.mark.parametrize("t", range(8))
def test_tilezero_zeroes_one_tile(tiles, rng, t):
    tiles.configure(FULL)
    source = random_bytes(rng)
    for u in range(8):
        tiles.load(u, source)
    tiles.call(f"tilezero_{t}")
    for u in range(8):
        np.testing.assert_array_equal(tiles.store(u, np.empty_like(source)), source * (u != t))


@pytest.mark.parametrize("name, form", addressing_forms().items(), ids=lambda x: x if isinstance(x, str) else "")
def test_addressing_forms(tiles, rng, name, form):
    op, _, _, scale, disp = form
    tiles.configure(FULL)
    memory = random_bytes(rng, 16, 96)  # stride 96 = a multiple of every scale
    address, per_index = memory.ctypes.data - disp, memory.strides[0] // scale
    if op == "tilestored":
        source = random_bytes(rng)
        tiles.load(2, source)
        tiles.call(name, address, per_index)
        np.testing.assert_array_equal(memory[:, :64], source)
    else:
        tiles.call(name, address, per_index)
        np.testing.assert_array_equal(tiles.store(2, np.empty((16, 64), np.uint8)), memory[:, :64])


# ---- dot products ----

SHAPES = [(16, 16, 16), (1, 1, 1), (16, 3, 5), (5, 16, 1), (1, 16, 16), (13, 11, 7)]  # rows, columns, words of depth


def product_config(d, a, b, rows, columns, depth):
    shapes = {d: (rows, columns), a: (rows, depth), b: (depth, columns)}
    return config([shapes.get(t, (0, 0))[0] for t in range(8)], [4 * shapes.get(t, (0, 0))[1] for t in range(8)])


def multiply(tiles, name, operands, c, a, b):
    """c + a b by one instruction, all uint32: c [rows, columns], a [rows, depth], b [depth, columns]."""
    tiles.configure(product_config(*operands, *c.shape, a.shape[1]))
    for t, array in zip(operands, (c, a, b), strict=True):
        tiles.load(t, array)
    tiles.call("{}_{}{}{}".format(name, *operands))
    return tiles.store(operands[0], np.full_like(c, 0xDEADBEEF))


def bf16_bits(x):
    return (np.asarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def words(elements):
    """[rows, columns, n] small elements, n to a word of 32 bits -> [rows, columns] uint32."""
    return np.ascontiguousarray(elements).view(np.uint32)[..., 0]


@pytest.mark.parametrize("rows, columns, depth", SHAPES)
@pytest.mark.parametrize("operands", OPERANDS)
@pytest.mark.parametrize("name", ["tdpbf16ps", "tdpfp16ps"])
def test_float_products(tiles, rng, name, operands, rows, columns, depth):
    # Small integers: every order of summation is exact.
    a, b = rng.integers(-8, 9, (rows, depth, 2)), rng.integers(-8, 9, (depth, columns, 2))
    c = rng.integers(-1000, 1000, (rows, columns)).astype(np.float32)
    bits = bf16_bits if name == "tdpbf16ps" else lambda x: x.astype(np.float16).view(np.uint16)
    got = multiply(tiles, name, operands, c.view(np.uint32), words(bits(a)), words(bits(b))).view(np.float32)
    np.testing.assert_array_equal(got, c + np.einsum("mki,kni->mn", a, b))


@pytest.mark.parametrize("name", ["tdpbf16ps", "tdpfp16ps"])
def test_float_products_of_any_value(tiles, rng, name):
    a, b = (rng.standard_normal((16, 16, 2)).astype(np.float32) for _ in range(2))
    if name == "tdpbf16ps":
        a_bits, b_bits = bf16_bits(a), bf16_bits(b)
        a, b = ((bits.astype(np.uint32) << 16).view(np.float32) for bits in (a_bits, b_bits))
    else:
        a, b = a.astype(np.float16), b.astype(np.float16)
        a_bits, b_bits = a.view(np.uint16), b.view(np.uint16)
    c = rng.standard_normal((16, 16)).astype(np.float32)
    got = multiply(tiles, name, (0, 1, 2), c.view(np.uint32), words(a_bits), words(b_bits)).view(np.float32)
    wanted = c + np.einsum("mki,kni->mn", a.astype(np.float64), b.astype(np.float64))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=32 * 2.0**-24 * 16)  # 32 roundings of sums below 16


def test_special_values_stay_in_their_rows_and_columns(tiles):
    a, b = np.ones((16, 16, 2), np.float32), np.ones((16, 16, 2), np.float32)
    a[3, 5, 1], b[2, 9, 0] = np.nan, np.inf
    got = multiply(
        tiles, "tdpbf16ps", (0, 1, 2), np.zeros((16, 16), np.uint32), words(bf16_bits(a)), words(bf16_bits(b))
    ).view(np.float32)
    wanted = np.full((16, 16), 32.0)
    wanted[:, 9], wanted[3, :] = np.inf, np.nan
    np.testing.assert_array_equal(got, wanted)


def test_subnormals(tiles):
    def one(name, a, b, c=0.0):
        a_word, b_word = (np.array([[value]], np.uint32) for value in (a, b))
        return multiply(tiles, name, (0, 1, 2), np.array([[c]], np.float32).view(np.uint32), a_word, b_word).view(
            np.float32
        )[0, 0]

    smallest_normal = np.finfo(np.float32).tiny
    bf16 = lambda x: int(bf16_bits(x))  # noqa: E731
    assert one("tdpbf16ps", bf16(smallest_normal), bf16(1.0)) == smallest_normal
    assert one("tdpbf16ps", bf16(smallest_normal), bf16(0.5)) == 0, "a subnormal result is flushed"
    assert one("tdpbf16ps", 0x0040, bf16(4.0)) == 0, "a subnormal bf16 input is zero"
    assert one("tdpbf16ps", 0, 0, c=smallest_normal / 2) == 0, "a subnormal accumulator is zero"
    assert one("tdpfp16ps", 0x0001, 0x3C00) == 2.0**-24, "a subnormal fp16 input counts"
    assert one("tdpfp16ps", 0x83FF, 0x3C00) == -1023 * 2.0**-24


@pytest.mark.parametrize("rows, columns, depth", SHAPES)
@pytest.mark.parametrize(
    "name, a_type, b_type",
    [
        ("tdpbssd", np.int8, np.int8),
        ("tdpbsud", np.int8, np.uint8),
        ("tdpbusd", np.uint8, np.int8),
        ("tdpbuud", np.uint8, np.uint8),
    ],
)
@pytest.mark.parametrize("operands", OPERANDS[:2])
def test_byte_products(tiles, rng, name, a_type, b_type, operands, rows, columns, depth):
    a, b = (
        random_bytes(rng, rows, 4 * depth).reshape(rows, depth, 4),
        random_bytes(rng, depth, 4 * columns).reshape(depth, columns, 4),
    )
    c = rng.integers(0, 2**32, (rows, columns), dtype=np.uint32)  # sums wrap around
    got = multiply(tiles, name, operands, c, words(a), words(b))
    product = np.einsum("mki,kni->mn", a.view(a_type).astype(np.int64), b.view(b_type).astype(np.int64))
    np.testing.assert_array_equal(got, (c.astype(np.int64) + product).astype(np.uint32))


# ---- traps and threads ----


def test_adjacent_instructions_share_a_trap(tiles, amx_emulator):
    def cost(name):
        before = amx_emulator.counts()
        tiles.call(name)
        after = amx_emulator.counts()
        return after.traps - before.traps, after.instructions - before.instructions

    tiles.configure(FULL)
    assert cost("two_together") == (1, 2)
    assert cost("one_apart_from_one") == (2, 2)


def test_threads_have_tiles_of_their_own(tiles, rng):
    barrier, results = threading.Barrier(4), {}

    def work(n):
        data = np.full((4 + n, 16), n, np.uint8)
        tiles.call("ldtilecfg", ctypes.addressof(configs[n]))
        barrier.wait()
        tiles.call("tileloadd_0", data.ctypes.data, data.strides[0])
        barrier.wait()
        out = np.full((16, 64), 99, np.uint8)
        tiles.call("tilestored_0", out.ctypes.data, out.strides[0])
        results[n] = out
        tiles.call("tilerelease")

    configs = [ctypes.create_string_buffer(config([4 + n], [16]), 64) for n in range(4)]
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(4):
        wanted = np.full((16, 64), 99, np.uint8)
        wanted[: 4 + n, :16] = n
        np.testing.assert_array_equal(results[n], wanted)


# ---- refusals, each in a process of its own ----

ONE_PROCESS = """
import ctypes, faulthandler, sys
emulator, program = sys.argv[1:3]
program = ctypes.CDLL(program)
if "earlier" in sys.argv: assert program.earlier_handler_install() == 0
if "faulthandler" in sys.argv: faulthandler.enable()
assert ctypes.CDLL(emulator).amx_emulator_install() == 0
assert ctypes.CDLL(emulator).amx_emulator_install() == 0
memory = ctypes.create_string_buffer(64 * 64)
for step in sys.argv[3].split(","):
    if step.startswith("config="):
        program.ldtilecfg(ctypes.create_string_buffer(bytes.fromhex(step[7:]), 64))
    else:
        getattr(program, step)(memory, ctypes.c_int64(64))
if "earlier" in sys.argv: print(program.earlier_handler_count())
"""


def run_alone(amx_emulator, program_path, steps, *options):
    command = [sys.executable, "-c", ONE_PROCESS, str(amx_emulator.library), str(program_path), steps, *options]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def configured(data: bytes) -> str:
    return "config=" + data.hex()


REFUSED = {
    "load without configuration": "tileloadd_0",
    "store without configuration": "tilestored_0",
    "zero without configuration": "tilezero_0",
    "product without configuration": "tdpbf16ps_012",
    "load after release": configured(FULL) + ",tileloadd_0,tilerelease,tileloadd_0",
    "load of an unconfigured tile": configured(config([16], [64])) + ",tileloadd_1",
    "zero of an unconfigured tile": configured(config([16], [64])) + ",tilezero_1",
    "product with an unconfigured tile": configured(config([16, 16], [64, 64])) + ",tdpbf16ps_012",
    "rows of a and c differ": configured(config([16, 8, 16], [64, 64, 64])) + ",tdpbf16ps_012",
    "columns of b and c differ": configured(config([16, 16, 16], [64, 64, 32])) + ",tdpbssd_012",
    "depths of a and b differ": configured(config([16, 16, 16], [64, 32, 64])) + ",tdpfp16ps_012",
    "columns not whole words": configured(config([16, 16, 16], [62, 64, 62])) + ",tdpbf16ps_012",
    "result is the first source": configured(FULL) + ",tdpbf16ps_001",
    "result is the second source": configured(FULL) + ",tdpbf16ps_010",
    "sources are one": configured(FULL) + ",tdpbf16ps_100",
    "palette 2": configured(config([16], [64], palette=2)),
    "17 rows": configured(config([17], [64])),
    "65 bytes in a row": configured(config([16], [65])),
    "rows without bytes": configured(config([16], [0])),
    "a ninth tile": configured(config([16] * 9, [64] * 9)),
    "start row": configured(config([16], [64], start_row=1)),
    "reserved byte": configured(config([16], [64], reserved=1)),
    "load without an index byte": configured(FULL) + ",load_without_sib",
    "vvvv in use": configured(FULL) + ",vvvv_in_tilezero",
    "tile 8": configured(FULL) + ",tilezero_of_tile_8",
    "no tile instruction": "ud2",
    "raised by the program": "raise_sigill",
}


@pytest.mark.parametrize("steps", REFUSED.values(), ids=REFUSED.keys())
def test_refused_work_kills_with_sigill(amx_emulator, program_path, steps):
    assert run_alone(amx_emulator, program_path, steps).returncode == -signal.SIGILL


def test_accepted_work_survives_alone(amx_emulator, program_path):
    result = run_alone(
        amx_emulator, program_path, configured(FULL) + ",tileloadd_0,tdpbf16ps_012,tilestored_0,tilerelease"
    )
    assert result.returncode == 0, result.stderr


def test_the_earlier_handler_gets_what_is_not_a_tile_instruction(amx_emulator, program_path):
    result = run_alone(amx_emulator, program_path, configured(FULL) + ",zero_ud2_store,raise_sigill,ud2", "earlier")
    assert (result.returncode, result.stdout) == (0, "3\n"), result.stderr


def test_faulthandler_still_reports(amx_emulator, program_path):
    result = run_alone(amx_emulator, program_path, configured(FULL) + ",tilezero_0,ud2", "faulthandler")
    assert result.returncode == -signal.SIGILL
    assert "Fatal Python error: Illegal instruction" in result.stderr
