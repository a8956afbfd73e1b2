"""Fixtures of the kernel tests: the built modules of this checkout behind the public functions."""

from types import SimpleNamespace

import pytest
import torch
from tolerances import PAGED

from tilewright.codegen.build import build
from tilewright.runtime import dispatch, store
from tilewright.runtime.errors import MissingModuleError
from tilewright.schedules.catalog import all_workloads

TARGET = "x86-avx2"


@pytest.fixture(params=PAGED, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request):
    return request.param


class Modules:
    """Stands before the store: x86-avx2 modules of this checkout only, built where they are not up to date.

    Attributes:
        general: hide the specialised modules. split: tell the planner that ranges may be cut every 16 keys.
    """

    def __init__(self, load):
        self._load, self.general, self.split = load, False, False

    def use(self, size=None, *, general=False, split=False):
        general = general if size is None else size.general
        if (general, split) != (self.general, self.split):
            self.general, self.split = general, split
            dispatch.kernel.cache_clear()

    def load(self, workload):
        paged = workload.operator.startswith("paged")
        if workload not in all_workloads(TARGET) or (paged and self.general and not workload.general):
            raise MissingModuleError(workload.name)
        root = build(workload, TARGET).folder.parent.parent
        module = self._load(workload, TARGET, root=root)
        plan = module.plan | {"chunk": 16, "min_split": 16} if paged and self.split else module.plan
        return SimpleNamespace(function=module.function, plan=plan)


@pytest.fixture(scope="module")
def loaded():
    dispatch.kernel.cache_clear()
    modules = Modules(store.load)
    yield modules
    dispatch.kernel.cache_clear()


@pytest.fixture(autouse=True)
def modules(loaded, monkeypatch):
    monkeypatch.setattr(store, "load", loaded.load)
    monkeypatch.delenv("TILEWRIGHT_STRICT", raising=False)
    monkeypatch.setenv("TILEWRIGHT_CHECK", "1")
    loaded.use()
    return loaded


@pytest.fixture
def many_threads(monkeypatch):
    """The planner cuts work for 16 threads; the launcher asks torch itself."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
