"""Prepares chunks under a decay per channel: operands that carry the decay, scores, and the solve.

With g the running decay of a chunk and g_last its last,

    q_read = q 2^g;  k_read = k 2^g;  k_write = k 2^(g_last - g)
    P_ij = scale * sum_d q_id k_jd 2^(g_id - g_jd), i >= j;  M_ij = sum_d k_id k_jd 2^(g_id - g_jd), i > j
    A = (I + M diag(beta))^-1

The decay between two tokens sits inside their product. So what is below the diagonal is split into squares, each
between the halves of a block of 2, 4, .. 64 tokens: keys of the left half decay to its end, queries and keys of the
right half from its start. Every decay is a sum over its own span, as in intra.py: no two running sums are subtracted,
no exponent is positive, and a reset is a plain zero.

Where neither half of a chunk decays by more than 2^-60, one product does: rows and columns are decayed from the middle
and to it, by factors that fp32 and bf16 hold both ways. Each kernel looks for itself, chunk by chunk. The middle enters
as a whole power of two, which changes no digit of a factor, so that no row's numbers depend on later tokens.
"""

# Type checkers do not know the launches and loops of kernels.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo_kernels.delta.chunk import CHANNELED, LEAST_BETA, Form, example
from zoo_kernels.delta.prep import LOG2E
from zoo_kernels.delta.solve import invert_blocks, store_blocks
from zoo_kernels.delta.tables import CHUNK, Tables
from zoo_kernels.device import INTERPRETED
from zoo_kernels.launch import CompileRow, Launch, Row, pick, provide, recorded

# The tile is of channels, in one step of the loop over them.
provide(
    "delta_channel_prep",
    Row(Launch(tile=64, warps=8), when={"half": False}),
    Row(Launch(tile=64, warps=4)),
)
provide("delta_channel_solve", Row(Launch(tile=16, warps=1)))


# A decay below this, in nats, is a reset: 0 in fp32, exact in bf16, and unlike -inf it can be multiplied by 0.
RESET = tl.constexpr(-112.0)
# Halves of chunks that decay by less, in nats, are taken at once: 2^60 and 2^-60 leave bf16 and fp32 room for keys,
# and their products, 2^120 where nothing is read, room to stay finite.
MOST_AT_ONCE = tl.constexpr(-41.5)


@dataclass(frozen=True, eq=False)
class ChannelOperands:
    """What the scans read under a decay per channel.

    Attributes:
        q_read, k_write: [tokens, HV, K] in the operands' dtype; the queries without the scale.
        k_read: the same. None: no erasing, so nothing is recalled.
        keep: fp32 [NC, HV, K], each chunk's whole decay, in base 2.
        scores: [tokens, HV, 64], rows of P; zero above the diagonal and where a chunk has no token.
        beta: fp32 [tokens, HV], at least LEAST_BETA. None: no erasing.
        solve: [tokens, HV, 64], rows of A. None: no erasing.
    """

    q_read: Tensor
    k_write: Tensor
    k_read: Tensor | None
    keep: Tensor
    scores: Tensor
    beta: Tensor | None
    solve: Tensor | None


@lru_cache(maxsize=8)
def spans(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Squares [14, 64, 64], by which kernels sum gates over spans of rows, and find rows and columns that meet.

    0 to 5, for halves of 1, 2, .. 32 tokens: the span of each row's decay, which runs from the half's start to the row
    in a right half, and from after the row to the half's end in a left half. 6 to 11: where a row of a right half meets
    a column of its left half on each of these levels. 12: all rows up to one's own. 13: all rows after it.
    """
    row, column = torch.arange(CHUNK)[:, None], torch.arange(CHUNK)[None, :]
    squares, meetings = [], []
    for level in range(6):
        half, others = row >> level, column >> level
        right = half % 2 == 1
        squares.append((half == others) & torch.where(right, column <= row, column > row))
        meetings.append(right & (half == others + 1))
    return torch.stack([x.to(dtype) for x in (*squares, *meetings, column <= row, column > row)]).to(device)


@triton.jit
def sum_of_spans(square, x, rest, SPLIT: tl.constexpr, PREC: tl.constexpr):
    """[64, BT]: for each row, the sum of the rows of x in its span, and of ``rest`` where ``SPLIT``.

    A product, so that what comes of it lies where other products lie; ``rest`` is what bf16 leaves out of fp32 numbers.
    """
    total = tl.dot(square, x, input_precision=PREC)
    if SPLIT:
        total = tl.dot(square, rest, total, input_precision=PREC)
    return total


@triton.jit
def at_once(gates):
    """Whether these gates [64, BT] let one product serve the chunk, and the middle to which it decays, [BT], in base 2.

    The middle is a whole number: powers of two change no digit of a factor, so no row depends on later tokens.
    """
    early = tl.arange(0, 64)[:, None] < 32
    first, second = tl.sum(tl.where(early, gates, 0.0), 0), tl.sum(tl.where(early, 0.0, gates), 0)
    return tl.min(tl.minimum(first, second), 0) > MOST_AT_ONCE, tl.floor(first * LOG2E)


@triton.jit
def channel_prep_kernel(
    q, k, log_decay, chunks, spans, q_read, k_read, k_write, keep, scores, overlaps, scale,
    q_row: tl.constexpr, k_row: tl.constexpr, HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
    ERASES: tl.constexpr, SPLIT: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, PREC_SUM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """All of one chunk of one value head but the solve; ``overlaps`` holds M in fp32, its lower blocks of 16 alone."""
    at = tl.program_id(0)
    chunk, head = (at // HV).to(tl.int64), at % HV
    first, rows = tl.load(chunks + 2 * chunk).to(tl.int64), tl.load(chunks + 2 * chunk + 1)
    row = tl.arange(0, 64)
    valid = row < rows
    # Tiles lie at 64-bit bases and 32-bit offsets, which take half the registers.
    start, gate_at = first * HV, row * HV + head
    spans += row[:, None] * 64 + row[None, :]
    of_query = q + first * q_row + row[:, None] * q_row + (head // R) * K
    of_key = k + first * k_row + row[:, None] * k_row + (head // R) * K
    P, M, own = tl.zeros([64, 64], tl.float32), tl.zeros([64, 64], tl.float32), tl.zeros([64], tl.float32)
    for begin in range(0, K, BT):
        channel = begin + tl.arange(0, BT)
        seen = channel < K
        inside = valid[:, None] & seen[None, :]
        here = gate_at[:, None] * K + channel[None, :]
        bq = tl.load(of_query + channel[None, :], mask=inside, other=0.0).to(DT)
        bk = tl.load(of_key + channel[None, :], mask=inside, other=0.0).to(DT)
        gates = tl.maximum(tl.load(log_decay + start * K + here, mask=inside, other=0.0).to(tl.float32), RESET)
        high = gates.to(DT)
        rest = (gates - high.to(tl.float32)).to(DT)
        tl.store(keep + (chunk * HV + head) * K + channel, tl.sum(gates, 0) * LOG2E, mask=seen)
        own += tl.sum(bq.to(tl.float32) * bk.to(tl.float32), 1)
        entered = tl.exp2(sum_of_spans(tl.load(spans + 12 * 4096), high, rest, SPLIT, PREC_SUM) * LOG2E)
        whole, middle = at_once(gates)
        if whole:
            leaving = tl.exp2(tl.sum(gates, 0) * LOG2E)[None, :] / entered
        else:
            leaving = tl.exp2(sum_of_spans(tl.load(spans + 13 * 4096), high, rest, SPLIT, PREC_SUM) * LOG2E)
        tl.store(q_read + start * K + here, (bq.to(tl.float32) * entered).to(DT), mask=inside)
        tl.store(k_write + start * K + here, (bk.to(tl.float32) * leaving).to(DT), mask=inside)
        if ERASES:
            tl.store(k_read + start * K + here, (bk.to(tl.float32) * entered).to(DT), mask=inside)
        if whole:
            below = row[:, None] > row[None, :]
            from_start, to_end = entered * tl.exp2(-middle)[None, :], tl.exp2(middle)[None, :] / entered
            P, M = _scores(bq, bk, from_start, to_end, below, P, M, ERASES, DT, PREC)
        else:
            for level in tl.range(0, 6, num_stages=STAGES):
                meeting = tl.load(spans + (6 + level) * 4096) != 0.0
                exponent = sum_of_spans(tl.load(spans + level * 4096), high, rest, SPLIT, PREC_SUM) * LOG2E
                P, M = _scores(bq, bk, tl.exp2(exponent), tl.exp2(exponent), meeting, P, M, ERASES, DT, PREC)
    P = tl.where(row[:, None] == row[None, :], own[:, None], P) * scale
    square = gate_at[:, None] * 64 + row[None, :]
    tl.store(scores + start * 64 + square, P.to(DT), mask=valid[:, None])
    if ERASES:
        tl.store(overlaps + start * 64 + square, M, mask=valid[:, None] & (row[None, :] // 16 <= row[:, None] // 16))


@triton.jit
def _scores(
    bq, bk, from_start, to_end, meeting, P, M, ERASES: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr
):  # fmt: skip
    """P and M, and what these channels add where rows meet columns."""
    queries, keys = (bq.to(tl.float32) * from_start).to(DT), (bk.to(tl.float32) * to_end).to(DT)
    # Only a right operand may be turned: it lies in shared memory, and those in registers turn out wrong.
    P += tl.where(meeting, tl.dot(queries, tl.trans(keys), input_precision=PREC), 0.0)
    if ERASES:
        readers = (bk.to(tl.float32) * from_start).to(DT)
        M += tl.where(meeting, tl.dot(readers, tl.trans(keys), input_precision=PREC), 0.0)
    return P, M


@triton.jit(do_not_specialize=["HV"])
def channel_solve_kernel(overlaps, beta, chunks, beta_out, solve, HV, PREC: tl.constexpr):
    """A from M, for one chunk of one value head."""
    at = tl.program_id(0)
    chunk, head = (at // HV).to(tl.int64), at % HV
    first, rows = tl.load(chunks + 2 * chunk).to(tl.int64), tl.load(chunks + 2 * chunk + 1)
    row, line = tl.arange(0, 16), HV * 64
    start = first * HV + head
    place = start * 64 + row[:, None] * line + row[None, :]
    v0, v1, v2, v3 = row < rows, row < rows - 16, row < rows - 32, row < rows - 48
    weights, weights_out = beta + start + row * HV, beta_out + start + row * HV
    b0 = _clamped(weights, weights_out, v0)
    b1 = _clamped(weights + 16 * HV, weights_out + 16 * HV, v1)
    b2 = _clamped(weights + 32 * HV, weights_out + 32 * HV, v2)
    b3 = _clamped(weights + 48 * HV, weights_out + 48 * HV, v3)
    source = overlaps + place
    m00 = tl.load(source, mask=v0[:, None], other=0.0)
    m10 = tl.load(source + 16 * line, mask=v1[:, None], other=0.0)
    m11 = tl.load(source + 16 * line + 16, mask=v1[:, None], other=0.0)
    m20 = tl.load(source + 32 * line, mask=v2[:, None], other=0.0)
    m21 = tl.load(source + 32 * line + 16, mask=v2[:, None], other=0.0)
    m22 = tl.load(source + 32 * line + 32, mask=v2[:, None], other=0.0)
    m30 = tl.load(source + 48 * line, mask=v3[:, None], other=0.0)
    m31 = tl.load(source + 48 * line + 16, mask=v3[:, None], other=0.0)
    m32 = tl.load(source + 48 * line + 32, mask=v3[:, None], other=0.0)
    m33 = tl.load(source + 48 * line + 48, mask=v3[:, None], other=0.0)
    x00, x11, x22, x33, x10, x20, x30, x21, x31, x32 = invert_blocks(
        m00 * b0, m11 * b1, m22 * b2, m33 * b3, m10 * b0, m20 * b0, m30 * b0, m21 * b1, m31 * b1, m32 * b2, PREC
    )
    zero = tl.zeros([16, 16], tl.float32)
    target = solve + place
    store_blocks(target, x00, zero, zero, zero, v0)
    store_blocks(target + 16 * line, x10, x11, zero, zero, v1)
    store_blocks(target + 32 * line, x20, x21, x22, zero, v2)
    store_blocks(target + 48 * line, x30, x31, x32, x33, v3)


@triton.jit
def _clamped(beta, beta_out, valid):
    """16 betas as a row, at least LEAST_BETA; stored on the way."""
    weights = tl.maximum(tl.load(beta, mask=valid, other=0.0).to(tl.float32), LEAST_BETA)
    tl.store(beta_out, weights, mask=valid)
    return weights[None, :]


# Sums of fp32 gates need all three of tf32; of bf16 gates they are exact.
SUM_PRECISION = "ieee" if INTERPRETED else "tf32x3"


def splits(form: Form, log_decay: Tensor) -> bool:
    """Whether bf16 operands leave out a part of the gates that counts."""
    return form.half and log_decay.dtype != torch.bfloat16


def prepare_channel(
    form: Form, q: Tensor, k: Tensor, log_decay: Tensor, beta: Tensor | None, tables: Tables, scale: float
) -> ChannelOperands:
    """Launch the kernels of this file.

    Args:
        q, k: [tokens, H, K], heads and channels side by side; any stride between tokens.
        log_decay: [tokens, HV, K], contiguous, any float dtype; nats, <= 0, -inf for a reset.
        beta: [tokens, HV], contiguous, any float dtype.
    """
    tokens, HV, K = log_decay.shape
    q_read = q.new_empty(tokens, HV, K, dtype=form.dtype)
    k_write, k_read = torch.empty_like(q_read), torch.empty_like(q_read) if form.erases else None
    keep = q.new_empty(tables.count, HV, K, dtype=torch.float32)
    scores = q.new_empty(tokens, HV, CHUNK, dtype=form.dtype)
    overlaps = solve = weights = None
    if form.erases:
        overlaps = q.new_empty(tokens, HV, CHUNK, dtype=torch.float32)
        solve, weights = torch.empty_like(scores), q.new_empty(tokens, HV, dtype=torch.float32)
    if tables.count:
        launch = pick("delta_channel_prep", form.arch, K=form.BK, half=form.half, erases=form.erases)
        channel_prep_kernel[(tables.count * HV,)](
            q, k, log_decay, tables.chunks, spans(form.dtype, q.device), q_read, k_read, k_write, keep, scores,
            overlaps, scale,
            q_row=q.stride(0), k_row=k.stride(0), HV=HV, R=form.R, K=K, BT=min(launch.tile, form.BK),
            ERASES=form.erases, SPLIT=splits(form, log_decay), DT=form.operand, PREC=form.precision,
            PREC_SUM=SUM_PRECISION, STAGES=launch.stages, num_warps=launch.warps,
        )  # fmt: skip
        if form.erases:
            launch = pick("delta_channel_solve", form.arch, half=form.half)
            channel_solve_kernel[(tables.count * HV,)](
                overlaps,
                beta,
                tables.chunks,
                weights,
                solve,
                HV,
                PREC=form.precision,
                num_warps=launch.warps,
            )
    return ChannelOperands(q_read, k_write, k_read, keep, scores, weights, solve)


def compile_rows() -> Iterator[CompileRow]:
    """Every shape class of :data:`zoo_kernels.delta.chunk.CHANNELED`, for the offline compile gate."""
    for case in CHANNELED:
        x = example(case)
        kernels = {"channel prep": channel_prep_kernel, "channel solve": channel_solve_kernel}
        with recorded(case, **kernels) as rows:
            prepare_channel(x.form, x.q, x.k, x.log_decay, x.beta, x.tables, 1.0)
        yield from rows
