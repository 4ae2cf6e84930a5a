"""Tables on a terminal, filled at once or while runs go on; the only file that knows of rich."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

WAITS = "waits"  # what a table says of a run that has not begun
_LINES = 4  # of progress a run, where there is no terminal
_EVERY = 0.5  # seconds between two looks at a run's figures: each makes the host wait for the device
_FRAME = 6  # lines of a screen that a table's head, frame and caption take


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


def watch_runs() -> Lines | LiveRuns:
    """What shows runs as they go: a table that fills on a terminal, lines elsewhere."""
    console = Console()
    return LiveRuns(console) if console.is_terminal else Lines()


class Lines:
    """Runs as lines: one when each begins, four on its way, one at its end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def begin(self, titles: Sequence[str]) -> None:
        """What is going to run, in order."""
        self.count, self.number = len(titles), 0

    def start(self, title: str) -> None:
        """The next run begins."""
        self.number += 1
        print(f"run {self.number} of {self.count}: {title}", flush=True)

    def step(self, done: int, whole: int, figures: Callable[[], dict[str, float]]) -> None:
        """It has made a step."""
        if whole <= 0 or done * _LINES // whole == (done - 1) * _LINES // whole:
            return
        print(f"  step {done} of {whole}{figure_words(figures())}", flush=True)

    def end(self, status: str, score: str, *, before: bool) -> None:
        """It is over."""
        print(f"  {status}{' before' if before else ''}: {score}", flush=True)


class LiveRuns:
    """Runs as a table that fills while they go: progress, figures, and the time that is left.

    Args:
        console: a terminal.
    """

    def __init__(self, console: Console):
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="visible")
        self._rows: list[list[str]] = []
        self._now, self._look = -1, 0.0
        self._begun = 0.0
        self._first: int | None = None  # steps that the run had made before this call
        self._left = ""

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._left = ""
        self._show(whole=True)
        self._live.stop()

    def begin(self, titles: Sequence[str]) -> None:
        """What is going to run, in order; more may be said later."""
        self._rows += [[title, WAITS, ""] for title in titles]
        self._show()

    def start(self, title: str) -> None:
        """The next run begins."""
        self._now += 1
        self._rows[self._now][1:] = ["begins", ""]
        self._begun, self._look, self._first = time.monotonic(), 0.0, None
        self._show()

    def step(self, done: int, whole: int, figures: Callable[[], dict[str, float]]) -> None:
        """It has made a step."""
        now = time.monotonic()
        # A run that goes on begins in the middle; only steps made now tell how long the others take.
        self._first = done - 1 if self._first is None else self._first
        if now - self._look < _EVERY and done != whole:
            return
        self._look = now
        a_step = (now - self._begun) / (done - self._first)
        waiting = len(self._rows) - self._now - 1
        self._left = f"about {clock_words(a_step * (whole - done + waiting * whole))} left"
        self._rows[self._now][1:] = [f"{done / whole:.0%}", figure_words(figures()).removeprefix(", ")]
        self._show()

    def end(self, status: str, score: str, *, before: bool) -> None:
        """It is over."""
        self._rows[self._now][1:] = [f"{status}{' before' if before else ''}", score]
        self._show()

    def _show(self, *, whole: bool = False) -> None:
        over = sum(row[1] != WAITS and not _under_way(row) for row in self._rows)
        table = Table(caption=f"{over} of {len(self._rows)} runs are over {self._left}", header_style="bold")
        for title in ("run", "progress", "figures"):
            table.add_column(title)
        # What is higher than the screen cannot be drawn over: then only runs under way are shown, and all at the end.
        fits = whole or len(self._rows) <= self._live.console.height - _FRAME
        for row in self._rows if fits else filter(_under_way, self._rows):
            table.add_row(*row)
        self._live.update(table, refresh=True)


def _under_way(row: Sequence[str]) -> bool:
    return row[1].startswith("begins") or "%" in row[1]


def figure_words(logged: dict[str, float]) -> str:
    """``, loss 1.234, val bits/byte 2.345, 9,876 tokens/s``: those that are there."""
    names = (("loss", "train/loss"), ("val bits/byte", "val/bpb"))
    parts = [f"{name} {logged[key]:.3f}" for name, key in names if key in logged]
    parts += [f"{logged['tok/s']:,.0f} tokens/s"] if "tok/s" in logged else []
    return "".join(f", {part}" for part in parts)


def clock_words(seconds: float) -> str:
    """``1:02:03``, or ``2:03`` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
