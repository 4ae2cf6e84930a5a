"""The normalisations in Triton: one kernel forward and one backward for RMS and L2, with weight, gate and groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo_kernels import device
from zoo_kernels import launch as launches
from zoo_kernels.device import Kernels, refusal
from zoo_kernels.eager import operator
from zoo_kernels.elementwise import sigmoid
from zoo_kernels.launch import Launch, Row
from zoo_kernels.norm import NormCall
from zoo_kernels.rows import block_of, lay_out, places

MOST_SIZE = 8192
MOST_ROWS = 2**30
# Launch.tile: numbers that a program holds at once, in whole rows, at least one.
launches.provide(
    "norm_forward",
    Row(Launch(tile=8192, warps=8), when={"block": (4096, 8192)}),
    Row(Launch(tile=4096, warps=4)),
)
launches.provide(
    "norm_backward",
    Row(Launch(tile=8192, warps=16), when={"block": 8192}),
    Row(Launch(tile=4096, warps=8), when={"block": 4096}),
    Row(Launch(tile=2048, warps=4)),
)
# Programs of the backward with a weight walk over rows and leave one partial sum each. There are as many as run at
# once, so many warps a multiprocessor; or more, so that no last few run alone, where each has rows enough for its sum.
WARPS_PER_PROCESSOR = 16
ROWS_A_SUM = 64


class Triton(Kernels):
    """One launch forward and one backward, which read and write each number once; 1 / root is computed again."""

    def serves(self, call: NormCall) -> str | None:
        """None, or the reason why not."""
        x = call.x
        if (reason := refusal(x)) is not None:
            return reason
        if call.gate is not None and call.gate.dtype == torch.float64:
            return "its kernels compute in fp32, and the gate is float64"
        if (size := x.shape[-1] // call.groups) > MOST_SIZE:
            return f"a program holds rows of up to {MOST_SIZE} numbers, and these have {size}"
        if x.numel() // max(1, size) >= MOST_ROWS:
            return f"rows are counted in 32 bits, up to {MOST_ROWS}"
        return None

    def run(self, call: NormCall) -> Tensor:
        """y, shaped like x and of its dtype."""
        sigmoid_gate = call.activation == "sigmoid"
        return normalise(
            call.x, call.weight, call.gate, float(call.eps), call.mean, sigmoid_gate, call.gate_first, call.groups
        )


# ------------------------------------------------------------------------------------------------------------- kernels
@triton.jit
def _opened(gate, SIGMOID: tl.constexpr):
    """activation(gate) and its derivative."""
    s = sigmoid(gate)
    if SIGMOID:
        return s, s * (1.0 - s)
    else:
        return gate * s, s * (1.0 + gate * (1.0 - s))


@triton.jit(do_not_specialize=["rows", "inner", "x_outer", "x_inner", "gate_outer", "gate_inner"])
def _forward_kernel(
    x, weight, gate, y, rows, inner, x_outer, x_inner, gate_outer, gate_inner, eps, SIZE: tl.constexpr,
    MEAN: tl.constexpr, SIGMOID: tl.constexpr, GATE_FIRST: tl.constexpr, GROUPS: tl.constexpr,
    NESTED: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one group each; row ``r`` belongs to group r % GROUPS."""
    group = tl.program_id(0) % GROUPS
    row = (tl.program_id(0) // GROUPS * ROWS + tl.arange(0, ROWS)) * GROUPS + group
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    mask = (row < rows)[:, None] & inside[None, :]
    # Multiplied here, so that the compiler sees what strides are multiples of, whatever their value.
    at = x + places(row, inner, x_outer * ALIGN, x_inner * ALIGN, NESTED) + column[None, :]
    values = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    opened = values
    if gate is not None:
        at = gate + places(row, inner, gate_outer * ALIGN, gate_inner * ALIGN, NESTED) + column[None, :]
        opened, _ = _opened(tl.load(at, mask=mask, other=0.0).to(tl.float32), SIGMOID)
        if GATE_FIRST:
            values *= opened
    square = tl.sum(values * values, axis=1)
    if MEAN:
        square *= 1.0 / SIZE
    values *= tl.rsqrt(square + eps)[:, None]
    if weight is not None:
        values *= tl.load(weight + group * SIZE + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if gate is not None and not GATE_FIRST:
        values *= opened
    tl.store(y + row.to(tl.int64)[:, None] * SIZE + column[None, :], values.to(y.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=[
        *("rows", "inner", "lanes", "turns", "x_outer", "x_inner", "gate_outer", "gate_inner", "dy_outer", "dy_inner")
    ]
)
def _backward_kernel(
    x, weight, gate, dy, dx, dgate, dweight, rows, inner, lanes, turns, x_outer, x_inner, gate_outer, gate_inner,
    dy_outer, dy_inner, eps, SIZE: tl.constexpr, MEAN: tl.constexpr, SIGMOID: tl.constexpr,
    GATE_FIRST: tl.constexpr, GROUPS: tl.constexpr, NESTED: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``turns`` times ROWS rows of one group, ``lanes`` programs taking turns; dweight is one share per program."""
    group, lane = tl.program_id(0) % GROUPS, tl.program_id(0) // GROUPS
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    scale = tl.full([1, BLOCK], 1.0, tl.float32)
    if weight is not None:
        scale = tl.load(weight + group * SIZE + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    shares = tl.zeros([ROWS, BLOCK], tl.float32)
    for turn in range(turns):
        row = ((turn * lanes + lane) * ROWS + tl.arange(0, ROWS)) * GROUPS + group
        mask = (row < rows)[:, None] & inside[None, :]
        at = x + places(row, inner, x_outer * ALIGN, x_inner * ALIGN, NESTED) + column[None, :]
        values = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        at = dy + places(row, inner, dy_outer * ALIGN, dy_inner * ALIGN, NESTED) + column[None, :]
        gradient = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        out = row.to(tl.int64)[:, None] * SIZE + column[None, :]
        plain, opened, slope = values, values, values
        if gate is not None:
            at = gate + places(row, inner, gate_outer * ALIGN, gate_inner * ALIGN, NESTED) + column[None, :]
            opened, slope = _opened(tl.load(at, mask=mask, other=0.0).to(tl.float32), SIGMOID)
            if GATE_FIRST:
                values *= opened
        square = tl.sum(values * values, axis=1)
        if MEAN:
            square *= 1.0 / SIZE
        root = tl.rsqrt(square + eps)[:, None]
        unit = values * root
        if gate is not None and not GATE_FIRST:
            tl.store(dgate + out, (gradient * unit * scale * slope).to(dgate.dtype.element_ty), mask=mask)
            gradient *= opened
        if weight is not None:
            shares += gradient * unit
            gradient *= scale
        along = tl.sum(gradient * unit, axis=1)
        if MEAN:
            along *= 1.0 / SIZE
        gradient = (gradient - unit * along[:, None]) * root
        if gate is not None and GATE_FIRST:
            tl.store(dgate + out, (gradient * plain * slope).to(dgate.dtype.element_ty), mask=mask)
            gradient *= opened
        tl.store(dx + out, gradient.to(dx.dtype.element_ty), mask=mask)
    if weight is not None:
        at = dweight + tl.program_id(0).to(tl.int64) * SIZE + column
        tl.store(at, tl.sum(shares, axis=0), mask=inside)


# ------------------------------------------------------------------------------------------------------------ launches
def _settings(
    launch: Launch, size: int, align: int, nested: bool, mean: bool, sigmoid_gate: bool, gate_first: bool, groups: int
) -> dict[str, Any]:
    block = block_of(size)
    return {
        "SIZE": size,
        "MEAN": mean,
        "SIGMOID": sigmoid_gate,
        "GATE_FIRST": gate_first,
        "GROUPS": groups,
        "NESTED": nested,
        "ALIGN": align,
        "ROWS": max(1, launch.tile // block),
        "BLOCK": block,
        "num_warps": launch.warps,
    }


@operator("zoo_kernels::norm")
def normalise(
    x: Tensor,
    weight: Tensor | None,
    gate: Tensor | None,
    eps: float,
    mean: bool,
    sigmoid_gate: bool,
    gate_first: bool,
    groups: int,
) -> Tensor:
    """y [..., D] of checked arguments, in x's dtype.

    Args:
        x, gate: [..., D], any strides; no copy is made where two strides reach all rows and the last axis is dense.
        weight: [D].
        eps: added inside the root.
        mean: divide by the root of the mean square, else by that of the sum of squares.
        sigmoid_gate, gate_first, groups: as in :func:`zoo_kernels.norm.gated_rms_norm`.
    """
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return y
    given = (x,) if gate is None else (x, gate)
    rows = lay_out(groups, x.shape, *(tensor.stride() for tensor in given))
    launch = launches.pick("norm_forward", device.architecture(x.device), block=block_of(rows.size))
    settings = _settings(launch, rows.size, rows.align, rows.nested, mean, sigmoid_gate, gate_first, groups)
    programs = -(-rows.count // (groups * settings["ROWS"])) * groups
    wide_x, wide_gate = (*rows.read(*given), None)[:2]
    x_strides, gate_strides = (*rows.strides, (0, 0))[:2]
    with torch.cuda.device_of(x):
        _forward_kernel[(programs,)](  # pyright: ignore[reportCallIssue]
            *(wide_x, None if weight is None else weight.contiguous(), wide_gate, y),
            *(rows.count, rows.inner, *x_strides, *gate_strides, eps),
            **settings,
        )
    return y


@operator("zoo_kernels::norm_backward")
def normalise_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    gate: Tensor | None,
    eps: float,
    mean: bool,
    sigmoid_gate: bool,
    gate_first: bool,
    groups: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`normalise` for x, weight and gate; those of an absent weight or gate are empty."""
    dx, dgate = (
        x.new_empty(0) if one is None else torch.empty_like(one, memory_format=torch.contiguous_format)
        for one in (x, gate)
    )
    if x.numel() == 0:
        return dx, x.new_empty(0) if weight is None else torch.zeros_like(weight), dgate
    given = (x, dy) if gate is None else (x, dy, gate)
    rows = lay_out(groups, x.shape, *(tensor.stride() for tensor in given))
    launch = launches.pick("norm_backward", device.architecture(x.device), block=block_of(rows.size))
    settings = _settings(launch, rows.size, rows.align, rows.nested, mean, sigmoid_gate, gate_first, groups)
    turns, lanes = 1, -(-rows.count // (groups * settings["ROWS"]))
    shares = None
    if weight is not None:
        together = max(1, device.processors(x.device) * WARPS_PER_PROCESSOR // launch.warps // groups)
        most = max(together, lanes * settings["ROWS"] // ROWS_A_SUM)
        turns, lanes = -(-lanes // most), min(lanes, most)
        # Added up afterwards in an order that never changes.
        shares = x.new_empty((lanes, weight.shape[0]), dtype=torch.float32)
    wide_x, wide_dy, wide_gate = (*rows.read(*given), None)[:3]
    x_strides, dy_strides, gate_strides = (*rows.strides, (0, 0))[:3]
    with torch.cuda.device_of(x):
        _backward_kernel[(lanes * groups,)](
            *(wide_x, None if weight is None else weight.contiguous(), wide_gate, wide_dy, dx),
            *(
                None if gate is None else dgate,
                shares,
                rows.count,
                rows.inner,
                lanes,
                turns,
                *x_strides,
                *gate_strides,
                *dy_strides,
                eps,
            ),
            **settings,
        )
    dweight = x.new_empty(0) if weight is None or shares is None else shares.sum(0).to(weight.dtype)
    return dx, dweight, dgate


# ------------------------------------------------------------------------------------------------- what torch must know
@normalise.register_fake
def _(x, weight, gate, *options):
    return x.new_empty(x.shape)


@normalise_backward.register_fake
def _(dy, x, weight, gate, *options):
    return tuple(x.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape) for tensor in (x, weight, gate))


def _keep(ctx, inputs, output):
    *tensors, eps, mean, sigmoid_gate, gate_first, groups = inputs
    ctx.save_for_backward(*tensors)
    ctx.options = (eps, mean, sigmoid_gate, gate_first, groups)


def _differentiate(ctx, dy):
    x, weight, gate = ctx.saved_tensors
    dx, dweight, dgate = normalise_backward(dy, x, weight, gate, *ctx.options)
    return dx, None if weight is None else dweight, None if gate is None else dgate, *(None for _ in ctx.options)


normalise.register_autograd(_differentiate, setup_context=_keep)


# -------------------------------------------------------------------------------------------------------- compile gate
def compile_rows() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any], int, int]]:
    """Every kind of kernel that is launched, in bf16: (name, function, signature, constants, warps, stages)."""
    absent: dict[str, Sequence[str]] = {
        "rms": ("gate", "dgate"),
        "l2": ("weight", "gate", "dweight", "dgate"),
        "gated": (),
        "gated first": (),
    }
    for kernel, function in (("norm_forward", _forward_kernel), ("norm_backward", _backward_kernel)):
        for size in (64, 128, 1024, 2048, 4096, 8192):
            for case, missing in absent.items():
                launch = launches.pick(kernel, "sm_90", block=block_of(size))
                groups = 4 if case == "gated first" else 1
                settings = _settings(launch, size, 8, True, case != "l2", False, case == "gated first", groups)
                constants = {**dict.fromkeys(missing), **settings}
                warps = constants.pop("num_warps")
                constants = {name: value for name, value in constants.items() if name in function.arg_names}
                signature = {name: _type(name) for name in function.arg_names}
                signature |= dict.fromkeys(constants, "constexpr")
                yield f"{kernel}, {case}, rows of {size}", function, signature, constants, warps, 1


def _type(name: str) -> str:
    """The type of a kernel's argument, by its name."""
    if name in ("x", "gate", "y", "dy", "dx", "dgate", "weight"):
        return "*bf16"
    return {"eps": "fp32", "dweight": "*fp32"}.get(name, "i32")
