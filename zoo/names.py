"""Which mixers exist, known without importing one: importing torch takes seconds, a misspelt name should not."""

from __future__ import annotations

import difflib
import importlib.util
import re
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path

# The same text as zoo_layers.mixer.ENTRY_POINTS, which cannot be imported without torch; a test holds them together.
ENTRY_POINTS = "hybrid_zoo.mixers"
_REGISTRATION = re.compile(r'^@register\("([A-Z][A-Z0-9]*)"\)', re.MULTILINE)


def mixer_names() -> list[str]:
    """The names of all mixers, those of plug-ins too, sorted.

    Read from the registry where torch is loaded already, else from the ``@register("NAME")`` lines of the sources and
    from the packages' entry points. Empty where the sources cannot be read: then only the registry knows.
    """
    if "zoo_layers.mixer" in sys.modules:
        from zoo_layers.mixer import broken, registered

        return sorted({*registered(), *broken()})
    found = importlib.util.find_spec("zoo_layers.mixers")
    folders = found.submodule_search_locations if found else None
    sources = [source.read_text(encoding="utf-8") for folder in folders or () for source in Path(folder).glob("*.py")]
    names = {name for text in sources for name in _REGISTRATION.findall(text)}
    return sorted(names | {entry.name for entry in entry_points(group=ENTRY_POINTS)}) if names else []


def near(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'GDN'?"``, or nothing where no known word is close."""
    words = {k.lower(): k for k in known}
    found = difflib.get_close_matches(word.lower(), words, n=1)
    return f"; did you mean '{words[found[0]]}'?" if found else ""
