"""The tolerance table: what it lets pass, and what it never does."""

import math

import pytest
import torch

from zoo_kernels.accuracy import KINDS, LIMITS, limit, relative_error


def test_the_error_is_the_rms_of_the_difference_over_the_rms_of_the_truth():
    truth = torch.tensor([3.0, -4.0, 0.0])
    assert relative_error(truth + torch.tensor([0.0, 0.0, 0.5]), truth) == pytest.approx(0.1)
    assert relative_error(truth, truth) == 0.0


def test_the_error_is_computed_in_float64():
    truth = torch.full((1000,), 1e30)
    assert relative_error(truth * 2, truth) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("got", "expected"),
    [([1.0, math.nan], [1.0, 2.0]), ([1.0, 2.0], [1.0, math.nan]), ([math.nan], [math.nan]), ([math.inf], [1.0])],
    ids=["NaN got", "NaN expected", "NaN both", "infinity got"],
)
def test_what_is_not_finite_never_passes(got, expected):
    assert relative_error(torch.tensor(got), torch.tensor(expected)) == math.inf


def test_a_reference_of_zeros_asks_for_zeros():
    zeros = torch.zeros(3)
    assert relative_error(zeros, zeros) == 0.0
    assert relative_error(zeros + 1e-30, zeros) == math.inf


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match=r"accuracy: \[3\] cannot be compared with \[1, 3\]"):
        relative_error(torch.zeros(3), torch.zeros(1, 3))


@pytest.mark.parametrize("quantity", KINDS)
def test_every_quantity_has_a_limit_in_every_dtype_and_wider_dtypes_are_not_looser(quantity):
    row = [limit(quantity, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)]
    assert row == sorted(row, reverse=True)
    assert 0 < row[-1] <= 1e-10
    assert row[0] <= 2e-2
    assert set(LIMITS) == set(KINDS.values())


def test_unknown_quantities_and_dtypes_are_named():
    with pytest.raises(ValueError, match=r"no limit is kept for 'dz'; there are y, last_state"):
        limit("dz", torch.float32)
    with pytest.raises(ValueError, match=r"no limit is kept for torch.int64"):
        limit("y", torch.int64)
