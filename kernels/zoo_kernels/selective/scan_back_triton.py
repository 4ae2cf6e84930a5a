"""The scan's gradients in Triton: a program walks up its tokens, segment by segment, from the states that were kept.

Inside a segment the states are computed anew twice: once downwards, leaving one per block of tokens in memory of the
program's own, and once more block by block, into registers, where the gradient passes on its way up.
"""

# Triton's own language has no starred tuples, and compiles what stands under a run-time condition:
# ruff: noqa: RUF005, SIM102
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo_kernels import launch as launches
from zoo_kernels.launch import CompileRow, Launch, Row, recorded
from zoo_kernels.selective.call import SEGMENT
from zoo_kernels.selective.scan_triton import (
    ENDS,
    JOIN,
    MIDDLE,
    SMALL,
    as_launched,
    ends_kernel,
    examples,
    held,
    join_kernel,
    place,
    plan,
    put,
    rates,
    rows,
    walk_ends,
)

BACKWARD = "selective_backward"
# Launch.tile: channels per program. Launch.stages: tokens whose states are in registers at once. As the forward's, not
# measured: the most that spills nothing.
launches.provide(
    BACKWARD,
    Row(Launch(tile=32, warps=2, stages=2), when={"K": SMALL}),
    Row(Launch(tile=32, warps=8, stages=2), when={"K": MIDDLE}),
    Row(Launch(tile=8, warps=8, stages=2)),
)


# ------------------------------------------------------------------------------------------------------------- kernels
@triton.jit
def _owner(documents, token, T, sequence):
    """The document of a token; ``sequence`` past the end, and where nothing is packed."""
    if documents is not None:
        sequence = tl.load(documents + token, mask=token < T, other=sequence)
    return sequence


@triton.jit
def _behind(state, rate, value, step, write):
    """The state behind a token, from the one before it."""
    return tl.exp2(rate * step[None, :]) * state + write[:, None] * (value * step)[None, :]


@triton.jit(do_not_specialize=["batch", "T", "E", "K", "walks", "share", "lanes"])
def _backward_kernel(
    dy, dlast, x, dt, A, B, C, D, before, kept, documents, ends, scratch, dx, ddt, dA, dB, dC, dD, dbefore,
    batch, T, E, K, walks, share, lanes,
    SEGMENT: tl.constexpr, UNROLL: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx, ddt of one walk; its share of dA, dD, and its channels' share of dB, dC; dbefore of documents that begin."""
    row, walk, block, e, first = place(E, walks, share, BLOCK)
    stop, k, lane = tl.minimum(first + share, T), tl.arange(0, STATES), tl.arange(0, BLOCK)
    rate, skip = rates(A, row, k, e, K, E), tl.zeros([BLOCK], tl.float32)
    if D is not None:
        skip = tl.load(D + e, mask=e < E, other=0.0).to(tl.float32)
    # On the way up, `later` owns the token just passed, and `gradient` is that of the state before it.
    later = _owner(documents, tl.minimum(stop, T - 1), T, row)
    gradient = held(dlast, later, k, e, K, E)
    if ends is not None:
        if stop < T:
            gradient = held(ends, row * walks + walk + 1, k, e, K, E)
    rate_sum, skip_sum = tl.zeros([STATES, BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    slot = tl.program_id(0).to(tl.int64) * (SEGMENT // UNROLL)
    origin, own = row * T, (block * batch + row) * T
    for upwards in range(tl.cdiv(stop - first, SEGMENT)):
        segment = tl.cdiv(stop, SEGMENT) - 1 - upwards
        start = segment * SEGMENT
        count = tl.cdiv(tl.minimum(T - start, SEGMENT), UNROLL)
        state = held(kept, row * tl.cdiv(T, SEGMENT) + segment, k, e, K, E)
        sequence = _owner(documents, tl.maximum(start - 1, 0), T, row)
        for i in range(count):
            base = start + i * UNROLL
            put(scratch, slot + i, state, k, lane, K, lanes)
            values, steps = rows(x, origin, base, T, E, e, UNROLL), rows(dt, origin, base, T, E, e, UNROLL)
            writes = rows(B, origin, base, T, K, k, UNROLL)
            for u in tl.static_range(UNROLL):
                if documents is not None:
                    now = _owner(documents, base + u, T, sequence)
                    if now != sequence:
                        state = held(before, now, k, e, K, E)
                    sequence = now
                state = _behind(state, rate, values[u], steps[u], writes[u])
        # What one thread stored, another may load: the layouts of the two are the compiler's choice.
        tl.debug_barrier()
        for i in range(count):
            base = start + (count - 1 - i) * UNROLL
            state = held(scratch, slot + count - 1 - i, k, lane, K, lanes)
            sequence = _owner(documents, tl.maximum(base - 1, 0), T, row)
            values, steps = rows(x, origin, base, T, E, e, UNROLL), rows(dt, origin, base, T, E, e, UNROLL)
            writes, reads = rows(B, origin, base, T, K, k, UNROLL), rows(C, origin, base, T, K, k, UNROLL)
            upstream, stood = rows(dy, origin, base, T, E, e, UNROLL), ()
            for u in tl.static_range(UNROLL):
                if documents is not None:
                    now = _owner(documents, base + u, T, sequence)
                    if now != sequence:
                        state = held(before, now, k, e, K, E)
                    sequence = now
                stood = stood + (state,)
                if u < UNROLL - 1:
                    state = _behind(state, rate, values[u], steps[u], writes[u])
            for u in tl.static_range(UNROLL - 1, -1, -1):
                if documents is not None:
                    now = _owner(documents, base + u, T, later)
                    if now != later:
                        put(dbefore, later, gradient, k, e, K, E)
                        gradient = held(dlast, now, k, e, K, E)
                    later = now
                written, decay = values[u] * steps[u], tl.exp2(rate * steps[u][None, :])
                behind = reads[u][:, None] * upstream[u][None, :] + gradient
                gradient = decay * behind
                # The gradient of dt * A: the state before the token, times the gradient that comes to it.
                exponents = stood[u] * gradient
                became = decay * stood[u] + writes[u][:, None] * written[None, :]
                read_sum, write_sum = tl.sum(became * upstream[u][None, :], 1), tl.sum(behind * written[None, :], 1)
                received = tl.sum(behind * writes[u][:, None], 0)
                step_sum = values[u] * received + 0.6931471805599453 * tl.sum(exponents * rate, 0)
                rate_sum += exponents * steps[u][None, :]
                skip_sum += upstream[u] * values[u]
                mask, at = (e < E) & (base + u < T), (origin + base + u) * E + e
                tl.store(dx + at, (steps[u] * received + skip * upstream[u]).to(dx.dtype.element_ty), mask=mask)
                tl.store(ddt + at, step_sum.to(ddt.dtype.element_ty), mask=mask)
                mask, at = (k < K) & (base + u < T), (own + base + u) * K + k
                tl.store(dB + at, write_sum, mask=mask)
                tl.store(dC + at, read_sum, mask=mask)
        tl.debug_barrier()
    if first == 0:
        put(dbefore, later, gradient, k, e, K, E)
    put(dA, row * walks + walk, rate_sum, k, e, K, E)
    if dD is not None:
        tl.store(dD + (row * walks + walk) * E + e, skip_sum, mask=e < E)


# ------------------------------------------------------------------------------------------------------------ launches
def backward(
    dy: Tensor,
    dlast: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor | None,
    kept: Tensor,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of the scan for x, dt, A, B, C, D and the state: None for those of an absent D or state.

    Programs write their shares of sums side by side, to be added afterwards in an order that never changes.
    """
    (batch, tokens, channels), K = x.shape, A.shape[1]
    dx, ddt = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, dt))
    dstate = None
    if state is not None:  # an empty document hands its gradient through; the others write theirs over it
        dstate = torch.zeros_like(state) if dlast is None else dlast.contiguous().clone()
    if not x.numel():
        nothing = None if D is None else torch.zeros_like(D)
        return dx, ddt, torch.zeros_like(A), torch.zeros_like(B), torch.zeros_like(C), nothing, dstate
    dy, x, dt, A, B, C = (tensor.contiguous() for tensor in (dy, x, dt, A.t(), B, C))
    dlast, state, D = (None if tensor is None else tensor.contiguous() for tensor in (dlast, state, D))
    cut = plan(BACKWARD, x, A)
    settings = {"SEGMENT": SEGMENT, **cut.settings, "num_warps": cut.launch.warps}
    blocks = triton.cdiv(channels, cut.launch.tile)
    programs = blocks * cut.walks * batch
    dA = x.new_empty(batch * cut.walks, K, channels, dtype=torch.float32)
    dD = None if D is None else x.new_empty(batch * cut.walks, channels, dtype=torch.float32)
    dB, dC = (x.new_empty(blocks, batch, tokens, K, dtype=torch.float32) for _ in range(2))
    slots = programs * (SEGMENT // cut.launch.stages)
    scratch = x.new_empty(slots, K, cut.launch.tile, dtype=torch.float32)
    with torch.cuda.device_of(x):
        ends = walk_ends(cut, dy, dt, A, C, dlast, documents, reverse=True)
        _backward_kernel[(programs,)](
            dy, dlast, x, dt, A, B, C, D, state, kept, documents, ends, scratch, dx, ddt, dA, dB, dC, dD, dstate,
            batch, tokens, channels, K, cut.walks, cut.share, cut.launch.tile, **settings,
        )  # fmt: skip
    found = dA.sum(0).t().contiguous().to(A.dtype), dB.sum(0).to(B.dtype), dC.sum(0).to(C.dtype)
    return dx, ddt, *found, None if D is None or dD is None else dD.sum(0).to(D.dtype), dstate


# -------------------------------------------------------------------------------------------------------- compile gate
def compile_rows() -> Iterator[CompileRow]:
    """The backward of every kind of call, in bf16, for the offline compile gate."""
    for case, x in examples():
        kept = x["x"].new_empty(1, triton.cdiv(x["x"].shape[1], SEGMENT), *x["A"].T.shape, dtype=torch.float32)
        names = {BACKWARD: _backward_kernel, ENDS: ends_kernel, JOIN: join_kernel}
        with recorded(f"{case}, mirrored", **names) as found:
            backward(dy=x["x"], dlast=x["state"], kept=kept, **x)
        yield from as_launched(found)
