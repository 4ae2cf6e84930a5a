"""Carries the state through the chunks of every segment, and leaves the state that enters each chunk, and the errors.

In another use (``MAP``), the same kernel finds the map of a segment: what it makes of an empty state, and, where it
erases, of the identity. A chain over the maps then gives each segment its own first state, so that one long sequence
keeps a whole device busy.
"""

# Type checkers do not know the launches and loops of kernels.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo_kernels.delta.chunk import SCANNED, Example, Form, example, within
from zoo_kernels.delta.tables import Tables
from zoo_kernels.launch import CompileRow, Launch, Row, pick, provide, recorded

provide(
    "delta_scan",
    Row(Launch(tile=64, warps=8), when={"half": False}),
    Row(Launch(tile=64, warps=8, stages=1), when={"K": 256}),
    # Pipelined loads of rows that do not start at 16 bytes fault on sm_90 (Triton 3.6, K 100).
    Row(Launch(tile=64, warps=4, stages=1), when={"aligned": False}),
    Row(Launch(tile=64, warps=4, stages=3)),
)
# tile: values of one program.
provide(
    "delta_chain",
    Row(Launch(tile=64, warps=8), when={"half": False}),
    Row(Launch(tile=64, warps=4)),
)

# A map whose norm is below 2^-64 leaves nothing of a state that fp32 could still tell beside what was written since.
FORGOTTEN = tl.constexpr(-64.0)


@dataclass(frozen=True, eq=False)
class Operands:
    """What a scan reads. With a decay per channel, the decays sit in the three keyed operands.

    Attributes:
        reader, writer, query: [tokens, H or HV, K], what recalls, what writes, and what reads out.
        decay, beta, solve, bound: as in :class:`zoo_kernels.delta.prep.Prepared`.
        keep: by channel: fp32 [NC, HV, K], each chunk's whole decay, in base 2.
        scores: by channel: [tokens, HV, 64], decayed products of queries with keys, times the scale.
    """

    reader: Tensor
    writer: Tensor
    query: Tensor
    decay: Tensor | None
    beta: Tensor | None
    solve: Tensor | None
    bound: Tensor | None
    keep: Tensor | None
    scores: Tensor | None


@triton.jit
def first_that_counts(bound, chunk, count, HV, head):
    """The first chunk of a segment that what leaves it still remembers; looks at the last 64 chunks."""
    place = tl.arange(0, 64)
    at = count - 64 + place
    steps = tl.load(bound + (chunk + at) * HV + head, mask=at >= 0, other=0.0)
    forgotten = tl.cumsum(steps, 0, reverse=True) < FORGOTTEN
    return tl.max(tl.where(forgotten & (at >= 0), at, 0), 0)


@triton.jit
def scan_kernel(
    reader, writer, v, decay, beta, solve, bound, keep, segments, start, entering, errors, last, maps, kept,
    reader_row: tl.constexpr, v_row: tl.constexpr, HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, GATED: tl.constexpr, CHANNEL: tl.constexpr,
    ERASES: tl.constexpr, STARTS: tl.constexpr, MAP: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (V + BV - 1) // BV + ((K + BV - 1) // BV if MAP and ERASES else 0)
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
    # Tiles lie at 64-bit bases and 32-bit offsets: 64-bit offsets would cost a scan its registers.
    key_at = row[:, None] * reader_row + key_head * K + channel[None, :]
    value_at = row[:, None] * v_row + head * V + column[None, :]
    out_at = (row[:, None] * HV + head) * V + column[None, :]
    square_at = (row[:, None] * HV + head) * 64 + row[None, :]
    gate_at = row * HV + head
    state_at = channel[:, None] * V + column[None, :]
    inside = within(seen, value, K == BK, V % BV == 0)
    S = tl.zeros([BK, BV], tl.float32)
    if STARTS:
        S = tl.load(start + (segment * HV + head) * K * V + state_at, mask=inside, other=0.0)
    begin = 0
    fades = tl.zeros([BK], tl.float32)
    if MAP:
        if ERASES:  # tiles beyond the values carry the identity
            unit = tile * BV - ((V + BV - 1) // BV) * BV + tl.arange(0, BV)
            value = value & (tile < (V + BV - 1) // BV)
            S = tl.where((channel[:, None] == unit[None, :]) & seen[:, None], 1.0, S)
        if GATED:
            begin = first_that_counts(bound, chunk, count, HV, head)
            if ERASES:  # what was forgotten leaves no trace of the identity
                S = tl.where(begin > 0, tl.zeros([BK, BV], tl.float32), S)
    for i in tl.range(begin, count, num_stages=STAGES):
        token = first + i * 64
        valid = i * 64 + row < tokens
        keys, values = (
            within(valid, seen, False, K == BK),
            within(valid, value, False, V % BV == 0 and not (MAP and ERASES)),
        )
        bk = tl.load(reader + token * reader_row + key_at, mask=keys, other=0.0)
        bv = tl.load(v + token * v_row + value_at, mask=values, other=0.0)
        bk = bk.to(DT)
        Sb = S.to(DT)
        if GATED:
            running = tl.load(decay + token * HV + gate_at, mask=valid, other=0.0)
            whole = tl.load(decay + (token + tl.minimum(tokens - i * 64, 64) - 1) * HV + head)
            entered = tl.exp2(running)
            leaving = tl.exp2(tl.where(valid, whole - running, float("-inf")))
        if ERASES:
            weight = tl.load(beta + token * HV + gate_at, mask=valid, other=0.0)
            inverse = tl.load(solve + token * HV * 64 + square_at, mask=valid[:, None], other=0.0)
            recalled = tl.dot(bk, Sb, input_precision=PREC)
            if GATED:
                recalled = recalled * entered[:, None]
            error = tl.dot(inverse, (bv - recalled).to(DT), input_precision=PREC)
            written = error * weight[:, None]
        else:
            written = bv.to(tl.float32)
        if not MAP:
            tl.store(entering + ((chunk + i) * HV + head) * K * V + state_at, Sb, mask=inside)
            if ERASES:
                tl.store(errors + token * HV * V + out_at, error.to(DT), mask=values)
        if CHANNEL:
            fade = tl.load(keep + ((chunk + i) * HV + head) * K + channel, mask=seen, other=0.0)
            S = S * tl.exp2(fade)[:, None]
            fades += fade
            bk = tl.load(writer + token * reader_row + key_at, mask=keys, other=0.0)
        elif GATED:
            S = S * tl.exp2(whole)
            fades += whole
            written = written * leaving[:, None]
        S = tl.dot(tl.trans(bk), written.to(DT), S, input_precision=PREC)
    if MAP:
        target = (segment * HV + head) * K
        if ERASES:
            if tile < (V + BV - 1) // BV:
                tl.store(last + target * V + state_at, S, mask=inside)
            else:
                tl.store(maps + target * K + channel[:, None] * K + unit[None, :], S,
                         mask=seen[:, None] & (unit < K)[None, :])  # fmt: skip
        else:
            tl.store(last + target * V + state_at, S, mask=inside)
            if tile == 0:
                tl.store(kept + target + channel, tl.where(begin > 0, 0.0, tl.exp2(fades)), mask=seen)
    elif tl.load(segments + 5 * segment + 4) == 1:
        sequence = tl.load(segments + 5 * segment + 3).to(tl.int64)
        tl.store(last + (sequence * HV + head) * K * V + state_at, S, mask=inside)


@triton.jit
def chain_kernel(
    maps, kept, added, outer, parts, carried,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ERASES: tl.constexpr,
    OUTER: tl.constexpr, REVERSE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Finds what enters each segment, or in ``REVERSE`` the gradient of what leaves it, from ``outer`` at the end."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    at = tl.program_id(0)
    tile, head, sequence = at % TILES, (at // TILES) % HV, (at // TILES // HV).to(tl.int64)
    low, high = tl.load(parts + sequence), tl.load(parts + sequence + 1)
    channel, column = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    seen = channel < K
    state_at = channel[:, None] * V + column[None, :]
    inside = seen[:, None] & (column < V)[None, :]
    S = tl.zeros([BK, BV], tl.float32)
    if OUTER:
        S = tl.load(outer + (sequence * HV + head) * K * V + state_at, mask=inside, other=0.0)
    for i in tl.range(0, high - low, num_stages=1):
        segment = high - 1 - i if REVERSE else low + i
        target = (segment + sequence * 0) * HV + head  # int64
        tl.store(carried + target * K * V + state_at, S, mask=inside)
        fresh = tl.load(added + target * K * V + state_at, mask=inside, other=0.0)
        if ERASES:
            square = seen[:, None] & seen[None, :]
            if REVERSE:
                mapped = tl.load(
                    maps + target * K * K + channel[None, :] * K + channel[:, None], mask=square, other=0.0
                )
            else:
                mapped = tl.load(
                    maps + target * K * K + channel[:, None] * K + channel[None, :], mask=square, other=0.0
                )
            S = tl.dot(mapped, S, fresh, input_precision=PREC)
        else:
            S = S * tl.load(kept + target * K + channel, mask=seen, other=0.0)[:, None] + fresh


@dataclass(frozen=True, eq=False)
class Maps:
    """What each segment does to a state: ``S' = matrix @ S + added`` or ``S' = fading * S + added``, all fp32.

    Attributes:
        matrix: [NS, HV, K, K], where the rule erases; fading: [NS, HV, K], where it only fades.
    """

    matrix: Tensor | None
    fading: Tensor | None


def scan(
    form: Form, operands: Operands, v: Tensor, tables: Tables, start: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The forward from each segment's first state.

    Args:
        v: [tokens, HV, V]; start: fp32 [NS, HV, K, V] or None for zeros.

    Returns:
        The last states, fp32 [N, HV, K, V]; the states that enter the chunks [NC, HV, K, V] and the errors
        [tokens, HV, V] (None where nothing erases) in the operands' dtype.
    """
    sequences = tables.parts.shape[0] - 1
    last = v.new_empty(sequences, form.HV, form.K, form.V, dtype=torch.float32)
    entering = v.new_empty(tables.count, form.HV, form.K, form.V, dtype=form.dtype)
    errors = v.new_empty(v.shape[0], form.HV, form.V, dtype=form.dtype) if form.erases else None
    _launch(form, operands, v, tables, start, entering, errors, last, None, None)
    return last, entering, errors


def segment_starts(
    form: Form, operands: Operands, v: Tensor, tables: Tables, state: Tensor | None, rows: int
) -> tuple[Tensor, Maps]:
    """The state that enters each segment, fp32 [rows, HV, K, V], and the segments' maps, for the backward.

    Args:
        state: fp32 [N, HV, K, V], or None for zeros.
        rows: at least NS; what is beyond is not used.
    """
    shape = (rows, form.HV, form.K)
    added = v.new_empty(*shape, form.V, dtype=torch.float32)
    matrix = v.new_empty(*shape, form.K, dtype=torch.float32) if form.erases else None
    kept = None if form.erases else v.new_empty(shape, dtype=torch.float32)
    _launch(form, operands, v, tables, None, None, None, added, matrix, kept)
    maps = Maps(matrix, kept)
    return chain(form, maps, added, state, tables, reverse=False), maps


def chain(form: Form, maps: Maps, added: Tensor, outer: Tensor | None, tables: Tables, *, reverse: bool) -> Tensor:
    """Run through the segments' maps: what enters each segment, or in reverse the gradient of what leaves it."""
    carried = torch.empty_like(added)
    launch = pick("delta_chain", form.arch, K=form.BK, half=form.half)
    BV = min(launch.tile, form.BV)
    grid = ((tables.parts.shape[0] - 1) * form.HV * triton.cdiv(form.V, BV),)
    chain_kernel[grid](
        maps.matrix, maps.fading, added, outer, tables.parts, carried,
        HV=form.HV, K=form.K, V=form.V, BK=form.BK, BV=BV, ERASES=form.erases, OUTER=outer is not None, REVERSE=reverse,
        PREC=form.precision, num_warps=launch.warps,
    )  # fmt: skip
    return carried


def _launch(
    form: Form, operands: Operands, v: Tensor, tables: Tables, start: Tensor | None, entering: Tensor | None,
    errors: Tensor | None, last: Tensor, maps: Tensor | None, kept: Tensor | None,
) -> None:  # fmt: skip
    launch = pick("delta_scan", form.arch, K=form.BK, half=form.half, aligned=form.aligned)
    BV = min(launch.tile, form.BV)
    tiles = triton.cdiv(form.V, BV) + (triton.cdiv(form.K, BV) if maps is not None else 0)
    scan_kernel[(tables.pieces * form.HV * tiles,)](
        operands.reader, operands.writer, v, operands.decay, operands.beta, operands.solve, operands.bound,
        operands.keep, tables.segments, start, entering, errors, last, maps, kept,
        reader_row=operands.reader.stride(0), v_row=v.stride(0), HV=form.HV, R=form.R, K=form.K, V=form.V,
        BK=form.BK, BV=BV, GATED=form.gate == "head", CHANNEL=form.gate == "channel",
        ERASES=form.erases, STARTS=start is not None, MAP=entering is None, DT=form.operand, PREC=form.precision,
        STAGES=launch.stages, num_warps=launch.warps,
    )  # fmt: skip


def operands_of(x: Example) -> Operands:
    """What the scans of ``x`` read."""
    return Operands(x.k, x.k, x.q, x.decay, x.beta, x.solve, x.bound, None, None)


def compile_rows() -> Iterator[CompileRow]:
    """What a scan of each of :data:`zoo_kernels.delta.chunk.SCANNED` launches, for the offline compile gate."""
    for case, piece in SCANNED:
        x = example(case, piece)
        reads, start = operands_of(x), None
        with recorded(f"{case}{', segments' * x.tables.split}", scan=scan_kernel, chain=chain_kernel) as rows:
            if x.tables.split:
                start, _ = segment_starts(x.form, reads, x.v, x.tables, None, x.tables.pieces)
            scan(x.form, reads, x.v, x.tables, start)
        yield from rows
