"""zoo bench: how fast the kernels are on this machine, and the table that they are launched by."""

from __future__ import annotations

import argparse
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.cli import Parser
from zoo.errors import UserError
from zoo.names import near

if TYPE_CHECKING:
    import torch

    from zoo.bench.ops import Case
    from zoo.bench.table import Report


class _Part(Parser):
    """The parser of one part of the verb; it answers for its own unknown options."""

    # Python 3.14 hands the outer parser's colours down.
    def __init__(self, prog: str, description: str, color: bool = True):
        super().__init__(prog, description)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            word = unknown[0].split("=")[0]
            self.error(f"unknown argument '{word}'{near(word, self._option_string_actions)}")
        return found, unknown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Enter the parts and their options."""
    parts = parser.add_subparsers(dest="part", required=True, metavar="{ops,tune}", parser_class=_Part)
    ops = parts.add_parser("ops", description="speed and memory of each op, and of peers that are installed")
    tune = parts.add_parser("tune", description="try the launch settings of each kernel, and write down the fastest")
    for part in (ops, tune):
        part.add_argument("--op", nargs="+", metavar="OP", help="the cases of these ops; without it and --case, most")
        part.add_argument("--case", nargs="+", metavar="NAME", help="these cases; --list shows them")
        part.add_argument("--repeats", type=int, default=None, metavar="N", help="timed calls; default: 0.2 s of them")
    ops.add_argument("--small", action="store_true", help="tiny shapes, to try the command; also without a GPU")
    ops.add_argument("--list", action="store_true", help="show the cases and end")
    ops.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="time peers too")
    ops.add_argument("--cached", action="store_true", help="keep compiled kernels between runs; first calls say less")
    ops.add_argument("--out", default=None, metavar="FILE.json", help="write all figures, case by case")
    ops.add_argument("--markdown", default=None, metavar="FILE.md", help="write the table for docs/benchmarks")
    ops.add_argument("--plot", default=None, metavar="FILE.png", help="draw the curve; needs --op curve")
    tune.add_argument("--kernel", nargs="+", metavar="NAME", help="kernels with a table of launches; default: all seen")
    tune.add_argument("--out", default=None, metavar="FILE.py", help="default: launches.py beside the kernels")


def run(args: argparse.Namespace) -> int:
    """Run one part. Exits with 1 if something of ours failed."""
    if args.repeats is not None and args.repeats < 1:
        raise UserError(f"--repeats must be at least 1, got {args.repeats}")
    from zoo.bench.ops import OPS, select

    if args.part == "ops" and args.list:
        return _list(select(args.op, args.case) if args.op or args.case else select(OPS))
    cases = select(args.op, args.case)
    for name in ("out", "markdown", "plot"):
        file = getattr(args, name, None)
        if file is not None and not Path(file).absolute().parent.is_dir():
            raise UserError(f"--{name} {file}: there is no folder {Path(file).parent}; make it first")
    if args.part == "tune":
        return _tune(args, cases, _device(args.part, "launches measured on a CPU would mean nothing."))
    if args.small:
        cases = [case.small() for case in cases]
    cure = "--small runs tiny shapes, to try the command; its figures say nothing of kernels."
    return _ops(args, cases, _device(args.part, None if args.small else f"these shapes take hours on a CPU.\n{cure}"))


def _list(cases: list[Case]) -> int:
    width = max(len(case.name) for case in cases) + 2
    op = ""
    for case in cases:
        if case.op != op:
            print(case.op)
            op = case.op
        print(f"  {case.name:<{width}}{case.shape}")
    return 0


def _device(part: str, refusal: str | None) -> torch.device:
    """The GPU; without one the CPU, or, with a ``refusal``, an error."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if refusal is not None:
        raise UserError(f"zoo bench {part}: there is no CUDA GPU here, and {refusal}")
    return torch.device("cpu")


def _ops(args: argparse.Namespace, cases: list[Case], device: torch.device) -> int:
    from zoo.bench.measure import measure
    from zoo.bench.ops import standard_dtype
    from zoo.bench.peers import undisguised
    from zoo.bench.roofline import measure_ceilings
    from zoo.bench.table import Report, markdown, progress, show, versions, write_json
    from zoo.bench.timing import empty_kernel_cache

    if args.plot is not None and not any(case.op == "curve" for case in cases):
        raise UserError(
            "--plot draws chunkwise against recurrent, and no case of the curve was asked for; add --op curve"
        )
    dtype = standard_dtype(device)
    report = Report(_command(args), versions(device), measure_ceilings(device, dtype, small=args.small), ())
    with ExitStack() as stack:
        stack.enter_context(undisguised())
        if not args.cached:
            stack.enter_context(empty_kernel_cache())
        for case in cases:
            for found in measure(case, device, dtype, peers=args.peers, repeats=args.repeats):
                report = report.with_row(found)
                print(progress(found), flush=True)
                if args.out is not None:
                    write_json(report, args.out)
    print()
    show(report)
    if args.markdown is not None:
        Path(args.markdown).write_text(markdown(report), encoding="utf-8")
    if args.plot is not None:
        _plot(args.plot, report)
    return 1 if any(row.reason.startswith("failed") and not row.peer for row in report.rows) else 0


def _plot(file: str, report: Report) -> None:
    from zoo.bench.table import curve, head
    from zoo.plot import draw_by_length

    lines = curve(report.rows)
    if not lines:
        print(f"no point of the curve has both times, so {file} is not drawn")
        return
    draw_by_length(
        lines,
        file,
        ylabel="times faster than token by token",
        title="The chunkwise delta rule against the recurrent, forward",
        note="; ".join(head(report)[:2]),
    )


def _tune(args: argparse.Namespace, cases: list[Case], device: torch.device) -> int:
    from zoo.bench.tune import launches_file, merged, read_launches, tune, write_launches

    file = Path(args.out) if args.out else launches_file()
    rows = read_launches(file)
    for kernel, new in tune(cases, device, kernels=args.kernel, repeats=args.repeats):
        # At once: a candidate that ends the process must not take the others' results along.
        rows = merged(rows, kernel, new)
        write_launches(rows, file)
        print(f"{kernel}: {len(new)} rows in {file}")
    return 0


def _command(args: argparse.Namespace) -> str:
    """The command that gives these figures again."""
    words = ["zoo", "bench", args.part]
    for name, value in vars(args).items():
        if name == "part" or value is None or value is False or (name, value) == ("peers", True):
            continue
        words += [f"--{name}", *(value if isinstance(value, list) else [] if value is True else [str(value)])]
    return shlex.join(words + (["--no-peers"] if not args.peers else []))
