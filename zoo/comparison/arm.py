"""The arms of a comparison: read as the user names them, built, and sized to the budget."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.architecture import Architecture
from zoo.budget import match_parameters
from zoo.data.document_data import DocumentData
from zoo.errors import PatternError, UserError
from zoo.ledger import Cost, cost
from zoo.match import match
from zoo.pattern import expand, parse
from zoo.presets import preset, presets
from zoo.recipe import ZooCLI
from zoo_layers.mixer import SpecError


class ArmError(UserError):
    """An arm that is well written, but cannot be built under the recipe, or not be sized to its budget."""


@dataclass(frozen=True)
class Entry:
    """An arm as the user names it.

    Attributes:
        text: a pattern, a preset's name, or a recipe's file (it ends in .yaml or .yml).
        name: what tables call it; None: the text, or the file's name without its folder.
        overrides: settings of this arm alone, as they would follow ``zoo fit``.
        free: the size that moves where it is sized, see :func:`zoo.knobs.knob`; None: the default of what is held.
    """

    text: str
    name: str | None = None
    overrides: tuple[str, ...] = ()
    free: str | None = None

    @property
    def title(self) -> str:
        """What tables call it."""
        return self.name or (Path(self.text).stem if self.is_recipe else self.text)

    @property
    def is_recipe(self) -> bool:
        """Whether the text names a file."""
        return self.text.endswith((".yaml", ".yml"))


@dataclass(frozen=True)
class Arm:
    """One architecture of a comparison, sized to the budget.

    Attributes:
        text: as tables call it.
        number: its place among those that were named, from 1.
        architecture: sized.
        turned: which size was turned for that, from what to what.
        non_embedding: parameters without embedding and head.
        deviation: of what is held from the reference, as a signed share.
        flops_per_token: of the forward, per token, at the training context.
        state_bytes: what decoding keeps per sequence at the comparison's context.
        by_context: (tokens, FLOPs per token, state bytes) for every context that was asked for.
        recipe: what it is trained by. overrides: further settings, those of all arms first.
        conditions: what ``CONDITIONS`` are for it, in words.
        learning_rate, warmup_steps: the recipe's; None where optimizer or schedule have none.
    """

    text: str
    number: int
    architecture: Architecture
    turned: str
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
class LeftOut:
    """An arm that cannot take part, and why."""

    text: str
    number: int
    reason: str


@dataclass(frozen=True)
class Target:
    """What every arm is sized to.

    Attributes:
        own: the recipe's model, which is the measure.
        by: what is held, one of :data:`zoo.ledger.QUANTITIES`.
        context: tokens at which FLOPs are averaged (those of a training row) or the state is counted.
        tolerance: the largest deviation, as a share; infinite: arms are not sized, and deviate in parameters.
        reference: the model's cost.
    """

    own: Architecture
    by: str
    context: int
    tolerance: float
    reference: Cost

    @property
    def amount(self) -> float:
        """What is held, of the recipe's model."""
        return self.reference.of(self.by)

    def size(self, asked: Architecture, free: str | None) -> tuple[Architecture, str]:
        """Turn one size until the model meets the budget.

        Args:
            asked: the model.
            free: the size; None: the default of what is held.

        Returns:
            the model, and what was turned in words.

        Raises:
            UserError: nothing brings it within the tolerance, with the nearest and the rule.
        """
        if math.isinf(self.tolerance):
            return asked, "not sized"
        if cost(asked, self.context).of(self.by) == self.amount:
            return asked, "as it is"
        if self.by == "params" and free is None:
            sized = match_parameters(asked, round(self.amount), tolerance=self.tolerance).architecture
            return sized, _moved("d_ff", asked.d_ff, sized.d_ff)
        options: dict[str, Any] = {"by": self.by, "free": free, "tolerance": self.tolerance, "context": self.context}
        found = match(asked, self.own, **options)
        step = 64 if asked.d_model >= 512 else 16
        while not found.agrees and found.free == "d_ff" and step > 1:  # a tiny model has no wide step that fits
            step //= 2
            found = match(asked, self.own, **options, step=step)
        if not found.agrees:
            # The last sentence speaks of options of `zoo match`.
            raise UserError(
                "; ".join(found.why_not()[:-1]) + "; change the arm's sizes, free another one, or allow more with --tol"
            )
        return found.best.architecture, _moved(found.free, found.start, found.best.value)


def _moved(name: str, before: int, after: int) -> str:
    return f"{name} {before} -> {after}" if before != after else f"{name} {before}, as it was"


def settle_arm(
    entry: Entry,
    number: int,
    recipe: Path,
    overrides: Sequence[str],
    base: ZooCLI,
    shared: dict[str, str],
    target: Target,
    contexts: tuple[int, ...],
) -> Arm:
    """One arm, sized and counted; only what has own settings is read again.

    Args:
        entry, number: what is named, and its place.
        recipe, overrides, base, shared: what all arms share: the file, further settings, both as read, and the
            conditions that follow from them.
        target: what it is sized to.
        contexts: tokens at which FLOPs and state are counted.

    Raises:
        UserError, PatternError, SpecError: what is misspelt, or a budget of the arm's own.
        ArmError: it cannot be built, or not be sized.
    """
    words, cli, conditions, path = (*overrides, *entry.overrides), base, shared, recipe
    if entry.is_recipe:
        path = Path(entry.text)
        given = base.config.budget
        words += (f"--budget.tokens={given.tokens}",) if given.tokens is not None else ()
        words += (f"--budget.batch_tokens={given.batch_tokens}",)
    if entry.is_recipe or entry.overrides:
        cli = instantiate(path, words)
        conditions = conditions_of(cli)
        for name in ("tokens", "batch_tokens"):
            if cli.config.budget[name] != base.config.budget[name]:
                raise UserError(
                    f"arm {entry.title}: budget.{name} is {cli.config.budget[name]:,}, but "
                    f"{base.config.budget[name]:,} in the comparison; tokens are always held, so leave the "
                    "budget to the comparison"
                )
    own: Architecture = cli.model.architecture
    try:
        asked = own if entry.is_recipe else _with_arm(entry.text, own)
    except (PatternError, SpecError) as error:
        if _misspelt(entry.text, error):
            raise
        raise ArmError(str(error)) from error
    try:
        sized, turned = target.size(asked, entry.free)
        model = sized.build(device="meta")
    except (UserError, SpecError) as error:
        raise ArmError(str(error)) from error
    optimizer, schedule = (
        (cli.config.model.get(name) or {}).get("init_args") or {} for name in ("optimizer", "lr_scheduler")
    )
    counts = model.parameter_counts()
    counted = Cost(
        counts.total,
        counts.non_embedding,
        model.flops_per_token(target.context),
        model.state_bytes(target.context),
        target.context,
        sized.tie,
    )
    return Arm(
        text=entry.title,
        number=number,
        architecture=sized,
        turned=turned,
        total=counts.total,
        non_embedding=counts.non_embedding,
        deviation=counted.of(target.by) / target.amount - 1,
        flops_per_token=model.flops_per_token(cli.datamodule.seq_len),
        state_bytes=model.state_bytes(contexts[0]),
        by_context=tuple((context, model.flops_per_token(context), model.state_bytes(context)) for context in contexts),
        recipe=path,
        overrides=words,
        conditions=conditions,
        learning_rate=optimizer.get("lr"),
        warmup_steps=schedule.get("warmup_steps"),
    )


def left_out(entry: Entry, number: int, error: ArmError) -> LeftOut:
    """The arm's row, with the reason in one line."""
    cause = error.__cause__
    if isinstance(cause, PatternError):
        return LeftOut(entry.title, number, f"cannot be built: {cause.problem}. {cause.cure}")
    what = "built" if isinstance(cause, SpecError) else "sized to the budget"
    return LeftOut(entry.title, number, f"cannot be {what}: {' '.join(str(error).split())}")


def _with_arm(text: str, own: Architecture) -> Architecture:
    """The recipe's model with another pattern; a preset brings its options and its MLP too."""
    if text in presets():
        found = preset(text)
        return own.with_pattern(found.pattern, mixers=found.mixers, mlp=found.mlp)
    return own.with_pattern(text)


def _misspelt(text: str, error: ValueError) -> bool:
    """Whether a pattern is wrong by itself, whatever the depth and the width of the model."""
    try:
        expand(parse(text), None)
    except PatternError as found:
        return found.problem == getattr(error, "problem", None)
    return False


def conditions_of(cli: ZooCLI) -> dict[str, str]:
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
