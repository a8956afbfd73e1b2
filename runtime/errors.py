"""What can go wrong between asking for a kernel and calling it. Messages say what, where, expected, got, remedy."""

from __future__ import annotations


class Error(Exception):
    """Base of tilewright's own errors. Wrong arguments of a call stay ValueError, TypeError, NotImplementedError."""


class MissingModuleError(Error, LookupError):
    """No usable module serves the workload; the message lists what was tried and what builds it.

    Attributes:
        unusable: what is wrong with each artifact that is there, () where there is none.
    """

    unusable: tuple[str, ...] = ()


class IntegrityError(Error):
    """A file of an artifact is missing, cut short, altered, or not readable as what its manifest says it is."""


class IncompatibleModuleError(Error):
    """An intact artifact that this process cannot use: other schema, definition, library version or CPU."""


class UnsupportedTargetError(Error, ValueError):
    """A target name that does not exist, or one that this machine cannot build for."""


class BuildError(Error):
    """A module could not be built; the message names the workload, the target and the cause."""
