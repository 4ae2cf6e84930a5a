"""recipes/launch/profile.yaml, laid over a recipe: a table and a trace of three steps, and nothing else of a run."""

import json
import re
from pathlib import Path

import pytest

from zoo.errors import UserError

ROOT = Path(__file__).parents[2]
OVERLAY = ROOT / "recipes/launch/profile.yaml"


def test_settings_that_record_nothing_are_refused(zoo):
    with pytest.raises(UserError, match="warmup and active at least 1; got 2, 1, 0"):
        zoo("fit", "--config", str(OVERLAY), "--trainer.profiler.init_args.active", "0")


def micros(text):
    number, unit = re.fullmatch(r"([\d.]+)(us|ms|s)", text).groups()
    return float(number) * {"us": 1, "ms": 1e3, "s": 1e6}[unit]


def test_the_overlay_profiles_three_steps_and_can_be_run_again(zoo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for accumulate in ("1", "2"):
        zoo("fit", "--config", str(OVERLAY), "--trainer.accumulate_grad_batches", accumulate)
    folder = tmp_path / "runs/profile"
    assert not list(folder.rglob("*.ckpt"))
    traces = sorted(folder.glob("*.pt.trace.json"))
    assert len(traces) == 2
    names = [event.get("name", "") for event in json.loads(traces[0].read_text())["traceEvents"]]
    assert len({name for name in names if name.startswith("ProfilerStep#")}) == 3
    assert "[pl][module]zoo_layers.mixers.gated_deltanet.GatedDeltaNet: model.blocks.0.mixer" in names
    assert "Optimizer.step#AdamW.step" in names
    table = (folder / "fit-profile.txt").read_text(encoding="utf-8").split("Profile stats")[-1]  # appended to
    cells = [re.split(r" {2,}", line.strip()) for line in table.splitlines()]
    (header,) = [row for row in cells if "CPU total" in row]
    totals = [
        micros(row[header.index("CPU total")])
        for row in cells
        if len(row) == len(header) and row != header and "-" not in row[1]
    ]
    assert len(totals) > 10
    assert totals == sorted(totals, reverse=True)
