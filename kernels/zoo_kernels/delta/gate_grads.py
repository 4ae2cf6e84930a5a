"""The gradient of a decay per head, from what crosses each token: the last step of grads.py, small and apart.

A token's decay receives all that crosses it: products of later rows with earlier columns and later reads of the state
that entered, less what was written after it (both lie in ``crossing`` and ``reads``, row by row); what was written
before it to the state that leaves; and the state that passes through. Kept out of the kernels of the products, whose
registers these sums would take.
"""

# Type checkers do not know the launches and loops of kernels.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo_kernels.delta.chunk import EXAMPLES, Form, example
from zoo_kernels.delta.tables import Tables
from zoo_kernels.launch import CompileRow, Launch, Row, pick, provide, recorded

provide("delta_gate_grads", Row(Launch(tile=64, warps=1)))


@triton.jit(do_not_specialize=["tokens", "count"])
def gate_kernel(
    crossing, reads, writes, passed, decay, log_decay, chunks, ddecay, tokens, count,
    decay_row: tl.constexpr, HV: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One chunk of one value head; sums over the TILES of keys."""
    at = tl.program_id(0)
    chunk, head = (at // HV).to(tl.int64), at % HV
    first, rows = tl.load(chunks + 2 * chunk).to(tl.int64), tl.load(chunks + 2 * chunk + 1)
    row = tl.arange(0, 64)
    valid = row < rows
    gate_at = row * HV + head
    crosses = tl.load(crossing + first * HV + gate_at, mask=valid, other=0.0)
    written, passing = tl.zeros([64], tl.float32), 0.0
    for tile in tl.static_range(TILES):
        part = (first + tl.full([], tile, tl.int64) * tokens) * HV + gate_at
        crosses += tl.load(reads + part, mask=valid, other=0.0)
        written += tl.load(writes + part, mask=valid, other=0.0)
        passing += tl.load(passed + (chunk + tl.full([], tile, tl.int64) * count) * HV + head)
    whole = tl.load(decay + (first + rows - 1) * HV + head)
    # A sum of what lies before, not a difference of running sums: under strong decays those cancel.
    before = tl.sum(tl.where(row[None, :] < row[:, None], written[None, :], 0.0), 1)
    through = tl.cumsum(crosses, 0, reverse=True) + before + tl.exp2(whole) * passing
    steps = tl.load(log_decay + first * decay_row + row * decay_row + head, mask=valid, other=0.0).to(tl.float32)
    # exp(-inf) has no slope, and rounding must not leave one.
    through = tl.where(steps > float("-inf"), through, 0.0)
    tl.store(ddecay + first * HV + gate_at, through.to(ddecay.dtype.element_ty), mask=valid)


def gate_gradient(
    form: Form, crossing: Tensor, reads: Tensor, writes: Tensor, passed: Tensor, decay: Tensor, log_decay: Tensor,
    tables: Tables,
) -> Tensor:  # fmt: skip
    """dlog_decay, in the shape and dtype of ``log_decay``.

    Args:
        crossing: fp32 [tokens, HV], of scores; reads, writes: fp32 [tiles, tokens, HV], of states, by tile of the key.
        passed: fp32 [tiles, NC, HV], the products of states that pass through with their gradients.
        decay: fp32 [tokens, HV], the running sums; log_decay: [tokens, HV], or [HV] for constants.
    """
    constant = log_decay.dim() == 1
    ddecay = torch.empty_like(crossing, dtype=torch.float32 if constant else log_decay.dtype)
    if tables.count:
        launch = pick("delta_gate_grads", form.arch)
        gate_kernel[(tables.count * form.HV,)](
            crossing, reads, writes, passed, decay, log_decay, tables.chunks, ddecay, crossing.shape[0], tables.count,
            decay_row=0 if constant else log_decay.stride(0), HV=form.HV, TILES=reads.shape[0],
            num_warps=launch.warps,
        )  # fmt: skip
    return ddecay.sum(0).to(log_decay.dtype) if constant else ddecay


def compile_rows() -> Iterator[CompileRow]:
    """Every shape class of :data:`zoo_kernels.delta.chunk.EXAMPLES` that decays, for the offline compile gate."""
    for case in EXAMPLES:
        x = example(case)
        if x.log_decay is None or x.decay is None:
            continue
        tiles = triton.cdiv(x.form.K, 64)
        parts, passed = x.decay.new_empty(tiles, *x.decay.shape), x.decay.new_empty(tiles, x.tables.count, x.form.HV)
        with recorded(case, **{"gate grads": gate_kernel}) as rows:
            gate_gradient(x.form, x.decay, parts, parts, passed, x.decay, x.log_decay, x.tables)
        yield from rows
