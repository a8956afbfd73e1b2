"""Names and keys of workloads: what records and artifacts are found by."""

import pytest

from tilewright.schedules.catalog import all_workloads
from tilewright.schedules.targets import TARGETS
from tilewright.schedules.workload import Workload, WorkloadError

# As they were before workloads had a kv_dtype and trees.
KEYS = {
    "paged_decode-bf16-g4-d128": "9bc219ce7b8df19f1c010780e11baf094c9893f97ba432fb622b74a66a43399e",
    "paged_extend-f32-general": "80144fe4ec94cc6cd27c92fc6f43911d02afb15e6dade052c0762082863272f3",
    "merge-fp16": "38393ee8be25d5fc647494e8394a6a48e0aeebcd205a85efdaf3d48e4521b651",
    "lightning_extend-bf16-d128": "37048ee5509899479fc22a96e32f9b2b703e91c07d7091a684e11826249e5d4c",
    "paged_decode-bf16-g16-d576v512": "ba016abfac9cc9f6bebe5ccb7b19f0dedbcac686bab414a532e477f2501529f6",
}
NAMES = {
    "paged_decode-bf16-kvfp8-g4-d128": Workload("paged_decode", "bf16", 4, 128, 128, "fp8_e4m3"),
    "write_kv-bf16-kvfp8": Workload("write_kv", "bf16", kv_dtype="fp8_e4m3"),
    "paged_extend-bf16-kvfp8-general-tree": Workload("paged_extend", "bf16", kv_dtype="fp8_e4m3", tree=True),
    "paged_extend-fp16-g3-d64v32-tree": Workload("paged_extend", "fp16", 3, 64, 32, tree=True),
}


@pytest.mark.parametrize("name", KEYS)
def test_older_keys_stand(name):
    assert Workload.parse(name).key == KEYS[name]


@pytest.mark.parametrize("name", NAMES)
def test_names_of_fp8_pools_and_trees(name):
    assert NAMES[name].name == name
    assert Workload.parse(name) == NAMES[name]


def test_every_workload_has_a_name_and_a_key_of_its_own():
    every = {w for target in TARGETS for w in all_workloads(target)}
    assert {Workload.parse(w.name) for w in every} == every
    assert len({w.key for w in every}) == len(every)


@pytest.mark.parametrize(("fields", "message"), [
    ({"operator": "merge", "kv_dtype": "fp8_e4m3"}, "kv_dtype: merge has no KV pool"),
    ({"operator": "lightning_decode", "kv_dtype": "fp8_e4m3"}, "kv_dtype: lightning_decode has no KV pool"),
    ({"operator": "paged_decode", "kv_dtype": "fp8_e5m2"}, "kv_dtype: got 'fp8_e5m2', expected None or"),
    ({"operator": "paged_decode", "tree": True}, "tree: paged_decode has no mask among new tokens"),
])  # fmt: skip
def test_impossible_fields(fields, message):
    with pytest.raises(WorkloadError, match=message):
        Workload(dtype="bf16", **fields)


@pytest.mark.parametrize("name", [
    "paged_decode-bf16-g4-d128-kvfp8", "paged_extend-bf16-tree-general", "paged_decode-bf16-general-tree",
    "paged_decode-bf16-kvfp9-general",
])  # fmt: skip
def test_names_of_nothing(name):
    with pytest.raises(WorkloadError):
        Workload.parse(name)
