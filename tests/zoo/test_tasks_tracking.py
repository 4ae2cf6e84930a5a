"""State tracking: lengths, values, and expressions that are what they should be."""

import numpy as np
import pytest

from zoo.data.tasks import make_task


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


# ----------------------------------------------------------------------------------------------------------- arithmetic
def written(task, tokens):
    """The ids of a row as text."""
    signs = {0: "", 1: "+", 2: "-", 3: "*", 4: "=", 5 + task.modulus: "(", 6 + task.modulus: ")"}
    return "".join(signs[token] if token in signs else str(token - 5) for token in tokens)


@pytest.mark.parametrize("split", ["train", "test"])
def test_digits_and_operators_alternate_and_an_equals_sign_ends_them(split):
    task = make_task("arithmetic", "gpu")
    rows = task.block(split, 0, 0)
    low, high = (4, 40) if split == "train" else (40, 256)
    lengths = (rows.tokens != 0).sum(1)
    assert (lengths % 2 == 0).all()
    assert lengths.min() >= low
    assert lengths.max() <= high
    assert lengths.max() - lengths.min() > 0.9 * (high - low)
    for tokens, length in zip(rows.tokens, lengths):
        assert ((tokens[0 : length - 1 : 2] >= 5) & (tokens[0 : length - 1 : 2] < 10)).all()
        assert ((tokens[1 : length - 1 : 2] >= 1) & (tokens[1 : length - 1 : 2] <= 3)).all()
        assert tokens[length - 1] == 4
        assert not tokens[length:].any()
    np.testing.assert_array_equal((rows.targets != -100).argmax(1), lengths - 1)
    assert ((rows.targets != -100).sum(1) == 1).all()


def test_multiplication_binds_tighter():
    task = make_task("arithmetic")
    # 3 - 2 * 4 * 3 + 1 = -20 = 0 modulo 5; from left to right it would be 3.
    assert task.solve([8, 2, 7, 3, 9, 3, 8, 1, 6, 4], 9) == 5
    rows = task.block("train", 0, 0)
    differs = 0
    for tokens, targets in zip(rows.tokens.tolist(), rows.targets.tolist()):
        value = tokens[0] - 5
        for operator, digit in zip(tokens[1::2], tokens[2::2]):
            if operator in (1, 2, 3):
                value = {1: value + digit - 5, 2: value - digit + 5, 3: value * (digit - 5)}[operator]
        differs += value % 5 + 5 != max(targets)
    assert differs > 100


@pytest.mark.parametrize("times", [False, True])
def test_nested_expressions_have_their_length_and_their_signs(times):
    task = make_task("arithmetic", "brackets", {"times": times})
    rows = task.block("train", 0, 0)
    lengths = (rows.tokens != 0).sum(1)
    assert lengths.min() == 3
    assert lengths.max() == 40
    texts = [written(task, tokens) for tokens in rows.tokens.tolist()]
    assert all(text.endswith("=") and text.count("(") == text.count(")") for text in texts)
    assert any("*" in text for text in texts) == times
    assert any(text.count("(") > 4 for text in texts)


def test_another_modulus_has_its_own_ids_and_chance():
    task = make_task("arithmetic", options={"modulus": 7})
    assert (task.vocab_size, task.classes) == (12, 7)
    rows = task.block("train", 0, 0)
    assert set(rows.targets[rows.targets != -100].tolist()) == set(range(5, 12))
