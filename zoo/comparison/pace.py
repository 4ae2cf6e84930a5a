"""Runs that begin only where they will be over in time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from zoo.comparison.plan import Run
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

    def __init__(self, minutes: float | None, clock: Clock = time.monotonic):
        if minutes is not None and not (math.isfinite(minutes) and minutes > 0):
            raise UserError(f"--minutes {minutes:g}: give a number above 0, or leave it out for as long as it takes")
        self.clock = clock
        self._end = math.inf if minutes is None else clock() + 60 * minutes
        self._words = "" if minutes is None else f"--minutes {minutes:g}"

    def refuse(self, seconds: float) -> str | None:
        """Why something that takes so long does not begin; None: it fits."""
        left = self._end - self.clock()
        return (
            None if seconds <= left else f"{self._words}: it takes about {seconds:.0f} s, {max(0.0, left):.0f} are left"
        )


class Pace:
    """Lets runs begin as long as they fit: by the slowest so far, by the stated time at first."""

    def __init__(self, allowance: Allowance, stated: float):
        self.allowance, self.stated = allowance, stated
        self.times: list[float] = []
        self._begun: float | None = None

    def admit(self, run: Run) -> str | None:
        """Asked between runs, so the one before is over."""
        self.end()
        reason = self.allowance.refuse(max(self.times, default=self.stated))
        self._begun = self.allowance.clock() if reason is None else None
        return reason

    def end(self) -> None:
        """Take the time of the run that is over, if one has begun."""
        if self._begun is not None:
            self.times.append(self.allowance.clock() - self._begun)
            self._begun = None
