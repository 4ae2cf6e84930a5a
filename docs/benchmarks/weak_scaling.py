"""Weak scaling: one micro-batch a GPU on 1, 2, 4, 8 GPUs of a host, each measurement a `zoo fit` as a user types it.

    python docs/benchmarks/weak_scaling.py --data FOLDER --out runs/scaling --replicas 1 2 --resume 8 4

What finished is not run again: the same command goes on where the last one stopped. docs/benchmarks/weak_scaling.md
says what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from weak_scaling_figures import DONE, NO_MEMORY, agreement, profiled, resume_row, row, speed, write

from zoo.bench.table import versions
from zoo.errors import UserError
from zoo.run import LAST

RECIPES = Path(__file__).parents[2] / "recipes"
FSDP, PROFILE = RECIPES / "launch/fsdp.yaml", RECIPES / "launch/profile.yaml"
ROW_TOKENS = 16_384  # of a GPU's micro-batch where --rows is left out: 4 rows of 4096
WARMUP = 10  # steps that are not timed, and in which the rate rises: compilation, first allocations
TIMINGS = 5  # windows that a run's steps are timed in, so that the host seldom waits for the device
STOP, RESUMED = 10, 20  # steps after which a run is stopped for --resume, and those of the whole run
NOT_SAVED = {"checkpoint.save_last": False}
NO_TIME = "no time left (--minutes)"

Runner = Callable[[Sequence[str], Path, float | None], str]


# ------------------------------------------------------------------------------------------------------------- the runs
@dataclass(frozen=True)
class Case:
    """One `zoo fit`.

    Attributes:
        context: tokens of a row.
        rows: of a micro-batch, on each GPU.
        replicas: copies of the model, each divided among ``devices / replicas`` GPUs.
        accumulate: micro-batches of a step.
    """

    recipe: Path
    context: int
    rows: int
    devices: int
    replicas: int = 1
    accumulate: int = 1

    @property
    def layout(self) -> str:
        if self.devices == 1:
            return "one device"
        return "FSDP2" if self.replicas == 1 else f"HSDP {self.replicas} x {self.devices // self.replicas}"

    @property
    def name(self) -> str:
        copies = f"-{self.replicas}replicas" if self.replicas > 1 else ""
        return f"{self.recipe.stem}-{self.context}x{self.rows}-{self.devices}{copies}"

    @property
    def batch_tokens(self) -> int:
        return self.devices * self.accumulate * self.rows * self.context


def cases(args: argparse.Namespace) -> list[Case]:
    """All runs whose speed is measured, in order.

    Raises:
        UserError: rows for some contexts only; replicas that fit no number of devices.
    """
    rows = args.rows or [max(1, ROW_TOKENS // context) for context in args.contexts]
    if len(rows) not in (1, len(args.contexts)):
        raise UserError(
            f"--rows gives {len(rows)} numbers for {len(args.contexts)} contexts; give one, or one a context"
        )
    for count in args.replicas:
        if count > 1 and not any(_divides(count, devices) for devices in args.devices):
            raise UserError(
                f"--replicas {count}: none of --devices {' '.join(map(str, args.devices))} is {count} replicas of two "
                "GPUs or more"
            )
    return [
        Case(recipe, context, each, devices, count)
        for recipe in args.recipes
        for context, each in zip(args.contexts, rows * (len(args.contexts) if len(rows) == 1 else 1))
        for devices in sorted(set(args.devices))
        for count in ([1] if devices == 1 else args.replicas)
        if count == 1 or _divides(count, devices)
    ]


def _divides(replicas: int, devices: int) -> bool:
    return devices % replicas == 0 and devices // replicas > 1


def words(
    case: Case, args: argparse.Namespace, steps: int, folder: Path, more: Mapping[str, Any], *overlays: Path
) -> list[str]:
    """What stands behind `zoo fit`: the recipe at ``case``'s sizes, without validation.

    Args:
        steps: of the whole run.
        folder: of the run.
        more: settings that differ by what is measured.
        overlays: laid over the recipe.
    """
    settings: dict[str, Any] = {
        "trainer.devices": case.devices,
        "trainer.accumulate_grad_batches": case.accumulate,
        "trainer.limit_val_batches": 0,
        "trainer.enable_progress_bar": False,
        "trainer.default_root_dir": folder,
        "budget.batch_tokens": case.batch_tokens,
        "budget.tokens": steps * case.batch_tokens,
        "data.init_args.seq_len": case.context,
        "data.init_args.val_batch_tokens": None,
        "model.lr_scheduler.init_args.warmup_steps": min(WARMUP, steps // 2),
    }
    if case.replicas > 1:
        settings["trainer.strategy.init_args.replicas"] = case.replicas
    if args.data is not None:
        settings["data.init_args.folder"] = args.data
    if args.backend == "cpu":
        settings |= {"trainer.accelerator": "cpu", "trainer.precision": "32-true"}
    files = [case.recipe, *([FSDP] if case.devices > 1 else []), *overlays]
    asked = dict(word.split("=", 1) for word in args.set)
    given = [word for file in files for word in ("--config", str(file))]
    return given + [word for key, value in {**settings, **more, **asked}.items() for word in (f"--{key}", _text(value))]


def _text(value: Any) -> str:
    """A setting as YAML has it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def fit(given: Sequence[str], log: Path, seconds: float | None) -> str:
    """Run `zoo fit` and all its processes; returns DONE, or why there is no result.

    Args:
        given: what stands behind `zoo fit`.
        log: what it prints is added here.
        seconds: it is stopped after so many. None: it may take its time.
    """
    with log.open("a", encoding="utf-8") as output:
        print("zoo fit", shlex.join(given), file=output, flush=True)
        process = subprocess.Popen(
            [sys.executable, "-m", "zoo", "fit", *given],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return NO_TIME
        finally:
            # At once: SIGTERM would have it save what nobody goes on from. Processes of other ranks are in its group.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return DONE if status == 0 else why(log.read_text(encoding="utf-8", errors="replace"), status)


def why(printed: str, status: int) -> str:
    """The reason of a run that ended with ``status``, from what it printed."""
    if re.search(r"OutOfMemoryError|CUDA out of memory", printed):
        return NO_MEMORY
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"(\[rank\d+\]: ?)?[\w.]*(Error|Exception): ", line)]
    return f"failed with {status}: {(named or lines)[-1][:200]}"


# --------------------------------------------------------------------------------------------------- one after another
class Bench:
    """The measurements of a call, each in a folder of its own below ``--out``.

    Args:
        args: the command line.
        run: as :func:`fit`.
    """

    def __init__(self, args: argparse.Namespace, run: Runner = fit):
        self.args, self.run = args, run
        self.out = Path(args.out)
        self.until = None if args.minutes is None else time.monotonic() + 60 * args.minutes
        on_gpu = args.backend == "gpu" and torch.cuda.is_available()
        self.versions = versions(torch.device("cuda" if on_gpu else "cpu"))

    def measure(
        self, name: str, commands: Sequence[Sequence[str]], figures: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Run ``commands`` until one fails, and keep what ``figures`` finds; or return what an earlier call kept.

        A run that did not fit into memory is a result. What failed in another way, or had no time, is run again.

        Raises:
            UserError: the folder holds a result of other commands.
        """
        folder = self.out / name
        typed = [shlex.join(["zoo", "fit", *command]) for command in commands]
        file = folder / "result.json"
        if file.exists():
            kept = json.loads(file.read_text(encoding="utf-8"))
            known = kept["status"] in (DONE, NO_MEMORY)
            if known and kept["commands"] != typed:
                raise UserError(
                    f"{folder} holds a result of\n  {kept['commands'][-1]}\nand this call asks for\n  {typed[-1]}\n"
                    "Give another --out, or the settings of the first call."
                )
            if known:
                return kept
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        kept = {"status": self._run(commands, folder / "output.txt"), "commands": typed, "versions": self.versions}
        if kept["status"] == DONE:
            kept |= figures()
        file.write_text(json.dumps(kept, indent=1), encoding="utf-8")
        print(f"{name}: {kept['status']}", flush=True)
        return kept

    def _run(self, commands: Sequence[Sequence[str]], log: Path) -> str:
        for command in commands:
            left = None if self.until is None else self.until - time.monotonic()
            status = NO_TIME if left is not None and left <= 0 else self.run(command, log, left)
            if status != DONE:
                return status
        return DONE

    def speed(self, case: Case) -> dict[str, Any]:
        """How fast a run is."""
        folder, steps = self.out / case.name / "run", self.args.steps
        more = {"trainer.log_every_n_steps": max(1, steps // TIMINGS), "throughput.skip": WARMUP, **NOT_SAVED}
        given = words(case, self.args, WARMUP + steps, folder, more)
        return self.measure(case.name, [given], lambda: speed(folder))

    def profile(self, case: Case) -> dict[str, Any]:
        """How much of a run's communication is exposed."""
        name = f"{case.name}-profile"
        folder = self.out / name / "run"
        more = {"trainer.profiler.init_args.dirpath": folder}
        given = words(case, self.args, WARMUP + self.args.steps, folder, more, PROFILE)
        return self.measure(name, [given], lambda: profiled(folder))

    def resume(self, case: Case, first: int, then: int) -> dict[str, Any]:
        """Whether a run on ``first`` GPUs that goes on on ``then`` has the losses of one that never stopped."""
        most, name = max(first, then), f"{case.recipe.stem}-{case.context}x{case.rows}-resume-{first}"
        begun, gone_on = (replace(case, devices=n, accumulate=most // n) for n in (first, then))
        whole, parts = self.out / f"{name}-straight", self.out / f"{name}-{then}"
        logged = {"trainer.log_every_n_steps": 1}
        saved = logged | {"checkpoint.every_n_train_steps": STOP}
        straight = words(begun, self.args, RESUMED, whole / "run", logged | NOT_SAVED)
        before = self.measure(whole.name, [straight], dict)
        if before["status"] != DONE:
            return before
        stopped = words(begun, self.args, RESUMED, parts / "run", saved | {"trainer.max_steps": STOP})
        resumed = words(gone_on, self.args, RESUMED, parts / "run", saved | {"ckpt_path": "last"})

        def figures() -> dict[str, Any]:
            found = agreement(whole / "run", parts / "run", STOP, RESUMED)
            last = parts / "run" / LAST  # 12 bytes a parameter, and of no further use
            shutil.rmtree(last) if last.is_dir() else last.unlink()
            return found

        return self.measure(parts.name, [stopped, resumed], figures)


def measured(bench: Bench) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """All that the call asks for: speeds, then profiles, then resumed runs; the report so far after each of them."""
    args, planned = bench.args, cases(bench.args)
    found: dict[Case, dict[str, Any]] = {}
    profiles: dict[Case, dict[str, Any]] = {}
    resumes: list[dict[str, Any]] = []

    def rows() -> list[dict[str, Any]]:
        alone = [found.get(replace(case, devices=1, replicas=1)) for case in found]
        return [row(case, found[case], profiles.get(case), other) for case, other in zip(found, alone)]

    for case in planned:
        found[case] = bench.speed(case)
        yield rows(), resumes
    for case in planned:
        if case.devices > 1 and found[case]["status"] == DONE:
            profiles[case] = bench.profile(case)
            yield rows(), resumes
    for case in planned if args.resume else ():
        # One a recipe: the sizes of its first run, on other devices.
        if case != replace(planned[0], recipe=case.recipe):
            continue
        first, then = args.resume
        resumes.append(
            resume_row(replace(case, replicas=1), first, then, bench.resume(case, first, then), args.backend)
        )
        yield rows(), resumes


# ----------------------------------------------------------------------------------------------------- the command line
def read(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    Raises:
        UserError: numbers below 1; words of --set without a value; numbers of GPUs that --resume cannot give one batch.
    """
    parser = argparse.ArgumentParser(description="Weak scaling of recipes on the GPUs of a host.", allow_abbrev=False)
    add = parser.add_argument
    both = [RECIPES / "gdn_h1_1.3b.yaml", RECIPES / "transformer_1.3b.yaml"]
    add("--recipes", nargs="+", type=Path, default=both, metavar="FILE", help="default: two of 1.3B parameters")
    add("--devices", nargs="+", type=int, default=[1, 2, 4, 8], metavar="N", help="GPUs; efficiency needs 1 of them")
    add("--contexts", nargs="+", type=int, default=[4096, 32768], metavar="T", help="tokens of a row")
    add("--rows", nargs="+", type=int, metavar="B", help="a GPU, one or one a context; default: of 16,384 tokens")
    add("--replicas", nargs="+", type=int, default=[1], metavar="R", help="1: FSDP2; 2: HSDP of two replicas, as well")
    add("--steps", type=int, default=50, metavar="N", help="timed steps of a run")
    add("--data", metavar="FOLDER", help="token shards; default: each recipe's own")
    add("--out", required=True, metavar="FOLDER", help="runs and report; the same command goes on there")
    add("--minutes", type=float, metavar="M", help="stop after so many; default: when all is done")
    add("--resume", nargs=2, type=int, metavar=("FROM", "TO"), help="stop a run on FROM GPUs and go on on TO")
    add("--backend", choices=("gpu", "cpu"), default="gpu", help="cpu: gloo processes, for tiny sizes by --set")
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help="for all runs: model.n_layers=2")
    args = parser.parse_args(argv)
    for name in ("devices", "contexts", "rows", "replicas", "steps", "minutes", "resume"):
        value = getattr(args, name)
        for each in value if isinstance(value, list) else [value]:
            if each is not None and each <= 0:
                raise UserError(f"--{name} must be above 0, got {each}")
    for word in args.set:
        if "=" not in word:
            raise UserError(f"--set {word}: give KEY=VALUE, such as model.n_layers=2")
    if args.resume and max(args.resume) % min(args.resume):
        first, then = args.resume
        raise UserError(f"--resume {first} {then}: one batch needs one of them to be a multiple of the other")
    return args


def main(argv: Sequence[str], run: Runner = fit) -> int:
    """Measure, and write the report after every run. Returns 1 where a run is missing, failed or disagrees."""
    bench = Bench(read(argv), run)
    command = shlex.join(["python", "docs/benchmarks/weak_scaling.py", *argv])
    bench.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    resumes: list[dict[str, Any]] = []
    for rows, resumes in measured(bench):
        write(bench.out, command, bench.versions, rows, resumes)
    print((bench.out / "report.md").read_text(encoding="utf-8"))
    return 1 if any(each["remark"] for each in [*rows, *resumes]) else 0


def _end(number: int, frame: Any) -> NoReturn:
    """So that the processes of a run end with this one."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
