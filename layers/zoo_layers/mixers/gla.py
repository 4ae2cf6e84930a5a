"""GLA: a memory in which every key channel fades at a rate of its own, read from the token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor
from torch.nn import functional as F

from zoo_kernels.packing import Packing
from zoo_layers.init import Linear
from zoo_layers.memory import MemoryMixer, wide
from zoo_layers.mixer import MixerCache, MixerSpec, option, register, settled
from zoo_layers.norm import GatedRMSNorm
from zoo_layers.sizes import check_divides, check_memory, open_head_dim


@register("GLA")
@dataclass(frozen=True, kw_only=True)
class GatedLinearAttentionSpec(MixerSpec):
    """Gated linear attention: a decay per key channel from a low-rank gate, output gate.

    Keys are half as wide as the model, values as wide: the paper's expand_k 0.5 and expand_v 1, taken of the width.

    Source: Yang et al. 2023, arXiv:2312.06635.
    """

    heads: int | None = option(None, "heads; open: d_model / 2 / head_dim", at_least=1)
    head_dim: int | None = option(
        None, "size of a key head; open: d_model / 2 / heads, or a divisor up to 128", at_least=1
    )
    expand_v: int = option(2, "size of a value head, in key heads", at_least=1)
    conv: int = option(0, "taps of the short convolution on q, k, v, with SiLU; 0: none", at_least=0, at_most=8)
    gate_rank: int = option(16, "inner width of the decay's projection", at_least=1)
    gate_normalizer: float = option(16.0, "the log decay is divided by this, so that little fades at first", at_least=1)

    def resolve(self, d_model: int) -> Self:
        heads, head_dim = self.heads, self.head_dim
        if heads is None:
            head_dim = head_dim or open_head_dim(d_model)
            heads = max(1, d_model // (2 * head_dim))
        elif head_dim is None:
            check_divides("heads", heads, "half of d_model", d_model // 2)
            head_dim = d_model // 2 // heads
        check_memory("head_dim", head_dim, "expand_v", head_dim * self.expand_v)
        return self.with_(heads=heads, head_dim=head_dim)

    def module(self, d_model: int) -> GatedLinearAttention:
        return GatedLinearAttention(self, d_model)


class GatedLinearAttention(MemoryMixer):
    """See :class:`GatedLinearAttentionSpec`."""

    DECAYS, ERASES = True, False

    spec: GatedLinearAttentionSpec

    def __init__(self, spec: GatedLinearAttentionSpec, d_model: int):
        heads, head_dim = settled(spec.heads), settled(spec.head_dim)
        value_dim = head_dim * spec.expand_v
        super().__init__(heads=heads, head_dim=head_dim, value_heads=heads, value_dim=value_dim, conv=spec.conv)
        self.spec = spec
        self.to_qkv = Linear(d_model, 2 * self.keys + self.values)
        self.to_gates = Linear(d_model, self.values + spec.gate_rank)  # output gate, decay's inner layer
        self.to_decay = Linear(spec.gate_rank, self.keys, bias=True)
        self.norm = GatedRMSNorm(value_dim)
        self.to_out = Linear(self.values, d_model)

    def forward(self, x: Tensor, cache: MixerCache | None = None, packing: Packing | None = None) -> Tensor:
        if cache is not None:
            cache.admit(x, packing)
        qk, v = self.split(self.convolve(self.to_qkv(x), cache, packing, silu=self.conv is not None))
        q, k = qk.chunk(2, dim=-2)  # each [B, T, H, K]; v [B, T, H, V]
        gate, inner = self.to_gates(x).split([self.values, self.spec.gate_rank], dim=-1)
        log_decay = F.logsigmoid(wide(self.to_decay(inner))) / self.spec.gate_normalizer
        y = self.remember(q, k, v, cache, packing, log_decay=log_decay.unflatten(-1, (self.heads, -1)))
        return self.to_out(self.norm(y, gate.unflatten(-1, (self.heads, -1))).flatten(-2))
