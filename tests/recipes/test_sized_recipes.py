"""The recipes of published sizes: each builds the model and the training that its source names."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml

from zoo.architecture import settle
from zoo.budget import non_embedding
from zoo.cli import main
from zoo.presets import presets
from zoo.recipe import ZooCLI
from zoo.run import read_metrics

ROOT = Path(__file__).parents[2]
VOCABULARY = 32_000


@dataclass(frozen=True)
class Study:
    """A training that a study names: tokens, and rates at the first step, behind the warm-up and at the last."""

    tokens: int
    batch_tokens: int
    row: int
    warmup_tokens: float
    decay: float
    rates: tuple[float, float, float]
    folder: str


SLIMPAJAMA, FINEWEB = "data/slimpajama", "data/fineweb-edu"
DN_SMALL = Study(15 * 10**9, 524_288, 2048, 0.5e9, 0.01, (3e-5, 3e-4, 3e-5), SLIMPAJAMA)
DN_LARGE = Study(100 * 10**9, 2_097_152, 2048, 1e9, 0.01, (3e-5, 3e-4, 3e-5), SLIMPAJAMA)
GDN_SMALL = Study(15 * 10**9, 2_097_152, 4096, 0.15e9, 0.1, (4e-6, 4e-4, 4e-5), FINEWEB)
GDN_LARGE = Study(100 * 10**9, 524_288, 4096, 1e9, 0.1, (4e-6, 4e-4, 4e-5), FINEWEB)
M2_SMALL = Study(15 * 10**9, 524_288, 2048, 0.5e9, 0.1, (1.5e-5, 1.5e-3, 1e-5), SLIMPAJAMA)

# Recipe: preset; parameters without embedding and head, and all of them with 32,000 ids, a tied head once; study.
TABLE = {
    "transformer_340m": ("transformer++-340m", 308_331_520, 373_867_520, DN_SMALL),
    "transformer_1.3b": ("transformer++-1.3b", 1_233_225_728, 1_364_297_728, DN_LARGE),
    "deltanet_340m": ("deltanet-340m", 308_826_112, 374_362_112, DN_SMALL),
    "deltanet_1.3b": ("deltanet-1.3b", 1_234_605_056, 1_365_677_056, DN_LARGE),
    "deltanet_swa_340m": ("deltanet-swa-340m", 308_578_816, 374_114_816, DN_SMALL),
    "deltanet_swa_1.3b": ("deltanet-swa-1.3b", 1_233_915_392, 1_364_987_392, DN_LARGE),
    "deltanet_global_340m": ("deltanet-global-340m", 308_784_896, 374_320_896, DN_SMALL),
    "deltanet_global_1.3b": ("deltanet-global-1.3b", 1_234_490_112, 1_365_562_112, DN_LARGE),
    "gdn_0.4b": ("gdn-0.4b", 467_685_830, 516_837_830, GDN_SMALL),
    "gdn_1.3b": ("gdn-1.3b", 1_232_495_488, 1_309_295_488, GDN_LARGE),
    "gdn_h1_0.4b": ("gdn-h1-0.4b", 481_612_908, 530_764_908, GDN_SMALL),
    "gdn_h1_1.3b": ("gdn-h1-1.3b", 1_242_880_290, 1_316_608_290, GDN_LARGE),
    "gdn_h2_0.4b": ("gdn-h2-0.4b", 482_287_752, 531_439_752, GDN_SMALL),
    "gdn_h2_1.3b": ("gdn-h2-1.3b", 1_241_971_800, 1_315_699_800, GDN_LARGE),
    "mamba2_340m": ("mamba2-340m", 316_851_712, 382_387_712, M2_SMALL),
    "mamba2_1.3b": ("mamba2-1.3b", 1_240_767_488, 1_371_839_488, GDN_LARGE),
}
TEXT = {name: (ROOT / f"recipes/{name}.yaml").read_text(encoding="utf-8") for name in TABLE}


@pytest.fixture(scope="module")
def supplied(tmp_path_factory):
    """A folder with what the recipes ask a user for: shards of text in a tokenizer of 32,000 ids."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("supplied")
    texts, tokenizer = folder / "texts", folder / "tokenizer.json"
    texts.mkdir()
    for number in range(120):
        words = " ".join(f"word{1 + (number * 7919 + place * place) % (VOCABULARY - 1)}" for place in range(80))
        (texts / f"{number:03d}.txt").write_text(words + "\n", encoding="utf-8")
    ids = {"</s>": 0, **{f"word{number}": number for number in range(1, VOCABULARY)}}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="</s>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(tokenizer))
    for name in (SLIMPAJAMA, FINEWEB):
        words = [str(texts), "--out", str(folder / name), "--tokenizer", str(tokenizer)]
        (folder / name).parent.mkdir(exist_ok=True)
        assert main(["data", "prepare", *words, "--val_share", "0.1"]) == 0
    return folder


@pytest.fixture
def there(supplied, monkeypatch):
    """Where the recipes' own paths lead to what is supplied."""
    monkeypatch.chdir(supplied)


def test_every_recipe_with_a_preset_stands_in_the_table_with_its_presets_name():
    found = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in (ROOT / "recipes").glob("*.yaml")}
    assert {name for name, read in found.items() if "preset" in read.get("model", {})} == TABLE.keys()
    for name, (preset, *_) in TABLE.items():
        assert name == preset.replace("++", "").replace("-", "_")
        assert presets()[preset].n_layers is not None


@pytest.mark.parametrize("name", TABLE)
def test_a_recipe_trains_the_model_and_the_study_that_it_names(there, name):
    preset, inner, total, study = TABLE[name]
    words = ["--config", str(ROOT / f"recipes/{name}.yaml"), "--trainer.accelerator", "cpu"]
    cli = ZooCLI([*words, "--trainer.precision", "32-true"], run=False)
    counts = cli.model.architecture.build(device="meta").parameter_counts()
    assert (counts.non_embedding, counts.total) == (inner, total)
    assert f"{inner:,}" in TEXT[name].replace("\n# ", " ")
    assert f"{total:,}" in TEXT[name].replace("\n# ", " ")
    assert cli.model.architecture.pattern == presets()[preset].pattern
    assert cli.model.architecture.vocab_size == VOCABULARY

    assert cli.trainer.max_steps == math.ceil(study.tokens / study.batch_tokens)
    data = cli.datamodule
    assert (data.batch_tokens, data.seq_len, data.folder) == (study.batch_tokens, study.row, study.folder)
    assert cli.trainer.gradient_clip_val == 1.0
    optimizer = cli.model.optimizer_of([torch.nn.Parameter(torch.zeros(1))])
    assert type(optimizer) is torch.optim.AdamW
    settings = optimizer.defaults
    assert (settings["betas"], settings["eps"], settings["weight_decay"]) == ((0.9, 0.95), 1e-8, study.decay)
    schedule = cli.model.scheduler_of(optimizer)
    schedule.begin(cli.trainer.max_steps)
    warmup = schedule.warmup_steps
    assert warmup * study.batch_tokens == pytest.approx(study.warmup_tokens, rel=0.01)
    rates = [settings["lr"] * schedule.factor(step) for step in (0, warmup, cli.trainer.max_steps - 1)]
    assert rates == pytest.approx(study.rates, rel=1e-3)


@pytest.mark.parametrize("name", TABLE)
def test_micro_batches_are_as_large_as_the_comments_say_and_validation_as_frequent(name):
    read, study = yaml.safe_load(TEXT[name]), TABLE[name][-1]
    trainer = read["trainer"]
    said = re.search(r"micro-batches of ([\d,]+) tokens", TEXT[name])[1].replace(",", "")
    assert int(said) * trainer["accumulate_grad_batches"] == study.batch_tokens
    assert int(said) % study.row == 0
    every = re.search(r"every (\d+) steps", TEXT[name])[1]
    assert int(every) * trainer["accumulate_grad_batches"] == trainer["val_check_interval"]
    on_eight = re.search(r"fsdp\.yaml --trainer\.accumulate_grad_batches (\d+)", TEXT[name])[1]
    assert int(on_eight) * 8 == trainer["accumulate_grad_batches"]
    assert trainer["precision"] == "bf16-mixed"


@pytest.mark.parametrize("name", TABLE)
def test_every_setting_of_the_training_has_a_mark(name):
    """[paper], [config] or [ours] stands on the line, or on the one that opens its section."""
    lines = TEXT[name].splitlines()
    for key in ("optimizer:", "lr_scheduler:", "warmup_steps", "data:", "seq_len", "val_tokens", "precision", "clip"):
        (line,) = (line for line in lines if key in line and not line.startswith("#"))
        assert re.search(r"\[(paper|config|ours)\]", line), line
    (budget,) = (number for number, line in enumerate(lines) if line.startswith("budget:"))
    assert lines[budget + 1].startswith("# Tokens")


def test_explain_counts_a_sized_recipe_with_the_tokenizer_that_is_supplied(there, capsys):
    assert main(["explain", "--recipe", str(ROOT / "recipes/gdn_h2_0.4b.yaml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 531_439_752


def test_the_two_h2_recipes_stand_beside_h1_in_parameters():
    for size in ("0.4b", "1.3b"):
        assert TABLE[f"gdn_h2_{size}"][1] == pytest.approx(TABLE[f"gdn_h1_{size}"][1], rel=0.002)
        assert TABLE[f"gdn_h2_{size}"][3] is TABLE[f"gdn_h1_{size}"][3]


def test_a_sized_recipe_made_small_trains_with_the_first_rates_of_its_schedule(there, tmp_path):
    words = ["--config", str(ROOT / "recipes/gdn_h2_0.4b.yaml"), "--trainer.default_root_dir", str(tmp_path / "run")]
    words += ["--model.n_layers", "3", "--model.d_model", "32", "--model.d_ff", "32"]
    words += ["--model.mixers.GDN.heads", "1", "--model.mixers.GDN.head_dim", "16", "--model.mixers.SWA.heads", "2"]
    words += ["--model.mixers.SWA.head_dim", "16", "--model.mixers.M2.head_dim", "16", "--model.mixers.M2.state", "16"]
    words += ["--budget.batch_tokens", "512", "--data.init_args.seq_len", "64", "--data.init_args.val_tokens", "256"]
    words += ["--data.init_args.val_batch_tokens", "256", "--trainer.enable_progress_bar", "false"]
    words += [
        "--trainer.accelerator",
        "cpu",
        "--trainer.precision",
        "32-true",
        "--trainer.enable_progress_bar",
        "false",
    ]
    words += ["--trainer.accumulate_grad_batches", "2", "--trainer.max_steps", "3", "--trainer.val_check_interval", "6"]
    assert main(["fit", *words, "--trainer.log_every_n_steps", "1"]) == 0
    rows = read_metrics(tmp_path / "run")
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert losses[0] == pytest.approx(math.log(VOCABULARY), abs=0.6)
    rates = [row["lr-AdamW/decay"] for row in rows if "lr-AdamW/decay" in row]
    assert rates == pytest.approx([4e-4 * (0.01 + 0.99 * step / 72) for step in range(3)])
    assert math.isfinite(next(row["val/loss"] for row in rows if "val/loss" in row))


def test_the_models_of_a_study_differ_by_at_most_three_percent_of_the_transformer():
    for size, tolerance in (("340m", 0.03), ("1.3b", 0.01)):
        reference = non_embedding(settle(preset=f"transformer++-{size}"))
        for name, (preset, inner, *_) in TABLE.items():
            if name.endswith(size):
                assert inner == pytest.approx(reference, rel=tolerance), preset
