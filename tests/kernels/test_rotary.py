"""rotary() against complex multiplication, and what makes it a position embedding."""

import random

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from zoo_kernels import device
from zoo_kernels.accuracy import limit, relative_error
from zoo_kernels.rotary import rotary, rotary_reference

ON_CPU = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


INTERPRETED = pytest.mark.skipif(device.missing(torch.device("cpu")) is not None, reason="Triton compiles for the GPU")
KERNELS = [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)]


def check(seed, dtype, device="cpu", backend=None):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    batch, tokens, heads = rng.choice([1, 3]), rng.randint(1, 40), rng.choice([1, 4])
    size, fraction = rng.choice([(2, 1.0), (6, 1.0), (8, 0.5), (8, 0.25), (64, 1.0), (20, 0.3)])
    x = torch.randn(batch, tokens, heads, size).to(device, dtype).requires_grad_()
    shape = rng.choice([(tokens,), (batch, tokens)])
    positions = torch.randint(0, 60, shape, device=device, dtype=rng.choice([torch.int32, torch.int64]))
    options = {"theta": rng.choice([10000.0, 500000.0, 10.0]), "fraction": fraction}
    y = rotary(x, positions, **options, backend=backend)
    exact = x.detach().double().requires_grad_()
    expected = rotary_reference(exact, positions, **options)
    dy = torch.randn_like(y)
    assert y.dtype == dtype
    assert relative_error(y, expected) < limit("y", dtype)
    (got,), (wanted,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, exact, dy.double())
    assert relative_error(got, wanted) < limit("dx", dtype)


@pytest.mark.parametrize("dtype", ON_CPU, ids=str)
@pytest.mark.parametrize("seed", range(10))
def test_it_equals_complex_multiplication_in_output_and_gradient(seed, dtype):
    check(seed, dtype)


@pytest.mark.parametrize("where", KERNELS)
@pytest.mark.parametrize("seed", range(20))
def test_the_kernel_equals_complex_multiplication_in_output_and_gradient(seed, where):
    for dtype in (torch.float32, torch.float16) if where == "cpu" else (torch.bfloat16, torch.float16, torch.float32):
        check(seed, dtype, where, "triton")


@pytest.mark.parametrize("where", KERNELS)
def test_the_kernel_reads_queries_and_keys_where_they_lie_among_values(where):
    torch.manual_seed(0)
    wide = torch.randn(2, 70, 3 * 4 + 5, 64, device=where)
    qk = wide[:, :, :12].detach().requires_grad_()
    apart = qk.detach().contiguous().requires_grad_()
    at = torch.arange(70, device=where)
    for other in (torch.randn(2, 70, 12, 64, device=where), torch.randn(2, 12, 70, 64, device=where).transpose(1, 2)):
        ys = [rotary(x, at, fraction=0.75, backend="triton") for x in (qk, apart)]
        assert torch.equal(*ys)
        assert torch.equal(torch.autograd.grad(ys[0], qk, other)[0], torch.autograd.grad(ys[1], apart, other)[0])


@pytest.mark.parametrize("where", KERNELS)
def test_the_kernel_is_bit_equal_every_time_compiled_checkpointed_and_under_autocast(where):
    torch.manual_seed(0)
    x, at = torch.randn(2, 33, 3, 32, device=where, requires_grad=True), torch.arange(33, device=where)
    torch._dynamo.reset()

    def op(x):
        return rotary(x, at, backend="triton")

    ways = [op, torch.compile(op, fullgraph=True, backend="aot_eager"), torch.autocast(where, torch.bfloat16)(op)]
    ways.append(lambda x: checkpoint(op, x, use_reentrant=False))
    found = [(y := way(x), *torch.autograd.grad(y.square().sum(), x)) for way in ways * 2]
    assert all(torch.equal(got, want) for one in found for got, want in zip(one, found[0]))


@pytest.mark.parametrize("where", KERNELS)
def test_what_torch_must_know_of_the_op_holds(where):
    x, angle = torch.randn(1, 3, 2, 16, device=where, requires_grad=True), torch.randn(3, 4, device=where)
    torch.library.opcheck(torch.ops.zoo_kernels.rotary.default, (x, angle.cos(), angle.sin(), False))


def test_gradcheck_holds_in_float64():
    torch.manual_seed(0)
    x = torch.randn(2, 5, 2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotary(x, torch.arange(5), fraction=0.5), x)


def test_scores_depend_on_distance_alone():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)
    scores = [
        (rotary(q, torch.tensor([at + 7])) * rotary(k, torch.tensor([at]))).sum().item() for at in (0, 1, 500, 100000)
    ]
    assert scores == pytest.approx([scores[0]] * 4, rel=1e-9)


def test_position_zero_and_the_channels_left_out_stay_as_they_are():
    torch.manual_seed(0)
    x = torch.randn(1, 3, 2, 8)
    assert torch.equal(rotary(x, torch.zeros(3, dtype=torch.long)), x)
    y = rotary(x, torch.arange(3), fraction=0.5)
    assert torch.equal(y[..., 4:], x[..., 4:])
    assert not torch.equal(y[:, 1:, :, :4], x[:, 1:, :, :4])


def test_channel_i_turns_with_channel_i_plus_half():
    x = torch.zeros(1, 1, 1, 8, dtype=torch.float64)
    x[..., 1] = 1.0
    y = rotary(x, torch.tensor([3]), theta=100.0)
    angle = torch.tensor(3 * 100.0 ** (-2 / 8), dtype=torch.float64)
    expected = torch.zeros(8, dtype=torch.float64)
    expected[1], expected[5] = angle.cos(), angle.sin()
    torch.testing.assert_close(y.flatten(), expected)


def test_angles_stay_precise_in_half_precision_and_under_autocast_at_far_positions():
    torch.manual_seed(0)
    x = torch.randn(1, 64, 1, 32).bfloat16()
    positions = torch.arange(30000, 30064)
    expected = rotary_reference(x.double(), positions)
    assert relative_error(rotary(x, positions), expected) < limit("y", torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(rotary(x, positions), rotary(x, positions))
        assert rotary(x.float(), positions).dtype == torch.float32
        assert relative_error(rotary(x.float(), positions), expected) < 2e-3  # fp32 angles of 30000 radians


def test_strides_do_not_matter():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 7, 8, dtype=torch.float64).transpose(1, 2)
    assert torch.equal(rotary(x, torch.arange(7)), rotary(x.contiguous(), torch.arange(7)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(5, 2, 8)}, r"x must be \[B, T, H, D\] of a float dtype, got \[5, 2, 8\]"),
        ({"positions": torch.zeros(5)}, "positions must be integers, got torch.float32"),
        ({"positions": torch.arange(4)}, r"positions are \[4\], .* asks for \[5\] or \[1, 5\]"),
        ({"theta": 0.0}, "theta must be above 0"),
        ({"fraction": 0.0}, "an even number from 2 to 8 is needed"),
        ({"fraction": 1.5}, "an even number from 2 to 8"),
        ({"fraction": 0.4}, r"fraction 0.4 of 8 channels is 3.2, .* fraction 0.5 would turn 4"),
        ({"x": torch.zeros(1, 5, 2, 7)}, "fraction 1.0 of 7 channels is 7"),
    ],
)
def test_what_a_user_can_get_wrong_is_named(change, message):
    arguments = {"x": torch.zeros(1, 5, 2, 8), "positions": torch.arange(5), **change}
    with pytest.raises(ValueError, match=message):
        rotary(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ON_CPU, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_it_equals_complex_multiplication_on_cuda(seed, dtype):
    check(seed, dtype, "cuda")
