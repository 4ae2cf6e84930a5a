"""The command ``zoo``: a table of verbs, and a main that imports a verb's module when that verb is called.

Users' errors are printed as they are, without traceback or usage, and end with 2; an interrupted command ends with 130.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from zoo import __version__
from zoo.errors import UserError
from zoo.names import near


@dataclass(frozen=True)
class Verb:
    """A verb: where it lives, and what it does in one line.

    Attributes:
        module: has ``add_arguments(parser)`` and ``run(args) -> int``; or ``run_lightning(verb, argv) -> int``.
        help: one line.
        lightning: the module reads the command line itself, with LightningCLI.
    """

    module: str
    help: str
    lightning: bool = False


VERBS = {
    "explain": Verb("zoo.verbs.explain", "what a pattern means: layers, parameters, FLOPs, decode state"),
    "mixers": Verb("zoo.verbs.mixers", "what can stand in a pattern, and the options of each"),
    "presets": Verb("zoo.verbs.presets", "published patterns and models by name, with sources"),
    "match": Verb("zoo.verbs.match", "one size turned until parameters, FLOPs or state equal another model's"),
    "fit": Verb("zoo.verbs.train", "train a model from a recipe", lightning=True),
    "validate": Verb("zoo.verbs.train", "measure a checkpoint on the validation split", lightning=True),
    "test": Verb("zoo.verbs.train", "measure a checkpoint on the test split", lightning=True),
    "predict": Verb("zoo.verbs.train", "the loss of every document", lightning=True),
    "compare": Verb("zoo.verbs.compare", "train several patterns under one budget and compare them"),
    "claims": Verb("zoo.verbs.claims", "the claims that the project is built on, tried one by one"),
    "generate": Verb("zoo.verbs.generate", "continue a prompt from a checkpoint"),
    "data": Verb("zoo.verbs.data", "texts into token shards, and what is in them"),
    "consolidate": Verb("zoo.verbs.consolidate", "one safetensors file of a checkpoint's weights"),
    "bench": Verb(
        "zoo.verbs.bench", "how fast kernels are and models train here; and the table that kernels launch by"
    ),
    "doctor": Verb("zoo.verbs.doctor", "what serves on this machine, and why the rest does not"),
}


class Parser(argparse.ArgumentParser):
    """A parser that reads no abbreviations and raises its errors instead of printing a page of usage."""

    def __init__(self, prog: str, description: str):
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}\n`{self.prog} --help` shows what it takes.")

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Like ``parse_args``; an unknown option is answered with the nearest."""
        args, unknown = self.parse_known_args(list(argv))
        if unknown:
            word = unknown[0].split("=")[0]
            self.error(f"unknown argument '{word}'{near(word, self._option_string_actions)}")
        return args


class PartParser(Parser):
    """The parser of one part of a verb; it answers for its own unknown options."""

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


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words behind ``zoo``. None: the process's own.

    Returns:
        the exit status: 0, 2 for a user's error, 130 when interrupted, or what the verb says.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _dispatch(words)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, such as head, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except ValueError as error:
        if not _users(error):
            raise
        print(error, file=sys.stderr)
        return 2


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if words else 2
    if words[0] == "--version":
        print(f"zoo {__version__}")
        return 0
    name, rest = words[0], words[1:]
    if name not in VERBS:
        raise UserError(f"unknown verb '{name}'{near(name, VERBS)}\nKnown verbs: {' '.join(VERBS)}.")
    verb = VERBS[name]
    module = importlib.import_module(verb.module)
    if verb.lightning:
        return module.run_lightning(name, rest)
    parser = Parser(f"zoo {name}", verb.help)
    module.add_arguments(parser)
    try:
        args = parser.read(rest)
    except SystemExit as stop:  # argparse has printed its help
        return int(stop.code or 0)
    return module.run(args)


def _users(error: ValueError) -> bool:
    """Whether a user made this mistake; a mixer's refusal counts, and is known only where torch is loaded already."""
    mixer = sys.modules.get("zoo_layers.mixer")
    return isinstance(error, UserError) or (mixer is not None and isinstance(error, mixer.SpecError))


def _overview() -> str:
    width = max(map(len, VERBS)) + 2
    lines = [f"  {name:<{width}}{verb.help}" for name, verb in VERBS.items()]
    head = "zoo: hybrid sequence models from one line of text, trained and compared.\n\nusage: zoo VERB ...\n"
    return "\n".join([head, *lines, "", "`zoo VERB --help` shows a verb's options. Patterns: docs/patterns.md."])
