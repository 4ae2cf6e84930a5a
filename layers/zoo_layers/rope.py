"""Rotary positions: where each token stands in its own sequence, and how many channels may turn."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo_kernels.packing import Packing
from zoo_layers.mixer import MixerCache, MixerSpec, SpecError


def positions(x: Tensor, cache: MixerCache | None, packing: Packing | None) -> Tensor:
    """Each token's place in its sequence, from 0, what a cache has seen counted in.

    Args:
        x: [B, T, D].
        cache: one row per sequence, before it advances.
        packing: documents laid end to end; then B is 1.

    Returns:
        int64 [T] where all rows agree, else [B, T].
    """
    here = torch.arange(x.shape[1], device=x.device) if packing is None else packing.positions
    if cache is None or cache.fresh:
        return here
    before = cache.lengths.long()
    return before[:, None] + here if packing is None else (before[packing.document_ids] + here)[None]


def check_turned(spec: MixerSpec, head_dim: int, fraction: float = 1.0) -> None:
    """Refuse rotary settings that do not fit: an odd number of channels to turn, or settings that nothing reads.

    Args:
        spec: has the options ``rope`` and ``rope_theta``, perhaps ``rope_fraction``.
        head_dim: size of a query and key head.
        fraction: the share of it that turns.
    """
    given = spec.all_options()
    if not given["rope"]:
        unread = [name for name in spec.to_options() if name in ("rope_theta", "rope_fraction")]
        if unread:
            raise SpecError(
                unread[0], "key", f"{unread[0]} has no effect with rope=false", "Take it out, or set rope=true."
            )
        return
    turned = head_dim * fraction
    if turned >= 2 and turned % 2 == 0:
        return
    problem = f"rotary positions turn an even number of channels, but {fraction:g} of {head_dim} is {turned:g}"
    if "rope_fraction" in given and head_dim >= 2:
        even = max(2, int(turned) // 2 * 2)
        cure = f"Take rope_fraction={even / head_dim:g}, an even head_dim, or rope=false."
    else:
        cure = "Take an even head_dim, or rope=false."
    raise SpecError("head_dim" if fraction == 1 else "rope_fraction", "value", problem, cure)
