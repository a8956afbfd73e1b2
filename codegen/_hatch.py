"""Hatchling build hook: one import name over the fixed top-level folders.

Editable installs get a git-ignored tree of links `build/dev/tilewright/`; wheels get the folders below `tilewright/`
(the `sources` table of pyproject.toml) plus the package root. Imports nothing but the standard library and hatchling.
"""

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDERS = ("schedules", "codegen", "runtime", "tuning_logs")
ROOT_FILES = {"__init__.py": "runtime/_root.py", "py.typed": "runtime/py.typed"}


def link_tree(root: Path) -> Path:
    """Make `build/dev/tilewright/` of links into the checkout at `root`; return the folder to put on sys.path."""
    package = root / "build" / "dev" / "tilewright"
    package.mkdir(parents=True, exist_ok=True)
    wanted = {folder: root / folder for folder in FOLDERS} | {name: root / path for name, path in ROOT_FILES.items()}
    for name, target in wanted.items():
        link = package / name
        if link.is_symlink():
            link.unlink()
        link.symlink_to(os.path.relpath(target, package))
    return package.parent


class TreeHook(BuildHookInterface):
    """Map the folders for the kind of build that runs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before each build; `version` is "standard" or "editable"."""
        root = Path(self.root)
        if version == "editable":
            link_tree(root)
        else:
            # Not in the static force-include table: hatch would copy these in editable mode too, shadowing the links.
            for name, path in ROOT_FILES.items():
                build_data["force_include"][str(root / path)] = f"tilewright/{name}"
