"""Normalisations over the last axis, in fp32 or better: RMS with weight and gate, unit L2 length, unit L1 length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from zoo_kernels import backend as backends
from zoo_kernels.device import Absent, triton_missing

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


@dataclass(frozen=True, eq=False)
class NormCall:
    """A checked call of a normalisation: what the backends read.

    Attributes:
        mean: divide by the root of the mean square. False: by the root of the sum of squares.
    """

    x: Tensor
    eps: float
    weight: Tensor | None = None
    mean: bool = True
    gate: Tensor | None = None
    activation: str = "silu"
    groups: int = 1
    gate_first: bool = False


def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, backend: str | None = None) -> Tensor:
    """Scale each row to root mean square 1, then by ``weight``.

        y = x / sqrt(mean(x^2) + eps) * weight

    Args:
        x: [..., D], any float dtype.
        weight: [D], any float dtype. None: no weight.
        eps: added inside the root, > 0; an all-zero row gives zeros and finite gradients.
        backend: "triton", "torch" or "reference". None: the op chooses.

    Returns:
        [..., D] in x's dtype, under autocast too. Computed in fp32 (float64 for float64 inputs).

    Raises:
        ValueError: a weight of another size, an eps not above 0.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    _check("rms_norm", x, eps, weight=weight)
    return _run("rms_norm", NormCall(x, eps, weight), backend)


def rms_norm_reference(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6) -> Tensor:
    """:func:`rms_norm` as its formula reads, in float64."""
    y = x.double() / torch.sqrt(x.double().pow(2).mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.double()).to(x.dtype)


def gated_rms_norm(
    x: Tensor,
    weight: Tensor | None,
    gate: Tensor,
    *,
    eps: float = 1e-6,
    activation: str = "silu",
    groups: int = 1,
    gate_first: bool = False,
    backend: str | None = None,
) -> Tensor:
    """RMS norm with an output gate.

        y = rms(x) * weight * activation(gate)          gate_first: y = rms(x * activation(gate)) * weight

    Args:
        x, gate: [..., D], any float dtypes.
        weight: [D]. None: no weight.
        eps: added inside the root, > 0.
        activation: "silu" or "sigmoid".
        groups: the mean is taken over each of this many equal slices of D.
        gate_first: gate before the norm, as Mamba-2 does.
        backend: "triton", "torch" or "reference". None: the op chooses.

    Returns:
        [..., D] in x's dtype, under autocast too. Computed in fp32 (float64 for float64 inputs).

    Raises:
        ValueError: sizes that disagree, groups that do not divide D, an unknown activation, an eps not above 0.

    Source: after the norm: Sun et al. 2023, arXiv:2307.08621; before it: Dao and Gu 2024, arXiv:2405.21060.
    """
    _check("gated_rms_norm", x, eps, weight=weight, gate=gate)
    if activation not in ACTIVATIONS:
        raise ValueError(f"gated_rms_norm: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if groups < 1 or x.shape[-1] % groups:
        raise ValueError(f"gated_rms_norm: {groups} groups do not divide {x.shape[-1]} channels; take a divisor")
    call = NormCall(x, eps, weight, gate=gate, activation=activation, groups=groups, gate_first=gate_first)
    return _run("gated_rms_norm", call, backend)


def gated_rms_norm_reference(
    x: Tensor,
    weight: Tensor | None,
    gate: Tensor,
    *,
    eps: float = 1e-6,
    activation: str = "silu",
    groups: int = 1,
    gate_first: bool = False,
) -> Tensor:
    """:func:`gated_rms_norm` as its formula reads, group by group, in float64."""
    z = gate.double()
    opened = z * torch.sigmoid(z) if activation == "silu" else torch.sigmoid(z)
    y = x.double() * opened if gate_first else x.double()
    y = torch.cat([rms_norm_reference(part, eps=eps) for part in y.chunk(groups, dim=-1)], dim=-1)
    if weight is not None:
        y = y * weight.double()
    return (y if gate_first else y * opened).to(x.dtype)


def l2_norm(x: Tensor, *, eps: float = 1e-6, backend: str | None = None) -> Tensor:
    """Scale each row to length 1.

        y = x / sqrt(sum(x^2) + eps)

    Args:
        x: [..., D], any float dtype.
        eps: added inside the root, > 0; an all-zero row gives zeros and finite gradients.
        backend: "triton", "torch" or "reference". None: the op chooses.

    Returns:
        [..., D] in x's dtype, under autocast too. Computed in fp32 (float64 for float64 inputs).
    """
    _check("l2_norm", x, eps)
    return _run("l2_norm", NormCall(x, eps, mean=False), backend)


def l2_norm_reference(x: Tensor, *, eps: float = 1e-6) -> Tensor:
    """:func:`l2_norm` as its formula reads, in float64."""
    return (x.double() / torch.sqrt(x.double().pow(2).sum(-1, keepdim=True) + eps)).to(x.dtype)


def l1_norm(x: Tensor, *, eps: float = 1e-3) -> Tensor:
    """Scale each row so that the absolute values sum to 1.

        y = x / max(sum(|x|), eps)

    The absolute values, not the values: a signed sum can cancel.

    Args:
        x: [..., D], any float dtype.
        eps: the smallest sum to divide by, > 0; an all-zero row gives zeros, and gradients of at most 1 / eps, which
            fp16 must hold.

    Returns:
        [..., D] in x's dtype, under autocast too. Computed in fp32 (float64 for float64 inputs).
    """
    _check("l1_norm", x, eps)
    wide = _wide(x)
    return (wide / wide.abs().sum(-1, keepdim=True).clamp(min=eps)).to(x.dtype)


def l1_norm_reference(x: Tensor, *, eps: float = 1e-3) -> Tensor:
    """:func:`l1_norm` as its formula reads, in float64."""
    total = torch.where(x < 0, -x, x).double().sum(-1, keepdim=True)
    return (x.double() / torch.where(total < eps, eps, total)).to(x.dtype)


class _Reference:
    """The formulas, in float64."""

    name = "reference"

    def serves(self, call: NormCall) -> str | None:
        return None

    def run(self, call: NormCall) -> Tensor:
        if call.gate is not None:
            options = {"activation": call.activation, "groups": call.groups, "gate_first": call.gate_first}
            return gated_rms_norm_reference(call.x, call.weight, call.gate, eps=call.eps, **options)
        return (
            rms_norm_reference(call.x, call.weight, eps=call.eps)
            if call.mean
            else l2_norm_reference(call.x, eps=call.eps)
        )


class _Torch:
    """In fp32, by F.rms_norm on a GPU and by :class:`_Normalise` elsewhere."""

    name = "torch"

    def serves(self, call: NormCall) -> str | None:
        return None

    def run(self, call: NormCall) -> Tensor:
        x, weight, eps = call.x, call.weight, call.eps
        if call.gate is None:
            if call.mean and x.is_cuda and (weight is None or weight.dtype == x.dtype):
                return F.rms_norm(x, x.shape[-1:], weight, eps)
            return _normalise(_wide(x), weight, eps, call.mean).to(x.dtype)
        wide, opened = _wide(x), ACTIVATIONS[call.activation](_wide(call.gate))
        if call.gate_first:
            wide = wide * opened
        if call.groups == 1:
            y = _normalise(wide, weight, eps, call.mean)
        else:
            y = _normalise(wide.unflatten(-1, (call.groups, -1)), None, eps, call.mean).flatten(-2)
            y = y if weight is None else y * _wide(weight)
        return (y if call.gate_first else y * opened).to(x.dtype)


class _Normalise(torch.autograd.Function):
    """y = factor * x / sqrt(sum(x^2) + eps) * weight, keeping x and one number per row for the gradient.

    Written out because F.rms_norm and its gradient take 1.4 to 2 times as long on a CPU (fp32, [8, 128, 64] to
    [1, 1024, 1024], one thread, torch 2.13).
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None, eps: float, factor: float) -> Tensor:
        inverse = (x * x).sum(-1, keepdim=True).add_(eps).rsqrt_().mul_(factor)
        ctx.save_for_backward(x, weight, inverse)
        ctx.factor = factor
        y = x * inverse
        return y if weight is None else y * weight

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, inverse = ctx.saved_tensors
        unit = x * inverse
        dweight = None
        if ctx.needs_input_grad[1]:
            dweight = (dy * unit).reshape(-1, x.shape[-1]).sum(0)
        dunit = dy if weight is None else dy * weight
        along = (dunit * unit).sum(-1, keepdim=True).div_(ctx.factor**2)
        return torch.addcmul(dunit, unit, along, value=-1.0).mul_(inverse), dweight, None, None


def _normalise(x: Tensor, weight: Tensor | None, eps: float, mean: bool) -> Tensor:
    """RMS or L2 norm of a tensor that is fp32 or float64 already."""
    size = x.shape[-1]
    weight = None if weight is None else weight.to(x.dtype)
    if not mean:
        return _Normalise.apply(x, weight, eps, 1.0)  # pyright: ignore[reportReturnType]
    if x.is_cuda:
        return F.rms_norm(x, (size,), weight, eps)
    return _Normalise.apply(x, weight, eps * size, size**0.5)  # pyright: ignore[reportReturnType]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _run(op: str, call: NormCall, backend: str | None) -> Tensor:
    return backends.choose(op, call, backend).run(call)


def _check(op: str, x: Tensor, eps: float, *, weight: Tensor | None = None, gate: Tensor | None = None) -> None:
    if not eps > 0:
        raise ValueError(f"{op}: eps must be above 0, got {eps}; without it a row of zeros has no direction")
    if not x.is_floating_point():
        raise ValueError(f"{op}: x must be of a float dtype, got {x.dtype}")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: weight is {list(weight.shape)}, but rows of x have {x.shape[-1]} numbers: give [{x.shape[-1]}]"
        )
    if gate is not None and gate.shape != x.shape:
        raise ValueError(
            f"{op}: gate is {list(gate.shape)}, but x is {list(x.shape)}; one gate value per number of x is needed"
        )


def _table() -> list[backends.Backend]:
    portable: list[backends.Backend] = [_Torch(), _Reference()]
    if triton_missing() is not None:
        return [Absent(), *portable]
    from zoo_kernels.norm_triton import Triton

    return [Triton(), *portable]


for _op in ("rms_norm", "gated_rms_norm", "l2_norm"):
    backends.provide(_op, _table)
