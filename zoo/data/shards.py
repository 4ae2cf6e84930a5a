"""Token shards: a folder of ids on disk with an index that names, counts and hashes every file."""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from zoo.data.corpus import SPLITS
from zoo.errors import UserError

SCHEMA = "zoo-shards-1"
INDEX = "index.json"


@dataclass(frozen=True)
class StoredFile:
    """A file of a shard: its name in the folder, its bytes, and the SHA-256 of them."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class StoredSplit:
    """The documents of one split in one shard, each as ``separator, id, id, ...``, laid end to end.

    Attributes:
        documents, tokens: counts, separators included.
        bytes: UTF-8 bytes of the text.
        files: ``tokens`` ids; ``starts`` int64 [documents + 1], where each document begins, and the end; ``widths``
            uint8 or uint16, bytes each id stands for, left out where every id but the separator is one byte.
    """

    documents: int
    tokens: int
    bytes: int
    files: dict[str, StoredFile]

    def open(self, folder: Path, kind: str, dtype: np.dtype) -> np.ndarray:
        """One of the files, mapped; ``dtype`` is that of ids."""
        file = self.files[kind]
        if kind != "tokens":
            dtype = np.dtype("<i8" if kind == "starts" else f"<u{file.size // self.tokens}")
        try:
            # Slices of the subclass that memmap returns are slow.
            return np.memmap(folder / file.name, dtype=dtype, mode="r").view(np.ndarray)
        except OSError as error:
            raise UserError(f"data: cannot read {str(folder / file.name)!r}: {error.strerror}; restore it") from error


@dataclass(frozen=True)
class Shard:
    """A stretch of the source.

    Attributes:
        splits: by name; one without a document is left out.
        after: (part of the source, documents of it) that the shard ends behind.
    """

    splits: dict[str, StoredSplit]
    after: tuple[int, int]


@dataclass(frozen=True)
class Index:
    """What a folder of shards holds.

    Attributes:
        complete: every document of the source is in it.
        command: what made it.
        source: ``names`` as given, number of ``parts``, their ``bytes`` and a ``fingerprint``.
        tokenizer: ``file`` (or name) that rebuilds it, ``identity``, ``vocab_size``, ``separator``, ``dtype`` of ids.
        settings: what else decides what lies in which shard.
        shards: in the order of the source.
    """

    complete: bool
    command: str
    source: dict[str, Any]
    tokenizer: dict[str, Any]
    settings: dict[str, Any]
    shards: tuple[Shard, ...] = ()

    @property
    def dtype(self) -> np.dtype:
        """Type of an id on disk, little-endian."""
        return np.dtype(self.tokenizer["dtype"]).newbyteorder("<")

    @property
    def content_hash(self) -> str:
        """Of the tokenizer and of every file in order; equal hashes give equal batches."""
        content = hashlib.sha256(self.tokenizer["identity"].encode())
        for _, file in self.files():
            content.update(f"{file.name} {file.sha256}".encode())
        return content.hexdigest()[:16]

    def files(self) -> Iterator[tuple[str, StoredFile]]:
        """Every file of every shard, with the kind of what it holds."""
        for shard in self.shards:
            for split in shard.splits.values():
                yield from split.files.items()

    def counts(self) -> dict[str, dict[str, int]]:
        """Documents, bytes and tokens per split."""
        names = ("documents", "bytes", "tokens")
        found = {split: [shard.splits[split] for shard in self.shards if split in shard.splits] for split in SPLITS}
        return {
            split: {name: sum(getattr(s, name) for s in stored) for name in names} for split, stored in found.items()
        }

    def with_shard(self, shard: Shard) -> Index:
        """The same with one shard more."""
        return replace(self, shards=(*self.shards, shard))

    def to_json(self) -> str:
        """As it stands in the file, with a hash of itself at the end."""
        content = {"schema": SCHEMA, **asdict(self)}
        return json.dumps({**content, "sha256": _hash(content)}, indent=1, ensure_ascii=False) + "\n"


def read_index(folder: Path) -> Index:
    """Read the index of ``folder``.

    Raises:
        UserError: there is none, it is damaged, or another version wrote it.
    """
    path = folder / INDEX
    if not path.is_file():
        raise UserError(
            f"data: {str(folder)!r} holds no {INDEX}; make shards with `zoo data prepare SOURCE --out {folder}`"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        schema, stored = content.pop("schema"), content.pop("sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"data: {path} is no index of shards ({error!r}); restore it, or prepare the folder anew"
        ) from error
    if schema != SCHEMA:
        raise UserError(f"data: {path} has the schema {schema!r}, but {SCHEMA!r} is read here; prepare the folder anew")
    if _hash({"schema": schema, **content}) != stored:
        raise UserError(f"data: {path} was changed after it was written: its hash differs; restore it, or prepare anew")
    return Index(**{**content, "shards": tuple(_shard(shard) for shard in content["shards"])})


def check_sizes(folder: Path, index: Index) -> None:
    """The quick check: everything is there and as long as it should be.

    Raises:
        UserError: the folder is not finished, or a file is missing or of another size.
    """
    if not index.complete:
        raise UserError(
            f"data: {str(folder)!r} is not finished, it holds {len(index.shards)} shards of a part of the source; run "
            f"its command again, which goes on behind them: {index.command}"
        )
    for _, file in index.files():
        problem = _size_problem(folder, file)
        if problem:
            raise UserError(
                f"data: {problem}; restore it, or prepare the folder anew. `zoo data check` looks at all files"
            )


def find_problems(folder: Path, index: Index) -> Iterator[str]:
    """The full check: what is wrong, file by file; reads everything."""
    if not index.complete:
        yield f"the folder is not finished; run its command again: {index.command}"
    for number, shard in enumerate(index.shards):
        for name, split in shard.splits.items():
            broken = [problem for file in split.files.values() if (problem := _file_problem(folder, file))]
            yield from broken
            if not broken:
                yield from (f"shard {number}, {name}: {problem}" for problem in _structure(folder, index, split))


def check_content(folder: Path, index: Index) -> None:
    """The full check, for a training run.

    Raises:
        UserError: with the first problem, and how many there are.
    """
    problems = list(find_problems(folder, index))
    if problems:
        raise UserError(
            f"data: {problems[0]} (problems in {str(folder)!r}: {len(problems)}); restore it, or prepare anew"
        )


class ShardedSplit:
    """One split over all shards, laid end to end and from its end to its beginning, read where it lies on disk.

    Args:
        folder: of the shards.
        index: what it holds.
        name: the split.

    Raises:
        UserError: the split has no documents.
    """

    def __init__(self, folder: Path, index: Index, name: str) -> None:
        self._folder, self._dtype = folder, index.dtype
        self._stored = [shard.splits[name] for shard in index.shards if name in shard.splits]
        if not self._stored:
            cure = "name shards that have it" if name == "train" else f"prepare them with a larger --{name}_share"
            raise UserError(f"data: the shards in {str(folder)!r} have no document in the split {name!r}; {cure}")
        self.separator: int = index.tokenizer["separator"]
        self.has_widths = "widths" in self._stored[0].files
        self._offsets = [0, *accumulate(split.tokens for split in self._stored)]
        self._documents = [0, *accumulate(split.documents for split in self._stored)]
        self._arrays: dict[tuple[int, str], np.ndarray] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A copy opens the files itself; a memory map would be copied into memory.
        return {**self.__dict__, "_arrays": {}}

    @property
    def tokens(self) -> int:
        """Tokens of all documents, their separators included."""
        return self._offsets[-1]

    def ids(self, first: int, count: int) -> np.ndarray:
        """``count`` ids from place ``first``; behind the last follows the first."""
        return self._read("tokens", first, count)

    def widths(self, first: int, count: int) -> np.ndarray:
        """Bytes that the ids of the same places stand for."""
        return self._read("widths", first, count)

    def starts(self, first: int, count: int) -> np.ndarray:
        """int64, which of ``count`` places from ``first`` on begin a document, counted from ``first``."""
        found, behind = [], 0
        for shard, begin, taken in self._pieces(first, count):
            starts = self._array(shard, "starts")
            a, b = np.searchsorted(starts, (begin, begin + taken))
            found.append(starts[a:b] - (begin - behind))
            behind += taken
        return found[0] if len(found) == 1 else np.concatenate(found)

    def documents(self, first: int, count: int) -> np.ndarray:
        """int64 [count], the number of the document of every place from ``first`` on."""
        found = []
        for shard, begin, taken in self._pieces(first, count):
            places = np.arange(begin, begin + taken)
            inside = np.searchsorted(self._array(shard, "starts"), places, side="right") - 1
            found.append(inside + self._documents[shard])
        return np.concatenate(found)

    def _read(self, kind: str, first: int, count: int) -> np.ndarray:
        pieces = [self._array(shard, kind)[begin : begin + taken] for shard, begin, taken in self._pieces(first, count)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _pieces(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """(shard, first place in it, places) that make up a stretch."""
        while count:
            first %= self.tokens
            shard = bisect_right(self._offsets, first) - 1
            taken = min(count, self._offsets[shard + 1] - first)
            yield shard, first - self._offsets[shard], taken
            first, count = first + taken, count - taken

    def _array(self, shard: int, kind: str) -> np.ndarray:
        if (shard, kind) not in self._arrays:
            self._arrays[shard, kind] = self._stored[shard].open(self._folder, kind, self._dtype)
        return self._arrays[shard, kind]


def hash_file(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _shard(plain: dict[str, Any]) -> Shard:
    splits = {
        name: StoredSplit(**{**split, "files": {kind: StoredFile(**file) for kind, file in split["files"].items()}})
        for name, split in plain["splits"].items()
    }
    return Shard(splits, (plain["after"][0], plain["after"][1]))


def _size_problem(folder: Path, file: StoredFile) -> str | None:
    try:
        size = os.stat(folder / file.name).st_size
    except OSError as error:
        return f"{folder / file.name}: {error.strerror}"
    if size != file.size:
        return f"{folder / file.name} has {size:,} bytes, but {file.size:,} were written"
    return None


def _file_problem(folder: Path, file: StoredFile) -> str | None:
    problem = _size_problem(folder, file)
    if problem:
        return problem
    try:
        found = hash_file(folder / file.name)
    except OSError as error:
        return f"{folder / file.name}: {error.strerror}"
    if found != file.sha256:
        return f"{folder / file.name} was changed: its SHA-256 begins {found[:16]}, but {file.sha256[:16]} was written"
    return None


def _structure(folder: Path, index: Index, split: StoredSplit) -> Iterator[str]:
    """What does not fit in files that are as they were written: a fault of ours, or an index made by hand."""
    arrays = {kind: split.open(folder, kind, index.dtype) for kind in split.files}
    tokens, starts = arrays["tokens"], arrays["starts"]
    if len(tokens) != split.tokens or len(starts) != split.documents + 1:
        found = f"{len(tokens)} tokens in {len(starts) - 1} documents"
        yield f"{found}, but the index counts {split.tokens} in {split.documents}"
        return
    if starts[0] != 0 or starts[-1] != split.tokens or np.any(np.diff(starts) < 1):
        yield "the documents do not cover the tokens"
        return
    if np.any(tokens[starts[:-1]] != index.tokenizer["separator"]):
        yield "a document does not begin with the separator"
    if tokens.max() >= index.tokenizer["vocab_size"]:
        yield f"id {tokens.max()} is outside the vocabulary of {index.tokenizer['vocab_size']}"
    if "widths" in arrays and arrays["widths"].sum(dtype=np.int64) != split.bytes:
        yield f"the tokens stand for {arrays['widths'].sum(dtype=np.int64)} bytes, but the text had {split.bytes}"
