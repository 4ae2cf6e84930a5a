"""explain: what a pattern means, layer by layer, before anything is trained."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from zoo import dialects
from zoo.errors import UserError
from zoo.names import mixer_names, near
from zoo.pattern import PatternError, check_names, misplaced_key, parse
from zoo.presets import VOCABULARY, preset

# What a pattern alone is explained at; a preset with a size and a recipe say their own.
D_MODEL = 1024
# What of a recipe's model decides the table.
KEYS = ("pattern", "preset", "n_layers", "d_model", "vocab_size", "mlp", "d_ff", "tie", "mixers")
_BYTES = 257  # ids of the byte tokenizer, which a recipe has when it names none


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``zoo explain``."""
    add = parser.add_argument
    add("pattern", nargs="?", metavar="PATTERN", help='such as "3xGDN,GA"; with --from, the other project\'s text')
    add("--preset", metavar="NAME", help="take pattern, options and sizes from a preset")
    add("--recipe", metavar="FILE", type=Path, help="take them from a recipe's model")
    add("--n_layers", type=int, metavar="N", help="depth (default: once through the pattern)")
    add("--d_model", type=int, metavar="D", help=f"width (default {D_MODEL})")
    add(
        "--context",
        type=int,
        default=4096,
        metavar="T",
        help="tokens of a sequence, for FLOPs and state (default 4096)",
    )
    add("--vocab_size", type=int, metavar="V", help=f"rows of the embedding (default {VOCABULARY})")
    add("--mlp", metavar="NAME", help="MLP of layers that name none (default swiglu)")
    add("--d_ff", type=int, metavar="F", help="width of the MLPs (default: about 8/3 of d_model)")
    add("--tie", action=argparse.BooleanOptionalAction, default=None, help="embedding and head as one (default: tied)")
    add("--full", action="store_true", help="every layer, and the state in its parts")
    add("--json", action="store_true", help="the same for machines")
    add("--from", dest="source", metavar="DIALECT", help=f"read another notation: {', '.join(dialects.DIALECTS)}")
    add("--to", dest="target", metavar="DIALECT", help="write another notation instead of the table")
    add("--names", metavar="A=B,...", help="for --from and --to: their name = our mixer, such as linear=GDN")


def run(args: argparse.Namespace) -> int:
    """Print the table, or the pattern in another notation."""
    if args.source:
        return _translated(args)
    settings = _settings(args)
    if args.target:
        print(_foreign(args, settings))
        return 0
    _print_table(args, settings)
    return 0


def _print_table(args: argparse.Namespace, settings: dict[str, Any]) -> None:
    from zoo.architecture import settle  # imports torch; a misspelt pattern has been refused before
    from zoo.explain import explain, render

    architecture = settle(**settings)
    for notice in architecture.notices:
        print(notice, file=sys.stderr)
    table = explain(architecture, context=args.context)
    print(json.dumps(table.to_plain(), indent=2) if args.json else render(table, full=args.full))


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of :func:`zoo.architecture.settle`: the command line's, else the recipe's, else the defaults."""
    settings = recipe_model(args.recipe) if args.recipe else {}
    for key in KEYS:
        given = getattr(args, key, None)
        if given is not None:
            settings[key] = given
    base = preset(settings["preset"]) if settings.get("preset") else None
    if settings.get("pattern") is None and base is None:
        raise UserError('explain needs a pattern, --preset NAME or --recipe FILE\nFor example: zoo explain "3xGDN,GA"')
    pattern = parse(settings["pattern"] if settings.get("pattern") is not None else getattr(base, "pattern", ""))
    check_names(pattern, mixer_names() or None)
    for key, default in (("d_model", D_MODEL), ("vocab_size", VOCABULARY)):
        if settings.get(key) is None and getattr(base, key, None) is None:
            settings[key] = default
    if args.recipe is None and settings.get("tie") is None and (base is None or base.tie is None):
        settings["tie"] = True
    return settings


def recipe_model(path: Path) -> dict[str, Any]:
    """What a recipe says of its model.

    Raises:
        UserError: a file that cannot be read, or that is no recipe; a key that is misspelt or a mixer's name.
    """
    import yaml

    try:
        recipe: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"recipe {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"recipe {path} is not valid: {error}") from error
    model = recipe.get("model") if isinstance(recipe, dict) else None
    if not isinstance(model, dict):
        raise UserError(f"recipe {path} has no model; a recipe has the keys model, data and trainer")
    for key in model:
        if key not in KEYS:
            misplaced = misplaced_key(str(key), model.get("pattern"))
            if misplaced:
                raise misplaced
            hint = near(str(key), KEYS)
            if hint:
                raise UserError(f"recipe {path}: the model has no key '{key}'{hint}")
    settings = {key: model[key] for key in KEYS if key in model}
    for key, value in settings.items():
        if "${" in str(value):
            raise UserError(f"recipe {path}: {key} is a reference, {value}, which only training reads; give --{key}")
    if settings.get("vocab_size") is None:
        settings["vocab_size"] = _vocabulary(recipe.get("data"))
    return settings


def _vocabulary(data: Any) -> int | None:
    """The ids of a recipe's data, which training gives the model whatever its preset says; None where unknown."""
    section = data if isinstance(data, dict) else {"class_path": data}
    name, options = str(section.get("class_path")).rpartition(".")[2], section.get("init_args") or {}
    if name == "TokenData":
        tokenizer = options.get("tokenizer", "byte")
        if tokenizer == "byte":
            return _BYTES
        from zoo.data.tokenizer import load_tokenizer

        return load_tokenizer(tokenizer).vocab_size
    if name == "ShardData" and Path(str(options.get("folder"))).is_dir():
        from zoo.data.shards import read_index

        return read_index(Path(options["folder"])).tokenizer["vocab_size"]
    if name == "TaskData":
        from zoo.data.tasks import make_task

        return make_task(options.get("task", "overwrite"), options.get("profile"), options.get("options")).vocab_size
    return options.get("vocab_size")


# ------------------------------------------------------------------------------------------------------ other notations
def _names(text: str | None) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in (text or "").split(",") if pair]
    for name, sign, mixer in pairs:
        if not (name and sign and mixer):
            raise UserError(f"--names is a list such as linear=GDN,attn=GA, got '{text}'")
    return {name: mixer for name, _, mixer in pairs}


def _translated(args: argparse.Namespace) -> int:
    if args.pattern is None:
        raise UserError(f"--from {args.source} needs the text to read")
    if args.preset or args.recipe:
        raise UserError("--from reads a text; leave --preset and --recipe out")
    read = dialects.read(args.source, args.pattern, names=_names(args.names), n_layers=args.n_layers)
    for notice in read.notices:
        print(notice, file=sys.stderr)
    args.pattern, args.n_layers, args.names = str(read.pattern), read.n_layers, args.names if args.target else None
    if args.target:
        print(_foreign(args, {"pattern": args.pattern, "n_layers": read.n_layers, "mlp": args.mlp}))
        return 0
    if not args.json:
        print(f"{args.source} says    {read.pattern}    n_layers {read.n_layers}")
    try:
        settings = _settings(args)
    except (
        PatternError
    ) as error:  # a mixer that the other project has and this one does not: the translation still holds
        print(f"no table: {error}", file=sys.stderr)
        return 0
    _print_table(args, settings)
    return 0


def _foreign(args: argparse.Namespace, settings: dict[str, Any]) -> str:
    base = preset(settings["preset"]) if settings.get("preset") else None
    pattern = settings["pattern"] if settings.get("pattern") is not None else getattr(base, "pattern", "")
    n_layers = settings.get("n_layers") or getattr(base, "n_layers", None)
    mlp = settings.get("mlp") or getattr(base, "mlp", None) or "swiglu"
    if settings.get("mixers") or getattr(base, "mixers", None):
        # Options that stand beside the pattern are put into it, so that none is lost without a word.
        from zoo.architecture import settle

        architecture = settle(**settings)
        pattern, n_layers = architecture.canonical, architecture.n_layers
    return dialects.write(args.target, pattern, n_layers=n_layers, mlp=mlp, names=_names(args.names))
