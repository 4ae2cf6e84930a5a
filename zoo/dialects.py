"""Other projects' notations for the layers of a hybrid, read into our patterns and written from them.

Nothing is guessed: what one side cannot say raises, with the place and the reason. Where :func:`write` succeeds,
:func:`read` of its text gives the same layers.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zoo.errors import PatternError, UserError
from zoo.grammar import Entry, Pattern
from zoo.names import mixer_names, near
from zoo.pattern import arrange, fold, parse


@dataclass(frozen=True)
class Translation:
    """What a foreign text says in our language.

    Attributes:
        pattern: the shortest one.
        n_layers: how many layers the text describes.
        notices: what was dropped, one sentence each.
    """

    pattern: Pattern
    n_layers: int
    notices: tuple[str, ...] = ()


def read(
    dialect: str, text: Any, *, names: Mapping[str, str] | None = None, n_layers: int | None = None
) -> Translation:
    """Read a foreign notation.

    Args:
        dialect: one of :data:`DIALECTS`.
        text: as it stands in the other project's file; a list or mapping may be given as such.
        names: what the other side calls a mixer, and our name of it: ``{"linear": "GDN"}`` for hf, ``{"base": "GDN"}``
            for fla, ``{"gdn": "GDN", "attn": "GA"}`` for olmo. megatron and kimi need none.
        n_layers: the depth, where the text does not say it: fla always, olmo where its blocks repeat.

    Raises:
        PatternError: a part of the text that has no counterpart here, with its place.
        UserError: an unknown dialect, or something that the dialect needs beside the text.
    """
    wanted = {str(foreign): str(ours).upper() for foreign, ours in (names or {}).items()}
    for foreign, ours in wanted.items():
        known = mixer_names()
        if known and ours not in (*known, *_SPOKEN):
            raise UserError(f"{dialect}: '{foreign}' is to be '{ours}', which is no mixer{near(ours, known)}")
    layers, notices = _dialect(dialect).read(text, wanted, n_layers)
    return Translation(parse(fold(layers)), len(layers), tuple(notices))


def write(
    dialect: str,
    pattern: str | Sequence[Any] | Pattern,
    *,
    n_layers: int | None = None,
    mlp: str = "swiglu",
    names: Mapping[str, str] | None = None,
) -> str:
    """Write a pattern in a foreign notation, layer by layer.

    Args:
        dialect: one of :data:`DIALECTS`.
        pattern: ours.
        n_layers: the depth; None: once through.
        mlp: the model's MLP; only megatron says which layers have one.
        names: as in :func:`read`.

    Raises:
        PatternError: a layer that the other notation cannot say, with a caret.
        UserError: an unknown dialect, or a name that it needs.
    """
    wanted = {str(foreign): str(ours).upper() for foreign, ours in (names or {}).items()}
    return _dialect(dialect).write(arrange(parse(pattern), n_layers), wanted, mlp)


@dataclass(frozen=True)
class _Dialect:
    read: Callable[[Any, Mapping[str, str], int | None], tuple[list[str], list[str]]]
    write: Callable[[list[Entry], Mapping[str, str], str], str]


def _dialect(name: str) -> _Dialect:
    if name not in _TABLE:
        raise UserError(f"unknown dialect '{name}'{near(name, _TABLE)}\nKnown dialects: {' '.join(_TABLE)}.")
    return _TABLE[name]


# ------------------------------------------------------------------------------------------------------------- megatron
_MEGATRON = {"M": "M2", "G": "GDN", "*": "GA", "+": "MLA"}
_MEGATRON_REFUSED = {
    "D": "sparse attention has no mixer here",
    "E": "experts have no MLP here",
    "/": "extra prediction heads are no part of a pattern",
    "[": "groups have no counterpart here",
    "]": "groups have no counterpart here",
}


def _read_megatron(text: Any, names: Mapping[str, str], n_layers: int | None) -> tuple[list[str], list[str]]:
    """``M-M*-M-``: each symbol is a sublayer; ``-`` is an MLP, which belongs to the mixer before it."""
    _no_names("megatron", names)
    if not isinstance(text, str) or not text:
        raise UserError(f"megatron: a text of symbols is needed, such as M-M*-M-, got {text!r}")
    layers: list[str] = []
    notices = []
    open_mixer = False
    for at, symbol in enumerate(text):
        place = (text, [(at, at + 1)])
        if symbol in _MEGATRON:
            layers.append(f"{_MEGATRON[symbol]}/none")
            open_mixer = True
        elif symbol == "-" and open_mixer:
            layers[-1] = layers[-1].removesuffix("/none")
            open_mixer = False
        elif symbol == "-":
            raise PatternError("this MLP has no mixer before it", "A layer here begins with a mixer: M-.", *place)
        elif symbol == "|":
            notices.append(
                f"megatron: the pipeline cut at character {at + 1} is dropped; a pattern does not say where to cut"
            )
        else:
            why = _MEGATRON_REFUSED.get(symbol, "unknown symbol")
            raise PatternError(f"megatron: {symbol!r}: {why}", "Known symbols: M G * + - and |.", *place)
    if not layers:
        raise UserError(f"megatron: {text!r} names no mixer")
    _same_depth("megatron", n_layers, len(layers))
    return layers, notices


def _write_megatron(entries: list[Entry], names: Mapping[str, str], mlp: str) -> str:
    _no_names("megatron", names)
    symbols = {ours: symbol for symbol, ours in _MEGATRON.items()}
    text = ""
    for entry in entries:
        if entry.mixer not in symbols:
            raise entry.refuse(f"megatron has no symbol for {entry.mixer}", f"It has {' '.join(symbols)}.")
        _no_options("megatron", entry)
        layer_mlp = entry.mlp or mlp
        if layer_mlp not in ("none", mlp):
            cure = "Its MLP symbol stands for one kind; take the model's own, or none."
            raise entry.refuse(f"megatron cannot say the MLP {layer_mlp}", cure, entry.origin.mlp or entry.origin.name)
        text += symbols[entry.mixer] + ("" if layer_mlp == "none" else "-")
    return text


# ------------------------------------------------------------------------------------------------------------------- hf
_HF_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}
_HF = {"full_attention": "GA", "sliding_attention": "SWA"}


def _read_hf(text: Any, names: Mapping[str, str], n_layers: int | None) -> tuple[list[str], list[str]]:
    """A list of layer types; ``linear_attention`` does not say which, so ``names`` does."""
    _only_names("hf", names, {"linear"})
    listed = _literal("hf", text, list)
    layers = []
    for at, kind in enumerate(listed):
        kind = _HF_OLDER.get(kind, kind) if isinstance(kind, str) else kind
        if kind == "linear_attention":
            layers.append(_needed("hf", names, "linear", "linear_attention does not say which mixer it is"))
        elif isinstance(kind, str) and kind in _HF:
            layers.append(_HF[kind])
        else:
            cure = "Known types: linear_attention full_attention sliding_attention."
            raise _in_list("hf", text, listed, at, f"{listed[at]!r} has no counterpart here", cure)
    _same_depth("hf", n_layers, len(layers))
    return layers, []


def _write_hf(entries: list[Entry], names: Mapping[str, str], mlp: str) -> str:
    _only_names("hf", names, {"linear"})
    kinds = {ours: kind for kind, ours in _HF.items()}
    linear = [entry for entry in entries if entry.mixer not in kinds]
    for entry in entries:
        _plain("hf", entry)
        if entry.mixer not in kinds and entry.mixer != linear[0].mixer:
            cure = "One list has one kind of linear_attention."
            raise entry.refuse(f"hf cannot say two linear mixers, {linear[0].mixer} and {entry.mixer}", cure)
        if entry.mixer not in kinds and names.get("linear", entry.mixer) != entry.mixer:
            raise entry.refuse(f"hf: linear is to be {names['linear']}, but here it is {entry.mixer}", "Name that one.")
    return json.dumps([kinds.get(entry.mixer, "linear_attention") for entry in entries])


# ------------------------------------------------------------------------------------------------------------------ fla
_FLA_KEYS = {"layers": None, "num_heads": "heads", "num_kv_heads": "kv_heads", "rope_theta": "rope_theta"}


def _read_fla(text: Any, names: Mapping[str, str], n_layers: int | None) -> tuple[list[str], list[str]]:
    """A base mixer, and ``attn``: the layers, counted from 0, that are attention."""
    _only_names("fla", names, {"base"})
    base = _needed("fla", names, "base", "the text says only where attention stands")
    if n_layers is None:
        raise UserError("fla: the text does not say how many layers there are; give n_layers")
    groups = _literal("fla", text, dict, list)
    found: dict[int, str] = {}
    for group in [groups] if isinstance(groups, dict) else groups:
        if not isinstance(group, dict) or not isinstance(group.get("layers"), list):
            raise UserError(f"fla: each group is a mapping with a list of layers, got {group!r}")
        layer = _fla_layer(group)
        for number in group["layers"]:
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < n_layers:
                raise UserError(f"fla: layer {number!r} is outside the model: they count from 0 to {n_layers - 1}")
            if number in found:
                raise UserError(f"fla: layer {number} is given twice")
            found[number] = layer
    return [found.get(i, base) for i in range(n_layers)], []


def _fla_layer(group: Mapping[str, Any]) -> str:
    window = group.get("window_size")
    layer = "GA" if window is None else "SWA"
    options = {}
    for key, value in group.items():
        if key == "window_size":
            if value is not None:
                options["window"] = value
        elif key in ("qkv_bias", "qk_norm") and value is False:
            continue
        elif key == "qk_norm" and value is True:
            options["qk_norm"] = "true"
        elif key not in _FLA_KEYS:
            raise UserError(
                f"fla: {key}={value!r} has no counterpart here; known keys: {' '.join(_FLA_KEYS)} window_size qk_norm"
            )
        elif key != "layers" and value is not None:
            options[str(_FLA_KEYS[key])] = value
    # What equals the default is not said, as in every canonical pattern.
    return layer + "".join(f":{key}={value}" for key, value in sorted(_differing(layer, options).items()))


def _differing(mixer: str, options: Mapping[str, Any]) -> dict[str, Any]:
    from zoo_layers.mixer import SpecError, registered

    try:
        spec = registered()[mixer].from_options(options)
    except SpecError as error:
        raise UserError(f"fla: {error}") from error
    known = spec.options()
    return {name: known[name].write(value) for name, value in spec.to_options().items()}


def _write_fla(entries: list[Entry], names: Mapping[str, str], mlp: str) -> str:
    _only_names("fla", names, {"base"})
    base = [entry for entry in entries if entry.mixer not in ("GA", "SWA")]
    groups: dict[str, dict[str, Any]] = {}
    for number, entry in enumerate(entries):
        if entry.mlp is not None:
            raise entry.refuse(
                "fla cannot say a layer's MLP", "Set the model's.", entry.origin.mlp or entry.origin.name
            )
        if entry.mixer not in ("GA", "SWA"):
            _no_options("fla", entry)
            if entry.mixer != base[0].mixer or names.get("base", entry.mixer) != entry.mixer:
                other = names.get("base", base[0].mixer)
                raise entry.refuse(
                    f"fla has one base mixer, {other}, and this is {entry.mixer}", "Use one beside attention."
                )
            continue
        group = {"layers": [], **_fla_settings(entry)}
        groups.setdefault(repr(group), group)["layers"].append(number)
    if not base and "base" not in names:
        raise UserError("fla: every layer is attention, and a base mixer is needed; name one: base=GDN")
    listed = list(groups.values())
    return json.dumps(listed[0] if len(listed) == 1 else listed)


def _fla_settings(entry: Entry) -> dict[str, Any]:
    from zoo_layers.mixer import registered

    known = registered()[entry.mixer].options()
    foreign = {ours: theirs for theirs, ours in _FLA_KEYS.items() if ours}
    settings: dict[str, Any] = {}
    for name, word in entry.options:
        if name == "window":
            continue
        value = known[name].read(word) if name in known else word
        if name == "qk_norm":
            settings["qk_norm"] = value
        elif name in foreign:
            settings[foreign[name]] = value
        else:
            raise entry.refuse(f"fla cannot say {entry.mixer}'s {name}", "Leave it out.", entry.origin.keys[name])
    if entry.mixer == "SWA":
        said = dict(entry.options).get("window", known["window"].default)
        settings["window_size"] = known["window"].read(said)
    return settings


# ----------------------------------------------------------------------------------------------------------------- kimi
_KIMI = {"kda_layers": "KDA", "full_attn_layers": "MLA"}


def _read_kimi(text: Any, names: Mapping[str, str], n_layers: int | None) -> tuple[list[str], list[str]]:
    """Two lists of layers, counted from 1, which must cover the model once."""
    _no_names("kimi", names)
    said = _literal("kimi", text, dict)
    for key in said:
        if key not in _KIMI:
            raise UserError(f"kimi: unknown key {key!r}{near(str(key), _KIMI)}; known keys: {' '.join(_KIMI)}")
    found: dict[int, str] = {}
    for key, mixer in _KIMI.items():
        numbers = said.get(key, [])
        if not isinstance(numbers, list):
            raise UserError(f"kimi: {key} must be a list of layers, got {numbers!r}")
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise UserError(f"kimi: layers count from 1, got {number!r} in {key}")
            if number in found:
                raise UserError(f"kimi: layer {number} stands in both lists, or twice in one")
            found[number] = mixer
    depth = max(found, default=0)
    gaps = [number for number in range(1, depth + 1) if number not in found]
    if not found or gaps:
        where = f"layer {gaps[0]} stands in neither list" if gaps else "both lists are empty"
        raise UserError(f"kimi: {where}; together they must name 1 to N once")
    _same_depth("kimi", n_layers, depth)
    return [found[number] for number in range(1, depth + 1)], []


def _write_kimi(entries: list[Entry], names: Mapping[str, str], mlp: str) -> str:
    _no_names("kimi", names)
    lists: dict[str, list[int]] = {key: [] for key in _KIMI}
    keys = {ours: key for key, ours in _KIMI.items()}
    for number, entry in enumerate(entries, 1):
        if entry.mixer not in keys:
            raise entry.refuse(f"kimi has no list for {entry.mixer}", "It has KDA and MLA.")
        _plain("kimi", entry)
        lists[keys[entry.mixer]].append(number)
    return json.dumps(lists)


# ----------------------------------------------------------------------------------------------------------------- olmo
def _read_olmo(text: Any, names: Mapping[str, str], n_layers: int | None) -> tuple[list[str], list[str]]:
    """``block_pattern=[...]``: names of blocks, repeated to the depth; ``names`` says which mixer each is."""
    body = re.sub(r"^\s*block_pattern\s*=\s*", "", text) if isinstance(text, str) else text
    listed = _literal("olmo", body, list)
    cycle = []
    for at, block in enumerate(listed):
        if not isinstance(block, str) or block not in names:
            cure = f"Name it, for example {block}=GDN." if isinstance(block, str) else "A block has a name."
            raise _in_list("olmo", text, listed, at, f"block {block!r} is not said to be a mixer", cure)
        cycle.append(names[block])
    depth = len(cycle) if n_layers is None else n_layers
    if depth < 1 or depth % len(cycle):
        raise UserError(
            f"olmo: {len(cycle)} blocks do not fill n_layers={depth}; a cut last cycle is refused: write the whole list"
        )
    return cycle * (depth // len(cycle)), []


def _write_olmo(entries: list[Entry], names: Mapping[str, str], mlp: str) -> str:
    blocks: dict[str, str] = {}
    for block, ours in names.items():
        if ours in blocks:
            raise UserError(f"olmo: {ours} is named twice, {blocks[ours]} and {block}; keep one")
        blocks[ours] = block
    for entry in entries:
        if entry.mixer not in blocks:
            raise entry.refuse(f"olmo: no block's name is given for {entry.mixer}", f"Name it: gdn={entry.mixer}.")
        _plain("olmo", entry)
    return "block_pattern=" + json.dumps([blocks[entry.mixer] for entry in entries])


# -------------------------------------------------------------------------------------------------------------- shared
_TABLE = {
    "megatron": _Dialect(_read_megatron, _write_megatron),
    "hf": _Dialect(_read_hf, _write_hf),
    "fla": _Dialect(_read_fla, _write_fla),
    "kimi": _Dialect(_read_kimi, _write_kimi),
    "olmo": _Dialect(_read_olmo, _write_olmo),
}
DIALECTS = tuple(_TABLE)
_SPOKEN = {*_MEGATRON.values(), *_HF.values(), *_KIMI.values()}


def _literal(dialect: str, text: Any, *kinds: type) -> Any:
    """The list or mapping that a text says, in JSON's or Python's way; one given as such is taken as it is."""
    value = text
    if isinstance(text, str):
        body = re.sub(r"^\s*(attn|layer_types)\s*=\s*", "", text)
        words = {"null": "None", "true": "True", "false": "False"}
        body = re.sub(r"\b(null|true|false)\b", lambda found: words[found.group()], body)
        try:
            value = ast.literal_eval(body.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            value = None
    # Without attention, fla's list of groups is empty; any other empty list would be a model of no layers.
    if not isinstance(value, kinds) or not (value or dialect == "fla"):
        wanted = " or ".join({list: "a list", dict: "a mapping"}[kind] for kind in kinds)
        raise UserError(f"{dialect}: {wanted} is needed, in JSON's or Python's way, got {text!r}")
    return value


def _in_list(dialect: str, text: Any, listed: list[Any], at: int, problem: str, cure: str) -> PatternError:
    """An error at an item of a list, with a caret where the text can be found."""
    problem = f"{dialect}: {problem}"
    if isinstance(text, str) and isinstance(listed[at], str):
        start = -1
        for item in listed[: at + 1]:
            word = re.search(rf"""(["']){re.escape(str(item))}\1""", text[start + 1 :])
            if word is None:
                break
            start += 1 + word.start() + 1
        else:
            return PatternError(problem, cure, text, [(start, start + len(listed[at]))])
    return PatternError(f"{problem} (item {at + 1})", cure)


def _no_names(dialect: str, names: Mapping[str, str]) -> None:
    _only_names(dialect, names, set())


def _only_names(dialect: str, names: Mapping[str, str], known: set[str]) -> None:
    for name in names:
        if name not in known:
            taken = f"it takes {' '.join(sorted(known))}" if known else "it takes none"
            raise UserError(f"{dialect}: the name '{name}' has no use here; {taken}")


def _needed(dialect: str, names: Mapping[str, str], name: str, why: str) -> str:
    if name not in names:
        raise UserError(f"{dialect}: {why}; name it: {name}=GDN")
    return names[name]


def _same_depth(dialect: str, n_layers: int | None, found: int) -> None:
    if n_layers is not None and n_layers != found:
        raise UserError(f"{dialect}: the text holds {found} layers, but n_layers is {n_layers}; leave n_layers out")


def _no_options(dialect: str, entry: Entry) -> None:
    if entry.options:
        name = entry.options[0][0]
        cure = "Leave it out; options live elsewhere in that project's files."
        raise entry.refuse(f"{dialect} cannot say {entry.mixer}'s {name}", cure, entry.origin.keys[name])


def _plain(dialect: str, entry: Entry) -> None:
    """Refuse what is not a bare mixer."""
    _no_options(dialect, entry)
    if entry.mlp is not None:
        cure = "Set the model's."
        raise entry.refuse(f"{dialect} cannot say a layer's MLP", cure, entry.origin.mlp or entry.origin.name)
