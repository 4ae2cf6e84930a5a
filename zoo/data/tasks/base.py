"""What a task is: checked settings, rows in blocks that depend on a seed alone, and a slow solver."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np

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
        legal: int64 [n, L], bit ``i`` set where id ``i`` would be right as well as the target; None: the target alone.
    """

    tokens: np.ndarray
    targets: np.ndarray
    slices: dict[str, np.ndarray]
    stale: np.ndarray
    legal: np.ndarray | None = None

    def __getitem__(self, rows: np.ndarray | slice) -> TaskRows:
        slices = {name: mask[rows] for name, mask in self.slices.items()}
        legal = None if self.legal is None else self.legal[rows]
        return TaskRows(self.tokens[rows], self.targets[rows], slices, self.stale[rows], legal)

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def join(parts: Sequence[TaskRows]) -> TaskRows:
        """The rows of all ``parts``, in order."""
        slices = {name: np.concatenate([part.slices[name] for part in parts]) for name in parts[0].slices}
        tokens, targets, stale = (
            np.concatenate([getattr(part, field) for part in parts]) for field in ("tokens", "targets", "stale")
        )
        legal = [part.legal for part in parts if part.legal is not None]
        return TaskRows(tokens, targets, slices, stale, np.concatenate(legal) if legal else None)


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
        by_class: report the mean over answers of the accuracy of each, too.
        several_right: rows say which ids are ``legal``, and answers are scored by that, too.
        unsolved_in_training: training rows also label what their tokens do not tell.
        decoder: rows are restored from their last position, once they are seen whole; the model needs a decoder.
    """

    seq_len: int
    name: ClassVar[str]
    profiles: ClassVar[Mapping[str, Mapping[str, Any]]]
    classes: ClassVar[int | None] = None
    replace_overlap: ClassVar[bool] = True
    by_class: ClassVar[bool] = False
    several_right: ClassVar[bool] = False
    unsolved_in_training: ClassVar[bool] = False
    decoder: ClassVar[bool] = False

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
        """The right answer at position ``at`` of one row, found the slow and obvious way.

        Raises:
            KeyError: the tokens up to there, or the whole row where it is restored, do not tell.
        """

    def identity(self) -> dict[str, str]:
        """What names the rows beside the seed; a run goes on only where it is the same."""
        return {"task": repr(self)}

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
