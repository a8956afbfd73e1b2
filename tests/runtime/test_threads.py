"""Kernels on threads as serving has them: any number, nested, beside torch, in workers, on part of the machine."""

import concurrent.futures
import ctypes
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from amx_modules import BESIDE, REAL, module, serving
from batches import make_decode_batch, make_paged_batch

from tilewright import decode_attention, extend_attention
from tilewright.runtime.launcher import openmp_functions

MODULES = ("paged_decode-bf16-g4-d128", "paged_extend-bf16-g4-d128")
SIZES = {"num_qo_heads": 8, "num_kv_heads": 2, "dim": 128, "dtype": torch.bfloat16}
CPUS = sorted(os.sched_getaffinity(0))
needs_two = pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")


@pytest.fixture(params=[BESIDE, pytest.param(REAL, marks=pytest.mark.amx)])
def target(request):
    """The public functions run on modules of this target; torch's thread count is restored afterwards."""
    for name in MODULES:
        module(name, request.param)
    module("merge-bf16")
    before = torch.get_num_threads()
    with serving(request.param):
        yield request.param
    torch.set_num_threads(before)


def make_calls():
    """Calls without arguments, each with its own tensors: decode of one long request, of many, and extend."""
    alone, many = make_decode_batch([1500], **SIZES), make_decode_batch([1, 300, 17, 700, 64], **SIZES)
    mixed = make_paged_batch([0, 300, 20], [40, 1, 9], **SIZES)
    # Whether and where requests are split must not follow the number of threads, for results to be compared.
    options = {"return_lse": True, "batch_invariant": True}
    return [
        lambda: decode_attention(*alone.decode_arguments(), **options),
        lambda: decode_attention(*many.decode_arguments(), **options),
        lambda: extend_attention(*mixed.extend_arguments(), **options),
    ]


def results(calls):
    return [tensor for call in calls for tensor in call()]


def same(got, wanted):
    return all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("count", [1, 2, 3, 15, 16, 64])
def test_any_number_of_threads(target, count):
    calls = make_calls()
    torch.set_num_threads(1)
    wanted = results(calls)
    assert all(tensor.isfinite().all() for tensor in wanted)
    torch.set_num_threads(count)
    assert all(same(results(calls), wanted) for _ in range(5))


def test_many_python_threads_at_once(target):
    """Each has a team of its own; none waits for another, none sees another's workspaces or tasks."""
    wanted = results(make_calls())

    def work(_):
        calls = make_calls()
        return all(same(results(calls), wanted) for _ in range(10))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


@needs_two
def test_inside_another_parallel_region(target):
    """As an operator that another library runs from its own OpenMP loop."""
    calls = make_calls()
    wanted = results(calls)
    outcomes = []

    def body(_):
        outcomes.append(same(results(make_calls()), wanted))

    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(body)
    parallel = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel(openmp_functions()[0])(callback, None, 2, 0)
    assert outcomes == [True, True]
    assert same(results(calls), wanted), "and the pool works as before"


class Attended(torch.utils.data.Dataset):
    """What a kernel computes, as a data set."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.cat([tensor.flatten().float() for tensor in results(make_calls())])


def test_in_a_worker_of_a_data_loader(target):
    """A child by fork, after the parent's pool (and its tiles) have been used."""
    wanted = Attended()[0]
    loader = torch.utils.data.DataLoader(Attended(), num_workers=2, batch_size=None, multiprocessing_context="fork")
    assert all(torch.equal(got, wanted) for got in loader)
    assert torch.equal(Attended()[0], wanted)


def best(call, rounds=200):
    """Fastest of many calls in microseconds: what others do to this machine only adds."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return 1e6 * min(times)


@needs_two
def test_alternating_with_torch_costs_little(target):
    """One pool for both: with one of our own, spinning beside torch's, a pair costs milliseconds more."""
    batch = make_decode_batch([40] * 8, **SIZES)
    out = batch.out()
    x, y = torch.randn(1 << 18), torch.randn(1 << 18)

    def kernel():
        decode_attention(*batch.decode_arguments(), out=out)

    def operator():
        torch.add(x, y, out=x)

    def pair():
        kernel()
        operator()

    # 30 us is what the bench measures on a quiet machine; here others may run.
    extra = min(best(pair) - best(kernel) - best(operator) for _ in range(3))
    assert extra < 150, f"{extra:.0f} us"


# ---- in processes of their own

SERVE = """
import json, os, sys
sys.path.insert(0, {tests!r})
cpus = {cpus!r}
os.sched_setaffinity(0, cpus)
import torch
from test_threads import make_calls, results, same
from amx_modules import serving
torch.set_num_threads({threads})
with serving({target!r}):
    calls = make_calls()
    first = results(calls)
    stable = all(same(results(calls), first) for _ in range(20))
tasks = [int(name) for name in os.listdir("/proc/self/task")]
strayed = [task for task in tasks if not os.sched_getaffinity(task) <= set(cpus)]
print(json.dumps([stable, len(tasks), strayed, [tensor.double().sum().item() for tensor in first]]))
"""


def start(target, cpus, threads, **environment):
    script = SERVE.format(tests=str(Path(__file__).parent), cpus=set(cpus), threads=threads, target=target)
    path = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )  # fmt: skip


def finish(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    return json.loads(out)


@needs_two
def test_two_processes_on_disjoint_cpus(target):
    half = len(CPUS) // 2
    wanted = [tensor.double().sum().item() for tensor in results(make_calls())]
    for stable, _, strayed, sums in map(finish, [start(target, CPUS[:half], half), start(target, CPUS[half:], half)]):
        assert stable and not strayed
        assert sums == wanted


FAKE_CPUS = """
#define _GNU_SOURCE
#include <sched.h>
int sched_getaffinity(pid_t pid, size_t size, cpu_set_t *set) {
  (void)pid;
  CPU_ZERO_S(size, set);
  for (int cpu = 0; cpu < 64; cpu++) CPU_SET_S(cpu, size, set);
  return 0;
}
"""


@pytest.mark.parametrize("threads", [3, 15, 16, 33])
def test_more_threads_than_cpus(target, tmp_path, threads):
    """The launcher takes no more threads than there are CPUs; a container's limit or a wrong mask can make it."""
    library = tmp_path / "fake.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-xc", "-", "-o", str(library)],
        input=textwrap.dedent(FAKE_CPUS),
        text=True,
        check=True,
    )
    environment = {"LD_PRELOAD": str(library), "OMP_WAIT_POLICY": "passive"}
    stable, tasks, _, sums = finish(start(target, CPUS, threads, **environment))
    assert stable and tasks >= threads
    assert sums == [tensor.double().sum().item() for tensor in results(make_calls())]
