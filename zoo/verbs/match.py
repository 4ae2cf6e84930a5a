"""match: one size of a model turned until its parameters, FLOPs or decode state agree with another model's."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.errors import PatternError, UserError
from zoo.names import near
from zoo.pattern import parse
from zoo.presets import VOCABULARY, preset, presets
from zoo.verbs.explain import D_MODEL, recipe_model

if TYPE_CHECKING:
    from zoo.architecture import Architecture
    from zoo.match import Sizing

CONTEXT = 4096
MISSED = 3  # the exit status where no size agrees


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``zoo match``."""
    add = parser.add_argument
    add("pattern", metavar="PATTERN", help="what is sized: a pattern, or a preset's name")
    add("--to", required=True, metavar="REF", help="the reference: a pattern, a preset or a recipe (.yaml)")
    add("--by", required=True, metavar="WHAT", help="what shall be equal: params, flops or state")
    add("--free", metavar="SIZE", help="what moves: d_ff, d_model, n_layers, heads, or an option such as SWA.window")
    add("--tol", default="1%", metavar="SHARE", help="how far it may be off (default 1%%)")
    add(
        "--context",
        type=int,
        metavar="T",
        help=f"tokens, for FLOPs and state (default {CONTEXT}; a recipe's FLOPs: its own)",
    )
    add("--count", default="non-embedding", metavar="WHICH", help="parameters: non-embedding (default) or total")
    add("--step", type=int, metavar="N", help="d_ff or d_model in multiples of N (default 64; d_ff 16 below width 512)")
    add("--n_layers", type=int, metavar="N", help="depth, of each side that has no sizes (default: the other side's)")
    add("--d_model", type=int, metavar="D", help=f"width, likewise (default: the other side's, else {D_MODEL})")
    add("--d_ff", type=int, metavar="F", help="width of the MLPs, likewise; a d_model that moves leaves it alone")
    add("--vocab_size", type=int, metavar="V", help=f"token ids of both sides (default: theirs, else {VOCABULARY})")
    add("--tie", action=argparse.BooleanOptionalAction, default=None, help="embedding and head as one, likewise")
    add("--out", type=Path, metavar="RECIPE", help="write the sized model as a recipe, trained like REF if that is one")
    add("--json", action="store_true", help="the same for machines")


def run(args: argparse.Namespace) -> int:
    """Print the sized model and its ledger, and write the recipe. Ends with 3 where no size agrees."""
    arm, reference = _sides(args)
    from zoo.ledger import read_share
    from zoo.match import match

    sizing = match(
        arm,
        reference,
        by=args.by,
        free=args.free,
        tolerance=read_share(args.tol),
        context=_context(args),
        count=args.count,
        step=args.step,
        keep_d_ff=args.d_ff is not None,
    )
    if args.out and sizing.agrees:
        _write(args, sizing)  # before anything is printed: a reader such as head may close the output
    if args.json:
        print(json.dumps(sizing.to_plain(), indent=2))
    else:
        _print(args, sizing)
    if not sizing.agrees:
        print("\n".join(_why_not(arm, reference, sizing)), file=sys.stderr)
        return MISSED
    if args.out:
        print(f"written: {args.out}; zoo fit --config {args.out}", file=sys.stderr)
    return 0


# ------------------------------------------------------------------------------------------------------- the two models
def _sides(args: argparse.Namespace) -> tuple[Architecture, Architecture]:
    """The model to size and the reference; a side without sizes takes the command line's, else the other side's."""
    own, other = _side(args.pattern), _side(args.to)
    if _is_recipe(args.pattern):
        raise UserError(f"{args.pattern}: a recipe can be the reference, --to; what is sized is a pattern or a preset")
    from zoo.architecture import settle  # imports torch; a misspelt pattern has been refused before

    both = {"vocab_size": args.vocab_size} if args.vocab_size is not None else {}
    flags = {key: value for key in ("n_layers", "d_model", "d_ff", "tie") if (value := getattr(args, key)) is not None}
    if _has_sizes(other):
        reference = settle(**{**other, **both})
        arm = settle(**_sized(args, own, _lent(reference, own, other, flags), {**flags, **both}))
        _refuse_idle(args, arm, flags)
        return arm, reference
    if _has_sizes(own):
        arm = settle(**{**own, **flags, **both})
        return arm, settle(**_sized(args, other, _lent(arm, other, own, {}), both))
    if args.n_layers is None:
        raise UserError(f"neither {args.pattern} nor {args.to} has sizes; give both --n_layers, and --d_model")
    sizes = {"d_model": D_MODEL, "vocab_size": VOCABULARY, **flags, **both}
    return settle(**_sized(args, own, {}, sizes)), settle(**{**other, **sizes})


def _is_recipe(text: str) -> bool:
    return text.endswith((".yaml", ".yml"))


def _side(text: str) -> dict[str, Any]:
    """The arguments of :func:`zoo.architecture.settle` that a pattern, a preset or a recipe stands for."""
    if _is_recipe(text):
        path = Path(text)
        settings = recipe_model(path)
        if settings.get("vocab_size") is None:
            settings["vocab_size"] = VOCABULARY
        return settings
    if text in presets():
        return {"preset": preset(text).name}
    try:
        parse(text)
    except PatternError as error:
        hint = near(text, presets())
        if hint:
            raise UserError(f"unknown preset '{text}'{hint}\n`zoo presets` lists them all.") from error
        raise
    return {"pattern": text}


def _has_sizes(side: dict[str, Any]) -> bool:
    return "d_model" in side or ("preset" in side and preset(side["preset"]).d_model is not None)


def _lent(
    lender: Architecture, side: dict[str, Any], lender_side: dict[str, Any], flags: dict[str, Any]
) -> dict[str, Any]:
    """What a side takes from the other: sizes where it has none; a recipe's options by mixer too."""
    if _has_sizes(side):
        return {"vocab_size": lender.vocab_size}
    lent: dict[str, Any] = {key: getattr(lender, key) for key in ("n_layers", "d_model", "vocab_size", "tie")}
    if any(layer.mlp != "none" for layer in lender.layers) and flags.get("d_model", lender.d_model) == lender.d_model:
        lent["d_ff"] = lender.d_ff
    if "vocab_size" in lender_side:  # a recipe; its options and its MLP serve other patterns too, as in `zoo compare`
        lent["mixers"] = lender.offered
        if "preset" not in side or preset(side["preset"]).mlp is None:
            lent["mlp"] = lender.mlp
    return lent


def _sized(
    args: argparse.Namespace, side: dict[str, Any], lent: dict[str, Any], given: dict[str, Any]
) -> dict[str, Any]:
    """A side with what is lent to it, and over that what the command line gives."""
    settings = {**side, **lent, **given}
    if "preset" in side and lent.get("mixers"):
        found = preset(side["preset"])
        settings["mixers"] = {
            name: {**lent["mixers"].get(name, {}), **found.mixers.get(name, {})}
            for name in {**lent["mixers"], **found.mixers}
        }
    if args.free == "n_layers" and not _has_sizes(side) and settings.get("n_layers") is not None:
        from zoo.knobs import nearest_depth

        pattern = side["pattern"] if "pattern" in side else preset(side["preset"]).pattern
        settings["n_layers"] = nearest_depth(pattern, settings["n_layers"])
    return settings


def _refuse_idle(args: argparse.Namespace, arm: Architecture, flags: dict[str, Any]) -> None:
    """A size that is given and moves all the same would say nothing."""
    from zoo.knobs import default_size

    free = args.free or default_size(arm, args.by)
    if free in flags and free != "d_model":  # the heads keep the size that they have at the d_model given
        raise UserError(f"--{free} {flags[free]}: {free} is free to move here; leave that out, or free another size")


def _context(args: argparse.Namespace) -> int:
    """The tokens given; else, for FLOPs against a recipe, those of its rows, which are what training pays for."""
    if args.context is not None or args.by != "flops" or not _is_recipe(args.to):
        return CONTEXT if args.context is None else args.context
    import yaml

    data = yaml.safe_load(Path(args.to).read_text(encoding="utf-8")).get("data") or {}
    return data.get("init_args", data).get("seq_len", CONTEXT)


# ------------------------------------------------------------------------------------------------------------- printing
def _print(args: argparse.Namespace, sizing: Sizing) -> None:
    from zoo.explain import explain, render

    row = sizing.best.row
    moved = "stays" if sizing.best.value == sizing.start else f"{sizing.start} -> {sizing.best.value}"
    print(f"{sizing.free}    {moved}    ({sizing.rule})")
    print(f"ledger    {row}    against {args.to}")
    for name, own, reference, quantity in (
        ("parameters, non-embedding", row.own.non_embedding, row.reference.non_embedding, None),
        ("parameters, total", row.own.total, row.reference.total, None),
        ("FLOPs/token, forward", row.own.flops, row.reference.flops, "flops"),
        (f"state bytes at {row.own.context:,}", row.own.state, row.reference.state, "state"),
    ):
        held = quantity == row.held or (row.held == "params" and quantity is None and row.count in name)
        mark = "  = held" if held and row.agrees else "  ≠ not within" if held else ""
        print(f"  {name:<28}{own:>18,.0f}{reference:>18,.0f}  {own / reference - 1:+.2%}{mark}")
    if row.warning:
        print(f"warning: {row.warning}")
    others = ", ".join(f"{trial.value} gives {trial.deviation:+.2%}" for trial in sizing.others)
    if others:
        print(f"next      {sizing.free} {others}")
    for value, reason in sizing.blocked:
        print(f"blocked   {sizing.free} {value}: {reason}")
    print()
    print(render(explain(sizing.best.architecture, context=row.own.context)))


def _why_not(arm: Architecture, reference: Architecture, sizing: Sizing) -> list[str]:
    from zoo.match import alternatives

    lines = sizing.why_not()
    found = alternatives(arm, reference, sizing)
    if found:
        words = [f"--free {other.free} ({other.best.value}: {other.best.deviation:+.2%})" for other in found]
        lines.append(f"what would do: {', '.join(words)}")
    return lines


def _write(args: argparse.Namespace, sizing: Sizing) -> None:
    from zoo.sized_recipe import write_recipe

    row, like = sizing.best.row, Path(args.to) if _is_recipe(args.to) else None
    head = [
        f"{args.pattern}, sized by {sizing.free} to the {row.held} of {args.to}:",
        f"{row}.",
        f"Counted with {sizing.architecture.vocab_size:,} token ids; training takes their number from the data.",
    ]
    if like is None:
        head.append("Data, budget and schedule are a small example that runs anywhere: put yours in their place.")
    head += ["", f"  zoo fit --config {args.out}"]
    write_recipe(sizing.architecture, args.out, like=like, context=row.own.context, head=head)
