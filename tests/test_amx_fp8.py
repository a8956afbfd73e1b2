"""Pools of fp8 e4m3 on tiles: converted as they are gathered, exact in decode, rounded to bf16 in extend."""

import pytest
import torch
from amx_modules import EMULATED, REAL, module, serving
from paged_calls import check, run
from paged_sizes import Size, decode_batch, paged_batch

from tilewright import decode_attention
from tilewright.runtime import dispatch, store
from tilewright.schedules.paged_attention import reference
from tilewright.schedules.workload import Workload

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SIZE = Size(128, 128, 4, 2, general=False)
SCALES = {"k_scale": 0.5, "v_scale": 0.3}
OPTIONS = [{}, {"window": 40}, {"logit_cap": 5.0}, {"window": 5, "logit_cap": 2.0, "sm_scale": 0.4}]


@pytest.fixture(params=[EMULATED, pytest.param(REAL, marks=pytest.mark.amx)], autouse=True)
def tiles(request):
    if request.param == EMULATED:
        request.getfixturevalue("amx_emulator")
    with serving(request.param):
        for operator in ("paged_decode", "paged_extend"):
            module(f"{operator}-bf16-kvfp8-g4-d128", request.param)
        module("merge-bf16")
        dispatch.kernel.cache_clear()
        workload = Workload("paged_decode", "bf16", 4, 128, 128, "fp8_e4m3")
        assert store.load(workload).target == request.param
        yield request.param


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_decode(options):
    batch = decode_batch(SIZE, [130, 1, 0, 64, 900], dtype=BF16).to_fp8(**SCALES)
    sinks = torch.linspace(-2, 2, SIZE.group * SIZE.kv_heads)
    plain = check(batch, decode=True, sinks=sinks, **SCALES, **options)[0]
    assert (run(batch, decode=True, sinks=sinks, **options)[0] - plain).abs().max() > 1e-2, "scales have an effect"


@pytest.mark.parametrize("from_pool", [False, True], ids=["new keys", "pool"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_extend(options, from_pool):
    batch = paged_batch(SIZE, [129, 40, 7, 0], [9, 1, 0, 140], dtype=BF16, from_pool=from_pool).to_fp8(**SCALES)
    check(batch, sinks=torch.linspace(-2, 2, SIZE.group * SIZE.kv_heads), **SCALES, **options)


def test_every_code():
    """All 256 codes as values, subnormal ones and NaN too: of one key, out is the value."""
    codes = torch.arange(256, dtype=torch.uint8).view(2, 1, 128).view(E4M3)
    zeros = torch.zeros(2, 1, 128, dtype=BF16).to(E4M3)
    q = torch.ones(2, 4, 128, dtype=BF16)
    paging = torch.arange(2, dtype=torch.int32)[:, None], torch.arange(2), torch.ones(2).long()
    out = decode_attention(q, zeros, codes, *paging, v_scale=0.5)
    wanted = (torch.tensor(reference.e4m3_values()) / 2).to(BF16).view(2, 1, 128).expand(out.shape)
    assert torch.equal(out.nan_to_num(7), wanted.nan_to_num(7))
