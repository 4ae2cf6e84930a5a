"""The delta rule token by token, fused in one launch: decoding in place, and the loop over any number of tokens."""

import importlib
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.waits import no_waits
from zoo_kernels.accuracy import limit, relative_error
from zoo_kernels.backend import explain, observe, prefer
from zoo_kernels.delta import delta_rule
from zoo_kernels.delta.call import DeltaCall
from zoo_kernels.delta.step import FusedRecurrent, delta_step, short
from zoo_kernels.device import missing
from zoo_kernels.launch import TABLES, force
from zoo_kernels.packing import Packing

MEMBERS = {
    "LA": (None, False),
    "DN": (None, True),
    "RET": ("constant", False),
    "RET, erasing": ("constant", True),
    "M2": ("head", False),
    "GDN": ("head", True),
    "GLA": ("channel", False),
    "KDA": ("channel", True),
}
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DEVICES = [pytest.param(CPU, id="cpu"), pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)]
BACKENDS = ["triton", "torch"]

pytestmark = pytest.mark.skipif(missing(CPU) is not None and not torch.cuda.is_available(), reason=str(missing(CPU)))


@dataclass(frozen=True)
class Case:
    """Inputs drawn from a seed and rounded to ``dtype``; on a GPU, sizes that fill it and bf16 where none is asked."""

    member: str = "KDA"
    B: int = 2
    T: int = 3
    H: int = 1
    HV: int = 2
    K: int = 20
    V: int = 12
    dtype: torch.dtype = torch.float32
    documents: int | None = None  # states, where they are not one per row
    seed: int = 0

    def on(self, device: torch.device, **larger) -> "Case":
        """This case, or on a GPU the same one with other sizes."""
        if device.type == "cpu":
            return self
        return replace(self, **{"H": 2, "HV": 4, "K": 128, "V": 128, "dtype": torch.bfloat16, **larger})

    def draw(self, device: torch.device) -> dict[str, Tensor | None]:
        """q, k, v, the gates of the member and a state."""
        generator = torch.Generator().manual_seed(self.seed)
        decay, erases = MEMBERS[self.member]
        B, T, H, HV, K, V = self.B, self.T, self.H, self.HV, self.K, self.V

        def normal(*shape, to=self.dtype):
            return torch.randn(*shape, generator=generator).to(to)

        def uniform(*shape):
            return torch.rand(*shape, generator=generator)

        shapes = {"constant": (HV,), "head": (B, T, HV), "channel": (B, T, HV, K)}
        drawn = {
            "q": normal(B, T, H, K),
            "k": torch.nn.functional.normalize(normal(B, T, H, K, to=torch.float32), dim=-1).to(self.dtype),
            "v": normal(B, T, HV, V),
            "log_decay": -uniform(*shapes[decay]) if decay else None,
            "beta": 2 * uniform(B, T, HV) if erases else None,
            "state": normal(self.documents or B, HV, K, V, to=torch.float32),
        }
        return {name: None if x is None else x.to(device) for name, x in drawn.items()}


@contextmanager
def poisoned():
    """Inside, what is allocated and not written holds NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def truth(drawn: dict, **options) -> tuple[Tensor, Tensor]:
    """y and the last state by the recurrence, in float64 on the CPU."""
    x = {name: None if x is None else x.detach().cpu().double() for name, x in drawn.items()}
    gates = {"log_decay": x["log_decay"], "beta": x["beta"], "initial_state": x["state"]}
    return delta_rule(x["q"], x["k"], x["v"], **gates, backend="recurrent", **options)


def loop(drawn: dict, *, packing: Packing | None = None, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """y and the last state by backend `fused_recurrent`."""
    call = as_call(drawn, packing=packing, scale=scale)
    assert FusedRecurrent().serves(call) is None
    with poisoned():
        return FusedRecurrent().run(call)


def as_call(drawn: dict, *, packing: Packing | None = None, scale: float | None = None) -> DeltaCall:
    inputs = {name: drawn[name] for name in ("q", "k", "v", "log_decay", "beta")}
    scale = drawn["q"].shape[3] ** -0.5 if scale is None else scale
    return DeltaCall(**inputs, initial_state=drawn["state"], packing=packing, scale=scale, chunk=None)


def step(drawn: dict, state: Tensor, *, backend: str | None = "triton", **options) -> Tensor:
    """:func:`delta_step` on drawn inputs; ``state`` is changed."""
    gates = {"log_decay": drawn["log_decay"], "beta": drawn["beta"]}
    with nullcontext() if backend == "torch" else poisoned():  # cuBLAS asks for more than memory that is written
        return delta_step(drawn["q"], drawn["k"], drawn["v"], state, **gates, **options, backend=backend)


def tokens(drawn: dict, start: int, end: int) -> dict:
    """The same inputs for some of the tokens."""
    return {n: x if n == "state" or x is None or x.dim() == 1 else x[:, start:end] for n, x in drawn.items()}


def requests(drawn: dict, rows) -> dict:
    """The same inputs for some of the requests."""
    return {n: x if n == "state" or x is None or x.dim() == 1 else x[rows] for n, x in drawn.items()}


def close(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    """Hold y and the last state against the truth."""
    for name, one, other in zip(("y", "last_state"), got, expected):
        assert relative_error(one, other) <= limit(name, dtype), (name, relative_error(one, other))


# ----------------------------------------------------------------------------------------------- against the recurrence
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("member", MEMBERS)
def test_the_loop_gives_what_the_recurrence_gives(member, device):
    case = Case(member, T=5).on(device, T=300)
    drawn = case.draw(device)
    close(loop(drawn), truth(drawn), case.dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_gives_what_the_recurrence_gives_and_leaves_the_state_behind(backend, member, device):
    case = Case(member).on(device, B=16)
    drawn = case.draw(device)
    state = drawn["state"].clone()
    y = step(drawn, state, backend=backend)
    close((y, state), truth(drawn), case.dtype)
    assert y.dtype == case.dtype


SIZES = [(1, 1), (3, 130), (16, 8), (33, 5), (60, 17), (100, 9), (256, 33)]


@pytest.mark.parametrize(("K", "V"), SIZES)
def test_sizes_are_padded_and_split(K, V):
    drawn = Case("KDA", B=1, T=2, HV=1, K=K, V=V).draw(CPU)
    close(loop(drawn), truth(drawn), torch.float32)
    state = drawn["state"].clone()
    close((step(drawn, state), state), truth(drawn), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize(("K", "V"), [*SIZES, (64, 64), (128, 64), (192, 384), (200, 400), (256, 512)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sizes_are_padded_and_split_on_cuda(K, V, dtype):
    drawn = Case("KDA", B=3, T=7, H=1, HV=4, K=K, V=V, dtype=dtype).draw(CUDA)
    close(loop(drawn), truth(drawn), dtype)
    state = drawn["state"].clone()
    close((step(drawn, state), state), truth(drawn), dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("H", "HV"), [(3, 3), (2, 6), (1, 4)])
def test_value_heads_share_the_key_head_of_their_group(H, HV, device):
    case = replace(Case("GDN", B=2, T=2).on(device), H=H, HV=HV)
    drawn = case.draw(device)
    close(loop(drawn), truth(drawn), case.dtype)


def test_half_precision_inputs_are_computed_in_fp32():
    drawn = Case("GDN", dtype=torch.float16).draw(CPU)
    y, last = loop(drawn, scale=0.3)
    close((y, last), truth(drawn, scale=0.3), torch.float16)
    assert relative_error(last, truth(drawn)[1]) <= limit("last_state", torch.float32)  # only y is rounded
    assert (y.dtype, last.dtype) == (torch.float16, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_without_a_first_state_the_memory_starts_empty(device):
    case = Case("GDN").on(device)
    drawn = case.draw(device)
    got = loop({**drawn, "state": None})
    close(got, truth({**drawn, "state": torch.zeros_like(drawn["state"])}), case.dtype)


def test_gates_may_have_any_float_dtype():
    drawn = Case("KDA").draw(CPU)
    rounded = {n: x.half() if n in ("log_decay", "beta") else x for n, x in drawn.items()}
    close(loop(rounded), truth(rounded), torch.float32)
    wide = {n: x.double() if n in ("log_decay", "beta") else x for n, x in drawn.items()}
    close(loop(wide), truth(wide), torch.float32)


@pytest.mark.parametrize("table", ["delta_step", "delta_recurrent"])
@pytest.mark.parametrize("device", DEVICES)
def test_every_row_of_the_launch_table_computes_the_same(table, device):
    importlib.import_module("zoo_kernels.delta.recurrent_triton")  # which brings the tables
    case = Case("KDA", B=1, T=2, HV=1, V=40).on(device)
    drawn = case.draw(device)
    expected = truth(drawn)
    for row in TABLES[table]:
        state = drawn["state"].clone()
        with force(**{table: row.launch}):
            got = loop(drawn) if table == "delta_recurrent" else (step(drawn, state), state)
        close(got, expected, case.dtype)


# ------------------------------------------------------------------------------------------------------- token by token
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pieces", [[1, 1, 1, 1], [2, 2], [3, 1], [4]], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_pieces_give_what_the_whole_gives(backend, pieces, device):
    case = Case("GDN", T=4).on(device, B=8)
    drawn = case.draw(device)
    state, ends = drawn["state"].clone(), torch.tensor([0, *pieces]).cumsum(0).tolist()
    ys = [step(tokens(drawn, a, b), state, backend=backend) for a, b in pairwise(ends)]
    close((torch.cat(ys, 1), state), truth(drawn), case.dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_and_the_loop_give_the_same_bits(device):
    case = Case("KDA", T=3).on(device)
    drawn = case.draw(device)
    state = drawn["state"].clone()
    with force(delta_step=TABLES["delta_recurrent"][-1].launch):
        y = step(drawn, state)
    expected = loop(drawn)
    assert torch.equal(y, expected[0])
    assert torch.equal(state, expected[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_request_has_the_row_of_its_slot_and_negative_ones_have_none(backend, integers, device):
    case = Case("GDN", B=4, documents=6).on(device)
    drawn = case.draw(device)
    for name in ("q", "k", "v", "log_decay", "beta"):
        drawn[name][1] = torch.nan  # a skipped request may hold anything
    slots, used = [4, -1, 0, -7], [0, 2]
    state = drawn["state"].clone()
    # The values are looked at on the CPU, where a NaN passes.
    y = step(drawn, state, slots=torch.tensor(slots, dtype=integers, device=device), backend=backend)
    rows = [slots[request] for request in used]
    expected = truth({**requests(drawn, used), "state": drawn["state"][rows]})
    close((y[used], state[rows]), expected, case.dtype)
    assert torch.equal(y[[1, 3]], torch.zeros_like(y[[1, 3]]))
    others = [row for row in range(6) if row not in rows]
    assert torch.equal(state[others], drawn["state"][others])


@pytest.mark.parametrize("backend", BACKENDS)
def test_skipping_every_request_and_serving_none_change_nothing(backend):
    drawn = Case("GDN").draw(CPU)
    state = drawn["state"].clone()
    y = step(drawn, state, slots=torch.tensor([-1, -1]), backend=backend)
    assert torch.equal(y, torch.zeros_like(y))
    nobody = requests(drawn, slice(0, 0))
    y = step(nobody, state, slots=torch.zeros(0, dtype=torch.int32), backend=backend)
    assert y.shape == (0, *drawn["v"].shape[1:])
    assert torch.equal(state, drawn["state"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_in_bf16_is_rounded_but_does_not_drift(backend, device):
    if backend == "triton" and device.type == "cpu":
        pytest.skip("the interpreter truncates bf16")
    allowed = {"M2": 1e-2, "GDN": 1e-2, "DN": 3e-2}  # measured: 0.4 %, 0.4 %, 1.6 %
    for member, most in allowed.items():
        drawn = Case(member, B=1, T=4096, H=1, HV=1, K=16, V=16).draw(device)
        drawn = {**drawn, "beta": None if drawn["beta"] is None else drawn["beta"] / 2}
        state = drawn["state"].bfloat16()
        exact, _ = truth({**drawn, "state": state})
        ys = [step(tokens(drawn, t, t + 1), state, backend=backend) for t in range(4096)]
        y = torch.cat(ys[-256:], 1)
        assert state.dtype == torch.bfloat16
        assert 1e-4 < relative_error(y, exact[:, -256:]) <= most, member


# ------------------------------------------------------------------------------------------------------------ documents
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("member", ["KDA", "RET"])
def test_packed_documents_never_meet_and_empty_ones_return_their_state(member, device):
    offsets = [0, 0, 3, 3, 4, 7, 7]
    case = Case(member, B=1, T=7, documents=6).on(device)
    drawn = case.draw(device)
    packing = Packing.from_offsets(offsets).to(device)
    y, last = loop(drawn, packing=packing)
    close((y, last), truth(drawn, packing=offsets), case.dtype)
    for n, (start, end) in enumerate(pairwise(offsets)):
        if start == end:
            assert torch.equal(last[n], drawn["state"][n])
        else:
            alone = loop({**tokens(drawn, start, end), "state": drawn["state"][n : n + 1]})
            assert torch.equal(y[:, start:end], alone[0])
            assert torch.equal(last[n : n + 1], alone[1])
    assert loop({**drawn, "state": None}, packing=packing)[1][0].count_nonzero() == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("member", ["M2", "GDN", "KDA"])
def test_a_decay_of_minus_infinity_forgets_everything(member, device):
    case = Case(member, T=4).on(device)
    drawn = case.draw(device)
    drawn["log_decay"][:, 2] = -torch.inf
    y, last = loop(drawn)
    after = loop({**tokens(drawn, 2, 4), "state": torch.zeros_like(drawn["state"])})
    assert torch.equal(y[:, 2:], after[0])
    assert torch.equal(last, after[1])
    close((y, last), truth(drawn), case.dtype)
    drawn["k"][:, 2:] = 0.0
    assert loop(drawn)[1].count_nonzero() == 0


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens_return_the_state(device):
    drawn = tokens(Case("GDN").draw(device), 0, 0)
    y, last = loop(drawn)
    assert y.shape == drawn["v"].shape
    assert torch.equal(last, drawn["state"])
    assert last.data_ptr() != drawn["state"].data_ptr()


# -------------------------------------------------------------------------------------------------------------- layouts
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("B", "T"), [(2, 3), (2, 1), (1, 3), (1, 1)])
def test_views_of_wider_rows_give_the_same_bits(B, T, device):
    case = Case("KDA", B=B, T=T).on(device)
    drawn = case.draw(device)

    def inside(x: Tensor) -> Tensor:
        """The same numbers between heads of NaN."""
        wide = torch.full((*x.shape[:2], x.shape[2] + 2, *x.shape[3:]), torch.nan, dtype=x.dtype, device=device)
        wide[:, :, 1:-1] = x
        return wide[:, :, 1:-1]

    expected = loop(drawn)
    views = {name: x if name == "state" else inside(x) for name, x in drawn.items()}
    assert all(torch.equal(a, b) for a, b in zip(loop(views), expected))
    turned = {n: x if n == "state" else x.transpose(1, 2).contiguous().transpose(1, 2) for n, x in drawn.items()}
    assert all(torch.equal(a, b) for a, b in zip(loop(turned), expected))
    by_time = {n: x if n == "state" else x.transpose(0, 1).contiguous().transpose(0, 1) for n, x in drawn.items()}
    assert all(torch.equal(a, b) for a, b in zip(loop(by_time), expected))


@pytest.mark.parametrize("device", DEVICES)
def test_repeats_are_bit_equal(device):
    case = Case("KDA").on(device, B=16, T=16)
    drawn = case.draw(device)
    first, state = loop(drawn), drawn["state"].clone()
    y = step(drawn, state)
    for _ in range(2 if device.type == "cpu" else 100):
        assert all(torch.equal(a, b) for a, b in zip(loop(drawn), first))
        again = drawn["state"].clone()
        assert torch.equal(step(drawn, again), y)
        assert torch.equal(again, state)


# ----------------------------------------------------------------------------------------------------------- who serves
def test_the_loop_refuses_gradients_and_float64_with_the_reason():
    drawn = Case("GDN").draw(CPU)
    learning = as_call({**drawn, "v": drawn["v"].requires_grad_()})
    assert FusedRecurrent().serves(learning) == "it has no backward, but v would need a gradient"
    with torch.no_grad():
        assert FusedRecurrent().serves(learning) is None
    exact = as_call({name: x.detach().double() for name, x in drawn.items()})
    assert FusedRecurrent().serves(exact) == "it computes in fp32, but the inputs are float64"


def test_short_is_what_has_at_most_16_tokens_in_every_document():
    assert short(as_call(Case(T=16).draw(CPU)))
    assert not short(as_call(Case(T=17).draw(CPU)))
    long = Case(T=20, B=1).draw(CPU)
    assert short(as_call(long, packing=Packing.from_offsets([0, 16, 20])))
    assert not short(as_call(long, packing=Packing.from_offsets([0, 17, 20])))


def test_a_step_in_float64_is_served_by_torch_with_float64_precision():
    drawn = {n: None if x is None else x.double() for n, x in Case("KDA").draw(CPU).items()}
    state = drawn["state"].clone()
    close((step(drawn, state, backend=None), state), truth(drawn), torch.float64)
    with pytest.raises(ValueError, match=r"delta_step: backend 'triton' cannot serve .* computes in fp32"):
        step(drawn, state, backend="triton")


# ------------------------------------------------------------------------------------------------------ what is refused
B, T, H, HV, K, V = 2, 3, 1, 2, 4, 6
REFUSED = {
    "keys unlike queries": ({"k": torch.zeros(B, T, H, 5)}, r"q is \[2, 3, 1, 4\], but k is \[2, 3, 1, 5\]"),
    "a decay above 0": ({"log_decay": torch.ones(HV)}, r"log_decay must be at most 0 everywhere, got 1"),
    "too many tokens": (
        {"q": torch.zeros(B, 17, H, K), "k": torch.zeros(B, 17, H, K), "v": torch.zeros(B, 17, HV, V)},
        r"may bring 1 to 16 tokens, got 17; use delta_rule",
    ),
    "no tokens": (
        {"q": torch.zeros(B, 0, H, K), "k": torch.zeros(B, 0, H, K), "v": torch.zeros(B, 0, HV, V)},
        r"may bring 1 to 16 tokens, got 0; use delta_rule",
    ),
    "an infinite scale": ({"scale": float("nan")}, r"scale must be a finite number, got nan"),
    "a state of another layout": (
        {"state": torch.zeros(B, HV, V, K)},
        r"state is \[2, 2, 6, 4\], but q \[2, 3, 1, 4\] .* 2 rows, one per request, of \[HV, K, V\] = \[2, 4, 6\]",
    ),
    "more rows than requests": ({"state": torch.zeros(3, HV, K, V)}, r"state is \[3, .*; give slots where the rows"),
    "a flat state": (
        {"state": torch.zeros(B), "slots": torch.tensor([0, 1])},
        r"state is \[2\], .* any number of rows",
    ),
    "a state in fp16": ({"state": torch.zeros(B, HV, K, V).half()}, r"float32 or torch.bfloat16; allocate it so"),
    "a state in float64": (
        {"state": torch.zeros(B, HV, K, V).double()},
        r"state is torch.float64, but for inputs in torch.float32",
    ),
    "a state elsewhere": ({"state": torch.zeros(B, HV, K, V, device="meta")}, r"on meta, but v is on cpu; move"),
    "a state with gaps": ({"state": torch.zeros(B, HV, K, V + 1)[..., :V]}, r"must be contiguous to be changed"),
    "slots for others": ({"slots": torch.tensor([0, 1, 2])}, r"slots is \[3\], but 2 requests ask for \[2\]"),
    "slots of fractions": ({"slots": torch.tensor([0.0, 1.0])}, r"slots must be int32 or int64, got torch.float32"),
    "slots elsewhere": ({"slots": torch.zeros(B, dtype=torch.int32, device="meta")}, r"slots is on meta, but v"),
    "a slot past the end": ({"slots": torch.tensor([0, 2])}, r"slot 2 is given, but state has 2 rows"),
    "a slot twice": ({"slots": torch.tensor([1, 1])}, r"slot 1 is given to two requests; each needs a row"),
    "a gradient": ({"v": torch.zeros(B, T, HV, V, requires_grad=True)}, r"v would need a gradient, .*no_grad"),
    "an unknown backend": ({"backend": "fast"}, r"no backend is called 'fast'; there are (torch|triton), "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_refused_with_the_rule_the_value_and_the_cure(case):
    changed, message = REFUSED[case]
    right = {"q": torch.zeros(B, T, H, K), "k": torch.zeros(B, T, H, K), "v": torch.zeros(B, T, HV, V)}
    arguments = {**right, "state": torch.zeros(B, HV, K, V), **changed}
    state = arguments["state"]
    before = None if state.is_meta else state.clone()
    positional = [arguments.pop(name) for name in ("q", "k", "v", "state")]
    with pytest.raises(ValueError, match=rf"^delta_step: .*?{message}"):
        delta_step(*positional, **arguments)
    assert before is None or torch.equal(state, before)


# ------------------------------------------------------------------------------------------------- a citizen of PyTorch
def decoded(q, k, v, state, beta, slots):
    """A layer around the op."""
    return delta_step(q * 2, k, v, state, beta=beta.sigmoid(), slots=slots, backend="triton") + 1


def decoder_inputs(device: torch.device) -> tuple[Tensor, ...]:
    drawn = Case("DN", B=3, documents=4).on(device).draw(device)
    return *(drawn[name] for name in ("q", "k", "v", "state", "beta")), torch.tensor([2, -1, 0], device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_code_gives_the_eager_numbers_in_one_graph(device):
    torch._dynamo.reset()
    inputs = decoder_inputs(device)
    other = [x.clone() for x in inputs]
    compiled = torch.compile(decoded, fullgraph=True, backend="aot_eager" if device.type == "cpu" else "inductor")
    with torch.no_grad():
        for _ in range(2):
            y, expected = compiled(*inputs), decoded(*other)
            assert relative_error(y, expected) <= limit("step", y.dtype)
            assert relative_error(inputs[3], other[3]) <= limit("step", y.dtype)
    assert not torch.equal(other[3], decoder_inputs(device)[3])


@pytest.mark.parametrize("device", DEVICES)
def test_the_ops_keep_the_contract_of_custom_ops(device):
    drawn = Case("KDA").on(device).draw(device)
    ops = torch.ops.zoo_kernels
    x = [drawn[name] for name in ("q", "k", "v", "state", "log_decay", "beta")]
    utilities = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(ops.delta_step.default, (*x, None, None, "triton"), test_utils=utilities)
    q, k, v, state, log_decay, beta = x
    torch.library.opcheck(
        ops.delta_recurrent.default, (q, k, v, log_decay, beta, state, None, 0.5), test_utils=utilities
    )


def test_flops_are_those_of_the_recurrence():
    from torch.utils.flop_counter import FlopCounterMode

    for member in ("RET", "KDA"):
        drawn = Case(member).draw(CPU)
        counted = []
        for run in (lambda: truth(drawn), lambda: loop(drawn), lambda: step(drawn, drawn["state"].clone())):  # noqa: B023
            with FlopCounterMode(display=False) as counter:
                run()
            counted.append(counter.get_total_flops())
        assert counted[0] == counted[1] == counted[2] > 0


def test_autocast_changes_nothing():
    drawn = Case("GDN").draw(CPU)
    state, other = drawn["state"].clone(), drawn["state"].clone()
    expected = step(drawn, other, backend="torch")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = step(drawn, state, backend="torch")
    assert torch.equal(y, expected)
    assert torch.equal(state, other)


def test_memories_made_and_changed_in_inference_mode_stay_there():
    drawn = Case("GDN").draw(CPU)
    expected = truth(drawn)
    with torch.inference_mode():
        state = drawn["state"].clone()
        close((step(drawn, state), state), expected, torch.float32)


def test_a_kernel_is_chosen_unless_it_is_interpreted_and_preferences_are_obeyed():
    seen = []
    drawn = Case("GDN").draw(CPU)
    with observe(lambda op, call, name: seen.append((op, call, name))):
        step(drawn, drawn["state"].clone(), backend=None)
        with prefer({"delta_step": "triton"}):
            step(drawn, drawn["state"].clone(), backend=None)
    assert [(op, name) for op, _, name in seen] == [("delta_step", "torch"), ("delta_step", "triton")]
    rows = dict(explain("delta_step", seen[0][1]))
    assert rows == {"triton": "could serve: interpreted kernels serve only when named", "torch": "chosen"}


# ------------------------------------------------------------------------------------------------------------- GPU only
@pytest.mark.gpu
@pytest.mark.parametrize("slots", [None, [5, -1, 0, 3]], ids=["rows", "slots"])
def test_a_cuda_graph_replays_the_step(slots):
    case = Case("KDA", B=4, T=1, documents=6 if slots else None).on(CUDA)
    drawn = case.draw(CUDA)
    state, other = drawn["state"].clone(), drawn["state"].clone()
    options = {"slots": torch.tensor(slots, dtype=torch.int32, device=CUDA)} if slots else {}
    step(drawn, state.clone(), **options)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step(drawn, state, **options)
    for seed in range(3):
        fresh = replace(case, seed=seed + 1).draw(CUDA)
        for name in ("q", "k", "v", "log_decay", "beta"):
            drawn[name].copy_(fresh[name])
        graph.replay()
        assert torch.equal(y, step(fresh, other, **options))
        assert torch.equal(state, other)


@pytest.mark.gpu
def test_the_host_never_waits():
    drawn = Case("KDA", B=4).on(CUDA).draw(CUDA)
    packing = Packing.from_offsets([0, 2, 2, 3]).to(CUDA)
    slots = torch.tensor([3, -1, 0, 1], device=CUDA)
    state, packed = drawn["state"].clone(), {**requests(drawn, slice(0, 1)), "state": drawn["state"][:3]}

    def both():
        step(drawn, state, slots=slots)
        loop(packed, packing=packing)

    both()
    with no_waits():
        both()


@pytest.mark.gpu
def test_new_lengths_and_batches_compile_nothing():
    from zoo_kernels.delta.recurrent_triton import recurrent_kernel

    def compiled() -> int:
        return sum(len(cache[0]) for cache in recurrent_kernel.device_caches.values())

    counts = []
    for batch, length in [(2, 3), (1, 3), (2, 1), (1, 1), (16, 16), (3, 5), (64, 8), (1, 16), (16, 1)]:
        drawn = Case("KDA", B=batch, T=length).on(CUDA).draw(CUDA)
        step(drawn, drawn["state"].clone())
        loop(drawn)
        counts.append(compiled())
    for length in (17, 100, 256, 1000):
        loop(Case("KDA", B=1, T=length).on(CUDA).draw(CUDA))
        counts.append(compiled())
    assert counts[0] == counts[-1], counts
