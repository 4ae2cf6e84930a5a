"""First values of parameters: drawn on the CPU from a seed and a name, whatever device, order and sharding."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


@torch.no_grad()
def fill(parameter: Tensor, values: Tensor) -> None:
    """Copy ``values`` (whole, on the CPU, fp32) into ``parameter``: plain or sharded, of any dtype, on any device."""
    if isinstance(parameter, DTensor):
        # Every rank drew the same values, so nothing is sent: each keeps its own part.
        whole = values.to(device=parameter.device, dtype=parameter.dtype)
        values = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(values)


def normal(parameter: Tensor, std: float) -> None:
    """Fill with N(0, std^2)."""
    fill(parameter, torch.randn(parameter.shape, device="cpu", dtype=torch.float32) * std)


def uniform(parameter: Tensor, low: float, high: float) -> None:
    """Fill with U(low, high)."""
    fill(parameter, torch.rand(parameter.shape, device="cpu", dtype=torch.float32) * (high - low) + low)


def constant(parameter: Tensor, value: float) -> None:
    """Fill with one number."""
    with torch.no_grad():
        parameter.fill_(value)


def linear_std(fan_in: int) -> float:
    """sqrt(2 / (5 * fan_in)): 0.02 at width 1024 (Nguyen and Salazar 2019, "Transformers without Tears")."""
    return math.sqrt(2 / (5 * fan_in))


class Linear(nn.Linear):
    """A linear layer that starts from N(0, 2 / (5 * fan_in)) and a zero bias."""

    def __init__(self, d_in: int, d_out: int, *, bias: bool = False):
        super().__init__(d_in, d_out, bias=bias)

    def reset_parameters(self) -> None:
        if self.weight.is_meta:
            return
        normal(self.weight, linear_std(self.in_features))
        if self.bias is not None:
            constant(self.bias, 0.0)


def reset(module: nn.Module, seed: int | None = None) -> None:
    """Fill every parameter and buffer of ``module``, each owner under a random state of its own.

    The values depend on the seed and on the owner's name inside ``module`` alone: not on the device, the order of the
    modules, whether they were built on meta, or how they are sharded. The global random state is left as it was, but
    for one draw where ``seed`` is None.

    Args:
        module: what to fill. Nothing in it may live on meta.
        seed: any integer. None: drawn from PyTorch's global CPU generator.

    Raises:
        TypeError: a module owns tensors, but has no ``reset_parameters()``: they would hold garbage.
    """
    if seed is None:
        seed = int(torch.randint(2**62, (), device="cpu").item())
    for name, owner in module.named_modules():
        tensors = [*owner.parameters(recurse=False), *owner.buffers(recurse=False)]
        if not tensors:
            continue
        reset_own = getattr(owner, "reset_parameters", None)
        if not callable(reset_own):
            raise TypeError(
                f"{name or type(module).__name__} ({type(owner).__name__}) owns tensors, but has no reset_parameters()"
            )
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            reset_own()
