"""Softmax attention as a layer, full or windowed: what GA and SWA share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from zoo_kernels.attention import attention, cached_attention
from zoo_kernels.packing import Packing
from zoo_kernels.rotary import rotary
from zoo_layers.init import Linear
from zoo_layers.mixer import MixerCache, MixerSpec, TokenMixer, option, settled
from zoo_layers.mlp import linear_flops
from zoo_layers.norm import RMSNorm
from zoo_layers.rope import check_turned, positions
from zoo_layers.sizes import check_divides, settle_heads


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(MixerSpec):
    """Softmax attention: the settings of its full and its windowed form."""

    heads: int | None = option(None, "query heads; open: d_model // head_dim", at_least=1)
    kv_heads: int | None = option(None, "key and value heads, a divisor of heads; open: as many", at_least=1)
    head_dim: int | None = option(None, "size of a head; open: d_model / heads, or a divisor up to 128", at_least=1)
    rope: bool = option(True, "rotary positions on queries and keys")
    rope_theta: float = option(10000.0, "base of the rotary frequencies", at_least=1)
    rope_fraction: float = option(1.0, "share of each head's channels that turn", at_least=0.001, at_most=1)
    output_gate: bool = option(False, "a sigmoid gate per channel on the output")
    qk_norm: bool = option(False, "RMSNorm on every query and key head")

    def resolve(self, d_model: int) -> Self:
        heads, head_dim = settle_heads(self.heads, self.head_dim, d_model, even=self.rope)
        kv_heads = heads if self.kv_heads is None else self.kv_heads
        check_divides("kv_heads", kv_heads, "heads", heads)
        check_turned(self, head_dim, self.rope_fraction)
        return self.with_(heads=heads, kv_heads=kv_heads, head_dim=head_dim)


class Attention(TokenMixer):
    """Causal softmax attention with grouped heads.

    Args:
        spec: resolved settings.
        d_model: the model's width.
        window: a token sees itself and ``window - 1`` before it. None: all.
    """

    spec: AttentionSpec

    def __init__(self, spec: AttentionSpec, d_model: int, *, window: int | None):
        super().__init__()
        self.spec, self.window = spec, window
        self.heads, self.kv_heads, self.head_dim = settled(spec.heads), settled(spec.kv_heads), settled(spec.head_dim)
        gates = self.heads if spec.output_gate else 0
        self.parts = [self.heads + self.kv_heads, self.kv_heads, gates]  # q and k, v, gate: in heads
        self.to_qkv = Linear(d_model, sum(self.parts) * self.head_dim)
        self.q_norm = RMSNorm(self.head_dim) if spec.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim) if spec.qk_norm else None
        self.to_out = Linear(self.heads * self.head_dim, d_model)

    def forward(self, x: Tensor, cache: MixerCache | None = None, packing: Packing | None = None) -> Tensor:
        if cache is not None:
            cache.admit(x, packing, room=self._room(cache))
        qk, v, gate = self.to_qkv(x).unflatten(-1, (-1, self.head_dim)).split(self.parts, dim=-2)
        q, k = qk.split([self.heads, self.kv_heads], dim=-2)  # [B, T, H, dh], [B, T, Hk, dh]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.spec.rope:
            turned = qk if self.q_norm is None else torch.cat([q, k], dim=-2)
            at = positions(x, cache, packing)
            turned = rotary(turned, at, theta=self.spec.rope_theta, fraction=self.spec.rope_fraction)
            q, k = turned.split([self.heads, self.kv_heads], dim=-2)
        if cache is None or cache.fresh:
            y = attention(q, k, v, window=self.window, packing=packing)
            if cache is not None:
                self._store(k, v, cache, packing)
        else:
            y = self._attend(q, k, v, cache, packing)
        if self.spec.output_gate:
            y = y * gate.sigmoid()
        return self.to_out(y.flatten(-2))

    def new_cache(self, batch: int, context: int, *, dtype: torch.dtype, device: torch.device | str) -> MixerCache:
        """Keys and values of ``context`` tokens, or a ring of as many as the window shows."""
        shape = (batch, self._slots(context), self.kv_heads, self.head_dim)
        return MixerCache({name: torch.zeros(shape, dtype=dtype, device=device) for name in ("k", "v")})

    def state_bytes(self, context: int) -> int:
        """bf16 keys and values of ``context`` tokens, or of the window where that is shorter."""
        return 4 * self.kv_heads * self.head_dim * self._slots(context)

    def flops_per_token(self, context: int) -> float:
        """Projections, and scores and values against the mean causal context of a document of ``context`` tokens."""
        return linear_flops(self) + 4 * self.heads * self.head_dim * mean_context(context, self.window)

    def _slots(self, context: int) -> int:
        return context if self.window is None else min(self.window, context)

    def _room(self, cache: MixerCache) -> int | None:
        """The most tokens a row may see: a ring as long as the window never fills."""
        slots = cache["k"].shape[1]
        return slots if self.window is None or slots < self.window else None

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cache: MixerCache, packing: Packing | None) -> Tensor:
        """Attend to what the cache holds and to the new tokens, and store these. y [B, T, H, dh]."""
        longest = q.shape[1] if packing is None else packing.max_length
        here = cache.lengths.long()[:, None] + torch.arange(longest, device=q.device)
        if packing is not None:
            # One row per document, the short ones padded behind their end.
            here = here.masked_fill(torch.arange(longest, device=q.device) >= packing.cu_seqlens.diff()[:, None], -1)
            q = pad_documents(q, packing)
        if self.window is None or longest == 1:
            # No new key takes the slot of one that a new query still sees.
            self._store(k, v, cache, packing)
            keys, values, at = self._held(cache, k.dtype)
        else:
            old_keys, old_values, old = self._held(cache, k.dtype)
            new_keys, new_values = (k, v) if packing is None else (pad_documents(k, packing), pad_documents(v, packing))
            keys, values = torch.cat([old_keys, new_keys], dim=1), torch.cat([old_values, new_values], dim=1)
            at = torch.cat([old, here], dim=1)
            self._store(k, v, cache, packing)
        y = cached_attention(q, keys, values, q_positions=here, k_positions=at, window=self.window)
        return y if packing is None else y[packing.document_ids, packing.positions][None]

    def _held(self, cache: MixerCache, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values in ``dtype``, and their positions, without the slots that are empty in every row."""
        slots = cache["k"].shape[1]
        held = min(slots, max(cache.seen))
        at = slot_positions(cache.lengths, slots)[:, :held]
        return cache["k"][:, :held].to(dtype), cache["v"][:, :held].to(dtype), at

    def _store(self, k: Tensor, v: Tensor, cache: MixerCache, packing: Packing | None) -> None:
        """Write new keys and values into their slots, the last ones where they are more than the slots."""
        slots = cache["k"].shape[1]
        if packing is None:
            skipped = max(0, k.shape[1] - slots)
            row = torch.arange(k.shape[0], device=k.device)[:, None]
            at = cache.lengths.long()[:, None] + torch.arange(skipped, k.shape[1], device=k.device)
            new = {"k": k[:, skipped:], "v": v[:, skipped:]}
        else:
            token, row = last_tokens(packing, slots)
            at = cache.lengths.long()[row] + packing.positions[token]
            new = {"k": k[0, token], "v": v[0, token]}
        with torch.no_grad():
            for name, tensor in new.items():
                cache[name].index_put_((row, at % slots), tensor.to(cache[name].dtype))
        cache.advance(k.shape[1] if packing is None else packing)


def mean_context(tokens: int, window: int | None) -> float:
    """How many keys a query meets, averaged over a causal document of ``tokens`` tokens."""
    shown = tokens if window is None else min(window, tokens)
    return (shown * (shown + 1) / 2 + (tokens - shown) * shown) / tokens


def pad_documents(x: Tensor, packing: Packing) -> Tensor:
    """[1, T, ...] packed -> [N, longest document, ...], zeros behind each document's end."""
    rows = x.new_zeros(packing.documents, packing.max_length, *x.shape[2:])
    return rows.index_put((packing.document_ids, packing.positions), x[0])


def slot_positions(lengths: Tensor, slots: int) -> Tensor:
    """The position whose key each slot of a ring holds, int64 [N, slots]; below 0: none.

    Position p lies in slot p % slots, so after ``lengths`` tokens slot s holds the last position that ends there.
    """
    last = lengths.long()[:, None] - 1
    return last - (last - torch.arange(slots, device=lengths.device)) % slots


def last_tokens(packing: Packing, most: int) -> tuple[Tensor, Tensor]:
    """The last ``most`` tokens of each document: (token, document), each int64, without asking the device."""
    if packing.max_length <= most:
        return torch.arange(packing.tokens, device=packing.cu_seqlens.device), packing.document_ids
    kept = packing.cu_seqlens.diff().clamp(max=most)
    total = sum(min(length, most) for length in packing.lengths)
    row = torch.repeat_interleave(torch.arange(packing.documents, device=kept.device), kept, output_size=total)
    from_end = kept.cumsum(0)[row] - torch.arange(total, device=kept.device)
    return packing.cu_seqlens.long()[row + 1] - from_end, row
