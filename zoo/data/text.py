"""TokenData: text as packed batches, the same for every model, with an exact position in the checkpoint."""

from __future__ import annotations

from typing import Any, Literal

from zoo.data.corpus import Corpus, build_corpus
from zoo.data.document_data import DocumentData
from zoo.data.rows import Rows, TextStream, lay_out
from zoo.data.sources import DOCUMENT_BYTES, TEXT_ENDINGS, check_source, read_documents
from zoo.data.tokenizer import load_tokenizer

# Shares of validation and test where none are given. One document in a hundred is enough of a large text, but would
# leave two of the excerpt's 176, and six of the standard library's six hundred or so.
FRACTIONS = {"excerpt": 0.1, "stdlib": 0.05}
FRACTION = 0.01


class TokenData(DocumentData):
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
        tokenizer: `byte`, the path of a `tokenizers` JSON file, or `tiktoken:` and a name or a file.
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
        self.source = source if source is not None else "excerpt"
        default = FRACTIONS.get(self.source, FRACTION) if isinstance(self.source, str) else FRACTION
        self.val_fraction = val_fraction if val_fraction is not None else default
        self.test_fraction = test_fraction if test_fraction is not None else self.val_fraction
        self.limit_bytes, self.document_bytes = limit_bytes, document_bytes
        self.endings = tuple(endings) if endings is not None else TEXT_ENDINGS
        check_source(self.source)
        super().__init__(
            load_tokenizer(tokenizer),
            seq_len=seq_len,
            batch_tokens=batch_tokens,
            data_seed=data_seed,
            doc_mask=doc_mask,
            val_tokens=val_tokens,
            val_batch_tokens=val_batch_tokens,
            layout=layout,
        )
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
        self.corpus  # noqa: B018 - reading is what the property does at its first use
        super().setup(stage)

    def train_stream(self) -> TextStream:
        """The training rows."""
        return TextStream(
            self.corpus.splits["train"],
            seq_len=self.seq_len,
            data_seed=self.data_seed,
            content_hash=self.corpus.content_hash,
            layout=self.layout,
        )

    def table(self, split: str) -> Rows:
        """The rows of ``val`` or ``test``, the last one padded."""
        return lay_out(self.corpus.splits[split], self.seq_len, keep_tail=True)
