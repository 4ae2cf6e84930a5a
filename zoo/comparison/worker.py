"""Trains runs of a comparison on the device that its environment shows it: python -m zoo.comparison.worker.

It is started by :mod:`zoo.comparison.devices` and talks to it alone. In: lines of JSON; one that names a work and a
size is followed by the pickled plan and folder, any other is a run of a work. Out: lines of JSON, of steps and of ends.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from zoo.comparison.allowance import Allowance
from zoo.comparison.plan import Plan, Run
from zoo.comparison.run import train_run
from zoo.errors import UserError
from zoo.recipe import quiet

EVERY = 0.5  # seconds between two looks at a run's figures: each makes the host wait for the device


class Teller:
    """Sends what a run does as lines of JSON."""

    def __init__(self, out: TextIO):
        self.out, self._look = out, 0.0

    def tell(self, **event: Any) -> None:
        """One line."""
        print(json.dumps(event), file=self.out, flush=True)

    def begin(self, titles: Sequence[str]) -> None:
        """Said by who starts the runs."""

    def start(self, title: str) -> None:
        """Said by who starts the runs."""

    def step(self, done: int, whole: int, figures: Callable[[], dict[str, float]]) -> None:
        """It has made a step."""
        now = time.monotonic()
        if now - self._look >= EVERY or done == whole:
            self._look = now
            self.tell(event="step", done=done, whole=whole, figures=figures())

    def end(self, status: str, score: str, *, before: bool) -> None:
        """Said by who starts the runs, from the run's folder."""


def serve(source: Any, teller: Teller) -> None:
    """Train run after run, until the other side closes."""
    works: dict[int, tuple[Plan, Path]] = {}
    for line in source:
        job = json.loads(line)
        if "bytes" in job:
            plan, out = pickle.loads(source.read(job["bytes"]))
            if not isinstance(plan, Plan):
                raise TypeError(f"zoo.comparison.worker reads a Plan, got {type(plan).__name__}")
            works[job["work"]] = plan, Path(out)
            continue
        plan, out = works[job["work"]]
        run = Run(plan.arms[job["arm"]], job["seed"], job["learning_rate"], job["factor"])
        try:
            train_run(plan, run, out, teller, job["at_once"], Allowance.taken(**job["allowance"]))
        except UserError as error:
            teller.tell(event="refused", message=str(error))
        else:
            teller.tell(event="end")


def main() -> None:
    """Serve standard input and output; what anything prints goes to the log that standard error is."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    quiet(greetings=False)
    serve(sys.stdin.buffer, Teller(channel))


if __name__ == "__main__":
    main()
