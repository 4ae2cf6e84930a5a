"""Backend `blocks`: windows and documents of any lengths, on any device: a block of queries meets only its own keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo_kernels.attention.call import AttentionCall, one_head_size
from zoo_kernels.attention.choice import Ranked
from zoo_kernels.attention.sdpa import causal, causal_refusal, masked
from zoo_kernels.packing import Packing

MIN_BLOCK = 32  # queries per block where the window is small


class Blocks(Ranked):
    """Documents of similar length are laid side by side as rows; rows longer than the window are folded into blocks.

    Short documents are lengthened at their end, where causality hides it, with their own last token, so that nothing of
    another document is ever read. Work is O(T * window): rows are at most twice as long as their documents, and blocks
    meet 1.5 keys per key of a window above 64. Memory is O(T) where torch has a fused kernel: no scores are kept.
    """

    name = "blocks"

    def serves(self, call: AttentionCall) -> str | None:
        # Rows within the window, and the first block of longer ones, run as full causal attention.
        return causal_refusal(call.q)

    def run(self, call: AttentionCall) -> Tensor:
        if call.packing is None:
            return _rows(call.q, call.k, call.v, call.window, call.scale)
        groups = _similar_documents(call.packing)
        take, put = _layout(call.packing, groups)
        places = [len(documents) * longest for documents, longest in groups]
        parts = [tensor[0].index_select(0, take).split(places) for tensor in (call.q, call.k, call.v)]
        outputs = []
        for (documents, _), *tensors in zip(groups, *parts):
            q, k, v = (tensor.unflatten(0, (len(documents), -1)) for tensor in tensors)
            outputs.append(_rows(q, k, v, call.window, call.scale).flatten(0, 1))
        return torch.cat(outputs).index_select(0, put)[None]


def _similar_documents(packing: Packing) -> list[tuple[list[int], int]]:
    """Groups of documents whose lengths lie within a factor of two, each with its longest length."""
    groups: dict[int, list[int]] = {}
    for document, length in enumerate(packing.lengths):
        if length:
            groups.setdefault((length - 1).bit_length(), []).append(document)
    return [(documents, max(packing.lengths[n] for n in documents)) for documents in groups.values()]


def _layout(packing: Packing, groups: list[tuple[list[int], int]]) -> tuple[Tensor, Tensor]:
    """Where each place of the side-by-side rows takes its token from, and where each token's output is found there."""
    device = packing.cu_seqlens.device
    take, first_place, places = [], [0] * packing.documents, 0
    for documents, longest in groups:
        chosen = torch.tensor(documents).to(device, non_blocking=True)
        start, end = packing.cu_seqlens[:-1][chosen].long(), packing.cu_seqlens[1:][chosen].long()
        rows = start[:, None] + torch.arange(longest, device=device)
        take.append(torch.minimum(rows, end[:, None] - 1).flatten())
        for row, document in enumerate(documents):
            first_place[document] = places + row * longest
        places += len(documents) * longest
    put = torch.tensor(first_place).to(device, non_blocking=True)[packing.document_ids] + packing.positions
    return torch.cat(take), put


def _rows(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float) -> Tensor:
    """Attention of rows that know no packing: [N, T, H, D], [N, T, Hk, D], [N, T, Hk, Dv] to [N, T, H, Dv]."""
    tokens = q.shape[1]
    if window is None or tokens <= window:
        return causal(q, k, v, scale)
    size = v.shape[-1]
    q, k, v = one_head_size(q, k, v)
    block = max(MIN_BLOCK, window // 2)  # so that two blocks before its own hold all that a query sees, or one does
    back = -(-(window - 1) // block)
    head = min(tokens, max(block, back * block))
    outputs = [_block(q[:, :head], k[:, :head], v[:, :head], window, scale)]
    if head < tokens:
        outputs.append(_folded(q[:, head:], k, v, window, scale, block, back, head))
    return torch.cat(outputs, dim=1)[..., :size]


def _folded(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, block: int, back: int, head: int) -> Tensor:
    """The queries behind the first ``head`` tokens, each block of them with its own and ``back`` blocks of keys."""
    batch, tokens = q.shape[:2]
    count = -(-tokens // block)
    surplus = count * block - tokens
    q = F.pad(q, (0, 0, 0, 0, 0, surplus)).unflatten(1, (count, block)).flatten(0, 1)
    first = head - back * block
    k, v = (
        F.pad(tensor[:, first:], (0, 0, 0, 0, 0, surplus))
        .unfold(1, (back + 1) * block, block)
        .movedim(-1, 2)
        .flatten(0, 1)
        for tensor in (k, v)
    )
    y = _block(q, k, v, window, scale)
    return y.unflatten(0, (batch, count)).flatten(1, 2)[:, :tokens]


def _block(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    """The last tokens of some keys attend to these keys: q [N, b, H, D], k and v [N, S, Hk, D] to [N, b, H, D]."""
    queries, keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    if queries == keys <= window:
        return causal(q, k, v, scale)
    at = torch.arange(keys - queries, keys, device=q.device)[:, None] - torch.arange(keys, device=q.device)
    seen = (at >= 0) & (at < window)
    # The query heads of a group stand below each other as more queries of one head, so that no key is copied for them.
    q = q.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    y = masked(q, k.transpose(1, 2), v.transpose(1, 2), seen.repeat(group, 1), scale)
    return y.unflatten(2, (group, queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)
