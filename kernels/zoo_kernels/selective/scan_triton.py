"""The scan in Triton: one program walks down some tokens of some channels, their state [K, channels] in registers.

Where rows and channels alone would leave processors idle, the tokens of a row are split into walks. A first launch ends
each walk from an empty state, a second joins the ends in order, and a third starts every walk from where it really is.
The same two launches, mirrored, carry the gradient of the state from the last walk to the first.
"""

# Triton's own language has no starred tuples, and compiles what stands under a run-time condition:
# ruff: noqa: RUF005, SIM102
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo_kernels import device
from zoo_kernels import launch as launches
from zoo_kernels.launch import CompileRow, Launch, Row, recorded
from zoo_kernels.selective.call import SEGMENT

# Launch.tile: channels per program; with one warp, a thread has one of them and the sum over K to itself.
# Launch.stages: tokens whose loads are issued before the first of them is used; it divides SEGMENT.
# Not measured: of those tried, the largest tile and fewest warps that spill nothing for sm_90 (Triton 3.7.1).
ENDS, JOIN, FORWARD = "selective_ends", "selective_join", "selective_forward"
SMALL, MIDDLE = (1, 2, 4, 8, 16), (32, 64)
launches.provide(
    ENDS,
    Row(Launch(tile=32, warps=1, stages=2), when={"K": SMALL}),
    Row(Launch(tile=32, warps=8, stages=2)),
)
launches.provide(
    JOIN,
    Row(Launch(tile=32, warps=1), when={"K": SMALL}),
    Row(Launch(tile=32, warps=8), when={"K": MIDDLE}),
    Row(Launch(tile=16, warps=8)),
)
launches.provide(
    FORWARD,
    Row(Launch(tile=32, warps=1, stages=2), when={"K": SMALL}),
    Row(Launch(tile=32, warps=8, stages=2), when={"K": MIDDLE}),
    Row(Launch(tile=16, warps=8, stages=2)),
)
# Warps that a multiprocessor is given before walks grow longer. Splitting costs another pass over the tokens, so it is
# done only where it at least doubles the programs. Not measured.
WARPS_PER_PROCESSOR = 8


# ------------------------------------------------------------------------------------------------------------- kernels
@triton.jit
def held(states, index, k, e, K, E):
    """One state of [.., K, E] in fp32, or zeros where there are none; ``index`` has 64 bits. [STATES, BLOCK]

    K and E must be numbers of which the compiler knows nothing: could it read several channels at a time, it would give
    them to one thread, and the states to another layout than the sums over K, at a conversion per token.
    """
    value = tl.zeros([k.shape[0], e.shape[0]], tl.float32)
    if states is not None:
        at = states + (index * K + k[:, None]) * E + e[None, :]
        value = tl.load(at, mask=(k < K)[:, None] & (e < E)[None, :], other=0.0).to(tl.float32)
    return value


@triton.jit
def put(states, index, value, k, e, K, E):
    """Write one state of [.., K, E], if there is room for any."""
    if states is not None:
        at = states + (index * K + k[:, None]) * E + e[None, :]
        tl.store(at, value, mask=(k < K)[:, None] & (e < E)[None, :])


@triton.jit
def rates(A, row, k, e, K, E):
    """A [K, E] as [STATES, BLOCK], in powers of two; 0 where there is nothing, so that nothing fades."""
    return held(A, 0 * row, k, e, K, E) * 1.4426950408889634


@triton.jit
def rows(pointer, origin, first, T, width, c, COUNT: tl.constexpr):
    """COUNT tokens of [B, T, width] from ``first`` on in the row that begins at token ``origin``; zeros from T on.

    All loads are in flight before the first is used. ``origin`` has 64 bits, and so have all places.
    """
    loaded = ()
    for u in tl.static_range(COUNT):
        at = pointer + (origin + first + u) * width + c
        loaded = loaded + (tl.load(at, mask=(c < width) & (first + u < T), other=0.0).to(tl.float32),)
    return loaded


@triton.jit
def place(E, walks, share, BLOCK: tl.constexpr):
    """Of a grid over blocks of channels, walks and rows: row, walk, block, channels, and the walk's first token."""
    blocks = tl.cdiv(E, BLOCK)
    block, index = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    walk, row = index % walks, (index // walks).to(tl.int64)
    return row, walk, block, block * BLOCK + tl.arange(0, BLOCK), walk * share


@triton.jit(do_not_specialize=["T", "E", "K", "walks", "share"])
def ends_kernel(
    value, dt, A, weight, boundary, documents, ends, totals, T, E, K, walks, share,
    REVERSE: tl.constexpr, UNROLL: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What each walk makes of an empty state (or of its own document's), and the sum of its steps.

    Forward: value x, weight B, boundary the first states. Mirrored: dy, C and the gradients of the last states; a token
    then adds first and fades after, and the end stands before the walk's first token.
    """
    # The last walk in order ends where nobody goes on.
    row, walk, _, e, _ = place(E, walks - 1, share, BLOCK)
    walk += REVERSE
    first = walk * share
    stop, k = tl.minimum(first + share, T), tl.arange(0, STATES)
    rate, total = rates(A, row, k, e, K, E), tl.zeros([BLOCK], tl.float32)
    state, sequence = tl.zeros([STATES, BLOCK], tl.float32), row
    if documents is not None:
        if REVERSE:
            sequence = tl.load(documents + tl.minimum(stop, T - 1))
        else:
            sequence = tl.load(documents + tl.maximum(first - 1, 0))
    if REVERSE:
        if stop == T:
            state = held(boundary, sequence, k, e, K, E)
    else:
        if first == 0:
            state = held(boundary, sequence, k, e, K, E)
    FROM: tl.constexpr = UNROLL - 1 if REVERSE else 0
    TO: tl.constexpr = -1 if REVERSE else UNROLL
    STEP: tl.constexpr = -1 if REVERSE else 1
    blocks = tl.cdiv(stop - first, UNROLL)
    for i in range(blocks):
        base = first + i * UNROLL
        if REVERSE:
            base = first + (blocks - 1 - i) * UNROLL
        values, steps = rows(value, row * T, base, T, E, e, UNROLL), rows(dt, row * T, base, T, E, e, UNROLL)
        weights = rows(weight, row * T, base, T, K, k, UNROLL)
        for u in tl.static_range(FROM, TO, STEP):
            if documents is not None:
                now = tl.load(documents + base + u, mask=base + u < T, other=sequence)
                if now != sequence:
                    state = held(boundary, now, k, e, K, E)
                sequence = now
            decay = tl.exp2(rate * steps[u][None, :])
            if REVERSE:
                state = decay * (state + weights[u][:, None] * values[u][None, :])
            else:
                state = decay * state + weights[u][:, None] * (values[u] * steps[u])[None, :]
            total += steps[u]
    put(ends, row * walks + walk, state, k, e, K, E)
    tl.store(totals + (row * walks + walk) * E + e, total, mask=e < E)


@triton.jit(do_not_specialize=["T", "E", "K", "walks", "share"])
def join_kernel(
    A, documents, ends, totals, T, E, K, walks, share,
    REVERSE: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turn the ends of walks that began with nothing into those of walks that go on, one after another, in place."""
    row, _, _, e, _ = place(E, 1, share, BLOCK)
    k = tl.arange(0, STATES)
    rate, slot = rates(A, row, k, e, K, E), row * walks
    if REVERSE:
        slot += walks - 1
    state = held(ends, slot, k, e, K, E)
    for i in range(1, walks - 1):
        walk = i
        if REVERSE:
            walk = walks - 1 - i
        total = tl.load(totals + (row * walks + walk) * E + e, mask=e < E, other=0.0)
        passed = tl.exp2(rate * total[None, :]) * state
        if documents is not None:
            # What comes in reaches the end if it belongs to the document that goes out.
            one, other = walk * share - 1, walk * share + share - 1
            if REVERSE:
                one, other = one + 1, other + 1
            same = tl.load(documents + one) == tl.load(documents + other)
            passed = tl.where(same, passed, 0.0)
        state = passed + held(ends, row * walks + walk, k, e, K, E)
        put(ends, row * walks + walk, state, k, e, K, E)


@triton.jit(do_not_specialize=["T", "E", "K", "walks", "share"])
def _forward_kernel(
    x, dt, A, B, C, D, before, documents, ends, y, kept, last, T, E, K, walks, share,
    SEGMENT: tl.constexpr, UNROLL: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y of one walk, the states before its segments, and the last states of documents behind which it goes on."""
    row, walk, _, e, first = place(E, walks, share, BLOCK)
    stop, k = tl.minimum(first + share, T), tl.arange(0, STATES)
    rate, skip, sequence = rates(A, row, k, e, K, E), tl.zeros([BLOCK], tl.float32), row
    if D is not None:
        skip = tl.load(D + e, mask=e < E, other=0.0).to(tl.float32)
    if documents is not None:
        sequence = tl.load(documents + tl.maximum(first - 1, 0))
    state = held(before, sequence, k, e, K, E)
    if ends is not None:
        if walk > 0:
            state = held(ends, row * walks + walk - 1, k, e, K, E)
    for base in range(first, stop, UNROLL):
        if kept is not None:
            if base % SEGMENT == 0:
                put(kept, row * tl.cdiv(T, SEGMENT) + base // SEGMENT, state, k, e, K, E)
        values, steps = rows(x, row * T, base, T, E, e, UNROLL), rows(dt, row * T, base, T, E, e, UNROLL)
        writes, reads = rows(B, row * T, base, T, K, k, UNROLL), rows(C, row * T, base, T, K, k, UNROLL)
        for u in tl.static_range(UNROLL):
            if documents is not None:
                now = tl.load(documents + base + u, mask=base + u < T, other=sequence)
                if now != sequence:
                    put(last, sequence, state, k, e, K, E)
                    state = held(before, now, k, e, K, E)
                sequence = now
            state = tl.exp2(rate * steps[u][None, :]) * state + writes[u][:, None] * (values[u] * steps[u])[None, :]
            out = tl.sum(reads[u][:, None] * state, axis=0) + skip * values[u]
            at = y + (row * T + base + u) * E + e
            tl.store(at, out.to(y.dtype.element_ty), mask=(e < E) & (base + u < T))
    if stop == T:
        put(last, sequence, state, k, e, K, E)


# ------------------------------------------------------------------------------------------------------------ launches
@dataclass(frozen=True)
class Plan:
    """How a scan is cut: ``walks`` of ``share`` tokens per row, and the launch of the kernel that it was cut for."""

    launch: Launch
    states: int
    walks: int
    share: int

    @property
    def settings(self) -> dict[str, Any]:
        """The constants of that kernel."""
        return {"UNROLL": self.launch.stages, "STATES": self.states, "BLOCK": self.launch.tile}


def picked(kernel: str, A: Tensor) -> tuple[Launch, int]:
    """The launch of a kernel for A [K, E], and K filled up to a power of two."""
    states = int(triton.next_power_of_2(A.shape[0]))
    return launches.pick(kernel, device.architecture(A.device), K=states), states


def plan(kernel: str, x: Tensor, A: Tensor) -> Plan:
    """Whole rows where they make enough programs; else walks of whole segments. A is [K, E] here and below."""
    batch, tokens, channels = x.shape
    launch, states = picked(kernel, A)
    programs = max(1, batch * triton.cdiv(channels, launch.tile))
    wanted = device.processors(x.device) * WARPS_PER_PROCESSOR // launch.warps
    segments = max(1, triton.cdiv(tokens, SEGMENT))
    # At least two segments a walk: the ends of walks are kept and joined, like the states before segments.
    share = triton.cdiv(segments, max(1, wanted // programs))
    share = segments if wanted < 2 * programs else min(segments, max(2, share))
    return Plan(launch, states, triton.cdiv(segments, share), share * SEGMENT)


def walk_ends(
    cut: Plan,
    value: Tensor,
    dt: Tensor,
    A: Tensor,
    weight: Tensor,
    boundary: Tensor | None,
    documents: Tensor | None,
    *,
    reverse: bool,
) -> Tensor | None:
    """The state behind each walk (its gradient before each walk, mirrored) [B, walks, K, E]; None for a single walk.

    The last in order is left unwritten: nobody goes on from it.
    """
    if cut.walks == 1:
        return None
    (batch, tokens, channels), K = value.shape, A.shape[0]
    ends = value.new_empty(batch, cut.walks, K, channels, dtype=torch.float32)
    totals = value.new_empty(batch, cut.walks, channels, dtype=torch.float32)
    sizes = (tokens, channels, K, cut.walks, cut.share)
    launch, states = picked(ENDS, A)
    settings = {**Plan(launch, states, cut.walks, cut.share).settings, "num_warps": launch.warps}
    ends_kernel[(triton.cdiv(channels, launch.tile) * (cut.walks - 1) * batch,)](
        value, dt, A, weight, boundary, documents, ends, totals, *sizes, REVERSE=reverse, **settings
    )
    if cut.walks > 2:
        launch, states = picked(JOIN, A)
        settings = {"STATES": states, "BLOCK": launch.tile, "num_warps": launch.warps}
        programs = triton.cdiv(channels, launch.tile) * batch
        join_kernel[(programs,)](A, documents, ends, totals, *sizes, REVERSE=reverse, **settings)
    return ends


def forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor | None,
    documents: Tensor | None,
    last: Tensor,
    kept: Tensor | None,
) -> Tensor:
    """y [B, T, E]; the last state of every document that has tokens goes into ``last``, which may be ``state`` itself.

    Args:
        documents: int64 [T], or None.
        last: fp32 [N, K, E], contiguous.
        kept: fp32 [B, S, K, E] for the state before each segment, or None.
    """
    (batch, tokens, channels), K = x.shape, A.shape[1]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not y.numel():
        return y
    x, dt, A, B, C = (tensor.contiguous() for tensor in (x, dt, A.t(), B, C))
    D, state = (None if tensor is None else tensor.contiguous() for tensor in (D, state))
    cut = plan(FORWARD, x, A)
    settings = {"SEGMENT": SEGMENT, **cut.settings, "num_warps": cut.launch.warps}
    with torch.cuda.device_of(x):
        ends = walk_ends(cut, x, dt, A, B, state, documents, reverse=False)
        _forward_kernel[(triton.cdiv(channels, cut.launch.tile) * cut.walks * batch,)](
            x, dt, A, B, C, D, state, documents, ends, y, kept, last,
            tokens, channels, K, cut.walks, cut.share, **settings,
        )  # fmt: skip
    return y


# -------------------------------------------------------------------------------------------------------- compile gate
def examples() -> Iterator[tuple[str, dict[str, Any]]]:
    """A name and meta tensors by name for each kind of call: one walk, many walks packed, and larger states."""
    for case, tokens, K, packed in (
        ("one walk", SEGMENT, 16, False),
        ("walks", 64 * SEGMENT, 16, True),
        ("K 5", 64 * SEGMENT, 5, True),
        ("K 64", 64 * SEGMENT, 64, True),
        ("K 256", 64 * SEGMENT, 256, True),
    ):
        half = {"dtype": torch.bfloat16, "device": "meta"}
        exact = {"dtype": torch.float32, "device": "meta"}
        state = torch.empty(1, K, 64, **exact) if packed else None
        tensors = {"x": torch.empty(1, tokens, 64, **half), "dt": torch.empty(1, tokens, 64, **exact)}
        tensors |= {"A": torch.empty(64, K, **exact), "D": torch.empty(64, **exact), "state": state}
        tensors |= {name: torch.empty(1, tokens, K, **half) for name in ("B", "C")}
        tensors["documents"] = torch.empty(tokens, dtype=torch.int32, device="meta") if packed else None
        yield case, tensors


def as_launched(found: list[CompileRow]) -> Iterator[CompileRow]:
    """The recorded rows, with documents of 64 bits, which they have no name for."""
    for name, kernel, signature, constants, warps, stages in found:
        if "documents" in signature:
            signature = {**signature, "documents": "*i64"}
        yield name, kernel, signature, constants, warps, stages


def compile_rows() -> Iterator[CompileRow]:
    """Every kind of kernel that the forward launches, in bf16, for the offline compile gate."""
    kernels = {FORWARD: _forward_kernel, ENDS: ends_kernel, JOIN: join_kernel}
    for case, x in examples():
        kept = x["x"].new_empty(1, triton.cdiv(x["x"].shape[1], SEGMENT), *x["A"].T.shape, dtype=torch.float32)
        with recorded(case, **kernels) as found:
            forward(**x, last=kept[:, 0], kept=kept)
        yield from as_launched(found)
