"""Fixtures of the whole suite."""

pytest_plugins = ["amx_emulator"]
