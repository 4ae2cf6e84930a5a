"""Rotary position embedding: pairs of channels turned by an angle that grows with the position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zoo_kernels import backend as backends
from zoo_kernels.device import Absent, triton_missing


@dataclass(frozen=True, eq=False)
class RotaryCall:
    """A checked call of :func:`rotary`; ``turned`` of the channels turn."""

    x: Tensor
    positions: Tensor
    turned: int
    theta: float


def rotary(
    x: Tensor, positions: Tensor, *, theta: float = 10000.0, fraction: float = 1.0, backend: str | None = None
) -> Tensor:
    """Turn channel ``i`` together with channel ``i + R / 2``, for the first R = ``fraction`` of the channels.

        angle = position * theta^(-2i / R);   (a, b) -> (a cos - b sin, b cos + a sin)

    Queries and keys may share one call: lay their heads side by side.

    Args:
        x: [B, T, H, D], any float dtype.
        positions: [B, T] or [T] (the same for every row), integers from 0.
        theta: the base, > 0; the slowest pair turns once in about 2 pi theta tokens.
        fraction: the share of D that turns, in (0, 1]; it must come to an even number of channels, at least 2.
        backend: "triton", "torch" or "reference". None: the op chooses.

    Returns:
        [B, T, H, D] in x's dtype. Angles are fp32 in every precision mode (float64 for float64 inputs); no table is
        kept.

    Raises:
        ValueError: shapes that disagree, a fraction that leaves no even number of channels, positions that are no
            integers.

    Source: Su et al. 2021, arXiv:2104.09864, in the halves layout.
    """
    call = RotaryCall(x, positions, _turned_channels(x, positions, theta, fraction), theta)
    return backends.choose("rotary", call, backend).run(call)


def rotary_reference(x: Tensor, positions: Tensor, *, theta: float = 10000.0, fraction: float = 1.0) -> Tensor:
    """:func:`rotary` by complex multiplication, in double precision."""
    turned = _turned_channels(x, positions, theta, fraction)
    pair = torch.arange(turned // 2, device=x.device, dtype=torch.float64)
    angle = positions.double()[..., None, None] * theta ** (-2 * pair / turned)
    first, second = x[..., :turned].double().chunk(2, dim=-1)
    spun = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([spun.real, spun.imag, x[..., turned:].double()], dim=-1).to(x.dtype)


class _Reference:
    """Complex multiplication, in double precision."""

    name = "reference"

    def serves(self, call: RotaryCall) -> str | None:
        return None

    def run(self, call: RotaryCall) -> Tensor:
        return rotary_reference(
            call.x, call.positions, theta=call.theta, fraction=call.turned / max(1, call.x.shape[-1])
        )


class _Torch:
    """In fp32, in PyTorch's own passes over memory, which a compiler makes one of."""

    name = "torch"

    def serves(self, call: RotaryCall) -> str | None:
        return None

    def run(self, call: RotaryCall) -> Tensor:
        wide = call.x if call.x.dtype == torch.float64 else call.x.float()
        cos, sin = (x.unsqueeze(-2) for x in angles(call.positions, call.turned, call.theta, wide.dtype))
        cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)  # for whole rows
        return _Turn.apply(wide, cos, sin).to(call.x.dtype)


class _Turn(torch.autograd.Function):
    """Turn the leading channels of x by an angle, given as cosine and sine for every channel; the gradient turns back.

    Two multiplications over whole rows are about twice as fast as four over half rows, joined by cat, on a CPU (fp32,
    [8, 128, 2, 64], one thread, torch 2.13).
    """

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return _turn(dy, cos, sin, -1.0), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    turned = cos.shape[-1]
    head = x[..., :turned]
    # Not in place: under torch.compile, torch 2.11 gives a Function zero gradients if its output was made by addcmul_.
    y = torch.addcmul(head * cos, head.roll(turned // 2, dims=-1), sin, value=sign)
    return y if turned == x.shape[-1] else torch.cat([y, x[..., turned:]], dim=-1)


def angles(positions: Tensor, turned: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every pair, each [B or nothing, T, turned / 2]."""
    # A power taken in fp32 is off by some units in the last place: 5e-3 radians at position 32768. MPS has no float64.
    exact = torch.float32 if positions.device.type == "mps" else torch.float64
    pair = torch.arange(0, turned, 2, device=positions.device, dtype=exact)
    frequency = (theta ** (-pair / turned)).to(dtype)
    angle = positions.to(dtype)[..., None] * frequency
    return angle.cos(), angle.sin()


def _turned_channels(x: Tensor, positions: Tensor, theta: float, fraction: float) -> int:
    if x.dim() != 4 or not x.is_floating_point():
        raise ValueError(f"rotary: x must be [B, T, H, D] of a float dtype, got {list(x.shape)} of {x.dtype}")
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise ValueError(
            f"rotary: positions must be integers, got {positions.dtype}; fractions of a token have no meaning here"
        )
    batch, tokens, size = x.shape[0], x.shape[1], x.shape[-1]
    if positions.shape not in ((tokens,), (batch, tokens)):
        raise ValueError(
            f"rotary: positions are {list(positions.shape)}, but x is {list(x.shape)} and asks for [{tokens}] or "
            f"[{batch}, {tokens}]"
        )
    if not theta > 0:
        raise ValueError(f"rotary: theta must be above 0, got {theta}; 10000 is usual")
    turned = round(size * fraction)
    if not 0 < fraction <= 1 or turned < 2 or turned % 2 or abs(turned - size * fraction) > 1e-6:
        raise ValueError(
            f"rotary: fraction {fraction} of {size} channels is {size * fraction:g}, but an even number from 2 to "
            f"{size} is needed; fraction {2 * max(1, size // 4) / size:g} would turn {2 * max(1, size // 4)}"
        )
    return turned


def _table() -> list[backends.Backend]:
    portable: list[backends.Backend] = [_Torch(), _Reference()]
    if triton_missing() is not None:
        return [Absent(), *portable]
    from zoo_kernels.rotary_triton import Triton

    return [Triton(), *portable]


backends.provide("rotary", _table)
