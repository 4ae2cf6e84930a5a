"""What all mixers with a [K, V] memory share: convolution, feature maps, decay parameters, cache, counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo_kernels.conv import short_conv
from zoo_kernels.delta import delta_rule, delta_step
from zoo_kernels.delta.step import decodes
from zoo_kernels.norm import l1_norm, l2_norm
from zoo_kernels.packing import Packing
from zoo_layers import init
from zoo_layers.mixer import MixerCache, TokenMixer
from zoo_layers.mlp import linear_flops

FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "elu1": lambda x: F.elu(x) + 1,
    "none": lambda x: x,
}
QK_NORMS: dict[str, Callable[[Tensor], Tensor]] = {"l2": l2_norm, "l1": l1_norm, "none": lambda x: x}

# Mamba-2's step size: log-uniform in this range, and never below the floor.
DT_RANGE, DT_FLOOR = (1e-3, 1e-1), 1e-4


def wide(x: Tensor) -> Tensor:
    """``x`` in fp32, or float64 as it is: what gates and decays are computed in, in every precision mode."""
    return x if x.dtype == torch.float64 else x.float()


def log_rate(parameter: Tensor, low: float, high: float) -> None:
    """Fill with the logarithm of U(low, high): decay rates, kept positive by the exponential that reads them."""
    rates = torch.rand(parameter.shape, device="cpu", dtype=torch.float32) * (high - low) + low
    init.fill(parameter, rates.log())


def step_bias(parameter: Tensor) -> None:
    """Fill so that softplus of it is a step size log-uniform in [1e-3, 1e-1], floor 1e-4.

    Source: Dao and Gu 2024, arXiv:2405.21060.
    """
    low, high = (math.log(bound) for bound in DT_RANGE)
    exponent = torch.rand(parameter.shape, device="cpu", dtype=torch.float32) * (high - low) + low
    step = exponent.exp().clamp(min=DT_FLOOR)
    # The inverse of softplus, in the form that does not overflow.
    init.fill(parameter, step + torch.log(-torch.expm1(-step)))


def decay(steps: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Mamba-2's log decay, ``-exp(a_log) * softplus(steps + dt_bias)``, in fp32; shapes broadcast."""
    return -wide(a_log).exp() * F.softplus(wide(steps) + wide(dt_bias))


class ShortConv(nn.Module):
    """A causal convolution over the last few tokens, each channel for itself.

    Args:
        channels: C.
        taps: tokens that one output sees, its own included.
        bias: whether each channel has one.
    """

    def __init__(self, channels: int, taps: int, *, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, taps))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def reset_parameters(self) -> None:
        """Weights from U(-1, 1) / sqrt(taps), biases 0."""
        bound = self.weight.shape[1] ** -0.5
        init.uniform(self.weight, -bound, bound)
        if self.bias is not None:
            init.constant(self.bias, 0.0)

    def forward(self, x: Tensor, cache: MixerCache | None, packing: Packing | None, *, silu: bool) -> Tensor:
        """x [B, T, C] -> the same; the last inputs go into ``cache["conv"]``."""
        before = None if cache is None or cache.fresh else cache["conv"].to(x.dtype)
        y, tail = short_conv(
            x,
            self.weight,
            bias=self.bias,
            initial_state=before,
            packing=packing,
            activation="silu" if silu else None,
        )
        if cache is not None:
            cache.put("conv", tail)
        return y


class MemoryMixer(TokenMixer):
    """A mixer whose past is one [K, V] memory per value head, rewritten by ``delta_rule``.

    A subclass says in two class attributes what its rule does, builds its layers, and calls :meth:`remember` once.

    Args:
        heads, head_dim: query and key heads, and their size K.
        value_heads, value_dim: value heads, a multiple of ``heads``, and their size V.
        conv: taps of the short convolution. 0: none.
        conv_channels: what it runs over. None: queries, keys and values.
        conv_bias: whether it has a bias.
    """

    DECAYS: ClassVar[bool]  # whether the memory fades
    ERASES: ClassVar[bool]  # whether a write replaces what its key recalls

    def __init__(
        self,
        *,
        heads: int,
        head_dim: int,
        value_heads: int,
        value_dim: int,
        conv: int = 0,
        conv_channels: int | None = None,
        conv_bias: bool = False,
    ):
        super().__init__()
        self.heads, self.head_dim, self.value_heads, self.value_dim = heads, head_dim, value_heads, value_dim
        self.keys, self.values = heads * head_dim, value_heads * value_dim
        self.conv = ShortConv(conv_channels or 2 * self.keys + self.values, conv, bias=conv_bias) if conv else None

    def convolve(self, x: Tensor, cache: MixerCache | None, packing: Packing | None, *, silu: bool) -> Tensor:
        """The short convolution where there is one, then SiLU where asked for: x [B, T, C] -> the same."""
        if self.conv is not None:
            return self.conv(x, cache, packing, silu=silu)
        return F.silu(x) if silu else x

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, 2K' + V'] -> queries and keys side by side [B, T, 2H, K], values [B, T, HV, V]."""
        qk, v = qkv.split([2 * self.keys, self.values], dim=-1)
        return qk.unflatten(-1, (2 * self.heads, self.head_dim)), v.unflatten(-1, (self.value_heads, self.value_dim))

    def mapped(
        self,
        qkv: Tensor,
        cache: MixerCache | None,
        packing: Packing | None,
        feature_map: str,
        norm: str,
        *,
        silu_v: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Convolution, feature map and norm of q and k, SiLU of v: -> q, k [B, T, H, K], v [B, T, HV, V]."""
        whole = silu_v and feature_map == "silu"  # one activation for all three: left to the convolution
        qk, v = self.split(self.convolve(qkv, cache, packing, silu=whole))
        if not whole:
            qk, v = FEATURE_MAPS[feature_map](qk), F.silu(v) if silu_v else v
        q, k = QK_NORMS[norm](qk).chunk(2, dim=-2)
        return q, k, v

    def remember(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: MixerCache | None,
        packing: Packing | None,
        *,
        log_decay: Tensor | None = None,
        beta: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Run ``delta_rule`` from the cache's memory and leave the last one there; called last. y [B, T, HV, V]."""
        if cache is not None and not cache.fresh and packing is None and decodes(q, k, v, log_decay, beta):
            y = delta_step(q, k, v, cache["state"], log_decay=log_decay, beta=beta, scale=scale)  # in place
            cache.advance(q.shape[1])
            return y
        before = None if cache is None or cache.fresh else cache["state"]
        y, state = delta_rule(
            q, k, v, log_decay=log_decay, beta=beta, initial_state=before, packing=packing, scale=scale
        )
        if cache is not None:
            cache.put("state", state)
            cache.advance(q.shape[1] if packing is None else packing)
        return y

    def new_cache(self, batch: int, context: int, *, dtype: torch.dtype, device: torch.device | str) -> MixerCache:
        """An empty cache; its size does not depend on ``context``."""
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        shape = (batch, self.value_heads, self.head_dim, self.value_dim)
        tensors = {"state": torch.zeros(shape, dtype=exact, device=device)}
        if self.conv is not None:
            channels, taps = self.conv.weight.shape
            tensors["conv"] = torch.zeros(batch, taps - 1, channels, dtype=dtype, device=device)
        return MixerCache(tensors)

    def state_bytes(self, context: int) -> int:
        """The memory in fp32 and the convolution's tail in bf16, whatever ``context`` is."""
        tail = 0 if self.conv is None else 2 * (self.conv.weight.shape[1] - 1) * self.conv.weight.shape[0]
        return 4 * self.value_heads * self.head_dim * self.value_dim + tail

    def flops_per_token(self, context: int) -> float:
        """Projections, convolution, and the recurrent form of the memory, whatever ``context`` is."""
        convolution = 0 if self.conv is None else 2 * self.conv.weight.numel()
        # Per state element: 2 to write, 2 to read, 2 to recall what is erased, 1 to fade.
        rule = (4 + 2 * self.ERASES + self.DECAYS) * self.value_heads * self.head_dim * self.value_dim
        return linear_flops(self) + convolution + rule
