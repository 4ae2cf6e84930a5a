"""Every op under torch.compile gives the eager numbers, gradients too, and takes upstream gradients in any layout.

Both were learnt on a GPU: torch 2.11 gave zero gradients to a Function whose output an in-place operation had made, and
cuDNN read a gradient by the strides of the output.
"""

import pytest
import torch

from zoo_kernels import backend as backends
from zoo_kernels.accuracy import limit, relative_error
from zoo_kernels.attention import attention, cached_attention
from zoo_kernels.attention.op import checked_call
from zoo_kernels.conv import short_conv
from zoo_kernels.norm import gated_rms_norm, l1_norm, l2_norm, rms_norm
from zoo_kernels.rotary import rotary
from zoo_kernels.scale import scale_rows

ROW = (2, 24, 8)
# name -> (function of tensors, their shapes); a new op adds its line here
OPS = {
    "rotary": (lambda x: rotary(x, torch.arange(24, device=x.device)), [(2, 24, 2, 8)]),
    "rotary, half turned": (lambda x: rotary(x, torch.arange(24, device=x.device), fraction=0.5), [(2, 24, 2, 8)]),
    "conv": (lambda x, w: short_conv(x, w)[0], [ROW, (8, 4)]),
    "conv, bias, silu": (lambda x, w, b: short_conv(x, w, bias=b, activation="silu")[0], [ROW, (8, 4), (8,)]),
    "conv, last state": (lambda x, w: short_conv(x, w)[1], [ROW, (8, 4)]),
    "rms_norm": (lambda x, w: rms_norm(x, w), [ROW, (8,)]),
    "gated_rms_norm": (lambda x, w, z: gated_rms_norm(x, w, z), [ROW, (8,), ROW]),
    "gated_rms_norm, gate first": (lambda x, w, z: gated_rms_norm(x, w, z, gate_first=True), [ROW, (8,), ROW]),
    "l2_norm": (lambda x: l2_norm(x), [ROW]),
    "l1_norm": (lambda x: l1_norm(x), [ROW]),
    "scale_rows": (lambda x, s: scale_rows(x, s), [(2, 24, 2, 8), (2, 24, 2)]),
    "scale_rows, heads, add": (lambda x, s, y: scale_rows(x, s, y), [(2, 24, 2, 8), (2,), (2, 24, 2, 8)]),
    "attention": (lambda q, k, v: attention(q, k, v), [(2, 24, 2, 8)] * 3),
    "attention, window": (lambda q, k, v: attention(q, k, v, window=5), [(2, 24, 2, 8)] * 3),
    "cached attention": (
        lambda q, k, v: cached_attention(
            q,
            k,
            v,
            q_positions=torch.arange(24, device=q.device).expand(2, -1),
            k_positions=torch.arange(24, device=q.device).expand(2, -1),
        ),
        [(2, 24, 2, 8)] * 3,
    ),
}


def results(function, shapes, device):
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]
    y = function(*inputs)
    dy = torch.randn(y.shape, generator=generator).to(device)
    used = [
        i
        for i, g in enumerate(torch.autograd.grad(y, inputs, dy, retain_graph=True, allow_unused=True))
        if g is not None
    ]
    return [y, *torch.autograd.grad(y, [inputs[i] for i in used], dy)]


def agree(name, device, backend):
    function, shapes = OPS[name]
    torch._dynamo.reset()
    for got, expected in zip(
        results(torch.compile(function, backend=backend), shapes, device),
        results(function, shapes, device),
        strict=True,
    ):
        assert relative_error(got, expected) <= limit("dx", torch.float32)


@pytest.mark.parametrize("name", OPS)
def test_a_compiled_op_has_the_eager_gradients(name):
    agree(name, "cpu", "aot_eager")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", OPS)
def test_a_compiled_op_has_the_eager_gradients_on_cuda(name, backend):
    agree(name, "cuda", backend)


def any_layout(device, dtype):
    """Upstream gradients of the same numbers in three layouts, through every backend that serves."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 256, 4, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    dy = torch.randn(2, 256, 4, 64, device=device, dtype=dtype)
    layouts = [
        dy,
        dy.transpose(1, 2).contiguous().transpose(1, 2),
        dy.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    ]
    for window in (None, 48):
        call = checked_call(*inputs, window=window)
        for backend in backends.backends("attention"):
            if backend.serves(call) is not None:
                continue
            y = attention(*inputs, window=window, backend=backend.name)
            first, *others = [torch.autograd.grad(y, inputs, layout, retain_graph=True) for layout in layouts]
            exact = torch.autograd.grad(attention(*inputs, window=window, backend="math"), inputs, dy)
            for got, expected in zip(first, exact):
                assert relative_error(got, expected) <= limit("dq", dtype), (backend.name, window)
            for other in others:
                for got, expected in zip(other, first):
                    assert relative_error(got, expected) <= limit("dq", dtype), (backend.name, window)


def test_an_upstream_gradient_may_have_any_layout():
    any_layout("cpu", torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_an_upstream_gradient_may_have_any_layout_on_cuda(dtype):
    any_layout("cuda", dtype)
