"""The normalisations on Triton, where test_norm.py does not look: sizes, views, long walks, every launch, stray memory.

On a GPU the same cases have more rows and are in bf16.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from zoo_kernels import backend as table
from zoo_kernels import device
from zoo_kernels.accuracy import limit, relative_error
from zoo_kernels.launch import TABLES, force
from zoo_kernels.norm import gated_rms_norm, l2_norm, rms_norm

if device.missing(torch.device("cuda" if torch.cuda.is_available() else "cpu")) is not None:
    pytest.skip("Triton kernels cannot run here", allow_module_level=True)

from zoo_kernels import norm_triton
from zoo_kernels.rows import lay_out

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not device.INTERPRETED, reason="Triton compiles for the GPU")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
# name -> function of x, weight and gate
FORMS = {
    "rms": lambda x, weight, gate: rms_norm(x, weight),
    "rms, no weight": lambda x, weight, gate: rms_norm(x),
    "l2": lambda x, weight, gate: l2_norm(x),
    "gated": lambda x, weight, gate: gated_rms_norm(x, weight, gate),
    "gated, no weight": lambda x, weight, gate: gated_rms_norm(x, None, gate, activation="sigmoid"),
    "gated first": lambda x, weight, gate: gated_rms_norm(x, weight, gate, gate_first=True, activation="sigmoid"),
    "groups": lambda x, weight, gate: gated_rms_norm(x, weight, gate, groups=2),
    "groups, gated first": lambda x, weight, gate: gated_rms_norm(x, weight, gate, groups=4, gate_first=True),
}
OPS = ("rms_norm", "gated_rms_norm", "l2_norm")


def draw(where, *shape, seed=0):
    """x, weight and gate; on a GPU, twenty times the rows and bf16."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float32
    if where == "cuda":
        dtype, shape = torch.bfloat16, (20 * shape[0], *shape[1:])
    return [torch.randn(size, generator=generator).to(where, dtype) for size in (shape, shape[-1:], shape)]


def results(form, inputs, backend="triton"):
    """y and the gradients of those inputs that matter."""
    inputs = [tensor.requires_grad_() for tensor in inputs]
    with table.prefer(dict.fromkeys(OPS, backend)):
        y = FORMS[form](*inputs)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(y.device, y.dtype)
    return [y, *(g for g in torch.autograd.grad(y, inputs, dy, allow_unused=True) if g is not None)]


def check(form, inputs):
    """Triton against the formula in float64."""
    expected = results(form, [tensor.detach().double() for tensor in inputs], "reference")
    for n, (got, want) in enumerate(zip(results(form, inputs), expected, strict=True)):
        assert got.dtype == inputs[0].dtype
        assert relative_error(got, want) < limit("dx" if n else "y", got.dtype), n


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("size", [4, 12, 64, 100, 128, 260, 2048, 8192])
@pytest.mark.parametrize("form", FORMS)
def test_rows_of_any_size_give_the_truth(where, form, size):
    check(form, draw(where, 9, size))


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("form", FORMS)
def test_programs_that_walk_over_many_rows_give_the_truth(where, form, monkeypatch):
    monkeypatch.setattr(norm_triton, "WARPS_PER_PROCESSOR", 0)
    check(form, draw(where, 3, 25, 128))


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("kernel", ["norm_forward", "norm_backward"])
def test_every_launch_of_the_table_gives_the_truth(where, kernel):
    for row in TABLES[kernel]:
        with force(**{kernel: row.launch}):
            check("groups", draw(where, 5, 4096))
            check("rms", draw(where, 70, 128))


def views(x, weight, gate):
    """The same numbers as slices: heads between other channels, [B, T, H, D] of two strides."""
    wide = torch.full((*x.shape[:2], 3 * x.shape[2], x.shape[3]), torch.nan, device=x.device, dtype=x.dtype)
    heads = x.shape[2]
    return [wide[:, :, :heads].copy_(x), weight, wide[:, :, heads : 2 * heads].copy_(gate)]


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("form", FORMS)
def test_slices_are_read_where_they_lie(where, form):
    inputs = draw(where, 2, 5, 3, 32)
    for got, expected in zip(results(form, views(*inputs)), results(form, inputs), strict=True):
        assert torch.equal(got, expected)


def test_two_strides_reach_slices_and_more_are_copied():
    x, _, gate = views(*draw("cpu", 2, 5, 3, 32))
    rows = lay_out(1, x.shape, x.stride(), gate.stride(), x.contiguous().stride())
    assert rows.read(x, gate)[0] is x
    assert rows.read(x, gate)[1] is gate
    assert (rows.count, rows.size, rows.inner, rows.align) == (30, 32, 3, 8)
    assert rows.strides == ((36, 4), (36, 4), (12, 4))
    for view in (x[:, ::2], x.mT):
        assert lay_out(1, view.shape, view.stride()).read(view)[0].is_contiguous()
    assert not lay_out(1, x.shape, x.contiguous().stride()).nested


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("form", FORMS)
def test_results_are_bit_equal_every_time_and_no_stray_memory_is_read(where, form, monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    inputs, surrounded = draw(where, 11, 100), []
    for tensor in inputs:  # each input stands between numbers that would show in any sum
        padded = torch.full((tensor.numel() + 512,), 1e18, device=where, dtype=tensor.dtype)
        surrounded.append(padded[256:-256].view(tensor.shape).copy_(tensor))
    first = results(form, inputs)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives with NaN
    try:
        for _ in range(1 if where == "cpu" else 100):
            for got, expected in zip(results(form, [tensor.detach() for tensor in surrounded]), first, strict=True):
                assert torch.equal(got, expected)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("form", FORMS)
def test_compiled_checkpointed_and_under_autocast_it_is_the_same_op(where, form):
    inputs = [tensor.requires_grad_() for tensor in draw(where, 3, 16)]
    torch._dynamo.reset()
    op = FORMS[form]
    ways = {
        "eager": op,
        "compiled": torch.compile(op, fullgraph=True, backend="aot_eager"),
        "checkpointed": lambda *arguments: checkpoint(op, *arguments, use_reentrant=False),
        "autocast": torch.autocast(where, dtype=torch.bfloat16)(op),
    }
    found = {}
    for way, function in ways.items():
        with table.prefer(dict.fromkeys(OPS, "triton")):
            y = function(*inputs)
            y.float().square().sum().backward()
        found[way] = [y.detach(), *(tensor.grad for tensor in inputs if tensor.grad is not None)]
        for tensor in inputs:
            tensor.grad = None
        for got, expected in zip(found[way], found["eager"], strict=True):
            assert torch.equal(got, expected), way


@pytest.mark.parametrize("where", DEVICES)
def test_what_torch_must_know_of_an_op_holds(where):
    x, weight, gate = (tensor.requires_grad_() for tensor in draw(where, 3, 16))
    for arguments in (
        (x, weight, gate, 1e-5, True, False, False, 2),
        (x, weight, None, 1e-5, True, False, False, 1),
        (x, None, None, 1e-5, False, False, False, 1),
    ):
        torch.library.opcheck(torch.ops.zoo_kernels.norm.default, arguments, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("where", DEVICES)
def test_no_rows_give_no_rows_and_a_weight_that_learns_nothing(where):
    x = torch.zeros(0, 5, 16, device=where, requires_grad=True)
    weight = torch.ones(16, device=where, requires_grad=True)
    y = rms_norm(x, weight, backend="triton")
    dx, dweight = torch.autograd.grad(y, (x, weight), torch.zeros_like(y))
    assert y.shape == dx.shape == x.shape
    assert not dweight.any()


@pytest.mark.skipif(not device.INTERPRETED, reason="these tensors lie on the CPU")
@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: l2_norm(torch.zeros(2, 4, dtype=torch.float64), backend="triton"), "the input is torch.float64"),
        (lambda: l2_norm(torch.zeros(2, 8193), backend="triton"), "rows of up to 8192 numbers, and these have 8193"),
        (lambda: l2_norm(torch.zeros(2, 4).bfloat16(), backend="triton"), "computes bf16 wrongly"),
        (
            lambda: gated_rms_norm(torch.zeros(2, 4), None, torch.zeros(2, 4).double(), backend="triton"),
            "the gate is float64",
        ),
    ],
)
def test_what_it_cannot_serve_has_a_reason(call, reason):
    with pytest.raises(ValueError, match=reason):
        call()


@pytest.mark.gpu
def test_new_numbers_of_rows_compile_nothing():
    def compiled():
        kernels = (norm_triton._forward_kernel, norm_triton._backward_kernel)
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    for form in FORMS:
        results(form, draw("cuda", 2, 128))
        before = compiled()
        for rows in (1, 3, 16, 1000):
            results(form, draw("cuda", rows, 128))
            results(form, draw("cuda", rows, 5, 128))
        assert compiled() == before, form
