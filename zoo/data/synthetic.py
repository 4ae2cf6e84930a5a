"""TaskData: synthetic tasks as batches, drawn while training."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule

from zoo.data.loader import Batch, BatchShape, EvalLoader, TrainLoader, check_batch_tokens, check_seed, check_vocabulary
from zoo.data.rows import IGNORED
from zoo.data.tasks import BLOCK, Task, TaskRows, make_task
from zoo.errors import UserError
from zoo.metrics import TaskScore

ONLINE_EPOCH_ROWS = 100 * BLOCK  # an endless stream has no epochs; loaders must have a length, and this is it
# So many bits, and rows of two splits meet with a chance below 1e-7 even for a million of each: nothing to look for.
ROOMY_BITS = 64.0


class TaskData(LightningDataModule):
    """A synthetic task, such as recall of pairs, parity, or a needle in a haystack; docs/tasks.md describes each.

    Training rows are drawn as they are needed, row i from the task's seed and i alone. A batch is a dict: `input_ids`
    and `labels` [rows, seq_len] int64, `labels[t]` belongs to `logits[t]` and -100 does not count; `packing` None;
    `slices`, a dict of masks [rows, seq_len], and under `legal`, where a task has several right answers, the sets of
    them as bits; `stale` [rows, seq_len], outdated answers, -100 where there is none; `tokens`, how many labels count.

    Args:
        task: Its name: `mqar`, `overwrite`, `parity`, `arithmetic`, `mad_recall`, `mad_fuzzy`, `mad_copy`,
            `mad_memorize`, `mad_compress`, `niah` or `regbench`.
        batch_tokens: Tokens of one optimizer step, all ranks and micro-batches together; a multiple of the task's row
            length.
        profile: A named set of the task's options, such as `cpu` or `gpu`. None: the task's first.
        options: Options of the task that override the profile's.
        task_seed: Seed of the rows, independent of every other seed.
        train_rows: Train on so many rows, again and again, shuffled anew each time. None: never see a row twice.
        val_rows: Rows of the validation set.
        test_rows: Rows of the test set; 1000 give a standard error of at most 1.6 points.

    Raises:
        UserError: an unknown task, profile or option, settings that cannot be met, or a batch that does not fit.
    """

    def __init__(
        self,
        task: str = "overwrite",
        *,
        batch_tokens: int,
        profile: str | None = None,
        options: dict[str, bool | int | float | str] | None = None,
        task_seed: int = 0,
        train_rows: int | None = None,
        val_rows: int = BLOCK,
        test_rows: int = 2 * BLOCK,
    ) -> None:
        super().__init__()
        self.task: Task = make_task(task, profile, options)
        self.seq_len, self.vocab_size = self.task.seq_len, self.task.vocab_size
        self.batch_tokens, self.task_seed = batch_tokens, task_seed
        self.train_rows, self.val_rows, self.test_rows = train_rows, val_rows, test_rows
        check_seed("task_seed", task_seed)
        check_batch_tokens("batch_tokens", batch_tokens, self.seq_len)
        for name, rows in (("train_rows", train_rows), ("val_rows", val_rows), ("test_rows", test_rows)):
            if rows is not None and rows < 1:
                raise UserError(f"data: {name} is {rows}, but must be at least 1")
        self._eval: dict[str, TaskRows] = {}
        self.overlap: dict[str, int] = {}

    @property
    def decoder(self) -> bool:
        """Whether the task's rows are restored, so that the model needs a decoder."""
        return self.task.decoder

    def __str__(self) -> str:
        # Lightning's own asks every loader for a dataset, which ours do not have.
        return f"TaskData({self.task!r}, seq_len={self.seq_len}, batch_tokens={self.batch_tokens})"

    def setup(self, stage: str | None = None) -> None:
        """Draw the rows that the stage evaluates; refuse a model with a smaller vocabulary."""
        check_vocabulary(self.trainer, self.vocab_size, f"the task {self.task.name}")
        for split in {"fit": ("val",), "validate": ("val",)}.get(stage or "", ("test",)):
            self.eval_rows(split)

    def train_dataloader(self) -> TrainLoader:
        """Endless training batches with a resumable position."""
        stream = TaskStream(self.task, seed=self.task_seed, rows=self.train_rows)
        return TrainLoader(stream, self._shape(training=True))

    def val_dataloader(self) -> EvalLoader:
        """Validation rows, in a fixed order."""
        return EvalLoader(FixedRows(self.eval_rows("val")), self._shape(training=False))

    def test_dataloader(self) -> EvalLoader:
        """Test rows, in a fixed order."""
        return EvalLoader(FixedRows(self.eval_rows("test")), self._shape(training=False))

    def predict_dataloader(self) -> EvalLoader:
        """The test rows again."""
        return self.test_dataloader()

    def new_score(self) -> TaskScore:
        """A metric for this task's answers."""
        task = self.task
        ids = task.vocab_size if task.by_class else None
        return TaskScore(task.slice_names, classes=task.classes, ids=ids, legal=task.several_right)

    def eval_rows(self, split: str) -> TaskRows:
        """The rows of ``val`` or ``test``, drawn at the first use.

        Where a task has so few rows that splits can meet, ``overlap[split]`` counts the rows that also occur in
        training (in the first 102,400 of an endless stream). They are replaced by later rows of the split, unless the
        task's short rows must meet, or there are not enough others: then they stay.
        """
        if split not in self._eval:
            wanted = self.val_rows if split == "val" else self.test_rows
            self._eval[split], self.overlap[split] = self._draw(split, wanted)
        return self._eval[split]

    def _draw(self, split: str, wanted: int) -> tuple[TaskRows, int]:
        needed = -(-wanted // BLOCK)
        if self.task.log2_rows >= ROOMY_BITS:
            blocks = [self.task.block(split, number, self.task_seed) for number in range(needed)]
            return TaskRows.join(blocks)[slice(wanted)], 0
        seen = self._training_rows()
        small = np.min_scalar_type(self.task.vocab_size)
        kept, overlapping = [], []
        for number in range(2 * needed if self.task.replace_overlap else needed):  # enough to replace half of the rows
            rows = self.task.block(split, number, self.task_seed)
            if not self.task.replace_overlap:
                rows = rows[slice(wanted - number * BLOCK)]  # what is not scored is not counted either
            met = np.array([row.tobytes() in seen for row in rows.tokens.astype(small)])
            overlapping.append(rows[met])
            kept.append(rows[~met] if self.task.replace_overlap else rows)
            if sum(map(len, kept)) >= wanted:
                break
        return TaskRows.join([*kept, *overlapping])[slice(wanted)], sum(map(len, overlapping))

    def _training_rows(self) -> set[bytes]:
        count = self.train_rows if self.train_rows is not None else ONLINE_EPOCH_ROWS
        blocks = (self.task.block("train", number, self.task_seed) for number in range(-(-count // BLOCK)))
        tokens = np.concatenate([block.tokens for block in blocks])[:count]
        return {row.tobytes() for row in tokens.astype(np.min_scalar_type(self.task.vocab_size))}

    def _shape(self, *, training: bool) -> BatchShape:
        return BatchShape.of(self.trainer, seq_len=self.seq_len, batch_tokens=self.batch_tokens, training=training)


class TaskStream:
    """Training rows of a task, drawn block by block.

    Args:
        task: the task.
        seed: seed of the rows.
        rows: repeat so many rows, shuffled anew each time; None: all are new.
    """

    def __init__(self, task: Task, *, seed: int, rows: int | None) -> None:
        self.task, self.seed, self.repeated = task, seed, rows
        self.epoch_rows = rows if rows is not None else ONLINE_EPOCH_ROWS
        self.identity: dict[str, Any] = {**task.identity(), "task_seed": seed, "train_rows": rows}
        self._blocks: dict[int, TaskRows] = {}  # a dictionary can be pickled, which functools.lru_cache cannot
        self._whole: TaskRows | None = None

    def trace(self, first: int, count: int) -> bytes:
        """Input ids of rows ``first`` to ``first + count``."""
        return self._rows(first, count).tokens.astype("<u4").tobytes()

    def batch(self, first: int, count: int) -> Batch:
        """The same rows as a batch."""
        return task_batch(self._rows(first, count))

    def documents(self, first: int, count: int) -> np.ndarray:
        """None: a task's row is named by its number alone."""
        del first, count
        return np.empty(0, dtype=np.int64)

    def _rows(self, first: int, count: int) -> TaskRows:
        parts = []
        while count:
            part = self._new(first, count) if self.repeated is None else self._again(first, count)
            parts.append(part)
            first, count = first + len(part), count - len(part)
        return TaskRows.join(parts)

    def _new(self, first: int, count: int) -> TaskRows:
        number, place = divmod(first, BLOCK)
        return self._block(number)[slice(place, place + count)]

    def _block(self, number: int) -> TaskRows:
        """Block ``number``; the last two are kept, as a batch may begin in one and end in the next."""
        if number not in self._blocks:
            last = list(self._blocks.items())[-1:]
            self._blocks = dict([*last, (number, self.task.block("train", number, self.seed))])
        return self._blocks[number]

    def _again(self, first: int, count: int) -> TaskRows:
        if self._whole is None:
            blocks = [self._block(number) for number in range(-(-self.epoch_rows // BLOCK))]
            self._whole = TaskRows.join(blocks)[slice(self.epoch_rows)]
        epoch, place = divmod(first, self.epoch_rows)
        # Splits are drawn with keys (split, block); a key of three numbers meets none of them.
        random = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(0, epoch, 0)))
        return self._whole[random.permutation(self.epoch_rows)[place : place + count]]


class FixedRows:
    """Rows of an evaluation set."""

    def __init__(self, rows: TaskRows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, which: np.ndarray, padding_rows: int = 0) -> Batch:
        """Rows ``which`` as a batch, and behind them ``padding_rows`` rows without a label."""
        padding = self.rows[np.zeros(padding_rows, dtype=np.int64)]
        blank = TaskRows(
            padding.tokens,
            np.full_like(padding.targets, IGNORED),
            {name: np.zeros_like(mask) for name, mask in padding.slices.items()},
            np.full_like(padding.stale, IGNORED),
            padding.legal,
        )
        return task_batch(TaskRows.join([self.rows[which], blank]))


def task_batch(rows: TaskRows) -> Batch:
    """Rows of a task as the batch that a training step takes."""
    slices = {name: torch.from_numpy(mask) for name, mask in rows.slices.items()}
    if rows.legal is not None:
        slices["legal"] = torch.from_numpy(rows.legal)
    return {
        "input_ids": torch.from_numpy(rows.tokens),
        "labels": torch.from_numpy(rows.targets),
        "packing": None,
        "slices": slices,
        "stale": torch.from_numpy(rows.stale),
        "tokens": int(np.count_nonzero(rows.targets != IGNORED)),
    }
