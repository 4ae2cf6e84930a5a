"""The sizes that the matcher turns: what values each may take, which rule refuses one, and what it makes of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from zoo.architecture import Architecture, settle
from zoo.errors import PatternError, UserError
from zoo.names import near
from zoo.pattern import Layer, arrange, canonical, parse
from zoo_layers.mixer import MixerSpec, SpecError

SIZES = ("d_ff", "d_model", "n_layers", "heads")
# What a mixer's option may be, beside what the mixer itself refuses.
OPTIONS: dict[str, tuple[Sequence[int], str]] = {
    "heads": (range(1, 257), "whole heads of the size they have"),
    "head_dim": ((32, 64, 128, 192, 256), "one of 32, 64, 128, 192, 256"),
    "expand_v": (range(1, 17), "a whole number"),
    "expand": (range(1, 17), "a whole number"),
    "state": (range(16, 257, 16), "a multiple of 16"),
    "rank": (range(16, 4097, 16), "a multiple of 16"),
    "window": (range(64, 131_073, 64), "a multiple of 64"),
}
_LIKE_HEADS = ("kv_heads", "value_heads")  # open, they are as many as heads
DEPTHS, WIDEST, WIDEST_MLP = range(1, 1025), 16_384, 262_144


@dataclass(frozen=True)
class Knob:
    """One size that may move.

    Attributes:
        name: ``d_ff``, ``d_model``, ``n_layers`` or ``MIXER.option``.
        rule: what its values are, in words.
        values: all that are tried, rising.
        start: what the model has.
        refuses: the rule that blocks a value, in words, or None.
        turn: the model with another value, one that is not refused.
    """

    name: str
    rule: str
    values: Sequence[int]
    start: int
    refuses: Callable[[int], str | None]
    turn: Callable[[int], Architecture]


def default_size(arm: Architecture, held: str) -> str:
    """What to turn where nobody says: ``d_ff``, as it changes neither mixers nor state; without MLPs ``n_layers``.

    For the state: the first that changes it of the heads of a memory, a window, the heads of attention, the size of a
    latent, of a state, of a key head.
    """
    if held != "state":
        return "n_layers" if all(layer.mlp == "none" for layer in arm.layers) else "d_ff"
    memories, _ = _with_heads(arm)
    tried = [(mixer, "heads") for mixer in memories]
    for option in ("window", "heads", "rank", "state", "expand", "head_dim"):
        tried += [(layer.mixer, option) for layer in arm.layers if option in type(layer.spec).options()]
    return next((f"{mixer}.{option}" for mixer, option in tried if _changes_state(arm, mixer, option)), "n_layers")


def knob(arm: Architecture, name: str, *, step: int | None = None, keep_d_ff: bool = False) -> Knob:
    """The knob called ``name`` on a model.

    Args:
        arm: the model.
        name: one of ``SIZES``, or an option of a mixer, such as ``GDN.heads``.
        step: values of ``d_ff`` and ``d_model`` are multiples of it. None: 64, and for ``d_ff`` 16 below d_model 512.
        keep_d_ff: a ``d_model`` that moves leaves ``d_ff`` as it is; else the two keep their ratio.

    Raises:
        UserError: an unknown name, a size that this model does not have, a step below 1 or for another size.
    """
    if step is not None and (step < 1 or name not in ("d_ff", "d_model")):
        raise UserError(f"a step of {step} for {name}: steps are at least 1, and only d_ff and d_model move in steps")
    if name == "d_ff":
        return _d_ff(arm, step or _mlp_step(arm.d_model))
    if name == "d_model":
        return _d_model(arm, step or 64, keep_d_ff)
    if name == "n_layers":
        return _n_layers(arm)
    if name == "heads":
        name = f"{_the_one_with_heads(arm)}.heads"
    mixer, _, option = name.partition(".")
    return _option(arm, name, mixer.upper(), option)


def nearest_depth(pattern: str | list[Any], depth: int) -> int:
    """The depth that a pattern fills and that is nearest to ``depth``; the smaller one of two."""
    parsed = parse(pattern)
    fitting = [n for n in DEPTHS if _refused_depth(parsed, n) is None]
    return min(fitting, key=lambda n: (abs(n - depth), n)) if fitting else depth


def spelt_out(arm: Architecture) -> Architecture:
    """The same model with every open size of its mixers written down, so that no rule decides it again."""
    return _relaid(arm, [replace(layer, spec=_spelt(layer.resolve(arm.d_model))) for layer in arm.layers])


# ------------------------------------------------------------------------------------------------------------ the knobs
def _mlp_step(d_model: int) -> int:
    return 64 if d_model >= 512 else 16


def _d_ff(arm: Architecture, step: int) -> Knob:
    if all(layer.mlp == "none" for layer in arm.layers):
        raise UserError(f"{arm.canonical}: no layer has an MLP, so there is no d_ff to turn; free n_layers or d_model")
    values = range(step, WIDEST_MLP + 1, step)
    return Knob("d_ff", f"a multiple of {step}", values, arm.d_ff, lambda value: None, arm.with_d_ff)


def _n_layers(arm: Architecture) -> Knob:
    parsed = parse(arm.pattern)
    plain = {**arm.to_plain(), "mixers": arm.offered}
    cycle = len(parsed.entries)
    rule = f"whole cycles of {cycle} layers" if cycle > 1 else "a whole number"
    if parsed.placements:
        rule = f"what the cycle of {cycle} and the placements of the pattern allow"

    def turn(depth: int) -> Architecture:
        return settle(**{**plain, "n_layers": depth})

    return Knob("n_layers", rule, DEPTHS, arm.n_layers, lambda depth: _refused_depth(parsed, depth), turn)


def _refused_depth(parsed: Any, depth: int) -> str | None:
    try:
        arrange(parsed, depth)
    except PatternError as error:
        return error.problem
    return None


def _d_model(arm: Architecture, step: int, keep_d_ff: bool) -> Knob:
    freed = [replace(layer, spec=_following(layer.spec, arm.d_model)) for layer in arm.layers]
    own = [(layer.mixer, layer.resolve(arm.d_model)) for layer in arm.layers]
    filling = {spec.all_options()["head_dim"]: mixer for mixer, spec in own if _fills(spec, arm.d_model)}
    has_mlp = any(layer.mlp != "none" for layer in arm.layers)

    def inner(width: int) -> int:
        unit = _mlp_step(width)
        return arm.d_ff if keep_d_ff else max(1, round(arm.d_ff * width / arm.d_model / unit)) * unit

    def refuses(width: int) -> str | None:
        for head_dim, mixer in filling.items():
            if width % head_dim:
                return (
                    f"heads times head_dim must be d_model, but {width} is no multiple of {mixer}'s heads of {head_dim}"
                )
        return _refused({layer.spec for layer in freed}, width)

    rule = f"a multiple of {step}; heads keep their size, and their number follows where the width had settled it"
    if has_mlp:
        rule += "; d_ff stays" if keep_d_ff else f"; d_ff keeps its ratio of {arm.d_ff / arm.d_model:.3g}"
    return Knob(
        "d_model",
        rule,
        range(step, WIDEST + 1, step),
        arm.d_model,
        refuses,
        lambda width: _relaid(arm, freed, d_model=width, d_ff=inner(width)),
    )


def _following(spec: Any, d_model: int) -> Any:
    """A spec whose heads keep their size, their number open again where the width would settle it as it is."""
    resolved = spec.resolve(d_model)
    options = resolved.all_options()
    sizes = {name: options[name] for name in ("heads", "head_dim") if name in options}
    kept = replace(spec, **sizes)
    if "heads" not in sizes:
        return kept
    opened = replace(_spelt(kept), heads=None)
    return opened if opened.resolve(d_model) == resolved else kept


def _spelt(spec: Any) -> Any:
    """A spec without the numbers of heads that are those of ``heads`` anyway."""
    options = spec.all_options()
    heads = options.get("heads")
    return replace(spec, **{name: None for name in _LIKE_HEADS if heads is not None and options.get(name) == heads})


def _fills(spec: MixerSpec, d_model: int) -> bool:
    """Whether a mixer's heads together are as wide as the model."""
    options = spec.all_options()
    return options.get("heads", 0) * options.get("head_dim", 0) == d_model


def _with_heads(arm: Architecture) -> tuple[list[str], list[str]]:
    """The mixers that have heads: memories, and attention, whose heads fill the width and better stay."""
    found = {layer.mixer: layer.spec for layer in arm.layers if "heads" in type(layer.spec).options()}
    attention = [m for m, spec in found.items() if _state(spec, arm.d_model, 1) != _state(spec, arm.d_model, 2)]
    return [mixer for mixer in found if mixer not in attention], attention


def _the_one_with_heads(arm: Architecture) -> str:
    memories, attention = _with_heads(arm)
    found = memories or attention
    if not found:
        raise UserError(f"{arm.canonical}: no mixer has an option heads; free {_other_options(arm)}")
    if len(found) > 1:
        raise UserError(f"{' and '.join(found)} have heads; say whose may move: --free {found[0]}.heads")
    return found[0]


def _other_options(arm: Architecture) -> str:
    known = {f"{layer.mixer}.{option}" for layer in arm.layers for option in type(layer.spec).options()}
    return ", ".join(sorted(name for name in known if name.partition(".")[2] in OPTIONS))


def _option(arm: Architecture, name: str, mixer: str, option: str) -> Knob:
    own = [layer for layer in arm.layers if layer.mixer == mixer]
    if not own or option not in OPTIONS or option not in type(own[0].spec).options():
        raise UserError(
            f"'{name}' is nothing that can be turned here{near(name, [*SIZES, *_other_options(arm).split(', ')])}\n"
            f"One of {', '.join(SIZES)} can, and of this pattern's mixers {_other_options(arm)}."
        )
    held = {getattr(layer.resolve(arm.d_model), option) for layer in own}
    if len(held) > 1:
        listed = ", ".join(str(value) for value in sorted(held))
        raise UserError(f"{name} differs between layers ({listed}), and one knob cannot turn it; free another size")
    values, rule = OPTIONS[option]

    def refuses(value: int) -> str | None:
        try:
            type(own[0].spec).options()[option].read(value)
        except SpecError as error:
            return error.problem
        return _refused({_changed(layer.spec, option, value, arm.d_model) for layer in own}, arm.d_model)

    def turn(value: int) -> Architecture:
        moved = {layer: replace(layer, spec=_changed(layer.spec, option, value, arm.d_model)) for layer in own}
        return _relaid(arm, [moved.get(layer, layer) for layer in arm.layers])

    return Knob(f"{mixer}.{option}", rule, values, held.pop(), refuses, turn)


def _changed(spec: Any, option: str, value: int, d_model: int) -> Any:
    """A spec with another value of an option."""
    sizes = spec.resolve(d_model).all_options() if option == "heads" else {}
    pinned = {"head_dim": sizes["head_dim"]} if "head_dim" in sizes else {}  # open, it would shrink as heads grow
    return replace(spec, **pinned, **{option: value})


def _state(spec: Any, d_model: int, tokens: int) -> int:
    """Bytes that decoding keeps of ``tokens`` tokens."""
    with torch.device("meta"):
        return spec.resolve(d_model).module(d_model).state_bytes(tokens)


def _changes_state(arm: Architecture, mixer: str, option: str) -> bool:
    """Whether values of an option that the mixer allows differ in decode state; a few of them are tried."""
    spec = next(layer.spec for layer in arm.layers if layer.mixer == mixer)
    turned = (_changed(spec, option, value, arm.d_model) for value in OPTIONS[option][0])
    allowed = islice((each for each in turned if _refused([each], arm.d_model) is None), 4)
    return len({_state(each, arm.d_model, WIDEST_MLP) for each in allowed}) > 1


def _refused(specs: Iterable[MixerSpec], width: int) -> str | None:
    for spec in specs:
        try:
            spec.resolve(width)
        except SpecError as error:
            return error.problem
    return None


def _relaid(arm: Architecture, layers: Sequence[Layer], **sizes: int) -> Architecture:
    """The model with these layers instead: the user's pattern and a table of options where that says it, else a longer
    pattern that names every option."""
    plain = {**arm.to_plain(), **sizes}
    wanted = [layer.resolve(plain["d_model"]) for layer in layers]
    table: dict[str, dict[str, Any]] = {}
    for layer in layers:
        table.setdefault(layer.mixer, layer.spec.to_options())
    try:
        made = settle(**{**plain, "mixers": table})
        if [layer.resolve(made.d_model) for layer in made.layers] == wanted:
            return made
    except (PatternError, SpecError):
        pass  # options in the pattern that do not go with the table; the long form names them all
    return settle(**{**plain, "pattern": canonical(layers, mlp=arm.mlp), "mixers": {}})
