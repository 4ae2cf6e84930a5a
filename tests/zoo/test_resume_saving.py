"""Saving is atomic, and what cannot be read is named."""

import errno
import os
import pickle
from pathlib import Path

import pytest
import torch

from zoo.checkpoint import META, WholeFiles, load_model, part_of, publish, read_facts, recover
from zoo.errors import UserError


def shard_folder(path, content="new"):
    path.mkdir()
    (path / META).write_text(content)


class FullDisk:
    """A file that takes so many bytes and no more."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        self.room -= memoryview(data).nbytes
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *arguments):
        self.file.close()


@pytest.mark.parametrize("room", [0, 5_000, 50_000], ids=["at once", "in the middle", "near the end"])
def test_a_full_disk_leaves_the_checkpoint_before_and_says_so(zoo, tmp_path, monkeypatch, room):
    zoo("fit", "--trainer.max_steps", "2")
    last = tmp_path / "run" / "last.ckpt"
    before = last.read_bytes()
    true_open = Path.open

    def opened(self, mode="r", *arguments, **settings):
        file = true_open(self, mode, *arguments, **settings)
        return FullDisk(file, room) if self.name == "last.ckpt.part" and "w" in mode else file

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(UserError, match=r"last.ckpt could not be saved: .*The one before it is as it was"):
        zoo("fit", "--ckpt_path", "last")
    assert last.read_bytes() == before
    assert not list(last.parent.glob("*.part"))
    monkeypatch.undo()
    assert load_model(last).facts["tokens_seen"] == 2 * 128


def test_a_kill_while_saving_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    WholeFiles().save_checkpoint({"number": 1}, path)

    def killed(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        WholeFiles().save_checkpoint({"number": 2}, path)
    assert torch.load(path, weights_only=True) == {"number": 1}
    monkeypatch.undo()
    WholeFiles().save_checkpoint({"number": 3}, path)
    assert torch.load(path, weights_only=True) == {"number": 3}
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_kill_between_the_renames_of_a_folder_is_repaired(tmp_path, monkeypatch, renames):
    path, true_rename, left = tmp_path / "last.ckpt", Path.rename, [renames]
    shard_folder(path, "old")
    shard_folder(part_of(path))

    def rename(self, target):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return true_rename(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    if renames < 2:
        with pytest.raises(KeyboardInterrupt):
            publish(part_of(path), path)
    else:
        publish(part_of(path), path)
    monkeypatch.undo()
    assert recover(path) == (renames == 1)
    assert (path / META).read_text() == ("new" if renames else "old")
    assert not path.with_name("last.ckpt.old").exists()


def test_a_folder_takes_the_place_of_a_file_and_a_file_that_of_a_folder(tmp_path):
    path = tmp_path / "last.ckpt"
    path.write_text("a file")
    shard_folder(part_of(path))
    publish(part_of(path), path)
    assert (path / META).is_file()
    part_of(path).write_text("a file")
    publish(part_of(path), path)
    assert path.read_text() == "a file"
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.97])
def test_a_checkpoint_cut_short_is_named_and_nothing_is_trained(zoo, tmp_path, share):
    zoo("fit", "--trainer.max_steps", "2")
    last = tmp_path / "run" / "last.ckpt"
    whole = last.read_bytes()
    last.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UserError, match=r"last.ckpt cannot be read as a checkpoint .*it may be cut short"):
        zoo("fit", "--ckpt_path", "last")


def test_a_checkpoint_with_flipped_bytes_is_named(zoo, tmp_path):
    zoo("fit", "--trainer.max_steps", "2")
    last = tmp_path / "run" / "last.ckpt"
    content = bytearray(last.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(64 * [0xA5])
    last.write_bytes(content)
    with pytest.raises(UserError, match="cannot be read as a checkpoint"):
        zoo("fit", "--ckpt_path", "last")


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(UserError, match=r"is no checkpoint: it holds no meta.pt"):
        read_facts(tmp_path)
    torch.save({"zoo": {"architecture": {}}}, tmp_path / META)
    with pytest.raises(UserError, match="cannot be read as a checkpoint"):
        read_facts(tmp_path)


class Harm:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


def test_a_table_of_contents_that_would_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"zoo": {"architecture": {}}}, tmp_path / META)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Harm()))
    with pytest.raises(UserError, match="describes no tensor"):
        read_facts(tmp_path)
    assert not (tmp_path / "harmed").exists()


def test_the_best_checkpoint_is_kept_beside_the_last_and_can_be_asked_for(zoo, tmp_path):
    validate = ["--trainer.val_check_interval", "2", "--trainer.check_val_every_n_epoch", "null"]
    best = "--trainer.callbacks=zoo.callbacks.Best"
    rows = zoo("fit", best, *validate, "--budget.tokens", "1280")
    scores = {int(row["step"]) + 1: row["val/loss"] for row in rows if "val/loss" in row}
    found = min(scores, key=lambda step: scores[step])
    assert load_model(tmp_path / "run" / "best.ckpt").facts["tokens_seen"] == 128 * found
    assert load_model(tmp_path / "run").facts["tokens_seen"] == 1280
    zoo("validate", best, "--ckpt_path", "best")
    (file,) = (tmp_path / "run").glob("logs/version_1/metrics.csv")
    header, values = (line.split(",") for line in file.read_text().splitlines())
    assert float(values[header.index("val/loss")]) == pytest.approx(scores[found], rel=1e-5)
