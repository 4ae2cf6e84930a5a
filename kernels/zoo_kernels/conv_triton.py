"""The short convolution in Triton: one program walks down some tokens of some channels, its window in registers."""

# Triton's own language has no starred tuples, and compiles what stands under a run-time condition:
# ruff: noqa: RUF005, SIM102
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from zoo_kernels import device
from zoo_kernels import launch as launches
from zoo_kernels.conv import ConvCall
from zoo_kernels.device import Kernels, refusal
from zoo_kernels.eager import operator
from zoo_kernels.elementwise import sigmoid
from zoo_kernels.launch import Launch, Row

# Launch.tile: channels per program. Launch.stages: tokens whose loads are issued before the first of them is used.
launches.provide(
    "short_conv_forward",
    Row(Launch(tile=128, warps=1, stages=4), when={"width": "over 4", "channels": "few"}),
    Row(Launch(tile=512, warps=4, stages=4), when={"width": "over 4"}),
    Row(Launch(tile=128, warps=1, stages=8), when={"channels": "few"}),
    Row(Launch(tile=512, warps=4, stages=8)),
)
launches.provide(
    "short_conv_backward",
    Row(Launch(tile=64, warps=1, stages=4), when={"width": "over 4", "channels": "few"}),
    Row(Launch(tile=256, warps=4, stages=4), when={"width": "over 4"}),
    Row(Launch(tile=128, warps=1, stages=4), when={"channels": "few"}),
    Row(Launch(tile=512, warps=4, stages=4)),
)
FEW_CHANNELS = 256
# Warps that a multiprocessor is given before programs grow longer; longer ones read fewer tokens twice, up to so many.
WARPS_PER_PROCESSOR = 64
MOST_TOKENS = {"short_conv_forward": 128, "short_conv_backward": 256}
# Inside a program, offsets have 32 bits: its tokens and the window, times this, stay below 2^31.
MOST_STRIDE = 2**22


class Triton(Kernels):
    """One launch forward and one backward, which read each input about once; the gradient recomputes the taps."""

    def serves(self, call: ConvCall) -> str | None:
        """None, or the reason why not."""
        if (reason := refusal(call.x)) is not None:
            return reason
        if call.x.shape[2] > MOST_STRIDE:
            return f"it serves up to {MOST_STRIDE} channels, and x has {call.x.shape[2]}"
        return None

    def run(self, call: ConvCall) -> tuple[Tensor, Tensor]:
        """y [B, T, C] and the last state [N, W - 1, C], both in x's dtype."""
        x, packing, before = call.x, call.packing, call.initial_state
        tables = (None, None) if packing is None else (packing.document_ids, packing.cu_seqlens)
        before = None if before is None else before.to(x.dtype)
        return convolve(x, call.weight, call.bias, before, *tables, call.activation == "silu")


# ------------------------------------------------------------------------------------------------------------- kernels
@triton.jit
def _input(x_rows, state, sequence, token, begin, c, inside, C, stride, WIDTH: tl.constexpr):
    """One input of a sequence that starts at ``begin``: a token, or before it a row of the state, or zeros. [BLOCK]"""
    at = x_rows + token.to(tl.int64) * stride + c
    value = tl.load(at, mask=inside & (token >= begin), other=0.0).to(tl.float32)
    if state is not None:
        row = (sequence + 1) * (WIDTH - 1) + token - begin
        before = tl.load(state + row * C + c, mask=inside & (token < begin), other=0.0).to(tl.float32)
        value = tl.where(token < begin, before, value)
    return value


@triton.jit
def _taps(weight, c, inside, WIDTH: tl.constexpr):
    """The filters as WIDTH tensors [BLOCK], oldest tap first."""
    taps = ()
    for i in tl.static_range(WIDTH):
        taps = taps + (tl.load(weight + c.to(tl.int64) * WIDTH + i, mask=inside, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def _window(x_rows, state, sequence, first, begin, c, inside, C, stride, WIDTH: tl.constexpr):
    """What stands before token ``first``, as WIDTH tensors, oldest first; the oldest leaves before it is read."""
    window = (tl.zeros_like(c).to(tl.float32),)
    for i in tl.static_range(WIDTH - 1):
        token = first - (WIDTH - 1) + i
        window = window + (_input(x_rows, state, sequence, token, begin, c, inside, C, stride, WIDTH),)
    return window


@triton.jit
def _restarted(window, fresh, state, sequence, c, inside, C, WIDTH: tl.constexpr):
    """``window``, or, where a document starts, what stands before that."""
    restarted = (window[0],)
    for i in tl.static_range(WIDTH - 1):
        before = tl.zeros_like(window[0])
        if state is not None:
            row = sequence * (WIDTH - 1) + i
            before = tl.load(state + row * C + c, mask=inside & fresh, other=0.0).to(tl.float32)
        restarted = restarted + (tl.where(fresh, before, window[i + 1]),)
    return restarted


@triton.jit
def _convolved(window, taps, shift, WIDTH: tl.constexpr):
    """shift + sum over i of taps[i] * window[i]."""
    y = shift
    for i in tl.static_range(WIDTH):
        y += taps[i] * window[i]
    return y


@triton.jit
def _loaded(rows, first, count, stride, c, inside, COUNT: tl.constexpr):
    """COUNT rows from ``first`` on, those from ``count`` on zero: all loads are in flight before the first is used."""
    loaded = ()
    for u in tl.static_range(COUNT):
        mask = inside & (first + u < count)
        loaded = loaded + (tl.load(rows + (first + u) * stride + c, mask=mask, other=0.0),)
    return loaded


@triton.jit(do_not_specialize=["T", "tiles", "per_row", "tokens", "channels", "x_stride", "x_pitch"])
def _forward_kernel(
    x, weight, bias, state, documents, offsets, y, last, T, tiles, per_row, tokens, channels, x_stride, x_pitch,
    WIDTH: tl.constexpr, SILU: tl.constexpr, ALIGN: tl.constexpr, UNROLL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs below ``tiles``: y of ``tokens`` tokens. The others: the last state of one sequence each."""
    # Multiplied here, so that the compiler sees what these are multiples of, whatever their value.
    C, stride = channels * ALIGN, x_stride * ALIGN
    blocks = tl.cdiv(C, BLOCK)
    c = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    index = tl.program_id(0) // blocks
    if index < tiles:
        first = (index % per_row) * tokens
        row = (index // per_row).to(tl.int64)
        sequence, begin = row, first * 0
        if documents is not None:
            sequence = tl.load(documents + first)
            begin = tl.load(offsets + sequence)
        x_rows = x + row * x_pitch * stride
        taps, shift = _taps(weight, c, inside, WIDTH), tl.zeros([BLOCK], tl.float32)
        if bias is not None:
            shift = tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
        window = _window(x_rows, state, sequence, first, begin, c, inside, C, stride, WIDTH)
        # From here on, places are counted from the first token, in 32 bits.
        x_rows += first.to(tl.int64) * stride
        y_rows, left = y + (row * T + first) * C, T - first
        for block in range(0, tl.minimum(tokens, left), UNROLL):
            loaded = _loaded(x_rows, block, left, stride, c, inside, UNROLL)
            for u in tl.static_range(UNROLL):
                r = block + u
                if documents is not None:
                    now = tl.load(documents + first + r, mask=r < left, other=sequence)
                    window = _restarted(window, now != sequence, state, now, c, inside, C, WIDTH)
                    sequence = now
                window = window[1:] + (loaded[u].to(tl.float32),)
                out = _convolved(window, taps, shift, WIDTH)
                if SILU:
                    out *= sigmoid(out)
                tl.store(y_rows + r * C + c, out.to(y.dtype.element_ty), mask=inside & (r < left))
    else:
        sequence = (index - tiles).to(tl.int64)
        begin, end, x_rows = index * 0, index * 0 + T, x + sequence * x_pitch * stride
        if documents is not None:
            begin, end, x_rows = tl.load(offsets + sequence), tl.load(offsets + sequence + 1), x
        for i in tl.static_range(WIDTH - 1):
            token = end - (WIDTH - 1) + i
            value = _input(x_rows, state, sequence, token, begin, c, inside, C, stride, WIDTH)
            tl.store(last + (sequence * (WIDTH - 1) + i) * C + c, value.to(last.dtype.element_ty), mask=inside)


@triton.jit
def _passed_on(dlast, sequence, token, end, c, inside, C, WIDTH: tl.constexpr):
    """The gradient that an input has for standing in the last state. [BLOCK]"""
    gradient = tl.zeros_like(c).to(tl.float32)
    if dlast is not None:
        place = token - end + WIDTH - 1
        at = dlast + (sequence * (WIDTH - 1) + place) * C + c
        gradient = tl.load(at, mask=inside & (place >= 0) & (token < end), other=0.0).to(tl.float32)
    return gradient


@triton.jit(
    do_not_specialize=["T", "tiles", "per_row", "tokens", "channels", "x_stride", "x_pitch", "dy_stride", "dy_pitch"]
)
def _backward_kernel(
    x, weight, bias, state, documents, offsets, dy, dlast, dx, dtaps, dshift, dstate, T, tiles, per_row, tokens,
    channels, x_stride, x_pitch, dy_stride, dy_pitch, WIDTH: tl.constexpr, SILU: tl.constexpr, ALIGN: tl.constexpr,
    UNROLL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs below ``tiles``: dx of ``tokens`` tokens, and their share of the gradients of weight and bias.

    The others, where there is a state: dstate of one sequence each, whose rows are the tokens just before the first.
    """
    C, x_step, dy_step = channels * ALIGN, x_stride * ALIGN, dy_stride * ALIGN
    blocks = tl.cdiv(C, BLOCK)
    c = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    index = tl.program_id(0) // blocks
    of_state = index >= tiles
    owner = tl.where(of_state, index - tiles, index // per_row).to(tl.int64)  # a row of the batch, or a sequence
    first = tl.where(of_state, 0, (index % per_row) * tokens)
    own = tl.where(of_state, 0, tl.minimum(T - first, tokens))
    begin, end, row = 0 * first, 0 * first + T, owner
    if documents is not None:
        row = 0 * owner
        owner = tl.load(documents + first, mask=index < tiles, other=owner)
        begin, end = tl.load(offsets + owner), tl.load(offsets + owner + 1)
        first = tl.where(of_state, begin, first)
    taps, zero = _taps(weight, c, inside, WIDTH), tl.zeros([BLOCK], tl.float32)
    shift = zero
    if bias is not None:
        shift = tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    x_rows, dy_rows = x + row * x_pitch * x_step, dy + row * dy_pitch * dy_step
    window = _window(x_rows, state, owner, first, begin, c, inside, C, x_step, WIDTH)
    pending, sums, total = (zero,), (zero,), zero
    for i in tl.static_range(WIDTH - 1):
        # Only a state is handed on unread; other tokens before `first` are finished by their own program.
        handed = zero
        if dstate is not None:
            token = begin - (WIDTH - 1) + i
            handed = _passed_on(dlast, owner, token, end, c, inside & of_state, C, WIDTH)
        pending, sums = pending + (handed,), sums + (zero,)
    # From here on, places are counted from the first token, in 32 bits: step r reads token first + r, and finishes the
    # gradient of the token WIDTH - 1 before it.
    x_rows, dy_rows = x_rows + first.to(tl.int64) * x_step, dy_rows + first.to(tl.int64) * dy_step
    left, low, high = T - first, tl.where(of_state, 0, WIDTH - 1), own + WIDTH - 1
    out = dx + (row * T + first - (WIDTH - 1)) * C
    if dstate is not None:
        if of_state:
            out = dstate + owner * (WIDTH - 1) * C
    sequence = owner
    for block in range(0, high, UNROLL):
        x_loaded = _loaded(x_rows, block, left, x_step, c, inside, UNROLL)
        dy_loaded = _loaded(dy_rows, block, left, dy_step, c, inside, UNROLL)
        for u in tl.static_range(UNROLL):
            r = block + u
            position = first + r
            if documents is not None:
                now = tl.load(documents + first + r, mask=r < left, other=sequence)
                window = _restarted(window, now != sequence, state, now, c, inside, C, WIDTH)
                sequence = now
                position -= tl.load(offsets + now)
                if dstate is not None:
                    position = tl.where(of_state, tl.where(now == owner, WIDTH, 0), position)
                if dlast is not None:
                    end = tl.load(offsets + now + 1)
            window = window[1:] + (x_loaded[u].to(tl.float32),)
            gradient = dy_loaded[u].to(tl.float32)
            if SILU:
                value = _convolved(window, taps, shift, WIDTH)
                gate = sigmoid(value)
                gradient *= gate * (1.0 + value * (1.0 - gate))
            counted = tl.where(r < own, gradient, 0.0)
            total += counted
            pending = pending[1:] + (_passed_on(dlast, sequence, first + r, end, c, inside, C, WIDTH),)
            more, more_sums = (), ()
            for i in tl.static_range(WIDTH):
                reached = pending[i] + taps[i] * gradient
                if documents is not None:
                    reached = tl.where(position >= WIDTH - 1 - i, reached, pending[i])
                more, more_sums = more + (reached,), more_sums + (sums[i] + counted * window[i],)
            pending, sums = more, more_sums
            mask = inside & (r >= low) & (r < high)
            tl.store(out + r * C + c, pending[0].to(dx.dtype.element_ty), mask=mask)
    mask = inside & (index < tiles)
    share = index.to(tl.int64) * C + c
    for i in tl.static_range(WIDTH):
        tl.store(dtaps + share * WIDTH + i, sums[i], mask=mask)
    if bias is not None:
        tl.store(dshift + share, total, mask=mask)


# ------------------------------------------------------------------------------------------------------------ launches
def _by_rows(x: Tensor) -> tuple[Tensor, int, int]:
    """x [B, T, C], the stride of its tokens, and how many such strides lead to the next row; a copy where none do."""
    batch, tokens, channels = x.shape
    next_row, stride, step = x.stride()
    if tokens == 1:
        stride = next_row if batch > 1 else channels
    dense = (step == 1 or channels == 1) and 0 < stride <= MOST_STRIDE
    if dense and (batch == 1 or next_row % stride == 0):
        return x, stride, next_row // stride if batch > 1 else tokens
    return x.contiguous(), channels, tokens


def _plan(kernel: str, x: Tensor, width: int) -> tuple[Launch, int, int, int]:
    """The launch, the tokens of one program, the programs of one row of the batch, and the blocks of channels."""
    batch, tokens, channels = x.shape
    launch = launches.pick(
        kernel,
        device.architecture(x.device),
        channels="few" if channels <= FEW_CHANNELS else "many",
        width="over 4" if width > 4 else "up to 4",
    )
    blocks = -(-channels // launch.tile)
    programs = max(1, device.processors(x.device) * WARPS_PER_PROCESSOR // launch.warps)
    share = min(-(-batch * tokens * blocks // programs), MOST_TOKENS[kernel])
    share = max(1, -(-share // launch.stages)) * launch.stages
    return launch, share, -(-tokens // share), blocks


def _settings(width: int, silu: bool, launch: Launch, *multiples: int) -> dict[str, Any]:
    return {
        "WIDTH": width,
        "SILU": silu,
        "ALIGN": 1 if any(number % 8 for number in multiples) else 8,
        "UNROLL": launch.stages,
        "BLOCK": launch.tile,
        "num_warps": launch.warps,
    }


def _sequences(x: Tensor, offsets: Tensor | None) -> int:
    return x.shape[0] if offsets is None else offsets.shape[0] - 1


@operator("zoo_kernels::short_conv")
def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    documents: Tensor | None,
    offsets: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor]:
    """y [B, T, C] and the last state [N, W - 1, C] of checked arguments, both in x's dtype.

    Args:
        x: [B, T, C], any strides; no copy is made where the last axis is dense and rows of the batch are apart by a
            multiple of a token's stride.
        weight, bias: [C, W] and [C], any float dtype.
        state: [N, W - 1, C] in x's dtype.
        documents, offsets: int64 [T] and int32 [N + 1] of a Packing, or neither.
        silu: whether y goes through SiLU.
    """
    (batch, tokens, channels), width, sequences = x.shape, weight.shape[1], _sequences(x, offsets)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    last = x.new_empty(sequences, width - 1, channels)
    x, stride, pitch = _by_rows(x)
    launch, share, per_row, blocks = _plan("short_conv_forward", x, width)
    tiles = batch * per_row
    if programs := (tiles + (sequences if width > 1 else 0)) * blocks:
        settings = _settings(width, silu, launch, channels, stride)
        align = settings["ALIGN"]
        with torch.cuda.device_of(x):
            _forward_kernel[(programs,)](
                *(x, weight.contiguous(), bias, None if state is None else state.contiguous(), documents, offsets),
                *(y, last, tokens, tiles, max(1, per_row), share, channels // align, stride // align, pitch),
                **settings,
            )
    return y, last


@operator("zoo_kernels::short_conv_backward")
def convolve_backward(
    dy: Tensor,
    dlast: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    documents: Tensor | None,
    offsets: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of :func:`convolve` for x, weight, bias and state; those of an absent bias or state are empty."""
    (batch, tokens, channels), width, sequences = x.shape, weight.shape[1], _sequences(x, offsets)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dstate = None if state is None else x.new_empty(state.shape)
    launch, share, per_row, blocks = _plan("short_conv_backward", x, width)
    tiles = batch * per_row
    # One share of each sum per program, added up afterwards in an order that never changes.
    dtaps = x.new_empty((tiles, channels, width), dtype=torch.float32)
    dshift = None if bias is None else x.new_empty((tiles, channels), dtype=torch.float32)
    x, stride, pitch = _by_rows(x)
    dy, dy_stride, dy_pitch = _by_rows(dy)
    if programs := (tiles + (0 if state is None or width == 1 else sequences)) * blocks:
        settings = _settings(width, silu, launch, channels, stride, dy_stride)
        align = settings["ALIGN"]
        with torch.cuda.device_of(x):
            _backward_kernel[(programs,)](
                *(x, weight.contiguous(), bias, None if state is None else state.contiguous(), documents, offsets),
                *(dy, None if dlast is None else dlast.contiguous(), dx, dtaps, dshift, dstate),
                *(tokens, tiles, max(1, per_row), share, channels // align),
                *(stride // align, pitch, dy_stride // align, dy_pitch),
                **settings,
            )
    dbias = x.new_empty(0) if bias is None or dshift is None else dshift.sum(0).to(bias.dtype)
    return dx, dtaps.sum(0).to(weight.dtype), dbias, x.new_empty(0) if dstate is None else dstate


# ------------------------------------------------------------------------------------------------- what torch must know
@convolve.register_fake
def _(x, weight, bias, state, documents, offsets, silu):
    return x.new_empty(x.shape), x.new_empty(_sequences(x, offsets), weight.shape[1] - 1, x.shape[2])


@convolve_backward.register_fake
def _(dy, dlast, x, weight, bias, state, documents, offsets, silu):
    def like(tensor):
        return x.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)

    return x.new_empty(x.shape), like(weight), like(bias), like(state)


def _keep(ctx, inputs, output):
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dy, dlast):
    x, weight, bias, state, *packing = ctx.saved_tensors
    if dy is None:
        dy = torch.zeros_like(x)
    dx, dweight, dbias, dstate = convolve_backward(dy, dlast, x, weight, bias, state, *packing, ctx.silu)
    return dx, dweight, None if bias is None else dbias, None if state is None else dstate, None, None, None


convolve.register_autograd(_differentiate, setup_context=_keep)


@register_flop_formula(torch.ops.zoo_kernels.short_conv)
def _forward_flops(x, weight, *_, out_shape=None, **__) -> int:
    """2 * W * C per token: the taps, as the reference multiplies them."""
    batch, tokens, channels = x
    return 2 * batch * tokens * channels * weight[1]


@register_flop_formula(torch.ops.zoo_kernels.short_conv_backward)
def _backward_flops(dy, dlast, x, weight, bias, state, documents, offsets, silu, *_, out_shape=None, **__) -> int:
    """The taps once for x and once for the weight; once more where SiLU makes the forward be computed anew."""
    return (3 if silu else 2) * _forward_flops(x, weight)


# -------------------------------------------------------------------------------------------------------- compile gate
def compile_rows() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any], int, int]]:
    """Every kind of kernel that is launched, in bf16: (name, function, signature, constants, warps, stages)."""
    halves = ("x", "weight", "bias", "state", "y", "last", "dy", "dlast", "dx", "dstate")
    pointers = dict.fromkeys(halves, "*bf16")
    pointers |= {"dtaps": "*fp32", "dshift": "*fp32", "documents": "*i64", "offsets": "*i32"}
    plain = {"bias": None, "state": None, "documents": None, "offsets": None, "dlast": None, "dstate": None}
    packed = dict.fromkeys(("bias", "state", "dlast", "dstate"))
    cases = [("plain", 4, plain), ("packed", 4, packed), ("everything", 4, {}), ("everything wide", 8, {})]
    cases += [(f"width {width}", width, plain) for width in (1, 2, 3, 5, 6, 7, 8)]
    for kernel, function in (("short_conv_forward", _forward_kernel), ("short_conv_backward", _backward_kernel)):
        for case, width, absent in cases:
            for channels in ("few", "many"):
                launch = launches.pick(kernel, "sm_90", channels=channels, width="over 4" if width > 4 else "up to 4")
                constants = {**absent, **_settings(width, True, launch)}
                warps = constants.pop("num_warps")
                constants = {name: value for name, value in constants.items() if name in function.arg_names}
                signature = {
                    name: "constexpr" if name in constants else pointers.get(name, "i32") for name in function.arg_names
                }
                yield f"{kernel}, {case}, {channels} channels", function, signature, constants, warps, 1
