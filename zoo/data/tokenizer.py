"""Text to token ids and back: bytes by default, or a `tokenizers` JSON file."""

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

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of ``ids``; separators are left out, broken UTF-8 becomes U+FFFD."""
        ...

    def byte_counts(self, text: str) -> np.ndarray:
        """UTF-8 bytes that each id of ``encode(text)`` stands for, uint16 [n]; they sum to the bytes of ``text``."""
        ...


class ByteTokenizer:
    """The 256 bytes of UTF-8 text, and 256 for the document separator: V is 257."""

    vocab_size = 257
    separator = 256
    identity = "byte-257"

    def encode(self, text: str) -> np.ndarray:
        """Ids of ``text``, int64 [bytes]."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of ``ids``; separators are left out, broken UTF-8 becomes U+FFFD.

        Raises:
            UserError: an id outside 0..256.
        """
        ids = np.asarray(ids, dtype=np.int64).reshape(-1)
        _check_ids(ids, self.vocab_size)
        return ids[ids != self.separator].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def byte_counts(self, text: str) -> np.ndarray:
        """One byte for each id, uint16 [bytes]."""
        return np.ones(len(text.encode("utf-8")), dtype=np.uint16)


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
            raise UserError(f"tokenizer: no file {str(path)!r}; write `byte`, or the path of a tokenizers JSON file")
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError as error:
            raise UserError(
                f"tokenizer: {str(path)!r} needs the `tokenizers` package, which is not installed; "
                "`pip install 'hybrid-zoo[tokenizers]'`, or use the tokenizer `byte`"
            ) from error
        content = path.read_bytes()
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
        return np.asarray(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of ``ids``; special tokens are left out.

        Raises:
            UserError: an id outside the vocabulary.
        """
        ids = np.asarray(ids, dtype=np.int64).reshape(-1)
        _check_ids(ids, self.vocab_size)
        return self._backend.decode(ids.tolist(), skip_special_tokens=True)

    def byte_counts(self, text: str) -> np.ndarray:
        """Bytes from the end of the token before to the end of each token, uint16 [n]; the last takes what is left."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        widths = np.array([len(character.encode("utf-8")) for character in text], dtype=np.int64)
        bytes_before = np.concatenate([[0], np.cumsum(widths)])
        ends = np.maximum.accumulate(np.array([end for _, end in encoding.offsets] or [0], dtype=np.int64))
        ends[-1] = len(text)
        return np.diff(bytes_before[ends], prepend=0).astype(np.uint16)[: len(encoding.ids)]


def load_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """The tokenizer called ``byte``, or one read from a `tokenizers` JSON file.

    Raises:
        UserError: neither; what is missing, and what to write instead.
    """
    if str(name_or_path) == "byte":
        return ByteTokenizer()
    return FileTokenizer(name_or_path)


def _check_ids(ids: np.ndarray, vocab_size: int) -> None:
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise UserError(
            f"tokenizer: id {outside[0]} is outside 0..{vocab_size - 1}; these ids belong to another tokenizer"
        )
