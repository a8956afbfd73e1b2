"""What README.md promises is what there is."""

import re
from pathlib import Path

import tilewright
from tilewright.runtime import env

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_first_screen_has_two_commands():
    block = re.search(r"```sh\n(.*?)```", README, re.DOTALL).group(1)
    assert [line.split("#")[0].strip() for line in block.splitlines()] == ["make tune", "make test"]


def test_environment_table_is_generated_from_the_variables():
    rows = [f"| `{variable.name}` | {variable.doc} |" for variable in env.VARIABLES]
    assert "\n".join(rows) in README, "README.md: write the table anew from runtime/env.py"
    assert len(rows) == README.count("| `TILEWRIGHT_")


def test_public_names_exist():
    named = set(re.findall(r"`([a-zA-Z_.]+)`", README.split("## Support")[0].split("| function |")[1]))
    for name in named:
        value = tilewright
        for part in name.split("."):
            value = getattr(value, part)


def test_example_runs():
    example = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    scope = {}
    exec(compile(example, "README.md", "exec"), scope)
    assert scope["out"].shape == (2, 32, 128)
    assert scope["out"].isfinite().all()


def test_links_point_at_files():
    for document in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: no {target}"
