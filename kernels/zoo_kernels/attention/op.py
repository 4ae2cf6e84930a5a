"""attention(): checks its arguments, picks a backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zoo_kernels import backend as table
from zoo_kernels.attention.blocks import Blocks
from zoo_kernels.attention.call import AttentionCall
from zoo_kernels.attention.flash2 import Flash2
from zoo_kernels.attention.flash4 import Flash4
from zoo_kernels.attention.reference import Math
from zoo_kernels.attention.sdpa import Sdpa
from zoo_kernels.attention.varlen import Varlen
from zoo_kernels.packing import Packing, as_packing


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    packing: Packing | Sequence[int] | Tensor | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Causal softmax attention, full or in a sliding window, over dense rows or packed documents.

        y[t] = sum over s of softmax(scale * q[t] . k[s]) v[s],   t - window < s <= t, s in the document of t

    No backend builds a T x T mask.

    Args:
        q: [B, T, H, D]. k: [B, T, Hk, D], H a multiple of Hk; query head h reads key head h // (H / Hk).
        v: [B, T, Hk, Dv]. All three of one float dtype, which rules under autocast too.
        window: tokens that a query sees, itself included, >= 1. None: all before it.
        packing: where packed documents begin and end; then B is 1.
        scale: None: D ** -0.5.
        backend: a name that :func:`zoo_kernels.backend.explain` lists. None: the op chooses.

    Returns:
        [B, T, H, Dv] in the inputs' dtype.

    Raises:
        ValueError: shapes, dtypes, devices or offsets that disagree; a window below 1; a named backend that cannot
            serve.
    """
    call = checked_call(q, k, v, window=window, packing=packing, scale=scale)
    if 0 in (call.q.shape[0], call.q.shape[1]):
        # Nothing to attend to; the product keeps the inputs in the graph.
        return q.new_zeros(*q.shape[:3], v.shape[-1]) + 0 * (q.sum() + k.sum() + v.sum())
    served_by = table.choose("attention", call, backend)
    if torch.is_autocast_enabled(q.device.type):
        with torch.autocast(q.device.type, enabled=False):
            return served_by.run(call)
    return served_by.run(call)


def checked_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    packing: Packing | Sequence[int] | Tensor | None = None,
    scale: float | None = None,
) -> AttentionCall:
    """The call as backends see it; :func:`zoo_kernels.backend.explain` takes it.

    Raises:
        ValueError: as :func:`attention`.
    """
    check_heads("attention", q, k, v)
    if k.shape[1] != q.shape[1]:
        raise ValueError(f"attention: q has {q.shape[1]} tokens, k {k.shape[1]}; against a cache use cached_attention")
    check_window("attention", window)
    packing = as_packing(packing, batch=q.shape[0], tokens=q.shape[1], op="attention")
    longest = q.shape[1]
    if packing is not None:
        longest = packing.max_length
        packing = None if longest == packing.tokens else packing
    if packing is not None and packing.cu_seqlens.device != q.device:
        packing = packing.to(q.device, non_blocking=True)
    if window is not None and window >= longest:
        window = None
    return AttentionCall(q, k, v, window, packing, q.shape[-1] ** -0.5 if scale is None else float(scale))


def check_heads(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless q [B, T, H, D], k [B, S, Hk, D] and v [B, S, Hk, Dv] fit."""
    shapes = f"q is {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"{op}: {shapes}; each must be [batch, tokens, heads, head size]")
    if k.shape[0] != q.shape[0] or v.shape[:3] != k.shape[:3]:
        raise ValueError(f"{op}: {shapes}; all must have one batch, and k and v the same tokens and heads")
    if k.shape[3] != q.shape[3] or 0 in (q.shape[2], q.shape[3], k.shape[2], v.shape[3]):
        raise ValueError(f"{op}: {shapes}; q and k must have one head size, and no heads or sizes may be 0")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{op}: {q.shape[2]} query heads are no multiple of {k.shape[2]} key heads; a key head serves a whole group"
        )
    if not q.is_floating_point() or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"{op}: q is {q.dtype}, k {k.dtype}, v {v.dtype}; give all three one float dtype")
    if not q.device == k.device == v.device:
        raise ValueError(f"{op}: q is on {q.device}, k on {k.device}, v on {v.device}; move them to one device")


def check_window(op: str, window: int | None) -> None:
    """Raise ValueError unless ``window`` is None or a whole number from 1."""
    if window is None:
        return
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ValueError(
            f"{op}: window must be a whole number, at least 1 (the token itself), got {window!r}; None sees all"
        )


def _backends() -> list[table.Backend]:
    return [Sdpa(), Varlen(), Flash4(), Flash2(), Blocks(), Math()]


table.provide("attention", _backends)
