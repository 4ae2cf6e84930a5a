"""Next-token loss in pieces: the logits of a whole batch never exist at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

IGNORED = -100  # a label that does not count
PIECE_LOGITS = 2**24  # logits held at once, 64 MiB in fp32
# A GPU gets pieces so many times as large, 512 MiB: products of few rows leave it idle, and the head's gradient, which
# is as large as the head, is read and written once a piece.
GPU_PIECE = 8
FEW = 2  # where no more than one position in so many has a label, as in tasks, those are gathered before the head


def token_nll(hidden: Tensor, weight: Tensor, labels: Tensor, at_most: int | None = None) -> tuple[Tensor, Tensor]:
    """Negative log likelihood of ``labels`` under ``softmax(hidden @ weight.T)``, summed over the labels that count.

    The head is applied to positions with a label only, where a bound on their number is known: to count them itself,
    the host would have to wait for a GPU. Gradients of both factors are computed piece by piece in the
    forward pass, so that memory holds at most 2^24 logits, on a GPU 2^27; sums are fp32 (float64 for float64 inputs).

    Args:
        hidden: [..., D], any float dtype; under autocast the product runs in autocast's dtype.
        weight: [vocab, D].
        labels: [...] int64, ``labels[t]`` belongs to ``hidden[t]``; -100 is not counted.
        at_most: no more labels count, says who made the batch; None: not known, and a GPU takes all positions.

    Returns:
        nll: scalar in nats, fp32 or float64, 0 where nothing counts. tokens: int64 scalar, how many labels count.

    Raises:
        ValueError: shapes that disagree; on CPU also a label outside 0..vocab-1 other than -100, and more labels than
            ``at_most``. On a GPU, which would have to wait to raise, more labels make loss and gradient NaN.
    """
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"token_nll: labels are {list(labels.shape)}, but hidden {list(hidden.shape)} asks for one per token"
        )
    if hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"token_nll: hidden has width {hidden.shape[-1]}, the head {weight.shape[-1]}; they must agree"
        )
    flat, targets = hidden.flatten(0, -2), labels.flatten()
    tokens = (targets != IGNORED).sum()
    if targets.device.type == "cpu":
        _check_labels(targets, weight.shape[0], at_most)
        at_most = int(tokens)
    if at_most is not None and at_most * FEW <= targets.numel():
        flat, targets = _labelled(flat, targets, at_most)
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        flat, weight = flat.to(dtype), weight.to(dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        nll = _TokenNLL.apply(flat, weight.to(flat.dtype), targets)
    if at_most is not None:
        nll = nll * torch.ones_like(nll).masked_fill(tokens > at_most, math.nan)
    return nll, tokens


def _labelled(hidden: Tensor, labels: Tensor, at_most: int) -> tuple[Tensor, Tensor]:
    """The first positions with a label, and others without one where there are fewer; the host waits for nothing."""
    counts = labels != IGNORED
    places = torch.nonzero_static(counts, size=at_most, fill_value=0).squeeze(-1)
    filled = torch.arange(at_most, device=labels.device) >= counts.sum()
    return hidden.index_select(0, places), labels.index_select(0, places).masked_fill(filled, IGNORED)


def _check_labels(labels: Tensor, vocab: int, at_most: int | None) -> None:
    have = int((labels != IGNORED).sum())
    if at_most is not None and at_most < have:
        raise ValueError(
            f"token_nll: at_most is {at_most}, but {have} labels count; a batch's `tokens` must not be below that"
        )
    wrong = (labels != IGNORED) & ((labels < 0) | (labels >= vocab))
    if wrong.any():
        raise ValueError(
            f"token_nll: label {int(labels[wrong][0])} is outside 0..{vocab - 1}; the model's vocab_size must cover "
            "the tokenizer"
        )


class _TokenNLL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        need_hidden, need_weight = ctx.needs_input_grad[:2]  # type: ignore[attr-defined]
        total = torch.zeros((), dtype=wide, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros_like(weight, dtype=wide) if need_weight else None
        logits_at_once = PIECE_LOGITS * (GPU_PIECE if hidden.is_cuda else 1)
        rows = max(1, logits_at_once // weight.shape[0])
        for start in range(0, hidden.shape[0], rows):
            h, y = hidden[start : start + rows], labels[start : start + rows]
            logits = (h @ weight.T).to(wide)
            counts = y != IGNORED
            index = y.clamp(min=0).unsqueeze(-1)
            normaliser = logits.logsumexp(-1, keepdim=True)
            total += torch.where(counts, (normaliser - logits.gather(-1, index)).squeeze(-1), 0.0).sum()
            if d_hidden is None and d_weight is None:
                continue
            d_logits = logits.sub_(normaliser).exp_()
            d_logits.scatter_add_(-1, index, d_logits.new_full(index.shape, -1.0))
            d_logits = d_logits.mul_(counts.unsqueeze(-1)).to(h.dtype)
            if d_hidden is not None:
                d_hidden[start : start + rows] = d_logits @ weight
            if d_weight is not None:
                d_weight += (d_logits.T @ h).to(wide)  # summed in fp32: bf16 would round each piece away
        ctx.save_for_backward(d_hidden, d_weight)  # type: ignore[attr-defined]
        ctx.weight_dtype = weight.dtype  # type: ignore[attr-defined]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d_total: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        d_hidden, d_weight = ctx.saved_tensors  # type: ignore[attr-defined]
        return (
            None if d_hidden is None else d_hidden * d_total.to(d_hidden.dtype),
            None if d_weight is None else (d_weight * d_total).to(ctx.weight_dtype),  # type: ignore[attr-defined]
            None,
        )
