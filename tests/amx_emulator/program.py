"""A library with every tile instruction in every form, and configurations for it: what the emulator is tested with."""

import ctypes
import itertools
import struct
import subprocess
from pathlib import Path

import numpy as np

from amx_emulator import COMPILE

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


def build_program(folder: Path) -> Path:
    """Assemble `functions` and EARLIER_HANDLER into a shared library in `folder`."""
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


def random_bytes(rng, rows=16, columns=64):
    return rng.integers(0, 256, (rows, columns), dtype=np.uint8)
