"""KDA: Gated DeltaNet with a decay for every key channel."""

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
from zoo_layers.sizes import check_memory, check_multiple, settle_heads


@register("KDA")
@dataclass(frozen=True, kw_only=True)
class KimiDeltaSpec(MixerSpec):
    """Kimi Delta Attention: the delta rule with a decay per key channel, low-rank gates, sigmoid output gate.

    Source: Kimi Linear 2025, arXiv:2510.26692.
    """

    heads: int | None = option(None, "query and key heads; open: d_model // head_dim", at_least=1)
    value_heads: int | None = option(None, "value heads, a multiple of heads; open: as many", at_least=1)
    head_dim: int | None = option(None, "size of a key head; open: d_model / heads, or a divisor up to 128", at_least=1)
    expand_v: int = option(1, "size of a value head, in key heads", at_least=1)
    conv: int = option(4, "taps of the short convolution on q, k, v; 0: none", at_least=0, at_most=8)
    gate_rank: int | None = option(None, "inner width of decay and output gate; open: size of a value head", at_least=1)
    negative_eigenvalues: bool = option(False, "write strength in (0, 2) instead of (0, 1)")

    def resolve(self, d_model: int) -> Self:
        heads, head_dim = settle_heads(self.heads, self.head_dim, d_model)
        value_heads = self.value_heads or heads
        check_multiple("value_heads", value_heads, "heads", heads)
        check_memory("head_dim", head_dim, "expand_v", head_dim * self.expand_v)
        rank = self.gate_rank or head_dim * self.expand_v
        return self.with_(heads=heads, value_heads=value_heads, head_dim=head_dim, gate_rank=rank)

    def module(self, d_model: int) -> KimiDelta:
        return KimiDelta(self, d_model)


class KimiDelta(MemoryMixer):
    """See :class:`KimiDeltaSpec`; ``A_log`` [HV] and ``dt_bias`` [HV, K] set the decays."""

    FLOAT32 = ("A_log", "dt_bias")
    DECAYS, ERASES = True, True

    spec: KimiDeltaSpec

    def __init__(self, spec: KimiDeltaSpec, d_model: int):
        heads, value_heads, head_dim = settled(spec.heads), settled(spec.value_heads), settled(spec.head_dim)
        value_dim = head_dim * spec.expand_v
        super().__init__(heads=heads, head_dim=head_dim, value_heads=value_heads, value_dim=value_dim, conv=spec.conv)
        self.spec, self.rank = spec, settled(spec.gate_rank)
        self.to_qkv = Linear(d_model, 2 * self.keys + self.values)
        self.to_inner = Linear(d_model, 2 * self.rank + value_heads)  # of decay, of output gate; write strength
        self.to_decay = Linear(self.rank, value_heads * head_dim)
        self.to_gate = Linear(self.rank, self.values, bias=True)
        self.A_log = nn.Parameter(torch.empty(value_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(value_heads, head_dim, dtype=torch.float32))
        self.norm = GatedRMSNorm(value_dim, activation="sigmoid")
        self.to_out = Linear(self.values, d_model)

    def reset_parameters(self) -> None:
        """Rates from U(1, 16); steps as in Mamba-2."""
        log_rate(self.A_log, 1.0, 16.0)
        step_bias(self.dt_bias)

    def forward(self, x: Tensor, cache: MixerCache | None = None, packing: Packing | None = None) -> Tensor:
        if cache is not None:
            cache.admit(x, packing)
        qk, v = self.split(self.convolve(self.to_qkv(x), cache, packing, silu=True))
        q, k = l2_norm(qk).chunk(2, dim=-2)  # each [B, T, H, K]; v [B, T, HV, V]
        inner_decay, inner_gate, write = self.to_inner(x).split([self.rank, self.rank, self.value_heads], dim=-1)
        steps = self.to_decay(inner_decay).unflatten(-1, (self.value_heads, -1))
        log_decay = decay(steps, self.A_log[:, None], self.dt_bias)  # [B, T, HV, K]
        beta = wide(write).sigmoid()
        if self.spec.negative_eigenvalues:
            beta = 2 * beta
        y = self.remember(q, k, v, cache, packing, log_decay=log_decay, beta=beta)
        return self.to_out(self.norm(y, self.to_gate(inner_gate).unflatten(-1, (self.value_heads, -1))).flatten(-2))
