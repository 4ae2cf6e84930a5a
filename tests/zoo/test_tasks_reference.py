"""Our rows against other generators: plain ones, written from the papers' descriptions, and the originals where they
can be imported.

A plain generator draws one row after another with loops, so that it shares no line with ours. Two generators of one
distribution have the same histogram of ids at every position. HazyResearch/zoology and athms/mad-lab are compared where
they are on the path (PYTHONPATH=FOLDER pytest -rs ...); docs/tasks.md says what was compared and what was not.
"""

import importlib
import itertools
import math
import random
import re
from collections import Counter

import numpy as np
import pytest
import yaml

from zoo.data.sources import EXCERPT
from zoo.data.tasks import BLOCK, TaskRows, languages, make_task, recall
from zoo.data.tasks.needle_text import sentences
from zoo.data.tokenizer import ByteTokenizer


def block_rows(name, profile=None, split="train", blocks=1, options=None):
    task = make_task(name, profile, options)
    return task, TaskRows.join([task.block(split, number, 5) for number in range(blocks)])


def original(module, reason):
    try:
        return importlib.import_module(module)
    except ImportError:
        pytest.skip(reason)


def assert_as_expected(counts, expected):
    """Chi-square against expected counts: six standard deviations of the statistic, with a fixed seed."""
    degrees = len(counts) - 1
    assert ((counts - expected) ** 2 / expected).sum() < degrees + 6 * math.sqrt(2 * degrees) + 6, (counts, expected)


def assert_alike(ours, theirs, what):
    """Chi-square of two columns of ids, of equal length."""
    bins = 1 + max(ours.max(), theirs.max())
    one, other = np.bincount(ours, minlength=bins), np.bincount(theirs, minlength=bins)
    seen = one + other > 0
    degrees = max(1, seen.sum() - 1)
    found = ((one - other)[seen] ** 2 / (one + other)[seen]).sum()
    assert found < degrees + 6 * math.sqrt(2 * degrees) + 6, (what, one, other)


# ----------------------------------------------------------------------------------------------------------------- MQAR
ZOOLOGY = "zoology is not on the path: a checkout of HazyResearch/zoology"


def drawn_as_zoology_does(n, seq_len, kv, vocab, seed):
    """Keys, values and slots in the original's order of calls: seed, all keys, all values, all slots."""
    dice = np.random.RandomState(seed)
    slots = (seq_len - 2 * kv) // 2
    weights = np.arange(1, slots + 1) ** (0.01 - 1)

    def choose(ids, **options):
        rows = np.tile(ids, (n, 1))
        return np.apply_along_axis(dice.choice, 1, rows, replace=False, size=kv, **options)

    keys, values = choose(np.arange(1, vocab // 2)), choose(np.arange(vocab // 2, vocab))
    return keys, values, choose(np.arange(slots), p=weights / weights.sum())


def plain_mqar(keys, values, slots, seq_len):
    """One row after another: pairs, then each key in its slot, its value as the label on the key."""
    tokens, targets = [], []
    for row_keys, row_values, row_slots in zip(keys.tolist(), values.tolist(), slots.tolist()):
        row, labels = [0] * seq_len, [-100] * seq_len
        for place, (key, value, slot) in enumerate(zip(row_keys, row_values, row_slots)):
            row[2 * place], row[2 * place + 1] = key, value
            row[2 * len(row_keys) + 2 * slot] = key
            labels[2 * len(row_keys) + 2 * slot] = value
        tokens.append(row)
        targets.append(labels)
    return np.array(tokens), np.array(targets)


SETTINGS = [(64, 4, 8192), (64, 16, 128), (128, 8, 8192)]  # the second fills every slot


def ours_of_zoologys_draws(monkeypatch, n, seq_len, kv, vocab, seed):
    keys, values, slots = drawn_as_zoology_does(n, seq_len, kv, vocab, seed)
    handed = iter([keys, values])
    with monkeypatch.context() as patch:
        patch.setattr(recall, "distinct", lambda *args: next(handed))
        patch.setattr(recall, "query_slots", lambda *args: slots)
        task = make_task("mqar", options={"seq_len": seq_len, "kv": kv, "vocab": vocab})
        return task.generate(n, np.random.default_rng(0)), plain_mqar(keys, values, slots, seq_len)


@pytest.mark.parametrize(("seq_len", "kv", "vocab"), SETTINGS)
def test_mqar_lays_the_same_draws_out_as_a_plain_generator(monkeypatch, seq_len, kv, vocab):
    rows, (tokens, targets) = ours_of_zoologys_draws(monkeypatch, 50, seq_len, kv, vocab, 3)
    np.testing.assert_array_equal(rows.tokens, tokens)
    np.testing.assert_array_equal(rows.targets, targets)


@pytest.mark.parametrize(("seq_len", "kv", "vocab"), SETTINGS)
def test_mqar_gives_the_rows_of_zoology(monkeypatch, seq_len, kv, vocab):
    theirs = original("zoology.data.multiquery_ar", ZOOLOGY).multiquery_ar(
        vocab_size=vocab,
        num_examples=1000,
        input_seq_len=seq_len,
        seed=3,
        power_a=0.01,
        num_kv_pairs=kv,
        random_non_queries=False,
    )
    rows, _ = ours_of_zoologys_draws(monkeypatch, 1000, seq_len, kv, vocab, 3)
    np.testing.assert_array_equal(rows.tokens, np.asarray(theirs.inputs))
    np.testing.assert_array_equal(rows.targets, np.asarray(theirs.labels))


def test_slots_of_the_hardest_setting_follow_the_weights():
    task, found = make_task("mqar", "fig2"), [[], []]
    slots, count = (task.seq_len - 2 * task.kv) // 2, 98 * BLOCK
    for number in range(98):
        tokens = task.block("train", number, 7).tokens
        for key in (0, 1):
            found[key].append((tokens[:, 2 * task.kv :: 2] == tokens[:, [2 * key]]).argmax(1))
    logs, weights = np.log(np.arange(1, slots + 1)), np.arange(1, slots + 1) ** (0.01 - 1)
    weights /= weights.sum()
    # Of keys drawn evenly the first takes the first slot that is drawn, the second the next, without the first.
    second = weights * ((weights / (1 - weights)).sum() - weights / (1 - weights))
    for key, expected in enumerate((weights, second)):
        chosen = np.concatenate(found[key])
        counts, mean = np.bincount(chosen, minlength=slots), (expected * logs).sum()
        assert_as_expected(counts, expected * count)
        assert counts[0] == pytest.approx(expected[0] * count, rel=0.01)
        assert abs(np.median(chosen) - np.searchsorted(np.cumsum(expected), 0.5)) <= 1
        # The mean logarithm is what the exponent shows in most clearly.
        error = math.sqrt(((expected * logs**2).sum() - mean**2) / count)
        assert abs(logs[chosen].mean() - mean) < 3 * error
    for a in (0.0, 0.02):
        other = np.arange(1, slots + 1) ** (a - 1)
        mean = (other * logs).sum() / other.sum()
        assert abs(logs[np.concatenate(found[0])].mean() - mean) > 3 * error, "the test cannot tell exponents apart"


# ------------------------------------------------------------------------------------------------------------------ MAD
def pairs_and_labels(pairs, split, ignored=()):
    """Ids without the last, and the labels: every next id, or the values of keys that came before."""
    row = [token for pair in pairs for part in pair for token in part]
    labels, seen = [], set()
    for key, value in pairs:
        known = key in seen and key[0] not in ignored
        labels += [-100] * len(key) + [token if known else -100 for token in value]
        seen.add(key)
    return row[:-1], row[1:] if split == "train" else labels[1:]


def plain_recall(dice, split, noise=0.0):
    pairs, facts = [], {}
    kept = dice.randrange(63)
    for place in range(63):
        if place != kept and dice.random() < noise:
            pairs.append(((dice.randrange(16, 32),), (dice.randrange(16, 32),)))
            continue
        key = dice.randrange(8)
        pairs.append(((key,), (facts.setdefault(key, dice.randrange(8, 16)),)))
    probe = dice.choice(sorted(facts))
    return pairs_and_labels([*pairs, ((probe,), (facts[probe],))], split, ignored=range(16, 32))


def plain_noisy(dice, split):
    return plain_recall(dice, split, noise=0.2)


def plain_fuzzy(dice, split):
    facts, pairs = {}, []

    def motif(low, high, size):
        return tuple(dice.sample(range(low, high), size))

    def pair():
        key = motif(0, 7, 3 if split == "test" else dice.randint(1, 3))
        if key not in facts:
            facts[key] = motif(7, 15, dice.randint(1, 3))
        return key, facts[key]

    probe = pair()
    room = 128 - 2 * sum(map(len, probe))
    while True:
        drawn = pair()
        room -= sum(map(len, drawn))
        if room < 0:
            break
        pairs.append(drawn)
    pairs.insert(dice.randint(0, len(pairs)), probe)
    ids, labels = pairs_and_labels([*pairs, probe], split)
    padding = 127 - len(ids)
    first = [15] * (padding - 1) + [pairs[0][0][0]] if split == "train" else [-100] * padding
    return [15] * padding + ids, first[:padding] + labels


def plain_copy(dice, split):
    content = [dice.randrange(14) for _ in range(16)]
    row, before = list(content), Counter(dice.randrange(16) for _ in range(223))
    for place in range(15, -1, -1):
        row[place:place] = [14] * before[place]
    return [*row, 15, *[14] * 16], [-100] * 240 + content


def plain_memorize(dice, split):
    facts = make_task("mad_memorize").facts().tolist()
    keys = [dice.randrange(127) for _ in range(16)]
    row = [token for key in keys for token in (key, 255)]
    return row, [token for key in keys for token in (-100, facts[key])]


# Task, profile, the plain generator of one row, and the original's function with its options.
MAD = {
    "in_context": (
        "mad_recall",
        "in_context",
        plain_recall,
        "generate_in_context_recall_instance",
        {"noise_vocab_size": 0},
    ),
    "noisy": (
        "mad_recall",
        "noisy",
        plain_noisy,
        "generate_noisy_in_context_recall_instance",
        {"vocab_size": 32, "noise_vocab_size": 16, "frac_noise": 0.2},
    ),
    "fuzzy": ("mad_fuzzy", "baseline", plain_fuzzy, "generate_fuzzy_in_context_recall_instance", {}),
    "copy": ("mad_copy", "baseline", plain_copy, "generate_selective_copying_instance", {"num_tokens_to_copy": 16}),
    "memorize": ("mad_memorize", "baseline", plain_memorize, "generate_memorization_instance", {}),
}


def assert_same_histograms(ours, tokens, targets):
    for place in range(tokens.shape[1]):
        assert_alike(ours.tokens[: len(tokens), place], tokens[:, place], f"ids at {place}")
        assert_alike(100 + ours.targets[: len(tokens), place], 100 + targets[:, place], f"labels at {place}")
    labels = [(each != -100).sum(1) for each in (ours.targets[: len(tokens)], targets)]
    assert_alike(*labels, "labels of a row")
    # Neighbours hang together as they should, not only places alone.
    both = [each[:, -9:-1:2] * 256 + each[:, -8::2] for each in (ours.tokens[: len(tokens)], tokens)]
    assert_alike(both[0].ravel(), both[1].ravel(), "neighbours")


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("which", MAD)
def test_mad_rows_are_spread_as_a_plain_generator_draws_them(which, split):
    name, profile, plain, _, _ = MAD[which]
    _, ours = block_rows(name, profile, split, blocks=3)
    dice = random.Random(17)
    tokens, targets = (np.array(part) for part in zip(*(plain(dice, split) for _ in range(3 * BLOCK))))
    assert_same_histograms(ours, tokens, targets)


def rows_of_mad_lab(which, split):
    """Task, our rows, and the tokens and targets of as many of the original's."""
    instances = original("mad.data.instances", "mad is not on the path: a checkout of athms/mad-lab")
    name, profile, _, function, options = MAD[which]
    task, ours = block_rows(name, profile, split, blocks=3)
    dice = np.random.default_rng(12345)
    np.random.seed(12345)  # its selective copying draws places from the global generator
    options = {"vocab_size": task.vocab_size, "multi_query": True, **options}
    if name == "mad_memorize":
        # Any table will do, so it gets ours.
        options["kv_map"] = {(key,): (value,) for key, value in enumerate(task.facts().tolist())}
    training = {"is_training": split == "train", "rng": dice}
    length = {"seq_len": task.seq_len + (name in ("mad_recall", "mad_fuzzy"))}
    rows = [getattr(instances, function)(**options, **length, **training) for _ in range(3 * BLOCK)]
    return task, ours, *(np.array(part) for part in zip(*rows))


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("which", [which for which in MAD if which != "fuzzy"])
def test_mad_rows_are_spread_as_those_of_mad_lab(which, split):
    task, ours, tokens, targets = rows_of_mad_lab(which, split)
    for row, labels in zip(tokens[:200].tolist(), targets.tolist()) if split == "test" else ():
        assert all(task.solve(row, at) == label for at, label in enumerate(labels) if label != -100)
    assert_same_histograms(ours, tokens, targets)


def test_fuzzy_rows_of_mad_lab_are_solved_where_they_can_be():
    """Its rows have 2 to 7 pads in 128 places and ours 0 to 5 in 127, and it places the repeated pair by token, so that
    rows are no more alike than that. In some of its rows that pair stands at the end alone: nobody could answer."""
    task, ours, tokens, targets = rows_of_mad_lab("fuzzy", "test")
    lost = 0
    for row, labels in zip(tokens.tolist(), targets.tolist()):
        answers = [(at, label) for at, label in enumerate(labels) if label != -100]
        try:
            assert all(task.solve(row, at) == label for at, label in answers)
        except KeyError:
            lost += 1
    assert 0 < lost < 0.1 * len(tokens)
    sizes = [(each != -100).sum(1) for each in (ours.targets, targets)]
    assert abs(sizes[0].mean() - sizes[1].mean()) < 0.5
    shares = [np.bincount(each[each != 15], minlength=16) / (each != 15).sum() for each in (ours.tokens, tokens)]
    np.testing.assert_allclose(*shares, atol=0.005)


# ------------------------------------------------------------------------------------------------------------- RegBench
class Noting(random.Random):
    """Notes what was asked for and drawn."""

    def __init__(self, seed):
        super().__init__(seed)
        self.drawn = {}

    def randint(self, a, b):
        value = super().randint(a, b)
        self.drawn.setdefault((a, b), []).append(value)
        return value


def test_automata_have_states_symbols_and_edges_in_even_shares(monkeypatch):
    drawn, dice, task = [], Noting(2), make_task("regbench")
    monkeypatch.setattr(languages, "least_form", lambda automaton: drawn.append(automaton) or ())
    for _ in range(6000):
        task._draw(dice)
    assert dice.drawn.keys() == {(4, 12), (4, 18), (1, 3)}
    for (low, high), values in dice.drawn.items():
        counts = np.bincount(values, minlength=high + 1)[low:]
        assert_as_expected(counts, np.full(len(counts), len(values) / len(counts)))
    states = np.bincount([len(automaton) for automaton in drawn], minlength=13)
    assert_as_expected(states[4:], np.full(9, 6000 / 9))
    symbols = Counter()
    for automaton, alphabet in zip(drawn, dice.drawn[4, 18]):
        used = {symbol for out in automaton for symbol in out}
        assert len(used) <= alphabet
        symbols.update(used)
        for state, out in enumerate(automaton):
            assert 1 <= len(out) == len(set(out.values())) <= 3
            assert state not in out.values()
            assert all(0 <= to < len(automaton) for to in out.values())
    used = np.array([symbols[symbol] for symbol in range(1, 19)])
    assert used.sum() == sum(symbols.values()), "an id that is no symbol"
    assert np.abs(used / used.mean() - 1).max() < 0.05


def plain_strings(dice):
    """A row of a random automaton, which is walked as it was drawn."""
    count = dice.randint(4, 12)
    alphabet = dice.sample(range(1, 19), dice.randint(4, 18))
    edges = []
    for state in range(count):
        out = dice.randint(1, 3)
        edges.append(
            list(zip(dice.sample(alphabet, out), dice.sample([other for other in range(count) if other != state], out)))
        )
    strings = []
    for _ in range(dice.randint(10, 19)):
        state, string = 0, []
        for _ in range(dice.randint(1, 49)):
            symbol, state = dice.choice(edges[state])
            string.append(symbol)
        strings.append(string)
    return [token for number, string in enumerate(strings) for token in ([19] if number else []) + string]


@pytest.mark.parametrize("split", ["train", "test"])
def test_strings_are_spread_as_a_plain_generator_draws_them(split):
    _, ours = block_rows("regbench", split=split, blocks=2)
    dice = random.Random(23)
    lists = [row[row != 0].tolist() for row in ours.tokens], [plain_strings(dice) for _ in range(2 * BLOCK)]
    lengths = [np.array([len(row) for row in rows]) for rows in lists]
    for each in lengths:
        # 14.5 strings of 25 symbols, parted by 13.5 separators: 376.
        assert abs(each.mean() - 376) < 4 * each.std() / math.sqrt(len(each))
    assert_alike(*(each // 40 for each in lengths), "length of a row")
    found = [
        {
            "strings": [1 + row.count(19) for row in rows],
            "symbols": [len(set(row) - {19}) for row in rows],
            "pairs": [len(set(itertools.pairwise(row))) // 4 for row in rows],
            "the first": [row[0] for row in rows],
        }
        for rows in lists
    ]
    for what in found[0]:
        assert_alike(np.array(found[0][what]), np.array(found[1][what]), what)


# ---------------------------------------------------------------------------------------------------------------- RULER
# Single needles are asked for in the singular, while the needle keeps the plural.
RULERLIKE = {
    "needle": "One of the hidden {kind}s for {key} is: {value}.",
    "instruction": "A hidden {kind} stands in the text below. Make sure to keep it; I will ask for it afterwards.",
    "question": "What is the hidden {kind} for {key} that the text above mentions?",
    "prefix": " The hidden {kind} for {key} that the text above mentions is",
    "number": "number",
    "code": "uuid",
    "filler": ["The road is long.", "Away we go."],
}


def plain_prompts(text, key, kind, value, room):
    """The prompt for every depth, sentence after sentence added while it fits, as bytes behind a separator."""
    said = {part: RULERLIKE[part].format(kind=kind, key=key, value=value) for part in ("needle", "question", "prefix")}
    instruction, found = RULERLIKE["instruction"].format(kind=kind), {}
    for depth in np.round(np.linspace(0, 100, 40)).astype(int).tolist():
        for count in range(1, len(text) + 1):
            at = int(count * (depth / 100))
            haystack = " ".join([*text[:at], said["needle"], *text[at:count]])
            prompt = f"{instruction}\n{haystack}\n{said['question']}{said['prefix']}"
            if 1 + len(prompt.encode()) > room:
                break
            found[depth] = prompt
    return found


@pytest.mark.parametrize(("seq_len", "places"), [(1024, 2), (4096, 9)])
@pytest.mark.parametrize(("profile", "kind"), [("s2", "number"), ("s3", "uuid")])
def test_twenty_prompts_are_those_of_a_plain_generator(tmp_path, profile, kind, seq_len, places):
    wording = tmp_path / "words.yaml"
    wording.write_text(yaml.safe_dump(RULERLIKE))
    task = make_task("niah", profile, {"wording": str(wording), "from_start": True, "seq_len": seq_len})
    text = sentences(" ".join(EXCERPT.read_text(encoding="utf-8").split()))[:200]
    seen = set()
    for row in task.block("test", 0, 42).tokens[:20]:
        said = ByteTokenizer().decode(row)
        key, value = re.search(rf"One of the hidden {kind}s for (\S+) is: (\S+)\.", said).groups()
        prompts = plain_prompts(text, key, kind, value, seq_len - 128)
        assert said in {f"{prompt} {value}" for prompt in prompts.values()}
        assert re.fullmatch(r"[1-9]\d{6}" if kind == "number" else r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", value)
        seen.add(said.index("One of the hidden"))
    assert len(seen) >= places, "the needle stands at few depths"
