"""Arms under one budget: same tokens, same order, same schedule, one quantity matched; each trained with every seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zoo.architecture import Architecture
from zoo.budget import TOLERANCE
from zoo.comparison.arm import Arm, ArmError, Entry, LeftOut, Target, conditions_of, instantiate, left_out, settle_arm
from zoo.errors import UserError
from zoo.ledger import check_held, cost
from zoo.names import near
from zoo.recipe import ZooCLI

# What must be the same in every arm unless the user allows it to differ; tokens always are.
CONDITIONS = ("data_order", "tokenizer", "validation", "precision", "optimizer")
RATE_SHARE = 0.1  # of the budget, for a run that only judges a learning rate
LEARNING_RATE, WARM_UP = "model.optimizer.init_args.lr", "model.lr_scheduler.init_args.warmup_steps"


@dataclass(frozen=True)
class Reading:
    """A measurement of a trained model, beside the validation that every run ends with.

    Attributes:
        name: in front of its figures, as in ``4x/accuracy``.
        settings: of the data, as they would follow ``zoo test``; none: the recipe's own.
        split: of the data, "test" or "val".
        edges: rising; the loss is also taken by how many tokens of its document a label has before it, up to each edge
            from the one before. None: not.
    """

    name: str
    settings: tuple[str, ...] = ()
    split: str = "test"
    edges: tuple[int, ...] = ()


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
        seconds: validation included; of calls that were killed on the way nothing is known. peak_bytes: of a CUDA
            device in the last call, else None.
        curve: (tokens, validation bits per byte, or nats where there are no bytes) pairs.
        train_curve: (tokens, training loss in nats per token) pairs.
        command: what trains it again, in another folder.
        scores: figures of the plan's readings, by ``READING/METRIC``.
        at_once: runs that its device trained at the same time, itself included: above 1, its speed is none of its own.
        trained_with: code, torch and device; several where it went on with others. Empty: it took no step.
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
    at_once: int = 1
    trained_with: list[str] = field(default_factory=list)

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
        reference: what every arm is matched to: non-embedding parameters, FLOPs a token, or bytes of state.
        contexts: tokens at which FLOPs and decode state are counted; the first is the ledger's, and where a held state
            is counted.
        train_context: tokens of a training row.
        data_hash: names the text; empty where the data is a task, which the recipe names whole.
        seeds: of the first weights; every arm is trained with each.
        rates: factors on the recipe's learning rate that every arm tries; none: the recipe's serves all.
        rate_seed: the seed of those trials, none of ``seeds``.
        allowed: the ``CONDITIONS`` that may differ.
        matched: whether arms were sized to ``reference``; else each is what its pattern makes of the recipe.
        readings: what every trained model is measured on besides.
        by: what is held, one of :data:`zoo.ledger.QUANTITIES`.
        left_out: arms that cannot be built or sized.
        factors: of the training length, at which ``readings`` try rows.
    """

    arms: tuple[Arm, ...]
    recipe: Path
    overrides: tuple[str, ...]
    reference: float
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
    by: str = "params"
    left_out: tuple[LeftOut, ...] = ()
    factors: tuple[int, ...] = ()

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
        held = {
            "params": f"parameters without embedding and head ({self.reference:,.0f}",
            "flops": f"training FLOPs (forward {self.reference:,.0f} a token in rows of {self.train_context:,}",
            "state": f"decode state ({self.reference:,.0f} bytes at {self.context:,} tokens",
        }
        sizes = (
            f"{held[self.by]} of {self.reference_text}, within {self.tolerance:.1%}: worst {worst:.2%})"
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
    by: str = "params",
    factors: Sequence[int] = (),
    leave_out: bool = False,
) -> Plan:
    """Size every arm to the recipe's own model; nothing is trained or written.

    Args:
        arms: patterns, presets by name (their pattern, options and MLP; sizes are the recipe's), or recipes (their
            whole model but for the size that is turned, and their settings; tokens are those of ``recipe``).
        recipe: a training recipe; its model is the reference that arms are matched to.
        overrides: settings for all arms, as they would follow ``zoo fit``.
        tolerance: the largest deviation in what is held, as a share.
        contexts: where FLOPs and decode state are counted, in tokens.
        seeds: how many, counted on from the recipe's; or the seeds themselves.
        rates: factors on the recipe's learning rate; every arm tries each on a tenth of the tokens with a seed that
            is not reported, and goes on with its best.
        allow: the ``CONDITIONS`` in which arms may differ.
        match: size the arms; False: leave each as its pattern makes it, models without MLPs for example,
            and ``tolerance`` without a say.
        readings: what every trained model is measured on besides, each name once.
        by: what is held besides the tokens, one of :data:`zoo.ledger.QUANTITIES`: parameters by ``d_ff``, FLOPs in rows
            of the training length, decode state at the first of ``contexts``; which size is turned for these,
            :func:`zoo.knobs.default_size` says unless the arm does.
        factors: also validate on rows of so many times the training length; text only.
        leave_out: an arm that cannot be built or sized is left out with its reason, as long as another is left.

    Raises:
        UserError, PatternError, SpecError: what is wrong with an arm or the recipe.
    """
    entries, path = [entry if isinstance(entry, Entry) else Entry(entry) for entry in arms], Path(recipe)
    _check_asked(entries, path, contexts, allow, readings)
    check_held(by)
    base = instantiate(path, overrides)
    chosen = settle_seeds(seeds, base)
    if rates and (base.config.budget.tokens is None or min(rates) <= 0 or len(set(rates)) < len(rates)):
        raise UserError(
            f"learning rates {', '.join(f'{rate:g}' for rate in rates)}: give different factors above 0, and "
            "budget.tokens in the recipe, of which a trial takes a tenth"
        )
    own: Architecture = base.model.architecture
    context = contexts[0] if by == "state" else base.datamodule.seq_len
    target = Target(own, by, context, tolerance if match else math.inf, cost(own, context))
    found, out = _settle_arms(entries, path, overrides, base, target, tuple(contexts), leave_out)
    _check_distinct(found)
    for arm in found[1:]:
        _check_conditions(found[0], arm, allow)
    manifest = getattr(base.datamodule, "manifest", None)
    return Plan(
        arms=tuple(found),
        recipe=path,
        overrides=tuple(overrides),
        reference=target.amount,
        reference_text=str(own.pattern),
        tolerance=target.tolerance,
        contexts=tuple(contexts),
        train_context=base.datamodule.seq_len,
        batch_tokens=base.datamodule.batch_tokens,
        tokens=base.config.budget.tokens,
        data_hash=manifest()["content_hash"] if manifest is not None else "",
        seeds=chosen,
        rates=tuple(rates),
        rate_seed=max(chosen) + 1000 if max(chosen) + 1000 < 2**32 else min(chosen) - 1,
        allowed=tuple(allow),
        matched=match,
        readings=(*readings, *length_readings(base, factors)),
        by=by,
        left_out=tuple(out),
        factors=tuple(factors),
    )


def _check_asked(
    entries: Sequence[Entry],
    recipe: Path,
    contexts: Sequence[int],
    allow: Sequence[str],
    readings: Sequence[Reading],
) -> None:
    """What can be refused before a recipe is read.

    Raises:
        UserError: the first of it.
    """
    if not entries:
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
    for file in (recipe, *(Path(entry.text) for entry in entries if entry.is_recipe)):
        if not file.is_file():
            raise UserError(f"no recipe at {file}; recipes are YAML files, such as recipes/tiny_text.yaml")


def _settle_arms(
    entries: Sequence[Entry],
    recipe: Path,
    overrides: Sequence[str],
    base: ZooCLI,
    target: Target,
    contexts: tuple[int, ...],
    leave_out: bool,
) -> tuple[list[Arm], list[LeftOut]]:
    shared, found, out = conditions_of(base), [], []
    for number, entry in enumerate(entries, start=1):
        try:
            found.append(settle_arm(entry, number, recipe, overrides, base, shared, target, contexts))
        except ArmError as error:
            # Without any arm there is nothing to compare, and the first reason is the answer.
            if not leave_out or (not found and number == len(entries)):
                raise
            out.append(left_out(entry, number, error))
    return found, out


def length_readings(base: ZooCLI, factors: Sequence[int]) -> list[Reading]:
    """Validation on rows of some times the training length, with the loss by position in the longest.

    Args:
        base: the recipe as read.
        factors: such as 1, 2, 4.

    Raises:
        UserError: factors that are not rising, or data whose rows have no length that could be set.
    """
    if not factors:
        return []
    if list(factors) != sorted(set(factors)) or factors[0] < 1:
        raise UserError(f"lengths {', '.join(map(str, factors))}: give rising whole numbers, such as 1,2,4")
    if not hasattr(base.datamodule, "eval_text"):
        raise UserError(
            "lengths need a text, whose rows can be cut at any length; rows of a task are what it makes them"
        )
    own, found = base.datamodule.seq_len, []
    for factor in factors:
        length = own * factor
        # Both numbers of a batch must be whole rows of the new length; about as many tokens as in training.
        batch = max(1, base.datamodule.batch_tokens // length) * length
        settings = [f"--data.init_args.seq_len={length}", f"--data.init_args.val_batch_tokens={batch}"]
        settings += ["--budget.tokens=null", "--trainer.max_steps=1", f"--budget.batch_tokens={batch}"]
        found.append(Reading(f"{factor}x", tuple(settings), "val", position_edges(own, factor)))
    return found


def position_edges(length: int, factor: int) -> tuple[int, ...]:
    """Where buckets of positions end: an eighth, a quarter, a half of the length, the length, its double, and so on."""
    edges = [length // 8, length // 4, length // 2]
    edge = length
    while edge < length * factor:
        edges.append(edge)
        edge *= 2
    return tuple(sorted({edge for edge in edges if edge} | {length * factor}))


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
