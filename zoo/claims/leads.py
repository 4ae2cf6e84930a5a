"""How far one arm leads another over the rows of a test, which both were asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from zoo.claims.claim import Claim
from zoo.claims.judge import Margin
from zoo.claims.run import Trial
from zoo.comparison.intervals import bootstrap

# Figures that are means over rows, and what each row gives of the share of its labels that is right.
OF_ROWS = {"row_accuracy": lambda share: share, "exact": lambda share: share == 1.0}


@dataclass(frozen=True)
class Lead:
    """One arm's lead over another with one seed: its mean over rows, and the 95 % interval of the paired bootstrap.

    The interval covers other rows of the same task, not other seeds; ``figure`` names what is averaged.
    """

    claim: str
    figure: str
    better: str
    worse: str
    seed: int
    rows: int
    lead: float
    low: float
    high: float


def leads_of(claims: Iterable[Claim], trials: Sequence[Trial]) -> list[Lead]:
    """Of every margin that claims ask for, where the rows were kept. Accuracy is averaged by row here."""
    by_name = {trial.experiment.name: trial for trial in trials}
    found = []
    for claim in claims:
        trial = by_name.get(claim.experiment.name) if claim.experiment is not None else None
        for rule in claim.rules if trial is not None else ():
            if isinstance(rule, Margin) and trial is not None:
                found += [lead for worse in rule.worse for lead in _leads(claim.name, rule, worse, trial)]
    return found


def _leads(claim: str, rule: Margin, worse: str, trial: Trial) -> Iterable[Lead]:
    reading, _, metric = rule.score.rpartition("/")
    metric = "row_accuracy" if metric == "accuracy" else metric
    if metric not in OF_ROWS:
        return
    own, theirs = trial.rows.get(rule.better, {}), trial.rows.get(worse, {})
    for seed in trial.experiment.seeds:
        pair = [rows[seed][reading] for rows in (own, theirs) if reading in rows.get(seed, {})]
        if len(pair) < 2 or len(pair[0]) != len(pair[1]):
            continue
        asked = np.isfinite(pair[0]) & np.isfinite(pair[1])
        first, second = (OF_ROWS[metric](shares[asked]).astype(float) for shares in pair)
        if len(difference := first - second):
            low, high = bootstrap(difference)
            lead = float(difference.mean())
            yield Lead(claim, f"{reading}/{metric}", rule.better, worse, seed, len(difference), lead, low, high)
