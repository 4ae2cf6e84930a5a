"""Rotary positions in Triton: one pass over memory forward, and one backward, which turns back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo_kernels import device
from zoo_kernels import launch as launches
from zoo_kernels.device import Kernels, refusal
from zoo_kernels.eager import operator
from zoo_kernels.launch import CompileRow, Launch, Row, recorded
from zoo_kernels.rotary import RotaryCall, angles
from zoo_kernels.rows import block_of, lay_out, places

MOST_SIZE = 4096
MOST_ROWS = 2**30
# Launch.tile: numbers that a program holds at once, in whole rows, at least one.
launches.provide("rotary", Row(Launch(tile=4096, warps=4)))


class Triton(Kernels):
    """One launch forward and one backward; cosines and sines come from PyTorch, once a token."""

    def serves(self, call: RotaryCall) -> str | None:
        """None, or the reason why not."""
        if (reason := refusal(call.x)) is not None:
            return reason
        if (size := call.x.shape[-1]) > MOST_SIZE:
            return f"a program holds rows of up to {MOST_SIZE} numbers, and these have {size}"
        if call.x.numel() // max(1, size) >= MOST_ROWS:
            return f"rows are counted in 32 bits, up to {MOST_ROWS}"
        return None

    def run(self, call: RotaryCall) -> Tensor:
        """y, shaped like x and of its dtype."""
        cos, sin = angles(call.positions, call.turned, call.theta, torch.float32)
        return turn(call.x, cos, sin, False)


@triton.jit(do_not_specialize=["rows", "inner", "x_outer", "x_inner", "tokens"])
def _kernel(
    x, cos, sin, y, rows, inner, x_outer, x_inner, tokens, HEADS: tl.constexpr, BACK: tl.constexpr,
    SIZE: tl.constexpr, PAIRS: tl.constexpr, NESTED: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """ROWS rows; the angles of a row are those of its token, of which there are ``tokens`` before they repeat."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = (row < rows)[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    mask = there & (pair < PAIRS)
    at = x + places(row, inner, x_outer * ALIGN, x_inner * ALIGN, NESTED)
    first = tl.load(at + pair, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + PAIRS + pair, mask=mask, other=0.0).to(tl.float32)
    angle = ((row // HEADS) % tokens).to(tl.int64)[:, None] * PAIRS + pair
    c = tl.load(cos + angle, mask=mask, other=0.0)
    s = tl.load(sin + angle, mask=mask, other=0.0)
    if BACK:
        s = -s
    out = y + row.to(tl.int64)[:, None] * SIZE
    tl.store(out + pair, (first * c - second * s).to(y.dtype.element_ty), mask=mask)
    tl.store(out + PAIRS + pair, (second * c + first * s).to(y.dtype.element_ty), mask=mask)
    if REST > 0:
        column = 2 * PAIRS + tl.arange(0, REST)[None, :]
        kept = there & (column < SIZE)
        tl.store(out + column, tl.load(at + column, mask=kept, other=0.0), mask=kept)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """The leading channels of x [B, T, H, D] turned, or turned ``back``, in x's dtype.

    Args:
        x: any strides; no copy is made where two strides reach all rows and the last axis is dense.
        cos, sin: fp32 [T, pairs], or [B, T, pairs].
    """
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return y
    rows, pairs = lay_out(1, x.shape, x.stride()), cos.shape[-1]
    launch = launches.pick("rotary", device.architecture(x.device))
    settings: dict[str, Any] = {
        "HEADS": x.shape[2],
        "BACK": back,
        "SIZE": rows.size,
        "PAIRS": pairs,
        "NESTED": rows.nested,
        "ALIGN": rows.align,
        "ROWS": max(1, launch.tile // block_of(rows.size)),
        "BLOCK": block_of(pairs),
        "REST": block_of(rows.size - 2 * pairs) if rows.size > 2 * pairs else 0,
        "num_warps": launch.warps,
    }
    counts = (rows.count, rows.inner, *rows.strides[0], cos.numel() // pairs)
    with torch.cuda.device_of(x):
        _kernel[(-(-rows.count // settings["ROWS"]),)](  # pyright: ignore[reportCallIssue]
            *(*rows.read(x), cos.contiguous(), sin.contiguous(), y, *counts), **settings
        )
    return y


# ------------------------------------------------------------------------------------------------- what torch must know
turn = operator("zoo_kernels::rotary")(_turn)


@turn.register_fake
def _(x, cos, sin, back):
    return x.new_empty(x.shape)


def _keep(ctx, inputs, output):
    _, cos, sin, back = inputs
    ctx.save_for_backward(cos, sin)
    ctx.back = back


def _differentiate(ctx, dy):
    return turn(dy, *ctx.saved_tensors, not ctx.back), None, None, None


turn.register_autograd(_differentiate, setup_context=_keep)


# -------------------------------------------------------------------------------------------------------- compile gate
def compile_rows() -> Iterator[CompileRow]:
    """Every kind of kernel that is launched, in bf16: (name, function, signature, constants, warps, stages)."""
    for size, pairs in ((64, 32), (128, 64), (256, 32), (4096, 2048)):
        x = torch.empty(2, 64, 6, size, dtype=torch.bfloat16, device="meta")[:, :, :3]
        angle = torch.empty(64, pairs, device="meta")
        for back in (False, True):
            case = f"of {2 * pairs} in {size} channels{', back' * back}"
            with recorded(case, rotary=_kernel) as rows:
                _turn(x, angle, angle, back)
            yield from rows
