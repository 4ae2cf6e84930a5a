"""fit, validate, test, predict: the four verbs that Lightning runs."""

from __future__ import annotations

import sys

from zoo.recipe import ZooCLI, quiet


def run_lightning(verb: str, argv: list[str]) -> int:
    """Run one of the four verbs. ``argv``: what stands behind the verb."""
    quiet()
    sys.argv[1:] = [verb, *argv]  # Lightning starts the processes of further devices from it
    ZooCLI(None)
    return 0
