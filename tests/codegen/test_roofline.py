"""The machine's limits: the loops compile for every target and count what they execute. No rate is judged."""

import pytest
from amx_emulator import hardware_runs_tiles

from tilewright.codegen import roofline


def test_limits_of_this_machine():
    limits = roofline.measure("x86-avx2", 1)
    assert 1e8 < limits.flops < 1e13 and 1e8 < limits.bandwidth < 1e13
    assert limits.tiles is limits.tile_peak is None
    assert limits.seconds(limits.flops, 0) == 1 == limits.seconds(0, limits.bandwidth)


def test_a_target_with_tiles_is_held_to_them():
    limits = roofline.Limits(flops=1e12, bandwidth=1e11, tiles=8e12, tile_peak=15e12)
    assert limits.seconds(8e12, 0) == 1 == limits.seconds(0, 1e11)


@pytest.mark.parametrize("target", roofline.FLAGS)
def test_the_loops_compile_for_every_target(target, tmp_path):
    functions = roofline.compiled(target, tmp_path, "-Wall", "-Wextra", "-Werror")
    assert hasattr(functions, "tilewright_tiles") == (target == "x86-amx")


def test_a_target_that_cannot_run_here_is_not_measured(monkeypatch):
    monkeypatch.setattr(
        roofline.features, "missing_features", lambda names: ["amx_tile"] if "amx_tile" in names else []
    )
    with pytest.raises(roofline.RooflineError, match="x86-amx: its peak cannot be measured here: no amx_tile"):
        roofline.measure("x86-amx")
    monkeypatch.delitem(roofline.FLAGS, "x86-avx2")
    with pytest.raises(roofline.RooflineError, match="x86-avx2: its peak cannot be measured yet"):
        roofline.measure.__wrapped__("x86-avx2")


def test_the_tile_loop_counts_its_products(tmp_path, monkeypatch, amx_emulator):
    """Under the emulator: as many tile instructions are executed as the loop says it has done."""
    # No AVX-512 where there is only an emulator of tiles, and a short loop: an instruction costs a trap.
    monkeypatch.setitem(roofline.FLAGS, "x86-amx", ("-march=x86-64-v3", "-mamx-tile", "-mamx-bf16"))
    functions = roofline.compiled("x86-amx", tmp_path, "-DREPEATS=8")
    assert functions.tilewright_tiles(0.0, 0) > 0
    before = amx_emulator.counts().instructions
    assert functions.tilewright_tiles(0.0, 0) > 0
    between = amx_emulator.counts().instructions
    assert functions.tilewright_tiles(0.0, 16 << 10) > 0
    after = amx_emulator.counts().instructions
    if not hardware_runs_tiles():
        once = 1 + 4 + 4 + 1 + 1  # configuration, accumulators, operands, the store, release
        assert between - before == once + 4 * 8
        assert after - between == once + 8 * 8, "with operands loaded before every use"


@pytest.mark.amx
def test_limits_of_tiles():
    limits = roofline.measure("x86-amx")
    assert limits.flops < limits.tiles < limits.tile_peak
