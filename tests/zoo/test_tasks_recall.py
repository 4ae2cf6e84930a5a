"""Recall of pairs: what every row must hold, how draws are spread, layouts."""

import random

import numpy as np
import pytest

from zoo.data.tasks import BLOCK, Overwrite, distinct, make_task
from zoo.data.tasks.draws import first_equal, last_equal


def drawn(name, profile, options=None):
    seed = random.SystemRandom().randrange(2**31)
    print(f"task seed {seed}")
    task = make_task(name, profile, options)
    return task, {split: task.block(split, seed % 7, seed) for split in ("train", "val", "test")}


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


# ----------------------------------------------------------------------------------------------------------------- mqar
@pytest.mark.parametrize("layout", ["scattered", "lm", "sep"])
@pytest.mark.parametrize("random_fillers", [False, True])
def test_every_key_is_bound_once_and_asked_once(layout, random_fillers):
    if layout == "sep" and random_fillers:
        pytest.skip("that layout has no fillers")
    options = {"layout": layout, "random_fillers": random_fillers, "min_kv": 2}
    task, blocks = drawn("mqar", "cpu", options)
    assert task.kvs == (8, 4, 2)
    rows, half = blocks["train"], task.vocab // 2
    for number, (tokens, targets) in enumerate(zip(rows.tokens.tolist(), rows.targets.tolist())):
        kv = task.kvs[number % 3]
        context = dict(zip(tokens[: 2 * kv : 2], tokens[1 : 2 * kv : 2]))
        assert len(context) == len(set(context.values())) == kv
        assert all(1 <= key < half <= value < task.vocab for key, value in context.items())
        asked = {tokens[at]: at for at, label in enumerate(targets) if label != -100}
        assert asked.keys() == context.keys()
        assert all(targets[at] == context[key] for key, at in asked.items())
        check_layout(layout, random_fillers, tokens, 2 * kv, asked, context)


def check_layout(layout, random_fillers, tokens, context_end, asked, context):
    if layout == "sep":
        assert tokens[context_end] == 128
        assert sorted(asked.values()) == list(range(context_end + 1, context_end + 1 + len(context)))
        assert not any(tokens[context_end + 1 + len(context) :])
        return
    assert all(at >= context_end and at % 2 == 0 for at in asked.values())
    used = {*range(context_end), *asked.values()}
    if layout == "lm":
        assert all(tokens[at + 1] == context[key] for key, at in asked.items())
        used |= {at + 1 for at in asked.values()}
    fillers = [token for at, token in enumerate(tokens) if at not in used]
    assert all(1 <= token < 128 for token in fillers) if random_fillers else not any(fillers)


def test_rows_take_turns_with_their_pairs_and_are_scored_by_them():
    task = make_task("mqar", "dense")
    assert task.kvs == (64, 32, 16, 8)
    assert task.slice_names[:4] == ("pairs_64", "pairs_32", "pairs_16", "pairs_8")
    rows = task.block("val", 0, 0)
    labels = (rows.targets != -100).sum(1)
    np.testing.assert_array_equal(labels, np.resize([64, 32, 16, 8], BLOCK))
    for kv in task.kvs:
        np.testing.assert_array_equal(rows.slices[f"pairs_{kv}"].sum(1), np.where(labels == kv, kv, 0))


def test_gaps_are_distances_from_the_pair_to_its_query():
    task = make_task("mqar", "cpu")
    rows = task.block("val", 0, 0)
    gaps = [name for name in task.slice_names if name.startswith("gap_to_")]
    np.testing.assert_array_equal(sum(rows.slices[name].astype(int) for name in gaps), rows.targets != -100)
    for row, at in zip(*np.nonzero(rows.targets != -100)):
        distance = at - rows.tokens[row].tolist().index(rows.tokens[row, at])
        (name,) = [name for name in gaps if rows.slices[name][row, at]]
        edge = int(name.removeprefix("gap_to_"))
        assert edge / 2 < distance <= edge or (edge == 2 and distance <= 2)


def slow_slots(slots, k, random):
    """One row's slots as the original draws them: one by one, each with its weight among those that are left."""
    weights, chosen = [(slot + 1) ** -0.99 for slot in range(slots)], []
    for _ in range(k):
        total = sum(weights)
        chosen.append(random.choices(range(slots), [weight / total for weight in weights])[0])
        weights[chosen[-1]] = 0
    return chosen


def test_slots_are_spread_as_drawn_one_by_one():
    task, kv, slots = make_task("mqar", "cpu"), 8, 24
    targets = np.concatenate([task.block("train", number, 1).targets for number in range(20)])
    used = (targets[:, 16::2] != -100).mean(0)  # how often each slot holds a query
    dice = random.Random(5)
    slow = np.zeros(slots)
    for _ in range(20_000):
        slow[slow_slots(slots, kv, dice)] += 1 / 20_000
    assert used.sum() == pytest.approx(kv)
    errors = np.sqrt(slow * (1 - slow) / 20_000 * 2)
    assert (np.abs(used - slow) < 5 * errors).all()
    assert used[0] > used[5] > used[20]


@pytest.mark.parametrize("column", [0, 7])
def test_keys_and_values_are_even_and_their_order_means_nothing(column):
    task = make_task("mqar", "cpu")
    tokens = np.concatenate([task.block("train", number, 3).tokens for number in range(20)])
    for ids, low, high in ((tokens[:, 2 * column], 1, 64), (tokens[:, 2 * column + 1], 64, 128)):
        counts, mean = np.bincount(ids - low, minlength=high - low), len(ids) / (high - low)
        assert len(counts) == high - low
        assert ((counts - mean) ** 2 / mean).sum() < high - low + 6 * (2 * (high - low)) ** 0.5


# ---------------------------------------------------------------------------------------------------------------- draws
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


def test_equal_entries_are_found_in_both_directions():
    values = np.array([[3, 1, 3, 3, 1], [5, 4, 3, 2, 1]])
    assert first_equal(values).tolist() == [[0, 1, 0, 0, 1], [0, 1, 2, 3, 4]]
    assert last_equal(values).tolist() == [[-1, -1, 0, 2, 1], [-1, -1, -1, -1, -1]]
