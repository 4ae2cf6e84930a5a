"""Backend `math`: softmax written out in float64, the truth that other backends are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo_kernels.attention.call import AttentionCall
from zoo_kernels.attention.choice import Ranked

BLOCK = 64  # queries that meet their keys at once


class Math(Ranked):
    """Blocks of ``BLOCK`` queries, each against all keys of its document up to the block's last query, masked in place.

    FlopCounterMode sees the two products. They multiply more than the tokens see: whole blocks, and keys outside the
    window too; :func:`multiplied_context` says how much.
    """

    name = "math"

    def serves(self, call: AttentionCall) -> str | None:
        return None

    def run(self, call: AttentionCall) -> Tensor:
        lengths = [call.q.shape[1]] if call.packing is None else list(call.packing.lengths)
        q, k, v = (tensor.double().split(lengths, dim=1) for tensor in (call.q, call.k, call.v))
        documents = [_document(*tensors, call.window, call.scale) for tensors in zip(q, k, v) if tensors[0].shape[1]]
        return torch.cat(documents, dim=1).to(call.q.dtype)


def multiplied_context(tokens: int) -> float:
    """Mean number of keys that `math` multiplies each query of one document with, whatever the window.

    Each of the two products then costs ``2 * D * multiplied_context(T)`` per query head and token.
    """
    blocks = [(start, min(start + BLOCK, tokens)) for start in range(0, tokens, BLOCK)]
    return sum((end - start) * end for start, end in blocks) / tokens


def _document(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float) -> Tensor:
    """Attention of one document, [B, T, H, D] and [B, T, Hk, Dv] to [B, T, H, Dv]."""
    batch, tokens, heads, _ = q.shape
    q = q.unflatten(2, (k.shape[2], -1)).permute(0, 2, 3, 1, 4)  # [B, Hk, group, T, D]
    k, v = k.permute(0, 2, 3, 1).unsqueeze(2), v.transpose(1, 2).unsqueeze(2)  # [B, Hk, 1, D, T], [B, Hk, 1, T, Dv]
    outputs = []
    for start in range(0, tokens, BLOCK):
        end = min(start + BLOCK, tokens)
        scores = scale * (q[..., start:end, :] @ k[..., :end])
        back = torch.arange(start, end, device=q.device)[:, None] - torch.arange(end, device=q.device)
        seen = back >= 0 if window is None else (back >= 0) & (back < window)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        outputs.append(weights @ v[..., :end, :])
    return torch.cat(outputs, dim=-2).permute(0, 3, 1, 2, 4).reshape(batch, tokens, heads, -1)
