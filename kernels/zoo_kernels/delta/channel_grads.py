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

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo_kernels.delta.channel import RESET, SUM_PRECISION, spans, splits, sum_of_spans
from zoo_kernels.delta.chunk import Form
from zoo_kernels.delta.prep import LOG2E
from zoo_kernels.delta.tables import CHUNK, Tables
from zoo_kernels.launch import Launch, Row, pick, provide

# The tile is of values for pairs, and of channels for gradients.
provide(
    "delta_channel_pairs",
    Row(Launch(tile=32, warps=4), when={"half": False}),
    Row(Launch(tile=64, warps=4, stages=2)),
)
provide(
    "delta_channel_grads",
    Row(Launch(tile=32, warps=4)),
)
VALUES = {True: 64, False: 32}  # values of one step of the gradients, by whether operands have 16 bits


@triton.jit(do_not_specialize=["HV"])
def channel_pairs_kernel(
    dy, errors, dv, beta, chunks, dscores, doverlaps, dbeta, scale, e_row, HV,
    V: tl.constexpr, BV: tl.constexpr, ERASES: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dP, dM and dbeta of one chunk of one value head."""
    at = tl.program_id(0)
    chunk, head = (at // HV).to(tl.int64), at % HV
    first, rows = tl.load(chunks + 2 * chunk).to(tl.int64), tl.load(chunks + 2 * chunk + 1)
    row = tl.arange(0, 64)
    valid = row < rows
    by_token = (first + row) * HV + head
    X, Y, both = tl.zeros([64, 64], tl.float32), tl.zeros([64, 64], tl.float32), tl.zeros([64], tl.float32)
    for j in tl.range(0, (V + BV - 1) // BV, num_stages=STAGES):
        value = j * BV + tl.arange(0, BV)
        inside = valid[:, None] & (value < V)[None, :]
        here = by_token[:, None] * V + value[None, :]
        by_error = (first + row)[:, None] * e_row + head * V + value[None, :]
        be = tl.load(errors + by_error, mask=inside, other=0.0).to(DT)
        X = tl.dot(tl.load(dy + here, mask=inside, other=0.0).to(DT), tl.trans(be), X, input_precision=PREC)
        if ERASES:
            bz = tl.load(dv + here, mask=inside, other=0.0).to(DT)
            Y = tl.dot(bz, tl.trans(be), Y, input_precision=PREC)
            both += tl.sum(be.to(tl.float32) * bz.to(tl.float32), 1)
    place = by_token[:, None] * 64 + row[None, :]
    X *= scale
    if ERASES:
        weight = tl.load(beta + by_token, mask=valid, other=1.0)
        tl.store(dbeta + by_token, both / weight, mask=valid)
        X *= weight[None, :]
        Y = tl.where(row[:, None] > row[None, :], -Y * weight[None, :], 0.0)
        tl.store(doverlaps + place, Y.to(DT), mask=valid[:, None])
    tl.store(dscores + place, tl.where(row[:, None] >= row[None, :], X, 0.0).to(DT), mask=valid[:, None])


@triton.jit(do_not_specialize=["HV", "R"])
def channel_grads_kernel(
    q, k, log_decay, dy, errors, dv, beta, keep, entering, leaving, dscores, doverlaps, chunks, spans, dq, dk,
    dlog_decay, scale, q_row, k_row, e_row, HV, R,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, ERASES: tl.constexpr, GROUPED: tl.constexpr,
    SPLIT: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, PREC_SUM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One chunk of one key head, BT of its channels; loops over the key head's value heads."""
    TILES: tl.constexpr = (K + BT - 1) // BT
    at = tl.program_id(0)
    heads = HV // R
    tile, key_head, chunk = at % TILES, (at // TILES) % heads, (at // TILES // heads).to(tl.int64)
    first, rows = tl.load(chunks + 2 * chunk).to(tl.int64), tl.load(chunks + 2 * chunk + 1)
    row, channel = tl.arange(0, 64), tile * BT + tl.arange(0, BT)
    valid, seen = row < rows, channel < K
    spans += row[:, None] * 64 + row[None, :]
    in_keys = valid[:, None] & seen[None, :]
    at_key = key_head * K + channel[None, :]
    bq = tl.load(q + (first + row)[:, None] * q_row + at_key, mask=in_keys, other=0.0).to(DT)
    bk = tl.load(k + (first + row)[:, None] * k_row + at_key, mask=in_keys, other=0.0).to(DT)
    sum_q, sum_k = tl.zeros([64, BT], tl.float32), tl.zeros([64, BT], tl.float32)
    for member in range(R if GROUPED else 1):
        head = key_head * R + member
        by_token = (first + row) * HV + head
        here = by_token[:, None] * K + channel[None, :]
        gates = tl.maximum(tl.load(log_decay + here, mask=in_keys, other=0.0).to(tl.float32), RESET)
        high = gates.to(DT)
        rest = (gates - high.to(tl.float32)).to(DT)
        # Through the states.
        grad_q, recall = tl.zeros([64, BT], tl.float32), tl.zeros([64, BT], tl.float32)
        wrote, passing = tl.zeros([64, BT], tl.float32), tl.zeros([BT], tl.float32)
        for j in tl.range(0, (V + BV - 1) // BV, num_stages=STAGES):
            value = j * BV + tl.arange(0, BV)
            inside = valid[:, None] & (value < V)[None, :]
            of_value = by_token[:, None] * V + value[None, :]
            of_error = (first + row)[:, None] * e_row + head * V + value[None, :]
            of_state = ((chunk * HV + head) * K + channel[:, None]) * V + value[None, :]
            in_state = seen[:, None] & (value < V)[None, :]
            bh = tl.load(entering + of_state, mask=in_state, other=0.0)
            bds = tl.load(leaving + of_state, mask=in_state, other=0.0)
            bdy = tl.load(dy + of_value, mask=inside, other=0.0).to(DT)
            be = tl.load(errors + of_error, mask=inside, other=0.0).to(DT)
            grad_q = tl.dot(bdy, tl.trans(bh), grad_q, input_precision=PREC)
            wrote = tl.dot(be, tl.trans(bds), wrote, input_precision=PREC)
            if ERASES:
                bz = tl.load(dv + of_value, mask=inside, other=0.0).to(DT)
                recall = tl.dot(bz, tl.trans(bh), recall, input_precision=PREC)
            passing += tl.sum(bh.to(tl.float32) * bds.to(tl.float32), 1)
        entered = tl.exp2(sum_of_spans(tl.load(spans + 12 * 4096), high, rest, SPLIT, PREC_SUM) * LOG2E)
        lasts = tl.exp2(sum_of_spans(tl.load(spans + 13 * 4096), high, rest, SPLIT, PREC_SUM) * LOG2E)
        grad_q *= entered * scale
        wrote *= lasts
        crossing = bq.to(tl.float32) * grad_q
        if ERASES:
            wrote *= tl.load(beta + by_token, mask=valid, other=0.0)[:, None]
            recall *= entered
            crossing -= bk.to(tl.float32) * recall
            grad_k = wrote - recall
        else:
            grad_k = wrote
        early = (bk.to(tl.float32) * wrote).to(DT)
        # Through the scores.
        square = by_token[:, None] * 64 + row[None, :]
        dP = tl.load(dscores + square, mask=valid[:, None], other=0.0)
        if ERASES:
            dM = tl.load(doverlaps + square, mask=valid[:, None], other=0.0)
        own = tl.load(dscores + by_token * 64 + row, mask=valid, other=0.0).to(tl.float32)[:, None]
        grad_q += own * bk.to(tl.float32)
        grad_k += own * bq.to(tl.float32)
        for level in tl.range(0, 6, num_stages=STAGES):
            meeting = tl.load(spans + (6 + level) * 4096)
            fade = tl.exp2(sum_of_spans(tl.load(spans + level * 4096), high, rest, SPLIT, PREC_SUM) * LOG2E)
            queries, keys = (bq.to(tl.float32) * fade).to(DT), (bk.to(tl.float32) * fade).to(DT)
            by_score = meeting * dP
            asked = tl.dot(by_score, keys, input_precision=PREC)
            met = tl.dot(tl.trans(by_score), queries, input_precision=PREC)
            grad_q += fade * asked
            crossing += queries.to(tl.float32) * asked
            if ERASES:
                by_overlap = meeting * dM
                recalled = tl.dot(by_overlap, keys, input_precision=PREC)
                met = tl.dot(tl.trans(by_overlap), keys, met, input_precision=PREC)
                grad_k += fade * recalled
                crossing += keys.to(tl.float32) * recalled
            grad_k += fade * met
            crossing -= keys.to(tl.float32) * met
        sum_q += grad_q
        sum_k += grad_k
        # Down to the gates.
        high = crossing.to(DT)
        rest = (crossing - high.to(tl.float32)).to(DT)
        through = sum_of_spans(tl.trans(tl.load(spans + 12 * 4096)), high, rest, tl.bfloat16 == DT, PREC_SUM)
        through += sum_of_spans(tl.trans(tl.load(spans + 13 * 4096)), early, early, False, PREC_SUM)
        whole = tl.load(keep + (chunk * HV + head) * K + channel, mask=seen, other=0.0)
        through += (tl.exp2(whole) * passing)[None, :]
        gates = tl.load(log_decay + here, mask=in_keys, other=0.0).to(tl.float32)
        tl.store(dlog_decay + here, tl.where(gates > RESET, through, 0.0), mask=in_keys)
    place = ((first + row)[:, None] * heads + key_head) * K + channel[None, :]
    tl.store(dq + place, sum_q.to(dq.dtype.element_ty), mask=in_keys)
    tl.store(dk + place, sum_k.to(dk.dtype.element_ty), mask=in_keys)


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
        dq, dk [tokens, H, K] in q's dtype; dlog_decay fp32 [tokens, HV, K], 0 at resets; dbeta fp32 [tokens, HV].
    """
    tokens, HV, K = log_decay.shape
    V, half = form.V, form.half
    dq, dk = (x.new_empty(x.shape) for x in (q, k))
    dlog_decay = q.new_empty(tokens, HV, K, dtype=torch.float32)
    dscores = q.new_empty(tokens, HV, CHUNK, dtype=form.dtype)
    doverlaps = torch.empty_like(dscores) if form.erases else None
    dbeta = q.new_empty(tokens, HV, dtype=torch.float32) if form.erases else None
    if tables.count:
        padded = max(16, triton.next_power_of_2(V))
        launch = pick("delta_channel_pairs", form.arch, V=V, half=half, erases=form.erases)
        channel_pairs_kernel[(tables.count * HV,)](
            dy, errors, dv, beta, tables.chunks, dscores, doverlaps, dbeta, scale, errors.stride(0), HV,
            V=V, BV=min(launch.tile, padded), ERASES=form.erases, DT=form.operand, PREC=form.precision,
            STAGES=launch.stages, num_warps=launch.warps,  # pyright: ignore[reportCallIssue]
        )  # fmt: skip
        launch = pick("delta_channel_grads", form.arch, K=form.BK, V=V, half=half, group=form.R > 1, erases=form.erases)
        BT = min(launch.tile, form.BK)
        channel_grads_kernel[(tables.count * HV // form.R * triton.cdiv(K, BT),)](
            q, k, log_decay, dy, errors, dv, beta, keep, entering, leaving, dscores, doverlaps, tables.chunks,
            spans(form.dtype, q.device), dq, dk, dlog_decay, scale, q.stride(0), k.stride(0), errors.stride(0), HV,
            form.R,
            K=K, V=V, BT=BT, BV=min(VALUES[half], padded), ERASES=form.erases, GROUPED=form.R > 1,
            SPLIT=splits(form, log_decay), DT=form.operand, PREC=form.precision, PREC_SUM=SUM_PRECISION,
            STAGES=launch.stages, num_warps=launch.warps,  # pyright: ignore[reportCallIssue]
        )  # fmt: skip
    return dq, dk, dlog_decay, dbeta


def compile_rows() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any], int, int]]:
    """Every shipped configuration, for the offline compile gate: name, kernel, signature, constants, warps, stages."""
    halves = dict.fromkeys(("dy", "errors", "dv", "dscores", "doverlaps"), "*bf16")
    shared = {**halves, "beta": "*fp32", "chunks": "*i32", "scale": "fp32", "e_row": "i32", "HV": "i32"}
    keyed = dict.fromkeys(("q", "k", "log_decay", "entering", "leaving", "spans", "dq", "dk"), "*bf16")
    integers = dict.fromkeys(("q_row", "k_row", "R"), "i32")
    for size in (64, 128):
        launch = pick("delta_channel_pairs", "sm_90", V=size, half=True, erases=True)
        common = {"V": size, "ERASES": True, "DT": tl.bfloat16, "PREC": "tf32"}
        pairs = {**common, "BV": min(launch.tile, size), "STAGES": launch.stages}
        signature = {**shared, "dbeta": "*fp32"}
        yield f"channel pairs V{size}", channel_pairs_kernel, signature, pairs, launch.warps, launch.stages
        launch = pick("delta_channel_grads", "sm_90", K=size, V=size, half=True, group=False, erases=True)
        grads = {
            **common,
            "K": size,
            "BT": min(launch.tile, size),
            "BV": min(VALUES[True], size),
            "STAGES": launch.stages,
        }
        grads |= {"GROUPED": False, "SPLIT": False, "PREC_SUM": SUM_PRECISION}
        signature = {**shared, **keyed, **integers, "keep": "*fp32", "dlog_decay": "*fp32"}
        yield f"channel grads K{size}", channel_grads_kernel, signature, grads, launch.warps, launch.stages
