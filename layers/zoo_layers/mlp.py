"""The channel mixers by name: what a block does to each token alone, after tokens have seen each other."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F

from zoo_layers.init import Linear


class SwiGLU(nn.Module):
    """``down(silu(gate) * up)`` with gate and up from one projection: x [..., D] -> [..., D].

    Source: Shazeer 2020, arXiv:2002.05202.
    """

    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.to_gate_and_up = Linear(d_model, 2 * d_ff)
        self.to_down = Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.to_gate_and_up(x).chunk(2, dim=-1)
        return self.to_down(F.silu(gate) * up)


class GELU(nn.Module):
    """``down(gelu(up))``: x [..., D] -> [..., D]; two thirds of SwiGLU's parameters at the same ``d_ff``."""

    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.to_up = Linear(d_model, d_ff)
        self.to_down = Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.to_down(F.gelu(self.to_up(x)))


def registered_mlps() -> dict[str, type[nn.Module] | None]:
    """All MLPs by the name behind the slash of a pattern; None for ``none``: the layer is the mixer alone."""
    return {"swiglu": SwiGLU, "gelu": GELU, "none": None}


def default_d_ff(d_model: int) -> int:
    """The width of an MLP when none is given: about 8/3 of ``d_model``.

    Rounded up to a multiple of 256 from ``d_model`` 512 on (1024 gives 2816, 2048 gives 5632), of 16 below (64: 176).
    """
    step = 256 if d_model >= 512 else 16
    return step * math.ceil(8 * d_model / (3 * step))


def build_mlp(name: str, d_model: int, d_ff: int | None = None) -> nn.Module | None:
    """The MLP called ``name``; its tensors are not filled.

    Args:
        name: one of :func:`registered_mlps`.
        d_model: the width of the residual stream.
        d_ff: the inner width. None: :func:`default_d_ff`.

    Raises:
        ValueError: an unknown name, or an inner width below 1.
    """
    known = registered_mlps()
    if name not in known:
        raise ValueError(f"unknown MLP '{name}'; known MLPs: {' '.join(known)}")
    if d_ff is not None and d_ff < 1:
        raise ValueError(
            f"d_ff must be at least 1, got {d_ff}; leave it out for {default_d_ff(d_model)}, or take the MLP none"
        )
    kind = known[name]
    return None if kind is None else kind(d_model, d_ff or default_d_ff(d_model))


def mlp_flops_per_token(mlp: nn.Module | None) -> int:
    """Model FLOPs of an MLP's forward, per token: 2 per weight."""
    return 0 if mlp is None else linear_flops(mlp)


def linear_flops(module: nn.Module) -> int:
    """Model FLOPs per token of all linear layers below ``module``, each used once: 2 per weight, biases free."""
    return sum(2 * m.in_features * m.out_features for m in module.modules() if isinstance(m, nn.Linear))
