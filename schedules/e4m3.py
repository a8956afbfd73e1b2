"""fp8 e4m3 (e4m3fn: no infinities, 0x7f and 0xff are NaN) as tensor expressions: plain integer operations.

Exact for all codes, subnormal ones too, also where the thread flushes denormal numbers to zero.
"""

from __future__ import annotations

from tvm import tirx

from tilewright.schedules.vector_math import f32, let, reinterpret

HALF_UNIT = 256.0
"""What one unit of `half_of_e4m3` stands for."""
LARGEST = 448.0
_NAN = 0x7F


def half_of_e4m3(code: tirx.Expr) -> tirx.Expr:
    """The value of a uint8 code divided by HALF_UNIT, as float16: exact.

    The bits of a code, moved to the places of float16, are the number with 7 too little in its exponent field times
    two to what the biases differ by: 15 - 7 = 8. Subnormal codes become subnormal halves, and the conversion from
    float16 to float32 takes those for what they are in every mode of the processor.
    """
    word = lambda value: tirx.const(value, "int16")  # noqa: E731

    def of(code: tirx.Expr) -> tirx.Expr:
        # Through int8 the sign comes to the top; the bit under it is a copy to be cleared.
        moved = tirx.shift_left(reinterpret("int8", code).astype("int16"), word(7))
        half = tirx.bitwise_and(moved, word(~0x4000))
        # The largest magnitude is the code of NaN: adding a mantissa unit carries it, and it alone, to the bit above
        # the exponent, which makes an exponent of all ones of it.
        is_nan = tirx.bitwise_and(half + word(0x80), word(0x4000))
        return reinterpret("float16", tirx.bitwise_or(half, is_nan))

    return let("code", code, of)


def e4m3_of(value: tirx.Expr) -> tirx.Expr:
    """The uint8 code nearest to a float32, ties to even; beyond +-448 that of +-448, NaN gives NaN, -0 stays -0."""
    word = lambda number: tirx.const(number, "int32")  # noqa: E731
    # The value is not named: TVM does not take a bf16 for what it is within a let, and bounds an integer variable anew
    # under every condition. LLVM computes it once.
    bits = tirx.bitwise_and(reinterpret("int32", value), word(0x7FFFFFFF))
    sign = tirx.bitwise_and(tirx.shift_right(reinterpret("int32", value), word(24)), word(0x80))
    # Normal codes: drop 20 bits of the mantissa, rounded by an addition, and 120 of the exponent.
    odd = tirx.bitwise_and(tirx.shift_right(bits, word(20)), word(1))
    normal = tirx.shift_right(bits + odd + word(0x7FFFF), word(20)) - word(120 << 3)
    # Below 2**-6 codes are multiples of 2**-9, which is what a float32 next to 2**14 is rounded to.
    shifted = reinterpret("int32", reinterpret("float32", bits) + f32(16384.0)) - word(0x46800000)
    code = tirx.Select(bits < word(0x3C800000), shifted, tirx.Select(normal > word(0x7E), word(0x7E), normal))
    code = tirx.Select(bits > word(0x7F800000), word(_NAN), code)
    return tirx.bitwise_or(code, sign).astype("uint8")
