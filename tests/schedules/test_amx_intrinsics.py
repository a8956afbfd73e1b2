"""The AMX tensor intrinsics: `desc` against numpy, `impl` in a scheduled product under the emulator."""

import ml_dtypes
import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import s_tir, te, tirx
from tvm.s_tir import TensorIntrin

from tilewright.schedules.intrinsics import amx

EMULATED = {"kind": "llvm", "mcpu": "x86-64-v3", "mattr": ["+amx-tile", "+amx-bf16", "+amx-int8"]}
REAL = {"kind": "llvm", "mcpu": "sapphirerapids", "mattr": ["-prefer-256-bit"]}

SCALAR_MOVES = {"vpextrw", "vpextrd", "vpinsrw", "vpinsrd", "vpgatherqd", "vpgatherdd"}  # what a shuffle replaces

# rows, columns, depth of one product: whole tiles, several, tails in either direction, the smallest.
SIZES = [(16, 16, 32), (32, 32, 64), (64, 16, 32), (16, 64, 128), (16, 4, 64), (4, 32, 32), (20, 12, 64), (2, 2, 32)]
SIZES += [(16, 16, 80), (32, 16, 16)]  # a last 16 of depth


@pytest.fixture
def rng():
    return np.random.default_rng(42)


def integers(rng, *shape):
    """Small integers as bf16: every order of summation is exact."""
    return rng.integers(-8, 9, shape).astype(ml_dtypes.bfloat16)


def pairs(b):
    """[depth, columns] -> [depth // 2, columns, 2]."""
    return np.ascontiguousarray(b.reshape(b.shape[0] // 2, 2, b.shape[1]).transpose(0, 2, 1))


def run(module, *arrays):
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    module(*tensors)
    return tensors[-1].numpy()


def description(name):
    function = TensorIntrin.get(name).desc.with_attr("global_symbol", "desc")
    return tvm.compile(tvm.IRModule({"desc": function}), target=tvm.target.Target({"kind": "llvm"}))["desc"]


@pytest.mark.parametrize("rows, columns, depth", SIZES)
@pytest.mark.parametrize("fresh", [False, True])
def test_product_description(rng, rows, columns, depth, fresh):
    a, b = integers(rng, rows, depth), integers(rng, depth, columns)
    c = rng.integers(-99, 99, (rows, columns)).astype(np.float32)
    got = run(description(amx.bf16_product(rows, columns, depth, fresh=fresh)), a, pairs(b), c)
    np.testing.assert_array_equal(got, c + a.astype(np.float32) @ b.astype(np.float32))


def test_product_over_description(rng):
    a, b = integers(rng, 32, 192), integers(rng, 192, 16)
    got = run(description(amx.bf16_product_over(32, 16, 192, 64)), a, pairs(b), np.ones((32, 16), np.float32))
    np.testing.assert_array_equal(got, 1 + a.astype(np.float32) @ b.astype(np.float32))


@pytest.mark.parametrize("rows, columns, ahead", [(32, 32, 0), (16, 32, 2), (32, 16, 1), (16, 64, 0)])
@pytest.mark.parametrize("iterations", [0, 1, 3])
def test_product_loops_under_the_emulator(amx_emulator, rng, rows, columns, ahead, iterations):
    """As many steps of depth as the loop has by then; none at all makes zeros of whatever was there."""
    module, (m, n, d) = scheduled_product(rows, columns, 192, True, over=64, ahead=ahead)

    def shortened(loop, mutator):
        if amx.OVER not in dict(loop.annotations):
            return mutator.default_mutate(loop)
        extent = tirx.const(iterations, str(loop.extent.ty.dtype))
        return tirx.For(loop.loop_var, loop.min, extent, loop.kind, loop.body, None, loop.annotations)

    function = amx.product_loops(tvm_ffi.structural_mutate(module["main"], (tirx.For, shortened)))
    built = tvm.compile(tvm.IRModule({"main": function}), target=tvm.target.Target(EMULATED))
    a, b, keys = integers(rng, m, d), integers(rng, d, n), 64 * iterations
    got = run(built["main"], a, b, np.full((m, n), np.nan, np.float32))
    np.testing.assert_array_equal(got, a[:, :keys].astype(np.float32) @ b[:keys].astype(np.float32))


def test_product_loops_keep_their_accumulators():
    """One load or store of the result a tile, outside the loop; operands only are loaded in it."""
    module, _ = scheduled_product(32, 32, 192, True, over=64)
    function = amx.product_loops(module["main"])
    text = tvm.compile(tvm.IRModule({"main": function}), target=tvm.target.Target(REAL)).mod.inspect_source("asm")
    words = text.split()
    assert words.count("tilezero") == words.count("tilestored") > 0
    assert words.count("ldtilecfg") == 1 and words.count("tileloadd") <= words.count("tdpbf16ps")


@pytest.mark.parametrize(
    "sizes", [(24, 16, 64, 32), (16, 8, 64, 32), (16, 16, 64, 16), (16, 16, 96, 64), (48, 48, 64, 32)]
)
def test_impossible_product_loops_are_refused(sizes):
    with pytest.raises(ValueError, match="bf16_product_over: "):
        amx.bf16_product_over(*sizes)


def test_init_description():
    got = run(description(amx.omitted_init(16, 32)), np.full((16, 32), np.nan, np.float32))
    np.testing.assert_array_equal(got, 0)


def test_zeroed_description():
    got = run(description(amx.zeroed(16, 32)), np.full((16, 32), np.nan, np.float32))
    np.testing.assert_array_equal(got, 0)


def test_interleave_description(rng):
    rows = integers(rng, 2, 48)
    got = run(description(amx.interleave_rows(48)), rows, np.full((1, 48, 2), np.nan, ml_dtypes.bfloat16))
    np.testing.assert_array_equal(got, pairs(rows))


@pytest.mark.parametrize("depth", [32, 16])
def test_interleave_columns_description(rng, depth):
    b = integers(rng, depth, 16)
    empty = np.full((depth // 2, 16, 2), np.nan, b.dtype)
    got = run(description(amx.interleave_columns(depth)), np.ascontiguousarray(b.T), empty)
    np.testing.assert_array_equal(got, pairs(b))


@pytest.mark.parametrize("depth", [32, 16])
@pytest.mark.parametrize("target", [EMULATED, REAL], ids=["emulated", "real"])
def test_interleave_columns_by_shuffles(rng, target, depth):
    """Out[k // 2, j, k % 2] = (a copy of In)[j, k]: the copy is a buffer of the function, as operands are."""
    source = te.placeholder((32, 64), "bfloat16", name="In")
    copy = te.compute((32, 64), lambda j, k: source[j, k], name="copy")
    target_ = te.compute((32, 32, 2), lambda p, j, s: copy[j, 2 * p + s], name="Out")
    schedule = s_tir.Schedule(te.create_prim_func([source, target_]))
    operand = schedule.cache_read(schedule.get_sblock("Out"), 0, "global")
    schedule.transform_layout(operand, ("write", 0), lambda j, k: (k // 2, j, k % 2))
    j, k = schedule.get_loops(operand)
    j0, j1 = schedule.split(j, [None, 16])
    k0, k1 = schedule.split(k, [None, depth])
    schedule.reorder(j0, k0, j1, k1)
    schedule.tensorize(j1, amx.interleave_columns(depth))
    schedule.vectorize(schedule.split(schedule.fuse(*schedule.get_loops(schedule.get_sblock("copy"))), [None, 32])[1])
    schedule.vectorize(schedule.split(schedule.fuse(*schedule.get_loops(schedule.get_sblock("Out"))), [None, 32])[1])
    built = tvm.compile(schedule.mod, target=tvm.target.Target(target))
    if target is REAL:
        assert not set(built.mod.inspect_source("asm").split()) & SCALAR_MOVES
    else:
        b = integers(rng, 64, 32)
        got = run(built["main"], np.ascontiguousarray(b.T), np.full((32, 32, 2), np.nan, b.dtype))
        np.testing.assert_array_equal(got, pairs(b))


def rounding_cases(rng):
    """f32 [32, 16]: ordinary values, halfway cases of both parities, zeros, infinities and NaN."""
    x = rng.standard_normal((32, 16)).astype(np.float32)
    bits = x.view(np.uint32)
    bits[::3] = bits[::3] & 0xFFFF0000 | 0x8000
    x[5, :6] = 0, -0.0, np.inf, -np.inf, np.nan, np.finfo(np.float32).max
    return x


def test_transpose_description(rng):
    x = rounding_cases(rng)
    got = run(description(amx.transpose_to_bf16()), x, np.zeros((16, 32), ml_dtypes.bfloat16))
    np.testing.assert_array_equal(got.astype(np.float32), x.T.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("target", [EMULATED, REAL], ids=["emulated", "real"])
def test_transpose_by_shuffles(rng, target):
    x = te.placeholder((64, 48), "float32", name="X")
    rounded = te.compute((64, 48), lambda t, j: x[t, j].astype("bfloat16"), name="rounded")
    copy = te.compute((48, 64), lambda j, t: rounded[t, j], name="copy")
    schedule = s_tir.Schedule(te.create_prim_func([x, copy]))
    block = schedule.get_sblock("rounded")
    schedule.transform_layout(block, ("write", 0), lambda t, j: (j, t))
    t, j = schedule.get_loops(block)
    t0, t1 = schedule.split(t, [None, 32])
    j0, j1 = schedule.split(j, [None, 16])
    schedule.reorder(t0, j0, t1, j1)
    schedule.tensorize(t1, amx.transpose_to_bf16())
    built = tvm.compile(schedule.mod, target=tvm.target.Target(target))
    if target is REAL:
        assert not set(built.mod.inspect_source("asm").split()) & SCALAR_MOVES
    else:
        values = np.tile(rounding_cases(rng), (2, 3))
        got = run(built["main"], values, np.zeros((48, 64), ml_dtypes.bfloat16)).astype(np.float32)
        np.testing.assert_array_equal(got, halves_away_from_zero(values.T))


def halves_away_from_zero(x):
    """bf16 rounding to nearest, as f32; what lies in the middle goes away from zero."""
    below = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    above = (below.view(np.uint32) + np.uint32(0x10000)).view(np.float32)
    with np.errstate(invalid="ignore"):
        up = np.abs(x.astype(np.float64) - below) >= np.abs(above.astype(np.float64) - x)
    up |= np.isinf(above) & ~np.isinf(below) & (x.astype(ml_dtypes.bfloat16).astype(np.float32) == above)
    return np.where(up, above, below)


def scheduled_product(rows, columns, depth, fresh, over=0, ahead=0):
    """C = A B of 2 x 2 products in rows and columns, and 2 in depth unless fresh, tensorized; every size static.

    over: a loop over depth in steps of so many, by `bf16_product_over`.
    """
    m, n, d = 2 * rows, 2 * columns, depth if fresh else 2 * depth
    a, b = te.placeholder((m, d), "bfloat16", name="A"), te.placeholder((d, n), "bfloat16", name="B")
    k = te.reduce_axis((0, d), "k")
    product = lambda i, j: te.sum(a[i, k].astype("float32") * b[k, j].astype("float32"), axis=k)  # noqa: E731
    schedule = s_tir.Schedule(te.create_prim_func([a, b, te.compute((m, n), product, name="C")]))
    block = schedule.get_sblock("C")
    copy_a, copy_b = (schedule.cache_read(block, operand, "global") for operand in range(2))
    schedule.transform_layout(block, ("read", 1), lambda k, j: (k // 2, j, k % 2))
    if n % 16 == 0:
        schedule.tensorize(schedule.split(schedule.get_loops(copy_b)[0], [None, 2])[1], amx.interleave_rows(n))
    i, j, k = schedule.get_loops(block)
    i0, i1 = schedule.split(i, [None, rows])
    j0, j1 = schedule.split(j, [None, columns])
    k0, k1 = schedule.split(k, [None, depth])
    schedule.reorder(i0, j0, k0, i1, j1, k1)
    schedule.parallel(i0)
    schedule.compute_at(copy_a, i0)
    init = schedule.decompose_reduction(block, k0)
    if fresh:
        schedule.tensorize(schedule.get_loops(init)[-2], amx.omitted_init(rows, columns))
    else:
        schedule.tensorize(schedule.get_loops(init)[-2], amx.zeroed(rows, columns))
    if over:
        schedule.tensorize(i1, amx.bf16_product_over(rows, columns, depth, over, ahead))
    else:
        schedule.tensorize(i1, amx.bf16_product(rows, columns, depth, fresh=fresh))
    return schedule.mod, (m, n, d)


@pytest.mark.parametrize("rows, columns, depth", SIZES)
@pytest.mark.parametrize("fresh", [False, True])
def test_scheduled_product_under_the_emulator(amx_emulator, rng, rows, columns, depth, fresh):
    module, (m, n, d) = scheduled_product(rows, columns, depth, fresh)
    built = tvm.compile(module, target=tvm.target.Target(EMULATED))
    assert "zmm" not in built.mod.inspect_source("asm"), "the emulated build must run without AVX-512"
    a, b = integers(rng, m, d), integers(rng, d, n)
    got = run(built["main"], a, b, np.full((m, n), np.nan, np.float32))
    np.testing.assert_array_equal(got, a.astype(np.float32) @ b.astype(np.float32))


def test_fresh_product_ignores_what_its_result_held(amx_emulator, rng):
    # The scratch of a kernel is not zeroed: NaN in it must not survive (0 * NaN would).
    module, (m, n, d) = scheduled_product(16, 16, 32, True)
    built = tvm.compile(module, target=tvm.target.Target(EMULATED))["main"]
    a, b = integers(rng, m, d), integers(rng, d, n)
    results = [run(built, a, b, np.full((m, n), fill, np.float32)) for fill in (np.nan, 1e30, 0)]
    for result in results:
        np.testing.assert_array_equal(result, results[-1])


@pytest.mark.parametrize("target", [EMULATED, REAL], ids=["emulated", "real"])
def test_tiles_are_configured_once_per_worker(target):
    module, _ = scheduled_product(32, 32, 64, False)
    text = tvm.compile(module, target=tvm.target.Target(target)).mod.inspect_source("asm")
    words = text.split()
    assert words.count("ldtilecfg") == words.count("tilerelease") == 1
    # 4 blocks of C, 2 of depth; each of 2 x 2 x 2 tile products. LLVM may unroll, never duplicate.
    assert 8 <= words.count("tdpbf16ps") <= 64 and words.count("tdpbf16ps") % 8 == 0


def test_interleaving_needs_no_scalar_moves():
    module, _ = scheduled_product(16, 64, 32, False)
    words = tvm.compile(module, target=tvm.target.Target(REAL)).mod.inspect_source("asm").split()
    assert "vpermt2w" in words or "vpunpcklwd" in words
    assert not SCALAR_MOVES & set(words)


@pytest.mark.parametrize("sizes", [(1, 16, 32), (16, 1, 32), (16, 16, 8), (16, 16, 0), (16, 16, 40), (48, 48, 32)])
def test_impossible_products_are_refused(sizes):
    with pytest.raises(ValueError, match="bf16_product: .*{} x {} x {}".format(*sizes)):
        amx.bf16_product(*sizes)


@pytest.mark.parametrize("columns", [0, 8, 20])
def test_impossible_interleavings_are_refused(columns):
    with pytest.raises(ValueError, match=f"interleave_rows: got {columns} columns"):
        amx.interleave_rows(columns)


@pytest.mark.parametrize(
    "sizes, fits",
    [
        ([(32, 32, 64)], True),  # 4 + 2 + 1
        ([(64, 16, 32)], True),  # 4 + 1 + 1
        ([(48, 32, 32)], False),  # 6 + 2 + 1
        ([(32, 32, 32), (32, 32, 64)], True),  # the same registers twice
        ([(64, 8, 32), (16, 16, 32)], True),  # 5 of 16 x 8 words and 1 of 16 x 16; 3 of 16 x 16
        ([(64, 8, 32), (8, 64, 32)], False),  # 5 of 16 x 8, 5 of 8 x 16
        ([(32, 16, 80)], True),  # 2 + 1 + 1 and, for the last 16 of depth, 1 of 16 x 8 and 1 of 8 x 16
        ([(32, 32, 80)], False),  # 4 + 2 + 1 and 2 + 1
    ],
)
def test_tile_registers(sizes, fits):
    assert amx.products_fit(*sizes) is fits
