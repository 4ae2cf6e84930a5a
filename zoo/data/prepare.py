"""From text to token shards, in the order of the source, so that a stopped run goes on behind the last whole shard."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from zoo.data.corpus import SPLITS, id_dtype, split_name
from zoo.data.shards import INDEX, Index, Shard, StoredFile, StoredSplit, read_index
from zoo.data.sources import Part, list_parts, normalise
from zoo.data.tokenizer import Tokenizer, load_tokenizer
from zoo.errors import UserError

SHARD_TOKENS = 50_000_000
VAL_SHARE = 0.005
ENDINGS = (
    *(ending + packed for ending in (".txt", ".md", ".jsonl") for packed in ("", ".gz", ".zst")),
    ".parquet",
)
BATCH_CHARACTERS = 4_000_000  # text that is encoded at once: enough to keep many cores busy
PARTIAL = ".tmp"  # ends the names of files that are not whole


@dataclass(frozen=True)
class Progress:
    """How far a preparation is.

    Attributes:
        share: of the source, in 0..1.
        shards, documents, tokens: what is encoded, earlier runs included.
    """

    share: float
    shards: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class Document:
    """A text of the source.

    Attributes:
        text: normalised.
        after: (part of the source, documents of it) that it ends.
        read: bytes of the source up to its end.
    """

    text: str
    after: tuple[int, int]
    read: int


def prepare(
    source: str | Sequence[str],
    out: str | Path,
    *,
    tokenizer: str = "byte",
    shard_tokens: int = SHARD_TOKENS,
    val_share: float = VAL_SHARE,
    test_share: float = 0.0,
    text_key: str = "text",
    endings: Sequence[str] = ENDINGS,
    command: str = "zoo.data.prepare.prepare",
    report: Callable[[Progress], None] | None = None,
) -> Index:
    """Encode the documents of ``source`` into shards in the folder ``out``, or go on where an earlier call stopped.

    Line ends become ``\\n``, white space around a text and empty texts go; a document's split follows from its content.
    What is in a shard depends on the source and the settings alone, so a run that was killed and goes on ends with the
    files of one that was not.

    Args:
        source: as :func:`~zoo.data.sources.list_parts` takes it.
        out: a new or empty folder, or one that an earlier call with the same source and settings left.
        tokenizer: as :func:`~zoo.data.tokenizer.load_tokenizer` takes it.
        shard_tokens: a shard ends with the document that brings it to so many tokens.
        val_share, test_share: expected shares of documents, each in [0, 1), together below 1.
        text_key: the field or column that holds the text.
        endings: file names that count in a folder.
        command: what is written into the index as the origin.
        report: called now and then.

    Returns:
        the index of the finished folder.

    Raises:
        UserError: a setting out of range, a source that cannot be read, a folder of another source or other settings
            (with both values), or a disk that takes no more: whole shards stay valid then.
    """
    _check_settings(shard_tokens, val_share, test_share)
    encoder, parts, out = load_tokenizer(tokenizer), list_parts(source, endings=endings, text_key=text_key), Path(out)
    settings = {"shard_tokens": shard_tokens, "val_share": val_share, "test_share": test_share, "text_key": text_key}
    names = [source] if isinstance(source, str) else list(source)
    wanted = Index(False, command, _describe(names, parts), _describe_tokenizer(encoder), settings)
    with _alone(out):
        index = _begin(out, wanted, encoder)
        if not index.complete:
            for state, progress in _encode(out, index, parts, encoder):
                index = state
                if report is not None:
                    report(progress)
        if not index.shards:
            raise UserError(f"data: {', '.join(names)} holds no text: every document is empty; name one with text")
        if not index.complete:
            index = replace(index, complete=True)
            _write_index(out, index)
    return index


# ----------------------------------------------------------------------------------------------------------- the folder
def _begin(out: Path, wanted: Index, encoder: Tokenizer) -> Index:
    """The index in ``out``, if it holds shards of the same source and settings; else that of a new folder."""
    index = read_index(out) if (out / INDEX).is_file() else None
    if index is None:
        strangers = sorted(path.name for path in out.iterdir() if not path.name.endswith(PARTIAL))
        if strangers:
            raise UserError(f"data: {str(out)!r} holds other files, such as {strangers[0]!r}; name a new folder")
    if index is not None and index.shards:
        _refuse_others(out, index, wanted)
    else:
        index = wanted
        _write_index(out, index)  # first of all, so that a folder with anything in it says what it is
    for name, content in encoder.saved()[1].items():
        if not (out / name).is_file() or (out / name).read_bytes() != content:
            _write(out / name, memoryview(content))
    for path in out.glob("*" + PARTIAL):
        path.unlink()
    return index


def _refuse_others(out: Path, index: Index, wanted: Index) -> None:
    pairs = [
        ("source", _source_words(index.source), _source_words(wanted.source)),
        ("tokenizer", index.tokenizer["identity"], wanted.tokenizer["identity"]),
        *((name, index.settings[name], value) for name, value in wanted.settings.items()),
    ]
    for name, there, here in pairs:
        if there != here:
            raise UserError(
                f"data: the shards in {str(out)!r} were begun with {name} {there!r}, but {here!r} is given; set it "
                "back, or name another folder"
            )


def _describe(names: list[str], parts: list[Part]) -> dict[str, Any]:
    found = hashlib.sha256()
    for part in parts:
        found.update(f"{part.name} {part.fingerprint()}\n".encode())
    size = sum(part.size for part in parts)
    return {"names": names, "parts": len(parts), "bytes": size, "fingerprint": found.hexdigest()[:16]}


def _source_words(source: dict[str, Any]) -> str:
    """A source in words; its names are left out, as a folder may be named in several ways."""
    return f"{source['parts']} files, {source['bytes']:,} bytes, fingerprint {source['fingerprint']}"


def _describe_tokenizer(encoder: Tokenizer) -> dict[str, Any]:
    return {
        "file": encoder.saved()[0],
        "identity": encoder.identity,
        "vocab_size": encoder.vocab_size,
        "separator": encoder.separator,
        "dtype": id_dtype(encoder.vocab_size).name,
    }


# --------------------------------------------------------------------------------------------------------------- shards
class _OpenShard:
    """The shard that is being filled, in memory."""

    def __init__(self, index: Index) -> None:
        self._index, self.tokens, self.documents = index, 0, 0
        self.after = index.shards[-1].after if index.shards else (0, 0)
        self._ids: dict[str, list[np.ndarray]] = {name: [] for name in SPLITS}
        self._widths: dict[str, list[np.ndarray]] = {name: [] for name in SPLITS}
        self._bytes: dict[str, int] = dict.fromkeys(SPLITS, 0)

    def add(self, document: Document, ids: np.ndarray, widths: np.ndarray | None) -> None:
        """Append a document to its split."""
        tokenizer, settings = self._index.tokenizer, self._index.settings
        size = len(document.text.encode("utf-8"))
        if ids.max(initial=0) >= tokenizer["vocab_size"]:
            raise UserError(
                f"tokenizer: {tokenizer['identity']} gave the id {ids.max()}, but says that it has "
                f"{tokenizer['vocab_size']}; its ids must have no gaps"
            )
        if widths is not None and widths.sum(dtype=np.int64) != size:
            raise UserError(
                f"tokenizer: {tokenizer['identity']} puts more than 65,535 bytes into one token; use one with a token "
                "for every byte"
            )
        split = split_name(document.text, val_fraction=settings["val_share"], test_fraction=settings["test_share"])
        self._ids[split].append(np.append(tokenizer["separator"], ids).astype(self._index.dtype))
        if widths is not None:
            self._widths[split].append(np.append(0, widths).astype(np.uint16))
        self._bytes[split] += size
        self.tokens, self.documents, self.after = self.tokens + len(ids) + 1, self.documents + 1, document.after

    def close(self, out: Path) -> Shard:
        """Write the files; they count once the index names them."""
        number = len(self._index.shards)
        splits = {name: self._store(out, f"{number:05d}.{name}", name) for name in SPLITS if self._ids[name]}
        return Shard(splits, self.after)

    def _store(self, out: Path, stem: str, split: str) -> StoredSplit:
        ids, widths = self._ids[split], self._widths[split]
        starts = np.concatenate([[0], np.cumsum([len(piece) for piece in ids])]).astype("<i8")
        arrays = {"tokens": np.concatenate(ids), "starts": starts}
        if widths:
            joined = np.concatenate(widths)
            arrays["widths"] = joined.astype("<u1" if joined.max() < 2**8 else "<u2")
        files = {kind: _write_array(out / f"{stem}.{kind}.bin", array) for kind, array in arrays.items()}
        return StoredSplit(len(ids), int(starts[-1]), self._bytes[split], files)


def _encode(out: Path, index: Index, parts: list[Part], encoder: Tokenizer) -> Iterator[tuple[Index, Progress]]:
    """Fill and write shard after shard; yields the index as it stands."""
    shard = _OpenShard(index)
    for batch in _batches(_documents(parts, shard.after)):
        for document, (ids, widths) in zip(batch, encoder.encode_batch([document.text for document in batch])):
            shard.add(document, ids, widths)
            if shard.tokens >= index.settings["shard_tokens"]:
                index = index.with_shard(shard.close(out))
                _write_index(out, index)
                shard = _OpenShard(index)
        yield index, _progress(index, shard, batch[-1].read)
    if shard.tokens:
        index = index.with_shard(shard.close(out))
        _write_index(out, index)
    yield index, _progress(index, _OpenShard(index), index.source["bytes"])


def _documents(parts: list[Part], after: tuple[int, int]) -> Iterator[Document]:
    """The documents of the source behind ``after`` that hold text."""
    before = sum(part.size for part in parts[: after[0]])
    for number, part in enumerate(parts[after[0] :], start=after[0]):
        skip = after[1] if number == after[0] else 0
        for place, (text, read) in enumerate(part.documents(skip), start=skip + 1):
            text = normalise(text)
            if text:
                yield Document(text, (number, place), before + read)
        before += part.size


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch, characters = [], 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _progress(index: Index, shard: _OpenShard, read: int) -> Progress:
    counts = index.counts().values()
    documents, tokens = (sum(count[name] for count in counts) for name in ("documents", "tokens"))
    share = min(1.0, read / max(1, index.source["bytes"]))
    return Progress(share, len(index.shards), documents + shard.documents, tokens + shard.tokens)


# -------------------------------------------------------------------------------------------------------------- writing
def _write_array(path: Path, array: np.ndarray) -> StoredFile:
    content = np.ascontiguousarray(array).view(np.uint8).data
    _write(path, content)
    return StoredFile(path.name, len(content), hashlib.sha256(content).hexdigest())


def _write_index(out: Path, index: Index) -> None:
    _write(out / INDEX, memoryview(index.to_json().encode("utf-8")))


def _write(path: Path, content: memoryview) -> None:
    """Write a file that is either whole or not there: under another name, to the disk, then renamed."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the name itself
        finally:
            os.close(folder)
    except OSError as error:
        partial.unlink(missing_ok=True)  # gives its room back where the disk is full
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise UserError(
            f"data: cannot write {str(path)!r}: {error.strerror}; whole shards beside it stay valid: "
            f"{'make room' if full else 'repair it'}, then run the same command again, which goes on behind them"
        ) from error


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Make the folder and hold it against a second process; the system lets go when this one ends, however it does."""
    import fcntl  # not on Windows

    try:
        out.mkdir(parents=True, exist_ok=True)
        folder = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"data: cannot make the folder {str(out)!r}: {error.strerror}; name another") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(folder)
        raise UserError(f"data: another process prepares {str(out)!r}; wait for it, or name another folder") from error
    try:
        yield
    finally:
        os.close(folder)


def _check_settings(shard_tokens: int, val_share: float, test_share: float) -> None:
    if shard_tokens < 1:
        raise UserError(f"data: shard_tokens is {shard_tokens}, but a shard holds at least 1 token")
    if not (0 <= val_share < 1 and 0 <= test_share < 1 and val_share + test_share < 1):
        raise UserError(
            f"data: val_share {val_share} and test_share {test_share} must be at least 0 and together below 1, for "
            "instance 0.005 and 0"
        )
