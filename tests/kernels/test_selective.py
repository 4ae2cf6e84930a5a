"""selective_scan() and selective_step(): every backend against a loop over tokens in float64, each gradient on its own.

Triton's kernels are interpreted in fp32 where there is no GPU; on one, the same cases are larger, in bf16 and fp32.
"""

import random
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.waits import no_waits
from zoo_kernels import backend as table
from zoo_kernels import device
from zoo_kernels.accuracy import limit, relative_error
from zoo_kernels.launch import TABLES, force
from zoo_kernels.packing import Packing
from zoo_kernels.selective import selective_scan, selective_step

QUANTITIES = {"x": "dx", "dt": "dlog_decay", "A": "dlog_decay", "B": "dk", "C": "dq", "D": "dweight"}
QUANTITIES["initial_state"] = "dinitial_state"
SMALL = ("x", "B", "C")  # what a model in bf16 holds in bf16; steps, rates and states are fp32
NO_KERNELS = device.missing(torch.device("cpu"))
KERNELS = pytest.mark.skipif(NO_KERNELS is not None, reason=str(NO_KERNELS))
WAYS = [  # backend, device, dtype
    pytest.param("chunked", "cpu", torch.float64, id="chunked"),
    pytest.param("chunked", "cpu", torch.bfloat16, id="chunked bf16"),
    pytest.param("triton", "cpu", torch.float32, marks=KERNELS, id="triton"),
    pytest.param("triton", "cuda", torch.bfloat16, marks=pytest.mark.gpu, id="gpu bf16"),
    pytest.param("triton", "cuda", torch.float32, marks=pytest.mark.gpu, id="gpu fp32"),
]


def case(where, dtype, *, tokens, batch=1, channels=5, K=3, ends=None, state=True, skip=True, strength=1.0, seed=0):
    """Tensors by name, and the packing; on a GPU 20 times as many channels.

    Args:
        strength: what steps are multiplied by: at 100, a state is forgotten within a token.
    """
    draw = torch.Generator().manual_seed(seed)
    if where == "cuda":
        channels = 20 * channels
    packing = None if ends is None else Packing.from_offsets(ends)
    sequences = batch if packing is None else packing.documents
    normal = {"generator": draw, "dtype": torch.float64}
    tensors = {
        "x": torch.randn(batch, tokens, channels, **normal),
        "dt": strength * torch.nn.functional.softplus(torch.randn(batch, tokens, channels, **normal) - 1),
        "A": -torch.rand(channels, K, **normal) * 4,
        "B": torch.randn(batch, tokens, K, **normal),
        "C": torch.randn(batch, tokens, K, **normal),
    }
    if skip:
        tensors["D"] = torch.randn(channels, **normal)
    if state:
        tensors["initial_state"] = torch.randn(sequences, K, channels, **normal)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    tensors = {name: t.to(where, dtype if name in SMALL else wide).requires_grad_() for name, t in tensors.items()}
    return tensors, packing if packing is None else packing.to(where)


def upstream_of(tensors, packing):
    """Random gradients of y and of the last state, float64."""
    sequences = tensors["x"].shape[0] if packing is None else packing.documents
    draw = torch.Generator().manual_seed(1)
    shapes = tensors["x"].shape, (sequences, *tensors["A"].T.shape)
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(tensors["x"].device) for shape in shapes]


def results(tensors, packing, upstream, backend):
    """Outputs and gradients by name."""
    outputs = selective_scan(**tensors, packing=packing, backend=backend)
    gradients = [gradient.to(y.dtype) for gradient, y in zip(upstream, outputs)]
    found = torch.autograd.grad(outputs, list(tensors.values()), gradients)
    return {"y": outputs[0], "last_state": outputs[1], **dict(zip(tensors, found))}


def check(tensors, packing, backend):
    """One backend against the recurrence in float64 on the same numbers, which autograd differentiates."""
    dtype = tensors["x"].dtype
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}
    upstream = upstream_of(tensors, packing)
    upstream[0] = upstream[0].to(dtype)
    got, expected = (results(t, packing, upstream, b) for t, b in ((tensors, backend), (exact, "recurrent")))
    for name, tensor in got.items():
        assert tensor.dtype == (tensors[name].dtype if name in tensors else dtype if name == "y" else wide(dtype)), name
        assert relative_error(tensor, expected[name]) <= limit(QUANTITIES.get(name, name), dtype), name


def wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


# ------------------------------------------------------------------------------------------------------- against truth
@pytest.mark.parametrize(("backend", "where", "dtype"), WAYS)
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
def test_every_length_gives_the_truth(backend, where, dtype, tokens):
    check(*case(where, dtype, tokens=tokens, batch=2 if tokens < 64 else 1), backend)


@pytest.mark.parametrize(("backend", "where", "dtype"), WAYS)
@pytest.mark.parametrize(
    ("ends", "state"), [([0, 0, 3, 3, 64, 69, 70, 70], True), ([0, 70, 70], True), ([0, 1, 2, 3, 70], False)], ids=str
)
def test_packed_documents_give_the_truth(backend, where, dtype, ends, state):
    check(*case(where, dtype, tokens=70, ends=ends, state=state, skip=state), backend)


@pytest.mark.parametrize(("backend", "where", "dtype"), WAYS)
@pytest.mark.parametrize("strength", [0.0, 1e-3, 100.0])
def test_states_that_never_fade_and_states_that_fade_at_once_give_the_truth(backend, where, dtype, strength):
    tensors, packing = case(where, dtype, tokens=70, strength=strength)
    if strength:
        check(tensors, packing, backend)
    else:
        y, last = selective_scan(**tensors, backend=backend)
        assert torch.equal(last, tensors["initial_state"])
        assert y.isfinite().all()


@pytest.mark.parametrize(("backend", "where", "dtype"), WAYS)
@pytest.mark.parametrize(("K", "channels"), [(1, 33), (16, 40), (20, 1), (65, 9)])
def test_any_number_of_channels_and_any_state_is_served(backend, where, dtype, K, channels):
    check(*case(where, dtype, tokens=5, K=K, channels=channels, ends=[0, 2, 5]), backend)


@pytest.mark.parametrize(("backend", "where", "dtype"), WAYS[2:])
@pytest.mark.parametrize("walks", ["one", "many"])
@pytest.mark.parametrize("ends", [None, [0, 3, 3, 128, 129]], ids=str)
def test_rows_in_one_walk_and_in_several_give_the_truth(backend, where, dtype, walks, ends, monkeypatch):
    scan = pytest.importorskip("zoo_kernels.selective.scan_triton")
    if walks == "one":
        monkeypatch.setattr(scan, "WARPS_PER_PROCESSOR", 0)
    tokens = 260 if walks == "many" else 130
    tensors, packing = case(where, dtype, tokens=tokens, ends=ends and [*ends, tokens])
    cut = scan.plan(scan.FORWARD, tensors["x"], tensors["A"].T)
    assert (cut.walks > 2) == (walks == "many")
    check(tensors, packing, backend)


@pytest.mark.parametrize(("backend", "where", "dtype"), WAYS[2:])
def test_every_launch_of_the_tables_gives_the_truth(backend, where, dtype):
    tensors, packing = case(where, dtype, tokens=20, ends=[0, 17, 20])
    results(tensors, packing, upstream_of(tensors, packing), backend)  # the tables are named when the kernels are
    for kernel, rows in TABLES.items():
        if kernel.startswith("selective_"):
            for row in rows[1:]:
                with force(**{kernel: row.launch}):
                    check(tensors, packing, backend)


# ----------------------------------------------------------------------------------------------- documents and strides
@pytest.mark.parametrize(("backend", "where", "dtype"), WAYS)
def test_a_document_sees_nothing_of_the_others(backend, where, dtype):
    """Not even a NaN; outputs and gradients of the others are bit-equal."""
    ends, beside = [0, 5, 5, 80, 84], [*range(5), *range(80, 84)]
    found = []
    for poison in (None, torch.nan):
        tensors, packing = case(where, dtype, tokens=84, ends=ends)
        if poison is not None:
            for name in ("x", "B", "C"):
                tensors[name].data[:, 5:80] = poison
            tensors["initial_state"].data[2] = poison
        found.append(results(tensors, packing, upstream_of(tensors, packing), backend))
    for name in ("y", "x", "dt", "B", "C"):
        one, other = (result[name][:, beside] for result in found)
        assert torch.equal(one, other), name
    for name in ("last_state", "initial_state"):
        one, other = (result[name][[0, 1, 3]] for result in found)
        assert torch.equal(one, other), name


@pytest.mark.parametrize(("backend", "where", "dtype"), WAYS)
def test_without_a_token_the_state_is_handed_on(backend, where, dtype):
    for ends in (None, [0, 0, 0]):
        tensors, packing = case(where, dtype, tokens=0, ends=ends)
        found = results(tensors, packing, upstream_of(tensors, packing), backend)
        assert found["y"].shape == tensors["x"].shape
        assert torch.equal(found["last_state"], tensors["initial_state"])
        upstream = upstream_of(tensors, packing)[1]
        assert torch.equal(found["initial_state"], upstream.to(found["initial_state"].dtype))
        assert not any(found[name].any() for name in ("x", "dt", "A", "B", "C", "D"))


@pytest.mark.parametrize(("backend", "where", "dtype"), WAYS)
def test_results_are_bit_equal_every_time_whatever_the_strides_and_the_memory_around(backend, where, dtype):
    tensors, packing = case(where, dtype, tokens=70, ends=[0, 3, 3, 70])
    upstream = upstream_of(tensors, packing)
    first = results(tensors, packing, upstream, backend)
    strided = {}
    for name, tensor in tensors.items():
        around = torch.full((*tensor.shape, 3), torch.nan, dtype=tensor.dtype, device=where)
        strided[name] = around[..., 1].copy_(tensor.detach()).requires_grad_()
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives with NaN
    try:
        again = results(strided, packing, [t.mT.contiguous().mT for t in upstream], backend)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, tensor in first.items():
        assert torch.equal(again[name], tensor), name


@pytest.mark.parametrize(("backend", "where", "dtype"), WAYS)
@pytest.mark.parametrize("unused", ["y", "last_state"])
def test_an_output_that_nobody_uses_costs_nothing(backend, where, dtype, unused):
    tensors, packing = case(where, dtype, tokens=6)
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}
    found = []
    for inputs, how in ((tensors, backend), (exact, "recurrent")):
        y, last = selective_scan(**inputs, packing=packing, backend=how)
        used = last if unused == "y" else y
        found.append(torch.autograd.grad(used.sum(), list(inputs.values()), materialize_grads=True))
    for name, got, expected in zip(tensors, *found):
        assert relative_error(got, expected) <= limit(QUANTITIES[name], dtype), name


@pytest.mark.parametrize(("backend", "where", "dtype"), WAYS)
def test_y_alone_is_the_y_of_both_with_a_gradient_and_without(backend, where, dtype):
    tensors, packing = case(where, dtype, tokens=70)
    both, _ = selective_scan(**tensors, packing=packing, backend=backend)
    assert torch.equal(selective_scan(**tensors, packing=packing, backend=backend, return_state=False), both)
    with torch.no_grad():
        assert torch.equal(selective_scan(**tensors, packing=packing, backend=backend, return_state=False), both)


# ------------------------------------------------------------------------------------------------------------ decoding
STEPS = [
    pytest.param("torch", "cpu", torch.float64, id="torch"),
    pytest.param("triton", "cpu", torch.float32, marks=KERNELS, id="triton"),
    pytest.param("triton", "cuda", torch.bfloat16, marks=pytest.mark.gpu, id="gpu bf16"),
    pytest.param("triton", "cuda", torch.float32, marks=pytest.mark.gpu, id="gpu fp32"),
]


@pytest.mark.parametrize(("backend", "where", "dtype"), STEPS)
@pytest.mark.parametrize("pieces", [[1] * 20, [7, 1, 12]], ids=["one by one", "a few"])
@torch.no_grad()
def test_steps_equal_the_whole_and_end_in_its_state(backend, where, dtype, pieces):
    tensors, _ = case(where, dtype, tokens=20, batch=3)
    exact = {name: tensor.double() for name, tensor in tensors.items()}
    whole, end = selective_scan(**exact, backend="recurrent")
    state, outputs, start = tensors.pop("initial_state").detach().clone(), [], 0
    place = state.data_ptr()
    for tokens in pieces:
        at = slice(start, start + tokens)
        part = {name: t[:, at] if name in ("x", "dt", "B", "C") else t for name, t in tensors.items()}
        outputs.append(selective_step(**part, state=state, backend=backend))
        start += tokens
    assert state.data_ptr() == place
    assert outputs[0].dtype == dtype
    assert relative_error(torch.cat(outputs, 1), whole) <= limit("step", dtype)
    assert relative_error(state, end) <= limit("last_state", dtype)


@pytest.mark.parametrize("seed", range(4))
def test_any_split_into_calls_equals_the_whole(seed):
    draw = random.Random(seed)
    tensors, _ = case("cpu", torch.float64, tokens=150, seed=seed)
    whole, end = selective_scan(**tensors)
    cuts = sorted({0, 150, *(draw.randint(0, 150) for _ in range(4))})
    state, outputs = tensors.pop("initial_state"), []
    for start, stop in pairwise(cuts):
        part = {name: t[:, start:stop] if name in ("x", "dt", "B", "C") else t for name, t in tensors.items()}
        y, state = selective_scan(**part, initial_state=state)
        outputs.append(y)
    assert relative_error(torch.cat(outputs, 1), whole) <= limit("step", torch.float64), cuts
    assert relative_error(state, end) <= limit("last_state", torch.float64), cuts


# ----------------------------------------------------------------------------------------- choice, and what torch knows
def test_kernels_serve_by_themselves_unless_the_environment_leaves_them_out(monkeypatch):
    triton = next(b for b in table.backends("selective_scan") if b.name == "triton")
    if device.triton_missing() is not None:
        pytest.skip("no kernels here")
    monkeypatch.setattr(device, "INTERPRETED", False)
    for wanted, reason in ((True, None), (False, device.UNWANTED)):
        monkeypatch.setattr(device, "WANTED", wanted)
        assert triton.declines(None) == reason


def test_on_a_cpu_the_chunked_form_serves():
    seen = []
    with table.observe(lambda op, _, backend: seen.append((op, backend))):
        selective_scan(**case("cpu", torch.float32, tokens=3)[0])
    assert seen == [("selective_scan", "chunked")]


@pytest.mark.parametrize(("backend", "where", "dtype"), WAYS)
def test_compiled_checkpointed_and_under_autocast_it_is_the_same_op(backend, where, dtype):
    tensors, packing = case(where, dtype, tokens=10, ends=[0, 3, 3, 10])
    upstream = upstream_of(tensors, packing)
    first = results(tensors, packing, upstream, backend)
    torch._dynamo.reset()

    def op(*arguments):
        return selective_scan(**dict(zip(tensors, arguments)), packing=packing, backend=backend)

    ways = {
        "compiled": torch.compile(op, fullgraph=True, backend="aot_eager"),
        "checkpointed": lambda *arguments: checkpoint(op, *arguments, use_reentrant=False),
        "autocast": torch.autocast(where, dtype=torch.bfloat16)(op),
    }
    for way, function in ways.items():
        outputs = function(*tensors.values())
        gradients = [gradient.to(y.dtype) for gradient, y in zip(upstream, outputs)]
        found = (*outputs, *torch.autograd.grad(outputs, list(tensors.values()), gradients))
        for (name, expected), got in zip(first.items(), found):
            assert torch.equal(got, expected), f"{way}, {name}"


@pytest.mark.parametrize(("backend", "where", "dtype"), WAYS)
@pytest.mark.parametrize("packed", [False, True])
def test_what_torch_must_know_of_the_op_holds(backend, where, dtype, packed):
    tensors, packing = case(where, dtype, tokens=10, ends=[0, 3, 3, 10] if packed else None)
    kernel, places = backend == "triton", (None, None)
    if packing is not None:
        places = (packing.document_ids, packing.cu_seqlens) if kernel else (None, packing.host_offsets)
    op, arguments = torch.ops.zoo_kernels.selective_scan.default, (*tensors.values(), *places, True, kernel)
    torch.library.opcheck(op, arguments, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
def test_the_read_is_counted_and_three_products_of_the_backward(backend):
    tensors, packing = case("cpu", torch.float32, tokens=10, ends=[0, 3, 3, 10])
    each = 2 * 10 * tensors["A"].numel()
    with FlopCounterMode(display=False) as counter:
        y, _ = selective_scan(**tensors, packing=packing, backend=backend)
        assert counter.get_total_flops() == each
        y.sum().backward()
    assert counter.get_total_flops() == (3 if backend == "recurrent" else 4) * each


# -------------------------------------------------------------------------------------------------------- what is wrong
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(6, 4)}, r"x must be \[B, T, E\] of fp16, bf16, fp32 or float64, got \[6, 4\]"),
        ({"x": torch.zeros(2, 6, 4, dtype=torch.long)}, "got .* of torch.int64"),
        ({"dt": torch.zeros(2, 6)}, r"dt is \[2, 6\], but x \[2, 6, 4\] and A \[4, 3\] ask for \[2, 6, 4\]"),
        ({"A": torch.zeros(3, 4)}, r"A is \[3, 4\], but x has 4 channels: give \[4, K\], K from 1 to 256"),
        ({"A": torch.zeros(4, 257)}, r"A is \[4, 257\]"),
        ({"B": torch.zeros(2, 6, 4)}, r"B is \[2, 6, 4\], but .* ask for \[2, 6, 3\]"),
        ({"C": torch.zeros(2, 6, 3).bfloat16()}, "x, B and C must share one dtype, got .*bfloat16; cast them"),
        ({"D": torch.zeros(3)}, r"D is \[3\], but .* ask for \[4\]"),
        ({"D": torch.zeros(4, dtype=torch.int)}, "D must hold floating-point numbers, got torch.int32; cast it"),
        ({"D": torch.zeros(4, device="meta")}, "D is on meta, but x is on cpu; move them"),
        ({"dt": torch.full((2, 6, 4), -0.5)}, r"dt must be at least 0 everywhere, got -0\.5; pass F\.softplus"),
        ({"A": torch.full((4, 3), 0.25)}, r"A must be finite and at most 0 everywhere, got 0\.25; pass -torch\.exp"),
        ({"A": torch.full((4, 3), -torch.inf)}, "A must be finite and at most 0 everywhere, got -inf"),
        ({"initial_state": torch.zeros(2, 4, 3)}, r"\[2, 4, 3\], but 2 rows .* ask for \[N, K, E\] = \[2, 3, 4\]"),
        ({"initial_state": torch.zeros(2, 3, 4).double()}, "initial_state is torch.float64, but states are kept in"),
        ({"packing": [0, 6]}, "the batch is 2"),
        ({"backend": "cuda"}, "no backend is called 'cuda'; there are triton, chunked, recurrent"),
    ],
)
def test_what_a_user_can_get_wrong_is_named(change, message):
    zeros = {"x": (2, 6, 4), "dt": (2, 6, 4), "A": (4, 3), "B": (2, 6, 3), "C": (2, 6, 3)}
    with pytest.raises(ValueError, match=message):
        selective_scan(**{name: torch.zeros(shape) for name, shape in zeros.items()} | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 17, 4)}, "may bring 1 to 16 tokens, got 17; use selective_scan"),
        ({"state": torch.zeros(3, 3, 4)}, r"state is \[3, 3, 4\], but .* \[2, 3, 4\]"),
        ({"state": torch.zeros(2, 3, 4).bfloat16()}, "state is torch.bfloat16, but for inputs in torch.float32"),
        ({"state": torch.zeros(2, 4, 3).mT}, "must be contiguous to be changed in place; allocate it"),
        ({"dt": torch.full((2, 1, 4), -1.0)}, "selective_step: dt must be at least 0"),
        ({"D": torch.zeros(4, requires_grad=True)}, "D would need a gradient"),
    ],
)
def test_what_a_user_can_get_wrong_in_a_step_is_named(change, message):
    tokens = change.get("x", torch.zeros(2, 1, 4)).shape[1]
    zeros = {"x": (2, tokens, 4), "dt": (2, tokens, 4), "A": (4, 3), "B": (2, tokens, 3), "C": (2, tokens, 3)}
    zeros["state"] = (2, 3, 4)
    with pytest.raises(ValueError, match=message):
        selective_step(**{name: torch.zeros(shape) for name, shape in zeros.items()} | change)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "chunked"])
def test_it_does_not_wait_for_the_device(backend):
    tensors, packing = case("cuda", torch.bfloat16, tokens=300, ends=[0, 100, 100, 170, 300])
    for watched in (nullcontext, no_waits):  # the first round compiles and allocates
        with watched():
            y, last = selective_scan(**tensors, packing=packing, backend=backend)
            (y.float().sum() + last.sum()).backward()
