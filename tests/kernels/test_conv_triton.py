"""short_conv() on Triton, where test_conv.py does not look: long walks, every launch, views, stray memory, compilers.

On a GPU the same cases are larger and in bf16.
"""

from itertools import pairwise

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from zoo_kernels import device
from zoo_kernels.accuracy import limit, relative_error
from zoo_kernels.conv import short_conv
from zoo_kernels.launch import TABLES, force
from zoo_kernels.packing import Packing

if device.missing(torch.device("cuda" if torch.cuda.is_available() else "cpu")) is not None:
    pytest.skip("Triton kernels cannot run here", allow_module_level=True)

from zoo_kernels import conv_triton

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not device.INTERPRETED, reason="Triton compiles for the GPU")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
KERNELS = ("short_conv_forward", "short_conv_backward")


def case(where, *, width=4, channels=20, tokens=45, batch=2, ends=None, state=True, bias=True, seed=0):
    """Tensors by name, and the packing; on a GPU, more tokens and channels, in bf16."""
    draw = torch.Generator().manual_seed(seed)
    dtype = torch.float32
    if where == "cuda":
        dtype, channels, tokens = torch.bfloat16, 16 * channels + channels % 2, 20 * tokens
        ends = ends and [20 * end for end in ends]
    packing = None if ends is None else Packing.from_offsets(ends).to(where)
    if packing is not None:
        batch, tokens = 1, packing.tokens
    sequences = batch if packing is None else packing.documents
    shapes = {"x": (batch, tokens, channels), "weight": (channels, width)}
    if bias:
        shapes["bias"] = (channels,)
    if state:
        shapes["initial_state"] = (sequences, width - 1, channels)
    tensors = {name: torch.randn(shape, generator=draw).to(where, dtype) for name, shape in shapes.items()}
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}, packing


def results(tensors, packing, upstream, backend="triton"):
    """Outputs, then the gradients, by name."""
    y, last = short_conv(**tensors, packing=packing, activation="silu", backend=backend)
    dy, dlast = (grad.to(y.device, y.dtype) for grad in upstream)
    gradients = torch.autograd.grad((y, last), list(tensors.values()), (dy, dlast))
    return {"y": y, "last_state": last, **{f"d{name}": gradient for name, gradient in zip(tensors, gradients)}}


def upstream_of(tensors, packing):
    """Random gradients of y and of the last state."""
    (batch, _, channels), width = tensors["x"].shape, tensors["weight"].shape[1]
    sequences = batch if packing is None else packing.documents
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=draw) for shape in (tensors["x"].shape, (sequences, width - 1, channels))]


def check(tensors, packing):
    """Triton against the torch backend in float64, which test_conv.py holds against a loop over tokens."""
    upstream, dtype = upstream_of(tensors, packing), tensors["x"].dtype
    upstream = [grad.to(dtype) for grad in upstream]
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}
    got, expected = results(tensors, packing, upstream), results(exact, packing, upstream, "torch")
    for name, tensor in got.items():
        assert tensor.dtype == dtype
        assert tensor.shape == expected[name].shape
        assert relative_error(tensor, expected[name]) < limit(name, dtype), name


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("ends", [None, [0, 1, 2, 3, 3, 30, 45, 45], [0, 45]], ids=str)
@pytest.mark.parametrize("programs", ["few", "many"])
def test_long_walks_and_short_ones_give_the_truth(where, ends, programs, monkeypatch):
    if programs == "few":
        monkeypatch.setattr(conv_triton, "WARPS_PER_PROCESSOR", 0)
        monkeypatch.setattr(conv_triton, "MOST_TOKENS", dict.fromkeys(KERNELS, 24))
    check(*case(where, ends=ends))


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_launch_of_the_table_gives_the_truth(where, kernel):
    for row in TABLES[kernel]:
        with force(**{kernel: row.launch}):
            check(*case(where, width=6 if row.when.get("width") == "over 4" else 3, tokens=11, batch=1))


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("channels", [1, 7, 8, 300])
def test_any_number_of_channels_is_served(where, channels):
    check(*case(where, channels=channels, tokens=9))


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_few_tokens_hand_the_state_on(where, tokens):
    for ends in (None, [0, 0, tokens, tokens]):
        tensors, packing = case(where, tokens=tokens, ends=ends)
        if tokens == 0:
            y, last = short_conv(**tensors, packing=packing, backend="triton")
            assert y.shape == tensors["x"].shape
            assert torch.equal(last, tensors["initial_state"])
            dlast = torch.randn_like(last)
            gradients = torch.autograd.grad(last, list(tensors.values()), dlast)
            assert torch.equal(gradients[-1], dlast)
            assert not any(gradient.any() for gradient in gradients[:-1])
        else:
            check(tensors, packing)


@pytest.mark.parametrize("where", DEVICES)
def test_a_view_with_dense_channels_is_read_where_it_lies(where, monkeypatch):
    tensors, packing = case(where, tokens=13)
    upstream = upstream_of(tensors, packing)
    whole = results(tensors, packing, upstream)
    x = tensors["x"].detach()
    wide = torch.full((x.shape[0], x.shape[1] + 3, 2 * x.shape[2] + 8), torch.nan, device=x.device, dtype=x.dtype)
    view = wide[:, 2:-1, 8 : 8 + x.shape[2]].copy_(x).requires_grad_()
    assert conv_triton._by_rows(view)[0] is view
    assert conv_triton._by_rows(view[:, :1])[0].data_ptr() == view.data_ptr()
    sliced = results({**tensors, "x": view}, packing, upstream)
    for name, tensor in whole.items():
        assert torch.equal(sliced[name], tensor), name


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("ends", [None, [0, 5, 5, 17]])
def test_results_are_bit_equal_every_time_and_no_stray_memory_is_read(where, ends, monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    tensors, packing = case(where, ends=ends, tokens=17, batch=1)
    upstream = upstream_of(tensors, packing)
    # Each input stands between numbers that would show in any sum.
    surrounded = {}
    for name, tensor in tensors.items():
        padded = torch.full((tensor.numel() + 512,), 3e38 if where == "cpu" else 1e38, device=where, dtype=tensor.dtype)
        surrounded[name] = padded[256:-256].view(tensor.shape).copy_(tensor.detach()).requires_grad_()
    first = results(tensors, packing, upstream)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives with NaN
    try:
        for _ in range(1 if where == "cpu" else 100):
            again = results(surrounded, packing, upstream)
            for name, tensor in first.items():
                assert torch.equal(again[name], tensor), name
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("unused", ["y", "last_state"])
def test_an_output_that_nobody_uses_costs_nothing(where, unused):
    tensors, packing = case(where, tokens=6)
    y, last = short_conv(**tensors, packing=packing, backend="triton")
    used = last if unused == "y" else y
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}
    outputs = short_conv(**exact, packing=packing, backend="torch")
    expected = outputs[1] if unused == "y" else outputs[0]
    dy = torch.randn_like(used)
    for name, got, want in zip(
        tensors,
        torch.autograd.grad(used, list(tensors.values()), dy),
        torch.autograd.grad(expected, list(exact.values()), dy.double(), materialize_grads=True),
    ):
        assert relative_error(got, want) < limit(f"d{name}", used.dtype), name


@pytest.mark.parametrize("where", DEVICES)
def test_compiled_checkpointed_and_under_autocast_it_is_the_same_op(where):
    tensors, packing = case(where, ends=[0, 3, 3, 10])
    assert packing is not None
    upstream = upstream_of(tensors, packing)
    first = results(tensors, packing, upstream)
    torch._dynamo.reset()

    def op(*arguments):
        return short_conv(**dict(zip(tensors, arguments)), packing=packing, activation="silu", backend="triton")

    ways = {
        "compiled": torch.compile(op, fullgraph=True, backend="aot_eager"),
        "checkpointed": lambda *arguments: checkpoint(op, *arguments, use_reentrant=False),
        "autocast": torch.autocast(where, dtype=torch.bfloat16)(op),
    }
    for way, function in ways.items():
        y, last = function(*tensors.values())
        gradients = torch.autograd.grad(
            (y, last), list(tensors.values()), [grad.to(where, y.dtype) for grad in upstream]
        )
        for (name, expected), got in zip(first.items(), (y, last, *gradients)):
            assert torch.equal(got, expected), f"{way}, {name}"


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize(("activation", "passes"), [(None, 2), ("silu", 3)])
def test_taps_are_counted_forward_and_backward(where, activation, passes):
    tensors, packing = case(where, tokens=5)
    each = 2 * tensors["weight"].numel() * tensors["x"].shape[0] * tensors["x"].shape[1]
    with FlopCounterMode(display=False) as counter:
        y, _ = short_conv(**tensors, packing=packing, activation=activation, backend="triton")
        assert counter.get_total_flops() == each
        y.float().sum().backward()
    assert counter.get_total_flops() == (1 + passes) * each


@pytest.mark.parametrize("where", DEVICES)
def test_what_torch_must_know_of_an_op_holds(where):
    tensors, packing = case(where, ends=[0, 3, 3, 10])
    assert packing is not None
    arguments = (*tensors.values(), packing.document_ids, packing.cu_seqlens, True)
    torch.library.opcheck(torch.ops.zoo_kernels.short_conv.default, arguments, atol=1e-2, rtol=1e-2)


def test_what_it_cannot_serve_has_a_reason():
    x = torch.zeros(1, 3, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"'triton' cannot serve.*(the input is torch\.float64|needs a GPU)"):
        short_conv(x, torch.zeros(2, 4), backend="triton")


@pytest.mark.gpu
def test_new_lengths_and_batches_compile_nothing():
    def run(batch, tokens, ends=None):
        tensors, packing = case("cuda", batch=batch, tokens=tokens, ends=ends)
        results(tensors, packing, upstream_of(tensors, packing))

    def compiled():
        kernels = (conv_triton._forward_kernel, conv_triton._backward_kernel)
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    run(1, 16)
    run(1, 16, [0, 16])
    before = compiled()
    for batch, tokens in ((1, 1), (2, 1), (3, 17), (8, 256), (64, 2)):
        run(batch, tokens)
    for ends in pairwise([0, 1, 7, 64]):
        run(1, ends[1], [0, *ends])
    assert compiled() == before
