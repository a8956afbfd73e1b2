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
