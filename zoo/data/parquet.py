"""Documents of a Parquet file; the only file that knows of `pyarrow`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zoo.errors import UserError

ROWS_AT_ONCE = 1024


def read_parquet(path: Path, *, text_key: str, skip: int) -> Iterator[tuple[object, int]]:
    """The values of the column ``text_key`` behind the first ``skip``, each with its row, from 1.

    Raises:
        UserError: the package is missing, the file cannot be read, or it has no such column.
    """
    file, failures = _open(path)
    names = file.schema_arrow.names
    if text_key not in names:
        raise UserError(
            f"data: {str(path)!r} has no column {text_key!r}, its columns are {', '.join(names)}; set text_key to one"
        )
    row = 0
    try:
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if row + rows <= skip:  # whole groups are passed over unread
                row += rows
                continue
            for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=[text_key]):
                for value in batch.column(0):
                    row += 1
                    if row > skip:
                        yield value.as_py(), row
    except failures as error:
        raise UserError(
            f"data: {str(path)!r} is damaged behind row {row} ({error}); fetch it again, or leave it out"
        ) from error


def count_rows(path: Path) -> int:
    """Rows of the file, from its footer."""
    return _open(path)[0].metadata.num_rows


def _open(path: Path) -> tuple[Any, tuple[type[Exception], ...]]:
    """The file, and what reading it may raise."""
    try:
        import pyarrow  # pyright: ignore[reportMissingImports]
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            f"data: {str(path)!r} needs the `pyarrow` package, which is not installed; "
            "`pip install 'hybrid-zoo[parquet]'`, or convert the file to .jsonl"
        ) from error
    failures = (pyarrow.ArrowException, OSError)
    try:
        return pyarrow.parquet.ParquetFile(path), failures
    except failures as error:
        raise UserError(f"data: {str(path)!r} is no readable Parquet file ({error}); leave it out") from error
