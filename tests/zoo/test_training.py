"""A run from the command line: its steps, its checkpoints, and that it goes on as if it had never stopped."""

import csv
import math

import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from zoo.checkpoint import load_model, read_checkpoint
from zoo.errors import UserError
from zoo.module import HybridLMModule
from zoo.recipe import stop_status
from zoo.run import read_metrics
from zoo_layers.mixer import registered


def losses(rows):
    return [row["train/loss"] for row in rows if "train/loss" in row]


def test_the_budget_gives_the_steps_and_the_rate_moves_every_step(zoo):
    rows = zoo("fit")
    assert len(losses(rows)) == 6  # 768 tokens, 128 a step
    rates = [row["lr-AdamW/decay"] for row in rows if "lr-AdamW/decay" in row]
    assert rates[0] == pytest.approx(1e-4)
    assert rates[1] == pytest.approx(1e-2 * (0.01 + 0.99 / 2))
    assert rates[2] == pytest.approx(1e-2)
    assert rates[-1] == pytest.approx(1e-3)


@pytest.mark.parametrize("pattern", ["GDN,SWA", "M2,GA"])
def test_a_run_stopped_twice_and_resumed_has_the_losses_of_one_never_stopped(zoo, pattern):
    straight = zoo("fit", "--model.pattern", pattern, root="straight")
    zoo("fit", "--model.pattern", pattern, "--trainer.max_steps", "2", root="stopped")
    zoo("fit", "--model.pattern", pattern, "--trainer.max_steps", "3", "--ckpt_path", "last", root="stopped")
    resumed = zoo("fit", "--model.pattern", pattern, "--ckpt_path", "last", root="stopped")
    assert len(losses(straight)) == 6
    assert losses(resumed) == losses(straight)
    assert [row.get("lr-AdamW/decay") for row in resumed] == [row.get("lr-AdamW/decay") for row in straight]


def test_a_resumed_run_ends_with_the_weights_of_one_never_stopped(zoo, tmp_path):
    zoo("fit", root="straight")
    zoo("fit", "--trainer.max_steps", "3", root="stopped")
    zoo("fit", "--ckpt_path", "last", root="stopped")
    one, other = (
        torch.load(tmp_path / root / "last.ckpt", weights_only=True)["state_dict"] for root in ("straight", "stopped")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_two_runs_with_one_seed_are_equal_and_another_seed_differs(zoo):
    first, second = losses(zoo("fit", root="a")), losses(zoo("fit", root="b"))
    other = losses(zoo("fit", "--seed_everything", "2", root="c"))
    assert first == second
    assert first != other


def test_validating_more_often_does_not_change_the_training(zoo):
    rarely = losses(zoo("fit", root="rarely"))
    often = zoo("fit", "--trainer.val_check_interval", "1", "--trainer.check_val_every_n_epoch", "null", root="often")
    assert losses(often) == rarely
    assert sum("val/bpb" in row for row in often) == 6


def test_a_learnt_model_beats_the_uniform_one_and_says_so_in_three_units(zoo):
    rows = zoo(
        "fit",
        "--budget.tokens",
        "5120",
        "--trainer.val_check_interval",
        "40",
        "--trainer.check_val_every_n_epoch",
        "null",
    )
    (last,) = [row for row in rows if "val/loss" in row]
    assert last["val/loss"] < 0.75 * math.log(257)
    assert last["val/ppl"] == pytest.approx(math.exp(last["val/loss"]), rel=1e-4)
    assert last["val/bpb"] >= last["val/loss"] / math.log(2) * 0.999  # separators are predicted, but are no bytes


def test_a_short_run_is_the_beginning_of_the_long_one(zoo, capsys):
    whole = zoo("fit", root="whole")
    short = zoo("fit", "--trainer.max_steps", "3", root="short")
    assert losses(short) == losses(whole)[:3]
    assert "cut short: 3 of 6 steps" in capsys.readouterr().out


def test_a_checkpoint_holds_plain_types_and_rebuilds_the_model_without_the_recipe(zoo, tmp_path):
    zoo("fit")
    path = tmp_path / "run" / "last.ckpt"
    stored = torch.load(path, weights_only=True)
    assert stored["zoo"]["canonical"] == "GDN:head_dim=16:heads=1,SWA:heads=2:window=8"
    assert stored["zoo"]["tokenizer"] == "byte-257"
    assert stored["zoo"]["tokens_seen"] == 768
    assert stored["zoo"]["layers"][1]["options"]["window"] == 8
    assert stored["hyper_parameters"]["vocab_size"] == 257
    model = load_model(path).model
    module = HybridLMModule.load_from_checkpoint(path)
    ids = torch.randint(0, 257, (2, 16))
    torch.testing.assert_close(model(ids), module.built().eval()(ids), rtol=0, atol=0)


def test_a_checkpoint_of_every_mixer_rebuilds_it_whole(tmp_path):
    """Buffers that no checkpoint holds, such as RetNet's decay, follow from the settings."""
    module = HybridLMModule(",".join(registered()), d_model=32, vocab_size=17)
    module.configure_model()
    checkpoint = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(checkpoint)
    torch.save(checkpoint, tmp_path / "every.ckpt")
    ids = torch.randint(0, 17, (2, 16))
    loaded = load_model(tmp_path / "every.ckpt").model
    torch.testing.assert_close(loaded(ids), module.built().eval()(ids), rtol=0, atol=0)


def test_validate_test_and_predict_read_the_checkpoint(zoo, tmp_path):
    zoo("fit")
    logged = read_metrics(tmp_path / "run")
    zoo("validate", "--ckpt_path", "last")
    zoo("test", "--ckpt_path", "last")
    zoo("predict", "--ckpt_path", "last")
    assert read_metrics(tmp_path / "run") == logged  # evaluating a run afterwards hides nothing of its training
    with (tmp_path / "run" / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert logged
    assert rows
    assert all(float(row["nll"]) > 0 and int(row["tokens"]) > 0 for row in rows)


def test_a_task_trains_by_the_same_command_and_reports_accuracy(zoo):
    rows = zoo(
        "fit",
        "--data={class_path: zoo.data.TaskData, init_args: {task: overwrite, val_rows: 8}}",
        "--budget.batch_tokens=72",
        "--budget.tokens=144",
        "--model.lr_scheduler.init_args.warmup_steps=0",
        "--trainer.val_check_interval=2",
        "--trainer.check_val_every_n_epoch=null",
    )
    (last,) = [row for row in rows if "val/accuracy" in row]
    assert 0 <= last["val/accuracy"] <= 1
    assert "val/bpb" not in last


# ---------------------------------------------------------------------------------------------------------- wrong input
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.pattern", "GND,SWA"], r"unknown mixer 'GND'; did you mean 'GDN'\?"),
        (["--model.pattern", "GDN,GDN,SWA"], "the pattern holds 3 layers, but n_layers is 2"),
        (["--model.mixers.SWA.win", "8"], r"SWA has no option 'win'; did you mean 'window'\?"),
        (["--model.mixers.SWA.heads", "3"], "heads"),
        (["--model.preset", "gnd-h1"], r"unknown preset 'gnd-h1'"),
        (["--model.patern", "GA"], r"Did you mean model\.pattern\?"),
        (["--model.d_model", "big"], "model.d_model: expected a whole number, got big"),
        (["--model={pattern: GDN, SWA: null}"], "'SWA' is a mixer, not a setting of the model"),
        (["--data.init_args.seq_len", "1"], "seq_len is 1, but a row needs at least 2"),
        (["--data.init_args.source", "nowhere"], "^data: no file or folder 'nowhere'; write `excerpt`"),
        (["--budget.batch_tokens", "100"], "batch_tokens is 100, no multiple of the row length 32; the next is 128"),
        (["--budget.tokens", "0"], "budget.tokens must be at least 1"),
        (["--model.lr_scheduler.init_args.warmup_steps", "9"], "9 warm-up steps do not fit into a run of 6 steps"),
        (["--ckpt_path", "last"], "there is no .*last.ckpt; leave the option out to train from scratch"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--ckpt_path", "best"], "there is no .*best.ckpt; leave the option out"),
        (["--ckpt_path", "hpc"], "means nothing to a new process"),
        (["--seed_everything", "-1"], "seed_everything must lie in 0"),
        (["--budget.token", "5"], r"Did you mean budget\.tokens\?"),
        (["--trainer.max_steps", "0"], r"trainer\.max_steps is 0, but a run has at least 1 step"),
        (["--budget.tokens", "null", "--trainer.max_steps", "0"], r"trainer\.max_steps is 0, but"),
        (["--model.total_steps", "3"], r"model\.total_steps is 3, but budget\.tokens makes 6 steps"),
        (["--model.vocab_size", "300"], r"model\.vocab_size follows from the data"),
        (["--trainer.devices", "0"], r"^trainer \(accelerator cpu, devices 0\): .*not a valid input using cpu"),
        (["--trainer.devices=-2"], r"^trainer \(accelerator cpu, devices -2\): .*should be an int > 0"),
        (
            ["--trainer.precision", "transformer-engine"],
            r"^trainer \(accelerator cpu, precision transformer-engine\): ",
        ),
        (["--trainer.accumulate_grad_batches", "0"], r"trainer\.accumulate_grad_batches is 0; give at least 1"),
        (["--trainer.val_check_interval", "0"], r"trainer\.limit_val_batches 0 leaves validation out"),
        (["--trainer.max_steps", "7"], "it may only cut the 6 steps"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_wrong_input_is_named_in_one_message_and_nothing_is_trained(zoo, tmp_path, words, message):
    with pytest.raises(UserError, match=message) as caught:
        zoo("fit", *words)
    assert len(str(caught.value)) < 600
    assert not list(tmp_path.glob("run/*.ckpt"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_gpu_that_is_not_here_is_named(zoo, tmp_path):
    with pytest.raises(UserError, match=r"^trainer \(accelerator gpu\): No supported gpu backend found.*`zoo doctor`"):
        zoo("fit", "--trainer.accelerator", "gpu")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("setting", ["--trainer.logger=false", "--trainer.log_every_n_steps=0"])
def test_a_run_without_logs_trains_what_one_with_logs_does(zoo, tmp_path, setting):
    zoo("fit", root="logged")
    zoo("fit", setting)
    one, other = (torch.load(tmp_path / root / "last.ckpt", weights_only=True) for root in ("logged", "run"))
    assert one["state_dict"].keys() == other["state_dict"].keys()
    assert all(torch.equal(one["state_dict"][name], other["state_dict"][name]) for name in one["state_dict"])
    for verb in ("validate", "predict"):
        zoo(verb, setting, "--ckpt_path", "last")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("budgt: {tokens: 5, batch_tokens: 32}", r"unknown key 'budgt'; did you mean 'budget'\?"),
        ("", "holds no settings"),
        ("model: [", "is not valid YAML"),
    ],
    ids=["a misspelt key", "an empty file", "no YAML"],
)
def test_a_file_that_is_no_recipe_is_named(zoo, tmp_path, content, message):
    path = tmp_path / "second.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message) as caught:
        zoo("fit", "--config", str(path))
    assert str(path) in str(caught.value)


def test_a_runs_own_configuration_trains_the_run_again(zoo, recipe, tmp_path):
    first = losses(zoo("fit"))
    (written,) = (tmp_path / "run").glob("logs/version_0/config.yaml")
    recipe.write_text(written.read_text(encoding="utf-8"), encoding="utf-8")
    assert losses(zoo("fit", root="again")) == first
    assert len(losses(zoo("fit", "--budget.tokens", "1024", root="longer"))) == 8, "the steps follow from the budget"


def test_the_configuration_of_a_run_cut_short_trains_it_as_short(zoo, recipe, tmp_path):
    first = losses(zoo("fit", "--trainer.max_steps", "2"))
    recipe.write_text((tmp_path / "run/logs/version_0/config.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    assert losses(zoo("fit", root="again")) == first
    assert len(losses(zoo("fit", "--trainer.max_steps=-1", root="whole"))) == 6


def test_the_configuration_of_a_run_that_went_on_trains_it_from_its_beginning(zoo, recipe, tmp_path):
    whole = losses(zoo("fit", root="whole"))
    zoo("fit", "--trainer.max_steps", "2")
    zoo("fit", "--ckpt_path", "last")
    recipe.write_text((tmp_path / "run/logs/version_1/config.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    assert losses(zoo("fit", root="again")) == whole


def test_a_recipe_with_tokens_and_steps_is_refused(zoo, recipe):
    recipe.write_text(recipe.read_text().replace("trainer:\n", "trainer:\n  max_steps: 5\n"))
    with pytest.raises(UserError, match="keep one of them"):
        zoo("fit")


def test_a_finished_run_is_not_overwritten(zoo, tmp_path):
    zoo("fit")
    before = (tmp_path / "run" / "last.ckpt").read_bytes()
    with pytest.raises(UserError, match="already holds a run"):
        zoo("fit")
    assert (tmp_path / "run" / "last.ckpt").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.d_ff", "48"], "d_ff is 32 there and 48 here"),
        (["--model.mixers.SWA.window", "4"], r"layer 2, SWA: window is 8 there and 4 here"),
        (["--model.pattern", "GA"], "the layers are .*GDN.* there and .*GA"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_with_both_values(zoo, tmp_path, words, message):
    zoo("fit", "--trainer.max_steps", "2")
    before = (tmp_path / "run" / "last.ckpt").read_bytes()
    with pytest.raises(UserError, match=message):
        zoo("fit", "--ckpt_path", "last", *words)
    assert (tmp_path / "run" / "last.ckpt").read_bytes() == before


def test_data_of_another_vocabulary_than_the_checkpoint_is_refused_with_both_sizes(zoo, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    zoo("fit", "--trainer.max_steps", "2")
    before = (tmp_path / "run" / "last.ckpt").read_bytes()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.train_from_iterator(
        ["some words and some more words"],
        tokenizers.trainers.BpeTrainer(vocab_size=40, special_tokens=["<|endoftext|>"], show_progress=False),
    )
    tokenizer.save(str(tmp_path / "bpe.json"))
    size = tokenizer.get_vocab_size()
    for verb in ("fit", "validate"):
        with pytest.raises(UserError, match=f"vocab_size is 257 there and {size} here"):
            zoo(verb, "--ckpt_path", "last", "--data.init_args.tokenizer", str(tmp_path / "bpe.json"))
    assert (tmp_path / "run" / "last.ckpt").read_bytes() == before


def test_evaluating_without_a_checkpoint_is_refused(zoo):
    with pytest.raises(UserError, match="zoo validate needs trained weights"):
        zoo("validate")


# -------------------------------------------------------------------------------------------------------- configuration
def stored_mixers(tmp_path):
    return torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)["zoo"]["architecture"]["mixers"]


def test_two_flags_for_one_mixer_and_one_for_another_all_arrive(zoo, tmp_path):
    flags = ["--model.mixers.SWA.window", "4", "--model.mixers.SWA.heads", "1", "--model.mixers.GDN.conv", "2"]
    zoo("fit", "--trainer.max_steps", "1", *flags)
    assert stored_mixers(tmp_path) == {"SWA": {"heads": 1, "window": 4}, "GDN": {"heads": 1, "head_dim": 16, "conv": 2}}


def test_a_second_file_replaces_a_mixer_whole_and_leaves_the_others(zoo, tmp_path):
    second = tmp_path / "second.yaml"
    second.write_text("model: {mixers: {SWA: {window: 4}}}\n")
    zoo("fit", "--config", str(second), "--trainer.max_steps", "1")
    assert stored_mixers(tmp_path) == {"SWA": {"window": 4}, "GDN": {"heads": 1, "head_dim": 16}}


def test_settings_for_a_mixer_that_no_layer_is_are_noticed_and_not_stored(zoo, tmp_path, caplog):
    with caplog.at_level("INFO"):
        zoo("fit", "--trainer.max_steps", "1", "--model.pattern", "GA")
    assert "mixers: settings for SWA left out, no layer is SWA" in caplog.text
    assert stored_mixers(tmp_path) == {"GA": {"heads": 2}}


def test_print_config_prints_and_trains_nothing(zoo, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        zoo("fit", "--print_config")
    assert stop.value.code in (0, None)
    assert "pattern: GDN,SWA" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_a_signal_has_its_own_exit_status_and_other_exits_keep_theirs(capsys):
    ctrl_c = SystemExit(1)
    ctrl_c.__context__ = KeyboardInterrupt()  # as Lightning leaves it
    assert stop_status(ctrl_c) == 130
    assert "interrupted" in capsys.readouterr().err
    assert stop_status(SIGTERMException()) == 143
    assert stop_status(SystemExit(1)) is None


def test_the_last_step_is_saved_whatever_the_interval(zoo, tmp_path):
    every = ["--checkpoint.every_n_train_steps", "4"]
    straight = zoo("fit", root="straight")
    zoo("fit", *every, "--trainer.max_steps", "5", root="cut")
    assert read_checkpoint(tmp_path / "cut" / "last.ckpt")["global_step"] == 5
    again = zoo("fit", *every, "--ckpt_path", "last", root="cut")
    losses = [[row["train/loss"] for row in rows if "train/loss" in row] for rows in (straight, again)]
    assert losses[1] == losses[0]
    assert read_checkpoint(tmp_path / "cut" / "last.ckpt")["global_step"] == 6
