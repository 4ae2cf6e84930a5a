"""Tasks of MAD (Poli et al. 2024, arXiv:2403.17844): recall plain, noisy and fuzzy, selective copying,
memorization, compression."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from zoo.data.rows import IGNORED
from zoo.data.tasks.base import Task, TaskRows, task
from zoo.data.tasks.draws import buckets, distinct, edges, first_equal, last_equal


class MadTask(Task):
    """What the tasks share: accuracies by answer, and labels with the distance to what they depend on."""

    vocab: int
    by_class: ClassVar[bool] = True

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.vocab

    @property
    def slice_names(self) -> tuple[str, ...]:
        """Labels by the distance to where the answer was last seen."""
        return tuple(f"gap_to_{edge}" for edge in edges(self.seq_len))

    def _rows(self, tokens: np.ndarray, targets: np.ndarray, gap: np.ndarray) -> TaskRows:
        """Rows in which ``gap``, int64 [n, L], is above 0 where an answer was seen before."""
        slices = buckets("gap_to_", gap, gap > 0, self.seq_len)
        return TaskRows(tokens, targets, slices, np.full_like(tokens, IGNORED))

    def _next_token_rows(self, whole: np.ndarray, gap: np.ndarray, split: str) -> TaskRows:
        """Rows of ``whole`` [n, L + 1]: trained on every next id, evaluated where it was seen before."""
        tokens, following = whole[:, :-1].copy(), whole[:, 1:].copy()
        targets = following if split == "train" else np.where(gap > 0, following, IGNORED)
        return self._rows(tokens, targets, gap)


@task("mad_recall")
@dataclass(frozen=True, kw_only=True)
class MadRecall(MadTask):
    """In-context recall: pairs whose keys come back, plain or with noise between them.

    A row is ``key value`` again and again, each key always with the value that it has in this row; two keys may have
    the same. The last key has come before; its value is left out. Training labels every next id, evaluation the values
    of keys that have come before. Ids: keys, as many values, noise.

    Attributes:
        seq_len: ids of a row, odd: the last value is not put in.
        vocab: V, noise included.
        noise_vocab: ids of noise.
        noise: share of the pairs, all but the last, that are two ids of noise instead; at least one pair is kept.
    """

    vocab: int
    noise_vocab: int = 0
    noise: float = 0.0
    unsolved_in_training: ClassVar[bool] = True
    profiles: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "in_context": {"seq_len": 127, "vocab": 16},
        "noisy": {"seq_len": 127, "vocab": 32, "noise_vocab": 16, "noise": 0.2},
    }

    def __post_init__(self) -> None:
        self.require(
            self.seq_len >= 3 and self.seq_len % 2 == 1,
            f"seq_len is {self.seq_len}, but must be odd and at least 3: pairs, of which the last lacks its value",
        )
        plain = self.vocab - self.noise_vocab
        self.require(
            plain >= 2 and plain % 2 == 0,
            f"vocab {self.vocab} less noise_vocab {self.noise_vocab} is {plain}, but must be even and at least 2: half "
            "are keys, half are values",
        )
        self.require(0 <= self.noise < 1, f"noise is {self.noise}, but must be a share from 0 to below 1")
        self.require(
            (self.noise > 0) == (self.noise_vocab > 0) and self.noise_vocab >= 0,
            f"noise is {self.noise} and noise_vocab {self.noise_vocab}; give both, or neither",
        )

    @property
    def keys(self) -> int:
        """Different keys, and different values."""
        return (self.vocab - self.noise_vocab) // 2

    @property
    def log2_rows(self) -> float:
        """Of the keys and the noise, as far as pairs are more often kept than not."""
        return (self.seq_len - 1) / 2 * math.log2(min(self.keys, self.noise_vocab or self.keys))

    def generate(self, n: int, random: np.random.Generator, split: str = "train") -> TaskRows:
        """``n`` rows of a split; draws from ``random`` alone."""
        pairs, row = (self.seq_len + 1) // 2, np.arange(n)
        keys = random.integers(0, self.keys, (n, pairs))
        noisy = np.zeros((n, pairs), dtype=bool)
        if self.noise:
            noisy = random.random((n, pairs)) < self.noise
            noisy[row, random.integers(0, pairs - 1, n)] = noisy[:, -1] = False
        shown = np.zeros((n, self.keys + 1), dtype=bool)
        shown[row[:, None], np.where(noisy, self.keys, keys)[:, :-1]] = True
        keys[:, -1] = np.argmax(shown[:, :-1] * random.random((n, self.keys)), axis=1)
        values = self.keys + random.integers(0, self.keys, (n, self.keys))

        whole = np.empty((n, pairs, 2), dtype=np.int64)
        whole[..., 0], whole[..., 1] = keys, np.take_along_axis(values, keys, axis=1)
        if self.noise:
            whole[noisy] = random.integers(2 * self.keys, self.vocab, (int(noisy.sum()), 2))
        # Ids of their own, so that no noise is a repeat.
        place = np.arange(pairs)
        before = last_equal(np.where(noisy, self.keys + place, keys))
        gap = np.zeros((n, self.seq_len), dtype=np.int64)
        gap[:, ::2] = np.where(before >= 0, 2 * (place - before), 0)
        return self._next_token_rows(whole.reshape(n, -1), gap, split)

    def solve(self, tokens: Sequence[int], at: int) -> int:
        """Note the value behind each key, and look up."""
        if at % 2 or tokens[at] >= self.keys:
            raise KeyError("no value comes next")
        return dict(zip(tokens[:at:2], tokens[1:at:2]))[tokens[at]]


@task("mad_fuzzy")
@dataclass(frozen=True, kw_only=True)
class MadFuzzy(MadTask):
    """Fuzzy recall: as in-context recall, with keys and values of several ids.

    A key or value is 1 to so many different ids. A row is pairs drawn until it is full, among them, at a place drawn
    evenly, the pair that is repeated at its end; padding stands before it. Training labels every next id, padding
    included; evaluation, whose keys all have the full length, the values of keys that have come before. Ids: keys,
    values, and padding, which is the last.

    Attributes:
        seq_len: ids of a row; the last of its value is not put in.
        vocab: V; V/2 - 1 ids make keys, V/2 make values.
        key_length, value_length: most ids of a key and of a value.
    """

    vocab: int
    key_length: int = 3
    value_length: int = 3
    unsolved_in_training: ClassVar[bool] = True
    profiles: ClassVar[Mapping[str, Mapping[str, Any]]] = {"baseline": {"seq_len": 127, "vocab": 16}}

    def __post_init__(self) -> None:
        self.require(
            self.key_length >= 1 and self.value_length >= 1,
            f"key_length is {self.key_length} and value_length {self.value_length}, but both must be at least 1",
        )
        need = 2 * max(self.key_length + 1, self.value_length)
        self.require(
            self.vocab % 2 == 0 and self.vocab >= need,
            f"vocab is {self.vocab}, but must be even and at least {need}: ids of a key, or of a value, are different",
        )
        need = 2 * (self.key_length + self.value_length) - 1
        self.require(
            self.seq_len >= need,
            f"seq_len is {self.seq_len}, but a pair and its repetition need {need}; raise seq_len or shorten motifs",
        )

    @property
    def log2_rows(self) -> float:
        """Of the ids of the pairs that are not repeated, of which even the longest leave room for so many."""
        pairs = (self.seq_len + 1) // (self.key_length + self.value_length) - 1
        return pairs * (math.log2(self.vocab // 2 - 1) + math.log2(self.vocab // 2))

    def generate(self, n: int, random: np.random.Generator, split: str = "train") -> TaskRows:
        """``n`` rows of a split; draws from ``random`` alone."""
        most, half = 1 + (self.seq_len + 1) // 2, self.vocab // 2
        least = 1 if split == "train" else self.key_length
        # Pair 0 is the one that is repeated; the others follow in order.
        keys, key_sizes = self._motifs(n, most, random, 0, half - 1, least, self.key_length)
        values, value_sizes = self._motifs(n, most, random, half - 1, self.vocab - 1, 1, self.value_length)
        codes = ((keys + 1) * half ** np.arange(self.key_length)).sum(-1)
        first = first_equal(codes)
        values = np.take_along_axis(values, first[..., None], axis=1)
        sizes = key_sizes + np.take_along_axis(value_sizes, first, axis=1)

        taken = np.cumsum(sizes[:, 1:], axis=1) + 2 * sizes[:, :1]
        kept = (taken <= self.seq_len + 1).sum(1, keepdims=True)
        at, place = random.integers(0, kept + 1), np.arange(most + 1)
        order = np.where(place < at, place + 1, place)
        order[(place == at) | (place == kept + 1)] = 0
        order[place > kept + 1] = -1
        return self._lay_out(order, codes, np.concatenate([keys, values], axis=2), sizes, split)

    def _motifs(
        self, n: int, pairs: int, random: np.random.Generator, low: int, high: int, least: int, most: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Motifs of different ids, [n, pairs, most] with -1 behind them, and their lengths."""
        ids = distinct(random, n * pairs, most, low, high).reshape(n, pairs, most)
        sizes = random.integers(least, most + 1, (n, pairs))
        return np.where(np.arange(most) < sizes[..., None], ids, -1), sizes

    def _lay_out(
        self, order: np.ndarray, codes: np.ndarray, pairs: np.ndarray, sizes: np.ndarray, split: str
    ) -> TaskRows:
        """Rows of the pairs in ``order`` [n, places], where -1 is none, at the end of each row."""
        n, width = len(order), pairs.shape[-1]
        used, row = order >= 0, np.arange(n)[:, None]
        before = last_equal(np.where(used, codes[row, order], -1 - np.arange(order.shape[1])))
        starts = np.cumsum(np.where(used, sizes[row, order], 0), axis=1) - sizes[row, order]
        gap = np.where(before >= 0, starts - np.take_along_axis(starts, before, axis=1), 0)
        ids = np.where(used[..., None], pairs[row, order], -1)
        gaps = np.where(np.arange(width) >= self.key_length, gap[..., None], 0).reshape(n, -1)
        ids = ids.reshape(n, -1)
        # What is there goes to the end, in its order.
        last = np.argsort(ids >= 0, axis=1, kind="stable")[:, -(self.seq_len + 1) :]
        whole, gaps = np.take_along_axis(ids, last, axis=1), np.take_along_axis(gaps, last, axis=1)
        there = whole >= 0
        following = np.where(there, gaps, 0)[:, 1:].copy()
        return self._next_token_rows(np.where(there, whole, self.vocab - 1), following, split)

    def solve(self, tokens: Sequence[int], at: int) -> int:
        """Cut the row into keys and values, and look up what stood behind the value's beginning."""
        keys, runs = self.vocab // 2 - 1, []
        for token in tokens[: at + 1]:
            kind = "pad" if token == self.vocab - 1 else "key" if token < keys else "value"
            if not runs or runs[-1][0] != kind:
                runs.append((kind, []))
            runs[-1][1].append(token)
        motifs = [tuple(ids) for kind, ids in runs if kind != "pad"]
        if len(motifs) % 2:
            motifs.append(())
        memory = dict(zip(motifs[:-2:2], motifs[1:-2:2]))
        value = memory[motifs[-2]]
        if len(motifs[-1]) == len(value):
            raise KeyError("another pair follows")
        return value[len(motifs[-1])]


@task("mad_copy")
@dataclass(frozen=True, kw_only=True)
class MadCopy(MadTask):
    """Selective copying: some ids among blanks, to be given again, in order, without the blanks.

    Each blank goes before an id drawn evenly, so the last id stands right before the copy id; behind that come as many
    blanks, which carry the labels. Ids: content 0 to V - 3, blank V - 2, copy V - 1.

    Attributes:
        vocab: V.
        copies: ids to be copied.
    """

    vocab: int
    copies: int = 16
    profiles: ClassVar[Mapping[str, Mapping[str, Any]]] = {"baseline": {"seq_len": 256, "vocab": 16}}

    def __post_init__(self) -> None:
        self.require(self.copies >= 1, f"copies is {self.copies}, but at least 1 id must be copied")
        self.require(self.vocab >= 3, f"vocab is {self.vocab}, but content, blank and copy need at least 3")
        need = 2 * self.copies + 1
        self.require(
            self.seq_len >= need,
            f"seq_len is {self.seq_len}, but {self.copies} ids, the copy id and {self.copies} blanks for the answer "
            f"need {need}; raise seq_len or lower copies",
        )

    @property
    def log2_rows(self) -> float:
        """Of the content and its places."""
        free = self.seq_len - self.copies - 2
        return self.copies * math.log2(self.vocab - 2) + math.log2(math.comb(free, self.copies - 1))

    def generate(self, n: int, random: np.random.Generator, split: str = "train") -> TaskRows:
        """``n`` rows, of every split alike; draws from ``random`` alone."""
        del split
        copies, row = self.copies, np.arange(n)[:, None]
        content = random.integers(0, self.vocab - 2, (n, copies))
        blanks = random.multinomial(self.seq_len - 2 * copies - 1, np.full(copies, 1 / copies), size=n)
        places = np.cumsum(blanks, axis=1) + np.arange(copies)
        tokens = np.full((n, self.seq_len), self.vocab - 2, dtype=np.int64)
        tokens[row, places] = content
        tokens[:, -copies - 1] = self.vocab - 1
        targets, gap = np.full_like(tokens, IGNORED), np.zeros_like(tokens)
        targets[:, -copies:] = content
        gap[:, -copies:] = np.arange(self.seq_len - copies, self.seq_len) - places
        return self._rows(tokens, targets, gap)

    def solve(self, tokens: Sequence[int], at: int) -> int:
        """Leave the blanks out and count."""
        if self.vocab - 1 not in tokens[:at]:
            raise KeyError("nothing is asked here")
        copy = list(tokens).index(self.vocab - 1)
        return [token for token in tokens[:copy] if token != self.vocab - 2][at - copy - 1]


@task("mad_memorize")
@dataclass(frozen=True, kw_only=True)
class MadMemorize(MadTask):
    """Memorization: keys whose values stand in no row and must be learned.

    A row is ``key, blank`` again and again; the label, the key's value, sits on the blank. Ids: keys from 0 on, values,
    of which each key has its own, and the blank, which is the last.

    Attributes:
        vocab: V.
        map_seed: draws the value of every key, alike in every split and for every task seed.
    """

    vocab: int
    map_seed: int = 12345
    profiles: ClassVar[Mapping[str, Mapping[str, Any]]] = {"baseline": {"seq_len": 32, "vocab": 256}}

    def __post_init__(self) -> None:
        self.require(
            self.seq_len >= 2 and self.seq_len % 2 == 0, f"seq_len is {self.seq_len}, but must be even and at least 2"
        )
        self.require(self.vocab >= 3, f"vocab is {self.vocab}, but a key, a value and the blank need at least 3")
        self.require(self.map_seed >= 0, f"map_seed is {self.map_seed}, but a seed is a whole number from 0 on")

    @property
    def slice_names(self) -> tuple[str, ...]:
        """None: nothing in a row tells labels apart."""
        return ()

    @property
    def log2_rows(self) -> float:
        """Of the keys."""
        return self.seq_len / 2 * math.log2(max(1, len(self.facts())))

    def facts(self) -> np.ndarray:
        """The value of every key, int64 [keys]."""
        keys = (self.vocab - 1) // 2
        return np.random.default_rng(self.map_seed).permutation(np.arange(keys, self.vocab - 1))[:keys]

    def generate(self, n: int, random: np.random.Generator, split: str = "train") -> TaskRows:
        """``n`` rows, of every split alike; draws from ``random`` alone."""
        del split
        facts = self.facts()
        keys = random.integers(0, len(facts), (n, self.seq_len // 2))
        tokens = np.full((n, self.seq_len), self.vocab - 1, dtype=np.int64)
        targets = np.full_like(tokens, IGNORED)
        tokens[:, ::2], targets[:, 1::2] = keys, facts[keys]
        return TaskRows(tokens, targets, {}, np.full_like(tokens, IGNORED))

    def solve(self, tokens: Sequence[int], at: int) -> int:
        """Look the key up among the facts."""
        return dict(enumerate(self.facts().tolist()))[tokens[at - 1]]


@task("mad_compress")
@dataclass(frozen=True, kw_only=True)
class MadCompress(MadTask):
    """Compression: a row of random ids, to be restored from the vector at its last position alone.

    The last id is always the same; behind it the model has seen the row, and a decoder makes all ids of that one
    vector. Every position has a label, its own id; slices go by the distance to the last. Ids: content 0 to V - 2, and
    the last.

    Attributes:
        vocab: V.
    """

    vocab: int
    decoder: ClassVar[bool] = True
    profiles: ClassVar[Mapping[str, Mapping[str, Any]]] = {"baseline": {"seq_len": 32, "vocab": 16}}

    def __post_init__(self) -> None:
        self.require(self.seq_len >= 2, f"seq_len is {self.seq_len}, but must be at least 2: some ids, and the last")
        self.require(self.vocab >= 3, f"vocab is {self.vocab}, but two ids to tell apart and the last need at least 3")

    @property
    def log2_rows(self) -> float:
        """Of the content."""
        return (self.seq_len - 1) * math.log2(self.vocab - 1)

    def generate(self, n: int, random: np.random.Generator, split: str = "train") -> TaskRows:
        """``n`` rows, of every split alike; draws from ``random`` alone."""
        del split
        tokens = random.integers(0, self.vocab - 1, (n, self.seq_len))
        tokens[:, -1] = self.vocab - 1
        gap = np.broadcast_to(np.arange(self.seq_len)[::-1], tokens.shape)
        return self._rows(tokens, tokens.copy(), gap)

    def solve(self, tokens: Sequence[int], at: int) -> int:
        """Look at the row, which is there to be seen."""
        return tokens[at]
