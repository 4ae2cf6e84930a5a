"""M1: Mamba's selective state space: every channel keeps a small state whose numbers fade at rates of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo_kernels.delta.step import decodes
from zoo_kernels.packing import Packing
from zoo_kernels.selective import selective_scan, selective_step
from zoo_layers import init
from zoo_layers.init import Linear
from zoo_layers.memory import ShortConv, step_bias, wide
from zoo_layers.mixer import MixerCache, MixerSpec, TokenMixer, option, register, settled
from zoo_layers.mlp import linear_flops


@register("M1")
@dataclass(frozen=True, kw_only=True)
class Mamba1Spec(MixerSpec):
    """Mamba: a state space with a decay per channel and state, short convolution, skip, SiLU gate.

    Source: Gu and Dao 2023, arXiv:2312.00752.
    """

    expand: int = option(2, "inner width, in widths of the model", at_least=1)
    state: int = option(16, "size of the state per channel", at_least=1, at_most=256)
    conv: int = option(4, "taps of the short convolution on x", at_least=1, at_most=8)
    dt_rank: int | None = option(
        None, "inner width of the steps' projection; open: d_model / 16, rounded up", at_least=1
    )

    def resolve(self, d_model: int) -> Self:
        return self.with_(dt_rank=self.dt_rank or -(-d_model // 16))

    def module(self, d_model: int) -> Mamba1:
        return Mamba1(self, d_model)


class StepLinear(Linear):
    """From the steps' inner layer to the channels: starts from U(-1, 1) / sqrt(rank), which keeps their variance."""

    def reset_parameters(self) -> None:
        if self.weight.is_meta:
            return
        bound = self.in_features**-0.5
        init.uniform(self.weight, -bound, bound)


class Mamba1(TokenMixer):
    """See :class:`Mamba1Spec`. ``A_log`` is [channels, state]; ``dt_bias`` and the skip ``D`` are [channels]."""

    FLOAT32 = ("A_log", "dt_bias", "D")

    spec: Mamba1Spec

    def __init__(self, spec: Mamba1Spec, d_model: int):
        super().__init__()
        self.spec = spec
        self.inner, rank = spec.expand * d_model, settled(spec.dt_rank)
        self.parts = [rank, spec.state, spec.state]  # the steps' inner layer; B, C
        self.to_inner = Linear(d_model, 2 * self.inner)
        self.conv = ShortConv(self.inner, spec.conv, bias=True)
        self.to_selection = Linear(self.inner, sum(self.parts))
        self.to_steps = StepLinear(rank, self.inner)
        self.A_log = nn.Parameter(torch.empty(self.inner, spec.state, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(self.inner, dtype=torch.float32))
        self.D = nn.Parameter(torch.empty(self.inner, dtype=torch.float32))
        self.to_out = Linear(self.inner, d_model)

    def reset_parameters(self) -> None:
        """Rates 1, 2, .. up to the state's size in every channel, steps log-uniform in [1e-3, 1e-1], skip 1."""
        rates = torch.arange(1, self.spec.state + 1, dtype=torch.float32)
        init.fill(self.A_log, rates.log().repeat(self.inner, 1))
        step_bias(self.dt_bias)
        init.constant(self.D, 1.0)

    def forward(self, x: Tensor, cache: MixerCache | None = None, packing: Packing | None = None) -> Tensor:
        if cache is not None:
            cache.admit(x, packing)
        inner, gate = self.to_inner(x).chunk(2, dim=-1)  # each [B, T, channels]
        inner = self.conv(inner, cache, packing, silu=True)
        steps, b, c = self.to_selection(inner).split(self.parts, dim=-1)  # b, c [B, T, state]
        dt = F.softplus(wide(self.to_steps(steps)) + wide(self.dt_bias))  # [B, T, channels]
        y = self._scan(inner, dt, b.to(inner.dtype), c.to(inner.dtype), cache, packing)
        return self.to_out(y * F.silu(gate))

    def _scan(
        self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, cache: MixerCache | None, packing: Packing | None
    ) -> Tensor:
        """Run the scan from the cache's state and leave the last one there; called last. y [B, T, channels]."""
        rates, skip = -wide(self.A_log).exp(), wide(self.D)
        if cache is None:
            return selective_scan(x, dt, rates, b, c, skip, packing=packing, return_state=False)
        if not cache.fresh and packing is None and decodes(x, dt, rates, b, c, skip):
            y = selective_step(x, dt, rates, b, c, cache["state"], skip)  # in place
            cache.advance(x.shape[1])
            return y
        before = None if cache.fresh else cache["state"]
        y, state = selective_scan(x, dt, rates, b, c, skip, initial_state=before, packing=packing)
        cache.put("state", state)
        cache.advance(x.shape[1] if packing is None else packing)
        return y

    def new_cache(self, batch: int, context: int, *, dtype: torch.dtype, device: torch.device | str) -> MixerCache:
        """An empty cache; its size does not depend on ``context``."""
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        state = torch.zeros(batch, self.spec.state, self.inner, dtype=exact, device=device)
        conv = torch.zeros(batch, self.spec.conv - 1, self.inner, dtype=dtype, device=device)
        return MixerCache({"state": state, "conv": conv})

    def state_bytes(self, context: int) -> int:
        """The state in fp32 and the convolution's tail in bf16, whatever ``context`` is."""
        return 4 * self.inner * self.spec.state + 2 * (self.spec.conv - 1) * self.inner

    def flops_per_token(self, context: int) -> float:
        """Projections, convolution, and 7 per number of the state: 2 to read it, 5 to build its decay and its input."""
        return linear_flops(self) + 2 * self.conv.weight.numel() + 7 * self.inner * self.spec.state
