"""Every precision of the trainer carries packed documents: the weights change their type, the packing does not."""

import csv

import pytest
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import move_data_to_device

from zoo.checkpoint import load_model
from zoo_kernels.packing import Packing
from zoo_layers.mixer import registered

PLUGINS = {
    "32-true": Precision(),
    "64-true": DoublePrecision(),
    "16-true": HalfPrecision("16-true"),
    "bf16-true": HalfPrecision("bf16-true"),
    "bf16-mixed": MixedPrecision("bf16-mixed", "cpu"),
}
# Every mixer that keeps something in fp32, in small: Mamba-2's and the delta family's rates, RetNet's decay.
PATTERN = "GDN:heads=1:head_dim=16,M2:head_dim=16:state=16,KDA:heads=1:head_dim=16,RET:heads=1:head_dim=16,SWA"
WORDS = ["--model.pattern", PATTERN, "--model.n_layers", "5", "--data.init_args.layout", "packed"]

BY_STEP = ["--trainer.check_val_every_n_epoch=null"]


@pytest.mark.parametrize("precision", PLUGINS)
def test_a_packing_passes_every_precision_as_it_is(precision):
    packing = Packing.from_offsets([0, 3, 70])
    batch = {"input_ids": torch.zeros(1, 70, dtype=torch.int64), "packing": packing, "weights": torch.ones(2)}
    moved = move_data_to_device(PLUGINS[precision].convert_input(batch), torch.device("cpu"))
    assert moved["packing"].offsets == (0, 3, 70)
    assert moved["packing"].cu_seqlens.dtype == moved["packing"].chunk_table.dtype == torch.int32
    assert moved["packing"].host_offsets.dtype == moved["input_ids"].dtype == torch.int64


# bf16 weights move a loss near ln 257 by about a hundredth; float64 agrees with fp32 to its rounding.
@pytest.mark.parametrize(
    ("precision", "dtype", "close"),
    [
        ("64-true", torch.float64, 1e-5),
        ("bf16-true", torch.bfloat16, 2e-2),
        ("bf16-mixed", torch.float32, 2e-2),
    ],
)
def test_a_packed_run_has_the_losses_of_fp32_and_keeps_its_rates_in_fp32(zoo, tmp_path, precision, dtype, close):
    steps = ["--trainer.max_steps=2", "--trainer.val_check_interval=2", *BY_STEP]
    first = zoo("fit", *WORDS, *steps, root="fp32")
    rows = zoo("fit", *WORDS, *steps, "--trainer.precision", precision)
    for name in ("train/loss", "val/loss"):
        wanted = torch.tensor([row[name] for row in first if name in row])
        found = torch.tensor([row[name] for row in rows if name in row])
        torch.testing.assert_close(found, wanted, rtol=close, atol=0)
    stored = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)["state_dict"]
    kept = {name for mixer in registered().values() for name in mixer().build(32).FLOAT32}
    rate = torch.float64 if dtype == torch.float64 else torch.float32
    found = {name: tensor.dtype for name, tensor in stored.items()}
    assert found == {name: rate if name.rpartition(".")[2] in kept else dtype for name in stored}
    assert any(name.endswith("A_log") for name in stored)
    assert load_model(tmp_path / "run").model.embedding.weight.dtype == dtype


def test_a_run_is_measured_alike_in_every_precision(zoo, tmp_path):
    rows = zoo("fit", *WORDS, "--trainer.val_check_interval=6", *BY_STEP)
    (trained,) = [row["val/loss"] for row in rows if "val/loss" in row]
    for number, (precision, close) in enumerate({**dict.fromkeys(PLUGINS, 2e-2), "64-true": 1e-5}.items(), start=1):
        zoo("validate", *WORDS, "--trainer.precision", precision, "--ckpt_path", "last")
        with (tmp_path / f"run/logs/version_{number}/metrics.csv").open(newline="") as file:
            (row,) = csv.DictReader(file)
        assert float(row["val/loss"]) == pytest.approx(trained, rel=close), precision


def test_a_run_in_bf16_goes_on_and_is_measured_as_one_in_fp32(zoo):
    precision = ["--trainer.precision", "bf16-true"]
    whole = zoo("fit", *precision, "--trainer.max_steps", "4", root="whole")
    zoo("fit", *precision, "--trainer.max_steps", "2")
    rows = zoo("fit", *precision, "--trainer.max_steps", "4", "--ckpt_path", "last")
    assert [row["train/loss"] for row in rows] == [row["train/loss"] for row in whole]
    for verb in ("validate", "test", "predict"):
        zoo(verb, *precision, "--ckpt_path", "last")
