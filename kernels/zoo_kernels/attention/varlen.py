"""Backend `varlen`: torch's flash kernel for documents of different lengths, with a window; CUDA only."""

from __future__ import annotations

import inspect
from functools import cache
from typing import cast

import torch
from torch import Tensor

from zoo_kernels.attention.call import (
    AttentionCall,
    capability,
    flash_refusal,
    one_head_size,
    one_kv_head_per_query_head,
)
from zoo_kernels.attention.choice import Ranked
from zoo_kernels.attention.flash import count_varlen
from zoo_kernels.device import constant


class Varlen(Ranked):
    """All documents in one launch; it reads their offsets on the device and their longest length on the host."""

    name = "varlen"

    def serves(self, call: AttentionCall) -> str | None:
        if (reason := flash_refusal(call)) is not None:
            return reason
        if capability(call.q.device) < (8, 0):
            return "it needs a GPU of compute capability 8.0 or newer"
        if not _takes("window_size"):
            return f"torch {torch.__version__} has no varlen_attn with a window; 2.11 is the first"
        return None

    def run(self, call: AttentionCall) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        batch, tokens = call.q.shape[:2]
        q, k, v = one_head_size(call.q, call.k, call.v)
        grouped = {}
        if k.shape[2] != q.shape[2]:
            if _takes("enable_gqa"):
                grouped["enable_gqa"] = True
            else:
                k, v = one_kv_head_per_query_head(q, k, v)
        if call.packing is None:
            cu_seqlens = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=q.device)
        else:
            cu_seqlens = call.packing.cu_seqlens
        # The kernel counts the tokens before the query; the window counts the query too.
        window = (-1 if call.window is None else call.window - 1, 0)
        longest = max(call.lengths)
        q, k, v = (tensor.flatten(0, 1).contiguous() for tensor in (q, k, v))
        offsets = (cu_seqlens, cu_seqlens, longest, longest)
        y = cast(Tensor, varlen_attn(q, k, v, *offsets, scale=call.scale, window_size=window, **grouped))
        return y.unflatten(0, (batch, tokens))[..., : call.v.shape[-1]]


@constant
def _takes(parameter: str) -> bool:
    """Whether this torch has a varlen_attn with such a parameter."""
    return parameter in _parameters()


@cache
def _parameters() -> frozenset[str]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    count_varlen()
    return frozenset(inspect.signature(varlen_attn).parameters)
