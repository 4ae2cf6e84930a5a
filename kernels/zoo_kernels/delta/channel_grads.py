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

from zoo_kernels.delta.channel import RESET, SUM_PRECISION, at_once, spans, splits, sum_of_spans
from zoo_kernels.delta.chunk import CHANNELED, Form, example, within
from zoo_kernels.delta.grads import SLAB, score_gradients, score_kernel
from zoo_kernels.delta.prep import LOG2E
from zoo_kernels.delta.tables import CHUNK, Tables
from zoo_kernels.launch import CompileRow, Launch, Row, pick, provide, recorded

# The tile is of channels, in both.
provide(
    "delta_channel_states",
    Row(Launch(tile=64, warps=8), when={"half": False}),
    Row(Launch(tile=64, warps=4), when={"aligned": False}),
    Row(Launch(tile=64, warps=4, stages=2)),
)
provide(
    "delta_channel_grads",
    Row(Launch(tile=64, warps=8), when={"half": False}),
    Row(Launch(tile=64, warps=4)),
)
VALUES = 64  # of one step of the gradients; never 32, see LEAST_BLOCK in chunk.py


@triton.jit(do_not_specialize=["skipped"])
def channel_states_kernel(
    dy, errors, dv, beta, entering, leaving, chunks, reads, writes, recalls, passed, scale, skipped,
    e_row: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
    ERASES: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Products with the states of one chunk of one value head, BT of its channels, before any decay."""
    TILES: tl.constexpr = (K + BT - 1) // BT
    at = tl.program_id(0)
    tile, head, chunk = at % TILES, (at // TILES) % HV, (at // TILES // HV).to(tl.int64)
    first, rows = tl.load(chunks + 2 * chunk).to(tl.int64), tl.load(chunks + 2 * chunk + 1)
    base = tl.load(chunks)  # the first token of this slab of chunks
    row, channel = tl.arange(0, 64), tile * BT + tl.arange(0, BT)
    valid, seen = row < rows, channel < K
    # Tiles lie at 64-bit bases and 32-bit offsets, which take half the registers.
    gate_at, states = row * HV + head, (skipped + chunk) * HV * K * V + head * K * V
    read, recall = tl.zeros([64, BT], tl.float32), tl.zeros([64, BT], tl.float32)
    wrote, passing = tl.zeros([64, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
    for j in tl.range(0, (V + BV - 1) // BV, num_stages=STAGES):
        value = j * BV + tl.arange(0, BV)
        values = within(valid, value < V, False, V % BV == 0)
        inside = within(seen, value < V, K % BT == 0, V % BV == 0)
        of_value, of_state = gate_at[:, None] * V + value[None, :], channel[:, None] * V + value[None, :]
        of_error = row[:, None] * e_row + head * V + value[None, :]
        bh = tl.load(entering + states + of_state, mask=inside, other=0.0)
        bds = tl.load(leaving + states + of_state, mask=inside, other=0.0)
        bdy = tl.load(dy + first * HV * V + of_value, mask=values, other=0.0).to(DT)
        be = tl.load(errors + first * e_row + of_error, mask=values, other=0.0).to(DT)
        read = tl.dot(bdy, tl.trans(bh), read, input_precision=PREC)
        wrote = tl.dot(be, tl.trans(bds), wrote, input_precision=PREC)
        if ERASES:
            bz = tl.load(dv + first * HV * V + of_value, mask=values, other=0.0).to(DT)
            recall = tl.dot(bz, tl.trans(bh), recall, input_precision=PREC)
        # Its diagonal counts; as a product, for the reason in grads.py.
        passing = tl.dot(bh, tl.trans(bds), passing, input_precision=PREC)
    start = (first - base) * HV * K
    keys, target = within(valid, seen, False, K % BT == 0), gate_at[:, None] * K + channel[None, :]
    if ERASES:
        wrote *= tl.load(beta + first * HV + gate_at, mask=valid, other=0.0)[:, None]
        tl.store(recalls + start + target, recall.to(DT), mask=keys)
    tl.store(reads + start + target, (read * scale).to(DT), mask=keys)
    tl.store(writes + start + target, wrote.to(DT), mask=keys)
    own = tl.arange(0, BT)[:, None] == tl.arange(0, BT)[None, :]
    tl.store(passed + (chunk * HV + head) * K + channel, tl.sum(tl.where(own, passing, 0.0), 0), mask=seen)


@triton.jit(do_not_specialize=["skipped"])
def channel_grads_kernel(
    q, k, log_decay, keep, reads, writes, recalls, passed, dscores, doverlaps, downs, chunks, spans, dq, dk,
    dlog_decay, skipped,
    q_row: tl.constexpr, k_row: tl.constexpr, HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
    ERASES: tl.constexpr, SPLIT: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, PREC_SUM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One chunk of one key head, BT of its channels; loops over the key head's value heads."""
    TILES: tl.constexpr = (K + BT - 1) // BT
    at = tl.program_id(0)
    heads: tl.constexpr = HV // R
    tile, key_head, chunk = at % TILES, (at // TILES) % heads, (at // TILES // heads).to(tl.int64)
    first, rows = tl.load(chunks + 2 * chunk).to(tl.int64), tl.load(chunks + 2 * chunk + 1)
    base = tl.load(chunks)
    row, channel = tl.arange(0, 64), tile * BT + tl.arange(0, BT)
    valid, seen = row < rows, channel < K
    keys = within(valid, seen, False, K % BT == 0)
    spans += row[:, None] * 64 + row[None, :]
    at_key = key_head * K + channel[None, :]
    bq = tl.load(q + first * q_row + row[:, None] * q_row + at_key, mask=keys, other=0.0).to(DT)
    bk = tl.load(k + first * k_row + row[:, None] * k_row + at_key, mask=keys, other=0.0).to(DT)
    sum_q, sum_k = tl.zeros([64, BT], tl.float32), tl.zeros([64, BT], tl.float32)
    for member in tl.range(0, R, num_stages=1):
        head = key_head * R + member
        gate_at = row * HV + head
        here, square = gate_at[:, None] * K + channel[None, :], gate_at[:, None] * 64 + row[None, :]
        start, slab = first * HV, (first - base) * HV
        gates = tl.maximum(tl.load(log_decay + start * K + here, mask=keys, other=0.0).to(tl.float32), RESET)
        high = gates.to(DT)
        rest = (gates - high.to(tl.float32)).to(DT)
        kept = tl.exp2(tl.load(keep + ((skipped + chunk) * HV + head) * K + channel, mask=seen, other=0.0))
        entered = tl.exp2(sum_of_spans(tl.load(spans + 12 * 4096), high, rest, SPLIT, PREC_SUM) * LOG2E)
        whole, middle = at_once(gates)
        if whole:
            lasts = kept[None, :] / entered
        else:
            lasts = tl.exp2(sum_of_spans(tl.load(spans + 13 * 4096), high, rest, SPLIT, PREC_SUM) * LOG2E)
        # Through the states.
        grad_q = entered * tl.load(reads + slab * K + here, mask=keys, other=0.0).to(tl.float32)
        grad_k = lasts * tl.load(writes + slab * K + here, mask=keys, other=0.0).to(tl.float32)
        crossing = bq.to(tl.float32) * grad_q
        early = (bk.to(tl.float32) * grad_k).to(DT)
        if ERASES:
            recall = entered * tl.load(recalls + slab * K + here, mask=keys, other=0.0).to(tl.float32)
            crossing -= bk.to(tl.float32) * recall
            grad_k -= recall
        # Through the scores.
        own = tl.load(downs + start + gate_at, mask=valid, other=0.0)[:, None]
        grad_q += own * bk.to(tl.float32)
        grad_k += own * bq.to(tl.float32)
        dP = tl.load(dscores + slab * 64 + square, mask=valid[:, None], other=0.0)
        dM = tl.load(doverlaps + slab * 64 + square, mask=valid[:, None], other=0.0)
        if whole:
            from_start, to_end = entered * tl.exp2(-middle)[None, :], tl.exp2(middle)[None, :] / entered
            grad_q, grad_k, crossing = _through_scores(
                bq, bk, from_start, to_end, dP, dM, grad_q, grad_k, crossing, ERASES, DT, PREC
            )
        else:
            for level in tl.range(0, 6, num_stages=STAGES):
                meeting = tl.load(spans + (6 + level) * 4096)
                exponent = sum_of_spans(tl.load(spans + level * 4096), high, rest, SPLIT, PREC_SUM) * LOG2E
                grad_q, grad_k, crossing = _through_scores(
                    bq, bk, tl.exp2(exponent), tl.exp2(exponent), meeting * dP, meeting * dM, grad_q, grad_k, crossing,
                    ERASES, DT, PREC,
                )  # fmt: skip
        sum_q += grad_q
        sum_k += grad_k
        # Down to the gates.
        high = crossing.to(DT)
        rest = (crossing - high.to(tl.float32)).to(DT)
        through = sum_of_spans(tl.trans(tl.load(spans + 12 * 4096)), high, rest, tl.bfloat16 == DT, PREC_SUM)
        through += sum_of_spans(tl.trans(tl.load(spans + 13 * 4096)), early, early, False, PREC_SUM)
        through += (kept * tl.load(passed + (chunk * HV + head) * K + channel, mask=seen, other=0.0))[None, :]
        gates = tl.load(log_decay + start * K + here, mask=keys, other=0.0).to(tl.float32)
        tl.store(
            dlog_decay + start * K + here,
            tl.where(gates > RESET, through, 0.0).to(dlog_decay.dtype.element_ty),
            mask=keys,
        )
    place = (row[:, None] * heads + key_head) * K + channel[None, :]
    tl.store(dq + first * heads * K + place, sum_q.to(dq.dtype.element_ty), mask=keys)
    tl.store(dk + first * heads * K + place, sum_k.to(dk.dtype.element_ty), mask=keys)


@triton.jit
def _through_scores(
    bq, bk, from_start, to_end, by_score, by_overlap, grad_q, grad_k, crossing, ERASES: tl.constexpr,
    DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The gradients, and what crosses tokens, with what comes through scores of rows that meet columns."""
    queries, keys = (bq.to(tl.float32) * from_start).to(DT), (bk.to(tl.float32) * to_end).to(DT)
    asked = tl.dot(by_score, keys, input_precision=PREC)
    met = tl.dot(tl.trans(by_score), queries, input_precision=PREC)
    grad_q += from_start * asked
    crossing += queries.to(tl.float32) * asked
    if ERASES:
        readers = (bk.to(tl.float32) * from_start).to(DT)
        recalled = tl.dot(by_overlap, keys, input_precision=PREC)
        met = tl.dot(tl.trans(by_overlap), readers, met, input_precision=PREC)
        grad_k += from_start * recalled
        crossing += readers.to(tl.float32) * recalled
    grad_k += to_end * met
    crossing -= keys.to(tl.float32) * met
    return grad_q, grad_k, crossing


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
    exact, half, erases = torch.float32, form.dtype, form.erases
    dq, dk = (x.new_empty(x.shape) for x in (q, k))
    dlog_decay, own = torch.empty_like(log_decay), dy.new_empty(tokens, HV, dtype=exact)
    dbeta = dy.new_empty(tokens, HV, dtype=exact) if erases else None
    facts = {"K": form.BK, "V": form.V, "half": form.half, "aligned": form.aligned, "erases": erases}
    first, second = pick("delta_channel_states", form.arch, **facts), pick("delta_channel_grads", form.arch, **facts)
    tiles = [triton.cdiv(K, min(launch.tile, form.BK)) for launch in (first, second)]
    bytes_of_chunk = CHUNK * HV * ((2 + erases) * K + (1 + erases) * CHUNK) * half.itemsize
    step = max(2, SLAB // bytes_of_chunk // 2 * 2)  # even, so that every slab of the table starts at 16 bytes
    for begin in range(0, tables.count, step):
        chunks = tables.chunks[begin : begin + step]
        rows = min(len(chunks) * CHUNK, tokens)
        dscores, doverlaps, _ = score_gradients(
            form, q, k, dy, errors, dv, None, beta, chunks, rows, scale, dbeta=dbeta, own=own
        )
        reads, writes, recalls = (dy.new_empty(rows if there else 0, HV, K, dtype=half) for there in (1, 1, erases))
        passed = dy.new_empty(len(chunks), HV, K, dtype=exact)
        channel_states_kernel[(len(chunks) * HV * tiles[0],)](
            dy, errors, dv, beta, entering, leaving, chunks, reads, writes, recalls, passed, scale, begin,
            e_row=errors.stride(0), HV=HV, K=K, V=form.V, BT=min(first.tile, form.BK), BV=min(VALUES, form.BV),
            ERASES=erases, DT=form.operand, PREC=form.precision, STAGES=first.stages, num_warps=first.warps,
        )  # fmt: skip
        channel_grads_kernel[(len(chunks) * HV // form.R * tiles[1],)](
            q, k, log_decay, keep, reads, writes, recalls, passed, dscores, doverlaps, own, chunks,
            spans(half, q.device), dq, dk, dlog_decay, begin,
            q_row=q.stride(0), k_row=k.stride(0), HV=HV, R=form.R, K=K, BT=min(second.tile, form.BK), ERASES=erases,
            SPLIT=splits(form, log_decay), DT=form.operand, PREC=form.precision, PREC_SUM=SUM_PRECISION,
            STAGES=second.stages, num_warps=second.warps,
        )  # fmt: skip
    return dq, dk, dlog_decay, dbeta


def compile_rows() -> Iterator[CompileRow]:
    """Every shape class of :data:`zoo_kernels.delta.chunk.CHANNELED`, for the offline compile gate."""
    for case in CHANNELED:
        x = example(case)
        keep = x.k.new_empty(x.tables.count, x.form.HV, x.form.K, dtype=torch.float32)
        kernels = {
            "channel scores": score_kernel,
            "channel states": channel_states_kernel,
            "channel grads": channel_grads_kernel,
        }
        with recorded(case, **kernels) as rows:
            channel_gradients(
                x.form, x.q, x.k, x.log_decay, x.beta, keep, x.v, x.v, x.v, x.entering, x.entering, x.tables, 1.0
            )
        yield from (row for row in rows if ", launch" not in row[0])  # later slabs launch the same
