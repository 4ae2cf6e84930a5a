"""Seeds, learning rates, failures and conditions: what makes a comparison one that a reviewer would believe."""

import io
import json
import math
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from zoo.cli import Parser, main
from zoo.comparison.arm import instantiate
from zoo.comparison.intervals import compare_pair, interval, t_quantile
from zoo.comparison.plan import make_plan
from zoo.console import LiveRuns
from zoo.module import HybridLMModule
from zoo.verbs import compare as verb


@pytest.fixture
def compare(monkeypatch, recipe, tmp_path):
    monkeypatch.setattr(sys, "argv", ["zoo"])

    def run(*words, out="compared"):
        return main(["compare", "--recipe", str(recipe), "--out", str(tmp_path / out), "--tol", "3%", *words])

    return run


@pytest.fixture
def spec(monkeypatch, recipe, tmp_path):
    """Write a comparison file beside the recipe, and run it."""
    monkeypatch.setattr(sys, "argv", ["zoo"])

    def run(content, *words):
        content = {"recipe": recipe.name, "tolerance": "3%", "out": str(tmp_path / "compared"), **content}
        path = tmp_path / "spec.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
        return main(["compare", str(path), *words])

    return run


def read(tmp_path, out="compared"):
    return json.loads((tmp_path / out / "results.json").read_text())


# ------------------------------------------------------------------------------------------------------------ intervals
@pytest.mark.parametrize(
    ("freedom", "value"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (30, 2.04227)]
)
def test_quantiles_are_those_of_the_tables(freedom, value):
    assert t_quantile(freedom) == pytest.approx(value, abs=5e-6 * value)


def test_an_interval_is_that_of_a_hand_count():
    mean, half = interval([3.10, 3.14, 3.12])
    assert mean == pytest.approx(3.12)
    assert half == pytest.approx(0.0497, abs=5e-5)
    assert interval([2.5]) == (2.5, None)
    assert interval([]) == (None, None)


def test_differences_are_paired_by_seed():
    """Seeds that move both arms alike say nothing of their difference, and a seed that only one has is left out."""
    pair = compare_pair("bpb", {1: 2.0, 2: 3.0, 3: 4.0}, {1: 1.9, 2: 2.89, 3: 3.91, 4: 0.0})
    assert pair["n"] == 3
    assert pair["diff"] == pytest.approx(-0.1)
    assert pair["verdict"] == "better"
    assert compare_pair("bpb", {1: 2.0, 2: 3.0}, {1: 2.1, 2: 2.8})["verdict"] == "no difference"
    assert compare_pair("bpb", {1: 2.0}, {1: 1.0})["verdict"] == "one seed: no interval"
    assert compare_pair("bpb", {1: 2.0}, {2: 1.0})["diff"] is None


# ---------------------------------------------------------------------------------------------------------------- seeds
def test_every_arm_is_trained_with_every_seed_on_one_order_of_tokens(compare, tmp_path, capsys):
    assert compare("GA", "GDN,SWA", "--seeds", "2") == 0
    results = read(tmp_path)
    runs = [run for arm in results["arms"] for run in arm["runs"]]
    assert [run["seed"] for run in runs] == [1, 2, 1, 2]
    assert len({run["order_hash"] for run in runs}) == 1
    assert len({run["bpb"] for run in runs}) == 4
    for arm in results["arms"]:
        mean, half = interval([run["bpb"] for run in arm["runs"]])
        assert (arm["mean"], arm["half_interval"]) == (pytest.approx(mean), pytest.approx(half))
    (pair,) = results["pairs"]
    assert pair["diff"] == pytest.approx(results["arms"][1]["mean"] - results["arms"][0]["mean"])
    assert pair["ci95"][0] < pair["diff"] < pair["ci95"][1]
    assert f"GDN,SWA against GA: {pair['verdict']}" in capsys.readouterr().out


def test_a_further_seed_is_added_to_those_that_finished(compare, tmp_path, capsys):
    compare("GA")
    (first,) = read(tmp_path)["arms"][0]["runs"]
    capsys.readouterr()
    assert compare("GA", "--seeds", "2") == 0
    assert capsys.readouterr().out.count("finished before") == 1
    assert read(tmp_path)["arms"][0]["runs"][0] == first


def test_an_arm_that_diverges_is_reported_and_is_in_no_mean(compare, tmp_path, monkeypatch, capsys):
    step = HybridLMModule.training_step

    def bursting(self, batch, batch_idx):
        loss = step(self, batch, batch_idx)
        return loss * math.nan if self.architecture.pattern == "GA" else loss

    monkeypatch.setattr(HybridLMModule, "training_step", bursting)
    assert compare("GA", "GDN,SWA") == 1
    first, second = read(tmp_path)["arms"]
    assert first["runs"][0]["status"] == "diverged"
    assert first["mean"] is None
    assert second["runs"][0]["status"] == "finished"
    assert "GA, seed 1: diverged (NonFiniteError" in " ".join(capsys.readouterr().out.split())
    assert "diverged" in (tmp_path / "compared" / "report.html").read_text()
    compare("GA", "GDN,SWA")
    assert "diverged before" in capsys.readouterr().out


def test_a_failure_that_is_no_runtime_error_is_a_row_too_and_is_tried_again(compare, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(HybridLMModule, "validation_step", lambda *_: {}["no such key"])
        assert compare("GA") == 1
        assert "KeyError" in read(tmp_path)["arms"][0]["runs"][0]["error"]
    assert compare("GA") == 0


def test_a_users_error_in_one_arm_is_its_row_and_in_what_all_share_ends_the_comparison(spec, compare, tmp_path, capsys):
    long = {"model.lr_scheduler.init_args.warmup_steps": 50}
    arms = [{"pattern": "GDN,SWA", "name": "late", "set": long}, "GA"]
    assert spec({"arms": arms, "allow": ["optimizer"]}) == 1
    late, other = (arm["runs"][0] for arm in read(tmp_path)["arms"])
    assert "50 warm-up steps do not fit" in late["error"]
    assert other["status"] == "finished"
    capsys.readouterr()
    assert compare("GA", "--set", "model.lr_scheduler.init_args.warmup_steps=50", out="shared") == 2
    assert "50 warm-up steps do not fit" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------- learning rates
def test_every_arm_tries_the_same_rates_with_a_seed_that_is_not_reported(compare, tmp_path):
    assert compare("GA", "GDN,SWA", "--rates", "0.01,1", "--set", "budget.tokens=2560") == 0
    results = read(tmp_path)
    assert results["rate_seed"] not in results["seeds"]
    for arm in results["arms"]:
        grid = arm["learning_rate_grid"]
        assert [trial["factor"] for trial in grid] == [0.01, 1.0]
        assert [trial["learning_rate"] for trial in grid] == pytest.approx([1e-4, 1e-2])
        assert {trial["tokens"] for trial in grid} == {256}
        best = min(grid, key=lambda trial: trial["loss"])
        assert arm["learning_rate"] == arm["runs"][0]["learning_rate"] == best["learning_rate"]
        assert arm["runs"][0]["tokens"] == 2560
        assert f"--model.optimizer.init_args.lr={best['learning_rate']}" in arm["runs"][0]["command"]
    page = (tmp_path / "compared" / "report.md").read_text()
    assert "GA: its best learning rate is at the edge of the grid." in page
    assert "learning rate chosen for each arm from the same 2 factors" in page


# ----------------------------------------------------------------------------------------------------------- conditions
@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ({"data.init_args.data_seed": 3}, "data_order"),
        ({"data.init_args.val_tokens": 64}, "validation"),
        ({"trainer.precision": "bf16-mixed"}, "precision"),
        ({"model.optimizer.init_args.weight_decay": 0.5}, "optimizer"),
    ],
)
def test_arms_under_other_conditions_are_refused_unless_that_is_allowed(spec, tmp_path, capsys, setting, name):
    arms = ["GA", {"pattern": "GDN,SWA", "name": "other", "set": setting}]
    assert spec({"arms": arms}) == 2
    said = capsys.readouterr().err
    assert f"GA and other differ in {name.replace('_', ' ')}" in said
    assert f"--allow {name}" in said
    assert not (tmp_path / "compared").exists()
    if name == "data_order":
        assert spec({"arms": arms}, "--allow", name) == 0
        results = read(tmp_path)
        assert list(results["differing"]) == [name]
        assert "NOT their order" in results["held"]
        assert "DIFFERS, as allowed" in (tmp_path / "compared" / "report.md").read_text()


def test_an_arm_cannot_have_a_budget_of_its_own(spec, capsys):
    assert spec({"arms": ["GA", {"pattern": "GDN,SWA", "set": {"budget.tokens": 1024}}]}) == 2
    assert "tokens are always held" in capsys.readouterr().err


def test_a_recipe_can_be_an_arm_with_the_tokens_of_the_comparison(spec, recipe, tmp_path):
    other = recipe.read_text().replace("GDN,SWA", "M2,SWA").replace("tokens: 768", "tokens: 640")
    (tmp_path / "other.yaml").write_text(other)
    assert spec({"arms": ["GA", "other.yaml"]}) == 0
    arm = read(tmp_path)["arms"][1]
    assert (arm["name"], arm["pattern"]) == ("other", "M2,SWA")
    assert arm["tokens"] == 768
    assert abs(arm["deviation"]) <= 0.03


# ---------------------------------------------------------------------------------------------------------------- specs
def test_a_file_says_what_words_say(spec, compare, tmp_path):
    assert spec({"arms": ["GA"], "seeds": [1, 5], "budget": {"tokens": 512}, "contexts": [64, 128]}) == 0
    results = read(tmp_path)
    assert results["seeds"] == [1, 5]
    assert results["arms"][0]["tokens"] == 512
    states = results["arms"][0]["state_bytes"]
    assert states["128"] == 2 * states["64"]
    assert compare("GA", "--set", "budget.tokens=512", out="words") == 0
    assert read(tmp_path, "words")["arms"][0]["runs"][0]["bpb"] == results["arms"][0]["runs"][0]["bpb"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"arms": ["GA"], "seed": 3}, "unknown key 'seed'; did you mean 'seeds'"),
        ({"arms": []}, "arms is missing"),
        ({"arms": ["GA"], "recipe": None}, "recipe is missing"),
        ({"arms": ["GA"], "recipe": "none.yaml"}, "no recipe at none.yaml"),
        ({"arms": ["GA"], "seeds": 0}, "0 seeds train nothing"),
        ({"arms": ["GA"], "seeds": [1, 1]}, "each once"),
        ({"arms": ["GA"], "seeds": "three"}, "give how many"),
        ({"arms": ["GA"], "held": "seconds"}, "'seconds' cannot be held equal"),
        ({"arms": ["GA"], "budget": 5}, "budget is 5"),
        ({"arms": [{"pattern": "GA", "preset": "gdn"}]}, "exactly one of"),
        ({"arms": [{"pattern": "GA", "sets": {}}]}, "unknown key 'arms: sets'"),
        ({"arms": ["GND"]}, "unknown mixer 'GND'"),
        ({"arms": ["GA"], "learning_rates": ["fast"]}, "learning_rates"),
    ],
)
def test_a_wrong_file_is_named_before_anything_trains(spec, tmp_path, capsys, content, message):
    assert spec(content) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "compared").exists()


def test_the_guide_names_every_key_of_a_file():
    guide = (Path(__file__).parents[2] / "docs/comparing.md").read_text(encoding="utf-8")
    section = guide.split("## 4.")[1].split("## 5.")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert sorted(word.strip(" `") for row in rows for word in row.split(",")) == sorted(verb.KEYS)


def test_a_recipe_in_the_place_of_a_comparison_is_told_apart(recipe, capsys):
    assert main(["compare", str(recipe)]) == 2
    assert "is a recipe, not a comparison" in capsys.readouterr().err
    assert main(["compare", "GA"]) == 2
    assert "under which recipe" in capsys.readouterr().err


def test_the_recipes_folder_holds_a_comparison_that_can_be_planned():
    parser = Parser("zoo compare", "")
    verb.add_arguments(parser)
    request = verb.read_request(parser.read([str(Path(__file__).parents[2] / "recipes/compare_tiny.yaml")]))
    plan = make_plan(
        request.arms, request.recipe, overrides=request.overrides, seeds=request.seeds, contexts=request.contexts
    )
    assert [arm.text for arm in plan.arms] == ["GA", "GDN,SWA", "M2,GDN,SWA"]
    assert plan.seeds == (1, 2)
    assert plan.tokens == 192 * plan.batch_tokens
    assert instantiate(request.recipe, request.overrides).trainer.max_steps == 192


# ------------------------------------------------------------------------------------------------------- while it runs
def test_on_a_terminal_a_table_fills_with_progress_and_the_time_that_is_left():
    screen = io.StringIO()
    with LiveRuns(Console(file=screen, force_terminal=True, width=100)) as watch:
        watch.begin(["GA, seed 1", "GDN, seed 1"])
        watch.start("GA, seed 1")
        watch.end("finished", "2.5000 bits per byte", before=True)
        watch.start("GDN, seed 1")
        watch.step(8, 16, lambda: {"train/loss": 1.25, "tok/s": 2000.0})
        said = screen.getvalue()
        watch.end("failed", "out of memory", before=False)
    assert "finished before" in said
    assert "50%" in said
    assert "loss 1.250, 2,000 tokens/s" in said
    assert "1 of 2 runs are over" in said
    assert "about 0:00 left" in said
    assert "2 of 2 runs are over" in screen.getvalue()


@pytest.mark.parametrize(
    ("content", "said"),
    [("", "is empty; a comparison is a mapping"), ("- GA\n", "give a mapping with recipe and arms")],
)
def test_a_file_that_holds_no_mapping_is_refused(content, said, tmp_path, capsys):
    file = tmp_path / "spec.yaml"
    file.write_text(content)
    assert main(["compare", str(file)]) == 2
    assert said in capsys.readouterr().err
