"""mixers: what can stand in a pattern, and the options of each."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from zoo.errors import UserError
from zoo.names import mixer_names, near

if TYPE_CHECKING:
    from zoo_layers.mixer import MixerSpec, Option

# Width at which a mixer is checked: small, and what the defaults of every mixer fit.
CHECK_WIDTH = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``zoo mixers``."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="show this mixer's options")
    parser.add_argument("--check", action="store_true", help="try every property that a mixer must have on this one")


def run(args: argparse.Namespace) -> int:
    """Print all mixers, or the options of one; or check one."""
    if args.check and not args.name:
        raise UserError("--check needs a mixer's name: zoo mixers --check GDN")
    name = args.name.upper() if args.name else None
    names = mixer_names()
    if name is not None and names and name not in names:
        raise UserError(f"unknown mixer '{args.name}'{near(args.name, names)}\nKnown mixers: {' '.join(names)}.")
    from zoo_layers.mixer import broken, registered

    if name is None:
        _print_all(registered(), broken())
        return 0
    if name in broken():
        raise UserError(f"mixer {name} is installed, but could not be loaded: {broken()[name]}")
    if args.check:
        return _check(registered()[name])
    _print_one(registered()[name])
    return 0


def _check(spec: type[MixerSpec]) -> int:
    """Print each property and whether it holds; 1 where one does not."""
    from zoo_layers.conformance import check

    failed = 0
    for prop, failure in check(spec(), CHECK_WIDTH):
        print(f"{spec.name}  {prop}: {'holds' if failure is None else failure}")
        failed += failure is not None
    return 1 if failed else 0


def _print_all(specs: dict[str, type[MixerSpec]], failed: dict[str, str]) -> None:
    width = max(len(name) for name in (*specs, *failed)) + 2
    for name, spec in specs.items():
        print(f"{name:<{width}}{_summary(spec)}")
    for name, reason in failed.items():
        print(f"{name:<{width}}could not be loaded: {reason}")
    print("\n`zoo mixers NAME` shows a mixer's options.")


def _summary(spec: type[MixerSpec]) -> str:
    lines = (spec.__doc__ or "").strip().splitlines()
    return lines[0] if lines else ""


def _print_one(spec: type[MixerSpec]) -> None:
    print(
        f"{spec.name}    "
        + "\n      ".join(line.strip() for line in (spec.__doc__ or "").strip().splitlines() if line.strip())
    )
    rows = [("option", "type", "default", "range", "meaning")]
    rows += [_row(option) for option in spec.options().values()]
    widths = [max(len(row[column]) for row in rows) + 2 for column in range(4)]
    print()
    for row in rows:
        print("".join(word.ljust(width) for word, width in zip(row, widths)) + row[4])
    first = next(iter(spec.options().values()), None)
    if first is not None:
        recipe = f"mixers: {{{spec.name}: {{{first.name}: VALUE}}}}"
        print(f"\nIn a pattern: {spec.name}:{first.name}=VALUE. In a recipe: {recipe}.")


def _row(option: Option) -> tuple[str, str, str, str, str]:
    default = "open" if option.default is None else option.write(option.default)
    if option.choices:
        limits = ", ".join(option.choices)
    elif option.at_least is not None and option.at_most is not None:
        limits = f"{option.at_least} to {option.at_most}"
    elif option.at_least is not None:
        limits = f"at least {option.at_least}"
    elif option.at_most is not None:
        limits = f"at most {option.at_most}"
    else:
        limits = "true, false" if option.kind is bool else ""
    return option.name, option.kind.__name__, default, limits, option.help
