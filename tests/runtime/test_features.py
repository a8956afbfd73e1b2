import ctypes
import errno
import os
import types

import pytest

from tilewright.runtime import features
from tilewright.schedules.targets import TARGETS, get_target

XEON = """processor\t: 0
vendor_id\t: GenuineIntel
flags\t\t: fpu avx avx2 fma f16c avx512f amx_bf16 amx_tile amx_int8
bugs\t\t: spectre_v1

processor\t: 1
flags\t\t: fpu
"""


@pytest.fixture
def cpu(monkeypatch):
    """Give this process another CPU's features (without the permission for tiles)."""

    def become(*names: str, permission: bool = False) -> None:
        monkeypatch.setattr(features, "cpu_features", lambda: frozenset(names))
        monkeypatch.setattr(features, "amx_permission", lambda: permission)

    return become


def test_parse_cpuinfo_reads_the_first_processor():
    assert features.parse_cpuinfo(XEON) == {
        "fpu",
        "avx",
        "avx2",
        "fma",
        "f16c",
        "avx512f",
        "amx_bf16",
        "amx_tile",
        "amx_int8",
    }
    assert features.parse_cpuinfo("Features: fp asimd\n") == frozenset()


def test_this_machine_has_features_and_they_are_read_once():
    assert "fpu" in features.cpu_features()
    assert features.cpu_features() is features.cpu_features()


def test_tiles_count_only_with_permission(cpu):
    cpu("avx2", "amx_tile", "amx_bf16")
    assert features.usable_features() == {"avx2"}
    assert features.missing_features(["avx2", "amx_tile"]) == ["amx_tile"]
    cpu("avx2", "amx_tile", "amx_bf16", permission=True)
    assert features.missing_features(["avx2", "amx_tile"]) == []


def test_permission_is_not_asked_for_without_need(cpu, monkeypatch):
    cpu("avx2", "amx_tile")
    monkeypatch.setattr(features, "amx_permission", lambda: pytest.fail("asked"))
    assert features.missing_features(["avx2"]) == []


def test_no_permission_where_there_are_no_tiles(monkeypatch):
    monkeypatch.setattr(features, "cpu_features", lambda: frozenset({"avx2"}))
    features.amx_permission.cache_clear()
    assert not features.amx_permission()
    features.amx_permission.cache_clear()


@pytest.fixture
def kernel_says(monkeypatch):
    """Let the kernel answer requests for tiles with this errno, on a CPU that has them; the list of requests."""
    features.amx_permission.cache_clear()
    monkeypatch.setattr(features, "cpu_features", lambda: frozenset({"avx2", "amx_tile"}))
    requests = []

    def answer(error: int) -> list[tuple[int, ...]]:
        def syscall(*arguments):
            requests.append(tuple(argument.value for argument in arguments))
            ctypes.set_errno(error)
            return -1 if error else 0

        fake = types.SimpleNamespace(syscall=syscall)
        monkeypatch.setattr(features.ctypes, "CDLL", lambda name, use_errno: fake)
        return requests

    yield answer
    features.amx_permission.cache_clear()


def test_tiles_are_asked_for_once(kernel_says):
    requests = kernel_says(0)
    for _ in range(2):
        assert features.missing_features(["avx2", "amx_tile"]) == []
    assert requests == [(158, 0x1023, 18)], "arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)"
    child = os.fork()
    if not child:  # inherited: nothing to ask for
        os._exit(features.missing_features(["amx_tile"]) != [] or len(requests) != 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_refusal_is_one_warning(kernel_says, caplog):
    requests = kernel_says(errno.EPERM)
    for _ in range(3):
        assert features.missing_features(["avx2", "amx_tile"]) == ["amx_tile"]
        assert features.missing_features(["avx2"]) == []
    assert len(requests) == 1
    [record] = caplog.records
    assert record.levelname == "WARNING" and "Operation not permitted" in record.message


def test_emulated_features_are_usable_inside_the_block_only(cpu):
    cpu("avx2")
    with features.emulated("amx_tile"):
        with features.emulated("amx_bf16"):
            assert features.missing_features(["avx2", "amx_tile", "amx_bf16"]) == []
        assert features.declared() == {"amx_tile"}
        assert features.missing_features(["amx_bf16"]) == ["amx_bf16"]
    assert features.declared() == frozenset()
    assert features.missing_features(["amx_tile"]) == ["amx_tile"]


def test_targets_grow_in_what_they_require():
    assert set(get_target("x86-avx2").features) < set(get_target("x86-amx").features)
    assert set(get_target("x86-amx-emulated").features) < set(get_target("x86-amx").features)
    assert [name for name, target in TARGETS.items() if not target.packaged] == ["x86-amx-emulated"]
    with pytest.raises(ValueError, match="expected one of x86-avx2"):
        get_target("x86")
