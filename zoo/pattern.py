"""One line of text for the layers of a hybrid: ``3xGDN,GA`` is three GDN layers, one of attention, and again.

:func:`parse` reads the text, :func:`expand` makes layers of it, :func:`canonical` writes layers back as the shortest
text. No mixer is known by name here: names and options come from the registry. docs/patterns.md is the guide.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zoo.errors import PatternError
from zoo.grammar import (
    EXAMPLE,
    MAX_LAYERS,
    Entry,
    Pattern,
    Placement,
    Position,
    Reader,
    fits_line,
    quoted,
    too_many,
)
from zoo.list_form import read_item
from zoo.names import mixer_names, near

if TYPE_CHECKING:  # torch takes seconds to import; reading a pattern does without
    from zoo_layers.mixer import MixerSpec, SpecError

__all__ = [
    "Entry",
    "Layer",
    "Pattern",
    "PatternError",
    "Placement",
    "Position",
    "arrange",
    "canonical",
    "check_names",
    "expand",
    "fold",
    "misplaced_key",
    "parse",
    "unused_mixers",
    "unused_notice",
]

Settings = Mapping[str, Mapping[str, Any]]
Registry = Mapping[str, "type[MixerSpec]"]


@dataclass(frozen=True)
class Layer:
    """One layer of a model.

    Attributes:
        mixer: the mixer's registered name.
        spec: its settings, checked; what is open is settled by :meth:`resolve`.
        mlp: the name of its MLP, ``"none"`` for the mixer alone.
        entry: where it was written, for errors; no part of what the layer is.
    """

    mixer: str
    spec: MixerSpec
    mlp: str
    entry: Entry | None = field(default=None, compare=False, repr=False)

    @property
    def options(self) -> dict[str, Any]:
        """The options that differ from the mixer's defaults, sorted by name."""
        return self.spec.to_options()

    def resolve(self, d_model: int) -> MixerSpec:
        """The spec with nothing left open, for a model of width ``d_model``.

        Raises:
            PatternError: sizes that do not fit the width, with a caret under the layer in the pattern.
        """
        from zoo_layers.mixer import SpecError

        try:
            return self.spec.resolve(d_model)
        except SpecError as error:
            if self.entry is None:
                raise
            raise _at_option(self.entry, error) from error


# ----------------------------------------------------------------------------------------------------- text to pattern
def parse(pattern: str | Sequence[Any] | Pattern) -> Pattern:
    """Read a pattern: a line of text, or a list whose items are text or mappings.

    Args:
        pattern: such as ``"3xGDN,GA"``, or ``["3xGDN", {"mixer": "GA", "options": {"heads": 16}}]``. The keys of a
            mapping are mixer, options, mlp, count and at.

    Returns:
        the pattern; whether its mixers and options exist, and whether it fits a depth, :func:`expand` checks.

    Raises:
        PatternError: what is not understood, with its place.
    """
    if isinstance(pattern, Pattern):
        return pattern
    if isinstance(pattern, str):
        readers, listed = [Reader(pattern, None)], False
    elif isinstance(pattern, Sequence) and not isinstance(pattern, (bytes, bytearray)):
        if not pattern:
            raise PatternError("the pattern is empty", EXAMPLE)
        readers, listed = [read_item(item, number) for number, item in enumerate(pattern, 1)], True
    else:
        raise PatternError(f"a pattern is a line of text or a list, got {pattern!r}", EXAMPLE)
    found = Pattern(
        tuple(entry for reader in readers for entry in reader.cycle),
        tuple(placement for reader in readers for placement in reader.placements),
        tuple(reader.text for reader in readers),
        listed,
        tuple((index, *span) for index, reader in enumerate(readers) for span in reader.spans),
    )
    if not found.entries:
        raise found.refuse(
            "only placements, and no layers to place them among",
            f"Say what fills the rest: DN,{found.text}.",
            [(max((p.entry.origin.item or 1) - 1, 0), *p.entry.origin.whole) for p in found.placements],
        )
    if len(found.entries) > MAX_LAYERS:
        raise too_many(found.text, (0, len(found.text)), None)
    return found


# --------------------------------------------------------------------------------------------------- pattern to layers
def expand(
    pattern: str | Sequence[Any] | Pattern,
    n_layers: int | None = None,
    *,
    mixers: Settings | None = None,
    mlp: str = "swiglu",
    registry: Registry | None = None,
    mlps: Collection[str] | None = None,
) -> list[Layer]:
    """The layers that a pattern says, first to last.

    Args:
        pattern: text, list form, or what :func:`parse` returned.
        n_layers: the depth, 1 to 10,000. None: once through the pattern. Otherwise the pattern's cycle repeats to that
            depth, and must fill it; the last cycle may be cut where a placement says what the last layer is.
        mixers: options by mixer name, for layers that do not give their own.
        mlp: the MLP of layers that name none.
        registry: mixer specs by name. None: :func:`zoo_layers.mixer.registered`.
        mlps: names of the MLPs. None: :func:`zoo_layers.mlp.registered_mlps`.

    Raises:
        PatternError: an unknown name, option or MLP, a value out of range, a depth that does not fit; with its place.
    """
    pattern = parse(pattern)
    if registry is None:
        check_names(pattern, mixer_names() or None)
        registry = _registered(pattern)
    if mlps is None:
        from zoo_layers.mlp import registered_mlps

        mlps = {*registered_mlps(), "none"}
    check_names(pattern, registry)
    if mlp not in mlps:
        raise PatternError(f"unknown MLP '{mlp}'{near(mlp, mlps)}", f"Known MLPs: {' '.join(sorted(mlps))}.")
    table = _settings(mixers or {}, registry)
    made = {id(entry): _layer(entry, table, mlp, registry, mlps) for entry in pattern.every_entry()}
    return [made[id(entry)] for entry in arrange(pattern, n_layers)]


def arrange(pattern: Pattern, n_layers: int | None = None) -> list[Entry]:
    """The entry of each layer, first to last: the cycle repeated to the depth, placements put in. Asks no registry.

    Raises:
        PatternError: a depth that the pattern does not fit, a position outside it, two placements on one layer.
    """
    depth = _depth(pattern, n_layers)
    placed = _placed(pattern, depth, n_layers)
    _check_fill(pattern, depth, cut=depth in placed)
    cycle = pattern.entries
    return [placed[i + 1].entry if i + 1 in placed else cycle[i % len(cycle)] for i in range(depth)]


def check_names(pattern: Pattern, known: Collection[str] | None) -> None:
    """Refuse mixers that are not among the known names (None: nothing is known, nothing is refused).

    Raises:
        PatternError: an unknown mixer, with a caret and the nearest name.
    """
    if known is None:
        return
    for entry in pattern.every_entry():
        if entry.mixer not in known:
            name = entry.origin.text[slice(*entry.origin.name)]
            raise entry.refuse(f"unknown mixer '{name}'{near(name, known)}", _known_mixers(known))


def _known_mixers(known: Iterable[str]) -> str:
    return f"Known mixers: {' '.join(sorted(known))}. `zoo mixers` lists their options."


def _registered(pattern: Pattern) -> Registry:
    from zoo_layers.mixer import broken, registered

    for entry in pattern.every_entry():
        if entry.mixer in broken() and entry.mixer not in registered():
            problem = f"mixer {entry.mixer} is installed, but could not be loaded: {broken()[entry.mixer]}"
            raise entry.refuse(problem, "Mend or remove that package, or take another mixer.")
    return registered()


def _settings(mixers: Settings, registry: Registry) -> dict[str, dict[str, Any]]:
    """The model's table of options, its names in upper case, every option of it checked whether used or not."""
    from zoo_layers.mixer import SpecError

    table: dict[str, dict[str, Any]] = {}
    for name, options in mixers.items():
        mixer = str(name).upper()
        if mixer not in registry:
            raise PatternError(f"unknown mixer '{name}' in mixers{near(str(name), registry)}", _known_mixers(registry))
        if mixer in table:
            raise PatternError(f"mixer {mixer} is given twice in mixers", "Keep one.")
        if not isinstance(options, Mapping):
            raise PatternError(f"mixers: {mixer} must be a mapping of options, got {options!r}", "Write {heads: 16}.")
        try:
            registry[mixer].from_options(options)
        except SpecError as error:
            raise PatternError(error.problem, _sentence(error.cure)) from error
        table[mixer] = dict(options)
    return table


def _layer(entry: Entry, table: Settings, mlp: str, registry: Registry, mlps: Collection[str]) -> Layer:
    from zoo_layers.mixer import SpecError

    try:
        spec = registry[entry.mixer].from_options({**table.get(entry.mixer, {}), **dict(entry.options)})
    except SpecError as error:
        raise _at_option(entry, error) from error
    if entry.mlp is not None and entry.mlp not in mlps:
        cure = f"Known MLPs: {' '.join(sorted(mlps))}. Leave / out for the model's own."
        raise entry.refuse(
            f"unknown MLP '{entry.mlp}'{near(entry.mlp, mlps)}", cure, entry.origin.mlp or entry.origin.name
        )
    return Layer(entry.mixer, spec, entry.mlp or mlp, entry)


def _at_option(entry: Entry, error: SpecError) -> PatternError:
    """A spec's refusal, with a caret under the option where the entry gives it, else under the mixer's name."""
    places = entry.origin.values if error.part == "value" else entry.origin.keys
    return entry.refuse(error.problem, _sentence(error.cure), places.get(error.option, entry.origin.name))


def _sentence(cure: str) -> str:
    return cure if cure.endswith((".", "?", "!")) else f"{cure}."


def _depth(pattern: Pattern, n_layers: int | None) -> int:
    if n_layers is None:
        return len(pattern.entries)
    if isinstance(n_layers, bool) or not isinstance(n_layers, int) or not 1 <= n_layers <= MAX_LAYERS:
        problem = f"n_layers must be a whole number from 1 to {MAX_LAYERS:,}, got {n_layers!r}"
        raise PatternError(problem, "Say how many layers the model has, or leave it out for once through the pattern.")
    return n_layers


def _placed(pattern: Pattern, depth: int, n_layers: int | None) -> dict[int, Placement]:
    """The placements by layer number."""
    found: dict[int, Placement] = {}
    for placement in pattern.placements:
        number = _layer_number(placement, depth, n_layers)
        if number in found:
            both = [(max((p.entry.origin.item or 1) - 1, 0), *p.entry.origin.whole) for p in (found[number], placement)]
            raise pattern.refuse(f"two placements on layer {number}", "Keep one of them.", both)
        found[number] = placement
    return found


def _layer_number(placement: Placement, depth: int, n_layers: int | None) -> int:
    position, entry = placement.position, placement.entry
    if position.divisor is None:
        number = position.number if position.number > 0 else depth + 1 + position.number
    else:
        whole, rest = divmod(depth, position.divisor)
        number = whole + position.number
        if rest:
            near_ones = [n for n in (number, number + 1) if 1 <= n <= depth]
            problem = f"N/{position.divisor} is not whole: n_layers is {depth}"
            cure = (
                f"Write {' or '.join(f'@{n}' for n in near_ones)}." if near_ones else f"Name a layer from 1 to {depth}."
            )
            raise entry.refuse(problem, cure, position.span)
    if not 1 <= number <= depth:
        shown = position.number if position.divisor is None else number
        cure = f"Positions go from 1 to {depth}, or from -{depth} to -1."
        if n_layers is None:
            cure = f"n_layers is not given, so the depth is {depth}, once through the pattern."
        raise entry.refuse(f"position {shown} is outside the model", cure, position.span)
    return number


def _check_fill(pattern: Pattern, depth: int, *, cut: bool) -> None:
    """The cycle must fill the depth; ``cut``: a placement says what the last layer is, so the last cycle may be cut."""
    length = len(pattern.entries)
    rest = depth % length
    if rest == 0 or cut:
        return
    if depth < length:
        problem = f"the pattern holds {length} layers, but n_layers is {depth}"
        cure = f"Shorten it, take a multiple of {length}, or leave n_layers out."
    else:
        problem = f"the cycle of {length} layers does not fill n_layers={depth}: {rest} left over"
        last = f"{pattern.text},{pattern.entries[-1].mixer}@-1"
        cure = f"Take {depth - rest} or {depth - rest + length} layers, or place the last layer: {quoted(last)}."
    raise pattern.refuse(problem, cure, _joined(pattern))


def _joined(pattern: Pattern) -> list[tuple[int, int, int]]:
    """The places of the cycle's entries, those with only a comma between them as one."""
    places: list[tuple[int, int, int]] = []
    for item, start, end in pattern.cycle_spans:
        if places and places[-1][0] == item and places[-1][2] + 1 == start:
            places[-1] = (item, places[-1][1], end)
        else:
            places.append((item, start, end))
    return places


# --------------------------------------------------------------------------------------------------- layers to pattern
def canonical(layers: Sequence[Layer], *, mlp: str = "swiglu") -> str:
    """The one shortest text for these layers: ``expand(canonical(layers, mlp=m), len(layers), mlp=m) == layers``.

    Args:
        layers: at least one.
        mlp: the model's MLP; layers that have it do not say so.

    Raises:
        ValueError: no layers, or an option whose value a line cannot hold.
    """
    if not layers:
        raise ValueError("canonical: there are no layers; a pattern holds at least one")
    return fold([_layer_text(layer, mlp) for layer in layers])


def fold(texts: Sequence[str]) -> str:
    """The shortest pattern for layers given one by one: the smallest cycle that divides their number, in runs."""
    count = len(texts)
    period = next(
        p for p in range(1, count + 1) if count % p == 0 and all(texts[i] == texts[i - p] for i in range(p, count))
    )
    runs = [(text, len(list(same))) for text, same in itertools.groupby(texts[:period])]
    return ",".join(text if times == 1 else f"{times}x{text}" for text, times in runs)


def _layer_text(layer: Layer, mlp: str) -> str:
    known = type(layer.spec).options()
    text = layer.mixer
    for name, value in layer.options.items():
        word = known[name].write(value)
        if not fits_line(word):
            problem = f"canonical: {layer.mixer}'s option {name} is {value!r}, and a line holds words and numbers only"
            raise ValueError(f"{problem}; such a model has only the list form")
        text += f":{name}={word}"
    return text if layer.mlp == mlp else f"{text}/{layer.mlp}"


# ------------------------------------------------------------------------------------------ what stands round a pattern
def unused_mixers(layers: Iterable[Layer], mixers: Settings) -> list[str]:
    """The mixers that have settings, but no layer, in the order of ``mixers``."""
    used = {layer.mixer for layer in layers}
    return [str(name).upper() for name, options in mixers.items() if options and str(name).upper() not in used]


def unused_notice(mixer: str) -> str:
    """What to print for each of :func:`unused_mixers`; one recipe may serve several patterns, so it is no error."""
    return f"mixers: settings for {mixer} left out, no layer is {mixer}"


def misplaced_key(key: str, pattern: Any, known: Collection[str] | None = None) -> PatternError | None:
    """The error for a key of the model that is a mixer's name, or None where it is not one.

    YAML reads ``{pattern: GDN,SWA}`` as two keys, ``pattern: GDN`` and ``SWA``.
    """
    if key.split(":")[0].split("/")[0].upper() not in (mixer_names() if known is None else known):
        return None
    return PatternError(f"'{key}' is a mixer, not a setting of the model", f'Quote the pattern: "{pattern},{key}".')
