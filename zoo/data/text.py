"""TokenData: text as packed batches, the same for every model, with an exact position in the checkpoint."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from lightning.pytorch import LightningDataModule

from zoo.data.corpus import Corpus, build_corpus
from zoo.data.loader import BatchShape, EvalLoader, TrainLoader, check_batch_tokens, check_seed, check_vocabulary
from zoo.data.rows import DocumentRows, Layout, TextRows, TextStream
from zoo.data.sources import DOCUMENT_BYTES, TEXT_ENDINGS, check_source, read_documents
from zoo.data.tokenizer import load_tokenizer
from zoo.errors import UserError

# Shares of validation and test where none are given. One document in a hundred is enough of a large text, but would
# leave two of the excerpt's 176, and six of the standard library's six hundred or so.
FRACTIONS = {"excerpt": 0.1, "stdlib": 0.05}
FRACTION = 0.01


class TokenData(LightningDataModule):
    """Text as next-token batches.

    A batch is a dict: `input_ids` and `labels`, int64, and `packing`. `labels[t]` belongs to `logits[t]`, -100 does not
    count. Each document is fed as separator, token, token, ... and predicts token, token, ..., separator, so its first
    token is predicted from the separator alone and its real end is predicted too. Either the shape is [1, batch] with a
    Packing at every document and row, or, where no document begins inside a row, [rows, seq_len] and None. `tokens` and
    `bytes` count the labels and their UTF-8 bytes, as plain integers.

    Args:
        source: `excerpt` (public-domain plays and sonnets, ships with the package), `stdlib` (the Python standard
            library's own sources), a text file, a .jsonl file with a "text" field per line, a folder, or a list of
            these. None: `excerpt`.
        seq_len: Tokens of one row, the training context, at least 2.
        batch_tokens: Tokens of one optimizer step, all ranks and micro-batches together; a multiple of seq_len. The
            trainer's accumulate_grad_batches says into how many micro-batches it is cut.
        data_seed: Seed of the order of the documents, independent of every other seed.
        tokenizer: `byte`, or the path of a `tokenizers` JSON file.
        doc_mask: Documents inside a row do not see each other.
        val_fraction: Share of the documents for validation. None: 0.01, but 0.1 for the excerpt and
            0.05 for the standard library, which have few documents.
        test_fraction: Share of the documents for the test. None: like val_fraction.
        val_tokens: Validate on about so many tokens, spread evenly over the split. None: all.
        val_batch_tokens: Tokens of one validation or test batch, all ranks together. None: batch_tokens.
        limit_bytes: Keep so many bytes of text, chosen by content. None: all.
        document_bytes: Longer texts are cut at the first blank line after so many bytes.
        endings: File names that count in a folder.
        layout: `auto`, or `packed`: pack every batch, even where it makes no difference.

    Raises:
        UserError: a size that does not fit, a source that is not there, a split without documents: with the value and
            what to do.
    """

    def __init__(
        self,
        source: str | list[str] | None = None,
        *,
        seq_len: int,
        batch_tokens: int,
        data_seed: int = 0,
        tokenizer: str = "byte",
        doc_mask: bool = True,
        val_fraction: float | None = None,
        test_fraction: float | None = None,
        val_tokens: int | None = None,
        val_batch_tokens: int | None = None,
        limit_bytes: int | None = None,
        document_bytes: int = DOCUMENT_BYTES,
        endings: list[str] | None = None,
        layout: Literal["auto", "packed"] = "auto",
    ) -> None:
        super().__init__()
        self.source = source if source is not None else "excerpt"
        self.seq_len, self.batch_tokens, self.data_seed = seq_len, batch_tokens, data_seed
        self.layout = Layout(doc_mask=doc_mask, always_packed=layout == "packed")
        default = FRACTIONS.get(self.source, FRACTION) if isinstance(self.source, str) else FRACTION
        self.val_fraction = val_fraction if val_fraction is not None else default
        self.test_fraction = test_fraction if test_fraction is not None else self.val_fraction
        self.val_tokens = val_tokens
        self.val_batch_tokens = val_batch_tokens if val_batch_tokens is not None else batch_tokens
        self.limit_bytes, self.document_bytes = limit_bytes, document_bytes
        self.endings = tuple(endings) if endings is not None else TEXT_ENDINGS
        check_source(self.source)
        self._check_sizes()
        self.tokenizer = load_tokenizer(tokenizer)
        self.vocab_size = self.tokenizer.vocab_size  # known before setup: the command line hands it to the model
        self._corpus: Corpus | None = None

    @property
    def corpus(self) -> Corpus:
        """The encoded splits; read at the first use."""
        if self._corpus is None:
            documents = read_documents(self.source, endings=self.endings, document_bytes=self.document_bytes)
            self._corpus = build_corpus(
                documents,
                self.tokenizer,
                val_fraction=self.val_fraction,
                test_fraction=self.test_fraction,
                limit_bytes=self.limit_bytes,
            )
        return self._corpus

    def manifest(self) -> dict[str, Any]:
        """Documents, bytes and tokens per split, content hash, tokenizer, split salt; plain types."""
        return self.corpus.manifest()

    def __str__(self) -> str:
        # Lightning's own asks every loader for a dataset, which ours do not have.
        return f"TokenData({self.source!r}, seq_len={self.seq_len}, batch_tokens={self.batch_tokens})"

    def setup(self, stage: str | None = None) -> None:
        """Read, split and encode the text, once per process; refuse a model with a smaller vocabulary."""
        del stage  # every stage reads the same text
        self.corpus  # noqa: B018 - reading is what the property does at its first use
        check_vocabulary(self.trainer, self.vocab_size, f"the tokenizer {self.tokenizer.identity!r}")

    def train_dataloader(self) -> TrainLoader:
        """Endless training batches with a resumable position."""
        stream = TextStream(
            self.corpus.splits["train"],
            seq_len=self.seq_len,
            data_seed=self.data_seed,
            content_hash=self.corpus.content_hash,
            layout=self.layout,
        )
        shape = BatchShape.of(self.trainer, seq_len=self.seq_len, batch_tokens=self.batch_tokens, training=True)
        return TrainLoader(stream, shape)

    def val_dataloader(self) -> EvalLoader:
        """Validation rows, each label once, in a fixed order."""
        return self._eval_loader("val")

    def test_dataloader(self) -> EvalLoader:
        """Test rows, each label once, in a fixed order."""
        return self._eval_loader("test")

    def predict_dataloader(self) -> EvalLoader:
        """The test rows with the number of each position's document, so that losses can be given by document."""
        rows = DocumentRows(self.corpus.splits["test"], seq_len=self.seq_len, layout=self.layout)
        return EvalLoader(rows, self._eval_shape())

    def eval_rows(self, split: str = "val") -> TextRows:
        """The rows of ``val`` or ``test`` that are evaluated."""
        limit = self.val_tokens if split == "val" else None
        return TextRows(self.corpus.splits[split], seq_len=self.seq_len, layout=self.layout, max_tokens=limit)

    def eval_text(self, split: str = "val") -> np.ndarray:
        """Ids that are predicted in the evaluation of ``val`` or ``test``, in order: what entropies are of."""
        return self.eval_rows(split).labels()

    def eval_bytes(self, split: str = "val") -> int:
        """UTF-8 bytes that :meth:`eval_text` stands for: what its bits are divided by."""
        return self.eval_rows(split).text_bytes()

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
                "given; set data.tokenizer back"
            )

    def _check_sizes(self) -> None:
        if self.seq_len < 2:
            raise UserError(
                f"data: seq_len is {self.seq_len}, but a row needs at least 2 tokens to predict one from another"
            )
        check_seed("data_seed", self.data_seed)
        check_batch_tokens("batch_tokens", self.batch_tokens, self.seq_len)
        check_batch_tokens("val_batch_tokens", self.val_batch_tokens, self.seq_len)

    def _eval_loader(self, split: str) -> EvalLoader:
        return EvalLoader(self.eval_rows(split), self._eval_shape())

    def _eval_shape(self) -> BatchShape:
        return BatchShape.of(self.trainer, seq_len=self.seq_len, batch_tokens=self.val_batch_tokens, training=False)
