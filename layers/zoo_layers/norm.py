"""RMSNorm, plain and gated, as modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo_kernels.norm import gated_rms_norm, rms_norm
from zoo_layers import init

EPS = 1e-5


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, computed in fp32; output in x's dtype."""

    def __init__(self, size: int, *, eps: float = EPS):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def reset_parameters(self) -> None:
        """The weight starts at 1."""
        init.constant(self.weight, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same."""
        return rms_norm(x, self.weight, eps=self.eps)


class GatedRMSNorm(nn.Module):
    """RMSNorm and an output gate in one.

    Args:
        size: the last axis.
        activation: of the gate, "silu" or "sigmoid".
        gate_first: False: norm(x) * weight * act(gate). True: norm(x * act(gate)) * weight, Mamba-2's order.
        groups: the last axis is normalised in so many equal parts.
    """

    def __init__(
        self, size: int, *, activation: str = "silu", gate_first: bool = False, groups: int = 1, eps: float = EPS
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.activation, self.gate_first, self.groups, self.eps = activation, gate_first, groups, eps

    def reset_parameters(self) -> None:
        """The weight starts at 1."""
        init.constant(self.weight, 1.0)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate [..., size] -> the same, in x's dtype."""
        return gated_rms_norm(
            x,
            self.weight,
            gate,
            eps=self.eps,
            activation=self.activation,
            gate_first=self.gate_first,
            groups=self.groups,
        )
