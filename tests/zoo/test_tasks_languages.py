"""Languages in context: automata, what is legal, and splits that share none."""

import itertools
from random import Random

import numpy as np

from zoo.data.tasks import make_task
from zoo.data.tasks.languages import least_form


def accepted(automaton, string):
    """Whether an automaton, drawn or in its least form, has a way for every symbol."""
    state = 0
    for symbol in string:
        out = dict(automaton[state])
        if symbol not in out:
            return False
        state = out[symbol]
    return True


def test_the_least_form_keeps_the_language_and_merges_what_does_the_same():
    dice = Random(3)
    task = make_task("regbench", "cpu", {"symbols": 4})
    merged = 0
    for _ in range(50):
        drawn = []
        for node in range(5):
            others = [other for other in range(5) if other != node]
            count = dice.randint(1, 2)
            drawn.append(dict(zip(dice.sample(range(1, 4), count), dice.sample(others, count))))
        least = least_form(drawn)
        merged += len(least) < 5
        for string in itertools.chain.from_iterable(itertools.product(range(1, 4), repeat=k) for k in range(6)):
            assert accepted(drawn, string) == accepted(least, string)
    assert merged > 5
    assert task.vocab_size == 6


def test_automata_of_one_language_have_one_least_form():
    # Two states that do the same, one that is never reached, and other numbers.
    large = [{1: 1, 2: 2}, {3: 0}, {3: 0}, {1: 0}]
    small = [{1: 1, 2: 1}, {3: 0}]
    assert least_form(large) == least_form(small) == (((1, 1), (2, 1)), ((3, 0),))
    assert least_form([{1: 1}, {1: 2}, {1: 0}]) == (((1, 0),),)


def test_no_split_shares_a_language_with_another():
    task, dice = make_task("regbench"), Random(0)
    found = {split: {task.automaton(dice, split) for _ in range(1500)} for split in ("train", "val", "test")}
    for a, b in itertools.combinations(found.values(), 2):
        assert not a & b
    sizes = [len(automaton) for automaton in found["train"]]
    assert 1 <= min(sizes) <= 4
    assert max(sizes) == 12
    edges = [len(out) for automaton in found["train"] for out in automaton]
    assert set(edges) == {1, 2, 3}
    assert np.mean(edges) > 1.8


def test_legal_symbols_are_the_edges_of_the_true_automaton():
    task, dice = make_task("regbench"), Random(1)
    for _ in range(30):
        automaton = task.automaton(dice, "test")
        ids, sets = task._strings(automaton, dice)
        state = 0
        for token, legal in zip(ids, sets):
            state = 0 if token == 19 else dict(automaton[state])[token]
            assert legal == sum(1 << symbol for symbol, _ in automaton[state])


def test_rows_have_the_strings_and_the_labels_they_should():
    task = make_task("regbench")
    rows = task.block("train", 0, 0)
    filled = (rows.tokens != 0).sum(1)
    strings = 1 + (rows.tokens == 19).sum(1)
    assert filled.mean() == np.clip(filled.mean(), 350, 400)  # 14.5 strings of 25 symbols, and what parts them
    assert (strings.min(), strings.max()) == (10, 19)
    labelled = rows.targets != -100
    np.testing.assert_array_equal(labelled.sum(1), filled - 1 - (strings - 1))
    assert ((rows.targets >= 1) & (rows.targets <= 18))[labelled].all()
    np.testing.assert_array_equal(rows.targets[:, :-1][labelled[:, :-1]], rows.tokens[:, 1:][labelled[:, :-1]])
    assert (rows.legal[labelled] >> rows.targets[labelled] & 1).all()
    assert not rows.legal[~labelled].any()


def test_what_followed_the_same_beginning_is_legal_and_uniform_guessing_is_not():
    task = make_task("regbench", "cpu")
    rows, right, guessed = task.block("test", 0, 0), [], []
    for tokens, targets, legal in zip(rows.tokens.tolist(), rows.targets.tolist(), rows.legal.tolist()):
        for at in np.flatnonzero(np.array(targets) != -100):
            guessed.append(legal[at] >> (1 + at % task.symbols) & 1)
            try:
                right.append(legal[at] >> task.solve(tokens, at) & 1)
            except KeyError:
                continue
    assert len(right) > 1000
    assert all(right)
    assert np.mean(guessed) < 0.4
