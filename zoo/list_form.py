"""The list form of a pattern, for what a line cannot hold: its items are texts of the grammar, or mappings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zoo.errors import PatternError
from zoo.grammar import KEY, MAX_LAYERS, NAME, POSITION, POSITIONS, Entry, Placement, Reader, fits_line
from zoo.names import near

KEYS = ("mixer", "options", "mlp", "count", "at")


def read_item(item: Any, number: int) -> Reader:
    """Read one item, the ``number``-th.

    A mapping is read through the line of text that says the same, so that errors have a place for their carets.

    Raises:
        PatternError: neither text nor mapping, an unknown key, a wrong value, or what the grammar refuses.
    """
    if isinstance(item, str):
        return Reader(item, number)
    if not isinstance(item, Mapping):
        raise PatternError(f"an item is a text or a mapping, got {item!r}", "Write GDN, or {mixer: GDN}.", item=number)
    _check(item, number)
    options = {key: _plain(value) for key, value in (item.get("options") or {}).items()}
    raw = {key: value for key, value in options.items() if not fits_line(value)}
    # What a line cannot hold is read as a word of the same length, and put back afterwards.
    shown = {key: repr(value) if key in raw else value for key, value in options.items()}
    reader = Reader(_line(item, {key: "x" * len(word) if key in raw else word for key, word in shown.items()}), number)
    if raw:
        text = _line(item, shown)
        made = {
            id(entry): _restored(entry, raw, text) for entry in (*reader.cycle, *(p.entry for p in reader.placements))
        }
        reader.text = text
        reader.cycle = [made[id(entry)] for entry in reader.cycle]
        reader.placements = [Placement(made[id(p.entry)], p.position) for p in reader.placements]
    return reader


def _restored(entry: Entry, raw: Mapping[str, Any], text: str) -> Entry:
    options = tuple((key, raw.get(key, word)) for key, word in entry.options)
    return replace(entry, options=options, origin=replace(entry.origin, text=text))


def _plain(value: Any) -> Any:
    """The text of a number or a truth value, as a line would say it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, (int, float)) else value


def _line(item: Mapping[str, Any], options: Mapping[str, str]) -> str:
    layer = item["mixer"] + "".join(f":{key}={word}" for key, word in options.items())
    if item.get("mlp") is not None:
        layer += f"/{item['mlp']}"
    if "at" in item:
        return ",".join(f"{layer}@{place}" for place in _places(item["at"]))
    return layer if item.get("count", 1) == 1 else f"{item['count']}x{layer}"


def _places(at: Any) -> list[str]:
    listed = isinstance(at, Sequence) and not isinstance(at, str)
    return [str(place) for place in (at if listed else [at])]


def _check(item: Mapping[Any, Any], number: int) -> None:
    """Refuse what no line of text would say."""
    problem, cure = _fault(item)
    if problem:
        raise PatternError(problem, cure, item=number)


def _fault(item: Mapping[Any, Any]) -> tuple[str, str]:
    """What is wrong with a mapping and what to do; two empty texts where nothing is."""
    for key in item:
        if key not in KEYS:
            return f"unknown key {key!r}{near(str(key), KEYS)}", f"The keys of an item: {' '.join(KEYS)}."
    if "count" in item and "at" in item:
        return "'count' and 'at' exclude each other", "A placement stands for one layer; list all its positions in at."
    count, mixer, mlp, options = item.get("count", 1), item.get("mixer"), item.get("mlp"), item.get("options")
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_LAYERS:
        problem = f"count must be a whole number from 1 to {MAX_LAYERS:,}, got {count!r}"
        return problem, "Take the item out, or say how many."
    if not isinstance(mixer, str) or not NAME.fullmatch(mixer):
        return f"mixer must be a mixer's name, got {mixer!r}", "Write {mixer: GDN}."
    if mlp is not None and (not isinstance(mlp, str) or not KEY.fullmatch(mlp)):
        return f"mlp must be an MLP's name, got {mlp!r}", "Write mlp: swiglu, or leave it out."
    if options is not None and not isinstance(options, Mapping):
        return f"options must be a mapping, got {options!r}", "Write options: {heads: 16}."
    for key in options or ():
        if not isinstance(key, str) or not KEY.fullmatch(key):
            return f"an option's name is a word, got {key!r}", "Write options: {heads: 16}."
    places = _places(item["at"]) if "at" in item else ["1"]
    if not places:
        return "at names no position", POSITIONS
    for place in places:
        if not POSITION.fullmatch(place):
            return f"{place!r} is no position", POSITIONS
    return "", ""
