"""`tilewright demo`: a real model answers a few prompts through the paged backend, timed beside dense attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from tilewright.codegen.demo.compare import Comparison, Run

PROMPTS = (
    "What is the capital of France?",
    "Explain to a child why the sky is blue.",
    "Summarize this in one sentence: The lighthouse was built in 1871, after three ships had been lost on the reef in "
    "a single winter. For ninety years a keeper lived beside it and carried oil up its steps every evening. The lamp "
    "became electric in 1961, and the last keeper moved to the town.",
    "Write a haiku about the sea.",
    "What is gravity?",
    "Write a Python function that adds two numbers.",
)


@click.command(context_settings={"show_default": True})
@click.option("--prompt", "prompts", multiple=True, help="Say this; repeat for more.  [default: six prompts]")
@click.option("--dtype", type=click.Choice(["f32", "bf16"]), default="f32", help="Weights, activations and KV cache.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, help="Longest answer.")
@click.option("--chunk", type=click.IntRange(min=1), default=64, help="Most prompt tokens read in one forward.")
@click.option("--raw", is_flag=True, help="Continue the prompts as they are, without the model's chat form.")
def command(prompts: tuple[str, ...], dtype: str, max_new_tokens: int, chunk: int, raw: bool) -> None:
    """Generate text with SmolLM2-135M-Instruct, every attention through PagedAttentionBackend.

    The requests arrive one after the other, are read in chunks, decode together and leave when they are done. The same
    run is then repeated over dense torch attention, and both are timed.
    """
    import torch

    from tilewright.codegen.demo.compare import compare
    from tilewright.codegen.demo.gguf_model import DemoRequirementError, find_model, load_model

    try:
        path = find_model()
    except DemoRequirementError as error:
        raise click.ClickException(str(error)) from error
    said = list(prompts or PROMPTS)
    click.echo(f"{path.stem} in {dtype}: {len(said)} prompts, read in chunks of {chunk} tokens\n")
    chat = load_model(path, {"f32": torch.float32, "bf16": torch.bfloat16}[dtype])
    asked = said if raw else [chat.chat_prompt(prompt) for prompt in said]
    comparison = compare(chat, asked, max_new_tokens=max_new_tokens, chunk=chunk)
    for prompt, answer in zip(said, comparison.answers, strict=True):
        click.echo(click.style(prompt, bold=True) + ("" if raw else "\n") + answer.rstrip() + "\n")
    _print_table(comparison)


def _print_table(comparison: Comparison) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("", "extend tok/s", "decode tok/s", "seconds", "in attention"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, run in (("paged (tilewright)", comparison.paged), ("dense (torch SDPA)", comparison.dense)):
        table.add_row(name, *_cells(run))
    Console().print(table)
    click.echo(
        f"Both: the same model, engine and prompts, {comparison.new_tokens} new tokens; "
        f"dense attention chose {comparison.same_tokens} of them too.\n"
        "Dense: a contiguous KV cache of its own; decode is one padded call a batch, extend one call a request."
    )


def _cells(run: Run) -> list[str]:
    share = run.attention_seconds / run.seconds
    speeds = [f"{part.tokens / part.seconds:.1f}" if part.tokens else "-" for part in (run.extend, run.decode)]
    return [*speeds, f"{run.seconds:.2f}", f"{share:.0%}"]
