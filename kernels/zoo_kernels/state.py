"""First states that a recurrent op is given: what they must be."""

from __future__ import annotations

import torch
from torch import Tensor


def check_state(
    op: str, state: Tensor | None, shape: tuple[int, ...], why: str, dtype: torch.dtype, beside: tuple[str, Tensor]
) -> None:
    """Shape, dtype and device of an ``initial_state``; None passes.

    Args:
        op: whose it is.
        shape: what it must have.
        why: the sizes that ask for it, in words that end with the letters of the shape.
        dtype: in which the op keeps states.
        beside: name and value of the input whose dtype and device decide.

    Raises:
        ValueError: what disagrees, with the cure.
    """
    if state is None:
        return
    name, other = beside
    if tuple(state.shape) != shape:
        raise ValueError(f"{op}: initial_state is {list(state.shape)}, but {why} = {list(shape)}")
    if state.dtype != dtype:
        raise ValueError(
            f"{op}: initial_state is {state.dtype}, but states are kept in {dtype} where {name} is {other.dtype}; cast "
            "it"
        )
    if state.device != other.device:
        raise ValueError(
            f"{op}: initial_state is on {state.device}, but {name} is on {other.device}; move them to one device"
        )
