"""In-context languages: strings of an automaton that no other row has."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

import numpy as np

from zoo.data.rows import IGNORED
from zoo.data.tasks.base import Task, TaskRows, task
from zoo.data.tasks.draws import buckets, edges

Automaton = tuple[tuple[tuple[int, int], ...], ...]
"""For every state, the first being where strings begin, its edges: symbol and next state, by symbol."""

SHARES = {"train": (0.0, 0.5), "val": (0.5, 0.75), "test": (0.75, 1.0)}  # of all automata


@task("regbench")
@dataclass(frozen=True, kw_only=True)
class RegBench(Task):
    """In-context language learning: which symbol may follow, in a language that this row alone shows.

    A row is strings of one random automaton, parted by a separator; the label is the next symbol, and every symbol that
    the automaton allows there counts as ``legal``. The hash of an automaton's least form decides its split, so no
    language of one split occurs in another. Ids: 0 padding, the symbols from 1 on, and the separator, the last.

    Attributes:
        symbols: different symbols; a language uses 4 or more of them.
        max_nodes: states, from 4 to so many, before those that do the same are merged.
        max_edges: edges of a state, from 1 to so many, to different other states.
        min_strings, max_strings: strings of a row.
        max_string: symbols of a string, from 1 to so many.

    Source: Akyurek et al. 2024, arXiv:2401.12973.
    """

    symbols: int = 18
    max_nodes: int = 12
    max_edges: int = 3
    min_strings: int = 10
    max_strings: int = 19
    max_string: int = 49
    several_right: ClassVar[bool] = True
    profiles: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "baseline": {"seq_len": 1024},
        "cpu": {"seq_len": 128, "symbols": 8, "max_nodes": 6, "min_strings": 6, "max_strings": 8, "max_string": 15},
    }

    def __post_init__(self) -> None:
        self.require(
            4 <= self.symbols <= 60, f"symbols is {self.symbols}, but must be from 4 to 60: sets of them are 64-bit"
        )
        self.require(self.max_nodes >= 4, f"max_nodes is {self.max_nodes}, but must be at least 4")
        self.require(
            1 <= self.max_edges <= 3,
            f"max_edges is {self.max_edges}, but must be from 1 to 3: 4 states have 3 others to go to",
        )
        self.require(
            1 <= self.min_strings <= self.max_strings,
            f"min_strings {self.min_strings} and max_strings {self.max_strings} must rise from 1",
        )
        self.require(self.max_string >= 2, f"max_string is {self.max_string}, but must be at least 2")
        need = self.max_strings * (self.max_string + 1) - 1
        self.require(
            self.seq_len >= need,
            f"seq_len is {self.seq_len}, but {self.max_strings} strings of {self.max_string} and what parts them need "
            f"{need}; raise seq_len or lower max_strings or max_string",
        )

    @property
    def vocab_size(self) -> int:
        """Padding, symbols, separator."""
        return self.symbols + 2

    @property
    def slice_names(self) -> tuple[str, ...]:
        """Labels by which string of the row they stand in."""
        return tuple(f"string_to_{edge}" for edge in edges(self.max_strings))

    @property
    def log2_rows(self) -> float:
        """Without a bound: the splits share no language."""
        return math.inf

    def generate(self, n: int, random: np.random.Generator, split: str = "train") -> TaskRows:
        """``n`` rows of a split; draws from ``random`` alone."""
        dice = Random(int(random.integers(2**63)))  # for single numbers many times faster than numpy's
        tokens, legal = np.zeros((n, self.seq_len), dtype=np.int64), np.zeros((n, self.seq_len), dtype=np.int64)
        for row in range(n):
            ids, sets = self._strings(self.automaton(dice, split), dice)
            tokens[row, : len(ids)], legal[row, : len(ids)] = ids, sets
        targets = np.roll(tokens, -1, axis=1)
        targets[:, -1] = 0
        counted = (targets > 0) & (targets <= self.symbols)
        separator = tokens == self.symbols + 1
        slices = buckets("string_to_", 1 + np.cumsum(separator, axis=1), counted, self.max_strings)
        targets[~counted], legal[~counted] = IGNORED, 0
        return TaskRows(tokens, targets, slices, np.full_like(tokens, IGNORED), legal)

    def _strings(self, automaton: Automaton, dice: Random) -> tuple[list[int], list[int]]:
        """Ids of a row, and at each the set of what may follow, as bits."""
        allowed = [sum(1 << symbol for symbol, _ in out) for out in automaton]
        ids: list[int] = []
        sets: list[int] = []
        for _ in range(dice.randint(self.min_strings, self.max_strings)):
            if ids:
                ids.append(self.symbols + 1)
                sets.append(allowed[0])
            state = 0
            for _ in range(dice.randint(1, self.max_string)):
                out = automaton[state]
                symbol, state = out[int(dice.random() * len(out))]
                ids.append(symbol)
                sets.append(allowed[state])
        return ids, sets

    def automaton(self, dice: Random, split: str) -> Automaton:
        """A random automaton of a split, in its least form."""
        low, high = SHARES[split]
        while True:
            found = self._draw(dice)
            digest = hashlib.sha256(repr(found).encode()).digest()
            if low <= int.from_bytes(digest[:8], "big") / 2**64 < high:
                return found

    def _draw(self, dice: Random) -> Automaton:
        nodes = dice.randint(4, self.max_nodes)
        alphabet = dice.sample(range(1, self.symbols + 1), dice.randint(4, self.symbols))
        drawn = []
        for node in range(nodes):
            count = dice.randint(1, self.max_edges)
            symbols, others = dice.sample(alphabet, count), dice.sample(range(nodes - 1), count)
            drawn.append({symbol: other + (other >= node) for symbol, other in zip(symbols, others)})
        return least_form(drawn)

    def solve(self, tokens: Sequence[int], at: int) -> int:
        """A symbol that followed the same beginning of a string before; it is legal, if not the only one."""
        strings: list[list[int]] = [[]]
        for token in tokens[: at + 1]:
            if token == self.symbols + 1:
                strings.append([])
            else:
                strings[-1].append(token)
        begun = strings.pop()
        for string in strings:
            if string[: len(begun)] == begun and len(string) > len(begun):
                return string[len(begun)]
        raise KeyError("no string began like this")


def least_form(automaton: Sequence[Mapping[int, int]]) -> Automaton:
    """The automaton of the same language with the fewest states, numbered as they are met from the first one on.

    All states accept, and a missing edge rejects. Two automata have the same language if and only if this is the same.
    """
    alike = [0] * len(automaton)
    while True:
        # States stay together while their edges have the same symbols and lead to states that do.
        views = [
            (alike[state], tuple(sorted((symbol, alike[to]) for symbol, to in out.items())))
            for state, out in enumerate(automaton)
        ]
        numbers: dict[Any, int] = {}
        refined = [numbers.setdefault(view, len(numbers)) for view in views]
        if len(numbers) == len(set(alike)):
            break
        alike = refined
    member = {group: state for state, group in reversed(list(enumerate(alike)))}
    order, states = {alike[0]: 0}, [alike[0]]
    found: list[tuple[tuple[int, int], ...]] = []
    for group in states:
        out = []
        for symbol, to in sorted(automaton[member[group]].items()):
            if alike[to] not in order:
                order[alike[to]] = len(order)
                states.append(alike[to])
            out.append((symbol, order[alike[to]]))
        found.append(tuple(out))
    return tuple(found)
