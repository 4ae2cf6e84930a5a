"""Shows runs that go side by side: a table that fills on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol, Self

from zoo.console import WAITS, Console, LiveRuns, clock_words, figure_words

_LINES = 4  # of progress a run, where there is no terminal


class DeviceWatch(Protocol):
    """Hears of runs on several devices; one call at a time."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def begin(self, titles: Sequence[str]) -> None:
        """What is going to run, in the order of the queue; more may be said later."""

    def take(self, title: str, device: str) -> None:
        """A device takes a run."""

    def progress(self, title: str, done: int, whole: int, figures: dict[str, float]) -> None:
        """It has made steps."""

    def back(self, title: str, reason: str) -> None:
        """It stands in the queue again."""

    def over(self, title: str, status: str, score: str, *, before: bool) -> None:
        """It has ended; ``before``: it had been in an earlier call."""


def watch_devices() -> DeviceWatch:
    """A table on a terminal, lines elsewhere."""
    console = Console()
    return DeviceTable(console) if console.is_terminal else DeviceLines()


class DeviceLines:
    """Every run by name: one line when it begins, up to four on its way, one at its end."""

    def __init__(self) -> None:
        self._quarters: dict[str, int] = {}  # by title
        self._numbers: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def begin(self, titles: Sequence[str]) -> None:
        """What is going to run."""
        self._quarters |= dict.fromkeys(titles, 0)

    def take(self, title: str, device: str) -> None:
        """A device takes a run."""
        number = self._numbers.setdefault(title, len(self._numbers) + 1)
        print(f"run {number} of {len(self._quarters)} on {device}: {title}", flush=True)

    def progress(self, title: str, done: int, whole: int, figures: dict[str, float]) -> None:
        """It has made steps."""
        quarter = done * _LINES // whole if whole > 0 else 0
        if quarter > self._quarters[title]:
            self._quarters[title] = quarter
            print(f"  {title}: step {done} of {whole}{figure_words(figures)}", flush=True)

    def back(self, title: str, reason: str) -> None:
        """It stands in the queue again."""
        self._quarters[title] = 0
        print(f"  {title}: {reason}", flush=True)

    def over(self, title: str, status: str, score: str, *, before: bool) -> None:
        """It has ended."""
        print(f"  {title}: {status}{' before' if before else ''}: {score}", flush=True)


class DeviceTable(LiveRuns):
    """All runs as a table that fills: how far each is and where, its figures, and the time that is left.

    Args:
        console: a terminal.
    """

    def __init__(self, console: Console):
        super().__init__(console)
        self._places: dict[str, tuple[int, str]] = {}  # row and device
        self._going: dict[str, tuple[float, int | None, float]] = {}  # began, first step of this call, share of it
        self._times: list[float] = []  # seconds of the runs that were trained in this call

    def begin(self, titles: Sequence[str]) -> None:
        """What is going to run."""
        self._places |= {title: (row, "") for row, title in enumerate(titles, start=len(self._rows))}
        super().begin(titles)

    def take(self, title: str, device: str) -> None:
        """A device takes a run."""
        row, _ = self._places[title]
        self._places[title] = (row, device)
        self._going[title] = (time.monotonic(), None, 0.0)
        self._fill(title, f"0% on {device}", "")

    def progress(self, title: str, done: int, whole: int, figures: dict[str, float]) -> None:
        """It has made steps."""
        began, first, _ = self._going[title]
        first = done - 1 if first is None else first
        self._going[title] = (began, first, (done - first) / max(1, whole - first))
        self._fill(title, f"{done / whole:.0%} on {self._places[title][1]}", figure_words(figures).removeprefix(", "))

    def back(self, title: str, reason: str) -> None:
        """It stands in the queue again."""
        self._going.pop(title)
        self._fill(title, WAITS, reason)

    def over(self, title: str, status: str, score: str, *, before: bool) -> None:
        """It has ended."""
        began, first, _ = self._going.pop(title)
        if first is not None:
            self._times.append(time.monotonic() - began)
        self._fill(title, f"{status}{' before' if before else ''}", score)

    def _fill(self, title: str, progress: str, figures: str) -> None:
        self._rows[self._places[title][0]][1:] = [progress, figures]
        self._left = self._time_left()
        self._show()

    def _time_left(self) -> str:
        """By what the runs under way have taken, and by the mean of those that are known for those that wait."""
        now = time.monotonic()
        wholes = {title: (now - began) / share for title, (began, _, share) in self._going.items() if share > 0}
        known = [*self._times, *wholes.values()]
        if not known:
            return ""
        mean = sum(known) / len(known)
        under_way = [wholes.get(title, mean) * (1 - share) for title, (_, _, share) in self._going.items()]
        waiting = sum(row[1] == WAITS for row in self._rows)
        devices = len({device for _, device in self._places.values() if device})
        return f"about {clock_words((sum(under_way) + waiting * mean) / devices)} left"
