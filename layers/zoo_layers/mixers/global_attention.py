"""GA: every token sees every earlier one; keys and values of all are kept."""

from __future__ import annotations

from dataclasses import dataclass

from zoo_layers.attention import Attention, AttentionSpec
from zoo_layers.mixer import register


@register("GA")
@dataclass(frozen=True, kw_only=True)
class GlobalAttentionSpec(AttentionSpec):
    """Global attention: softmax over all earlier tokens, grouped heads, rotary positions, optional output gate.

    Source: Vaswani et al. 2017, arXiv:1706.03762; grouped heads: arXiv:2305.13245; output gate: arXiv:2505.06708.
    """

    def module(self, d_model: int) -> Attention:
        return Attention(self, d_model, window=None)
