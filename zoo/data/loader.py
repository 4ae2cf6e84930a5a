"""Loaders: an endless stream of training batches whose position is exact, and evaluation batches in a fixed order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy

from zoo.errors import UserError

Batch = dict[str, Any]


class RowStream(Protocol):
    """Rows of a training set, without an end; row ``i`` depends on what ``identity`` names and on ``i`` alone.

    Attributes:
        epoch_rows: rows of one pass; the length of a loader follows from it, nothing else.
        identity: plain values that name the rows; a position is worth something only where they are equal.
    """

    epoch_rows: int
    identity: dict[str, Any]

    def trace(self, first: int, count: int) -> bytes:
        """What tells rows ``first`` to ``first + count`` from any others of this identity, such as their ids."""
        ...

    def batch(self, first: int, count: int) -> Batch:
        """The same rows as a batch."""
        ...

    def documents(self, first: int, count: int) -> np.ndarray:
        """The documents that the same rows hold parts of, by their numbers in the split, sorted; empty where none."""
        ...


class RowSet(Protocol):
    """Rows of an evaluation set, in a fixed order."""

    def __len__(self) -> int: ...

    def batch(self, which: np.ndarray, padding_rows: int) -> Batch:
        """Rows ``which`` as a batch, and behind them ``padding_rows`` rows without a label."""
        ...


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """How rows become batches, and which share of them this rank takes.

    Attributes:
        seq_len: tokens of one row.
        batch_tokens: tokens of one optimizer step, all ranks and micro-batches together.
        accumulate: micro-batches of one step.
        rank, world: this rank, and how many share a step.

    Raises:
        UserError: rows that are no whole number, or that ranks and micro-batches cannot share equally.
    """

    seq_len: int
    batch_tokens: int
    accumulate: int = 1
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        check_batch_tokens("batch_tokens", self.batch_tokens, self.seq_len)
        if self.rows % (self.world * self.accumulate):
            shares = f"{self.world} ranks x {self.accumulate} micro-batches"
            raise UserError(
                f"data: batch_tokens {self.batch_tokens} is {self.rows} rows of {self.seq_len}, which {shares} "
                f"cannot share equally; make the rows a multiple of {self.world * self.accumulate}"
            )

    @classmethod
    def of(cls, trainer: Trainer | None, *, seq_len: int, batch_tokens: int, training: bool) -> BatchShape:
        """The shape under ``trainer``: its data-parallel ranks and, in training, its accumulated micro-batches."""
        rank, world, accumulate = 0, 1, 1
        if trainer is not None:
            accumulate = trainer.accumulate_grad_batches if training else 1
            if isinstance(trainer.strategy, ParallelStrategy):
                # Of data-parallel ranks: those that share a row by tensor parallelism read the same one.
                share = trainer.strategy.distributed_sampler_kwargs
                rank, world = share["rank"], share["num_replicas"]
        return cls(seq_len=seq_len, batch_tokens=batch_tokens, accumulate=accumulate, rank=rank, world=world)

    @property
    def rows(self) -> int:
        """Rows of one optimizer step."""
        return self.batch_tokens // self.seq_len

    @property
    def micro_rows(self) -> int:
        """Rows of one micro-batch on one rank."""
        return self.rows // (self.world * self.accumulate)


def check_batch_tokens(name: str, batch_tokens: int, seq_len: int) -> None:
    """Refuse a batch that is no whole number of rows.

    Raises:
        UserError: with the setting's ``name``, both numbers and the next that would do.
    """
    if batch_tokens < seq_len or batch_tokens % seq_len:
        above = max(1, -(-batch_tokens // seq_len)) * seq_len
        raise UserError(f"data: {name} is {batch_tokens}, no multiple of the row length {seq_len}; the next is {above}")


def check_seed(name: str, seed: int) -> None:
    """Refuse a seed that no generator takes.

    Raises:
        UserError: below 0.
    """
    if seed < 0:
        raise UserError(f"data: {name} is {seed}, but a seed is a whole number from 0 on, for instance 0")


def check_vocabulary(trainer: Trainer | None, needed: int, owner: str) -> None:
    """Refuse a model, if the trainer has one, that lacks ids of its data.

    Raises:
        UserError: with ``owner``, to whom the ids belong, and both numbers.
    """
    if trainer is None or trainer.lightning_module is None:
        return
    given = trainer.lightning_module.hparams.get("vocab_size")
    if given is not None and given < needed:
        raise UserError(
            f"data: {owner} has {needed} ids, but the model's vocab_size is {given}; set model.vocab_size to "
            f"{needed} or more, or use the data the model was made for"
        )


class TrainLoader:
    """Training batches without an end; step ``i`` depends on the stream and ``i`` alone.

    Ranks and micro-batches share the rows of a step, so a step holds the same rows for any number of either, and the
    position, counted in steps, survives a change of both. Iterating yields ``len(loader)`` batches, about one pass over
    the rows, from where the loader stands, and moves it.

    Args:
        stream: the rows.
        shape: rows of a step and this rank's share.
    """

    def __init__(self, stream: RowStream, shape: BatchShape) -> None:
        self.stream, self.shape = stream, shape
        self._identity = {**stream.identity, "batch_tokens": shape.batch_tokens}
        self._step, self._micro = 0, 0
        self._order_hash = hashlib.sha256(repr(sorted(self._identity.items())).encode()).hexdigest()

    @property
    def step(self) -> int:
        """Steps whose first micro-batch was handed out."""
        return self._step + (self._micro > 0)

    @property
    def order_hash(self) -> str:
        """Hash of all rows handed out, in order, by whole steps: equal on every rank, for any number of ranks."""
        return self._order_hash

    def __len__(self) -> int:
        return max(1, self.stream.epoch_rows // self.shape.rows) * self.shape.accumulate

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(len(self)):
            step, micro = self._step, self._micro
            if micro == 0:
                trace = self.stream.trace(step * self.shape.rows, self.shape.rows)
                self._order_hash = hashlib.sha256(self._order_hash.encode() + trace).hexdigest()
            self._micro = (micro + 1) % self.shape.accumulate
            self._step = step + (self._micro == 0)
            yield self.batch(step, micro)

    def batch(self, step: int, micro: int = 0) -> Batch:
        """This rank's micro-batch ``micro`` of step ``step``, and its ``first_row`` in the stream; moves nothing."""
        first = self._first_row(step, self.shape.rank, micro)
        return {**self.stream.batch(first, self.shape.micro_rows), "first_row": first}

    def shares(self, row: int) -> Iterator[tuple[int, int, int]]:
        """(rank, micro-batch, first row) of all micro-batches of the step that reads ``row`` of the stream."""
        for rank in range(self.shape.world):
            for micro in range(self.shape.accumulate):
                yield rank, micro, self._first_row(row // self.shape.rows, rank, micro)

    def _first_row(self, step: int, rank: int, micro: int) -> int:
        return step * self.shape.rows + (rank * self.shape.accumulate + micro) * self.shape.micro_rows

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands and what it reads; plain types, equal on every rank."""
        position = {"step": self._step, "micro": self._micro, "accumulate": self.shape.accumulate}
        return {**self._identity, **position, "order_hash": self._order_hash}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken, on any number of ranks.

        Raises:
            UserError: other rows or batches than those of ``state``, named with both values; or a state from inside a
                step with another number of micro-batches.
        """
        for key, given in self._identity.items():
            stored = state.get(key)
            if stored != given:
                raise UserError(
                    f"data: the checkpoint was trained with {key} {stored!r}, but {given!r} is given; its position "
                    f"means nothing here. Set {key} back, or start a new run"
                )
        if state["micro"] and state["accumulate"] != self.shape.accumulate:
            raise UserError(
                f"data: the checkpoint stands inside a step of {state['accumulate']} micro-batches, but "
                f"{self.shape.accumulate} are given; resume with {state['accumulate']}, or from another checkpoint"
            )
        self._step, self._micro, self._order_hash = state["step"], state["micro"], state["order_hash"]


class EvalLoader:
    """Every row of a set once, in a fixed order, whatever the batch size or the number of ranks.

    Ranks get equally many batches of equal shape; where rows run out, rows without labels fill up.

    Args:
        rows: the rows.
        shape: ``batch_tokens`` is what all ranks together take at once.
    """

    def __init__(self, rows: RowSet, shape: BatchShape) -> None:
        self.rows, self.shape = rows, shape

    def __len__(self) -> int:
        return -(-len(self.rows) // self.shape.rows)

    def __iter__(self) -> Iterator[Batch]:
        for index in range(len(self)):
            yield self.batch(index)

    def batch(self, index: int) -> Batch:
        """This rank's share of batch ``index``."""
        taken = np.arange(index * self.shape.rows, min((index + 1) * self.shape.rows, len(self.rows)))
        share = -(-len(taken) // self.shape.world)
        mine = taken[self.shape.rank * share : (self.shape.rank + 1) * share]
        return self.rows.batch(mine, share - len(mine))
