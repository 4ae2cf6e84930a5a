"""The time that a call may take: what is under way at its end is saved, and goes on with the next call."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Self

from zoo.errors import UserError

Clock = Callable[[], float]


class Allowance:
    """The time that a call may take.

    Args:
        minutes: as given; None: without a bound.
        clock: seconds that only rise.

    Raises:
        UserError: no time at all.
    """

    def __init__(self, minutes: float | None = None, clock: Clock = time.monotonic):
        if minutes is not None and not (math.isfinite(minutes) and minutes > 0):
            raise UserError(f"--minutes {minutes:g}: give a number above 0, or leave it out for as long as it takes")
        self.clock = clock
        self.words = "" if minutes is None else f"--minutes {minutes:g}"
        self._end = math.inf if minutes is None else clock() + 60 * minutes

    @property
    def left(self) -> float:
        """Seconds; below 0 when they are over, infinite where there is no bound."""
        return self._end - self.clock()

    def refuse(self, seconds: float = 0.0) -> str | None:
        """Why nothing begins any more, or nothing that takes so long and cannot be stopped half-way; None: it may."""
        left = self.left
        if left <= 0:
            return f"{self.words}: they are over"
        return None if seconds <= left else f"{self.words}: it takes about {seconds:.0f} s, {left:.0f} are left"

    def handed(self) -> dict[str, float | str | None]:
        """For another process of this host, which has the same clock: what :meth:`taken` takes there."""
        return {"end": self._end if math.isfinite(self._end) else None, "words": self.words}

    @classmethod
    def taken(cls, end: float | None, words: str) -> Self:
        """Of another process of this host."""
        own = cls()
        own.words, own._end = words, math.inf if end is None else end
        return own
