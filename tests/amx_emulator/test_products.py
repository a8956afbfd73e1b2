"""Each dot product of tiles, in each form, against numpy."""

import numpy as np
import pytest

from amx_emulator.program import OPERANDS, config, random_bytes

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
