"""Token by token: :func:`delta_step` to decode with, and `fused_recurrent`, the loop over tokens as one launch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from zoo_kernels import backend as backends
from zoo_kernels.backend import Backend
from zoo_kernels.delta import op as door
from zoo_kernels.delta.call import DeltaCall, without_autocast
from zoo_kernels.delta.reference import Recurrent
from zoo_kernels.device import Kernels, missing
from zoo_kernels.eager import operator

OP = "delta_step"
MAX_TOKENS = 16
# fp16 is not among them: a memory outgrows its range.
STATES = (torch.float32, torch.bfloat16)


def delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    slots: Tensor | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Decode: ``delta_rule`` over a few new tokens of each request, its memory rewritten in place.

        S = exp(log_decay) * S;  u = beta * (v - k @ S);  S = S + outer(k, u);  y = scale * q @ S

    On a GPU this is one launch that reads and writes each memory once, waits for nothing and allocates y alone, so that
    a CUDA graph can hold it. Everything inside is fp32 (float64 for float64 inputs). It has no gradient.

    Args:
        q, k: [B, T, H, K], T from 1 to 16: B requests, and T new tokens of each.
        v: [B, T, HV, V]; sizes and dtypes as for ``delta_rule``.
        state: [rows, HV, K, V], contiguous, changed in place. fp32 (float64 for float64 inputs), or bf16, which halves
            the traffic and rounds the memory after every call: after 4096 single random tokens y is off by 0.4 % (decay
            to a half in 10 tokens) to 2 % (slow decay, or only beta), and by 7 % where the memory only adds.
        log_decay: [B, T, HV], [B, T, HV, K] or [HV], natural log, <= 0. None: forget nothing.
        beta: [B, T, HV] in [0, 2]. None: only add, u = v.
        slots: int32 or int64 [B], on the device of ``state``: the row of each request, none twice. Negative: the
            request is skipped, its y is zero, and no row changes. None: request b has row b, and there are B rows.
        scale: what multiplies y. None: K ** -0.5.
        backend: "triton" or "torch"; the latter waits for the device where ``slots`` are given. None: the first that
            serves the call.

    Returns:
        y [B, T, HV, V] in v's dtype.

    Raises:
        ValueError: what ``delta_rule`` refuses; more than 16 tokens; a state or slots of another shape, dtype or
            device; an input that requires a gradient; slots past the last row or given twice (values are looked at on
            the CPU and under ZOO_CHECK=1 only: elsewhere such slots overwrite what is not theirs).

    Source: as for ``delta_rule``.
    """
    if torch.is_grad_enabled() and (names := _learning(q=q, k=k, v=v, state=state, log_decay=log_decay, beta=beta)):
        raise ValueError(
            f"{OP}: {names} would need a gradient, which a memory rewritten in place cannot give; call it under "
            "torch.no_grad(), or use delta_rule"
        )
    return _delta_step(q, k, v, state, log_decay, beta, slots, scale, backend)


@operator("zoo_kernels::delta_step", mutates=("state",))
def _delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    slots: Tensor | None,
    scale: float | None,
    backend: str | None,
) -> Tensor:
    # Checks and choice stand inside the op, where tensors are real: compilers see neither, and cannot break on them.
    call = _checked(q, k, v, state, log_decay, beta, slots, scale)
    _check_values(call)
    chosen = backends.choose(OP, call, backend)
    with without_autocast(v.device):
        return chosen.run(call)


@_delta_step.register_fake
def _(q: Any, k: Any, v: Tensor, state: Any, log_decay: Any, beta: Any, slots: Any, scale: Any, backend: Any) -> Tensor:
    _checked(q, k, v, state, log_decay, beta, slots, scale)
    return v.new_empty(v.shape)


@operator("zoo_kernels::delta_recurrent")
def _delta_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    from zoo_kernels.delta.recurrent_triton import LOOP, recurrent

    last = _last_state(k, v, cu_seqlens)
    before = None if initial_state is None else initial_state.contiguous()
    y = recurrent(LOOP, q, k, v, log_decay, beta, before, last, scale=scale, cu_seqlens=cu_seqlens)
    return y, last


@_delta_recurrent.register_fake
def _(
    q: Any, k: Tensor, v: Tensor, log_decay: Any, beta: Any, initial_state: Any, cu_seqlens: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), _last_state(k, v, cu_seqlens)


def _last_state(k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Room for the last states [N, HV, K, V], not yet written."""
    sequences = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return v.new_empty(sequences, v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)


def _flops(k: torch.Size, v: torch.Size, beta: torch.Size | None) -> int:
    """Write, read by query, read by key where there is beta; the decay is elementwise, and not counted."""
    B, T, HV, V = v
    return (4 if beta is None else 6) * B * T * HV * k[3] * V


@register_flop_formula(torch.ops.zoo_kernels.delta_step)
def _(q: Any, k: Any, v: Any, state: Any, log_decay: Any, beta: Any, *rest: Any, **more: Any) -> int:
    return _flops(k, v, beta)


@register_flop_formula(torch.ops.zoo_kernels.delta_recurrent)
def _(q: Any, k: Any, v: Any, log_decay: Any, beta: Any, *rest: Any, **more: Any) -> int:
    return _flops(k, v, beta)


# ------------------------------------------------------------------------------------------------------------ backends
class FusedRecurrent(Kernels):
    """`fused_recurrent` of ``delta_rule``: the recurrence over any number of tokens as one launch, without a backward.

    One read and one write of the state make it the choice for a few tokens, see :func:`short`. For many it is there to
    be named, and to be measured against.
    """

    name = "fused_recurrent"

    def serves(self, call: DeltaCall) -> str | None:
        """Inputs that need no gradient, in fp32 or less, where Triton runs."""
        learning = {"q": call.q, "k": call.k, "v": call.v, "log_decay": call.log_decay, "beta": call.beta}
        if torch.is_grad_enabled() and (names := _learning(**learning, initial_state=call.initial_state)):
            return f"it has no backward, but {names} would need a gradient"
        return _narrow(call)

    def declines(self, call: DeltaCall) -> str | None:
        """Not chosen by itself for many tokens, nor interpreted."""
        if (reason := super().declines(call)) is not None:
            return reason
        return None if short(call) else f"beyond {MAX_TOKENS} tokens a document, chunks in matrix products are faster"

    def run(self, call: DeltaCall) -> tuple[Tensor, Tensor]:
        """y [B, T, HV, V] in v's dtype, and the last state [N, HV, K, V]."""
        offsets = None if call.packing is None else call.packing.cu_seqlens.to(call.v.device, non_blocking=True)
        return _delta_recurrent(
            call.q, call.k, call.v, call.log_decay, call.beta, call.initial_state, offsets, call.scale
        )


def decodes(*inputs: Tensor | None) -> bool:
    """Whether :func:`delta_step` takes these inputs, q first: few tokens, and none that needs a gradient."""
    q = inputs[0]
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return q is not None and 1 <= q.shape[1] <= MAX_TOKENS and not learns


def short(call: DeltaCall) -> bool:
    """Whether every document is so short that one read and one write of its state outweigh all matrix products."""
    longest = call.v.shape[1] if call.packing is None else call.packing.max_length
    return longest <= MAX_TOKENS


@dataclass(frozen=True)
class StepCall:
    """The arguments of :func:`delta_step` after its checks; ``tokens`` holds all but ``state`` and ``slots``."""

    tokens: DeltaCall
    state: Tensor
    slots: Tensor | None


class _Triton(Kernels):
    """One launch, which reads and writes each state once."""

    def serves(self, call: StepCall) -> str | None:
        return _narrow(call.tokens)

    def run(self, call: StepCall) -> Tensor:
        from zoo_kernels.delta.recurrent_triton import STEP, recurrent

        x, state, slots = call.tokens, call.state, call.slots
        slots = None if slots is None else slots.contiguous()
        return recurrent(STEP, x.q, x.k, x.v, x.log_decay, x.beta, state, state, scale=x.scale, slots=slots)


class _Torch:
    """The recurrence in plain PyTorch, over the requests that have a row."""

    name = "torch"

    def serves(self, call: StepCall) -> str | None:
        return None

    def run(self, call: StepCall) -> Tensor:
        if call.slots is None:
            y, last = self._advance(call.tokens, call.state)
            call.state.copy_(last)
            return y
        used = (call.slots >= 0).nonzero().squeeze(1)
        rows, x = call.slots[used].long(), call.tokens
        log_decay = x.log_decay if x.log_decay is None or x.log_decay.dim() == 1 else x.log_decay[used]
        beta = None if x.beta is None else x.beta[used]
        x = replace(x, q=x.q[used], k=x.k[used], v=x.v[used], log_decay=log_decay, beta=beta)
        found, last = self._advance(x, call.state[rows])
        call.state[rows] = last.to(call.state.dtype)
        y = torch.zeros_like(call.tokens.v, memory_format=torch.contiguous_format)
        y[used] = found
        return y

    def _advance(self, tokens: DeltaCall, state: Tensor) -> tuple[Tensor, Tensor]:
        return Recurrent().run(replace(tokens, initial_state=state.to(tokens.compute_dtype)))


def _table() -> list[Backend]:
    return [_Triton(), _Torch()]


backends.provide(OP, _table)


def _narrow(call: DeltaCall) -> str | None:
    """Why Triton's kernel cannot serve these dtypes, or on this device."""
    if call.v.dtype == torch.float64:
        return "it computes in fp32, but the inputs are float64"
    return missing(call.v.device)


def _learning(**tensors: Tensor | None) -> str:
    """The names of those that require a gradient."""
    return ", ".join(name for name, x in tensors.items() if x is not None and x.requires_grad)


# -------------------------------------------------------------------------------------------------------------- checks
def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    slots: Tensor | None,
    scale: float | None,
) -> StepCall:
    """All that can be checked without a look at numbers."""
    with _in_our_name():
        door._check_tensors(q, k, v, log_decay, beta)
        door._check_sizes(q, k, v)
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"{OP}: scale must be a finite number, got {scale}; leave it out for K ** -0.5")
    if not 1 <= v.shape[1] <= MAX_TOKENS:
        raise ValueError(
            f"{OP}: each request may bring 1 to {MAX_TOKENS} tokens, got {v.shape[1]}; use delta_rule, which takes and "
            "returns the state, for another number"
        )
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    tokens = DeltaCall(q, k, v, log_decay, beta, initial_state=None, packing=None, scale=scale, chunk=None)
    call = StepCall(tokens, state, slots)
    _check_slots(call)
    _check_state(call)
    return call


def _check_slots(call: StepCall) -> None:
    slots, batch, device = call.slots, call.tokens.v.shape[0], call.tokens.v.device
    if slots is None:
        return
    if list(slots.shape) != [batch]:
        raise ValueError(f"{OP}: slots is {list(slots.shape)}, but {batch} requests ask for [{batch}]: a row for each")
    if slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{OP}: slots must be int32 or int64, got {slots.dtype}; cast it with slots.int()")
    if slots.device != device:
        raise ValueError(f"{OP}: slots is on {slots.device}, but v is on {device}; move them to one device")


def _check_state(call: StepCall) -> None:
    tokens, state, wanted = call.tokens, call.state, list(call.tokens.state_shape)
    if list(state.shape[1:]) != wanted[1:] or (call.slots is None and state.shape[0] != wanted[0]):
        rows = "any number of rows" if call.slots is not None else f"{wanted[0]} rows, one per request,"
        cure = "" if call.slots is not None else "; give slots where the rows lie otherwise"
        raise ValueError(
            f"{OP}: state is {list(state.shape)}, but q {list(tokens.q.shape)} and v {list(tokens.v.shape)} ask for "
            f"{rows} of [HV, K, V] = {wanted[1:]}{cure}"
        )
    allowed = (torch.float64,) if tokens.compute_dtype == torch.float64 else STATES
    if state.dtype not in allowed:
        raise ValueError(
            f"{OP}: state is {state.dtype}, but for inputs in {tokens.v.dtype} it must be "
            f"{' or '.join(map(str, allowed))}; allocate it so"
        )
    if state.device != tokens.v.device:
        raise ValueError(f"{OP}: state is on {state.device}, but v is on {tokens.v.device}; move them to one device")
    if not state.is_contiguous():
        raise ValueError(
            f"{OP}: state {list(state.shape)} has strides {list(state.stride())}, but must be contiguous to be changed "
            "in place; allocate it as [rows, HV, K, V]"
        )


def _check_values(call: StepCall) -> None:
    """Shapes of gates; and where looking costs nothing or is asked for, what gates and slots hold."""
    tokens = call.tokens
    with _in_our_name():
        door._check_gates(tokens.q, tokens.v, tokens.log_decay, tokens.beta)
    if call.slots is None or (tokens.v.device.type != "cpu" and os.environ.get("ZOO_CHECK") != "1"):
        return
    used, rows = sorted(slot for slot in call.slots.tolist() if slot >= 0), call.state.shape[0]
    if used and used[-1] >= rows:
        raise ValueError(f"{OP}: slot {used[-1]} is given, but state has {rows} rows; rows count from 0")
    for one, other in pairwise(used):
        if one == other:
            raise ValueError(f"{OP}: slot {one} is given to two requests; each needs a row of its own, -1 skips one")


@contextmanager
def _in_our_name() -> Iterator[None]:
    """The checks of ``delta_rule`` speak of themselves: here they speak of this op."""
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error).replace(door.OP, OP, 1)) from None
