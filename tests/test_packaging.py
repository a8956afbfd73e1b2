"""What a wheel holds: one top-level name, every package folder, every file that the code reads."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("schedules", "codegen", "runtime", "tuning_logs")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> set[str]:
    """The names in a freshly built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return set(zipfile.ZipFile(path).namelist())


def test_it_adds_one_top_level_name(wheel):
    assert {name.split("/")[0] for name in wheel if ".dist-info/" not in name} == {"tilewright"}


def test_it_holds_every_source_and_data_file(wheel):
    tracked = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert tracked.returncode == 0, tracked.stderr
    left_out = {
        "runtime/_root.py",
        "runtime/py.typed",
        "codegen/_hatch.py",
    }  # two move to the root, one builds the wheel
    expected = {f"tilewright/{name}" for name in set(tracked.stdout.splitlines()) - left_out}
    assert "tilewright/runtime/launcher.c" in expected
    assert expected - wheel == set()
    assert {"tilewright/__init__.py", "tilewright/py.typed"} <= wheel


def test_every_folder_of_sources_is_a_package():
    folders = {path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert [str(folder.relative_to(ROOT)) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_the_command_is_an_entry_point(wheel):
    assert any(name.endswith("entry_points.txt") for name in wheel)
