"""Hugging Face data sets, saved on disk or by name; the only file that knows of the `datasets` package."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.data.readers import check_text
from zoo.errors import UserError

PREFIX = "hf:"
SPLIT = "train"
ROWS_AT_ONCE = 256


def is_hub(name: str) -> bool:
    """Whether a source is a data set: ``hf:NAME``, or a folder that ``save_to_disk`` wrote."""
    return name.startswith(PREFIX) or _saved(Path(name))


@dataclass(frozen=True, eq=False)
class HubPart:
    """One split of a data set.

    Attributes:
        name: as given.
        size: bytes of its table.
        text_key: the column that holds the text.
        rows: the data set.
    """

    name: str
    size: int
    text_key: str
    rows: Any

    def documents(self, skip: int = 0) -> Iterator[tuple[str, int]]:
        """The texts behind the first ``skip``, each with the bytes read so far."""
        row = skip
        for batch in self.rows.select(range(skip, len(self.rows))).iter(batch_size=ROWS_AT_ONCE):
            for text in batch[self.text_key]:
                row += 1
                yield check_text(text, f"{self.name}, row {row}"), self.size * row // len(self.rows)

    def fingerprint(self) -> str:
        """Of the number of rows, the first and the last."""
        ends = [str(self.rows[row][self.text_key]) for row in sorted({0, len(self.rows) - 1})]
        return hashlib.sha256(repr((len(self.rows), ends)).encode("utf-8", "replace")).hexdigest()


def hub_part(source: str, text_key: str) -> HubPart:
    """Open ``hf:NAME``, ``hf:NAME,CONFIG``, either with ``:SPLIT`` behind it, or a saved folder.

    Raises:
        UserError: the package is missing, the data set or the split is not there, it has no such column or no rows.
    """
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            f"data: {source!r} needs the `datasets` package, which is not installed; "
            "`pip install 'hybrid-zoo[datasets]'`, or save the texts as .jsonl"
        ) from error
    name, _, split = source.removeprefix(PREFIX).partition(":")
    name, _, config = name.partition(",")
    try:
        found = datasets.load_from_disk(name) if _saved(Path(name)) else _load(datasets, name, config, split)
    except Exception as error:  # the package raises many kinds, of its own and of the network's
        first = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise UserError(
            f"data: {source!r} cannot be opened ({first[0]}); write hf:NAME, hf:NAME,CONFIG or hf:NAME,CONFIG:SPLIT, "
            "or the folder that `save_to_disk` wrote"
        ) from error
    if _saved(Path(name)) and (config or (split and not isinstance(found, datasets.DatasetDict))):
        raise UserError(f"data: {source!r} names a configuration or a split, but {name!r} has none; leave it out")
    if isinstance(found, datasets.DatasetDict):
        if (split or SPLIT) not in found:
            raise UserError(
                f"data: {source!r} has no split {split or SPLIT!r}, its splits are {', '.join(found)}; write "
                f"{PREFIX}{name}:SPLIT"
            )
        found = found[split or SPLIT]
    return _checked(source, found, text_key)


def _load(datasets: Any, name: str, config: str, split: str) -> Any:
    return datasets.load_dataset(name, config or None, split=split or SPLIT)


def _checked(source: str, rows: Any, text_key: str) -> HubPart:
    if text_key not in rows.column_names:
        raise UserError(
            f"data: {source!r} has no column {text_key!r}, its columns are {', '.join(rows.column_names)}; set "
            "text_key to one"
        )
    if not len(rows):
        raise UserError(f"data: {source!r} has no rows; name another split")
    return HubPart(source, rows.data.nbytes, text_key, rows.select_columns([text_key]))


def _saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote the folder: several splits, or one."""
    found = {name for name in ("dataset_dict.json", "dataset_info.json", "state.json") if (folder / name).is_file()}
    return "dataset_dict.json" in found or found == {"dataset_info.json", "state.json"}
