"""Documents of one file: plain text, JSON lines or Parquet, compressed or not, one after another."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from zoo.errors import UserError

COMPRESSIONS = (".gz", ".zst")


def read_file(path: Path, *, text_key: str = "text", skip: int = 0) -> Iterator[tuple[str, int]]:
    """The documents of ``path`` behind the first ``skip``, each with the bytes of the file read so far.

    Args:
        path: ``.jsonl`` and ``.parquet`` hold many documents, anything else is one; ``.gz`` and ``.zst`` may follow the
            first two endings and those of text.
        text_key: the field or column that holds the text.
        skip: documents to pass over, empty ones counted.

    Raises:
        UserError: the file cannot be read, or a document is no text; with file and line.
    """
    kind = Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix
    if kind == ".parquet":
        yield from _rows(path, text_key, skip)
    elif kind == ".jsonl":
        yield from _lines(path, text_key, skip)
    elif not skip:
        yield read_text(path), path.stat().st_size


def read_text(path: Path) -> str:
    """The whole file as text.

    Raises:
        UserError: it cannot be read, is binary, or is not UTF-8.
    """
    try:
        with ExitStack() as stack:
            content = _open(path, stack)[0].read()
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error
    if b"\0" in content:
        raise UserError(
            f"data: {str(path)!r} is binary (it holds a zero byte); text files only, choose them with `endings`"
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"data: {str(path)!r} is not UTF-8: byte {error.start} is 0x{content[error.start]:02x}; convert it, or "
            "leave it out"
        ) from error


def check_text(text: object, place: str) -> str:
    """``text``, if it is one.

    Args:
        text: what stands where a text is expected.
        place: file and line, for the message.

    Raises:
        UserError: no string, or a string that UTF-8 cannot hold.
    """
    if not isinstance(text, str):
        raise UserError(f"data: {place}: the text is a {type(text).__name__}, not a string; mend or drop it")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"data: {place}: the text holds half a surrogate pair; mend or drop it") from error
    return text


def _lines(path: Path, text_key: str, skip: int) -> Iterator[tuple[str, int]]:
    try:
        with ExitStack() as stack:
            content, raw = _open(path, stack)
            for number, line in enumerate(content, start=1):
                if not line.strip():
                    continue
                if skip:
                    skip -= 1
                    continue
                yield check_text(_field(line, path, number, text_key), f"{path}, line {number}"), raw.tell()
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error


def _field(line: bytes, path: Path, number: int, text_key: str) -> object:
    keys = ""
    try:
        content = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        if isinstance(content, dict) and content and text_key not in content:
            keys = f" (its keys: {', '.join(content)})"
        return content[text_key]
    except UnicodeDecodeError as error:
        raise UserError(
            f"data: {path}, line {number} is not UTF-8: byte {error.start} is 0x{line[error.start]:02x}; convert it, "
            "or leave it out"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        cure = "name the field by text_key, or mend it" if keys else "mend or drop it"
        raise UserError(
            f'data: {path}, line {number} is not an object like {{"{text_key}": "..."}}{keys}; {cure}'
        ) from error


def _rows(path: Path, text_key: str, skip: int) -> Iterator[tuple[str, int]]:
    from zoo.data.parquet import count_rows, read_parquet

    size, rows = path.stat().st_size, count_rows(path)
    for value, row in read_parquet(path, text_key=text_key, skip=skip):
        yield check_text(value, f"{path}, row {row}"), size * row // rows


def _open(path: Path, stack: ExitStack) -> tuple[io.BufferedIOBase, io.BufferedReader]:
    """The content, decompressed, and the file below it, whose place says how far reading is."""
    raw = stack.enter_context(path.open("rb"))
    if path.suffix == ".gz":
        return stack.enter_context(gzip.open(raw)), raw
    if path.suffix == ".zst":
        from zoo.data.zstd import open_zst

        return stack.enter_context(open_zst(raw, str(path))), raw
    return raw, raw


def _unreadable(path: Path, error: Exception) -> UserError:
    reason = getattr(error, "strerror", None) or str(error)
    cure = "it is damaged, so fetch it again" if path.suffix in COMPRESSIONS else "check its permissions"
    return UserError(f"data: cannot read {str(path)!r}: {reason}; {cure}, or leave it out")
