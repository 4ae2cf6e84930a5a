"""The scan as PyTorch sees it, one op with its gradient whoever computes it; and the two backends that it serves."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from zoo_kernels.delta.call import without_autocast
from zoo_kernels.device import Kernels, refusal
from zoo_kernels.eager import operator
from zoo_kernels.selective import chunked
from zoo_kernels.selective.call import SEGMENT, SelectiveCall, computed


class Chunked:
    """Segments of tokens in plain PyTorch: any device, any dtype, with a gradient of its own."""

    name = "chunked"

    def serves(self, call: SelectiveCall) -> str | None:
        """Everything."""
        return None

    def run(self, call: SelectiveCall) -> tuple[Tensor, Tensor]:
        """y [B, T, E] in x's dtype, and the last state [N, K, E]."""
        offsets = None if call.packing is None else call.packing.host_offsets
        return _run(call, None, offsets, kernel=False)


class Triton(Kernels):
    """One launch forward and one backward where rows and channels fill the GPU, three each where they do not."""

    def serves(self, call: SelectiveCall) -> str | None:
        """None, or the reason why not."""
        return refusal(call.x)

    def run(self, call: SelectiveCall) -> tuple[Tensor, Tensor]:
        """y [B, T, E] in x's dtype, and the last state [N, K, E]."""
        tables = (None, None) if call.packing is None else (call.packing.document_ids, call.packing.cu_seqlens)
        return _run(call, *tables, kernel=True)


def _run(
    call: SelectiveCall, documents: Tensor | None, offsets: Tensor | None, *, kernel: bool
) -> tuple[Tensor, Tensor]:
    tensors = (call.x, call.dt, call.A, call.B, call.C, call.D, call.initial_state, documents, offsets)
    y, last, _ = scan(*tensors, call.learns, kernel)
    return y, last


@operator("zoo_kernels::selective_scan")
def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor | None,
    documents: Tensor | None,
    offsets: Tensor | None,
    keep: bool,
    kernel: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y [B, T, E], the last state [N, K, E] and the state before each segment [B, S, K, E] of checked arguments.

    Args:
        x, dt, A, B, C, D, state: as the public op has them.
        documents: int64 [T], the document of each token: for the kernels alone.
        offsets: [N + 1], where documents begin and end: int32 on the device for the kernels, int64 on the host else.
        keep: whether a backward may follow; else no state is kept, and S is 0.
        kernel: whether Triton computes it.
    """
    if not kernel:
        with without_autocast(x.device):
            return chunked.forward(x, dt, A, B, C, D, state, offsets, keep)
    from zoo_kernels.selective import scan_triton

    (batch, tokens, channels), K = x.shape, A.shape[1]
    sequences = batch if offsets is None else offsets.shape[0] - 1
    # What an empty document returns stands there before; documents with tokens write theirs over it.
    last = x.new_zeros(sequences, K, channels, dtype=torch.float32) if state is None else state.contiguous().clone()
    kept = x.new_empty(batch, -(-tokens // SEGMENT) if keep else 0, K, channels, dtype=torch.float32)
    y = scan_triton.forward(x, dt, A, B, C, D, state, documents, last, kept if keep else None)
    return y, last, kept


@operator("zoo_kernels::selective_scan_backward")
def scan_backward(
    dy: Tensor,
    dlast: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor | None,
    kept: Tensor,
    documents: Tensor | None,
    offsets: Tensor | None,
    kernel: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of :func:`scan` for x, dt, A, B, C, D and state; those of an absent D or state are empty."""
    tensors = (dy, dlast, x, dt, A, B, C, D, state, kept)
    if kernel:
        from zoo_kernels.selective.scan_back_triton import backward

        found = backward(*tensors, documents)
    else:
        with without_autocast(x.device):
            found = chunked.backward(*tensors, offsets)
    dx, ddt, dA, dB, dC, *rest = found
    dD, dstate = (x.new_empty(0) if gradient is None else gradient for gradient in rest)
    return dx, ddt, dA, dB, dC, dD, dstate


# ------------------------------------------------------------------------------------------------- what torch must know
@scan.register_fake
def _(x, dt, A, B, C, D, state, documents, offsets, keep, kernel):
    (batch, tokens, channels), K, dtype = x.shape, A.shape[1], computed(x)
    sequences = batch if offsets is None else offsets.shape[0] - 1
    last = x.new_empty(sequences, K, channels, dtype=dtype)
    kept = x.new_empty(batch, -(-tokens // SEGMENT) if keep else 0, K, channels, dtype=dtype)
    return x.new_empty(x.shape), last, kept


@scan_backward.register_fake
def _(dy, dlast, x, dt, A, B, C, D, state, kept, documents, offsets, kernel):
    def like(tensor):
        return x.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)

    return tuple(like(tensor) for tensor in (x, dt, A, B, C, D, state))


def _save(ctx, inputs, output):
    *tensors, _, ctx.kernel = inputs
    x, dt, A, B, C, D, state, documents, offsets = tensors
    ctx.save_for_backward(x, dt, A, B, C, D, state, output[2], documents, offsets)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dy, dlast, _):
    x, dt, A, B, C, D, state, kept, *tables = ctx.saved_tensors
    if dy is None:
        dy = torch.zeros_like(x)
    *found, dD, dstate = scan_backward(dy, dlast, x, dt, A, B, C, D, state, kept, *tables, ctx.kernel)
    return *found, None if D is None else dD, None if state is None else dstate, None, None, None, None


scan.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.zoo_kernels.selective_scan)
def _forward_flops(x, dt, A, *_, out_shape=None, **__) -> int:
    """What the reference multiplies: the read, 2 per number of the state. Decay and write are elementwise."""
    batch, tokens, channels = x
    return 2 * batch * tokens * channels * A[1]


@register_flop_formula(torch.ops.zoo_kernels.selective_scan_backward)
def _backward_flops(dy, dlast, x, dt, A, *_, out_shape=None, **__) -> int:
    """The products of the gradients of C, of B, and of what was written."""
    return 3 * _forward_flops(x, dt, A)
