"""FSDP2 over two gloo processes trains what one process trains."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zoo.architecture import settle
from zoo.errors import UserError
from zoo.run import read_metrics
from zoo.sharding import shard

ROOT = Path(__file__).parents[2]
STRATEGY = (
    "{class_path: lightning.pytorch.strategies.ModelParallelStrategy, init_args: "
    "{data_parallel_size: 2, tensor_parallel_size: 1, save_distributed_checkpoint: false}}"
)


def test_weights_of_two_types_are_refused_before_they_are_sharded():
    model = settle("GDN,SWA", d_model=32, vocab_size=17).build(device="meta").to(torch.bfloat16)
    with pytest.raises(UserError, match="bfloat16 and float32, cannot be sharded"):
        shard(model, mesh=None)


@pytest.mark.dist
def test_two_processes_have_the_losses_weights_and_clipping_of_one(zoo, recipe, tmp_path):
    """One launch for a hybrid of three kinds of layers: two imports cost more than the steps."""
    settings = ["--model.pattern", "M2,GDN,SWA", "--model.n_layers", "3", "--trainer.gradient_clip_val", "0.3"]
    settings += ["--trainer.val_check_interval", "3", "--trainer.check_val_every_n_epoch", "null"]
    alone = zoo("fit", *settings, root="alone")
    words = ["fit", "--config", str(recipe), *settings, "--trainer.default_root_dir", str(tmp_path / "sharded")]
    command = [sys.executable, "-m", "zoo", *words, "--trainer.devices", "2", "--trainer.strategy", STRATEGY]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "layers"), str(ROOT / "kernels")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    sharded = read_metrics(tmp_path / "sharded")
    for name in ("train/loss", "grad_norm", "val/loss"):
        one = [row[name] for row in alone if name in row]
        two = [row[name] for row in sharded if name in row]
        assert len(one) == len(two) > 0
        torch.testing.assert_close(torch.tensor(two), torch.tensor(one), rtol=1e-5, atol=1e-5, msg=name)
    first, second = (torch.load(tmp_path / root / "last.ckpt", weights_only=True) for root in ("alone", "sharded"))
    assert first["state_dict"].keys() == second["state_dict"].keys()
    for name, tensor in first["state_dict"].items():
        torch.testing.assert_close(second["state_dict"][name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    assert second["zoo"]["tokens_seen"] * 2 == first["zoo"]["tokens_seen"]
