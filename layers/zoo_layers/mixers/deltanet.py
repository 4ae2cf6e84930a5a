"""DN: a memory in which a write replaces what its key recalls; nothing fades."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from zoo_kernels.packing import Packing
from zoo_layers.init import Linear
from zoo_layers.memory import FEATURE_MAPS, QK_NORMS, MemoryMixer, wide
from zoo_layers.mixer import MixerCache, MixerSpec, option, register, settled
from zoo_layers.norm import GatedRMSNorm, RMSNorm
from zoo_layers.sizes import check_memory, settle_heads


@register("DN")
@dataclass(frozen=True, kw_only=True)
class DeltaNetSpec(MixerSpec):
    """DeltaNet: the delta rule without decay, on mapped and normalised queries and keys.

    Source: Yang et al. 2024, arXiv:2406.06484; negative eigenvalues: Grazzi et al. 2024, arXiv:2411.12537.
    """

    heads: int | None = option(None, "heads; open: d_model // head_dim", at_least=1)
    head_dim: int | None = option(None, "size of a key head; open: d_model / heads, or a divisor up to 128", at_least=1)
    expand_v: int = option(1, "size of a value head, in key heads", at_least=1)
    conv: int = option(4, "taps of the short convolution on q, k, v; 0: none", at_least=0, at_most=8)
    feature_map: str = option("silu", "map of q and k", choices=tuple(FEATURE_MAPS))
    qk_norm: str = option("l2", "what makes q and k one long; erasing wants l2", choices=tuple(QK_NORMS))
    output_gate: bool = option(False, "a SiLU gate per channel on the normed output")
    negative_eigenvalues: bool = option(False, "write strength in (0, 2) instead of (0, 1)")

    def resolve(self, d_model: int) -> Self:
        heads, head_dim = settle_heads(self.heads, self.head_dim, d_model)
        check_memory("head_dim", head_dim, "expand_v", head_dim * self.expand_v)
        return self.with_(heads=heads, head_dim=head_dim)

    def module(self, d_model: int) -> DeltaNet:
        return DeltaNet(self, d_model)


class DeltaNet(MemoryMixer):
    """See :class:`DeltaNetSpec`; values pass SiLU whatever the map of queries and keys is."""

    DECAYS, ERASES = False, True

    spec: DeltaNetSpec

    def __init__(self, spec: DeltaNetSpec, d_model: int):
        heads, head_dim = settled(spec.heads), settled(spec.head_dim)
        value_dim = head_dim * spec.expand_v
        super().__init__(heads=heads, head_dim=head_dim, value_heads=heads, value_dim=value_dim, conv=spec.conv)
        self.spec = spec
        self.to_qkv = Linear(d_model, 2 * self.keys + self.values)
        self.to_gates = Linear(d_model, heads + (self.values if spec.output_gate else 0))  # write strength, output gate
        self.norm = GatedRMSNorm(value_dim) if spec.output_gate else RMSNorm(value_dim)
        self.to_out = Linear(self.values, d_model)

    def forward(self, x: Tensor, cache: MixerCache | None = None, packing: Packing | None = None) -> Tensor:
        if cache is not None:
            cache.admit(x, packing)
        q, k, v = self.mapped(self.to_qkv(x), cache, packing, self.spec.feature_map, self.spec.qk_norm, silu_v=True)
        gates = self.to_gates(x)
        beta = wide(gates[..., : self.heads]).sigmoid()
        if self.spec.negative_eigenvalues:
            beta = 2 * beta
        y = self.remember(q, k, v, cache, packing, beta=beta)  # [B, T, H, V]
        if isinstance(self.norm, GatedRMSNorm):
            y = self.norm(y, gates[..., self.heads :].unflatten(-1, (self.heads, -1)))
        else:
            y = self.norm(y)
        return self.to_out(y.flatten(-2))
