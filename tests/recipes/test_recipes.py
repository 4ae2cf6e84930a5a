"""Every recipe is a run that starts: it parses under each verb, says its own command, and trains."""

import math
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from zoo.cli import VERBS, main
from zoo.comparison.plan import make_plan
from zoo.errors import UserError
from zoo.recipe import ZooCLI
from zoo.run import Budget, read_metrics

ROOT = Path(__file__).parents[2]
RECIPES = {
    path.stem: path
    for path in sorted((ROOT / "recipes").glob("*.yaml"))
    if "arms" not in yaml.safe_load(path.read_text(encoding="utf-8"))  # a comparison trains no model of its own
}
READ = {name: yaml.safe_load(path.read_text(encoding="utf-8")) for name, path in RECIPES.items()}
ON_CPU = [name for name, read in READ.items() if read["trainer"]["accelerator"] == "cpu"]
# Published sizes read text and a tokenizer that the user supplies; test_sized_recipes.py lends them some.
SIZED = [name for name, read in READ.items() if "preset" in read["model"]]
ON_GPU = [name for name in RECIPES if name not in (*ON_CPU, *SIZED)]
LIGHTNING = [name for name, verb in VERBS.items() if verb.lightning]
# The published sizes differ in numbers alone, so one verb of the four is enough for them.
PARSED = [(name, verb) for name in RECIPES for verb in (LIGHTNING if name not in SIZED else ["test"])]


def printed_config(capsys, verb, *words):
    """What the verb would run with, as `--print_config` tells it."""
    with pytest.raises(SystemExit) as stop:
        main([verb, *words, "--print_config"])
    assert not stop.value.code
    return yaml.safe_load(capsys.readouterr().out)


def commands(name):
    """The command lines in a recipe's comments, as words."""
    return [shlex.split(line) for line in re.findall(r"^#   (zoo .*)$", RECIPES[name].read_text(), re.MULTILINE)]


def contains(config, part):
    """Whether every setting of ``part`` stands in ``config`` with its value; numbers may be written as text."""
    if isinstance(part, dict):
        return all(key in config and contains(config[key], value) for key, value in part.items())
    return config == part or str(config) == str(part)


# ----------------------------------------------------------------------------------------------------------- as written
@pytest.mark.parametrize(("name", "verb"), PARSED)
def test_a_recipe_parses_under_every_verb_and_nothing_of_it_is_lost(capsys, name, verb):
    config = printed_config(capsys, verb, "--config", str(RECIPES[name]))
    assert contains(config, READ[name])


@pytest.mark.parametrize(
    ("section", "key"), [("model", "patern"), ("trainer", "max_step"), ("budget", "token"), ("checkpoint", "every")]
)
def test_a_key_that_does_not_exist_is_refused(tmp_path, section, key):
    file = tmp_path / "recipe.yaml"
    read = READ["tiny_text"]
    file.write_text(yaml.safe_dump({**read, section: {**read[section], key: 1}}))
    with pytest.raises(UserError, match=key):
        ZooCLI(["--config", str(file)], run=False)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_its_own_command_and_every_command_in_it_can_be_typed(monkeypatch, capsys, name):
    monkeypatch.chdir(ROOT)
    written = commands(name)
    assert ["zoo", "fit", "--config", f"recipes/{name}.yaml"] in written
    for _, verb, *words in written:
        assert verb in VERBS
        assert f"recipes/{name}.yaml" in words
        if VERBS[verb].lightning:
            printed_config(capsys, verb, *words)


@pytest.mark.parametrize("name", RECIPES)
def test_the_steps_that_a_comment_names_are_those_of_the_budget(name):
    (line,) = re.findall(r"^budget:.*$", RECIPES[name].read_text(), re.MULTILINE)
    steps, rows, row = re.search(r"# (\d+) steps(?: of (\d+) rows of (\d+))?", line).groups()
    budget = Budget(**READ[name]["budget"])
    assert budget.steps == int(steps)
    assert rows is None or int(rows) * int(row) == budget.batch_tokens


# ----------------------------------------------------------------------------------------------------------- as it runs
def small(name, folder, *, steps, device):
    """Settings that make three steps of a recipe out of it: less text, less validation, every step logged."""
    words = ["--config", str(RECIPES[name]), "--trainer.default_root_dir", str(folder)]
    words += ["--trainer.max_steps", str(steps), "--trainer.val_check_interval", str(steps)]
    words += ["--trainer.limit_val_batches", "1", "--trainer.log_every_n_steps", "1"]
    words += ["--trainer.enable_progress_bar", "false", "--trainer.accelerator", device]
    if READ[name]["data"]["class_path"] == "zoo.data.TokenData":
        words += ["--data.init_args.source", "excerpt", "--data.init_args.val_tokens", "4096"]
    return words


def check_three_steps(name, folder, device):
    assert main(["fit", *small(name, folder, steps=3, device=device)]) == 0
    rows = read_metrics(folder)
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    stored = torch.load(folder / "last.ckpt", weights_only=True)
    # An untrained model guesses evenly; the first logits are of a size that blurs this a little.
    assert losses[0] == pytest.approx(math.log(stored["hyper_parameters"]["vocab_size"]), abs=0.6)
    assert all(map(math.isfinite, losses))
    assert len(losses) == stored["global_step"] == 3
    assert math.isfinite(next(row["val/loss"] for row in rows if "val/loss" in row))
    # The schedule is that of the whole run: three steps up the first slope.
    peak = READ[name]["model"]["optimizer"]["init_args"]["lr"]
    warmup = READ[name]["model"]["lr_scheduler"]["init_args"]["warmup_steps"]
    rates = [row["lr-AdamW/decay"] for row in rows if "lr-AdamW/decay" in row]
    assert rates == pytest.approx([peak * (0.01 + 0.99 * step / warmup) for step in range(3)])


@pytest.mark.parametrize("name", ON_CPU)
def test_a_cpu_recipe_trains(name, tmp_path):
    check_three_steps(name, tmp_path / "run", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_a_gpu_recipe_trains(name, tmp_path):
    check_three_steps(name, tmp_path / "run", "gpu")


def test_the_gpu_recipe_has_the_documented_parameters():
    words = [
        "--config",
        str(RECIPES["gdn_h1_text_25m"]),
        "--trainer.accelerator",
        "cpu",
        "--trainer.precision",
        "32-true",
    ]
    counts = ZooCLI(words, run=False).model.architecture.build(device="meta").parameter_counts()
    assert counts.total == 25_012_644
    assert counts.non_embedding == 24_815_268


def test_the_arms_of_the_demo_agree_within_a_percent():
    plan = make_plan(["GA", "GDN,SWA", "M2,GDN,SWA"], RECIPES["tiny_text"])
    assert plan.tolerance == 0.01
    assert all(abs(arm.deviation) <= 0.01 for arm in plan.arms)
    assert plan.arms[1].deviation == 0  # the recipe's own model is the measure
    assert all(arm.non_embedding == pytest.approx(plan.reference, rel=0.01) for arm in plan.arms)


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in SIZED])
def test_explain_counts_the_model_that_the_recipe_trains(name, capsys):
    path = RECIPES[name]
    trained = ZooCLI(["--config", str(path), "--trainer.accelerator", "cpu"], run=False).model
    assert main(["explain", "--recipe", str(path), "--json"]) == 0
    shown = capsys.readouterr().out
    assert f"{trained.architecture.build(device='meta').parameter_counts().total}" in shown.replace(",", "")
