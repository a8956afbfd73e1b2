"""Hooks and fixtures of the whole suite."""

import pytest
from amx_modules import COMPILER, REAL

from tilewright.runtime import features
from tilewright.schedules.targets import get_target

pytest_plugins = ["amx_emulator"]
NOTHING_RAN = pytest.StashKey[bool]()

# Without a compiler, on a machine that only serves, what is about schedules and their search cannot be imported.
collect_ignore_glob = [] if COMPILER else ["schedules/*", "codegen/test_search*"]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Tests marked `amx` run on tiles of the processor or not at all."""
    if item.get_closest_marker("amx"):
        missing = features.missing_features(get_target(REAL).features)
        if missing:
            pytest.skip(f"{REAL} cannot run here: no {', '.join(missing)}")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    """A run of marked tests (-m) that skips all of them has shown nothing, and must not look as if it had."""
    results = session.config.pluginmanager.get_plugin("terminalreporter").stats
    ran = any(results.get(outcome) for outcome in ("passed", "failed", "error", "xfailed", "xpassed"))
    if session.config.option.markexpr and results.get("skipped") and not ran:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        session.config.stash[NOTHING_RAN] = True


def pytest_terminal_summary(terminalreporter, config):
    """The reason of a failure that no test has."""
    if NOTHING_RAN in config.stash:
        reasons = {report.longrepr[2] for report in terminalreporter.stats["skipped"]}
        terminalreporter.write_line(f"FAILED: -m {config.option.markexpr}: every test was skipped", red=True)
        for reason in sorted(reasons):
            terminalreporter.write_line(f"  {reason}")
