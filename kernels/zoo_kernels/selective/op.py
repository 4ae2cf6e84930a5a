"""``selective_scan``: the public op of this folder. It checks its arguments and picks a backend."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from zoo_kernels import backend as backends
from zoo_kernels import device
from zoo_kernels.backend import Backend
from zoo_kernels.delta.call import without_autocast
from zoo_kernels.packing import Packing, as_packing
from zoo_kernels.selective.call import SelectiveCall
from zoo_kernels.state import check_state

OP = "selective_scan"
MAX_STATE = 256
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _table() -> list[Backend]:
    from zoo_kernels.selective.operators import Chunked
    from zoo_kernels.selective.reference import Recurrent

    portable: list[Backend] = [Chunked(), Recurrent()]
    if device.triton_missing() is not None:
        return [device.Absent(), *portable]
    from zoo_kernels.selective.operators import Triton

    return [Triton(), *portable]


backends.provide(OP, _table)


@overload
def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    packing: Packing | Sequence[int] | Tensor | None = None,
    return_state: Literal[True] = True,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    packing: Packing | Sequence[int] | Tensor | None = None,
    return_state: Literal[False],
    backend: str | None = None,
) -> Tensor: ...
def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    packing: Packing | Sequence[int] | Tensor | None = None,
    return_state: bool = True,
    backend: str | None = None,
) -> tuple[Tensor, Tensor] | Tensor:
    """Read and rewrite a state of K numbers per channel, one token after another; each number fades at its own rate.

        S[k, e] = exp(dt[e] * A[e, k]) * S[k, e] + B[k] * dt[e] * x[e]
        y[e] = sum over k of C[k] * S[k, e] + D[e] * x[e]

    Everything inside is computed in fp32, or in float64 for float64 inputs, whatever autocast says. The letters A to D
    are the paper's; sizes are [B] rows, T tokens, E channels and K numbers of state per channel.

    Args:
        x: [B, T, E], fp16, bf16, fp32 or float64, T >= 0.
        dt: [B, T, E], any float dtype: the step of each token and channel, >= 0 (pass softplus of a projection).
        A: [E, K], any float dtype, finite and <= 0; K from 1 to 256. The log decay of a step is dt * A.
        B, C: [B, T, K], in x's dtype: what each token writes by and reads by, shared by all channels.
        D: [E], any float dtype: how much of x is added to y. None: nothing.
        initial_state: [N, K, E], what the state holds before the first token; fp32 (float64 for float64 inputs). None:
            zeros.
        packing: a Packing, or host offsets of N + 1 numbers: where packed documents begin and end; then B is 1. None:
            every row is one document, and N is B.
        return_state: False: y alone.
        backend: "triton", "chunked" or "recurrent". None: the first that serves the call.

    Returns:
        y [B, T, E] in x's dtype, and the last state [N, K, E] in fp32 (float64 for float64 inputs). An empty document
        returns the state that it was given. Every input gets a gradient; one through the last state counts. Gradients
        of gradients: backend "recurrent" only.

    Raises:
        ValueError: shapes, dtypes, devices or offsets that disagree, with both and the cure; a dt below 0, an A above 0
            or infinite (on the CPU always; on devices only under ZOO_CHECK=1, since looking at values makes the host
            wait; a NaN passes, and makes the outputs NaN); a named backend that cannot serve, with its reason.

    Source: Gu and Dao 2023, arXiv:2312.00752.
    """
    check_inputs(OP, x, dt, A, B, C, D)
    check_values(OP, dt, A)
    packed = as_packing(packing, batch=x.shape[0], tokens=x.shape[1], op=OP)
    if packed is not None and packed.cu_seqlens.device != x.device:
        packed = packed.to(x.device, non_blocking=True)
    call = SelectiveCall(x, dt, A, B, C, D, initial_state, packed)
    _check_state(call)
    chosen = backends.choose(OP, call, backend)
    with without_autocast(x.device):
        y, last = chosen.run(call)
    return (y, last) if return_state else y


# -------------------------------------------------------------------------------------------------------------- checks
def check_inputs(op: str, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> None:
    """Shapes, dtypes and devices.

    Raises:
        ValueError: what disagrees, in the name of ``op``.
    """
    if x.dim() != 3 or x.dtype not in FLOATS:
        raise ValueError(
            f"{op}: x must be [B, T, E] of fp16, bf16, fp32 or float64, got {list(x.shape)} of {x.dtype}; cast it, or "
            "flatten its heads into channels"
        )
    batch, tokens, channels = x.shape
    if A.dim() != 2 or A.shape[0] != channels or not 1 <= A.shape[1] <= MAX_STATE:
        raise ValueError(
            f"{op}: A is {list(A.shape)}, but x has {channels} channels: give [{channels}, K], K from 1 to {MAX_STATE}"
        )
    by_state = [batch, tokens, A.shape[1]]
    wanted = {"dt": (dt, list(x.shape)), "B": (B, by_state), "C": (C, by_state), "D": (D, [channels])}
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and list(tensor.shape) != shape:
            raise ValueError(
                f"{op}: {name} is {list(tensor.shape)}, but x {list(x.shape)} and A {list(A.shape)} ask for {shape}"
            )
    if not x.dtype == B.dtype == C.dtype:
        raise ValueError(
            f"{op}: x, B and C must share one dtype, got {x.dtype}, {B.dtype} and {C.dtype}; cast them, for instance "
            "B.to(x.dtype)"
        )
    for name, tensor in (("dt", dt), ("A", A), ("B", B), ("C", C), ("D", D)):
        if tensor is None:
            continue
        if not tensor.is_floating_point():
            raise ValueError(f"{op}: {name} must hold floating-point numbers, got {tensor.dtype}; cast it")
        if tensor.device != x.device:
            raise ValueError(f"{op}: {name} is on {tensor.device}, but x is on {x.device}; move them to one device")


def check_values(op: str, dt: Tensor, A: Tensor) -> None:
    """That nothing grows by itself, where looking costs nothing or is asked for.

    Raises:
        ValueError: a dt below 0, an A above 0 or infinite, in the name of ``op``.
    """
    if torch.compiler.is_compiling() or dt.is_meta:
        return
    if dt.device.type != "cpu" and os.environ.get("ZOO_CHECK") != "1":
        return
    if dt.numel() and (lowest := dt.detach().amin().item()) < 0:
        raise ValueError(f"{op}: dt must be at least 0 everywhere, got {lowest:.6g}; pass F.softplus(x)")
    if A.numel():
        lowest, highest = (bound.item() for bound in A.detach().aminmax())
        if highest > 0 or lowest == float("-inf"):
            outside = highest if highest > 0 else lowest
            raise ValueError(
                f"{op}: A must be finite and at most 0 everywhere, got {outside:.6g}; pass -torch.exp(A_log)"
            )


def _check_state(call: SelectiveCall) -> None:
    counted = "rows of the batch" if call.packing is None else "documents"
    why = f"{call.sequences} {counted}, states of {call.A.shape[1]} and {call.A.shape[0]} channels ask for [N, K, E]"
    check_state(OP, call.initial_state, call.state_shape, why, call.compute_dtype, ("x", call.x))
