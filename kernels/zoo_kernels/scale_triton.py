"""Rows times numbers in Triton: each number is read once and written once, forward and backward."""

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
from zoo_kernels.rows import block_of, lay_out, places
from zoo_kernels.scale import ScaleCall

MOST_SIZE = 8192
MOST_ROWS = 2**30
# Launch.tile: numbers that a program holds at once, in whole rows, at least one.
launches.provide(
    "scale_forward", Row(Launch(tile=8192, warps=8), when={"block": 8192}), Row(Launch(tile=4096, warps=4))
)
launches.provide(
    "scale_backward", Row(Launch(tile=8192, warps=8), when={"block": 8192}), Row(Launch(tile=4096, warps=4))
)


class Triton(Kernels):
    """One launch forward and one backward."""

    def serves(self, call: ScaleCall) -> str | None:
        """None, or the reason why not."""
        if (reason := refusal(call.x)) is not None:
            return reason
        if call.scale.dtype == torch.float64:
            return "its kernels compute in fp32, and scale is float64"
        if (size := call.x.shape[-1]) > MOST_SIZE:
            return f"a program holds rows of up to {MOST_SIZE} numbers, and these have {size}"
        if call.x.numel() // max(1, size) >= MOST_ROWS:
            return f"rows are counted in 32 bits, up to {MOST_ROWS}"
        return None

    def run(self, call: ScaleCall) -> Tensor:
        """y, shaped like x and of its dtype."""
        return scale(call.x, call.scale, call.add)


# ------------------------------------------------------------------------------------------------------------- kernels
@triton.jit(do_not_specialize=["rows", "inner", "x_outer", "x_inner", "add_outer", "add_inner"])
def _forward_kernel(
    x, scale, add, y, rows, inner, x_outer, x_inner, add_outer, add_inner, HEADS: tl.constexpr,
    SIZE: tl.constexpr, NESTED: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows; HEADS above 0: one number for each head instead of each row."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < SIZE)[None, :]
    at = x + places(row, inner, x_outer * ALIGN, x_inner * ALIGN, NESTED) + column[None, :]
    values = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    number = row % HEADS if HEADS > 0 else row
    values *= tl.load(scale + number, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    if add is not None:
        at = add + places(row, inner, add_outer * ALIGN, add_inner * ALIGN, NESTED) + column[None, :]
        values += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row.to(tl.int64)[:, None] * SIZE + column[None, :], values.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "inner", "x_outer", "x_inner", "dy_outer", "dy_inner"])
def _backward_kernel(
    x, scale, dy, dx, dscale, rows, inner, x_outer, x_inner, dy_outer, dy_inner, HEADS: tl.constexpr,
    SIZE: tl.constexpr, NESTED: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of x, and for each row that of its number: sum(x * dy)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < SIZE)[None, :]
    at = x + places(row, inner, x_outer * ALIGN, x_inner * ALIGN, NESTED) + column[None, :]
    values = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    at = dy + places(row, inner, dy_outer * ALIGN, dy_inner * ALIGN, NESTED) + column[None, :]
    gradient = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(dscale + row, tl.sum(values * gradient, axis=1), mask=row < rows)
    number = row % HEADS if HEADS > 0 else row
    gradient *= tl.load(scale + number, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    tl.store(dx + row.to(tl.int64)[:, None] * SIZE + column[None, :], gradient.to(dx.dtype.element_ty), mask=mask)


# ------------------------------------------------------------------------------------------------------------ launches
def _settings(kernel: str, x: Tensor, scale: Tensor, size: int, nested: bool, align: int) -> dict[str, Any]:
    block = block_of(size)
    launch = launches.pick(kernel, device.architecture(x.device), block=block)
    return {
        "HEADS": 0 if scale.ndim == x.ndim - 1 else scale.shape[0],
        "SIZE": size,
        "NESTED": nested,
        "ALIGN": align,
        "ROWS": max(1, launch.tile // block),
        "BLOCK": block,
        "num_warps": launch.warps,
    }


def _scale(x: Tensor, scale: Tensor, add: Tensor | None) -> Tensor:
    """y [..., H, D] of checked arguments, in x's dtype.

    Args:
        x, add: [..., H, D], any strides; no copy is made where two strides reach all rows and the last axis is dense.
        scale: [..., H] or [H].
    """
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return y
    given = (x,) if add is None else (x, add)
    rows = lay_out(1, x.shape, *(tensor.stride() for tensor in given))
    settings = _settings("scale_forward", x, scale, rows.size, rows.nested, rows.align)
    wide_x, wide_add = (*rows.read(*given), None)[:2]
    x_strides, add_strides = (*rows.strides, (0, 0))[:2]
    with torch.cuda.device_of(x):
        _forward_kernel[(-(-rows.count // settings["ROWS"]),)](  # pyright: ignore[reportCallIssue]
            *(wide_x, scale.contiguous(), wide_add, y, rows.count, rows.inner, *x_strides, *add_strides), **settings
        )
    return y


def _scale_backward(dy: Tensor, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`_scale` for x and for scale; that of add is dy."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return dx, torch.zeros_like(scale)
    rows = lay_out(1, x.shape, x.stride(), dy.stride())
    settings = _settings("scale_backward", x, scale, rows.size, rows.nested, rows.align)
    shares = x.new_empty(x.shape[:-1], dtype=torch.float32)
    with torch.cuda.device_of(x):
        wide_x, wide_dy = rows.read(x, dy)
        _backward_kernel[(-(-rows.count // settings["ROWS"]),)](
            *(wide_x, scale.contiguous(), wide_dy, dx, shares, rows.count, rows.inner, *rows.strides[0]),
            *rows.strides[1],
            **settings,
        )
    if settings["HEADS"]:
        shares = shares.flatten(0, -2).sum(0)
    return dx, shares.to(scale.dtype)


# ------------------------------------------------------------------------------------------------- what torch must know
scale = operator("zoo_kernels::scale")(_scale)
scale_backward = operator("zoo_kernels::scale_backward")(_scale_backward)


@scale.register_fake
def _(x, scale, add):
    return x.new_empty(x.shape)


@scale_backward.register_fake
def _(dy, x, scale):
    return x.new_empty(x.shape), scale.new_empty(scale.shape)


def _keep(ctx, inputs, output):
    x, scale, add = inputs
    ctx.save_for_backward(x, scale)
    ctx.adds = add is not None


def _differentiate(ctx, dy):
    return *scale_backward(dy, *ctx.saved_tensors), dy if ctx.adds else None


scale.register_autograd(_differentiate, setup_context=_keep)


# -------------------------------------------------------------------------------------------------------- compile gate
def compile_rows() -> Iterator[CompileRow]:
    """Every kind of kernel that is launched, in bf16: (name, function, signature, constants, warps, stages)."""
    for size in (64, 128, 1024, 8192):
        x = torch.empty(2, 64, 2, 3 * size, dtype=torch.bfloat16, device="meta")[..., :size]
        for case, number in (("by row", x[..., 0].float()), ("by head", x[0, 0, :, 0].float())):
            with recorded(f"rows of {size}, {case}", scale_forward=_forward_kernel) as rows:
                _scale(x, number, None)
                _scale(x, number, x)
            yield from rows
            with recorded(f"rows of {size}, {case}", scale_backward=_backward_kernel) as rows:
                _scale_backward(x, x, number)
            yield from rows
