"""`recurrent`: one token after another in plain PyTorch, the truth for all other backends; and the parallel form."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from zoo_kernels.delta.call import DeltaCall


class Recurrent:
    """The recurrence as it is written, with PyTorch's own gradients; any device, in fp32 or float64."""

    name = "recurrent"

    def serves(self, call: DeltaCall) -> str | None:
        """It serves every call."""
        return None

    def run(self, call: DeltaCall) -> tuple[Tensor, Tensor]:
        """y [B, T, HV, V] in v's dtype, and the last state [N, HV, K, V]."""
        q, k, v = (x.to(call.compute_dtype) for x in (call.q, call.k, call.v))
        q, k = (x.repeat_interleave(call.group, 2) for x in (q, k))
        log_decay, beta, state = call.gates()
        if call.packing is None:
            y, state = recurrence(q, k, v, log_decay, beta, state, call.scale)
            return y.to(call.v.dtype), state
        ys, states = [], []
        for n, (start, end) in enumerate(pairwise(call.packing.offsets)):
            at = slice(start, end)
            forget = None if log_decay is None else log_decay[:, at]
            erase = None if beta is None else beta[:, at]
            y, last = recurrence(q[:, at], k[:, at], v[:, at], forget, erase, state[n : n + 1], call.scale)
            ys.append(y)
            states.append(last)
        return torch.cat(ys, 1).to(call.v.dtype), torch.cat(states)


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The loop over tokens. Order matters: decay, then read by the key, then write, then read by the query.

    Args:
        q, k: [B, T, HV, K], already one per value head.
        v: [B, T, HV, V].
        log_decay: [B, T, HV, K or 1] or None.
        beta: [B, T, HV, 1] or None.
        state: [B, HV, K, V].
        scale: what multiplies y.

    Returns:
        y [B, T, HV, V] and the last state.
    """
    # One unbind each: indexing token by token would make the backward quadratic in T.
    decays = None if log_decay is None else log_decay.exp().unsqueeze(-1).unbind(1)
    betas = None if beta is None else beta.unsqueeze(-1).unbind(1)
    queries, keys, values = (q * scale).unsqueeze(-2).unbind(1), k.unsqueeze(-2).unbind(1), v.unsqueeze(-2).unbind(1)
    ys = []
    for t, (query, key, value) in enumerate(zip(queries, keys, values)):
        if decays is not None:
            state = state * decays[t]
        if betas is not None:
            value = betas[t] * (value - key @ state)
        state = state + key.mT @ value
        ys.append(query @ state)
    if not ys:  # nothing to compute, but every input stays connected
        inputs = (q, k, log_decay, beta)
        return sum((x.sum(-1, keepdim=True) for x in inputs if x is not None), v), state
    return torch.stack(ys, 1).squeeze(-2), state


def parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """All tokens at once from an empty memory: a third witness, cubic in T and never a backend.

        T_ = (I + stril(diag(beta) M))^-1 diag(beta);  Y = scale * tril(P) T_ V
        M_ij = sum_d k_id k_jd exp(g_id - g_jd), and P the same with q_i; g is the running sum of log_decay

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V], all of one dtype, in which everything is computed. Meant for small T.
        log_decay: [B, T, HV], [B, T, HV, K] or [HV], finite; beta: [B, T, HV].
        scale: None: K ** -0.5.

    Returns:
        y [B, T, HV, V] and the last state [B, HV, K, V].
    """
    T, group = q.shape[1], v.shape[2] // q.shape[2]
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    q, k, v = (x.transpose(1, 2) for x in (q.repeat_interleave(group, 2), k.repeat_interleave(group, 2), v))
    running = _running(log_decay, like=k)
    difference = running.unsqueeze(-2) - running.unsqueeze(-3)  # [B, HV, T, T, K]
    seen = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    decay = difference.masked_fill(~seen.unsqueeze(-1), -torch.inf).exp()
    by_query = scale * torch.einsum("bhik,bhjk,bhijk->bhij", q, k, decay)
    written = v
    if beta is not None:
        rows = beta.transpose(1, 2).unsqueeze(-1)  # [B, HV, T, 1]
        by_key = torch.einsum("bhik,bhjk,bhijk->bhij", k, k, decay).tril(-1)
        written = torch.linalg.solve(torch.eye(T, dtype=q.dtype, device=q.device) + rows * by_key, rows * v)
    last_state = (k * decay[..., -1, :, :]).mT @ written
    return (by_query @ written).transpose(1, 2), last_state


def _running(log_decay: Tensor | None, *, like: Tensor) -> Tensor:
    """Running sums of the log decay, one per channel: [B, HV, T, K], the shape of ``like``."""
    if log_decay is None:
        return torch.zeros_like(like)
    if log_decay.dim() == 1:
        log_decay = log_decay.unsqueeze(-1)  # [HV, T = 1]
    elif log_decay.dim() == 3:
        log_decay = log_decay.transpose(1, 2)
    else:
        return log_decay.transpose(1, 2).cumsum(-2)
    return log_decay.unsqueeze(-1).expand_as(like).cumsum(-2)
