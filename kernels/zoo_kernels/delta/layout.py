"""Where tokens lie while they are worked on in chunks: [B, T, heads, X] in, [rows, heads, chunk, X] inside, and back.

A row is one chunk of one sequence. Rows are sorted by the place of the chunk in its sequence, then by the length of the
sequence, longest first: so the rows that the carry handles in one step lie together, and a step holds every sequence
that still has a chunk. Work is done span by span, a span being a few steps, so that what is alive at a time does not
grow with T.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from zoo_kernels.packing import Packing


@dataclass(frozen=True)
class Packed:
    """Tables of packed documents, on the device.

    Attributes:
        order, back: int64 [N], the documents from long to short, and what undoes it.
        token, place: int64 [T], each token's number and its place among all rows * chunk places, sorted by place.
        tokens_before: for each step and after the last, how many tokens lie in earlier steps; on the host.
    """

    order: Tensor
    back: Tensor
    token: Tensor
    place: Tensor
    tokens_before: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """The rows of one batch.

    Attributes:
        sequences: N.
        batch, tokens: B and T.
        chunk: tokens per chunk.
        rows_before: for each step of the carry and after the last, how many rows lie in earlier steps.
        packed: None: each row of the batch is one sequence.
    """

    sequences: int
    batch: int
    tokens: int
    chunk: int
    rows_before: tuple[int, ...]
    packed: Packed | None = None

    @property
    def rows(self) -> int:
        """Chunks of all sequences."""
        return self.rows_before[-1]

    def spans(self, rows: int) -> list[Span]:
        """All steps, cut into spans of about so many rows, and of at least one step."""
        spans, first = [], 0
        for step in range(1, len(self.rows_before)):
            last = step == len(self.rows_before) - 1
            if last or self.rows_before[step + 1] - self.rows_before[first] > rows:
                spans.append(Span(self, first, step))
                first = step
        return spans

    def by_length(self, states: Tensor) -> Tensor:
        """States [N, ...] in the order in which the carry wants them."""
        return states if self.packed is None else states.index_select(0, self.packed.order)

    def by_number(self, states: Tensor) -> Tensor:
        """Undo :meth:`by_length`."""
        return states if self.packed is None else states.index_select(0, self.packed.back)


@dataclass(frozen=True)
class Span:
    """Steps ``first`` to ``stop`` of a layout."""

    layout: Layout
    first: int
    stop: int

    @property
    def rows(self) -> slice:
        """Its rows among all rows."""
        return slice(self.layout.rows_before[self.first], self.layout.rows_before[self.stop])

    @property
    def count(self) -> int:
        """How many rows it has."""
        return self.rows.stop - self.rows.start

    @property
    def steps(self) -> list[int]:
        """The number of rows of each step; never rising."""
        before = self.layout.rows_before[self.first : self.stop + 1]
        return [b - a for a, b in pairwise(before)]

    def load(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, T, heads, X] -> [rows, heads, chunk, X], contiguous, zeros where a chunk has no token."""
        layout, heads, X = self.layout, *x.shape[2:]
        rows = self.count
        if layout.packed is not None:
            token, place = self._tables(layout.packed)
            flat = torch.zeros(rows * layout.chunk, heads, X, dtype=dtype, device=x.device)
            flat.index_copy_(0, place, x[0].index_select(0, token).to(dtype))
            return flat.unflatten(0, (rows, layout.chunk)).transpose(1, 2).contiguous()
        out = torch.empty(rows, heads, layout.chunk, X, dtype=dtype, device=x.device)
        for inside, outside in self._pieces(out, x):
            inside.copy_(outside)
        missing = self.stop * layout.chunk - layout.tokens
        if missing > 0:
            out[-layout.batch :, :, -missing:].zero_()
        return out

    def store(self, x: Tensor, out: Tensor) -> None:
        """[rows, heads, chunk, X] into its place in ``out`` [B, T, heads, X]; undoes :meth:`load`."""
        if self.layout.packed is not None:
            token, place = self._tables(self.layout.packed)
            out[0].index_copy_(0, token, x.transpose(1, 2).flatten(0, 1).index_select(0, place).to(out.dtype))
            return
        for inside, outside in self._pieces(x, out):
            outside.copy_(inside)

    def _tables(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """The tokens of the span, and their places in it."""
        mine = slice(packed.tokens_before[self.first], packed.tokens_before[self.stop])
        return packed.token[mine], packed.place[mine] - self.rows.start * self.layout.chunk

    def _pieces(self, inside: Tensor, outside: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Views of the same shape: the whole chunks, and the last one where it is not whole."""
        B, C = self.layout.batch, self.layout.chunk
        whole = min(self.stop, self.layout.tokens // C) - self.first
        start, rest = self.first * C, self.layout.tokens % C
        pieces = []
        if whole:
            chunks = outside[:, start : start + whole * C].unflatten(1, (whole, C)).permute(1, 0, 3, 2, 4)
            pieces.append((inside[: whole * B].unflatten(0, (whole, B)), chunks))
        if whole < self.stop - self.first:
            pieces.append((inside[whole * B :, :, :rest], outside[:, start + whole * C :].transpose(1, 2)))
        return pieces


@dataclass(frozen=True)
class Heads:
    """Which value heads are worked on together: H key heads, R value heads each, or every value head alone with R = 1.

    Attributes:
        H, HV: key heads and value heads of the call.
        shared: value heads of a group share queries and keys.
    """

    H: int
    HV: int
    shared: bool

    @property
    def R(self) -> int:
        """Value heads side by side in one matrix."""
        return self.HV // self.H if self.shared else 1

    @property
    def count(self) -> int:
        """Heads inside."""
        return self.HV // self.R

    def load_keys(self, span: Span, x: Tensor, dtype: torch.dtype) -> Tensor:
        """q or k [B, T, H, K] -> [rows, count, chunk, K]."""
        x = span.load(x, dtype)
        return x if self.count == self.H else x.repeat_interleave(self.HV // self.H, 1)

    def store_keys(self, span: Span, x: Tensor, out: Tensor) -> None:
        """Undo :meth:`load_keys` for a gradient: the sum over the value heads of each group."""
        span.store(x if self.count == self.H else x.unflatten(1, (self.H, -1)).sum(2), out)

    def load_values(self, span: Span, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, T, HV, V] -> [rows, count, chunk, R * V]."""
        return span.load(x.flatten(2).unflatten(2, (self.count, -1)), dtype)

    def store_values(self, span: Span, x: Tensor, out: Tensor) -> None:
        """Undo :meth:`load_values`; ``out`` is contiguous."""
        span.store(x, out.flatten(2).unflatten(2, (self.count, -1)))

    def load_state(self, layout: Layout, state: Tensor) -> Tensor:
        """[N, HV, K, V] -> a copy [N * count, K, R * V], sequences in the order of the carry."""
        state = layout.by_length(state).unflatten(1, (self.count, self.R)).transpose(2, 3).flatten(-2)
        return state.clone(memory_format=torch.contiguous_format).flatten(0, 1)

    def store_state(self, layout: Layout, state: Tensor) -> Tensor:
        """Undo :meth:`load_state`."""
        state = (
            state.unflatten(0, (layout.sequences, self.count)).unflatten(-1, (self.R, -1)).transpose(2, 3).flatten(1, 2)
        )
        return layout.by_number(state).contiguous()


def dense(batch: int, tokens: int, chunk: int) -> Layout:
    """Every row of the batch is one sequence of ``tokens``."""
    return Layout(
        batch, batch, tokens, chunk, rows_before=tuple(batch * step for step in range(-(-tokens // chunk) + 1))
    )


# All layers of a model share one Packing, so its tables are built once per batch and go when it goes.
_PACKED: WeakKeyDictionary[Packing, dict[tuple[int, torch.device], Layout]] = WeakKeyDictionary()


def packed(packing: Packing, chunk: int, device: torch.device) -> Layout:
    """Documents laid end to end: each is cut into chunks from its own first token."""
    known = _PACKED.setdefault(packing, {})
    if (chunk, device) not in known:
        known[chunk, device] = _packed(packing, chunk, device)
    return known[chunk, device]


def _packed(packing: Packing, chunk: int, device: torch.device) -> Layout:
    # From host offsets alone, and moved by copies that nothing waits for.
    lengths = torch.tensor(packing.lengths, dtype=torch.int64, device="cpu")
    order = torch.argsort(lengths, descending=True, stable=True)
    back = torch.argsort(order)
    chunks = -(-lengths // chunk)
    steps = torch.arange(int(chunks.max()), device="cpu")
    rows_before = (0, *accumulate((chunks > steps.unsqueeze(-1)).sum(-1).tolist()))
    document = torch.repeat_interleave(torch.arange(packing.documents, device="cpu"), lengths)
    position = torch.arange(packing.tokens, device="cpu") - torch.tensor(packing.offsets[:-1], device="cpu")[document]
    step = position // chunk
    place = (torch.tensor(rows_before, device="cpu")[step] + back[document]) * chunk + position % chunk
    place, token = place.sort()
    tokens_before = (0, *accumulate(torch.bincount(step, minlength=len(steps)).tolist()))
    order, back, token, place = (table.to(device, non_blocking=True) for table in (order, back, token, place))
    tables = Packed(order, back, token, place, tokens_before)
    return Layout(packing.documents, 1, packing.tokens, chunk, rows_before, tables)
