"""What trying claims gave, as claims.json; and from that alone claims.md, figures as CSV, and pictures."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zoo.claims.judge import FAILS, HOLDS, NOT_RUN, figure
from zoo.claims.leads import leads_of
from zoo.claims.run import Judged, Outcome, Trial
from zoo.comparison.provenance import counted, versions
from zoo.comparison.run import finite, write_json
from zoo.page import Section, Table, to_markdown
from zoo.plot import Chart, Grid, Line, draw_chart

SCHEMA = 4  # of claims.json
SLOW = 2  # times the stated seconds, and a claim is called over its time
Content = Mapping[str, Any]


# -------------------------------------------------------------------------------------------------------------- content
def collect(outcome: Outcome, command: str) -> dict[str, Any]:
    """Everything that a report says, in types that JSON holds."""
    return finite(
        {
            "schema": SCHEMA,
            "command": command,
            "good": outcome.good,
            "counts": {word: _count(outcome, word) for word in (HOLDS, FAILS, NOT_RUN)},
            "claims": [_claim_content(judged) for judged in outcome.judged],
            "experiments": [_trial_content(trial) for trial in outcome.trials],
            "leads": [vars(lead) for lead in leads_of((judged.claim for judged in outcome.judged), outcome.trials)],
            "versions": versions(),
        }
    )


def _count(outcome: Outcome, word: str) -> int:
    return sum(judged.verdict.outcome == word for judged in outcome.judged)


def _claim_content(judged: Judged) -> dict[str, Any]:
    claim, verdict = judged.claim, judged.verdict
    stated = claim.experiment.stated if claim.experiment is not None else claim.seconds
    names = ("name", "tier", "family", "sentence", "source", "expected", "gate", "cost")
    return {
        **{name: getattr(claim, name) for name in names},
        "experiment": claim.experiment.name if claim.experiment is not None else None,
        "verdict": verdict.outcome,
        "reason": verdict.reason,
        "findings": [{"words": finding.words, "held": finding.held} for finding in verdict.findings],
        "seconds": judged.seconds,
        "over_its_time": judged.seconds is not None and judged.seconds > SLOW * stated * judged.at_once,
    }


def _trial_content(trial: Trial) -> dict[str, Any]:
    own = trial.experiment
    kept = ("status", "seed", "learning_rate", "seconds", "at_once", "tokens", "loss", "bpb", "error", "command")
    kept += ("trained_with", "curve")
    return {
        "name": own.name,
        "recipe": own.recipe,
        "settings": list(own.settings),
        "seeds": list(own.seeds),
        "rates": list(own.rates),
        "lengths": dict(own.lengths),
        "context": own.context,
        "train_context": trial.train_context,
        "score": own.score,
        "matched": own.matched,
        "error": trial.error,
        "arms": [
            {
                "name": arm.text,
                "pattern": arm.architecture.pattern,
                "canonical": arm.architecture.canonical,
                "parameters": arm.non_embedding,
                "state_bytes": arm.state_bytes,
                "rate": trial.rates.get(arm.text),
                "lost": trial.lost.get(arm.text, ""),
                "scores": {str(seed): dict(scores) for seed, scores in trial.scores.get(arm.text, {}).items()},
                "runs": [{name: getattr(r, name) for name in kept} for r in trial.results if r.arm.text == arm.text],
            }
            for arm in trial.arms
        ],
    }


# ---------------------------------------------------------------------------------------------------------------- files
def write_report(content: Content, out: str | Path) -> dict[str, Path]:
    """Write claims.json, claims.md with its pictures, and the figures as CSV; on any machine.

    Args:
        content: from :func:`collect`, or read from claims.json.
        out: the folder, made where it is not there.

    Returns:
        The files by name.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    names = ("claims.json", "claims.md", "figures.csv", "lengths.csv", "depths.csv", "states.csv", "leads.csv")
    files = {name: out / name for name in names}
    write_json(files["claims.json"], content)
    charts = {own["name"]: charts_of(own) for own in content["experiments"]}
    files["claims.md"].write_text(to_markdown("Claims, and what was measured", sections(content, charts)), "utf-8")
    for chart in (chart for found in charts.values() for chart in found):
        files[f"{chart.name}.png"] = out / f"{chart.name}.png"
        draw_chart(chart, files[f"{chart.name}.png"])
    for name, rows in (
        ("figures.csv", _figure_rows(content)),
        ("lengths.csv", _length_rows(content)),
        ("depths.csv", _depth_rows(content)),
        ("states.csv", _state_rows(content)),
        ("leads.csv", ([lead[name] for name in COLUMNS["leads.csv"]] for lead in content["leads"])),
    ):
        _write_csv(files[name], COLUMNS[name], rows)
    return files


COLUMNS = {
    "figures.csv": ("experiment", "arm", "seed", "figure", "value"),
    "lengths.csv": ("experiment", "arm", "seed", "trained_on", "tokens", "metric", "value"),
    "depths.csv": ("experiment", "arm", "seed", "trained_on", "tokens", "depth_to", "exact"),
    "states.csv": ("experiment", "arm", "seed", "context", "state_bytes", "figure", "value"),
    "leads.csv": ("claim", "figure", "better", "worse", "seed", "rows", "lead", "low", "high"),
}


def _write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)


def _each_run(content: Content) -> Iterable[tuple[Content, Content, int, Mapping[str, float]]]:
    """(experiment, arm, seed, figures) of every run that gave some."""
    for own in content["experiments"]:
        for arm in own["arms"]:
            for seed, scores in arm["scores"].items():
                yield own, arm, int(seed), _numbers(scores)


def _numbers(scores: Mapping[str, float | None]) -> dict[str, float]:
    """Figures as numbers; JSON has none that are not finite, and null in their place."""
    return {name: math.nan if value is None else value for name, value in scores.items()}


def _figure_rows(content: Content) -> Iterable[Sequence[Any]]:
    for own, arm, seed, scores in _each_run(content):
        for name, value in scores.items():
            yield own["name"], arm["name"], seed, name, value


def _length_rows(content: Content) -> Iterable[Sequence[Any]]:
    for own, arm, seed, scores in _each_run(content):
        metric = _metric(own)
        for reading, tokens in own["lengths"].items():
            value = figure(scores, f"{reading}/{metric}")
            yield own["name"], arm["name"], seed, own["train_context"], tokens, metric, value


def _depth_rows(content: Content) -> Iterable[Sequence[Any]]:
    for own, arm, seed, scores in _each_run(content):
        for reading, tokens in own["lengths"].items():
            for depth, value in depths(scores, reading).items():
                yield own["name"], arm["name"], seed, own["train_context"], tokens, depth, value


def _state_rows(content: Content) -> Iterable[Sequence[Any]]:
    for own, arm, seed, scores in _each_run(content):
        value = figure(scores, own["score"])
        yield own["name"], arm["name"], seed, own["context"], arm["state_bytes"], own["score"], value


def _metric(own: Content) -> str:
    return own["score"].rpartition("/")[2]


def depths(scores: Mapping[str, float], reading: str) -> dict[int, float]:
    """The share of rows answered right by the needle's depth, in percent up to; empty where there is no needle."""
    shape = re.compile(rf"{re.escape(reading)}/depth_to_(\d+)/exact")
    found = {int(match[1]): value for name, value in scores.items() if (match := shape.fullmatch(name))}
    return dict(sorted(found.items()))


# --------------------------------------------------------------------------------------------------------------- charts
def charts_of(own: Content) -> list[Chart]:
    """Of an experiment: score by length and by decode state, and by depth and length where there is a needle."""
    arms, metric = [arm for arm in own["arms"] if arm["scores"]], _metric(own)
    found = []
    if len(set(own["lengths"].values())) > 1:
        title = f"{own['name']}: trained on rows of {own['train_context']:,}"
        drawn = _drawn(_line(arm, own["lengths"], metric) for arm in arms)
        found.append(Chart(f"{own['name']}_length", title, "tokens of a row", metric, drawn, log=True, ticks=True))
    reading = own["score"].rpartition("/")[0]
    drawn = _drawn(_line(arm, {reading: float(arm["state_bytes"])}, metric) for arm in arms)
    if drawn[1:]:
        title, xlabel = f"{own['name']}: score by decode state", f"state bytes at {own['context']:,} tokens"
        found.append(Chart(f"{own['name']}_state", title, xlabel, own["score"], drawn, log=True))
    return [chart for chart in found if chart.lines] + _depth_charts(own, arms)


def _drawn(lines: Iterable[Line]) -> tuple[Line, ...]:
    return tuple(line for line in lines if line.points)


def _line(arm: Content, places: Mapping[str, float], metric: str) -> Line:
    """An arm's mean over seeds at each reading, and the range of its seeds."""
    points, band, seeds = [], [], [_numbers(scores) for scores in arm["scores"].values()]
    for reading, x in places.items():
        values = [figure(scores, f"{reading}/{metric}") for scores in seeds]
        values = [value for value in values if math.isfinite(value)]
        if values:
            points.append((x, math.fsum(values) / len(values)))
            band.append((min(values), max(values)))
    return Line(arm["name"], tuple(points), tuple(band) if len(seeds) > 1 else ())


def _depth_charts(own: Content, arms: Sequence[Content]) -> list[Chart]:
    charts = []
    for number, arm in enumerate(arms, start=1):
        # Means over seeds, cell by cell: (depth, tokens) -> values.
        cells: dict[tuple[int, int], list[float]] = {}
        for scores in arm["scores"].values():
            for reading, tokens in own["lengths"].items():
                for depth, value in depths(_numbers(scores), reading).items():
                    cells.setdefault((depth, tokens), []).append(value)
        if not cells:
            continue
        rows, columns = sorted({depth for depth, _ in cells}), sorted({tokens for _, tokens in cells})
        means = {place: math.fsum(values) / len(values) for place, values in cells.items()}
        grid = Grid(
            tuple(f"{tokens:,}" for tokens in columns),
            tuple(f"{depth - 10} to {depth} %" for depth in rows),
            tuple(tuple(means.get((depth, tokens)) for tokens in columns) for depth in rows),
        )
        title = f"{arm['name']}: answers right, trained on {own['train_context']:,}"
        name = f"{own['name']}_depth_{number}"
        charts.append(Chart(name, title, "tokens of a row", "depth of the needle", (), grid=grid))
    return charts


# ------------------------------------------------------------------------------------------------------------- sections
def sections(content: Content, charts: Mapping[str, Sequence[Chart]]) -> list[Section]:
    """The report: a table of all, then family by family, then the runs."""
    found = [Section("All", (summary(content),), claims_table(content))]
    shown: set[str] = set()
    for family in dict.fromkeys(claim["family"] for claim in content["claims"]):
        own = [claim for claim in content["claims"] if claim["family"] == family]
        names = dict.fromkeys(claim["experiment"] for claim in own if claim["experiment"])
        pictures = [chart for name in names if name not in shown for chart in charts.get(name, ())]
        shown |= names.keys()
        found.append(Section(f"Family {family}", [line for claim in own for line in _words(claim)], charts=pictures))
    found += [_lead_section(content["leads"])] if content["leads"] else []
    found += [_experiment_section(own) for own in content["experiments"] if own["arms"]]
    runs = (run for own in content["experiments"] for arm in own["arms"] for run in arm["runs"])
    rows = [["command", content["command"]]]
    rows += [["runs trained with", words] for words in counted(run["trained_with"] for run in runs)]
    rows += [[name, str(value)] for name, value in content["versions"].items()]
    return [*found, Section("Provenance", table=Table((("what", True), ("which", True)), rows))]


def summary(content: Content) -> str:
    """How many of each verdict, in a sentence."""
    counts = content["counts"]
    reported = sum(claim["verdict"] == FAILS and not claim["gate"] for claim in content["claims"])
    note = f" ({reported} of them reported only, which decides nothing)" if reported else ""
    return f"{counts[HOLDS]} hold, {counts[FAILS]} do not{note}, {counts[NOT_RUN]} were not run."


COLUMNS_OF_ALL = (
    ("claim", True),
    ("tier", False),
    ("counts", True),
    ("verdict", True),
    ("measured", True),
    ("s", False),
)


def claims_table(content: Content, *, measured: bool = True) -> Table:
    """One row a claim; what was measured may be left to the families."""
    rows = [
        [
            claim["name"],
            str(claim["tier"]),
            "gate" if claim["gate"] else "reported",
            claim["verdict"],
            _measured(claim) if measured else claim["reason"] or claim["expected"],
            ""
            if claim["seconds"] is None
            else f"{claim['seconds']:.0f}" + (" (over)" if claim["over_its_time"] else ""),
        ]
        for claim in content["claims"]
    ]
    return Table(COLUMNS_OF_ALL, rows)


def _measured(claim: Content) -> str:
    broken = [finding["words"] for finding in claim["findings"] if finding["held"] is False]
    said = broken or [finding["words"] for finding in claim["findings"]]
    if claim["verdict"] == NOT_RUN:
        return claim["reason"]
    return claim["reason"] or (said[0] + (f"; and {len(said) - 1} more" if said[1:] else ""))


def _words(claim: Content) -> list[str]:
    kind = "a gate" if claim["gate"] else "reported, not a gate"
    lines = [
        f"{claim['name']} (tier {claim['tier']}, {kind}): {claim['sentence']} Source: {claim['source']}.",
        f"Expected: {claim['expected']}. Cost: {claim['cost']}. Verdict: {claim['verdict']}."
        + (f" Reason: {claim['reason']}." if claim["reason"] else ""),
    ]
    return [*lines, *(f"{_mark(finding['held'])}: {finding['words']}." for finding in claim["findings"])]


def _mark(held: bool | None) -> str:
    return "open" if held is None else "held" if held else "broken"


def _lead_section(leads: Sequence[Content]) -> Section:
    columns = (("claim", True), ("figure", True), ("arm", True), ("ahead of", True), ("seed", False), ("by", False))
    columns += (("95 % interval", False), ("rows", False))
    rows = [
        [
            *(lead["claim"], lead["figure"], lead["better"], lead["worse"], str(lead["seed"])),
            *(f"{lead['lead']:+.4f}", f"{lead['low']:+.4f} to {lead['high']:+.4f}", f"{lead['rows']:,}"),
        ]
        for lead in leads
    ]
    words = (
        "Both arms answered the same rows, so leads are taken row by row and the rows drawn anew 10,000 times. The "
        "interval covers other rows of the same task; other first weights are the other seeds."
    )
    return Section("Leads over rows", (words,), Table(columns, rows))


def _experiment_section(own: Content) -> Section:
    columns = (("arm", True), ("parameters", False), ("state bytes", False), ("rate", False), ("seed", False))
    columns += (("status", True), ("seconds", False), ("command", True))
    rows = [
        [
            arm["name"],
            f"{arm['parameters']:,}",
            f"{arm['state_bytes']:,}",
            "n/a" if arm["rate"] is None else f"{arm['rate']:.3g}",
            str(run["seed"]),
            run["status"] + (f": {run['error']}" if run["error"] else ""),
            "n/a" if run["seconds"] is None else f"{run['seconds']:.0f}",
            run["command"],
        ]
        for arm in own["arms"]
        for run in arm["runs"]
    ]
    sizes = "brought to equal parameters" if own["matched"] else "as the patterns make them"
    lines = [
        f"recipes/{own['recipe']}.yaml {' '.join(own['settings'])}; arms {sizes}; rows of {own['train_context']:,}."
    ]
    return Section(f"Runs of {own['name']}", lines, Table(columns, rows))
