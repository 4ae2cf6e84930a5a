"""What a model is, layer by layer, before one number of it exists: options, parameters, FLOPs, decode state.

Built on the meta device, so nothing is allocated; Lightning is not imported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch

from zoo.architecture import Architecture
from zoo.errors import UserError
from zoo.model import HybridLM
from zoo.pattern import quoted
from zoo_layers.block import Block
from zoo_layers.mixer import MixerSpec, TokenMixer

# Smallest widths of the table's columns; longer contents widen them.
_WIDTHS = (7, 7, 43, 11, 12, 14, 22)
_GAPS = (2, 1, 2, 0, 1, 2, 3)
# An option that is worth a word only where it differs from the other.
_SAID_IF_OTHER_THAN = {"value_heads": "heads"}
# A run of equal layers longer than this is one line of the table.
_RUN = 4


@dataclass(frozen=True)
class Row:
    """One layer.

    Attributes:
        number: from 1.
        mixer: its name.
        options: every option, resolved.
        shown: the options as the table shows them: sizes, and what differs from the default.
        mlp: ``"swiglu 2816"``, ``"none"``.
        parameters: of mixer, MLP and norms.
        flops: model FLOPs of the forward, per token, mean over a sequence of the context.
        state: bytes that decoding keeps per sequence: ``memory``, ``convolution`` and ``attention`` add up to it.
    """

    number: int
    mixer: str
    options: dict[str, Any]
    shown: str
    mlp: str
    parameters: int
    flops: float
    state: int
    memory: int
    convolution: int
    attention: int

    @property
    def like(self) -> tuple[str, str, str]:
        """What makes two layers the same."""
        return self.mixer, repr(sorted(self.options.items())), self.mlp


@dataclass(frozen=True)
class Table:
    """A model, layer by layer.

    Attributes:
        pattern: as the user wrote it. canonical: the shortest text for the same layers.
        d_model, vocab_size, tie, context: what the numbers hold for.
        rows: one a layer.
        outside_parameters, outside_flops: final norm, embedding and head.
        parameters, flops, state: totals; ``inner_parameters`` and ``inner_flops`` are without embedding and head.
    """

    pattern: str
    canonical: str
    d_model: int
    vocab_size: int
    tie: bool
    context: int
    rows: tuple[Row, ...]
    outside_parameters: int
    outside_flops: float
    parameters: int
    inner_parameters: int
    flops: float
    inner_flops: float
    state: int

    def to_plain(self) -> dict[str, Any]:
        """The same in types that JSON holds."""
        plain = asdict(self)
        plain["layers"] = [{k: v for k, v in row.items() if k != "shown"} for row in plain.pop("rows")]
        return plain


def explain(architecture: Architecture, *, context: int) -> Table:
    """Count a model on the meta device.

    Args:
        architecture: from :func:`zoo.architecture.settle`.
        context: tokens of a sequence, at least 1: FLOPs are its mean, the state is what decoding keeps after it.

    Raises:
        SpecError: a mixer that does not fit the width.
        UserError: a context below 1.
    """
    if context < 1:
        raise UserError(f"context must be at least 1, got {context}")
    model = architecture.build("meta")
    blocks = cast("Iterable[Block]", model.blocks)
    rows = tuple(
        _row(number, layer.mixer, block, f"{layer.mlp} {architecture.d_ff}" if layer.mlp != "none" else "none", context)
        for number, (layer, block) in enumerate(zip(architecture.layers, blocks), 1)
    )
    counts = model.parameter_counts()
    inner = sum(row.flops for row in rows)
    outside = model.flops_per_token(context) - inner
    return Table(
        pattern=_written(architecture),
        canonical=architecture.canonical,
        d_model=architecture.d_model,
        vocab_size=architecture.vocab_size,
        tie=architecture.tie,
        context=context,
        rows=rows,
        outside_parameters=_outside_parameters(model),
        outside_flops=outside,
        parameters=counts.total,
        inner_parameters=counts.non_embedding,
        flops=inner + outside,
        inner_flops=inner,
        state=model.state_bytes(context),
    )


def _written(architecture: Architecture) -> str:
    given = architecture.pattern
    return given if isinstance(given, str) else architecture.canonical


def _outside_parameters(model: HybridLM) -> int:
    inside = {id(p) for p in model.blocks.parameters()}
    return sum(p.numel() for p in model.parameters() if id(p) not in inside)


def _row(number: int, mixer: str, block: Block, mlp: str, context: int) -> Row:
    module: TokenMixer = block.mixer
    parts = _state_parts(module, context)
    return Row(
        number,
        mixer,
        module.spec.all_options(),
        _shown(module.spec),
        mlp,
        sum(p.numel() for p in block.parameters()),
        block.flops_per_token(context),
        module.state_bytes(context),
        *parts,
    )


def _state_parts(module: TokenMixer, context: int) -> tuple[int, int, int]:
    """Bytes of memory, convolution tail and attention cache of one sequence."""
    cache = module.new_cache(1, context, dtype=torch.bfloat16, device="meta")
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in cache.tensors.items()}
    memory, tail = sizes.get("state", 0), sizes.get("conv", 0)
    return memory, tail, sum(sizes.values()) - memory - tail


def _shown(spec: MixerSpec) -> str:
    """Sizes always, everything else where it differs from the default."""
    known, values, given = spec.options(), spec.all_options(), spec.to_options()
    words = []
    for name, value in values.items():
        if name in _SAID_IF_OTHER_THAN and value == values.get(_SAID_IF_OTHER_THAN[name]):
            continue
        if known[name].kind is int or name in given:
            words.append(f"{name}={known[name].write(value)}")
    return " ".join(words)


# -------------------------------------------------------------------------------------------------------------- as text
def render(table: Table, *, full: bool = False) -> str:
    """The table as text; equal layers are named once.

    Args:
        table: from :func:`explain`.
        full: every layer with all its numbers, and the state in its three parts.
    """
    state = "decode state = memory + convolution + attention cache, bytes" if full else "decode state, bytes"
    lines = [("layer", "mixer", "options (resolved)", "MLP", "parameters", "FLOPs/token", state)]
    lines += _every_row(table) if full else _grouped_rows(table)
    widths = [max(least, *(len(line[i]) + _GAPS[i] for line in lines)) for i, least in enumerate(_WIDTHS)]
    outside = f"final norm, embedding and head ({'tied' if table.tie else 'untied'})"
    sums = [
        (outside, table.outside_parameters, table.outside_flops, None),
        ("total", table.parameters, table.flops, table.state),
        ("without embedding and head", table.inner_parameters, table.inner_flops, None),
    ]
    widths[4] = max(widths[4], *(len(_number(count)) + 1 for _, count, _, _ in sums))
    text = [_head(table)]
    text += [
        "".join(_cell(word, width, i) for i, (word, width) in enumerate(zip(line, widths))).rstrip() for line in lines
    ]
    for label, count, flops, state in sums:
        numbers = (_number(count), _number(flops), "" if state is None else _number(state))
        row = label.ljust(sum(widths[:4])) + "".join(word.rjust(width) for word, width in zip(numbers, widths[4:]))
        text.append(row.rstrip())
    if full:
        parts = {
            "memory": sum(row.memory for row in table.rows),
            "convolution": sum(row.convolution for row in table.rows),
            "attention cache": sum(row.attention for row in table.rows),
        }
        text.append("state      " + "    ".join(f"{name} {_number(size)}" for name, size in parts.items()))
    text.append(
        f"FLOPs: forward, per token, mean over a sequence of {table.context:,} tokens; training is three times that. "
        "State: bf16 keys and values, fp32 memory."
    )
    return "\n".join(text)


def _head(table: Table) -> str:
    mixers = ", ".join(f"{count} {name}" for name, count in Counter(row.mixer for row in table.rows).items())
    depth = f"{len(table.rows)} layer{'s' if len(table.rows) > 1 else ''}"
    tied = "tied" if table.tie else "untied"
    return "    ".join(
        (
            f"pattern    {quoted(table.pattern)}",
            f"canonical {table.canonical}",
            depth,
            f"d_model {table.d_model}",
            f"vocabulary {table.vocab_size:,}, {tied}",
            f"mixers {mixers}",
        )
    )


def _cell(word: str, width: int, column: int) -> str:
    return word.ljust(width) if column < 4 else word.rjust(width)


def _number(value: float) -> str:
    """With thousands separated; a fraction only where there is one."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"


Line = tuple[str, str, str, str, str, str, str]


def _line(layer: str, mixer: str, options: str, mlp: str, rows: tuple[Row, ...]) -> Line:
    sums = (sum(r.parameters for r in rows), sum(r.flops for r in rows), sum(r.state for r in rows))
    counts, flops, state = map(_number, sums)
    return layer, mixer, options, mlp, counts, flops, state


def _every_row(table: Table) -> list[Line]:
    lines = []
    for row in table.rows:
        split = f" = {_number(row.memory)} + {_number(row.convolution)} + {_number(row.attention)}"
        line = _line(str(row.number), row.mixer, row.shown, row.mlp, (row,))
        lines.append((*line[:-1], line[-1] + split))
    return lines


def _grouped_rows(table: Table) -> list[Line]:
    """The first cycle, equal layers as the first of their kind, then all further cycles as one line."""
    rows = table.rows
    count = len(rows)
    likes = [row.like for row in rows]
    period = next(
        p for p in range(1, count + 1) if count % p == 0 and all(likes[i] == likes[i - p] for i in range(p, count))
    )
    first: dict[tuple[str, str, str], int] = {}
    lines: list[Line] = []
    at = 0
    while at < period:
        row = rows[at]
        run = next((i for i in range(at, period) if likes[i] != likes[at]), period) - at
        seen = first.setdefault(likes[at], row.number)
        if seen == row.number or run <= _RUN:
            run = 1
        options = row.shown if seen == row.number else f"as {seen}"
        layer = str(row.number) if run == 1 else f"{row.number}-{row.number + run - 1}"
        lines.append(_line(layer, row.mixer, options, row.mlp, rows[at : at + run]))
        at += run
    if period < count:
        cycle = "1" if period == 1 else f"1-{period}"
        layer = f"{period + 1}-{count}" if period + 1 < count else str(count)
        lines.append(_line(layer, f"as {cycle}", "", "", rows[period:]))
    return lines
