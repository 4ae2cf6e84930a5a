"""Sampling through the caches: one packed prefill for prompts of any lengths, then one token at a time."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from zoo.errors import UserError
from zoo.model import HybridLM
from zoo_kernels.packing import Packing


@torch.inference_mode()
def generate(
    model: HybridLM,
    prompts: Sequence[Sequence[int]] | Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stop_ids: Collection[int] = (),
    attention_mask: Tensor | None = None,
) -> list[list[int]]:
    """Continue prompts.

    What a prompt gets does not depend on the others beside it: nothing is padded, and each row draws from its own
    random stream, which the seed and the row's number fix.

    Args:
        model: in any mode; it runs in eval mode and is left as it was.
        prompts: lists of ids, of any lengths from 1; or a left-padded [N, T] tensor with its mask.
        max_new_tokens: at most so many new tokens each, 0 or more.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draw among the k most likely tokens only. None: all.
        seed: of the draws.
        stop_ids: a row ends behind the first of these; it is part of what is returned.
        attention_mask: [N, T] of 0 and 1 for a tensor of prompts: zeros, then ones.

    Returns:
        The new ids of each prompt.

    Raises:
        UserError: an empty prompt, numbers out of range, a mask that pads on the right.
    """
    rows = _prompts(prompts, attention_mask)
    if max_new_tokens < 0:
        raise UserError(f"generate: max_new_tokens must be at least 0, got {max_new_tokens}")
    if not temperature >= 0:
        raise UserError(f"generate: temperature must be at least 0, got {temperature}; 0 takes the most likely token")
    if top_k is not None and top_k < 1:
        raise UserError(f"generate: top_k must be at least 1, got {top_k}")
    new: list[list[int]] = [[] for _ in rows]
    if max_new_tokens == 0 or not rows:
        return new
    device = model.embedding.weight.device
    streams = [torch.Generator().manual_seed((seed * 1_000_003 + row) % 2**63) for row in range(len(rows))]
    was_training = model.training
    model.eval()
    try:
        caches = model.new_caches(len(rows), max(map(len, rows)) + max_new_tokens)
        packing = Packing.from_offsets([0, *torch.tensor([len(row) for row in rows]).cumsum(0).tolist()]).to(device)
        packed = torch.tensor([[token for row in rows for token in row]], device=device)
        hidden = model.hidden(packed, caches, packing)
        logits = model.head(hidden[0, packing.cu_seqlens[1:].long() - 1])
        open_rows = set(range(len(rows)))
        for _ in range(max_new_tokens):
            chosen = _draw(logits, temperature, top_k, streams)
            for row in list(open_rows):
                new[row].append(chosen[row])
                if chosen[row] in stop_ids:
                    open_rows.discard(row)
            if not open_rows or len(new[min(open_rows)]) == max_new_tokens:
                break
            logits = model(torch.tensor(chosen, device=device).unsqueeze(1), caches)[:, -1]
    finally:
        model.train(was_training)
    return new


def _draw(logits: Tensor, temperature: float, top_k: int | None, streams: list[torch.Generator]) -> list[int]:
    """One token for each row of logits [N, vocab]."""
    if temperature == 0:
        return logits.argmax(-1).tolist()
    scaled = logits.float().cpu() / temperature
    if top_k is not None and top_k < scaled.shape[-1]:
        floor = scaled.topk(top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < floor, float("-inf"))
    chances = scaled.softmax(-1)
    return [int(torch.multinomial(row, 1, generator=stream)) for row, stream in zip(chances, streams)]


def _prompts(prompts: Sequence[Sequence[int]] | Tensor, mask: Tensor | None) -> list[list[int]]:
    """Prompts as lists of ids, without padding."""
    if isinstance(prompts, Tensor):
        if prompts.dim() != 2:
            raise UserError(f"generate: a tensor of prompts must be [N, T], got {list(prompts.shape)}")
        mask = torch.ones_like(prompts) if mask is None else mask
        if mask.shape != prompts.shape:
            raise UserError(
                f"generate: the mask is {list(mask.shape)}, the prompts {list(prompts.shape)}; they must agree"
            )
        seen = mask.bool()
        if (seen[:, :-1] & ~seen[:, 1:]).any():
            raise UserError(
                "generate: the prompts are padded on the right, behind which nothing can be decoded; pad on the left"
            )
        rows = [row[keep].tolist() for row, keep in zip(prompts, seen)]
    elif mask is not None:
        raise UserError("generate: lists of ids need no attention_mask; leave it out")
    else:
        rows = [[int(token) for token in row] for row in prompts]
    for number, row in enumerate(rows):
        if not row:
            raise UserError(
                f"generate: prompt {number} is empty; begin with the tokenizer's separator, which starts a document"
            )
    return rows
