"""What a model costs, and the row of a comparison's ledger: what was held equal, and how far everything else moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zoo.architecture import Architecture
from zoo.errors import UserError
from zoo.names import near

# What can be held; tokens always are.
QUANTITIES = ("params", "flops", "state")
COUNTS = ("non-embedding", "total")


@dataclass(frozen=True)
class Cost:
    """A model's budgets, counted on a built instance.

    Attributes:
        total: parameters, a tied head once.
        non_embedding: parameters without embedding, head and decoder.
        flops: model FLOPs of the forward, per token, mean over a document of ``context`` tokens. Training is three
            times that, so at equal tokens two runs differ by the same share.
        state: bytes that decoding keeps per sequence after ``context`` tokens.
        context: tokens.
        tie: embedding and head are one.
        decoder, decoder_flops: the decoder's parameters, part of ``total``, and its share of ``flops``; 0 without one.
            It follows from the width alone, so models of one width differ by their layers only.
    """

    total: int
    non_embedding: int
    flops: float
    state: int
    context: int
    tie: bool
    decoder: int = 0
    decoder_flops: int = 0

    def of(self, quantity: str, count: str = COUNTS[0]) -> float:
        """One of ``QUANTITIES``; parameters as ``count``, one of ``COUNTS``, says."""
        return {"params": self.total if count == "total" else self.non_embedding, "flops": self.flops}.get(
            quantity, self.state
        )


def cost(architecture: Architecture, context: int) -> Cost:
    """Count a model on the meta device: every layer is built, none stands for another.

    Args:
        architecture: from :func:`zoo.architecture.settle`.
        context: tokens of a document, at least 1.

    Raises:
        UserError: a context below 1.
    """
    if context < 1:
        raise UserError(f"context must be at least 1, got {context}")
    model = architecture.build("meta")
    counts = model.parameter_counts()
    return Cost(
        total=counts.total,
        non_embedding=counts.non_embedding,
        flops=model.flops_per_token(context),
        state=model.state_bytes(context),
        context=context,
        tie=architecture.tie,
        decoder=counts.decoder,
        decoder_flops=model.decoder_flops_per_token(),
    )


@dataclass(frozen=True)
class LedgerRow:
    """One model against the reference.

    Attributes:
        own, reference: at the same context.
        held: the one of ``QUANTITIES`` that should be equal.
        tolerance: how far it may be off, as a share.
        count: which parameters, one of ``COUNTS``.
    """

    own: Cost
    reference: Cost
    held: str
    tolerance: float
    count: str = COUNTS[0]

    def __post_init__(self) -> None:
        check_held(self.held)
        if self.count not in COUNTS:
            raise UserError(f"count must be one of {', '.join(COUNTS)}, got '{self.count}'{near(self.count, COUNTS)}")
        if not 0 < self.tolerance < 1:
            raise UserError(f"the tolerance must be a share between 0 and 1, such as 0.01, got {self.tolerance}")

    def deviation(self, quantity: str) -> float:
        """From the reference, as a signed share."""
        return self.own.of(quantity, self.count) / self.reference.of(quantity, self.count) - 1

    @property
    def agrees(self) -> bool:
        """Whether what is held is within the tolerance."""
        return abs(self.deviation(self.held)) <= self.tolerance

    @property
    def warning(self) -> str | None:
        """What to mistrust about the row, or None."""
        if self.held == "params" and self.count == "total" and self.own.tie != self.reference.tie:
            tied, untied = ("it", "the reference") if self.own.tie else ("the reference", "it")
            return (
                f"total parameters of a tied and an untied model: {tied} counts the embedding once, {untied} twice; "
                "hold those without embedding and head, or tie both"
            )
        return None

    def __str__(self) -> str:
        """``params (non-embedding) = +0.13% (within 1%) · tokens = · FLOPs@4096 -12.10% · state@4096 -96.80%``."""
        at = f"@{self.own.context}"
        names = {"params": f"params ({self.count})", "flops": f"FLOPs{at}", "state": f"state{at}"}
        words = [
            f"{names[quantity]} {self._mark(quantity)}{self.deviation(quantity):+.2%}{self._within(quantity)}"
            for quantity in QUANTITIES
        ]
        return " · ".join([words[0], "tokens =", *words[1:], *self._decoder()])

    def _decoder(self) -> list[str]:
        if not (self.own.decoder or self.reference.decoder):
            return []
        sides = [f"{cost.decoder:,} params, {cost.decoder_flops:,} FLOPs" for cost in (self.own, self.reference)]
        return [f"decoder {sides[0]}" + (f" (reference {sides[1]})" if sides[0] != sides[1] else " in both")]

    def _mark(self, quantity: str) -> str:
        return "" if quantity != self.held else "= " if self.agrees else "≠ "

    def _within(self, quantity: str) -> str:
        if quantity != self.held:
            return ""
        return f" ({'within' if self.agrees else 'NOT within'} {self.tolerance:.2%})"

    def to_plain(self) -> dict[str, Any]:
        """The same in types that JSON holds."""
        return {
            "held": self.held,
            "count": self.count,
            "tolerance": self.tolerance,
            "agrees": self.agrees,
            "context": self.own.context,
            "deviations": {quantity: self.deviation(quantity) for quantity in QUANTITIES},
            "own": _plain(self.own),
            "reference": _plain(self.reference),
            "warning": self.warning,
        }


def check_held(quantity: str) -> None:
    """Refuse what cannot be held.

    Raises:
        UserError: with what can.
    """
    if quantity not in QUANTITIES:
        raise UserError(
            f"'{quantity}' cannot be held equal{near(quantity, QUANTITIES)}\n"
            f"Held can be one of {', '.join(QUANTITIES)}; tokens always are."
        )


def _plain(cost: Cost) -> dict[str, Any]:
    return {
        "params": {"total": cost.total, "non_embedding": cost.non_embedding, "decoder": cost.decoder},
        "flops_per_token_forward": cost.flops,
        "decoder_flops_per_token_forward": cost.decoder_flops,
        "state_bytes": cost.state,
        "tie": cost.tie,
    }


def read_share(text: str) -> float:
    """``"1%"`` or ``"0.01"`` as a share.

    Raises:
        UserError: no number, or not between 0 and 1.
    """
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise UserError(f"--tol {text}: give a share between 0 and 1, such as 1% or 0.01")
    return share
