"""The tasks of MAD: ids, labels and distributions as specified."""

import numpy as np
import pytest

from zoo.data.tasks import make_task

PROFILES = ["in_context", "noisy"]


def rows_of(name, profile=None, options=None, split="test", blocks=1):
    task = make_task(name, profile, options)
    return task, type(task.block(split, 0, 2)).join([task.block(split, number, 2) for number in range(blocks)])


@pytest.mark.parametrize("profile", PROFILES)
def test_evaluation_labels_the_values_of_keys_that_came_before_and_no_others(profile):
    task, rows = rows_of("mad_recall", profile)
    for tokens, targets, last in zip(rows.tokens.tolist(), rows.targets.tolist(), rows.targets[:, -1]):
        memory = {}
        for at in range(0, task.seq_len - 1, 2):
            key, value = tokens[at], tokens[at + 1]
            if key >= 2 * task.keys:
                assert value >= 2 * task.keys
                assert targets[at] == -100
                continue
            assert key < task.keys <= value < 2 * task.keys
            assert targets[at] == memory.get(key, -100)
            assert memory.setdefault(key, value) == value
            assert targets[at + 1] == -100
        assert last == memory[tokens[-1]]


def test_keys_values_and_noise_are_even():
    _, rows = rows_of("mad_recall", "noisy", blocks=4)
    pairs = rows.tokens[:, :-1].reshape(len(rows), -1, 2)
    noisy = pairs[..., 0] >= 16
    assert noisy.mean() == pytest.approx(0.2 * (1 - 1 / 63), abs=0.003)
    for ids, low, count in ((pairs[~noisy][:, 0], 0, 8), (pairs[noisy].ravel(), 16, 16)):
        assert np.bincount(ids - low, minlength=count) / len(ids) == pytest.approx(1 / count, abs=0.004)
    labels = rows.targets[rows.targets != -100]
    assert np.bincount(labels - 8, minlength=8) / len(labels) == pytest.approx(1 / 8, abs=0.01)


def test_a_row_of_noise_alone_never_comes():
    _, rows = rows_of("mad_recall", "noisy", {"noise": 0.99, "seq_len": 9})
    assert ((rows.tokens[:, :-1:2] < 16).sum(1) >= 1).all()
    assert (rows.targets[:, -1] != -100).all()


def motifs(tokens, keys, pad):
    """A row as alternate keys and values."""
    found = []
    for token in tokens:
        kind = token < keys
        if token == pad:
            continue
        if not found or found[-1][0] != kind:
            found.append((kind, []))
        found[-1][1].append(token)
    return [tuple(ids) for _, ids in found]


@pytest.mark.parametrize("split", ["train", "test"])
def test_fuzzy_motifs_hold_different_ids_and_the_last_pair_came_before(split):
    task, rows = rows_of("mad_fuzzy", split=split)
    whole = np.concatenate([rows.tokens, rows.targets[:, -1:]], axis=1).tolist()
    sizes = set()
    for tokens in whole:
        assert tokens == [15] * tokens.count(15) + [token for token in tokens if token != 15]
        assert tokens.count(15) < 2 * (task.key_length + task.value_length)
        found = motifs(tokens, 7, 15)
        assert all(len(set(ids)) == len(ids) <= 3 for ids in found)
        memory = {}
        for key, value in zip(found[::2], found[1::2]):
            assert memory.setdefault(key, value) == value
        assert found[-2] in found[:-2:2]
        sizes |= {len(key) for key in found[::2]}
    assert sizes == ({1, 2, 3} if split == "train" else {3})


def test_fuzzy_labels_are_the_values_of_repeated_keys():
    _, rows = rows_of("mad_fuzzy")
    for tokens, targets in zip(rows.tokens.tolist(), rows.targets.tolist()):
        whole = [*tokens, targets[-1]]
        place, seen, expected = whole.count(15), {}, [-100] * len(tokens)
        found = motifs(whole, 7, 15)
        for key, value in zip(found[::2], found[1::2]):
            if key in seen:
                begin = place + len(key) - 1
                expected[begin : begin + len(value)] = value
            seen[key], place = value, place + len(key) + len(value)
        assert targets == expected


def test_copied_ids_stand_among_blanks_and_come_back_in_order():
    _, rows = rows_of("mad_copy", blocks=4)
    assert (rows.tokens[:, -17] == 15).all()
    assert (rows.tokens[:, -18] < 14).all()
    assert (rows.tokens[:, -16:] == 14).all()
    content = rows.tokens[:, :-17]
    assert ((content < 14).sum(1) == 16).all()
    assert ((content == 14).sum(1) == 223).all()
    np.testing.assert_array_equal(content[content < 14].reshape(-1, 16), rows.targets[:, -16:])
    # Blanks are shared out evenly: before each id as many on average.
    places = np.nonzero(content < 14)[1].reshape(-1, 16)
    assert np.diff(places, axis=1, prepend=-1).mean(0) - 1 == pytest.approx(223 / 16, abs=0.5)


def test_memorized_facts_are_fixed_and_each_key_has_its_own_value():
    task, rows = rows_of("mad_memorize")
    facts = task.facts()
    assert len(facts) == 127
    assert len(set(facts.tolist())) == 127
    assert 127 <= facts.min() <= facts.max() <= 254
    assert set(rows.tokens[:, ::2].ravel().tolist()) == set(range(127))
    assert (rows.tokens[:, 1::2] == 255).all()
    np.testing.assert_array_equal(rows.targets[:, 1::2], facts[rows.tokens[:, ::2]])
    assert (rows.targets[:, ::2] == -100).all()
    np.testing.assert_array_equal(make_task("mad_memorize").facts(), facts)
    assert (make_task("mad_memorize", options={"map_seed": 1}).facts() != facts).any()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mad_recall", {"seq_len": 1023, "vocab": 128}),
        ("mad_fuzzy", {"seq_len": 1023, "vocab": 128}),
        ("mad_copy", {"seq_len": 1024, "vocab": 128, "copies": 96}),
        ("mad_memorize", {"vocab": 8192}),
        ("mad_compress", {"seq_len": 256, "vocab": 128}),
    ],
)
def test_the_largest_settings_of_the_sweeps_are_drawn_and_solved(name, options):
    task = make_task(name, options=options)
    rows = task.generate(8, np.random.default_rng(0), "test")
    for tokens, targets in zip(rows.tokens.tolist(), rows.targets.tolist()):
        labelled = [at for at, label in enumerate(targets) if label != -100]
        assert labelled
        assert all(task.solve(tokens, at) == targets[at] for at in labelled)
