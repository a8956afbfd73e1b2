"""Fixtures of the host-side tests: kernels replaced by the executable interface (tests/abi_model.py)."""

import pytest
from abi_model import ModelStore

from tilewright.runtime import dispatch


@pytest.fixture
def use_model(monkeypatch):
    """A function that puts a ModelStore (made of its keyword arguments) in the store's place, and returns it."""
    dispatch.kernel.cache_clear()

    def use(**options) -> ModelStore:
        dispatch.kernel.cache_clear()
        store = ModelStore(**options)
        monkeypatch.setattr(dispatch.store, "load", store.load)
        return store

    monkeypatch.setenv("TILEWRIGHT_CHECK", "1")
    yield use
    dispatch.kernel.cache_clear()


@pytest.fixture
def model(use_model):
    """The store of the model with its default planner parameters; checked mode is on."""
    return use_model()
