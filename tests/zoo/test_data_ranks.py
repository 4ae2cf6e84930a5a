"""Two real processes: disjoint training rows, complete evaluation, metrics summed over ranks."""

import json
import os
import socket
import subprocess
import sys

import pytest

from zoo.data import ShardData, TokenData
from zoo.data.prepare import prepare

# Each rank trains and validates a bigram table and prints one line of JSON.
SCRIPT = """
import json, sys
import lightning.pytorch as pl
import torch
from zoo.data import ShardData, TokenData
from zoo.metrics import TokenLoss


class Bigram(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(257, 257)
        self.fed, self.metric, self.seen, self.result = [], TokenLoss(), 0, None

    def nll(self, batch):
        logits = self.table(batch["input_ids"]).flatten(0, -2)
        labels = batch["labels"].flatten()
        return torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")

    def training_step(self, batch, index):
        self.fed.append(batch["input_ids"].flatten().tolist())
        return self.nll(batch) / batch["tokens"]

    def validation_step(self, batch, index):
        self.seen += batch["tokens"]
        self.metric.update(self.nll(batch), batch["tokens"], batch["bytes"])

    def on_validation_epoch_end(self):
        self.result = {name: value.item() for name, value in self.metric.compute().items()}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


torch.manual_seed(0)
settings = {"seq_len": 64, "batch_tokens": 512, "val_tokens": 1984}
model, data = Bigram(), ShardData(sys.argv[1], **settings) if sys.argv[1:] else TokenData(**settings)
trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_steps=4, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
)
trainer.fit(model, data)
state = trainer.train_dataloader.state_dict()
trainer.limit_val_batches = 1.0
trainer.validate(model, data, verbose=False)
print("RESULT" + json.dumps({"fed": model.fed, "state": state, "result": model.result, "seen": model.seen}), flush=True)
"""


@pytest.mark.dist
@pytest.mark.parametrize("source", ["text", "shards"])
def test_two_processes_read_what_one_reads(tmp_path, source):
    settings = {"seq_len": 64, "batch_tokens": 512, "val_tokens": 1984}
    words = []
    if source == "shards":
        prepare("excerpt", tmp_path / "shards", shard_tokens=50_000, val_share=0.1)
        words = [str(tmp_path / "shards")]
    (tmp_path / "script.py").write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "NODE_RANK": "0"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "script.py"), *words],
            env={**shared, "LOCAL_RANK": str(rank), "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    lines = [line for out, _ in outputs for line in out.splitlines() if line.startswith("RESULT")]
    assert len(lines) == 2, outputs
    found = [json.loads(line.removeprefix("RESULT")) for line in lines]

    alone = ShardData(*words, **settings) if words else TokenData(**settings)
    loader = alone.train_dataloader()
    steps = [batch["input_ids"].flatten().tolist() for _, batch in zip(range(4), loader)]
    for step, whole in enumerate(steps):
        halves = sorted(rank["fed"][step] for rank in found)
        assert halves == sorted([whole[:256], whole[256:]])
    assert [rank["state"] for rank in found] == [loader.state_dict()] * 2
    assert found[0]["result"] == found[1]["result"]
    assert found[0]["seen"] + found[1]["seen"] == sum(batch["tokens"] for batch in alone.val_dataloader()) == 1984
