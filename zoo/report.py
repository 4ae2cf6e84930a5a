"""A comparison on the terminal; the only file that prints tables with rich."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from zoo.compare import COLUMNS, Plan, Result, notes, shown, table_rows


def print_table(plan: Plan, results: list[Result], entropies: dict[str, float]) -> None:
    """The comparison's table and the notes that belong to it, plain where the output is no terminal."""
    table = Table(title=None, header_style="bold")
    for key, title in COLUMNS:
        table.add_column(title, justify="left" if key in ("arm", "status") else "right", no_wrap=key == "arm")
    for row in table_rows(results):
        table.add_row(*(shown(key, row[key]) for key, _ in COLUMNS))
    console = Console(width=None if Console().is_terminal else 140)
    console.print(table)
    for line in notes(plan, entropies):
        console.print(line, highlight=False)
