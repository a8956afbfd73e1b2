"""Which module serves a call: the specialised, the general with a warning, or none."""

import logging

import pytest
from batches import make_decode_batch

import tilewright
from tilewright.runtime.paged import decode_attention


def test_general_module_serves_with_one_warning(use_model, caplog):
    model = use_model(special=False)
    batch = make_decode_batch([5])
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        decode_attention(*batch.decode_arguments())
        decode_attention(*batch.decode_arguments())
    assert model.names() == ["paged_decode-f32-general"] * 2
    (record,) = caplog.records
    assert "paged_decode-f32-g2-d8" in record.getMessage() and "tilewright build" in record.getMessage()


def test_strict_refuses_the_general_module(use_model, monkeypatch):
    use_model(special=False)
    monkeypatch.setenv("TILEWRIGHT_STRICT", "1")
    with pytest.raises(tilewright.MissingModuleError, match="paged_decode-f32-g2-d8"):
        decode_attention(*make_decode_batch([5]).decode_arguments())


def test_no_module_at_all(use_model):
    use_model(special=False, general=False)
    with pytest.raises(tilewright.MissingModuleError):
        decode_attention(*make_decode_batch([5]).decode_arguments())
