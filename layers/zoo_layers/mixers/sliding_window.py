"""SWA: every token sees itself and the tokens just before it; only those are kept."""

from __future__ import annotations

from dataclasses import dataclass

from zoo_layers.attention import Attention, AttentionSpec
from zoo_layers.mixer import option, register


@register("SWA")
@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """Sliding-window attention: softmax over the last `window` tokens, the token itself included.

    Source: Beltagy et al. 2020, arXiv:2004.05150.
    """

    window: int = option(2048, "tokens that a token sees, itself included", at_least=1, cure="For no window use GA")

    def module(self, d_model: int) -> Attention:
        return Attention(self, d_model, window=self.window)
