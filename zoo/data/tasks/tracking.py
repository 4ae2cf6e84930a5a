"""State tracking: parity, and arithmetic modulo a number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

import numpy as np

from zoo.data.rows import IGNORED
from zoo.data.tasks.base import Task, TaskRows, task
from zoo.data.tasks.draws import buckets, edges

PLUS, MINUS, TIMES, EQUALS, DIGITS = 1, 2, 3, 4, 5  # ids; 0 is padding


class LengthTask(Task):
    """What tasks with rows of several lengths share; test rows may be longer than those of training and validation."""

    min_length: int
    max_length: int
    test_min_length: int
    test_max_length: int
    replace_overlap: ClassVar[bool] = False  # short rows must meet

    def _check_lengths(self, shortest: int) -> None:
        for prefix in ("", "test_"):
            low, high = getattr(self, f"{prefix}min_length"), getattr(self, f"{prefix}max_length")
            self.require(
                shortest <= low <= high <= self.seq_len,
                f"{prefix}min_length {low} and {prefix}max_length {high} must rise from {shortest} to seq_len, "
                f"here {self.seq_len}",
            )

    def _range(self, split: str) -> tuple[int, int]:
        """The least and the greatest length of a split."""
        if split == "test":
            return self.test_min_length, self.test_max_length
        return self.min_length, self.max_length

    @property
    def slice_names(self) -> tuple[str, ...]:
        """Labels by how many symbols they depend on."""
        return tuple(f"length_to_{edge}" for edge in edges(self.seq_len))


@task("parity")
@dataclass(frozen=True, kw_only=True)
class Parity(LengthTask):
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
        self._check_lengths(1)

    @property
    def vocab_size(self) -> int:
        """3."""
        return 3

    @property
    def log2_rows(self) -> float:
        """One bit a symbol."""
        return float(self.min_length)

    def generate(self, n: int, random: np.random.Generator, split: str = "train") -> TaskRows:
        """``n`` rows of a split; draws from ``random`` alone."""
        low, high = self._range(split)
        lengths = random.integers(low, high + 1, (n, 1))
        place = np.arange(self.seq_len)
        inside = place < lengths
        tokens = np.where(inside, random.integers(1, 3, (n, self.seq_len), dtype=np.int8), 0).astype(np.int64)
        labelled = inside if self.variant == "every" else place == lengths - 1
        odd = np.logical_xor.accumulate(tokens == 2, axis=1)
        targets = np.where(labelled, 1 + odd, IGNORED)
        slices = buckets("length_to_", place + 1, labelled, self.seq_len)
        return TaskRows(tokens, targets, slices, np.full_like(tokens, IGNORED))

    def solve(self, tokens: Sequence[int], at: int) -> int:
        """Turn a switch at every 2."""
        odd = False
        for token in tokens[: at + 1]:
            odd = odd != (token == 2)
        return 2 if odd else 1


@task("arithmetic")
@dataclass(frozen=True, kw_only=True)
class Arithmetic(LengthTask):
    """The value of an expression modulo a number.

    Digits and operators in turn, multiplication first, then ``=``; the label, the value, sits there and is not put in.
    Ids: 0 padding behind a row, 1 ``+``, 2 ``-``, 3 ``*``, 4 ``=``, 5 to 4 + m the digits, then ``(`` and ``)`` where
    there are brackets.

    Attributes:
        modulus: m.
        brackets: nested expressions instead, each in brackets, of any length from 1 symbol on.
        times: with brackets: multiply as well as add and subtract.
        min_length, max_length: symbols of a training or validation row, ``=`` included, drawn evenly; without brackets
            lengths are even.
        test_min_length, test_max_length: symbols of a test row.

    Source: Deletang et al. 2022, arXiv:2207.02098; as a test of memories: Grazzi et al. 2024, arXiv:2411.12537.
    """

    min_length: int
    max_length: int
    test_min_length: int
    test_max_length: int
    modulus: int = 5
    brackets: bool = False
    times: bool = False
    profiles: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "cpu": {"seq_len": 40, "min_length": 4, "max_length": 20, "test_min_length": 4, "test_max_length": 40},
        "gpu": {"seq_len": 256, "min_length": 4, "max_length": 40, "test_min_length": 40, "test_max_length": 256},
        "brackets": {
            "seq_len": 256,
            "min_length": 3,
            "max_length": 40,
            "test_min_length": 40,
            "test_max_length": 256,
            "brackets": True,
        },
    }

    def __post_init__(self) -> None:
        self.require(self.modulus >= 2, f"modulus is {self.modulus}, but must be at least 2")
        self._check_lengths(2)
        for split, prefix in (("train", ""), ("test", "test_")):
            low, high = self._range(split)
            self.require(
                self.brackets or high > low or low % 2 == 0,
                f"{prefix}min_length and {prefix}max_length are {low}, but digits and operators in turn, with = behind "
                f"them, have an even length; take {low + 1}, or brackets",
            )
        self.require(
            self.brackets or not self.times, "times is for brackets: without them there is always multiplication"
        )

    @property
    def classes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The modulus."""
        return self.modulus

    @property
    def vocab_size(self) -> int:
        """Padding, operators, ``=`` and digits; and the brackets, where there are any."""
        return DIGITS + self.modulus + 2 * self.brackets

    @property
    def log2_rows(self) -> float:
        """Of the digits of the shortest rows; those in brackets may have one digit alone."""
        digits = 1 if self.brackets else (self.min_length + 1) // 2
        return digits * math.log2(self.modulus)

    def generate(self, n: int, random: np.random.Generator, split: str = "train") -> TaskRows:
        """``n`` rows of a split; draws from ``random`` alone."""
        low, high = self._range(split)
        tokens, values, lengths = (self._nested if self.brackets else self._flat)(n, random, low, high)
        labelled = np.arange(self.seq_len) == lengths[:, None] - 1
        targets = np.where(labelled, DIGITS + values[:, None], IGNORED)
        slices = buckets("length_to_", np.arange(1, self.seq_len + 1), labelled, self.seq_len)
        return TaskRows(tokens, targets, slices, np.full_like(tokens, IGNORED))

    def _flat(
        self, n: int, random: np.random.Generator, low: int, high: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows of digits and operators in turn: ids [n, L], values [n], lengths [n]."""
        count = random.integers((low + 1) // 2, high // 2 + 1, n)
        most = int(count.max())
        digits = random.integers(0, self.modulus, (n, most))
        operators = random.integers(PLUS, TIMES + 1, (n, most))  # the one behind each digit
        tokens = np.zeros((n, self.seq_len), dtype=np.int64)
        tokens[:, 0 : 2 * most : 2], tokens[:, 1 : 2 * most : 2] = DIGITS + digits, operators
        tokens[np.arange(n), 2 * count - 1] = EQUALS
        tokens[:, : 2 * most][np.arange(2 * most) >= 2 * count[:, None]] = 0
        # A digit of value 0 added behind the last one changes nothing, so that all rows go on to the longest.
        beyond = np.arange(most) >= count[:, None]
        digits[beyond], operators[:, :-1][beyond[:, 1:]] = 0, PLUS
        total, term = np.zeros(n, dtype=np.int64), digits[:, 0]
        for place in range(1, most):
            before, digit = operators[:, place - 1], digits[:, place]
            times = before == TIMES
            total = np.where(times, total, total + term) % self.modulus
            term = np.where(times, term, np.where(before == PLUS, 1, -1)) * digit % self.modulus
        return tokens, (total + term) % self.modulus, 2 * count

    def _nested(
        self, n: int, random: np.random.Generator, low: int, high: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows of nested expressions: ids [n, L], values [n], lengths [n]."""
        lengths = random.integers(low, high + 1, n)
        tokens, values = np.zeros((n, self.seq_len), dtype=np.int64), np.zeros(n, dtype=np.int64)
        dice = Random(int(random.integers(2**63)))  # for single numbers many times faster than numpy's
        for row, length in enumerate(lengths.tolist()):
            ids, values[row] = self._expression(length - 1, dice)
            tokens[row, :length] = [*ids, EQUALS]
        return tokens, values, lengths

    def _expression(self, length: int, dice: Random) -> tuple[list[int], int]:
        """An expression of ``length`` symbols and its value."""
        opened, closed = DIGITS + self.modulus, DIGITS + self.modulus + 1
        if length <= 4:
            digit = dice.randrange(self.modulus)
            negative = length in (2, 4)
            ids = [MINUS, DIGITS + digit] if negative else [DIGITS + digit]
            ids = [opened, *ids, closed] if length > 2 else ids
            return ids, (-digit if negative else digit) % self.modulus
        shorter = dice.randrange(1, length - 3)
        left, a = self._expression(shorter, dice)
        right, b = self._expression(length - 3 - shorter, dice)
        operator = dice.choice((PLUS, MINUS, TIMES) if self.times else (PLUS, MINUS))
        value = a + b if operator == PLUS else a - b if operator == MINUS else a * b
        return [opened, *left, operator, *right, closed], value % self.modulus

    def solve(self, tokens: Sequence[int], at: int) -> int:
        """Write the expression as Python does, and have its value taken."""
        signs = {PLUS: "+", MINUS: "-", TIMES: "*", DIGITS + self.modulus: "(", DIGITS + self.modulus + 1: ")"}
        written = "".join(signs.get(token) or str(token - DIGITS) for token in tokens[:at])
        if tokens[at] != EQUALS:
            raise KeyError("no expression ends here")
        return DIGITS + eval(written, {"__builtins__": {}}) % self.modulus
