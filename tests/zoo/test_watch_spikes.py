"""LossSpikes: jumps of the loss are found, smooth losses are none, and the data of a spike is named rightly."""

import csv
import json
import math

import numpy as np
import pytest
import torch

from tests.zoo import ranks
from tests.zoo.conftest import RECIPE
from tests.zoo.watched import Seen
from zoo.data import ShardData, TaskData, TokenData
from zoo.data.prepare import prepare
from zoo.errors import UserError
from zoo.spikes import LossSpikes, spans

LONG = ["--budget.tokens", "2560", "--spikes.window", "4"]  # 20 steps
JOLT = "--trainer.callbacks+={class_path: tests.zoo.watched.Jolt, init_args: {step: 11}}"
SEEN = "--trainer.callbacks+={class_path: tests.zoo.watched.Seen, init_args: {step: 11}}"


def spikes(folder, version=0):
    path = folder / "logs" / f"version_{version}" / "spikes.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def numbers(text):
    """What ``3-5 9`` stands for."""
    ends = [span.split("-") for span in text.split()]
    return [n for span in ends for n in range(int(span[0]), int(span[-1]) + 1)]


# --------------------------------------------------------------------------------------------------------- the rule
def noisy(steps, *, drop=2.0, seed=0):
    """A loss as training has it: it falls fast, then slowly, with noise."""
    random = np.random.default_rng(seed)
    return 3 + drop * np.exp(-np.arange(steps) / 200) + 0.05 * random.standard_normal(steps)


@pytest.mark.parametrize("seed", range(5))
def test_smooth_losses_have_no_spike(seed):
    watch = LossSpikes()
    assert [watch.judge(step, loss) for step, loss in enumerate(noisy(3_000, seed=seed))] == [None] * 3_000


def test_quiet_losses_have_no_spike_below_the_floor_and_one_above():
    watch = LossSpikes(window=10, floor=0.1)
    assert not any(watch.judge(step, 1.0) for step in range(10))
    assert watch.judge(10, 1.099) is None
    assert watch.judge(11, 1.101).limit == pytest.approx(1.1)


def test_a_jump_is_found_with_what_was_expected_and_the_next_step_is_none():
    watch, losses = LossSpikes(), noisy(300)
    losses[250] += 1.5
    found = [spike for step, loss in enumerate(losses) if (spike := watch.judge(step, loss, 7.0))]
    assert [spike.step for spike in found] == [250]
    (spike,) = found
    past = losses[150:250]
    assert spike.expected == pytest.approx(np.median(past))
    assert spike.limit == pytest.approx(spike.expected + 8 * np.median(np.abs(past - np.median(past))))
    assert (spike.loss, spike.grad_norm) == (losses[250], 7.0)


def test_a_loss_that_is_not_finite_is_a_spike_and_no_part_of_what_is_expected():
    watch = LossSpikes(window=5)
    losses = [1.0] * 5 + [math.inf, math.nan, 1.0]
    assert [watch.judge(step, loss) is not None for step, loss in enumerate(losses)] == [False] * 5 + [
        True,
        True,
        False,
    ]


def test_a_loss_that_stays_up_is_the_expected_one_after_half_a_window():
    watch = LossSpikes(window=20)
    found = [step for step, loss in enumerate([1.0] * 20 + [2.0] * 40) if watch.judge(step, loss)]
    assert found == list(range(20, 30))


@pytest.mark.parametrize("words", [{"window": -1}, {"window": 2}, {"k": 0.0}, {"k": math.nan}, {"floor": -0.1}])
def test_settings_that_make_no_rule_are_refused(words):
    with pytest.raises(ValueError, match="LossSpikes: "):
        LossSpikes(**words)


def test_a_window_of_nothing_never_looks(zoo, tmp_path):
    zoo("fit", *LONG, JOLT, "--spikes.window", "0")
    assert not spikes(tmp_path / "run")


def test_spans_are_sorted_numbers_in_short():
    assert list(spans(np.array([3, 4, 5, 9, 11, 12]))) == ["3-5", "9", "11-12"]
    assert list(spans(np.array([], dtype=np.int64))) == []


# ------------------------------------------------------------------------------------------------------------ a run
def test_a_run_without_a_jump_writes_nothing(zoo, tmp_path):
    zoo("fit", *LONG, "--spikes.floor", "1.5")
    assert not spikes(tmp_path / "run")


@pytest.mark.parametrize("every", ["1", "7"], ids=["every step logged", "few steps logged"])
def test_a_spike_names_the_rows_and_documents_of_both_micro_batches(zoo, tmp_path, text, caplog, every):
    words = ["--trainer.accumulate_grad_batches", "2", "--trainer.log_every_n_steps", every]
    with caplog.at_level("INFO"):
        rows = zoo("fit", *LONG, *words, JOLT, SEEN, "--spikes.floor", "1.5")
    found = spikes(tmp_path / "run")
    assert [(line["step"], line["rank"], line["micro_batch"]) for line in found] == [("11", "0", "0"), ("11", "0", "1")]
    assert "step 11: loss " in caplog.text
    data = TokenData(str(text), seq_len=32, batch_tokens=128, val_fraction=0.2)
    stream, split = data.train_stream(), data.corpus.splits["train"]
    documents = [data.tokenizer.decode(split.tokens[a:b]) for a, b in zip(split.starts, split.starts[1:])]
    for line, trained in zip(found, Seen.batches, strict=True):
        first, count = int(line["first_row"]), int(line["rows"])
        assert torch.equal(stream.batch(first, count)["input_ids"], trained)
        # Text between separators comes from a document that is named, and each that is named has a part in it.
        pieces = [
            data.tokenizer.decode(piece) for row in trained.reshape(count, 32).numpy() for piece in pieces_of(row, 256)
        ]
        named = [documents[n] for n in numbers(line["documents"])]
        assert all(any(piece in document for document in named) for piece in pieces)
        assert all(any(piece in document for piece in pieces) for document in named)
        assert "".join(data.train_text(first, count)) == data.tokenizer.decode(trained.numpy())
    by_step = {int(row["step"]): row for row in rows if "train/loss" in row}
    if every == "1":
        assert float(found[0]["loss"]) == pytest.approx(by_step[11]["train/loss"], rel=1e-5)
        assert float(found[0]["grad_norm"]) == pytest.approx(by_step[11]["grad_norm"], rel=1e-4)
        before = [by_step[step]["train/loss"] for step in range(7, 11)]
        assert float(found[0]["expected"]) == pytest.approx(np.median(before), rel=1e-5)


def pieces_of(row, separator):
    """The ids between separators."""
    return [piece[piece != separator] for piece in np.split(row, np.flatnonzero(row == separator)) if len(piece) > 1]


def test_a_run_that_goes_on_judges_as_one_that_was_never_stopped(zoo, tmp_path):
    words = [*LONG, "--spikes.floor", "1.5", JOLT]
    zoo("fit", *words, root="straight")
    zoo("fit", *words, "--trainer.max_steps", "10")
    zoo("fit", *words, "--ckpt_path", "last")  # the window of 4 was filled before it
    assert spikes(tmp_path / "run") == []
    assert spikes(tmp_path / "run", 1) == spikes(tmp_path / "straight") != []


def test_steps_that_nobody_logs_are_judged_when_a_checkpoint_is_saved(zoo, tmp_path):
    words = ["--spikes.floor", "1.5", JOLT]
    logged = zoo("fit", *LONG, *words, root="logged")
    silent = ["--trainer.log_every_n_steps", "0", "--checkpoint.every_n_train_steps", "13"]
    zoo("fit", *LONG, *words, *silent, "--trainer.max_steps", "14")
    assert {line["step"] for line in spikes(tmp_path / "run")} == {"11"}
    stored = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)
    steps = range(stored["global_step"] - 4, stored["global_step"])
    losses = {row["step"]: row["train/loss"] for row in logged if "train/loss" in row}
    assert stored["callbacks"]["LossSpikes"]["losses"] == pytest.approx([losses[step] for step in steps], rel=1e-5)


def test_wrong_settings_are_named_by_the_command(zoo):
    with pytest.raises(UserError, match="window is 2, but a median needs at least 3 steps"):
        zoo("fit", "--spikes.window", "2")


# ------------------------------------------------------------------------------------------------------ other data
def test_the_documents_of_shards_are_counted_as_they_are_stored(tmp_path):
    prepare("excerpt", tmp_path / "shards", shard_tokens=50_000, val_share=0.1)
    data = ShardData(str(tmp_path / "shards"), seq_len=32, batch_tokens=128)
    text = data.train_stream().text
    ids, starts = text.ids(0, text.tokens), text.starts(0, text.tokens)
    documents = [data.tokenizer.decode(piece) for piece in np.split(ids, starts)[1:]]
    loader = data.train_dataloader()
    for step in (0, 5, len(loader) - 1):  # the last one goes over into the next epoch
        first, trained = loader.batch(step)["first_row"], loader.batch(step)["input_ids"].reshape(4, 32).numpy()
        named = [documents[n] for n in loader.stream.documents(first, 4)]
        pieces = [data.tokenizer.decode(piece) for row in trained for piece in pieces_of(row, 256)]
        assert all(any(piece in document for document in named) for piece in pieces)


def test_a_task_has_rows_and_no_documents():
    loader = TaskData(batch_tokens=144, val_rows=8).train_dataloader()
    batch = loader.batch(3)
    assert torch.equal(loader.stream.batch(batch["first_row"], 4)["input_ids"], batch["input_ids"])
    assert len(loader.stream.documents(batch["first_row"], 4)) == 0


# ------------------------------------------------------------------------------------------------------- two ranks
@pytest.mark.dist
def test_a_spike_on_two_ranks_names_the_micro_batches_of_both(tmp_path):
    words = ranks.recipe_in(tmp_path, RECIPE)
    spread = ["--trainer.strategy", "fsdp2", "--trainer.accumulate_grad_batches", "2", *LONG, "--spikes.floor", "1.5"]
    ranks.launch(tmp_path, [["fit", *words, str(tmp_path / "run"), *spread, JOLT]])
    found = spikes(tmp_path / "run")
    shares = [(line["step"], line["rank"], line["micro_batch"], line["first_row"], line["rows"]) for line in found]
    assert shares == [("11", str(n // 2), str(n % 2), str(44 + n), "1") for n in range(4)], json.dumps(shares)
    data = TokenData(str(tmp_path / "text"), seq_len=32, batch_tokens=128, val_fraction=0.2)
    assert [numbers(line["documents"]) for line in found] == [
        data.train_stream().documents(44 + n, 1).tolist() for n in range(4)
    ]
    with next((tmp_path / "run" / "logs").glob("version_0/metrics.csv")).open(newline="") as file:
        (row,) = [row for row in csv.DictReader(file) if row["step"] == "11" and row["train/loss"]]
    assert float(found[0]["loss"]) == pytest.approx(float(row["train/loss"]), rel=1e-5)
    assert float(found[0]["grad_norm"]) == pytest.approx(float(row["grad_norm"]), rel=1e-4)
