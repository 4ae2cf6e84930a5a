"""Inside one chunk: running decays, the scores of tokens with earlier tokens, and their gradients.

Letters of shapes: G stands for [rows, heads], one chunk of one key head; R value heads of the group; C tokens of the
chunk; K. Every decay is built from the factors of its own span: no two running sums are subtracted. So no exponent is
ever positive, nothing overflows, -inf is a plain reset, and a strong decay early in the chunk costs later tokens no
digits.
"""

from __future__ import annotations

import torch
from torch import Tensor


class HeadDecay:
    """One decay per token and value head, or none at all.

    Attributes:
        entering: [G, R, C], what the state that enters the chunk keeps until it is read at a token. None: no decay.
        leaving: [G, R, C], what is written at a token keeps until the end of the chunk.
        keep: [G, R], what the state keeps over the whole chunk.
    """

    def __init__(self, log_decay: Tensor | None, *, like: Tensor, chunk: int):
        self.entering = self.leaving = self.keep = None
        if log_decay is None:
            self.between = torch.ones(chunk, chunk, dtype=like.dtype, device=like.device).tril_()
            return
        steps = log_decay.unsqueeze(-1).expand(*log_decay.shape, chunk).tril(-1)  # [.., i, j]: that of i, where i > j
        self.between = steps.cumsum(-2).exp_().tril_()  # [G, R, C, C], the decay from after j to i
        self.entering = log_decay.cumsum(-1).exp_()
        self.leaving = self.between[..., -1, :]
        self.keep = self.entering[..., -1]

    def scores(self, q: Tensor, k: Tensor, *, erases: bool) -> tuple[Tensor, Tensor | None]:
        """Decayed products [G, R, C, C], zero above the diagonal: of queries with keys, and of keys with keys.

        Args:
            q, k: [G, C, K].
            erases: False: the second is not wanted, and None.
        """
        by_query = (q @ k.mT).unsqueeze(2) * self.between
        return by_query, (k @ k.mT).unsqueeze(2) * self.between if erases else None

    def scores_backward(
        self, q: Tensor, k: Tensor, by_query: Tensor, by_key: Tensor | None, d_by_query: Tensor, d_by_key: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients of :meth:`scores`.

        Args:
            by_query, by_key: the scores.
            d_by_query: [G, R, C, C]; what is above the diagonal is not read.
            d_by_key: the same; nor is the diagonal.

        Returns:
            dq, dk: [G, C, K], summed over R.
            crossing: [G, R, C], score times gradient, rows less columns: what each token owes to the decays up to its
                own. The diagonal is left out, as it does not decay. None without decay.
        """
        crossing = None
        if self.keep is not None:
            products = by_query * d_by_query
            if by_key is not None and d_by_key is not None:
                products.addcmul_(by_key, d_by_key)
            products.tril_(-1)
            crossing = products.sum(-1) - products.sum(-2)
        d_by_query = self._decayed_sum(d_by_query)
        dq, dk = d_by_query @ k, d_by_query.mT @ q
        if d_by_key is not None:
            d_by_key = self._decayed_sum(d_by_key).tril_(-1)
            dk.flatten(0, 1).baddbmm_((d_by_key + d_by_key.mT).flatten(0, 1), k.flatten(0, 1))
        return dq, dk, crossing

    def _decayed_sum(self, scores: Tensor) -> Tensor:
        """[G, R, C, C] -> [G, C, C], over the value heads of each group."""
        decayed = scores * self.between
        return decayed.squeeze(2) if decayed.shape[2] == 1 else decayed.sum(2)

    def gradient(self, crossing: Tensor, written: Tensor, kept: Tensor) -> Tensor:
        """dlog_decay [G, R, C].

        Args:
            crossing: [G, R, C], of the scores and of reading the state that enters.
            written: [G, R, C], of what a token writes to the state that leaves: it owes to the decays after its own.
            kept: [G, R], of the state that passes through, before its decay.
        """
        C = crossing.shape[-1]
        later = torch.ones(C, C, dtype=crossing.dtype, device=crossing.device).tril_()
        through = kept if self.keep is None else self.keep * kept
        return crossing @ later + written @ (1 - later) + through.unsqueeze(-1)


class ChannelDecay:
    """One decay per token, value head and channel of the key; R is 1.

    The decay between two tokens sits inside their product. So the lower triangle is split into squares, each between
    the two halves of a block of 2, 4, .. C tokens: keys of the left half decay to its end, queries and keys of the
    right half from its start. Queries and keys are read alike, so they lie side by side: n is 2, or 1 without beta.

    Attributes:
        entering, leaving: [G, C, K]; keep: [G, K]; as in :class:`HeadDecay`.
        halves: for each size of a half, half: the left decays to the end and the right ones from the start, both
            [G, C / (2 * half), half, K].
    """

    def __init__(self, log_decay: Tensor):
        C = log_decay.shape[-2]
        from_start = log_decay.exp()  # inside blocks of `half` tokens
        to_end = torch.ones_like(from_start)  # leaves out the token's own
        self.halves: dict[int, tuple[Tensor, Tensor]] = {}
        half = 1
        while half < C:
            left_start, right_start = from_start.unflatten(-2, (-1, 2, half)).unbind(-3)
            left_end, right_end = to_end.unflatten(-2, (-1, 2, half)).unbind(-3)
            self.halves[half] = (left_end, right_start)
            from_start = torch.stack([left_start, right_start * left_start[..., -1:, :]], -3).flatten(-4, -2)
            to_end = torch.stack([left_end * right_start[..., -1:, :], right_end], -3).flatten(-4, -2)
            half *= 2
        self.entering, self.leaving, self.keep = from_start, to_end, from_start[..., -1, :]
        self._products: dict[int, tuple[Tensor, Tensor]] = {}

    def scores(self, q: Tensor, k: Tensor, *, erases: bool) -> tuple[Tensor, Tensor | None]:
        """As :meth:`HeadDecay.scores`; the diagonal of keys with keys is left zero, as nothing reads it."""
        readers = torch.stack([q, k] if erases else [q], 2)  # [G, n, C, K]
        found = q.new_zeros(*readers.shape[:-1], q.shape[-2])  # [G, n, C, C]
        found.select(2, 0).diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
        for half, (to_end, from_start) in self.halves.items():
            left = _half(k, half, 0) * to_end
            right = (_half(readers, half, 1).transpose(2, 3) * from_start.unsqueeze(3)).flatten(3, 4)
            _square(found, half).copy_((right @ left.mT).unflatten(3, (-1, half)).transpose(2, 3))
            self._products[half] = (left, right)  # [G, blocks, half, K] and [G, blocks, n * half, K]
        by_query, *by_key = found.unsqueeze(3).unbind(2)
        return by_query, by_key[0] if by_key else None

    def scores_backward(
        self, q: Tensor, k: Tensor, by_query: Tensor, by_key: Tensor | None, d_by_query: Tensor, d_by_key: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As :meth:`HeadDecay.scores_backward`, after :meth:`scores`; ``crossing`` is [G, C, K]."""
        d_scores = d_by_query if d_by_key is None else torch.cat([d_by_query, d_by_key], 2)  # [G, n, C, C]
        d_readers = q.new_zeros(*d_scores.shape[:-1], q.shape[-1])  # [G, n, C, K]
        written = torch.zeros_like(k)
        for half, (to_end, from_start) in self.halves.items():
            left, right = self._products[half]
            squares = _square(d_scores, half).transpose(2, 3).flatten(3, 4)  # [G, blocks, n * half, half]
            d_right = (squares @ left).unflatten(3, (-1, half)).transpose(2, 3)
            _half(d_readers, half, 1).addcmul_(from_start.unsqueeze(2), d_right)
            _half(written, half, 0).addcmul_(to_end, squares.mT @ right)
        dq, dk = d_readers.select(2, 0), written
        crossing = q * dq
        crossing.addcmul_(k, written, value=-1)
        if d_by_key is not None:
            read = d_readers.select(2, 1)
            crossing.addcmul_(k, read)
            dk = written.add_(read)
        own = d_scores.select(2, 0).diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        return dq.addcmul_(own, k), dk.addcmul_(own, q), crossing

    def gradient(self, crossing: Tensor, written: Tensor, kept: Tensor) -> Tensor:
        """dlog_decay [G, C, K]; as :meth:`HeadDecay.gradient`, with ``kept`` [G, K]."""
        C = crossing.shape[-2]
        later = torch.ones(C, C, dtype=crossing.dtype, device=crossing.device).triu_()
        return later @ crossing + (1 - later) @ written + (self.keep * kept).unsqueeze(-2)


def _half(x: Tensor, half: int, side: int) -> Tensor:
    """View of the left (0) or right (1) halves of all blocks: [.., C, K] -> [.., C / (2 * half), half, K]."""
    return x.unflatten(-2, (-1, 2, half)).select(-3, side)


def _square(scores: Tensor, half: int) -> Tensor:
    """View of the scores of right halves with their left halves: [.., C, C] -> [.., C / (2 * half), half, half]."""
    split = scores.unflatten(-1, (-1, 2, half)).select(-2, 0).unflatten(-3, (-1, 2, half)).select(-4, 1)
    return split.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
