"""Configuration, loads and stores, zeroing, traps and threads of the emulated tiles."""

import ctypes
import threading

import numpy as np
import pytest

from amx_emulator.program import FULL, addressing_forms, config, random_bytes


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
