"""M2: Mamba-2's selective state space: a memory that fades by as much as it takes in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo_kernels.packing import Packing
from zoo_kernels.scale import scale_rows
from zoo_layers import init
from zoo_layers.init import Linear
from zoo_layers.memory import MemoryMixer, log_rate, step_bias, wide
from zoo_layers.mixer import MixerCache, MixerSpec, option, register, settled
from zoo_layers.norm import GatedRMSNorm
from zoo_layers.sizes import check_divides, check_memory, largest_divisor


@register("M2")
@dataclass(frozen=True, kw_only=True)
class Mamba2Spec(MixerSpec):
    """Mamba-2: a state space with one decay per head, short convolution, skip, gated norm.

    Source: Dao and Gu 2024, arXiv:2405.21060.
    """

    expand: int = option(2, "inner width, in widths of the model", at_least=1)
    head_dim: int | None = option(None, "size of a head; open: a divisor of the inner width up to 64", at_least=1)
    state: int = option(128, "size of the state per channel", at_least=1)
    groups: int = option(1, "groups of heads that share B and C, a divisor of the heads", at_least=1)
    conv: int = option(4, "taps of the short convolution on x, B, C", at_least=1, at_most=8)

    def resolve(self, d_model: int) -> Self:
        inner = self.expand * d_model
        head_dim = self.head_dim or settled(largest_divisor(inner, 64))
        check_divides("head_dim", head_dim, "expand * d_model", inner)
        check_divides("groups", self.groups, "the number of heads", inner // head_dim)
        check_memory("state", self.state, "head_dim", head_dim)
        return self.with_(head_dim=head_dim)

    def module(self, d_model: int) -> Mamba2:
        return Mamba2(self, d_model)


class Mamba2(MemoryMixer):
    """See :class:`Mamba2Spec`. In the family's words: q = C, k = B, v = dt * x, log_decay = dt * A.

    ``A_log``, ``dt_bias`` and the skip ``D`` are [heads].
    """

    FLOAT32 = ("A_log", "dt_bias", "D")
    DECAYS, ERASES = True, False

    spec: Mamba2Spec

    def __init__(self, spec: Mamba2Spec, d_model: int):
        head_dim, inner, bc = settled(spec.head_dim), spec.expand * d_model, spec.groups * spec.state
        super().__init__(
            heads=spec.groups,
            head_dim=spec.state,
            value_heads=inner // head_dim,
            value_dim=head_dim,
            conv=spec.conv,
            conv_channels=inner + 2 * bc,
            conv_bias=True,
        )
        self.spec = spec
        self.parts = [inner, inner + 2 * bc, self.value_heads]  # output gate; x, B, C; dt
        self.to_inner = Linear(d_model, sum(self.parts))
        self.A_log = nn.Parameter(torch.empty(self.value_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads, dtype=torch.float32))
        self.D = nn.Parameter(torch.empty(self.value_heads, dtype=torch.float32))
        self.norm = GatedRMSNorm(inner, gate_first=True, groups=spec.groups)
        self.to_out = Linear(inner, d_model)

    def reset_parameters(self) -> None:
        """Rates from U(1, 16), steps log-uniform in [1e-3, 1e-1], skip 1."""
        log_rate(self.A_log, 1.0, 16.0)
        step_bias(self.dt_bias)
        init.constant(self.D, 1.0)

    def forward(self, x: Tensor, cache: MixerCache | None = None, packing: Packing | None = None) -> Tensor:
        if cache is not None:
            cache.admit(x, packing)
        gate, xbc, steps = self.to_inner(x).split(self.parts, dim=-1)
        inner, b, c = self.convolve(xbc, cache, packing, silu=True).split([self.values, self.keys, self.keys], dim=-1)
        b, c = (t.unflatten(-1, (self.heads, -1)) for t in (b, c))  # each [B, T, groups, state]
        inner = inner.unflatten(-1, (self.value_heads, -1))  # [B, T, heads, head_dim]
        dt = F.softplus(wide(steps) + wide(self.dt_bias))  # [B, T, heads]
        v = scale_rows(inner, dt)
        y = self.remember(c, b, v, cache, packing, log_decay=-dt * wide(self.A_log).exp(), scale=1.0)
        y = scale_rows(inner, wide(self.D), add=y)
        return self.to_out(self.norm(y.flatten(-2), gate))
