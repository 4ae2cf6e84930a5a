"""Arms under one budget: same tokens, same order, same schedule, parameters matched; each trained with every seed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zoo.architecture import Architecture
from zoo.budget import TOLERANCE, Match, match_parameters, non_embedding
from zoo.data.document_data import DocumentData
from zoo.errors import UserError
from zoo.names import near
from zoo.presets import preset, presets
from zoo.recipe import ZooCLI

# What must be the same in every arm unless the user allows it to differ; tokens always are.
CONDITIONS = ("data_order", "tokenizer", "validation", "precision", "optimizer")
RATE_SHARE = 0.1  # of the budget, for a run that only judges a learning rate
LEARNING_RATE, WARM_UP = "model.optimizer.init_args.lr", "model.lr_scheduler.init_args.warmup_steps"


@dataclass(frozen=True)
class Entry:
    """An arm as the user names it.

    Attributes:
        text: a pattern, a preset's name, or a recipe's file (it ends in .yaml or .yml).
        name: what tables call it; None: the text, or the file's name without its folder.
        overrides: settings of this arm alone, as they would follow ``zoo fit``.
    """

    text: str
    name: str | None = None
    overrides: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """What tables call it."""
        return self.name or (Path(self.text).stem if self.is_recipe else self.text)

    @property
    def is_recipe(self) -> bool:
        """Whether the text names a file."""
        return self.text.endswith((".yaml", ".yml"))


@dataclass(frozen=True)
class Reading:
    """A measurement of a trained model on the test split, beside the validation that every run ends with.

    Attributes:
        name: in front of its figures, as in ``4x/accuracy``.
        settings: of the data, as they would follow ``zoo test``; none: the recipe's own.
    """

    name: str
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Arm:
    """One architecture of a comparison, sized to the budget.

    Attributes:
        text: as tables call it.
        architecture: with its matched ``d_ff``.
        non_embedding: parameters without embedding and head.
        deviation: of these from the reference, as a signed share.
        flops_per_token: of the forward, per token, at the training context.
        state_bytes: what decoding keeps per sequence at the comparison's context.
        by_context: (tokens, FLOPs per token, state bytes) for every context that was asked for.
        recipe: what it is trained by. overrides: further settings, those of all arms first.
        conditions: what ``CONDITIONS`` are for it, in words.
        learning_rate, warmup_steps: the recipe's; None where optimizer or schedule have none.
    """

    text: str
    architecture: Architecture
    total: int
    non_embedding: int
    deviation: float
    flops_per_token: float
    state_bytes: int
    by_context: tuple[tuple[int, float, int], ...]
    recipe: Path
    overrides: tuple[str, ...]
    conditions: dict[str, str]
    learning_rate: float | None
    warmup_steps: int | None


@dataclass(frozen=True)
class Run:
    """One training: an arm with a seed; ``factor`` is set where it only judges a learning rate."""

    arm: Arm
    seed: int
    learning_rate: float | None = None
    factor: float | None = None

    @property
    def title(self) -> str:
        """As progress calls it."""
        rate = f", learning rate x {self.factor:g}" if self.factor is not None else ""
        return f"{self.arm.text}, seed {self.seed}{rate}"

    @property
    def folder(self) -> str:
        """Its folder's name inside the arm's."""
        return f"seed-{self.seed}" if self.factor is None else f"rate-{self.factor:g}"


@dataclass
class Result:
    """What one run gave.

    Attributes:
        status: "finished", "diverged" (a loss or gradient that is not finite), "failed" or "not run", both with the
            reason as ``error``.
        learning_rate: where it is not the recipe's.
        loss, bpb: validation, nats per token and bits per byte, after the last step.
        seconds: of the last start of this run, validation included. peak_bytes: of a CUDA device, else None.
        curve: (tokens, validation bits per byte, or nats where there are no bytes) pairs.
        train_curve: (tokens, training loss in nats per token) pairs.
        command: what trains it again, in another folder.
        scores: figures of the plan's readings, by ``READING/METRIC``.
    """

    arm: Arm
    status: str
    seed: int | None = None
    learning_rate: float | None = None
    factor: float | None = None
    loss: float = math.nan
    bpb: float = math.nan
    tokens: int = 0
    seconds: float = math.nan
    tokens_per_second: float = math.nan
    peak_bytes: int | None = None
    order_hash: str = ""
    error: str = ""
    command: str = ""
    curve: list[tuple[int, float]] = field(default_factory=list)
    train_curve: list[tuple[int, float]] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)

    @property
    def score(self) -> str:
        """The validation's outcome in words, a task has no bytes; or what the run died of."""
        if self.error:
            return self.error
        return f"{self.bpb:.4f} bits per byte" if math.isfinite(self.bpb) else f"{self.loss:.4f} nats per label"


@dataclass(frozen=True)
class Plan:
    """A comparison, settled before anything trains.

    Attributes:
        recipe: the YAML file that all arms share.
        overrides: further settings for all arms, as on the command line.
        reference: non-embedding parameters that every arm is matched to.
        contexts: tokens at which FLOPs and decode state are counted; the first is the ledger's.
        train_context: tokens of a training row.
        data_hash: names the text; empty where the data is a task, which the recipe names whole.
        seeds: of the first weights; every arm is trained with each.
        rates: factors on the recipe's learning rate that every arm tries; none: the recipe's serves all.
        rate_seed: the seed of those trials, none of ``seeds``.
        allowed: the ``CONDITIONS`` that may differ.
        matched: whether arms were sized to ``reference``; else each is what its pattern makes of the recipe.
        readings: what every trained model is measured on besides.
    """

    arms: tuple[Arm, ...]
    recipe: Path
    overrides: tuple[str, ...]
    reference: int
    reference_text: str
    tolerance: float
    contexts: tuple[int, ...]
    train_context: int
    batch_tokens: int
    tokens: int | None
    data_hash: str = ""
    seeds: tuple[int, ...] = (0,)
    rates: tuple[float, ...] = ()
    rate_seed: int = 0
    allowed: tuple[str, ...] = ()
    matched: bool = True
    readings: tuple[Reading, ...] = ()

    @property
    def context(self) -> int:
        """Where the ledger counts the decode state."""
        return self.contexts[0]

    @property
    def differing(self) -> dict[str, list[str]]:
        """Conditions that are not the same in every arm, with each arm's; all of them are allowed."""
        found = {name: [arm.conditions[name] for arm in self.arms] for name in CONDITIONS}
        return {name: values for name, values in found.items() if len(set(values)) > 1}

    @property
    def held(self) -> str:
        """The first line of every report."""
        worst = max(abs(arm.deviation) for arm in self.arms)
        order = "NOT their order" if "data_order" in self.differing else "and their order"
        unequal = [name.replace("_", " ") for name in self.differing if name != "data_order"]
        rates = (
            f"learning rate chosen for each arm from the same {len(self.rates)} factors"
            if self.rates
            else "learning rate the recipe's, not tuned for any arm"
        )
        sizes = (
            f"parameters without embedding and head ({self.reference:,} of {self.reference_text}, within "
            f"{self.tolerance:.1%}: worst {worst:.2%})"
            if self.matched
            else f"NOT parameters, which are what the patterns make them (up to {worst:.1%} apart)"
        )
        return f"held: training tokens {order} (exact); {sizes}; {rates}" + (
            f"; NOT held, as allowed: {', '.join(unequal)}" if unequal else ""
        )


# ----------------------------------------------------------------------------------------------------------------- plan
def make_plan(
    arms: Sequence[str | Entry],
    recipe: str | Path,
    *,
    overrides: Sequence[str] = (),
    tolerance: float = TOLERANCE,
    contexts: Sequence[int] = (4096,),
    seeds: int | Sequence[int] = 1,
    rates: Sequence[float] = (),
    allow: Sequence[str] = (),
    match: bool = True,
    readings: Sequence[Reading] = (),
) -> Plan:
    """Size every arm to the recipe's own model; nothing is trained or written.

    Args:
        arms: patterns, presets by name (their pattern, options and MLP; sizes are the recipe's), or recipes (their
            whole model but ``d_ff``, and their settings; tokens are those of ``recipe``).
        recipe: a training recipe; its model is the reference that arms are matched to.
        overrides: settings for all arms, as they would follow ``zoo fit``.
        tolerance: the largest deviation in parameters, as a share.
        contexts: where FLOPs and decode state are counted, in tokens.
        seeds: how many, counted on from the recipe's; or the seeds themselves.
        rates: factors on the recipe's learning rate; every arm tries each on a tenth of the tokens with a seed that
            is not reported, and goes on with its best.
        allow: the ``CONDITIONS`` in which arms may differ.
        match: size the arms by ``d_ff``; False: leave each as its pattern makes it, models without MLPs for example,
            and ``tolerance`` without a say.
        readings: what every trained model is measured on besides, each name once.

    Raises:
        UserError, PatternError, SpecError: what is wrong with an arm or the recipe.
    """
    if not arms:
        raise UserError(
            "compare what? Name at least one pattern: zoo compare GA GDN,SWA --recipe recipes/tiny_text.yaml"
        )
    for context in contexts:
        if context < 1:
            raise UserError(f"--context must be at least 1 token, got {context}")
    for name in allow:
        if name not in CONDITIONS:
            raise UserError(f"--allow {name}{near(name, CONDITIONS)}; arms may differ in {', '.join(CONDITIONS)}")
    names = [reading.name for reading in readings]
    if len(set(names)) < len(names):
        raise UserError(f"readings: {', '.join(names)}; give each a name of its own")
    entries = [entry if isinstance(entry, Entry) else Entry(entry) for entry in arms]
    path = Path(recipe)
    for file in (path, *(Path(entry.text) for entry in entries if entry.is_recipe)):
        if not file.is_file():
            raise UserError(f"no recipe at {file}; recipes are YAML files, such as recipes/tiny_text.yaml")
    base = instantiate(path, overrides)
    chosen = settle_seeds(seeds, base)
    if rates and (base.config.budget.tokens is None or min(rates) <= 0 or len(set(rates)) < len(rates)):
        raise UserError(
            f"learning rates {', '.join(f'{rate:g}' for rate in rates)}: give different factors above 0, and "
            "budget.tokens in the recipe, of which a trial takes a tenth"
        )
    own: Architecture = base.model.architecture
    target = non_embedding(own)
    shared = _conditions(base)
    limit = tolerance if match else math.inf
    found = [_settle_arm(e, path, overrides, base, shared, target, limit, tuple(contexts)) for e in entries]
    _check_distinct(found)
    for arm in found[1:]:
        _check_conditions(found[0], arm, allow)
    manifest = getattr(base.datamodule, "manifest", None)
    return Plan(
        tuple(found),
        path,
        tuple(overrides),
        target,
        str(own.pattern),
        limit,
        tuple(contexts),
        base.datamodule.seq_len,
        base.datamodule.batch_tokens,
        base.config.budget.tokens,
        manifest()["content_hash"] if manifest is not None else "",
        chosen,
        tuple(rates),
        max(chosen) + 1000 if max(chosen) + 1000 < 2**32 else min(chosen) - 1,
        tuple(allow),
        match,
        tuple(readings),
    )


def settle_seeds(seeds: int | Sequence[int], base: ZooCLI) -> tuple[int, ...]:
    """The seeds themselves: a number of them is counted on from the recipe's.

    Raises:
        UserError: none, one twice, or one out of range.
    """
    if isinstance(seeds, int):
        if seeds < 1:
            raise UserError(f"seeds: {seeds} seeds train nothing; give at least 1, or 3 for an interval")
        first = base.config.get("seed_everything")
        first = first if isinstance(first, int) and not isinstance(first, bool) else 0
        return tuple(range(first, first + seeds))
    if not seeds or len(set(seeds)) < len(seeds) or not all(0 <= seed < 2**32 for seed in seeds):
        raise UserError(f"seeds: {list(seeds)}; give at least one, each once, from 0 to {2**32 - 1}")
    return tuple(seeds)


def _settle_arm(
    entry: Entry,
    recipe: Path,
    overrides: Sequence[str],
    base: ZooCLI,
    shared: dict[str, str],
    target: int,
    tolerance: float,
    contexts: tuple[int, ...],
) -> Arm:
    """One arm, sized (as it is, if ``tolerance`` is infinite) and counted; only what has own settings is read again."""
    words, cli, conditions, path = (*overrides, *entry.overrides), base, shared, recipe
    if entry.is_recipe:
        path = Path(entry.text)
        budget = base.config.budget
        words += (f"--budget.tokens={budget.tokens}",) if budget.tokens is not None else ()
        words += (f"--budget.batch_tokens={budget.batch_tokens}",)
    if entry.is_recipe or entry.overrides:
        cli = instantiate(path, words)
        conditions = _conditions(cli)
        for name in ("tokens", "batch_tokens"):
            if cli.config.budget[name] != base.config.budget[name]:
                raise UserError(
                    f"arm {entry.title}: budget.{name} is {cli.config.budget[name]:,}, but "
                    f"{base.config.budget[name]:,} in the comparison; tokens are always held, so leave the "
                    "budget to the comparison"
                )
    own: Architecture = cli.model.architecture
    asked = own if entry.is_recipe else _with_arm(entry.text, own)
    if math.isfinite(tolerance):
        sized = match_parameters(asked, target, tolerance=tolerance)
    else:
        count = non_embedding(asked)
        sized = Match(asked, count, count / target - 1)
    model = sized.architecture.build(device="meta")
    optimizer, schedule = (
        (cli.config.model.get(name) or {}).get("init_args") or {} for name in ("optimizer", "lr_scheduler")
    )
    return Arm(
        entry.title,
        sized.architecture,
        model.parameter_counts().total,
        sized.non_embedding,
        sized.deviation,
        model.flops_per_token(cli.datamodule.seq_len),
        model.state_bytes(contexts[0]),
        tuple((context, model.flops_per_token(context), model.state_bytes(context)) for context in contexts),
        path,
        words,
        conditions,
        optimizer.get("lr"),
        schedule.get("warmup_steps"),
    )


def _with_arm(text: str, own: Architecture) -> Architecture:
    """The recipe's model with another pattern; a preset brings its options and its MLP too."""
    if text in presets():
        found = preset(text)
        return own.with_pattern(found.pattern, mixers=found.mixers, mlp=found.mlp)
    return own.with_pattern(text)


def _check_distinct(arms: Sequence[Arm]) -> None:
    names: dict[tuple[Any, ...], str] = {}
    for arm in arms:
        model = arm.architecture
        key = (repr(model.table()), model.d_model, model.tie, arm.overrides, arm.recipe)
        same = names.setdefault(key, arm.text)
        if same != arm.text or [other.text for other in arms].count(arm.text) > 1:
            raise UserError(f"{same} and {arm.text} are one model, named twice; compare an arm with another")


def _check_conditions(first: Arm, arm: Arm, allow: Sequence[str]) -> None:
    for name in CONDITIONS:
        one, other = first.conditions[name], arm.conditions[name]
        if one != other and name not in allow:
            raise UserError(
                f"{first.text} and {arm.text} differ in {name.replace('_', ' ')}:\n  {first.text}: {one}\n  "
                f"{arm.text}: {other}\nThat would be compared too. Make them equal, or allow it, and the ledger says "
                f"so: --allow {name}"
            )


def _conditions(cli: ZooCLI) -> dict[str, str]:
    """What must be the same in every arm, in words that are equal only if it is."""
    data, config, trainer = cli.datamodule, cli.config, cli.trainer
    limit = f"limit_val_batches {config.trainer.limit_val_batches}"
    if isinstance(data, DocumentData):
        order = {**data.train_stream().identity, "batch_tokens": data.batch_tokens}
        labels = data.eval_text("val")
        digest = hashlib.sha256(labels.tobytes()).hexdigest()[:12]
        validation = (
            f"{len(labels):,} labels {digest}, rows of {data.seq_len}, doc_mask {data.layout.doc_mask}, {limit}"
        )
        tokenizer = data.tokenizer.identity
        order_text = ", ".join(f"{name} {value}" for name, value in order.items())
    else:  # a task names its rows by its settings
        order_text = _words(config.data)
        validation, tokenizer = f"{order_text}, {limit}", f"the data's own, {getattr(data, 'vocab_size', '?')} symbols"
    clip = f"clip {config.trainer.gradient_clip_val} by {config.trainer.gradient_clip_algorithm or 'norm'}"
    return {
        "data_order": order_text,
        "tokenizer": tokenizer,
        "validation": validation,
        "precision": str(trainer.precision),
        "optimizer": f"{_words(config.model.optimizer)}; {_words(config.model.lr_scheduler)}; {clip}",
    }


def _words(settings: Any) -> str:
    """``AdamW lr 0.004, weight_decay 0.1`` of a class and its arguments; what is not set is left out."""
    if settings is None:
        return "default"
    options = dict(settings.get("init_args") or {})
    shown = ", ".join(f"{name} {value}" for name, value in options.items() if value not in (None, False))
    return f"{settings.get('class_path', '').rpartition('.')[2]} {shown}"


def instantiate(recipe: Path, overrides: Sequence[str]) -> ZooCLI:
    """Read a recipe with further settings: its trainer, model and data module, ready to run."""
    return ZooCLI(["--config", str(recipe), *overrides], run=False)
