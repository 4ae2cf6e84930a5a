"""Throughput and peak memory of a comparison's arms against the context, by a few training steps each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zoo.bench.train import Shape, Subject, measure
from zoo.comparison.allowance import Allowance
from zoo.comparison.arm import Arm
from zoo.comparison.plan import Plan
from zoo.comparison.run import arm_folder, write_json

CPU_STEPS = 2


def measure_arms(plan: Plan, out: str | Path, allowance: Allowance | None = None) -> dict[str, list[dict[str, Any]]]:
    """Time training steps of every arm at every context of the plan; what the same device has measured is kept.

    A step has about as many tokens as one of the comparison, in rows of the context, at least one; random ids, no
    packing, blocks not compiled; bf16 autocast on a GPU, fp32 on a CPU.

    Args:
        plan: a comparison.
        out: its folder; an arm's figures are ``measured.json`` in the arm's.
        allowance: no arm is begun once it is over, and has no figures then; None: all are measured.

    Returns:
        by arm, a mapping a context: ``context``, ``rows``, ``tokens_per_second``, ``peak_bytes`` (None without a GPU)
        and ``reason``, why there is nothing, such as too little memory.
    """
    found = read_measured(plan, out)
    for arm in plan.arms:
        if arm.text not in found and (allowance is None or allowance.refuse() is None):
            found[arm.text] = _measured(plan, arm, arm_folder(arm, Path(out)) / "measured.json")
    return found


def read_measured(plan: Plan, out: str | Path) -> dict[str, list[dict[str, Any]]]:
    """What earlier calls have measured of these arms and contexts on this device."""
    found = {}
    for arm in plan.arms:
        stored = _stored(arm_folder(arm, Path(out)) / "measured.json", _key(plan, arm))
        found |= {arm.text: stored} if stored is not None else {}
    return found


def _measured(plan: Plan, arm: Arm, path: Path) -> list[dict[str, Any]]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = [Shape(context, max(1, plan.batch_tokens // context)) for context in plan.contexts]
    steps = None if device.type == "cuda" else CPU_STEPS
    rows = [
        {
            "context": row.shape.tokens,
            "rows": row.shape.rows,
            "tokens_per_second": row.tokens_per_second,
            "peak_bytes": row.peak_bytes,
            "reason": row.reason,
        }
        for row in measure(Subject(arm.text, arm.architecture, compiled=False), shapes, device, steps=steps)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"key": _key(plan, arm), "rows": rows})
    return rows


def _key(plan: Plan, arm: Arm) -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    shape = {"contexts": list(plan.contexts), "batch_tokens": plan.batch_tokens}
    return {"device": device, "torch": torch.__version__, **shape, "architecture": arm.architecture.to_plain()}


def _stored(path: Path, key: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    if not path.is_file():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    return content["rows"] if content["key"] == json.loads(json.dumps(key)) else None
