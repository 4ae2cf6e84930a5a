"""RET: a memory that fades at a constant rate, slower in each further head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from zoo_kernels.packing import Packing
from zoo_kernels.rotary import rotary
from zoo_layers import init
from zoo_layers.init import Linear
from zoo_layers.memory import MemoryMixer
from zoo_layers.mixer import MixerCache, MixerSpec, option, register, settled
from zoo_layers.norm import GatedRMSNorm
from zoo_layers.rope import check_turned, positions
from zoo_layers.sizes import check_memory, settle_heads


@register("RET")
@dataclass(frozen=True, kw_only=True)
class RetNetSpec(MixerSpec):
    """RetNet's retention: constant decay 1 - 2^-(5 + h) in head h, rotary positions, output gate.

    Source: Sun et al. 2023, arXiv:2307.08621, without xPos scaling.
    """

    heads: int | None = option(None, "heads; open: d_model // head_dim", at_least=1)
    head_dim: int | None = option(None, "size of a key head; open: d_model / heads, or a divisor up to 128", at_least=1)
    expand_v: int = option(2, "size of a value head, in key heads", at_least=1)
    rope: bool = option(True, "rotary positions on queries and keys")
    rope_theta: float = option(10000.0, "base of the rotary frequencies", at_least=1)

    def resolve(self, d_model: int) -> Self:
        heads, head_dim = settle_heads(self.heads, self.head_dim, d_model, even=self.rope)
        check_memory("head_dim", head_dim, "expand_v", head_dim * self.expand_v)
        check_turned(self, head_dim)
        return self.with_(heads=heads, head_dim=head_dim)

    def module(self, d_model: int) -> RetNet:
        return RetNet(self, d_model)


class RetNet(MemoryMixer):
    """See :class:`RetNetSpec`; ``log_decay`` [H] is a buffer: it is never trained, and not part of a checkpoint."""

    FLOAT32 = ("log_decay",)
    DECAYS, ERASES = True, False

    log_decay: Tensor
    spec: RetNetSpec

    def __init__(self, spec: RetNetSpec, d_model: int):
        heads, head_dim = settled(spec.heads), settled(spec.head_dim)
        value_dim = head_dim * spec.expand_v
        super().__init__(heads=heads, head_dim=head_dim, value_heads=heads, value_dim=value_dim)
        self.spec = spec
        self.to_qkv = Linear(d_model, 2 * self.keys + self.values)
        self.to_gate = Linear(d_model, self.values)
        self.register_buffer("log_decay", torch.empty(heads, dtype=torch.float32), persistent=False)
        self.norm = GatedRMSNorm(value_dim)
        self.to_out = Linear(self.values, d_model)

    def reset_parameters(self) -> None:
        """Head h keeps 1 - 2^-(5 + h) of the memory per token."""
        lost = 2.0 ** -(5.0 + torch.arange(self.heads, dtype=torch.float64, device="cpu"))
        init.fill(self.log_decay, torch.log1p(-lost).float())

    def forward(self, x: Tensor, cache: MixerCache | None = None, packing: Packing | None = None) -> Tensor:
        if cache is not None:
            cache.admit(x, packing)
        qk, v = self.split(self.to_qkv(x))  # [B, T, 2H, K], [B, T, H, V]
        if self.spec.rope:
            qk = rotary(qk, positions(x, cache, packing), theta=self.spec.rope_theta)
        q, k = qk.chunk(2, dim=-2)
        y = self.remember(q, k, v, cache, packing, log_decay=self.log_decay)
        return self.to_out(self.norm(y, self.to_gate(x).unflatten(-1, (self.heads, -1))).flatten(-2))
