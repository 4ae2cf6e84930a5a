"""What the chunks of one span bring along, forward and backward alike: operands, decays, scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo_kernels.delta.intra import ChannelDecay, HeadDecay
from zoo_kernels.delta.layout import Heads, Span

# Stands for beta = 0, so that dbeta = e . z / beta holds there too; it writes far less than a state is rounded by.
LEAST_BETA = 2.0**-60


@dataclass(frozen=True)
class Erasing:
    """What beta adds.

    Attributes:
        beta: [G, C, 1].
        by_key: [G, 1, C, C], the scores of keys with earlier keys.
        solve: [G, C, C], A = (I + stril(by_key) diag(beta))^-1.
        recalling: [G, C, K], k times the decay since the chunk began.
    """

    beta: Tensor
    by_key: Tensor
    solve: Tensor
    recalling: Tensor


@dataclass(frozen=True)
class Operands:
    """All that depends on q, k and the gates alone, for all chunks of a span at once.

    The value heads of a group share their queries and keys as long as neither beta nor a decay by channel tells them
    apart; then decays multiply values. Else each value head has its own, and decays multiply queries and keys. In
    shapes, G stands for [rows, heads], a state is [G, K, R * V], and values are [G, C, R * V].

    Attributes:
        q, k: [G, C, K]; q times ``scale``.
        by_query: [G, R, C, C], the scores of queries with keys up to their own.
        reading: [G, C, K], q, with the decay since the chunk began where heads are apart.
        writing: [G, C, K], k, with the decay until the chunk ends where heads are apart.
        entering, leaving: those two decays, shaped for keys where heads are apart, for values where they are shared.
        keep: [G, 1 or K, 1 or R * V], what the state keeps over a chunk. These three: None without decay.
        erasing: None without beta.
    """

    span: Span
    heads: Heads
    scale: float
    q: Tensor
    k: Tensor
    decay: HeadDecay | ChannelDecay
    by_query: Tensor
    reading: Tensor
    writing: Tensor
    entering: Tensor | None
    leaving: Tensor | None
    keep: Tensor | None
    erasing: Erasing | None

    @classmethod
    def of(
        cls,
        span: Span,
        heads: Heads,
        q: Tensor,
        k: Tensor,
        log_decay: Tensor | None,
        beta: Tensor | None,
        *,
        scale: float,
        value_size: int,
        dtype: torch.dtype,
    ) -> Operands:
        """Load the inputs in ``dtype`` and do what can be done ahead.

        Args:
            q, k: [B, T, H, K].
            log_decay: [B, T, HV, K or 1] or None.
            beta: [B, T, HV, 1] or None.
            scale: what multiplies q.
            value_size: V.
        """
        q, k = heads.load_keys(span, q, dtype).mul_(scale), heads.load_keys(span, k, dtype)
        gate = None if log_decay is None else span.load(log_decay, dtype)  # [rows, HV, C, K or 1]
        decay = _decay(gate, heads, like=k, chunk=span.layout.chunk)
        by_query, by_key = decay.scores(q, k, erases=beta is not None)
        reading, writing, entering, leaving, keep = q, k, decay.entering, decay.leaving, decay.keep
        if entering is not None and leaving is not None and keep is not None:
            if heads.R > 1:  # [G, R, C] -> [G, C, R, 1]
                entering, leaving = entering.mT.unsqueeze(-1), leaving.mT.unsqueeze(-1)
                keep = keep.repeat_interleave(value_size, -1).unsqueeze(-2)
            else:
                if isinstance(decay, HeadDecay):  # [G, 1, C] -> [G, C, 1]
                    entering, leaving = entering.mT, leaving.mT
                keep = keep.unsqueeze(-1)
                reading, writing = q * entering, k * leaving
        erasing = None
        if beta is not None and by_key is not None:
            beta = span.load(beta, dtype).clamp_(min=LEAST_BETA)
            solve = _inverse(by_key.squeeze(2) * beta.mT)
            erasing = Erasing(beta, by_key, solve, recalling=k if entering is None else k * entering)
        return cls(
            span=span,
            heads=heads,
            scale=scale,
            q=q,
            k=k,
            decay=decay,
            by_query=by_query,
            reading=reading,
            writing=writing,
            entering=entering,
            leaving=leaving,
            keep=keep,
            erasing=erasing,
        )

    def by_step(self, x: Tensor) -> Sequence[Tensor]:
        """Views of [rows, heads, ...], one [rows * heads, ...] for each step of the carry."""
        return x.flatten(0, 1).split([rows * self.heads.count for rows in self.span.steps])

    def kept_by_step(self) -> Sequence[Tensor] | Sequence[None]:
        """``keep``, step by step."""
        return [None] * len(self.span.steps) if self.keep is None else self.by_step(self.keep)

    def by_values(self, scores: Tensor, values: Tensor) -> Tensor:
        """scores [G, R, C, C] @ values [G, C, R * V], value head by value head."""
        if self.heads.R == 1:
            return scores.squeeze(2) @ values
        return (scores @ self._apart(values)).transpose(2, 3).flatten(-2)

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """left @ right^T of values [G, C, R * V], value head by value head: [G, R, C, C]."""
        if self.heads.R == 1:
            return (left @ right.mT).unsqueeze(2)
        return self._apart(left) @ self._apart(right).mT

    def decayed(self, values: Tensor, decay: Tensor | None) -> Tensor:
        """Values [G, C, R * V] times ``entering`` or ``leaving``, where values carry the decay."""
        if decay is None or self.heads.R == 1:
            return values
        return (values.unflatten(-1, (self.heads.R, -1)) * decay).flatten(-2)

    def add_decayed_keys(self, total: Tensor, keys: Tensor, decay: Tensor | None) -> None:
        """Add to ``total`` queries or keys [G, C, K] times ``entering`` or ``leaving``, where they carry the decay."""
        if decay is None or self.heads.R > 1:
            total += keys
        else:
            total.addcmul_(keys, decay)

    def decay_gradient(self, crossing: Tensor, read: Tensor, wrote: Tensor, states: Tensor, dstates: Tensor) -> Tensor:
        """dlog_decay [rows, HV, C, K or 1].

        Args:
            crossing: from ``decay.scores_backward``.
            read: reads of the state that enters, times their gradient: [G, C, K] where heads are apart, [G, C, R * V]
                where they are shared.
            wrote: the same for writes to the state that leaves.
            states, dstates: [G, K, R * V], the states that enter, and the gradients of those that leave.
        """
        if isinstance(self.decay, ChannelDecay):
            return self.decay.gradient(crossing + read, wrote, (states * dstates).sum(-1))
        read, wrote = (x.unflatten(-1, (self.heads.R, -1)).sum(-1).mT for x in (read, wrote))
        kept = (states * dstates).unflatten(-1, (self.heads.R, -1)).sum((-3, -1))
        return self.decay.gradient(crossing + read, wrote, kept).flatten(1, 2).unsqueeze(-1)

    def _apart(self, values: Tensor) -> Tensor:
        return values.unflatten(-1, (self.heads.R, -1)).transpose(2, 3)  # [G, R, C, V]


def _decay(gate: Tensor | None, heads: Heads, *, like: Tensor, chunk: int) -> HeadDecay | ChannelDecay:
    if gate is not None and gate.shape[-1] > 1:
        return ChannelDecay(gate)
    return HeadDecay(None if gate is None else gate.squeeze(-1).unflatten(1, (-1, heads.R)), like=like, chunk=chunk)


def _inverse(below: Tensor) -> Tensor:
    """(I + stril(below))^-1; the diagonal of ``below`` and what is above it are not read."""
    identity = torch.eye(below.shape[-1], dtype=below.dtype, device=below.device)
    return torch.linalg.solve_triangular(below, identity.expand_as(below), upper=False, unitriangular=True)
