"""The bench of GPUs, as far as it goes without one; and one quick row where there is one."""

import json

import pytest
import torch
from click.testing import CliRunner

from tilewright.codegen import cli
from tilewright.codegen.bench import gpu_cases
from tilewright.runtime import store


def test_rows_are_listed_without_a_gpu():
    listed = CliRunner().invoke(cli.main, ["bench", "--target", "cuda-sm90a", "--list"])
    assert listed.exit_code == 0, listed.output
    assert listed.output.splitlines() == [*(case.name for case in gpu_cases.CASES), "host"]
    few = CliRunner().invoke(cli.main, ["bench", "--target", "cuda-sm90a", "--list", "8x(4096+512)"])
    assert few.output.splitlines() == ["paged_extend-bf16-g4-d128 8x(4096+512)-h32/8"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_told():
    outcome = CliRunner().invoke(cli.main, ["bench", "--target", "cuda-sm90a", "1x4096"])
    assert outcome.exit_code == 1 and "cuda-sm90a: torch sees no CUDA device" in outcome.output


def test_missing_modules_are_named_with_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "checkout", lambda: tmp_path / "checkout")
    outcome = CliRunner().invoke(cli.main, ["bench", "--target", "cuda-sm90a", "1x4096"])
    assert outcome.exit_code == 1
    assert "tilewright build paged_decode-bf16-g4-d128 merge-bf16 --target cuda-sm90a" in outcome.output


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_a_row_is_held_to_its_peers_and_timed(tmp_path):
    target = "cuda-sm90a" if torch.cuda.get_device_capability() == (9, 0) else "cuda-sm80"
    options = ["--rounds", "2", "--seconds", "0", "--json", str(tmp_path / "bench.json")]
    outcome = CliRunner().invoke(cli.main, ["bench", "--target", target, "16x4096", *options])
    assert outcome.exit_code == 0, outcome.output
    (row,) = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert row["ratio"] > 0 and row["limit_us"] > 0 and row["best_peer"].startswith(("sdpa", "flashinfer"))
