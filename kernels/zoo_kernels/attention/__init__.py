"""Attention: causal, windowed, packed, grouped; and against a cache."""

from zoo_kernels.attention.cached import cached_attention
from zoo_kernels.attention.op import attention

__all__ = ["attention", "cached_attention"]
