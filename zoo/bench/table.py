"""What was measured, as a table for people, as Markdown for the documentation, and as JSON."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from zoo import __version__
from zoo.bench.measure import Measurement
from zoo.bench.ops import CurveCase
from zoo.bench.roofline import Ceilings, Work
from zoo.bench.timing import Timing
from zoo.console import print_table

SCHEMA = 1  # of the JSON
# (title, whether it holds text)
COLUMNS = (
    ("case", True),
    ("who", True),
    ("first call s", False),
    ("compiled", False),
    ("forward ms", False),
    ("forward + backward ms", False),
    ("extra GiB", False),
    ("TB/s", False),
    ("TFLOP/s", False),
    ("of roofline", False),
    ("ours : peer", False),
    ("remark", True),
)
NOTHING = "-"


@dataclass(frozen=True)
class Report:
    """Everything that a table says.

    Attributes:
        command: that printed it.
        versions: of what it was taken with, the device among them.
    """

    command: str
    versions: dict[str, str]
    ceilings: Ceilings
    rows: tuple[Measurement, ...]

    def with_row(self, row: Measurement) -> Report:
        """The report with one more line."""
        return replace(self, rows=(*self.rows, row))


def versions(device: torch.device) -> dict[str, str]:
    """What the figures are taken with; peers stand in the table with theirs."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
    found = {"device": where, "zoo": __version__, "torch": torch.__version__, "triton": triton}
    return found | {"CUDA": torch.version.cuda or "none", "python": platform.python_version()}


def head(report: Report) -> list[str]:
    """Command, versions and ceilings, one a line."""
    top = report.ceilings
    clocks = {row.forward.clock for row in report.rows if row.forward}
    lines = [
        report.command,
        ", ".join(f"{name} {version}" for name, version in report.versions.items()),
        f"ceilings, in this run: {top.bytes_per_second / 1e12:.3g} TB/s and {top.flops_per_second / 1e12:.4g} TFLOP/s "
        f"({top.note}); medians by {' and '.join(sorted(clocks)) or 'no clock'}",
    ]
    if report.versions["device"].startswith("CPU"):
        lines.append(
            "Taken on a CPU by the wall clock: these figures say that the command works, and nothing of kernels."
        )
    return lines


def notes(report: Report) -> list[str]:
    """What the columns mean."""
    return [
        "Pairs are forward / forward and backward. First call: forward and backward of a shape class new to this "
        "process, by the wall clock, a peer's own tuning included; compiled: Triton's kernels in it. Extra: the peak "
        "of memory in forward and backward, above the inputs, outputs and gradients included.",
        "TB/s and TFLOP/s are of the least work: each input read and each output written once, and the products of the "
        "chunkwise form; what a kernel moves or computes beyond that counts for nothing. Of roofline: the least time "
        "for it at the ceilings, as a share of the time taken. Where a CUDA graph was replayed, both are of that: the "
        "device's time, without what the host takes to launch a short call.",
        "Ours : peer is our time over theirs; below 1 we are faster. Differs: y against ours, relative, at both ends "
        "of the first row.",
    ]


def progress(row: Measurement) -> str:
    """One line, printed while the rest is measured."""
    times = f"forward {_ms(row.forward)} ms, with backward {_ms(row.both)} ms" if row.forward else ""
    return "  ".join(filter(None, [f"{row.case.name:16}", f"{row.who:24}", times, row.reason]))


def show(report: Report) -> None:
    """Print the table."""
    rows = report.rows
    last = [index for index, row in enumerate(rows) if index + 1 == len(rows) or rows[index + 1].case != row.case]
    print_table(COLUMNS, cells(report), notes=[*head(report)[1:], *notes(report)], sections=last, width=200)


def cells(report: Report) -> list[list[str]]:
    """The table's rows as text."""
    found = []
    for index, row in enumerate(report.rows):
        fresh = index == 0 or report.rows[index - 1].case != row.case
        forward, both = row.replay or row.forward, row.replay_both or row.both
        found.append(
            [
                f"{row.case.name}\n{row.case.shape}" if fresh else "",
                row.who,
                NOTHING if row.first is None else f"{row.first.seconds:.1f}",
                NOTHING if row.first is None or row.first.compiled is None else _compiled(row),
                _ms(row.forward) + (f" (graph {_ms(row.replay)})" if row.replay else ""),
                _ms(row.both) + (f" (graph {_ms(row.replay_both)})" if row.replay_both else ""),
                NOTHING if row.extra_bytes is None else f"{row.extra_bytes / 2**30:.2f}",
                _pair(_rate(row.work, "bytes", forward), _rate(row.work_both, "bytes", both), "{:.2f}"),
                _pair(_rate(row.work, "flops", forward), _rate(row.work_both, "flops", both), "{:.0f}"),
                _pair(
                    _share(report.ceilings, row.work, forward),
                    _share(report.ceilings, row.work_both, both),
                    "{:.0%}",
                ),
                _pair(*ratios(report.rows, row), "{:.2f}"),
                "; ".join(filter(None, [row.reason, f"differs {row.difference:.1e}" if row.difference else ""])),
            ]
        )
    return found


def ratios(rows: Sequence[Measurement], peer: Measurement) -> tuple[float | None, float | None]:
    """Our time over a peer's, forward and forward and backward; None where one of them is missing."""
    if not peer.peer:
        return None, None
    ours = next((row for row in rows if row.case == peer.case and not row.peer), None)
    if ours is None:
        return None, None
    pairs = ((ours.forward, peer.forward), (ours.both, peer.both))
    forward, both = (mine.median_ms / theirs.median_ms if mine and theirs else None for mine, theirs in pairs)
    return forward, both


def markdown(report: Report) -> str:
    """The table as a page of the documentation: the command and the versions first."""
    command, *facts = head(report)
    titles = [title for title, _ in COLUMNS]
    lines = ["```", command, "```", "", *(line + "  " for line in facts), ""]
    lines.append("| " + " | ".join(titles) + " |")
    lines.append("|" + "|".join("---" if text else "---:" for _, text in COLUMNS) + "|")
    lines += [
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", ": ") for cell in row) + " |" for row in cells(report)
    ]
    return "\n".join([*lines, "", *(line + "\n" for line in notes(report))])


def write_json(report: Report, path: str | Path) -> None:
    """Everything, numbers as numbers; milliseconds, bytes and FLOPs."""
    rows = []
    for row in report.rows:
        facts = {name: value for name, value in asdict(row).items() if name != "case"}
        if row.difference is not None and not math.isfinite(row.difference):
            facts["difference"] = "infinite"  # JSON has no such number
        forward, both = ratios(report.rows, row)
        case = {"case": row.case.name, "op": row.case.op, "shape": row.case.shape, "sizes": asdict(row.case)}
        rows.append({**case, **facts, "ours_to_peer": {"forward": forward, "both": both}})
    content = {
        "schema": SCHEMA,
        "command": report.command,
        "versions": report.versions,
        "ceilings": asdict(report.ceilings),
        "rows": rows,
    }
    Path(path).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def curve(rows: Sequence[Measurement]) -> list[tuple[str, list[tuple[int, float]]]]:
    """Chunkwise against recurrent: for each head size, (tokens, how often the recurrent takes the chunkwise's time)."""
    lines: dict[int, list[tuple[int, float]]] = {}
    cases = dict.fromkeys(row.case for row in rows if isinstance(row.case, CurveCase))
    for case in cases:
        times = [row.forward.median_ms for row in rows if row.case == case and row.forward]
        if len(times) == 2:
            chunkwise, recurrent = times
            lines.setdefault(case.K, []).append((case.T, recurrent / chunkwise))
    return [(f"heads of {size}", sorted(points)) for size, points in sorted(lines.items())]


def _compiled(row: Measurement) -> str:
    first = row.first
    if first is None:
        return NOTHING
    return f"{first.compiled}" + (f" + {first.cached} cached" if first.cached else "")


def _ms(timing: Timing | None) -> str:
    return NOTHING if timing is None else f"{timing.median_ms:.3f}"


def _rate(work: Work | None, kind: str, timing: Timing | None) -> float | None:
    """TB/s or TFLOP/s; None where there is nothing to count."""
    if work is None or timing is None or not getattr(work, kind):
        return None
    return getattr(work, kind) / (timing.median_ms / 1e3) / 1e12


def _share(ceilings: Ceilings, work: Work | None, timing: Timing | None) -> float | None:
    return None if work is None or timing is None else ceilings.seconds(work) / (timing.median_ms / 1e3)


def _pair(forward: float | None, both: float | None, layout: str) -> str:
    if forward is None and both is None:
        return NOTHING
    if both is None and forward is not None:
        return layout.format(forward)
    return " / ".join(NOTHING if value is None else layout.format(value) for value in (forward, both))
