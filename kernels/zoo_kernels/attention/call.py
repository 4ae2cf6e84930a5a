"""What every attention backend reads: a checked call, and the two ways of making its heads alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo_kernels.device import constant
from zoo_kernels.packing import Packing


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """A checked call of :func:`zoo_kernels.attention.attention`.

    Attributes:
        q: [B, T, H, D]. k: [B, T, Hk, D]. v: [B, T, Hk, Dv]. One dtype, one device, T >= 1.
        window: tokens that a query sees, itself included. None: all of its document; a window that no document
            exceeds was turned into None.
        packing: None where there is but one document, whose offsets say nothing.
        scale: what scores are multiplied with.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    window: int | None
    packing: Packing | None
    scale: float

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document that has any; without a packing each row of the batch is one."""
        if self.packing is None:
            return (self.q.shape[1],) * self.q.shape[0]
        return tuple(length for length in self.packing.lengths if length)


def one_kv_head_per_query_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat grouped key and value heads; for kernels that know no groups. Heads are the second axis from the end."""
    group = q.shape[-2] // k.shape[-2]
    if group == 1:
        return k, v
    return k.repeat_interleave(group, dim=-2), v.repeat_interleave(group, dim=-2)


def one_head_size(q: Tensor, k: Tensor, v: Tensor, sizes: tuple[int, ...] = ()) -> tuple[Tensor, Tensor, Tensor]:
    """Lengthen D and Dv with zeros to one size: the first of ``sizes`` that holds both; without ``sizes``, on CUDA, a
    multiple of 8, as the kernels ask.

    Zeros change no score; the output's last axis is to be cut back to Dv.
    """
    multiple = 8 if q.is_cuda else 1
    size = -(-max(q.shape[-1], v.shape[-1]) // multiple) * multiple
    size = next((kept for kept in sizes if kept >= size), size)
    if q.shape[-1] < size:
        q, k = F.pad(q, (0, size - q.shape[-1])), F.pad(k, (0, size - k.shape[-1]))
    if v.shape[-1] < size:
        v = F.pad(v, (0, size - v.shape[-1]))
    return q, k, v


HALF = (torch.bfloat16, torch.float16)


def flash_refusal(call: AttentionCall, largest: int = 256) -> str | None:
    """Why a kernel of the flash family cannot serve: it runs half precision on a GPU, heads up to ``largest``."""
    if not call.q.is_cuda:
        return f"it runs on CUDA, and the tensors are on {call.q.device.type}"
    if call.q.dtype not in HALF:
        return f"it computes bfloat16 and float16 only, and the inputs are {call.q.dtype}"
    size = max(call.q.shape[-1], call.v.shape[-1])
    return f"heads of {size} exceed its limit of {largest}" if size > largest else None


@constant
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; a constant of compiled graphs."""
    return torch.cuda.get_device_capability(device)
