"""A run that was killed goes on as if it had not been: the same losses and text, on other numbers of ranks too."""

import shutil
import sys

import pytest
import torch

from tests.zoo.conftest import RECIPE
from tests.zoo.ranks import launch, recipe_in
from zoo.checkpoint import load_model, read_checkpoint, read_facts, whole_checkpoint
from zoo.data import TokenData
from zoo.run import read_metrics
from zoo.verbs.train import run_lightning

STEPS, FIRST, SECOND = 20, 13, 16
LOGGER = (
    "{class_path: lightning.pytorch.loggers.CSVLogger, init_args: "
    "{save_dir: ROOT, name: logs, flush_logs_every_n_steps: 1}}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """straight: 2 ranks, never stopped. killed: 2 ranks, killed twice. widened: 1 rank, then 2. narrowed: 2, then 1."""
    folder = tmp_path_factory.mktemp("resume")
    words = recipe_in(folder, RECIPE)

    def fit(name, *more, ranks=2, resumed=False):
        command = ["fit", *words, str(folder / name), "--budget.tokens", str(128 * STEPS)]
        command += ["--trainer.logger", LOGGER.replace("ROOT", str(folder / name)), *more]
        return command + ["--ckpt_path", "last"] * resumed + ["--trainer.strategy", "fsdp2"] * (ranks > 1)

    def alone(*arguments, **settings):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["zoo"])
            run_lightning(*_split(fit(*arguments, ranks=1, **settings)))

    def kill(step):
        return [f"--trainer.callbacks={{class_path: tests.zoo.ranks.KillAt, init_args: {{step: {step}}}}}"]

    alone("alone")
    alone("widened", "--trainer.max_steps", str(FIRST))
    commands = [fit("straight"), fit("widened", resumed=True), fit("narrowed", "--trainer.max_steps", str(FIRST))]
    launch(folder, [*commands, fit("killed", *kill(FIRST))], status=-9)
    launch(folder, [fit("killed", *kill(SECOND), resumed=True)], status=-9)
    shutil.copytree(folder / "killed", folder / "stopped")
    launch(folder, [fit("killed", resumed=True)])
    alone("narrowed", resumed=True)
    return folder


def _split(command):
    return command[0], command[1:]


def losses(folder):
    return [row["train/loss"] for row in read_metrics(folder) if "train/loss" in row]


def position(path):
    stored = read_facts(path) if path.is_dir() else read_checkpoint(path)
    return stored["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]


@pytest.mark.dist
def test_a_run_killed_twice_has_the_losses_and_the_text_of_one_never_killed(folder):
    stopped = position(folder / "stopped" / "last.ckpt")
    data = TokenData(str(folder / "text"), seq_len=32, batch_tokens=128, val_fraction=0.2)
    assert stopped["step"] == SECOND > FIRST > len(data.train_dataloader()), "both kills lie in the second epoch"
    assert len(losses(folder / "straight")) == STEPS
    assert losses(folder / "killed") == losses(folder / "straight")
    assert position(folder / "killed" / "last.ckpt") == position(folder / "straight" / "last.ckpt")


@pytest.mark.dist
@pytest.mark.parametrize("name", ["straight", "widened", "narrowed"])
def test_the_number_of_ranks_may_change_on_the_way(folder, name):
    for metric in ("train/loss", "grad_norm", "lr-AdamW/decay"):
        one, other = ([row[metric] for row in read_metrics(folder / run)] for run in ("alone", name))
        torch.testing.assert_close(torch.tensor(other), torch.tensor(one), rtol=1e-5, atol=1e-5, msg=metric)
    whole = position(folder / "alone" / "last.ckpt")
    assert position(folder / name / "last.ckpt")["order_hash"] == whole["order_hash"]
    assert (folder / name / "last.ckpt").is_dir() == (name != "narrowed")


@pytest.mark.dist
def test_a_sharded_folder_holds_what_one_file_would(folder):
    one, other = read_checkpoint(folder / "alone" / "last.ckpt"), whole_checkpoint(folder / "widened" / "last.ckpt")
    assert one["zoo"] == other["zoo"]
    first, second = one["optimizer_states"][0], other["optimizer_states"][0]
    assert [g["params"] for g in first["param_groups"]] == [g["params"] for g in second["param_groups"]]
    for place, state in first["state"].items():
        torch.testing.assert_close(second["state"][place]["exp_avg"], state["exp_avg"], rtol=1e-3, atol=1e-5)
    assert load_model(folder / "widened").facts == one["zoo"]
