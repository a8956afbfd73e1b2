"""Intel AMX as tensor intrinsics over bf16 buffers.

Each is a pair: `desc`, the plain loops it stands for, and `impl`, tile instructions. A product needs its right operand
in pairs of rows: element (k, j) of a [depth, columns] matrix lies at [k // 2, j, k % 2]. That is what
`transform_layout(..., lambda k, j: (k // 2, j, k % 2))` makes of a cache_read; `interleave_rows` is that copy,
vectorised.

`impl` uses LLVM's `.internal` intrinsics, whose operands are tile values: LLVM allocates the registers, configures them
at the entry of each function that uses tiles, thus once per worker of a parallel loop, and releases them at its end. It
cannot carry a tile value around a loop, so everything inside an intrinsic is unrolled. Operands must be buffers that
the function allocates: offsets are 32 bits.

Nothing here is legal to run before the operating system has been asked for permission.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable

import tvm_ffi
from tvm import DataType, tirx
from tvm.ir.expr import StringImm, Var
from tvm.s_tir import TensorIntrin
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from tilewright.schedules.lowering import TRIP

TILE_ROWS = 16
TILE_WORDS = 16  # 32-bit words in a row
TILE_REGISTERS = 8
OVER = "tilewright.amx.over"  # on the loop of a `bf16_product_over`: its steps of 32 an iteration

# TVM has no type for a tile. Any type of 1024 bytes passes through its code generator; only LLVM looks at the value.
_TILE = "int32x256"


@functools.cache
def bf16_product(rows: int, columns: int, depth: int, *, fresh: bool = False, ahead: bool = False) -> str:
    """Register C[i, j] += sum_k f32(A[i, k]) * f32(B[k // 2, j, k % 2]) by `tdpbf16ps`.

    A is bf16 [rows, depth], B bf16 [depth // 2, columns, 2], C f32 [rows, columns]; row strides are free,
    the dimensions inside a row are dense. Products are exact, sums are f32 in the instruction's order.

    Args:
        rows: at least 2; 16 to a tile, the last tile may be lower.
        columns: at least 2; 16 to a tile, the last tile may be narrower.
        depth: a multiple of 16; all of it is unrolled. A last 16 take tiles of their own, half as deep.
        fresh: start from zero instead of from C, whatever C holds. Sound only where `depth` is the whole reduction, and
            only together with `omitted_init` on the block that would have zeroed C.
        ahead: ask for the next `rows` rows of A (they need not be there) while this product runs.

    Returns:
        The name for `Schedule.tensorize`, whose block has the loops i, j, k.

    Raises:
        ValueError: fewer than 2 rows or columns (TVM drops such loops), a depth that is no positive multiple of 16, or
            more tiles than registers (all tiles of C, one side of a step in depth, one tile of the other).
    """
    row_tiles, column_tiles, depth_tiles = _tiles(rows), _tiles(columns), _tiles(depth // 2)
    size = f"{rows} x {columns} x {depth}"
    if rows < 2 or columns < 2 or depth < 16 or depth % 16:
        raise ValueError(f"bf16_product: got {size}, expected 2 x 2 x 16 or more, the depth in multiples of 16")
    # The tiles of the shorter side stay in registers while those of the longer one come and go.
    if len(row_tiles) <= len(column_tiles):
        order = [(row, column) for column in column_tiles for row in row_tiles]
    else:
        order = [(row, column) for row in row_tiles for column in column_tiles]
    if not products_fit((rows, columns, depth)):
        raise ValueError(f"bf16_product: {size} holds more tiles at once than there are registers ({TILE_REGISTERS})")

    def implementation() -> None:
        a_row, b_row, c_row = _sizes("A_row", "B_row", "C_row")
        a = _matrix("A", (rows, depth), "bfloat16", [a_row, 1])
        b = _matrix("B", (depth // 2, columns, 2), "bfloat16", [b_row, 2, 1])
        c = _matrix("C", (rows, columns), "float32", [c_row, 1])
        a_bytes, b_bytes, c_bytes = (_bytes(matrix, matrix.strides[0]) for matrix in (a, b, c))
        with T.sblock("root"):
            T.reads(c[0:rows, 0:columns], a[0:rows, 0:depth], b[0 : depth // 2, 0:columns, 0:2])
            T.writes(c[0:rows, 0:columns])
            sums = {
                (i, j): _zero(m, n) if fresh else _load(m, n, _address(c, i, j), c_bytes) for (i, m), (j, n) in order
            }
            for k, words in depth_tiles:
                a_tiles: dict[int, tirx.Expr] = {}
                b_tiles: dict[int, tirx.Expr] = {}
                for (i, m), (j, n) in order:
                    if i not in a_tiles:
                        a_tiles[i] = _load(m, words, _address(a, i, 2 * k), a_bytes)
                        for row in range(rows + i, rows + i + m) if ahead else ():
                            _prefetch(_address(a, row, 2 * k))
                    if j not in b_tiles:
                        b_tiles[j] = _load(words, n, _address(b, k, j, 0), b_bytes)
                    sums[i, j] = _instruction("tdpbf16ps", m, n, 4 * words, sums[i, j], a_tiles[i], b_tiles[j])
            for (i, m), (j, n) in order:
                _store(m, n, _address(c, i, j), c_bytes, sums[i, j])

    name = f"amx_bf16_product_{rows}x{columns}x{depth}" + ("_fresh" if fresh else "") + ("_ahead" if ahead else "")
    return _register(name, lambda: _product(rows, columns, depth), implementation)


def _product(rows: int, columns: int, depth: int) -> None:
    """What a product of tiles computes: C += A B, B in pairs of rows."""
    a = _matrix("A", (rows, depth), "bfloat16")
    b = _matrix("B", (depth // 2, columns, 2), "bfloat16")
    c = _matrix("C", (rows, columns), "float32")
    with T.sblock("root"):
        T.reads(c[0:rows, 0:columns], a[0:rows, 0:depth], b[0 : depth // 2, 0:columns, 0:2])
        T.writes(c[0:rows, 0:columns])
        with T.grid(rows, columns, depth) as loops, T.sblock("product"):
            i, j, k = T.axis.remap("SSR", loops)
            product = a[i, k].astype("float32") * b[k // 2, j, k % 2].astype("float32")
            T.buffer_store(c, c[i, j] + product, [i, j])


def products_fit(*sizes: tuple[int, int, int]) -> bool:
    """Whether one function can hold `bf16_product`s of these (rows, columns, depth).

    A product keeps all tiles of C, those of the shorter side of a step in depth, and one of the other side. A register
    has one shape for the whole function, so products share registers only where their tiles have the same shape. LLVM
    does not spill its way out of more: it ends the process.
    """
    needed: Counter[tuple[int, int]] = Counter()
    for rows, columns, depth in sizes:
        row_tiles, column_tiles, depth_tiles = ([n for _, n in _tiles(x)] for x in (rows, columns, depth // 2))
        held = Counter((m, n) for m in row_tiles for n in column_tiles)
        steps: Counter[tuple[int, int]] = Counter()
        for words in set(depth_tiles):
            left, right = [(m, words) for m in row_tiles], [(words, n) for n in column_tiles]
            kept, streamed = (left, right) if len(left) <= len(right) else (right, left)
            steps |= Counter(kept) + Counter(set(streamed))
        needed |= held + steps
    return needed.total() <= TILE_REGISTERS


@functools.cache
def bf16_product_over(rows: int, columns: int, depth: int, step: int, ahead: int = 0) -> str:
    """Register the `fresh` product of `bf16_product` as a loop over depth whose accumulators stay in tile registers.

    Shapes and layouts are those of `bf16_product`. The loop, `depth / step` iterations of `step`, carries the
    annotation `OVER` (and may be given another extent by then): `product_loops` must make code of it. An accumulator is
    stored once, where `bf16_product` over the same loop would load and store it in every iteration.

    Args:
        rows: a multiple of 16; the tiles of rows x columns must fit the registers, see `products_fit`.
        columns: a multiple of 16.
        depth: a multiple of `step`.
        step: a multiple of 32.
        ahead: how many times 32 of depth before its use a row of B is asked for, 0 = never.

    Returns:
        The name for `Schedule.tensorize`, whose block has the loops i, j, k.

    Raises:
        ValueError: sizes that are no such multiples.
    """
    if rows % 16 or columns % 16 or step < 32 or step % 32 or depth < step or depth % step:
        raise ValueError(
            f"bf16_product_over: got {rows} x {columns} x {depth} by {step}, expected multiples of 16, 16, step, 32"
        )
    if not products_fit((rows, columns, step)):
        raise ValueError(
            f"bf16_product_over: {rows} x {columns} holds more tiles than there are registers ({TILE_REGISTERS})"
        )

    def implementation() -> None:
        a_row, b_row, c_row = _sizes("A_row", "B_row", "C_row")
        a = _matrix("A", (rows, depth), "bfloat16", [a_row, 1])
        b = _matrix("B", (depth // 2, columns, 2), "bfloat16", [b_row, 2, 1])
        c = _matrix("C", (rows, columns), "float32", [c_row, 1])
        with T.sblock("root"):
            T.reads(c[0:rows, 0:columns], a[0:rows, 0:depth], b[0 : depth // 2, 0:columns, 0:2])
            T.writes(c[0:rows, 0:columns])
            with T.serial(0, depth // step, annotations={OVER: step // 32, TRIP: "keys"}):
                operands = [(_address(m, *[0] * len(m.shape)), _bytes(m, m.strides[0])) for m in (c, a, b)]
                T.evaluate(
                    tirx.call_extern(
                        "void",
                        f"tilewright_amx_product_{rows}x{columns}x{ahead}",
                        *(x for pair in operands for x in pair),
                    )
                )

    name = f"amx_bf16_product_over_{rows}x{columns}x{depth}by{step}_ahead{ahead}"
    return _register(name, lambda: _product(rows, columns, depth), implementation)


def product_loops(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Make code of the loops that `bf16_product_over` left: one function of LLVM's, inlined, which loops itself."""

    def visit(loop: tirx.For, mutator: tvm_ffi.StructuralMutator) -> tirx.Stmt:
        steps = dict(loop.annotations).get(OVER)
        if steps is None:
            return mutator.default_mutate(loop)
        call = loop.body.value
        name = str(call.args[0].value)
        rows, columns, ahead = (int(n) for n in name.rpartition("_")[2].split("x"))
        call = tirx.call_extern("void", name, *call.args[1:], loop.extent.astype("int64") * int(steps))
        return tirx.AttrStmt(
            tirx.const(0, "int32"),
            "pragma_import_llvm",
            StringImm(_product_loop(name, rows, columns, ahead)),
            tirx.Evaluate(call),
        )

    return tvm_ffi.structural_mutate(func, (tirx.For, visit))


def _product_loop(name: str, rows: int, columns: int, ahead: int) -> str:
    """LLVM IR: C = sum over `steps` of A's next 32 columns times B's next 16 rows of pairs.

    Written out, because TVM has no loop that carries a tile.
    """
    zero, load, product, store = (
        f"@llvm.x86.{n}.internal" for n in ("tilezero", "tileloadd64", "tdpbf16ps", "tilestored64")
    )
    tiles = [(i, j) for i in range(rows // 16) for j in range(columns // 16)]
    body: list[str] = []

    def matrix_tile(register: str, base: str, row_bytes: str, rows: int, column_bytes: int) -> None:
        body.append(f"  %{register}_down = mul i64 {row_bytes}, {rows}")
        body.append(f"  %{register}_off = add i64 %{register}_down, {column_bytes}")
        body.append(f"  %{register}_at = getelementptr i8, ptr {base}, i64 %{register}_off")
        body.append(f"  %{register} = call x86_amx {load}(i16 16, i16 64, ptr %{register}_at, i64 {row_bytes})")

    streamed_rows = rows > columns
    done: set[str] = set()
    order = sorted(tiles) if streamed_rows else sorted(tiles, key=lambda t: (t[1], t[0]))
    for i, j in order:
        for register, base, row_bytes, down, right in (
            (f"a{i}", "%a_next", "%a_row", 16 * i, 0),
            (f"b{j}", "%b_next", "%b_row", 0, 64 * j),
        ):
            if register not in done:
                done.add(register)
                matrix_tile(register, base, row_bytes, down, right)
                for row in range(16) if ahead and base == "%b_next" else ():
                    line = f"%line{j}_{row}"
                    body.append(f"  {line}_down = mul i64 {row_bytes}, {16 * ahead + row}")
                    body.append(f"  {line}_off = add i64 {line}_down, {right}")
                    body.append(f"  {line} = getelementptr i8, ptr {base}, i64 {line}_off")
                    body.append(f"  call void @llvm.prefetch.p0(ptr {line}, i32 0, i32 3, i32 1)")
        body.append(
            f"  %new{i}_{j} = call x86_amx {product}(i16 16, i16 64, i16 64, "
            f"x86_amx %sum{i}_{j}, x86_amx %a{i}, x86_amx %b{j})"
        )
    loop, body = body, []
    for i, j in tiles:
        body.append(f"  %down{i}_{j} = mul i64 %c_row, {16 * i}")
        body.append(f"  %off{i}_{j} = add i64 %down{i}_{j}, {64 * j}")
        body.append(f"  %at{i}_{j} = getelementptr i8, ptr %c, i64 %off{i}_{j}")
        body.append(f"  call void {store}(i16 16, i16 64, ptr %at{i}_{j}, i64 %c_row, x86_amx %all{i}_{j})")
    return "\n".join(
        [
            f"define void @{name}(ptr %c, i64 %c_row, ptr %a, i64 %a_row, ptr %b, i64 %b_row, i64 %steps) {{",
            "entry:",
            *(f"  %zero{i}_{j} = call x86_amx {zero}(i16 16, i16 64)" for i, j in tiles),
            "  %b_step = mul i64 %b_row, 16",
            "  %some = icmp sgt i64 %steps, 0",
            "  br i1 %some, label %loop, label %done",
            "loop:",
            *(f"  %sum{i}_{j} = phi x86_amx [ %zero{i}_{j}, %entry ], [ %new{i}_{j}, %loop ]" for i, j in tiles),
            "  %a_next = phi ptr [ %a, %entry ], [ %a_then, %loop ]",
            "  %b_next = phi ptr [ %b, %entry ], [ %b_then, %loop ]",
            "  %step = phi i64 [ 0, %entry ], [ %after, %loop ]",
            *loop,
            "  %a_then = getelementptr i8, ptr %a_next, i64 64",
            "  %b_then = getelementptr i8, ptr %b_next, i64 %b_step",
            "  %after = add i64 %step, 1",
            "  %more = icmp slt i64 %after, %steps",
            "  br i1 %more, label %loop, label %done",
            "done:",
            *(f"  %all{i}_{j} = phi x86_amx [ %zero{i}_{j}, %entry ], [ %new{i}_{j}, %loop ]" for i, j in tiles),
            *body,
            "  ret void",
            "}",
            "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
            f"declare x86_amx {zero}(i16, i16)",
            f"declare x86_amx {load}(i16, i16, ptr, i64)",
            f"declare x86_amx {product}(i16, i16, i16, x86_amx, x86_amx, x86_amx)",
            f"declare void {store}(i16, i16, ptr, i64, x86_amx)",
        ]
    )


@functools.cache
def omitted_init(rows: int, columns: int) -> str:
    """Register C[i, j] = 0 over f32 [rows, columns] as nothing at all: the init block of a `fresh` product."""

    def loops(body: bool) -> None:
        c = _matrix("C", (rows, columns), "float32")
        with T.sblock("root"):
            T.reads()
            T.writes(c[0:rows, 0:columns])
            if body:
                with T.grid(rows, columns) as indices, T.sblock("init"):
                    i, j = T.axis.remap("SS", indices)
                    T.buffer_store(c, tirx.const(0.0, "float32"), [i, j])
            else:
                T.evaluate(tirx.const(0, "int32"))

    return _register(f"amx_omitted_init_{rows}x{columns}", lambda: loops(True), lambda: loops(False))


@functools.cache
def zeroed(rows: int, columns: int) -> str:
    """Register C[i, j] = 0 over f32 [rows, columns] by tiles.

    LLVM makes a call of memset of plain stores, and behind each call the tiles must be configured anew.
    """

    def loops(tiles: bool) -> None:
        (c_row,) = _sizes("C_row") if tiles else (None,)
        c = _matrix("C", (rows, columns), "float32", [c_row, 1] if tiles else None)
        with T.sblock("root"):
            T.reads()
            T.writes(c[0:rows, 0:columns])
            if tiles:
                for i, m in _tiles(rows):
                    for j, n in _tiles(columns):
                        _store(m, n, _address(c, i, j), _bytes(c, c.strides[0]), _zero(m, n))
            else:
                with T.grid(rows, columns) as indices, T.sblock("init"):
                    i, j = T.axis.remap("SS", indices)
                    T.buffer_store(c, tirx.const(0.0, "float32"), [i, j])

    return _register(f"amx_zeroed_{rows}x{columns}", lambda: loops(False), lambda: loops(True))


@functools.cache
def interleave_rows(columns: int) -> str:
    """Register Out[t // 2, j, t % 2] = In[t, j] for two rows t.

    In is bf16 [2, columns], Out bf16 [1, columns, 2]; row strides are free, the dimensions inside a row are dense.

    Args:
        columns: a multiple of 16.

    Returns:
        The name for `Schedule.tensorize`, whose block has the loops t, j.

    Raises:
        ValueError: columns is no positive multiple of 16.
    """
    if columns < 1 or columns % 16:
        raise ValueError(f"interleave_rows: got {columns} columns, expected a positive multiple of 16")

    def description() -> None:
        source = _matrix("In", (2, columns), "bfloat16")
        target = _matrix("Out", (1, columns, 2), "bfloat16")
        with T.sblock("root"):
            T.reads(source[0:2, 0:columns])
            T.writes(target[0:1, 0:columns, 0:2])
            with T.grid(2, columns) as loops, T.sblock("copy"):
                t, j = T.axis.remap("SS", loops)
                T.buffer_store(target, source[t, j], [t // 2, j, t % 2])

    def implementation() -> None:
        source_row, target_row = _sizes("In_row", "Out_row")
        source = _matrix("In", (2, columns), "bfloat16", [source_row, 1])
        target = _matrix("Out", (1, columns, 2), "bfloat16", [target_row, 2, 1])
        zipped = [lane + 16 * row for lane in range(16) for row in range(2)]
        with T.sblock("root"):
            T.reads(source[0:2, 0:columns])
            T.writes(target[0:1, 0:columns, 0:2])
            T.evaluate(tirx.buffer_data(source))  # keeps it bf16, see _address; leaves no code
            for j in range(0, columns, 16):
                # As integers: TVM would widen bf16 values to f32 and round them back.
                halves = [T.reinterpret("uint16x16", source[row, tirx.Ramp(j, 1, 16)]) for row in range(2)]
                words = T.reinterpret("bfloat16x32", tirx.Shuffle(halves, zipped))
                T.buffer_store(target, words, [0, j, tirx.Ramp(0, 1, 32)])  # 32 lanes: the last dimensions are dense

    return _register(f"amx_interleave_rows_{columns}", description, implementation)


@functools.cache
def transpose_to_bf16() -> str:
    """Register Out[j, t] = bf16(In[t, j]): the left operand of a product from f32 values that lie the other way.

    In is f32 [32, 16], Out bf16 [16, 32]; row strides are free, rows are dense. Rounded to nearest, halves away from
    zero; NaN stays NaN if its upper half has a fraction that does not overflow (all that arithmetic makes).

    Returns:
        The name for `Schedule.tensorize`, whose block has the loops t, j.
    """
    keys, rows = 2 * TILE_WORDS, TILE_ROWS

    def description() -> None:
        source, target = _matrix("In", (keys, rows), "float32"), _matrix("Out", (rows, keys), "bfloat16")
        with T.sblock("root"):
            T.reads(source[0:keys, 0:rows])
            T.writes(target[0:rows, 0:keys])
            with T.grid(keys, rows) as loops, T.sblock("copy"):
                t, j = T.axis.remap("SS", loops)
                T.buffer_store(target, source[t, j].astype("bfloat16"), [j, t])

    def implementation() -> None:
        source_row, target_row = _sizes("In_row", "Out_row")
        source = _matrix("In", (keys, rows), "float32", [source_row, 1])
        target = _matrix("Out", (rows, keys), "bfloat16", [target_row, 1])

        def rounded(t: int) -> tirx.Expr:
            return T.reinterpret("uint32x16", source[t, tirx.Ramp(0, 1, 16)]) + _lanes(0x8000)

        with T.sblock("root"):
            T.reads(source[0:keys, 0:rows])
            T.writes(target[0:rows, 0:keys])
            pairs = [
                T.Bind(rounded(2 * p) >> _lanes(16) | rounded(2 * p + 1) & _lanes(0xFFFF0000))
                for p in range(TILE_WORDS)
            ]
            for j, words in enumerate(_transposed(pairs)):
                T.buffer_store(target, T.reinterpret("bfloat16x32", words), [j, tirx.Ramp(0, 1, 32)])

    return _register("amx_transpose_to_bf16", description, implementation)


@functools.cache
def interleave_columns(depth: int = 32) -> str:
    """Register Out[k // 2, j, k % 2] = In[j, k]: the right operand of a product from its transpose.

    In is bf16 [16, depth], Out bf16 [depth // 2, 16, 2]; row strides are free, the dimensions inside a row are dense.

    Args:
        depth: 32 or 16, a whole tile or half of one.

    Returns:
        The name for `Schedule.tensorize`, whose block has the loops j, k.

    Raises:
        ValueError: another depth.
    """
    rows, half = TILE_ROWS, TILE_ROWS // 2
    if depth not in (16, 32):
        raise ValueError(f"interleave_columns: got a depth of {depth}, expected 16 or 32")

    def description() -> None:
        source, target = _matrix("In", (rows, depth), "bfloat16"), _matrix("Out", (depth // 2, rows, 2), "bfloat16")
        with T.sblock("root"):
            T.reads(source[0:rows, 0:depth])
            T.writes(target[0 : depth // 2, 0:rows, 0:2])
            with T.grid(rows, depth) as loops, T.sblock("copy"):
                j, k = T.axis.remap("SS", loops)
                T.buffer_store(target, source[j, k], [k // 2, j, k % 2])

    def implementation() -> None:
        source_row, target_row = _sizes("In_row", "Out_row")
        source = _matrix("In", (rows, depth), "bfloat16", [source_row, 1])
        target = _matrix("Out", (depth // 2, rows, 2), "bfloat16", [target_row, 2, 1])
        with T.sblock("root"):
            T.reads(source[0:rows, 0:depth])
            T.writes(target[0 : depth // 2, 0:rows, 0:2])
            T.evaluate(tirx.buffer_data(source))  # keeps it bf16, see _address; leaves no code
            words = [
                T.Bind(T.reinterpret(f"uint32x{depth // 2}", source[j, tirx.Ramp(0, 1, depth)])) for j in range(rows)
            ]
            if depth == 16:  # rows j and j + 8 side by side: two squares of 8 x 8 words
                words = [T.Bind(tirx.Shuffle([words[j], words[j + half]], list(range(16)))) for j in range(half)]
            for p, pairs in enumerate(_transposed(words)):
                T.buffer_store(target, T.reinterpret("bfloat16x32", pairs), [p, 0, tirx.Ramp(0, 1, 32)])

    return _register(f"amx_interleave_columns_{depth}", description, implementation)


def _transposed(rows: list[Var]) -> list[Var]:
    """The columns of 16 vectors of 16 words, or of two squares of 8 words side by side in 8 vectors.

    Exchanges the off-diagonal blocks of size 8, 4, 2, 1.
    """
    rows = list(rows)
    for size in (n for n in (8, 4, 2, 1) if n < len(rows)):
        upper = [lane if lane & size == 0 else lane - size + 16 for lane in range(16)]
        lower = [lane + size if lane & size == 0 else lane + 16 for lane in range(16)]
        for p in (p for p in range(len(rows)) if p & size == 0):
            both = [rows[p], rows[p + size]]
            rows[p], rows[p + size] = (T.Bind(tirx.Shuffle(both, lanes)) for lanes in (upper, lower))
    return rows


def _lanes(value: int) -> tirx.Expr:
    return tirx.Broadcast(tirx.const(value, "uint32"), 16)


def _tiles(extent: int) -> list[tuple[int, int]]:
    """(start, size) of the tiles along one dimension."""
    return [(start, min(TILE_ROWS, extent - start)) for start in range(0, extent, TILE_ROWS)]


def _sizes(*names: str) -> list[Var]:
    sizes = [T.int32() for _ in names]
    for name, size in zip(names, sizes, strict=True):
        IRBuilder.name(name, size)
    return sizes


def _matrix(name: str, shape: tuple[int, ...], dtype: str, strides: list[Var | int] | None = None) -> Var:
    handle = T.arg(name.lower(), T.handle())
    matrix = T.match_buffer(handle, shape, dtype, strides=strides, offset_factor=1, layout=None)
    IRBuilder.name(name, matrix)
    return matrix


def _bytes(matrix: Var, elements: tirx.Expr) -> tirx.Expr:
    return elements.astype("int64") * DataType(matrix.dtype).itemsize


def _address(matrix: Var, *indices: int) -> tirx.Expr:
    # Not address_of an element: only a use of the pointer itself keeps TVM's bf16 legalisation from turning the buffer
    # behind it into f32.
    offset = matrix.elem_offset
    for index, stride in zip(indices, matrix.strides, strict=True):
        offset = offset + index * stride
    return tirx.op.handle_add_byte_offset(tirx.buffer_data(matrix), _bytes(matrix, offset))


def _register(name: str, description: Callable[[], None], implementation: Callable[[], None]) -> str:
    functions = []
    for body in (description, implementation):
        with IRBuilder() as builder, T.prim_func(s_tir=True):
            T.func_name(name)
            body()
        functions.append(builder.get())
    # A second import of this module (a test may make one) finds its names taken.
    TensorIntrin.register(name, *functions, override=True)
    return name


def _call(dtype: str, instruction: str, *arguments: tirx.Expr) -> tirx.Expr:
    return tirx.call_llvm_intrin(dtype, f"llvm.x86.{instruction}.internal", *arguments)


def _shape(rows: int, words: int) -> tuple[tirx.Expr, tirx.Expr]:
    return tirx.const(rows, "int16"), tirx.const(4 * words, "int16")


def _zero(rows: int, words: int) -> tirx.Expr:
    return T.Bind(_call(_TILE, "tilezero", *_shape(rows, words)))


def _load(rows: int, words: int, address: tirx.Expr, row_bytes: tirx.Expr) -> tirx.Expr:
    return T.Bind(_call(_TILE, "tileloadd64", *_shape(rows, words), address, row_bytes))


def _prefetch(address: tirx.Expr) -> None:
    zero, all_levels, data = (tirx.const(value, "int32") for value in (0, 3, 1))
    T.evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch", address, zero, all_levels, data))


def _instruction(name: str, rows: int, words: int, depth_bytes: int, *tiles: tirx.Expr) -> tirx.Expr:
    return T.Bind(_call(_TILE, name, *_shape(rows, words), tirx.const(depth_bytes, "int16"), *tiles))


def _store(rows: int, words: int, address: tirx.Expr, row_bytes: tirx.Expr, value: tirx.Expr) -> None:
    T.evaluate(_call("void", "tilestored64", *_shape(rows, words), address, row_bytes, value))
