"""``delta_rule``: the public op of the family. It checks its arguments and picks a backend."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zoo_kernels import backend as backends
from zoo_kernels import device
from zoo_kernels.backend import Backend
from zoo_kernels.delta.call import DeltaCall, without_autocast
from zoo_kernels.packing import Packing, as_packing
from zoo_kernels.state import check_state

OP = "delta_rule"
CHUNKS = (16, 32, 64)
MAX_K, MAX_V = 256, 512
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _table() -> list[Backend]:
    from zoo_kernels.delta.chunked import Chunked
    from zoo_kernels.delta.reference import Recurrent
    from zoo_kernels.delta.step import FusedRecurrent

    portable: list[Backend] = [Chunked(), Recurrent()]
    if device.triton_missing() is not None:
        return [FusedRecurrent(), device.Absent(), *portable]
    from zoo_kernels.delta.triton_backend import Triton

    return [FusedRecurrent(), Triton(), *portable]


backends.provide(OP, _table)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    initial_state: Tensor | None = None,
    packing: Packing | Sequence[int] | Tensor | None = None,
    scale: float | None = None,
    chunk: int | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Read and rewrite a [K, V] memory, one token after another.

        S = exp(log_decay) * S;  u = beta * (v - k @ S);  S = S + outer(k, u);  y = scale * q @ S

    What is absent is not done: the two gates give six mixers, from linear attention (neither) to Kimi Delta Attention
    (both, channel by channel). Everything inside, gates and states included, is computed in fp32, or in float64 for
    float64 inputs, whatever autocast says: autocast neither casts the inputs nor excuses them from having one dtype.

    Args:
        q, k: [B, T, H, K], K from 1 to 256. Give k unit length when beta is given, else the memory can grow without
            bound.
        v: [B, T, HV, V], V from 1 to 512, HV a multiple of H; value head h reads key head h // (HV / H). q, k and v
            share one of the dtypes fp16, bf16, fp32, float64.
        log_decay: [B, T, HV], [B, T, HV, K] or [HV], any float dtype; nats per token, from -inf (forget all) to 0.
            None: forget nothing.
        beta: [B, T, HV], any float dtype, in [0, 2]: the share of the recalled value to replace. None: only add, u = v.
        initial_state: [N, HV, K, V], what the memory holds before the first token; fp32 (float64 for float64 inputs).
            None: zeros.
        packing: a Packing, or host offsets of N + 1 numbers: where packed documents begin and end; then B is 1. None:
            every row is one document, and N is B.
        scale: what multiplies y. None: K ** -0.5.
        chunk: tokens per chunk, 16, 32 or 64: a choice of speed, not of result. None: the backend's own choice.
        backend: the name of the one backend to use. None: the first that serves the call.

    Returns:
        y [B, T, HV, V] in v's dtype, and the last state [N, HV, K, V] in fp32 (float64 for float64 inputs). An empty
        document returns the state that it was given. Every input, gates and initial state included, gets a gradient;
        one through the last state counts. Gradients of gradients: backend "recurrent" only.

    Raises:
        ValueError: shapes, dtypes, devices or offsets that disagree, with both and the cure; sizes out of range; a
            log_decay above 0 or a beta outside [0, 2] (on the CPU always; on devices only under ZOO_CHECK=1, since
            looking at values makes the host wait; a NaN passes, and makes the outputs NaN); a named backend that cannot
            serve, with its reason.

    Source: Yang et al. 2024, arXiv:2406.06484 and arXiv:2412.06464; by channel: Kimi Linear, arXiv:2510.26692.
    """
    arguments = (q, k, v, log_decay, beta, initial_state, packing, scale, chunk, backend)
    return _closed()(*arguments) if torch.compiler.is_compiling() and _loops(v, backend) else _delta_rule(*arguments)


def _loops(v: Tensor, backend: str | None) -> bool:
    """Whether the backend is made of loops and tables, which would be traced anew for every length and packing."""
    named = backends.preferred(OP) if backend is None else backend
    kernels = device.WANTED and v.is_cuda and v.dtype != torch.float64 and device.missing(v.device) is None
    return named not in ("triton", "fused_recurrent") and not (named is None and kernels)


def _closed() -> Callable[..., tuple[Tensor, Tensor]]:
    """The op, closed to compilers."""
    if not _CLOSED:
        _CLOSED.append(torch.compiler.disable(_delta_rule, reason="delta_rule runs as it is"))
    return _CLOSED[0]


_CLOSED: list[Any] = []


def _delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    packing: Packing | Sequence[int] | Tensor | None,
    scale: float | None,
    chunk: int | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    _check_tensors(q, k, v, log_decay, beta)
    _check_sizes(q, k, v)
    _check_gates(q, v, log_decay, beta)
    if chunk is not None and chunk not in CHUNKS:
        raise ValueError(f"{OP}: chunk must be 16, 32 or 64, got {chunk!r}; leave it out to let the backend choose")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"{OP}: scale must be a finite number, got {scale}; leave it out for K ** -0.5")
    call = DeltaCall(
        q=q,
        k=k,
        v=v,
        log_decay=log_decay,
        beta=beta,
        initial_state=initial_state,
        packing=as_packing(packing, batch=v.shape[0], tokens=v.shape[1], op=OP),
        scale=q.shape[3] ** -0.5 if scale is None else float(scale),
        chunk=chunk,
    )
    _check_state(call)
    chosen = backends.choose(OP, call, backend)
    with without_autocast(v.device):
        return chosen.run(call)


# -------------------------------------------------------------------------------------------------------------- checks
def _check_tensors(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            heads = "HV, V" if name == "v" else "H, K"
            raise ValueError(
                f"{OP}: {name} is {list(x.shape)}, but it must be [B, T, {heads}]; unflatten the heads first"
            )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"{OP}: q, k and v must share one dtype, got {q.dtype}, {k.dtype} and {v.dtype}; cast them, for instance "
            "q.to(v.dtype) (under autocast, a normalisation returns fp32)"
        )
    if v.dtype not in FLOATS:
        raise ValueError(f"{OP}: q, k and v must be fp16, bf16, fp32 or float64, got {v.dtype}; cast them")
    for name, x in (("q", q), ("k", k), ("log_decay", log_decay), ("beta", beta)):
        if x is not None and x.device != v.device:
            raise ValueError(f"{OP}: {name} is on {x.device}, but v is on {v.device}; move them to one device")
    for name, x in (("log_decay", log_decay), ("beta", beta)):
        if x is not None and not x.is_floating_point():
            raise ValueError(
                f"{OP}: {name} must hold floating-point numbers, got {x.dtype}; cast it with {name}.float()"
            )


def _check_sizes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.shape != k.shape:
        raise ValueError(f"{OP}: q is {list(q.shape)}, but k is {list(k.shape)}; both must be [B, T, H, K]")
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"{OP}: v is {list(v.shape)}, but k is {list(k.shape)}; the first two sizes, B and T, must agree"
        )
    (H, K), (HV, V) = k.shape[2:], v.shape[2:]
    if H < 1 or HV < 1 or HV % H:
        raise ValueError(
            f"{OP}: HV must be a multiple of H, and neither may be 0, got {HV} value heads for {H} key heads; "
            f"{max(1, round(HV / max(H, 1))) * max(H, 1)} value heads would do"
        )
    if not 1 <= K <= MAX_K:
        raise ValueError(f"{OP}: K must be from 1 to {MAX_K}, got {K}; use more heads of smaller keys")
    if not 1 <= V <= MAX_V:
        raise ValueError(f"{OP}: V must be from 1 to {MAX_V}, got {V}; use more heads of smaller values")


def _check_gates(q: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None) -> None:
    by_token, K = list(v.shape[:3]), q.shape[3]
    if log_decay is not None and list(log_decay.shape) not in (by_token, [*by_token, K], by_token[2:]):
        raise ValueError(
            f"{OP}: log_decay is {list(log_decay.shape)}, but q {list(q.shape)} and v {list(v.shape)} ask for "
            f"{by_token} (one number per value head), {[*by_token, K]} (one per channel of the key) or {by_token[2:]} "
            "(constants)"
        )
    if beta is not None and list(beta.shape) != by_token:
        raise ValueError(
            f"{OP}: beta is {list(beta.shape)}, but v {list(v.shape)} asks for one value per token and head: "
            f"{by_token}. Squeeze or expand it, or leave beta out for a mixer that never erases"
        )
    if torch.compiler.is_compiling() or v.is_meta or (v.device.type != "cpu" and os.environ.get("ZOO_CHECK") != "1"):
        return
    if log_decay is not None and log_decay.numel() and (highest := log_decay.detach().amax().item()) > 0:
        raise ValueError(
            f"{OP}: log_decay must be at most 0 everywhere, got {highest:.6g}; it is the natural logarithm of a factor "
            "from 0 to 1: negate it, or pass -F.softplus(x) or F.logsigmoid(x)"
        )
    if beta is not None and beta.numel():
        lowest, highest = (bound.item() for bound in beta.detach().aminmax())
        if lowest < 0 or highest > 2:
            outside = lowest if lowest < 0 else highest
            raise ValueError(f"{OP}: beta must lie in [0, 2], got {outside:.6g}; pass x.sigmoid(), or 2 * x.sigmoid()")


def _check_state(call: DeltaCall) -> None:
    counted = "rows of the batch" if call.packing is None else "documents"
    why = (
        f"{call.sequences} {counted}, {call.v.shape[2]} value heads, keys of {call.k.shape[3]} and values of "
        f"{call.v.shape[3]} ask for [N, HV, K, V]"
    )
    check_state(OP, call.initial_state, call.state_shape, why, call.compute_dtype, ("v", call.v))
