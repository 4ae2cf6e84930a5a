"""What a comparison says in the end: numbers, intervals, a ledger, and the sections that page and Markdown show."""

from __future__ import annotations

import csv
import importlib.metadata
import math
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zoo import __version__, console
from zoo.compare import CONDITIONS, Arm, Plan, instantiate
from zoo.compare_run import Outcome, finite, plain_result, write_json
from zoo.explain import explain
from zoo.metrics import bigram_conditional_entropy, unigram_entropy
from zoo.page import Section, Table, to_html, to_markdown
from zoo.plot import UNITS, cost_charts, curve_charts, draw_chart, grid_charts

SCHEMA = 2  # of results.json
Content = Mapping[str, Any]


# ----------------------------------------------------------------------------------------------------------- intervals
def t_quantile(freedom: int, share: float = 0.95) -> float:
    """Student's two-sided quantile: ``t`` lies within it with probability ``share``.

    The distribution function is the finite sum for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4).
    """
    low, high = 0.0, 1e6
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _t_within(middle, freedom) < share else (low, middle)
    return high


def _t_within(t: float, freedom: int) -> float:
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for step in range(1 + odd, freedom, 2):
        total += term
        term *= cosine**2 * step / (step + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean, and half of its 95 % interval: t(0.975, n - 1) s / sqrt(n); None where there are too few values."""
    n = len(values)
    if not n:
        return None, None
    mean = math.fsum(values) / n
    if n == 1:
        return mean, None
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    return mean, t_quantile(n - 1) * deviation / math.sqrt(n)


def compare_pair(metric: str, first: Mapping[int, float], other: Mapping[int, float]) -> dict[str, Any]:
    """The other arm minus the first, seed by seed; a difference counts only if its interval leaves 0 out."""
    both = sorted(first.keys() & other.keys())
    mean, half = interval([other[seed] - first[seed] for seed in both])
    if mean is None:
        verdict = "no run to compare"
    elif half is None:
        verdict = "one seed: no interval"
    else:
        verdict = "no difference" if abs(mean) <= half else "better" if mean < 0 else "worse"
    span = None if mean is None or half is None else [mean - half, mean + half]
    return {"metric": metric, "diff": mean, "ci95": span, "n": len(both), "verdict": verdict}


# ------------------------------------------------------------------------------------------------------------- content
def text_entropies(plan: Plan) -> dict[str, float]:
    """Bits per byte that counting alone reaches on the validation text: what a model must beat to have learned
    anything.

    Returns:
        ``unigram`` and ``bigram``, plug-in estimates over the validation tokens, by the bytes that these stand for, as
        the arms' bits are; empty where the data is no text.
    """
    data = instantiate(plan.recipe, plan.overrides).datamodule
    if not hasattr(data, "eval_text"):
        return {}
    ids = data.eval_text("val")
    per_byte = len(ids) / data.eval_bytes("val")
    return {"unigram": unigram_entropy(ids) * per_byte, "bigram": bigram_conditional_entropy(ids) * per_byte}


def versions() -> dict[str, str]:
    """What the figures were taken with."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
    libraries = {name: importlib.metadata.version(name) for name in ("lightning", "numpy")}
    return {
        "zoo": __version__,
        "code": _commit(),
        "torch": torch.__version__,
        **libraries,
        "python": platform.python_version(),
        "device": device,
        "threads": str(torch.get_num_threads()),
    }


def _commit() -> str:
    """The commit of a working copy, with a mark where files differ from it."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return "an installed package"
    words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def collect(plan: Plan, outcome: Outcome, entropies: Mapping[str, float], command: str) -> dict[str, Any]:
    """Everything that a report says, in types that JSON holds; page, Markdown and pictures follow from it alone."""
    finished = [result for result in outcome.results if result.status == "finished"]
    metric = "bpb" if any(math.isfinite(result.bpb) for result in finished) else "loss"
    arms = [_arm_content(plan, outcome, arm, metric) for arm in plan.arms]
    scores = [{run["seed"]: run[metric] for run in arm["runs"] if run["status"] == "finished"} for arm in arms]
    pairs = [
        {"a": arms[0]["name"], "b": arm["name"], **compare_pair(metric, scores[0], own)}
        for arm, own in zip(arms[1:], scores[1:])
    ]
    plain = {
        "schema": SCHEMA,
        "held": plan.held,
        "held_quantity": "params",
        "tolerance": plan.tolerance,
        "green": outcome.good and all(abs(arm.deviation) <= plan.tolerance for arm in plan.arms),
        "command": command,
        "recipe": str(plan.recipe),
        "overrides": list(plan.overrides),
        "reference": {"pattern": plan.reference_text, "non_embedding": plan.reference},
        "tokens": plan.tokens,
        "batch_tokens": plan.batch_tokens,
        "train_context": plan.train_context,
        "contexts": list(plan.contexts),
        "data_hash": plan.data_hash,
        "seeds": list(plan.seeds),
        "rates": list(plan.rates),
        "rate_seed": plan.rate_seed if plan.rates else None,
        "allowed": list(plan.allowed),
        "differing": plan.differing,
        "metric": metric,
        "entropies": dict(entropies),
        "versions": versions(),
        "arms": arms,
        "pairs": pairs,
    }
    return finite(plain)


def _arm_content(plan: Plan, outcome: Outcome, arm: Arm, metric: str) -> dict[str, Any]:
    runs = [plain_result(result) for result in outcome.of(arm)]
    done = [run for run in runs if run["status"] == "finished"]
    mean, half = interval([run[metric] for run in done])
    rates = [run["tokens_per_second"] for run in done if math.isfinite(run["tokens_per_second"])]
    rate = math.fsum(rates) / len(rates) if rates else None
    tokens = max((run["tokens"] for run in done), default=0)
    grid = [plain_result(trial) for trial in outcome.trials if trial.arm is arm]
    chosen = next((run["learning_rate"] for run in runs if run["learning_rate"] is not None), arm.learning_rate)
    return {
        "name": arm.text,
        "pattern": arm.architecture.pattern,
        "canonical": arm.architecture.canonical,
        "architecture": arm.architecture.to_plain(),
        "recipe": str(arm.recipe),
        "overrides": list(arm.overrides),
        "params": {"total": arm.total, "non_embedding": arm.non_embedding},
        "deviation": arm.deviation,
        "flops": {
            "per_token_forward": arm.flops_per_token,
            "context": plan.train_context,
            "train_total": 3 * arm.flops_per_token * tokens,
        },
        "flops_by_context": {str(context): flops for context, flops, _ in arm.by_context},
        "state_bytes": {str(context): state for context, _, state in arm.by_context},
        "layers": explain(arm.architecture, context=plan.context).to_plain()["layers"],
        "conditions": arm.conditions,
        "learning_rate": chosen,
        "learning_rate_grid": grid,
        "tokens": tokens,
        "tokens_per_second": rate,
        "training_seconds": tokens / rate if rate else None,
        "mean": mean,
        "half_interval": half,
        "n": len(done),
        "runs": runs,
    }


# --------------------------------------------------------------------------------------------------------------- files
RUN_COLUMNS = ("arm", "seed", "kind", "status", "learning_rate", "loss", "bpb", "tokens", "seconds")
RUN_COLUMNS += ("tokens_per_second", "peak_bytes", "order_hash", "error")
ARM_COLUMNS = ("d_ff", "parameters", "deviation", "flops_per_token", "state_bytes")


def write_report(content: Content, out: str | Path) -> dict[str, Path]:
    """Write results.json, results.csv (a row a run), curves.csv, report.html, report.md and its pictures.

    Returns:
        The files by name.
    """
    out = Path(out)
    names = ("results.json", "results.csv", "curves.csv", "report.html", "report.md")
    files = {name: out / name for name in names}
    write_json(files["results.json"], content)
    _write_csv(files["results.csv"], [*RUN_COLUMNS, *ARM_COLUMNS], _run_rows(content))
    _write_csv(files["curves.csv"], ["arm", "seed", "curve", "tokens", "value"], _curve_rows(content))
    found = sections(content)
    title = f"{' · '.join(arm['name'] for arm in content['arms'])} under one budget"
    files["report.html"].write_text(to_html(title, found), encoding="utf-8")
    files["report.md"].write_text(to_markdown(title, found), encoding="utf-8")
    for section in found:
        for chart in section.charts:
            files[f"{chart.name}.png"] = out / f"{chart.name}.png"
            draw_chart(chart, files[f"{chart.name}.png"])
    return files


def _write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(columns))
        writer.writeheader()
        writer.writerows(rows)


def _run_rows(content: Content) -> Iterable[dict[str, Any]]:
    context = str(content["contexts"][0])
    for arm in content["arms"]:
        own = {
            "d_ff": arm["architecture"]["d_ff"],
            "parameters": arm["params"]["non_embedding"],
            "deviation": arm["deviation"],
            "flops_per_token": arm["flops"]["per_token_forward"],
            "state_bytes": arm["state_bytes"][context],
        }
        for run in [*arm["learning_rate_grid"], *arm["runs"]]:
            kind = "run" if run["factor"] is None else "learning rate"
            yield {**{name: run.get(name) for name in RUN_COLUMNS}, "kind": kind, **own}


def _curve_rows(content: Content) -> Iterable[dict[str, Any]]:
    for arm in content["arms"]:
        for run in arm["runs"]:
            for curve in ("curve", "train_curve"):
                name = "train/loss" if curve == "train_curve" else f"val/{content['metric']}"
                for tokens, value in run[curve]:
                    yield {"arm": arm["name"], "seed": run["seed"], "curve": name, "tokens": tokens, "value": value}


def print_table(content: Content) -> None:
    """The comparison's table and the notes that belong to it, plain where the output is no terminal."""
    table = results_table(content)
    console.print_table(table.columns, table.rows, notes=caveats(content))


# ------------------------------------------------------------------------------------------------------------ sections
def sections(content: Content) -> list[Section]:
    """The report, part by part."""
    found = [
        Section("What was held equal", (content["held"] + ".", *verdicts(content)), ledger_table(content)),
        Section("Results", caveats(content), results_table(content)),
    ]
    charts = curve_charts(content)
    if charts:
        found.append(Section("Curves", (_curve_note(content),), charts=charts))
        found.append(Section("Quality against what it costs", charts=cost_charts(content)))
    if content["rates"]:
        found.append(Section("Learning rates", (_grid_note(content),), grid_table(content), grid_charts(content)))
    found.append(Section("By context", (_context_note(content),), context_table(content)))
    found.append(Section("Conditions", table=condition_table(content)))
    found += [Section(f"Layers of {arm['name']}", (_arm_line(arm),), layer_table(arm)) for arm in content["arms"]]
    found.append(Section("Runs", ("Each can be trained again:",), runs_table(content)))
    found.append(Section("Provenance", table=provenance_table(content)))
    return found


def verdicts(content: Content) -> list[str]:
    """One sentence a pair."""
    unit, lines = UNITS[content["metric"]], []
    for pair in content["pairs"]:
        if pair["diff"] is None:
            lines.append(f"{pair['b']} against {pair['a']}: {pair['verdict']}.")
            continue
        span = f", 95 % interval {pair['ci95'][0]:+.4f} to {pair['ci95'][1]:+.4f}" if pair["ci95"] else ""
        lines.append(
            f"{pair['b']} against {pair['a']}: {pair['verdict']} ({pair['diff']:+.4f} {unit}{span}, "
            f"{pair['n']} paired seed{'s' if pair['n'] > 1 else ''})."
        )
    return lines


def caveats(content: Content) -> list[str]:
    """What the columns mean, and what to mistrust; written from the data."""
    arms, n = content["arms"], len(content["seeds"])
    lines = [
        "Parameters without embedding and head. FLOPs: forward, per token, at the training context. State: per "
        f"sequence at {content['contexts'][0]:,} tokens."
    ]
    if n == 1:
        lines.append("One seed: there is no interval, so small differences rank nothing.")
    else:
        lines.append(
            f"± is the 95 % t interval over {n} seeds of the first weights; the order of the data is the same in all "
            "runs, so it does not cover other orders." + (" Two seeds make it very wide." if n == 2 else "")
        )
    if content["entropies"]:
        unigram, bigram = content["entropies"]["unigram"], content["entropies"]["bigram"]
        lines.append(
            f"The validation tokens themselves, in bits per byte: unigram entropy {unigram:.4f}, entropy "
            f"given the token before {bigram:.4f}."
        )
    if len({arm["architecture"]["tie"] for arm in arms}) > 1:
        lines.append("Some arms tie embedding and head and some do not: their total parameters do not compare.")
    for name, values in content["differing"].items():
        shown = "; ".join(f"{arm['name']}: {value}" for arm, value in zip(arms, values))
        lines.append(f"NOT equal, as allowed: {name.replace('_', ' ')} ({shown}).")
    lines += [
        f"{arm['name']}, seed {run['seed']}: {run['status']} ({run['error']}); it is in no mean."
        for arm in arms
        for run in arm["runs"]
        if run["status"] != "finished"
    ]
    return lines + [f"{arm['name']}: its best learning rate is at the edge of the grid." for arm in arms if _edge(arm)]


def _edge(arm: Content) -> bool:
    factors = [trial["learning_rate"] for trial in arm["learning_rate_grid"]]
    return len(factors) > 1 and arm["learning_rate"] in (min(factors), max(factors))


def results_table(content: Content) -> Table:
    """One row an arm."""
    unit = "val bits/byte" if content["metric"] == "bpb" else "val loss"
    columns = [("arm", True), ("d_ff", False), ("parameters", False), ("against reference", False)]
    columns += [("FLOPs/token", False), ("state bytes", False), ("tokens/s", False), (unit, False)]
    first = content["arms"][0]["name"]
    several = len(content["arms"]) > 1
    columns += [(f"minus {first}", False)] if several else []
    columns += [("status", True)]
    pairs = {pair["b"]: pair for pair in content["pairs"]}
    rows = []
    for arm in content["arms"]:
        row = [arm["name"], number(arm["architecture"]["d_ff"]), number(arm["params"]["non_embedding"])]
        row += [f"{arm['deviation']:+.2%}", number(arm["flops"]["per_token_forward"])]
        row += [number(arm["state_bytes"][str(content["contexts"][0])]), number(arm["tokens_per_second"])]
        row.append(plus_minus(arm["mean"], arm["half_interval"]))
        if several:
            pair = pairs.get(arm["name"])
            row.append("" if pair is None else _difference(pair))
        rows.append([*row, _status(arm)])
    return Table(tuple(columns), rows)


def _difference(pair: Content) -> str:
    if pair["diff"] is None:
        return "n/a"
    half = (pair["ci95"][1] - pair["ci95"][0]) / 2 if pair["ci95"] else None
    return f"{pair['diff']:+.4f}" + ("" if half is None else f" ± {half:.4f}, {pair['verdict']}")


def _status(arm: Content) -> str:
    runs = arm["runs"]
    bad = [f"seed {run['seed']} {run['status']}: {run['error']}" for run in runs if run["status"] != "finished"]
    if len(runs) == 1:
        return bad[0].partition(" ")[2].partition(" ")[2] if bad else "finished"
    return "; ".join([f"{len(runs) - len(bad)} of {len(runs)} seeds finished", *bad])


def ledger_table(content: Content) -> Table:
    """What is held, and by how much everything else moved."""
    first, context = content["arms"][0], str(content["contexts"][0])
    name = first["name"]
    columns = (("arm", True), ("parameters (held)", False), (f"within {content['tolerance']:.1%}", True))
    columns += (("tokens (held)", False), (f"training FLOPs, against {name}", False))
    columns += ((f"state at {int(context):,}, against {name}", False), (f"training seconds, against {name}", False))
    rows = []
    for arm in content["arms"]:
        rows.append(
            [
                arm["name"],
                f"{arm['deviation']:+.2%}",
                "yes" if abs(arm["deviation"]) <= content["tolerance"] else "NO",
                number(arm["tokens"] if arm["n"] else None),
                share(arm["flops"]["per_token_forward"], first["flops"]["per_token_forward"]),
                share(arm["state_bytes"][context], first["state_bytes"][context]),
                share(arm["training_seconds"], first["training_seconds"]),
            ]
        )
    return Table(columns, rows)


def grid_table(content: Content) -> Table:
    """Validation losses by factor, one row an arm."""
    columns = (("arm", True), *((f"x {factor:g}", False) for factor in sorted(content["rates"])), ("chosen", False))
    rows = []
    for arm in content["arms"]:
        losses = {t["factor"]: f"{t['loss']:.4f}" if t["loss"] is not None else t["status"] for t in _grid(arm)}
        chosen = f"{arm['learning_rate']:.3g}" if arm["n"] and arm["learning_rate"] else "n/a"
        rows.append([arm["name"], *(losses[factor] for factor in sorted(content["rates"])), chosen])
    return Table(columns, rows)


def _grid(arm: Content) -> list[Any]:
    return sorted(arm["learning_rate_grid"], key=lambda trial: trial["factor"])


def context_table(content: Content) -> Table:
    """FLOPs and state against the context, counted."""
    columns = [("arm", True)]
    columns += [(f"{what} at {t:,}", False) for what in ("FLOPs/token", "state bytes") for t in content["contexts"]]
    rows = [
        [arm["name"]]
        + [number(arm[key][str(t)]) for key in ("flops_by_context", "state_bytes") for t in content["contexts"]]
        for arm in content["arms"]
    ]
    return Table(tuple(columns), rows)


def condition_table(content: Content) -> Table:
    """What every arm was trained under, and what differs."""
    rows = []
    for name in CONDITIONS:
        values = [f"{arm['name']}: {arm['conditions'][name]}" for arm in content["arms"]]
        same = name not in content["differing"]
        shown = content["arms"][0]["conditions"][name] if same else "; ".join(values)
        rows.append([name.replace("_", " "), "equal" if same else "DIFFERS, as allowed", shown])
    hashes = {run["order_hash"] for arm in content["arms"] for run in arm["runs"] if run["status"] == "finished"}
    shown = ", ".join(sorted(digest[:16] for digest in hashes)) or "no run finished"
    rows.append(["hash of the tokens read", "equal" if len(hashes) == 1 else "n/a" if not hashes else "DIFFERS", shown])
    return Table((("condition", True), ("in all arms", True), ("what", True)), rows)


def layer_table(arm: Content) -> Table:
    """One row a layer."""
    columns = (("layer", False), ("mixer", True), ("options", True), ("MLP", True))
    columns += (("parameters", False), ("FLOPs/token", False), ("state bytes", False))
    rows = [
        [
            str(row["number"]),
            row["mixer"],
            ", ".join(f"{name} {value}" for name, value in row["options"].items()),
            row["mlp"],
            *(number(row[name]) for name in ("parameters", "flops", "state")),
        ]
        for row in arm["layers"]
    ]
    return Table(columns, rows)


def runs_table(content: Content) -> Table:
    """One row a run, with its command."""
    columns = (("arm", True), ("seed", False), ("score", False), ("seconds, last start", False), ("peak memory", False))
    columns += (("command", True),)
    rows = [
        [
            arm["name"],
            str(run["seed"]),
            plus_minus(run[content["metric"]], None),
            number(run["seconds"]),
            number(run["peak_bytes"]),
            run["command"] or run["status"],
        ]
        for arm in content["arms"]
        for run in arm["runs"]
    ]
    return Table(columns, rows)


def provenance_table(content: Content) -> Table:
    """What repeats it."""
    rows = [["command", content["command"]], ["recipe", content["recipe"]]]
    rows += [["settings for all", " ".join(content["overrides"]) or "none"]]
    rows += [["seeds", ", ".join(map(str, content["seeds"]))], ["data hash", content["data_hash"] or "a task"]]
    rows += [[name, value] for name, value in content["versions"].items()]
    return Table((("what", True), ("which", True)), rows)


# --------------------------------------------------------------------------------------------------------------- words
def _curve_note(content: Content) -> str:
    band = (
        "Lines are means over seeds, areas reach from the lowest to the highest seed. " if content["seeds"][1:] else ""
    )
    return band + (
        "FLOPs are the model's, three times the forward. Seconds are tokens over the mean rate: without warm-up, "
        "validation and saving, on the device that the provenance names."
    )


def _grid_note(content: Content) -> str:
    return (
        f"Every arm tried the same factors on its recipe's rate, on a tenth of the tokens with seed "
        f"{content['rate_seed']}, which is reported nowhere else, and kept the one with the lowest validation loss. "
        "The validation text is the one that is reported."
    )


def _context_note(content: Content) -> str:
    return (
        f"Counted, not measured. All arms were trained and validated on rows of {content['train_context']:,} tokens; "
        "how well they read longer ones was not tried."
    )


def _arm_line(arm: Content) -> str:
    return (
        f"{arm['canonical']}: {arm['params']['total']:,} parameters, {arm['params']['non_embedding']:,} without "
        "embedding and head."
    )


def number(value: float | None) -> str:
    """A whole number as people read it."""
    return "n/a" if value is None else f"{value:,.0f}"


def plus_minus(mean: float | None, half: float | None) -> str:
    """A score, and its interval where there is one."""
    return "n/a" if mean is None else f"{mean:.4f}" + ("" if half is None else f" ± {half:.4f}")


def share(value: float | None, of: float | None) -> str:
    """A signed deviation in percent."""
    return "n/a" if value is None or not of else f"{value / of - 1:+.1%}"
