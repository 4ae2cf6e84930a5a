"""--report-only: what a verb wrote before is written anew, from the one file that holds all of it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from zoo.errors import UserError


def read_stored(args: argparse.Namespace, verb: str, name: str, schema: int) -> tuple[dict[str, Any], Path]:
    """The content of ``--report-only FOLDER``, and the folder.

    Args:
        args: of the command line; no other option may be in it, for none would do anything.
        verb: what writes such folders.
        name: the file.
        schema: the layout that this version reads.

    Raises:
        UserError: another option, no such file, or another layout.
    """
    for option, value in vars(args).items():
        if option != "report_only" and value not in (None, [], False):
            word = "an arm" if option == "arms" else f"--{option.replace('_', '-')}"
            raise UserError(f"--report-only writes what the folder holds, and {word} changes none of it; leave one out")
    folder = Path(args.report_only)
    path = folder / name
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--report-only {folder}: {path} cannot be read; name a folder of `zoo {verb}`") from error
    found = content.get("schema") if isinstance(content, dict) else None
    if found != schema:
        raise UserError(
            f"{path} has the layout {found}, and this version writes {schema}; call `zoo {verb}` with the same words "
            "again: what finished is not trained again"
        )
    return content, folder
