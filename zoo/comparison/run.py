"""The runs of a comparison: each arm with each seed, one after another; what finished is not run again."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from zoo.callbacks import Throughput
from zoo.comparison.allowance import Allowance
from zoo.comparison.arm import instantiate
from zoo.comparison.plan import LEARNING_RATE, RATE_SHARE, WARM_UP, Arm, Plan, Result, Run
from zoo.comparison.provenance import trained_with
from zoo.comparison.read import read_all
from zoo.console import Lines
from zoo.errors import UserError, out_of_memory
from zoo.run import LAST, read_metrics
from zoo.watch import NonFiniteError, SaveOnSignal

OUT_OF_MEMORY = "out of memory"  # begins the reason of a run that died of it


class Watch(Protocol):
    """Hears of a comparison while it runs."""

    def begin(self, titles: Sequence[str]) -> None:
        """What is going to run, in order."""

    def start(self, title: str) -> None:
        """The next run begins."""

    def step(self, done: int, whole: int, figures: Callable[[], dict[str, float]]) -> None:
        """It has made a step; ``figures`` fetches the logged ones from the device."""

    def end(self, status: str, score: str, *, before: bool) -> None:
        """It is over; ``before``: it had been in an earlier call."""


class Steps(Callback):
    """Tell a watch of every step."""

    def __init__(self, watch: Watch):
        self.watch = watch

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        logged = trainer.callback_metrics
        self.watch.step(
            trainer.global_step, trainer.max_steps, lambda: {name: float(value) for name, value in logged.items()}
        )


class EndsInTime(Callback):
    """Has a run saved and ended, as SIGTERM does, once the time of its call is over.

    Not before a validation, which would have no place in the run that goes on, nor after the last step.

    Attributes:
        stopped: the step that it was saved at, and how many there are; None: it was not, or a signal was first.
        seconds, rate: of the run so far, from :meth:`on_fit_start` on; rate None: no step was timed.
        trained_with: for the result, set by who makes the trainer.
    """

    def __init__(self, allowance: Allowance):
        self.allowance = allowance
        self.trained_with: list[str] = []
        self.stopped: tuple[int, int] | None = None
        self.seconds, self.rate = 0.0, None
        self._begun, self._step = 0.0, 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._begun = time.perf_counter()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        whole, self._step = trainer.global_step != self._step, trainer.global_step  # no micro-batch of a step
        last = trainer.global_step == trainer.max_steps
        if not whole or last or self.allowance.left > 0 or _validates(trainer, batch_idx):
            return
        for callback in trainer.callbacks:
            if isinstance(callback, SaveOnSignal) and callback.ask():
                self.stopped = trainer.global_step, trainer.max_steps
            elif isinstance(callback, Throughput):
                self.rate = callback.mean_rate
        self.seconds = time.perf_counter() - self._begun


def _validates(trainer: Any, batch_idx: int) -> bool:
    """Whether a validation follows this batch."""
    every = trainer.val_check_batch
    over_epochs = trainer.check_val_every_n_epoch is None
    return math.isfinite(every) and ((trainer.fit_loop.total_batch_idx if over_epochs else batch_idx) + 1) % every == 0


@dataclass(frozen=True)
class Outcome:
    """What a comparison gave: ``results``, seed by seed and inside of that arm by arm; ``trials`` of learning rates."""

    results: list[Result]
    trials: list[Result]

    @property
    def good(self) -> bool:
        """Whether every arm finished with every seed."""
        return all(result.status == "finished" for result in self.results)

    def of(self, arm: Arm) -> list[Result]:
        """The arm's runs, by seed."""
        return [result for result in self.results if result.arm is arm]


# A run, or what is known of it already.
Job = tuple[Run, Result | None]


def run_plan(plan: Plan, out: str | Path, *, watch: Watch | None = None, allowance: Allowance | None = None) -> Outcome:
    """Train and evaluate every arm with every seed; what the same plan has finished is not run again.

    First the trials of learning rates, then the first seed of all arms, then the second: stopped half-way, it is
    balanced. A run that fails is a result that says so.

    Args:
        plan: from :func:`make_plan`.
        out: the comparison's folder: one folder an arm and in it one a run.
        watch: hears how it goes; None: lines.
        allowance: what is under way at its end is saved and goes on with the next call; None: all are run.

    Raises:
        UserError: ``out`` holds another comparison, or the arms did not read the same tokens in the same order.
    """
    out, listener = Path(out), watch if watch is not None else Lines()
    given = allowance if allowance is not None else Allowance()

    def one_by_one(jobs: Sequence[Job]) -> list[Result]:
        results = []
        for run, known in jobs:
            listener.start(run.title)
            if known is None:
                results.append(_run(plan, run, out, listener, given))
            else:
                listener.end(known.status, known.error, before=False)
                results.append(known)
        return results

    return in_order(plan, out, listener.begin, one_by_one)


def in_order(
    plan: Plan, out: Path, begin: Callable[[Sequence[str]], None], runner: Callable[[Sequence[Job]], list[Result]]
) -> Outcome:
    """The trials of learning rates, then every run at its arm's best, by whatever runs jobs.

    Args:
        begin: told what is going to run.
        runner: gives a result a job, in their order.

    Raises:
        UserError: as :func:`run_plan`.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: the folder cannot be made ({error.strerror}); name another") from error
    trials = [
        Run(arm, plan.rate_seed, _rate(arm) * factor, factor) for factor in sorted(plan.rates) for arm in plan.arms
    ]
    runs = [Run(arm, seed) for seed in plan.seeds for arm in plan.arms]
    begin([run.title for run in (*trials, *runs)])
    tried = runner([(trial, None) for trial in trials])
    rates = {arm.text: best_rate(tried, arm) for arm in plan.arms} if trials else {}
    jobs: list[Job] = []
    for run in runs:
        if run.arm.text in rates and rates[run.arm.text] is None:
            jobs.append((run, _without_rate(run, tried)))
        else:
            jobs.append((Run(run.arm, run.seed, rates.get(run.arm.text)), None))
    results = runner(jobs)
    hashes = {result.order_hash for result in results if result.status == "finished"}
    if len(hashes) > 1 and "data_order" not in plan.differing:
        raise UserError(f"the arms did not read the same tokens in the same order; the comparison in {out} is void")
    return Outcome(results, tried)


def _without_rate(run: Run, tried: Sequence[Result]) -> Result:
    waiting = next((t for t in tried if t.arm is run.arm and t.status in ("not run", "failed")), None)
    if waiting is not None:
        reason = f"its learning rate is not chosen: the trial at {waiting.learning_rate:.3g} is {waiting.status}"
        return Result(run.arm, waiting.status, run.seed, error=f"{reason} ({waiting.error})")
    return Result(run.arm, "failed", run.seed, error="no learning rate of the grid gave a finite loss")


def best_rate(trials: Sequence[Result], arm: Arm) -> float | None:
    """The learning rate with the lowest validation loss among an arm's trials.

    None where none finished, or one is still to be run: the best of some rates would be another protocol.
    """
    own = [trial for trial in trials if trial.arm is arm]
    whole = [trial for trial in own if trial.status == "finished"]
    waiting = any(trial.status in ("not run", "failed") for trial in own)
    return min(whole, key=lambda trial: trial.loss).learning_rate if whole and not waiting else None


def _rate(arm: Arm) -> float:
    if arm.learning_rate is None:
        raise UserError(f"arm {arm.text}: its recipe gives no {LEARNING_RATE}, so there is nothing to try factors on")
    return arm.learning_rate


def arm_folder(arm: Arm, out: Path) -> Path:
    """Where an arm's runs are kept."""
    return out / f"{arm.number:02d}-{_file_name(arm.text)}"


def folder_of(run: Run, out: Path) -> Path:
    """Where a run is kept."""
    return arm_folder(run.arm, out) / run.folder


def over_before(plan: Plan, run: Run, out: Path) -> Result | None:
    """What an earlier call found; None: it is to be run. A divergence comes again; a failure, of memory for example,
    need not.

    Raises:
        UserError: the folder holds another run.
    """
    folder = folder_of(run, out)
    status = folder / "status.json"
    stored = json.loads(status.read_text(encoding="utf-8")) if status.is_file() else {}
    if stored and stored["key"] != _key(plan, run):
        raise UserError(
            f"{folder} holds an arm of another comparison (recipe, settings or pattern differ); take another folder: "
            "--out FOLDER"
        )
    return read_result(run.arm, stored) if stored.get("status") in ("finished", "diverged") else None


def _run(plan: Plan, run: Run, out: Path, watch: Watch, allowance: Allowance) -> Result:
    before = over_before(plan, run, out)
    if before is not None:
        watch.end(before.status, before.score, before=True)
        return before
    reason = allowance.refuse()
    if reason is not None:
        watch.end("not run", reason, before=False)
        return not_run(run, reason)
    result = train_run(plan, run, out, watch, allowance=allowance)
    watch.end(result.status, result.score, before=False)
    return result


def not_run(run: Run, reason: str, status: str = "not run") -> Result:
    """A run without figures, and why."""
    return Result(run.arm, status, run.seed, run.learning_rate, run.factor, error=reason)


def train_run(
    plan: Plan, run: Run, out: Path, watch: Watch, at_once: int = 1, allowance: Allowance | None = None
) -> Result:
    """Train a run that is not over, from its checkpoint where it has one; what it dies of is its result.

    Args:
        plan, run, out, watch, allowance: as :func:`run_plan`.
        at_once: runs that its device trains at the same time, for the record.

    Raises:
        UserError: of what all arms share, before the first step: it would be every run's.
    """
    folder, key = folder_of(run, out), _key(plan, run)
    folder.mkdir(parents=True, exist_ok=True)
    before = _before(folder)
    write_json(folder / "status.json", {"key": key, "status": "running", **asdict(before)})
    result, ending = not_run(run, "", "failed"), EndsInTime(allowance if allowance is not None else Allowance())
    try:
        result = _train(plan, run, folder, watch, ending, before)
    except SIGTERMException:
        if ending.stopped is None:
            raise
        done, whole = ending.stopped
        reason = f"{ending.allowance.words}: saved at step {done} of {whole}; the same command goes on from there"
        result = not_run(run, reason)
        result.seconds = before.seconds + ending.seconds
        result.tokens_per_second = math.nan if ending.rate is None else ending.rate
    except Exception as error:
        shared = run.arm.recipe == plan.recipe and run.arm.overrides == plan.overrides
        if isinstance(error, UserError) and shared and not (folder / LAST).exists():
            (folder / "status.json").unlink()  # nothing has begun: corrected words may take the folder
            raise
        # Any other does not take the other runs with it; the table shows what this one died of.
        result.status = "diverged" if isinstance(error, NonFiniteError) else "failed"
        result.error = why(error)
    gc.collect()  # the run is gone now, a traceback too, and with them the last hold on its tensors
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # others may share the device
    result.at_once, result.trained_with = at_once, ending.trained_with
    write_json(folder / "status.json", {"key": key, **plain_result(result)})
    return result


def why(error: BaseException) -> str:
    """An error in one line; of memory, what was wanted and what there was, without the list of who has it."""
    if out_of_memory(error):
        first = next(iter(str(error).splitlines()), "")
        return f"{OUT_OF_MEMORY}: {first.split(' Including non-PyTorch memory')[0]}"
    return next(iter(f"{type(error).__name__}: {error}".splitlines()))


def starved(result: Result) -> bool:
    """Whether a run died for want of memory."""
    return result.status == "failed" and result.error.startswith(OUT_OF_MEMORY)


def _run_words(plan: Plan, run: Run) -> list[str]:
    """What a run sets besides its arm's own settings, as on the command line."""
    words = [f"--seed_everything={run.seed}"]
    if run.learning_rate is not None:
        words.append(f"--{LEARNING_RATE}={run.learning_rate!r}")
    if run.factor is not None and plan.tokens is not None:
        steps = max(1, round(plan.tokens * RATE_SHARE / plan.batch_tokens))
        words.append(f"--budget.tokens={steps * plan.batch_tokens}")
        if run.arm.warmup_steps is not None:  # the whole schedule in small
            words.append(f"--{WARM_UP}={round(run.arm.warmup_steps * RATE_SHARE)}")
    return words


@dataclass(frozen=True)
class Before:
    """What earlier calls took for a run that goes on.

    Attributes:
        seconds: of those that ended by their own; of one that was killed nothing is known.
        tokens_per_second: of the last; None: it timed no step.
        trained_with: code, torch and device of each that differ.
    """

    seconds: float = 0.0
    tokens_per_second: float | None = None
    trained_with: list[str] = field(default_factory=list)


def _before(folder: Path) -> Before:
    status = folder / "status.json"
    if not (status.is_file() and (folder / LAST).exists()):
        return Before()
    stored = json.loads(status.read_text(encoding="utf-8"))
    return Before(stored.get("seconds") or 0.0, stored.get("tokens_per_second"), stored.get("trained_with", []))


def _train(plan: Plan, run: Run, folder: Path, watch: Watch, ending: EndsInTime, before: Before) -> Result:
    arm = run.arm
    given = [*arm.overrides, "--config", str(_write_arm(arm, folder)), *_run_words(plan, run)]
    cli = instantiate(arm.recipe, given)
    trainer: Any = cli.trainer
    trainer.callbacks = [ending, *trainer.callbacks, Steps(watch)]  # it asks, and in the same step another saves
    ending.trained_with = list(dict.fromkeys([*before.trained_with, trained_with(trainer.strategy.root_device)]))
    _note(folder, trained_with=ending.trained_with)  # now: a run that is killed says no more
    (folder / "recipe.yaml").write_text(arm.recipe.read_text(encoding="utf-8"), encoding="utf-8")
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    resume = "last" if (folder / LAST).exists() else None
    trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=resume)
    seconds = before.seconds + time.perf_counter() - begun
    loader: Any = trainer.train_dataloader  # validation below replaces it
    (final,) = trainer.validate(cli.model, datamodule=cli.datamodule, verbose=False)
    timed = next(c for c in trainer.callbacks if isinstance(c, Throughput))
    rate = timed.mean_rate if timed.mean_rate is not None else before.tokens_per_second
    per_step = cli.datamodule.batch_tokens
    tokens = trainer.global_step * per_step
    # Of the run, before longer rows are read; it begins anew at every step that is logged.
    peak = max(timed.peak_bytes, torch.cuda.max_memory_allocated()) if on_gpu else None
    scores = read_all(cli, run, given, plan.readings if run.factor is None else (), folder)
    loss, bpb = final["val/loss"], final.get("val/bpb", math.nan)
    rows = read_metrics(folder)
    name = "val/bpb" if math.isfinite(bpb) else "val/loss"
    curve = [
        ((int(row["step"]) + 1) * per_step, row[name])
        for row in rows
        if name in row and int(row["step"]) < trainer.global_step
    ]
    if not curve or curve[-1][0] < tokens:
        curve.append((tokens, final[name]))
    return Result(
        arm,
        "finished" if math.isfinite(loss) else "diverged",
        seed=run.seed,
        learning_rate=run.learning_rate,
        factor=run.factor,
        loss=loss,
        bpb=bpb,
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=rate if rate is not None else math.nan,
        peak_bytes=peak,
        order_hash=loader.order_hash,
        error="" if math.isfinite(loss) else "the validation loss is not finite",
        command=shlex.join(
            ["zoo", "fit", "--config", str(arm.recipe), *given, "--trainer.default_root_dir", "runs/again"]
        ),
        curve=curve,
        train_curve=[((int(r["step"]) + 1) * per_step, r["train/loss"]) for r in rows if "train/loss" in r],
        scores=scores,
    )


def _note(folder: Path, **more: Any) -> None:
    """Add to what a run's status says."""
    status = folder / "status.json"
    write_json(status, json.loads(status.read_text(encoding="utf-8")) | more)


def _write_arm(arm: Arm, folder: Path) -> Path:
    """What makes the shared recipe this arm's, as a second file: `zoo fit --config RECIPE --config ARM`."""
    plain = arm.architecture.to_plain()
    content = {
        "model": {name: plain[name] for name in ("pattern", "n_layers", "d_model", "d_ff", "mlp", "mixers")},
        "trainer": {"default_root_dir": str(folder), "enable_progress_bar": False},
    }
    path = folder / "arm.yaml"
    path.write_text(f"# {arm.text}, sized to the budget\n" + yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path


def _key(plan: Plan, run: Run) -> str:
    """Names what a run is: recipe, settings, architecture and text. The folder is not part of it."""
    recipe, words = run.arm.recipe.read_text(encoding="utf-8"), _run_words(plan, run)
    content = [recipe, list(run.arm.overrides), words, run.arm.architecture.to_plain(), plan.data_hash]
    if plan.readings:
        content.append([[reading.name, *reading.settings] for reading in plan.readings])
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "_+-." else "_" for c in text)[:60]


def plain_result(result: Result) -> dict[str, Any]:
    """A run in types that JSON holds; of its arm, the name."""
    return {**vars(result), "arm": result.arm.text}


def read_result(arm: Arm, stored: dict[str, Any]) -> Result:
    """Undo :func:`plain_result`, from JSON."""
    kept = {k: v for k, v in stored.items() if k not in ("arm", "key") and v is not None}
    kept["curve"], kept["train_curve"] = ([tuple(p) for p in kept[k]] for k in ("curve", "train_curve"))
    kept["scores"] = {name: math.nan if v is None else v for name, v in kept.get("scores", {}).items()}
    return Result(arm, **kept)


def finite(content: Any) -> Any:
    """JSON knows no NaN: numbers that are not finite become null."""
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def write_json(path: Path, content: Any) -> None:
    """Written whole or not at all: a kill leaves the old file."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(finite(content), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(path)
