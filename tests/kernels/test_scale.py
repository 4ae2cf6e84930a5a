"""scale_rows on every backend: rows and heads, with and without an addend, views, empty batches, and what it refuses.

On a GPU the Triton cases are in bf16 and have more rows.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from zoo_kernels import backend as table
from zoo_kernels import device
from zoo_kernels.accuracy import limit, relative_error
from zoo_kernels.launch import TABLES, force
from zoo_kernels.scale import ScaleCall, scale_rows

TRITON = device.missing(torch.device("cpu")) is None
# (backend, device)
WHERE = [
    ("torch", "cpu"),
    pytest.param("triton", "cpu", marks=pytest.mark.skipif(not TRITON, reason="Triton compiles for the GPU")),
    pytest.param("torch", "cuda", marks=pytest.mark.gpu),
    pytest.param("triton", "cuda", marks=pytest.mark.gpu),
]
KERNELS = [where for where in WHERE[1:] if where.values[0] == "triton"]
FORMS = {"by row": (False, False), "by head": (True, False), "by row, add": (False, True), "by head, add": (True, True)}


def draw(form, where, *shape):
    """x, scale and, of a form that has one, add; on a GPU, in bf16 with forty times the tokens."""
    by_head, adds = FORMS[form]
    generator, dtype = torch.Generator().manual_seed(0), torch.float32
    if where == "cuda":
        dtype, shape = torch.bfloat16, (shape[0], 40 * shape[1], *shape[2:])
    x, add = torch.randn(2, *shape, generator=generator).to(where, dtype)
    scale = torch.randn(shape[2:3] if by_head else shape[:3], generator=generator).to(where)
    return [x, scale, add] if adds else [x, scale]


def results(inputs, backend):
    """y and every gradient."""
    inputs = [tensor.requires_grad_() for tensor in inputs]
    y = scale_rows(*inputs, backend=backend)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(y.device, y.dtype)
    return [y, *torch.autograd.grad(y, inputs, dy)]


@pytest.mark.parametrize(("backend", "where"), WHERE)
@pytest.mark.parametrize("size", [1, 4, 64, 100, 128, 513])
@pytest.mark.parametrize("form", FORMS)
def test_output_and_each_gradient_are_the_truth(backend, where, form, size):
    inputs = draw(form, where, 2, 9, 3, size)
    expected = results([tensor.detach().double() for tensor in inputs], "reference")
    for n, (got, want, like) in enumerate(
        zip(results(inputs, backend), expected, [inputs[0], *inputs], strict=True), start=-1
    ):
        assert got.dtype == like.dtype
        assert got.shape == like.shape
        assert relative_error(got, want) < limit("dx" if n >= 0 else "y", inputs[0].dtype), n


@pytest.mark.parametrize(("backend", "where"), WHERE)
@pytest.mark.parametrize("form", FORMS)
def test_slices_and_turned_gradients_are_read_where_they_lie(backend, where, form):
    inputs = draw(form, where, 2, 9, 3, 16)
    wide = torch.full((*inputs[0].shape[:2], 5, 3, 16), torch.nan, device=where, dtype=inputs[0].dtype)
    views = [wide[:, :, 1].copy_(inputs[0]), inputs[1], *(wide[:, :, 3].copy_(add) for add in inputs[2:])]
    tolerance = 0 if backend == "triton" else 1e-6  # PyTorch's own sums are in the order of memory
    for got, want in zip(results(views, backend), results(inputs, backend), strict=True):
        assert relative_error(got, want) <= tolerance
    x, scale, *add = (tensor.detach().requires_grad_() for tensor in inputs)
    y = scale_rows(x, scale, *add, backend=backend)
    dy = torch.randn_like(y)
    turned = dy.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    for got, want in zip(
        torch.autograd.grad(y, (x, scale), turned, retain_graph=True), torch.autograd.grad(y, (x, scale), dy)
    ):
        assert relative_error(got, want) <= tolerance


@pytest.mark.parametrize(("backend", "where"), KERNELS)
@pytest.mark.parametrize("kernel", ["scale_forward", "scale_backward"])
def test_every_launch_of_the_table_gives_the_truth(backend, where, kernel):
    inputs = draw("by row, add", where, 2, 9, 3, 300)
    expected = results([tensor.detach().double() for tensor in inputs], "reference")
    for row in TABLES[kernel]:
        with force(**{kernel: row.launch}):
            for got, want in zip(results(inputs, backend), expected, strict=True):
                assert relative_error(got, want) < limit("dx", inputs[0].dtype)


@pytest.mark.parametrize(("backend", "where"), KERNELS)
@pytest.mark.parametrize("form", FORMS)
def test_results_are_bit_equal_every_time_and_no_stray_memory_is_read(backend, where, form, monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    inputs, surrounded = draw(form, where, 1, 7, 3, 100), []
    for tensor in inputs:  # each input stands between numbers that would show in any sum
        padded = torch.full((tensor.numel() + 512,), 1e18, device=where, dtype=tensor.dtype)
        surrounded.append(padded[256:-256].view(tensor.shape).copy_(tensor))
    first = results(inputs, backend)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives with NaN
    try:
        for _ in range(1 if where == "cpu" else 100):
            for got, want in zip(results([tensor.detach() for tensor in surrounded], backend), first, strict=True):
                assert torch.equal(got, want)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("backend", "where"), WHERE)
@pytest.mark.parametrize("form", FORMS)
def test_compiled_checkpointed_and_under_autocast_it_is_the_same_op(backend, where, form):
    inputs = [tensor.requires_grad_() for tensor in draw(form, where, 1, 3, 2, 16)]
    torch._dynamo.reset()

    def op(*tensors):
        return scale_rows(*tensors, backend=backend)

    ways = {
        "eager": op,
        "compiled": torch.compile(op, fullgraph=True, backend="aot_eager"),
        "checkpointed": lambda *tensors: checkpoint(op, *tensors, use_reentrant=False),
        "autocast": torch.autocast(where, dtype=torch.bfloat16)(op),
    }
    found = {}
    for way, function in ways.items():
        y = function(*inputs)
        found[way] = [y.detach(), *torch.autograd.grad(y.float().square().sum(), inputs)]
        for got, want in zip(found[way], found["eager"], strict=True):
            assert got.dtype == want.dtype
            assert relative_error(got, want) <= (0 if backend == "triton" else 1e-6), way


@pytest.mark.parametrize(("backend", "where"), KERNELS)
@pytest.mark.parametrize("form", FORMS)
def test_what_torch_must_know_of_an_op_holds(backend, where, form):
    x, scale, add = (*(t.requires_grad_() for t in draw(form, where, 1, 3, 2, 16)), None)[:3]
    torch.library.opcheck(torch.ops.zoo_kernels.scale.default, (x, scale, add), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(("backend", "where"), WHERE)
@pytest.mark.parametrize("form", FORMS)
def test_no_rows_give_no_rows_and_numbers_that_learn_nothing(backend, where, form):
    inputs = [tensor.requires_grad_() for tensor in draw(form, where, 0, 5, 3, 16)]
    y = scale_rows(*inputs, backend=backend)
    assert y.shape == inputs[0].shape
    for gradient, tensor in zip(torch.autograd.grad(y, inputs, torch.zeros_like(y)), inputs):
        assert gradient.shape == tensor.shape
        assert not gradient.any()


X = torch.zeros(2, 5, 3, 8)


@pytest.mark.parametrize(
    ("x", "scale", "add", "words"),
    [
        (X[0, 0, 0], X[0, 0, 0, 0], None, r"x must be \[..., H, D\].*got \[8\]"),
        (X.long(), X[..., 0], None, "float dtype.*int64"),
        (X, X[..., 0].long(), None, "of torch.int64"),
        (X, torch.zeros(5), None, r"scale is \[5\].*give \[2, 5, 3\] or \[3\]"),
        (X, torch.zeros(5, 3), None, r"scale is \[5, 3\]"),
        (X, X[..., 0], X[:1], r"add is \[1, 5, 3, 8\]"),
        (X, X[..., 0], X.half(), "float16.*make them alike"),
    ],
)
def test_what_does_not_fit_is_refused_by_rule_and_value(x, scale, add, words):
    with pytest.raises(ValueError, match=words):
        scale_rows(x, scale, add)


def test_the_op_says_who_does_not_serve():
    call = ScaleCall(X.double(), X[..., 0], None)
    reasons = {b.name: b.serves(call) for b in table.backends("scale_rows")}
    assert reasons["torch"] is None
    assert reasons["reference"] is None
    assert reasons["triton"] is not None
