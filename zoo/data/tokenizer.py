"""Text to token ids and back: bytes by default, a `tokenizers` JSON file, or a table of `tiktoken`'s."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from zoo.errors import UserError

SEPARATOR_NAMES = (
    "<|endoftext|>",
    "</s>",
    "<eos>",
    "<|end_of_text|>",
    "[SEP]",
)  # looked for in a JSON file, in this order
SAVED_AS = "tokenizer.json"

Encoded = tuple[np.ndarray, np.ndarray | None]
"""Ids, int64 [n], and the UTF-8 bytes that each stands for, uint16 [n]; None: one byte each."""


class Tokenizer(Protocol):
    """What the data modules, ``generate`` and the checkpoints need of a tokenizer.

    Attributes:
        vocab_size: V; every id is below it.
        separator: the id that stands before, between and after documents: prefix (BOS) and end (EOS) alike.
        identity: names the tokenizer and its contents; kept in checkpoints, compared before training goes on.
    """

    vocab_size: int
    separator: int
    identity: str

    def encode(self, text: str) -> np.ndarray:
        """Ids of ``text``, int64 [n], without separators."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        """Ids and byte counts of every text."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of ``ids``; separators are left out, broken UTF-8 becomes U+FFFD."""
        ...

    def byte_counts(self, text: str) -> np.ndarray:
        """UTF-8 bytes that each id of ``encode(text)`` stands for, uint16 [n]; they sum to the bytes of ``text``."""
        ...

    def saved(self) -> tuple[str, dict[str, bytes]]:
        """What :func:`load_tokenizer` takes to rebuild it, and the files, by name, that this needs in its folder."""
        ...


class ByteTokenizer:
    """The 256 bytes of UTF-8 text, and 256 for the document separator: V is 257."""

    vocab_size = 257
    separator = 256
    identity = "byte-257"

    def encode(self, text: str) -> np.ndarray:
        """Ids of ``text``, int64 [bytes]."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        """The ids of every text; each is one byte."""
        return [(self.encode(text), None) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of ``ids``; separators are left out, broken UTF-8 becomes U+FFFD.

        Raises:
            UserError: an id outside 0..256.
        """
        ids = np.asarray(ids, dtype=np.int64).reshape(-1)
        check_ids(ids, self.vocab_size)
        return ids[ids != self.separator].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def byte_counts(self, text: str) -> np.ndarray:
        """One byte for each id, uint16 [bytes]."""
        return np.ones(len(text.encode("utf-8")), dtype=np.uint16)

    def saved(self) -> tuple[str, dict[str, bytes]]:
        """The name, which is enough."""
        return "byte", {}


class FileTokenizer:
    """A tokenizer of the `tokenizers` package, read from its JSON file.

    Args:
        path: the JSON file.

    Raises:
        UserError: the file is missing or cannot be read, the package is missing, or no end-of-document token is found.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        if not path.is_file():
            raise UserError(
                f"tokenizer: no file {str(path)!r}; write `byte`, the path of a tokenizers JSON file, or tiktoken:NAME"
            )
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError as error:
            raise UserError(
                f"tokenizer: {str(path)!r} needs the `tokenizers` package, which is not installed; "
                "`pip install 'hybrid-zoo[tokenizers]'`, or use the tokenizer `byte`"
            ) from error
        content = self._content = path.read_bytes()
        try:
            self._backend = Backend.from_str(content.decode("utf-8"))
        except Exception as error:  # the package raises bare Exception for a file it cannot read
            raise UserError(
                f"tokenizer: {str(path)!r} is not a tokenizers JSON file ({error}); save it with `save`"
            ) from error
        self.vocab_size = self._backend.get_vocab_size(with_added_tokens=True)
        found = [self._backend.token_to_id(name) for name in SEPARATOR_NAMES]
        known = [token for token in found if token is not None]
        if not known:
            raise UserError(
                f"tokenizer: {str(path)!r} has no end-of-document token; add one of {', '.join(SEPARATOR_NAMES)} as a "
                "special token"
            )
        self.separator = known[0]
        self.identity = f"tokenizers-{self.vocab_size}-{hashlib.sha256(content).hexdigest()[:16]}"

    def encode(self, text: str) -> np.ndarray:
        """Ids of ``text``, int64 [n], without special tokens."""
        return self.encode_batch([text])[0][0]

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        """Ids and byte counts of every text, over the machine's cores.

        A token counts the bytes from the end of the token before to its own end; the last takes what is left.
        """
        found = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [
            (np.asarray(encoding.ids, dtype=np.int64), _widths(text, [end for _, end in encoding.offsets]))
            for text, encoding in zip(texts, found)
        ]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of ``ids``; special tokens are left out.

        Raises:
            UserError: an id outside the vocabulary.
        """
        ids = np.asarray(ids, dtype=np.int64).reshape(-1)
        check_ids(ids, self.vocab_size)
        return self._backend.decode(ids.tolist(), skip_special_tokens=True)

    def byte_counts(self, text: str) -> np.ndarray:
        """Bytes from the end of the token before to the end of each token, uint16 [n]; the last takes what is left."""
        return _widths(text, [end for _, end in self._backend.encode(text, add_special_tokens=False).offsets])

    def saved(self) -> tuple[str, dict[str, bytes]]:
        """The JSON file."""
        return SAVED_AS, {SAVED_AS: self._content}


def load_tokenizer(name_or_path: str | Path, folder: Path | None = None) -> Tokenizer:
    """The tokenizer called ``byte``, one read from a `tokenizers` JSON file, or ``tiktoken:NAME``, ``tiktoken:FILE``.

    Args:
        name_or_path: which one; ``bytes`` is ``byte``.
        folder: where a file is looked for; None: here.

    Raises:
        UserError: none of these; what is missing, and what to write instead.
    """
    name = str(name_or_path)
    if name in ("byte", "bytes"):
        return ByteTokenizer()
    if name.startswith("tiktoken:"):
        from zoo.data.tiktoken_tokenizer import TiktokenTokenizer

        rest = name.removeprefix("tiktoken:")
        return TiktokenTokenizer(rest if folder is None else str(folder / rest))
    return FileTokenizer(name if folder is None else folder / name)


def check_ids(ids: np.ndarray, vocab_size: int) -> None:
    """Refuse ids that the vocabulary lacks.

    Raises:
        UserError: with the first such id.
    """
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise UserError(
            f"tokenizer: id {outside[0]} is outside 0..{vocab_size - 1}; these ids belong to another tokenizer"
        )


def _widths(text: str, ends: list[int]) -> np.ndarray:
    """Bytes of each token that ends behind so many characters of ``text``, uint16."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    widths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    bytes_before = np.concatenate([[0], np.cumsum(widths)])
    reached = np.maximum.accumulate(np.array(ends, dtype=np.int64))
    reached[-1:] = len(text)
    return np.diff(bytes_before[reached], prepend=0).astype(np.uint16)
