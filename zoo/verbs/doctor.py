"""zoo doctor: what this installation can do, and why not the rest."""

from __future__ import annotations

import argparse

HELP = "what this installation can do, and why not the rest"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def run(args: argparse.Namespace) -> int:
    """Print one line a finding."""
    from zoo.doctor import examine

    kind = ""
    for row in examine():
        if row.kind != kind:
            print(row.kind)
            kind = row.kind
        print(f"  {row.name:36s}  {row.state}")
    return 0
