"""FSDP2 over gloo processes trains what one process trains: every setting of it, in one launch."""

import sys

import pytest
import torch

from tests.zoo.conftest import RECIPE
from tests.zoo.ranks import ONE_FILE, Uneven, launch, recipe_in, recipe_words
from zoo.checkpoint import load_model, read_checkpoint
from zoo.run import read_metrics
from zoo.verbs.train import run_lightning

# fp32: sums in another order. bf16: a matrix product of other shapes rounds otherwise, and steps add it up.
CLOSE = {"fp32": 1e-5, "bf16": 5e-3}
VALIDATE = ["--trainer.val_check_interval", "3", "--trainer.check_val_every_n_epoch", "null"]
HYBRID = ["--model.pattern", "M2,GDN,SWA", "--model.n_layers", "3", "--trainer.gradient_clip_val", "0.3", *VALIDATE]
UNEVEN = ["--data.class_path", "tests.zoo.ranks.Uneven", "--trainer.accumulate_grad_batches", "2"]
UNEVEN += ["--trainer.gradient_clip_val", "0"]  # clipping would hide a gradient of another scale
SGD = ["--model.optimizer", "torch.optim.SGD", "--model.optimizer.lr", "1.0", "--model.lr_scheduler.warmup_steps", "0"]
TYPES = "--trainer.callbacks=tests.zoo.ranks.GatheredTypes"
# name: (settings of both, of the sharded run alone, how close)
RUNS = {
    "hybrid": (HYBRID, [], "fp32"),
    "tied": (["--model.tie", "true", *HYBRID], [], "fp32"),
    "uneven labels": ([*UNEVEN, *SGD, "--trainer.max_steps", "1"], [], "fp32"),
    "selective": ([], ["--model.recompute", "selective"], "fp32"),
    "one file": ([], ["--trainer.strategy", ONE_FILE], "fp32"),
    "mixed": (["--trainer.precision", "bf16-mixed"], ["--model.recompute", "full", TYPES], "bf16"),
    "true": (["--model.pattern", "M2,GDN", "--trainer.precision", "bf16-true"], [], "bf16"),
}


def compare(folder, name, close):
    """Losses and norms of both runs, and the weights they end with."""
    alone, sharded = (read_metrics(folder / kind / name) for kind in ("alone", "sharded"))
    for metric in ("train/loss", "grad_norm", "val/loss"):
        one, two = ([row[metric] for row in rows if metric in row] for rows in (alone, sharded))
        assert len(one) == len(two), metric
        assert one or metric == "val/loss"
        limit = close if metric != "grad_norm" else 4 * close
        torch.testing.assert_close(
            torch.tensor(two), torch.tensor(one), rtol=limit, atol=limit, msg=f"{name}: {metric}"
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every run of RUNS, alone and on two processes."""
    folder = tmp_path_factory.mktemp("fsdp")
    words = recipe_in(folder, RECIPE)
    commands = []
    for name, (both, sharded, _) in RUNS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["zoo"])
            run_lightning("fit", [*words, str(folder / "alone" / name), *both])
        strategy = ["--trainer.strategy", "fsdp2"] * ("--trainer.strategy" not in sharded)
        commands.append(["fit", *words, str(folder / "sharded" / name), *both, *sharded, *strategy])
    commands.append(["validate", *words, str(folder / "sharded" / "tied"), *RUNS["tied"][0], "--ckpt_path", "last"])
    commands[-1] += ["--trainer.strategy", "fsdp2"]
    lightnings = "{class_path: ModelParallelStrategy, init_args: {data_parallel_size: 2, tensor_parallel_size: 1}}"
    commands.append(["fit", *words, str(folder / "other"), "--trainer.strategy", lightnings])
    commands.append(["fit", *words, str(folder / "sharded" / "hybrid"), "--ckpt_path", "last", "--model.d_ff", "48"])
    commands[-1] += [*HYBRID, "--trainer.strategy", "fsdp2"]
    answers = launch(folder, commands)
    assert answers[: len(RUNS) + 1] == [("done", "done")] * (len(RUNS) + 1)
    assert all("--trainer.strategy fsdp2" in answer for answer in answers[-2])
    assert all("d_ff is 32 there and 48 here" in answer for answer in answers[-1])
    return folder


@pytest.mark.dist
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_have_the_losses_norms_and_weights_of_one(folder, name):
    close = CLOSE[RUNS[name][2]]
    compare(folder, name, close)
    one, two = (load_model(folder / kind / name) for kind in ("alone", "sharded"))
    assert one.facts == two.facts
    wanted = one.model.state_dict()
    for key, tensor in two.model.state_dict().items():
        assert tensor.dtype == wanted[key].dtype, key
        # The first steps of Adam turn the sign of a gradient near zero into a whole step.
        limit = 1e-6 if name == "uneven labels" else 10 * close
        torch.testing.assert_close(tensor, wanted[key], rtol=limit, atol=limit, msg=lambda t, k=key: f"{name} {k}: {t}")


@pytest.mark.dist
def test_the_uneven_batch_is_uneven_and_divided_by_its_labels(folder, monkeypatch):
    """The gradient is that of the whole batch in one piece, not a mean over micro-batches and ranks."""
    data = Uneven(str(folder / "text"), seq_len=32, batch_tokens=128, val_fraction=0.2)
    data.setup("fit")
    batch = data.on_after_batch_transfer(data.train_dataloader().batch(0), 0)
    counts = (batch["labels"].reshape(4, 32) != -100).sum(-1).tolist()
    assert min(counts) == 0 < max(counts)
    assert len(set(counts)) > 2
    words = [*recipe_words(folder), str(folder / "alone" / "whole"), *UNEVEN, *SGD, "--trainer.max_steps", "1"]
    monkeypatch.setattr(sys, "argv", ["zoo"])
    run_lightning("fit", [*words, "--trainer.accumulate_grad_batches", "1"])
    wanted = load_model(folder / "alone" / "whole").model.state_dict()
    for key, tensor in load_model(folder / "sharded" / "uneven labels").model.state_dict().items():
        torch.testing.assert_close(tensor, wanted[key], rtol=1e-6, atol=1e-6, msg=lambda text, k=key: f"{k}: {text}")


@pytest.mark.dist
def test_a_sharded_run_is_measured_as_it_was_when_it_ended(folder):
    rows = read_metrics(folder / "sharded" / "tied")
    trained = [row["val/loss"] for row in rows if "val/loss" in row]
    text = (folder / "sharded" / "tied" / "logs" / "version_1" / "metrics.csv").read_text()
    assert f"{trained[-1]:.4f}"[:5] in text


@pytest.mark.dist
def test_bf16_true_keeps_the_rates_of_both_kinds_in_fp32_and_all_else_in_bf16(folder):
    kinds = {name: p.dtype for name, p in load_model(folder / "sharded" / "true").model.named_parameters()}
    rates = {name for name in kinds if name.rpartition(".")[2] in ("A_log", "dt_bias", "D")}
    assert len(rates) == 5
    assert {name for name, dtype in kinds.items() if dtype == torch.float32} == rates


@pytest.mark.dist
def test_a_file_of_two_processes_holds_what_one_process_would_write(folder):
    one, two = (read_checkpoint(folder / kind / "one file" / "last.ckpt") for kind in ("alone", "sharded"))
    assert one["state_dict"].keys() == two["state_dict"].keys()
    first, second = one["optimizer_states"][0], two["optimizer_states"][0]
    assert [g["params"] for g in first["param_groups"]] == [g["params"] for g in second["param_groups"]]
    for place, state in first["state"].items():
        torch.testing.assert_close(second["state"][place]["exp_avg"], state["exp_avg"], rtol=1e-3, atol=1e-5)


@pytest.mark.dist
@pytest.mark.slow
def test_four_processes_in_two_replicas_have_the_losses_of_one(tmp_path):
    words = recipe_in(tmp_path, RECIPE)
    strategy = "{class_path: zoo.sharding.ShardedStrategy, init_args: {replicas: 2, reshard: false}}"
    commands = [["fit", *words, str(tmp_path / "sharded" / "two"), *HYBRID, "--trainer.strategy", strategy]]
    commands.append(["fit", *words, str(tmp_path / "three"), "--trainer.strategy", strategy.replace("2", "3", 1)])
    answers = launch(tmp_path, commands, ranks=4)
    assert answers[0] == ("done",) * 4
    assert all("cannot hold 3 replicas" in answer for answer in answers[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["zoo"])
        run_lightning("fit", [*words, str(tmp_path / "alone" / "two"), *HYBRID])
    compare(tmp_path, "two", CLOSE["fp32"])
