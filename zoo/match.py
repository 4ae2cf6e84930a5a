"""Equal budgets: one size of a model turned until parameters, FLOPs or decode state agree with another model's."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from zoo.architecture import Architecture
from zoo.budget import TOLERANCE
from zoo.errors import UserError
from zoo.knobs import SIZES, Knob, default_size, knob, spelt_out
from zoo.ledger import COUNTS, Cost, LedgerRow, check_held, cost

_FEW = 16  # so many values are all tried; of more, those around the target
_AROUND = 4


@dataclass(frozen=True)
class Trial:
    """One value of the free size: the model with it, and its row of the ledger."""

    value: int
    architecture: Architecture
    row: LedgerRow

    @property
    def deviation(self) -> float:
        """Of what is held, from the reference, as a signed share."""
        return self.row.deviation(self.row.held)


@dataclass(frozen=True)
class Sizing:
    """A model sized to a reference's budget, or as near as the rules let it come.

    Attributes:
        free: the size that moved. rule: what its values are, in words. start: what it was.
        best: the nearest value.
        others: the next two.
        blocked: values that would lie nearer to the target, and the rule that refuses each.
        edge: "smallest" or "largest" where the target lies beyond all values; None between them.
    """

    free: str
    rule: str
    start: int
    best: Trial
    others: tuple[Trial, ...]
    blocked: tuple[tuple[int, str], ...]
    edge: str | None

    @property
    def architecture(self) -> Architecture:
        """The sized model, with every size of its mixers written down."""
        return spelt_out(self.best.architecture)

    @property
    def agrees(self) -> bool:
        """Whether what is held is within the tolerance."""
        return self.best.row.agrees

    def why_not(self) -> list[str]:
        """Why no value agrees, in sentences: the nearest ones, the rule between them, and what to do."""
        row = self.best.row
        shown = [f"{trial.value} gives {trial.deviation:+.2%}" for trial in (self.best, *self.others)]
        lines = [
            f"no {self.free} makes {row.held} agree within {row.tolerance:.2%}; the nearest are "
            f"{self.free} {', '.join(shown)}",
            f"the rule: {self.free} is {self.rule}",
        ]
        if self.edge:
            more = "more" if self.edge == "smallest" else "less"
            lines[1] = (
                f"the {self.edge} {self.free} that the rules allow still costs {more}: what does not move decides"
            )
        lines += [f"{self.free} {value} is refused: {reason}" for value, reason in self.blocked]
        wide = math.ceil(abs(self.best.deviation) * 1000) / 1000
        cure = "free another size" if self.edge or wide >= 1 else f"free another size, or allow --tol {wide:.1%}"
        if self.free in ("d_ff", "d_model") and not self.edge and not self.blocked:
            cure += ", or finer steps with --step"
        return [*lines, cure]

    def to_plain(self) -> dict[str, Any]:
        """The same in types that JSON holds."""
        return {
            "free": self.free,
            "rule": self.rule,
            "start": self.start,
            "value": self.best.value,
            "agrees": self.agrees,
            "ledger": self.best.row.to_plain(),
            "architecture": self.architecture.to_plain(),
            "others": [{"value": trial.value, "deviation": trial.deviation} for trial in self.others],
            "blocked": [{"value": value, "rule": reason} for value, reason in self.blocked],
        }


def match(
    arm: Architecture,
    reference: Architecture,
    *,
    by: str,
    free: str | None = None,
    tolerance: float = TOLERANCE,
    context: int = 4096,
    count: str = COUNTS[0],
    step: int | None = None,
    keep_d_ff: bool = False,
) -> Sizing:
    """Turn one size of ``arm`` until it costs what ``reference`` costs.

    Every value that comes into question is built on the meta device and counted; nothing is estimated. The same
    question has the same answer.

    Args:
        arm: what is resized.
        reference: what it is measured against; it stays as it is.
        by: what is held, one of :data:`zoo.ledger.QUANTITIES`.
        free: the size that moves, see :func:`zoo.knobs.knob`. None: :func:`zoo.knobs.default_size`.
        tolerance: the largest deviation that still counts as equal, as a share.
        context: tokens at which FLOPs are averaged and the state is counted.
        count: which parameters, one of :data:`zoo.ledger.COUNTS`.
        step, keep_d_ff: as in :func:`zoo.knobs.knob`.

    Returns:
        the nearest value within the rules; whether it agrees, ``Sizing.agrees`` says.

    Raises:
        UserError: what cannot be held or turned; a size on which the held quantity does not depend.
    """
    check_held(by)
    target = cost(reference, context)
    turned = knob(arm, free or default_size(arm, by), step=step, keep_d_ff=keep_d_ff)
    return _Search(turned, target, by, tolerance, count).run()


def alternatives(arm: Architecture, reference: Architecture, sizing: Sizing) -> list[Sizing]:
    """Where one size did not reach the target, the others that do, each with its rules' defaults."""
    row = sizing.best.row
    found = []
    for free in SIZES:
        if free == sizing.free or (free == "heads" and sizing.free.endswith(".heads")):
            continue
        try:
            other = match(
                arm,
                reference,
                by=row.held,
                free=free,
                tolerance=row.tolerance,
                context=row.own.context,
                count=row.count,
            )
        except UserError:  # this model has no such size, or it changes nothing that is held
            continue
        if other.agrees:
            found.append(other)
    return found


class _Search:
    """The values of one knob against a target; each is built once."""

    def __init__(self, turned: Knob, target: Cost, held: str, tolerance: float, count: str):
        self.knob, self.target, self.held, self.tolerance, self.count = turned, target, held, tolerance, count
        self.trials: dict[int, Trial] = {}

    def run(self) -> Sizing:
        allowed = [value for value in self.knob.values if self.knob.refuses(value) is None]
        if not allowed:
            value = min(self.knob.values, key=lambda v: abs(v - self.knob.start))
            raise UserError(f"no {self.knob.name} is allowed here: {value} is refused, {self.knob.refuses(value)}")
        first, last = allowed[0], allowed[-1]
        if self.amount(first) == self.amount(last):
            raise UserError(
                f"{self.knob.name} does not change {self.held}, so it cannot make it agree; free another size"
            )
        # What is held rises with every knob, so the target lies between two neighbours.
        wanted = self.target.of(self.held, self.count)
        at = bisect_left(allowed, wanted, key=self.amount)
        near = allowed if len(allowed) <= _FEW else allowed[max(0, at - _AROUND) : at + _AROUND]
        ranked = sorted((self.trial(value) for value in near), key=self.rank)
        below, above = (allowed[at - 1] if at else None), (allowed[at] if at < len(allowed) else None)
        return Sizing(
            self.knob.name,
            self.knob.rule,
            self.knob.start,
            ranked[0],
            tuple(ranked[1:3]),
            self.blocked(below, above, ranked[0].value),
            "smallest" if below is None else "largest" if above is None else None,
        )

    def trial(self, value: int) -> Trial:
        if value not in self.trials:
            made = self.knob.turn(value)
            row = LedgerRow(cost(made, self.target.context), self.target, self.held, self.tolerance, self.count)
            self.trials[value] = Trial(value, made, row)
        return self.trials[value]

    def amount(self, value: int) -> float:
        return self.trial(value).row.own.of(self.held, self.count)

    def rank(self, trial: Trial) -> tuple[float, int, float]:
        return abs(trial.deviation), abs(trial.value - self.knob.start), abs(trial.row.deviation("flops"))

    def blocked(self, below: int | None, above: int | None, best: int) -> tuple[tuple[int, str], ...]:
        """Up to three refused values between the neighbours of the target: of each rule the one nearest to the best."""
        low = below if below is not None else min(self.knob.values) - 1
        high = above if above is not None else max(self.knob.values) + 1
        # The numbers in a reason differ from value to value; the words are the rule.
        reasons: dict[str, tuple[int, str]] = {}
        between = [value for value in self.knob.values if low < value < high]
        for value in sorted(between, key=lambda value: (abs(value - best), value)):
            reason = self.knob.refuses(value)
            if reason is not None:
                reasons.setdefault(re.sub(r"[0-9]+", "", reason), (value, reason))
        return tuple(list(reasons.values())[:3])
