"""Rows of shards, read from disk when a batch needs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from zoo.data.loader import Batch
from zoo.data.rows import Layout, by_epoch, make_batch
from zoo.data.shards import ShardedSplit
from zoo.data.shuffle import shuffled
from zoo.errors import UserError

OFFSETS = 1  # with an epoch, names the draw of its first place, apart from the keys of its order


@dataclass(frozen=True, eq=False)
class ShardRows:
    """A :class:`~zoo.data.rows.RowTable` over shards, in the order they are stored.

    Attributes:
        text: the documents.
        seq_len: tokens of one row.
        first: the place in the text of the first row's first token.
        padded: the rows end with the text, the last one padded; otherwise they go round, and are whole.
    """

    text: ShardedSplit
    seq_len: int
    first: int = 0
    padded: bool = False

    def __len__(self) -> int:
        return -(-self.text.tokens // self.seq_len) if self.padded else self.text.tokens // self.seq_len

    @property
    def filled(self) -> int:
        """Positions that hold text; those behind are padding."""
        return self.text.tokens if self.padded else len(self) * self.seq_len

    @property
    def separator(self) -> int:
        """The separator's id."""
        return self.text.separator

    def inputs(self, which: np.ndarray) -> np.ndarray:
        """[rows, seq_len], the ids of the rows ``which``."""
        return self._gather("ids", which * self.seq_len, self.separator)

    def targets(self, which: np.ndarray) -> np.ndarray:
        """[rows, seq_len], the id after every id of the rows ``which``, in the padding as elsewhere."""
        return self._gather("ids", which * self.seq_len + 1, self.separator)

    def text_bytes(self, which: np.ndarray) -> int:
        """UTF-8 bytes that the targets of the rows ``which`` stand for; separators and padding are none."""
        if not self.text.has_widths:
            return int(np.count_nonzero(self.targets(which) != self.separator))
        return int(self._gather("widths", which * self.seq_len + 1, 0).sum(dtype=np.int64))

    def inner_starts(self, which: np.ndarray) -> list[np.ndarray]:
        """For each row, where documents (or the padding) begin inside it, its first token left out."""
        found = []
        for place in (which * self.seq_len).tolist():
            inside = min(self.seq_len, self.filled - place)
            starts = self.text.starts(self.first + place + 1, inside - 1) + 1
            found.append(np.append(starts, inside) if inside < self.seq_len else starts)
        return found

    def documents(self, which: np.ndarray) -> np.ndarray:
        """int64 [rows, seq_len], the number of the document of every token of ``which``; of padding, anything."""
        return np.stack([self.text.documents(self.first + n * self.seq_len, self.seq_len) for n in which.tolist()])

    def _gather(self, kind: str, places: np.ndarray, padding: int) -> np.ndarray:
        """[rows, seq_len] of what stands behind each of ``places``."""
        read = getattr(self.text, kind)
        rows = [read(self.first + place, self.seq_len) for place in places.tolist()]
        gathered = np.stack(rows) if rows else np.empty((0, self.seq_len), dtype=np.int64)
        if self.padded:
            gathered[places[:, None] + np.arange(self.seq_len) >= self.filled] = padding
        return gathered


class ShardStream:
    """Training rows of shards: each epoch cuts rows from another place on and takes them in another order.

    Documents stay in the order they are stored, end to end and round; fewer than ``seq_len`` tokens are left out of an
    epoch, others in each. Which row comes when is computed from ``data_seed`` and the row's number alone.

    Args:
        text: the training documents.
        seq_len: tokens of one row.
        data_seed: seed of the order, independent of every other seed.
        content_hash: names the documents.
        layout: how rows become tensors.

    Raises:
        UserError: fewer tokens than one row.
    """

    def __init__(self, text: ShardedSplit, *, seq_len: int, data_seed: int, content_hash: str, layout: Layout) -> None:
        self.text, self.seq_len, self.data_seed, self.layout = text, seq_len, data_seed, layout
        self.epoch_rows = text.tokens // seq_len
        if not self.epoch_rows:
            raise UserError(
                f"data: the train split has {text.tokens} tokens, fewer than seq_len {seq_len}; lower seq_len or add "
                "text"
            )
        self.identity: dict[str, Any] = {
            "content_hash": content_hash,
            "data_seed": data_seed,
            "seq_len": seq_len,
            "doc_mask": layout.doc_mask,
        }

    def trace(self, first: int, count: int) -> bytes:
        """Where rows ``first`` to ``first + count`` lie in the text: the hash of their content is in the identity."""
        places = [rows.first + which * self.seq_len for rows, which in self._parts(first, count)]
        return (np.concatenate(places) % self.text.tokens).astype("<i8").tobytes()

    def batch(self, first: int, count: int) -> Batch:
        """The same rows as a batch."""
        return make_batch(self._parts(first, count), self.layout)

    def documents(self, first: int, count: int) -> np.ndarray:
        """The documents that the same rows hold parts of, by their numbers in the split, sorted."""
        return np.unique(np.concatenate([rows.documents(which).ravel() for rows, which in self._parts(first, count)]))

    def _parts(self, first: int, count: int) -> list[tuple[ShardRows, np.ndarray]]:
        parts = []
        for epoch, begin, end in by_epoch(first, count, self.epoch_rows):
            draw = np.random.default_rng(np.random.SeedSequence(self.data_seed, spawn_key=(epoch, OFFSETS)))
            rows = ShardRows(self.text, self.seq_len, first=int(draw.integers(self.text.tokens)))
            which = shuffled(np.arange(begin, end), self.epoch_rows, seed=self.data_seed, epoch=epoch)
            parts.append((rows, which))
        return parts
