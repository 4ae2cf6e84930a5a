"""Where text comes from: the shipped excerpt, the standard library's sources, files and folders, as documents."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from zoo.data.hub import hub_part, is_hub
from zoo.data.readers import read_file, read_text
from zoo.errors import UserError

DOCUMENT_BYTES = 64 * 1024  # longer texts are cut at the next blank line
TEXT_ENDINGS = (".txt", ".md", ".rst", ".py", ".jsonl")
EXCERPT = Path(__file__).parent / "excerpt.txt"
EXCERPT_BREAK = "\f"  # stands alone on a line between the documents of the excerpt
# Packages differ by machine; the tests are two thirds of the bytes where they are installed, and often are not.
STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
STDLIB_GENERATED = "_sysconfigdata"  # files that begin so describe the machine Python was built on
SAMPLE = 64 * 1024  # bytes at either end of a file that enter its fingerprint


class Part(Protocol):
    """A piece of a source that is read from its beginning to its end, such as a file."""

    @property
    def name(self) -> str:
        """Its name inside the source."""
        ...

    @property
    def size(self) -> int:
        """Its bytes."""
        ...

    def documents(self, skip: int = 0) -> Iterator[tuple[str, int]]:
        """The documents behind the first ``skip``, each with the bytes read so far."""
        ...

    def fingerprint(self) -> str:
        """Tells it from another, without reading all of it."""
        ...


@dataclass(frozen=True)
class FilePart:
    """A file.

    Attributes:
        name: its path below the source.
        path: where it is.
        text_key: the field or column that holds the text, where there are fields.
        breaks: what stands between the documents of a text; None: it is one.
    """

    name: str
    path: Path
    text_key: str = "text"
    breaks: str | None = None

    @property
    def size(self) -> int:
        """Bytes of the file, compressed as it is."""
        return self.path.stat().st_size

    def documents(self, skip: int = 0) -> Iterator[tuple[str, int]]:
        """The documents behind the first ``skip``, each with the bytes read so far."""
        if self.breaks is None:
            yield from read_file(self.path, text_key=self.text_key, skip=skip)
        else:
            yield from ((text, self.size) for text in read_text(self.path).split(self.breaks)[skip:])

    def fingerprint(self) -> str:
        """Of the size and of the first and last 64 KiB."""
        found = hashlib.sha256(str(self.size).encode())
        try:
            with self.path.open("rb") as file:
                found.update(file.read(SAMPLE))
                file.seek(max(0, self.size - SAMPLE))
                found.update(file.read(SAMPLE))
        except OSError as error:
            raise UserError(
                f"data: cannot read {str(self.path)!r}: {error.strerror}; check its permissions, or leave it out"
            ) from error
        return found.hexdigest()


def read_documents(
    source: str | Sequence[str], *, endings: Sequence[str] = TEXT_ENDINGS, document_bytes: int = DOCUMENT_BYTES
) -> list[str]:
    """Read ``source`` into documents: line ends normalised, stripped, without empty ones and exact duplicates.

    Args:
        source: as :func:`list_parts` takes it.
        endings: file names that count in a folder.
        document_bytes: longer texts are cut at the first blank line after so many bytes.

    Raises:
        UserError: nothing there, nothing readable, or nothing but white space; with the path and what to do.
    """
    if document_bytes < 1:
        raise UserError(f"data: document_bytes is {document_bytes}, but a document holds at least 1 byte")
    documents: dict[str, None] = {}  # keeps the first of equal documents, in order
    for part in list_parts(source, endings=endings):
        for text, _ in part.documents():
            documents.update(dict.fromkeys(cut(normalise(text), document_bytes)))
    if not documents:
        raise UserError(f"data: {source!r} holds no text: every document is empty; name a file or folder with text")
    return list(documents)


def list_parts(
    source: str | Sequence[str], *, endings: Sequence[str] = TEXT_ENDINGS, text_key: str = "text"
) -> list[Part]:
    """The parts of ``source``, in order.

    Args:
        source: ``excerpt`` (public-domain plays and sonnets, ships with the package), ``stdlib`` (the Python standard
            library's own sources), a file (text; or ``.jsonl`` or ``.parquet`` with a field for the text; ``.gz`` or
            ``.zst`` of a text or ``.jsonl``), a folder (read whole, in the order of its paths), a data set
            (``hf:NAME``), or a list of these.
        endings: file names that count in a folder.
        text_key: the field or column that holds the text.

    Raises:
        UserError: nothing there.
    """
    names = [source] if isinstance(source, str) else list(source)
    if not names:
        raise UserError("data: the list of sources is empty; name `excerpt`, `stdlib`, a file or a folder")
    check_source(names)
    return [part for name in names for part in _parts(name, tuple(endings), text_key)]


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
        if name not in ("excerpt", "stdlib") and not is_hub(name) and not Path(name).exists():
            raise UserError(
                f"data: no file or folder {name!r}; write `excerpt`, `stdlib`, or the path of a text file, a .jsonl "
                "file or a folder"
            )


def _parts(name: str, endings: tuple[str, ...], text_key: str) -> list[Part]:
    if name == "excerpt":
        return [FilePart("excerpt", EXCERPT, breaks=EXCERPT_BREAK)]
    if name == "stdlib":
        return list(_standard_library())
    if is_hub(name):
        return [hub_part(name, text_key)]
    if Path(name).is_dir():
        return list(_folder(Path(name), endings, text_key))
    return [FilePart(Path(name).name, Path(name), text_key)]


def _folder(folder: Path, endings: tuple[str, ...], text_key: str) -> list[FilePart]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name.endswith(endings))
    if not files:
        raise UserError(
            f"data: the folder {str(folder)!r} holds no file that ends in {', '.join(endings)}; set `endings`, or name "
            "another folder"
        )
    return [FilePart(path.relative_to(folder).as_posix(), path, text_key) for path in files]


def _standard_library() -> Iterator[FilePart]:
    root = sysconfig.get_path("stdlib")
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - STDLIB_SKIPPED)  # os.walk descends into what is left here
        for name in sorted(files):
            if name.endswith(".py") and not name.startswith(STDLIB_GENERATED):
                path = Path(folder) / name
                yield FilePart(path.relative_to(root).as_posix(), path)
