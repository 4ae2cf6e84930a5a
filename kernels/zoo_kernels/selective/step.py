""":func:`selective_step`: a few new tokens of each request, the state rewritten in place."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from zoo_kernels import backend as backends
from zoo_kernels.backend import Backend
from zoo_kernels.delta.call import without_autocast
from zoo_kernels.delta.step import MAX_TOKENS
from zoo_kernels.device import Kernels, refusal
from zoo_kernels.eager import operator
from zoo_kernels.selective.call import SelectiveCall, computed
from zoo_kernels.selective.op import check_inputs, check_values
from zoo_kernels.selective.reference import Recurrent

OP = "selective_step"


def selective_step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    D: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Decode: ``selective_scan`` over a few new tokens of each request, its state rewritten in place.

    On a GPU the kernel is one launch that reads and writes each state once, waits for nothing and allocates y alone.
    It has no gradient.

    Args:
        x, dt: [B, T, E], T from 1 to 16: B requests, and T new tokens of each.
        A: [E, K]; B, C: [B, T, K]; D: [E] or None; dtypes as for ``selective_scan``.
        state: [B, K, E], contiguous, fp32 (float64 for float64 inputs), changed in place.
        backend: "triton" or "torch". None: the first that serves the call.

    Returns:
        y [B, T, E] in x's dtype.

    Raises:
        ValueError: what ``selective_scan`` refuses; more than 16 tokens; a state of another shape, dtype, device or
            memory layout; an input that requires a gradient.

    Source: Gu and Dao 2023, arXiv:2312.00752.
    """
    learning = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "state": state, "D": D}
    names = [name for name, tensor in learning.items() if tensor is not None and tensor.requires_grad]
    if names and torch.is_grad_enabled():
        raise ValueError(
            f"{OP}: {', '.join(names)} would need a gradient, which a state rewritten in place cannot give; call it "
            "under torch.no_grad(), or use selective_scan"
        )
    return step(x, dt, A, B, C, state, D, backend)


@operator("zoo_kernels::selective_step", mutates=("state",))
def step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    D: Tensor | None,
    backend: str | None,
) -> Tensor:
    # Checks and choice stand inside the op, where tensors are real: compilers see neither, and cannot break on them.
    call = _checked(x, dt, A, B, C, state, D)
    check_values(OP, dt, A)
    chosen = backends.choose(OP, call, backend)
    with without_autocast(x.device):
        return chosen.run(call)


@step.register_fake
def _(x, dt, A, B, C, state, D, backend):
    _checked(x, dt, A, B, C, state, D)
    return x.new_empty(x.shape)


@register_flop_formula(torch.ops.zoo_kernels.selective_step)
def _flops(x, dt, A, *_, out_shape=None, **__) -> int:
    """As of ``selective_scan``: the read alone."""
    return 2 * x[0] * x[1] * x[2] * A[1]


@dataclass(frozen=True, eq=False)
class StepCall:
    """The arguments of :func:`selective_step` after its checks; ``tokens`` holds all but ``state``."""

    tokens: SelectiveCall
    state: Tensor


class _Triton(Kernels):
    """The forward kernel of the scan, from the state into the state."""

    def serves(self, call: StepCall) -> str | None:
        return refusal(call.tokens.x)

    def run(self, call: StepCall) -> Tensor:
        from zoo_kernels.selective.scan_triton import forward

        t, state = call.tokens, call.state
        # One program owns its part of a state: it reads it, walks over the tokens, and writes it.
        return forward(t.x, t.dt, t.A, t.B, t.C, t.D, state, None, state, None)


class _Torch:
    """The recurrence in plain PyTorch."""

    name = "torch"

    def serves(self, call: StepCall) -> str | None:
        return None

    def run(self, call: StepCall) -> Tensor:
        y, last = Recurrent().run(replace(call.tokens, initial_state=call.state))
        call.state.copy_(last)
        return y


def _table() -> list[Backend]:
    return [_Triton(), _Torch()]


backends.provide(OP, _table)


def _checked(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, D: Tensor | None) -> StepCall:
    """All that can be checked without a look at numbers."""
    check_inputs(OP, x, dt, A, B, C, D)
    if not 1 <= x.shape[1] <= MAX_TOKENS:
        raise ValueError(
            f"{OP}: each request may bring 1 to {MAX_TOKENS} tokens, got {x.shape[1]}; use selective_scan, which takes "
            "and returns the state, for another number"
        )
    tokens = SelectiveCall(x, dt, A, B, C, D, initial_state=None, packing=None)
    if tuple(state.shape) != tokens.state_shape:
        raise ValueError(
            f"{OP}: state is {list(state.shape)}, but x {list(x.shape)} and A {list(A.shape)} ask for one [K, E] per "
            f"request: {list(tokens.state_shape)}"
        )
    if state.dtype != computed(x):
        raise ValueError(
            f"{OP}: state is {state.dtype}, but for inputs in {x.dtype} it must be {computed(x)}; allocate it so"
        )
    if state.device != x.device:
        raise ValueError(f"{OP}: state is on {state.device}, but x is on {x.device}; move them to one device")
    if not state.is_contiguous():
        raise ValueError(
            f"{OP}: state {list(state.shape)} has strides {list(state.stride())}, but must be contiguous to be changed "
            "in place; allocate it as [B, K, E]"
        )
    return StepCall(tokens, state)
