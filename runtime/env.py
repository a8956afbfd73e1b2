"""Every environment variable that tilewright reads, typed. Read at use, never at import.

`tilewright env` prints this table with the values in force.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Generic, TypeVar

from tilewright.runtime.errors import Error

T = TypeVar("T")
_environment: Mapping[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]


class EnvironmentVariableError(Error, ValueError):
    """A TILEWRIGHT_* variable holds a value that it cannot have."""


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One variable: `get()` gives its typed value or the default where it is unset or empty.

    Attributes:
        name: with its TILEWRIGHT_ prefix.
        parse: text to value; raises ValueError saying what is expected.
        default: the value where unset.
        doc: one line for the table.
    """

    name: str
    parse: Callable[[str], T]
    default: T
    doc: str

    @cached_property
    def _encoded(self) -> bytes:
        return os.fsencode(self.name)

    @property
    def raw(self) -> str:
        """The text as set, "" where unset."""
        return os.environ.get(self.name, "")

    def get(self) -> T:
        """The typed value.

        Raises:
            EnvironmentVariableError: the text is not one of the values it may have.
        """
        # os.environ.get costs microseconds where a variable is not set, and every call of attention asks for one.
        if self._encoded not in _environment:
            return self.default
        text = self.raw
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise EnvironmentVariableError(f"{self.name}: got {text!r}, expected {error}") from None


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("0 or 1")
    return text == "1"


def _choice(*values: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in values:
            raise ValueError(f"one of {', '.join(values)}")
        return text

    return parse


def _folder(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError("a folder (there is no user of that name)") from None


def _paths(text: str) -> tuple[Path, ...]:
    return tuple(_folder(part) for part in text.split(os.pathsep) if part)


def _path(text: str) -> Path | None:
    return _folder(text)


def _text(text: str) -> str | None:
    return text


MODULE_PATH: Variable[tuple[Path, ...]] = Variable(
    "TILEWRIGHT_MODULE_PATH",
    _paths,
    (),
    f"folders of built modules (<folder>/<target>/<workload>/), separated by '{os.pathsep}', searched first",
)
CACHE_DIR: Variable[Path | None] = Variable(
    "TILEWRIGHT_CACHE_DIR", _path, None, "the user cache of built modules; unset: the platform's cache folder"
)
BUILD_POLICY = Variable(
    "TILEWRIGHT_BUILD_POLICY",
    _choice("never", "missing", "always"),
    "never",
    "may loading a module build it first (needs the tune extra): never, missing, or always (whatever is out of date)",
)
TARGET = Variable(
    "TILEWRIGHT_TARGET", _text, None, "use modules of this target only; unset: the best usable one per workload"
)
STRICT = Variable(
    "TILEWRIGHT_STRICT", _flag, False, "1: a call that only a general module serves is a MissingModuleError"
)
CHECK = Variable("TILEWRIGHT_CHECK", _flag, False, "1: checked mode, index values are validated in every call (slow)")
CUDA_TOOLKIT: Variable[Path | None] = Variable(
    "TILEWRIGHT_CUDA_TOOLKIT",
    _path,
    None,
    "build CUDA modules with the CUDA 13 toolkit in this folder; unset: with the packages of the cuda extra",
)
LOG = Variable(
    "TILEWRIGHT_LOG", _choice("debug", "info", "warning", "error"), "warning", "level of the tilewright logger"
)

VARIABLES: tuple[Variable, ...] = (MODULE_PATH, CACHE_DIR, BUILD_POLICY, TARGET, STRICT, CHECK, CUDA_TOOLKIT, LOG)


@cache
def get_logger(part: str) -> logging.Logger:
    """The logger "tilewright.<part>", at the level of TILEWRIGHT_LOG where that is set.

    Where the application has configured no logging, a set variable also makes the messages go to standard error.
    """
    if LOG.raw:
        base = logging.getLogger("tilewright")
        base.setLevel(LOG.get().upper())
        if not base.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
            base.addHandler(handler)
    return logging.getLogger(f"tilewright.{part}")
