"""What hardware refuses must not be emulated, and other handlers keep their signals: each in a process of its own."""

import signal
import subprocess
import sys

import pytest

from amx_emulator.program import FULL, config

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
