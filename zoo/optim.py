"""Which parameters decay, and how the learning rate moves: by name, and by the budget."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from zoo.errors import UserError

# Weight decay pulls a number towards zero. That is no prior for rates, offsets and scales, so these are left alone:
# decay rates and time steps, skip weights, norms, convolutions (four taps a channel) and biases.
NO_DECAY = (
    r"(^|\.)(A_log|dt_bias|D)$",
    r"(^|\.)\w*norm\w*\.weight$",
    r"(^|\.)\w*conv\w*\.(weight|bias)$",
    r"(^|\.)\w*bias$",
)
DECAY = (r"(^|\.)(to_\w+|embedding|head|up|gate|down|\w*proj\w*)(\.\w+)*\.weight$",)


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Two groups for an optimizer: parameters that weight decay may shrink, and those that it may not.

    Args:
        named: (name, parameter) pairs; a shared parameter may come twice.

    Returns:
        [{"name": "decay", "params": ...}, {"name": "no_decay", "params": ..., "weight_decay": 0.0}], empty groups left
        out.

    Raises:
        ValueError: a trainable parameter that no rule names; a new kind of parameter must be placed by its author.
    """
    decay: dict[int, nn.Parameter] = {}
    keep: dict[int, nn.Parameter] = {}
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        if any(re.search(rule, name) for rule in NO_DECAY):
            keep[id(parameter)] = parameter
        elif any(re.search(rule, name) for rule in DECAY):
            decay[id(parameter)] = parameter
        else:
            raise ValueError(
                f"optimizer groups: no rule of zoo/optim.py names the parameter {name!r}; add it to DECAY or NO_DECAY"
            )
    groups = [{"name": "decay", "params": list(decay.values())}]
    groups.append({"name": "no_decay", "params": list(keep.values()), "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


class BudgetSchedule(LambdaLR):
    """A learning-rate schedule over a run whose length the budget gives; stepped once per optimizer step.

    Its length is set by :meth:`begin`, which the LightningModule calls with the steps of the budget. Shortening a run
    with ``--trainer.max_steps`` does not change the schedule: the short run is the beginning of the long one. A resumed
    run keeps the length it began with.

    Args:
        optimizer: whose learning rates move.
        warmup_steps: optimizer steps of linear rise from ``start_factor`` to 1.
        start_factor: the first step's rate as a share of the peak, in (0, 1].
        end_factor: the last step's rate as a share of the peak, in [0, 1].
        total_steps: optimizer steps of the whole schedule. None: the budget's.

    Raises:
        UserError: numbers outside these ranges.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: int = 0,
        start_factor: float = 0.01,
        end_factor: float = 0.1,
        total_steps: int | None = None,
    ):
        if warmup_steps < 0:
            raise UserError(f"schedule: warmup_steps must be at least 0, got {warmup_steps}")
        if not 0 < start_factor <= 1:
            raise UserError(
                f"schedule: start_factor must lie in (0, 1], got {start_factor}; 0 would waste the first step"
            )
        if not 0 <= end_factor <= 1:
            raise UserError(f"schedule: end_factor must lie in [0, 1], got {end_factor}")
        self.warmup_steps, self.start_factor, self.end_factor = warmup_steps, start_factor, end_factor
        self.total_steps = total_steps
        super().__init__(optimizer, self.factor)

    def begin(self, total_steps: int) -> None:
        """Set the length, unless the settings or a checkpoint already did.

        Raises:
            UserError: a warm-up that leaves no step for the rest.
        """
        if self.total_steps is None:
            self.total_steps = total_steps
        if self.warmup_steps >= self.total_steps:
            raise UserError(
                f"schedule: {self.warmup_steps} warm-up steps do not fit into a run of {self.total_steps} steps; "
                "shorten the warm-up "
                "or raise budget.tokens"
            )

    def factor(self, step: int) -> float:
        """The rate of optimizer step ``step`` (from 0), as a share of the peak."""
        if step < self.warmup_steps:
            return self.start_factor + (1 - self.start_factor) * step / self.warmup_steps
        if self.total_steps is None:
            if step == 0:
                return 1.0
            raise RuntimeError("schedule: its length is not known; call begin(total_steps), or set total_steps")
        # The last step is total_steps - 1, and there the rate is at its floor.
        span = max(1, self.total_steps - 1 - self.warmup_steps)
        return self.after_warmup(min(1.0, (step - self.warmup_steps) / span))

    def after_warmup(self, progress: float) -> float:
        """The share of the peak after the warm-up, with ``progress`` from 0 to 1."""
        raise NotImplementedError


class WarmupCosine(BudgetSchedule):
    """Linear warm-up, then half a cosine down to ``end_factor``."""

    def after_warmup(self, progress: float) -> float:
        return self.end_factor + (1 - self.end_factor) * (1 + math.cos(math.pi * progress)) / 2


class WarmupLinear(BudgetSchedule):
    """Linear warm-up, then a straight line down to ``end_factor``."""

    def after_warmup(self, progress: float) -> float:
        return 1 - (1 - self.end_factor) * progress


class WarmupStableDecay(BudgetSchedule):
    """Linear warm-up, a plateau at the peak, and a straight decay over the last ``decay_share`` of the rest (WSD).

    Args:
        optimizer: whose learning rates move.
        warmup_steps: optimizer steps of linear rise.
        decay_share: share of the steps after the warm-up that decay, in (0, 1].
        start_factor: the first step's rate as a share of the peak, in (0, 1].
        end_factor: the last step's rate as a share of the peak, in [0, 1].
        total_steps: optimizer steps of the whole schedule. None: the budget's.

    Source: Hu et al. 2024, arXiv:2404.06395.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: int = 0,
        decay_share: float = 0.2,
        start_factor: float = 0.01,
        end_factor: float = 0.0,
        total_steps: int | None = None,
    ):
        if not 0 < decay_share <= 1:
            raise UserError(f"schedule: decay_share must lie in (0, 1], got {decay_share}")
        self.decay_share = decay_share
        super().__init__(optimizer, warmup_steps, start_factor, end_factor, total_steps)

    def after_warmup(self, progress: float) -> float:
        falling = max(0.0, (progress - (1 - self.decay_share)) / self.decay_share)
        return 1 - (1 - self.end_factor) * falling
