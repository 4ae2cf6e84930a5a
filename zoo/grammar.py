"""The syntax of the pattern language: one line of text, read into entries. It knows no mixer and imports no torch.

    pattern   = entry , { "," , entry } ;
    entry     = [ count ] , ( layer | "(" , pattern , ")" ) | placement ;
    count     = integer , "x" ;
    placement = layer , "@" , position ;                 at the top level, without a count
    layer     = name , { ":" , key , "=" , value } , [ "/" , mlp ] ;
    position  = integer | "-" , integer | "N" , [ "/" , integer ] , [ ( "+" | "-" ) , integer ] ;

Anything else is refused, with a caret under it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from zoo.errors import PatternError

# More layers than any model has; it keeps a mistyped count from filling the memory.
MAX_LAYERS = 10_000

NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*")
KEY = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_VALUE = re.compile(r"[A-Za-z0-9_.+-]+")
_INTEGER = re.compile(r"[0-9]+")
POSITION = re.compile(r"(?P<plain>-?[0-9]+)|N(?:/(?P<divisor>[0-9]+))?(?P<offset>[+-][0-9]+)?")

_ZERO = "positions start at 1"
POSITIONS = "The forms of a position: 2, -1, N, N/2, N/2+1."
EXAMPLE = "Write one, for example GDN,SWA or 3xGDN,GA."


# ----------------------------------------------------------------------------------------------------- what was written
Span = tuple[int, int]


@dataclass(frozen=True)
class Origin:
    """Where an entry stands: its text, the item of the list (from 1; None for a line), and the places of its parts."""

    text: str
    item: int | None
    whole: Span
    name: Span
    keys: Mapping[str, Span]
    values: Mapping[str, Span]
    mlp: Span | None


@dataclass(frozen=True)
class Entry:
    """One layer as written.

    Attributes:
        mixer: its name in upper case.
        options: (name, value) pairs, sorted; a value is the text of it, or an object that no line can hold.
        mlp: the MLP's name; None for the model's own.
        origin: where it was written; two entries that say the same are equal wherever they stand.
    """

    mixer: str
    options: tuple[tuple[str, Any], ...]
    mlp: str | None
    origin: Origin = field(compare=False, repr=False)

    def refuse(self, problem: str, cure: str, *spans: Span) -> PatternError:
        """The error whose carets stand under these parts of the entry; under its name where none is given."""
        return PatternError(problem, cure, self.origin.text, spans or [self.origin.name], self.origin.item)


@dataclass(frozen=True)
class Position:
    """A layer's number: ``number`` alone (negative: from the end), or the depth by ``divisor`` plus ``number``."""

    number: int
    divisor: int | None = None
    span: Span = field(default=(0, 0), compare=False, repr=False)


@dataclass(frozen=True)
class Placement:
    """A layer that replaces the one the cycle gives at a position."""

    entry: Entry
    position: Position


@dataclass(frozen=True)
class Pattern:
    """What a pattern says, before any depth or width is known. Two patterns that say the same are equal.

    Attributes:
        entries: the cycle, counts and parentheses written out.
        placements: layers put at positions of their own, in the order written.
        items: the text as typed; one per item of a list.
        listed: True for the list form.
        cycle_spans: (item's index, start, end) of each entry of the cycle at the top level.
    """

    entries: tuple[Entry, ...]
    placements: tuple[Placement, ...]
    items: tuple[str, ...] = field(compare=False)
    listed: bool = field(default=False, compare=False)
    cycle_spans: tuple[tuple[int, int, int], ...] = field(default=(), compare=False, repr=False)

    def __str__(self) -> str:
        """The text as typed; the items of a list joined by commas.

        Raises:
            ValueError: a list with a value that a line cannot hold.
        """
        for entry in self.every_entry():
            for name, value in entry.options:
                if not fits_line(value):
                    raise ValueError(
                        f"the pattern has no text: {entry.mixer}'s option {name} is {value!r}, and a line holds words "
                        "and numbers only; keep the list form"
                    )
        return self.text

    @property
    def text(self) -> str:
        """All items in one line, as an error shows them."""
        return ",".join(self.items)

    def every_entry(self) -> list[Entry]:
        """The entries of cycle and placements in reading order, one of each that a count repeats."""
        found = {id(entry): entry for entry in (*self.entries, *(p.entry for p in self.placements))}
        return sorted(found.values(), key=lambda entry: (entry.origin.item or 0, entry.origin.whole))

    def refuse(self, problem: str, cure: str, places: Sequence[tuple[int, int, int]]) -> PatternError:
        """An error about entries, which may stand in several items: carets at (item's index, start, end)."""
        if len({item for item, _, _ in places}) == 1 and self.listed:
            item = places[0][0]
            return PatternError(problem, cure, self.items[item], [p[1:] for p in places], item + 1)
        starts = [0]
        for text in self.items:
            starts.append(starts[-1] + len(text) + 1)
        return PatternError(problem, cure, self.text, [(starts[i] + a, starts[i] + b) for i, a, b in places])


def fits_line(value: Any) -> bool:
    """Whether an option's value can be written in a line of text."""
    return isinstance(value, str) and _VALUE.fullmatch(value) is not None


def quoted(text: str) -> str:
    """A pattern as one would type it in a shell: in quotes where it has parentheses."""
    return f"'{text}'" if "(" in text or ")" in text else text


# -------------------------------------------------------------------------------------------------------------- reading
def too_many(text: str, span: Span, item: int | None) -> PatternError:
    return PatternError(
        f"the pattern holds more than {MAX_LAYERS:,} layers", "Take a smaller count.", text, [span], item
    )


class Reader:
    """Reads one text, of a line or of an item of a list.

    Attributes:
        cycle: its entries, counts and parentheses written out.
        placements: in the order written.
        spans: the places of the cycle's entries at the top level.
    """

    def __init__(self, text: str, item: int | None):
        self.text, self.item, self.at = text, item, 0
        self.cycle: list[Entry] = []
        self.placements: list[Placement] = []
        self.spans: list[Span] = []
        self._read()

    def _read(self) -> None:
        if not self.text.strip():
            self._fail("the pattern is empty" if self.item is None else "the item is empty", EXAMPLE)
        # Parentheses still open: the entries before each, its count, where its entry began, where it stands.
        opened: list[tuple[list[Entry], int, int, int]] = []
        current = self.cycle
        while True:
            start = self.at
            count = self._count()
            if self._peek() == "(":
                opened.append((current, count, start, self.at))
                current = []
                self.at += 1
                continue
            self._entry(start, count, current, inside=bool(opened), opened=[place for *_, place in opened])
            while self._peek() == ")":
                if not opened:
                    self._fail("this parenthesis was never opened", "Take it out, or open one.", (self.at, self.at + 1))
                self.at += 1
                outer, count, start, _ = opened.pop()
                self._repeat(outer, current, count, (start, self.at))
                current = outer
                if not opened:
                    self.spans.append((start, self.at))
            if self._peek() == "" and opened:
                self._unclosed(opened[-1][3])
            if self._peek() == "":
                return
            if self._peek() != ",":
                self._unexpected()
            self.at += 1

    def _entry(self, start: int, count: int, current: list[Entry], *, inside: bool, opened: list[int]) -> None:
        """One layer or placement, with its count read already."""
        counted = self.at > start
        if self._peek() in ("", ",", ")"):
            if self._peek() == "" and opened:
                self._unclosed(opened[-1])
            if self._peek() == ")" and not opened:
                self._fail("this parenthesis was never opened", "Take it out, or open one.", (self.at, self.at + 1))
            where = f"before '{self._peek()}'" if self._peek() else "at the end"
            what = "the count" if counted else "the comma"
            cure = "Write a mixer inside." if self._peek() == ")" else f"Write a mixer, or drop {what}."
            self._fail(f"an entry is missing {where}", cure, (self.at, self.at + 1))
        if not NAME.match(self.text, self.at):
            self._unexpected()
        count_span = (start, self.at)
        entry = self._layer()
        if self._peek() != "@":
            self._repeat(current, [entry], count, (start, self.at))
            if not inside:
                self.spans.append((start, self.at))
            return
        if counted:
            self._fail(
                "a placement stands for one layer and takes no count", "Write one placement per layer.", count_span
            )
        position = self._position()
        if inside:
            cure = f"Move {self.text[start : self.at]} behind them."
            self._fail("a placement cannot stand inside parentheses", cure, (start, self.at))
        origin = replace(entry.origin, whole=(start, self.at))
        self.placements.append(Placement(replace(entry, origin=origin), position))

    def _count(self) -> int:
        found = _INTEGER.match(self.text, self.at)
        if not found:
            return 1
        digits, after = found.group(), found.end()
        if self.text[after : after + 1] != "x":
            name = NAME.match(self.text, after)
            word = name.group() if name else "(...)" if self.text[after : after + 1] == "(" else "GDN"
            if word[0] == "X" and len(word) > 1:
                word = word[1:]
            self._fail("a count is written with an x", f"Write {quoted(f'{digits}x{word}')}.", found.span())
        span = (self.at, after + 1)
        if not digits.strip("0"):
            self._fail("a count must be at least 1", "Take the entry out, or say how many.", span)
        if len(digits) > 9 or int(digits) > MAX_LAYERS:
            raise too_many(self.text, span, self.item)
        self.at = after + 1
        return int(digits)

    def _layer(self) -> Entry:
        start = self.at
        mixer = self._word(NAME)
        name = (start, self.at)
        options: dict[str, str] = {}
        keys: dict[str, Span] = {}
        values: dict[str, Span] = {}
        while self._peek() == ":":
            self.at += 1
            key, key_span = self._part(KEY, "an option is missing behind ':'", f"Write {mixer}:OPTION=VALUE.")
            if key in options:
                self._fail(f"option '{key}' is given twice", "Keep one.", key_span)
            value = None
            if self._peek() == "=":
                value = _VALUE.match(self.text, self.at + 1)
            if value is None:
                kind = _kind(mixer.upper(), key)
                self._fail(f"option '{key}' has no value", f"Write {key}=VALUE{kind}.", key_span)
            self.at = value.end()
            options[key], keys[key], values[key] = value.group(), key_span, value.span()
        mlp, mlp_span = None, None
        if self._peek() == "/":
            self.at += 1
            mlp, mlp_span = self._part(KEY, "an MLP is missing behind '/'", f"Write {mixer}/none, or leave the / out.")
        origin = Origin(self.text, self.item, (start, self.at), name, keys, values, mlp_span)
        return Entry(mixer.upper(), tuple(sorted(options.items())), mlp, origin)

    def _position(self) -> Position:
        self.at += 1
        found = POSITION.match(self.text, self.at)
        if not found:
            if self._peek() in ("", ",", ")"):
                self._fail("a position is missing behind '@'", POSITIONS, (self.at, self.at + 1))
            self._unexpected(POSITIONS)
        position = _position_of(found)
        if isinstance(position, str):
            cure = "The first layer is @1, the last @-1 or @N." if position == _ZERO else POSITIONS
            self._fail(position, cure, found.span())
        self.at = found.end()
        if self._peek() not in ("", ",", ")"):
            order = self._peek() in (":", "/")
            self._unexpected("Options and MLP stand before the '@': GA:heads=8/none@2." if order else POSITIONS)
        return position

    def _repeat(self, target: list[Entry], entries: list[Entry], count: int, span: Span) -> None:
        if len(target) + len(entries) * count > MAX_LAYERS:
            raise too_many(self.text, span, self.item)
        target += entries * count

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _word(self, form: re.Pattern[str]) -> str:
        found = form.match(self.text, self.at)
        if not found:
            self._unexpected()
        self.at = found.end()
        return found.group()

    def _part(self, form: re.Pattern[str], missing: str, cure: str) -> tuple[str, Span]:
        if self._peek() in ("", ",", ")", ":", "=", "/", "@"):
            self._fail(missing, cure, (self.at, self.at + 1))
        start = self.at
        return self._word(form), (start, self.at)

    def _unclosed(self, place: int) -> NoReturn:
        cure = "Close it."
        if self.item is not None:
            cure = "Close it; YAML splits an unquoted item of a [...] list at its commas, so put the item in quotes."
        self._fail("this parenthesis is never closed", cure, (place, place + 1))

    def _unexpected(self, cure: str | None = None) -> NoReturn:
        char, before = self._peek(), self.text[: self.at]
        if cure is None and char == "*":
            name, number = re.search(NAME.pattern + "$", before), _INTEGER.match(self.text, self.at + 1)
            cure = f"Counts stand in front: {number.group() if number else 3}x{name.group() if name else 'GDN'}."
        elif cure is None and char.isspace():
            cure = "Write it without spaces."
        elif cure is None and char == ":":
            cure = "Options stand right behind the mixer's name: SWA:window=512/gelu."
        elif cure is None and char in "/@" and before.endswith(")"):
            cure = f"A '{char}' belongs to one layer, inside the parentheses or without them."
        self._fail(
            f"{char!r} has no meaning here",
            cure or "A pattern is made of letters, digits and , : = / @ ( ) + - . _ and of nothing else.",
            (self.at, self.at + 1),
        )

    def _fail(self, problem: str, cure: str, *spans: Span) -> NoReturn:
        raise PatternError(problem, cure, self.text, spans, self.item)


def _position_of(found: re.Match[str]) -> Position | str:
    """The position that a match of its form says, or what is wrong with it."""
    if any(len(run) > 9 for run in _INTEGER.findall(found.group())):
        return "this position is outside any model"
    if found["plain"]:
        number = int(found["plain"])
        return Position(number, None, found.span()) if number else _ZERO
    divisor = int(found["divisor"] or 1)
    if divisor == 0:
        return "the depth cannot be divided by 0"
    return Position(int(found["offset"] or 0), divisor, found.span())


def _kind(mixer: str, option: str) -> str:
    """What the option's value must be, as ", a whole number"; nothing where mixer or option are unknown."""
    from zoo_layers.mixer import KINDS, registered  # only an error asks, so that all other reading does without torch

    spec = registered().get(mixer)
    known = spec.options().get(option) if spec else None
    return f", {KINDS[known.kind]}" if known else ""
