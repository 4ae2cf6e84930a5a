"""Files compressed by Zstandard; the only file that knows of the `zstandard` package."""

from __future__ import annotations

import errno
import io
from typing import BinaryIO

from zoo.errors import UserError

PIECE = 1 << 18  # compressed bytes read at once


def open_zst(raw: BinaryIO, name: str) -> io.BufferedReader:
    """What ``raw`` holds, decompressed while it is read.

    Args:
        raw: the compressed file, open.
        name: the file's name, for messages.

    Raises:
        UserError: the package is missing. Reading raises OSError where the file is damaged or ends too early.
    """
    try:
        import zstandard  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            f"data: {name!r} needs the `zstandard` package, which is not installed; `pip install 'hybrid-zoo[zstd]'`, "
            "or decompress the file"
        ) from error
    return io.BufferedReader(_Frames(raw, zstandard.ZstdDecompressor(), zstandard.ZstdError))


class _Frames(io.RawIOBase):
    """Frame after frame; the package's own reader ends a file that was cut off without a word."""

    def __init__(self, raw: BinaryIO, decompressor: object, failure: type[Exception]) -> None:
        self._raw, self._decompressor, self._failure = raw, decompressor, failure
        self._frame, self._ready, self._rest = None, memoryview(b""), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        while not self._ready:
            piece = self._rest or self._raw.read(PIECE)
            if not piece:
                if self._frame is not None:
                    raise OSError(errno.EIO, "it ends inside a frame")
                return 0
            self._ready = memoryview(self._decompress(piece))
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _decompress(self, piece: bytes) -> bytes:
        if self._frame is None:
            self._frame = self._decompressor.decompressobj()  # pyright: ignore[reportAttributeAccessIssue]
        frame = self._frame
        try:
            found = frame.decompress(piece)
        except self._failure as error:
            raise OSError(errno.EIO, f"it is no Zstandard file ({error})") from error
        self._rest = frame.unused_data if frame.eof else b""
        if frame.eof:
            self._frame = None
        return found
