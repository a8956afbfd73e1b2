"""Fixtures of the whole suite."""

import re

import pytest

pytest_plugins = ["amx_emulator"]


def pytest_sessionfinish(session):
    """`-m cuda` (or amx) asks for hardware: a run of it that skips everything has shown nothing, and fails."""
    asked = re.fullmatch(r"cuda|amx", session.config.option.markexpr.strip())
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if asked and reporter is not None and not session.config.option.collectonly and not reporter.stats.get("passed"):
        reporter.write_line(f"-m {asked[0]}: nothing ran; expected the hardware to be there", red=True)
        session.exitstatus = max(session.exitstatus, pytest.ExitCode.TESTS_FAILED)
