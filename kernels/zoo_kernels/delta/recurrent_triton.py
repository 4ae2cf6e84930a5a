"""The delta rule token by token in one launch: a state stays in registers while its tokens pass; no matrix products.

A program owns some columns of one head's state, which never meet the others: the recurrence runs through each column of
[K, V] for itself. What is read and written once is the state; per token it is one key, one query and a few values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo_kernels import launch
from zoo_kernels.device import architecture
from zoo_kernels.launch import Launch, Row

STEP, LOOP = "delta_step", "delta_recurrent"

# `tile` counts columns of the state. A step waits for memory: it reads whole lines, and each thread has 32 numbers in
# flight. A loop waits for its own last token: it is one warp, so that no token ends at a barrier.
launch.provide(
    STEP,
    Row(Launch(tile=32, warps=8), when={"K": 256}),
    Row(Launch(tile=32, warps=4), when={"K": 128}),
    Row(Launch(tile=32, warps=2), when={"K": 64}),
    Row(Launch(tile=32, warps=1)),
)
launch.provide(LOOP, Row(Launch(tile=8, warps=1, stages=3)))


@triton.jit(do_not_specialize=["T", "H", "HV"])
def recurrent_kernel(
    q,
    k,
    v,
    log_decay,
    beta,
    before,
    after,
    y,
    slots,
    offsets,
    scale,
    T,
    H,
    HV,
    q_step,
    k_step,
    v_step,
    log_decay_step,
    beta_step,
    DECAY: tl.constexpr,
    ERASES: tl.constexpr,
    STARTS: tl.constexpr,
    SLOTS: tl.constexpr,
    PACKED: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per (sequence, value head, BV columns): y of all its tokens, and the state after the last one.

    ``before`` and ``after`` may be one tensor: a program reads its own columns before it writes them. A ``*_step`` is
    the distance from one token to the next. With SLOTS, sequence n has row slots[n] of the states; none if negative.
    """
    columns: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    sequence, head, column = (program // columns // HV).to(tl.int64), program // columns % HV, program % columns
    key_head = head // (HV // H)
    i, j = tl.arange(0, BK), column * BV + tl.arange(0, BV)
    in_key, in_value = i < K, j < V

    row, first, length = sequence, sequence * T, T
    if PACKED:
        first = tl.load(offsets + sequence).to(tl.int64)
        length = (tl.load(offsets + sequence + 1) - first).to(tl.int32)
    if SLOTS:
        row = tl.load(slots + sequence).to(tl.int64)
    used = row >= 0

    at = (row * HV + head) * (K * V) + i[:, None] * V + j[None, :]
    here = in_key[:, None] & in_value[None, :] & used
    state = tl.load(before + at, mask=here, other=0.0).to(tl.float32) if STARTS else tl.zeros([BK, BV], tl.float32)
    for t in tl.range(0, length, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        token = first + t
        key = tl.load(k + token * k_step + key_head * K + i, mask=in_key, other=0.0).to(tl.float32)
        query = tl.load(q + token * q_step + key_head * K + i, mask=in_key, other=0.0).to(tl.float32)
        value = tl.load(v + token * v_step + head * V + j, mask=in_value, other=0.0).to(tl.float32)
        if DECAY == "head":
            state *= tl.exp(tl.load(log_decay + token * log_decay_step + head).to(tl.float32))
        elif DECAY == "channel":
            channels = tl.load(log_decay + token * log_decay_step + head * K + i, mask=in_key, other=0.0)
            state *= tl.exp(channels.to(tl.float32))[:, None]
        if ERASES:
            share = tl.load(beta + token * beta_step + head).to(tl.float32)
            value = share * (value - tl.sum(key[:, None] * state, 0))
        state += key[:, None] * value[None, :]
        read = scale * tl.sum(query[:, None] * state, 0)
        # A sequence without a row has no memory: its y is zero, whatever its tokens hold.
        read = tl.where(used, read, 0.0)
        tl.store(y + (token * HV + head) * V + j, read.to(y.dtype.element_ty), mask=in_value)

    tl.store(after + at, state.to(after.dtype.element_ty), mask=here)


def recurrent(
    table: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    before: Tensor | None,
    after: Tensor,
    *,
    scale: float,
    slots: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Launch :func:`recurrent_kernel` on checked tensors.

    Args:
        table: ``STEP`` or ``LOOP``, whose launch to take; it depends on sizes of the model only, so that no length and
            no batch compiles anew.
        q, k: [B, T, H, K]. v: [B, T, HV, V]. fp32, bf16 or fp16; tokens may lie apart, heads may not.
        log_decay: [B, T, HV], [B, T, HV, K] or [HV], any of these dtypes. beta: [B, T, HV].
        before: [N or slots, HV, K, V], contiguous. None: zeros.
        after: the same, written; it may be ``before`` itself.
        slots: integers [N], the rows of the states; negative: none. None: row n.
        cu_seqlens: int32 [N + 1] where documents are packed into B = 1 row. None: N = B.

    Returns:
        y [B, T, HV, V] in v's dtype.
    """
    (B, T, H, K), (HV, V) = k.shape, v.shape[2:]
    y = torch.empty_like(v, memory_format=torch.contiguous_format)
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if sequences == 0:
        return y
    chosen, BK, BV = _tiles(table, architecture(v.device), K, V)
    (q, q_step), (k, k_step), (v, v_step) = map(_rows, (q, k, v))
    if log_decay is not None and log_decay.dim() == 1:
        # A constant is the decay of every token, which lies no step apart.
        log_decay, log_decay_step = log_decay.contiguous(), 0
    else:
        log_decay, log_decay_step = _rows(log_decay)
    beta, beta_step = _rows(beta)
    with torch.cuda.device_of(v):
        run: Any = recurrent_kernel[(sequences * HV * triton.cdiv(V, BV),)]
        run(
            q,
            k,
            v,
            log_decay,
            beta,
            before,
            after,
            y,
            slots,
            cu_seqlens,
            scale,
            T,
            H,
            HV,
            q_step,
            k_step,
            v_step,
            log_decay_step,
            beta_step,
            DECAY=_kind(log_decay),
            ERASES=beta is not None,
            STARTS=before is not None,
            SLOTS=slots is not None,
            PACKED=cu_seqlens is not None,
            K=K,
            V=V,
            BK=BK,
            BV=BV,
            STAGES=chosen.stages,
            num_warps=chosen.warps,
        )
    return y


def _tiles(table: str, arch: str, K: int, V: int) -> tuple[Launch, int, int]:
    """The launch, K padded to a power of two, and as much of V, padded too, as one program takes."""
    BK = max(16, 1 << (K - 1).bit_length())
    return _sized(launch.pick(table, arch, K=BK), BK, V)


@cache
def _sized(chosen: Launch, BK: int, V: int) -> tuple[Launch, int, int]:
    BV = min(chosen.tile, max(8, 1 << (V - 1).bit_length()))
    # Fewer than 8 numbers a thread, and two warps may hold one: the slower would read what the faster has written.
    return replace(chosen, warps=min(chosen.warps, max(1, BK * BV // 256))), BK, BV


def _rows(x: Tensor | None) -> tuple[Any, int]:
    """``x`` [B, T, ...] and the distance between tokens; copied where one distance does not reach all of them."""
    if x is None or not x.numel():
        return x, 0
    (B, T, *inner), (row, token, *steps) = x.shape, x.stride()
    size, dense = 1, B == 1 or T == 1 or row == T * token
    for count, step in zip(reversed(inner), reversed(steps)):
        dense = dense and (count == 1 or step == size)
        size *= count
    if not dense:
        x, row, token = x.contiguous(), T * size, size
    # Where B or T is 1, its stride means nothing.
    return x, token if T > 1 else row if B > 1 else size


def _kind(log_decay: Tensor | None) -> str:
    return "none" if log_decay is None else "channel" if log_decay.dim() == 4 else "head"


def compile_rows() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any], int, int]]:
    """Every shipped launch in bf16, for the offline compile gate: the largest member at every K, all members at one.

    Yields:
        name, kernel, signature, constants, warps, stages.
    """
    for K, V in ((16, 16), (32, 32), (64, 64), (100, 100), (128, 128), (256, 512)):
        yield _compile_row(STEP, K, V, "channel", erases=True)
        yield _compile_row(LOOP, K, V, "channel", erases=True)
    for decay in ("none", "head", "channel"):
        for erases in (False, True):
            yield _compile_row(STEP, 128, 128, decay, erases=erases, slots=True)
    yield _compile_row(LOOP, 128, 128, "head", erases=True, packed=True, starts=False)


def _compile_row(
    table: str,
    K: int,
    V: int,
    decay: str,
    *,
    erases: bool,
    slots: bool = False,
    packed: bool = False,
    starts: bool = True,
) -> tuple[str, Any, dict[str, str], dict[str, Any], int, int]:
    chosen, BK, BV = _tiles(table, "sm_90", K, V)
    absent = {"log_decay": decay == "none", "beta": not erases, "before": not starts, "slots": not slots}
    constants: dict[str, Any] = {name: None for name, is_absent in absent.items() if is_absent}
    constants |= {} if packed else {"offsets": None}
    constants |= {"DECAY": decay, "ERASES": erases, "STARTS": starts, "SLOTS": slots, "PACKED": packed}
    constants |= {"K": K, "V": V, "BK": BK, "BV": BV, "STAGES": chosen.stages}
    types = {"slots": "*i64", "offsets": "*i32", "scale": "fp32", "before": "*fp32", "after": "*fp32"}
    types |= dict.fromkeys(("log_decay", "beta"), "*fp32") | dict.fromkeys(("q", "k", "v", "y"), "*bf16")
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in recurrent_kernel.arg_names
    }
    name = f"{table} K{K} V{V} {decay} beta={erases} slots={slots} packed={packed} tile={constants['BV']}"
    return name, recurrent_kernel, signature, constants, chosen.warps, chosen.stages
