"""Prepares chunks under a decay per head: running decays, and A = (I + stril(K K^T) diag(beta))^-1, decayed.

The decay does not enter the solve. It is a diagonal similarity, which multiplies A once it is found.
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

from zoo_kernels.delta.chunk import EXAMPLES, LEAST_BETA, Form, example
from zoo_kernels.delta.solve import invert_blocks, store_blocks
from zoo_kernels.delta.tables import CHUNK, Tables
from zoo_kernels.launch import CompileRow, Launch, Row, pick, provide, recorded

# tile: channels of the key of one step.
provide(
    "delta_prep",
    # Three tf32 products of wider keys spill: 27 KiB a thread at K 256.
    Row(Launch(tile=32, warps=1), when={"half": False}),
    Row(Launch(tile=64, warps=1), when={"K": 256}),
    Row(Launch(tile=128, warps=1)),
)

LOG2E = tl.constexpr(1.4426950408889634)
# A decay below this, in base 2, is a reset: 2^-160 is 0 in fp32, and unlike -inf it can be subtracted from itself.
RESET = tl.constexpr(-160.0)


@dataclass(frozen=True, eq=False)
class Prepared:
    """What the scans read besides q, k and v.

    Attributes:
        decay: fp32 [tokens, HV], the running sum of log_decay inside each chunk, in base 2. None: no decay.
        beta: fp32 [tokens, HV], at least LEAST_BETA. None: no erasing.
        solve: [tokens, HV, 64], rows of A times the decay between its tokens, in the operands' dtype. None: no erasing.
        bound: fp32 [tokens, HV], of which the first NC rows are used: a bound on the norm of each chunk's map of the
            state, as a logarithm in base 2. None where there is no decay.
    """

    decay: Tensor | None
    beta: Tensor | None
    solve: Tensor | None
    bound: Tensor | None


@triton.jit
def prep_kernel(
    k, log_decay, beta, chunks, decay, beta_out, solve, bound,
    k_row: tl.constexpr, decay_row: tl.constexpr, beta_row: tl.constexpr, HV: tl.constexpr, R: tl.constexpr,
    K: tl.constexpr, BT: tl.constexpr, GATED: tl.constexpr, ERASES: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    chunk, head = (at // HV).to(tl.int64), at % HV
    first, rows = tl.load(chunks + 2 * chunk).to(tl.int64), tl.load(chunks + 2 * chunk + 1)
    whole = tl.arange(0, 64)
    valid = whole < rows
    out = (first + whole) * HV + head
    total = 0.0
    if GATED:
        steps = tl.load(log_decay + (first + whole) * decay_row + head, mask=valid, other=0.0).to(tl.float32)
        running = tl.cumsum(tl.maximum(steps * LOG2E, RESET), 0)
        tl.store(decay + out, running, mask=valid)
        total = tl.min(running, 0)
    if ERASES:
        weights = tl.load(beta + (first + whole) * beta_row + head, mask=valid, other=0.0).to(tl.float32)
        tl.store(beta_out + out, tl.maximum(weights, LEAST_BETA), mask=valid)
        row = tl.arange(0, 16)
        keys = k + first * k_row + (head // R).to(tl.int64) * K + row[:, None] * k_row
        square = tl.zeros([16, 16], tl.float32)
        s0, s1, s2, s3, s10, s20, s30, s21, s31, s32 = (
            square, square, square, square, square, square, square, square, square, square,
        )  # fmt: skip
        for begin in tl.range(0, K, BT, num_stages=1):
            channel = begin + tl.arange(0, BT)[None, :]
            seen, at_keys = channel < K, keys + channel
            k0 = tl.load(at_keys, mask=(row[:, None] < rows) & seen, other=0.0)
            k1 = tl.load(at_keys + 16 * k_row, mask=(row[:, None] < rows - 16) & seen, other=0.0)
            k2 = tl.load(at_keys + 32 * k_row, mask=(row[:, None] < rows - 32) & seen, other=0.0)
            k3 = tl.load(at_keys + 48 * k_row, mask=(row[:, None] < rows - 48) & seen, other=0.0)
            s0 = tl.dot(k0, tl.trans(k0), s0, input_precision=PREC)
            s1 = tl.dot(k1, tl.trans(k1), s1, input_precision=PREC)
            s2 = tl.dot(k2, tl.trans(k2), s2, input_precision=PREC)
            s3 = tl.dot(k3, tl.trans(k3), s3, input_precision=PREC)
            s10 = tl.dot(k1, tl.trans(k0), s10, input_precision=PREC)
            s20 = tl.dot(k2, tl.trans(k0), s20, input_precision=PREC)
            s30 = tl.dot(k3, tl.trans(k0), s30, input_precision=PREC)
            s21 = tl.dot(k2, tl.trans(k1), s21, input_precision=PREC)
            s31 = tl.dot(k3, tl.trans(k1), s31, input_precision=PREC)
            s32 = tl.dot(k3, tl.trans(k2), s32, input_precision=PREC)
        scale = beta + first * beta_row + head + row * beta_row
        b0 = tl.maximum(tl.load(scale, mask=row < rows, other=0.0).to(tl.float32), LEAST_BETA)
        b1 = tl.maximum(tl.load(scale + 16 * beta_row, mask=row < rows - 16, other=0.0).to(tl.float32), LEAST_BETA)
        b2 = tl.maximum(tl.load(scale + 32 * beta_row, mask=row < rows - 32, other=0.0).to(tl.float32), LEAST_BETA)
        b3 = tl.maximum(tl.load(scale + 48 * beta_row, mask=row < rows - 48, other=0.0).to(tl.float32), LEAST_BETA)
        below, same = row[:, None] > row[None, :], row[:, None] == row[None, :]
        s0, s1, s2, s3 = s0 * b0[None, :], s1 * b1[None, :], s2 * b2[None, :], s3 * b3[None, :]
        s10, s20, s30 = s10 * b0[None, :], s20 * b0[None, :], s30 * b0[None, :]
        s21, s31, s32 = s21 * b1[None, :], s31 * b1[None, :], s32 * b2[None, :]
        if GATED:
            # The map of one token is decay * (I - beta k k^T), whose norm is at most decay * max(1, |1 - beta k.k|).
            growth = tl.sum(_growth(s0, same) + _growth(s1, same) + _growth(s2, same) + _growth(s3, same), 0)
            tl.store(bound + chunk * HV + head, total + growth)
        x00, x11, x22, x33, x10, x20, x30, x21, x31, x32 = invert_blocks(
            tl.where(below, s0, 0.0), tl.where(below, s1, 0.0), tl.where(below, s2, 0.0), tl.where(below, s3, 0.0),
            s10, s20, s30, s21, s31, s32, PREC,
        )  # fmt: skip
        if GATED:
            g0, g1, g2, g3 = _part(running, 0), _part(running, 1), _part(running, 2), _part(running, 3)
            x00 *= _decays(g0, g0, below | same)
            x11 *= _decays(g1, g1, below | same)
            x22 *= _decays(g2, g2, below | same)
            x33 *= _decays(g3, g3, below | same)
            x10 *= tl.exp2(g1[:, None] - g0[None, :])
            x20 *= tl.exp2(g2[:, None] - g0[None, :])
            x30 *= tl.exp2(g3[:, None] - g0[None, :])
            x21 *= tl.exp2(g2[:, None] - g1[None, :])
            x31 *= tl.exp2(g3[:, None] - g1[None, :])
            x32 *= tl.exp2(g3[:, None] - g2[None, :])
        zero = tl.zeros([16, 16], tl.float32)
        target = solve + (first * HV + head) * 64 + row[:, None] * (HV * 64) + row[None, :]
        store_blocks(target, x00, zero, zero, zero, row < rows)
        store_blocks(target + 16 * HV * 64, x10, x11, zero, zero, row < rows - 16)
        store_blocks(target + 32 * HV * 64, x20, x21, x22, zero, row < rows - 32)
        store_blocks(target + 48 * HV * 64, x30, x31, x32, x33, row < rows - 48)
    elif GATED:
        tl.store(bound + chunk * HV + head, total)


@triton.jit
def _growth(scores, same):
    """log2 max(1, |1 - beta k.k|) of 16 tokens, [16]; their beta k.k lie on the diagonal of ``scores``."""
    written = tl.sum(tl.where(same, scores, 0.0), 1)
    return tl.log2(tl.maximum(tl.abs(1.0 - written), 1.0))


@triton.jit
def _part(x, block: tl.constexpr):
    """Rows 16 * block to 16 * block + 15 of [64]."""
    return tl.sum(tl.where(tl.arange(0, 4)[:, None] == block, tl.reshape(x, [4, 16]), 0.0), 0)


@triton.jit
def _decays(later, earlier, keep):
    return tl.exp2(tl.where(keep, later[:, None] - earlier[None, :], float("-inf")))


def prepare(form: Form, k: Tensor, log_decay: Tensor | None, beta: Tensor | None, tables: Tables) -> Prepared:
    """Launch :func:`prep_kernel`.

    Args:
        k: [tokens, H, K]; log_decay: [tokens, HV], or [HV] for constants; beta: [tokens, HV].
    """
    if log_decay is None and beta is None:
        return Prepared(None, None, None, None)
    tokens, heads = k.shape[0], form.HV
    new = k.new_empty
    exact = torch.float32
    decay = None if log_decay is None else new(tokens, heads, dtype=exact)
    bound = None if log_decay is None else new(tokens, heads, dtype=exact)
    weights = None if beta is None else new(tokens, heads, dtype=exact)
    solve = None if beta is None else new(tokens, heads, CHUNK, dtype=form.dtype)
    if tables.count:
        launch = pick("delta_prep", form.arch, K=form.BK, half=form.half)
        prep_kernel[(tables.count * heads,)](
            k, log_decay, beta, tables.chunks, decay, weights, solve, bound,
            k_row=k.stride(0), decay_row=0 if log_decay is None or log_decay.dim() == 1 else log_decay.stride(0),
            beta_row=0 if beta is None else beta.stride(0), HV=heads, R=form.R, K=form.K, BT=min(launch.tile, form.BK),
            GATED=log_decay is not None, ERASES=beta is not None, PREC=form.precision, num_warps=launch.warps,
        )  # fmt: skip
    return Prepared(decay, weights, solve, bound)


def compile_rows() -> Iterator[CompileRow]:
    """Every shape class of :data:`zoo_kernels.delta.chunk.EXAMPLES`, for the offline compile gate."""
    for case in EXAMPLES:
        x = example(case)
        with recorded(case, prep=prep_kernel) as rows:
            prepare(x.form, x.k, x.log_decay, x.beta, x.tables)
        yield from rows
