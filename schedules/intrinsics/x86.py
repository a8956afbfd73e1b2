"""Tensor intrinsics of vector registers as desc + impl pairs."""

from __future__ import annotations

import itertools

import tvm
from tvm.s_tir import TensorIntrin


def sums_of_lanes(keys: int | None, rows: int, lanes: int) -> str | None:
    """Register the intrinsic C[i, j] = sum over the lanes of A[i, j, :], all f32 and dense; gives its name.

    Four sums at a time: the halves of 16 lanes are added, two levels of horizontal adds leave the sums of half vectors
    side by side, one vertical add joins them. The block's axes are in the order that rfactor gives: lane, key, row.

    Args:
        keys: rows of C; None: one key, an axis that neither C nor A has.
        rows: columns of C.
        lanes: 8 or 16.

    Returns:
        None where no four sums lie side by side (rows is no multiple of 4) and where keys is 1 (TVM drops unit axes
        before it compares a block with a description).
    """
    if rows % 4 or keys == 1:
        return None
    of_key = [] if keys is None else [keys]
    name = f"x86_sums_of_{lanes}_lanes_{'x'.join(map(str, [*of_key, rows]))}"
    shape = ", ".join(map(str, [*of_key, rows]))
    whole = ", ".join(f"0:{size}" for size in [*of_key, rows])
    head = f"""@T.prim_func(s_tir=True)
def f(a: T.handle, c: T.handle):
    A = T.match_buffer(a, ({shape}, {lanes}), "float32", offset_factor=1, scope="local")
    C = T.match_buffer(c, ({shape},), "float32", offset_factor=1, scope="local")
    with T.sblock("root"):
        T.reads(A[{whole}, 0:{lanes}])
        T.writes(C[{whole}])
"""
    loops, kinds, axes = ("j, k", "RS", "vj") if keys is None else ("i, j, k", "RSS", "vi, vj")
    desc = f"""        for {loops} in T.grid({shape}, {lanes}):
            with T.sblock("sum"):
                vk, {axes} = T.axis.remap("{kinds}", [k, {loops[:-3]}])
                T.reads(C[{axes}], A[{axes}, vk])
                T.writes(C[{axes}])
                with T.init():
                    C[{axes}] = T.float32(0)
                C[{axes}] = C[{axes}] + A[{axes}, vk]
"""
    lines = []
    places = itertools.product((f"{i}, " for i in range(keys)) if keys else ("",), range(0, rows, 4))
    for number, (key, j) in enumerate(places):
        vectors = [_eight(f"A[{key}{j + x}, T.Ramp(0, 1, {lanes})]", lanes) for x in range(4)]
        halves = f"halves_{number}"
        lines.append(f"        {halves} = T.Bind({_hadd(_hadd(*vectors[:2]), _hadd(*vectors[2:]))})")
        joined = f"T.vectorlow('float32x4', {halves}) + T.vectorhigh('float32x4', {halves})"
        lines.append(f"        C[{key}T.Ramp({j}, 1, 4)] = {joined}")
    impl = head + "\n".join(lines) + "\n"
    TensorIntrin.register(name, tvm.script.from_source(head + desc), tvm.script.from_source(impl), override=True)
    return name


def _eight(vector: str, lanes: int) -> str:
    if lanes == 8:
        return vector
    return f"(T.vectorlow('float32x8', {vector}) + T.vectorhigh('float32x8', {vector}))"


def _hadd(a: str, b: str) -> str:
    return f"T.call_llvm_pure_intrin('float32x8', 'llvm.x86.avx.hadd.ps.256', {a}, {b})"
