"""The normalisations against their formulas in float64."""

import random
from functools import partial

import pytest
import torch

from zoo_kernels import backend as table
from zoo_kernels import norm
from zoo_kernels.accuracy import limit, relative_error
from zoo_kernels.device import missing

ON_CPU = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
CPU = torch.device("cpu")
INTERPRETED = pytest.mark.skipif(missing(CPU) is not None, reason=str(missing(CPU)))
# Kernels are interpreted here, which truncates to bf16.
TRIED = [("torch", dtype) for dtype in ON_CPU]
TRIED += [pytest.param("triton", dtype, marks=INTERPRETED) for dtype in (torch.float32, torch.float16)]
# name -> (fast, reference, takes a weight, takes a gate); a new normalisation adds its line here.
ROWS = {"rms": (norm.rms_norm, norm.rms_norm_reference, True, False)}
ROWS["l2"] = (norm.l2_norm, norm.l2_norm_reference, False, False)
ROWS["l1"] = (norm.l1_norm, norm.l1_norm_reference, False, False)
for activation in norm.ACTIVATIONS:
    for first in (False, True):
        for groups in (1, 3):
            options = {"activation": activation, "gate_first": first, "groups": groups}
            name = f"gated {activation}{' first' if first else ''} {groups}"
            pair = (norm.gated_rms_norm, norm.gated_rms_norm_reference)
            ROWS[name] = (*(partial(function, **options) for function in pair), True, True)


def on(backend):
    """Inside, every normalisation runs on that backend."""
    return table.prefer(dict.fromkeys(("rms_norm", "gated_rms_norm", "l2_norm"), backend))


def test_no_normalisation_is_left_out():
    public = {name for name in vars(norm) if name.endswith("_norm") and not name.startswith("_")}
    tested = {getattr(fast, "func", fast).__name__ for fast, *_ in ROWS.values()}
    assert public == tested, "each normalisation of norm.py needs a row above"


def draw(row, seed, dtype, device="cpu"):
    """x, then the weight and the gate that the row takes; now and then an all-zero row in x."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    size = 3 * rng.choice([1, 2, 7, 64])
    shape = rng.choice([(size,), (5, size), (2, 3, size), (2, 9, 4, size)])
    x = torch.randn(shape) * rng.choice([0.01, 1.0, 30.0])
    if x.dim() > 1 and rng.random() < 0.5:
        x[0] = 0.0
    tensors = [x]
    if row[2]:
        tensors.append(torch.randn(size))
    if row[3]:
        tensors.append(torch.randn(shape) * 3)
    return [tensor.to(device, dtype).requires_grad_() for tensor in tensors]


def check(row, inputs):
    dtype = inputs[0].dtype
    y = row[0](*inputs)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = row[1](*exact)
    assert y.dtype == dtype
    assert relative_error(y, expected) < limit("y", dtype)
    # A row of zeros multiplies by 1 / sqrt(eps) = 1000: small upstream gradients keep the true ones within fp16.
    dy = torch.randn_like(y) * (0.03 if dtype == torch.float16 else 1.0)
    got = torch.autograd.grad(y, inputs, dy)
    for one, other in zip(got, torch.autograd.grad(expected, exact, dy.double())):
        # Rows of zeros have gradients up to 1 / sqrt(eps), beside which all others vanish: judge row by row.
        for a, b in zip(one.reshape(-1, one.shape[-1]), other.reshape(-1, one.shape[-1])):
            if b.abs().max() > 1e-6:
                assert relative_error(a, b) < 3 * limit("dx", dtype)
        assert relative_error(one, other) < limit("dx", dtype)


@pytest.mark.parametrize(("backend", "dtype"), TRIED, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_it_equals_its_formula_in_output_and_each_gradient(name, backend, dtype):
    with on(backend):
        for seed in range(6):
            check(ROWS[name], draw(ROWS[name], seed, dtype))


@pytest.mark.parametrize("name", ROWS)
def test_gradcheck_holds_in_float64(name):
    torch.manual_seed(0)
    fast, _, weighted, gated = ROWS[name]
    shapes = [(2, 3, 6), *([(6,)] if weighted else []), *([(2, 3, 6)] if gated else [])]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(fast, inputs)


@pytest.mark.parametrize(("backend", "dtype"), TRIED[1:], ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_rows_of_zeros_and_rows_that_cancel_stay_finite(name, backend, dtype):
    fast, _, weighted, gated = ROWS[name]
    x = torch.zeros(3, 6, dtype=dtype)
    x[1] = torch.tensor([1.0, -1.0, 2.0, -2.0, 0.5, -0.5])
    x[2] = torch.tensor([1e4, -1e4, 1e4, -1e4, 1e4, -1e4])  # the squares pass the range of float16
    inputs = [x, *([torch.ones(6, dtype=dtype)] if weighted else []), *([torch.ones_like(x)] if gated else [])]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    with on(backend):
        y = fast(*inputs)
    assert y.isfinite().all()
    assert not y[0].any()
    for gradient in torch.autograd.grad(y.sum(), inputs):
        assert gradient.isfinite().all()


def test_rows_come_out_at_their_length():
    torch.manual_seed(0)
    x = torch.randn(4, 50, dtype=torch.float64)
    ones = torch.ones(4, dtype=torch.float64)
    torch.testing.assert_close(norm.l2_norm(x, eps=1e-12).norm(dim=-1), ones)
    torch.testing.assert_close(norm.l1_norm(x, eps=1e-12).abs().sum(-1), ones)
    torch.testing.assert_close(norm.rms_norm(x, eps=1e-12).square().mean(-1).sqrt(), ones)


def test_eps_stands_inside_the_root():
    x = torch.full((1, 4), 1e-3, dtype=torch.float64)
    torch.testing.assert_close(norm.l2_norm(x, eps=1e-6), x / (4e-6 + 1e-6) ** 0.5)
    torch.testing.assert_close(norm.rms_norm(x, eps=1e-6), x / (1e-6 + 1e-6) ** 0.5)


@pytest.mark.parametrize("name", ROWS)
def test_the_dtype_of_x_rules_whatever_weight_and_autocast_say(name):
    fast, _, weighted, gated = ROWS[name]
    torch.manual_seed(0)
    x = torch.randn(3, 6).bfloat16()
    inputs = [x, *([torch.randn(6)] if weighted else []), *([torch.randn(3, 6)] if gated else [])]
    y = fast(*inputs)
    assert y.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fast(*inputs), y)
        inputs[0] = x.float()
        assert fast(*inputs).dtype == torch.float32


@pytest.mark.parametrize("name", ROWS)
def test_strides_of_inputs_and_upstream_gradients_do_not_matter(name):
    row = ROWS[name]
    plain = draw(row, 3, torch.float64)
    results = []
    for strided in (False, True):
        inputs = [t.detach().mT.contiguous().mT if strided and t.dim() > 1 else t.detach() for t in plain]
        inputs = [tensor.requires_grad_() for tensor in inputs]
        y = row[0](*inputs)
        results.append([y, *torch.autograd.grad(y, inputs, torch.ones((), dtype=y.dtype).expand_as(y))])
    for got, wanted in zip(*results):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: norm.rms_norm(x, torch.ones(5)), r"weight is \[5\], but rows of x have 6 numbers: give \[6\]"),
        (lambda x: norm.rms_norm(x, eps=0.0), "eps must be above 0, got 0.0"),
        (lambda x: norm.l2_norm(x, eps=-1.0), "eps must be above 0"),
        (lambda x: norm.l1_norm(x.long()), "x must be of a float dtype, got torch.int64"),
        (lambda x: norm.gated_rms_norm(x, None, x[:1]), r"gate is \[1, 6\], but x is \[3, 6\]"),
        (lambda x: norm.gated_rms_norm(x, None, x, groups=4), "4 groups do not divide 6 channels"),
        (lambda x: norm.gated_rms_norm(x, None, x, groups=0), "0 groups"),
        (lambda x: norm.gated_rms_norm(x, None, x, activation="relu"), "one of silu, sigmoid, got 'relu'"),
    ],
)
def test_what_a_user_can_get_wrong_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(3, 6))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ON_CPU, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_it_equals_its_formula_on_cuda(name, dtype):
    for seed in range(6):
        check(ROWS[name], draw(ROWS[name], seed, dtype, "cuda"))
