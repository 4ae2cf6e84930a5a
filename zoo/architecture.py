"""What a model is made of, settled once and kept in plain types: pattern, sizes, mixer options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from zoo.errors import UserError
from zoo.model import HybridLM
from zoo.pattern import Layer, canonical, expand, parse, unused_mixers, unused_notice
from zoo.presets import preset as find_preset
from zoo_layers.mlp import default_d_ff

Settings = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Architecture:
    """Everything that decides a model's tensors; made by :func:`settle`.

    Attributes:
        pattern: as the user wrote it, a line or the list form.
        layers: what it expands to.
        notices: sentences for the user, about settings that no layer reads.
        offered: all mixer options that were given, those too that no layer reads; ``mixers`` holds those that are read.
        The rest are the arguments of :meth:`zoo.model.HybridLM.from_pattern`, none left open.
    """

    pattern: str | list[Any]
    n_layers: int
    d_model: int
    vocab_size: int
    mlp: str
    d_ff: int
    tie: bool
    mixers: dict[str, dict[str, Any]]
    decoder: bool
    layers: tuple[Layer, ...] = field(compare=False, repr=False)
    notices: tuple[str, ...] = field(default=(), compare=False, repr=False)
    offered: dict[str, dict[str, Any]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def canonical(self) -> str:
        """The one shortest pattern for these layers."""
        return canonical(self.layers, mlp=self.mlp)

    def build(self, device: torch.device | str | None = None, seed: int | None = None) -> HybridLM:
        """The model, filled unless ``device`` is meta; see :meth:`zoo.model.HybridLM.from_pattern`."""
        return HybridLM.from_layers(
            self.layers,
            d_model=self.d_model,
            vocab_size=self.vocab_size,
            d_ff=self.d_ff,
            tie=self.tie,
            decoder=self.decoder,
            seed=seed,
            device=device,
        )

    def table(self) -> list[dict[str, Any]]:
        """One row a layer in plain types: mixer, every option as resolved, MLP."""
        return [
            {"mixer": layer.mixer, "options": layer.resolve(self.d_model).all_options(), "mlp": layer.mlp}
            for layer in self.layers
        ]

    def to_plain(self) -> dict[str, Any]:
        """The arguments of :func:`settle` that rebuild this, in types that YAML and weights-only checkpoints hold."""
        names = ("pattern", "n_layers", "d_model", "vocab_size", "mlp", "d_ff", "tie", "mixers", "decoder")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Undo :meth:`to_plain`."""
        return settle(**plain)  # type: ignore[return-value]

    def with_d_ff(self, d_ff: int) -> Self:
        """The same with MLPs of another width."""
        return replace(self, d_ff=d_ff)

    def with_pattern(self, pattern: str, *, mixers: Settings | None = None, mlp: str | None = None) -> Architecture:
        """The same sizes with other layers; mixer options that were given and not read until now count.

        Raises:
            PatternError, SpecError: as :func:`settle`.
        """
        offered = {**self.offered}
        for name, options in (mixers or {}).items():
            offered[name] = {**offered.get(name, {}), **options}
        plain = {**self.to_plain(), "pattern": pattern, "mixers": offered, "mlp": mlp or self.mlp}
        return settle(**plain)

    def check_same(self, stored: Mapping[str, Any]) -> None:
        """Compare with a checkpoint's architecture.

        Raises:
            UserError: naming each key with the stored and the given value.
        """
        other = Architecture.from_plain(stored)
        differing = []
        for name in ("d_model", "vocab_size", "d_ff", "tie", "decoder"):
            if getattr(other, name) != getattr(self, name):
                differing.append(f"{name} is {getattr(other, name)} there and {getattr(self, name)} here")
        if other.table() != self.table():
            differing.append(
                f"the layers are {other.canonical!r} there and {self.canonical!r} here{_first(other, self)}"
            )
        if differing:
            raise UserError(
                f"the checkpoint holds another model: {'; '.join(differing)}. Give the checkpoint's settings, or train "
                "from scratch"
            )


def _first(one: Architecture, other: Architecture) -> str:
    """Where two models with the same mixers first differ in an option."""
    for number, (a, b) in enumerate(zip(one.table(), other.table()), start=1):
        for name in a["options"]:
            there, here = a["options"][name], b["options"].get(name)
            if a["mixer"] == b["mixer"] and there != here:
                return f" (layer {number}, {a['mixer']}: {name} is {there} there and {here} here)"
    return ""


def settle(
    pattern: str | list[Any] | None = None,
    preset: str | None = None,
    *,
    n_layers: int | None = None,
    d_model: int | None = None,
    vocab_size: int | None = None,
    mlp: str | None = None,
    d_ff: int | None = None,
    tie: bool | None = None,
    mixers: Settings | None = None,
    decoder: bool = False,
) -> Architecture:
    """Settle every open setting: what is given, else the preset's, else the default.

    Args:
        pattern, preset: at least one; a pattern overrides the preset's.
        mixers: options by mixer name; merged over the preset's, option by option.
        The rest: as in :class:`zoo.module.HybridLMModule`.

    Raises:
        PatternError, SpecError: the pattern, or a mixer that does not fit the width.
        UserError: no pattern, no width, or no vocabulary.
    """
    base = find_preset(preset) if preset is not None else None
    if pattern is None and base is None:
        raise UserError('the model needs a pattern or a preset: --model.pattern "GDN,SWA", or --model.preset gdn-h1')
    text = pattern if pattern is not None else base.pattern  # type: ignore[union-attr]

    def pick(given: Any, name: str, default: Any = None) -> Any:
        inherited = getattr(base, name, None) if base is not None else None
        return given if given is not None else inherited if inherited is not None else default

    width, vocabulary, depth = pick(d_model, "d_model"), pick(vocab_size, "vocab_size"), pick(n_layers, "n_layers")
    if width is None:
        raise UserError("the model needs a width: --model.d_model 256")
    if vocabulary is None:
        raise UserError(
            "the model needs vocab_size, the number of token ids; on the command line the data module gives it"
        )
    for name, value in (("d_model", width), ("vocab_size", vocabulary), ("d_ff", d_ff)):
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    merged: dict[str, dict[str, Any]] = {
        name: dict(options) for name, options in (getattr(base, "mixers", None) or {}).items()
    }
    for name, options in (mixers or {}).items():
        merged[str(name).upper()] = {**merged.get(str(name).upper(), {}), **options}
    default_mlp = pick(mlp, "mlp", "swiglu")
    layers = expand(parse(text), depth, mixers=merged, mlp=default_mlp)
    for layer in layers:
        layer.resolve(width)
    unused = unused_mixers(layers, mixers or {})
    return Architecture(
        pattern=text,
        n_layers=len(layers),
        d_model=width,
        vocab_size=vocabulary,
        mlp=default_mlp,
        d_ff=pick(d_ff, "d_ff", default_d_ff(width)),
        tie=bool(pick(tie, "tie", False)),
        mixers={name: merged[name] for name in merged if name not in unused_mixers(layers, merged)},
        decoder=decoder,
        layers=tuple(layers),
        notices=tuple(unused_notice(name) for name in unused),
        offered=merged,
    )
