"""Where chunks and segments lie: the device tables that every kernel of the chunkwise delta rule reads.

Documents are cut into chunks of 64 tokens, and runs of chunks into segments, which are scanned side by side. Both cuts
depend on lengths and sizes alone, so that results repeat bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

CHUNK = 64
# Scans starve below one program a multiprocessor. They are split then, into as many as two programs each can hold
# (255 registers, 4 warps: two fit), but not into pieces of less than this many chunks, whose extra passes cost more.
PROGRAMS_PER_PROCESSOR, LEAST_CHUNKS = 2, 8


@dataclass(frozen=True, eq=False)
class Tables:
    """One layout of tokens, on one device.

    Attributes:
        chunks: int32 [NC, 2], the first token of each chunk and how many of its 64 rows are tokens.
        segments: int32 [NS, 5], each segment's first token, tokens, first chunk, sequence, and whether it is the
            sequence's last. A sequence has at least one segment; that of an empty sequence has no tokens.
        parts: int32 [N + 1], the first segment of each sequence, and NS.
    """

    chunks: Tensor
    segments: Tensor
    parts: Tensor

    @property
    def count(self) -> int:
        """NC, the number of chunks."""
        return self.chunks.shape[0]

    @property
    def pieces(self) -> int:
        """NS, the number of segments."""
        return self.segments.shape[0]

    @property
    def split(self) -> bool:
        """Whether any sequence has more than one segment."""
        return self.pieces > self.parts.shape[0] - 1


@lru_cache(maxsize=64)
def tables(offsets: tuple[int, ...], packed: bool, piece: int, device: torch.device) -> Tables:
    """The tables of a packing with these offsets, or of a batch of ``offsets = (B, T)`` rows.

    Args:
        piece: the most chunks of one segment. 0: sequences stay whole.
    """
    ends = offsets if packed else tuple(row * offsets[1] for row in range(offsets[0] + 1))
    chunks, segments, parts = [], [], [0]
    for sequence, (start, end) in enumerate(pairwise(ends)):
        whole = max(1, -(-(end - start) // CHUNK))
        step = piece or whole
        for first in range(0, whole, step):
            begin = start + first * CHUNK
            tokens = min(end, begin + step * CHUNK) - begin
            segments.append((begin, tokens, len(chunks) + first, sequence, int(first + step >= whole)))
        chunks += [(at, min(CHUNK, end - at)) for at in range(start, end, CHUNK)]
        parts.append(len(segments))
    shapes = ((chunks, (-1, 2)), (segments, (-1, 5)), (parts, (-1,)))
    return Tables(
        *(torch.tensor(rows, dtype=torch.int32).reshape(shape).to(device, non_blocking=True) for rows, shape in shapes)
    )


def piece(chunks: int, pieces: int) -> int:
    """The most chunks of one segment, or 0 where sequences stay whole.

    Args:
        chunks: of all sequences together.
        pieces: how many segments would keep the device busy. 0: whole sequences do.
    """
    if not pieces:
        return 0
    length = max(LEAST_CHUNKS, -(-chunks // pieces))
    return length if length < chunks else 0


def most_segments(sequences: int, chunks: int, pieces: int) -> int:
    """A bound on the segments of :func:`piece`, from shapes alone; 0 where sequences stay whole."""
    return sequences + cast(int, torch.sym_min(pieces, chunks // LEAST_CHUNKS)) if pieces else 0
