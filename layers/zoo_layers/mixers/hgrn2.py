"""HGRN2: a memory whose forget gate is its key: a channel is written as far as it is let go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo_kernels.packing import Packing
from zoo_layers import init
from zoo_layers.init import Linear
from zoo_layers.memory import MemoryMixer, wide
from zoo_layers.mixer import MixerCache, MixerSpec, option, register, settled
from zoo_layers.norm import RMSNorm
from zoo_layers.sizes import check_divides, check_memory, largest_divisor, open_head_dim


@register("HGRN2")
@dataclass(frozen=True, kw_only=True)
class HGRN2Spec(MixerSpec):
    """HGRN2: a forget gate per key channel, and the key is what the gate lets go; values as wide as the model.

    The paper lifts the gates of all layers over floors that rise with depth, read from one table of the whole model.
    Here a layer has no floor, or one of its own: ``lower_bound``.

    Source: Qin et al. 2024, arXiv:2404.07904.
    """

    heads: int | None = option(None, "heads, a divisor of d_model; open: about d_model / head_dim", at_least=1)
    head_dim: int | None = option(None, "size of a key head; open: d_model / heads, or a divisor up to 128", at_least=1)
    lower_bound: bool = option(False, "a learned floor under the forget gate of each channel, 1/2 at the start")

    def resolve(self, d_model: int) -> Self:
        heads, head_dim = self.heads, self.head_dim
        if heads is None:
            head_dim = head_dim or open_head_dim(d_model)
            heads = settled(largest_divisor(d_model, max(1, d_model // head_dim)))
        check_divides("heads", heads, "d_model", d_model)
        head_dim = head_dim or d_model // heads
        check_memory("head_dim", head_dim, "heads", d_model // heads)
        return self.with_(heads=heads, head_dim=head_dim)

    def module(self, d_model: int) -> HGRN2:
        return HGRN2(self, d_model)


class HGRN2(MemoryMixer):
    """See :class:`HGRN2Spec`; ``floor_bias`` [H K] holds the floors' logits, where there are any."""

    FLOAT32 = ("floor_bias",)
    DECAYS, ERASES = True, False

    spec: HGRN2Spec

    def __init__(self, spec: HGRN2Spec, d_model: int):
        heads, head_dim = settled(spec.heads), settled(spec.head_dim)
        super().__init__(heads=heads, head_dim=head_dim, value_heads=heads, value_dim=d_model // heads)
        self.spec = spec
        self.to_inner = Linear(d_model, 2 * self.keys + self.values)  # queries, forget gate, values
        floors = torch.empty(self.keys, dtype=torch.float32) if spec.lower_bound else None
        self.floor_bias = None if floors is None else nn.Parameter(floors)
        self.norm = RMSNorm(self.values)
        self.to_out = Linear(self.values, d_model)

    def reset_parameters(self) -> None:
        """Floors start at 1/2, the mean over the layers of the paper's table at its start."""
        if self.floor_bias is not None:
            init.constant(self.floor_bias, 0.0)

    def forward(self, x: Tensor, cache: MixerCache | None = None, packing: Packing | None = None) -> Tensor:
        if cache is not None:
            cache.admit(x, packing)
        q, forget, v = self.to_inner(x).split([self.keys, self.keys, self.values], dim=-1)
        log_decay, k = self.gates(wide(forget))
        q, k, log_decay = (each.unflatten(-1, (self.heads, -1)) for each in (F.silu(q), k.to(q.dtype), log_decay))
        y = self.remember(q, k, v.unflatten(-1, (self.heads, -1)), cache, packing, log_decay=log_decay)
        return self.to_out(self.norm(y.flatten(-2)))

    def gates(self, forget: Tensor) -> tuple[Tensor, Tensor]:
        """The gate's logarithm, and the key, which is 1 - gate; each [..., H K], as ``forget``, its logits."""
        # The key is never 1 - exp(log decay), which would lose the slow channels' digits.
        log_decay, k = F.logsigmoid(forget), torch.sigmoid(-forget)
        if self.floor_bias is None:
            return log_decay, k
        floor = wide(self.floor_bias)  # gate = floor + (1 - floor) * sigmoid(forget)
        above = F.logsigmoid(-floor)
        # An open gate is 1, which the sum of its two parts may exceed by rounding.
        return torch.logaddexp(F.logsigmoid(floor), above + log_decay).clamp(max=0.0), above.exp() * k
