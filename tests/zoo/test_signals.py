"""SIGTERM, as a scheduler sends it: the step is finished and saved, the status is 143, and the run goes on later."""

import os
import signal
import subprocess
import sys

import pytest

from tests.zoo.ranks import ROOT, environment
from zoo.checkpoint import load_model
from zoo.run import read_metrics

SAVE_NEVER = ["--checkpoint.every_n_train_steps", "1000", "--budget.tokens", "1920"]
# The test's callback signals by itself, so that the step does not depend on the machine.
SIGNAL = "--trainer.callbacks={class_path: tests.zoo.ranks.SignalAt, init_args: {step: 3, during: DURING}}"


def losses(folder):
    return [row["train/loss"] for row in read_metrics(folder) if "train/loss" in row]


def ended(recipe, folder, *words):
    """The status and what was printed of a run of its own."""
    command = [sys.executable, "-m", "zoo", "fit", "--config", str(recipe), *SAVE_NEVER, *words]
    command += ["--trainer.default_root_dir", str(folder)]
    paths = {"PYTHONPATH": os.pathsep.join([environment()["PYTHONPATH"], str(ROOT)])}
    done = subprocess.run(
        command, cwd=folder.parent, env={**environment(), **paths}, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.dist
@pytest.mark.parametrize("devices", ["1", "2"])
def test_a_terminated_run_saves_its_step_ends_with_143_and_goes_on(zoo, recipe, tmp_path, devices):
    many = ["--trainer.devices", "2", "--trainer.strategy", "fsdp2"] * (devices == "2")
    status, text = ended(recipe, tmp_path / "run", SIGNAL.replace("DURING", "step"), *many)
    assert status == 143, text[-3000:]
    assert "SIGTERM: saved step 4; go on with --ckpt_path last" in text
    assert load_model(tmp_path / "run").facts["tokens_seen"] == 4 * 128
    zoo("fit", *SAVE_NEVER, "--ckpt_path", "last")
    zoo("fit", *SAVE_NEVER, root="straight")
    assert len(losses(tmp_path / "straight")) == 15
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "straight"), rel=0 if devices == "1" else 1e-5)


def test_a_validation_under_way_is_given_up_and_not_measured_by_half(zoo, tmp_path):
    validate = ["--trainer.val_check_interval", "4", "--trainer.check_val_every_n_epoch", "null"]
    before = signal.getsignal(signal.SIGTERM)
    zoo("fit", *SAVE_NEVER, *validate, SIGNAL.replace("DURING", "validation"))
    assert signal.getsignal(signal.SIGTERM) == before
    assert load_model(tmp_path / "run").facts["tokens_seen"] == 4 * 128
    rows = zoo("fit", *SAVE_NEVER, *validate, "--ckpt_path", "last")
    straight = zoo("fit", *SAVE_NEVER, *validate, root="straight")
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
    measured = {row["step"]: row["val/loss"] for row in straight if "val/loss" in row}
    assert {row["step"]: row["val/loss"] for row in rows if "val/loss" in row} == {
        step: loss for step, loss in measured.items() if step != 3
    }


def test_a_signal_between_micro_batches_waits_for_the_step(zoo, tmp_path):
    accumulate = ["--trainer.accumulate_grad_batches", "4"]
    zoo("fit", *SAVE_NEVER, *accumulate, SIGNAL.replace("DURING", "step"))
    zoo("fit", *SAVE_NEVER, *accumulate, "--ckpt_path", "last")
    zoo("fit", *SAVE_NEVER, *accumulate, root="straight")
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
