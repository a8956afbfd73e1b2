"""Device functions that generated CUDA kernels call: what neither tirx nor its PTX table says in one expression."""

# ruff: noqa: E501  (sources of device functions)
from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.layout import Layout, S, TileLayout

COPY_BATCH = 5  # copies of copy_rows that are under way from one set of registers


def strided(shape: tuple[tirx.Expr | int, ...], strides: tuple[tirx.Expr | int, ...]) -> Layout:
    """The layout of a parameter with these strides, in elements; a buffer's own `strides` are checked, but not used."""
    return TileLayout(S[shape:strides])


def _function(name: str, result: str, parameters: str, body: str) -> Callable[..., tirx.Expr]:
    source = f"__forceinline__ __device__ {result} {name}({parameters}) {{ {body} }}"
    types = {
        "float": "float32",
        "unsigned": "uint32",
        "unsigned long long": "uint64",
        "int": "int32",
        "long long": "int64",
        "void": "void",
        "void*": "handle",
    }

    def call(*arguments: tirx.Expr) -> tirx.Expr:
        return T.cuda.func_call(name, *arguments, source_code=source, return_type=types[result])

    return call


exp2 = _function(
    "tw_exp2", "float", "float x", 'float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y;'
)
"""2**x; 0 for -inf."""
log2 = _function("tw_log2", "float", "float x", 'float y; asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y;')
"""Binary logarithm."""
# tanh.approx is off by 5e-4, too much for a soft-cap of 50. Near 0 the quotient cancels.
tanh = _function(
    "tw_tanh",
    "float",
    "float x",
    'float e; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * 2.8853900817779268f)); '
    "float s = x * x; "
    "float small = x + x * s * (-1.f / 3 + s * (2.f / 15 + s * (-17.f / 315 + s * (62.f / 2835)))); "
    "return s < 0.0625f ? small : 1.f - __fdividef(2.f, 1.f + e);",
)
"""Hyperbolic tangent with a relative error of 2e-6, so that a large soft-cap costs no accuracy."""

quad_max = _function(
    "tw_quad_max",
    "float",
    "float x",
    "x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1)); return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));",
)
"""Maximum over the four lanes of a row; NaN is dropped, as by comparisons."""
quad_sum = _function(
    "tw_quad_sum",
    "float",
    "float x",
    "x += __shfl_xor_sync(0xffffffffu, x, 1); return x + __shfl_xor_sync(0xffffffffu, x, 2);",
)
"""Sum over the four lanes of a row."""
warp_max = _function(
    "tw_warp_max",
    "float",
    "float x",
    "for (int i = 16; i; i >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, i)); return x;",
)
"""Maximum over a warp; NaN is dropped."""
warp_sum = _function(
    "tw_warp_sum",
    "float",
    "float x",
    "for (int i = 16; i; i >>= 1) x += __shfl_xor_sync(0xffffffffu, x, i); return x;",
)
"""Sum over a warp."""
any_lane = _function("tw_any_lane", "int", "bool x", "return __any_sync(0xffffffffu, x);")
"""Whether any lane of the warp has it: an int32, 0 = none."""
reread = _function("tw_reread", "int", "int x", 'asm volatile("" : "+r"(x)); return x;')
"""The same int32, of which the compiler knows nothing: what follows from it is worked out here, not kept since before."""
shuffle = _function("tw_shuffle", "int", "int x, int lane", "return __shfl_sync(0xffffffffu, x, lane);")
"""Another lane's int32."""


load_pair = _function("tw_load_pair", "unsigned", "const void* p", "return *(const unsigned*)p;")
"""Two 16-bit numbers from an address that is a multiple of four."""

_COPY = 'asm volatile("cp.async.cg.shared.global{hint} [%0], [%1], 16;" :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory");'
copy16 = _function("tw_copy16", "void", "void* to, const void* from", _COPY.format(hint=".L2::128B"))
"""Start an asynchronous copy of 16 bytes from global to shared memory, both aligned to 16."""
_SHARED = '"r"((unsigned)__cvta_generic_to_shared({0}))'
expect_bytes = _function(
    "tw_expect_bytes",
    "void",
    "void* barrier, int bytes",
    'asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" '
    f':: {_SHARED.format("barrier")}, "r"(bytes) : "memory");',
)
"""Arrive at a barrier whose phase ends when so many bytes have been copied, too."""
# A cache policy as createpolicy makes it (evict_first, all of it). Not for copy16: ptxas 13.0 was seen to garble an
# operand of one of many copies with a policy (an illegal instruction at run time).
_EVICT_FIRST = '"l"(0x12f0000000000000ull)'
copy_bulk = _function(
    "tw_copy_bulk",
    "void",
    "void* to, const void* from, int bytes, void* barrier",
    'asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint '
    '[%0], [%1], %2, [%3], %4;" '
    f':: {_SHARED.format("to")}, "l"(from), "r"(bytes), {_SHARED.format("barrier")}, {_EVICT_FIRST} : "memory");',
)
"""One thread starts a copy from global to shared memory, both aligned to 16, a multiple of 16 bytes; it arrives at the
barrier as bytes. The L2 cache gives them up first."""
address = _function("tw_address", "long long", "const void* p", "return (long long)p;")
"""A pointer as an int64."""
moved = _function("tw_moved", "void*", "void* p, int bytes", "return (char*)p + bytes;")
"""A pointer so many bytes farther."""
copy_row16 = _function(
    "tw_copy_row16",
    "void",
    "void* to, long long first, long long stride, int row, int offset",
    "const char* from = (const char*)(first + row * stride + offset); " + _COPY.format(hint=".L2::128B"),
)
"""copy16 from a row of a tensor, given the address of its first row; stride and offset in bytes."""


_row_address = _function(
    "tw_row_address",
    "void",
    "void* p, long long first, long long stride, int row",
    'long long x = first + (long long)((unsigned long long)(unsigned)row * (unsigned long long)stride); asm volatile("" : "+l"(x) :: "memory"); *(long long*)p = x;',
)


def copy_rows(
    distance: int, to: tirx.Expr, first: tirx.Expr, stride: tirx.Expr, rows: list[tirx.Expr], addresses: tirx.Var
) -> None:
    """Statements of the function under construction: copy16 from rows[i] of a tensor to `to` + i * distance bytes.

    Addresses are worked out for a batch of copies before the first of them, each in registers of its own (`addresses`,
    a local int64 buffer of COPY_BATCH): else every copy waits until the one before has read its operands.
    """
    for begin in range(0, len(rows), COPY_BATCH):
        batch = range(begin, min(begin + COPY_BATCH, len(rows)))
        for i in batch:
            T.evaluate(_row_address(addresses.ptr_to([i - begin]), first, stride, rows[i]))
        for i in batch:
            copy = _function(
                f"tw_copy16_{i * distance}",
                "void",
                "void* to, long long from",
                _COPY.format(hint=".L2::128B").replace("[%0]", f"[%0+{i * distance}]"),
            )
            T.evaluate(copy(to, addresses[i - begin]))


shared_address = _function(
    "tw_shared_address", "unsigned", "const void* p", "return (unsigned)__cvta_generic_to_shared(p);"
)
"""A pointer into shared memory as its 32-bit address there."""
await_phase = _function(
    "tw_await_phase",
    "void",
    "unsigned barrier, int parity",
    "unsigned done; do { "
    'asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"'
    ' : "=r"(done) : "r"(barrier), "r"(parity) : "memory"); } while (!done);',
)
"""Wait for the end of the phase of this parity of an mbarrier at a shared address."""
arrive_if = _function(
    "tw_arrive_if",
    "void",
    "unsigned barrier, bool wanted",
    'asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; @p mbarrier.arrive.shared::cta.b64 _, [%0]; }"'
    ' :: "r"(barrier), "r"((unsigned)wanted) : "memory");',
)
"""Arrive at an mbarrier at a shared address, without a branch."""
tile_address = _function(
    "tw_tile_address", "unsigned", "const void* p", "return ((unsigned)__cvta_generic_to_shared(p) & 0x3ffffu) >> 4;"
)
"""A place in shared memory as the descriptors of wgmma hold it: in 16 bytes."""
tile_descriptor = _function(
    "tw_tile_descriptor", "unsigned long long", "unsigned low", "return 0x4000004000000000ull | low;"
)
"""The descriptor of a tile of rows of 128 bytes, swizzled, from its low word: tile_address and the leading offset << 16."""
let_next_start = _function("tw_let_next_start", "void", "", 'asm volatile("griddepcontrol.launch_dependents;");')
"""The next kernel may be put on the GPU beside this one, if it was launched so; it still waits for all of this one."""
await_previous = _function("tw_await_previous", "void", "", 'asm volatile("griddepcontrol.wait;" ::: "memory");')
"""Wait for all writes of the kernel before; at once where this one was launched after its end."""

PACK = {
    "bf16": _function(
        "tw_pack_bf16",
        "unsigned",
        "float a, float b",
        'unsigned r; asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(r) : "f"(a), "f"(b)); return r;',
    ),
    "fp16": _function(
        "tw_pack_fp16",
        "unsigned",
        "float a, float b",
        'unsigned r; asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(r) : "f"(a), "f"(b)); return r;',
    ),
}
"""Two f32 rounded to nearest and packed into a word, the first in its low half."""

copy_vector = _function("tw_copy_vector", "void", "void* to, const void* from", "*(uint4*)to = *(const uint4*)from;")
"""Sixteen bytes from global memory to global memory, both aligned to 16."""
store_word = _function("tw_store_word", "void", "void* p, unsigned x", "*(unsigned*)p = x;")
"""Four bytes to an address that is a multiple of four."""
store_two = _function("tw_store_two", "void", "float* p, float a, float b", "*(float2*)p = make_float2(a, b);")
"""Two f32 to an address that is a multiple of eight."""
load_fresh = _function("tw_load_fresh", "float", "const float* p", "return __ldcg(p);")
"""An f32 that another CTA of this launch has written."""
load_fresh_four = _function(
    "tw_load_fresh_four",
    "void",
    "float* to, const float* from",
    "float4 x = __ldcg((const float4*)from); to[0] = x.x; to[1] = x.y; to[2] = x.z; to[3] = x.w;",
)
"""Four f32 that another CTA of this launch has written, from an address that is a multiple of 16."""
arrived_last = _function(
    "tw_arrived_last",
    "int",
    "void* counter, int count",
    "int last = 0; __syncthreads(); "
    "if (threadIdx.x == 0) { __threadfence(); last = atomicAdd((int*)counter, 1) == count - 1; __threadfence(); "
    "if (last) *(int*)counter = 0; } "
    "return __syncthreads_or(last);",
)
"""Whether the CTA, all of whose threads call this, is the last of `count`; it then sees what the others wrote before.

The counter is 0 before the first and after the last.
"""


# ---- pools of fp8 (e4m3fn): codes become halves, of which they are a subset

_MOST = "fmaxf(m, fmaxf(fabsf({low}), fabsf({high})))"
_FLOATS = {
    "bf16": ("__int_as_float(x << 16)", "__int_as_float(x & 0xffff0000)"),
    "fp16": ("__half2float(__ushort_as_half(x))", "__half2float(__ushort_as_half(x >> 16))"),
}
PAIR_MAX = {
    name: _function(
        f"tw_pair_max_{name}", "float", "float m, unsigned x", f"return {_MOST.format(low=low, high=high)};"
    )
    for name, (low, high) in _FLOATS.items()
}
"""The greatest of m and the magnitudes of two packed 16-bit numbers; NaN is dropped."""
HALF_PAIR = {
    name: _function(
        f"tw_half_pair_{name}",
        "unsigned",
        "unsigned x, float scale",
        f'unsigned r; asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(r) : "f"({low} * scale), "f"({high} * scale)); return r;',
    )
    for name, (low, high) in _FLOATS.items()
}
"""Two packed 16-bit numbers times `scale` as two halves."""
# Exponent fields from 16 on: smaller numbers stay where they are, as far under the range of halves as they like.
_FIELD = "int e = max(min(__float_as_int(most) >> 23, 254), 16);"
range_scale = _function("tw_range_scale", "float", "float most", f"{_FIELD} return __int_as_float((268 - e) << 23);")
"""The power of two that brings a row whose greatest magnitude is `most` to the top of the range of halves."""
range_unit = _function("tw_range_unit", "float", "float most", f"{_FIELD} return __int_as_float((e - 14) << 23);")
"""One over range_scale."""
even_then_odd = _function("tw_even_then_odd", "unsigned", "unsigned x", "return __byte_perm(x, 0, 0x3120);")
"""The bytes 0, 2, 1, 3 of a word."""


def _code_halves(name: str, mine: str, spread: str, converts: bool) -> Callable[..., tirx.Expr]:
    if converts:
        body = (
            'unsigned r; asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, '
            f'{mine}; }}" : "=r"(r) : "r"(x)); return r;'
        )
    else:
        # Moved to a half's places a code is the number divided by 256; the largest magnitude stands for NaN.
        body = (
            f"unsigned b = __byte_perm(x, 0, {spread}); unsigned r = (b & 0x80008000) | ((b & 0x7f007f00) >> 1); "
            "return r | ((((b & 0x7f007f00) + 0x01000100) & 0x80008000) >> 1);"
        )
    return _function(name + ("" if converts else "_moved"), "unsigned", "unsigned x", body)


def halves(converts: bool) -> tuple[float, Callable[..., tirx.Expr], Callable[..., tirx.Expr]]:
    """(unit, low, high): the lower and the upper two of four codes in a word as two halves each, in units of `unit`.

    Args:
        converts: whether the GPU has an instruction for it (sm_89 and newer).
    """
    return (
        1.0 if converts else 256.0,
        _code_halves("tw_low_halves", "low", "0x1404", converts),
        _code_halves("tw_high_halves", "high", "0x3424", converts),
    )


_ROUND = """auto code = [](float v) -> unsigned {
  unsigned b = __float_as_uint(v) & 0x7fffffff, c = min(((b + ((b >> 20) & 1) + 0x7ffff) >> 20) - 960, 0x7eu);
  if (b < 0x3c800000) c = __float_as_uint(__uint_as_float(b) + 16384.f) - 0x46800000;
  if (b > 0x7f800000) c = 0x7f;
  return c | ((__float_as_uint(v) >> 24) & 0x80); };
auto pair = [&](float a, float b) -> unsigned { return code(a) | code(b) << 8; };"""
_CONVERT = """auto pair = [](float a, float b) -> unsigned {
  unsigned short r; asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(r) : "f"(a), "f"(b)); return r; };"""


def codes(dtype: str, converts: bool) -> Callable[..., tirx.Expr]:
    """(to, from, scale): 16 numbers of a dtype divided by `scale` become 16 codes, both addresses aligned to 16.

    Args:
        dtype: "bf16" or "fp16".
        converts: whether the GPU has an instruction for it (sm_89 and newer).
    """
    low, high = _FLOATS[dtype]
    # By f32 bits where there is no instruction: as schedules/e4m3.py does.
    body = (
        (_CONVERT if converts else _ROUND)
        + f"auto of = [&](unsigned x) -> unsigned {{ return pair(__fdiv_rn({low}, scale), __fdiv_rn({high}, scale)); }};"
        + "const uint4 *in = (const uint4*)from; uint4 a = in[0], b = in[1];"
        + "*(uint4*)to = make_uint4(of(a.x) | of(a.y) << 16, of(a.z) | of(a.w) << 16, "
        + "of(b.x) | of(b.y) << 16, of(b.z) | of(b.w) << 16);"
    )
    name = f"tw_codes_{dtype}" + ("" if converts else "_rounded")
    return _function(name, "void", "void* to, const void* from, float scale", body)


copy16_from = _function("tw_copy16_from", "void", "void* to, long long from", _COPY.format(hint=".L2::128B"))
"""copy16 from an address in global memory."""
store_zeros = _function("tw_store_zeros", "void", "void* to", "*(uint4*)to = make_uint4(0, 0, 0, 0);")
"""Sixteen zero bytes to an address that is a multiple of 16."""
warp_any = _function("tw_warp_any", "int", "int x", "return __any_sync(0xffffffffu, x);")
"""Whether x is not 0 in any lane of the warp, as an int32."""

# Two e4m3 of a word as halves. Where there is no instruction: their bits in a half are 2**-8 of the numbers.
_HALVES = """
#if __CUDA_ARCH__ >= 890
unsigned h; asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h) : "h"((unsigned short)(w[i / 2] >> i % 2 * 16)));
#else
unsigned x = w[i / 2] >> i % 2 * 16, y = (x & 0xff) | (x & 0xff00) << 8, h = (y & 0x800080) << 8 | (y & 0x7f007f) << 7;
asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(h) : "r"(0x5c005c00u));
if ((y & 0x7f) == 0x7f) h |= 0x7fff;
if ((y & 0x7f0000) == 0x7f0000) h |= 0x7fff0000;
#endif
"""


def _widen(name: str, pack: str) -> Callable[..., tirx.Expr]:
    return _function(
        name,
        "void",
        "void* to, void* next, const void* from",
        "uint4 raw = *(const uint4*)from; unsigned w[4] = {raw.x, raw.y, raw.z, raw.w}, r[8];\n#pragma unroll\n"
        f"for (int i = 0; i < 8; ++i) {{ {_HALVES} {pack} }}\n"
        "*(uint4*)to = make_uint4(r[0], r[1], r[2], r[3]); *(uint4*)next = make_uint4(r[4], r[5], r[6], r[7]);",
    )


WIDEN = {
    "bf16": _widen(
        "tw_widen_bf16",
        "float a, b; "
        'asm("{ .reg .b16 l, u; mov.b32 {l, u}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, u; }" : "=f"(a), "=f"(b) : "r"(h)); '
        'asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(r[i]) : "f"(a), "f"(b));',
    ),
    "fp16": _widen("tw_widen_fp16", "r[i] = h;"),
}
"""Sixteen e4m3 numbers as 16 bits each, exactly: the first eight to `to`, the others to `next`; either may be where they
came from. All addresses are multiples of 16."""
