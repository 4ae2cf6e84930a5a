"""Tries claims: what is free at once, then the experiments, each once for all claims that look at it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from zoo.claims.claim import Claim, Experiment
from zoo.claims.judge import FAILS, NOT_RUN, Verdict, judge, settle
from zoo.comparison.allowance import Allowance
from zoo.comparison.devices import CPU, Pool, Work
from zoo.comparison.plan import LEARNING_RATE, Arm, Plan, Result, Run, make_plan
from zoo.comparison.read import read_rows
from zoo.comparison.report import entropies_of
from zoo.comparison.run import Outcome as Ran
from zoo.comparison.run import Watch, folder_of, run_plan
from zoo.comparison.watch import DeviceWatch, watch_devices
from zoo.console import Lines
from zoo.errors import UserError

Watching = Callable[[Experiment], AbstractContextManager[Watch]]
NO_GPU = "needs a CUDA GPU, and there is none here"
NO_GPU_NAMED = "needs a CUDA GPU, and --devices names the CPU, which would take its share of the runs"


@dataclass
class Trial:
    """What an experiment gave.

    Attributes:
        arms: sized; empty where none could be made.
        results: of every run, of all rates.
        scores: arm -> seed -> figure -> value, at each arm's best rate.
        rows: arm -> seed -> reading -> the share of its labels that each row has right; of tasks, of the same runs.
        lost: arm -> why runs of it gave nothing.
        rates: arm -> the factor on the learning rate that it counts with.
        error: why none of its runs could begin, where that is so.
    """

    experiment: Experiment
    arms: tuple[Arm, ...] = ()
    train_context: int = 0
    results: list[Result] = field(default_factory=list)
    scores: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)
    rows: dict[str, dict[int, dict[str, np.ndarray]]] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    error: str = ""

    @property
    def seconds(self) -> float:
        """Of training, earlier calls included."""
        return math.fsum(result.seconds for result in self.results if math.isfinite(result.seconds))

    @property
    def at_once(self) -> int:
        """The most runs that shared a device."""
        return max((result.at_once for result in self.results), default=1)

    @property
    def broken(self) -> bool:
        """Whether a run failed or diverged, or none could begin."""
        return bool(self.error) or any(result.status in ("failed", "diverged") for result in self.results)


@dataclass(frozen=True)
class Judged:
    """A claim and what became of it.

    Attributes:
        seconds: of all its runs; None where nothing was tried.
        at_once: the most runs that shared a device.
    """

    claim: Claim
    verdict: Verdict
    seconds: float | None = None
    at_once: int = 1


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
    claims: Sequence[Claim],
    out: str | Path,
    *,
    minutes: float | None = None,
    watching: Watching | None = None,
    devices: Sequence[str] = (),
    watch: DeviceWatch | None = None,
) -> Outcome:
    """Try each claim; what earlier calls with the same folder have finished is not run again.

    Args:
        claims: from :func:`zoo.claims.table.select`.
        out: one folder an experiment, in it one an arm, in it one a run, as of a comparison.
        minutes: what is under way then is saved, and goes on with the next call.
        watching: what shows the runs of an experiment; None: lines.
        devices: from :func:`zoo.comparison.devices.read_devices`: as many runs at once, of whatever experiments; none:
            one run after another, in this process.
        watch: hears how runs go that are side by side; None: a table that fills on a terminal, lines elsewhere.

    Raises:
        UserError: no time at all, or a folder that cannot be made.
    """
    out, allowance = Path(out), Allowance(minutes)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: the folder cannot be made ({error.strerror}); take another") from error
    judged = {claim.name: _at_once(claim, allowance) for claim in claims if claim.experiment is None}
    tried = {claim.experiment.name: claim.experiment for claim in claims if claim.experiment is not None}
    if devices:
        gates = {claim.experiment.name for claim in claims if claim.experiment is not None and claim.gate}
        # What decides first, and of that what takes longest: a long run that begins last leaves the others idle.
        order = sorted(tried.values(), key=lambda each: (each.name not in gates, -each.seconds))
        trials = _side_by_side(order, out, allowance, devices, watch)
    else:
        trials = [run_experiment(each, out / name, allowance, watching or _lines) for name, each in tried.items()]
    by_name = {trial.experiment.name: trial for trial in trials}
    for claim in claims:
        if claim.experiment is not None:
            trial = by_name[claim.experiment.name]
            verdict = judge(claim.rules, trial.scores, claim.experiment.seeds, trial.lost)
            judged[claim.name] = Judged(claim, verdict, trial.seconds if trial.scores else None, trial.at_once)
    return Outcome([judged[claim.name] for claim in claims], [by_name[name] for name in tried])


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


@dataclass(frozen=True)
class Planned:
    """An experiment before its runs: one comparison a learning rate, by its factor; none where there is an error.

    Attributes:
        levels: what counting alone reaches on its text, as figures.
    """

    trial: Trial
    works: Mapping[float, Work] = field(default_factory=dict)
    levels: Mapping[str, float] = field(default_factory=dict)


def run_experiment(experiment: Experiment, out: Path, allowance: Allowance, watching: Watching = _lines) -> Trial:
    """Run what is not finished and fits; what a user got wrong is the trial's error, so that others go on."""
    planned = _planned(experiment, out, allowance, "" if torch.cuda.is_available() else NO_GPU)
    ran: dict[float, Ran | UserError] = {}
    for factor, work in planned.works.items():
        with watching(experiment) as watch:
            try:
                ran[factor] = run_plan(work.plan, work.out, watch=watch, allowance=work.allowance)
            except UserError as error:
                ran[factor] = error
                break
    return _settled(planned, ran)


def _side_by_side(
    experiments: Sequence[Experiment],
    out: Path,
    allowance: Allowance,
    devices: Sequence[str],
    watch: DeviceWatch | None,
) -> list[Trial]:
    """All experiments through one queue, in their order: none waits for the last run of the one before."""
    without = NO_GPU_NAMED if CPU in devices else ""
    # Before the pool: reading a recipe moves the process into its folder for a moment, and paths are relative to ours.
    planned = [_planned(each, out / each.name, allowance, without, turn) for turn, each in enumerate(experiments)]
    count = max(1, sum(len(each.works) for each in planned))
    listening = watch if watch is not None else watch_devices()
    # The threads only wait for the pool, which has to be left first: that ends their waits.
    with ThreadPoolExecutor(count) as threads, listening as listener, Pool(devices, out, listener) as pool:
        try:
            ran = [(each, {f: threads.submit(pool.run, work) for f, work in each.works.items()}) for each in planned]
            waiting = {future for _, futures in ran for future in futures.values()}
            while waiting:
                waiting = wait_for(waiting, timeout=0.2).not_done  # short waits hear a signal
        except KeyboardInterrupt:
            raise SystemExit(1) from None  # as Lightning ends a run
    return [_settled(planned, {f: _outcome(future) for f, future in futures.items()}) for planned, futures in ran]


def _outcome(future: Future[Ran]) -> Ran | UserError:
    try:
        return future.result()
    except UserError as error:
        return error


def _planned(experiment: Experiment, out: Path, allowance: Allowance, without: str, turn: int = 0) -> Planned:
    """Plan the runs; ``without`` says why experiments that need a GPU have none."""
    trial, titles = Trial(experiment), [entry.title for entry in experiment.arms]
    if experiment.gpu and without:
        trial.lost = dict.fromkeys(titles, without)
        return Planned(trial)
    try:
        plans = {factor: plan_of(experiment, factor) for factor in experiment.rates}
        first = plans[experiment.rates[0]]
        levels = {f"val/{name}": bits for name, bits in entropies_of(first).items()}
    except UserError as error:  # of the recipe: no run of this experiment can begin
        trial.error, trial.lost = str(error), dict.fromkeys(titles, str(error))
        return Planned(trial)
    trial.arms, trial.train_context = first.arms, first.train_context
    works: dict[float, Work] = {}
    for factor, plan in plans.items():
        several = experiment.rates != (1.0,)
        name = experiment.name + (f", learning rate x {factor:.3g}" if several else "")
        works[factor] = Work(plan, out / f"rate-{factor:.3g}" if several else out, allowance, name, turn)
    return Planned(trial, works, levels)


def _settled(planned: Planned, ran: Mapping[float, Ran | UserError]) -> Trial:
    """What the runs gave."""
    trial, titles = planned.trial, [entry.title for entry in planned.trial.experiment.arms]
    errors = [str(each) for each in ran.values() if isinstance(each, UserError)]
    if errors:  # a folder with other runs in it, or what all arms share
        trial.error, trial.lost = errors[0], dict.fromkeys(titles, errors[0])
    if errors or not ran:
        return trial
    by_rate = {factor: each.results for factor, each in ran.items() if not isinstance(each, UserError)}
    trial.results = [result for results in by_rate.values() for result in results]
    for title in titles:
        _settle_rate(trial, title, by_rate, planned.levels)
    for title, by_seed in trial.scores.items():
        work = planned.works[trial.rates[title]]
        arm = next(arm for arm in work.plan.arms if arm.text == title)
        trial.rows[title] = {seed: read_rows(folder_of(Run(arm, seed), work.out)) for seed in by_seed}
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


def _settle_rate(trial: Trial, title: str, by_rate: Mapping[float, list[Result]], levels: Mapping[str, float]) -> None:
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
