"""zoo compare: train several patterns under one budget, and report; from words, or from a file that says the same."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.errors import UserError
from zoo.names import near
from zoo.verbs.stored import report_anew

if TYPE_CHECKING:
    from zoo.comparison.allowance import Allowance
    from zoo.comparison.plan import Entry, Plan
    from zoo.comparison.run import Outcome

KEYS = ("recipe", "arms", "budget", "held", "tolerance", "seeds", "learning_rates", "contexts", "allow", "set", "out")
ARM_KEYS = ("pattern", "preset", "recipe", "name", "set", "free")
# Options that a SPEC.yaml says itself, and their words on the command line.
IN_A_SPEC = {"recipe": "--recipe", "by": "--by", "tol": "--tol", "context": "--context", "seeds": "--seeds"}
IN_A_SPEC |= {"rates": "--rates"}


@dataclass(frozen=True)
class Request:
    """What shall be compared, read from either form; ``zoo.comparison.plan.make_plan`` checks the values."""

    arms: list[str | Entry]
    recipe: Path
    overrides: list[str]
    by: str
    tolerance: float
    contexts: list[int]
    seeds: int | list[int]
    rates: list[float]
    allow: list[str]
    out: Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Enter the verb's options."""
    parser.add_argument(
        "arms",
        nargs="*",
        metavar="ARM",
        help="a pattern, a preset's name or a recipe.yaml; or one SPEC.yaml alone that says everything",
    )
    parser.add_argument("--recipe", metavar="FILE", help="what all arms share; its own model sets the budget")
    parser.add_argument("--out", metavar="FOLDER", help="default runs/compare-RECIPE, or runs/SPEC")
    parser.add_argument("--seeds", type=int, metavar="N", help="train every arm so often, from the recipe's seed on")
    parser.add_argument(
        "--rates",
        metavar="FACTORS",
        help="factors on the recipe's learning rate that every arm tries, such as 0.5,1,2; default: none is tried",
    )
    parser.add_argument("--by", metavar="WHAT", help="what is held besides tokens: params (default), flops or state")
    parser.add_argument("--tol", metavar="SHARE", help="how far what is held may be off (default 1%%)")
    parser.add_argument(
        "--context", metavar="T", help="tokens at which the decode state is counted, or several: 4096,32768"
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="WHAT",
        help="let arms differ in data_order, tokenizer, validation, precision or optimizer; may be repeated",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a recipe setting for all arms, such as --set budget.tokens=100000; may be repeated",
    )
    parser.add_argument(
        "--lengths", metavar="FACTORS", help="also validate on rows of so many times the training length, such as 1,2,4"
    )
    parser.add_argument(
        "--measure", action="store_true", help="also time a few training steps of every arm at every --context"
    )
    parser.add_argument(
        "--devices",
        metavar="LIST",
        help="runs side by side, one process a name: 0,1,2,3; or 0,0 for two on one GPU; cpu is a device too",
    )
    parser.add_argument("--minutes", type=float, metavar="M", help="stop then; the same command goes on")
    parser.add_argument(
        "--report-only", metavar="FOLDER", help="write the report of a finished comparison anew, from its results.json"
    )


def run(args: argparse.Namespace) -> int:
    """Run the arms, print the table, write the report. Exits with 1 if an arm failed, or has no place in the budget."""
    if args.report_only is not None:
        from zoo.comparison.report import SCHEMA

        return report_anew(args, "compare", "results.json", SCHEMA, _report)
    request = read_request(args)
    from zoo.comparison.allowance import Allowance
    from zoo.comparison.measure import measure_arms, read_measured
    from zoo.comparison.plan import make_plan
    from zoo.comparison.report import collect, entropies_of
    from zoo.recipe import quiet, stop_status

    quiet(greetings=False)
    allowance = Allowance(args.minutes)
    plan = make_plan(
        request.arms,
        request.recipe,
        overrides=request.overrides,
        by=request.by,
        tolerance=request.tolerance,
        contexts=request.contexts,
        seeds=request.seeds,
        rates=request.rates,
        allow=request.allow,
        factors=_numbers("--lengths", args.lengths, int) if args.lengths is not None else (),
        leave_out=True,
    )
    print(plan.held)
    for arm in plan.left_out:
        print(f"{arm.text} is left out: it {arm.reason}")
    entropies = entropies_of(plan)
    try:
        outcome = _run(plan, request.out, args.devices, allowance)
    except SystemExit as stop:
        status = stop_status(stop)
        if status is None:
            raise
        return status
    measured = measure_arms(plan, request.out, allowance) if args.measure else read_measured(plan, request.out)
    return _report(collect(plan, outcome, entropies, _command(args), measured), request.out)


def _run(plan: Plan, out: Path, devices: str | None, allowance: Allowance) -> Outcome:
    from zoo.comparison.run import run_plan

    if devices is not None:
        from zoo.comparison.devices import read_devices, run_on_devices

        return run_on_devices(plan, out, read_devices(devices), allowance=allowance)
    from zoo.console import watch_runs

    with watch_runs() as watch:
        return run_plan(plan, out, watch=watch, allowance=allowance)


def _report(content: Mapping[str, Any], out: Path) -> int:
    from zoo.comparison.report import print_table, verdicts, write_report

    files = write_report(content, out)
    print()
    print_table(content)
    for line in verdicts(content):
        print(line)
    print(f"\npage {files['report.html']}, Markdown {files['report.md']}, numbers {files['results.csv']}")
    return 0 if content["green"] else 1


def _command(args: argparse.Namespace) -> str:
    """The words that give this comparison again, with the folder left out."""
    words = ["zoo", "compare", *args.arms]
    words += [f"{flag}={value}" for key, flag in IN_A_SPEC.items() if (value := getattr(args, key)) is not None]
    words += [word for name in args.allow for word in ("--allow", name)]
    words += [f"--lengths={args.lengths}"] if args.lengths is not None else []
    words += ["--measure"] if args.measure else []
    return shlex.join([*words, *(word for setting in args.set for word in ("--set", setting))])


# -------------------------------------------------------------------------------------------------------------- reading
def read_request(args: argparse.Namespace) -> Request:
    """The command line's words, or the file that they name.

    Raises:
        UserError: what is missing, misspelt, or said twice.
    """
    if len(args.arms) == 1 and args.arms[0].endswith((".yaml", ".yml")) and args.recipe is None:
        return _read_spec(args)
    from zoo.ledger import read_share

    if args.recipe is None:
        raise UserError(
            "compare under which recipe? zoo compare GA GDN,SWA --recipe recipes/tiny_text.yaml; or name one file that "
            "says everything: zoo compare recipes/compare_tiny.yaml"
        )
    recipe = Path(args.recipe)
    return Request(
        arms=list(args.arms),
        recipe=recipe,
        overrides=_settings(args.set),
        by=args.by if args.by is not None else "params",
        tolerance=read_share(args.tol if args.tol is not None else "1%"),
        contexts=_numbers("--context", args.context if args.context is not None else "4096", int),
        seeds=args.seeds if args.seeds is not None else 1,
        rates=_numbers("--rates", args.rates, float) if args.rates is not None else [],
        allow=args.allow,
        out=Path(args.out) if args.out else Path("runs") / f"compare-{recipe.stem}",
    )


def _read_spec(args: argparse.Namespace) -> Request:
    path = Path(args.arms[0])
    said = [flag for key, flag in IN_A_SPEC.items() if getattr(args, key) is not None]
    if said:
        raise UserError(f"{path} says what is compared, so {' and '.join(said)} cannot be given too; write it there")
    spec = _read_mapping(path)
    _check_keys(path, spec, KEYS)
    for key in ("recipe", "arms"):
        if not spec.get(key):
            raise UserError(f"{path}: {key} is missing; a comparison has at least recipe and arms")
    from zoo.ledger import read_share

    budget, seeds = spec.get("budget") or {}, spec.get("seeds", 1)
    _check_type(path, "budget", budget, dict, "a mapping such as {tokens: 393_216}")
    _check_keys(path, budget, ("tokens", "batch_tokens"), "budget.")
    if not isinstance(seeds, int | list) or isinstance(seeds, bool):
        raise UserError(f"{path}: seeds is {seeds!r}; give how many, or a list of them")
    shared = _mapped(path, "set", spec.get("set")) + [f"--budget.{key}={value}" for key, value in budget.items()]
    return Request(
        arms=[_read_arm(path, arm) for arm in _listed(path, "arms", spec["arms"])],
        recipe=_beside(path, spec["recipe"]),
        overrides=[*shared, *_settings(args.set)],
        by=str(spec.get("held", "params")),
        tolerance=read_share(str(spec.get("tolerance", "1%"))),
        contexts=_numbers(f"{path}: contexts", _listed(path, "contexts", spec.get("contexts", [4096])), int),
        seeds=_numbers(f"{path}: seeds", seeds, int) if isinstance(seeds, list) else seeds,
        rates=_numbers(
            f"{path}: learning_rates", _listed(path, "learning_rates", spec.get("learning_rates", [])), float
        ),
        allow=[*map(str, _listed(path, "allow", spec.get("allow", []))), *args.allow],
        out=Path(args.out or spec.get("out") or Path("runs") / path.stem),
    )


def _read_mapping(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"comparison {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"comparison {path} is not valid YAML: {error}") from error
    if isinstance(content, dict) and "model" in content and "arms" not in content:
        raise UserError(f"{path} is a recipe, not a comparison: zoo compare GA GDN,SWA --recipe {path}")
    if content is None:
        raise UserError(f"{path} is empty; a comparison is a mapping with recipe and arms")
    _check_type(path, "the content", content, dict, "a mapping with recipe and arms")
    return content


def _read_arm(path: Path, arm: Any) -> Entry:
    from zoo.comparison.plan import Entry

    if isinstance(arm, str):
        return Entry(str(_beside(path, arm))) if arm.endswith((".yaml", ".yml")) else Entry(arm)
    _check_type(path, "an arm", arm, dict, "a pattern, a preset, a recipe, or {pattern: ..., name: ..., set: ...}")
    _check_keys(path, arm, ARM_KEYS, "arms: ")
    kinds = [key for key in ("pattern", "preset", "recipe") if key in arm]
    if len(kinds) != 1:
        raise UserError(f"{path}: the arm {arm} must have exactly one of pattern, preset and recipe")
    text = str(_beside(path, arm["recipe"])) if kinds == ["recipe"] else str(arm[kinds[0]])
    return Entry(text, arm.get("name"), tuple(_mapped(path, "set", arm.get("set"))), arm.get("free"))


def _beside(path: Path, name: Any) -> Path:
    """A file as the comparison names it: from its own folder, or else from where the command is called."""
    near_it = path.parent / str(name)
    return near_it if near_it.exists() else Path(str(name))


def _check_keys(path: Path, content: Mapping[str, Any], known: Sequence[str], where: str = "") -> None:
    for key in content:
        if key not in known:
            raise UserError(f"{path}: unknown key '{where}{key}'{near(str(key), known)}\nKeys: {' '.join(known)}.")


def _check_type(path: Path, what: str, value: Any, kind: type, wanted: str) -> None:
    if not isinstance(value, kind):
        raise UserError(f"{path}: {what} is {value!r}; give {wanted}")


def _listed(path: Path, key: str, value: Any) -> list[Any]:
    _check_type(path, key, value, list, "a list, such as [a, b]")
    return value


def _mapped(path: Path, key: str, value: Any) -> list[str]:
    """A mapping of settings as the words of a command line."""
    _check_type(path, key, value or {}, dict, "a mapping, such as {trainer.precision: 32-true}")
    return [f"--{name}={setting}" for name, setting in (value or {}).items()]


def _settings(given: Sequence[str]) -> list[str]:
    for setting in given:
        if "=" not in setting:
            raise UserError(f"--set {setting}: write KEY=VALUE, such as --set budget.tokens=100000")
    return [f"--{setting}" for setting in given]


def _numbers(what: str, given: str | Sequence[Any], kind: type) -> list[Any]:
    words = given.split(",") if isinstance(given, str) else given
    try:
        return [kind(word) for word in words]
    except (TypeError, ValueError):
        example = "0.5,1,2" if kind is float else "4096,32768"
        raise UserError(f"{what} {given}: give numbers with commas between, such as {example}") from None
