"""Comparisons: arms of one size, one order of tokens, one table; nothing that finished runs twice."""

import csv
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zoo.architecture import settle
from zoo.budget import match_parameters, non_embedding
from zoo.checkpoint import load_model
from zoo.cli import main
from zoo.comparison import report
from zoo.comparison.arm import instantiate
from zoo.comparison.provenance import versions
from zoo.comparison.sections import NEITHER, idle_arms
from zoo.errors import UserError
from zoo.metrics import bigram_conditional_entropy, unigram_entropy

ARMS = ["GA", "GDN,SWA"]


@pytest.fixture
def compare(monkeypatch, recipe, tmp_path):
    monkeypatch.setattr(sys, "argv", ["zoo"])

    def run(*words, out="compared"):
        return main(["compare", "--recipe", str(recipe), "--out", str(tmp_path / out), "--tol", "3%", *words])

    return run


def read(tmp_path, out="compared"):
    return json.loads((tmp_path / out / "results.json").read_text())


def test_every_preset_of_attention_and_state_matches_one_size_within_a_percent():
    own = settle("GA", n_layers=24, d_model=1024, vocab_size=32000)
    target = non_embedding(own)
    for pattern in ("GDN,SWA", "M2,GDN,SWA", "3xGDN,GA", "DN", "GLA"):
        match = match_parameters(own.with_pattern(pattern), target)
        assert abs(match.deviation) <= 0.01
        assert match.architecture.d_ff % 64 == 0
        assert match.non_embedding == non_embedding(match.architecture)


def test_the_published_check_value_of_the_matcher_comes_out():
    """24 x GDN of 4 heads 128/256 at width 1024 meets transformer_340M at d_ff 2816, with 0.1296 % more parameters."""
    target = non_embedding(settle("GA", n_layers=24, d_model=1024, d_ff=2816, vocab_size=32000))
    own = settle("GDN:heads=4:head_dim=128", n_layers=24, d_model=1024, vocab_size=32000)
    match = match_parameters(own, target)
    assert match.architecture.d_ff == 2816
    assert match.deviation == pytest.approx(0.001296, abs=5e-7)


def test_a_pattern_without_mlps_cannot_be_matched_and_says_why():
    own = settle("GDN/none", n_layers=2, d_model=64, vocab_size=257)
    with pytest.raises(UserError, match="no layer has an MLP"):
        match_parameters(own, 100_000)


def test_a_target_out_of_reach_names_the_nearest():
    own = settle("GDN", n_layers=2, d_model=64, vocab_size=257)
    with pytest.raises(UserError, match="the nearest d_ff is 1, which deviates by"):
        match_parameters(own, 1_000)


def test_arms_read_the_same_tokens_and_the_table_agrees_with_the_files(compare, tmp_path, capsys):
    assert compare(*ARMS) == 0
    printed = capsys.readouterr().out
    results = read(tmp_path)
    (first,), (second,) = (arm["runs"] for arm in results["arms"])
    assert first["order_hash"] == second["order_hash"] != ""
    assert first["tokens"] == second["tokens"] == 768
    assert [arm["name"] for arm in results["arms"]] == ARMS
    assert results["green"]
    with (tmp_path / "compared" / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row, arm in zip(rows, results["arms"]):
        assert abs(float(row["deviation"])) <= 0.03
        assert float(row["bpb"]) == arm["runs"][0]["bpb"] == arm["mean"]
        assert f"{arm['mean']:.4f}" in printed
        assert int(row["parameters"]) == arm["params"]["non_embedding"]
    assert (tmp_path / "compared" / "curves.png").stat().st_size > 10_000
    assert "held: training tokens and their order (exact)" in printed
    assert "learning rate the recipe's, not tuned" in printed
    assert "entropy given the token before" in printed
    assert results["entropies"]["bigram"] < results["entropies"]["unigram"] < 8


def test_what_finished_is_not_run_again_and_gives_the_same_table(compare, tmp_path, capsys):
    compare("GA")
    before = read(tmp_path)
    capsys.readouterr()
    compare("GA")
    assert capsys.readouterr().out.count("finished before") == 1
    assert read(tmp_path) == before


def test_a_second_comparison_with_the_same_seed_ends_equal(compare, tmp_path):
    compare("GDN,SWA")
    compare("GDN,SWA", out="again")
    (one,), (other,) = read(tmp_path)["arms"], read(tmp_path, "again")["arms"]
    assert one["mean"] == pytest.approx(other["mean"], abs=1e-4)


def test_an_arm_killed_half_way_goes_on_and_ends_equal(compare, tmp_path):
    compare("GDN,SWA")
    compare("GDN,SWA", "--set", "trainer.max_steps=3", out="killed")
    folder = tmp_path / "killed" / "01-GDN_SWA" / "seed-1"
    whole = tmp_path / "compared" / "01-GDN_SWA" / "seed-1" / "status.json"
    # As a kill would leave it: a checkpoint, and a status that says running.
    (folder / "status.json").write_text(json.dumps({"key": json.loads(whole.read_text())["key"], "status": "running"}))
    compare("GDN,SWA", out="killed")
    (one,), (other,) = (read(tmp_path, out)["arms"][0]["runs"] for out in ("compared", "killed"))
    assert other["bpb"] == one["bpb"]
    assert other["order_hash"] == one["order_hash"]
    assert other["train_curve"] == one["train_curve"]


def test_a_folder_of_another_comparison_is_refused_and_left_alone(compare, tmp_path, capsys):
    compare("GA")
    before = (tmp_path / "compared" / "results.json").read_text()
    assert compare("GA", "--set", "budget.tokens=1024") == 2
    assert "holds an arm of another comparison" in capsys.readouterr().err
    assert (tmp_path / "compared" / "results.json").read_text() == before


def test_an_arm_that_runs_out_of_memory_is_reported_and_the_others_finish(compare, tmp_path, monkeypatch, capsys):
    from zoo.module import HybridLMModule

    step = HybridLMModule.training_step

    def failing(self, batch, batch_idx):
        if self.architecture.pattern == "GA":
            raise RuntimeError("out of memory")
        return step(self, batch, batch_idx)

    monkeypatch.setattr(HybridLMModule, "training_step", failing)
    assert compare(*ARMS) == 1
    (first,), (second,) = (arm["runs"] for arm in read(tmp_path)["arms"])
    assert first["status"] == "failed"
    assert "out of memory" in first["error"]
    assert second["status"] == "finished"
    assert "out of memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["GND"], "unknown mixer 'GND'"),
        (["GA", "GA"], "named twice"),
        (["GA", "ga"], "GA and ga are one model"),
        (["GA", "--context", "0"], "--context must be at least 1 token"),
        (["GA/none"], "no layer has an MLP"),
        (["GA", "--tol", "big"], "--tol big"),
        (["GA", "--set", "budget"], "write KEY=VALUE"),
        (["GA", "--set", "budget.tokns=5"], "budget.tokns"),
        (["GA", "--seeds", "0"], "0 seeds train nothing"),
        (["GA", "--seeds", "few"], "--seeds: invalid int value"),
        (["GA", "--rates", "1,0"], "give different factors above 0"),
        (["GA", "--rates", "fast"], "--rates fast"),
        (["GA", "--allow", "precison"], "did you mean 'precision'"),
        (["GA", "none.yaml"], "no recipe at none.yaml"),
    ],
)
def test_wrong_input_is_named_before_anything_trains(compare, tmp_path, capsys, words, message):
    assert compare(*words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert not (tmp_path / "compared").exists()


def test_an_arms_own_settings_win_over_those_for_all(compare, tmp_path):
    assert compare("GA", "GDN,SWA", "--set", "model.d_ff=40", "--set", "model.n_layers=2") == 0
    for number, arm in ((1, "GA"), (2, "GDN")):
        (folder,) = (tmp_path / "compared").glob(f"{number:02d}-*/seed-1")
        trained = load_model(folder).architecture
        assert trained.layers[0].mixer == arm
        assert read(tmp_path)["arms"][number - 1]["architecture"]["d_ff"] == trained.d_ff


def test_another_text_is_another_comparison(compare, text, capsys):
    compare("GA")
    (text / "new.txt").write_text("something that was not there", encoding="utf-8")
    assert compare("GA") == 2
    assert "another comparison" in capsys.readouterr().err


def test_entropies_are_by_the_byte_whatever_a_token_is(compare, recipe, text, tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=60, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.train_from_iterator([file.read_text(encoding="utf-8") for file in text.iterdir()], trainer)
    tokenizer.save(str(tmp_path / "bpe.json"))
    assert compare("GA", "--set", f"data.init_args.tokenizer={tmp_path / 'bpe.json'}") == 0
    data = instantiate(recipe, [f"--data.init_args.tokenizer={tmp_path / 'bpe.json'}"]).datamodule
    ids = data.eval_text("val")
    ends = len(data.corpus.splits["val"].starts) - 1
    text_bytes = sum(len(tokenizer.decode([i]).encode()) for i in ids if i != data.tokenizer.separator)
    assert 2 * (len(ids) - ends) < text_bytes, "a token must stand for several bytes, or this test shows nothing"
    found = read(tmp_path)["entropies"]
    assert found["unigram"] == pytest.approx(unigram_entropy(ids) * len(ids) / text_bytes)
    assert found["bigram"] == pytest.approx(bigram_conditional_entropy(ids) * len(ids) / text_bytes)
    assert f"in bits per byte: unigram entropy {found['unigram']:.4f}" in " ".join(capsys.readouterr().out.split())


def test_a_task_is_compared_by_its_loss_and_what_finished_is_read_again(compare, recipe, capsys):
    data = "data={class_path: zoo.data.TaskData, init_args: {task: overwrite, val_rows: 8}}"
    words = ["GA", "--set", data, "--set", "budget.batch_tokens=72", "--set", "budget.tokens=216"]
    assert compare(*words) == 0
    said = " ".join(capsys.readouterr().out.split())
    # 32 values, about evenly; three steps teach nothing, and the report says so.
    costs = re.search(r"To answer by frequency alone, whatever is asked, costs (\d\.\d{4}) nats per label", said)
    assert costs is not None
    assert float(costs[1]) == pytest.approx(math.log(32), abs=0.3)
    assert "Not 2% better than that: GA. They have not learned the task in this budget" in said
    assert compare(*words) == 0
    assert re.search(r"finished before: \d\.\d{4} nats per label", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("means", "level", "idle"),
    [
        ((8.25, 8.319, None), {"answers": 8.3155}, ["a", "b"]),
        ((8.14, 8.319, 0.1), {"answers": 8.3155}, ["b"]),
        ((8.25, 8.319, 9.0), {"unigram": 4.0, "bigram": 3.0}, []),
        ((8.25, 8.319, 9.0), {}, []),
        ((1e-9, 0.5, 9.0), {"answers": 0.0}, []),  # one answer to everything: nothing is told apart
    ],
)
def test_arms_at_chance_are_those_no_better_than_frequency(means, level, idle):
    arms = [{"name": name, "n": int(mean is not None), "mean": mean} for name, mean in zip("abc", means)]
    assert idle_arms(arms, level) == idle


def test_chance_beside_chance_is_neither_better_nor_worse(compare, tmp_path, capsys, monkeypatch):
    """Whatever the intervals say; who has learned something is still better than who has not."""
    monkeypatch.setattr(
        report, "compare_pair", lambda *_: {"diff": 0.07, "ci95": [0.01, 0.1], "n": 2, "verdict": "worse"}
    )
    data = "data={class_path: zoo.data.TaskData, init_args: {task: overwrite, val_rows: 64}}"
    words = ["GA", "GA:heads=1", "--seeds", "2", "--set", data, "--set", "budget.batch_tokens=72"]
    assert compare(*words, "--set", "budget.tokens=216") == 0
    assert "GA:heads=1 against GA: neither has learned the task (" in " ".join(capsys.readouterr().out.split())
    assert read(tmp_path)["pairs"][0]["verdict"] == NEITHER
    monkeypatch.setattr(report, "idle_arms", lambda *_: ["GA"])
    assert compare(*words, "--set", "budget.tokens=216") == 0
    assert read(tmp_path)["pairs"][0]["verdict"] == "worse"


def test_a_report_names_the_commit_of_the_working_copy():
    root = Path(__file__).parents[2]
    words = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    if found.returncode or not (root / ".git").exists():
        pytest.skip("this is no working copy of git")
    assert versions()["code"].removesuffix("-dirty") == found.stdout.strip()


def test_a_missing_recipe_is_named(tmp_path, capsys):
    assert main(["compare", "GA", "--recipe", str(tmp_path / "none.yaml")]) == 2
    assert "no recipe at" in capsys.readouterr().err
