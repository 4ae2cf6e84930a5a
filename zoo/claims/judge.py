"""From scores to a verdict: pure functions; nothing here trains, reads or writes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

HOLDS, FAILS, NOT_RUN = "holds", "does not hold", "not run"
# arm -> seed -> figure -> value; a run that gave none is not in it.
Scores = Mapping[str, Mapping[int, Mapping[str, float]]]


@dataclass(frozen=True)
class Finding:
    """What one rule found.

    Attributes:
        words: with the figures of all seeds.
        held: None where it could not be judged.
    """

    words: str
    held: bool | None


@dataclass(frozen=True)
class Verdict:
    """``outcome`` is one of ``HOLDS``, ``FAILS``, ``NOT_RUN``; ``reason`` says why it was not run, else it is empty."""

    outcome: str
    findings: tuple[Finding, ...] = ()
    reason: str = ""


class Rule(Protocol):
    """What must be true of the scores of some arms."""

    @property
    def score(self) -> str:
        """The figure that it asks for, or the difference of two."""
        ...

    @property
    def arms(self) -> tuple[str, ...]:
        """Whose runs it looks at."""
        ...

    def find(self, scores: Scores, seeds: Sequence[int]) -> Finding:
        """Look at those seeds that all of ``arms`` have; too few of them leave it open, unless it is broken already."""
        ...


def judge(rules: Iterable[Rule], scores: Scores, seeds: Sequence[int], lost: Mapping[str, str]) -> Verdict:
    """All rules must hold; one that is broken decides, even where runs of others are missing.

    Args:
        rules: at least one.
        scores: of the runs that finished.
        seeds: those that every arm should have.
        lost: arm -> why some of its runs gave nothing.
    """
    rules = list(rules)
    findings = tuple(rule.find(scores, seeds) for rule in rules)
    if any(finding.held is False for finding in findings):
        return Verdict(FAILS, findings)
    if all(finding.held for finding in findings):
        return Verdict(HOLDS, findings)
    open_arms = [arm for rule, finding in zip(rules, findings) if finding.held is None for arm in rule.arms]
    reasons = dict.fromkeys(f"{arm}: {lost[arm]}" for arm in open_arms if arm in lost)
    return Verdict(NOT_RUN, findings, "; ".join(reasons) or "figures are missing")


def settle(findings: Sequence[Finding]) -> Verdict:
    """The verdict on findings that were made without training."""
    return Verdict(HOLDS if findings and all(finding.held for finding in findings) else FAILS, tuple(findings))


def figure(scores: Mapping[str, float], name: str) -> float:
    """A figure by name, or the difference of two: ``4x/loss - 1x/loss``; NaN where one is missing."""
    first, minus, second = name.partition(" - ")
    value = scores.get(first, math.nan)
    return value - scores.get(second, math.nan) if minus else value


def wilson(solved: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95 % interval of a share, which stays inside [0, 1] and is no point at 0 and at 1 (Wilson 1927)."""
    centre = (solved + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(solved * (n - solved) / n + z * z / 4)
    return max(0.0, centre - half), min(1.0, centre + half)


def _by_seed(scores: Scores, arm: str, name: str, seeds: Sequence[int]) -> dict[int, float]:
    """The figures of an arm that are there; an infinite one is a figure, NaN is none."""
    own = scores.get(arm, {})
    found = {seed: figure(own[seed], name) for seed in seeds if seed in own}
    return {seed: value for seed, value in found.items() if not math.isnan(value)}


def _listed(values: Iterable[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values) or "none"


def _complete(held: Iterable[bool], wanted: int) -> bool | None:
    """False as soon as one is; True if all are and none is missing; else None."""
    found = list(held)
    return False if not all(found) else True if len(found) == wanted and wanted else None


@dataclass(frozen=True)
class Margin:
    """In every seed ``better`` beats each arm of ``worse`` by at least ``by``; with ``lower``, less is better."""

    better: str
    worse: tuple[str, ...]
    score: str
    by: float = 0.0
    lower: bool = False

    @property
    def arms(self) -> tuple[str, ...]:
        """The better one first."""
        return (self.better, *self.worse)

    def find(self, scores: Scores, seeds: Sequence[int]) -> Finding:
        """Seed by seed, as the runs of a seed are paired."""
        own = _by_seed(scores, self.better, self.score, seeds)
        words, held = [f"{self.better} {_listed(own.values())}"], []
        for other in self.worse:
            theirs = _by_seed(scores, other, self.score, seeds)
            leads = [
                (theirs[s] - own[s]) if self.lower else (own[s] - theirs[s]) for s in seeds if s in own.keys() & theirs
            ]
            held += [lead >= self.by for lead in leads]
            words.append(f"{other} {_listed(theirs.values())} (leads {_listed(leads)}, wanted {self.by:g})")
        return Finding(f"{self.score}: {'; '.join(words)}", _complete(held, len(seeds) * len(self.worse)))


@dataclass(frozen=True)
class Bound:
    """In every seed the figure of ``arm`` is at least ``least`` and at most ``most``."""

    arm: str
    score: str
    least: float = -math.inf
    most: float = math.inf

    @property
    def arms(self) -> tuple[str, ...]:
        """The one."""
        return (self.arm,)

    def find(self, scores: Scores, seeds: Sequence[int]) -> Finding:
        """Seed by seed."""
        own = _by_seed(scores, self.arm, self.score, seeds)
        wanted = [f"at least {self.least:g}"] if math.isfinite(self.least) else []
        wanted += [f"at most {self.most:g}"] if math.isfinite(self.most) else []
        held = [self.least <= value <= self.most for value in own.values()]
        words = f"{self.score}: {self.arm} {_listed(own.values())} (wanted {', '.join(wanted)})"
        return Finding(words, _complete(held, len(seeds)))


@dataclass(frozen=True)
class Under:
    """In every seed one figure of ``arm`` is below another of the same run, ``level``."""

    arm: str
    score: str
    level: str

    @property
    def arms(self) -> tuple[str, ...]:
        """The one."""
        return (self.arm,)

    def find(self, scores: Scores, seeds: Sequence[int]) -> Finding:
        """Seed by seed."""
        own, levels = (_by_seed(scores, self.arm, name, seeds) for name in (self.score, self.level))
        both = [seed for seed in seeds if seed in own.keys() & levels]
        words = f"{self.score}: {self.arm} {_listed(own[s] for s in both)} (below {_listed(levels[s] for s in both)})"
        return Finding(words, _complete([own[seed] < levels[seed] for seed in both], len(seeds)))


@dataclass(frozen=True)
class Solved:
    """At least ``share`` of the seeds reach ``at``: for tasks solved whole or not at all, where means mislead."""

    arm: str
    score: str
    at: float
    share: float

    @property
    def arms(self) -> tuple[str, ...]:
        """The one."""
        return (self.arm,)

    def find(self, scores: Scores, seeds: Sequence[int]) -> Finding:
        """It is decided before all seeds are in, where those that are missing could not turn it."""
        values = list(_by_seed(scores, self.arm, self.score, seeds).values())
        solved, missing = sum(value >= self.at for value in values), len(seeds) - len(values)
        needed = self.share * len(seeds) - 1e-9
        held = True if solved >= needed and seeds else False if solved + missing < needed else None
        words = f"{self.score}: {self.arm} {_listed(values)}; "
        if values:
            low, high = wilson(solved, len(values))
            words += f"{solved} of {len(values)} solved (at {self.at:g}; 95 % interval {low:.2f} to {high:.2f}), "
            words += f"median {sorted(values)[len(values) // 2]:.3f}, best {max(values):.3f}; "
        return Finding(f"{words}wanted {self.share:.0%}", held)


@dataclass(frozen=True)
class NearBest:
    """In every seed each of ``arm_names`` has a loss at most ``within`` above the lowest of all ``among``."""

    arm_names: tuple[str, ...]
    among: tuple[str, ...]
    score: str
    within: float

    @property
    def arms(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(dict.fromkeys((*self.arm_names, *self.among)))

    def find(self, scores: Scores, seeds: Sequence[int]) -> Finding:
        """A seed counts where all arms have it: the best of some is not the best."""
        own = {arm: _by_seed(scores, arm, self.score, seeds) for arm in self.arms}
        whole = [seed for seed in seeds if all(seed in values for values in own.values())]
        best = {seed: min(own[arm][seed] for arm in self.among) for seed in whole}
        held = [own[arm][seed] <= best[seed] * (1 + self.within) for seed in whole for arm in self.arm_names]
        shown = "; ".join(f"{arm} {_listed(values.values())}" for arm, values in own.items())
        wanted = f"{' and '.join(self.arm_names)} within {self.within:.1%} of the lowest"
        return Finding(f"{self.score}: {shown} (wanted {wanted})", _complete(held, len(seeds) * len(self.arm_names)))
