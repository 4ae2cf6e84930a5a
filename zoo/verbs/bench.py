"""zoo bench: how fast kernels are and models train on this machine, and the table that kernels are launched by."""

from __future__ import annotations

import argparse
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.cli import PartParser
from zoo.errors import UserError

if TYPE_CHECKING:
    import torch

    from zoo.bench.ops import Case
    from zoo.bench.table import Report
    from zoo.bench.train_table import TrainReport

# On unless --no-NAME is given.
SWITCHES = ("peers", "baseline")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Enter the parts and their options."""
    parts = parser.add_subparsers(dest="part", required=True, metavar="{ops,tune,train}", parser_class=PartParser)
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
    _add_train(parts.add_parser("train", description="training speed, MFU, memory and parts of a step, for presets"))


def _add_train(train: argparse.ArgumentParser) -> None:
    add = train.add_argument
    add("presets", nargs="+", metavar="PRESET", help="with a size, such as gdn-h1-1.3b; `zoo presets` lists them")
    add("--lengths", nargs="+", default=None, metavar="TxB", help="tokens x rows; default: 2048x16 to 32768x1")
    add("--steps", type=int, default=None, metavar="N", help="timed steps; default: 10 or more, on a CPU 3")
    add("--compile", action="store_true", help="compile the presets' blocks; on a GPU the baseline always is")
    add(
        "--recompute",
        choices=("none", "selective", "full"),
        default="none",
        help="what the presets' backward computes again instead of keeping it",
    )
    add(
        "--baseline",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="train the Transformer++ of the nearest size too",
    )
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help="for all models: d_model=64, GDN.heads=2")
    add(
        "--peak_flops", type=float, default=None, metavar="F", help="dense FLOP/s of the device; default: its datasheet"
    )
    add("--out", default=None, metavar="FILE.json", help="write all figures, row by row")
    add("--markdown", default=None, metavar="FILE.md", help="write the table for docs/benchmarks")
    add("--plot", default=None, metavar="FILE.png", help="draw tokens a second against the baseline's, over length")


def run(args: argparse.Namespace) -> int:
    """Run one part. Exits with 1 if something of ours failed."""
    for name in ("repeats", "steps"):
        count = getattr(args, name, None)
        if count is not None and count < 1:
            raise UserError(f"--{name} must be at least 1, got {count}")
    for name in ("out", "markdown", "plot"):
        file = getattr(args, name, None)
        if file is not None and not Path(file).absolute().parent.is_dir():
            raise UserError(f"--{name} {file}: there is no folder {Path(file).parent}; make it first")
    if args.part == "train":
        return _train(args, _device(args.part, None))
    from zoo.bench.ops import OPS, select

    if args.part == "ops" and args.list:
        return _list(select(args.op, args.case) if args.op or args.case else select(OPS))
    cases = select(args.op, args.case)
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


def _train(args: argparse.Namespace, device: torch.device) -> int:
    from zoo.bench.ops import standard_dtype
    from zoo.bench.roofline import measure_ceilings
    from zoo.bench.table import versions
    from zoo.bench.train import LENGTHS, Shape, check_affordable, measure, read_settings, select
    from zoo.bench.train_table import TrainReport, markdown, progress, show, write_json

    on_gpu = device.type == "cuda"
    if args.plot is not None and not args.baseline:
        raise UserError("--plot draws tokens a second against the baseline's; leave --no-baseline out")
    if args.peak_flops is not None and args.peak_flops <= 0:
        raise UserError(f"--peak_flops must be above 0, got {args.peak_flops}")
    shapes = [Shape.read(text) for text in args.lengths or LENGTHS]
    subjects = select(
        args.presets,
        read_settings(args.set),
        compiled=args.compile,
        baseline=args.baseline,
        compiled_baseline=on_gpu or args.compile,
        recompute=args.recompute,
    )
    if not on_gpu:
        check_affordable(subjects, shapes)
    ceilings = measure_ceilings(device, standard_dtype(device), small=not on_gpu)
    report = TrainReport(_command(args), versions(device), ceilings, args.peak_flops or _peak(device))
    for subject in subjects:
        for row in measure(subject, shapes, device, steps=args.steps):
            report = report.with_row(row)
            print(progress(row), flush=True)
            if args.out is not None:
                write_json(report, args.out)
    print()
    show(report)
    if args.markdown is not None:
        Path(args.markdown).write_text(markdown(report), encoding="utf-8")
    if args.plot is not None:
        _plot_train(args.plot, report)
    return 1 if any(row.reason.startswith("failed") for row in report.rows) else 0


def _peak(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of a known GPU."""
    if device.type != "cuda":
        return None
    import torch

    from zoo.callbacks import known_peak

    return known_peak(torch.cuda.get_device_name(device), "bf16-mixed")


def _plot_train(file: str, report: TrainReport) -> None:
    from zoo.bench.train_table import head, lines_to_baseline
    from zoo.plot import draw_by_length

    lines = lines_to_baseline(report)
    if not lines:
        print(f"no model was measured beside its baseline, so {file} is not drawn")
        return
    draw_by_length(
        lines,
        file,
        ylabel="tokens a second, over Transformer++'s",
        title="Training speed against Transformer++ of the nearest size",
        note="; ".join(head(report)[:2]),
    )


def _command(args: argparse.Namespace) -> str:
    """The command that gives these figures again."""
    words, off = ["zoo", "bench", args.part, *getattr(args, "presets", [])], []
    for name, value in vars(args).items():
        if (
            name in ("part", "presets")
            or value is None
            or value in ([], "none")
            or (value is False and name not in SWITCHES)
        ):
            continue
        if name in SWITCHES:
            off += [] if value else [f"--no-{name}"]
            continue
        words += [f"--{name}", *(map(str, value) if isinstance(value, list) else [] if value is True else [str(value)])]
    return shlex.join(words + off)
