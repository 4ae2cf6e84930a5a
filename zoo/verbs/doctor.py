"""zoo doctor: what this installation can do, and why not the rest."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def run(args: argparse.Namespace) -> int:
    """Print one line a finding. Exits with 1 if something here gives wrong results."""
    from zoo.doctor import examine

    rows = examine()
    width = max(len(row.name) for row in rows)
    kind = ""
    for row in rows:
        if row.kind != kind:
            print(row.kind)
            kind = row.kind
        print(f"  {row.name:{width}s}  {row.state}")
    faults = [row for row in rows if row.fault]
    if faults:
        print(f"\n{len(faults)} of these must be repaired before anything is trained here.")
    return 1 if faults else 0
