"""How many heads, and how large, where the settings leave it open; and the refusals when sizes do not fit."""

from __future__ import annotations

from zoo_layers.mixer import SpecError

HEAD_DIM = 128  # the head size that open settings come closest to
MAX_KEY, MAX_VALUE = 256, 512  # what delta_rule takes


def largest_divisor(number: int, up_to: int, *, even: bool = False) -> int | None:
    """The largest (even) divisor of ``number`` that is at most ``up_to``; None: there is none."""
    fitting = [n for n in range(1, min(number, up_to) + 1) if number % n == 0 and not (even and n % 2)]
    return fitting[-1] if fitting else None


def open_head_dim(d_model: int, *, even: bool = False) -> int:
    """The head size when none is given: the largest divisor of ``d_model`` up to 128 and up to half of it."""
    return largest_divisor(d_model, min(HEAD_DIM, max(1, d_model // 2)), even=even) or max(1, d_model // 2)


def settle_heads(heads: int | None, head_dim: int | None, d_model: int, *, even: bool = False) -> tuple[int, int]:
    """(heads, head_dim) of a mixer whose heads together are as wide as the model, unless both are given.

    Args:
        heads, head_dim: as given; None: open.
        d_model: the model's width.
        even: an open head_dim should be even, for rotary positions.

    Raises:
        SpecError: heads that do not divide the width.
    """
    if heads is None:
        size = head_dim or open_head_dim(d_model, even=even)
        return max(1, d_model // size), size
    if head_dim is not None:
        return heads, head_dim
    if d_model % heads:
        raise SpecError(
            "heads",
            "value",
            f"heads must divide d_model, but {heads} do not divide {d_model}",
            f"Take heads={largest_divisor(d_model, heads)}, or say how large they are with head_dim.",
        )
    return heads, d_model // heads


def check_multiple(name: str, value: int, of: str, unit: int) -> None:
    """Refuse ``value`` of option ``name`` unless it is a multiple of ``unit``, the value of option ``of``."""
    if value % unit:
        raise SpecError(
            name,
            "value",
            f"{name} must be a multiple of {of}, but {value} is no multiple of {unit}",
            f"Take {name}={unit * max(1, round(value / unit))}.",
        )


def check_divides(name: str, value: int, of: str, number: int) -> None:
    """Refuse ``value`` of option ``name`` unless it divides ``number``, which is ``of`` in words."""
    if number % value:
        raise SpecError(
            name,
            "value",
            f"{name} must divide {of}, but {value} does not divide {number}",
            f"Take {name}={largest_divisor(number, value)}.",
        )


def check_memory(key: str, key_size: int, value: str, value_size: int) -> None:
    """Refuse a memory [K, V] larger than the kernels take; ``key`` and ``value`` name the options at fault."""
    for name, what, size, limit in ((key, "key", key_size, MAX_KEY), (value, "value", value_size, MAX_VALUE)):
        if size > limit:
            raise SpecError(
                name,
                "value",
                f"a {what} head may have at most {limit} channels, but {size} come out",
                "Take more heads and smaller ones." if name != "state" else f"Take state={limit}.",
            )
