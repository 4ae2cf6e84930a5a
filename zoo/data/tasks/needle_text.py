"""What stands around a needle: the words of prompt and needle, and haystacks cut into sentences."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from zoo.data.readers import read_text
from zoo.data.sources import EXCERPT
from zoo.errors import UserError

LONGEST = 240  # characters of a sentence; cast lists and the like are cut behind words
ABBREVIATIONS = ("Mr.", "Mrs.", "Ms.", "Dr.", "St.", "Prof.", "Sr.", "Jr.", "vs.", "etc.", "i.e.", "e.g.", "No.")
BOUNDARY = re.compile(r"(?<=[.!?]) (?=[\"'(\[]?[A-Z])")
SLOTS = {
    "needle": ("kind", "key", "value"),
    "instruction": ("kind",),
    "question": ("kind", "key"),
    "prefix": ("kind", "key"),
}


@dataclass(frozen=True)
class Wording:
    """The words of a needle and of what is asked; ``{kind}``, ``{key}`` and ``{value}`` are filled in.

    Attributes:
        needle: the sentence that is hidden.
        instruction: what stands before the haystack, on a line of its own.
        question: what stands behind it, on a line of its own.
        prefix: how the answer begins, right behind the question; the value follows after a space.
        number, code: the kind of a value of 7 digits, and of a UUID.
        filler: the sentences of a haystack that only repeats.
    """

    needle: str
    instruction: str
    question: str
    prefix: str
    number: str
    code: str
    filler: tuple[str, ...]

    def said(self, part: str, **words: str) -> str:
        """One of the four sentences with its words filled in."""
        text = getattr(self, part)
        for slot in SLOTS[part]:
            text = text.replace(f"{{{slot}}}", words[slot])
        return text


ZOO = Wording(
    needle="The secret {kind} of {key} is {value}.",
    instruction="A secret {kind} is written somewhere below. Keep it in mind: you will be asked for it.",
    question="Which secret {kind} belongs to {key}?",
    prefix=" The secret {kind} of {key} is",
    number="number",
    code="code",
    filler=("The lamp is lit.", "The door is shut.", "The rain is cold.", "Come in now.", "Stay and rest awhile."),
)


def read_wording(path: str) -> Wording:
    """The wording of a YAML file, which gives every field of :class:`Wording`.

    Raises:
        UserError: the file cannot be read, lacks a field or has another, or a sentence lacks its words.
    """
    try:
        given = yaml.safe_load(read_text(Path(path)))
    except yaml.YAMLError as error:
        raise UserError(f"task niah: wording {path!r} is not valid YAML: {error}") from error
    names = [field.name for field in fields(Wording)]
    if not isinstance(given, dict) or sorted(map(str, given)) != sorted(names):
        found = ", ".join(map(str, given)) if isinstance(given, dict) else "no mapping"
        raise UserError(f"task niah: wording {path!r} must give {', '.join(names)}, and nothing else; it has {found}")
    filler = given.pop("filler")
    texts_only = all(isinstance(value, str) for value in given.values())
    if not (texts_only and isinstance(filler, list) and filler and all(isinstance(text, str) for text in filler)):
        raise UserError(f"task niah: wording {path!r}: filler must be a list of sentences, everything else a text")
    for part, value in (("needle", "value"), ("needle", "key"), ("question", "key")):
        if f"{{{value}}}" not in given[part]:
            raise UserError(f"task niah: wording {path!r}: {part} must hold {{{value}}}, but is {given[part]!r}")
    return Wording(filler=tuple(filler), **given)


def read_haystack(path: str) -> str:
    """A text with single spaces for white space; the shipped excerpt where ``path`` is empty.

    Raises:
        UserError: it cannot be read.
    """
    return " ".join(read_text(Path(path) if path else EXCERPT).split())


def sentences(text: str) -> list[str]:
    """``text`` cut behind full stops, question and exclamation marks that a capital follows; joined by spaces it is
    the text again."""
    found: list[str] = []
    for part in BOUNDARY.split(text):
        if found and found[-1].endswith(ABBREVIATIONS):
            found[-1] += f" {part}"
        else:
            found.append(part)
    return [piece for sentence in found for piece in _cut(sentence)]


def _cut(sentence: str) -> list[str]:
    pieces: list[str] = []
    while len(sentence) > LONGEST:
        at = sentence.rfind(" ", 1, LONGEST)
        if at < 0:
            break
        pieces.append(sentence[:at])
        sentence = sentence[at + 1 :]
    return [*pieces, sentence]


def words_of(wording: Wording, coded: bool, key: str, value: str) -> dict[str, Any]:
    """What is filled into the sentences."""
    return {"kind": wording.code if coded else wording.number, "key": key, "value": value}
