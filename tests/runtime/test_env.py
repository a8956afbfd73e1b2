import logging
from pathlib import Path

import pytest

from tilewright.runtime import env


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


def test_defaults_serve():
    assert {variable.name: variable.get() for variable in env.VARIABLES} == {
        "TILEWRIGHT_MODULE_PATH": (),
        "TILEWRIGHT_CACHE_DIR": None,
        "TILEWRIGHT_BUILD_POLICY": "never",
        "TILEWRIGHT_TARGET": None,
        "TILEWRIGHT_STRICT": False,
        "TILEWRIGHT_CHECK": False,
        "TILEWRIGHT_CUDA_TOOLKIT": None,
        "TILEWRIGHT_LOG": "warning",
    }


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        (env.MODULE_PATH, "/a:~/b:", (Path("/a"), Path.home() / "b")),
        (env.CACHE_DIR, "/c", Path("/c")),
        (env.BUILD_POLICY, "missing", "missing"),
        (env.STRICT, "1", True),
        (env.CHECK, "0", False),
        (env.CHECK, "", False),
    ],
)
def test_values_are_typed_and_read_at_use(monkeypatch, variable, text, value):
    monkeypatch.setenv(variable.name, text)
    assert variable.get() == value


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        (env.STRICT, "true", "0 or 1"),
        (env.BUILD_POLICY, "sometimes", "one of never, missing, always"),
        (env.CACHE_DIR, "~no-such-user/x", "a folder"),
        (env.MODULE_PATH, "/a:~no-such-user/x", "a folder"),
    ],
)
def test_a_wrong_value_names_the_variable_and_what_it_takes(monkeypatch, variable, text, expected):
    monkeypatch.setenv(variable.name, text)
    with pytest.raises(env.EnvironmentVariableError, match=f"{variable.name}: got '{text}', expected {expected}"):
        variable.get()


def test_the_log_level_is_that_of_the_variable(monkeypatch):
    base = logging.getLogger("tilewright")
    level = base.level
    try:
        env.get_logger.cache_clear()
        assert env.get_logger("store").getEffectiveLevel() == logging.getLogger().level
        monkeypatch.setenv("TILEWRIGHT_LOG", "debug")
        env.get_logger.cache_clear()
        assert env.get_logger("store").getEffectiveLevel() == logging.DEBUG
    finally:
        base.setLevel(level)
        env.get_logger.cache_clear()
