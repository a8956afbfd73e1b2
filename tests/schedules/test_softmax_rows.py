"""The pass that folds softmax states once a row (what it computes is tested with the kernels)."""

import pytest
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock

from tilewright.schedules.paged_attention.definition import PagedShape, paged_attention
from tilewright.schedules.softmax_rows import fold_by_row
from tilewright.schedules.spaces import get_space
from tilewright.schedules.workload import Workload


def blocks(func: tirx.PrimFunc) -> dict[str, SBlock]:
    found: dict[str, SBlock] = {}

    def visit(block: SBlock) -> SBlock:
        found[block.name_hint] = block
        return block

    tvm_ffi.structural_map(func, (SBlock, visit))
    return found


@pytest.mark.parametrize("target", ["x86-avx2", "x86-amx"])
@pytest.mark.parametrize("name", ["paged_decode-bf16-g4-d128", "paged_extend-bf16-g3-d64"])
def test_the_exponential_is_taken_once_a_row(name: str, target: str) -> None:
    workload = Workload.parse(name)
    space = get_space(workload, target)
    found = blocks(space.module(space.default)[workload.operator])
    assert "Let" not in str(found["acc_update"].body), "values are multiplied and added, nothing else"
    assert [axis.var.name for axis in found["acc_rows"].iter_vars] == ["v_w", "v_h", "v_r", "v_c"]
    assert [region.source.name for region in found["acc_init"].writes] == ["acc.v2"]


def test_a_function_without_a_loop_over_chunks_is_refused() -> None:
    workload = Workload.parse("paged_decode-f32-g4-d128")
    unscheduled = paged_attention(workload, PagedShape.of(workload, 1, 64))
    with pytest.raises(ValueError, match="acc: no loop annotated"):
        fold_by_row(unscheduled, lanes=8)
