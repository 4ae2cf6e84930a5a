"""Gradients of queries, keys and gates under a decay per channel: every chunk on its own, between the two scans.

Per value head, with e the errors (v where nothing erases), z = dv, h the state that enters, dS the gradient of the one
that leaves, g the running decay, g_last its last, b = beta or 1:

    dP = scale * tril(dy e^T) * b_col;  dM = -stril(z e^T) * b_col
    dq = scale * 2^g * (dy h^T) + row(dP, k);  dk = 2^(g_last - g) * b * (e dS^T) - 2^g * (z h^T)
                                                    + col(dP, q) + row(dM, k) + col(dM, k)
    row(W, x)_id = sum_j W_ij x_jd 2^(g_id - g_jd);  col(W, x)_jd = sum_i W_ij x_id 2^(g_id - g_jd)
    dbeta = rowdot(e, z) / beta

Rows and columns meet in the squares of channel.py. A token's decay receives, in reverse order, all that crosses it:
products of later rows with earlier columns, reads of the state that entered, writes before it to the state that leaves,
and the state that passes through. A product enters once at its row and leaves once at its column, so both are taken
from the same rounded factors, and cancel in between.
"""

# Type checkers do not know the launches and loops of kernels.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo_kernels.delta.channel import RESET, SUM_PRECISION, levels, spans, splits, sum_of_spans
from zoo_kernels.delta.chunk import CHANNELED, Form, example
from zoo_kernels.delta.grads import score_gradients, score_kernel
from zoo_kernels.delta.prep import LOG2E
from zoo_kernels.delta.tables import Tables
from zoo_kernels.launch import CompileRow, Launch, Row, pick, provide, recorded

# The tile is of channels.
provide(
    "delta_channel_grads",
    Row(Launch(tile=64, warps=8), when={"half": False}),
    Row(Launch(tile=64, warps=4), when={"aligned": False}),
    Row(Launch(tile=64, warps=4, stages=2)),
)
VALUES = 64  # of one step of the gradients; never 32, see LEAST_BLOCK in chunk.py


@triton.jit
def channel_grads_kernel(
    q, k, log_decay, dy, errors, dv, beta, keep, entering, leaving, dscores, doverlaps, chunks, spans, dq, dk,
    dlog_decay, scale,
    q_row: tl.constexpr, k_row: tl.constexpr, e_row: tl.constexpr, HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, ERASES: tl.constexpr,
    SPLIT: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, PREC_SUM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One chunk of one key head, BT of its channels; loops over the key head's value heads."""
    TILES: tl.constexpr = (K + BT - 1) // BT
    at = tl.program_id(0)
    heads: tl.constexpr = HV // R
    tile, key_head, chunk = at % TILES, (at // TILES) % heads, (at // TILES // heads).to(tl.int64)
    first, rows = tl.load(chunks + 2 * chunk).to(tl.int64), tl.load(chunks + 2 * chunk + 1)
    row, channel = tl.arange(0, 64), tile * BT + tl.arange(0, BT)
    valid, seen = row < rows, channel < K
    spans += row[:, None] * 64 + row[None, :]
    in_keys = valid[:, None] & seen[None, :]
    at_key = key_head * K + channel[None, :]
    start = first * HV  # tiles lie at 64-bit bases and 32-bit offsets, which take half the registers
    bq = tl.load(q + first * q_row + row[:, None] * q_row + at_key, mask=in_keys, other=0.0).to(DT)
    bk = tl.load(k + first * k_row + row[:, None] * k_row + at_key, mask=in_keys, other=0.0).to(DT)
    sum_q, sum_k = tl.zeros([64, BT], tl.float32), tl.zeros([64, BT], tl.float32)
    for member in tl.range(0, R, num_stages=1):
        head = key_head * R + member
        gate_at = row * HV + head
        here = gate_at[:, None] * K + channel[None, :]
        gates = tl.maximum(tl.load(log_decay + start * K + here, mask=in_keys, other=0.0).to(tl.float32), RESET)
        high = gates.to(DT)
        rest = (gates - high.to(tl.float32)).to(DT)
        # Through the states.
        states = (chunk * HV + head) * K * V
        grad_q, recall = tl.zeros([64, BT], tl.float32), tl.zeros([64, BT], tl.float32)
        wrote, passing = tl.zeros([64, BT], tl.float32), tl.zeros([BT], tl.float32)
        for j in tl.range(0, (V + BV - 1) // BV, num_stages=STAGES):
            value = j * BV + tl.arange(0, BV)
            inside = valid[:, None] & (value < V)[None, :]
            of_value = gate_at[:, None] * V + value[None, :]
            of_error = row[:, None] * e_row + head * V + value[None, :]
            of_state = channel[:, None] * V + value[None, :]
            in_state = seen[:, None] & (value < V)[None, :]
            bh = tl.load(entering + states + of_state, mask=in_state, other=0.0)
            bds = tl.load(leaving + states + of_state, mask=in_state, other=0.0)
            bdy = tl.load(dy + start * V + of_value, mask=inside, other=0.0).to(DT)
            be = tl.load(errors + first * e_row + of_error, mask=inside, other=0.0).to(DT)
            grad_q = tl.dot(bdy, tl.trans(bh), grad_q, input_precision=PREC)
            wrote = tl.dot(be, tl.trans(bds), wrote, input_precision=PREC)
            if ERASES:
                bz = tl.load(dv + start * V + of_value, mask=inside, other=0.0).to(DT)
                recall = tl.dot(bz, tl.trans(bh), recall, input_precision=PREC)
            passing += tl.sum(bh.to(tl.float32) * bds.to(tl.float32), 1)
        entered = tl.exp2(sum_of_spans(tl.load(spans + 14 * 4096), high, rest, SPLIT, PREC_SUM) * LOG2E)
        lasts = tl.exp2(sum_of_spans(tl.load(spans + 15 * 4096), high, rest, SPLIT, PREC_SUM) * LOG2E)
        grad_q *= entered * scale
        wrote *= lasts
        crossing = bq.to(tl.float32) * grad_q
        if ERASES:
            wrote *= tl.load(beta + start + gate_at, mask=valid, other=0.0)[:, None]
            recall *= entered
            crossing -= bk.to(tl.float32) * recall
            grad_k = wrote - recall
        else:
            grad_k = wrote
        early = (bk.to(tl.float32) * wrote).to(DT)
        # Through the scores.
        square = gate_at[:, None] * 64 + row[None, :]
        dP = tl.load(dscores + start * 64 + square, mask=valid[:, None], other=0.0)
        if ERASES:
            dM = tl.load(doverlaps + start * 64 + square, mask=valid[:, None], other=0.0)
        own = tl.load(dscores + start * 64 + gate_at * 64 + row, mask=valid, other=0.0).to(tl.float32)[:, None]
        grad_q += own * bk.to(tl.float32)
        grad_k += own * bq.to(tl.float32)
        low_level, high_level = levels(gates)
        for level in tl.range(low_level, high_level, num_stages=STAGES):
            meeting = tl.load(spans + (7 + level) * 4096)
            exponent = sum_of_spans(tl.load(spans + level * 4096), high, rest, SPLIT, PREC_SUM) * LOG2E
            from_start = tl.exp2(exponent)
            to_end = tl.exp2(tl.where(level == 6, -exponent, exponent))
            queries, keys = (bq.to(tl.float32) * from_start).to(DT), (bk.to(tl.float32) * to_end).to(DT)
            by_score = meeting * dP
            asked = tl.dot(by_score, keys, input_precision=PREC)
            met = tl.dot(tl.trans(by_score), queries, input_precision=PREC)
            grad_q += from_start * asked
            crossing += queries.to(tl.float32) * asked
            if ERASES:
                by_overlap = meeting * dM
                readers = (bk.to(tl.float32) * from_start).to(DT)
                recalled = tl.dot(by_overlap, keys, input_precision=PREC)
                met = tl.dot(tl.trans(by_overlap), readers, met, input_precision=PREC)
                grad_k += from_start * recalled
                crossing += readers.to(tl.float32) * recalled
            grad_k += to_end * met
            crossing -= keys.to(tl.float32) * met
        sum_q += grad_q
        sum_k += grad_k
        # Down to the gates.
        high = crossing.to(DT)
        rest = (crossing - high.to(tl.float32)).to(DT)
        through = sum_of_spans(tl.trans(tl.load(spans + 14 * 4096)), high, rest, tl.bfloat16 == DT, PREC_SUM)
        through += sum_of_spans(tl.trans(tl.load(spans + 15 * 4096)), early, early, False, PREC_SUM)
        whole = tl.load(keep + (chunk * HV + head) * K + channel, mask=seen, other=0.0)
        through += (tl.exp2(whole) * passing)[None, :]
        gates = tl.load(log_decay + start * K + here, mask=in_keys, other=0.0).to(tl.float32)
        tl.store(
            dlog_decay + start * K + here,
            tl.where(gates > RESET, through, 0.0).to(dlog_decay.dtype.element_ty),
            mask=in_keys,
        )
    place = (row[:, None] * heads + key_head) * K + channel[None, :]
    tl.store(dq + first * heads * K + place, sum_q.to(dq.dtype.element_ty), mask=in_keys)
    tl.store(dk + first * heads * K + place, sum_k.to(dk.dtype.element_ty), mask=in_keys)


def channel_gradients(
    form: Form, q: Tensor, k: Tensor, log_decay: Tensor, beta: Tensor | None, keep: Tensor, dy: Tensor,
    errors: Tensor, dv: Tensor, entering: Tensor, leaving: Tensor, tables: Tables, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """All gradients but those of values and states.

    Args:
        q, k, log_decay: as :func:`zoo_kernels.delta.channel.prepare_channel` takes them.
        beta, keep: as it gives them.
        dy, dv: [tokens, HV, V], contiguous; errors: the same, or v where nothing erases, any stride between tokens.
        entering, leaving: [NC, HV, K, V], the states that enter chunks and the gradients of those that leave them.

    Returns:
        dq, dk [tokens, H, K] in q's dtype; dlog_decay [tokens, HV, K] in log_decay's dtype, 0 at resets; dbeta fp32
        [tokens, HV].
    """
    tokens, HV, K = log_decay.shape
    dq, dk = (x.new_empty(x.shape) for x in (q, k))
    dlog_decay = torch.empty_like(log_decay)
    dscores, doverlaps, dbeta = score_gradients(form, q, k, dy, errors, dv, None, beta, tables.chunks, tokens, scale)
    if tables.count:
        facts = {"K": form.BK, "V": form.V, "half": form.half, "aligned": form.aligned, "erases": form.erases}
        launch = pick("delta_channel_grads", form.arch, **facts, group=form.R > 1)
        BT = min(launch.tile, form.BK)
        channel_grads_kernel[(tables.count * HV // form.R * triton.cdiv(K, BT),)](
            q, k, log_decay, dy, errors, dv, beta, keep, entering, leaving, dscores, doverlaps, tables.chunks,
            spans(form.dtype, q.device), dq, dk, dlog_decay, scale,
            q_row=q.stride(0), k_row=k.stride(0), e_row=errors.stride(0), HV=HV, R=form.R, K=K, V=form.V, BT=BT,
            BV=min(VALUES, form.BV), ERASES=form.erases, SPLIT=splits(form, log_decay), DT=form.operand,
            PREC=form.precision, PREC_SUM=SUM_PRECISION, STAGES=launch.stages, num_warps=launch.warps,
        )  # fmt: skip
    return dq, dk, dlog_decay, dbeta


def compile_rows() -> Iterator[CompileRow]:
    """Every shape class of :data:`zoo_kernels.delta.chunk.CHANNELED`, for the offline compile gate."""
    for case in CHANNELED:
        x = example(case)
        keep = x.k.new_empty(x.tables.count, x.form.HV, x.form.K, dtype=torch.float32)
        kernels = {"channel scores": score_kernel, "channel grads": channel_grads_kernel}
        with recorded(case, **kernels) as rows:
            channel_gradients(
                x.form, x.q, x.k, x.log_decay, x.beta, keep, x.v, x.v, x.v, x.entering, x.entering, x.tables, 1.0
            )
        yield from rows
