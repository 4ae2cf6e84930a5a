"""Carries the gradient of the state back through the chunks of every segment; the values' gradients come for free.

With dS the gradient of the state that leaves a chunk, in the notation of chunked.py:

    du = k dS + P^T dy;  dv = z = A^T (beta * du);  dS' = dS + q^T dy - k^T z
"""

# Type checkers do not know the launches and loops of kernels.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo_kernels.delta.chunk import SCANNED, Form, decay_between_transposed, example, within
from zoo_kernels.delta.scan import FORGOTTEN, Maps, Operands, chain, chain_kernel, operands_of
from zoo_kernels.delta.tables import Tables
from zoo_kernels.launch import CompileRow, Launch, Row, pick, provide, recorded

provide(
    "delta_scan_back",
    Row(Launch(tile=64, warps=8), when={"half": False}),
    Row(Launch(tile=64, warps=8), when={"K": 256}),
    Row(Launch(tile=64, warps=4, stages=2), when={"erases": False, "aligned": True}),
    Row(Launch(tile=64, warps=4, stages=2), when={"K": (16, 32, 64, 128), "channel": True, "aligned": True}),
    Row(Launch(tile=64, warps=4, stages=1)),
)


@triton.jit
def last_that_counts(bound, chunk, count, HV, head):
    """How many chunks of a segment, from its first, what entered it still reaches; looks at the first 64."""
    place = tl.arange(0, 64)
    steps = tl.load(bound + (chunk + place) * HV + head, mask=place < count, other=0.0)
    forgotten = (tl.cumsum(steps, 0) < FORGOTTEN) & (place < count)
    return tl.min(tl.where(forgotten, place + 1, count), 0)


@triton.jit
def scan_back_kernel(
    reader, writer, query, dy, decay, beta, solve, bound, keep, scores, segments, dlast, dv, leaving_out, dfirst, scale,
    reader_row: tl.constexpr, query_row: tl.constexpr, HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GATED: tl.constexpr, CHANNEL: tl.constexpr,
    ERASES: tl.constexpr, ENDS: tl.constexpr, MAP: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (V + BV - 1) // BV
    at = tl.program_id(0)
    tile, head, segment = at % TILES, (at // TILES) % HV, (at // TILES // HV).to(tl.int64)
    first = tl.load(segments + 5 * segment).to(tl.int64)
    tokens = tl.load(segments + 5 * segment + 1)
    chunk = tl.load(segments + 5 * segment + 2).to(tl.int64)
    count = tl.cdiv(tokens, 64)
    key_head = head if CHANNEL else head // R
    row, channel = tl.arange(0, 64), tl.arange(0, BK)
    column = tile * BV + tl.arange(0, BV)
    value, seen = column < V, channel < K
    key_at = row[:, None] * reader_row + key_head * K + channel[None, :]
    query_at = row[:, None] * query_row + key_head * K + channel[None, :]
    value_at = (row[:, None] * HV + head) * V + column[None, :]
    square_at = (row[:, None] * HV + head) * 64 + row[None, :]
    turned_at = (row[None, :] * HV + head) * 64 + row[:, None]
    gate_at = row * HV + head
    state_at = channel[:, None] * V + column[None, :]
    inside = within(seen, value, K == BK, V % BV == 0)
    dS = tl.zeros([BK, BV], tl.float32)
    if ENDS:
        dS = tl.load(dlast + (segment * HV + head) * K * V + state_at, mask=inside, other=0.0)
    if MAP and GATED:
        count = last_that_counts(bound, chunk, count, HV, head)
    for j in tl.range(0, count, num_stages=STAGES):
        i = count - 1 - j
        token = first + i * 64
        valid = i * 64 + row < tokens
        keys, values = within(valid, seen, False, K == BK), within(valid, value, False, V % BV == 0)
        bq = tl.load(query + token * query_row + query_at, mask=keys, other=0.0).to(DT)
        bk = tl.load(reader + token * reader_row + key_at, mask=keys, other=0.0).to(DT)
        bdy = tl.load(dy + token * HV * V + value_at, mask=values, other=0.0)
        dSb = dS.to(DT)
        if not MAP:
            tl.store(leaving_out + ((chunk + i) * HV + head) * K * V + state_at, dSb, mask=inside)
        if GATED:
            running = tl.load(decay + token * HV + gate_at, mask=valid, other=0.0)
            whole = tl.load(decay + (token + tl.minimum(tokens - i * 64, 64) - 1) * HV + head)
            entered = tl.exp2(running)
            leaving = tl.exp2(tl.where(valid, whole - running, float("-inf")))
        if CHANNEL:
            wrote = tl.load(writer + token * reader_row + key_at, mask=keys, other=0.0)
            x = tl.dot(wrote, dSb, input_precision=PREC)
        else:
            x = tl.dot(bk, dSb, input_precision=PREC)
            if GATED:
                x = x * leaving[:, None]
        if CHANNEL:
            seeing = tl.load(scores + token * HV * 64 + turned_at, mask=valid[None, :], other=0.0)
        else:
            seeing = tl.dot(bk, tl.trans(bq), input_precision=PREC) * scale
            if GATED:
                seeing = seeing * decay_between_transposed(running, row, valid)
            else:
                seeing = tl.where(row[:, None] <= row[None, :], seeing, 0.0)
        x = tl.dot(seeing.to(DT), bdy.to(DT), x, input_precision=PREC)
        read = bdy.to(tl.float32) * scale
        if GATED:
            read = read * entered[:, None]
        if CHANNEL:
            fade = tl.load(keep + ((chunk + i) * HV + head) * K + channel, mask=seen, other=0.0)
            dS = dS * tl.exp2(fade)[:, None]
        elif GATED:
            dS = dS * tl.exp2(whole)
        if ERASES:
            weight = tl.load(beta + token * HV + gate_at, mask=valid, other=0.0)
            inverse = tl.load(solve + token * HV * 64 + square_at, mask=valid[:, None], other=0.0)
            x = tl.dot(tl.trans(inverse), (x * weight[:, None]).to(DT), input_precision=PREC)
            recalled = -x
            if GATED:
                recalled = recalled * entered[:, None]
            dS = tl.dot(tl.trans(bk), recalled.to(DT), dS, input_precision=PREC)
        if not MAP:
            tl.store(dv + token * HV * V + value_at, x.to(dv.dtype.element_ty), mask=values)
        dS = tl.dot(tl.trans(bq), read.to(DT), dS, input_precision=PREC)
    if MAP:
        tl.store(dfirst + (segment * HV + head) * K * V + state_at, dS, mask=inside)
    else:
        sequence = tl.load(segments + 5 * segment + 3)
        earlier = tl.load(segments + 5 * segment - 2, mask=segment > 0, other=-1)  # the sequence of the segment before
        if sequence != earlier:
            tl.store(dfirst + (sequence.to(tl.int64) * HV + head) * K * V + state_at, dS, mask=inside)


def scan_back(
    form: Form, operands: Operands, dy: Tensor, tables: Tables, maps: Maps | None, dlast: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward scan.

    Args:
        dy: [tokens, HV, V], contiguous; dlast: fp32 [N, HV, K, V] or None for zeros.
        maps: of the segments, where sequences are split.

    Returns:
        dv [tokens, HV, V] and the gradients of the states that leave the chunks [NC, HV, K, V], in the operands' dtype;
        that of the first states, fp32 [N, HV, K, V].
    """
    if maps is not None:
        added = dy.new_empty(tables.pieces, form.HV, form.K, form.V, dtype=torch.float32)
        _launch(form, operands, dy, tables, None, None, None, added, scale)
        dlast = chain(form, maps, added, dlast, tables, reverse=True)
    sequences = tables.parts.shape[0] - 1
    dv = dy.new_empty(dy.shape, dtype=form.dtype)
    leaving = dy.new_empty(tables.count, form.HV, form.K, form.V, dtype=form.dtype)
    dfirst = dy.new_empty(sequences, form.HV, form.K, form.V, dtype=torch.float32)
    _launch(form, operands, dy, tables, dlast, dv, leaving, dfirst, scale)
    return dv, leaving, dfirst


def _launch(
    form: Form, operands: Operands, dy: Tensor, tables: Tables, dlast: Tensor | None, dv: Tensor | None,
    leaving: Tensor | None, dfirst: Tensor, scale: float,
) -> None:  # fmt: skip
    facts = {"K": form.BK, "half": form.half, "aligned": form.aligned, "erases": form.erases}
    launch = pick("delta_scan_back", form.arch, **facts, channel=form.gate == "channel")
    BV = min(launch.tile, form.BV)
    scan_back_kernel[(tables.pieces * form.HV * triton.cdiv(form.V, BV),)](
        operands.reader, operands.writer, operands.query, dy, operands.decay, operands.beta, operands.solve,
        operands.bound, operands.keep, operands.scores, tables.segments, dlast, dv, leaving, dfirst, scale,
        reader_row=operands.reader.stride(0), query_row=operands.query.stride(0), HV=form.HV, R=form.R, K=form.K,
        V=form.V, BK=form.BK, BV=BV, GATED=form.gate == "head", CHANNEL=form.gate == "channel",
        ERASES=form.erases, ENDS=dlast is not None, MAP=dv is None, DT=form.operand, PREC=form.precision,
        STAGES=launch.stages, num_warps=launch.warps,
    )  # fmt: skip


def compile_rows() -> Iterator[CompileRow]:
    """What the scan back of each of :data:`zoo_kernels.delta.chunk.SCANNED` launches, for the offline compile gate."""
    for case, piece in SCANNED:
        x, kernels = example(case, piece), {"scan back": scan_back_kernel, "chain back": chain_kernel}
        form, maps = x.form, None
        if x.tables.split:
            maps = Maps(x.v.new_empty(x.tables.pieces, form.HV, form.K, form.K, dtype=torch.float32), None)
        with recorded(f"{case}{', segments' * x.tables.split}", **kernels) as rows:
            scan_back(form, operands_of(x), x.v, x.tables, maps, None, 1.0)
        yield from rows
