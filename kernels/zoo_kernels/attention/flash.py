"""The op behind the backends `flash2` and `flash4`: compiled graphs, checkpoints and FLOP counters see one node.

The libraries' own autograd functions cannot all be traced, and their launches are invisible to FlopCounterMode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from zoo_kernels.attention.call import AttentionCall, one_head_size


@dataclass(frozen=True)
class Span:
    """Which keys a query sees.

    Attributes:
        cu_seqlens: int32 [N + 1] on the device where tensors are documents end to end, [T, H, D]; None: [B, T, H, D].
        longest: tokens of the longest document.
        window: tokens that a query sees, itself included. None: all before it.
        scale: what scores are multiplied with.
    """

    cu_seqlens: Tensor | None
    longest: int
    window: int | None
    scale: float


@dataclass(frozen=True)
class Library:
    """How one library computes both passes, causal and in a fixed order of summation.

    Attributes:
        forward: (q, k, v, span) -> y as q, and the log-sum-exp of the scores, fp32 [B, H, T], packed [H, T].
        backward: (dy, q, k, v, y, lse, span) -> dq, dk, dv.
    """

    forward: Callable[[Tensor, Tensor, Tensor, Span], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Span], tuple[Tensor, Tensor, Tensor]]


# name -> library; the file of each backend adds its own.
LIBRARIES: dict[str, Library] = {}


def run(call: AttentionCall, library: str, sizes: tuple[int, ...] = ()) -> Tensor:
    """Compute a call with the named library; heads are lengthened to one of ``sizes``, see :func:`one_head_size`."""
    tensors = one_head_size(call.q, call.k, call.v, sizes)
    cu_seqlens = None if call.packing is None else call.packing.cu_seqlens
    if cu_seqlens is not None:
        tensors = tuple(tensor[0] for tensor in tensors)
    q, k, v = (tensor.contiguous() for tensor in tensors)
    y, _ = flash_attention(q, k, v, cu_seqlens, max(call.lengths), call.window, call.scale, library)
    return (y if cu_seqlens is None else y[None])[..., : call.v.shape[-1]]


@torch.library.custom_op("zoo_kernels::flash_attention", mutates_args=())
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    longest: int,
    window: int | None,
    scale: float,
    library: str,
) -> tuple[Tensor, Tensor]:
    """Causal attention by one of ``LIBRARIES``: y as q, and the log-sum-exp that the backward needs."""
    with torch.cuda.device_of(q):
        return LIBRARIES[library].forward(q, k, v, Span(cu_seqlens, longest, window, scale))


@flash_attention.register_fake
def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    longest: int,
    window: int | None,
    scale: float,
    library: str,
) -> tuple[Tensor, Tensor]:
    *batch, tokens, heads, _ = q.shape
    return torch.empty_like(q), q.new_empty((*batch, heads, tokens), dtype=torch.float32)


@torch.library.custom_op("zoo_kernels::flash_attention_backward", mutates_args=())
def flash_attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    longest: int,
    window: int | None,
    scale: float,
    library: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of :func:`flash_attention`."""
    with torch.cuda.device_of(q):
        span = Span(cu_seqlens, longest, window, scale)
        return LIBRARIES[library].backward(dy.contiguous(), q, k, v, y, lse, span)


@flash_attention_backward.register_fake
def _fake_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    longest: int,
    window: int | None,
    scale: float,
    library: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, *ctx.settings = inputs
    y, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)  # no zeros for the log-sum-exp
    ctx.save_for_backward(q, k, v, y, lse, cu_seqlens)


def _differentiate(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 8
    *tensors, cu_seqlens = ctx.saved_tensors
    return (*flash_attention_backward(dy, *tensors, cu_seqlens, *ctx.settings), *(None,) * 5)


flash_attention.register_autograd(_differentiate, setup_context=_remember)


# ------------------------------------------------------------------------------------------------------------- FLOPs
def _flops(products: int, q: Tensor, cu_seqlens: Tensor | None, longest: int, window: int | None) -> int:
    """FLOPs of some products over all pairs of a query and a key.

    As torch counts its own kernels, a full causal product is a whole square; a window is a band of whole rows.
    """
    lengths: Sequence[int]
    if cu_seqlens is None:
        lengths = [q.shape[1]] * q.shape[0]
    elif isinstance(cu_seqlens, FakeTensor) or cu_seqlens.is_meta:
        lengths = [longest] * (cu_seqlens.shape[0] - 1)
    else:
        lengths = cu_seqlens.diff().tolist()
    pairs = sum(length * min(length, window or length) for length in lengths)
    return 2 * products * pairs * q.shape[-2] * q.shape[-1]


@register_flop_formula(torch.ops.zoo_kernels.flash_attention, get_raw=True)
def _forward_flops(q, k, v, cu_seqlens, longest, window, *settings, out_val=None) -> int:
    return _flops(2, q, cu_seqlens, longest, window)


@register_flop_formula(torch.ops.zoo_kernels.flash_attention_backward, get_raw=True)
def _backward_flops(dy, q, k, v, y, lse, cu_seqlens, longest, window, *settings, out_val=None) -> int:
    return _flops(5, q, cu_seqlens, longest, window)


def count_varlen() -> None:
    """Have FlopCounterMode count torch's own varlen_attn by the same formula; torch 2.11 and 2.12 leave it out."""
    ops = torch.ops.torch_attn
    if ops._varlen_attn in flop_registry:
        return

    @register_flop_formula(ops._varlen_attn, get_raw=True)
    def forward(q, k, v, cu_q, cu_k, longest, longest_k, causal, scale, window, *settings, out_val=None) -> int:
        return _flops(2, q, cu_q, longest, _window(window))

    @register_flop_formula(ops._varlen_attn_backward, get_raw=True)
    def backward(
        dy, q, k, v, y, lse, cu_q, cu_k, longest, longest_k, causal, rng, scale, window, *settings, out_val=None
    ) -> int:
        return _flops(5, q, cu_q, longest, _window(window))


def _window(sides: Sequence[int] | None) -> int | None:
    return None if sides is None or sides[0] < 0 else sides[0] + 1
