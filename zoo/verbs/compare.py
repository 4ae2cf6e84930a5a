"""zoo compare: train several patterns under one budget, and report."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Enter the verb's options."""
    parser.add_argument("patterns", nargs="+", metavar="PATTERN", help="an arm: a pattern, or a preset's name")
    parser.add_argument(
        "--recipe", required=True, metavar="FILE", help="what all arms share; its own model sets the budget"
    )
    parser.add_argument("--out", default=None, metavar="FOLDER", help="default runs/compare-RECIPE")
    parser.add_argument("--tol", default="1%", metavar="SHARE", help="how far parameters may differ (default 1%%)")
    parser.add_argument(
        "--context", type=int, default=4096, metavar="T", help="tokens at which the decode state is counted"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a recipe setting for all arms, such as --set budget.tokens=100000; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """Run the arms, print the table, write the report. Exits with 1 if an arm failed."""
    from zoo.compare import make_plan, run_plan
    from zoo.errors import UserError
    from zoo.recipe import quiet, stop_status
    from zoo.report import print_table, text_entropies, write_report

    quiet(greetings=False)
    for setting in args.set:
        if "=" not in setting:
            raise UserError(f"--set {setting}: write KEY=VALUE, such as --set budget.tokens=100000")
    overrides = [f"--{setting}" for setting in args.set]
    plan = make_plan(args.patterns, args.recipe, overrides=overrides, tolerance=_share(args.tol), context=args.context)
    print(plan.held)
    out = Path(args.out) if args.out else Path("runs") / f"compare-{Path(args.recipe).stem}"
    entropies = text_entropies(plan)
    try:
        results = run_plan(plan, out)
    except SystemExit as stop:
        status = stop_status(stop)
        if status is None:
            raise
        return status
    files = write_report(plan, results, out, entropies)
    print()
    print_table(plan, results, entropies)
    print(f"\nreport {files['report.md']}, picture {files['curves.png']}, numbers {files['results.csv']}")
    return 0 if all(result.status == "finished" for result in results) else 1


def _share(text: str) -> float:
    from zoo.errors import UserError

    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise UserError(f"--tol {text}: give a share between 0 and 1, such as 1% or 0.01")
    return share
