"""fit, validate, test, predict: the four verbs that Lightning runs."""

from __future__ import annotations

import sys

from lightning.fabric.utilities.exceptions import MisconfigurationException

from zoo.errors import UserError
from zoo.recipe import ZooCLI, quiet, stop_status
from zoo.watch import NonFiniteError


def run_lightning(verb: str, argv: list[str]) -> int:
    """Run one of the four verbs. ``argv``: what stands behind the verb."""
    quiet()
    sys.argv[1:] = [verb, *argv]  # Lightning starts the processes of further devices from it
    try:
        ZooCLI(None)
    except (MisconfigurationException, NonFiniteError) as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"{error.strerror or error}: {error.filename or 'the run'}") from error
    except SystemExit as stop:
        status = stop_status(stop)
        if status is None:
            raise
        return status
    return 0
