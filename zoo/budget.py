"""Equal budgets: the width of the MLPs that makes two architectures agree in parameters."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.architecture import Architecture
from zoo.errors import UserError

TOLERANCE = 0.01  # what "equal" means where nothing else is said


@dataclass(frozen=True)
class Match:
    """An architecture resized to a budget.

    Attributes:
        architecture: with the chosen ``d_ff``.
        non_embedding: its parameters without embedding and head, counted on a built instance.
        deviation: from the target, as a signed share.
    """

    architecture: Architecture
    non_embedding: int
    deviation: float


def non_embedding(architecture: Architecture) -> int:
    """Parameters without embedding and head, counted on a meta instance: no closed formula, no layer times depth."""
    return architecture.build(device="meta").parameter_counts().non_embedding


def match_parameters(architecture: Architecture, target: int, *, tolerance: float = TOLERANCE) -> Match:
    """Choose ``d_ff`` so that the non-embedding parameters come closest to ``target``.

    ``d_ff`` changes neither the mixers nor the decode state, so it is the fairest knob. It moves in steps of 64, below
    d_model 512 of 16; where no such width is within the tolerance, as in tiny models, in the widest halving of that
    step that is.

    Args:
        architecture: what to resize; its own ``d_ff`` does not matter.
        target: non-embedding parameters to reach.
        tolerance: the largest deviation that still counts as equal, as a share.

    Raises:
        UserError: no layer has an MLP, or no width comes within the tolerance; with the nearest.
    """
    if all(layer.mlp == "none" for layer in architecture.layers):
        unsized = _match(architecture, architecture.d_ff, target)
        if abs(unsized.deviation) <= tolerance:
            return unsized
        raise UserError(
            f"{architecture.canonical}: no layer has an MLP, so d_ff cannot match its parameters to {target:,}"
        )
    # Parameters grow linearly with d_ff, so two counts give the line; every answer is counted again.
    narrow, wide = (non_embedding(architecture.with_d_ff(width)) for width in (1, 2))
    wanted = 1 + (target - narrow) / (wide - narrow)
    step = 64 if architecture.d_model >= 512 else 16
    while True:
        best = _match(architecture, max(1, round(wanted / step)) * step, target)
        if abs(best.deviation) <= tolerance:
            return best
        if step == 1:
            raise UserError(
                f"{architecture.canonical} cannot be matched to {target:,} parameters within {tolerance:.2%} by the "
                "width of its MLPs: the "
                f"nearest d_ff is {best.architecture.d_ff}, which deviates by {best.deviation:+.2%}; change the "
                "mixers' sizes, d_model "
                "or n_layers, or allow more with --tol"
            )
        step //= 2


def _match(architecture: Architecture, d_ff: int, target: int) -> Match:
    sized = architecture.with_d_ff(d_ff)
    count = non_embedding(sized)
    return Match(sized, count, count / target - 1)
