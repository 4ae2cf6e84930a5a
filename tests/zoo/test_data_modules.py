"""What both data modules are to Python: they can be shown, copied and sent to another process, before use and after."""

import copy
import pickle

import lightning.pytorch as pl
import pytest
import torch

from zoo.data import ShardData, TaskData, TokenData
from zoo.data.prepare import prepare
from zoo.module import HybridLMModule


def by_tokenizer_file(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=40, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.train_from_iterator(["shall I compare thee to a summer's day"], trainer)
    tokenizer.save(str(tmp_path / "bpe.json"))
    return TokenData(seq_len=32, batch_tokens=64, limit_bytes=60_000, tokenizer=str(tmp_path / "bpe.json"))


def by_shards(tmp_path):
    if not (tmp_path / "shards").exists():
        prepare("excerpt", tmp_path / "shards", shard_tokens=50_000, val_share=0.1)
    return ShardData("shards", seq_len=32, batch_tokens=64)


MODULES = {
    "bytes": lambda tmp_path: TokenData(seq_len=32, batch_tokens=64),
    "a tokenizer file": by_tokenizer_file,
    "shards": by_shards,
    "a task": lambda tmp_path: TaskData(batch_tokens=72, val_rows=8),
}
SHOWN = {
    "bytes": "TokenData('excerpt', seq_len=32, batch_tokens=64)",
    "a tokenizer file": "TokenData('excerpt', seq_len=32, batch_tokens=64)",
    "shards": "ShardData('shards', seq_len=32, batch_tokens=64)",
    "a task": (
        "TaskData(Overwrite(seq_len=36, kv=6, upd=6, vocab=64, random_fillers=False), seq_len=36, batch_tokens=72)"
    ),
}


@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("name", MODULES)
def test_a_data_module_is_shown_copied_and_pickled_and_the_copies_give_its_batches(tmp_path, monkeypatch, name, used):
    monkeypatch.chdir(tmp_path)
    data = MODULES[name](tmp_path)
    if used:
        module = HybridLMModule("GA", d_model=16, d_ff=16, mixers={"GA": {"heads": 1}}, vocab_size=data.vocab_size)
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        trainer = pl.Trainer(
            max_steps=1, accelerator="cpu", logger=False, limit_val_batches=1, default_root_dir=tmp_path, **quiet
        )
        trainer.fit(module, datamodule=data)
        data.train_dataloader().batch(0)
    assert str(data) == SHOWN[name]
    for made in (copy.copy(data), copy.deepcopy(data), pickle.loads(pickle.dumps(data))):
        assert str(made) == SHOWN[name]
        assert torch.equal(made.train_dataloader().batch(3)["labels"], data.train_dataloader().batch(3)["labels"])
