"""--report-only: what a verb wrote before is written anew, from the one file that holds all of it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zoo.errors import UserError


def report_anew(
    args: argparse.Namespace, verb: str, name: str, schema: int, report: Callable[[dict[str, Any], Path], int]
) -> int:
    """Write what follows from a file of ``--report-only FOLDER``; the exit status.

    Args:
        args: of the command line; no other option may be in it, for none would do anything.
        verb: what writes such folders.
        name: the file.
        schema: the layout that this version reads.
        report: writes and prints, from the content and the folder.

    Raises:
        UserError: another option, no such file, another layout, one that lacks something, or a folder that nothing can
            be written to.
    """
    for option, value in vars(args).items():
        if option != "report_only" and not (value is None or value is False or value == []):
            word = "an arm" if option == "arms" else f"--{option.replace('_', '-')}"
            raise UserError(f"--report-only writes what the folder holds, and {word} changes none of it; leave one out")
    folder = Path(args.report_only)
    path = folder / name
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--report-only {folder}: {path} cannot be read; name a folder of `zoo {verb}`") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no report; name a folder of `zoo {verb}`")
    found = content.get("schema")
    if found != schema:
        raise UserError(
            f"{path} has the layout {found}, and this version writes {schema}; call `zoo {verb}` with the same words "
            "again: what finished is not trained again"
        )
    try:
        return report(content, folder)
    except BrokenPipeError:  # of the output, not of the folder: the command line knows what to do
        raise
    except OSError as error:
        raise UserError(f"--report-only {folder}: it cannot be written to ({error})") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is not whole ({type(error).__name__}: {error}); call `zoo {verb}` with the same words again: what "
            "finished is not trained again"
        ) from error
