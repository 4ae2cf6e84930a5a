"""cached_attention(): new tokens against keys and values that were kept, in slots of any order."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo_kernels.attention.op import check_heads, check_window
from zoo_kernels.attention.sdpa import masked

MASK_ELEMENTS = 2**22  # most elements of one block's mask: 4 MiB, 16 MiB once a kernel turns it into fp32


def cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_positions: Tensor,
    k_positions: Tensor,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of new tokens to a cache that holds their own keys too: decoding, and prefill in pieces.

    A key is seen where ``0 <= k_position <= q_position`` and ``k_position > q_position - window``.

    Args:
        q: [N, Tq, H, D]. k: [N, S, Hk, D], H a multiple of Hk. v: [N, S, Hk, Dv]. One float dtype.
        q_positions: integers [N, Tq], each token's place in its sequence, from 0. A negative one marks a padded row.
        k_positions: integers [N, S], the place of what each slot holds, in any order; -1: the slot is empty. Empty
            slots are read too, so they must hold finite numbers.
        window: tokens that a query sees, itself included, >= 1. None: all before it.
        scale: None: D ** -0.5.

    Returns:
        [N, Tq, H, Dv] in the inputs' dtype, under autocast too. A query that sees no key gives zeros.

    Raises:
        ValueError: shapes, dtypes or devices that disagree; a window below 1.
    """
    check_heads("cached_attention", q, k, v)
    check_window("cached_attention", window)
    _check_positions(q, k, q_positions, k_positions)
    rows, queries, heads, slots = q.shape[0], q.shape[1], q.shape[2], k.shape[1]
    if 0 in (rows, queries, slots):
        return q.new_zeros(rows, queries, heads, v.shape[3])
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    group = heads // k.shape[2]
    block = max(1, MASK_ELEMENTS // (rows * slots * group))
    q = q.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4)  # [N, Hk, group, Tq, D]
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    outputs = [
        _block(part, k, v, _seen(at, k_positions, window), scale)
        for part, at in zip(q.split(block, dim=3), q_positions.split(block, dim=1))
    ]
    y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=3)
    return y.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _seen(q_positions: Tensor, k_positions: Tensor, window: int | None) -> Tensor:
    """bool [N, Tq, S]."""
    at, held = q_positions[:, :, None], k_positions[:, None, :]
    seen = (held >= 0) & (held <= at)
    return seen if window is None else seen & (held > at - window)


def _block(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """q [N, Hk, group, b, D], k [N, Hk, S, D], v [N, Hk, S, Dv], seen [N, b, S] to [N, Hk, group, b, Dv]."""
    group = q.shape[2]
    blind = ~seen.any(-1, keepdim=True)
    # A query that sees nothing would be 0/0 in some kernels: it sees everything instead, and its result is dropped.
    mask = (seen | blind).repeat(1, group, 1).unsqueeze(1)
    with torch.autocast(q.device.type, enabled=False):
        y = masked(q.flatten(2, 3), k, v, mask, scale)
    return y.unflatten(2, (group, -1)).masked_fill(blind[:, None, None], 0.0)


def _check_positions(q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor) -> None:
    for name, positions, wanted in (
        ("q_positions", q_positions, q.shape[:2]),
        ("k_positions", k_positions, k.shape[:2]),
    ):
        if positions.shape != wanted:
            raise ValueError(f"cached_attention: {name} is {list(positions.shape)}, but {list(wanted)} is needed")
        if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
            raise ValueError(f"cached_attention: {name} must be integers, got {positions.dtype}")
        if positions.device != q.device:
            raise ValueError(f"cached_attention: {name} is on {positions.device}, but q on {q.device}; move it there")
