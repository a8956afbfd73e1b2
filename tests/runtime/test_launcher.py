"""The OpenMP launcher: which library it runs on, how it shares out work, what it leaves alone."""

import ctypes
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import toys

from tilewright.codegen.build import build_launcher
from tilewright.runtime.launcher import Launcher

TASK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int64 * 2), ctypes.c_void_p)


@pytest.fixture(scope="module")
def toy_root() -> Path:
    return toys.built()


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    """The launcher's C functions, bound as in serving."""
    launcher = Launcher(build_launcher(toys.TARGET, tmp_path_factory.mktemp("launcher")))
    library = ctypes.CDLL(str(launcher.path))
    library.tilewright_alloc_workspace.restype = ctypes.c_void_p
    library.tilewright_alloc_workspace.argtypes = [
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_uint64,
        ctypes.c_int,
        ctypes.c_int,
    ]
    library.tilewright_free_workspace.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    library.tilewright_workspace_bytes.restype = ctypes.c_int64
    return library


@pytest.fixture
def threads():
    """torch's thread count, restored afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def serve(root: Path, body: str, *, before: str = "") -> str:
    """Run `body` in a serving process: `load(toy)` gives a function, `right(function)` checks it; its output."""
    script = f"""
import ctypes, os, sys, threading
from pathlib import Path
sys.path.insert(0, {str(Path(toys.__file__).parent)!r})
{textwrap.dedent(before)}
import torch
import toys
from tilewright.codegen.doctor import openmp_libraries
from tilewright.runtime import store
ROOT = Path({str(root)!r})
def load(toy, root=ROOT):
    return store.load(toy, toys.TARGET, root=root).function
x = torch.randn(301, 64)
out = torch.zeros(301, 64)
def right(function, *rest):
    out.fill_(torch.nan)
    function(x, out, *rest)
    assert torch.equal(out, 2 * x + 1)
{textwrap.dedent(body)}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


# ---- in a process without the compiler ----


def test_parallel_serial_and_workspace_modules_run_without_tvm_on_torchs_libgomp(toy_root):
    serve(
        toy_root,
        """
        right(load(toys.SERIAL))
        right(load(toys.PARALLEL))
        right(load(toys.WORKSPACE), 64000)
        assert not [name for name in sys.modules if name == "tvm" or name.startswith("tvm.")]
        assert not [line for line in open("/proc/self/maps") if "libtvm_runtime" in line or "libtvm_compiler" in line]
        libraries = openmp_libraries()
        assert len(libraries) == 1 and str(Path(torch.__file__).parent) in libraries.pop(), openmp_libraries()
        """,
    )


def test_another_libgomp_loaded_first_is_not_taken(toy_root):
    pytest.importorskip("xgboost")
    serve(
        toy_root,
        """
        from tilewright.runtime.launcher import openmp_functions
        assert len(openmp_libraries()) == 2, openmp_libraries()
        torch_folder = str(Path(torch.__file__).parent)
        address = openmp_functions()[0]
        for line in open("/proc/self/maps"):
            low, high = (int(part, 16) for part in line.split()[0].split("-"))
            if low <= address < high:
                assert torch_folder in line, line
                break
        else:
            raise AssertionError("not mapped")
        right(load(toys.PARALLEL))
        """,
        before="import xgboost",
    )


FOREIGN = """
runtime = {runtime}
import tvm_ffi, tvm_ffi.libinfo
if runtime:
    from importlib.util import find_spec
    folder = Path(find_spec("tvm").origin).parent / "lib"
    runtime = ctypes.CDLL(str(folder / "libtvm_runtime.so"), ctypes.RTLD_GLOBAL)
FOREIGN_ROOT = Path({foreign!r})
path = str(FOREIGN_ROOT / toys.TARGET / toys.PARALLEL.name / "module.so")
def pointer(where=path):
    library = ctypes.CDLL(where, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    return ctypes.c_void_p.in_dll(library, "__TVMBackendParallelLaunch").value
def load_foreign():
    function = tvm_ffi.load_module(path)["merge"]
    # As any tvm-ffi user has it: null without the runtime library, the runtime library's function with it.
    expected = ctypes.cast(runtime.TVMBackendParallelLaunch, ctypes.c_void_p).value if runtime else None
    assert pointer() == expected, (pointer(), expected)
    return function
def check_foreign(function):
    load_again = pointer()
    expected = ctypes.cast(runtime.TVMBackendParallelLaunch, ctypes.c_void_p).value if runtime else None
    assert load_again == expected
    if runtime:
        right(function)
"""


@pytest.mark.parametrize("runtime", [False, True], ids=["ffi-alone", "with-libtvm_runtime"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_foreign_parallel_module_runs_as_it_did(toy_root, tmp_path, runtime, order):
    foreign = shutil.copytree(toy_root, tmp_path / "foreign")
    ours = """
    right(load(toys.PARALLEL))
    right(load(toys.WORKSPACE), 64000)
    assert pointer(str(ROOT / toys.TARGET / toys.PARALLEL.name / "module.so")) == ctypes.cast(
        ctypes.CDLL(str(store._launchers["cpu"].path)).tilewright_launch, ctypes.c_void_p).value
    """
    ours = textwrap.dedent(ours)
    theirs = "function = load_foreign()\n"
    body = (
        theirs + ours if order == "before" else ours + theirs
    ) + "check_foreign(function)\nright(load(toys.PARALLEL))\n"
    serve(toy_root, FOREIGN.format(runtime=runtime, foreign=str(foreign)) + body)


def test_a_foreign_module_opened_globally_does_not_take_over_our_pointers(toy_root, tmp_path):
    """Its symbols come first in the global scope: ours must be bound to themselves (-Bsymbolic)."""
    foreign = shutil.copytree(toy_root, tmp_path / "foreign")
    path = foreign / toys.TARGET / toys.PARALLEL.name / "module.so"
    serve(
        toy_root,
        f"""
        import tvm_ffi
        ctypes.CDLL({str(path)!r}, mode=ctypes.RTLD_GLOBAL)
        right(load(toys.PARALLEL))
        """,
    )


def test_a_failing_task_of_a_worker_thread_reports_its_error(toy_root):
    serve(
        toy_root,
        """
        torch.set_num_threads(2)
        function = load(toys.WORKSPACE)
        for _ in range(20):
            try:
                function(x, out, 1 << 50)
            except MemoryError as error:
                assert "workspace" in str(error)
            else:
                raise AssertionError("no error")
        right(function, 640)
        """,
    )


# ---- the functions themselves ----


def run(library: ctypes.CDLL, num_task: int = 0, fail: int = -1) -> tuple[int, list[int], int, set[int]]:
    """Launch a counting task: (result, task ids, number of tasks told, threads used)."""
    lock, ids, told, used = threading.Lock(), [], set(), set()

    def task(task_id, env, data):
        with lock:
            ids.append(task_id)
            told.add(env.contents[1] & 0xFFFFFFFF)
            used.add(threading.get_ident())
        return -1 if task_id == fail else 0

    callback = TASK(task)
    result = library.tilewright_launch(callback, None, num_task)
    assert len(told) == 1
    return result, sorted(ids), told.pop(), used


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_more_tasks_than_threads_each_run_once(library, threads):
    threads(2)
    result, ids, told, _ = run(library)
    assert (result, told) == (0, 16)
    assert ids == list(range(16))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_given_number_of_tasks_is_kept(library, threads):
    threads(2)
    assert run(library, num_task=5)[1:3] == ([0, 1, 2, 3, 4], 5)


def test_one_thread_runs_one_task_in_place(library, threads):
    threads(1)
    result, ids, told, used = run(library)
    assert (result, ids, told, used) == (0, [0], 1, {threading.get_ident()})


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_set_num_threads_holds_in_threads_that_never_used_torch(library, threads):
    results = []
    for count in (1, 2):
        threads(count)
        thread = threading.Thread(target=lambda: results.append(run(library)[2]))
        thread.start()
        thread.join()
    assert results == [1, 16]


def test_thread_count_follows_the_affinity_mask(library, threads):
    threads(4)
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert run(library)[1:3] == ([0], 1)
    finally:
        os.sched_setaffinity(0, before)
    assert run(library)[2] == (1 if len(before) == 1 else 8 * min(4, len(before)))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_loop_inside_a_loop_runs_serially(library, threads):
    threads(2)
    inner = []

    def task(task_id, env, data):
        inner.append(run(library)[1:3])
        return 0

    assert library.tilewright_launch(TASK(task), None, 4) == 0
    assert inner == [([0], 1)] * 4


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_task_that_fails_makes_the_launch_fail(library, threads):
    threads(2)
    assert run(library, fail=3)[0] == -1


def workspace(library: ctypes.CDLL, size: int) -> int:
    address = library.tilewright_alloc_workspace(1, 0, size, 2, 32)
    assert address and address % 64 == 0
    ctypes.memset(address, 0xFF, size)
    return address


def test_workspaces_are_aligned_distinct_and_reused(library):
    first, second = workspace(library, 1000), workspace(library, 1000)
    assert abs(first - second) >= 1000
    library.tilewright_free_workspace(1, 0, second)
    assert workspace(library, 900) == second
    library.tilewright_free_workspace(1, 0, second)
    library.tilewright_free_workspace(1, 0, first)


def test_a_threads_workspaces_go_with_it(library):
    before = library.tilewright_workspace_bytes()
    held = []

    def use():
        blocks = [workspace(library, 1 << 16) for _ in range(4)]
        for block in blocks:
            library.tilewright_free_workspace(1, 0, block)
        held.append(library.tilewright_workspace_bytes() - before >= 4 << 16)

    for _ in range(8):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    assert held == [True] * 8
    deadline = time.monotonic() + 10
    while library.tilewright_workspace_bytes() != before and time.monotonic() < deadline:
        time.sleep(0.01)  # join() returns a moment before the thread's destructors have run
    assert library.tilewright_workspace_bytes() == before


def test_the_cache_is_bounded_and_adapts(library):
    bytes_held = []

    def use():
        before = library.tilewright_workspace_bytes()
        for block in [workspace(library, 8 << 20) for _ in range(8)]:
            library.tilewright_free_workspace(1, 0, block)
        bytes_held.append(library.tilewright_workspace_bytes() - before)
        # Small blocks fill the cache no longer than until something larger is needed again and again.
        for _ in range(12):
            library.tilewright_free_workspace(1, 0, workspace(library, 20 << 20))
        bytes_held.append(library.tilewright_workspace_bytes() - before)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert bytes_held[0] <= 32 << 20
    assert 20 << 20 <= bytes_held[1] <= 32 << 20
