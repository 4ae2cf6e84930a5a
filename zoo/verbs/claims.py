"""zoo claims: try the claims that the project is built on, and say of each whether it holds."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.verbs.stored import report_anew

if TYPE_CHECKING:
    from zoo.claims.claim import Claim, Experiment
    from zoo.console import Lines, LiveRuns

OUT = "runs/claims"  # unless --out names another folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Enter the verb's options."""
    parser.add_argument("--tier", type=int, metavar="N", help="1: two CPU cores (default); 2: one GPU; 3: a cluster")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these claims or families, of any tier")
    parser.add_argument("--free", action="store_true", help="only what needs no training")
    parser.add_argument(
        "--devices",
        metavar="LIST",
        help="runs side by side, one process a name: 0,1; or 0,0 for two on one GPU; cpu is a device too",
    )
    parser.add_argument("--minutes", type=float, metavar="M", help="stop then; the same command goes on")
    parser.add_argument("--out", metavar="FOLDER", help=f"default {OUT}; goes on with it")
    parser.add_argument("--list", action="store_true", help="show the claims and what each costs; try none")
    parser.add_argument(
        "--report-only", metavar="FOLDER", help="write the report of an earlier call anew, from its claims.json"
    )


def run(args: argparse.Namespace) -> int:
    """Try, print, write the report. Exits with 1 if a gate does not hold or a run failed."""
    if args.report_only is not None:
        from zoo.claims.report import SCHEMA

        return report_anew(args, "claims", "claims.json", SCHEMA, _report)
    from zoo.claims.table import select

    claims = select(tier=args.tier, only=args.only, free=args.free) if _asks(args) else select()
    if args.list:
        return _list(claims if _asks(args) else None)
    from zoo.claims.report import collect
    from zoo.claims.run import try_claims
    from zoo.comparison.devices import read_devices
    from zoo.recipe import quiet, stop_status

    quiet(greetings=False)
    out = Path(args.out if args.out is not None else OUT)
    try:
        devices = read_devices(args.devices) if args.devices is not None else ()
        outcome = try_claims(claims, out, minutes=args.minutes, watching=_watching, devices=devices)
    except SystemExit as stop:
        status = stop_status(stop)
        if status is None:
            raise
        return status
    return _report(collect(outcome, _command(args)), out)


def _report(content: Mapping[str, Any], out: Path) -> int:
    from zoo.claims.report import claims_table, summary, write_report
    from zoo.console import print_table

    files = write_report(content, out)
    table = claims_table(content)
    print()
    print_table(table.columns, table.rows, notes=[summary(content)])
    print(f"\nreport {files['claims.md']}, numbers {files['claims.json']}")
    return 0 if content["good"] else 1


def _watching(experiment: Experiment) -> Lines | LiveRuns:
    """Shows the runs of one experiment, behind a line that names it."""
    from zoo.console import watch_runs

    print(f"experiment {experiment.name}: {experiment.runs} runs, about {experiment.stated:.0f} s where it is quiet")
    return watch_runs()


def _asks(args: argparse.Namespace) -> bool:
    return args.tier is not None or bool(args.only) or args.free


def _list(claims: Sequence[Claim] | None) -> int:
    from zoo.claims.table import CLAIMS
    from zoo.console import print_table

    shown = claims if claims is not None else CLAIMS
    rows = [[c.name, str(c.tier), c.family, "gate" if c.gate else "reported", c.sentence, c.cost] for c in shown]
    columns = (("claim", True), ("tier", False), ("family", True), ("counts", True), ("says", True), ("cost", True))
    print_table(columns, rows, notes=[f"{len(rows)} claims. `zoo claims --only NAME` tries one; docs/claims.md."])
    return 0


def _command(args: argparse.Namespace) -> str:
    words = ["zoo", "claims", *([f"--tier={args.tier}"] if args.tier is not None else [])]
    words += [*(["--only", *args.only] if args.only else []), *(["--free"] if args.free else [])]
    words += [f"--devices={args.devices}"] if args.devices is not None else []
    return shlex.join([*words, *([f"--minutes={args.minutes:g}"] if args.minutes is not None else [])])
