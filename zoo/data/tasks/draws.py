"""What several tasks draw and measure alike: distinct ids, places of queries, repeats, buckets of slices."""

from __future__ import annotations

import math

import numpy as np


def distinct(random: np.random.Generator, n: int, k: int, low: int, high: int) -> np.ndarray:
    """``n`` rows of ``k`` different integers in [low, high), every ordered choice equally likely; int64 [n, k]."""
    if high - low <= max(4 * k, 64):
        return low + np.argsort(random.random((n, high - low)), axis=1)[:, :k]
    drawn = random.integers(low, high, (n, k))
    # Redraw the later ones of equal entries. The rule treats all ids alike, so the outcome is uniform over the choices.
    pending = np.arange(n)
    while True:
        # Sorting 32-bit values takes a fraction of the time of sorting places, and most rows need no more.
        ranked = np.sort(drawn[pending].astype(np.int32), axis=1)
        pending = pending[(ranked[:, 1:] == ranked[:, :-1]).any(axis=1)]
        if not len(pending):
            return drawn
        part = drawn[pending]
        repeated = first_equal(part) != np.arange(k)
        part[repeated] = random.integers(low, high, int(repeated.sum()))
        drawn[pending] = part


def first_equal(values: np.ndarray) -> np.ndarray:
    """For each entry of [n, k] the place in its row at which its value stands first; int64 [n, k]."""
    order = np.argsort(values, axis=1, kind="stable")
    group, _ = _groups(values, order)
    found = np.empty_like(order)
    np.put_along_axis(found, order, np.take_along_axis(order, group, axis=1), axis=1)
    return found


def last_equal(values: np.ndarray) -> np.ndarray:
    """For each entry of [n, k] the last place before it in its row with the same value, or -1; int64 [n, k]."""
    order = np.argsort(values, axis=1, kind="stable")
    _, starts = _groups(values, order)
    before = np.roll(order, 1, axis=1)
    before[starts] = -1
    found = np.empty_like(order)
    np.put_along_axis(found, order, before, axis=1)
    return found


def _groups(values: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the entries in sorted ``order``: where the run of equal values of each begins, and which entries begin one."""
    ranked = np.take_along_axis(values, order, axis=1)
    starts = np.ones(values.shape, dtype=bool)
    starts[:, 1:] = ranked[:, 1:] != ranked[:, :-1]
    return np.maximum.accumulate(np.where(starts, np.arange(values.shape[1]), 0), axis=1), starts


def query_slots(random: np.random.Generator, n: int, slots: int, k: int) -> np.ndarray:
    """``k`` of ``slots`` slots, int64 [n, k], from 0: drawn without replacement, the i-th with weight i ** -0.99.

    Most queries come soon after the context. The largest of weights plus Gumbel noise are such a draw.
    """
    scores = random.gumbel(size=(n, slots)) - 0.99 * np.log(np.arange(1, slots + 1))
    return np.argsort(-scores, axis=1)[:, :k]


def edges(longest: int) -> list[int]:
    """Upper ends of the buckets of 1 to ``longest``: powers of two."""
    return [2**power for power in range(1, math.ceil(math.log2(longest)) + 1)]


def buckets(prefix: str, value: np.ndarray, labelled: np.ndarray, longest: int) -> dict[str, np.ndarray]:
    """Labels by ``value``, integers [n, L] or [L]: each bucket reaches from the edge before, excluded, to its own."""
    uppers = edges(longest)
    # One look-up and one comparison of bytes a bucket: two comparisons of 64-bit numbers cost more than all the draws.
    bucket_of = np.searchsorted(uppers, np.arange(uppers[-1] + 1)).astype(np.int8)
    which = np.where(labelled, bucket_of[np.where(labelled, value, 0)], np.int8(-1))
    return {f"{prefix}{upper}": which == number for number, upper in enumerate(uppers)}
