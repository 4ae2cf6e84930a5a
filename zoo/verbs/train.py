"""fit, validate, test, predict: the four verbs that Lightning runs."""

from __future__ import annotations

import sys

from lightning.fabric.utilities.exceptions import MisconfigurationException

from zoo.errors import UserError
from zoo.recipe import ZooCLI, quiet

INTERRUPTED, TERMINATED = 130, 143  # exit statuses that schedulers know: 128 and the signal


def run_lightning(verb: str, argv: list[str]) -> int:
    """Run one of the four verbs. ``argv``: what stands behind the verb."""
    quiet()
    sys.argv[1:] = [verb, *argv]  # Lightning starts the processes of further devices from it
    try:
        cli = ZooCLI(None)
    except MisconfigurationException as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"{error.strerror or error}: {error.filename or 'the run'}") from error
    except SystemExit as stop:
        if not isinstance(stop.__context__, KeyboardInterrupt):
            raise
        print("interrupted; go on from the last checkpoint with --ckpt_path last", file=sys.stderr)
        return INTERRUPTED
    return TERMINATED if cli.trainer.received_sigterm else 0
