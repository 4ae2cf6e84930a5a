"""Longer rows than in training, losses by position, and what steps take at each context."""

import csv
import json
import math

import pytest
import torch

from zoo.checkpoint import load_model
from zoo.comparison.arm import instantiate
from zoo.comparison.measure import measure_arms, read_measured
from zoo.comparison.plan import make_plan, position_edges
from zoo.comparison.read import positions
from zoo.comparison.report import collect, write_report
from zoo.comparison.run import arm_folder, run_plan
from zoo.errors import UserError
from zoo_kernels.packing import Packing


def test_positions_count_from_the_start_of_the_document():
    labels = torch.zeros(2, 3, dtype=torch.long)
    assert positions(labels, None).tolist() == [[1, 2, 3], [1, 2, 3]]
    packed = positions(torch.zeros(1, 6, dtype=torch.long), Packing.from_offsets([0, 2, 2, 5, 6]))
    assert packed.tolist() == [[1, 2, 1, 2, 3, 1]]


def test_edges_reach_from_an_eighth_to_the_whole_row():
    assert position_edges(128, 4) == (16, 32, 64, 128, 256, 512)
    assert position_edges(128, 3) == (16, 32, 64, 128, 256, 384)
    assert position_edges(128, 1) == (16, 32, 64, 128)


@pytest.fixture
def plan(recipe):
    words = ["--budget.tokens=384", "--trainer.limit_val_batches=1.0"]
    return make_plan(["GA", "GDN,SWA"], recipe, tolerance=0.03, overrides=words, factors=(1, 2, 4), contexts=(32, 64))


def test_longer_rows_are_validated_and_their_positions_sum_to_the_whole(plan, recipe, tmp_path):
    outcome = run_plan(plan, tmp_path)
    assert outcome.good
    for result in outcome.results:
        scores = result.scores
        assert scores["1x/loss"] == pytest.approx(result.loss)
        assert not math.isclose(scores["4x/loss"], scores["1x/loss"], rel_tol=1e-4)
        counted = [
            (scores[f"4x/loss_to_{edge}"], scores[f"4x/labels_to_{edge}"])
            for edge in (4, 8, 16, 32, 64, 128)
            if f"4x/loss_to_{edge}" in scores
        ]
        labels = sum(n for _, n in counted)
        assert sum(loss * n for loss, n in counted) / labels == pytest.approx(scores["4x/loss"], rel=1e-5)
    (result,) = (r for r in outcome.results if r.arm.text == "GA")
    # The same by hand: the model of the checkpoint, rows of 128, whole logits.
    model = load_model(arm_folder(result.arm, tmp_path) / "seed-1").model
    rows = instantiate(recipe, ["--data.init_args.seq_len=128"]).datamodule.eval_rows("val")
    nll = tokens = 0.0
    model.requires_grad_(False)
    for index in range(len(rows)):
        batch = rows.batch([index], 0)
        logits = model(batch["input_ids"], packing=batch["packing"]).log_softmax(-1)
        keep = (
            (batch["labels"] != -100)
            & (positions(batch["labels"], batch["packing"]) > 32)
            & (positions(batch["labels"], batch["packing"]) <= 64)
        )
        picked = logits.gather(-1, batch["labels"].clamp(min=0).unsqueeze(-1)).squeeze(-1)
        nll, tokens = nll - float(picked[keep].sum()), tokens + int(keep.sum())
    assert tokens > 10
    assert result.scores["4x/labels_to_64"] == tokens
    assert result.scores["4x/loss_to_64"] == pytest.approx(nll / tokens, rel=1e-4)


def test_the_report_shows_lengths_and_what_was_measured(plan, tmp_path):
    outcome = run_plan(plan, tmp_path)
    measured = measure_arms(plan, tmp_path)
    assert read_measured(plan, tmp_path) == measured
    content = collect(plan, outcome, {}, "zoo compare", measured)
    files = write_report(content, tmp_path)
    stored = json.loads(files["results.json"].read_text())
    assert [reading["tokens"] for reading in stored["lengths"]] == [32, 64, 128]
    page, markdown = files["report.html"].read_text(), files["report.md"].read_text()
    with files["scores.csv"].open(newline="") as file:
        scores = {(row["arm"], row["figure"]): float(row["value"]) for row in csv.DictReader(file)}
    with files["contexts.csv"].open(newline="") as file:
        contexts = {(row["arm"], int(row["context"])): row for row in csv.DictReader(file)}
    for arm in stored["arms"]:
        for name in ("2x/bpb", "4x/loss_to_32"):
            assert scores[arm["name"], name] == arm["runs"][0]["scores"][name]
            assert f"{scores[arm['name'], name]:.4f}" in page
        assert [row["context"] for row in arm["measured"]] == [32, 64]
        for row in arm["measured"]:
            assert row["rows"] * row["context"] == plan.batch_tokens
            assert row["tokens_per_second"] > 0
            assert f"{row['tokens_per_second']:,.0f}" in markdown
            assert float(contexts[arm["name"], row["context"]]["tokens_per_second"]) == row["tokens_per_second"]
    for chart in ("lengths", "positions", "throughput"):
        assert files[f"{chart}.png"].stat().st_size > 5_000
        assert f"]({chart}.png)" in markdown
    assert page.count("<svg") == 7
    assert "was not tried" not in page


def test_lengths_need_a_text_and_rising_numbers(recipe):
    data = "--data={class_path: zoo.data.TaskData, init_args: {task: overwrite, val_rows: 8}}"
    words = [data, "--budget.batch_tokens=72", "--budget.tokens=216"]
    with pytest.raises(UserError, match="lengths need a text"):
        make_plan(["GA"], recipe, overrides=words, tolerance=0.03, factors=(1, 2))
    with pytest.raises(UserError, match="rising whole numbers"):
        make_plan(["GA"], recipe, tolerance=0.03, factors=(2, 1))
