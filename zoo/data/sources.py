"""Where text comes from: the shipped excerpt, the standard library's sources, files and folders, as documents."""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from zoo.errors import UserError

DOCUMENT_BYTES = 64 * 1024  # longer texts are cut at the next blank line
TEXT_ENDINGS = (".txt", ".md", ".rst", ".py", ".jsonl")
EXCERPT = Path(__file__).parent / "excerpt.txt"
EXCERPT_BREAK = "\f"  # stands alone on a line between the documents of the excerpt
# Packages differ by machine; the tests are two thirds of the bytes where they are installed, and often are not.
STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
STDLIB_GENERATED = "_sysconfigdata"  # files that begin so describe the machine Python was built on


def read_documents(
    source: str | Sequence[str], *, endings: Sequence[str] = TEXT_ENDINGS, document_bytes: int = DOCUMENT_BYTES
) -> list[str]:
    """Read ``source`` into documents: line ends normalised, stripped, without empty ones and exact duplicates.

    Args:
        source: ``excerpt`` (public-domain plays and sonnets, ships with the package), ``stdlib`` (the Python standard
            library's own sources), a text file, a ``.jsonl`` file with a ``text`` field per line, a folder (read
            whole, in the order of its paths), or a list of these.
        endings: file names that count in a folder.
        document_bytes: longer texts are cut at the first blank line after so many bytes.

    Raises:
        UserError: nothing there, nothing readable, or nothing but white space; with the path and what to do.
    """
    if document_bytes < 1:
        raise UserError(f"data: document_bytes is {document_bytes}, but a document holds at least 1 byte")
    names = [source] if isinstance(source, str) else list(source)
    if not names:
        raise UserError("data: the list of sources is empty; name `excerpt`, `stdlib`, a file or a folder")
    documents: dict[str, None] = {}  # keeps the first of equal documents, in order
    for name in names:
        before = len(documents)
        for text in _texts(name, tuple(endings)):
            documents.update(dict.fromkeys(cut(normalise(text), document_bytes)))
        if len(documents) == before and len(names) == 1:
            raise UserError(f"data: {name!r} holds no text: every document is empty; name a file or folder with text")
    return list(documents)


def normalise(text: str) -> str:
    """``text`` with ``\\n`` line ends, without a byte order mark and white space around it."""
    return text.replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff").strip()


def cut(text: str, document_bytes: int = DOCUMENT_BYTES) -> list[str]:
    """Pieces of ``text``, each cut at the first blank line after ``document_bytes`` bytes; none is empty."""
    pieces = []
    rest = text.encode("utf-8")
    while len(rest) > document_bytes and (blank := rest.find(b"\n\n", document_bytes)) >= 0:
        pieces.append(rest[:blank].decode("utf-8").strip())
        rest = rest[blank:].strip(b"\n")
    pieces.append(rest.decode("utf-8").strip())
    return [piece for piece in pieces if piece]


def check_source(source: str | Sequence[str]) -> None:
    """Refuse a source that is not there, without reading it.

    Raises:
        UserError: a name that is no source, no file and no folder.
    """
    for name in [source] if isinstance(source, str) else source:
        if name not in ("excerpt", "stdlib") and not Path(name).exists():
            raise UserError(
                f"data: no file or folder {name!r}; write `excerpt`, `stdlib`, or the path of a text file, a .jsonl "
                "file or a folder"
            )


def _texts(name: str, endings: tuple[str, ...]) -> Iterator[str]:
    check_source(name)
    if name == "excerpt":
        yield from _read(EXCERPT).split(EXCERPT_BREAK)
    elif name == "stdlib":
        yield from _standard_library()
    elif Path(name).is_dir():
        yield from _folder(Path(name), endings)
    else:
        yield from _file(Path(name))


def _folder(folder: Path, endings: tuple[str, ...]) -> Iterator[str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name.endswith(endings))
    if not files:
        raise UserError(
            f"data: the folder {str(folder)!r} holds no file that ends in {', '.join(endings)}; set `endings`, or name "
            "another folder"
        )
    for path in files:
        yield from _file(path)


def _file(path: Path) -> Iterator[str]:
    if path.suffix != ".jsonl":
        yield _read(path)
        return
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise UserError(
                f'data: {path}, line {number} is not an object like {{"text": "..."}}; mend or drop it'
            ) from error
        if not isinstance(text, str):
            raise UserError(
                f"data: {path}, line {number}: `text` is a {type(text).__name__}, not a string; mend or drop it"
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(
                f"data: {path}, line {number}: `text` holds half a surrogate pair; mend or drop it"
            ) from error
        yield text


def _standard_library() -> Iterator[str]:
    for folder, subfolders, files in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = sorted(set(subfolders) - STDLIB_SKIPPED)  # os.walk descends into what is left here
        for name in sorted(files):
            if name.endswith(".py") and not name.startswith(STDLIB_GENERATED):
                yield _read(Path(folder) / name)


def _read(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"data: cannot read {str(path)!r}: {error.strerror}; check its permissions, or leave it out"
        ) from error
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
