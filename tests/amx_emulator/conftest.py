"""Fixtures of the emulator's own tests; those of everybody are in __init__.py."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from amx_emulator import hardware_runs_tiles
from amx_emulator.program import Tiles, build_program


@pytest.fixture(scope="session")
def program_path(tmp_path_factory) -> Path:
    return build_program(tmp_path_factory.mktemp("program"))


@pytest.fixture(autouse=True)
def emulated():
    if hardware_runs_tiles():
        pytest.skip("this process runs tile instructions on the processor itself")


@pytest.fixture
def tiles(amx_emulator, program_path):
    tiles = Tiles(ctypes.CDLL(str(program_path)))
    yield tiles
    tiles.call("tilerelease")


@pytest.fixture
def rng():
    return np.random.default_rng(42)
