"""DocumentData: what data modules of text share, wherever their documents lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import numpy as np
from lightning.pytorch import LightningDataModule

from zoo.data.loader import (
    BatchShape,
    EvalLoader,
    RowStream,
    TrainLoader,
    check_batch_tokens,
    check_seed,
    check_vocabulary,
)
from zoo.data.rows import DocumentRows, Layout, RowTable, TextRows
from zoo.data.tokenizer import Tokenizer
from zoo.errors import UserError


class DocumentData(LightningDataModule, ABC):
    """Documents as next-token batches: the loaders, what is measured, and what a checkpoint remembers.

    Args:
        tokenizer: of the documents.
        seq_len: tokens of one row.
        batch_tokens: tokens of one optimizer step, all ranks and micro-batches together.
        data_seed: seed of the order.
        doc_mask: documents inside a row do not see each other.
        val_tokens: validate on about so many tokens; None: all.
        val_batch_tokens: tokens of one evaluation batch, all ranks together; None: ``batch_tokens``.
        layout: ``auto``, or ``packed``: pack every batch.

    Raises:
        UserError: a size that does not fit.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        batch_tokens: int,
        data_seed: int,
        doc_mask: bool,
        val_tokens: int | None,
        val_batch_tokens: int | None,
        layout: Literal["auto", "packed"],
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size  # known before setup: the command line hands it to the model
        self.seq_len, self.batch_tokens, self.data_seed = seq_len, batch_tokens, data_seed
        self.layout = Layout(doc_mask=doc_mask, always_packed=layout == "packed")
        self.val_tokens = val_tokens
        self.val_batch_tokens = val_batch_tokens if val_batch_tokens is not None else batch_tokens
        if seq_len < 2:
            raise UserError(
                f"data: seq_len is {seq_len}, but a row needs at least 2 tokens to predict one from another"
            )
        check_seed("data_seed", data_seed)
        check_batch_tokens("batch_tokens", batch_tokens, seq_len)
        check_batch_tokens("val_batch_tokens", self.val_batch_tokens, seq_len)

    @abstractmethod
    def manifest(self) -> dict[str, Any]:
        """Documents, bytes and tokens per split, and the content hash; plain types."""

    @abstractmethod
    def train_stream(self) -> RowStream:
        """The training rows."""

    @abstractmethod
    def table(self, split: str) -> RowTable:
        """The rows of ``val`` or ``test``, the last one padded."""

    def setup(self, stage: str | None = None) -> None:
        """Refuse a model with a smaller vocabulary."""
        del stage  # every stage reads the same documents
        check_vocabulary(self.trainer, self.vocab_size, f"the tokenizer {self.tokenizer.identity!r}")

    def train_dataloader(self) -> TrainLoader:
        """Endless training batches with a resumable position."""
        shape = BatchShape.of(self.trainer, seq_len=self.seq_len, batch_tokens=self.batch_tokens, training=True)
        return TrainLoader(self.train_stream(), shape)

    def val_dataloader(self) -> EvalLoader:
        """Validation rows, each label once, in a fixed order."""
        return EvalLoader(self.eval_rows("val"), self._eval_shape())

    def test_dataloader(self) -> EvalLoader:
        """Test rows, each label once, in a fixed order."""
        return EvalLoader(self.eval_rows("test"), self._eval_shape())

    def predict_dataloader(self) -> EvalLoader:
        """The test rows with the number of each position's document, so that losses can be given by document."""
        return EvalLoader(DocumentRows(self.table("test"), layout=self.layout), self._eval_shape())

    def eval_rows(self, split: str = "val") -> TextRows:
        """The rows of ``val`` or ``test`` that are evaluated."""
        limit = self.val_tokens if split == "val" else None
        return TextRows(self.table(split), layout=self.layout, max_tokens=limit)

    def eval_text(self, split: str = "val") -> np.ndarray:
        """Ids that are predicted in the evaluation of ``val`` or ``test``, in order: what entropies are of."""
        return self.eval_rows(split).labels()

    def eval_bytes(self, split: str = "val") -> int:
        """UTF-8 bytes that :meth:`eval_text` stands for: what its bits are divided by."""
        return self.eval_rows(split).text_bytes()

    def train_text(self, first: int, count: int) -> list[str]:
        """Rows ``first`` to ``first + count`` of the training stream as text, to look at what a step was trained on."""
        ids = self.train_stream().batch(first, count)["input_ids"].reshape(count, self.seq_len)
        return [self.tokenizer.decode(row.numpy()) for row in ids]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must know of its data: the tokenizer and the manifest."""
        return {"tokenizer": self.tokenizer.identity, "manifest": self.manifest()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse a checkpoint of another tokenizer.

        Raises:
            UserError: with both identities.
        """
        stored = state_dict["tokenizer"]
        if stored != self.tokenizer.identity:
            raise UserError(
                f"data: the checkpoint was trained with the tokenizer {stored!r}, but {self.tokenizer.identity!r} is "
                "given; set data.tokenizer back, or name the shards it was trained on"
            )

    def _eval_shape(self) -> BatchShape:
        return BatchShape.of(self.trainer, seq_len=self.seq_len, batch_tokens=self.val_batch_tokens, training=False)
