"""Head dims, groups and types that models have, right on every path a CPU can take."""

import contextlib
import itertools
import logging

import pytest
import torch
from amx_modules import BESIDE, EMULATED, REAL, module, serving
from paged_calls import check
from paged_sizes import Size, decode_batch, paged_batch

from tilewright.runtime import dispatch, store
from tilewright.schedules.spaces import UnsupportedWorkload, get_space
from tilewright.schedules.workload import DTYPES, Workload

DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256), (576, 512), (13, 13), (33, 55))
GROUPS = (1, 3, 4, 5, 6, 7, 8, 16)
MQA = Size(64, 64, 16, 1)
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "f32": torch.float32}
AVX512 = "x86-avx512"
# Every group and every dim that fills tiles, once: a kernel is compiled for each.
ON_TILES = [(80, 5), (96, 6), (192, 7), (256, 16), (64, 8)]


def check_both(size, dtype):
    """A ragged decode and a ragged extend, int32 and int64 tables."""
    tables = itertools.cycle((torch.int32, torch.int64))
    decode = decode_batch(size, [37, 1, 130], dtype=dtype)
    extend = paged_batch(size, [20, 0], [9, 3], dtype=dtype)
    for batch, options in ((decode, {"decode": True}), (extend, {})):
        batch.req_to_token = batch.req_to_token.to(next(tables))
        check(batch, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", DIMS, ids=lambda d: f"{d[0]}v{d[1]}")
@pytest.mark.parametrize("target", [BESIDE, pytest.param(AVX512, marks=pytest.mark.amx)])
def test_on_vectors(target, dims, dtype, caplog):
    """Each group, with one KV head and with two; whatever has no kernel of its own the general one serves."""
    caplog.set_level(logging.ERROR, "tilewright")
    for operator in ("paged_decode", "paged_extend"):
        module(f"{operator}-{dtype}-general", target)
    with serving(target):
        for group in GROUPS:
            check_both(Size(*dims, group, 1 + group % 2, aliased=dims[0] != dims[1] and dims[0] > 500), TORCH[dtype])


@pytest.fixture(params=[EMULATED, pytest.param(REAL, marks=pytest.mark.amx)])
def tiles(request):
    with contextlib.ExitStack() as stack:
        if request.param == EMULATED:
            request.getfixturevalue("amx_emulator")
        stack.enter_context(serving(request.param))
        yield request.param


@pytest.mark.parametrize("dim, group", ON_TILES)
def test_on_tiles(tiles, dim, group, request):
    for operator in ("paged_decode", "paged_extend"):
        module(f"{operator}-bf16-g{group}-d{dim}", tiles)
    dispatch.kernel.cache_clear()
    assert store.load(Workload("paged_decode", "bf16", group, dim, dim)).target == tiles
    check_both(Size(dim, dim, group, 2, general=False), torch.bfloat16)


@pytest.mark.parametrize("operator", ["paged_decode", "paged_extend"])
@pytest.mark.parametrize("dtype, dims, why", [
    ("bf16", (13, 13), "multiples of 16"), ("bf16", (33, 55), "multiples of 16"),
    ("fp16", (128, 128), "bf16"),  # of its eleven bits, bf16 keeps eight
])  # fmt: skip
def test_what_tiles_do_not_take(operator, dtype, dims, why):
    with pytest.raises(UnsupportedWorkload, match=why):
        get_space(Workload(operator, dtype, 4, *dims), REAL)


@pytest.mark.parametrize("dims", [(13, 13), (33, 55)], ids=str)
def test_dims_that_do_not_fill_tiles_are_served_by_vectors(tiles, dims):
    for operator in ("paged_decode", "paged_extend"):
        module(f"{operator}-bf16-general")
    check_both(Size(*dims, 4, 2), torch.bfloat16)


@pytest.mark.parametrize("operator", ["paged_decode", "paged_extend"])
def test_fp16_is_served_by_vectors(tiles, operator):
    workload = Workload(operator, "fp16", 4, 128, 128)
    module(workload.name)
    assert store.load(workload).target != tiles
    check_both(Size(128, 128, 4, 2, general=False), torch.float16)
