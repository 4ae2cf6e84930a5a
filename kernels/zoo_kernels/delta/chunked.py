"""`torch`: the chunkwise delta rule in matrix products, on any device, with a backward of its own.

Inside a chunk that the state S enters, with decays left out (intra.py holds them), P = tril(q k^T) and
N = stril(k k^T) diag(beta):

    A = (I + N)^-1;  e = A (v - k S);  u = beta * e;  y = q S + P u;  S' = S + k^T u

and, with dS the gradient of the state that leaves,

    du = k dS + P^T dy;  z = A^T (beta * du), which is dv;  dS' = dS + q^T dy - k^T z

Row t of e is the error of the recurrence, v_t - k_t S_t, so dbeta = e . z / beta. Without beta: e = u = v and z = du.
Only the lines for S and dS run chunk after chunk; everything else is done for all chunks of a span at once. The forward
keeps its inputs and the states that enter the chunks; the backward computes the rest again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zoo_kernels.delta.call import DeltaCall, without_autocast
from zoo_kernels.delta.layout import Heads, Layout, Span, dense, packed
from zoo_kernels.delta.operands import Erasing, Operands
from zoo_kernels.delta.reference import Recurrent

# Tokens per chunk where the caller leaves the choice. CPU: docs/benchmarks/chunkwise_cpu.md.
CHUNK_CPU, CHUNK_DEVICE = 32, 64
# Numbers in the largest tensor of a span. CPU: 512 KiB stay in the cache, and in the allocator's hands. Devices: large
# enough that launches do not count, small enough that what is alive at a time does not either.
SPAN_CPU, SPAN_DEVICE = 2**17, 2**24


class Chunked:
    """The chunkwise form; a single token is one step of the recurrence."""

    name = "torch"

    def serves(self, call: DeltaCall) -> str | None:
        """It serves every call."""
        return None

    def run(self, call: DeltaCall) -> tuple[Tensor, Tensor]:
        """y [B, T, HV, V] in v's dtype, and the last state [N, HV, K, V]."""
        if call.v.shape[1] <= 1:
            return Recurrent().run(call)
        tensors = (call.q, call.k, call.v, *call.gates())
        learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
        return ChunkwiseDeltaRule.apply(*tensors, Plan.of(call, learns=learns))


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

    @classmethod
    def of(cls, call: DeltaCall, *, learns: bool) -> Plan:
        """Cut ``call`` into chunks and spans."""
        B, T, HV, V = call.v.shape
        H, K = call.k.shape[2:]
        on_cpu = call.v.device.type == "cpu"
        chunk = call.chunk or (CHUNK_CPU if on_cpu else CHUNK_DEVICE)
        layout = dense(B, T, chunk) if call.packing is None else packed(call.packing, chunk, call.v.device)
        by_channel = call.log_decay is not None and call.log_decay.dim() == 4
        heads = Heads(H, HV, shared=call.beta is None and not by_channel)
        widest = max(K, heads.R * V, heads.R * chunk)
        spans = layout.spans((SPAN_CPU if on_cpu else SPAN_DEVICE) // (heads.count * chunk * widest))
        return cls(layout, spans, heads, call.scale, learns)

    def operands(
        self, span: Span, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, like: Tensor
    ) -> Operands:
        """The operands of one span, in the dtype of ``like``."""
        sizes = {"scale": self.scale, "value_size": v.shape[3], "dtype": like.dtype}
        return Operands.of(span, self.heads, q, k, log_decay, beta, **sizes)


class ChunkwiseDeltaRule(torch.autograd.Function):
    """(q, k, v, log_decay [B, T, HV, K or 1], beta [B, T, HV, 1], state, plan) -> (y, last state)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        beta: Tensor | None,
        state: Tensor,
        plan: Plan,
    ) -> tuple[Tensor, Tensor]:
        heads = plan.heads
        y = torch.empty_like(v, memory_format=torch.contiguous_format)
        last = heads.load_state(plan.layout, state)
        states = last.new_empty(plan.layout.rows if plan.learns else 0, heads.count, *last.shape[1:])
        for span in plan.spans:
            chunks = plan.operands(span, q, k, v, log_decay, beta, like=last)
            values = heads.load_values(span, v, last.dtype)
            entering = states[span.rows] if plan.learns else last.new_empty(span.count, *states.shape[1:])
            if chunks.erasing is None:
                _carry_additions(chunks, last, entering, values)
                written = values
            else:
                errors = _carry_errors(chunks, chunks.erasing, last, entering, values)
                written = errors.mul_(chunks.erasing.beta)
            read = chunks.decayed(chunks.reading @ entering, chunks.entering)
            heads.store_values(span, read.add_(chunks.by_values(chunks.by_query, written)), y)
        ctx.save_for_backward(q, k, v, log_decay, beta, states)
        ctx.plan, ctx.state_shape = plan, state.shape
        ctx.set_materialize_grads(False)
        return y, heads.store_state(plan.layout, last)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides the name of ctx
        ctx: Any, *douts: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        dy, dlast = douts
        *inputs, states = ctx.saved_tensors
        plan: Plan = ctx.plan
        heads, v, log_decay = plan.heads, inputs[2], inputs[3]
        outs = [None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
        with without_autocast(v.device):
            dstate = heads.load_state(plan.layout, states.new_zeros(ctx.state_shape) if dlast is None else dlast)
            for span in reversed(plan.spans):
                chunks = plan.operands(span, *inputs, like=states)
                values = heads.load_values(span, v, states.dtype)
                dvalues = torch.zeros_like(values) if dy is None else heads.load_values(span, dy, states.dtype)
                found = _gradients(chunks, values, states[span.rows], dvalues, dstate)
                stores = (heads.store_keys, heads.store_keys, heads.store_values, Span.store, Span.store)
                for store, gradient, out in zip(stores, found, outs):
                    if gradient is not None and out is not None:
                        store(span, gradient, out)
            if log_decay is not None and outs[3] is not None:
                # exp(-inf) has no slope, and rounding must not leave one.
                outs[3].masked_fill_(log_decay == -torch.inf, 0.0)
            return (*outs, heads.store_state(plan.layout, dstate), None)


# ---------------------------------------------------------------------------------------------------- chunk after chunk
def _steps(chunks: Operands, state: Tensor, states: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Step by step, the states that enter and the place for those that leave, each [rows * heads, K, R * V].

    That place is where the next step reads; only where sequences end between the two is it ``state``, which keeps them.

    Args:
        state: [N * heads, K, R * V], what enters the span; afterwards what leaves it.
        states: [G, K, R * V], to be filled with what enters the chunks.
    """
    entering = chunks.by_step(states)
    entering[0].copy_(state[: len(entering[0])])
    for now, following in zip(entering, [*entering[1:], state[:0]]):
        leaving = following if len(following) == len(now) else state[: len(now)]
        yield now, leaving
        if leaving is not following:
            following.copy_(leaving[: len(following)])


def _steps_back(chunks: Operands, dstate: Tensor, dstates: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The same from the last step to the first, for gradients: those that leave, and the place for those that enter."""
    leaving = chunks.by_step(dstates)
    leaving[-1].copy_(dstate[: len(leaving[-1])])
    for now, earlier in zip(reversed(leaving), [*reversed(leaving[:-1]), dstate[: len(leaving[0])]]):
        if len(earlier) > len(now):
            earlier[len(now) :].copy_(dstate[len(now) : len(earlier)])
        yield now, earlier[: len(now)]


def _carry_additions(chunks: Operands, state: Tensor, states: Tensor, values: Tensor) -> None:
    """Carry the state through a span without beta; ``values`` are [G, C, R * V]."""
    added = chunks.writing.mT @ chunks.decayed(values, chunks.leaving)
    steps = zip(_steps(chunks, state, states), chunks.kept_by_step(), chunks.by_step(added))
    for (entering, leaving), keep, new in steps:
        _decay_and_add(entering, keep, new, out=leaving)


def _carry_errors(chunks: Operands, erasing: Erasing, state: Tensor, states: Tensor, values: Tensor) -> Tensor:
    """The same with beta. Returns the errors e [G, C, V]."""
    errors, recalled = erasing.solve @ values, erasing.solve @ erasing.recalling  # e = A v - (A k) S
    writing = (chunks.writing * erasing.beta).mT
    tensors = map(chunks.by_step, (errors, recalled, writing))
    for (entering, leaving), keep, e, recall, write in zip(
        _steps(chunks, state, states), chunks.kept_by_step(), *tensors
    ):
        e.baddbmm_(recall, entering, alpha=-1)
        if keep is None:
            leaving.copy_(entering)
        else:
            torch.mul(entering, keep, out=leaving)
        leaving.baddbmm_(write, e)
    return errors


def _carry_back(chunks: Operands, dstate: Tensor, queried: Tensor) -> Tensor:
    """Carry the gradient of the state back through a span without beta.

    Args:
        dstate: [N * heads, K, R * V], that of the states that leave the span; becomes that of those that enter it.
        queried: [G, K, R * V], q^T dy.

    Returns:
        The gradients of the states that leave the chunks [G, K, R * V].
    """
    dstates = torch.empty_like(queried)
    tensors = (reversed(x) for x in (chunks.kept_by_step(), chunks.by_step(queried)))
    for (leaving, entering), keep, new in zip(_steps_back(chunks, dstate, dstates), *tensors):
        _decay_and_add(leaving, keep, new, out=entering)
    return dstates


def _carry_back_errors(chunks: Operands, erasing: Erasing, dstate: Tensor, queried: Tensor, z: Tensor) -> Tensor:
    """The same with beta. ``z`` [G, C, V] comes as A^T (beta * P^T dy) and leaves whole."""
    dstates = torch.empty_like(queried)
    written = erasing.solve.mT @ (chunks.writing * erasing.beta)
    by_step = (chunks.kept_by_step(), *map(chunks.by_step, (queried, z, written, erasing.recalling.mT)))
    steps = zip(_steps_back(chunks, dstate, dstates), *map(reversed, by_step))
    for (leaving, entering), keep, new, z_step, write, recall in steps:
        _decay_and_add(leaving, keep, new, out=entering)
        z_step.baddbmm_(write, leaving)
        entering.baddbmm_(recall, z_step, alpha=-1)
    return dstates


def _decay_and_add(state: Tensor, keep: Tensor | None, new: Tensor, *, out: Tensor) -> None:
    if keep is None:
        torch.add(state, new, out=out)
    else:
        torch.addcmul(new, state, keep, out=out)


# ------------------------------------------------------------------------------------------------------------ gradients
def _gradients(
    chunks: Operands, values: Tensor, states: Tensor, dy: Tensor, dstate: Tensor
) -> tuple[Tensor | None, ...]:
    """All gradients of one span, and ``dstate`` carried back through it.

    Args:
        values, dy: [G, C, R * V].
        states: [G, K, R * V], those that enter the chunks.
        dstate: [N * heads, K, R * V], that of the states that leave the span.

    Returns:
        dq, dk [G, C, K], dv [G, C, R * V], dlog_decay [rows, HV, C, K or 1], dbeta [G, C, 1].
    """
    erasing = chunks.erasing
    dy_read = chunks.decayed(dy, chunks.entering)
    queried = chunks.reading.mT @ dy_read
    dwritten = chunks.by_values(chunks.by_query.mT, dy)  # du, without what goes through the state
    by_key = dbeta = drecalling = d_by_key = None
    if erasing is None:
        written = values
        dstates = _carry_back(chunks, dstate, queried)
        z = dwritten.add_(chunks.decayed(chunks.writing @ dstates, chunks.leaving))
    else:
        # e = A (v - k S), where the products with every S are done at once, since every S is known.
        unknown = torch.baddbmm(*(x.flatten(0, 1) for x in (values, erasing.recalling, states)), alpha=-1)
        errors = erasing.solve @ unknown.view_as(values)
        z = erasing.solve.mT @ dwritten.mul_(erasing.beta)
        dstates = _carry_back_errors(chunks, erasing, dstate, queried, z)
        dbeta = (errors * z).sum(-1, keepdim=True).div_(erasing.beta)
        written = errors.mul_(erasing.beta)
        drecalling = (z @ states.mT).neg_()
        by_key, d_by_key = erasing.by_key, chunks.outer(z, written).neg_()
    written_left = chunks.decayed(written, chunks.leaving)
    dreading, dwriting = dy_read @ states.mT, written_left @ dstates.mT

    d_by_query = chunks.outer(dy, written)
    dq, dk, crossing = chunks.decay.scores_backward(chunks.q, chunks.k, chunks.by_query, by_key, d_by_query, d_by_key)
    dlog_decay = None
    if crossing is not None:
        if chunks.heads.R == 1:
            read, wrote = chunks.reading * dreading, chunks.writing * dwriting
            if erasing is not None and drecalling is not None:
                read.addcmul_(erasing.recalling, drecalling)
        else:
            read, wrote = dy_read * (chunks.reading @ states), written_left * (chunks.writing @ dstates)
        dlog_decay = chunks.decay_gradient(crossing, read, wrote, states, dstates)
    chunks.add_decayed_keys(dq, dreading, chunks.entering)
    chunks.add_decayed_keys(dk, dwriting, chunks.leaving)
    if drecalling is not None:
        chunks.add_decayed_keys(dk, drecalling, chunks.entering)
    return dq.mul_(chunks.scale), dk, z, dlog_decay, dbeta
