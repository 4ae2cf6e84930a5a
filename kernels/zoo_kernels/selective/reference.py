"""The truth: a loop over tokens in plain PyTorch."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from zoo_kernels.selective.call import SelectiveCall


class Recurrent:
    """Token by token, in fp32 or float64, on any device; gradients of gradients too."""

    name = "recurrent"

    def serves(self, call: SelectiveCall) -> str | None:
        """Everything."""
        return None

    def run(self, call: SelectiveCall) -> tuple[Tensor, Tensor]:
        """y [B, T, E] in x's dtype, and the last state [N, K, E]."""
        dtype = call.compute_dtype
        x, dt, A, B, C = (t.to(dtype) for t in (call.x, call.dt, call.A, call.B, call.C))
        state = call.initial_state
        if state is None:
            state = x.new_zeros(call.state_shape)
        if call.packing is None:
            y, state = recurrence(x, dt, A, B, C, state)
        else:
            parts = [slice(start, end) for start, end in pairwise(call.packing.offsets)]
            documents = [
                recurrence(x[:, at], dt[:, at], A, B[:, at], C[:, at], state[n : n + 1]) for n, at in enumerate(parts)
            ]
            y, state = torch.cat([y for y, _ in documents], 1), torch.cat([last for _, last in documents])
        if call.D is not None:
            y = y + call.D.to(dtype) * x
        return y.to(call.x.dtype), state


def recurrence(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The loop over tokens, without the skip. Order matters: decay, then write, then read.

    A FLOP counter sees the read alone, 2 of the 7 per number of the state: decay and write are elementwise.

    Args:
        x, dt: [B, T, E]; A: [E, K]; B, C: [B, T, K]; state: [B, K, E], all of one dtype.

    Returns:
        y [B, T, E] and the last state.
    """
    # One unbind each: indexing token by token would make the backward quadratic in T.
    decays = (dt.unsqueeze(2) * A.t()).exp().unbind(1)
    writes = (B.unsqueeze(3) * (dt * x).unsqueeze(2)).unbind(1)
    ys = []
    for decay, write, read in zip(decays, writes, C.unsqueeze(2).unbind(1)):
        state = decay * state + write
        ys.append(read @ state)
    if not ys:  # nothing to compute, but every input stays connected
        return x * dt + (B + C).sum(-1, keepdim=True) + A.sum(-1), state
    return torch.cat(ys, 1), state
