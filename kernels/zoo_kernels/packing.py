"""Where packed documents begin and end: checked once per batch, then handed to every layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

CHUNK = 64  # tokens per chunk of the chunk table; the kernels' default


class Packing:
    """Documents laid end to end in one row of ``T`` tokens.

    Build it with :meth:`from_offsets`, once per batch, on the host; layers read it without ever asking the device.
    It never changes, and is no dataclass: Lightning would take one apart to convert its tensors to a precision.

    Attributes:
        offsets: N + 1 host integers, from 0 to T, never falling. Document ``n`` is ``offsets[n]:offsets[n + 1]`` and
            may be empty.
        host_offsets: the same numbers, int64 [N + 1], on the host.
        cu_seqlens: the same numbers, int32 [N + 1], on the device of the batch.
        chunk_table: int32 [chunks, 2], the (document, chunk inside it) of every chunk of ``CHUNK`` tokens, on the
            device.
    """

    offsets: tuple[int, ...]
    host_offsets: Tensor
    cu_seqlens: Tensor
    chunk_table: Tensor

    def __init__(self, offsets: tuple[int, ...], host_offsets: Tensor, cu_seqlens: Tensor, chunk_table: Tensor):
        # By name, one by one: torch 2.11 cannot trace an update of the attributes' dict.
        object.__setattr__(self, "offsets", offsets)
        object.__setattr__(self, "host_offsets", host_offsets)
        object.__setattr__(self, "cu_seqlens", cu_seqlens)
        object.__setattr__(self, "chunk_table", chunk_table)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"packing: {name} cannot be set, a Packing never changes; build another by from_offsets")

    def __repr__(self) -> str:
        return f"Packing({self.documents} documents, {self.tokens} tokens, on {self.cu_seqlens.device})"

    @classmethod
    def from_offsets(cls, cu_seqlens: Sequence[int] | Tensor) -> Packing:
        """Check ``cu_seqlens`` and build the tables.

        Args:
            cu_seqlens: N + 1 integers on the host (a sequence or a CPU tensor), N >= 1.

        Raises:
            ValueError: offsets that are not whole numbers, live on a device, do not start at 0, fall, or pass 2^31 - 1.
        """
        offsets = _host_offsets(cu_seqlens)
        if len(offsets) < 2:
            raise ValueError(f"packing: {len(offsets)} offset given, at least 2 are needed: [0, T] is one document")
        if offsets[0] != 0:
            raise ValueError(f"packing: offsets must start at 0, got {offsets[0]}; prepend 0 to the document ends")
        for n, (start, end) in enumerate(pairwise(offsets)):
            if end < start:
                raise ValueError(f"packing: offsets must never fall, but offset {n} is {start} and the next is {end}")
        if offsets[-1] >= 2**31:
            raise ValueError(f"packing: {offsets[-1]} tokens exceed the limit of 2^31 - 1 a batch; split the batch")
        table = [(n, c) for n, (a, b) in enumerate(pairwise(offsets)) for c in range(-(-(b - a) // CHUNK))]
        return cls(
            offsets=offsets,
            host_offsets=torch.tensor(offsets, dtype=torch.int64),
            cu_seqlens=torch.tensor(offsets, dtype=torch.int32),
            chunk_table=torch.tensor(table, dtype=torch.int32).reshape(-1, 2),
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Packing:
        """Copy the device tables; Lightning calls this when it moves a batch."""
        move = {"device": device, "non_blocking": non_blocking}
        return Packing(self.offsets, self.host_offsets, self.cu_seqlens.to(**move), self.chunk_table.to(**move))

    @property
    def documents(self) -> int:
        """N, the number of documents, empty ones included."""
        return len(self.offsets) - 1

    @property
    def tokens(self) -> int:
        """T, the number of tokens in all documents."""
        return self.offsets[-1]

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens in each document, on the host."""
        return tuple(b - a for a, b in pairwise(self.offsets))

    @property
    def max_length(self) -> int:
        """Tokens in the longest document."""
        return max(self.lengths)

    @cached_property
    def document_ids(self) -> Tensor:
        """int64 [T], on the device: the document each token belongs to."""
        ids = torch.arange(self.documents, device=self.cu_seqlens.device)
        return torch.repeat_interleave(ids, self.cu_seqlens.diff(), output_size=self.tokens)

    @cached_property
    def positions(self) -> Tensor:
        """int64 [T], on the device: each token's place in its own document, from 0."""
        starts = self.cu_seqlens[:-1].long()[self.document_ids]
        return torch.arange(self.tokens, device=starts.device) - starts


def as_packing(packing: Packing | Sequence[int] | Tensor | None, *, batch: int, tokens: int, op: str) -> Packing | None:
    """Read the ``packing`` argument of an op, at its door.

    Args:
        packing: a :class:`Packing`, host offsets, or None.
        batch, tokens: B and T of the op's inputs.
        op: the op's name, for the message.

    Raises:
        ValueError: a batch other than 1, or offsets that do not end at T.
    """
    if packing is None:
        return None
    if not isinstance(packing, Packing):
        packing = Packing.from_offsets(packing)
    if batch != 1:
        raise ValueError(f"{op}: packed documents are laid end to end in one row, but the batch is {batch}; make it 1")
    if packing.tokens != tokens:
        raise ValueError(
            f"{op}: the offsets end at {packing.tokens}, but there are {tokens} tokens; an unused tail is a document "
            "of its own"
        )
    return packing


def _host_offsets(cu_seqlens: Sequence[int] | Tensor) -> tuple[int, ...]:
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.device.type != "cpu":
            raise ValueError(
                f"packing: offsets must be on the host, got a tensor on {cu_seqlens.device}; build one Packing per "
                "batch in the "
                "data module and pass it to every layer"
            )
        if cu_seqlens.is_floating_point() or cu_seqlens.is_complex() or cu_seqlens.dtype == torch.bool:
            raise ValueError(f"packing: offsets must be whole numbers, got {cu_seqlens.dtype}")
        if cu_seqlens.dim() != 1:
            raise ValueError(f"packing: offsets must be one row of numbers, got the shape {list(cu_seqlens.shape)}")
        cu_seqlens = cu_seqlens.tolist()
    for offset in cu_seqlens:
        if isinstance(offset, bool) or not hasattr(offset, "__index__"):
            raise ValueError(f"packing: offsets must be whole numbers, got {offset!r}")
    return tuple(offset.__index__() for offset in cu_seqlens)
