"""Backend `varlen`: torch's flash kernel for documents of different lengths, with a window; CUDA only."""

from __future__ import annotations

import inspect
from functools import cache
from typing import cast

import torch
from torch import Tensor

from zoo_kernels.attention.call import AttentionCall, one_head_size, one_kv_head_per_query_head

DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_SIZE = 256


class Varlen:
    """All documents in one launch; it reads their offsets on the device and their longest length on the host."""

    name = "varlen"

    def serves(self, call: AttentionCall) -> str | None:
        if not call.q.is_cuda:
            return f"it runs on CUDA, and the tensors are on {call.q.device.type}"
        if call.q.dtype not in DTYPES:
            return f"it computes bfloat16 and float16 only, and the inputs are {call.q.dtype}"
        if max(call.q.shape[-1], call.v.shape[-1]) > MAX_HEAD_SIZE:
            return f"heads of {max(call.q.shape[-1], call.v.shape[-1])} exceed its limit of {MAX_HEAD_SIZE}"
        if torch.cuda.get_device_capability(call.q.device) < (8, 0):
            return "it needs a GPU of compute capability 8.0 or newer"
        if "window_size" not in _parameters():
            return f"torch {torch.__version__} has no varlen_attn with a window; 2.11 is the first"
        return None

    def run(self, call: AttentionCall) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        batch, tokens = call.q.shape[:2]
        q, k, v = one_head_size(call.q, call.k, call.v)
        grouped = {}
        if k.shape[2] != q.shape[2]:
            if "enable_gqa" in _parameters():
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


@cache
def _parameters() -> frozenset[str]:
    """The parameters of varlen_attn in this torch; none where it does not exist."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)
