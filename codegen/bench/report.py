"""The outcome of a bench: rows, the table in a terminal, as plain text and as Markdown, and the JSON file."""

from __future__ import annotations

import statistics
from typing import Any

import msgspec

from tilewright.codegen.bench.overhead import Cost
from tilewright.codegen.bench.protocol import Contest, Timing
from tilewright.codegen.records import Environment

SCHEMA = 1
# Quartiles further apart than this share of the median: the row says so.
NOISY = 0.2
BUSY = 0.1


class Row(msgspec.Struct, frozen=True):
    """One case as it was timed.

    Attributes:
        name: workload and sizes.
        target, origin: of our module; origin "default" means that no record is committed for it.
        memory: which data was cold.
        flops, bytes: of one call. limit_us: the least time that the machine's measured limits allow; None: not known.
        required: ratio to the best peer that was promised; share: of the limit; most_us: of the time; None: nothing.
        contest: all times. warm: of our call on the same data again and again; None: the row is warm itself.
    """

    name: str
    target: str
    origin: str
    memory: str
    flops: float
    bytes: float
    limit_us: float | None
    required: float | None
    contest: Contest
    share: float | None = None
    most_us: float | None = None
    warm: Timing | None = None

    @property
    def ours(self) -> Timing:
        """Our time."""
        timing = self.contest.of("ours")
        assert timing is not None
        return timing

    @property
    def peer(self) -> Timing:
        """That of the fastest peer."""
        timing = self.contest.of("peer")
        assert timing is not None
        return timing

    @property
    def ratio(self) -> float:
        """How many times as fast as the fastest peer."""
        return self.peer.median / self.ours.median

    @property
    def reached(self) -> float | None:
        """Share of the machine's limit; None where it is not known."""
        return None if self.limit_us is None else self.limit_us / self.ours.median

    @property
    def promises(self) -> list[tuple[str, bool]]:
        """What was promised, in words, and whether it was kept (a share of an unknown limit was not)."""
        promises = []
        if self.required is not None:
            promises.append((f"{self.required:.1f}x", self.ratio >= self.required))
        if self.share is not None:
            promises.append((f"{self.share:.0%}", self.reached is not None and self.reached >= self.share))
        if self.most_us is not None:
            promises.append((f"{self.most_us:.0f} us", self.ours.median <= self.most_us))
        return promises

    @property
    def verdict(self) -> str:
        """In a word: "ok", "short" (of anything that was promised), or "" where nothing was."""
        return "" if not self.promises else "ok" if all(kept for _, kept in self.promises) else "short"

    @property
    def gain(self) -> float | None:
        """How many times as fast as the untuned schedule; None where that was not timed."""
        untuned = self.contest.of("untuned")
        return None if untuned is None else untuned.median / self.ours.median


class Report(msgspec.Struct, frozen=True):
    """Everything of one run: what is written with --json.

    Attributes:
        command, machine: for the caption of a table.
        flops, bandwidth: the machine's measured limits (flop/s of `product`, byte/s), None where not measured.
        tiles, tile_peak: those of AMX (roofline.Limits), None where it has none.
        skipped: rows that were not timed, with the reason.
        others: CPUs that other processes kept busy meanwhile.
    """

    command: str
    machine: str
    environment: Environment
    threads: int
    flops: float | None
    bandwidth: float | None
    others: float
    rows: list[Row]
    costs: list[Cost]
    tiles: float | None = None
    tile_peak: float | None = None
    skipped: dict[str, str] = {}
    schema: int = SCHEMA
    product: str = "f32 multiply-add"

    @property
    def median_gain(self) -> float | None:
        """Of the rows with a record: tuned over untuned."""
        gains = [row.gain for row in self.rows if row.gain is not None]
        return statistics.median(gains) if gains else None

    def to_json(self) -> str:
        """Pretty, with what the table computes."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        for row, plain in zip(self.rows, data["rows"], strict=True):
            plain |= {"ratio": row.ratio, "best_peer": row.peer.name, "verdict": row.verdict, "tuned_gain": row.gain}
        for cost, plain in zip(self.costs, data["costs"], strict=True):
            plain |= {"verdict": cost.verdict}
        data["median_tuned_gain"] = self.median_gain
        return msgspec.json.format(msgspec.json.encode(data), indent=1).decode() + "\n"


COLUMNS = (
    "workload", "us", "quartiles", "warm us", "GB/s", "TFLOP/s", "% of limit", "best peer", "peer us", "ratio",
    "required", "", "untuned us", "gain",
)  # fmt: skip
_LEFT = ("workload", "best peer", "")


def cells(row: Row) -> tuple[str, ...]:
    """The texts of COLUMNS."""
    ours, peer, untuned = row.ours, row.peer, row.contest.of("untuned")
    return (
        row.name,
        f"{ours.median:.0f}" + ("~" if max(ours.spread, peer.spread) > NOISY else ""),
        f"{ours.low:.0f}-{ours.high:.0f}",
        "" if row.warm is None else f"{row.warm.median:.0f}",
        f"{row.bytes / ours.median / 1e3:.1f}",
        f"{row.flops / ours.median / 1e6:.3g}",
        "" if row.reached is None else f"{100 * row.reached:.0f}",
        peer.name,
        f"{peer.median:.0f}",
        f"{row.ratio:.2f}",
        ", ".join(text for text, _ in row.promises),
        row.verdict,
        "no record" if row.origin == "default" else "" if untuned is None else f"{untuned.median:.0f}",
        "" if row.gain is None else f"{row.gain:.2f}",
    )


def notes(report: Report) -> list[str]:
    """What must be read with the table."""
    lines = []
    if report.flops and report.bandwidth:
        lines.append(
            f"limits measured in this run: {report.bandwidth / 1e9:.1f} GB/s read, {report.flops / 1e9:.0f} GFLOP/s "
            f"{report.product}"
        )
    if report.tiles and report.tile_peak:
        lines.append(
            f"products of bf16 tiles: {report.tiles / 1e12:.1f} TFLOP/s with operands from the second-level cache (the "
            f"limit), {report.tile_peak / 1e12:.1f} from registers"
        )
    lines += [f"not timed: {name}: {reason}" for name, reason in report.skipped.items()]
    gain = report.median_gain
    if gain is not None:
        count = sum(row.gain is not None for row in report.rows)
        lines.append(f"tuned over untuned: {gain:.2f} on the median of {count} workloads with a record (required 1.3)")
    for text in dict.fromkeys(row.memory for row in report.rows):
        lines.append(f"{text}: {', '.join(row.name for row in report.rows if row.memory == text)}")
    hopeless = {name for row in report.rows for name in row.contest.hopeless}
    if hopeless:
        lines.append(f"checked, but too slow to be timed further in some row: {', '.join(sorted(hopeless))}")
    if any(max(row.ours.spread, row.peer.spread) > NOISY for row in report.rows):
        lines.append(f"~ quartiles more than {NOISY:.0%} of the median apart: noisy")
    if report.others > BUSY:
        lines.append(f"others kept {report.others:.1f} CPUs busy meanwhile: do not keep these numbers")
    return lines


def _cost_cells(cost: Cost) -> tuple[str, ...]:
    return (
        cost.name,
        f"{cost.median:.{2 if cost.unit == 'x' else 1}f} {cost.unit}",
        f"{cost.low:.{2 if cost.unit == 'x' else 1}f}-{cost.high:.{2 if cost.unit == 'x' else 1}f}",
        "" if cost.required is None else f"< {cost.required:g} {cost.unit}",
        cost.verdict,
    )


_COST_COLUMNS = ("cost", "median", "quartiles", "required", "")


def _tables(report: Report) -> list[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
    tables: list[tuple[tuple[str, ...], list[tuple[str, ...]]]] = []
    if report.rows:
        tables.append((COLUMNS, [cells(row) for row in report.rows]))
    if report.costs:
        tables.append((_COST_COLUMNS, [_cost_cells(cost) for cost in report.costs]))
    return tables


def markdown(report: Report) -> str:
    """A section for docs/benchmarks.md: date, command and machine, tables, notes."""
    lines = [f"### {report.environment.date}", "", f"`{report.command}`", "", report.machine, ""]
    for columns, rows in _tables(report):
        lines.append("| " + " | ".join(columns) + " |")
        lines.append("|" + "|".join("---" if name in _LEFT or name == columns[0] else "--:" for name in columns) + "|")
        lines += ["| " + " | ".join(row) + " |" for row in rows] + [""]
    lines += [f"- {line}" for line in notes(report)]
    return "\n".join(lines) + "\n"


def plain(report: Report) -> str:
    """Aligned columns, whatever the width."""
    lines = [report.machine, ""]
    for columns, rows in _tables(report):
        widths = [max(len(text) for text in column) for column in zip(columns, *rows, strict=True)]
        for row in (columns, *rows):
            texts = [
                text.ljust(width) if name in _LEFT or name == columns[0] else text.rjust(width)
                for text, name, width in zip(row, columns, widths, strict=True)
            ]
            lines.append("  ".join(texts).rstrip())
        lines.append("")
    return "\n".join(lines + notes(report))


def show(report: Report) -> None:
    """Print the tables: drawn in a terminal, plain elsewhere."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console.out(plain(report), highlight=False)
        return
    console.print(report.machine, highlight=False)
    for columns, rows in _tables(report):
        table = Table(box=box.SIMPLE_HEAD)
        for name in columns:
            table.add_column(name, justify="left" if name in _LEFT or name == columns[0] else "right")
        for row in rows:
            table.add_row(*row, style="red" if "short" in row else None)
        console.print(table)
    for line in notes(report):
        console.print(line, highlight=False)
