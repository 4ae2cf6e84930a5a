"""Runs that begin only where they will be over in time."""

from __future__ import annotations

import math
import threading
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
    """Lets runs of one kind begin as long as they fit: by the slowest so far, by the stated time at first.

    Several threads may ask.

    Args:
        allowance: of the call.
        stated: seconds of a run that has its device for itself.
        at_once: runs that share a device: until one has been timed, each is taken to slow the others down.
    """

    def __init__(self, allowance: Allowance, stated: float, at_once: int = 1):
        self.allowance, self.stated = allowance, stated * at_once
        self.times: list[float] = []
        self._begun: dict[int, float] = {}  # by run: arms of two learning rates share their titles
        self._lock = threading.Lock()

    def admit(self, run: Run) -> str | None:
        """Why the run does not begin; None: it does, now."""
        with self._lock:
            reason = self.allowance.refuse(max(self.times, default=self.stated))
            if reason is None:
                self._begun[id(run)] = self.allowance.clock()
            return reason

    def over(self, run: Run, *, whole: bool) -> None:
        """The run has ended. If it was a whole one, and did not fail half-way, its time counts from now on."""
        with self._lock:
            taken = self.allowance.clock() - self._begun.pop(id(run))
            self.times += [taken] if whole else []
