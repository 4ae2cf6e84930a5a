"""Means over seeds with their intervals, and the difference of two arms seed by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def t_quantile(freedom: int, share: float = 0.95) -> float:
    """Student's two-sided quantile: ``t`` lies within it with probability ``share``.

    The distribution function is the finite sum for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4).
    """
    low, high = 0.0, 1e6
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _t_within(middle, freedom) < share else (low, middle)
    return high


def _t_within(t: float, freedom: int) -> float:
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for step in range(1 + odd, freedom, 2):
        total += term
        term *= cosine**2 * step / (step + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean, and half of its 95 % interval: t(0.975, n - 1) s / sqrt(n); None where there are too few values."""
    n = len(values)
    if not n:
        return None, None
    mean = math.fsum(values) / n
    if n == 1:
        return mean, None
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    return mean, t_quantile(n - 1) * deviation / math.sqrt(n)


def bootstrap(values: np.ndarray, *, draws: int = 10_000, seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of a mean over rows, by resampling the rows (Efron 1979).

    Of differences row by row it is the paired bootstrap. Drawing rows is drawing how often each value comes, which is
    multinomial, and values are few.

    Args:
        values: [n], finite, n at least 1.
        draws: how many means.
        seed: of the draws.
    """
    distinct, counts = np.unique(values, return_counts=True)
    n = len(values)
    means = np.random.default_rng(seed).multinomial(n, counts / n, size=draws) @ distinct / n
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def compare_pair(metric: str, first: Mapping[int, float], other: Mapping[int, float]) -> dict[str, Any]:
    """The other arm minus the first, seed by seed; a difference counts only if its interval leaves 0 out."""
    both = sorted(first.keys() & other.keys())
    mean, half = interval([other[seed] - first[seed] for seed in both])
    if mean is None:
        verdict = "no run to compare"
    elif half is None:
        verdict = "one seed: no interval"
    else:
        verdict = "no difference" if abs(mean) <= half else "better" if mean < 0 else "worse"
    span = None if mean is None or half is None else [mean - half, mean + half]
    return {"metric": metric, "diff": mean, "ci95": span, "n": len(both), "verdict": verdict}
