"""ShardData: token shards on disk as packed batches, for texts that memory cannot hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from zoo.data.document_data import DocumentData
from zoo.data.shard_rows import ShardRows, ShardStream
from zoo.data.shards import ShardedSplit, check_content, check_sizes, read_index
from zoo.data.tokenizer import load_tokenizer
from zoo.errors import UserError


class ShardData(DocumentData):
    """Token shards, which `zoo data prepare` wrote, as next-token batches.

    Batches are those of TokenData. Each epoch cuts rows from another place on and takes them in another order, which is
    computed from data_seed and the row's number alone, so it needs no memory and is entered anywhere.

    Args:
        folder: What `zoo data prepare` wrote; it brings its tokenizer.
        seq_len: Tokens of one row, the training context, at least 2.
        batch_tokens: Tokens of one optimizer step, all ranks and micro-batches together; a multiple of seq_len. The
            trainer's accumulate_grad_batches says into how many micro-batches it is cut.
        data_seed: Seed of the order, independent of every other seed.
        tokenizer: Refuse shards of another tokenizer than this one, written as for TokenData. None: take theirs.
        doc_mask: Documents inside a row do not see each other.
        val_tokens: Validate on about so many tokens, spread evenly over the split. None: all.
        val_batch_tokens: Tokens of one validation or test batch, all ranks together. None: batch_tokens.
        layout: `auto`, or `packed`: pack every batch, even where it makes no difference.
        verify: `sizes`, or `content`: compare every file with its checksum before training, which reads all of them.

    Raises:
        UserError: a size that does not fit, shards that are missing, damaged, unfinished or of another tokenizer: with
            the value and what to do.
    """

    def __init__(
        self,
        folder: str,
        *,
        seq_len: int,
        batch_tokens: int,
        data_seed: int = 0,
        tokenizer: str | None = None,
        doc_mask: bool = True,
        val_tokens: int | None = None,
        val_batch_tokens: int | None = None,
        layout: Literal["auto", "packed"] = "auto",
        verify: Literal["sizes", "content"] = "sizes",
    ) -> None:
        self.folder, self.verify = folder, verify
        self.index = read_index(Path(folder))
        check_sizes(Path(folder), self.index)
        written = self.index.tokenizer
        own = load_tokenizer(written["file"], Path(folder))
        if own.identity != written["identity"]:
            raise UserError(
                f"data: the tokenizer that lies in {folder!r} is {own.identity!r}, but the shards were written with "
                f"{written['identity']!r}; restore its file"
            )
        if tokenizer is not None and (given := load_tokenizer(tokenizer)).identity != own.identity:
            raise UserError(
                f"data: the shards in {folder!r} were written with the tokenizer {own.identity!r}, but "
                f"{given.identity!r} is given; leave data.tokenizer out, or prepare shards with it"
            )
        super().__init__(
            own,
            seq_len=seq_len,
            batch_tokens=batch_tokens,
            data_seed=data_seed,
            doc_mask=doc_mask,
            val_tokens=val_tokens,
            val_batch_tokens=val_batch_tokens,
            layout=layout,
        )

    def __str__(self) -> str:
        # Lightning's own asks every loader for a dataset, which ours do not have.
        return f"ShardData({self.folder!r}, seq_len={self.seq_len}, batch_tokens={self.batch_tokens})"

    def prepare_data(self) -> None:
        """Compare every file with its checksum, if asked for; once a machine."""
        if self.verify == "content":
            check_content(Path(self.folder), self.index)

    def manifest(self) -> dict[str, Any]:
        """Documents, bytes and tokens per split, content hash and tokenizer; plain types."""
        return {
            "splits": self.index.counts(),
            "content_hash": self.index.content_hash,
            "tokenizer": self.tokenizer.identity,
        }

    def train_stream(self) -> ShardStream:
        """The training rows."""
        return ShardStream(
            self._split("train"),
            seq_len=self.seq_len,
            data_seed=self.data_seed,
            content_hash=self.index.content_hash,
            layout=self.layout,
        )

    def table(self, split: str) -> ShardRows:
        """The rows of ``val`` or ``test``, the last one padded."""
        return ShardRows(self._split(split), self.seq_len, padded=True)

    def _split(self, name: str) -> ShardedSplit:
        return ShardedSplit(Path(self.folder), self.index, name)
