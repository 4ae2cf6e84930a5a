"""Rows times numbers: what turns a step size into a write, and a skip into an output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zoo_kernels import backend as backends
from zoo_kernels.device import Absent, triton_missing


@dataclass(frozen=True, eq=False)
class ScaleCall:
    """A checked call of :func:`scale_rows`."""

    x: Tensor
    scale: Tensor
    add: Tensor | None


def scale_rows(x: Tensor, scale: Tensor, add: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """Scale each row by a number of its own, or each head by one, and add what is given.

        y = x * scale[..., None] + add

    Args:
        x: [..., H, D], any float dtype.
        scale: [..., H]: a number for each row; or [H]: for each head. Any float dtype.
        add: [..., H, D] in x's dtype. None: nothing.
        backend: "triton", "torch" or "reference". None: the op chooses.

    Returns:
        [..., H, D] in x's dtype, under autocast too. Computed in fp32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes or dtypes that do not fit together.
    """
    if x.ndim < 2 or not x.is_floating_point():
        raise ValueError(f"scale_rows: x must be [..., H, D] of a float dtype, got {list(x.shape)} of {x.dtype}")
    if scale.shape not in (x.shape[:-1], x.shape[-2:-1]) or not scale.is_floating_point():
        raise ValueError(
            f"scale_rows: scale is {list(scale.shape)} of {scale.dtype}, but x is {list(x.shape)}: give "
            f"{list(x.shape[:-1])} or {list(x.shape[-2:-1])} of a float dtype"
        )
    if add is not None and (add.shape != x.shape or add.dtype != x.dtype):
        raise ValueError(
            f"scale_rows: add is {list(add.shape)} of {add.dtype}, but x is {list(x.shape)} of {x.dtype}; make them "
            "alike"
        )
    call = ScaleCall(x, scale, add)
    return backends.choose("scale_rows", call, backend).run(call)


def scale_rows_reference(x: Tensor, scale: Tensor, add: Tensor | None = None) -> Tensor:
    """:func:`scale_rows` as its formula reads, in float64."""
    y = x.double() * scale.double()[..., None]
    return (y if add is None else y + add.double()).to(x.dtype)


class _Reference:
    """The formula, in float64."""

    name = "reference"

    def serves(self, call: ScaleCall) -> str | None:
        return None

    def run(self, call: ScaleCall) -> Tensor:
        return scale_rows_reference(call.x, call.scale, call.add)


class _Torch:
    """In fp32, in PyTorch's own passes over memory, which a compiler makes one of."""

    name = "torch"

    def serves(self, call: ScaleCall) -> str | None:
        return None

    def run(self, call: ScaleCall) -> Tensor:
        x, scale = _wide(call.x), _wide(call.scale)[..., None]
        y = x * scale if call.add is None else torch.addcmul(_wide(call.add), x, scale)
        return y.to(call.x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _table() -> list[backends.Backend]:
    portable: list[backends.Backend] = [_Torch(), _Reference()]
    if triton_missing() is not None:
        return [Absent(), *portable]
    from zoo_kernels.scale_triton import Triton

    return [Triton(), *portable]


backends.provide("scale_rows", _table)
