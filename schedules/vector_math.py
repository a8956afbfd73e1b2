"""Elementary functions as tensor expressions: plain multiply-adds and bit operations.

`tirx.exp2` and its kin lower to one libm call per lane on x86; these vectorise on every SIMD width. All are f32,
propagate NaN and are accurate to about 2 units in the last place on the ranges given.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453

# Least maximum relative error of 2**f on [-1/2, 1/2]: 2e-9, so rounding dominates. 2**0 is exactly 1.
_EXP2 = (
    1.5345810970757157e-4,
    1.3399930903688073e-3,
    9.618489071726799e-3,
    5.550328642129898e-2,
    2.4022646248340607e-1,
)
_EXP2_LINEAR = 6.931471824645996e-1
# The same to 3e-6, for what is rounded to 16 bits afterwards.
_EXP2_SHORT = (
    9.582852944731712e-3,
    5.5906426161527634e-2,
    2.4024099111557007e-1,
    6.931241750717163e-1,
)
_TO_INTEGER = 12582912.0  # 1.5 * 2**23: the sum with |x| < 2**22 is rounded to an integer, held in its low bits
# Taylor coefficients of x**9, x**7, x**5, x**3; what is left out is below 1e-8 of tanh(x) for |x| < 1/4.
_TANH = (62 / 2835, -17 / 315, 2 / 15, -1 / 3)


def f32(value: float) -> tirx.Expr:
    """A float32 constant."""
    return tirx.const(value, "float32")


def negative_infinity() -> tirx.Expr:
    """-inf in float32."""
    return -tirx.infinity("float32")


def reinterpret(dtype: str, value: tirx.Expr) -> tirx.Expr:
    """The bits of a value as a value of another type of the same width."""
    return tirx.call_intrin(dtype, "tirx.reinterpret", value)


def isnan(x: tirx.Expr) -> tirx.Expr:
    """Whether x is NaN, by its bits: TVM splits a vectorised loop with a tirx.isnan into scalars."""
    magnitude = tirx.bitwise_and(reinterpret("int32", x), tirx.const(0x7FFFFFFF, "int32"))
    return magnitude > tirx.const(0x7F800000, "int32")


def let(name: str, value: tirx.Expr, body: Callable[[tirx.Expr], tirx.Expr]) -> tirx.Expr:
    """`body` of a named value: an expression used twice would otherwise be copied twice, tree by tree."""
    value = tirx.convert(value)  # an element of a te tensor becomes an expression
    var = tirx.Var(name, str(value.ty.dtype))
    return tirx.Let(var, value, body(var))


def exp2(x: tirx.Expr) -> tirx.Expr:
    """2**x for x <= 0; exactly 0 below -126 (so for -inf), exactly 1 at 0. NaN gives NaN."""

    def normal(x: tirx.Expr, whole: tirx.Expr) -> tirx.Expr:
        fraction = x - whole
        value = f32(_EXP2[0])
        for coefficient in (*_EXP2[1:], _EXP2_LINEAR, 1.0):
            value = value * fraction + f32(coefficient)
        exponent = tirx.shift_left(whole.astype("int32"), tirx.const(23, "int32"))
        return reinterpret("float32", reinterpret("int32", value) + exponent)

    def guarded(x: tirx.Expr) -> tirx.Expr:
        # A comparison with NaN is false: the operand order keeps NaN alive where max() would drop it.
        clamped = tirx.Select(x < f32(-126.0), f32(-126.0), x)
        # The nearest integer, by floor: TVM splits a vectorised loop with a nearbyint into scalars, and LLVM does not
        # always find its way back.
        nearest = lambda y: tirx.floor(y + f32(0.5))  # noqa: E731
        value = let("x", clamped, lambda y: let("whole", nearest(y), lambda whole: normal(y, whole)))
        return tirx.Select(x < f32(-126.0), f32(0.0), value)

    return let("exponent", x, guarded)


def exp2_short(x: tirx.Expr) -> tirx.Expr:
    """2**x for x <= 0 with a relative error of 3e-6, in about half the instructions of `exp2`.

    Exactly 1 at 0 and 0 from -127 down (so for -inf); between -127 and -126 the error is below 2**-126. A NaN whose
    nine low bits are 0 (all that come from 16-bit types, and what arithmetic makes) gives NaN.
    """

    def polynomial(fraction: tirx.Expr) -> tirx.Expr:
        value = f32(_EXP2_SHORT[0])
        for coefficient in (*_EXP2_SHORT[1:], 1.0):
            value = value * fraction + f32(coefficient)
        return value

    def of(x: tirx.Expr, shifted: tirx.Expr) -> tirx.Expr:
        # The bits of the constant itself leave the word on the way.
        exponent = tirx.shift_left(reinterpret("int32", shifted), tirx.const(23, "int32"))
        value = let("fraction", x - (shifted - f32(_TO_INTEGER)), polynomial)
        return reinterpret("float32", reinterpret("int32", value) + exponent)

    # The operand order keeps NaN alive, see exp2. At -127 the exponent bits of 1 become those of 0.
    clamped = lambda x: tirx.Select(x < f32(-127.0), f32(-127.0), x)  # noqa: E731
    with_shifted = lambda x: let("shifted", x + f32(_TO_INTEGER), lambda y: of(x, y))  # noqa: E731
    return let("exponent", x, lambda x: let("clamped", clamped(x), with_shifted))


def log2(x: tirx.Expr) -> tirx.Expr:
    """The binary logarithm of a normal x > 0. Unspecified for 0, infinity and NaN: guard them at the call."""
    mantissa_bits = tirx.const(23, "int32")

    def of_parts(bits: tirx.Expr, exponent: tirx.Expr) -> tirx.Expr:
        mantissa = reinterpret("float32", bits - tirx.shift_left(exponent, mantissa_bits))  # [sqrt(1/2), sqrt(2))
        logarithm = let("mantissa", mantissa, lambda x: let("s", (x - f32(1.0)) / (x + f32(1.0)), _twice_atanh))
        return exponent.astype("float32") + f32(LOG2_E) * logarithm

    def of_bits(bits: tirx.Expr) -> tirx.Expr:
        sqrt_half = tirx.const(0x3F3504F3, "int32")
        return let("exponent", tirx.shift_right(bits - sqrt_half, mantissa_bits), lambda e: of_parts(bits, e))

    return let("bits", reinterpret("int32", x), of_bits)


def _twice_atanh(s: tirx.Expr) -> tirx.Expr:
    """2 atanh(s) = ln((1 + s) / (1 - s)) for |s| < 0.172."""

    def series(square: tirx.Expr) -> tirx.Expr:
        value = f32(1 / 9)
        for denominator in (7, 5, 3, 1):
            value = value * square + f32(1 / denominator)
        return value

    return f32(2.0) * s * let("square", s * s, series)


def tanh(x: tirx.Expr) -> tirx.Expr:
    """The tanh of x with a relative error below 1e-6, so that a large soft-cap costs no accuracy; NaN gives NaN."""

    def series(x: tirx.Expr, square: tirx.Expr) -> tirx.Expr:
        value = f32(_TANH[0])
        for coefficient in _TANH[1:]:
            value = value * square + f32(coefficient)
        return x + x * square * value

    def of(x: tirx.Expr) -> tirx.Expr:
        magnitude = tirx.Select(x < f32(0.0), f32(0.0) - x, x)
        value = let("e", exp2(magnitude * f32(-2 * LOG2_E)), lambda e: (f32(1.0) - e) / (f32(1.0) + e))
        signed = let("magnitude", value, lambda y: tirx.Select(x < f32(0.0), f32(0.0) - y, y))
        # 1 - e cancels near 0.
        near_zero = let("square", x * x, lambda square: series(x, square))
        return tirx.Select(magnitude < f32(0.25), near_zero, signed)

    return let("argument", x, of)
