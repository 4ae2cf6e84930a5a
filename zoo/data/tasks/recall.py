"""Recall of pairs: multi-query associative recall, and the same after updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from zoo.data.rows import IGNORED
from zoo.data.tasks.base import Task, TaskRows, task
from zoo.data.tasks.draws import buckets, distinct, edges, query_slots

LAYOUTS = ("scattered", "lm", "sep")


class PairTask(Task):
    """What tasks with pairs of a key and a value share. Ids: 0 filler, keys 1 to V/2 - 1, values V/2 to V - 1."""

    kv: int
    vocab: int

    def _check_pairs(self) -> None:
        self.require(self.kv >= 1, f"kv is {self.kv}, but at least 1 pair is needed")
        self.require(self.vocab % 2 == 0, f"vocab is {self.vocab}, but must be even: half are keys, half are values")
        self.require(
            self.vocab // 2 - 1 >= self.kv,
            f"vocab {self.vocab} has {self.vocab // 2 - 1} keys, but kv asks for {self.kv}; raise vocab to "
            f"{2 * self.kv + 2}",
        )

    def _log2_pairs(self, kv: int) -> float:
        keys, values = self.vocab // 2 - 1, self.vocab // 2
        return sum(math.log2(keys - i) + math.log2(values - i) for i in range(kv))


@task("mqar")
@dataclass(frozen=True, kw_only=True)
class MQAR(PairTask):
    """Multi-query associative recall: pairs, then a query for every key.

    The row is ``key value`` for every pair, then the queries; the label, the key's value, sits on the query.

    Attributes:
        kv: pairs, of distinct keys and distinct values.
        vocab: V; the layout ``sep`` has the separator as one id more.
        layout: ``scattered``: each key stands in one of the slots of two tokens that follow, most of them soon, and its
            value is not put in. ``lm``: the same, with the value behind the key; an answered query writes the pair
            anew, so scores do not compare. ``sep``: a separator, then the queries back to back.
        min_kv: rows take turns with kv, kv / 2, kv / 4 and so on pairs, down to this; 0: all have kv.
        random_fillers: fill with ids 1 to V - 1 instead of 0; they may equal keys and values.

    Source: Arora et al. 2023, arXiv:2312.04927; the separator: Kimi Linear, arXiv:2510.26692.
    """

    kv: int
    vocab: int
    layout: str = "scattered"
    min_kv: int = 0
    random_fillers: bool = False
    profiles: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "cpu": {"seq_len": 64, "kv": 8, "vocab": 128},
        "fig2": {"seq_len": 512, "kv": 64, "vocab": 8192},
        "mixed": {"seq_len": 256, "kv": 64, "min_kv": 16, "vocab": 8192, "random_fillers": True},
        "dense": {"seq_len": 256, "kv": 64, "min_kv": 8, "vocab": 8192},
        "kimi": {"seq_len": 256, "kv": 85, "vocab": 8192, "layout": "sep"},
    }

    def __post_init__(self) -> None:
        self.require(self.layout in LAYOUTS, f"layout is {self.layout!r}, but must be one of {', '.join(LAYOUTS)}")
        self._check_pairs()
        halvings = [self.kv >> power for power in range(self.kv.bit_length())]
        self.require(
            self.min_kv == 0 or (self.min_kv in halvings and self.min_kv << halvings.index(self.min_kv) == self.kv),
            f"min_kv is {self.min_kv}, but must be 0 or kv, here {self.kv}, halved some times without a remainder",
        )
        if self.layout == "sep":
            self._check_sep()
        else:
            self._check_slots()

    def _check_sep(self) -> None:
        need = 3 * self.kv + 1
        self.require(
            self.seq_len >= need,
            f"seq_len is {self.seq_len}, but {self.kv} pairs, a separator and {self.kv} queries need 3 * kv + 1 = "
            f"{need}; raise seq_len or lower kv",
        )
        self.require(not self.random_fillers, "the layout sep has no fillers; leave random_fillers out")

    def _check_slots(self) -> None:
        self.require(self.seq_len % 2 == 0, f"seq_len is {self.seq_len}, but must be even: a row is made of pairs")
        self.require(
            self.seq_len >= 4 * self.kv,
            f"seq_len is {self.seq_len}, but {self.kv} pairs and {self.kv} queries need 4 * kv = {4 * self.kv}; raise "
            "seq_len or lower kv",
        )
        self.require(
            self.vocab > self.seq_len,
            f"vocab is {self.vocab}, but must be above seq_len, here {self.seq_len}; raise vocab to "
            f"{self.seq_len + 2} or lower seq_len",
        )

    @property
    def vocab_size(self) -> int:
        """V, and the separator where there is one."""
        return self.vocab + (self.layout == "sep")

    @property
    def kvs(self) -> tuple[int, ...]:
        """How many pairs rows have, in turn."""
        powers = range((self.kv // self.min_kv).bit_length()) if self.min_kv else range(1)
        return tuple(self.kv >> power for power in powers)

    @property
    def slice_names(self) -> tuple[str, ...]:
        """Labels by the distance from the pair to the query and, where it differs, by the pairs of the row."""
        pairs = tuple(f"pairs_{kv}" for kv in self.kvs) if self.min_kv else ()
        return (*pairs, *(f"gap_to_{edge}" for edge in edges(self.seq_len)))

    @property
    def log2_rows(self) -> float:
        """Of the choices of pairs."""
        return self._log2_pairs(min(self.kvs))

    def generate(self, n: int, random: np.random.Generator, split: str = "train") -> TaskRows:
        """``n`` rows, of every split alike; draws from ``random`` alone."""
        del split
        tokens = np.zeros((n, self.seq_len), dtype=np.int64)
        if self.random_fillers:
            tokens = random.integers(1, self.vocab, (n, self.seq_len))
        targets, gap = np.full_like(tokens, IGNORED), np.zeros_like(tokens)
        pairs = np.resize(self.kvs, n)
        for kv in self.kvs:
            self._write(kv, np.flatnonzero(pairs == kv)[:, None], random, tokens, targets, gap)
        labelled = targets != IGNORED
        slices = buckets("gap_to_", gap, labelled, self.seq_len)
        if self.min_kv:
            slices |= {f"pairs_{kv}": labelled & (pairs == kv)[:, None] for kv in self.kvs}
        return TaskRows(tokens, targets, slices, np.full_like(tokens, IGNORED))

    def _write(
        self,
        kv: int,
        row: np.ndarray,
        random: np.random.Generator,
        tokens: np.ndarray,
        targets: np.ndarray,
        gap: np.ndarray,
    ) -> None:
        """Fill the rows ``row`` [m, 1], which have ``kv`` pairs."""
        m, half = len(row), self.vocab // 2
        keys, values = distinct(random, m, kv, 1, half), distinct(random, m, kv, half, self.vocab)
        if self.layout == "sep":
            tokens[row[:, 0], 2 * kv] = self.vocab
            asked = 2 * kv + 1 + np.argsort(random.random((m, kv)), axis=1)
        else:
            asked = 2 * kv + 2 * query_slots(random, m, (self.seq_len - 2 * kv) // 2, kv)
        written = 2 * np.arange(kv)
        tokens[row, written], tokens[row, written + 1], tokens[row, asked] = keys, values, keys
        if self.layout == "lm":
            tokens[row, asked + 1] = values
        targets[row, asked] = values
        gap[row, asked] = asked - written

    def solve(self, tokens: Sequence[int], at: int) -> int:
        """Note what stands behind each key where it stands first, and look up."""
        memory: dict[int, int] = {}
        for place in range(0, at - 1, 2):
            if tokens[place] == self.vocab:
                break
            memory.setdefault(tokens[place], tokens[place + 1])
        return memory[tokens[at]]


@task("overwrite")
@dataclass(frozen=True, kw_only=True)
class Overwrite(PairTask):
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
        self._check_pairs()
        self.require(
            0 <= self.upd <= self.kv,
            f"upd is {self.upd}, but must be from 0 to kv, here {self.kv}: no key is updated twice",
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
        return ("overwritten", "kept", *(f"gap_to_{edge}" for edge in edges(self.seq_len)))

    @property
    def log2_rows(self) -> float:
        """Of the choices of pairs and of updates."""
        new_values = self.vocab // 2 - 1
        return self._log2_pairs(self.kv) + sum(math.log2(self.kv - i) + math.log2(new_values) for i in range(self.upd))

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
        asked = context + 2 * query_slots(random, n, (self.seq_len - context) // 2, kv)

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
        memory: dict[int, int] = {}
        for place in range(0, self.context, 2):
            memory[tokens[place]] = tokens[place + 1]
        return memory[tokens[at]]

    def _slices(self, targets: np.ndarray, stale: np.ndarray, gap: np.ndarray) -> dict[str, np.ndarray]:
        labelled, overwritten = targets != IGNORED, stale != IGNORED
        slices = {"overwritten": overwritten, "kept": labelled & ~overwritten}
        return slices | buckets("gap_to_", gap, labelled, self.seq_len)
