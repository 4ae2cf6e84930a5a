"""What every token mixer is: settings that can be checked, a module, a cache; and the registry of all by name."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import re
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from zoo_kernels.packing import Packing
from zoo_layers import init

ENTRY_POINTS = "hybrid_zoo.mixers"


# ------------------------------------------------------------------------------------------------------------ settings
class SpecError(ValueError):
    """A setting that a mixer refuses.

    Attributes:
        option: the option's name as given.
        part: "key" when the name is at fault, "value" when its value is.
        problem, cure: one clause each, without a full stop at the end of ``problem``.
    """

    def __init__(self, option: str, part: str, problem: str, cure: str):
        super().__init__(f"{problem}. {cure}")
        self.option, self.part, self.problem, self.cure = option, part, problem, cure


def option(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    choices: tuple[str, ...] | None = None,
    cure: str | None = None,
) -> Any:
    """One setting of a spec: a dataclass field with its default, its meaning and its range.

    Args:
        default: the value when nothing is given. None: settled by ``resolve``.
        help: what it does, in a few words; ``zoo mixers`` prints it.
        at_least, at_most: the range of a number, both ends included.
        choices: the words a text may be.
        cure: what to do instead of a value outside the range.
    """
    rules = {"help": help, "at_least": at_least, "at_most": at_most, "choices": choices, "cure": cure}
    return field(default=default, metadata=rules)


KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}


@dataclass(frozen=True)
class Option:
    """What is known of one option of a spec; read from its dataclass field."""

    name: str
    kind: type
    default: Any
    help: str
    at_least: float | None
    at_most: float | None
    choices: tuple[str, ...] | None
    cure: str | None

    def read(self, value: Any) -> Any:
        """``value``, or the text of it, as this option's type.

        Raises:
            SpecError: wrong type, out of range, or not one of the choices.
        """
        if value is None and self.default is None:
            return None
        read = self._cast(value)
        if read is None:
            shown = f"'{value}'" if isinstance(value, str) else repr(value)
            expected = "one of " + ", ".join(self.choices) if self.choices else KINDS[self.kind]
            raise self._refuse(f"{self.name} must be {expected}, got {shown}", misread=True)
        if self.choices is not None and read not in self.choices:
            near = difflib.get_close_matches(read, self.choices, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise self._refuse(f"{self.name} must be one of {', '.join(self.choices)}, got '{read}'{hint}")
        if self.at_least is not None and not read >= self.at_least:
            raise self._refuse(f"{self.name} must be at least {self.at_least}, got {read}")
        if self.at_most is not None and not read <= self.at_most:
            raise self._refuse(f"{self.name} must be at most {self.at_most}, got {read}")
        return read

    def write(self, value: Any) -> str:
        """The text that :meth:`read` turns into ``value``."""
        return str(value).lower() if isinstance(value, bool) else str(value)

    def _cast(self, value: Any) -> Any:
        if self.kind is bool:
            return (
                {"true": True, "false": False}.get(value)
                if isinstance(value, str)
                else value
                if isinstance(value, bool)
                else None
            )
        if isinstance(value, bool):
            return None
        if self.kind is int:
            if isinstance(value, str):
                return int(value) if re.fullmatch(r"[+-]?[0-9]{1,18}", value) else None
            return value if isinstance(value, int) else None
        if self.kind is float:
            try:
                number = float(value)
            except (TypeError, ValueError):
                return None
            return number if number == number and abs(number) != float("inf") else None
        return value if isinstance(value, str) else None

    def _refuse(self, problem: str, *, misread: bool = False) -> SpecError:
        default = "settled by the model's width" if self.default is None else self.write(self.default)
        cure = None if misread else self.cure  # the cure is for a number out of range, not for a word
        return SpecError(self.name, "value", problem, cure or f"The default is {default}.")


@dataclass(frozen=True, kw_only=True)
class MixerSpec(ABC):
    """The settings of one mixer: frozen, checked, every one with a default.

    A subclass is a frozen keyword-only dataclass whose fields are made by :func:`option`, registered under its name by
    :func:`register`. Its docstring's first line is what ``zoo mixers`` prints.
    """

    name: ClassVar[str]

    @classmethod
    def options(cls) -> dict[str, Option]:
        """All options by name, in the order of the class."""
        hints = typing.get_type_hints(cls)
        found = {}
        for f in fields(cls):
            members = [t for t in typing.get_args(hints[f.name]) if t is not types.NoneType] or [hints[f.name]]
            if f.default is MISSING:
                raise TypeError(f"{cls.__name__}.{f.name} has no default")
            found[f.name] = Option(f.name, members[0], f.default, **f.metadata)
        return found

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Build a spec from options by name; values may be typed or the text of a pattern.

        Raises:
            SpecError: an unknown name, a wrong type, a value out of range.
        """
        known = cls.options()
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean '{near[0]}'?" if near else ""
                listed = " ".join(known)
                raise SpecError(
                    name, "key", f"{cls.name} has no option '{name}'{hint}", f"Options of {cls.name}: {listed}."
                )
        return cls(**{name: known[name].read(value) for name, value in options.items()})

    def to_options(self) -> dict[str, Any]:
        """The options that differ from the defaults, by name, sorted."""
        defaults = {f.name: f.default for f in fields(self)}
        return {n: getattr(self, n) for n in sorted(defaults) if getattr(self, n) != defaults[n]}

    def all_options(self) -> dict[str, Any]:
        """Every option by name, in the order of the class."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @abstractmethod
    def resolve(self, d_model: int) -> Self:
        """Fill in every None and check what the width decides. Resolving twice changes nothing.

        Raises:
            SpecError: sizes that do not fit ``d_model``, with the rule and a value that would.
        """

    @abstractmethod
    def module(self, d_model: int) -> TokenMixer:
        """The module of this spec, already resolved; its tensors are not filled."""

    def build(self, d_model: int) -> TokenMixer:
        """Resolve, build, and fill every tensor (not on meta). A layer of width ``d_model``."""
        mixer = self.resolve(d_model).module(d_model)
        if not any(tensor.is_meta for tensor in mixer.parameters()):
            init.reset(mixer)
        return mixer

    def with_(self, **settled: Any) -> Self:
        """A copy with some options set; for ``resolve``."""
        return replace(self, **settled)


def settled(value: int | None) -> int:
    """A size that ``resolve`` has filled in.

    Raises:
        TypeError: it has not: a module was asked for before the spec was resolved.
    """
    if value is None:
        raise TypeError("a size is still open: call spec.build(d_model), or spec.resolve(d_model).module(d_model)")
    return value


# -------------------------------------------------------------------------------------------------------------- module
class CacheFullError(ValueError):
    """More tokens than a cache was built to hold."""


class MixerCache:
    """What decoding keeps of the past, one row per sequence: keys and values, or a state and a convolution's tail.

    A cache is for inference: what is written into it carries no gradient.

    Attributes:
        tensors: by name, each with the rows as first axis; zeros while nothing was seen.
        lengths: int32 [N] on the device, the tokens seen by each row.
        seen: the same numbers on the host, so that no layer ever asks the device.
    """

    def __init__(self, tensors: dict[str, Tensor]):
        if not tensors:
            raise ValueError("a cache needs at least one tensor, whose first axis counts the rows")
        first = next(iter(tensors.values()))
        self.tensors = tensors
        self.lengths = torch.zeros(first.shape[0], dtype=torch.int32, device=first.device)
        self.seen = [0] * first.shape[0]

    @property
    def rows(self) -> int:
        """N, the number of sequences."""
        return self.lengths.shape[0]

    @property
    def fresh(self) -> bool:
        """True while no row has seen a token: then a prefill may compute as if there were no cache."""
        return not any(self.seen)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def admit(self, x: Tensor, packing: Packing | None, *, room: int | None = None) -> None:
        """Check, before anything is computed, that ``x`` [B, T, D] fits this cache; every ``forward`` begins with it.

        Args:
            x, packing: as given to ``forward``.
            room: the most tokens that a row may see in all. None: no limit.

        Raises:
            ValueError: sequences that are not as many as the rows.
            CacheFullError: a row would pass ``room``.
        """
        batch = packing.documents if packing is not None else x.shape[0]
        if batch != self.rows:
            what = "documents" if packing is not None else "sequences"
            raise ValueError(f"cache: it holds {self.rows} rows, but {batch} {what} came; give one {what[:-1]} per row")
        if room is None:
            return
        for row, total in enumerate(self._grown(packing if packing is not None else x.shape[1])):
            if total > room:
                raise CacheFullError(
                    f"cache: row {row} would hold {total} tokens, but was built for a context of {room}; "
                    f"build it with new_cache(context={total}) or more"
                )

    def advance(self, tokens: int | Packing) -> None:
        """Count what was just read: as many tokens in every row, or one document of a packing per row."""
        self.seen = self._grown(tokens)
        # Not in place: positions computed before may still be needed by a backward pass.
        self.lengths = self.lengths + (tokens.cu_seqlens.diff() if isinstance(tokens, Packing) else tokens)

    def put(self, name: str, value: Tensor) -> None:
        """Replace one tensor by a value of its shape, kept in the cache's dtype."""
        held = self.tensors[name]
        if held.shape != value.shape:
            raise ValueError(f"cache: {name} is {list(held.shape)}, but {list(value.shape)} came")
        self.tensors[name] = value.detach().to(held.dtype)

    def nbytes(self) -> int:
        """Bytes of the tensors, the counters left out."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def reset(self) -> None:
        """Forget everything; snapshots and selections taken before stay as they are."""
        for name, tensor in self.tensors.items():
            self.tensors[name] = torch.zeros_like(tensor)
        self.lengths = torch.zeros_like(self.lengths)
        self.seen = [0] * self.rows

    def select(self, rows: Tensor | list[int]) -> MixerCache:
        """A deep copy of some rows, in the order given; a row may be named more than once.

        A tensor of rows on a device is read on the host, which waits for the device; give a list where that matters.
        """
        chosen = [int(row) for row in (rows.tolist() if isinstance(rows, Tensor) else rows)]
        index = torch.tensor(chosen, dtype=torch.long).to(self.lengths.device)
        copy = MixerCache({n: t.detach().index_select(0, index) for n, t in self.tensors.items()})
        copy.lengths = self.lengths.index_select(0, index)
        copy.seen = [self.seen[row] for row in chosen]
        return copy

    def snapshot(self) -> dict[str, Any]:
        """A deep copy of the whole content, for :meth:`restore`; plain types, so that a file can hold it."""
        return {
            "tensors": {n: t.detach().clone() for n, t in self.tensors.items()},
            "lengths": self.lengths.clone(),
            "seen": list(self.seen),
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Return to a snapshot; it is copied, never shared.

        Raises:
            ValueError: a snapshot of other tensors or shapes.
        """
        shapes = {n: list(t.shape) for n, t in self.tensors.items()}
        given = {n: list(t.shape) for n, t in snapshot["tensors"].items()}
        if shapes != given:
            raise ValueError(
                f"cache: the snapshot holds {given}, this cache {shapes}; build the cache with the same sizes"
            )
        for name, tensor in self.tensors.items():
            self.tensors[name] = torch.empty_like(tensor).copy_(snapshot["tensors"][name])
        self.lengths = torch.empty_like(self.lengths).copy_(snapshot["lengths"])
        self.seen = [int(length) for length in snapshot["seen"]]

    state_dict = snapshot
    load_state_dict = restore

    def _grown(self, tokens: int | Packing) -> list[int]:
        """``seen`` after so many more tokens."""
        added = tokens.lengths if isinstance(tokens, Packing) else [tokens] * self.rows
        return [before + more for before, more in zip(self.seen, added)]


class TokenMixer(nn.Module, ABC):
    """A layer that lets tokens see earlier tokens: x [B, T, D] -> [B, T, D].

    ``reset_parameters`` of any module here fills what that module itself owns (PyTorch's convention);
    :func:`zoo_layers.init.reset` fills everything below a module.
    """

    # Parameters and buffers of this class that stay fp32 when the module is moved to bf16 or fp16: decay rates, say.
    FLOAT32: ClassVar[tuple[str, ...]] = ()

    spec: Any  # the resolved settings; each mixer narrows this to its own class

    @abstractmethod
    def forward(self, x: Tensor, cache: MixerCache | None = None, packing: Packing | None = None) -> Tensor:
        """Mix.

        Args:
            x: [B, T, D], T >= 1.
            cache: read at entry, rewritten at exit; B rows. With a packing, one row per document.
            packing: documents laid end to end; then B is 1.
        """

    @abstractmethod
    def new_cache(self, batch: int, context: int, *, dtype: torch.dtype, device: torch.device | str) -> MixerCache:
        """An empty cache of ``batch`` rows with room for ``context`` tokens each."""

    @abstractmethod
    def flops_per_token(self, context: int) -> float:
        """Model FLOPs of this layer's forward, per token, averaged over a document of ``context`` tokens."""

    @abstractmethod
    def state_bytes(self, context: int) -> int:
        """What decoding keeps per sequence after ``context`` tokens: bf16 keys, values and tails, fp32 states."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        own = {**self._parameters, **self._buffers}
        kept = {id(own[name]) for name in self.FLOAT32 if own.get(name) is not None}

        def careful(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if id(tensor) in kept and moved.dtype in (torch.bfloat16, torch.float16):
                return tensor.to(device=moved.device)
            return moved

        return super()._apply(careful, recurse)


# ------------------------------------------------------------------------------------------------------------ registry
class PluginError(ImportError):
    """A mixer of another package that cannot be loaded."""


Spec = TypeVar("Spec", bound=type[MixerSpec])

_SPECS: dict[str, type[MixerSpec]] = {}
_PLUGINS: dict[str, EntryPoint] = {}  # by name, whether loaded yet or not
_BROKEN: dict[str, str] = {}
_DISCOVERED = False

# Words that YAML turns into something else, so that a pattern made of one would not arrive as text.
_YAML_WORDS = {"NO", "YES", "ON", "OFF", "TRUE", "FALSE", "NULL", "Y", "N"}


def register(name: str) -> Callable[[Spec], Spec]:
    """Enter a spec under ``name``: a letter, then letters and digits; upper case is what canonical patterns show.

    Raises:
        ValueError: a name out of form, one that YAML would retype, or one that is taken.
    """
    if not re.fullmatch(r"[A-Z][A-Z0-9]*", name):
        raise ValueError(
            f"mixer name {name!r}: upper-case letters and digits only, a letter first, so that it needs no quotes"
        )
    if name in _YAML_WORDS:
        raise ValueError(f"mixer name {name!r}: YAML would read it as another type; take another name")

    def enter(spec: Spec) -> Spec:
        if name in _SPECS and _SPECS[name].__qualname__ != spec.__qualname__:
            first = _SPECS[name]
            raise ValueError(
                f"mixer {name} is registered twice: by {first.__module__} and by {spec.__module__}; rename one"
            )
        spec.name = name
        _SPECS[name] = spec
        return spec

    return enter


def registered() -> dict[str, type[MixerSpec]]:
    """All mixers by name, sorted, plug-ins loaded; those that cannot be loaded are left out: see :func:`broken`.

    Imports ``zoo_layers.mixers`` and the plug-ins at the first call, never at import.
    """
    _discover()
    for name in _PLUGINS:
        _load(name)
    return dict(sorted(_SPECS.items()))


def names() -> list[str]:
    """The names of all mixers, sorted, those of plug-ins too; no plug-in is imported for it."""
    _discover()
    return sorted({*_SPECS, *_PLUGINS})


def spec_of(name: str) -> type[MixerSpec]:
    """The spec of one mixer; a plug-in is imported now.

    Raises:
        ValueError: no mixer has that name.
        PluginError: the plug-in of that name cannot be imported, with its reason.
    """
    _discover()
    _load(name)
    if name in _BROKEN:
        raise PluginError(f"mixer {name} cannot be loaded from {_BROKEN[name]}; repair or remove that package")
    if name not in _SPECS:
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ValueError(f"unknown mixer '{name}'{hint}. Known mixers: {' '.join(names())}")
    return _SPECS[name]


def broken() -> dict[str, str]:
    """Plug-in mixers that could not be loaded: name -> the package and why."""
    registered()
    return dict(_BROKEN)


def _plugins() -> Iterator[EntryPoint]:
    yield from entry_points(group=ENTRY_POINTS)


def _discover() -> None:
    """Import our own mixers and note the names of plug-ins, once."""
    global _DISCOVERED
    if _DISCOVERED:
        return
    from zoo_layers import mixers

    for module in pkgutil.iter_modules(mixers.__path__):
        importlib.import_module(f"zoo_layers.mixers.{module.name}")
    for entry in _plugins():
        if entry.name in _SPECS or entry.name in _PLUGINS:
            first = (
                f"package {_source(_PLUGINS[entry.name])}" if entry.name in _PLUGINS else _SPECS[entry.name].__module__
            )
            raise ValueError(
                f"mixer {entry.name} is registered twice: by {first} and by package {_source(entry)}; "
                "uninstall one, or ask its author for another name"
            )
        _PLUGINS[entry.name] = entry
    _DISCOVERED = True


def _load(name: str) -> None:
    """Import the plug-in of that name, if there is one that was not tried yet."""
    if name in _SPECS or name in _BROKEN or name not in _PLUGINS:
        return
    entry = _PLUGINS[name]
    try:
        spec = entry.load()
        if not (isinstance(spec, type) and issubclass(spec, MixerSpec)):
            raise TypeError(f"{entry.value} is no MixerSpec")
        register(name)(spec)
    except Exception as error:  # a plug-in may fail in any way; doctor shows it, and its name raises when it is used
        _BROKEN[name] = f"{_source(entry)} ({type(error).__name__}: {error})"


def _source(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else entry.value
