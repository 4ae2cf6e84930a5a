"""LA: a memory to which every token adds; nothing fades, nothing is replaced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from zoo_kernels.packing import Packing
from zoo_layers.init import Linear
from zoo_layers.memory import FEATURE_MAPS, QK_NORMS, MemoryMixer
from zoo_layers.mixer import MixerCache, MixerSpec, option, register, settled
from zoo_layers.norm import GatedRMSNorm
from zoo_layers.sizes import check_memory, settle_heads


@register("LA")
@dataclass(frozen=True, kw_only=True)
class LinearAttentionSpec(MixerSpec):
    """Linear attention: a sum of key-value products, read by the query; no normaliser.

    Source: Katharopoulos et al. 2020, arXiv:2006.16236; without the normaliser: Qin et al. 2022, arXiv:2210.10340.
    """

    heads: int | None = option(None, "heads; open: d_model // head_dim", at_least=1)
    head_dim: int | None = option(None, "size of a key head; open: d_model / heads, or a divisor up to 128", at_least=1)
    expand_v: int = option(1, "size of a value head, in key heads", at_least=1)
    conv: int = option(0, "taps of the short convolution on q, k, v, with SiLU on v; 0: none", at_least=0, at_most=8)
    feature_map: str = option("none", "map of q and k", choices=tuple(FEATURE_MAPS))
    qk_norm: str = option("none", "what makes q and k one long", choices=tuple(QK_NORMS))
    output_gate: bool = option(False, "RMSNorm and a SiLU gate per channel on the output")

    def resolve(self, d_model: int) -> Self:
        heads, head_dim = settle_heads(self.heads, self.head_dim, d_model)
        check_memory("head_dim", head_dim, "expand_v", head_dim * self.expand_v)
        return self.with_(heads=heads, head_dim=head_dim)

    def module(self, d_model: int) -> LinearAttention:
        return LinearAttention(self, d_model)


class LinearAttention(MemoryMixer):
    """See :class:`LinearAttentionSpec`."""

    DECAYS, ERASES = False, False

    spec: LinearAttentionSpec

    def __init__(self, spec: LinearAttentionSpec, d_model: int):
        heads, head_dim = settled(spec.heads), settled(spec.head_dim)
        value_dim = head_dim * spec.expand_v
        super().__init__(heads=heads, head_dim=head_dim, value_heads=heads, value_dim=value_dim, conv=spec.conv)
        self.spec = spec
        self.to_qkv = Linear(d_model, 2 * self.keys + self.values)
        self.to_gate = Linear(d_model, self.values) if spec.output_gate else None
        self.norm = GatedRMSNorm(value_dim) if spec.output_gate else None
        self.to_out = Linear(self.values, d_model)

    def forward(self, x: Tensor, cache: MixerCache | None = None, packing: Packing | None = None) -> Tensor:
        if cache is not None:
            cache.admit(x, packing)
        silu_v = self.conv is not None
        q, k, v = self.mapped(self.to_qkv(x), cache, packing, self.spec.feature_map, self.spec.qk_norm, silu_v=silu_v)
        y = self.remember(q, k, v, cache, packing)  # [B, T, H, V]
        if self.to_gate is not None and self.norm is not None:
            y = self.norm(y, self.to_gate(x).unflatten(-1, (self.heads, -1)))
        return self.to_out(y.flatten(-2))
