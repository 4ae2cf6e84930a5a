"""Compression: rows, the decoder that restores them, and runs that go on, are loaded, and are refused where due."""

import math
import sys

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.flop_counter import FlopCounterMode

from tests.zoo.ranks import launch
from zoo.architecture import settle
from zoo.checkpoint import load_model, read_checkpoint
from zoo.cli import main
from zoo.data import TaskData, TokenData
from zoo.data.tasks import make_task
from zoo.errors import UserError
from zoo.explain import explain
from zoo.generate import generate
from zoo.ledger import LedgerRow, cost
from zoo.model import HybridLM
from zoo.module import HybridLMModule
from zoo.run import read_metrics
from zoo.verbs.train import run_lightning
from zoo_layers.mixer import registered

RECIPE = """
seed_everything: 2
budget: {tokens: 3072, batch_tokens: 512}
model: {pattern: GDN, d_model: 16, mlp: none, mixers: {GDN: {heads: 1, head_dim: 16}, GA: {heads: 2}}}
data:
  class_path: zoo.data.TaskData
  init_args: {task: mad_compress, val_rows: 20, test_rows: 20}
trainer:
  accelerator: cpu
  num_sanity_val_steps: 0
  enable_progress_bar: false
  default_root_dir: ROOT
checkpoint: {every_n_train_steps: 1}
"""


def model_of(pattern, vocab=16, **settings):
    return HybridLM.from_pattern(pattern, d_model=32, vocab_size=vocab, decoder=True, seed=0, **settings)


@pytest.fixture
def zoo(tmp_path, monkeypatch):
    """A verb that trains, with the recipe and what is typed behind it."""
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("ROOT", str(tmp_path / "run")), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["zoo"])
    return lambda verb, *words: run_lightning(verb, ["--config", str(path), *words])


# ----------------------------------------------------------------------------------------------------------------- rows
def test_rows_are_even_and_every_id_is_a_label():
    task = make_task("mad_compress")
    rows = [task.block(split, 0, 1) for split in ("train", "val", "test")]
    for each in rows:
        np.testing.assert_array_equal(each.targets, each.tokens)
        assert (each.tokens[:, -1] == 15).all()
        assert not each.slices["gap_to_32"][:, 15:].any()
        assert each.slices["gap_to_2"][:, 29:31].all()
        assert not any(mask[:, 31].any() for mask in each.slices.values())
    counts = np.bincount(np.concatenate([each.tokens[:, :-1] for each in rows]).ravel())
    assert len(counts) == 15
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 14 + 6 * math.sqrt(2 * 14)


# -------------------------------------------------------------------------------------------------------------- decoder
@pytest.mark.parametrize("mixer", registered())
def test_every_mixer_hands_the_whole_row_to_the_decoder(mixer):
    model = model_of(mixer, mlp="none")
    ids = torch.randint(0, 16, (2, 9), generator=torch.Generator().manual_seed(3))
    model.nll(ids, ids)[0].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert all(p.grad.abs().sum() > 0 for p in model.decoder.parameters())
    # No other way leads from the ids to the answers than the last vector.
    x = model.hidden(ids)
    last = HybridLM.hidden.__get__(model)
    model.decoder, decoder = None, model.decoder
    torch.testing.assert_close(decoder(last(ids)[:, -1:].expand(-1, 9, -1)), x, rtol=0, atol=0)


def test_the_decoder_is_the_formula_for_any_width():
    for d_model in (16, 15):
        decoder = HybridLM.from_pattern("LA:heads=1", d_model=d_model, vocab_size=5, decoder=True, seed=0).decoder
        x = torch.randn(2, 7, d_model, generator=torch.Generator().manual_seed(1))
        half = math.ceil(d_model / 2)
        for t in range(7):
            angles = [t / 10_000 ** (2 * i / d_model) for i in range(half)]
            places = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)][:d_model])
            torch.testing.assert_close(decoder(x)[:, t], decoder.mlp(x[:, -1] + places), rtol=1e-5, atol=1e-6)


def test_first_values_come_of_seed_and_name_and_a_tied_head_stays_tied():
    plain = HybridLM.from_pattern("GDN,GA", d_model=32, vocab_size=16, tie=True, seed=0)
    tied = model_of("GDN,GA", tie=True)
    assert tied.head.weight is tied.embedding.weight
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tied.state_dict()[name], tensor), name
    added = tied.state_dict().keys() - plain.state_dict().keys()
    assert added == {"decoder.mlp.to_up.weight", "decoder.mlp.to_down.weight"}


def test_counts_and_flops_state_the_decoder_apart():
    settings = {"n_layers": 2, "d_model": 32, "vocab_size": 16}
    plain, other, third = (
        settle("GA", **settings),
        settle("GA", decoder=True, **settings),
        settle("LA", decoder=True, **settings),
    )
    one, two, three = (cost(each, 32) for each in (plain, other, third))
    assert one.decoder == one.decoder_flops == 0
    assert two.decoder == three.decoder == two.total - one.total == 2 * 32 * 96
    assert two.decoder_flops == two.flops - one.flops == 2 * two.decoder
    assert two.non_embedding == one.non_embedding
    assert two.state == one.state
    row = LedgerRow(three, two, "params", 0.5)
    assert str(row).endswith(" · decoder 6,144 params, 12,288 FLOPs in both")
    assert str(LedgerRow(two, one, "params", 0.5)).endswith("12,288 FLOPs (reference 0 params, 0 FLOPs)")
    assert "decoder" not in str(LedgerRow(one, one, "params", 0.5))
    assert row.to_plain()["own"]["params"]["decoder"] == 6144
    table = explain(other, context=32)
    assert table.flops == two.flops
    assert table.parameters == two.total == table.inner_parameters + table.outside_parameters - 32
    # The counter sees what the model says, but for the masked half of the context, which the reference multiplies too.
    counts = [FlopCounterMode(display=False) for _ in range(2)]
    ids = torch.zeros(1, 32, dtype=torch.long)
    for counter, each in zip(counts, (plain, other)):
        with counter:
            each.build(seed=0)(ids)
    assert counts[1].get_total_flops() - counts[0].get_total_flops() == 32 * two.decoder_flops


def test_a_model_with_a_decoder_has_no_next_token():
    model, ids = model_of("GDN"), torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(UserError, match="predicts no next token"):
        generate(model, [[1, 2]], max_new_tokens=3)
    with pytest.raises(ValueError, match="packing given to a model with a decoder"):
        model(ids, packing=[0, 2, 4])
    with pytest.raises(ValueError, match="caches given to a model with a decoder"):
        model(ids, HybridLM.from_pattern("GDN", d_model=32, vocab_size=16).new_caches(1, 4))


# ----------------------------------------------------------------------------------------------------------------- runs
def test_a_tiny_model_learns_to_restore_more_than_chance(tmp_path):
    torch.manual_seed(0)
    options = {"seq_len": 8, "vocab": 8}
    data = TaskData("mad_compress", options=options, batch_tokens=8 * 64, val_rows=500)
    module = HybridLMModule(
        "GDN",
        d_model=32,
        vocab_size=8,
        mlp="none",
        mixers={"GDN": {"heads": 1, "head_dim": 32}},
        decoder=data.decoder,
        total_steps=300,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    )
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", max_steps=300, default_root_dir=tmp_path, enable_checkpointing=False, **quiet)
    trainer.fit(module, data)
    (values,) = trainer.validate(module, data, verbose=False)
    print(values)
    chance = 7 / 8 * math.log(7)  # the last id is known
    assert values["val/loss"] < 0.8 * chance
    assert values["val/accuracy"] > 1.3 * (1 + 7 / 7) / 8


def test_the_data_asks_for_the_decoder_and_a_run_goes_on_is_tested_and_loaded(zoo, tmp_path, capsys):
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert zoo("fit", "--trainer.max_steps", "3") == 0
    assert zoo("fit", "--ckpt_path", "last") == 0
    assert zoo("fit", "--trainer.default_root_dir", str(whole)) == 0
    resumed, straight = (read_checkpoint(folder / "last.ckpt")["state_dict"] for folder in (run, whole))
    assert any(name.startswith("model.decoder.") for name in straight)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in straight.items())
    assert zoo("test", "--ckpt_path", "last") == 0
    assert "test/class_accuracy" in capsys.readouterr().out
    loaded = load_model(run)
    assert loaded.architecture.decoder
    assert loaded.model(torch.zeros(1, 32, dtype=torch.long)).shape == (1, 32, 16)
    assert main(["consolidate", str(run), "--out", str(tmp_path / "model.safetensors")]) == 0
    again = load_model(tmp_path / "model.safetensors").model.state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in loaded.model.state_dict().items())
    capsys.readouterr()
    assert main(["generate", "--ckpt", str(run), "--prompt", "To be"]) == 2
    assert "predicts no next token, so it cannot continue a text" in capsys.readouterr().err
    with pytest.raises(UserError, match="decoder is True there and False here"):
        zoo("test", "--ckpt_path", "last", "--data.init_args.task", "mad_copy", "--budget.batch_tokens", "512")


def test_a_decoder_that_does_not_fit_the_data_is_refused(zoo, tmp_path):
    with pytest.raises(UserError, match=r"model\.decoder follows from the data and is never written"):
        zoo("fit", "--model.decoder", "false")
    sizes = {"d_model": 16, "vocab_size": 257, "total_steps": 1}
    trainer = Trainer(accelerator="cpu", max_steps=1, logger=False, default_root_dir=tmp_path)
    with pytest.raises(UserError, match=r"model\.decoder is False, but the data asks for True"):
        trainer.fit(HybridLMModule("GDN", **sizes), TaskData("mad_compress", batch_tokens=64))
    with pytest.raises(UserError, match=r"model\.decoder is True, but the data asks for False"):
        trainer.fit(HybridLMModule("GDN", decoder=True, **sizes), TokenData(seq_len=32, batch_tokens=64))


@pytest.mark.dist
def test_two_processes_train_the_decoder_of_one(zoo, tmp_path):
    alone, sharded = tmp_path / "alone", tmp_path / "sharded"
    words = ["--model.pattern", "GDN,GA", "--trainer.gradient_clip_val", "0.3"]
    zoo("fit", *words, "--trainer.default_root_dir", str(alone))
    words += ["--trainer.default_root_dir", str(sharded), "--trainer.strategy", "fsdp2"]
    config = ["--config", str(tmp_path / "recipe.yaml")]
    assert launch(tmp_path, [["fit", *config, *words]]) == [("done", "done")]
    one, two = ([row["train/loss"] for row in read_metrics(each) if "train/loss" in row] for each in (alone, sharded))
    assert len(one) == 6
    torch.testing.assert_close(torch.tensor(two), torch.tensor(one), rtol=1e-5, atol=1e-5)
    wanted = load_model(alone).model.state_dict()
    for name, tensor in load_model(sharded).model.state_dict().items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-4, atol=1e-4, msg=name)
