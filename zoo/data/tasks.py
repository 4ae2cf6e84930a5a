"""Synthetic tasks: rows that a right answer can be computed for, in blocks that depend on a seed alone."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np

from zoo.data.rows import IGNORED
from zoo.errors import UserError

BLOCK = 1024  # rows drawn from one seed
SPLIT_KEYS = {"train": 0, "val": 1, "test": 2}
TASKS: dict[str, type[Task]] = {}
T = TypeVar("T", bound="type[Task]")


@dataclass(frozen=True, eq=False)
class TaskRows:
    """Rows of a task.

    Attributes:
        tokens: int64 [n, L].
        targets: int64 [n, L]; ``targets[t]`` belongs to ``logits[t]``, -100 is not counted.
        slices: bool [n, L] by name: labels that are also scored on their own.
        stale: int64 [n, L], the answer that was right once and no longer is; -100 where there is none.
    """

    tokens: np.ndarray
    targets: np.ndarray
    slices: dict[str, np.ndarray]
    stale: np.ndarray

    def __getitem__(self, rows: np.ndarray | slice) -> TaskRows:
        slices = {name: mask[rows] for name, mask in self.slices.items()}
        return TaskRows(self.tokens[rows], self.targets[rows], slices, self.stale[rows])

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def join(parts: Sequence[TaskRows]) -> TaskRows:
        """The rows of all ``parts``, in order."""
        slices = {name: np.concatenate([part.slices[name] for part in parts]) for name in parts[0].slices}
        tokens, targets, stale = (
            np.concatenate([getattr(part, field) for part in parts]) for field in ("tokens", "targets", "stale")
        )
        return TaskRows(tokens, targets, slices, stale)


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """Settings of a task, checked when made, and the generator of its rows.

    Subclasses are frozen dataclasses whose fields are their options, registered with :func:`task`.

    Attributes:
        seq_len: tokens of one row.
        name, profiles: the task's name; options by profile, the first being the default.
        classes: how many answers are possible, for a score scaled to chance; None: too many to matter.
        replace_overlap: evaluation rows that also occur in training give way to others; False where short rows
            cannot but meet, and leaving them out would change the task.
    """

    seq_len: int
    name: ClassVar[str]
    profiles: ClassVar[Mapping[str, Mapping[str, Any]]]
    classes: ClassVar[int | None] = None
    replace_overlap: ClassVar[bool] = True

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """V; every id is below it."""

    @property
    @abstractmethod
    def slice_names(self) -> tuple[str, ...]:
        """Names of the slices of every row."""

    @property
    @abstractmethod
    def log2_rows(self) -> float:
        """Binary logarithm of the number of different rows, from below."""

    @abstractmethod
    def generate(self, n: int, random: np.random.Generator, split: str = "train") -> TaskRows:
        """``n`` rows of a split; draws from ``random`` alone."""

    @abstractmethod
    def solve(self, tokens: Sequence[int], at: int) -> int:
        """The right answer at position ``at`` of one row, found the slow and obvious way."""

    def block(self, split: str, number: int, seed: int) -> TaskRows:
        """Block ``number`` of a split, 1024 rows; a pure function of its arguments."""
        seeds = np.random.SeedSequence(seed, spawn_key=(SPLIT_KEYS[split], number))
        return self.generate(BLOCK, np.random.default_rng(seeds), split)

    def require(self, holds: bool, rule: str) -> None:
        """Refuse settings that break ``rule``.

        Raises:
            UserError: with the rule, which names the values and what to change.
        """
        if not holds:
            raise UserError(f"task {self.name}: {rule}")


def task(name: str):
    """Register a task under ``name``; a second of that name is an error."""

    def register(cls: T) -> T:
        if name in TASKS:
            raise ValueError(f"task {name!r} is registered twice: {TASKS[name].__qualname__} and {cls.__qualname__}")
        cls.name = name
        TASKS[name] = cls
        return cls

    return register


def make_task(name: str, profile: str | None = None, options: Mapping[str, Any] | None = None) -> Task:
    """A task by name: the options of its profile, overridden by ``options``.

    Raises:
        UserError: an unknown task, profile or option, an option of the wrong type, or settings that cannot be met.
    """
    if name not in TASKS:
        raise UserError(f"data: no task {name!r}; there are {', '.join(sorted(TASKS))}")
    cls = TASKS[name]
    profile = profile if profile is not None else next(iter(cls.profiles))
    if profile not in cls.profiles:
        raise UserError(f"task {name}: no profile {profile!r}; there are {', '.join(cls.profiles)}")
    settings = {**cls.profiles[profile], **(options or {})}
    known = {field.name: field.type for field in dataclasses.fields(cls)}
    for option, value in settings.items():
        if option not in known:
            raise UserError(f"task {name}: no option {option!r}; there are {', '.join(known)}")
        if type(value).__name__ != known[option]:
            raise UserError(f"task {name}: {option} is {value!r}, but must be of type {known[option]}")
    return cls(**settings)


@task("overwrite")
@dataclass(frozen=True, kw_only=True)
class Overwrite(Task):
    """Recall after updates: pairs, then updates that bind some of their keys to new values, then a query for every key.

    The row is ``key value`` for every pair, ``key value`` for every update, and slots of two tokens, in which each key
    is asked once; most queries come soon. The label, the key's latest value, sits on the query and is not put in.
    Ids: 0 filler, keys 1 to V/2 - 1, values V/2 to V - 1.

    Attributes:
        kv: pairs, of distinct keys and distinct values.
        upd: updates, of distinct keys, each to a value other than that key's own old one.
        vocab: V.
        random_fillers: fill with ids 1 to V - 1 instead of 0; they may equal keys and values.
    """

    kv: int
    upd: int
    vocab: int
    random_fillers: bool = False
    profiles: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "cpu": {"seq_len": 36, "kv": 6, "upd": 6, "vocab": 64},
        "small": {"seq_len": 64, "kv": 8, "upd": 8, "vocab": 128},
        "gpu": {"seq_len": 256, "kv": 32, "upd": 32, "vocab": 8192},
    }

    def __post_init__(self) -> None:
        self.require(self.kv >= 1, f"kv is {self.kv}, but at least 1 pair is needed")
        self.require(
            0 <= self.upd <= self.kv,
            f"upd is {self.upd}, but must be from 0 to kv, here {self.kv}: no key is updated twice",
        )
        self.require(self.vocab % 2 == 0, f"vocab is {self.vocab}, but must be even: half are keys, half are values")
        self.require(
            self.vocab // 2 - 1 >= self.kv,
            f"vocab {self.vocab} has {self.vocab // 2 - 1} keys, but kv asks for {self.kv}; raise vocab to "
            f"{2 * self.kv + 2}",
        )
        self.require(self.seq_len % 2 == 0, f"seq_len is {self.seq_len}, but must be even: a row is made of pairs")
        need = 2 * (self.kv + self.upd) + 2 * self.kv
        self.require(
            self.seq_len >= need,
            f"seq_len is {self.seq_len}, but {self.kv} pairs, {self.upd} updates and {self.kv} queries need {need}; "
            "raise seq_len or lower kv",
        )

    @property
    def context(self) -> int:
        """Tokens of pairs and updates, before the first query."""
        return 2 * (self.kv + self.upd)

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.vocab

    @property
    def slice_names(self) -> tuple[str, ...]:
        """Labels of keys that were updated or not, and by the distance from the last write to the query."""
        return ("overwritten", "kept", *(f"gap_to_{edge}" for edge in _edges(self.seq_len)))

    @property
    def log2_rows(self) -> float:
        """Of the choices of pairs and of updates."""
        keys, values = self.vocab // 2 - 1, self.vocab // 2
        pairs = sum(math.log2(keys - i) + math.log2(values - i) for i in range(self.kv))
        return pairs + sum(math.log2(self.kv - i) + math.log2(values - 1) for i in range(self.upd))

    def generate(self, n: int, random: np.random.Generator, split: str = "train") -> TaskRows:
        """``n`` rows, of every split alike; draws from ``random`` alone."""
        del split
        half, kv, upd, context = self.vocab // 2, self.kv, self.upd, self.context
        row = np.arange(n)[:, None]
        keys = distinct(random, n, kv, 1, half)
        old = distinct(random, n, kv, half, self.vocab)
        updated = distinct(random, n, upd, 0, kv)  # which pairs are bound anew, in the order of the updates
        new = random.integers(half, self.vocab - 1, (n, upd))
        new += new >= old[row, updated]  # one id fewer was drawn from: the old value is stepped over
        latest = old.copy()
        latest[row, updated] = new
        written = np.broadcast_to(2 * np.arange(kv), (n, kv)).copy()
        written[row, updated] = 2 * (kv + np.arange(upd))
        asked = context + 2 * self._slots(n, random)

        tokens = np.zeros((n, self.seq_len), dtype=np.int64)
        if self.random_fillers:
            tokens = random.integers(1, self.vocab, (n, self.seq_len))
        tokens[:, 0 : 2 * kv : 2], tokens[:, 1 : 2 * kv : 2] = keys, old
        tokens[:, 2 * kv : context : 2], tokens[:, 2 * kv + 1 : context : 2] = keys[row, updated], new
        tokens[row, asked] = keys
        targets, stale = np.full_like(tokens, IGNORED), np.full_like(tokens, IGNORED)
        targets[row, asked] = latest
        stale[row, asked] = np.where(latest == old, IGNORED, old)
        gap = np.zeros_like(tokens)
        gap[row, asked] = asked - written
        return TaskRows(tokens, targets, self._slices(targets, stale, gap), stale)

    def solve(self, tokens: Sequence[int], at: int) -> int:
        """Read the context into a dictionary and look up."""
        memory = {}
        for place in range(0, self.context, 2):
            memory[tokens[place]] = tokens[place + 1]
        return memory[tokens[at]]

    def _slots(self, n: int, random: np.random.Generator) -> np.ndarray:
        """For each key its slot, int64 [n, kv]: drawn without replacement, slot i with weight i ** -0.99."""
        slots = (self.seq_len - self.context) // 2
        scores = random.gumbel(size=(n, slots)) - 0.99 * np.log(np.arange(1, slots + 1))
        return np.argsort(-scores, axis=1)[:, : self.kv]

    def _slices(self, targets: np.ndarray, stale: np.ndarray, gap: np.ndarray) -> dict[str, np.ndarray]:
        labelled, overwritten = targets != IGNORED, stale != IGNORED
        slices = {"overwritten": overwritten, "kept": labelled & ~overwritten}
        return slices | _buckets("gap_to_", gap, labelled, self.seq_len)


@task("parity")
@dataclass(frozen=True, kw_only=True)
class Parity(Task):
    """Whether the number of twos so far is odd.

    A memory whose transitions have eigenvalues in [0, 1] cannot track it over any length; one that reaches -1 can.
    Ids: 0 padding behind a row, symbols 1 and 2. Label: 1 + (number of 2s, modulo 2).

    Attributes:
        variant: ``every``: a label at every symbol. ``last``: at the last symbol alone.
        min_length, max_length: symbols of a training or validation row, drawn evenly.
        test_min_length, test_max_length: symbols of a test row.

    Source: Grazzi et al. 2024, arXiv:2411.12537.
    """

    variant: str
    min_length: int
    max_length: int
    test_min_length: int
    test_max_length: int
    classes: ClassVar[int | None] = 2
    replace_overlap: ClassVar[bool] = False
    profiles: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "cpu": {
            "seq_len": 40,
            "variant": "every",
            "min_length": 40,
            "max_length": 40,
            "test_min_length": 40,
            "test_max_length": 40,
        },
        "gpu": {
            "seq_len": 256,
            "variant": "last",
            "min_length": 3,
            "max_length": 40,
            "test_min_length": 40,
            "test_max_length": 256,
        },
    }

    def __post_init__(self) -> None:
        self.require(self.variant in ("every", "last"), f"variant is {self.variant!r}, but must be every or last")
        for prefix in ("", "test_"):
            low, high = getattr(self, f"{prefix}min_length"), getattr(self, f"{prefix}max_length")
            self.require(
                1 <= low <= high <= self.seq_len,
                f"{prefix}min_length {low} and {prefix}max_length {high} must rise from 1 to seq_len, "
                f"here {self.seq_len}",
            )

    @property
    def vocab_size(self) -> int:
        """3."""
        return 3

    @property
    def slice_names(self) -> tuple[str, ...]:
        """Labels by how many symbols they depend on."""
        return tuple(f"length_to_{edge}" for edge in _edges(self.seq_len))

    @property
    def log2_rows(self) -> float:
        """One bit a symbol."""
        return float(self.min_length)

    def generate(self, n: int, random: np.random.Generator, split: str = "train") -> TaskRows:
        """``n`` rows of a split; draws from ``random`` alone."""
        prefix = "test_" if split == "test" else ""
        low, high = getattr(self, f"{prefix}min_length"), getattr(self, f"{prefix}max_length")
        lengths = random.integers(low, high + 1, (n, 1))
        place = np.arange(self.seq_len)
        inside = place < lengths
        tokens = np.where(inside, random.integers(1, 3, (n, self.seq_len), dtype=np.int8), 0).astype(np.int64)
        labelled = inside if self.variant == "every" else place == lengths - 1
        odd = np.logical_xor.accumulate(tokens == 2, axis=1)
        targets = np.where(labelled, 1 + odd, IGNORED)
        slices = _buckets("length_to_", place + 1, labelled, self.seq_len)
        return TaskRows(tokens, targets, slices, np.full_like(tokens, IGNORED))

    def solve(self, tokens: Sequence[int], at: int) -> int:
        """Turn a switch at every 2."""
        odd = False
        for token in tokens[: at + 1]:
            odd = odd != (token == 2)
        return 2 if odd else 1


def distinct(random: np.random.Generator, n: int, k: int, low: int, high: int) -> np.ndarray:
    """``n`` rows of ``k`` different integers in [low, high), every ordered choice equally likely; int64 [n, k]."""
    if high - low <= max(4 * k, 64):
        return low + np.argsort(random.random((n, high - low)), axis=1)[:, :k]
    drawn = random.integers(low, high, (n, k))
    # Redraw the later ones of equal entries. The rule treats all ids alike, so the outcome is uniform over the choices.
    pending = np.arange(n)
    while len(pending):
        part = drawn[pending]
        order = np.argsort(part, axis=1, kind="stable")
        ranked = np.take_along_axis(part, order, axis=1)
        repeated = np.zeros(part.shape, dtype=bool)
        np.put_along_axis(repeated, order[:, 1:], ranked[:, 1:] == ranked[:, :-1], axis=1)
        part[repeated] = random.integers(low, high, int(repeated.sum()))
        drawn[pending] = part
        pending = pending[repeated.any(axis=1)]
    return drawn


def _edges(longest: int) -> list[int]:
    return [2**power for power in range(1, math.ceil(math.log2(longest)) + 1)]


def _buckets(prefix: str, value: np.ndarray, labelled: np.ndarray, longest: int) -> dict[str, np.ndarray]:
    """Labels by ``value`` ([n, L] or [L]): each bucket reaches from the edge before, excluded, to its own."""
    lower = [0, *_edges(longest)]
    return {
        f"{prefix}{upper}": labelled & (value > low) & (value <= upper) for low, upper in zip(lower, _edges(longest))
    }
