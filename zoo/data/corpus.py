"""Documents as token ids, split by their content alone, with a manifest of what was read."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zoo.data.tokenizer import ByteTokenizer, Tokenizer
from zoo.errors import UserError

SPLITS = ("train", "val", "test")
SALT = b"zoo-split-1\0"  # enters the hash that chooses a document's split; another salt is another split


@dataclass(frozen=True, eq=False)
class Split:
    """The documents of one split, each as ``separator, id, id, ...``, laid end to end.

    A document's first input is the separator and its last target is the separator of whatever follows, so each of its
    tokens and its end are predicted inside the document itself.

    Attributes:
        tokens: [S], unsigned ids.
        starts: int64 [documents + 1], where each document begins; the last is S.
        weights: uint16 [S], UTF-8 bytes each id stands for; None: one per id, none for a separator.
        bytes: UTF-8 bytes of all documents.
        separator: the separator's id.
    """

    tokens: np.ndarray
    starts: np.ndarray
    weights: np.ndarray | None
    bytes: int
    separator: int

    @property
    def documents(self) -> int:
        """The number of documents."""
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        """int64 [documents], tokens of each document, its separator included."""
        return np.diff(self.starts)

    def document(self, n: int) -> np.ndarray:
        """Ids of document ``n`` without its separator."""
        return self.tokens[self.starts[n] + 1 : self.starts[n + 1]]


@dataclass(frozen=True, eq=False)
class Corpus:
    """The three splits of a text, encoded.

    Attributes:
        splits: by the names ``train``, ``val`` and ``test``.
        content_hash: of all documents, tokenizer and fractions; equal hashes give equal batches.
        tokenizer: identity of the tokenizer.
        fractions: shares of ``val`` and ``test``.
    """

    splits: dict[str, Split]
    content_hash: str
    tokenizer: str
    fractions: tuple[float, float]

    def manifest(self) -> dict[str, Any]:
        """Documents, bytes and tokens per split, with all that identifies them; plain types only."""
        counts = {
            name: {"documents": split.documents, "bytes": split.bytes, "tokens": len(split.tokens)}
            for name, split in self.splits.items()
        }
        return {
            "splits": counts,
            "content_hash": self.content_hash,
            "tokenizer": self.tokenizer,
            "split_salt": SALT.rstrip(b"\0").decode(),
            "val_fraction": self.fractions[0],
            "test_fraction": self.fractions[1],
        }


def build_corpus(
    documents: Sequence[str],
    tokenizer: Tokenizer,
    *,
    val_fraction: float,
    test_fraction: float,
    limit_bytes: int | None = None,
) -> Corpus:
    """Split ``documents`` by the hash of their content and encode them.

    A document's split depends on its content alone, and so does its place inside the split: neither file names nor the
    order of reading matter.

    Args:
        documents: texts without duplicates.
        tokenizer: encodes them.
        val_fraction, test_fraction: expected shares of documents, each in (0, 1), together below 1.
        limit_bytes: keep so many bytes of documents, drawn by their hash; None: all.

    Raises:
        UserError: fractions out of range, or a split without documents; with counts and a cure.
    """
    if not (0 < val_fraction < 1 and 0 < test_fraction < 1 and val_fraction + test_fraction < 1):
        raise UserError(
            f"data: val_fraction {val_fraction} and test_fraction {test_fraction} must be above 0 and together "
            "below 1, for instance 0.01 each"
        )
    hashed = sorted(_hashed(text) for text in documents)
    if limit_bytes is not None:
        sizes = itertools.accumulate(len(text.encode("utf-8")) for _, _, text in hashed)
        hashed = [entry for entry, size in zip(hashed, sizes) if size <= limit_bytes]
    members: dict[str, list[str]] = {name: [] for name in SPLITS}
    content = hashlib.sha256(f"{tokenizer.identity} {val_fraction!r} {test_fraction!r}".encode())
    for order, share, text in hashed:
        content.update(order)
        members[_split_of(share, val_fraction, test_fraction)].append(text)
    _refuse_empty(members, limit_bytes)
    splits = {name: _encode(texts, tokenizer) for name, texts in members.items()}
    return Corpus(splits, content.hexdigest()[:16], tokenizer.identity, (val_fraction, test_fraction))


def split_name(text: str, *, val_fraction: float = 0.01, test_fraction: float = 0.01) -> str:
    """The split that a document belongs to: ``test``, ``val`` or ``train``."""
    return _split_of(_hashed(text)[1], val_fraction, test_fraction)


def id_dtype(vocab_size: int) -> np.dtype:
    """The smallest type that holds every id, of 2 bytes or of 4."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def _hashed(text: str) -> tuple[bytes, float, str]:
    """The key that orders documents, the number in [0, 1) that chooses the split, and the text itself."""
    digest = hashlib.sha256(SALT + text.encode("utf-8")).digest()
    # The order must not follow the share, or a byte limit would keep the test split and drop the rest.
    return digest[8:], int.from_bytes(digest[:8], "big") / 2**64, text


def _split_of(share: float, val_fraction: float, test_fraction: float) -> str:
    if share < test_fraction:
        return "test"
    return "val" if share < test_fraction + val_fraction else "train"


def _refuse_empty(members: dict[str, list[str]], limit_bytes: int | None) -> None:
    empty = [name for name, texts in members.items() if not texts]
    if not empty:
        return
    counts = ", ".join(f"{len(texts)} {name}" for name, texts in members.items())
    cure = "raise val_fraction and test_fraction, lower document_bytes so that there are more documents, or add text"
    if limit_bytes is not None:
        cure = f"raise limit_bytes (now {limit_bytes}), or {cure}"
    raise UserError(f"data: no document falls into the split {empty[0]!r} ({counts}); {cure}")


def _encode(texts: Sequence[str], tokenizer: Tokenizer) -> Split:
    dtype = id_dtype(tokenizer.vocab_size)
    separator = tokenizer.separator
    sizes = [len(text.encode("utf-8")) for text in texts]
    if isinstance(tokenizer, ByteTokenizer):  # every byte at once: 30 MB in a tenth of a second
        lengths = np.array(sizes, dtype=np.int64) + 1
        starts = np.concatenate([[0], np.cumsum(lengths)])
        tokens = np.empty(starts[-1], dtype=dtype)
        is_text = np.ones(len(tokens), dtype=bool)
        is_text[starts[:-1]] = False
        tokens[is_text] = np.frombuffer("".join(texts).encode("utf-8"), dtype=np.uint8)
        tokens[starts[:-1]] = separator
        return Split(tokens, starts, None, sum(sizes), separator)
    encoded = tokenizer.encode_batch(texts)
    starts = np.concatenate([[0], np.cumsum([len(ids) + 1 for ids, _ in encoded], dtype=np.int64)])
    tokens = np.concatenate([np.concatenate([[separator], ids]) for ids, _ in encoded]).astype(dtype)
    widths = [found for _, found in encoded if found is not None]  # of every text: only bytes have none
    weights = np.concatenate([np.append(0, found) for found in widths]).astype(np.uint16)
    return Split(tokens, starts, weights, sum(sizes), separator)
