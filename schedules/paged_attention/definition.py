"""Paged softmax attention, the merge of partial states and the KV write, as tensor expressions.

One definition for every target and phase: spaces schedule the stages, they never restate the maths. README.md derives
it; docs/kernel-abi.md has the argument tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import te, tirx
from tvm.ir import Range
from tvm.ir.expr import Var

from tilewright.schedules import lowering
from tilewright.schedules.e4m3 import HALF_UNIT, half_of_e4m3
from tilewright.schedules.vector_math import LN_2, LOG2_E, exp2, exp2_short, f32, isnan, log2, negative_infinity, tanh
from tilewright.schedules.workload import Workload

TVM_DTYPE = {"bf16": "bfloat16", "fp16": "float16", "f32": "float32"}

# Columns of `items` (docs/kernel-abi.md).
REQUEST, Q_ROW, Q_LEN, KV_BEGIN, KV_LEN, POS, PREFIX, NEW_ROW, PART, FIRST_NEW = range(10)
ITEM_COLUMNS = 10


@dataclass(frozen=True)
class PagedShape:
    """Sizes of one paged kernel: integers where the workload fixes them, else symbols.

    `block_q` query tokens, `rows` query rows and `chunk` keys per softmax chunk are decisions; the others belong to the
    problem. Rows beyond block_q * group are there to fill vectors or tiles: they repeat queries and are never stored.
    """

    block_q: int
    chunk: int
    num_qo_heads: tirx.Expr | int
    num_kv_heads: tirx.Expr | int
    group: tirx.Expr | int
    head_dim_qk: tirx.Expr | int
    head_dim_vo: tirx.Expr | int
    num_items: tirx.Expr | int
    num_tokens: tirx.Expr | int
    rows: tirx.Expr | int

    @staticmethod
    def of(workload: Workload, block_q: int, chunk: int, rows: int | None = None) -> PagedShape:
        """The shape of `workload`; rows: None = those of the block's tokens."""

        def size(name: str) -> tirx.Expr | int:
            fixed = getattr(workload, name, None)
            return fixed if fixed is not None else tirx.Var(name, "int64")

        heads = size("num_kv_heads")
        if workload.group is None:
            # Both head counts are bound from the call's tensors; the group follows.
            qo_heads = size("num_qo_heads")
            group = tirx.floordiv(qo_heads, heads)
        else:
            qo_heads, group = heads * workload.group, workload.group
        names = ("head_dim_qk", "head_dim_vo", "num_items", "num_tokens")
        dim, dim_vo, items, tokens = (size(name) for name in names)
        filled = block_q * group if rows is None else rows
        return PagedShape(block_q, chunk, qo_heads, heads, group, dim, dim_vo, items, tokens, filled)


@dataclass(frozen=True)
class PageTable:
    """Where the keys of an item lie: te tensors in the definition, buffers of the scheduled function in a pass."""

    items: Any
    req_to_token: Any
    req_pool_indices: Any
    kv_start: Any
    window: tirx.Expr
    chunk: tirx.Expr

    @staticmethod
    def of(parameters: Mapping[str, Any], chunk: tirx.Expr) -> PageTable:
        """From the parameters of a function by name."""
        names = ("items", "req_to_token", "req_pool_indices", "kv_start", "window")
        return PageTable(**{name: parameters[name] for name in names}, chunk=chunk)

    def skipped_chunks(self, w: tirx.Expr) -> tirx.Expr:
        """Chunks wholly before the window of the item's first row: never visited."""
        before = self.items[w, POS] - self.window + 1 - self.items[w, KV_BEGIN]
        return tirx.floordiv(tirx.max(before, 0).astype("int64"), self.chunk)

    def offset(self, w: tirx.Expr, c: tirx.Expr, t: tirx.Expr) -> tirx.Expr:
        """Offset within the item of key t of the c-th visited chunk."""
        return (self.skipped_chunks(w) + c) * self.chunk + t

    def position(self, w: tirx.Expr, offset: tirx.Expr) -> tirx.Expr:
        """Position of the key at `offset`; beyond the item's last key the last one (stale slots may hold NaN)."""
        last = self.items[w, KV_LEN].astype("int64") - 1
        return self.items[w, KV_BEGIN].astype("int64") + tirx.min(offset, last)

    def slot(self, w: tirx.Expr, position: tirx.Expr) -> tirx.Expr:
        """Slot of the key at `position` of the item's request."""
        request = self.items[w, REQUEST].astype("int64")
        row = self.req_pool_indices[request].astype("int64")
        return self.req_to_token[row, self.kv_start[request].astype("int64") + position].astype("int64")


def i64(value: tirx.Expr | int) -> tirx.Expr:
    """As an int64 expression."""
    return tirx.const(value, "int64") if isinstance(value, int) else value.astype("int64")


# The algebra of one score and of one state, for the stages below and for kernels that are generated (spaces/): a target
# passes its own elementary functions where the polynomials of vector_math are not the fastest.
Unary = Callable[[tirx.Expr], tirx.Expr]


def visible_bounds(
    position: tirx.Expr, end: tirx.Expr, window: tirx.Expr, lookahead: tirx.Expr
) -> tuple[tirx.Expr, tirx.Expr]:
    """(lo, hi) of a query at `position` over keys that end before `end`: it sees key positions lo < j <= hi."""
    return position - window, tirx.min(position + lookahead, end - 1)


def score(
    product: tirx.Expr,
    scale_log2: tirx.Expr,
    cap_log2: tirx.Expr,
    scale_over_cap: tirx.Expr,
    tanh: Unary = tanh,
) -> tirx.Expr:
    """The base-2 logit of a product q . k: scaled, with a soft-cap where there is one."""
    # A branch, not a select: tanh would cost all calls without a cap.
    return tirx.if_then_else(cap_log2 > f32(0.0), cap_log2 * tanh(product * scale_over_cap), product * scale_log2)


def masked(score: tirx.Expr, position: tirx.Expr, lo: tirx.Expr, hi: tirx.Expr) -> tirx.Expr:
    """The score of the key at `position`, -inf (probability exactly 0) outside the query's bounds."""
    return tirx.Select(tirx.And(position > lo, position <= hi), score, negative_infinity())


def sees_new(
    mask: Any, start: tirx.Expr, width: tirx.Expr, token: tirx.Expr, position: tirx.Expr, first_new: tirx.Expr
) -> tirx.Expr:
    """Whether the mask of a tree of drafts lets a new token see a key: every key before the first new one, and others.

    Args:
        mask: [n] uint8: row `token` of the request begins at start + token * width, its columns are new tokens.
        start: of the request.
        width: of a row.
        token: number of the query among the request's new tokens, within them.
        position: of the key, at most that of the last.
        first_new: position of the request's first new token.
    """
    # A branch, not a select: the prefix has no columns, and vectors over queries gather.
    allowed = tirx.if_then_else(
        position < first_new,
        tirx.const(1, "uint8"),
        mask[i64(start) + i64(token) * i64(width) + i64(position) - i64(first_new)],
    )
    return allowed != tirx.const(0, "uint8")


def finite_or_zero(maximum: tirx.Expr) -> tirx.Expr:
    """What to subtract from exponents whose maximum this is."""
    # -inf - -inf is NaN: rows without a visible key are shifted by 0 instead.
    return tirx.Select(maximum == negative_infinity(), f32(0.0), maximum)


def paged_attention(workload: Workload, shape: PagedShape) -> tirx.PrimFunc:
    """Attend the query rows of each work item to its paged keys and values.

    Computes softmax(options(q k^T)) v with f32 accumulation, chunk by chunk of keys, and the natural-log LSE.
    Source: the softmax monoid of Milakov and Gimelshein (arXiv:1805.02867) and FlashAttention; derivation in README.md.

    Args:
        workload: operator "paged_decode" or "paged_extend".
        shape: its sizes.

    Returns:
        An s_tir function with the arguments of docs/kernel-abi.md in call order and these blocks, to be scheduled:
        slot (of a key; decode), Qg, Kg, Vg (gathered rows), Qf, Kf, Vf (the same in f32), bound_lo, bound_hi (visible
        positions of a row), token (number of a row's query among the new ones; tree), S (scores), X (options and mask
        applied), m, P, l, O (one chunk), acc (the monoid over chunks), F (normaliser), lse_row, store.

        With an fp8 pool, decode's Kf and Vf are in units of HALF_UNIT * scale, and the scores and F make up for it; in
        extend, where a row may not be of the pool, Kg and Vg are the rows themselves in f32.
    """
    extend = workload.operator == "paged_extend"
    dtype = TVM_DTYPE[workload.dtype]
    fp8 = workload.kv_dtype is not None
    # Every extent is int64, constants too: TVM wants one index type a buffer, and addresses are 64-bit.
    G, D, Dv, Hk, W, T, C, M = (
        i64(size)
        for size in (
            shape.group,
            shape.head_dim_qk,
            shape.head_dim_vo,
            shape.num_kv_heads,
            shape.num_items,
            shape.num_tokens,
            shape.chunk,
            shape.rows,
        )
    )
    Hq = i64(shape.num_qo_heads)
    slots, rows, columns, requests, new, partials = (
        tirx.Var(name, "int64") for name in ("slots", "table_rows", "table_columns", "requests", "new_rows", "partials")
    )

    q = te.placeholder((T, Hq, D), dtype, name="q")
    k_buffer = te.placeholder((slots, Hk, D), "uint8" if fp8 else dtype, name="k_buffer")
    v_buffer = te.placeholder((slots, Hk, Dv), "uint8" if fp8 else dtype, name="v_buffer")
    k_new = te.placeholder((new, Hk, D), dtype, name="k_new")
    v_new = te.placeholder((new, Hk, Dv), dtype, name="v_new")
    req_to_token = te.placeholder((rows, columns), "int32", name="req_to_token")
    req_pool_indices = te.placeholder((requests,), "int32", name="req_pool_indices")
    kv_start = te.placeholder((requests,), "int32", name="kv_start")
    items = te.placeholder((W, ITEM_COLUMNS), "int32", name="items")
    sinks = te.placeholder((Hq,), "float32", name="sinks")
    out = te.placeholder((T, Hq, Dv), dtype, name="out")
    lse = te.placeholder((T, Hq), "float32", name="lse")
    part_o = te.placeholder((partials, Hq, Dv), "float32", name="part_o")
    part_lse = te.placeholder((partials, Hq), "float32", name="part_lse")
    mask = te.placeholder((tirx.Var("mask_size", "int64"),), "uint8", name="mask")
    mask_start = te.placeholder((requests,), "int32", name="mask_start")
    mask_width = te.placeholder((requests,), "int32", name="mask_width")
    scale_log2, cap_log2, scale_over_cap = (
        tirx.Var(name, "float32") for name in ("scale_log2", "cap_log2", "scale_over_cap")
    )
    window, lookahead = tirx.Var("window", "int32"), tirx.Var("lookahead", "int32")
    k_scale, v_scale = tirx.Var("k_scale", "float32"), tirx.Var("v_scale", "float32")

    table = PageTable(items, req_to_token, req_pool_indices, kv_start, window, C)

    def f32_of(element: tirx.Expr) -> tirx.Expr:
        """Of an element of a pool, in units of HALF_UNIT * scale where it is fp8."""
        return (half_of_e4m3(element) if fp8 else element).astype("float32")

    def gather(
        buffer: te.Tensor, fresh: te.Tensor, name: str, width: tirx.Expr | int, pool_scale: tirx.Expr
    ) -> te.Tensor:
        def row(w: tirx.Expr, h: tirx.Expr, c: tirx.Expr, t: tirx.Expr, d: tirx.Expr) -> tirx.Expr:
            if not extend:
                return buffer[slot[w, c, t].astype("int64"), h, d]
            j = table.position(w, table.offset(w, c, t))
            paged = buffer[table.slot(w, j), h, d]
            new_row = fresh[j + items[w, NEW_ROW].astype("int64"), h, d]
            if fp8:
                paged, new_row = f32_of(paged) * (pool_scale * f32(HALF_UNIT)), new_row.astype("float32")
            return tirx.if_then_else(j < items[w, PREFIX].astype("int64"), paged, new_row)

        return te.compute((W, Hk, chunks, C, width), row, name=name)

    chunks = tirx.ceildiv(columns, C)  # a stand-in: the kernel runs each item's own number (lowering.TRIP)
    # Decode looks a key's slot up once for all its columns; in extend the row may not be in the pool.
    slot = te.compute(
        (W, chunks, C),
        lambda w, c, t: table.slot(w, table.position(w, table.offset(w, c, t))).astype("int32"),
        name="slot",
    )
    query_token = lambda w, r: tirx.min(tirx.floordiv(r, G), items[w, Q_LEN].astype("int64") - 1)  # noqa: E731

    Qg = te.compute(
        (W, Hk, M, D),
        lambda w, h, r, d: q[
            items[w, Q_ROW].astype("int64") + tirx.max(query_token(w, r), i64(0)), h * G + tirx.floormod(r, G), d
        ],
        name="Qg",
    )
    Qf = te.compute((W, Hk, M, D), lambda *x: Qg(*x).astype("float32"), name="Qf")
    widened = (lambda element: element.astype("float32")) if extend else f32_of
    Kg = gather(k_buffer, k_new, "Kg", D, k_scale)
    Kf = te.compute((W, Hk, chunks, C, D), lambda *x: widened(Kg(*x)), name="Kf")
    Vg = gather(v_buffer, v_new, "Vg", Dv, v_scale)
    Vf = te.compute((W, Hk, chunks, C, Dv), lambda *x: widened(Vg(*x)), name="Vf")

    # Visible key positions of row r: bound_lo < position <= bound_hi.
    def bounds(w: tirx.Expr, r: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
        position = items[w, POS] + tirx.floordiv(r, G).astype("int32")
        return visible_bounds(position, items[w, KV_BEGIN] + items[w, KV_LEN], window, lookahead)

    bound_lo = te.compute((W, Hk, M), lambda w, h, r: bounds(w, r)[0], name="bound_lo")
    bound_hi = te.compute((W, Hk, M), lambda w, h, r: bounds(w, r)[1], name="bound_hi")
    token = te.compute(
        (W, Hk, M),
        lambda w, h, r: items[w, POS] - items[w, FIRST_NEW] + query_token(w, r).astype("int32"),
        name="token",
    )

    d = te.reduce_axis((i64(0), D), "d")
    S = te.compute(
        (W, Hk, chunks, C, M), lambda w, h, c, t, r: te.sum(Kf[w, h, c, t, d] * Qf[w, h, r, d], axis=d), name="S"
    )

    def options(w: tirx.Expr, h: tirx.Expr, c: tirx.Expr, t: tirx.Expr, r: tirx.Expr) -> tirx.Expr:
        offset = table.offset(w, c, t)
        position = items[w, KV_BEGIN] + offset.astype("int32")
        unit = k_scale * f32(HALF_UNIT)
        scales = (scale_log2 * unit, scale_over_cap * unit) if fp8 and not extend else (scale_log2, scale_over_cap)
        transformed = score(S[w, h, c, t, r], scales[0], cap_log2, scales[1])
        logit = masked(transformed, position, bound_lo[w, h, r], bound_hi[w, h, r])
        if not workload.tree:
            return logit
        request = items[w, REQUEST].astype("int64")
        place = mask_start[request], mask_width[request], token[w, h, r]
        seen = sees_new(mask, *place, table.position(w, offset), items[w, FIRST_NEW].astype("int64"))
        return tirx.Select(seen, logit, negative_infinity())

    X = te.compute((W, Hk, chunks, C, M), options, name="X")
    power = exp2 if workload.dtype == "f32" else exp2_short
    t_m, t_l, t_o = (te.reduce_axis((i64(0), C), name) for name in ("t_m", "t_l", "t_o"))
    m = te.compute((W, Hk, chunks, M), lambda w, h, c, r: te.max(X[w, h, c, t_m, r], axis=t_m), name="m")
    P = te.compute(
        (W, Hk, chunks, C, M),
        lambda w, h, c, t, r: power(X[w, h, c, t, r] - finite_or_zero(m[w, h, c, r])),
        name="P",
    )
    l = te.compute((W, Hk, chunks, M), lambda w, h, c, r: te.sum(P[w, h, c, t_l, r], axis=t_l), name="l")
    O = te.compute(
        (W, Hk, chunks, M, Dv),
        lambda w, h, c, r, e: te.sum(P[w, h, c, t_o, r] * Vf[w, h, c, t_o, e], axis=t_o),
        name="O",
    )

    c_acc = te.reduce_axis((i64(0), chunks), "c")
    acc_m, acc_l, acc_o = te.compute(
        (W, Hk, M, Dv),
        lambda w, h, r, e: softmax_monoid()((m[w, h, c_acc, r], l[w, h, c_acc, r], O[w, h, c_acc, r, e]), axis=c_acc),
        name="acc",
    )

    sink = te.compute((W, Hk, M), lambda w, h, r: sinks[h * G + tirx.floormod(r, G)] * f32(LOG2_E), name="sink")

    def row_normaliser(w: tirx.Expr, h: tirx.Expr, r: tirx.Expr) -> tirx.Expr:
        extra = tirx.Select(items[w, PART] < 0, sink[w, h, r], negative_infinity())
        factor = normaliser(acc_m[w, h, r, i64(0)], acc_l[w, h, r, i64(0)], extra)
        return factor * (v_scale * f32(HALF_UNIT)) if fp8 and not extend else factor

    F = te.compute((W, Hk, M), row_normaliser, name="F")
    lse_row = te.compute(
        (W, Hk, M), lambda w, h, r: natural_lse(acc_m[w, h, r, i64(0)], acc_l[w, h, r, i64(0)]), name="lse_row"
    )

    inputs = [q, k_buffer, v_buffer, *((k_new, v_new) if extend else ()), req_to_token, req_pool_indices, kv_start]
    inputs += [items, sinks, out, lse, part_o, part_lse, *((mask, mask_start, mask_width) if workload.tree else ())]
    scalars = [scale_log2, cap_log2, scale_over_cap, window, lookahead, *((k_scale, v_scale) if fp8 else ())]
    func = te.create_prim_func([*inputs, *scalars, acc_o, F, lse_row])
    func = lowering.append_block(
        func, "store", ("acc.v2", "F", "lse_row"), {"w": W, "h": Hk}, _store_rows(shape, dtype)
    )
    dense = {"q", "k_buffer", "v_buffer", "k_new", "v_new", "out"}
    free = {"req_to_token", "req_pool_indices", "kv_start", "lse", "mask_start", "mask_width"}
    present = {p.name for p in func.params if tirx.is_buffer_var(p)}
    func = lowering.strided_parameters(
        func, {name: True for name in dense & present} | {name: False for name in free & present}
    )
    return func.with_attr("global_symbol", workload.operator)


State = tuple[tirx.Expr, ...]


def joined_states(x: State, y: State) -> State:
    """The union of two partial softmax states (max, sum, values): exponents are base 2, none is positive."""
    # The state with the greater maximum keeps its scale, so one exponential does: 2**(least - greatest).
    greater = x[0] > y[0]
    greatest, least = tirx.Select(greater, x[0], y[0]), tirx.Select(greater, y[0], x[0])

    def joined(a: tirx.Expr, b: tirx.Expr) -> tirx.Expr:
        # One exp2 a use: a let-bound variable may be defined once in a function (LLVM shares the value again).
        scale = exp2(least - finite_or_zero(greatest))
        return tirx.Select(greater, a, b) + tirx.Select(greater, b, a) * scale

    return greatest, *(joined(a, b) for a, b in zip(x[1:], y[1:], strict=True))


def fold_factors(x: tuple[tirx.Expr, tirx.Expr], y: tuple[tirx.Expr, tirx.Expr]) -> State:
    """What `joined_states` makes of two states' (max, sum), and by what it multiplies the values of either."""
    one, zero = f32(1.0), f32(0.0)
    return joined_states((*x, one, zero), (*y, zero, one))


def softmax_monoid() -> tirx.CommReducer:
    """The reducer over partial softmax states: `joined_states`, whose identity is (-inf, 0, 0)."""

    def identity(*dtypes: str) -> State:
        return tirx.const(float("-inf"), dtypes[0]), tirx.const(0, dtypes[1]), tirx.const(0, dtypes[2])

    return te.comm_reducer(joined_states, identity, name="softmax")


def normaliser(maximum: tirx.Expr, total: tirx.Expr, sink: tirx.Expr, exp2: Unary = exp2) -> tirx.Expr:
    """1 / (sum + 2**(sink - max)), written so that no exponent is positive; 0 for an empty row."""
    shift = finite_or_zero(tirx.Select(maximum > sink, maximum, sink))
    denominator = total * exp2(maximum - shift) + exp2(sink - shift)
    return tirx.Select(total == f32(0.0), f32(0.0), exp2(maximum - shift) / denominator)


def natural_lse(maximum: tirx.Expr, total: tirx.Expr, log2: Unary = log2) -> tirx.Expr:
    """ln(sum of 2**score) of a state; -inf where it is empty, NaN where its sum is."""
    # A NaN must not look like an empty state, which a merge ignores: comparisons have dropped it from the maximum.
    known = tirx.Select(total == f32(0.0), negative_infinity(), (maximum + log2(total)) * f32(LN_2))
    return tirx.Select(isnan(total), total, known)


def _store_rows(shape: PagedShape, dtype: str) -> lowering.BlockBody:
    """The block that scatters an item's rows: whole rows to out and lse, partial states to part_o and part_lse."""
    G, M, Dv = shape.group, shape.rows, shape.head_dim_vo

    def body(buffers: Mapping[str, Var], axes: Mapping[str, Var]) -> lowering.Block:
        w, h = axes["w"], axes["h"]
        items = buffers["items"]
        i, g = (tirx.Var(name, "int64") for name in ("i", "g"))
        head, r = h * G + g, i * G + g
        item = lambda column: items[w, column].astype("int64")  # noqa: E731

        def rows(o: Var, log: Var, first_row: tirx.Expr, cast: str) -> tirx.Stmt:
            e = tirx.Var("e", "int64")
            value = buffers["acc.v2"][w, h, r, e] * buffers["F"][w, h, r]
            values = loop(e, Dv, tirx.BufferStore(o, value.astype(cast), [first_row + i, head, e]))
            return tirx.SeqStmt([tirx.BufferStore(log, buffers["lse_row"][w, h, r], [first_row + i, head]), values])

        whole = rows(buffers["out"], buffers["lse"], item(Q_ROW), dtype)
        partial = rows(buffers["part_o"], buffers["part_lse"], item(PART), "float32")
        stmt = tirx.IfThenElse(items[w, PART] < 0, whole, partial)
        stmt = loop(i, item(Q_LEN), loop(g, G, stmt))
        per_item = [(w, 1), (h, 1), (0, M)]
        reads = [
            region(buffers["acc.v2"], [*per_item, (0, Dv)]),
            region(buffers["F"], per_item),
            region(buffers["lse_row"], per_item),
            region(items, [(w, 1), (0, ITEM_COLUMNS)]),
        ]
        writes = [
            region(
                buffers[name],
                [(0, buffers[name].shape[0]), (h * G, G), *([(0, Dv)] if name in ("out", "part_o") else [])],
            )
            for name in ("out", "lse", "part_o", "part_lse")
        ]
        return stmt, reads, writes

    return body


def loop(var: Var, extent: tirx.Expr | int, body: tirx.Stmt) -> tirx.Stmt:
    """A serial int64 loop from 0."""
    return tirx.For(var, tirx.const(0, "int64"), i64(extent), tirx.ForKind.SERIAL, body)


def region(buffer: Var, bounds: Sequence[tuple[tirx.Expr | int, tirx.Expr | int]]) -> tirx.BufferRegion:
    """Part of a buffer: (begin, extent) of every dimension."""
    return tirx.BufferRegion(buffer, [Range.from_min_extent(i64(begin), i64(extent)) for begin, extent in bounds])
