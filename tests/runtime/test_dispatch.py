"""Which module serves a call: the specialised, the general with a warning, or none."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from batches import make_decode_batch

import tilewright
from tilewright.runtime import dispatch
from tilewright.runtime.errors import IntegrityError
from tilewright.runtime.paged import decode_attention
from tilewright.schedules.workload import Workload


def test_general_module_serves_with_one_warning(use_model, caplog):
    model = use_model(special=False)
    batch = make_decode_batch([5])
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        decode_attention(*batch.decode_arguments())
        decode_attention(*batch.decode_arguments())
    assert model.names() == ["paged_decode-f32-general"] * 2
    (record,) = caplog.records
    assert "paged_decode-f32-g2-d8" in record.getMessage() and "tilewright build" in record.getMessage()


def test_the_warning_says_why_a_module_that_is_there_does_not_serve(use_model, monkeypatch, caplog):
    """Casebook K04."""
    model = use_model()

    def load(workload):
        if not workload.general:
            error = tilewright.MissingModuleError(workload.name)
            error.unusable = ("/somewhere: definition revision: expected 2, got 1",)
            raise error
        return model.load(workload)

    monkeypatch.setattr(dispatch.store, "load", load)
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        decode_attention(*make_decode_batch([5]).decode_arguments())
    (record,) = caplog.records
    assert "not usable: /somewhere: definition revision: expected 2, got 1" in record.getMessage()


def test_a_plan_that_no_planner_knows_is_a_fault_of_its_artifact(use_model, monkeypatch):
    model = use_model()
    module = model.load(Workload("paged_decode", "f32", 2, 8, 8))
    module = SimpleNamespace(function=module.function, plan={"bogus": 1}, path=Path("root/name/module.so"))
    monkeypatch.setattr(dispatch.store, "load", lambda workload: module)
    with pytest.raises(IntegrityError, match="root/name: manifest: plan: got .*bogus.*expected block_q, chunk"):
        decode_attention(*make_decode_batch([5]).decode_arguments())


def test_strict_refuses_the_general_module(use_model, monkeypatch):
    use_model(special=False)
    monkeypatch.setenv("TILEWRIGHT_STRICT", "1")
    with pytest.raises(tilewright.MissingModuleError, match="paged_decode-f32-g2-d8"):
        decode_attention(*make_decode_batch([5]).decode_arguments())


def test_no_module_at_all(use_model):
    use_model(special=False, general=False)
    with pytest.raises(tilewright.MissingModuleError):
        decode_attention(*make_decode_batch([5]).decode_arguments())


@pytest.fixture
def gpu(monkeypatch):
    """A GPU's modules, by name: what a test puts there is found."""
    names = set()

    def load(workload, capability):
        assert capability == (9, 0)
        if workload.name in names:
            return SimpleNamespace(
                function=workload.name, plan={}, path=Path("x"), cut_next_loop=None, bind=lambda *a: None
            )
        raise tilewright.MissingModuleError(f"{workload.name}: Build it: tilewright build {workload.name}")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(dispatch.store, "load", load)
    dispatch.kernel.cache_clear()
    yield names
    dispatch.kernel.cache_clear()


GPU = torch.device("cuda", 0)


def test_extend_on_gpus_has_general_modules(gpu, caplog):
    gpu |= {"paged_extend-bf16-general", "paged_extend-bf16-kvfp8-general-tree", "paged_extend-bf16-g4-d128"}
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        assert dispatch.kernel("paged_extend", "bf16", 4, 128, 128, GPU).run == "paged_extend-bf16-g4-d128"
        assert not caplog.records
        assert dispatch.kernel("paged_extend", "bf16", 5, 96, 72, GPU).run == "paged_extend-bf16-general"
        last = dispatch.kernel("paged_extend", "bf16", 5, 96, 96, GPU, "fp8_e4m3", True)
    assert last.run == "paged_extend-bf16-kvfp8-general-tree"
    assert "tilewright build paged_extend-bf16-g5-d96v72 --target cuda-sm90a" in caplog.records[0].getMessage()


@pytest.mark.parametrize(
    "sizes",
    [
        ("paged_decode", 5, 96, 96, None),
        ("paged_extend", 5, 512, 512, None),
        ("paged_extend", 5, 100, 100, None),
        ("paged_extend", 5, 72, 72, "fp8_e4m3"),
    ],
)
def test_what_general_modules_of_gpus_do_not_serve_is_told(gpu, sizes):
    operator, group, dim, dim_vo, kv_dtype = sizes
    gpu |= {"paged_decode-bf16-general", "paged_extend-bf16-general", "paged_extend-bf16-kvfp8-general"}
    with pytest.raises(tilewright.MissingModuleError, match=f"tilewright build {operator}-bf16-.*g5-d{dim}"):
        dispatch.kernel(operator, "bf16", group, dim, dim_vo, GPU, kv_dtype)


def test_a_missing_general_module_does_not_hide_the_one_to_build(gpu):
    with pytest.raises(tilewright.MissingModuleError, match="tilewright build paged_extend-bf16-g5-d96"):
        dispatch.kernel("paged_extend", "bf16", 5, 96, 96, GPU)
