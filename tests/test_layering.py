"""Imports run one way, and serving never pulls in the compiler."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("schedules", "codegen", "runtime", "tuning_logs")
SOURCES = sorted(path for folder in (*FOLDERS, "tests") for path in (ROOT / folder).rglob("*.py"))
# What each room may import of ours, beside itself.
ALLOWED = {
    "schedules": (),
    "tuning_logs": (),
    "runtime": ("schedules.workload", "schedules.catalog", "schedules.targets"),
    "codegen": ("schedules", "runtime", "tuning_logs"),
}


def imported(path: Path) -> list[str]:
    """Full names of all modules that a file imports, also inside functions and for type checking."""
    package = ["tilewright", *path.relative_to(ROOT).parent.parts]
    names = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            names += [f"{origin}.{alias.name}" for alias in node.names]
    return names


def test_there_are_sources():
    assert len(SOURCES) > 20


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_bare_folder_is_imported(path):
    assert [name for name in imported(path) if name.split(".")[0] in FOLDERS] == []


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if path.relative_to(ROOT).parts[0] != "tests"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_imports_run_one_way(path):
    room = path.relative_to(ROOT).parts[0]
    allowed = tuple(f"tilewright.{name}" for name in (room, *ALLOWED[room]))
    ours = [name for name in imported(path) if name.startswith("tilewright.") and name.split(".")[1] in FOLDERS]
    assert [name for name in ours if not (f"{name}.").startswith(tuple(f"{item}." for item in allowed))] == []


def loaded(*modules: str) -> set[str]:
    """What a new interpreter has in sys.modules after importing these."""
    script = (
        f"import sys, importlib\nfor name in {modules!r}: importlib.import_module(name)\nprint(*sys.modules, sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_serving_imports_neither_the_compiler_nor_the_search():
    runtime = [
        f"tilewright.runtime.{path.stem}" for path in (ROOT / "runtime").glob("*.py") if not path.stem.startswith("_")
    ]
    names = loaded("tilewright", *sorted(runtime))
    assert {"tilewright.runtime.store", "tilewright.schedules.workload"} <= names
    foreign = [
        name for name in names if name.split(".")[0] in ("tvm", "xgboost") or name.startswith("tilewright.codegen")
    ]
    assert foreign == []


def test_the_package_itself_imports_nothing_heavy():
    assert not {"torch", "numpy", "tvm_ffi", "tvm"} & loaded("tilewright")


def test_the_command_line_imports_nothing_heavy():
    assert not {"torch", "numpy", "tvm_ffi", "tvm", "xgboost", "rich"} & loaded("tilewright.codegen.cli")
