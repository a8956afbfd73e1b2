"""Fixtures of the kernel tests: the built modules of this checkout behind the public functions.

A test that takes `device` runs on the CPU and, with `-m cuda`, on a GPU, at the sizes and dtypes that GPUs serve.
"""

from dataclasses import replace

import pytest
import torch
from tolerances import PAGED

from tilewright.codegen.build import build
from tilewright.runtime import dispatch, store
from tilewright.runtime.errors import MissingModuleError
from tilewright.schedules.catalog import all_workloads

TARGET = "x86-avx2"


def pytest_collection_modifyitems(config, items):
    """Leave out what no kernel of a GPU serves: general sizes, f32, head dims of other than whole 16 bytes."""
    kept = [item for item in items if not hasattr(item, "callspec") or _served(item.callspec.params)]
    left_out = [item for item in items if item not in set(kept)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def _served(params):
    if params.get("device") != "cuda":
        return True
    row = params | params.get("row", {})
    size = row.get("size")
    dims = [row[name] for name in ("dim", "dim_vo") if name in row]
    return row.get("dtype") is not torch.float32 and not (size and size.general) and all(n % 8 == 0 for n in dims)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    """Where the tensors of the test are made."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    with torch.device(request.param):
        yield torch.device(request.param)


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

    def load(self, workload, capability=None):
        paged = workload.operator.startswith("paged")
        if capability is None:
            module = self._built(workload, paged)
        else:
            module = self._load(workload, capability=capability)
        plan = module.plan | {"chunk": 16, "min_split": 16} if paged and self.split else module.plan
        return replace(module, plan=plan)

    def _built(self, workload, paged):
        if workload not in all_workloads(TARGET) or (paged and self.general and not workload.general):
            raise MissingModuleError(workload.name)
        root = build(workload, TARGET).folder.parent.parent
        return self._load(workload, TARGET, root=root)


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
