"""A needle in a haystack: one sentence with a value in a long text, and the question for it at the end."""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar
from uuid import UUID

import numpy as np

from zoo.data.rows import IGNORED
from zoo.data.tasks.base import SPLIT_KEYS, Task, TaskRows, task
from zoo.data.tasks.needle_text import ZOO, Wording, read_haystack, read_wording, sentences, words_of
from zoo.data.tasks.needle_words import ADJECTIVES, NOUNS
from zoo.data.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)
DEPTHS = np.round(np.linspace(0, 100, 40)).astype(int)  # of needles in prose, percent
SHARES = {"train": (0, 80), "val": (80, 90), "test": (90, 100)}  # of the haystack's sentences, percent


@dataclass(frozen=True)
class Haystack:
    """Sentences as ids, repeated as often as a row may need.

    Attributes:
        pieces: ids of every sentence with what parts it from the one before.
        bare: ids of every sentence alone.
        ends: int64, at which token each piece ends when they follow each other, over and over; 0 stands first.
        stream: ids of all pieces, once.
    """

    pieces: list[np.ndarray]
    bare: list[np.ndarray]
    ends: np.ndarray
    stream: np.ndarray

    @classmethod
    def of(cls, texts: Sequence[str], tokenizer: Tokenizer, seq_len: int, *, lines: bool = False) -> Haystack:
        """From sentences, parted by spaces; with ``lines``, the first begins a line."""
        pieces = tokenizer.encode_batch([("\n" if lines and not at else " ") + text for at, text in enumerate(texts)])
        led, bare = [ids for ids, _ in pieces], [ids for ids, _ in tokenizer.encode_batch(texts)]
        lengths = np.array([len(ids) for ids in led])
        rounds = 2 + seq_len // max(1, int(lengths.sum()))
        return cls(led, bare, np.concatenate([[0], np.cumsum(np.tile(lengths, rounds))]), np.concatenate(led))

    def fitting(self, start: int, room: int) -> int:
        """How many whole sentences from number ``start`` on have at most ``room`` tokens."""
        return int(np.searchsorted(self.ends, self.ends[start] + room, side="right")) - 1 - start

    def around(self, start: int, count: int, at: int, needle: np.ndarray, bare_needle: np.ndarray) -> list[np.ndarray]:
        """``count`` sentences from number ``start`` on, with a needle behind the first ``at``."""
        pieces = [self.pieces[number % len(self.pieces)] for number in range(start, start + count)]
        if at == 0:
            return [bare_needle, *pieces]
        return [self.bare[start], *pieces[1:at], needle, *pieces[at:]]


@task("niah")
@dataclass(frozen=True, kw_only=True)
class Needle(Task):
    """A single needle in a haystack, after S-NIAH-1, -2 and -3.

    A row is instruction, haystack with the needle, question, the beginning of the answer, and the value, as one
    document behind a separator. Evaluation labels the ids of the value, each with the ones before it put in. Training
    labels every next id, or these alone; a share of its rows are such rows, the others plain text of the haystack. No
    key of one split occurs in another.

    Attributes:
        form: 1: a number among a few sentences repeated; 2: a number in prose; 3: a UUID in prose.
        haystack: path of a text; empty: the shipped excerpt. Training takes the first 80 % of its sentences,
            validation and test 10 % each.
        from_start: every haystack begins with the text's first sentence, whatever the split, as RULER's do; else it
            begins at a sentence drawn evenly.
        wording: path of a YAML file with the words; empty: ours.
        tokenizer: as of text data.
        reserve: tokens that are kept free behind the prompt, the value among them.
        needle_share: share of training rows that hold a needle.
        learn: ``all``: training labels every next id, as language models learn; ``value``: the ids of the value alone,
            as the recall of pairs is learned, in a small part of the steps; then every row holds a needle.

    Source: Hsieh et al. 2024, arXiv:2404.06654.
    """

    form: int
    haystack: str = ""
    from_start: bool = False
    wording: str = ""
    tokenizer: str = "byte"
    reserve: int = 128
    needle_share: float = 1.0
    learn: str = "all"
    unsolved_in_training: ClassVar[bool] = True
    profiles: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "s1": {"seq_len": 1024, "form": 1},
        "s2": {"seq_len": 1024, "form": 2},
        "s3": {"seq_len": 1024, "form": 3},
        "lite": {"seq_len": 512, "form": 1, "reserve": 16, "needle_share": 0.1},
    }

    def __post_init__(self) -> None:
        self.require(self.form in (1, 2, 3), f"form is {self.form}, but must be 1, 2 or 3")
        self.require(0 < self.needle_share <= 1, f"needle_share is {self.needle_share}, but must be above 0, at most 1")
        self.require(self.learn in ("all", "value"), f"learn is {self.learn!r}, but must be all or value")
        self.require(
            self.learn == "all" or self.needle_share == 1,
            f"needle_share is {self.needle_share}, but with learn value, plain text has no label; set it to 1",
        )
        self.require(not (self.from_start and self.form == 1), "from_start is for prose: form 1 only repeats itself")
        key = f"{max(ADJECTIVES, key=len)}-{max(NOUNS, key=len)}"
        value = str(UUID(int=0)) if self._coded else "1" * 7
        before, needle, _, behind, answer = self._parts(key, value)
        self.require(
            self.reserve >= len(answer),
            f"reserve is {self.reserve}, but a value has up to {len(answer)} tokens; raise reserve",
        )
        longest = max(len(ids) for split in SPLIT_KEYS for ids in self._haystack(split).pieces)
        fixed = 1 + len(before) + len(needle) + len(behind) + self.reserve
        self.require(
            fixed + longest <= self.seq_len,
            f"seq_len is {self.seq_len}, but prompt, needle and reserve need {fixed} tokens, and the longest sentence "
            f"of the haystack {longest} more; raise seq_len to {fixed + longest} or lower reserve",
        )
        for split in SPLIT_KEYS if self.form != 1 else ():
            have, room = len(self._haystack(split).stream), self.seq_len - fixed
            if have < room:
                log.warning("task niah: the %s haystack has %d tokens, rows take %d: it repeats", split, have, room)

    @property
    def _coded(self) -> bool:
        return self.form == 3

    @cached_property
    def _words(self) -> Wording:
        return read_wording(self.wording) if self.wording else ZOO

    @cached_property
    def _encoder(self) -> Tokenizer:
        return load_tokenizer(self.tokenizer)

    @cached_property
    def _text(self) -> str:
        return read_haystack(self.haystack)

    @cached_property
    def _taken(self) -> set[str]:
        """Values that the text holds already."""
        return set(re.findall(r"(?=(\d{7}))", self._text))

    @cached_property
    def _haystacks(self) -> dict[str, Haystack]:
        return {}

    @cached_property
    def _prose(self) -> list[str]:
        found = sentences(self._text)
        self.require(len(found) >= 10, f"the haystack has {len(found)} sentences, but the splits need at least 10")
        return found

    def _haystack(self, split: str) -> Haystack:
        """The sentences of a split; of form 1, the few that repeat."""
        if split not in self._haystacks:
            prose = self.form != 1
            texts = (self._prose if self.from_start else self._share(split)) if prose else self._words.filler
            self._haystacks[split] = Haystack.of(texts, self._encoder, self.seq_len, lines=not prose)
        return self._haystacks[split]

    def _share(self, split: str) -> list[str]:
        low, high = (len(self._prose) * percent // 100 for percent in SHARES[split])
        return self._prose[low:high]

    @cached_property
    def _stream(self) -> np.ndarray:
        """Ids of the plain text that training reads beside the needles."""
        return Haystack.of(self._share("train"), self._encoder, self.seq_len).stream

    @property
    def vocab_size(self) -> int:
        """The tokenizer's."""
        return self._encoder.vocab_size

    @property
    def slice_names(self) -> tuple[str, ...]:
        """Labels by how deep in the haystack the needle stands, in percent."""
        return tuple(f"depth_to_{edge}" for edge in range(10, 101, 10))

    @property
    def log2_rows(self) -> float:
        """Without a bound: the splits share no key, so their needles cannot meet."""
        return math.inf

    def identity(self) -> dict[str, str]:
        """The settings, and a hash of what stands in the files they name."""
        contents = "\0".join([self._text, repr(self._words), self._encoder.identity])
        return {**super().identity(), "contents": hashlib.sha256(contents.encode()).hexdigest()}

    def generate(self, n: int, random: np.random.Generator, split: str = "train") -> TaskRows:
        """``n`` rows of a split; draws from ``random`` alone."""
        tokens = np.full((n, self.seq_len + 1), self._encoder.separator, dtype=np.int64)
        targets = np.full((n, self.seq_len), IGNORED, dtype=np.int64)
        depth = np.full(n, -1)
        share = self.needle_share if split == "train" else 1.0
        for row, holds in enumerate((random.random(n) < share).tolist()):
            if not holds:
                first = int(random.integers(len(self._stream)))
                places = np.arange(first, first + self.seq_len + 1)
                tokens[row] = self._stream.take(places, mode="wrap")
                targets[row] = tokens[row, 1:]
                continue
            prompt, answer, depth[row] = self._row(random, split)
            end = 1 + len(prompt) + len(answer)
            tokens[row, 1:end] = np.concatenate([prompt, answer])
            first = 0 if split == "train" and self.learn == "all" else len(prompt)
            targets[row, first : end - 1] = tokens[row, first + 1 : end]
        labelled = targets != IGNORED
        bucket = np.maximum(1, -(-depth // 10))
        slices = {
            f"depth_to_{edge}": labelled & ((depth >= 0) & (bucket == edge // 10))[:, None]
            for edge in range(10, 101, 10)
        }
        return TaskRows(tokens[:, :-1].copy(), targets, slices, np.full_like(targets, IGNORED))

    def _row(self, random: np.random.Generator, split: str) -> tuple[np.ndarray, np.ndarray, int]:
        """Prompt, value and the needle's depth in percent."""
        parts = self._parts(self._key(random, split), self._value(random))
        before, needle, bare_needle, behind, answer = parts
        haystack = self._haystack(split)
        start = 0 if self.form == 1 or self.from_start else int(random.integers(len(haystack.pieces)))
        room = self.seq_len - self.reserve - 1 - len(before) - len(needle) - len(behind)
        # Whichever stands first, sentence or needle, goes without its space.
        room += min(len(needle) - len(bare_needle), len(haystack.pieces[start]) - len(haystack.bare[start]))
        count = haystack.fitting(start, room)
        self.require(count >= 1, f"seq_len {self.seq_len} leaves {room} tokens for a haystack, less than a sentence")
        if self.form == 1:
            at = int(random.integers(1, count + 1))
            depth = 100 * at // count
        else:
            depth = int(random.choice(DEPTHS))
            at = count * depth // 100
        return np.concatenate([before, *haystack.around(start, count, at, needle, bare_needle), behind]), answer, depth

    def _parts(self, key: str, value: str) -> tuple[np.ndarray, ...]:
        """Ids of instruction, needle with and without a space, question with the beginning of the answer, and value."""
        said, words = self._words.said, words_of(self._words, self._coded, key, value)
        texts = [
            said("instruction", **words) + "\n",
            " " + said("needle", **words),
            said("needle", **words),
            "\n" + said("question", **words) + said("prefix", **words),
            f" {value}",
        ]
        return tuple(ids for ids, _ in self._encoder.encode_batch(texts))

    def _key(self, random: np.random.Generator, split: str) -> str:
        """A key of a split: the sum of the places of its two words, modulo 10, tells which."""
        low, high = (percent // 10 for percent in SHARES[split])
        first = int(random.integers(len(ADJECTIVES)))
        digit, tens = int(random.integers(low, high)), int(random.integers(len(NOUNS) // 10))
        return f"{ADJECTIVES[first]}-{NOUNS[10 * tens + (digit - first) % 10]}"

    def _value(self, random: np.random.Generator) -> str:
        if self._coded:
            return str(UUID(bytes=random.bytes(16), version=4))
        while True:
            value = str(int(random.integers(10**6, 10**7)))
            if value not in self._taken:
                return value

    def solve(self, tokens: Sequence[int], at: int) -> int:
        """Read the text, look for a needle and for the question behind it, and copy the value."""
        text = self._encoder.decode(tokens[: at + 1])
        shape = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}" if self._coded else r"\d{7}"
        words = words_of(self._words, self._coded, "(?P<key>[a-z]+-[a-z]+)", f"(?P<value>{shape})")
        slots = {name: f"\0{name}\0" for name in words}
        pattern = re.escape(self._words.said("needle", **slots))
        for name, word in words.items():
            pattern = pattern.replace(re.escape(slots[name]), word, 1)
        hidden = re.search(pattern, text)
        if hidden is None:
            raise KeyError("there is no needle so far")
        found = words_of(self._words, self._coded, hidden["key"], hidden["value"])
        asked = self._words.said("question", **found) + self._words.said("prefix", **found)
        _, known, given = text.rpartition(asked)
        answer = self._encoder.encode(f" {hidden['value']}")
        place = len(self._encoder.encode(given))
        if not known or place >= len(answer):
            raise KeyError("no value comes next")
        return int(answer[place])
