"""Elementary functions as tensor expressions: plain multiply-adds and bit operations.

`tirx.exp2` and its kin lower to one libm call per lane on x86; these vectorise on every SIMD width. All are f32, propagate NaN
and are accurate to about 2 units in the last place on the ranges given.
"""

from __future__ import annotations

from tvm import tirx

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453

# Least maximum relative error of 2**f on [-1/2, 1/2]: 2e-9, so rounding dominates. 2**0 is exactly 1.
_EXP2 = (1.5345810970757157e-4, 1.3399930903688073e-3, 9.618489071726799e-3, 5.550328642129898e-2, 2.4022646248340607e-1)
_EXP2_LINEAR = 6.931471824645996e-1


def f32(value: float) -> tirx.Expr:
    """A float32 constant."""
    return tirx.const(value, "float32")


def negative_infinity() -> tirx.Expr:
    """-inf in float32."""
    return -tirx.infinity("float32")


def _reinterpret(dtype: str, value: tirx.Expr) -> tirx.Expr:
    return tirx.call_intrin(dtype, "tirx.reinterpret", value)


def exp2(x: tirx.Expr) -> tirx.Expr:
    """2**x for x <= 0; exactly 0 below -126 (so for -inf), exactly 1 at 0. NaN gives NaN."""
    # A comparison with NaN is false: the operand order keeps NaN alive where max() would drop it.
    clamped = tirx.Select(x < f32(-126.0), f32(-126.0), x)
    whole = tirx.nearbyint(clamped)
    fraction = clamped - whole
    value = f32(_EXP2[0])
    for coefficient in (*_EXP2[1:], _EXP2_LINEAR, 1.0):
        value = value * fraction + f32(coefficient)
    shifted = _reinterpret("int32", value) + tirx.shift_left(whole.astype("int32"), tirx.const(23, "int32"))
    return tirx.Select(x < f32(-126.0), f32(0.0), _reinterpret("float32", shifted))


def log2(x: tirx.Expr) -> tirx.Expr:
    """log2(x) for normal x > 0. What it gives for 0, infinity and NaN is unspecified: guard them at the call."""
    sqrt_half = tirx.const(0x3F3504F3, "int32")
    bits = _reinterpret("int32", x)
    exponent = tirx.shift_right(bits - sqrt_half, tirx.const(23, "int32"))
    mantissa = _reinterpret("float32", bits - tirx.shift_left(exponent, tirx.const(23, "int32")))  # [sqrt(1/2), sqrt(2))
    s = (mantissa - f32(1.0)) / (mantissa + f32(1.0))  # ln(mantissa) = 2 atanh(s), |s| < 0.172
    square = s * s
    series = f32(1 / 9)
    for denominator in (7, 5, 3, 1):
        series = series * square + f32(1 / denominator)
    return exponent.astype("float32") + f32(2 * LOG2_E) * s * series


def tanh(x: tirx.Expr) -> tirx.Expr:
    """tanh(x) with an absolute error below 2e-7 everywhere. NaN gives NaN."""
    magnitude = tirx.Select(x < f32(0.0), f32(0.0) - x, x)
    e = exp2(magnitude * f32(-2 * LOG2_E))
    value = (f32(1.0) - e) / (f32(1.0) + e)
    return tirx.Select(x < f32(0.0), f32(0.0) - value, value)
