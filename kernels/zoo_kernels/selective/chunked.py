"""The scan in plain PyTorch, a segment of tokens at a time: one multiply-add per token, all else for the segment whole.

Decays are exponentials of what is at most 0, and none is ever divided by, so that nothing overflows however fast a
state fades. What is kept for the backward is one state per segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from zoo_kernels.selective.call import SEGMENT, computed


@dataclass(frozen=True)
class _Documents:
    """Which tokens open and close a document, and of which; rows of a batch are one document each, all at once."""

    opens: dict[int, slice]
    closes: dict[int, slice]

    @classmethod
    def of(cls, tokens: int, offsets: Tensor | None) -> _Documents:
        """``offsets``: int64 [N + 1] on the host, or None."""
        if offsets is None:
            return cls({0: slice(None)}, {tokens - 1: slice(None)})
        filled = [(n, a, b) for n, (a, b) in enumerate(pairwise(offsets.tolist())) if b > a]
        return cls({a: slice(n, n + 1) for n, a, _ in filled}, {b - 1: slice(n, n + 1) for n, _, b in filled})


class _Segments:
    """The inputs in the dtype of the computation, tokens first, and what they are for a segment of them."""

    def __init__(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor):
        self.dtype = computed(x)
        self.x, self.dt, self.B, self.C = (self.tokens_first(t) for t in (x, dt, B, C))
        self.A = A.to(self.dtype).t().contiguous()  # [K, E]

    def tokens_first(self, x: Tensor) -> Tensor:
        """[B, T, ..] -> [T, B, ..], contiguous: the order of sums is that of memory."""
        return x.to(self.dtype).transpose(0, 1).contiguous()

    def decays(self, at: slice) -> Tensor:
        """exp(dt * A) of each token. [t, B, K, E]"""
        return (self.dt[at].unsqueeze(2) * self.A).exp_()

    def writes(self, at: slice) -> Tensor:
        """B * dt * x of each token. [t, B, K, E]"""
        return self.B[at].unsqueeze(3) * (self.dt[at] * self.x[at]).unsqueeze(2)

    def states(
        self, at: slice, decays: Tensor, state: Tensor, documents: _Documents, first: Tensor | None
    ) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """The state behind each token [t, B, K, E], the last one, and what came before those that open a document."""
        states, before = self.writes(at), {}
        for i, (now, decay) in enumerate(zip(states.unbind(0), decays.unbind(0))):
            if (opened := documents.opens.get(at.start + i)) is not None:
                state = torch.zeros_like(now) if first is None else first[opened]
                before[i] = state
            state = now.addcmul_(decay, state)
        return states, state, before


def forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor | None,
    offsets: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y [B, T, E], the last state [N, K, E], and where asked for, the state before each segment [B, S, K, E].

    Args:
        offsets: int64 [N + 1] on the host, or None; the rest is as the public op has it.
    """
    (batch, tokens, channels), K = x.shape, A.shape[1]
    scan, documents = _Segments(x, dt, A, B, C), _Documents.of(tokens, offsets)
    sequences = batch if offsets is None else len(offsets) - 1
    last = x.new_zeros(sequences, K, channels, dtype=scan.dtype) if state is None else state.clone()
    kept = x.new_empty(batch, -(-tokens // SEGMENT) if keep else 0, K, channels, dtype=scan.dtype)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    carry = x.new_zeros(batch, K, channels, dtype=scan.dtype)
    for start in range(0, tokens, SEGMENT):
        at = slice(start, min(start + SEGMENT, tokens))
        if keep:
            kept[:, start // SEGMENT] = carry
        states, carry, _ = scan.states(at, scan.decays(at), carry, documents, state)
        read = (scan.C[at].unsqueeze(2) @ states).squeeze(2)
        if D is not None:
            read.addcmul_(scan.x[at], D.to(scan.dtype))
        y[:, at] = read.transpose(0, 1)
        for i, behind in enumerate(states.unbind(0), start):
            if (closed := documents.closes.get(i)) is not None:
                last[closed] = behind
    return y, last, kept


def backward(
    dy: Tensor,
    dlast: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor | None,
    kept: Tensor,
    offsets: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of :func:`forward` for x, dt, A, B, C, D and the state: None for those of an absent D or state."""
    (batch, tokens, channels), K = x.shape, A.shape[1]
    scan, documents = _Segments(x, dt, A, B, C), _Documents.of(tokens, offsets)
    dy = scan.tokens_first(dy)
    dx, ddt, dB, dC = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, dt, B, C))
    dA = x.new_zeros(K, channels, dtype=scan.dtype)
    dstate = None
    if state is not None:
        dstate = torch.zeros_like(state) if dlast is None else dlast.to(scan.dtype).clone()
    carry = x.new_zeros(batch, K, channels, dtype=scan.dtype)
    for start in reversed(range(0, tokens, SEGMENT)):
        at = slice(start, min(start + SEGMENT, tokens))
        decays, entered = scan.decays(at), kept[:, start // SEGMENT]
        states, _, opened = scan.states(at, decays, entered, documents, state)
        behind = scan.C[at].unsqueeze(3) * dy[at].unsqueeze(2)  # the gradient of the state behind each token
        pairs = list(zip(behind.unbind(0), decays.unbind(0)))
        for i in reversed(range(len(pairs))):
            now, decay = pairs[i]
            if (closed := documents.closes.get(start + i)) is not None:
                if dlast is not None:
                    now.add_(dlast[closed])
            elif i + 1 < len(pairs):
                later, its_decay = pairs[i + 1]
                now.addcmul_(its_decay, later)
            else:
                now.add_(carry)
            if dstate is not None and (first := documents.opens.get(start + i)) is not None:
                dstate[first] = decay * now
        carry = decays[0] * behind[0]
        written = scan.dt[at] * scan.x[at]
        dC[:, at] = (states @ dy[at].unsqueeze(3)).squeeze(3).transpose(0, 1)
        dB[:, at] = (behind @ written.unsqueeze(3)).squeeze(3).transpose(0, 1)
        received = (scan.B[at].unsqueeze(2) @ behind).squeeze(2)
        passed = received * scan.dt[at]
        if D is not None:
            passed.addcmul_(dy[at], D.to(scan.dtype))
        dx[:, at] = passed.transpose(0, 1)
        # The gradient of dt * A: what stood before the token, faded, times the gradient of what it became.
        before = torch.cat([entered[None], states[:-1]])
        for i, stood in opened.items():
            before[i] = stood
        exponents = before.mul_(decays).mul_(behind)
        ddt[:, at] = (received * scan.x[at] + (exponents * scan.A).sum(2)).transpose(0, 1)
        dA += exponents.mul_(scan.dt[at].unsqueeze(2)).sum((0, 1))
    dD = None if D is None else (dy * scan.x).sum((0, 1)).to(D.dtype)
    return dx, ddt, dA.t().contiguous().to(A.dtype), dB, dC, dD, dstate
