"""`pytest -m amx`: what it needs, and what it says where it can show nothing."""

import subprocess
import sys
from pathlib import Path

import pytest
from amx_modules import REAL

from tilewright.runtime import features
from tilewright.schedules.targets import get_target

# The compiler cannot be imported, as on a machine that only serves.
RUN = """
import sys
sys.modules["tvm"] = None
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def run(*arguments):
    root = Path(__file__).resolve().parent.parent
    return subprocess.run(
        [sys.executable, "-c", RUN, *arguments], cwd=root, capture_output=True, text=True, check=False, timeout=240
    )


def test_the_marked_tests_are_found_without_the_compiler():
    done = run("-m", "amx", "--collect-only")
    assert done.returncode == 0, done.stdout[-3000:]
    for name in ("test_amx_kernels", "test_amx_hardware", "test_batch_invariance", "test_threads", "test_roofline"):
        assert f"{name}.py::" in done.stdout


@pytest.mark.skipif(not features.missing_features(get_target(REAL).features), reason="this CPU runs them")
def test_a_run_that_skips_everything_fails():
    done = run("-m", "amx", "tests/test_amx_hardware.py")
    assert done.returncode == 1, done.stdout[-3000:]
    assert "FAILED: -m amx: every test was skipped\n  Skipped: x86-amx cannot run here: no a" in done.stdout
    mixed = run("tests/test_amx_hardware.py", "tests/test_amx_kernels.py", "-k", "child_by_fork or never_chooses")
    assert mixed.returncode == 0 and "passed" in mixed.stdout, "only a run of marked tests is held to that"
