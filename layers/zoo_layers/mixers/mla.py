"""MLA: every token sees every earlier one, but what is kept of each is one short latent for all heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from zoo_kernels.attention import attention, cached_attention
from zoo_kernels.packing import Packing
from zoo_kernels.rotary import rotary
from zoo_layers.attention import mean_context, pad_documents, slot_positions
from zoo_layers.init import Linear
from zoo_layers.mixer import MixerCache, MixerSpec, SpecError, TokenMixer, option, register, settled
from zoo_layers.mlp import linear_flops
from zoo_layers.norm import RMSNorm
from zoo_layers.rope import check_turned, positions
from zoo_layers.sizes import settle_heads


@register("MLA")
@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec(MixerSpec):
    """Multi-head latent attention: keys and values of all heads from one latent, and one key part shared by all.

    Without rotary positions, as in Kimi Linear, the shared part stays, as a plain key; with ``rope`` it alone turns, as
    in DeepSeek-V2. Queries have no latent of their own.

    Source: DeepSeek-AI 2024, arXiv:2405.04434; without positions: Kimi Linear, arXiv:2510.26692.
    """

    heads: int | None = option(None, "heads; open: d_model // head_dim", at_least=1)
    head_dim: int | None = option(
        None, "size of a head's own key; open: d_model / heads, or a divisor up to 128", at_least=1
    )
    rank: int | None = option(None, "size of the latent; open: 4 * head_dim", at_least=1)
    rope_dim: int | None = option(None, "size of the key part shared by all heads; open: head_dim / 2", at_least=1)
    value_dim: int | None = option(None, "size of a value head; open: head_dim", at_least=1)
    rope: bool = option(False, "rotary positions on the shared key part and its queries")
    rope_theta: float = option(10000.0, "base of the rotary frequencies", at_least=1)
    output_gate: bool = option(False, "a sigmoid gate per channel on the output")

    def resolve(self, d_model: int) -> Self:
        heads, head_dim = settle_heads(self.heads, self.head_dim, d_model)
        rope_dim = self.rope_dim or max(1, head_dim // 2)
        if self.rope and rope_dim % 2:
            raise SpecError(
                "rope_dim",
                "value",
                f"rotary positions turn an even number of channels, but rope_dim is {rope_dim}",
                f"Take rope_dim={rope_dim + 1}, or rope=false.",
            )
        check_turned(self, rope_dim)
        rank, value_dim = self.rank or 4 * head_dim, self.value_dim or head_dim
        return self.with_(heads=heads, head_dim=head_dim, rank=rank, rope_dim=rope_dim, value_dim=value_dim)

    def module(self, d_model: int) -> LatentAttention:
        return LatentAttention(self, d_model)


class ToHeads(Linear):
    """Keys and values of every head, from the latent that they share.

    Args:
        rank: r, the latent's size.
        heads: H.
        key_dim, value_dim: K and V, sizes of what a head gets of each.
    """

    def __init__(self, rank: int, heads: int, key_dim: int, value_dim: int):
        super().__init__(rank, heads * (key_dim + value_dim))
        self.heads, self.parts = heads, [key_dim, value_dim]

    def forward(self, input: Tensor, gather: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Latents [..., r] -> keys and values side by side [..., H, K + V].

        Or, with ``gather``, queries [..., H, K] -> values [..., H, V], without a key or value being built: ``gather``
        gets the queries as the latents meet them, [..., H, r], and returns what they draw from the latents, likewise.
        It happens in here so that whoever gathers sharded weights for a forward gathers them for this too.
        """
        if gather is None:
            return super().forward(input).unflatten(-1, (self.heads, -1))
        to_key, to_value = self.weight.to(input.dtype).unflatten(0, (self.heads, -1)).split(self.parts, dim=1)
        drawn = gather(torch.einsum("...hk,hkr->...hr", input, to_key))
        return torch.einsum("...hr,hvr->...hv", drawn, to_value)


class LatentAttention(TokenMixer):
    """See :class:`LatentAttentionSpec`; a cache keeps the latent, normed, and the shared key, turned."""

    spec: LatentAttentionSpec

    def __init__(self, spec: LatentAttentionSpec, d_model: int):
        super().__init__()
        self.spec, self.heads = spec, settled(spec.heads)
        self.own, self.shared, self.value_dim = settled(spec.head_dim), settled(spec.rope_dim), settled(spec.value_dim)
        self.rank = settled(spec.rank)
        gates = self.heads * self.value_dim if spec.output_gate else 0
        self.parts = [self.heads * (self.own + self.shared), self.rank, self.shared, gates]
        self.to_inner = Linear(d_model, sum(self.parts))  # queries, latent, shared key, output gate
        self.norm = RMSNorm(self.rank)
        self.to_kv = ToHeads(self.rank, self.heads, self.own, self.value_dim)
        self.to_out = Linear(self.heads * self.value_dim, d_model)

    def forward(self, x: Tensor, cache: MixerCache | None = None, packing: Packing | None = None) -> Tensor:
        if cache is not None:
            cache.admit(x, packing, room=cache["latent"].shape[1])
        q, latent, key, gate = self.to_inner(x).split(self.parts, dim=-1)
        q, latent = q.unflatten(-1, (self.heads, -1)), self.norm(latent)  # [B, T, H, K + R], [B, T, r]
        at = positions(x, cache, packing)
        if self.spec.rope:
            q, key = self._turned(q, key, at)
        if cache is None or cache.fresh:
            k, v = self.to_kv(latent).split([self.own, self.value_dim], dim=-1)
            k = torch.cat([k, key.unsqueeze(-2).expand(-1, -1, self.heads, -1)], dim=-1)
            y = attention(q, k, v, packing=packing)  # [B, T, H, V]
            if cache is not None:
                self._store(latent, key, at, cache, packing)
        else:
            self._store(latent, key, at, cache, packing)
            y = self._attend(q, at, cache, packing)
        if self.spec.output_gate:
            y = y * gate.unflatten(-1, (self.heads, -1)).sigmoid()
        return self.to_out(y.flatten(-2))

    def new_cache(self, batch: int, context: int, *, dtype: torch.dtype, device: torch.device | str) -> MixerCache:
        """Latents and shared keys of ``context`` tokens."""
        sizes = {"latent": self.rank, "key": self.shared}
        return MixerCache(
            {n: torch.zeros(batch, context, size, dtype=dtype, device=device) for n, size in sizes.items()}
        )

    def state_bytes(self, context: int) -> int:
        """bf16 latents and shared keys of ``context`` tokens."""
        return 2 * (self.rank + self.shared) * context

    def flops_per_token(self, context: int) -> float:
        """Projections, and scores and values of the heads written out, against the mean causal context."""
        scored = self.heads * (self.own + self.shared + self.value_dim)
        return linear_flops(self) + 2 * scored * mean_context(context, None)

    def _turned(self, q: Tensor, key: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary positions on the shared key [B, T, R] and on the queries' last R channels."""
        own, shared = q.split([self.own, self.shared], dim=-1)
        turned = rotary(torch.cat([shared, key.unsqueeze(-2)], dim=-2), at, theta=self.spec.rope_theta)
        return torch.cat([own, turned[..., :-1, :]], dim=-1), turned[..., -1, :]

    def _store(self, latent: Tensor, key: Tensor, at: Tensor, cache: MixerCache, packing: Packing | None) -> None:
        """Write the new tokens behind those that the cache holds."""
        rows = torch.arange(latent.shape[0], device=at.device)[:, None] if packing is None else packing.document_ids
        place = (rows, at) if packing is None else (rows[None], at)
        with torch.no_grad():
            for name, new in (("latent", latent), ("key", key)):
                cache[name].index_put_(place, new.to(cache[name].dtype))
        cache.advance(latent.shape[1] if packing is None else packing)

    def _attend(self, q: Tensor, at: Tensor, cache: MixerCache, packing: Packing | None) -> Tensor:
        """Attend to all that the cache holds, as latents: one key head serves all queries. y [B, T, H, V]."""
        held = max(cache.seen)
        latent, key = (cache[name][:, :held].to(q.dtype) for name in ("latent", "key"))
        k, v = torch.cat([latent, key], dim=-1).unsqueeze(-2), latent.unsqueeze(-2)  # [N, S, 1, r + R], [N, S, 1, r]
        there = slot_positions(cache.lengths, cache["latent"].shape[1])[:, :held]
        if packing is not None:
            # One row per document; behind the end of the short ones, positions of -1 and queries of zeros.
            q, at = pad_documents(q, packing), pad_documents(at + 1, packing) - 1
        own, shared = q.split([self.own, self.shared], dim=-1)
        scale = (self.own + self.shared) ** -0.5

        def gather(moved: Tensor) -> Tensor:
            queries = torch.cat([moved, shared], dim=-1)
            return cached_attention(queries, k, v, q_positions=at, k_positions=there, scale=scale)

        y = self.to_kv(own, gather)
        return y if packing is None else y[packing.document_ids, packing.positions][None]
