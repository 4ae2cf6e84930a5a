"""Byte-level BPE by `tiktoken`, by name or from a .tiktoken file; the only file that knows of the package."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zoo.data.tokenizer import Encoded, check_ids
from zoo.errors import UserError

PREFIX = "tiktoken:"
ENDING = ".tiktoken"


@dataclass(frozen=True)
class Encoding:
    """What a .tiktoken file does not say of itself.

    Attributes:
        pattern: how text is cut before pairs are merged.
        ranks: entries of the published file.
        separator: the id of its end-of-text token.
    """

    pattern: str
    ranks: int
    separator: int


# From tiktoken_ext/openai_public.py of the package, MIT; there they cannot be had without a download.
ENCODINGS = {
    "r50k_base": Encoding(
        r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""", 50_256, 50_256
    ),
    "cl100k_base": Encoding(
        r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|"""
        r"""\s*[\r\n]|\s+(?!\S)|\s""",
        100_256,
        100_257,
    ),
    "o200k_base": Encoding(
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"""
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"""
        r"""\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
        199_998,
        199_999,
    ),
}


class TiktokenTokenizer:
    """A table of byte sequences and their ranks; the separator is the published end-of-text id, or the one behind all.

    Args:
        name_or_file: ``cl100k_base`` and the like; or a .tiktoken file that bears such a name, or with ``@NAME`` behind
            it, which says by whose pattern text is cut.

    Raises:
        UserError: the package is missing, the name or the file is unknown, or the file cannot be read.
    """

    def __init__(self, name_or_file: str) -> None:
        try:
            import tiktoken  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise UserError(
                f"tokenizer: '{PREFIX}{name_or_file}' needs the `tiktoken` package, which is not installed; "
                "`pip install 'hybrid-zoo[tiktoken]'`, or use the tokenizer `byte`"
            ) from error
        file, sign, kind = name_or_file.rpartition("@")
        if not sign:
            file, kind = (name_or_file, Path(name_or_file).stem) if ENDING in name_or_file else ("", name_or_file)
        if kind not in ENCODINGS:
            raise UserError(
                f"tokenizer: '{PREFIX}{name_or_file}' does not say how text is cut; write {PREFIX}NAME or "
                f"{PREFIX}FILE@NAME, NAME one of {', '.join(ENCODINGS)}"
            )
        encoding = ENCODINGS[kind]
        ranks = _read(Path(file)) if file else _download(kind)
        self._kind, self._ranks = kind, ranks
        behind = max(ranks.values()) + 1
        self.separator = encoding.separator if len(ranks) == encoding.ranks else behind
        self.vocab_size = self.separator + 1
        self._backend = tiktoken.Encoding(
            "zoo", pat_str=encoding.pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": self.separator}
        )
        self._bytes = {rank: piece for piece, rank in ranks.items()}
        self._widths = np.zeros(self.vocab_size, dtype=np.uint16)
        self._widths[list(self._bytes)] = [len(piece) for piece in self._bytes.values()]
        content = hashlib.sha256(encoding.pattern.encode() + self._file_content()).hexdigest()
        self.identity = f"tiktoken-{self.vocab_size}-{content[:16]}"

    def encode(self, text: str) -> np.ndarray:
        """Ids of ``text``, int64 [n]; what looks like a special token is text."""
        return np.asarray(self._backend.encode_ordinary(text), dtype=np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        """Ids and byte counts of every text, over the machine's cores."""
        found = [np.asarray(ids, dtype=np.int64) for ids in self._backend.encode_ordinary_batch(list(texts))]
        return [(ids, self._widths[ids]) for ids in found]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of ``ids``; separators and ids without a meaning are left out.

        Raises:
            UserError: an id outside the vocabulary.
        """
        ids = np.asarray(ids, dtype=np.int64).reshape(-1)
        check_ids(ids, self.vocab_size)
        return b"".join(self._bytes.get(rank, b"") for rank in ids.tolist()).decode("utf-8", errors="replace")

    def byte_counts(self, text: str) -> np.ndarray:
        """The bytes of each token, uint16 [n]."""
        return self._widths[self.encode(text)]

    def saved(self) -> tuple[str, dict[str, bytes]]:
        """The ranks as a .tiktoken file, and by whose pattern text is cut."""
        name = "tokenizer" + ENDING
        return f"{PREFIX}{name}@{self._kind}", {name: self._file_content()}

    def _file_content(self) -> bytes:
        ordered = sorted(self._ranks.items(), key=lambda entry: entry[1])
        return b"".join(base64.b64encode(piece) + b" %d\n" % rank for piece, rank in ordered)


def _read(path: Path) -> dict[bytes, int]:
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        # Not by the package, which would keep a copy of the first file of this name.
        ranks = {base64.b64decode(piece, validate=True): int(rank) for piece, rank in lines}
    except OSError as error:
        raise UserError(f"tokenizer: cannot read {str(path)!r}: {error.strerror}; name a .tiktoken file") from error
    except (ValueError, binascii.Error) as error:
        raise UserError(
            f"tokenizer: {str(path)!r} is no .tiktoken file, which has a base64 word and a number a line ({error})"
        ) from error
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise UserError(f"tokenizer: {str(path)!r} has no token for byte {missing[0]}; it cannot encode every text")
    return ranks


def _download(name: str) -> dict[bytes, int]:
    import tiktoken  # pyright: ignore[reportMissingImports]

    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:  # whatever the network raises
        raise UserError(
            f"tokenizer: the table of {PREFIX}{name} cannot be fetched ({type(error).__name__}); name a local file: "
            f"{PREFIX}{name}{ENDING}"
        ) from error
    return {piece: encoding.encode_single_token(piece) for piece in encoding.token_byte_values()}
