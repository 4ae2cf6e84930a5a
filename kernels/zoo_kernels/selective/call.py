"""One call of the selective scan, checked: what backends are asked about, and what they compute."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zoo_kernels.packing import Packing

# Tokens between two states that the forward keeps for the backward, whatever the backend: 4 * K / 64 bytes per token
# and channel, half of what x takes in bf16 where K is 16.
SEGMENT = 64


@dataclass(frozen=True, eq=False)
class SelectiveCall:
    """The arguments of :func:`zoo_kernels.selective.selective_scan` after its checks; shapes as there."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    initial_state: Tensor | None
    packing: Packing | None

    @property
    def sequences(self) -> int:
        """N: documents of the packing, or rows of the batch."""
        return self.x.shape[0] if self.packing is None else self.packing.documents

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """[N, K, E]."""
        return self.sequences, self.A.shape[1], self.A.shape[0]

    @property
    def learns(self) -> bool:
        """Whether a backward may follow."""
        inputs = (self.x, self.dt, self.A, self.B, self.C, self.D, self.initial_state)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)

    @property
    def compute_dtype(self) -> torch.dtype:
        """fp32, or float64 for float64 inputs: the dtype of states and of everything inside."""
        return computed(self.x)


def computed(x: Tensor) -> torch.dtype:
    """The dtype in which a scan over ``x`` is computed."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
