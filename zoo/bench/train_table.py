"""Training steps as a table for people, as Markdown for the documentation, as JSON, and as lines to draw."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from zoo.bench.roofline import Ceilings
from zoo.bench.train import Row
from zoo.console import print_table

SCHEMA = 1  # of the JSON
# (title, whether it holds text)
COLUMNS = (
    ("tokens x rows", True),
    ("model", True),
    ("parameters", False),
    ("first step s", False),
    ("step ms", False),
    ("tokens/s", False),
    ("MFU", False),
    ("of product", False),
    ("peak GiB", False),
    ("to baseline", False),
    ("where an eager step's time goes", True),
    ("remark", True),
)
NOTHING = "-"


@dataclass(frozen=True)
class TrainReport:
    """Everything that a table says.

    Attributes:
        command: that printed it.
        versions: of what it was taken with, the device among them.
        peak_flops: dense FLOP/s of the device at the compute type, from its datasheet; None: not known, no MFU.
    """

    command: str
    versions: dict[str, str]
    ceilings: Ceilings
    peak_flops: float | None
    rows: tuple[Row, ...] = ()

    def with_row(self, row: Row) -> TrainReport:
        """The report with one more line."""
        return replace(self, rows=(*self.rows, row))

    @property
    def on_cpu(self) -> bool:
        return self.versions["device"].startswith("CPU")

    def mfu(self, row: Row) -> float | None:
        """Model FLOP/s of training over the device's peak; None where either is not known."""
        rate = row.flops_per_second
        return None if rate is None or self.peak_flops is None else rate / self.peak_flops

    def to_baseline(self, row: Row) -> float | None:
        """Tokens a second over the baseline's at the same shape; None for a baseline, and where one is missing."""
        other = next(
            (found for found in self.rows if found.subject.label == row.subject.against and found.shape == row.shape),
            None,
        )
        mine, theirs = row.tokens_per_second, other.tokens_per_second if other else None
        return None if mine is None or theirs is None else mine / theirs


def head(report: TrainReport) -> list[str]:
    """Command, versions and ceilings, one a line."""
    top = report.ceilings
    peak = "not known" if report.peak_flops is None else f"{report.peak_flops / 1e12:.4g} TFLOP/s"
    lines = [
        report.command,
        ", ".join(f"{name} {version}" for name, version in report.versions.items()),
        f"peak of the device, for MFU: {peak}; product of large matrices in this run: "
        f"{top.flops_per_second / 1e12:.4g} TFLOP/s ({top.note})",
        "trained in fp32" if report.on_cpu else "trained in bf16 autocast over fp32 weights, fused AdamW, clipped",
    ]
    for op, names in served(report.rows).items():
        lines.append(f"{op} by {' and '.join(names)}")
    if report.on_cpu:
        lines.append(
            "Taken on a CPU by the wall clock: these figures say that the command works, and nothing of models."
        )
    return lines


def notes() -> list[str]:
    """What the columns mean."""
    return [
        "A step is forward, backward, clipping and optimizer, on random ids without packing; its time is the median. "
        "First step: of the row's own mode, compilation included. Peak: all that is allocated, weights and optimizer "
        "states included.",
        "MFU: three times the model FLOPs of a forward at this length, over the device's peak; of product: over what a "
        "large product reached in this run. Nothing that is computed twice counts twice.",
        "Parts are of an eager step, the mean of some, since a compiled block has no seams to measure at. The rest is "
        "embedding, residual sums and casts.",
    ]


def progress(row: Row) -> str:
    """One line, printed while the rest is measured."""
    found = row.reason or f"{row.tokens_per_second:,.0f} tokens/s"
    return f"{row.subject.label:34}  {row.shape!s:9}  {found}"


def ordered(report: TrainReport) -> list[Row]:
    """The rows by shape, models in the order in which they were measured."""
    shapes = list(dict.fromkeys(row.shape for row in report.rows))
    return sorted(report.rows, key=lambda row: shapes.index(row.shape))


def show(report: TrainReport) -> None:
    """Print the table."""
    rows = ordered(report)
    last = [index for index, row in enumerate(rows) if index + 1 == len(rows) or rows[index + 1].shape != row.shape]
    print_table(COLUMNS, cells(report), notes=[*head(report)[1:], *notes()], sections=last, width=200)


def cells(report: TrainReport) -> list[list[str]]:
    """The table's rows as text."""
    return [
        [
            str(row.shape),
            row.subject.label,
            f"{_parameters(row) / 1e6:,.1f} M",
            _text(None if row.first is None else row.first.seconds, "{:.1f}"),
            _text(None if row.step is None else row.step.median_ms, "{:,.1f}"),
            _text(row.tokens_per_second, "{:,.0f}"),
            "n/a" if row.step is not None and report.peak_flops is None else _text(report.mfu(row), "{:.1%}"),
            _text(_of_product(report, row), "{:.1%}"),
            _text(None if row.peak_bytes is None else row.peak_bytes / 2**30, "{:.1f}"),
            _text(report.to_baseline(row), "{:.2f}"),
            where(row),
            "; ".join(filter(None, [row.reason, row.remark])),
        ]
        for row in ordered(report)
    ]


def where(row: Row) -> str:
    """The parts of a step with their shares, the largest first."""
    if row.parts is None:
        return NOTHING
    shares = sorted(row.parts.shares().items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} {share:.0%}" for name, share in shares)


def served(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The backends that served each op, over all rows."""
    found: dict[str, set[str]] = {}
    for row in rows:
        for op, names in row.backends.items():
            found.setdefault(op, set()).update(names)
    return {op: sorted(names) for op, names in sorted(found.items())}


def markdown(report: TrainReport) -> str:
    """The table as a page of the documentation: the command and the versions first."""
    command, *facts = head(report)
    lines = ["```", command, "```", "", *(line + "  " for line in facts), ""]
    lines.append("| " + " | ".join(title for title, _ in COLUMNS) + " |")
    lines.append("|" + "|".join("---" if text else "---:" for _, text in COLUMNS) + "|")
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells(report)]
    return "\n".join([*lines, "", *(line + "\n" for line in notes())])


def write_json(report: TrainReport, path: str | Path) -> None:
    """Everything, numbers as numbers; milliseconds, bytes and FLOPs."""
    content = {
        "schema": SCHEMA,
        "command": report.command,
        "versions": report.versions,
        "peak_flops": report.peak_flops,
        "ceilings": asdict(report.ceilings),
        "rows": [_plain(report, row) for row in report.rows],
    }
    Path(path).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def lines_to_baseline(report: TrainReport) -> list[tuple[str, list[tuple[int, float]]]]:
    """For each model that has a baseline, (tokens in a row, how often it does the baseline's tokens a second)."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in report.rows:
        ratio = report.to_baseline(row)
        if ratio is not None:
            lines.setdefault(row.subject.label, []).append((row.shape.tokens, ratio))
    return [(label, sorted(points)) for label, points in lines.items()]


def _plain(report: TrainReport, row: Row) -> dict[str, Any]:
    subject, architecture = row.subject, row.subject.architecture
    return {
        "preset": subject.name,
        "compiled": subject.compiled,
        "recompute": subject.recompute,
        "baseline": subject.against,
        "pattern": architecture.canonical,
        "architecture": architecture.to_plain(),
        "parameters": _parameters(row),
        "tokens": row.shape.tokens,
        "rows": row.shape.rows,
        "tokens_per_second": row.tokens_per_second,
        "flops_per_token": row.flops_per_token,
        "mfu": report.mfu(row),
        "of_product": _of_product(report, row),
        "to_baseline": report.to_baseline(row),
        "step": None if row.step is None else asdict(row.step),
        "first": None if row.first is None else asdict(row.first),
        "peak_bytes": row.peak_bytes,
        "parts": None if row.parts is None else {**asdict(row.parts), "shares": row.parts.shares()},
        "backends": dict(row.backends),
        "reason": row.reason,
        "remark": row.remark,
    }


def _parameters(row: Row) -> int:
    return row.subject.architecture.build("meta").parameter_counts().total


def _of_product(report: TrainReport, row: Row) -> float | None:
    rate = row.flops_per_second
    return None if rate is None else rate / report.ceilings.flops_per_second


def _text(value: float | None, layout: str) -> str:
    return NOTHING if value is None else layout.format(value)
