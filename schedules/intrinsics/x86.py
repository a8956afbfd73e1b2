"""Tensor intrinsics of vector registers as desc + impl pairs."""

from __future__ import annotations

import tvm
from tvm.s_tir import TensorIntrin


def sums_of_lanes(keys: int, rows: int, lanes: int) -> str | None:
    """Register the intrinsic C[i, j] = sum over the lanes of A[i, j, :], all f32 and dense; gives its name.

    Four sums at a time: the halves of 16 lanes are added, two levels of horizontal adds leave the sums of half vectors
    side by side, one vertical add joins them. The block's axes are in the order that rfactor gives: lane, key, row.

    Args:
        keys: rows of C.
        rows: columns of C.
        lanes: 8 or 16.

    Returns:
        None where no four sums lie side by side (rows is no multiple of 4) and where keys is 1 (TVM drops unit axes
        before it compares a block with a description).
    """
    if rows % 4 or keys == 1:
        return None
    fours = [(i, j) for i in range(keys) for j in range(0, rows, 4)]
    name = f"x86_sums_of_{lanes}_lanes_{keys}x{rows}"
    head = f"""@T.prim_func(s_tir=True)
def f(a: T.handle, c: T.handle):
    A = T.match_buffer(a, ({keys}, {rows}, {lanes}), "float32", offset_factor=1, scope="local")
    C = T.match_buffer(c, ({keys}, {rows}), "float32", offset_factor=1, scope="local")
    with T.sblock("root"):
        T.reads(A[0:{keys}, 0:{rows}, 0:{lanes}])
        T.writes(C[0:{keys}, 0:{rows}])
"""
    desc = f"""        for i, j, k in T.grid({keys}, {rows}, {lanes}):
            with T.sblock("sum"):
                vk, vi, vj = T.axis.remap("RSS", [k, i, j])
                T.reads(C[vi, vj], A[vi, vj, vk])
                T.writes(C[vi, vj])
                with T.init():
                    C[vi, vj] = T.float32(0)
                C[vi, vj] = C[vi, vj] + A[vi, vj, vk]
"""
    lines = []
    for number, (i, j) in enumerate(fours):
        vectors = [_eight(f"A[{i}, {j + x}, T.Ramp(0, 1, {lanes})]", lanes) for x in range(4)]
        place = f"{i}, T.Ramp({j}, 1, 4)"
        halves = f"halves_{number}"
        lines.append(f"        {halves} = T.Bind({_hadd(_hadd(*vectors[:2]), _hadd(*vectors[2:]))})")
        joined = f"T.vectorlow('float32x4', {halves}) + T.vectorhigh('float32x4', {halves})"
        lines.append(f"        C[{place}] = {joined}")
    impl = head + "\n".join(lines) + "\n"
    TensorIntrin.register(name, tvm.script.from_source(head + desc), tvm.script.from_source(impl), override=True)
    return name


def _eight(vector: str, lanes: int) -> str:
    if lanes == 8:
        return vector
    return f"(T.vectorlow('float32x8', {vector}) + T.vectorhigh('float32x8', {vector}))"


def _hadd(a: str, b: str) -> str:
    return f"T.call_llvm_pure_intrin('float32x8', 'llvm.x86.avx.hadd.ps.256', {a}, {b})"
