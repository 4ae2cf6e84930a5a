"""One call of the delta rule, checked: what backends are asked about, and what they compute."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo_kernels.device import constant
from zoo_kernels.packing import Packing


@dataclass(frozen=True)
class DeltaCall:
    """The arguments of :func:`zoo_kernels.delta.delta_rule` after its checks; shapes as there.

    ``log_decay`` may still be a constant [HV], so that a backend can make use of it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    beta: Tensor | None
    initial_state: Tensor | None
    packing: Packing | None
    scale: float
    chunk: int | None

    @property
    def sequences(self) -> int:
        """N: documents of the packing, or rows of the batch."""
        return self.v.shape[0] if self.packing is None else self.packing.documents

    @property
    def group(self) -> int:
        """Value heads that share one key head."""
        return self.v.shape[2] // self.k.shape[2]

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """[N, HV, K, V]."""
        return self.sequences, self.v.shape[2], self.k.shape[3], self.v.shape[3]

    @property
    def learns(self) -> bool:
        """Whether a backward may follow."""
        inputs = (self.q, self.k, self.v, self.log_decay, self.beta, self.initial_state)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)

    @property
    def compute_dtype(self) -> torch.dtype:
        """fp32, or float64 for float64 inputs: the dtype of states and of everything inside."""
        return torch.float64 if self.v.dtype == torch.float64 else torch.float32

    def gates(self) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """log_decay [B, T, HV, K or 1], beta [B, T, HV, 1] and the first state [N, HV, K, V], in the compute dtype."""
        log_decay, beta, state = self.log_decay, self.beta, self.initial_state
        if log_decay is not None:
            # Cast before it is spread, so that the gradient of a constant is summed in this dtype.
            log_decay = log_decay.to(self.compute_dtype)
            if log_decay.dim() < 4:
                log_decay = log_decay.expand(self.v.shape[:3]).unsqueeze(-1)
        if beta is not None:
            beta = beta.to(self.compute_dtype).unsqueeze(-1)
        if state is None:
            state = torch.zeros(self.state_shape, dtype=self.compute_dtype, device=self.v.device)
        return log_decay, beta, state


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Inside, products keep the dtype of their operands."""
    if _autocasts(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


@constant
def _autocasts(kind: str) -> bool:
    """Whether there is autocast for a kind of device; torch 2.11 cannot trace the question."""
    return torch.amp.is_autocast_available(kind)
