"""Backend `sdpa`: torch's fused causal attention, which knows no windows, and documents only if all have one length."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from zoo_kernels.attention.call import HALF, AttentionCall, one_head_size, one_kv_head_per_query_head
from zoo_kernels.attention.choice import Ranked

# On an H200 cuDNN is 1.5 to 1.7 times as fast as torch's flash kernel (bf16, H 16; D 128 at B 8, T 4096 and at B 1,
# T 32768; D 64 at B 8, T 4096).
FUSED_HALF = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
# Compiled graphs lay gradients out as they like, which cuDNN's backward does not bear (see _laid_out_alike).
FUSED_HALF_COMPILED = [SDPBackend.FLASH_ATTENTION]


class Sdpa(Ranked):
    """Rows, or documents of one length laid out as rows, in one fused call."""

    name = "sdpa"

    def serves(self, call: AttentionCall) -> str | None:
        if call.window is not None:
            return f"torch's kernel has no window, and a document exceeds {call.window} tokens"
        if len(set(call.lengths)) > 1:
            return "documents of different lengths are no rows of one batch"
        return causal_refusal(call.q)

    def run(self, call: AttentionCall) -> Tensor:
        rows = (len(call.lengths), call.lengths[0])
        q, k, v = (tensor.reshape(*rows, *tensor.shape[2:]) for tensor in (call.q, call.k, call.v))
        return causal(q, k, v, call.scale).reshape(*call.q.shape[:3], -1)


def causal_refusal(q: Tensor) -> str | None:
    """Why :func:`causal` would build a T x T mask for such tensors; None: it would not."""
    if q.is_cuda and q.dtype == torch.float64:
        return "on CUDA torch fuses no float64 attention and would build all scores at once"
    return None


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Full causal attention of rows: q [N, T, H, D], k [N, T, Hk, D], v [N, T, Hk, Dv] to [N, T, H, Dv]."""
    size = v.shape[-1]
    q, k, v = one_head_size(q, k, v)
    kernels = nullcontext()
    if q.is_cuda:
        q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k, v))
        if q.dtype in HALF and q.shape[-1] <= 256:
            fused = FUSED_HALF_COMPILED if torch.compiler.is_compiling() else FUSED_HALF
            kernels = sdpa_kernel(fused, set_priority=True)
        else:
            k, v = one_kv_head_per_query_head(q, k, v)
            kernels = sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    with kernels:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    if y.is_cuda and y.requires_grad and not torch.compiler.is_compiling():
        y.register_hook(_laid_out_alike(y.stride()))
    return y.transpose(1, 2)[..., :size]


def _laid_out_alike(strides: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """A hook that gives a gradient the strides of its output.

    cuDNN's backward reads the upstream gradient by the output's strides, whatever its own are: a gradient laid out
    otherwise gives dq, dk and dv that are wrong by 140 % without a word (torch 2.11, H200, bf16, [2, 4, 512, 128]).
    """

    def lay_out(gradient: Tensor) -> Tensor:
        if gradient.stride() == strides:
            return gradient
        laid_out = torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype, device=gradient.device)
        return laid_out.copy_(gradient)

    return lay_out


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention under one mask for all heads: q [N, H, b, D], k [N, H, S, D], v [N, H, S, Dv] to [N, H, b, Dv]."""
    # cuDNN would plan anew for every shape, and flash takes no mask.
    kernels = sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]) if q.is_cuda else nullcontext()
    with kernels:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
