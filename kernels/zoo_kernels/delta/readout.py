"""Reads the outputs, every chunk on its own, once the states h that enter are known.

y = scale * entered * (q h) + P u
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
from zoo_kernels.delta.scan import Operands, operands_of
from zoo_kernels.delta.tables import Tables
from zoo_kernels.launch import CompileRow, Launch, Row, pick, provide, recorded

provide(
    "delta_readout",
    Row(Launch(tile=64, warps=8), when={"half": False}),
    Row(Launch(tile=64, warps=4, stages=3), when={"K": (16, 32, 64, 128), "V": (16, 32, 64), "group": True}),
    Row(Launch(tile=128, warps=4), when={"K": (16, 32, 64, 128)}),
    Row(Launch(tile=64, warps=4)),
)


@triton.jit
def readout_kernel(
    query, reader, errors, decay, beta, scores, entering, chunks, y, scale,
    q_row: tl.constexpr, k_row: tl.constexpr, e_row: tl.constexpr, HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GATED: tl.constexpr, CHANNEL: tl.constexpr,
    ERASES: tl.constexpr, MEMBERS: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (V + BV - 1) // BV
    at = tl.program_id(0)
    tile, block = at % TILES, (at // TILES) % (HV // MEMBERS)
    chunk = (at // TILES // (HV // MEMBERS)).to(tl.int64)
    first, rows = tl.load(chunks + 2 * chunk).to(tl.int64), tl.load(chunks + 2 * chunk + 1)
    key_head = block if CHANNEL else block * MEMBERS // R
    row, channel, column = tl.arange(0, 64), tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    valid, seen, value = row < rows, channel < K, column < V
    keys, values = within(valid, seen, False, K == BK), within(valid, value, False, V % BV == 0)
    inside = within(seen, value, K == BK, V % BV == 0)
    query += first * q_row + key_head * K
    bq = tl.load(query + row[:, None] * q_row + channel[None, :], mask=keys, other=0.0).to(DT)
    if not CHANNEL:
        reader += first * k_row + key_head * K
        bk = tl.load(reader + row[:, None] * k_row + channel[None, :], mask=keys, other=0.0).to(DT)
        if MEMBERS > 1:
            plain = tl.dot(bq, tl.trans(bk), input_precision=PREC) * scale
    for member in tl.range(0, MEMBERS, num_stages=STAGES):
        head = block * MEMBERS + member
        gate_at = row * HV + head
        square_at = gate_at[:, None] * 64 + row[None, :]
        # All loads come first, so that their waits overlap.
        states = entering + (chunk * HV + head) * K * V
        bh = tl.load(states + channel[:, None] * V + column[None, :], mask=inside, other=0.0)
        be = tl.load(errors + first * e_row + row[:, None] * e_row + head * V + column[None, :], mask=values, other=0.0)
        if CHANNEL:
            seeing = tl.load(scores + first * HV * 64 + square_at, mask=valid[:, None], other=0.0).to(tl.float32)
        else:
            seeing = tl.dot(bq, tl.trans(bk), input_precision=PREC) * scale if MEMBERS == 1 else plain
            if not GATED:
                seeing = tl.where(row[:, None] >= row[None, :], seeing, 0.0)
        if GATED:
            running = tl.load(decay + first * HV + gate_at, mask=valid, other=0.0)
            seeing = seeing * decay_between(running, row, valid)
        if ERASES:  # u = beta * e, with beta on the columns of the scores
            weight = tl.load(beta + first * HV + gate_at, mask=valid, other=0.0)
            seeing = seeing * weight[None, :]
        read = tl.dot(bq, bh, input_precision=PREC) * scale
        if GATED:
            read = read * tl.exp2(running)[:, None]
        read = tl.dot(seeing.to(DT), be.to(DT), read, input_precision=PREC)
        out = y + first * HV * V + gate_at[:, None] * V + column[None, :]
        tl.store(out, read.to(y.dtype.element_ty), mask=values)


def read_out(
    form: Form, operands: Operands, errors: Tensor, entering: Tensor, tables: Tables, dtype: torch.dtype, scale: float
) -> Tensor:
    """y [tokens, HV, V] in ``dtype``.

    Args:
        errors: [tokens, HV, V], or v where nothing erases; entering: [NC, HV, K, V].
    """
    facts = {"K": form.BK, "V": form.V, "half": form.half, "aligned": form.aligned}
    launch = pick("delta_readout", form.arch, **facts, group=form.R > 1 and form.gate != "channel")
    BV = min(launch.tile, form.BV)
    together = 1 if form.gate == "channel" else members(form.R)
    y = errors.new_empty(errors.shape[0], form.HV, form.V, dtype=dtype)
    if tables.count:
        readout_kernel[(tables.count * form.HV // together * triton.cdiv(form.V, BV),)](
            operands.query, operands.reader, errors, operands.decay, operands.beta,
            operands.scores, entering, tables.chunks, y, scale,
            q_row=operands.query.stride(0), k_row=operands.reader.stride(0), e_row=errors.stride(0), HV=form.HV,
            R=form.R, K=form.K, V=form.V, BK=form.BK, BV=BV, GATED=form.gate == "head", CHANNEL=form.gate == "channel",
            ERASES=form.erases, MEMBERS=together, DT=form.operand, PREC=form.precision, STAGES=launch.stages,
            num_warps=launch.warps,
        )  # fmt: skip
    return y


def compile_rows() -> Iterator[CompileRow]:
    """Every shape class of :data:`zoo_kernels.delta.chunk.EXAMPLES`, for the offline compile gate."""
    for case in EXAMPLES:
        x = example(case)
        with recorded(case, readout=readout_kernel) as rows:
            read_out(x.form, operands_of(x), x.v, x.entering, x.tables, x.v.dtype, 1.0)
        yield from rows
