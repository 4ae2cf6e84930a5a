"""What the runs of weak_scaling.py leave, as figures and as a report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from zoo.errors import UserError
from zoo.plot import Chart, Line, draw_chart
from zoo.run import read_metrics

if TYPE_CHECKING:
    from weak_scaling import Case

DONE, NO_MEMORY = "done", "out of memory"
TARGET = 0.9  # efficiency on all GPUs of a host, at 4096 tokens
# Losses of two runs agree within this: sums in another order; under bf16, products that round otherwise.
CLOSE = {"cpu": 1e-5, "gpu": 5e-3}
# (title, how Markdown aligns it)
COLUMNS = (
    ("recipe", "---"),
    ("context x rows", "---"),
    ("devices", "---:"),
    ("layout", "---"),
    ("tokens/s", "---:"),
    ("efficiency", "---:"),
    ("MFU", "---:"),
    ("GiB a GPU", "---:"),
    ("exposed ms a step", "---:"),
    ("remark", "---"),
)
RESUME_COLUMNS = (
    ("resumed", "---"),
    ("context x rows", "---"),
    ("devices", "---"),
    ("losses differ before the stop", "---:"),
    ("after", "---:"),
    ("remark", "---"),
)


# ------------------------------------------------------------------------------------------------------ what they leave
def speed(folder: Path) -> dict[str, float | None]:
    """Tokens a second and MFU, of the median window of steps, and the peak of memory on the GPU that has most."""
    rows = read_metrics(folder)
    found: dict[str, list[float]] = {
        name: [row[name] for row in rows if name in row] for name in ("tok/s", "mfu", "gpu_peak_gib")
    }
    return {
        "windows": len(found["tok/s"]),
        "tokens_per_second": median(found["tok/s"]) if found["tok/s"] else None,
        "mfu": median(found["mfu"]) if found["mfu"] else None,
        "gpu_peak_gib": max(found["gpu_peak_gib"], default=None),
    }


Spans = list[tuple[float, float]]


@dataclass(frozen=True)
class Exposure:
    """What the kernels of one GPU did in a trace, in microseconds.

    Attributes:
        communication: at least one NCCL kernel ran.
        exposed: at least one NCCL kernel ran, and no other.
    """

    communication: float
    exposed: float


def exposure(events: Iterable[Mapping[str, Any]]) -> dict[int, Exposure]:
    """Communication that no computation hides, by GPU, from the ``traceEvents`` of torch.profiler.

    Kernels of all streams of a GPU count. Copies and fills by the copy engines are neither side. A NCCL kernel runs
    while it waits for a GPU that is late, so waiting counts as communication.
    """
    spans: dict[int, tuple[Spans, Spans]] = {}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") == "kernel":
            communication = "nccl" in event["name"].lower()
            sides = spans.setdefault(int(event["args"]["device"]), ([], []))
            sides[0 if communication else 1].append((event["ts"], event["ts"] + event["dur"]))
    found = {}
    for device, (communication, computation) in spans.items():
        sent, computed = _merged(communication), _merged(computation)
        total = sum(end - start for start, end in sent)
        found[device] = Exposure(total, total - _overlap(sent, computed))
    return found


def _merged(spans: Spans) -> Spans:
    """The union of ``spans``, in order."""
    merged: Spans = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _overlap(one: Spans, other: Spans) -> float:
    """How long both last, each merged."""
    total, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        total += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total


def profiled(folder: Path) -> dict[str, float | None]:
    """Communication of a step, exposed or not, from the traces of all ranks: means over the GPUs.

    The share is of the profiled step. All None where the traces hold no kernels, as on a CPU.
    """
    sent, exposed, lengths = [], [], []
    traces = sorted(folder.glob("*.pt.trace.json"))
    for path in traces:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        marks = [event for event in events if event.get("ph") == "X" and event.get("cat") == "user_annotation"]
        steps = {event["name"]: event["dur"] for event in marks if event["name"].startswith("ProfilerStep#")}
        for figures in exposure(events).values():
            sent.append(figures.communication / len(steps) / 1e3)
            exposed.append(figures.exposed / len(steps) / 1e3)
            lengths.append(mean(steps.values()) / 1e3)
    if not sent:
        return {"traces": len(traces), "communication_ms": None, "exposed_ms": None, "exposed_share": None}
    share = mean(exposed) / mean(lengths)
    return {
        "traces": len(traces),
        "communication_ms": mean(sent),
        "exposed_ms": mean(exposed),
        "exposed_share": share,
    }


def agreement(straight: Path, resumed: Path, stop: int, steps: int) -> dict[str, float]:
    """The largest relative differences of two runs' losses: before step ``stop``, where one was stopped, and after.

    Raises:
        UserError: a run that has not ``steps`` losses.
    """
    losses = [
        {int(row["step"]): row["train/loss"] for row in read_metrics(folder) if "train/loss" in row}
        for folder in (straight, resumed)
    ]
    for folder, run in zip((straight, resumed), losses):
        if sorted(run) != list(range(steps)):
            raise UserError(f"{folder} holds losses of {len(run)} steps, not of {steps}; delete it to run it again")
    apart = [abs(losses[1][step] / losses[0][step] - 1) for step in range(steps)]
    return {"before": max(apart[:stop]), "after": max(apart[stop:])}


# ----------------------------------------------------------------------------------------------------------- the report
def row(
    case: Case, found: Mapping[str, Any], profile: Mapping[str, Any] | None, alone: Mapping[str, Any] | None
) -> dict[str, Any]:
    """One line of the report.

    Args:
        found: of ``Bench.speed``.
        profile: of ``Bench.profile``; None: not profiled.
        alone: what ``Bench.speed`` found on one GPU; None: it was not asked.
    """
    remarks = []
    if found["status"] != DONE:
        remarks.append(found["status"])
    elif not found["windows"]:
        remarks.append("no tok/s was logged")
    if profile is not None and profile["status"] != DONE:
        remarks.append(f"profile: {profile['status']}")
    elif profile is not None and profile["traces"] != case.devices:
        remarks.append(f"profile: {profile['traces']} traces of {case.devices} devices")
    rate, other = found.get("tokens_per_second"), (alone or {}).get("tokens_per_second")
    efficiency = None
    if alone is not None and alone["versions"] != found["versions"]:
        remarks.append("one GPU was measured with another device or other versions")
    elif rate and other:
        efficiency = rate / (case.devices * other)
    return {
        **asdict(case),
        "recipe": case.recipe.stem,
        "layout": case.layout,
        **{key: found.get(key) for key in ("status", "tokens_per_second", "mfu", "gpu_peak_gib", "windows")},
        "efficiency": efficiency,
        **{key: (profile or {}).get(key) for key in ("communication_ms", "exposed_ms", "exposed_share")},
        "remark": "; ".join(remarks),
    }


def resume_row(case: Case, first: int, then: int, found: Mapping[str, Any], backend: str) -> dict[str, Any]:
    """One line about a run that was stopped on ``first`` GPUs and went on on ``then``; ``found``: of Bench.resume."""
    remark = "" if found["status"] == DONE else found["status"]
    if "after" in found and not found["after"] <= CLOSE[backend]:  # NaN is not close
        remark = f"the losses differ by more than {CLOSE[backend]:g}"
    about = {"recipe": case.recipe.stem, "context": case.context, "rows": case.rows, "first": first, "then": then}
    return {**about, **{key: found.get(key) for key in ("status", "before", "after")}, "remark": remark}


def markdown(command: str, about: str, rows: Sequence[Mapping[str, Any]], resumes: Sequence[Mapping[str, Any]]) -> str:
    """The report as a page: the command, the versions, a line a run, and a line a resumed run."""
    lines = ["```", command, "```", "", about, ""]
    if about.startswith("device CPU"):
        lines += ["Taken on a CPU: these figures say that the script works, and nothing of models.", ""]
    lines += [_line(part) for part in zip(*COLUMNS)]
    for each in rows:
        share = "" if each["exposed_share"] is None else f" ({each['exposed_share']:.1%})"
        lines.append(
            _line(
                (
                    each["recipe"],
                    f"{each['context']} x {each['rows']}",
                    str(each["devices"]),
                    each["layout"],
                    _text(each["tokens_per_second"], "{:,.0f}"),
                    _text(each["efficiency"], "{:.1%}"),
                    _text(each["mfu"], "{:.1%}"),
                    _text(each["gpu_peak_gib"], "{:.1f}"),
                    _text(each["exposed_ms"], "{:.1f}") + share,
                    each["remark"],
                )
            )
        )
    if resumes:
        lines += ["", *(_line(part) for part in zip(*RESUME_COLUMNS))]
    for each in resumes:
        apart = [_text(each[key], "{:.1e}") for key in ("before", "after")]
        shape, gpus = f"{each['context']} x {each['rows']}", f"{each['first']} to {each['then']}"
        lines.append(_line((each["recipe"], shape, gpus, *apart, each["remark"])))
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def chart(rows: Sequence[Mapping[str, Any]]) -> Chart | None:
    """Efficiency over devices, a line for every recipe, shape and number of replicas; None: there is none."""
    points: dict[str, list[tuple[float, float]]] = {}
    for each in rows:
        if each["devices"] > 1 and each["efficiency"] is not None:
            kind = "FSDP2" if each["replicas"] == 1 else f"HSDP, {each['replicas']} replicas"
            name = f"{each['recipe']}, {each['context']} x {each['rows']}, {kind}"
            points.setdefault(name, [(1.0, 1.0)]).append((each["devices"], each["efficiency"]))
    lines = tuple(Line(name, tuple(found)) for name, found in points.items())
    if not lines:
        return None
    return Chart(
        "weak_scaling",
        "Weak scaling",
        "devices",
        "tokens/s over devices times one's",
        lines,
        levels={"target": TARGET},
        log=True,
        ticks=True,
    )


def write(
    out: Path,
    command: str,
    about: Mapping[str, str],
    rows: Sequence[Mapping[str, Any]],
    resumes: Sequence[Mapping[str, Any]],
) -> None:
    """report.json, report.md and, where there is an efficiency, report.png in ``out``."""
    whole = {"command": command, "versions": about, "rows": rows, "resumes": resumes}
    (out / "report.json").write_text(json.dumps(whole, indent=1), encoding="utf-8")
    page = markdown(command, ", ".join(f"{name} {version}" for name, version in about.items()), rows, resumes)
    (out / "report.md").write_text(page, encoding="utf-8")
    drawn = chart(rows)
    if drawn is not None:
        draw_chart(drawn, out / "report.png")
