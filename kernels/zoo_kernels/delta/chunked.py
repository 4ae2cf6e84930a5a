"""`torch`: the chunkwise delta rule in matrix products, on any device, with a backward of its own.

Inside a chunk that the state S enters, with decays left out (intra.py holds them), P = tril(q k^T) and N = stril(k k^T) diag(beta):

    A = (I + N)^-1;  e = A (v - k S);  u = beta * e;  y = q S + P u;  S' = S + k^T u

and, with dS the gradient of the state that leaves,

    du = k dS + P^T dy;  z = A^T (beta * du), which is dv;  dS' = dS + q^T dy - k^T z

Row t of e is the error of the recurrence, v_t - k_t S_t, so dbeta = e . z / beta. Without beta: e = u = v and z = du. Only the lines
for S and dS run chunk after chunk; everything else is done for all chunks at once. The forward keeps its inputs and the states that
enter the chunks; the backward computes the rest again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zoo_kernels.delta.call import DeltaCall
from zoo_kernels.delta.layout import Heads, Layout, Span, dense, packed
from zoo_kernels.delta.operands import Operands
from zoo_kernels.delta.reference import Recurrent

# Numbers in the largest tensor of a span.
SPAN_CPU = 2**17
SPAN_DEVICE = 2**25


class Chunked:
    """The chunkwise form; a single token is one step of the recurrence."""

    name = "torch"

    def serves(self, call: DeltaCall) -> str | None:
        """It serves every call."""
        return None

    def run(self, call: DeltaCall) -> tuple[Tensor, Tensor]:
        """y [B, T, HV, V] in v's dtype, and the last state [N, HV, K, V]."""
        B, T, HV = call.v.shape[:3]
        if T <= 1:
            return Recurrent().run(call)
        log_decay, beta, state = call.gates()
        by_channel = log_decay is not None and log_decay.shape[-1] > 1
        on_cpu = call.v.device.type == "cpu"
        chunk = call.chunk or (32 if on_cpu else 64)
        layout = dense(B, T, chunk) if call.packing is None else packed(call.packing, chunk, call.v.device)
        heads = Heads(call.k.shape[2], HV, shared=beta is None and not by_channel)
        widest = max(call.k.shape[3], heads.R * call.v.shape[3], heads.R * chunk)
        spans = layout.spans((SPAN_CPU if on_cpu else SPAN_DEVICE) // (heads.count * chunk * widest))
        tensors = (call.q, call.k, call.v, log_decay, beta, state)
        learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
        return ChunkwiseDeltaRule.apply(*tensors, Plan(layout, spans, heads, call.scale, learns))


class ChunkwiseDeltaRule(torch.autograd.Function):
    """(q, k, v, log_decay [B, T, HV, K or 1], beta [B, T, HV, 1], state, plan) -> (y, last state)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, state: Tensor, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        layout, heads = plan.layout, plan.heads
        y = torch.empty_like(v, memory_format=torch.contiguous_format)
        last = heads.load_state(layout, state)
        states = last.new_empty(layout.rows if plan.learns else 0, heads.count, *last.shape[1:])
        for span in plan.spans:
            chunks = plan.operands(span, q, k, v, log_decay, beta, state.dtype)
            values = heads.load_values(span, v, state.dtype)
            entering = states[span.rows] if plan.learns else states.new_empty(chunks.k.shape[0], *states.shape[1:])
            if chunks.solve is None:
                _carry_additions(chunks, last, entering, values)
                written = values
            else:
                written = _carry_errors(chunks, last, entering, values).mul_(chunks.beta)
            read = chunks.decayed(chunks.reading @ entering, chunks.entering)
            heads.store_values(span, read.add_(chunks.by_values(chunks.by_query, written)), y)
        ctx.save_for_backward(q, k, v, log_decay, beta, states)
        ctx.plan, ctx.state_shape = plan, state.shape
        ctx.set_materialize_grads(False)
        return y, heads.store_state(layout, last)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dlast: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, beta, states = ctx.saved_tensors
        plan: Plan = ctx.plan
        inputs = (q, k, v, log_decay, beta)
        with torch.autocast(v.device.type, enabled=False):
            dstate = plan.heads.load_state(plan.layout, states.new_zeros(ctx.state_shape) if dlast is None else dlast)
            gradients = [None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
            for span in reversed(plan.spans):
                chunks = plan.operands(span, *inputs, states.dtype)
                values = plan.heads.load_values(span, v, states.dtype)
                dvalues = torch.zeros_like(values) if dy is None else plan.heads.load_values(span, dy, states.dtype)
                found = _gradients(chunks, values, states[span.rows], dvalues, dstate)
                _store(plan, span, found, gradients)
            if log_decay is not None and gradients[3] is not None:
                # exp(-inf) has no slope, and rounding must not leave one.
                gradients[3].masked_fill_(log_decay == -torch.inf, 0.0)
            return (*gradients, plan.heads.store_state(plan.layout, dstate), None)


@dataclass(frozen=True)
class Plan:
    """How one call is cut up.

    Attributes:
        spans: worked on one after the other; what a span needs besides inputs and states is gone when the next begins.
        learns: a backward may follow, so the states that enter the chunks are kept.
    """

    layout: Layout
    spans: list[Span]
    heads: Heads
    scale: float
    learns: bool

    def operands(
        self, span: Span, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, dtype: torch.dtype
    ) -> Operands:
        """The operands of one span."""
        return Operands.of(span, self.heads, q, k, log_decay, beta, self.scale, v.shape[3], dtype)


# ---------------------------------------------------------------------------------------------------- chunk after chunk
def _carry_additions(chunks: Operands, state: Tensor, states: Tensor, values: Tensor) -> None:
    """Without beta. ``state`` [N * heads, K, R * V] moves on to the end; those that enter are written to ``states`` [G, K, R * V]."""
    added = chunks.writing.mT @ chunks.decayed(values, chunks.leaving)
    for entering, keep, new in zip(*map(chunks.by_step, (states, chunks.keep, added))):
        now = state[: len(entering)]
        entering.copy_(now)
        _decay_and_add(now, keep, new)


def _carry_errors(chunks: Operands, state: Tensor, states: Tensor, values: Tensor) -> Tensor:
    """With beta: the same; returns the errors e [G, C, V]."""
    errors, recalled = chunks.solve @ values, chunks.solve @ chunks.recalling  # e = A v - (A k) S
    writing = (chunks.writing * chunks.beta).mT
    for entering, keep, e, recall, write in zip(*map(chunks.by_step, (states, chunks.keep, errors, recalled, writing))):
        now = state[: len(entering)]
        entering.copy_(now)
        e.baddbmm_(recall, entering, alpha=-1)
        if keep is not None:
            now *= keep
        now.baddbmm_(write, e)
    return errors


def _carry_back(chunks: Operands, dstate: Tensor, queried: Tensor, z: Tensor | None, written: Tensor | None) -> Tensor:
    """The gradients of the states that leave [G, K, R * V].

    Args:
        dstate: [N * heads, K, R * V], of the states that leave the last step; becomes that of those that enter the first.
        queried: [G, K, R * V], q^T dy.
        z: [G, C, V], with beta only: A^T (beta * P^T dy); becomes all of z.
        written: [G, C, K], with beta only: A^T (beta * k).
    """
    dstates = torch.empty_like(queried)
    recalling = None if z is None else chunks.recalling.mT
    steps = [reversed(chunks.by_step(x)) for x in (dstates, chunks.keep, queried, z, written, recalling)]
    for leaving, keep, new, z_step, write, recall in zip(*steps):
        now = dstate[: len(leaving)]
        leaving.copy_(now)
        _decay_and_add(now, keep, new)
        if z_step is not None:
            z_step.baddbmm_(write, leaving)
            now.baddbmm_(recall, z_step, alpha=-1)
    return dstates


def _decay_and_add(state: Tensor, keep: Tensor | None, new: Tensor) -> None:
    if keep is None:
        state += new
    else:
        torch.addcmul(new, state, keep, out=state)


# ------------------------------------------------------------------------------------------------------------ gradients
def _gradients(chunks: Operands, values: Tensor, states: Tensor, dy: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
    """dq, dk [G, C, K], dv [G, C, R * V], dlog_decay [rows, HV, C, K or 1], dbeta [G, C, 1]; moves ``dstate`` to the span's start.

    Args:
        states: [G, K, R * V], those that enter the chunks.
        dy: [G, C, R * V].
        dstate: [N * heads, K, R * V], of the states that leave the span.
    """
    dy_read = chunks.decayed(dy, chunks.entering)
    queried = chunks.reading.mT @ dy_read
    dwritten = chunks.by_values(chunks.by_query.mT, dy)  # du, without what goes through the state
    dbeta = drecalling = d_by_key = None
    if chunks.solve is None:
        written = values
        dstates = _carry_back(chunks, dstate, queried, None, None)
        z = dwritten + chunks.decayed(chunks.writing @ dstates, chunks.leaving)
    else:
        errors = chunks.solve @ (values - chunks.recalling @ states)
        z = chunks.solve.mT @ dwritten.mul_(chunks.beta)
        dstates = _carry_back(chunks, dstate, queried, z, chunks.solve.mT @ (chunks.writing * chunks.beta))
        dbeta = (errors * z).sum(-1, keepdim=True).div_(chunks.beta)
        written = errors.mul_(chunks.beta)
        drecalling = (z @ states.mT).neg_()
        d_by_key = chunks.outer(z, written).neg_()
    written_left = chunks.decayed(written, chunks.leaving)
    dreading, dwriting = dy_read @ states.mT, written_left @ dstates.mT

    scores = (chunks.q, chunks.k, chunks.by_query, chunks.by_key)
    dq, dk, crossing = chunks.decay.scores_backward(*scores, chunks.outer(dy, written), d_by_key)
    dlog_decay = None
    if crossing is not None:
        if chunks.heads.R == 1:
            read, wrote = chunks.reading * dreading, chunks.writing * dwriting
            if drecalling is not None:
                read.addcmul_(chunks.recalling, drecalling)
        else:
            read, wrote = dy_read * (chunks.reading @ states), written_left * (chunks.writing @ dstates)
        dlog_decay = chunks.decay_gradient(crossing, read, wrote, states * dstates)
    chunks.add_decayed_keys(dq, dreading, chunks.entering)
    chunks.add_decayed_keys(dk, dwriting, chunks.leaving)
    if drecalling is not None:
        chunks.add_decayed_keys(dk, drecalling, chunks.entering)
    return dq, dk, z, dlog_decay, dbeta


def _store(plan: Plan, span: Span, found: tuple[Tensor | None, ...], gradients: list[Tensor | None]) -> None:
    dq, dk, dv, dlog_decay, dbeta = found
    plan.heads.store_keys(span, dq.mul_(plan.scale), gradients[0])
    plan.heads.store_keys(span, dk, gradients[1])
    plan.heads.store_values(span, dv, gradients[2])
    if dlog_decay is not None:
        span.store(dlog_decay, gradients[3])
    if dbeta is not None:
        span.store(dbeta, gradients[4])
