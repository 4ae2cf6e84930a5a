"""A tiny run that the tests of this floor share: a few documents, two layers, a handful of steps."""

import logging
import sys

import pytest

from zoo.run import read_metrics
from zoo.verbs.train import run_lightning

RECIPE = """
seed_everything: 1
budget: {tokens: 768, batch_tokens: 128}
model:
  pattern: GDN,SWA
  n_layers: 2
  d_model: 32
  d_ff: 32
  mixers: {GDN: {heads: 1, head_dim: 16}, SWA: {heads: 2, window: 8}, GA: {heads: 2}, M2: {head_dim: 16, state: 16}}
  optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 1.0e-2}}
  lr_scheduler: {class_path: zoo.optim.WarmupCosine, init_args: {warmup_steps: 2}}
data:
  class_path: zoo.data.TokenData
  init_args: {source: SOURCE, seq_len: 32, val_fraction: 0.2}
trainer:
  accelerator: cpu
  gradient_clip_val: 1.0
  num_sanity_val_steps: 0
  limit_val_batches: 2
  enable_progress_bar: false
  log_every_n_steps: 1
  default_root_dir: ROOT
checkpoint: {every_n_train_steps: 1}
"""


@pytest.fixture
def text(tmp_path):
    """A folder of forty short documents."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(40):
        words = " ".join(f"word{(number * 7 + i) % 23}" for i in range(5 + number % 9))
        (folder / f"{number:02d}.txt").write_text(f"document {number}: {words}\n", encoding="utf-8")
    return folder


@pytest.fixture
def recipe(tmp_path, text):
    """A recipe file of six steps over :func:`text`."""
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("SOURCE", str(text)).replace("ROOT", str(tmp_path / "run")), encoding="utf-8")
    return path


@pytest.fixture
def zoo(monkeypatch, recipe, tmp_path):
    """Run a Lightning verb on the recipe, in this process; returns the logged rows of the run's folder."""

    def run(verb, *words, root=None):
        monkeypatch.setattr(sys, "argv", ["zoo"])
        for name in ("lightning.pytorch", "lightning.fabric", "lightning_utilities.core.rank_zero"):
            logging.getLogger(name).setLevel(logging.INFO)  # a comparison in the same process silences them
        folder = tmp_path / (root or "run")
        run_lightning(verb, ["--config", str(recipe), "--trainer.default_root_dir", str(folder), *words])
        return read_metrics(folder)

    return run
