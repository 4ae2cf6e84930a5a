"""How close is close enough: the one table of tolerances that every test and self-check asks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Relative errors, by kind of quantity and by the dtype of the inputs. The truth is float64 on inputs already rounded to
# that dtype. The half-precision column holds for random keys and (beta <= 1 or log_decay <= -0.1).
LIMITS: dict[str, dict[torch.dtype, float]] = {
    # What leaves the forward: rounded once more on the way out.
    "forward": {torch.bfloat16: 5e-3, torch.float16: 5e-3, torch.float32: 1e-5, torch.float64: 1e-10},
    # What a product of the backward returns: two roundings, and sums over more terms.
    "gradient": {torch.bfloat16: 1e-2, torch.float16: 1e-2, torch.float32: 1e-4, torch.float64: 1e-10},
    # Gradients of gates: sums of terms that cancel.
    "gate": {torch.bfloat16: 2e-2, torch.float16: 2e-2, torch.float32: 1e-4, torch.float64: 1e-10},
    # What leaves a whole layer: about ten tensors in a row, each rounded, 1e-3 apiece in bf16 and 1.5e-4 in fp16.
    "layer": {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-5, torch.float64: 1e-10},
}

KINDS = {
    **dict.fromkeys(("y", "last_state", "step"), "forward"),
    **dict.fromkeys(("dq", "dk", "dv", "dx", "dB", "dC", "dD", "dweight", "dbias", "dinitial_state"), "gradient"),
    **dict.fromkeys(("dbeta", "dlog_decay", "ddt", "dA"), "gate"),
    "layer": "layer",
}


def limit(quantity: str, dtype: torch.dtype) -> float:
    """The largest :func:`relative_error` that a quantity may show.

    Args:
        quantity: a name of ``KINDS``: "y", "last_state", "step" (decoding against the whole), "dq", "dk", "dv", "dx",
            "dB", "dC", "dD", "dweight", "dbias", "dinitial_state", "dbeta", "dlog_decay", "ddt", "dA", "layer" (the
            output of a whole mixer).
        dtype: the dtype of the inputs.

    Raises:
        ValueError: a quantity or a dtype that the table does not hold.
    """
    if quantity not in KINDS:
        raise ValueError(f"accuracy: no limit is kept for {quantity!r}; there are {', '.join(KINDS)}")
    row = LIMITS[KINDS[quantity]]
    if dtype not in row:
        raise ValueError(f"accuracy: no limit is kept for {dtype}; there are {', '.join(map(str, row))}")
    return row[dtype]


def relative_error(got: Tensor, expected: Tensor) -> float:
    """rms(got - expected) / rms(expected), in float64.

    Never NaN: where a tensor holds a NaN, or an infinity that the other does not match, the error is infinite. A
    reference of zeros asks for zeros: the error is 0 if ``got`` is zero too, and infinite otherwise. Two empty tensors
    agree.

    Raises:
        ValueError: different shapes, which would broadcast.
    """
    if got.shape != expected.shape:
        raise ValueError(
            f"accuracy: {list(got.shape)} cannot be compared with {list(expected.shape)}; give both one shape"
        )
    got, expected = (tensor.detach().to("cpu", torch.float64) for tensor in (got, expected))
    difference = torch.where(got == expected, 0.0, got - expected)  # equal infinities agree
    size = torch.where(expected.isinf(), 0.0, expected).norm().item()
    wrong = difference.norm().item()
    if wrong == 0.0:
        return 0.0
    error = wrong / size if size else math.inf
    return error if math.isfinite(error) else math.inf
