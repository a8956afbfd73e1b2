"""Worker processes of the search: they persist, fail aloud and end with their parent."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from search_toy import nothing, pid, refuse

from tilewright.codegen.search.worker import Pool, WorkerError


def test_workers_persist_between_calls(tmp_path):
    with Pool(1, nothing, tmp_path / "log", {}, lambda: False) as pool:
        pids = [outcome.value for _ in range(3) for _, outcome in pool.map(pid, [(0,), (1,)], 30)]
    assert len(pids) == 6
    assert len(set(pids)) == 1


def test_a_worker_that_cannot_start_is_not_a_failing_candidate(tmp_path):
    with (
        Pool(1, refuse, tmp_path / "log", {}, lambda: False) as pool,
        pytest.raises(WorkerError, match="no such compiler"),
    ):
        list(pool.map(pid, [(0,)], 30))
    assert "no such compiler" in (tmp_path / "log").read_text()


def test_a_hanging_worker_ends_with_a_killed_parent(tmp_path):
    program = (
        "import sys; from pathlib import Path; import search_toy as toy\n"
        "from tilewright.codegen.search.worker import Pool\n"
        "pool = Pool(1, toy.nothing, Path(sys.argv[1]), {}, lambda: False)\n"
        "print(next(pool.map(toy.pid, [(0,)], 60))[1].value, flush=True)\n"
        "list(pool.map(toy.sleep, [(600,)], 600))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command_line = [sys.executable, "-c", program, str(tmp_path / "log")]
    with subprocess.Popen(command_line, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        parent.kill()
    end = time.monotonic() + 20
    while (state := state_of(child)) not in ("", "Z") and time.monotonic() < end:
        time.sleep(0.05)
    assert state in ("", "Z")  # gone, or dead and not yet collected


def state_of(process):
    """The letter of the process's state, "" where there is no such process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""
