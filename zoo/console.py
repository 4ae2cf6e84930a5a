"""Tables on a terminal; the only file that knows of rich."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


def print_table(
    columns: Sequence[tuple[str, bool]],
    rows: Sequence[Sequence[str]],
    *,
    notes: Sequence[str] = (),
    sections: Sequence[int] = (),
    width: int = 140,
) -> None:
    """Print a table and sentences below it, plain where the output is no terminal.

    Args:
        columns: (title, whether it holds text); numbers stand right.
        rows: cells as text, one for each column.
        notes: printed below, one a line.
        sections: rows, from 0, under which a line is drawn.
        width: columns of the output where it is no terminal.
    """
    table = Table(title=None, header_style="bold")
    for index, (title, text) in enumerate(columns):
        table.add_column(title, justify="left" if text else "right", no_wrap=index == 0)
    for index, row in enumerate(rows):
        table.add_row(*row, end_section=index in sections)
    console = Console(width=None if Console().is_terminal else width)
    console.print(table)
    for line in notes:
        console.print(line, highlight=False)
