"""Synthetic tasks: right answers, seeds, layouts, speed, and settings that cannot be met."""

import itertools
import json
import random
import time

import numpy as np
import pytest
import torch

from zoo.data import TaskData
from zoo.data.synthetic import FixedRows
from zoo.data.tasks import BLOCK, TASKS, Overwrite, distinct, make_task

# Rows per second on one core, a fifth of what each must reach on a quiet machine.
FLOORS = {
    ("overwrite", "cpu"): 100_000 / 5,
    ("overwrite", "small"): 50_000 / 5,
    ("overwrite", "gpu"): 5_000 / 5,
    ("parity", "cpu"): 150_000 / 5,
    ("parity", "gpu"): 150_000 / 5,
}
# What an answer taken from another row scores: one of the values, or one of two parities.
CHANCE = {"overwrite": lambda task: 2 / task.vocab_size, "parity": lambda task: 1 / 2}


def drawn(name, profile):
    seed = random.SystemRandom().randrange(2**31)
    print(f"task seed {seed}")
    task = make_task(name, profile)
    return task, {split: task.block(split, seed % 7, seed) for split in ("train", "val", "test")}


def test_no_task_or_profile_is_left_out():
    assert FLOORS.keys() == {(name, profile) for name, task in TASKS.items() for profile in task.profiles}
    assert CHANCE.keys() == TASKS.keys()


@pytest.mark.parametrize(("name", "profile"), FLOORS)
def test_the_slow_solver_is_right_everywhere(name, profile):
    task, blocks = drawn(name, profile)
    for rows in blocks.values():
        assert rows.tokens.shape == rows.targets.shape == (BLOCK, task.seq_len)
        assert 0 <= rows.tokens.min() <= rows.tokens.max() < task.vocab_size
        assert rows.targets.max() < task.vocab_size
        labels = (rows.targets != -100).sum(1)
        assert labels.min() >= 1
        for tokens, targets in itertools.islice(zip(rows.tokens.tolist(), rows.targets.tolist()), 1000):
            wrong = [at for at, label in enumerate(targets) if label != -100 and task.solve(tokens, at) != label]
            assert not wrong


@pytest.mark.parametrize(("name", "profile"), FLOORS)
def test_answers_of_another_row_score_chance(name, profile):
    task, blocks = drawn(name, profile)
    rows, right = blocks["test"], []
    for tokens, targets in zip(rows.tokens.tolist(), np.roll(rows.targets, 1, axis=0).tolist()):
        for at, label in enumerate(targets):
            # Where the other row asks, this one may hold a filler, to which there is no answer.
            if label != -100 and (name != "overwrite" or tokens[at] in tokens[: task.context : 2]):
                right.append(task.solve(tokens, at) == label)
    chance = CHANCE[name](task)
    assert len(right) > 100
    # Labels of one row hang together, hence more than the four standard errors of single ones.
    assert abs(np.mean(right) - chance) < 8 * (chance * (1 - chance) / len(right)) ** 0.5


@pytest.mark.parametrize(("name", "profile"), FLOORS)
def test_rows_are_drawn_fast_enough(name, profile):
    task = make_task(name, profile)
    task.block("train", 0, 0)
    best = min(_seconds(lambda number=number: task.block("train", number, 0)) for number in range(3))
    assert BLOCK / best > FLOORS[name, profile]


def _seconds(draw):
    begin = time.perf_counter()
    draw()
    return time.perf_counter() - begin


@pytest.mark.parametrize(("name", "profile"), FLOORS)
def test_a_block_follows_from_seed_split_and_number_alone(name, profile):
    task = make_task(name, profile)
    rows = [
        task.block(split, n, seed).tokens
        for split, n, seed in itertools.product(("train", "val", "test"), (0, 1), (0, 1))
    ]
    for a, b in itertools.combinations(rows, 2):
        assert not np.array_equal(a, b)
    np.testing.assert_array_equal(task.block("val", 1, 1).tokens, make_task(name, profile).block("val", 1, 1).tokens)


# ------------------------------------------------------------------------------------------------------------ overwrite
@pytest.mark.parametrize("profile", Overwrite.profiles)
def test_every_update_changes_the_value_of_its_key(profile):
    task, blocks = drawn("overwrite", profile)
    half = task.vocab_size // 2
    rows = blocks["train"]
    for tokens, targets, stale in zip(rows.tokens.tolist(), rows.targets.tolist(), rows.stale.tolist()):
        pairs = list(zip(tokens[: task.context : 2], tokens[1 : task.context : 2]))
        first, updates = dict(pairs[: task.kv]), dict(pairs[task.kv :])
        assert len(first) == task.kv
        assert len(set(first.values())) == task.kv
        assert len(updates) == task.upd
        assert updates.keys() <= first.keys()
        assert all(updates[key] != first[key] for key in updates)
        assert all(1 <= key < half for key in first)
        assert all(half <= value < task.vocab_size for value in [*first.values(), *updates.values()])
        asked = {tokens[at]: at for at, label in enumerate(targets) if label != -100}
        assert asked.keys() == first.keys()
        for key, at in asked.items():
            assert at >= task.context
            assert at % 2 == 0
            assert targets[at] == updates.get(key, first[key])
            assert stale[at] == (first[key] if key in updates else -100)
            assert tokens[at + 1] == 0, "the answer, or another token, stands behind the query"


def test_slices_part_the_labels():
    task = make_task("overwrite", "small", {"upd": 3})
    rows = task.block("val", 0, 0)
    labelled = rows.targets != -100
    assert rows.slices.keys() == set(task.slice_names)
    np.testing.assert_array_equal(rows.slices["overwritten"] ^ rows.slices["kept"], labelled)
    assert rows.slices["overwritten"].sum() == 3 * BLOCK
    gaps = sum(rows.slices[name].astype(int) for name in task.slice_names if name.startswith("gap_to_"))
    np.testing.assert_array_equal(gaps, labelled)
    for row, at in zip(*np.nonzero(labelled)):
        written = max(p for p in range(0, task.context, 2) if rows.tokens[row, p] == rows.tokens[row, at])
        (name,) = [n for n in task.slice_names if n.startswith("gap_to_") and rows.slices[n][row, at]]
        edge = int(name.removeprefix("gap_to_"))
        assert edge / 2 < at - written <= edge or (edge == 2 and at - written <= 2)


def test_new_values_and_queries_are_spread_as_they_should_be():
    task = make_task("overwrite", options={"seq_len": 128, "kv": 2, "upd": 1, "vocab": 8})
    rows = [task.block("train", n, 0) for n in range(20)]
    tokens = np.concatenate([block.tokens for block in rows])
    # 4 values, and one that is new: each of the 3 others equally often.
    old = tokens[np.arange(len(tokens)), 1 + 2 * (tokens[:, 4] == tokens[:, 2])]
    step = (tokens[:, 5] - old) % 4
    counts = np.bincount(step, minlength=4)
    assert counts[0] == 0
    assert ((counts[1:] - len(tokens) / 3) ** 2 / (len(tokens) / 3)).sum() < 20, counts  # chi-square, 2 degrees
    # The key of the first pair is asked in slot i with probability proportional to i ** -0.99.
    weights = np.arange(1, 62) ** -0.99
    asked = (tokens[:, 6::2] == tokens[:, :1]).argmax(1)
    for slot in (0, 1, 10, 60):
        expected = weights[slot] / weights.sum()
        assert abs((asked == slot).mean() - expected) < 5 * (expected * (1 - expected) / len(tokens)) ** 0.5, slot


def test_random_fillers_fill_and_change_nothing_else():
    plain, filled = (make_task("overwrite", "small", {"random_fillers": value}) for value in (False, True))
    rows = filled.block("train", 0, 0)
    assert (rows.tokens > 0).all()
    for tokens, targets in zip(rows.tokens.tolist(), rows.targets.tolist()):
        assert all(filled.solve(tokens, at) == label for at, label in enumerate(targets) if label != -100)
    assert (plain.block("train", 0, 0).tokens == 0).any()


@pytest.mark.parametrize(("k", "size"), [(1, 1), (3, 4), (3, 200), (20, 400)])
def test_distinct_draws_are_distinct_and_even(k, size):
    numbers = distinct(np.random.default_rng(k), 4000, k, 5, 5 + size)
    assert numbers.shape == (4000, k)
    assert all(len(set(row)) == k for row in numbers.tolist())
    for column in (0, k - 1):
        counts = np.bincount(numbers[:, column] - 5, minlength=size)
        assert len(counts) == size
        mean = 4000 / size
        assert ((counts - mean) ** 2 / mean).sum() < size + 6 * (2 * size) ** 0.5


# --------------------------------------------------------------------------------------------------------------- parity
def test_parity_lengths_cover_their_range_and_labels_stand_where_they_should():
    task = make_task("parity", "gpu")
    for split, low, high in [("train", 3, 40), ("val", 3, 40), ("test", 40, 256)]:
        rows = task.block(split, 0, 0)
        lengths = (rows.tokens != 0).sum(1)
        assert lengths.min() >= low
        assert lengths.max() <= high
        assert lengths.max() - lengths.min() > 0.9 * (high - low)
        np.testing.assert_array_equal((rows.targets != -100).argmax(1), lengths - 1)
        assert ((rows.targets != -100).sum(1) == 1).all()
    every = make_task("parity").block("train", 0, 0)
    assert (every.targets != -100).all()


# ------------------------------------------------------------------------------------------------------------- TaskData
def test_batches_follow_from_the_seed_and_their_number_alone():
    module = TaskData(batch_tokens=36 * 48, task_seed=3)
    batches = [batch for _, batch in zip(range(60), module.train_dataloader())]
    whole = np.concatenate([module.task.block("train", n, 3).tokens for n in range(3)])
    got = torch.cat([batch["input_ids"] for batch in batches]).numpy()
    np.testing.assert_array_equal(got, whole[: len(got)])
    batch = batches[7]
    assert batch["packing"] is None
    assert batch["tokens"] == 48 * 6
    assert batch["labels"].shape == batch["input_ids"].shape == batch["stale"].shape == (48, 36)
    assert all(mask.shape == (48, 36) for mask in batch["slices"].values())


def test_a_task_loader_resumes_where_it_stood():
    straight = TaskData(batch_tokens=36 * 32, train_rows=200).train_dataloader()
    expected = [batch["input_ids"].tolist() for _, batch in zip(range(6), straight)]
    stopped = TaskData(batch_tokens=36 * 32, train_rows=200).train_dataloader()
    got = [batch["input_ids"].tolist() for _, batch in zip(range(2), stopped)]
    resumed = TaskData(batch_tokens=36 * 32, train_rows=200).train_dataloader()
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    got += [batch["input_ids"].tolist() for _, batch in zip(range(4), resumed)]
    assert got == expected
    assert resumed.order_hash == straight.order_hash
    with pytest.raises(ValueError, match="trained with task_seed 0, but 1 is given"):
        TaskData(batch_tokens=36 * 32, train_rows=200, task_seed=1).train_dataloader().load_state_dict(
            stopped.state_dict()
        )


def test_repeated_rows_come_once_an_epoch_in_another_order_each_time():
    module = TaskData(batch_tokens=36 * 10, train_rows=50)
    loader = module.train_dataloader()
    epochs = [torch.cat([batch["input_ids"] for batch in loader]).tolist() for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(module.task.block("train", 0, 0).tokens[:50].tolist())
    assert epochs[0] != epochs[1]


def test_evaluation_rows_are_whole_fixed_and_independent_of_the_batch():
    for rows in (7, 100):
        module = TaskData(batch_tokens=36 * rows, val_rows=50)
        got = torch.cat([batch["input_ids"] for batch in module.val_dataloader()])
        np.testing.assert_array_equal(got.numpy(), module.task.block("val", 0, 0).tokens[:50])
    padded = FixedRows(module.eval_rows("val")).batch(np.array([3]), padding_rows=2)
    assert padded["input_ids"].shape == (3, 36)
    assert (padded["labels"][1:] == -100).all()
    assert padded["tokens"] == 6


def test_rows_that_training_has_seen_are_replaced_and_counted():
    few = {"seq_len": 8, "kv": 1, "upd": 1, "vocab": 16}  # 7 keys, 8 values, 7 new ones: 392 rows
    module = TaskData(batch_tokens=8, options=few, train_rows=300, val_rows=100)
    seen = {row.tobytes() for row in module.task.block("train", 0, 0).tokens[:300]}
    rows = module.eval_rows("val")
    assert module.overlap["val"] > 0
    assert len(rows) == 100
    assert not any(row.tobytes() in seen for row in rows.tokens)
    endless = TaskData(batch_tokens=8, options=few)  # all 392 are seen: nothing to replace them by
    assert len(endless.eval_rows("test")) == 2048
    assert endless.overlap["test"] >= 2048
    parity = TaskData("parity", profile="gpu", batch_tokens=256, train_rows=2000)
    rows = parity.eval_rows("val")
    assert parity.overlap["val"] > 0
    np.testing.assert_array_equal(rows.tokens, parity.task.block("val", 0, 0).tokens)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"task": "overwritten"}, "no task 'overwritten'; there are overwrite, parity"),
        ({"profile": "tpu"}, "no profile 'tpu'; there are cpu, small, gpu"),
        ({"options": {"kvs": 3}}, "no option 'kvs'; there are seq_len, kv"),
        ({"options": {"kv": 2.5}}, "kv is 2.5, but must be of type int"),
        ({"options": {"kv": True}}, "kv is True, but must be of type int"),
        ({"options": {"kv": 0, "upd": 0}}, "at least 1 pair"),
        ({"options": {"upd": 7}}, "upd is 7, but must be from 0 to kv, here 6"),
        ({"options": {"vocab": 63}}, "vocab is 63, but must be even"),
        ({"options": {"vocab": 12}}, "12 has 5 keys, but kv asks for 6; raise vocab to 14"),
        ({"options": {"seq_len": 37}}, "seq_len is 37, but must be even"),
        ({"options": {"seq_len": 34}}, "need 36; raise seq_len or lower kv"),
        ({"task": "parity", "options": {"variant": "all"}}, "must be every or last"),
        ({"task": "parity", "options": {"min_length": 41}}, "min_length 41 and max_length 40 must rise"),
        ({"task": "parity", "options": {"test_max_length": 41}}, "test_max_length 41 must rise"),
        ({"batch_tokens": 100}, "no multiple of the row length 36; the next is 108"),
        ({"val_rows": 0}, "val_rows is 0"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(settings, match):
    with pytest.raises(ValueError, match=match):
        TaskData(**{"batch_tokens": 36, **settings})
