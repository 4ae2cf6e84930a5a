"""What a training step keeps of a layer for the backward pass: measured on the layer itself, per token."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zoo.architecture import Architecture
from zoo_layers import init
from zoo_layers.block import Block
from zoo_layers.mlp import build_mlp

# Two lengths, whole chunks both: what does not grow with the tokens, such as weights in another dtype, cancels.
_SHORT, _LONG = 128, 256


def kept_bytes(module: nn.Module, x: Tensor) -> int:
    """Bytes that ``module(x)`` keeps for its backward pass, every storage once, the parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x)
    return sum(storage.nbytes() for storage in kept.values())


def activation_bytes(architecture: Architecture, *, mixed: bool = True) -> list[float]:
    """Bytes per token that each layer keeps for the backward pass, in the order of the layers.

    Every distinct layer is built at its full width and run on the CPU; the figure is that of the PyTorch backends, and
    of attention whose memory grows with the tokens and not with their square. Kernels of a GPU may keep less.

    Args:
        architecture: what to measure; nothing of it is recomputed.
        mixed: under bf16 autocast with fp32 weights (``bf16-mixed``); else in fp32.
    """
    measured: dict[object, float] = {}
    for layer in architecture.layers:
        if layer not in measured:
            block = Block(
                layer.resolve(architecture.d_model).module(architecture.d_model),
                build_mlp(layer.mlp, architecture.d_model, architecture.d_ff),
                d_model=architecture.d_model,
            )
            init.reset(block, 0)
            measured[layer] = _per_token(block, architecture.d_model, mixed)
    return [measured[layer] for layer in architecture.layers]


def _per_token(block: Block, d_model: int, mixed: bool) -> float:
    short, long = (_kept(block, d_model, tokens, mixed) for tokens in (_SHORT, _LONG))
    return (long - short) / (_LONG - _SHORT)


def _kept(block: Block, d_model: int, tokens: int, mixed: bool) -> int:
    x = torch.randn(1, tokens, d_model, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        return kept_bytes(block, x)
