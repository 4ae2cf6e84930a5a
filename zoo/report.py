"""What a comparison says in the end: a table, a picture, and files for people and machines."""

from __future__ import annotations

import csv
import math
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from zoo import __version__, console
from zoo.compare import Plan, Result, instantiate, plain_result, write_json
from zoo.metrics import bigram_conditional_entropy, unigram_entropy
from zoo.plot import draw_curves

SCHEMA = 1  # of results.json
COLUMNS = (
    ("arm", "arm"),
    ("d_ff", "d_ff"),
    ("parameters", "parameters"),
    ("deviation", "against reference"),
    ("flops_per_token", "FLOPs/token"),
    ("state_bytes", "state bytes"),
    ("tokens_per_second", "tokens/s"),
    ("loss", "val loss"),
    ("bpb", "val bits/byte"),
    ("status", "status"),
)


def table_rows(results: Iterable[Result]) -> list[dict[str, Any]]:
    """One row an arm, by the keys of ``COLUMNS``; numbers as numbers."""
    return [
        {
            "arm": r.arm.text,
            "d_ff": r.arm.architecture.d_ff,
            "parameters": r.arm.non_embedding,
            "deviation": r.arm.deviation,
            "flops_per_token": r.arm.flops_per_token,
            "state_bytes": r.arm.state_bytes,
            "tokens_per_second": r.tokens_per_second,
            "loss": r.loss,
            "bpb": r.bpb,
            "status": r.status if not r.error else f"{r.status}: {r.error}",
        }
        for r in results
    ]


def shown(key: str, value: Any) -> str:
    """A cell as people read it."""
    if isinstance(value, float) and not math.isfinite(value):
        return "n/a"
    if key == "deviation":
        return f"{value:+.2%}"
    if key in ("loss", "bpb"):
        return f"{value:.4f}"
    if isinstance(value, float):
        return f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


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


def write_report(plan: Plan, results: list[Result], out: str | Path, entropies: dict[str, float]) -> dict[str, Path]:
    """Write results.json, results.csv, report.md and curves.png.

    Returns:
        The files by name.
    """
    out = Path(out)
    files = {name: out / name for name in ("results.json", "results.csv", "report.md", "curves.png")}
    rows = table_rows(results)
    with files["results.csv"].open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=[key for key, _ in COLUMNS])
        writer.writeheader()
        writer.writerows(rows)
    content = {
        "schema": SCHEMA,
        "held": plan.held,
        "tolerance": plan.tolerance,
        "recipe": str(plan.recipe),
        "overrides": list(plan.overrides),
        "context": plan.context,
        "entropies": entropies,
        "versions": versions(),
        "arms": [plain_result(result) for result in results],
    }
    write_json(files["results.json"], content)
    files["report.md"].write_text(_markdown(plan, rows, entropies), encoding="utf-8")
    draw_curves(
        [(r.arm.text, r.curve) for r in results if r.curve], files["curves.png"], entropies=entropies, title=plan.held
    )
    return files


def versions() -> dict[str, str]:
    """What the figures were taken with."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
    return {"zoo": __version__, "torch": torch.__version__, "python": platform.python_version(), "device": device}


def _markdown(plan: Plan, rows: list[dict[str, Any]], entropies: dict[str, float]) -> str:
    lines = [plan.held, ""]
    lines.append("| " + " | ".join(title for _, title in COLUMNS) + " |")
    lines.append("|" + "|".join("---" if key in ("arm", "status") else "---:" for key, _ in COLUMNS) + "|")
    lines += ["| " + " | ".join(shown(key, row[key]) for key, _ in COLUMNS) + " |" for row in rows]
    lines += ["", *notes(plan, entropies), "", "![validation bits per byte against training tokens](curves.png)", ""]
    return "\n".join(lines)


def notes(plan: Plan, entropies: dict[str, float]) -> list[str]:
    """Sentences below the table: what the columns mean, and what to mistrust."""
    lines = [
        "Parameters without embedding and head. FLOPs: forward, per token, at the training context. State: per "
        "sequence at "
        f"{plan.context:,} tokens. One seed: there is no interval, so small differences rank nothing."
    ]
    if entropies:
        lines.append(
            f"The validation tokens themselves, in bits per byte: unigram entropy {entropies['unigram']:.4f}, entropy "
            f"given the token before {entropies['bigram']:.4f}."
        )
    return lines


def print_table(plan: Plan, results: list[Result], entropies: dict[str, float]) -> None:
    """The comparison's table and the notes that belong to it, plain where the output is no terminal."""
    rows = [[shown(key, row[key]) for key, _ in COLUMNS] for row in table_rows(results)]
    columns = [(title, key in ("arm", "status")) for key, title in COLUMNS]
    console.print_table(columns, rows, notes=notes(plan, entropies))
