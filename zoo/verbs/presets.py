"""presets: published patterns and models by name, and where each number is from."""

from __future__ import annotations

import argparse

from zoo.errors import UserError
from zoo.names import near
from zoo.presets import Preset, presets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``zoo presets``."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="show what this preset sets, with sources")


def run(args: argparse.Namespace) -> int:
    """Print all presets, or one with its sources."""
    known = presets()
    if args.name is None:
        _print_all(list(known.values()))
        return 0
    if args.name not in known:
        raise UserError(f"unknown preset '{args.name}'{near(args.name, known)}\n`zoo presets` lists them all.")
    _print_one(known[args.name])
    return 0


def _print_all(every: list[Preset]) -> None:
    rows = [("preset", "pattern", "n_layers", "d_model", "d_ff", "note")]
    for one in every:
        width, inner = (str(size) if size is not None else "" for size in (one.d_model, one.d_ff))
        reason = one.why_not()
        note = one.note if reason is None else f"not yet: {reason}"
        rows.append((one.name, one.pattern, str(one.n_layers or one.depths), width, inner, note))
    widths = [max(len(row[column]) for row in rows) + 2 for column in range(5)]
    for row in rows:
        print("".join(word.ljust(width) for word, width in zip(row, widths)) + row[5])
    print("\n`zoo presets NAME` shows where each number is from; `zoo explain --preset NAME` the layers.")


def _print_one(one: Preset) -> None:
    print(f"{one.name}    {one.note}    n_layers must be: {one.depths}")
    reason = one.why_not()
    if reason is not None:
        print(f"not yet: {reason}")
    rows = [(name, _word(value), source) for name, value, source in one.settings()]
    widths = [max(len(row[column]) for row in rows) + 2 for column in range(2)]
    for name, value, source in rows:
        print(f"{name:<{widths[0]}}{value:<{widths[1]}}{source}")


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
