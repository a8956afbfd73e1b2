"""The parameters of the paged kernels on NVIDIA GPUs, declared once: docs/kernel-abi.md as buffers of tirx."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from tilewright.schedules.intrinsics.cuda import strided
from tilewright.schedules.paged_attention.definition import ITEM_COLUMNS, TVM_DTYPE
from tilewright.schedules.workload import Workload


def paged_buffers(workload: Workload, handles: Mapping[str, tirx.Var]) -> SimpleNamespace:
    """Buffers for the tensor parameters of the function under construction, by their names in docs/kernel-abi.md.

    Args:
        workload: of a paged operator.
        handles: the parameters that there are; None stands for one that there is not.

    Returns:
        The buffers as attributes; `heads` (KV heads) and `num_items`; `group`, `dim` and `dim_vo`, integers where the
        workload fixes them, else int32 expressions; `row_bytes`: of k_buffer, v_buffer, k_new and v_new by name, from
        one row of all heads to the next, int64.
    """
    dtype = TVM_DTYPE[workload.dtype]
    sizes: dict[str, tirx.Var] = {}

    def size(name: str) -> tirx.Var:
        return sizes.setdefault(name, tirx.Var(name, "int64"))

    found: dict[str, object] = {}
    row_bytes: dict[str, tirx.Expr] = {}

    def buffer(name: str, shape: tuple[tirx.Expr | int, ...], dtype: str, *, free: int = 0, align: int = 4) -> None:
        """`free` of the first dimensions have strides of their own."""
        if handles.get(name) is None:
            return
        strides: list[tirx.Expr | int] = [tirx.Var(f"{name}_stride{i}", "int64") for i in range(free)]
        options = {}
        if free:
            strides += [T.int64(1)] * (len(shape) - free)
            options = {"strides": strides, "layout": strided(shape, tuple(strides))}
            row_bytes[name] = strides[0] * (1 if dtype == "uint8" else 2)
        found[name] = T.match_buffer(handles[name], shape, dtype, align=align, **options)
        IRBuilder.name(name, found[name])

    heads, tokens, partials = size("heads"), size("tokens"), size("partials")
    if workload.general:
        query_heads, dim, dim_vo = size("query_heads"), size("dim"), size("dim_vo")
        fixed = [size.astype("int32") for size in (tirx.truncdiv(query_heads, heads), dim, dim_vo)]
    else:
        fixed = [workload.group, workload.head_dim_qk, workload.head_dim_vo]
        group, dim, dim_vo = (T.int64(size) for size in fixed)
        query_heads = heads * group
    pool = "uint8" if workload.kv_dtype is not None else dtype
    buffer("q", (tokens, query_heads, dim), dtype, free=2, align=16)
    buffer("k_buffer", (size("slots"), heads, dim), pool, free=2, align=16)
    buffer("v_buffer", (size("slots"), heads, dim_vo), pool, free=2, align=16)
    buffer("k_new", (size("new_rows"), heads, dim), dtype, free=2, align=16)
    buffer("v_new", (size("new_rows"), heads, dim_vo), dtype, free=2, align=16)
    buffer("req_to_token", (size("table_rows"), size("table_columns")), "int32", free=2)
    buffer("req_pool_indices", (size("requests"),), "int32", free=1)
    buffer("kv_start", (size("requests"),), "int32", free=1)
    buffer("items", (size("num_items"), ITEM_COLUMNS), "int32")
    buffer("sinks", (query_heads,), "float32")
    buffer("out", (tokens, query_heads, dim_vo), dtype, free=2)
    buffer("lse", (tokens, query_heads), "float32", free=2)
    buffer("part_o", (partials, query_heads, dim_vo), "float32", align=16)
    buffer("part_lse", (partials, query_heads), "float32")
    buffer("mask", (size("mask_bytes"),), "uint8", align=1)
    buffer("mask_start", (size("requests"),), "int32", free=1)
    buffer("mask_width", (size("requests"),), "int32", free=1)
    names = ("group", "dim", "dim_vo")
    return SimpleNamespace(
        **found,
        **dict(zip(names, fixed, strict=True)),
        heads=heads,
        num_items=size("num_items"),
        row_bytes=row_bytes,
    )
