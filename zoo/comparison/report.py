"""What a comparison says in the end: numbers with intervals, and the files that hold them."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zoo import console
from zoo.comparison.arm import Arm, instantiate
from zoo.comparison.intervals import compare_pair, interval
from zoo.comparison.plan import Plan
from zoo.comparison.provenance import versions
from zoo.comparison.run import Outcome, finite, plain_result, write_json
from zoo.comparison.sections import NEITHER, Content, caveats, idle_arms, results_table, sections
from zoo.comparison.sections import verdicts as verdicts  # the command line prints them
from zoo.data import TaskData
from zoo.data.rows import IGNORED
from zoo.explain import explain
from zoo.metrics import answer_entropy, bigram_conditional_entropy, unigram_entropy
from zoo.page import to_html, to_markdown
from zoo.plot import draw_chart

SCHEMA = 5  # of results.json


# ------------------------------------------------------------------------------------------------------------- content
def entropies_of(plan: Plan) -> dict[str, float]:
    """What counting alone reaches on the validation data: what a model must beat to have learned anything.

    Returns:
        Of text, ``unigram`` and ``bigram`` in bits per byte, plug-in estimates over the validation tokens, by the bytes
        that these stand for, as the arms' bits are. Of a task, ``answers`` in nats per label: the entropy of its
        answers. Empty where the data is neither.
    """
    data = instantiate(plan.recipe, plan.overrides).datamodule
    if isinstance(data, TaskData):
        labels = data.eval_rows("val").targets
        return {"answers": answer_entropy(labels[labels != IGNORED])}
    if not hasattr(data, "eval_text"):
        return {}
    ids = data.eval_text("val")
    per_byte = len(ids) / data.eval_bytes("val")
    return {"unigram": unigram_entropy(ids) * per_byte, "bigram": bigram_conditional_entropy(ids) * per_byte}


def collect(
    plan: Plan,
    outcome: Outcome,
    entropies: Mapping[str, float],
    command: str,
    measured: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
) -> dict[str, Any]:
    """Everything that a report says, in types that JSON holds; page, Markdown and pictures follow from it alone.

    Args:
        plan, outcome: what was planned, and what came of it.
        entropies: from :func:`entropies_of`.
        command: what repeats it.
        measured: by arm, from :func:`zoo.comparison.measure.measure_arms`; None: nothing was.
    """
    finished = [result for result in outcome.results if result.status == "finished"]
    metric = "bpb" if any(math.isfinite(result.bpb) for result in finished) else "loss"
    arms = [_arm_content(plan, outcome, arm, metric, (measured or {}).get(arm.text, ())) for arm in plan.arms]
    scores = [{run["seed"]: run[metric] for run in arm["runs"] if run["status"] == "finished"} for arm in arms]
    pairs = [
        {"a": arms[0]["name"], "b": arm["name"], **compare_pair(metric, scores[0], own)}
        for arm, own in zip(arms[1:], scores[1:])
    ]
    at_chance = set(idle_arms(arms, entropies))
    for pair in pairs:
        if {pair["a"], pair["b"]} <= at_chance:  # chance beside chance is neither better nor worse
            pair["verdict"] = NEITHER
    plain = {
        "schema": SCHEMA,
        "held": plan.held,
        "held_quantity": plan.by,
        "tolerance": plan.tolerance,
        "green": outcome.good and not plan.left_out and all(abs(arm.deviation) <= plan.tolerance for arm in plan.arms),
        "left_out": [{"name": each.text, "reason": each.reason} for each in plan.left_out],
        "command": command,
        "recipe": str(plan.recipe),
        "overrides": list(plan.overrides),
        "reference": {"pattern": plan.reference_text, "amount": plan.reference},
        "tokens": plan.tokens,
        "batch_tokens": plan.batch_tokens,
        "train_context": plan.train_context,
        "contexts": list(plan.contexts),
        "lengths": [
            {"name": reading.name, "tokens": plan.train_context * factor, "edges": list(reading.edges)}
            for reading, factor in zip(plan.readings[len(plan.readings) - len(plan.factors) :], plan.factors)
        ],
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


def _arm_content(
    plan: Plan, outcome: Outcome, arm: Arm, metric: str, measured: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    runs = [plain_result(result) for result in outcome.of(arm)]
    done = [run for run in runs if run["status"] == "finished"]
    mean, half = interval([run[metric] for run in done])
    rates = [run["tokens_per_second"] for run in done if math.isfinite(run["tokens_per_second"])]
    at_once = max((run["at_once"] for run in done), default=1)
    # The speed of runs that shared a device is that of their company.
    rate = math.fsum(rates) / len(rates) if rates and at_once == 1 else None
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
        "turned": arm.turned,
        "flops": {
            "per_token_forward": arm.flops_per_token,
            "context": plan.train_context,
            "train_total": 3 * arm.flops_per_token * tokens,
        },
        "flops_by_context": {str(context): flops for context, flops, _ in arm.by_context},
        "state_bytes": {str(context): state for context, _, state in arm.by_context},
        "measured": [dict(row) for row in measured],
        "layers": explain(arm.architecture, context=plan.context).to_plain()["layers"],
        "conditions": arm.conditions,
        "learning_rate": chosen,
        "learning_rate_grid": grid,
        "tokens": tokens,
        "at_once": at_once,
        "tokens_per_second": rate,
        "training_seconds": tokens / rate if rate else None,
        "mean": mean,
        "half_interval": half,
        "n": len(done),
        "runs": runs,
    }


# --------------------------------------------------------------------------------------------------------------- files
RUN_COLUMNS = ("arm", "seed", "kind", "status", "learning_rate", "loss", "bpb", "tokens", "seconds")
RUN_COLUMNS += ("tokens_per_second", "at_once", "peak_bytes", "order_hash", "error")
CONTEXT_COLUMNS = ("arm", "context", "flops_per_token", "state_bytes", "rows", "tokens_per_second", "peak_bytes")
CONTEXT_COLUMNS += ("reason",)
ARM_COLUMNS = ("d_ff", "turned", "parameters", "deviation", "flops_per_token", "state_bytes")


def write_report(content: Content, out: str | Path) -> dict[str, Path]:
    """Write results.json, report.html, report.md and its pictures, and as CSV: results (a row a run), curves, scores (a
    row a figure of a reading) and contexts (a row an arm and context).

    Returns:
        The files by name.
    """
    out = Path(out)
    names = ("results.json", "results.csv", "curves.csv", "scores.csv", "contexts.csv", "report.html", "report.md")
    files = {name: out / name for name in names}
    write_json(files["results.json"], content)
    _write_csv(files["results.csv"], [*RUN_COLUMNS, *ARM_COLUMNS], _run_rows(content))
    _write_csv(files["curves.csv"], ["arm", "seed", "curve", "tokens", "value"], _curve_rows(content))
    _write_csv(files["scores.csv"], ["arm", "seed", "figure", "value"], _score_rows(content))
    _write_csv(files["contexts.csv"], CONTEXT_COLUMNS, _context_rows(content))
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
            "turned": arm["turned"],
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


def _score_rows(content: Content) -> Iterable[dict[str, Any]]:
    for arm in content["arms"]:
        for run in arm["runs"]:
            for figure, value in run["scores"].items():
                yield {"arm": arm["name"], "seed": run["seed"], "figure": figure, "value": value}


def _context_rows(content: Content) -> Iterable[dict[str, Any]]:
    """Counted figures, and the measured ones where there are any."""
    for arm in content["arms"]:
        measured = {row["context"]: row for row in arm["measured"]}
        for context in content["contexts"]:
            counted = {"flops_per_token": arm["flops_by_context"][str(context)]}
            counted |= {"state_bytes": arm["state_bytes"][str(context)]}
            yield {"arm": arm["name"], "context": context, **counted, **measured.get(context, {})}


def print_table(content: Content) -> None:
    """The comparison's table and the notes that belong to it, plain where the output is no terminal."""
    table = results_table(content)
    console.print_table(table.columns, table.rows, notes=caveats(content))
