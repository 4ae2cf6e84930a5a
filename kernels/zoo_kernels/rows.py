"""Rows of numbers in memory: where tensors of one shape keep them, by two strides at most, so that none is copied."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def places(row, inner, outer_stride, inner_stride, NESTED: tl.constexpr):
    """Where rows start: row // inner steps of one stride and row % inner of the other. [ROWS, 1], 64 bits"""
    if NESTED:
        at = (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    else:
        at = row.to(tl.int64) * inner_stride
    return at[:, None]


@dataclass(frozen=True)
class Rows:
    """Several tensors of one shape as rows, each with two strides: row r starts at r // inner and r % inner of them.

    Attributes:
        reached: of each tensor, whether two strides reach all rows; if not, they are those of a copy.
        strides: (outer, inner) of each, divided by ``align``.
        count, size, inner: rows, numbers in each, and rows that share one outer step.
        nested: whether any tensor needs its outer stride.
    """

    reached: tuple[bool, ...]
    strides: tuple[tuple[int, int], ...]
    count: int
    size: int
    inner: int
    align: int

    @property
    def nested(self) -> bool:
        return self.inner > 1

    def read(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors, copied where they must be."""
        return [x if reached else x.contiguous() for x, reached in zip(tensors, self.reached)]


@lru_cache(maxsize=1024)
def lay_out(groups: int, shape: tuple[int, ...], *strides: tuple[int, ...]) -> Rows:
    """How tensors of one shape lie in memory, each with its strides."""
    *outer, width = shape
    size = width // groups
    if groups > 1:
        outer, strides = [*outer, groups], tuple((*steps[:-1], steps[-1] * size, steps[-1]) for steps in strides)
    count = math.prod(outer)
    levels = [_levels(outer, size, steps) for steps in strides]
    inner = next((level[1][0] for level in levels if level is not None and len(level) == 2), 1)
    reached, pairs = [], []
    for level in levels:
        reached.append(level is not None and not (len(level) == 2 and level[1][0] != inner))
        level = level if level is not None and reached[-1] else [(count, size)]
        stride = level[-1][1]
        pairs.append((level[0][1] if len(level) == 2 else inner * stride, stride))
    align = 1 if any(number % 8 for pair in pairs for number in (*pair, size)) else 8
    pairs = tuple((far // align, near // align) for far, near in pairs)
    return Rows(tuple(reached), pairs, count, size, inner, align)


def _levels(outer: Sequence[int], size: int, strides: tuple[int, ...]) -> list[tuple[int, int]] | None:
    """(rows, stride) of the axes before the last, outermost first, with those merged that one stride walks; at least
    one, at most two. None: there are more, or the last axis is not dense."""
    if strides[-1] != 1 and size > 1:
        return None
    levels: list[tuple[int, int]] = []
    for count, stride in zip(outer, strides):
        if count == 1:
            continue
        if levels and levels[-1][1] == count * stride:
            levels[-1] = (levels[-1][0] * count, stride)
        else:
            levels.append((count, stride))
    return (levels or [(1, size)]) if len(levels) <= 2 else None


def block_of(size: int) -> int:
    """The power of two that holds a row."""
    return 1 << (size - 1).bit_length()
