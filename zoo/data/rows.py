"""Documents laid end to end and cut into rows of one context each; rows gathered into batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from zoo.data.corpus import Split
from zoo.data.loader import Batch
from zoo.errors import UserError
from zoo_kernels.packing import Packing

IGNORED = -100  # the label of a position that does not count


@dataclass(frozen=True)
class Layout:
    """How rows become tensors.

    Attributes:
        doc_mask: documents inside a row do not see each other.
        always_packed: one packed row even where [rows, seq_len] without a packing would give the same.
    """

    doc_mask: bool = True
    always_packed: bool = False


class RowTable(Protocol):
    """Documents in some order, cut into rows of ``seq_len`` tokens; a row is a context: nothing is carried across rows.

    Attributes:
        filled: positions that hold text; those behind are padding.
        seq_len: tokens of one row.
        separator: the separator's id.
    """

    @property
    def filled(self) -> int: ...

    @property
    def seq_len(self) -> int: ...

    @property
    def separator(self) -> int: ...

    def __len__(self) -> int: ...

    def inputs(self, which: np.ndarray) -> np.ndarray:
        """[rows, seq_len], the ids of the rows ``which``."""
        ...

    def targets(self, which: np.ndarray) -> np.ndarray:
        """[rows, seq_len], the id after every id of the rows ``which``, in the padding as elsewhere."""
        ...

    def text_bytes(self, which: np.ndarray) -> int:
        """UTF-8 bytes that the targets of the rows ``which`` stand for; separators and padding are none."""
        ...

    def inner_starts(self, which: np.ndarray) -> list[np.ndarray]:
        """For each row, where documents (or the padding) begin inside it, its first token left out."""
        ...

    def documents(self, which: np.ndarray) -> np.ndarray:
        """int64 [rows, seq_len], the number of the document of every token of ``which``; of padding, anything."""
        ...


@dataclass(frozen=True, eq=False)
class Rows:
    """A :class:`RowTable` in memory.

    Attributes:
        stream: [rows * seq_len + 1], ids; ``stream[t + 1]`` is the target of ``stream[t]``, the last one included.
        weights: bytes of each id, like ``stream``; None: one per id, none for a separator.
        starts: int64, sorted places in the stream where a document (or the padding behind the last one) begins.
        filled: positions that hold text; those behind are padding.
        seq_len: tokens of one row.
        separator: the separator's id.
    """

    stream: np.ndarray
    weights: np.ndarray | None
    starts: np.ndarray
    filled: int
    seq_len: int
    separator: int

    def __len__(self) -> int:
        return (len(self.stream) - 1) // self.seq_len

    def inputs(self, which: np.ndarray) -> np.ndarray:
        """[rows, seq_len], the ids of the rows ``which``."""
        return self.stream[:-1].reshape(-1, self.seq_len)[which]

    def targets(self, which: np.ndarray) -> np.ndarray:
        """[rows, seq_len], the id after every id of the rows ``which``, in the padding as elsewhere."""
        return self.stream[1:].reshape(-1, self.seq_len)[which]

    def text_bytes(self, which: np.ndarray) -> int:
        """UTF-8 bytes that the targets of the rows ``which`` stand for; separators and padding are none."""
        if self.weights is None:
            return int(np.count_nonzero(self.targets(which) != self.separator))
        return int(self.weights[1:].reshape(-1, self.seq_len)[which].sum(dtype=np.int64))

    def documents(self, which: np.ndarray) -> np.ndarray:
        """int64 [rows, seq_len], the number of the document, in the order laid out, of every token of ``which``."""
        places = which[:, None] * self.seq_len + np.arange(self.seq_len)
        return np.searchsorted(self.starts, places, side="right") - 1

    def inner_starts(self, which: np.ndarray) -> list[np.ndarray]:
        """For each row, where documents begin inside it, its first token left out."""
        first = np.searchsorted(self.starts, which * self.seq_len, side="right")
        last = np.searchsorted(self.starts, (which + 1) * self.seq_len, side="left")
        return [self.starts[a:b] - row * self.seq_len for a, b, row in zip(first, last, which)]


def lay_out(split: Split, seq_len: int, *, order: np.ndarray | None = None, keep_tail: bool = False) -> Rows:
    """Lay the documents of ``split`` end to end and cut them into rows.

    Args:
        split: the documents.
        seq_len: tokens of one row.
        order: int64 [documents], which document comes when; None: as they are.
        keep_tail: pad the last row instead of leaving fewer than ``seq_len`` tokens out.
    """
    if order is None:
        tokens, weights, starts = split.tokens, split.weights, split.starts[:-1]
    else:
        pieces = [slice(split.starts[n], split.starts[n + 1]) for n in order]
        tokens = np.concatenate([split.tokens[piece] for piece in pieces])
        weights = None if split.weights is None else np.concatenate([split.weights[piece] for piece in pieces])
        starts = np.cumsum(split.lengths[order]) - split.lengths[order]
    filled = len(tokens)
    length = -(-filled // seq_len) * seq_len if keep_tail else filled // seq_len * seq_len
    stream = np.full(length + 1, split.separator, dtype=tokens.dtype)
    stream[: min(filled, length + 1)] = tokens[: length + 1]
    if weights is not None:
        weights = np.pad(weights, (0, max(0, length + 1 - filled)))[: length + 1]
    if filled < length:
        starts = np.append(starts, filled)
    return Rows(stream, weights, starts, filled, seq_len, split.separator)


class TextStream:
    """Training rows: each epoch shuffles documents, lays them end to end, cuts rows and shuffles those.

    Fewer than ``seq_len`` tokens at the end of an epoch are left out, different ones in each epoch.

    Args:
        split: the training documents.
        seq_len: tokens of one row.
        data_seed: seed of the order, independent of every other seed.
        content_hash: names the documents.
        layout: how rows become tensors.

    Raises:
        UserError: fewer tokens than one row.
    """

    def __init__(self, split: Split, *, seq_len: int, data_seed: int, content_hash: str, layout: Layout) -> None:
        self.split, self.seq_len, self.data_seed, self.layout = split, seq_len, data_seed, layout
        self.epoch_rows = len(split.tokens) // seq_len
        if not self.epoch_rows:
            raise UserError(
                f"data: the train split has {len(split.tokens)} tokens, fewer than seq_len {seq_len}; lower seq_len or "
                "add text"
            )
        self.identity: dict[str, Any] = {
            "content_hash": content_hash,
            "data_seed": data_seed,
            "seq_len": seq_len,
            "doc_mask": layout.doc_mask,
        }
        self._epoch: tuple[int, Rows, np.ndarray, np.ndarray] | None = None

    def trace(self, first: int, count: int) -> bytes:
        """Input ids of rows ``first`` to ``first + count``."""
        return b"".join(rows.inputs(which).astype("<u4").tobytes() for rows, which in self._parts(first, count))

    def batch(self, first: int, count: int) -> Batch:
        """The same rows as a batch."""
        return make_batch(self._parts(first, count), self.layout)

    def documents(self, first: int, count: int) -> np.ndarray:
        """The documents that the same rows hold parts of, by their numbers in the split, sorted."""
        found = []
        for epoch, begin, end in by_epoch(first, count, self.epoch_rows):
            rows, order, documents = self._shuffled(epoch)
            found.append(documents[rows.documents(order[begin:end])].ravel())
        return np.unique(np.concatenate(found))

    def _parts(self, first: int, count: int) -> list[tuple[Rows, np.ndarray]]:
        parts = []
        for epoch, begin, end in by_epoch(first, count, self.epoch_rows):
            rows, order, _ = self._shuffled(epoch)
            parts.append((rows, order[begin:end]))
        return parts

    def _shuffled(self, epoch: int) -> tuple[Rows, np.ndarray, np.ndarray]:
        """The rows of an epoch, their order, and the order of the documents in them."""
        if self._epoch is None or self._epoch[0] != epoch:
            random = np.random.default_rng(np.random.SeedSequence(self.data_seed, spawn_key=(epoch,)))
            documents = random.permutation(self.split.documents)
            rows = lay_out(self.split, self.seq_len, order=documents)
            self._epoch = (epoch, rows, random.permutation(self.epoch_rows), documents)
        return self._epoch[1:]


def by_epoch(first: int, count: int, epoch_rows: int) -> Iterator[tuple[int, int, int]]:
    """(epoch, first place, place behind the last) of ``count`` rows; short texts pass several epochs in one batch."""
    while count:
        epoch, begin = divmod(first, epoch_rows)
        taken = min(count, epoch_rows - begin)
        yield epoch, begin, begin + taken
        first, count = first + taken, count - taken


class TextRows:
    """Evaluation rows: the documents as they are, every label once, the last row padded.

    Args:
        rows: the documents, cut into rows.
        layout: how rows become tensors.
        max_tokens: keep about so many tokens, rows evenly spaced over the split; None: all.

    Raises:
        UserError: ``max_tokens`` below one row.
    """

    def __init__(self, rows: RowTable, *, layout: Layout, max_tokens: int | None = None) -> None:
        if max_tokens is not None and max_tokens < rows.seq_len:
            raise UserError(
                f"data: val_tokens is {max_tokens}, less than one row of seq_len {rows.seq_len}; raise it, or leave it "
                "out"
            )
        self.layout, self.rows = layout, rows
        count = len(self.rows) if max_tokens is None else min(len(self.rows), max_tokens // rows.seq_len)
        self.chosen = np.arange(count, dtype=np.int64) * len(self.rows) // count

    def __len__(self) -> int:
        return len(self.chosen)

    def batch(self, which: np.ndarray, padding_rows: int = 0) -> Batch:
        """Rows ``which`` as a batch, and behind them ``padding_rows`` rows without a label."""
        return make_batch([(self.rows, self.chosen[which])], self.layout, padding_rows=padding_rows)

    def documents(self, which: np.ndarray) -> np.ndarray:
        """int64 [rows, seq_len], the number of the document of every position; -1 for padding."""
        return np.where(self._filled(self.chosen[which]), self.rows.documents(self.chosen[which]), -1)

    def labels(self) -> np.ndarray:
        """Ids that are predicted, in order, separators included: what entropies are taken of."""
        return self.rows.targets(self.chosen)[self._filled(self.chosen)].astype(np.int64)

    def text_bytes(self) -> int:
        """UTF-8 bytes that :meth:`labels` stand for: what the batches' ``bytes`` sum to."""
        return self.rows.text_bytes(self.chosen)

    def _filled(self, which: np.ndarray) -> np.ndarray:
        """bool [rows, seq_len], which positions hold text."""
        return which[:, None] * self.rows.seq_len + np.arange(self.rows.seq_len) < self.rows.filled


class DocumentRows(TextRows):
    """Evaluation rows whose batches also say which document each position belongs to."""

    def batch(self, which: np.ndarray, padding_rows: int = 0) -> Batch:
        """As :meth:`TextRows.batch`, with ``documents`` int64 in the shape of the labels, -1 for padding."""
        batch = super().batch(which, padding_rows)
        documents = np.pad(self.documents(which), ((0, padding_rows), (0, 0)), constant_values=-1)
        return {**batch, "documents": torch.from_numpy(documents).reshape(batch["labels"].shape)}


def make_batch(parts: Sequence[tuple[RowTable, np.ndarray]], layout: Layout, *, padding_rows: int = 0) -> Batch:
    """Gather rows into the batch that a training step takes.

    Args:
        parts: which rows of what, in order.
        layout: how rows become tensors.
        padding_rows: rows without a label appended, so that every rank has a batch.

    Returns:
        ``input_ids`` and ``labels`` int64, [1, rows * seq_len] with a ``packing``, or [rows, seq_len] with None where
        no document begins inside a row; ``tokens``: labels that count; ``bytes``: UTF-8 bytes those labels stand for.
    """
    seq_len, separator = parts[0][0].seq_len, parts[0][0].separator
    ids, labels, inner, text_bytes = [], [], [], 0
    for rows, which in parts:
        targets = rows.targets(which).astype(np.int64)
        for row in np.flatnonzero((which + 1) * seq_len > rows.filled):  # the last row of an evaluation set, if at all
            targets[row, rows.filled - which[row] * seq_len :] = IGNORED
        text_bytes += rows.text_bytes(which)
        ids.append(rows.inputs(which).astype(np.int64))
        labels.append(targets)
        inner += rows.inner_starts(which) if layout.doc_mask else [np.empty(0, dtype=np.int64)] * len(which)
    if padding_rows:
        ids.append(np.full((padding_rows, seq_len), separator, dtype=np.int64))
        labels.append(np.full((padding_rows, seq_len), IGNORED, dtype=np.int64))
        inner += [np.empty(0, dtype=np.int64)] * padding_rows
    input_ids, all_labels = np.concatenate(ids), np.concatenate(labels)
    packing = None
    if layout.always_packed or any(len(starts) for starts in inner):
        ends = [np.append(starts, seq_len) + row * seq_len for row, starts in enumerate(inner)]
        packing = Packing.from_offsets([0, *np.concatenate(ends).tolist()])
        input_ids, all_labels = input_ids.reshape(1, -1), all_labels.reshape(1, -1)
    return {
        "input_ids": torch.from_numpy(input_ids),
        "labels": torch.from_numpy(all_labels),
        "packing": packing,
        "tokens": int(np.count_nonzero(all_labels != IGNORED)),
        "bytes": text_bytes,
    }
