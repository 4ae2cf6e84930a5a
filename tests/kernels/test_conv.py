"""short_conv(): the shifted multiply-adds against a loop over tokens, with states and packed documents."""

import random
from itertools import pairwise

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.waits import no_waits
from zoo_kernels import backend as table
from zoo_kernels.accuracy import limit, relative_error
from zoo_kernels.conv import MAX_WIDTH, short_conv, short_conv_reference
from zoo_kernels.device import missing
from zoo_kernels.packing import Packing

ON_CPU = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Kernels are interpreted here, which truncates to bf16; the reference is the truth of the others in float64 and fp32.
TRIED = {"torch": ON_CPU, "triton": [torch.float32, torch.float16], "reference": [torch.float64, torch.float32]}
INTERPRETED = [
    pytest.mark.skipif(missing(torch.device("cpu")) is not None, reason=str(missing(torch.device("cpu")))),
    # 2^-x in the sigmoid, which goes to 0 then; a GPU says nothing.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2"),
]
QUANTITIES = {"x": "dx", "weight": "dweight", "bias": "dbias", "initial_state": "dinitial_state"}


@pytest.fixture(params=["torch", pytest.param("triton", marks=INTERPRETED)])
def finest(request, monkeypatch):
    """Inside, that backend runs; the dtype in which it is closest to the truth, and how close."""
    if request.param == "triton":  # in long programs; by themselves, so few tokens would make many short ones
        monkeypatch.setattr("zoo_kernels.conv_triton.WARPS_PER_PROCESSOR", 0)
    with table.prefer({"short_conv": request.param}):
        yield {"torch": (torch.float64, 1e-12), "triton": (torch.float32, 1e-6)}[request.param]


def draw(seed, dtype=torch.float64, device="cpu"):
    """Arguments by name, from a seed: each width, any length, packed or not, with and without each option."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    width, channels, tokens = 1 + seed % MAX_WIDTH, rng.choice([1, 5, 16]), rng.choice([1, 2, 3, rng.randint(1, 40)])
    batch, offsets = rng.choice([1, 3]), None
    if rng.random() < 0.6:
        batch, offsets = 1, sorted([0, tokens, *(rng.randint(0, tokens) for _ in range(rng.randint(0, 5)))])
    sequences = batch if offsets is None else len(offsets) - 1
    shapes = {"x": (batch, tokens, channels), "weight": (channels, width)}
    if rng.random() < 0.5:
        shapes["bias"] = (channels,)
    if rng.random() < 0.6:
        shapes["initial_state"] = (sequences, width - 1, channels)
    tensors = {name: torch.randn(shape).to(device, dtype).requires_grad_() for name, shape in shapes.items()}
    packing = offsets if offsets is None or device == "cpu" else Packing.from_offsets(offsets).to(device)
    return tensors, {"packing": packing, "activation": rng.choice([None, "silu"])}


def check_against_reference(tensors, options, **how):
    """Outputs, last state, and each gradient through both."""
    dtype = tensors["x"].dtype
    y, last = short_conv(**tensors, **options, **how)
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}
    expected = short_conv_reference(**exact, **options)
    assert y.dtype == last.dtype == dtype
    assert relative_error(y, expected[0]) < limit("y", dtype)
    assert relative_error(last, expected[1]) < limit("last_state", dtype)
    upstream = [torch.randn_like(y), torch.randn_like(last)]
    got = torch.autograd.grad((y, last), list(tensors.values()), upstream)
    wanted = torch.autograd.grad(expected, list(exact.values()), [dy.double() for dy in upstream])
    for name, one, other in zip(tensors, got, wanted):
        assert relative_error(one, other) < limit(QUANTITIES[name], dtype), name


@pytest.mark.parametrize("dtype", ON_CPU, ids=str)
@pytest.mark.parametrize("seed", range(24))
def test_it_equals_a_loop_over_tokens_in_outputs_last_state_and_each_gradient(seed, dtype):
    tensors, options = draw(seed, dtype)
    for backend in table.backends("short_conv"):
        served = backend.name != "triton" or missing(torch.device("cpu")) is None
        if served and dtype in TRIED[backend.name]:
            check_against_reference(tensors, options, backend=backend.name)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_every_length_around_the_width_is_right(width, finest):
    torch.manual_seed(0)
    for tokens in range(1, 2 * width + 2):
        tensors = {
            "x": torch.randn(2, tokens, 3, dtype=finest[0], requires_grad=True),
            "weight": torch.randn(3, width, dtype=finest[0], requires_grad=True),
        }
        check_against_reference(tensors, {"activation": "silu"})


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("finest")
def test_any_split_into_calls_equals_the_whole_and_ends_in_the_same_state(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tokens = rng.randint(2, 30)
    x, weight, bias = torch.randn(2, tokens, 5), torch.randn(5, 4), torch.randn(5)
    options = {"bias": bias, "activation": "silu"}
    whole, end = short_conv(x, weight, **options)
    cuts = sorted({0, tokens, *(rng.randint(0, tokens) for _ in range(4))})
    for pieces in ([b - a for a, b in pairwise(cuts)], [1] * tokens):
        state, outputs = None, []
        for part in x.split(pieces, 1):
            y, state = short_conv(part, weight, initial_state=state, **options)
            outputs.append(y)
        assert relative_error(torch.cat(outputs, 1), whole) < limit("step", torch.float32), pieces
        assert torch.equal(state, end)


@pytest.mark.parametrize("with_state", [False, True])
def test_packed_documents_equal_documents_alone(with_state, finest):
    torch.manual_seed(0)
    dtype, close = finest
    lengths = [0, 1, 2, 0, 9, 3, 0]
    offsets = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    x = torch.randn(1, offsets[-1], 4, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, 4, dtype=dtype, requires_grad=True)
    state = torch.randn(len(lengths), 3, 4, dtype=dtype, requires_grad=True) if with_state else None
    alone = [
        short_conv(part, weight, initial_state=None if state is None else state[n : n + 1], activation="silu")
        for n, part in enumerate(x.split(lengths, 1))
    ]
    alone = [torch.cat([y for y, _ in alone], 1), torch.cat([last for _, last in alone])]
    packed = short_conv(x, weight, initial_state=state, packing=offsets, activation="silu")
    inputs, upstream = [t for t in (x, weight, state) if t is not None], [torch.randn_like(t) for t in alone]
    for got, wanted in zip(packed, alone):
        assert relative_error(got, wanted) < close
    for got, wanted in zip(*(torch.autograd.grad(outputs, inputs, upstream) for outputs in (packed, alone))):
        assert relative_error(got, wanted) < close


@pytest.mark.parametrize("poison", [100.0, float("nan")])
@pytest.mark.usefixtures("finest")
def test_changing_one_document_leaves_the_others_bit_equal(poison):
    torch.manual_seed(0)
    offsets, weight = [0, 5, 5, 12, 14], torch.randn(4, 4)
    others = [t for t in range(14) if not 5 <= t < 12]
    results = []
    for value in (None, poison):
        torch.manual_seed(1)
        x, state, dy = torch.randn(1, 14, 4), torch.randn(4, 3, 4), torch.randn(1, 14, 4)
        if value is not None:
            x[:, 5:12], state[2], dy[:, 5:12] = value, value, value
        x.requires_grad_()
        state.requires_grad_()
        y, last = short_conv(x, weight, initial_state=state, packing=offsets, activation="silu")
        dx, dstate = torch.autograd.grad(y, (x, state), dy)
        results.append([y[:, others], dx[:, others], last[[0, 1, 3]], dstate[[0, 1, 3]]])
    for before, after in zip(*results):
        assert torch.equal(before, after)


@pytest.mark.usefixtures("finest")
def test_empty_documents_return_their_initial_state():
    torch.manual_seed(0)
    x, weight, state = torch.randn(1, 4, 3), torch.randn(3, 4), torch.randn(4, 3, 3)
    _, last = short_conv(x, weight, initial_state=state, packing=[0, 0, 4, 4, 4])
    assert torch.equal(last[[0, 2, 3]], state[[0, 2, 3]])
    y, last = short_conv(x[:, :0], weight, initial_state=state[:1])
    assert y.shape == (1, 0, 3)
    assert torch.equal(last, state[:1])


@pytest.mark.usefixtures("finest")
def test_changing_later_tokens_leaves_earlier_outputs_bit_equal():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 20, 3), torch.randn(3, 4)
    later = x.clone()
    later[:, 11:] += 1.0
    assert torch.equal(short_conv(later, weight)[0][:, :11], short_conv(x, weight)[0][:, :11])


@pytest.mark.parametrize("packing", [None, [0, 3, 3, 11]])
def test_gradcheck_holds_in_float64(packing):
    torch.manual_seed(0)
    sequences = 1 if packing is None else 3
    shapes = [(1, 11, 2), (2, 4), (2,), (sequences, 3, 2)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def run(x, weight, bias, state):
        return short_conv(x, weight, bias=bias, initial_state=state, packing=packing, activation="silu")

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("packing", [None, [0, 3, 9]])
def test_strides_of_inputs_and_upstream_gradients_do_not_matter(packing, finest):
    torch.manual_seed(0)
    dtype, close = finest
    x, weight = torch.randn(1, 9, 4, dtype=dtype), torch.randn(4, 3, dtype=dtype)
    strided = x.transpose(1, 2).contiguous().transpose(1, 2), weight.t().contiguous().t()
    results = []
    for inputs in ((x, weight), strided):
        inputs = [tensor.detach().requires_grad_() for tensor in inputs]
        y, _ = short_conv(*inputs, packing=packing, activation="silu")
        results.append([y, *torch.autograd.grad(y, inputs, torch.ones((), dtype=y.dtype).expand_as(y))])
    for got, wanted in zip(*results):
        assert relative_error(got, wanted) < close


def test_weights_may_have_another_dtype_and_autocast_changes_nothing():
    torch.manual_seed(0)
    x, weight = torch.randn(1, 9, 4).bfloat16(), torch.randn(4, 3, requires_grad=True)
    y, last = short_conv(x, weight, activation="silu")
    assert y.dtype == last.dtype == torch.bfloat16
    y.float().sum().backward()
    assert weight.grad.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(short_conv(x.float(), weight)[0], short_conv(x.float(), weight.detach())[0])
        assert short_conv(x.float(), weight)[0].dtype == torch.float32


@pytest.mark.parametrize("packing", [None, [0, 3, 3, 10]])
def test_the_reference_shows_every_product_to_the_flop_counter(packing):
    x, weight = torch.randn(1, 10, 6), torch.randn(6, 4)
    with table.prefer({"short_conv": "reference"}), FlopCounterMode(display=False) as counter:
        short_conv(x, weight, packing=packing)
    assert counter.get_total_flops() == 2 * 4 * 6 * 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(6, 4)}, r"x must be \[B, T, C\] of a float dtype, got \[6, 4\]"),
        ({"x": torch.zeros(2, 6, 4, dtype=torch.long)}, "got .* of torch.int64"),
        ({"weight": torch.zeros(3, 4)}, r"weight is \[3, 4\], but x has 4 channels: give \[4, W\]"),
        ({"weight": torch.zeros(4, 9)}, "9 wide, but 1 to 8 are supported"),
        ({"weight": torch.zeros(4, 0)}, "0 wide"),
        ({"bias": torch.zeros(3)}, r"bias is \[3\]"),
        ({"activation": "gelu"}, "activation must be None or 'silu', got 'gelu'"),
        ({"initial_state": torch.zeros(2, 4, 4)}, r"initial_state is \[2, 4, 4\], but \[2, 3, 4\] is needed"),
        ({"packing": [0, 6]}, "the batch is 2"),
        ({"x": torch.zeros(1, 6, 4), "packing": [0, 5]}, "offsets end at 5, but there are 6 tokens"),
        ({"backend": "cudnn"}, "no backend is called 'cudnn'; there are .*torch, reference"),
    ],
)
def test_what_a_user_can_get_wrong_is_named(change, message):
    arguments = {"x": torch.zeros(2, 6, 4), "weight": torch.zeros(4, 4), **change}
    with pytest.raises(ValueError, match=message):
        short_conv(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ON_CPU, ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_it_equals_a_loop_over_tokens_on_cuda(seed, dtype):
    check_against_reference(*draw(seed, dtype, "cuda"))


@pytest.mark.gpu
def test_it_does_not_wait_for_the_device():
    x, weight = torch.randn(1, 300, 64, device="cuda", requires_grad=True), torch.randn(64, 4, device="cuda")
    packing = Packing.from_offsets([0, 100, 100, 170, 300]).to("cuda")
    with no_waits():
        y, last = short_conv(x, weight, packing=packing, activation="silu")
        (y.sum() + last.sum()).backward()
