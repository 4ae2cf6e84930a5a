"""Tries claims: what is free at once, then the experiments, each once for all claims that look at it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from zoo.claims.claim import Claim, Experiment
from zoo.claims.judge import FAILS, NOT_RUN, Verdict, judge, settle
from zoo.comparison.pace import Allowance, Pace
from zoo.comparison.plan import LEARNING_RATE, Arm, Plan, Result, make_plan
from zoo.comparison.report import text_entropies
from zoo.comparison.run import Watch, run_plan
from zoo.console import Lines
from zoo.errors import UserError

Watching = Callable[[Experiment], AbstractContextManager[Watch]]
NO_GPU = "needs a CUDA GPU, and there is none here"


@dataclass
class Trial:
    """What an experiment gave.

    Attributes:
        arms: sized; empty where none could be made.
        results: of every run, of all rates.
        scores: arm -> seed -> figure -> value, at each arm's best rate.
        lost: arm -> why runs of it gave nothing.
        rates: arm -> the factor on the learning rate that it counts with.
        error: why none of its runs could begin, where that is so.
    """

    experiment: Experiment
    arms: tuple[Arm, ...] = ()
    train_context: int = 0
    results: list[Result] = field(default_factory=list)
    scores: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    error: str = ""

    @property
    def seconds(self) -> float:
        """Of training, earlier calls included."""
        return math.fsum(result.seconds for result in self.results if math.isfinite(result.seconds))

    @property
    def broken(self) -> bool:
        """Whether a run failed or diverged, or none could begin."""
        return bool(self.error) or any(result.status in ("failed", "diverged") for result in self.results)


@dataclass(frozen=True)
class Judged:
    """A claim and what became of it; ``seconds`` is None where nothing was tried."""

    claim: Claim
    verdict: Verdict
    seconds: float | None = None


@dataclass(frozen=True)
class Outcome:
    """All claims in order, and the experiments that were looked at."""

    judged: list[Judged]
    trials: list[Trial]

    @property
    def good(self) -> bool:
        """No gate is broken and no run failed; what was not run is neither."""
        fallen = any(judged.claim.gate and judged.verdict.outcome == FAILS for judged in self.judged)
        return not fallen and not any(trial.broken for trial in self.trials)


def try_claims(
    claims: Sequence[Claim], out: str | Path, *, minutes: float | None = None, watching: Watching | None = None
) -> Outcome:
    """Try each claim; what earlier calls with the same folder have finished is not run again.

    Args:
        claims: from :func:`zoo.claims.table.select`.
        out: one folder an experiment, in it one an arm, in it one a run, as of a comparison.
        minutes: nothing begins that would not be over by then.
        watching: what shows the runs of an experiment; None: lines.

    Raises:
        UserError: no time at all, or a folder that cannot be made.
    """
    out, allowance = Path(out), Allowance(minutes)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: the folder cannot be made ({error.strerror}); take another") from error
    judged = {claim.name: _at_once(claim, allowance) for claim in claims if claim.experiment is None}
    trials: dict[str, Trial] = {}
    for claim in claims:
        if claim.experiment is None:
            continue
        name = claim.experiment.name
        if name not in trials:
            trials[name] = run_experiment(claim.experiment, out / name, allowance, watching or _lines)
        trial = trials[name]
        verdict = judge(claim.rules, trial.scores, claim.experiment.seeds, trial.lost)
        judged[claim.name] = Judged(claim, verdict, trial.seconds if trial.scores else None)
    return Outcome([judged[claim.name] for claim in claims], list(trials.values()))


def _at_once(claim: Claim, allowance: Allowance) -> Judged:
    """A claim that nothing is trained for: tried, or put off with the reason."""
    reason = claim.needs or allowance.refuse(claim.seconds)
    if claim.check is None or reason is not None:
        return Judged(claim, Verdict(NOT_RUN, reason=reason or ""))
    begun = allowance.clock()
    try:
        verdict = settle(claim.check())
    except Exception as error:  # one check that dies does not take the others with it, and it did not hold
        verdict = Verdict(FAILS, reason=_first_line(error))
    return Judged(claim, verdict, allowance.clock() - begun)


def _lines(experiment: Experiment) -> Lines:
    return Lines()


def run_experiment(experiment: Experiment, out: Path, allowance: Allowance, watching: Watching = _lines) -> Trial:
    """Run what is not finished and fits; what a user got wrong is the trial's error, so that others go on."""
    trial, titles = Trial(experiment), [entry.title for entry in experiment.arms]
    if experiment.gpu and not torch.cuda.is_available():
        trial.lost = dict.fromkeys(titles, NO_GPU)
        return trial
    try:
        pace, levels = Pace(allowance, experiment.seconds), {}
        by_rate: dict[float, list[Result]] = {}
        for factor in experiment.rates:
            plan = plan_of(experiment, factor)
            trial.arms, trial.train_context = plan.arms, plan.train_context
            folder = out if experiment.rates == (1.0,) else out / f"rate-{factor:.3g}"
            with watching(experiment) as watch:
                by_rate[factor] = run_plan(plan, folder, watch=watch, admit=pace.admit).results
            pace.end()
            levels = levels or {f"val/{name}": bits for name, bits in text_entropies(plan).items()}
    except UserError as error:
        # Of the recipe, or of a folder with other runs in it: no run of this experiment can begin.
        trial.error, trial.lost = str(error), dict.fromkeys(titles, str(error))
        return trial
    trial.results = [result for results in by_rate.values() for result in results]
    for title in titles:
        _settle_rate(trial, title, by_rate, levels)
    return trial


def plan_of(experiment: Experiment, factor: float = 1.0, settings: Sequence[str] = ()) -> Plan:
    """The comparison that the runs of an experiment at one learning rate are.

    Args:
        experiment: what to run.
        factor: on the recipe's learning rate.
        settings: further ones, for all arms.
    """
    words = [*experiment.settings, *settings]

    def plan(*more: str) -> Plan:
        return make_plan(
            experiment.arms,
            experiment.file,
            overrides=[*words, *more],
            contexts=(experiment.context,),
            seeds=experiment.seeds,
            match=experiment.matched,
            readings=experiment.readings,
        )

    first = plan()
    rate = first.arms[0].learning_rate
    if factor == 1.0:
        return first
    if rate is None:
        raise UserError(f"{experiment.file} gives no {LEARNING_RATE}, so experiment {experiment.name} has no rates")
    return plan(f"--{LEARNING_RATE}={rate * factor!r}")


def _settle_rate(trial: Trial, title: str, by_rate: dict[float, list[Result]], levels: dict[str, float]) -> None:
    """Take an arm's best rate, if every run of it is over: the best of some rates would be another protocol."""
    own = {rate: [run for run in results if run.arm.text == title] for rate, results in by_rate.items()}
    waiting = [run for runs in own.values() for run in runs if run.status in ("failed", "not run")]
    if waiting:
        trial.lost[title] = "; ".join(dict.fromkeys(run.error for run in waiting))
        if len(own) > 1:
            return
    losses = {rate: math.fsum(_loss(run) for run in runs) for rate, runs in own.items()}
    best = min(losses, key=lambda rate: losses[rate])
    trial.rates[title] = best
    diverged = [run for run in own[best] if run.status == "diverged"]
    if diverged:
        trial.lost[title] = "; ".join(f"seed {run.seed} diverged" for run in diverged)
    trial.scores[title] = {
        run.seed: {"val/loss": run.loss, "val/bpb": run.bpb, **levels, **run.scores}
        for run in own[best]
        if run.status == "finished" and run.seed is not None
    }


def _loss(run: Result) -> float:
    return run.loss if run.status == "finished" and math.isfinite(run.loss) else math.inf


def _first_line(error: BaseException) -> str:
    return next(iter(f"{type(error).__name__}: {error}".splitlines()))
