"""Gradients of queries, keys and gates under a decay per head: every chunk on its own, between the two scans.

Per value head, with e the errors (v where nothing erases), z = dv, h the state that enters, dS the gradient of the one
that leaves, ``entered``, ``leaving`` and G the decays of chunk.py, b = beta or 1:

    X = dy e^T;  dP = scale * tril(X) * G * b_col;  dN = -stril(z e^T) * G * b_col                     (score_kernel)
    dq = scale * entered * (dy h^T) + dP k                                                              (key_kernel)
    dk = leaving * b * (e dS^T) + dP^T q - entered * (z h^T) + (dN + dN^T) k
    dbeta = rowdot(e, z) / beta

What a decay receives is summed up in gate_grads.py.
"""

# Type checkers do not know the launches and loops of kernels.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo_kernels.delta.chunk import EXAMPLES, Form, decay_between, example, members, within
from zoo_kernels.delta.gate_grads import gate_gradient, gate_kernel
from zoo_kernels.delta.scan import Operands, operands_of
from zoo_kernels.delta.tables import CHUNK, Tables
from zoo_kernels.launch import CompileRow, Launch, Row, pick, provide, recorded

# tile: values of one step.
provide(
    "delta_score_grads",
    Row(Launch(tile=64, warps=8), when={"half": False}),
    Row(Launch(tile=64, warps=4), when={"aligned": False}),
    Row(Launch(tile=64, warps=4, stages=3), when={"erases": False}),
    Row(Launch(tile=64, warps=4, stages=2)),
)
# tile: channels of the key of one program.
provide(
    "delta_key_grads",
    Row(Launch(tile=64, warps=8), when={"half": False}),
    Row(Launch(tile=64, warps=4), when={"aligned": False}),
    Row(Launch(tile=64, warps=4, stages=2)),
)
VALUES = 64  # of one step of the keys' gradients
# Bytes of scores' gradients alive at a time. Chunks are worked on in slabs, so that these do not grow with the tokens.
SLAB = 2**26


@triton.jit
def score_kernel(
    q, k, dy, errors, dv, decay, beta, chunks, d_query, d_key, own, crossing, dbeta, scale,
    q_row: tl.constexpr, k_row: tl.constexpr, e_row: tl.constexpr, HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GATED: tl.constexpr, ERASES: tl.constexpr,
    MEMBERS: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of one chunk's scores, for MEMBERS value heads of one key head."""
    at = tl.program_id(0)
    block, chunk = at % (HV // MEMBERS), (at // (HV // MEMBERS)).to(tl.int64)
    first, rows = tl.load(chunks + 2 * chunk).to(tl.int64), tl.load(chunks + 2 * chunk + 1)
    base = tl.load(chunks)  # the first token of this slab of chunks
    row, channel = tl.arange(0, 64), tl.arange(0, BK)
    valid = row < rows
    lower, strict = row[:, None] >= row[None, :], row[:, None] > row[None, :]
    if GATED:
        keys = within(valid, channel < K, False, K == BK)
        key_head = block * MEMBERS // R
        k += first * k_row + key_head * K
        bk = tl.load(k + row[:, None] * k_row + channel[None, :], mask=keys, other=0.0).to(DT)
        q += first * q_row + key_head * K
        bq = tl.load(q + row[:, None] * q_row + channel[None, :], mask=keys, other=0.0).to(DT)
        by_query = tl.dot(bq, tl.trans(bk), input_precision=PREC) * scale
        if ERASES:
            by_key = tl.dot(bk, tl.trans(bk), input_precision=PREC)
    for member in tl.range(0, MEMBERS, num_stages=STAGES):
        head = block * MEMBERS + member
        gate_at = row * HV + head
        square_at = gate_at[:, None] * 64 + row[None, :]
        value_at, error_at = gate_at[:, None] * V, row[:, None] * e_row + head * V
        X, Y = tl.zeros([64, 64], tl.float32), tl.zeros([64, 64], tl.float32)
        for j in tl.range(0, (V + BV - 1) // BV, num_stages=STAGES):
            column = j * BV + tl.arange(0, BV)
            values = within(valid, column < V, False, V % BV == 0)
            be = tl.load(errors + first * e_row + error_at + column[None, :], mask=values, other=0.0)
            bdy = tl.load(dy + first * HV * V + value_at + column[None, :], mask=values, other=0.0)
            X = tl.dot(bdy.to(DT), tl.trans(be.to(DT)), X, input_precision=PREC)
            if ERASES:
                bz = tl.load(dv + first * HV * V + value_at + column[None, :], mask=values, other=0.0)
                Y = tl.dot(bz, tl.trans(be.to(DT)), Y, input_precision=PREC)
        X = tl.where(lower, X, 0.0)
        if ERASES:
            # From the product: a tile that is both multiplied and summed in a pipelined loop has one buffer, which the
            # next load overwrites under the product (Triton 3.6 and 3.7.1; the compile gate looks for it).
            both = tl.sum(tl.where(row[:, None] == row[None, :], Y, 0.0), 1)
            weight = tl.load(beta + first * HV + gate_at, mask=valid, other=0.0)
            X = X * weight[None, :]
            Y = tl.where(strict, -Y * weight[None, :], 0.0)
        if GATED:
            running = tl.load(decay + first * HV + gate_at, mask=valid, other=0.0)
            between = decay_between(running, row, valid)
            X = X * between
            products = tl.where(strict, X * by_query, 0.0)
            if ERASES:
                Y = Y * between
                products += Y * by_key
            crosses = tl.sum(products, 1) - tl.sum(products, 0)
            tl.store(crossing + first * HV + gate_at, crosses, mask=valid)
        if own is not None:
            diagonal = row[:, None] == row[None, :]
            tl.store(own + first * HV + gate_at, tl.sum(tl.where(diagonal, X, 0.0), 1) * scale, mask=valid)
            X = tl.where(diagonal, 0.0, X)
        target = (first - base) * HV * 64 + square_at
        tl.store(d_query + target, (X * scale).to(DT), mask=valid[:, None])
        if ERASES:
            tl.store(d_key + target, Y.to(DT), mask=valid[:, None])
            tl.store(dbeta + first * HV + gate_at, both / tl.where(valid, weight, 1.0), mask=valid)


@triton.jit(do_not_specialize=["skipped", "count", "tokens"])
def key_kernel(
    q, k, dy, errors, dv, decay, beta, entering, leaving_grad, chunks, d_query, d_key, dq, dk, reads, writes, passed,
    scale, skipped, count, tokens,
    q_row: tl.constexpr, k_row: tl.constexpr, e_row: tl.constexpr, HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, GATED: tl.constexpr, ERASES: tl.constexpr, DT: tl.constexpr,
    PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BT channels of the keys of one chunk of one key head, summed over its value heads; chunks before are skipped."""
    TILES: tl.constexpr = (K + BT - 1) // BT
    H: tl.constexpr = HV // R
    at = tl.program_id(0)
    tile, key_head, chunk = at % TILES, (at // TILES) % H, (at // TILES // H).to(tl.int64)
    first, rows = tl.load(chunks + 2 * chunk).to(tl.int64), tl.load(chunks + 2 * chunk + 1)
    base = tl.load(chunks)
    row, channel = tl.arange(0, 64), tile * BT + tl.arange(0, BT)
    valid, seen = row < rows, channel < K
    keys = within(valid, seen, False, K % BT == 0)
    # Tiles lie at 64-bit bases and 32-bit offsets, which take half the registers.
    q += first * q_row + key_head * K
    k += first * k_row + key_head * K
    bq = tl.load(q + row[:, None] * q_row + channel[None, :], mask=keys, other=0.0).to(DT)
    bk = tl.load(k + row[:, None] * k_row + channel[None, :], mask=keys, other=0.0).to(DT)
    grad_q, grad_k = tl.zeros([64, BT], tl.float32), tl.zeros([64, BT], tl.float32)
    for member in tl.range(0, R, num_stages=STAGES):
        head = key_head * R + member
        gate_at = row * HV + head
        square_at = gate_at[:, None] * 64 + row[None, :]
        value_at, error_at = gate_at[:, None] * V, row[:, None] * e_row + head * V
        state_at = (skipped + chunk) * HV * K * V + head * K * V
        read, wrote = tl.zeros([64, BT], tl.float32), tl.zeros([64, BT], tl.float32)
        recall, passing = tl.zeros([64, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
        for j in tl.range(0, (V + BV - 1) // BV, num_stages=STAGES):
            column = j * BV + tl.arange(0, BV)
            values = within(valid, column < V, False, V % BV == 0)
            inside = within(seen, column < V, K % BT == 0, V % BV == 0)
            bdy = tl.load(dy + first * HV * V + value_at + column[None, :], mask=values, other=0.0)
            bh = tl.load(entering + state_at + channel[:, None] * V + column[None, :], mask=inside, other=0.0)
            read = tl.dot(bdy.to(DT), tl.trans(bh), read, input_precision=PREC)
            be = tl.load(errors + first * e_row + error_at + column[None, :], mask=values, other=0.0)
            bds = tl.load(leaving_grad + state_at + channel[:, None] * V + column[None, :], mask=inside, other=0.0)
            wrote = tl.dot(be.to(DT), tl.trans(bds), wrote, input_precision=PREC)
            if ERASES:
                bz = tl.load(dv + first * HV * V + value_at + column[None, :], mask=values, other=0.0)
                recall = tl.dot(bz, tl.trans(bh), recall, input_precision=PREC)
            if GATED:  # its trace counts; as a product, for the reason above
                passing = tl.dot(bh, tl.trans(bds), passing, input_precision=PREC)
        read = read * scale
        if ERASES:
            weight = tl.load(beta + first * HV + gate_at, mask=valid, other=0.0)
            wrote = wrote * weight[:, None]
        if GATED:
            running = tl.load(decay + first * HV + gate_at, mask=valid, other=0.0)
            whole = tl.load(decay + (first + rows - 1) * HV + head)
            entered = tl.exp2(running)[:, None]
            read, recall = read * entered, recall * -entered
            wrote = wrote * tl.exp2(tl.where(valid, whole - running, float("-inf")))[:, None]
            crosses = tl.sum(bq.to(tl.float32) * read + bk.to(tl.float32) * recall, 1)
            written = tl.sum(bk.to(tl.float32) * wrote, 1)
            part = (tile.to(tl.int64) * tokens + first) * HV + gate_at
            tl.store(reads + part, crosses, mask=valid)
            tl.store(writes + part, written, mask=valid)
            trace = tl.sum(tl.where(tl.arange(0, BT)[:, None] == tl.arange(0, BT)[None, :], passing, 0.0))
            tl.store(passed + (tile.to(tl.int64) * count + skipped + chunk) * HV + head, trace)
        elif ERASES:
            # By a factor that the compiler does not know: it folds a plain minus into the products of an unrolled loop,
            # and drops half of them (ptxas 12.8, V 384; the compile gate looks for it).
            recall = recall * tl.where(valid, -1.0, 0.0)[:, None]
        target = (first - base) * HV * 64
        by_query = tl.load(d_query + target + square_at, mask=valid[:, None], other=0.0)
        grad_q = tl.dot(by_query, bk, grad_q + read, input_precision=PREC)
        grad_k += wrote + recall
        grad_k = tl.dot(tl.trans(by_query), bq, grad_k, input_precision=PREC)
        if ERASES:
            by_key = tl.load(d_key + target + square_at, mask=valid[:, None], other=0.0)
            grad_k = tl.dot(by_key, bk, grad_k, input_precision=PREC)
            grad_k = tl.dot(tl.trans(by_key), bk, grad_k, input_precision=PREC)
    place = (row[:, None] * H + key_head) * K + channel[None, :]
    tl.store(dq + first * H * K + place, grad_q.to(dq.dtype.element_ty), mask=keys)
    tl.store(dk + first * H * K + place, grad_k.to(dk.dtype.element_ty), mask=keys)


def score_gradients(
    form: Form, q: Tensor, k: Tensor, dy: Tensor, errors: Tensor, dv: Tensor, decay: Tensor | None,
    beta: Tensor | None, chunks: Tensor, rows: int, scale: float, crossing: Tensor | None = None,
    dbeta: Tensor | None = None, own: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Launch :func:`score_kernel` on some chunks.

    Args:
        rows: tokens of these chunks, at most.
        crossing, dbeta: fp32 [tokens, HV], to be filled at the chunks' tokens. dbeta None: it is made here.
        own: the same, takes the diagonal of dP, which is zero then. None: it stays.

    Returns:
        dP and dN [rows, HV, 64], from the first token of the chunks on, and dbeta. Without erasing, dN is dP.
    """
    facts = {"K": form.BK, "V": form.V, "half": form.half, "aligned": form.aligned}
    launch = pick("delta_score_grads", form.arch, **facts, erases=form.erases)
    together = 1 if decay is None else members(form.R)
    d_scores = dy.new_empty(1 + form.erases, rows, form.HV, CHUNK, dtype=form.dtype)
    if dbeta is None and form.erases:
        dbeta = dy.new_empty(dy.shape[0], form.HV, dtype=torch.float32)
    if len(chunks):
        score_kernel[(len(chunks) * form.HV // together,)](
            q, k, dy, errors, dv, decay, beta, chunks, d_scores[0], d_scores[-1], own, crossing, dbeta,
            scale,
            q_row=q.stride(0), k_row=k.stride(0), e_row=errors.stride(0), HV=form.HV, R=form.R, K=form.K, V=form.V,
            BK=form.BK, BV=min(launch.tile, form.BV), GATED=decay is not None, ERASES=form.erases, MEMBERS=together,
            DT=form.operand, PREC=form.precision, STAGES=launch.stages, num_warps=launch.warps,
        )  # fmt: skip
    return d_scores[0], d_scores[-1], dbeta


def gradients(
    form: Form, q: Tensor, k: Tensor, dy: Tensor, errors: Tensor, dv: Tensor, operands: Operands,
    log_decay: Tensor | None, entering: Tensor, leaving: Tensor, tables: Tables, scale: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """All gradients but those of values and states.

    Args:
        q, k: [tokens, H, K]; dy: [tokens, HV, V]; errors: the same, or v where nothing erases; dv: the same.
        log_decay: [tokens, HV], or [HV] for constants; entering, leaving: [NC, HV, K, V].

    Returns:
        dq, dk [tokens, H, K] in q's dtype; dlog_decay like log_decay; dbeta, fp32 [tokens, HV].
    """
    gated, tokens = form.gate == "head", dy.shape[0]
    facts = {"K": form.BK, "V": form.V, "half": form.half, "aligned": form.aligned}
    launch = pick("delta_key_grads", form.arch, **facts, group=form.R > 1)
    BT = min(launch.tile, form.BK)
    tiles = triton.cdiv(form.K, BT)
    dq, dk = (x.new_empty(x.shape) for x in (q, k))
    # Apart, so that each starts at a multiple of 16 bytes whatever the tokens are; else kernels would compile again.
    crossing, dbeta = (dy.new_empty(tokens, form.HV, dtype=torch.float32) for _ in range(2))
    reads, writes = (dy.new_empty(tiles if gated else 0, tokens, form.HV, dtype=torch.float32) for _ in range(2))
    passed = dy.new_empty(tiles if gated else 0, tables.count, form.HV, dtype=torch.float32)
    bytes_of_chunk = (1 + form.erases) * form.HV * CHUNK * CHUNK * form.dtype.itemsize
    step = max(2, SLAB // bytes_of_chunk // 2 * 2)  # even, so that every slab of the table starts at 16 bytes
    for begin in range(0, tables.count, step):
        chunks = tables.chunks[begin : begin + step]
        d_query, d_key, _ = score_gradients(
            form, q, k, dy, errors, dv, operands.decay, operands.beta, chunks, len(chunks) * CHUNK, scale, crossing,
            dbeta,
        )  # fmt: skip
        key_kernel[(len(chunks) * form.HV // form.R * tiles,)](
            q, k, dy, errors, dv, operands.decay, operands.beta, entering, leaving, chunks, d_query, d_key, dq, dk,
            reads, writes, passed, scale, begin, tables.count, tokens,
            q_row=q.stride(0), k_row=k.stride(0), e_row=errors.stride(0), HV=form.HV, R=form.R, K=form.K, V=form.V,
            BT=BT, BV=min(VALUES, form.BV), GATED=gated, ERASES=form.erases, DT=form.operand, PREC=form.precision,
            STAGES=launch.stages, num_warps=launch.warps,
        )  # fmt: skip
    dlog_decay = None
    if gated and operands.decay is not None and log_decay is not None:
        dlog_decay = gate_gradient(form, crossing, reads, writes, passed, operands.decay, log_decay, tables)
    return dq, dk, dlog_decay, dbeta if form.erases else None


def compile_rows() -> Iterator[CompileRow]:
    """Every shape class of :data:`zoo_kernels.delta.chunk.EXAMPLES`, for the offline compile gate."""
    for case in EXAMPLES:
        x = example(case)
        kernels = {"score grads": score_kernel, "key grads": key_kernel, "gate grads": gate_kernel}
        with recorded(case, **kernels) as rows:
            gradients(
                x.form, x.q, x.k, x.v, x.v, x.v, operands_of(x), x.log_decay, x.entering, x.entering, x.tables, 1.0
            )
        yield from (row for row in rows if row[1] is not gate_kernel)  # which has a file of its own
