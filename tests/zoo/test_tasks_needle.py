"""Needles: one in each haystack, the right length and depth, words that a user supplies."""

import logging
import re

import numpy as np
import pytest
import yaml

from zoo.data import TaskData
from zoo.data.sources import EXCERPT
from zoo.data.tasks import make_task
from zoo.data.tasks.needle_text import ZOO, sentences
from zoo.data.tasks.needle_words import ADJECTIVES, NOUNS
from zoo.data.tokenizer import ByteTokenizer
from zoo.errors import UserError

WORDING = {
    "needle": "One of the special {kind}s for {key} is: {value}.",
    "instruction": "A special {kind} is hidden within the following text.",
    "question": "What is the special {kind} for {key} mentioned in the provided text?",
    "prefix": " The special {kind} for {key} mentioned in the provided text is",
    "number": "number",
    "code": "uuid",
    "filler": ["The grass is green.", "Here we go."],
}


def texts(task, split="test", rows=200):
    block = task.block(split, 0, 4)
    return block[slice(rows)], [ByteTokenizer().decode(row) for row in block.tokens[:rows]]


def parts_of(text):
    """Instruction, haystack, and question with answer."""
    first, rest = text.split("\n", 1)
    return first, *rest.rsplit("\n", 1)


@pytest.mark.parametrize("profile", ["s1", "s2", "s3"])
def test_the_value_stands_once_in_the_haystack_and_the_key_where_it_is_asked(profile):
    rows, found = texts(make_task("niah", profile))
    shape = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}" if profile == "s3" else r"[1-9]\d{6}"
    kind = "code" if profile == "s3" else "number"
    for text, targets in zip(found, rows.targets.tolist()):
        instruction, haystack, question = parts_of(text)
        assert instruction.startswith(f"A secret {kind} is written")
        (needle,) = re.finditer(rf"The secret {kind} of ([a-z]+-[a-z]+) is ({shape})\.", haystack)
        key, value = needle.groups()
        assert question == f"Which secret {kind} belongs to {key}? The secret {kind} of {key} is {value}"
        assert bytes(label for label in targets if label != -100).decode() == f" {value}"


@pytest.mark.parametrize("profile", ["s1", "s2", "s3"])
@pytest.mark.parametrize("seq_len", [768, 1024, 2048])
def test_the_haystack_is_the_longest_that_fits(profile, seq_len):
    task = make_task("niah", profile, {"seq_len": seq_len})
    rows, found = texts(task, rows=300)
    answer = 37 if profile == "s3" else 8
    for row, text in zip(rows.targets, found):
        prompt = 1 + len(text.encode()) - answer
        assert np.flatnonzero(row != -100).tolist() == list(range(prompt - 1, prompt - 1 + answer))
        assert prompt + 128 <= seq_len
        if profile == "s1":
            following = ZOO.filler[
                len(re.findall(r"[.]", parts_of(text)[1])) % 5 - 1
            ]  # one of the stops is the needle's
            assert prompt + 128 + 1 + len(following) > seq_len
    slack = seq_len - 128 - np.array([1 + len(text.encode()) - answer for text in found])
    assert slack.min() < 20


def test_depths_cover_the_haystack_and_name_the_slices():
    task = make_task("niah", "s2", {"seq_len": 2048})
    rows, found = texts(task, rows=1024)
    where = []
    for text in found:
        _, haystack, _ = parts_of(text)
        where.append(100 * haystack.index("The secret number of") / (len(haystack) - 45))
    named = np.array(
        [[rows.slices[f"depth_to_{edge}"][row].any() for edge in range(10, 101, 10)] for row in range(1024)]
    )
    assert (named.sum(1) == 1).all()
    assert (named.mean(0) > 0.04).all()
    edge = 10 * (1 + named.argmax(1))
    assert np.corrcoef(where, edge)[0, 1] > 0.95
    assert min(where) == 0
    assert max(where) > 98


def test_splits_share_neither_keys_nor_prose():
    task, keys, prose = make_task("niah", "s2"), {}, {}
    for split in ("train", "val", "test"):
        _, found = texts(task, split, 1024)
        keys[split] = {re.search(r"belongs to ([a-z-]+)\?", text)[1] for text in found}
        prose[split] = {s for text in found for s in sentences(parts_of(text)[1]) if len(s) > 40 and "secret" not in s}
    for a, b in (("train", "val"), ("train", "test"), ("val", "test")):
        assert not keys[a] & keys[b]
        assert len(prose[a] & prose[b]) <= 0.01 * len(prose[b])  # a line that the text itself repeats
    # The words of a test's keys are known from training, their pairs are new.
    dice, words = np.random.default_rng(0), {}
    for split in ("train", "test"):
        words[split] = {word for _ in range(5000) for word in task._key(dice, split).split("-")}
    assert words["test"] == words["train"] == {*ADJECTIVES, *NOUNS}
    assert len(ADJECTIVES) == len(set(ADJECTIVES)) == len(NOUNS) == len(set(NOUNS)) == 200


def test_needles_are_mixed_into_a_stream_of_plain_text():
    task = make_task("niah", "lite")
    block = task.block("train", 0, 0)
    holds = np.array([b"secret number" in bytes(row[row < 256].astype(np.uint8)) for row in block.tokens])
    assert holds.mean() == pytest.approx(0.1, abs=0.04)
    assert (block.targets[~holds] != -100).all()
    text = " ".join(EXCERPT.read_text(encoding="utf-8").split())
    for row in block.tokens[~holds][:20]:
        assert ByteTokenizer().decode(row[5:400]) in text
    np.testing.assert_array_equal(block.targets[~holds][:, :-1], block.tokens[~holds][:, 1:])
    assert all(mask.any(1).sum() <= holds.sum() for mask in block.slices.values())
    every = make_task("niah", "lite", {"needle_share": 1.0}).block("train", 0, 0)
    assert all(b"secret number" in bytes(row[row < 256].astype(np.uint8)) for row in every.tokens)


@pytest.mark.parametrize("form", [1, 2, 3])
def test_learning_the_value_alone_changes_labels_and_not_rows(form):
    whole, value = (
        make_task("niah", "lite", {"form": form, "seq_len": 640, "reserve": 40, "needle_share": 1.0, "learn": learn})
        for learn in ("all", "value")
    )
    rows, bare, test = whole.block("train", 0, 0), value.block("train", 0, 0), value.block("test", 0, 0)
    np.testing.assert_array_equal(rows.tokens, bare.tokens)
    labelled = bare.targets != -100
    np.testing.assert_array_equal(bare.targets[labelled], rows.targets[labelled])
    assert set(labelled.sum(1)) == set((test.targets != -100).sum(1)) == {37 if form == 3 else 8}
    for row, at in zip(*np.nonzero(labelled[:50])):
        assert value.solve(bare.tokens[row].tolist(), at) == bare.targets[row, at]


def test_words_of_a_file_and_a_text_from_its_start_make_the_prompt(tmp_path):
    wording, essay = tmp_path / "words.yaml", tmp_path / "essay.txt"
    wording.write_text(yaml.safe_dump(WORDING))
    essay.write_text(" ".join(f"This is sentence number {name}." for name in "abcdefghijklmnopqrstuvwxyz"))
    options = {"wording": str(wording), "haystack": str(essay), "from_start": True}
    task = make_task("niah", "s2", {**options, "seq_len": 640})
    rows, found = texts(task, rows=20)
    for text in found:
        key, value = re.search(r"One of the special numbers for (\S+) is: (\d{7})\.", text).groups()
        needle = f"One of the special numbers for {key} is: {value}."
        bare = text.replace(f"\n{needle} ", "\n").replace(f" {needle}", "")
        haystack = " ".join(f"This is sentence number {name}." for name in "abcdefghijklmnopqrstuvwxyz")
        instruction, seen, question = parts_of(bare)
        assert instruction == "A special number is hidden within the following text."
        assert haystack.startswith(seen)
        asked = f"for {key} mentioned in the provided text"
        assert question == f"What is the special number {asked}? The special number {asked} is {value}"
    assert len(rows) == 20
    noise = make_task("niah", "s1", {"wording": str(wording), "seq_len": 640})
    assert "\nThe grass is green. Here we go.\nThe grass is green." in texts(noise)[1][0]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"needle": "One {kind} for {key}."}, "needle must hold {value}"),
        ({"question": "Which {kind}?"}, "question must hold {key}"),
        ({"filler": []}, "filler must be a list of sentences"),
        ({"number": 7}, "everything else a text"),
        ({"extra": "x"}, "and nothing else; it has .*extra"),
    ],
)
def test_a_wording_that_lacks_something_is_refused(tmp_path, change, match):
    file = tmp_path / "words.yaml"
    file.write_text(yaml.safe_dump({**WORDING, **change}))
    with pytest.raises(UserError, match=match):
        make_task("niah", "s2", {"wording": str(file)})
    with pytest.raises(UserError, match=r"nowhere\.yaml"):
        make_task("niah", "s2", {"wording": str(tmp_path / "nowhere.yaml")})


def test_a_value_that_the_text_holds_already_is_never_hidden(tmp_path):
    essay = tmp_path / "essay.txt"
    essay.write_text(" ".join(f"We counted {1_000_000 + number} of them." for number in range(20)))
    task = make_task("niah", "s2", {"haystack": str(essay)})

    class Counting:
        drawn = 1_000_000 - 1

        def integers(self, low, high):
            self.drawn += 1
            return self.drawn

    assert task._value(Counting()) == "1000020"


def test_a_short_text_repeats_with_a_warning_and_a_text_of_few_sentences_is_refused(tmp_path, caplog):
    essay = tmp_path / "essay.txt"
    essay.write_text(" ".join(f"Sentence {name} of a short text." for name in "abcdefghijklmnopqrst"))
    with caplog.at_level(logging.WARNING):
        task = make_task("niah", "s2", {"haystack": str(essay)})
    assert "the test haystack has" in caplog.text
    _, found = texts(task)
    assert found[0].count("Sentence s of a short text.") > 1
    essay.write_text("One. Two. Three.")
    with pytest.raises(UserError, match="3 sentences, but the splits need at least 10"):
        make_task("niah", "s2", {"haystack": str(essay)})


def test_a_run_does_not_go_on_with_another_text_under_the_same_name(tmp_path):
    essay = tmp_path / "essay.txt"

    def loader(word):
        essay.write_text(" ".join(f"This is {word} number {place}." for place in range(300)))
        options = {"haystack": str(essay)}
        return TaskData("niah", profile="s2", options=options, batch_tokens=2048).train_dataloader()

    state = loader("sentence").state_dict()
    loader("sentence").load_state_dict(state)
    with pytest.raises(UserError, match="trained with contents"):
        loader("line").load_state_dict(state)


def test_sentences_end_where_they_should():
    text = 'He came. Mr. Smith said: go! "Why?" It was 3.5 miles, e.g. far. the end'
    assert sentences(text) == ["He came.", "Mr. Smith said: go!", '"Why?" It was 3.5 miles, e.g. far. the end']
    long = " ".join(["word"] * 100)
    assert " ".join(sentences(long)) == long
    assert max(map(len, sentences(long))) <= 240
