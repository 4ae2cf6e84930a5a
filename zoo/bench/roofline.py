"""The least that an op must move and compute, and the ceilings of this machine that it is held against."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zoo.bench.timing import release, time_call


@dataclass(frozen=True)
class Work:
    """Bytes moved to and from memory, and floating-point operations of matrix products (2 for each multiply-add)."""

    bytes: int
    flops: int

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)


@dataclass(frozen=True)
class Ceilings:
    """What this machine reaches at most, measured.

    Attributes:
        bytes_per_second: read and written, of a large copy.
        flops_per_second: of a large matrix product in ``dtype``.
        dtype: of the product, as text.
        note: sizes of both.
    """

    bytes_per_second: float
    flops_per_second: float
    dtype: str
    note: str

    def seconds(self, work: Work) -> float:
        """The least time that ``work`` can take: the slower of moving and computing, the other hidden behind it."""
        return max(work.bytes / self.bytes_per_second, work.flops / self.flops_per_second)


def measure_ceilings(
    device: torch.device, dtype: torch.dtype, *, small: bool = False, repeats: int | None = None
) -> Ceilings:
    """Time a copy of 2 GiB and a product of 8192 x 8192 matrices (``small``: 2 MiB, and 128), of random numbers."""
    elements, size = (1 << 20, 128) if small else (1 << 30, 8192)
    moved, copy = _copy(elements, device, dtype, repeats)
    release(device)
    product = _product(size, device, dtype, repeats)
    release(device)
    kind = str(dtype).removeprefix("torch.")
    return Ceilings(
        bytes_per_second=moved / (copy / 1e3),
        flops_per_second=2 * size**3 / (product / 1e3),
        dtype=kind,
        note=f"copy of {moved // 2 / 2**20:,.0f} MiB, {kind} product of {size} x {size} matrices",
    )


def _copy(elements: int, device: torch.device, dtype: torch.dtype, repeats: int | None) -> tuple[int, float]:
    """Bytes moved, and milliseconds."""
    source = torch.randn(elements, device=device, dtype=dtype)
    target = torch.empty_like(source)
    timing = time_call(lambda: target.copy_(source), device, repeats)
    return 2 * source.numel() * source.element_size(), timing.median_ms


def _product(size: int, device: torch.device, dtype: torch.dtype, repeats: int | None) -> float:
    """Milliseconds."""
    a, b = torch.randn(2, size, size, device=device, dtype=dtype).unbind(0)
    return time_call(lambda: a @ b, device, repeats).median_ms


def delta_work(
    *, heads: int, value_heads: int, tokens: int, K: int, V: int, gate_bytes: int, erases: bool, element: int
) -> tuple[Work, Work]:
    """Forward and backward of the chunkwise delta rule, chunks of 64 tokens.

    Bytes: each input read once and each output and gradient written once; what passes between launches is not
    counted, so that no plan is favoured. FLOPs: the products of the chunkwise form (the E-form), those that the
    backward makes once more, to save memory, not counted.

    Args:
        tokens: B * T.
        gate_bytes: of log_decay and beta together.
        erases: whether beta is there.
        element: bytes of an element of q, k and v.
    """
    chunk = 64
    chunk_heads = -(-tokens // chunk) * value_heads
    big, keys, values = chunk * K * V, chunk * chunk * K, chunk * chunk * V
    # q k^T, q S, P v, k^T u; with beta also k k^T, k S and A W.
    forward = 2 * (2 * big + keys + values) + (2 * (big + keys + values) if erases else 0)
    # k dS, q^T dy, dy S^T, u dS^T, P^T dy, dy u^T, dP k, dP^T q; with beta k^T z, z S^T, A^T du, z e^T, dN k, dN^T k.
    backward = 2 * (4 * big + 2 * keys + 2 * values) + (2 * (2 * big + 2 * keys + 2 * values) if erases else 0)
    qk, v = 2 * tokens * heads * K * element, tokens * value_heads * V * element
    return (
        Work(qk + 2 * v + gate_bytes, chunk_heads * forward),
        Work(2 * qk + 3 * v + 2 * gate_bytes, chunk_heads * backward),
    )


def attention_work(*, pairs: int, tokens: int, heads: int, key_heads: int, D: int, element: int) -> tuple[Work, Work]:
    """Forward and backward of causal attention.

    Args:
        pairs: (query, key) pairs that may meet, of one head, over all rows.
        tokens: B * T.
    """
    q, kv = tokens * heads * D * element, 2 * tokens * key_heads * D * element
    return Work(2 * q + kv, 4 * pairs * heads * D), Work(4 * q + 2 * kv, 10 * pairs * heads * D)
