"""GDN: a memory that fades, and in which a write replaces what its key recalls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from zoo_kernels.norm import l2_norm
from zoo_kernels.packing import Packing
from zoo_layers.init import Linear
from zoo_layers.memory import MemoryMixer, decay, log_rate, step_bias, wide
from zoo_layers.mixer import MixerCache, MixerSpec, option, register, settled
from zoo_layers.norm import GatedRMSNorm
from zoo_layers.sizes import check_memory, check_multiple, open_head_dim


@register("GDN")
@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetSpec(MixerSpec):
    """Gated DeltaNet: the delta rule with a decay per head, short convolution, output gate.

    Source: Yang et al. 2024, arXiv:2412.06464; negative eigenvalues: Grazzi et al. 2024, arXiv:2411.12537.
    """

    heads: int | None = option(None, "query and key heads; open: 0.75 * d_model / head_dim, rounded", at_least=1)
    value_heads: int | None = option(None, "value heads, a multiple of heads; open: as many", at_least=1)
    head_dim: int | None = option(None, "size of a key head; open: a divisor of d_model up to 128", at_least=1)
    expand_v: int = option(2, "size of a value head, in key heads", at_least=1)
    conv: int = option(4, "taps of the short convolution on q, k, v; 0: none", at_least=0, at_most=8)
    negative_eigenvalues: bool = option(False, "write strength in (0, 2) instead of (0, 1)")

    def resolve(self, d_model: int) -> Self:
        head_dim = self.head_dim or open_head_dim(d_model)
        heads = self.heads or max(1, round(0.75 * d_model / head_dim))
        value_heads = self.value_heads or heads
        check_multiple("value_heads", value_heads, "heads", heads)
        check_memory("head_dim", head_dim, "expand_v", head_dim * self.expand_v)
        return self.with_(heads=heads, value_heads=value_heads, head_dim=head_dim)

    def module(self, d_model: int) -> GatedDeltaNet:
        return GatedDeltaNet(self, d_model)


class GatedDeltaNet(MemoryMixer):
    """See :class:`GatedDeltaNetSpec`; ``A_log`` and ``dt_bias`` [HV] set each head's decay as in Mamba-2."""

    FLOAT32 = ("A_log", "dt_bias")
    DECAYS, ERASES = True, True

    spec: GatedDeltaNetSpec

    def __init__(self, spec: GatedDeltaNetSpec, d_model: int):
        heads, value_heads, head_dim = settled(spec.heads), settled(spec.value_heads), settled(spec.head_dim)
        value_dim = head_dim * spec.expand_v
        super().__init__(heads=heads, head_dim=head_dim, value_heads=value_heads, value_dim=value_dim, conv=spec.conv)
        self.spec = spec
        self.to_qkv = Linear(d_model, 2 * self.keys + self.values)
        self.to_gates = Linear(d_model, self.values + 2 * value_heads)  # output gate, decay, write strength
        self.A_log = nn.Parameter(torch.empty(value_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(value_heads, dtype=torch.float32))
        self.norm = GatedRMSNorm(value_dim)
        self.to_out = Linear(self.values, d_model)

    def reset_parameters(self) -> None:
        """Rates from U(0, 16), kept off 0, where a head would neither fade nor learn to; steps as in Mamba-2."""
        log_rate(self.A_log, 0.01, 16.0)
        step_bias(self.dt_bias)

    def forward(self, x: Tensor, cache: MixerCache | None = None, packing: Packing | None = None) -> Tensor:
        if cache is not None:
            cache.admit(x, packing)
        qk, v = self.split(self.convolve(self.to_qkv(x), cache, packing, silu=True))
        q, k = l2_norm(qk).chunk(2, dim=-2)  # each [B, T, H, K]; v [B, T, HV, V]
        gate, steps, write = self.to_gates(x).split([self.values, self.value_heads, self.value_heads], dim=-1)
        beta = wide(write).sigmoid()
        if self.spec.negative_eigenvalues:
            beta = 2 * beta
        y = self.remember(q, k, v, cache, packing, log_decay=decay(steps, self.A_log, self.dt_bias), beta=beta)
        return self.to_out(self.norm(y, gate.unflatten(-1, (self.value_heads, -1))).flatten(-2))
