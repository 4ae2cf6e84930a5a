"""A shuffled order that is computed place by place, so that it needs no memory and can be entered anywhere."""

from __future__ import annotations

import numpy as np

ROUNDS = 6
LEAST_BITS = 4  # of each half: a smaller domain would know too few orders
# The multipliers of splitmix64 (Steele, Lea and Flood 2014), which spread every bit over the word.
FIRST, SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def shuffled(places: np.ndarray, count: int, *, seed: int, epoch: int) -> np.ndarray:
    """Where ``places`` of ``0..count - 1`` lie after shuffling; distinct places stay distinct.

    A Feistel network over the next power of four, walked along until it comes back into the range (Black and Rogaway
    2002, "Ciphers with arbitrary finite domains").

    Args:
        places: int64, each in 0..count - 1.
        count: length of the order.
        seed, epoch: choose the order.

    Returns:
        int64, like ``places``.
    """
    half = max(LEAST_BITS, ((count - 1).bit_length() + 1) // 2)
    keys = np.random.SeedSequence(seed, spawn_key=(epoch,)).generate_state(ROUNDS, np.uint64)
    found = _network(places.astype(np.uint64), half, keys)
    outside = found >= count
    while outside.any():
        found[outside] = _network(found[outside], half, keys)
        outside = found >= count
    return found.astype(np.int64)


def _network(words: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    """A bijection of the words of ``2 * half`` bits: each round mixes one half into the other."""
    bits, low = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = words >> bits, words & low
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & low)
    return left << bits | right


def _mixed(words: np.ndarray) -> np.ndarray:
    words = (words ^ words >> np.uint64(30)) * FIRST
    words = (words ^ words >> np.uint64(27)) * SECOND
    return words ^ words >> np.uint64(31)
