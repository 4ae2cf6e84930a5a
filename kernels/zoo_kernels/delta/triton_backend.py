"""`triton`: the chunkwise delta rule as five launches, one custom op forward and one backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from zoo_kernels import device
from zoo_kernels.delta import prep, scan
from zoo_kernels.delta.call import DeltaCall
from zoo_kernels.delta.channel import prepare_channel
from zoo_kernels.delta.channel_grads import channel_gradients
from zoo_kernels.delta.chunk import Form, operand_dtype
from zoo_kernels.delta.grads import gradients
from zoo_kernels.delta.readout import read_out
from zoo_kernels.delta.scan import Operands
from zoo_kernels.delta.scan_back import scan_back
from zoo_kernels.delta.tables import CHUNK, PROGRAMS_PER_PROCESSOR, Tables, most_segments, piece, tables
from zoo_kernels.eager import operator
from zoo_kernels.launch import pick

# The chain of segments multiplies by whole K x K maps, which fit a multiprocessor up to this K.
MOST_K_SPLIT = 128


# A call keeps its states for the backward up to this share of the device's memory; beyond it, a fifth of the backward's
# time buys them back.
SHARE_OF_STATES = 1 / 128
_POLICY: list[bool] = []


@contextmanager
def keep_states(keep: bool) -> Iterator[None]:
    """Inside, forwards keep the states that enter their chunks for the backward, or the backward computes them again.

    They take K * V / 64 numbers a token and value head, and V more where the rule erases; decays by channel bring 3 K
    and 128 more. Without this, calls keep them up to a small share of the device's memory. Under activation
    checkpointing they live only while their layer is worked on, kept or not.
    """
    _POLICY.append(keep)
    try:
        yield
    finally:
        _POLICY.pop()


def saves_states(call: DeltaCall) -> bool:
    """Whether the forward of ``call`` keeps its states for the backward; from shapes and the device alone."""
    if _POLICY:
        return _POLICY[-1]
    B, T, HV, V = call.v.shape
    K, size = call.q.shape[3], 2 if call.v.dtype == torch.bfloat16 else 4
    # Whole numbers alone, since compilers may hold sizes open: torch 2.11 cannot multiply those by a bool.
    chunk = K * V
    if call.beta is not None:
        chunk += CHUNK * V
    if call.log_decay is not None and call.log_decay.dim() == 4:
        chunk += CHUNK * ((3 if call.beta is not None else 2) * K + 2 * CHUNK)
    return bool(B * T * HV * chunk * size <= CHUNK * int(SHARE_OF_STATES * device.memory(call.v.device)))


class Triton(device.Kernels):
    """The chunkwise form on a GPU, in bf16, fp16 and fp32."""

    def serves(self, call: DeltaCall) -> str | None:
        """None, or the reason why not."""
        if (reason := device.missing(call.v.device)) is not None:
            return reason
        if call.v.dtype == torch.float64:
            return "its kernels compute in fp32, and the inputs are float64"
        if call.chunk not in (None, CHUNK):
            return f"its chunks have {CHUNK} tokens, and {call.chunk} were asked for"
        if device.INTERPRETED and call.v.dtype == torch.bfloat16:
            return "Triton's interpreter computes bf16 products wrongly; use fp32 or fp16"
        return None

    def run(self, call: DeltaCall) -> tuple[Tensor, Tensor]:
        """y [B, T, HV, V] in v's dtype, and the last state [N, HV, K, V]."""
        offsets = chunk_table = None
        if call.packing is not None:
            offsets, chunk_table = call.packing.host_offsets, call.packing.chunk_table
        y, last, *_ = delta_chunkwise(
            call.q, call.k, call.v, call.log_decay, call.beta, call.initial_state, offsets, chunk_table, call.scale,
            call.learns and saves_states(call),
        )  # fmt: skip
        return y, last


# ------------------------------------------------------------------------------------------------------------- the plan
@dataclass(frozen=True)
class Plan:
    """One call's shape class, and how its sequences are cut. Built from shapes alone, so that compilers can follow.

    Attributes:
        sequences, chunks: N and NC.
        pieces: how many segments would keep the device busy. 0: whole sequences do.
    """

    form: Form
    sequences: int
    chunks: int
    pieces: int

    @classmethod
    def of(
        cls, q: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, offsets: Tensor | None,
        chunk_table: Tensor | None,
    ) -> Plan:  # fmt: skip
        """The plan of a call of :func:`delta_chunkwise`."""
        # Compilers may hold every size open; heads and their sizes decide which kernels there are.
        (B, T), (HV, V), (H, K) = v.shape[:2], map(int, v.shape[2:]), map(int, q.shape[2:])
        dtype, precision = operand_dtype(v.dtype)
        gate = "none" if log_decay is None else "channel" if log_decay.dim() == 4 else "head"
        arch = device.architecture(v.device)
        form = Form(K, V, HV, HV // H, dtype, precision, gate, beta is not None, arch)
        sequences = B if offsets is None else offsets.shape[0] - 1
        chunks = B * ((T + CHUNK - 1) // CHUNK) if chunk_table is None else chunk_table.shape[0]
        columns = HV * -(-V // pick("delta_scan", arch, K=form.BK, half=form.half, aligned=form.aligned).tile)
        processors, pieces = device.processors(v.device), 0
        if form.BK <= MOST_K_SPLIT and sequences * columns < processors:
            pieces = max(1, PROGRAMS_PER_PROCESSOR * processors // columns)
        return cls(form, sequences, chunks, pieces)

    def tables(self, v: Tensor, offsets: Tensor | None) -> Tables:
        """The tables of the call; built once for each layout."""
        ends = v.shape[:2] if offsets is None else offsets.tolist()
        return tables(tuple(ends), offsets is not None, piece(self.chunks, self.pieces), v.device)

    @property
    def segments(self) -> int:
        """Rows of the tensors that are kept per segment."""
        return most_segments(self.sequences, self.chunks, self.pieces)


def _rows(x: Tensor) -> Tensor:
    """[B, T, H, K] -> [B * T, H, K] with heads and channels laid side by side; a view where it can be."""
    x = x.flatten(0, 1)
    H, K = x.shape[1:]
    return x if (H == 1 or x.stride(1) == K) and (K == 1 or x.stride(2) == 1) else x.contiguous()


def _gate(x: Tensor | None) -> Tensor | None:
    """[B, T, HV, ...] -> [B * T, HV, ...]; a constant [HV] stays."""
    return x if x is None else x.contiguous() if x.dim() == 1 else x.flatten(0, 1).contiguous()


def _prepare(
    form: Form, q: Tensor, k: Tensor, log_decay: Tensor | None, beta: Tensor | None, layout: Tables, scale: float
) -> Operands:
    """What the scans read, from rows."""
    if form.gate == "channel" and log_decay is not None:
        own = prepare_channel(form, q, k, log_decay, beta, layout, scale)
        reader = own.k_write if own.k_read is None else own.k_read
        return Operands(reader, own.k_write, own.q_read, None, own.beta, own.solve, None, own.keep, own.scores)
    ready = prep.prepare(form, k, log_decay, beta, layout)
    return Operands(k, k, q, ready.decay, ready.beta, ready.solve, ready.bound, None, None)


def _kept(plan: Plan, v: Tensor, save: bool) -> list[tuple[tuple[int, ...], torch.dtype] | None]:
    """Shapes and dtypes of all that the forward keeps for the backward; None: it is not there, and an output is empty.

    In order: what of :class:`Operands` is not an input; then the states that enter chunks, errors, first states of
    segments, and their maps.
    """
    form, tokens = plan.form, v.shape[0] * v.shape[1]
    half, exact = form.dtype, torch.float32
    head, channel = form.gate == "head", form.gate == "channel" and save
    erases = form.erases and (form.gate != "channel" or save)
    by_token, by_key = (tokens, form.HV), (tokens, form.HV, form.K)
    by_segment, split = (plan.segments, form.HV, form.K), plan.pieces > 0
    return [
        (by_key, half) if channel and erases else None,  # reader
        (by_key, half) if channel else None,  # writer
        (by_key, half) if channel else None,  # query
        (by_token, exact) if head else None,  # decay
        (by_token, exact) if erases else None,  # beta
        ((*by_token, CHUNK), half) if erases else None,  # solve
        (by_token, exact) if head else None,  # bound
        ((plan.chunks, form.HV, form.K), exact) if channel else None,  # keep
        ((*by_token, CHUNK), half) if channel else None,  # scores
        ((plan.chunks, form.HV, form.K, form.V), half) if save else None,  # entering
        ((*by_token, form.V), half) if save and form.erases else None,  # errors
        ((*by_segment, form.V), exact) if split else None,  # starts
        ((*by_segment, form.K), exact) if split and form.erases else None,  # matrix
        (by_segment, exact) if split and not form.erases else None,  # fading
    ]


OPERANDS = 9  # the first of these


def _places(plan: Plan, v: Tensor, save: bool) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of the op's outputs for :func:`_kept`, which are empty where nothing is kept."""
    return [wanted or ((0,), plan.form.dtype) for wanted in _kept(plan, v, save)]


# -------------------------------------------------------------------------------------------------------------- the ops
def _chunkwise(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, state: Tensor | None,
    offsets: Tensor | None, chunk_table: Tensor | None, scale: float, save: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """:func:`delta_chunkwise`, with None for what is not kept."""
    plan = Plan.of(q, v, log_decay, beta, offsets, chunk_table)
    form, layout = plan.form, plan.tables(v, offsets)
    x = _prepare(form, _rows(q), _rows(k), _gate(log_decay), _gate(beta), layout, scale)
    start, maps, values = state if state is None else state.contiguous(), None, _rows(v)
    if layout.split:
        start, maps = scan.segment_starts(form, x, values, layout, start, plan.segments)
    last, entering, errors = scan.scan(form, x, values, layout, start)
    y = read_out(form, x, values if errors is None else errors, entering, layout, v.dtype, scale)
    found = [x.reader, x.writer, x.query, x.decay, x.beta, x.solve, x.bound, x.keep, x.scores, entering, errors]
    found += [start, maps.matrix, maps.fading] if maps is not None else [None] * 3
    kept = (tensor if wanted is not None else None for tensor, wanted in zip(found, _kept(plan, v, save)))
    return y.view(v.shape), last, *kept


@operator("zoo_kernels::delta_chunkwise", implementation=_chunkwise)
def delta_chunkwise(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, state: Tensor | None,
    offsets: Tensor | None, chunk_table: Tensor | None, scale: float, save: bool,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
    Tensor, Tensor,
]:  # fmt: skip
    """The forward; arguments as in :func:`zoo_kernels.delta.delta_rule`.

    Args:
        offsets: int64 [N + 1] on the CPU; chunk_table: of the packing. None: a batch of rows.
        save: keep states and errors for the backward, and operands that carry decays; else it computes them again.

    Returns:
        y, the last state, and what the backward needs, as :func:`_kept` lists it.
    """
    y, last, *kept = _chunkwise(q, k, v, log_decay, beta, state, offsets, chunk_table, scale, save)
    places = _places(Plan.of(q, v, log_decay, beta, offsets, chunk_table), v, save)
    whole = (v.new_empty(shape, dtype=dtype) if x is None else x for x, (shape, dtype) in zip(kept, places))
    return (y, last, *whole)  # pyright: ignore[reportReturnType]  # _kept names fourteen


@delta_chunkwise.register_fake
def _(q, k, v, log_decay, beta, state, offsets, chunk_table, scale, save):
    plan = Plan.of(q, v, log_decay, beta, offsets, chunk_table)
    form = plan.form
    last = v.new_empty((plan.sequences, form.HV, form.K, form.V), dtype=torch.float32)
    return (v.new_empty(v.shape), last, *(v.new_empty(shape, dtype=dtype) for shape, dtype in _places(plan, v, save)))


@operator("zoo_kernels::delta_chunkwise_backward")
def delta_chunkwise_backward(
    dy: Tensor, dlast: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None,
    state: Tensor | None, offsets: Tensor | None, chunk_table: Tensor | None, kept: list[Tensor | None], scale: float,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, log_decay, beta and state; those of absent ones are empty."""
    plan = Plan.of(q, v, log_decay, beta, offsets, chunk_table)
    form, layout = plan.form, plan.tables(v, offsets)
    rows_q, rows_k, values, upstream = _rows(q), _rows(k), _rows(v), dy.flatten(0, 1).contiguous()
    known = [x if wanted is not None else None for x, wanted in zip(kept, _kept(plan, v, save))]
    entering, errors, starts, matrix, fading = known[OPERANDS:]
    operands = _again(form, rows_q, rows_k, known[:OPERANDS], log_decay, beta, layout, scale)
    start, maps = state if state is None else state.contiguous(), None
    if layout.split:
        start, maps = starts, scan.Maps(matrix, fading)
    if entering is None:
        _, entering, errors = scan.scan(form, operands, values, layout, start)
    errors = values if errors is None else errors
    last = dlast if dlast is None else dlast.contiguous()
    dv, leaving, dfirst = scan_back(form, operands, upstream, layout, maps, last, scale)
    if operands.keep is not None:
        dq, dk, dlog_decay, dbeta = channel_gradients(
            form, rows_q, rows_k, _gate(log_decay), operands.beta, operands.keep, upstream, errors, dv, entering,
            leaving, layout, scale,
        )  # fmt: skip
    else:
        dq, dk, dlog_decay, dbeta = gradients(
            form, rows_q, rows_k, upstream, errors, dv, operands, _gate(log_decay), entering, leaving, layout, scale
        )
    return (
        dq.view(q.shape),
        dk.view(k.shape),
        dv.to(v.dtype).view(v.shape),
        v.new_empty(0) if log_decay is None or dlog_decay is None else dlog_decay.view(log_decay.shape),
        v.new_empty(0) if beta is None or dbeta is None else dbeta.to(beta.dtype).view(beta.shape),
        v.new_empty(0) if state is None else dfirst,
    )


def _again(
    form: Form, q: Tensor, k: Tensor, known: list[Tensor | None], log_decay: Tensor | None, beta: Tensor | None,
    layout: Tables, scale: float,
) -> Operands:  # fmt: skip
    """The operands of the forward: kept, or computed again."""
    if form.gate != "channel":
        return Operands(k, k, q, *known[3:])
    reader, writer, query, *rest = known
    if writer is None or query is None:
        return _prepare(form, q, k, _gate(log_decay), _gate(beta), layout, scale)
    return Operands(writer if reader is None else reader, writer, query, *rest)


@delta_chunkwise_backward.register_fake
def _(dy, dlast, q, k, v, log_decay, beta, state, *rest):
    like = (q, k, v, log_decay, beta, state)
    return tuple(v.new_empty(0) if x is None else x.new_empty(x.shape) for x in like)


def _remember(ctx, inputs, output):
    q, k, v, log_decay, beta, state, offsets, chunk_table, scale, save = inputs
    ctx.save_for_backward(q, k, v, log_decay, beta, state, offsets, chunk_table, *output[2:])
    ctx.scale, ctx.save = scale, save
    ctx.mark_non_differentiable(*(x for x in output[2:] if x is not None))
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, dlast, *_):
    tensors = ctx.saved_tensors
    given = tensors[:6]
    if dy is None and dlast is None:
        return (None,) * 10
    dy = torch.zeros_like(tensors[2]) if dy is None else dy
    found = delta_chunkwise_backward(dy, dlast, *tensors[:8], list(tensors[8:]), ctx.scale, ctx.save)
    return (*(None if x is None else gradient for x, gradient in zip(given, found)), None, None, None, None)


delta_chunkwise.register_autograd(_backward, setup_context=_remember)


# ------------------------------------------------------------------------------------------------------ what they cost
def _products(q_shape: torch.Size, v_shape: torch.Size, erases: bool, scores: int, states: int, solves: int) -> int:
    """FLOPs of products per chunk: ``scores`` of [64, K] with [K, 64], ``states`` of [64, K] with [K, V], and
    ``solves`` of [64, 64] with [64, V]."""
    (B, T, HV, V), K = v_shape, q_shape[3]
    per_token = scores * 2 * CHUNK * K + states * 2 * K * V + solves * 2 * CHUNK * V
    return B * T * HV * per_token


@register_flop_formula(torch.ops.zoo_kernels.delta_chunkwise)
def _forward_flops(q, k, v, log_decay=None, beta=None, *args, out_shape=None, **kwargs) -> int:
    erases = int(beta is not None)
    return _products(q, v, bool(erases), scores=1 + erases, states=2 + erases, solves=1 + erases)


@register_flop_formula(torch.ops.zoo_kernels.delta_chunkwise_backward)
def _backward_flops(dy, dlast, q, k, v, log_decay=None, beta=None, *args, out_shape=None, **kwargs) -> int:
    erases = int(beta is not None)
    return _products(q, v, bool(erases), scores=3 + 3 * erases, states=5 + 4 * erases, solves=2 + 3 * erases)
