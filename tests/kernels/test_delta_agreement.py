"""All forms of the delta rule against each other: outputs, last states and every gradient."""

import random
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.waits import no_waits
from zoo_kernels.accuracy import limit, relative_error
from zoo_kernels.backend import backends
from zoo_kernels.delta import delta_rule
from zoo_kernels.delta.reference import parallel

TRUTH = "recurrent"
# Kernels serve neither float64 nor bf16 on the CPU; test_delta_triton.py and test_delta_step.py try them.
KERNELS = ("triton", "fused_recurrent")
OTHERS = [backend.name for backend in backends("delta_rule") if backend.name not in (TRUTH, *KERNELS)]
CELLS = {
    "LA": (None, False),
    "DN": (None, True),
    "M2": ("head", False),
    "RET": ("constant", False),
    "GDN": ("head", True),
    "GLA": ("channel", False),
    "KDA": ("channel", True),
}
NAMES = ("q", "k", "v", "log_decay", "beta", "initial_state")
# PyTorch 2.13 warns about itself: where a graph breaks, its compiler looks at .grad of whatever passes by.
GRAPH_BREAK = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
SEED = 20240613  # every random length below is drawn from it


@dataclass(frozen=True)
class Case:
    """One call, drawn from a seed; values are rounded to ``dtype`` before anything is computed."""

    cell: str
    T: int = 37
    B: int = 2
    H: int = 2
    HV: int = 4
    K: int = 8
    V: int = 6
    packing: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float64
    rate: float = 0.5  # log decays are drawn from -rate to 0
    most: float = 2.0  # beta is drawn from 0 to this
    seed: int = 0
    device: str = "cpu"

    def draw(self) -> dict[str, Tensor | None]:
        """Inputs and the two upstream gradients."""
        decay, erases = CELLS[self.cell]
        generator = torch.Generator().manual_seed(self.seed)
        B, T, H, HV, K, V = 1 if self.packing else self.B, self.T, self.H, self.HV, self.K, self.V
        N = len(self.packing) - 1 if self.packing else B
        exact = torch.float64 if self.dtype == torch.float64 else torch.float32

        def normal(*shape, to=self.dtype):
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(to)

        def uniform(*shape):
            return torch.rand(*shape, generator=generator, dtype=torch.float64).to(exact)

        shapes = {"head": (B, T, HV), "channel": (B, T, HV, K), "constant": (HV,)}
        beta = uniform(B, T, HV) * self.most
        beta[:, 3::7] = 0.0  # no write at all must work
        drawn = {
            "q": normal(B, T, H, K),
            # A positive mean: keys resemble each other, the hard case for the solve.
            "k": torch.nn.functional.normalize(normal(B, T, H, K, to=torch.float64) + 0.5, dim=-1).to(self.dtype),
            "v": normal(B, T, HV, V),
            "log_decay": -self.rate * uniform(*shapes[decay]) if decay else None,
            "beta": beta if erases else None,
            "initial_state": normal(N, HV, K, V, to=exact),
            "dy": normal(B, T, HV, V),
            "dlast": normal(N, HV, K, V, to=exact),
        }
        return {name: None if x is None else x.to(self.device) for name, x in drawn.items()}


def run(drawn: dict, *, to: torch.dtype | None = None, **options) -> dict[str, Tensor]:
    """y, last_state and the gradient of every input, computed in ``to``."""
    drawn = {name: None if x is None else x.detach().to(to or x.dtype) for name, x in drawn.items()}
    inputs = {name: drawn[name].clone().requires_grad_() for name in NAMES if drawn[name] is not None}
    q, k, v, *_ = inputs.values()
    y, last = delta_rule(q, k, v, **{n: x for n, x in inputs.items() if n not in "qkv"}, **options)
    torch.autograd.backward((y, last), (drawn["dy"], drawn["dlast"]))
    return {"y": y.detach(), "last_state": last.detach(), **{f"d{name}": x.grad for name, x in inputs.items()}}


def compare(case: Case, backend: str, *variants: dict) -> None:
    """Hold ``backend``, with each of some options, against the truth: every quantity by the table."""
    drawn = case.draw()
    packing = list(case.packing) if case.packing else None
    expected = run(drawn, to=torch.float64, packing=packing, backend=TRUTH)
    for options in variants or ({},):
        got = run(drawn, packing=packing, backend=backend, **options)
        assert got.keys() == expected.keys()
        errors = {name: relative_error(got[name], flushed(x, got[name].dtype)) for name, x in expected.items()}
        assert all(error <= limit(name, case.dtype) for name, error in errors.items()), (case, options, errors)


def flushed(truth: Tensor, dtype: torch.dtype) -> Tensor:
    """What ``dtype`` cannot hold is zero: after a violent decay, float64 still sees 1e-200 where fp32 has nothing."""
    return truth.where(truth.abs() >= torch.finfo(dtype).tiny, 0.0)


def lengths(count: int, seed: int) -> list[int]:
    return random.Random(SEED + seed).sample(range(1, 131), count)


def test_no_cell_of_the_family_is_left_out():
    kinds = {
        (None if decay is None else "channel" if decay == "channel" else "head", erases)
        for decay, erases in CELLS.values()
    }
    assert kinds == {(decay, erases) for decay in (None, "head", "channel") for erases in (False, True)}


# ------------------------------------------------------------------------------------------------------------ agreement
@pytest.mark.parametrize("T", lengths(3, seed=1), ids=lambda T: f"T{T}-seed{SEED}")
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", OTHERS)
def test_ragged_lengths_agree_in_float64(backend, cell, T):
    compare(Case(cell, T=T, seed=T), backend)


@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129])
@pytest.mark.parametrize("cell", ["DN", "KDA"])
@pytest.mark.parametrize("backend", OTHERS)
def test_lengths_around_a_chunk_agree_in_float64(backend, cell, T):
    compare(Case(cell, T=T, B=1, H=1, HV=2, seed=T), backend)


@pytest.mark.parametrize("packing", [None, (0, 0, 5, 5, 38, 39, 70, 70)], ids=["dense", "packed"])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", OTHERS)
def test_every_chunk_size_agrees_dense_and_packed(backend, cell, packing):
    compare(Case(cell, T=70, B=1, packing=packing), backend, *({"chunk": chunk} for chunk in (16, 32, 64)))


@pytest.mark.parametrize(("H", "HV"), [(1, 1), (3, 3), (2, 4), (1, 4)])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", OTHERS)
def test_every_grouping_of_heads_agrees(backend, cell, H, HV):
    compare(Case(cell, T=35, H=H, HV=HV, K=5, V=7), backend, {"chunk": 16})


@pytest.mark.parametrize(("K", "V"), [(1, 1), (1, 3), (3, 1), (33, 17), (20, 60), (100, 24), (256, 3), (2, 512)])
@pytest.mark.parametrize("cell", ["M2", "KDA"])
@pytest.mark.parametrize("backend", OTHERS)
def test_sizes_that_are_no_power_of_two_agree(backend, cell, K, V):
    compare(Case(cell, T=19, B=1, H=1, HV=2, K=K, V=V), backend, {"chunk": 16})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", OTHERS)
def test_narrow_dtypes_stay_within_the_table(backend, cell, dtype):
    compare(Case(cell, T=150, K=32, V=24, dtype=dtype, most=1.0), backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_the_reference_itself_stays_within_the_table(cell, dtype):
    compare(Case(cell, T=40, dtype=dtype, most=1.0), TRUTH)


@pytest.mark.parametrize("rate", [0.01, 5.0, 50.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("cell", ["M2", "RET", "GDN", "GLA", "KDA"])
@pytest.mark.parametrize("backend", OTHERS)
def test_slow_and_violent_decays_agree(backend, cell, dtype, rate):
    compare(Case(cell, T=70, rate=rate, dtype=dtype), backend)


@pytest.mark.parametrize("cell", ["M2", "GDN", "GLA", "KDA"])
@pytest.mark.parametrize("backend", OTHERS)
def test_spans_of_any_size_agree(backend, cell, monkeypatch):
    from zoo_kernels.delta import chunked

    for numbers in (1, 3000):
        monkeypatch.setattr(chunked, "SPAN_CPU", numbers)
        compare(Case(cell, T=75, B=1), backend, {"chunk": 16})
        compare(Case(cell, T=75, packing=(0, 0, 20, 21, 21, 75)), backend, {"chunk": 16})


@pytest.mark.parametrize("T", [1, 2, *lengths(2, seed=2)], ids=lambda T: f"T{T}-seed{SEED}")
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", [TRUTH, *OTHERS])
def test_the_parallel_form_agrees_in_output_state_and_gradients(backend, cell, T):
    drawn = Case(cell, T=T, B=1, K=5, V=4).draw() | {"initial_state": None}
    got = run(drawn, backend=backend)
    inputs = {name: drawn[name].clone().requires_grad_() for name in NAMES if drawn[name] is not None}
    q, k, v, *_ = inputs.values()
    y, last = parallel(q, k, v, log_decay=inputs.get("log_decay"), beta=inputs.get("beta"))
    torch.autograd.backward((y, last), (drawn["dy"], drawn["dlast"]))
    expected = {"y": y, "last_state": last, **{f"d{name}": x.grad for name, x in inputs.items()}}
    for name in expected:
        assert relative_error(got[name], expected[name]) <= limit(name, torch.float64), name


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", [TRUTH, *OTHERS])
def test_any_split_into_cached_calls_gives_the_whole(backend, cell):
    drawn = Case(cell, T=90).draw()
    cuts = sorted(random.Random(SEED).sample(range(1, 90), 3))
    whole, last = delta_rule(*call(drawn)[0], **call(drawn)[1], backend=backend)
    state, ys = drawn["initial_state"], []
    for part in map(slice, [0, *cuts, 0, 1], [*cuts, 90]):
        tensors, gates = call(drawn, part)
        y, state = delta_rule(*tensors, **(gates | {"initial_state": state}), backend=backend)
        ys.append(y)
    assert relative_error(torch.cat(ys, 1), whole) <= limit("y", torch.float64), cuts
    assert relative_error(state, last) <= limit("last_state", torch.float64), cuts


def call(drawn: dict, part: slice = slice(None)) -> tuple[list[Tensor], dict]:
    """Positional and named arguments, cut to some tokens."""
    gates = {n: drawn[n] for n in ("log_decay", "beta") if drawn[n] is not None}
    gates = {n: x if x.dim() == 1 else x[:, part] for n, x in gates.items()}
    return [drawn[n][:, part] for n in "qkv"], gates | {"initial_state": drawn["initial_state"]}


# ------------------------------------------------------------------------------------------------------------ gradients
# PyTorch's own gradients, those of the reference, need no slow mode.
GRADCHECKS = [(TRUTH, True), *((backend, fast) for backend in OTHERS for fast in (True, False))]


@pytest.mark.parametrize(("backend", "fast"), GRADCHECKS, ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_gradients_pass_gradcheck(cell, backend, fast):
    case = Case(cell, T=17 if fast else 5, B=1, H=1, HV=2, K=3, V=2)
    drawn = case.draw()
    if drawn["beta"] is not None:
        drawn["beta"] = drawn["beta"].clamp(0.1, 1.9)  # steps must not leave the allowed range
    if drawn["log_decay"] is not None:
        drawn["log_decay"] = drawn["log_decay"] - 0.1
    inputs = {name: drawn[name].requires_grad_() for name in NAMES if drawn[name] is not None}

    def op(*tensors):
        named = dict(zip(inputs, tensors))
        return delta_rule(named.pop("q"), named.pop("k"), named.pop("v"), **named, backend=backend, chunk=16)

    assert torch.autograd.gradcheck(op, tuple(inputs.values()), fast_mode=fast)


@pytest.mark.parametrize("missing", ["dy", "dlast"])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", OTHERS)
def test_a_gradient_of_one_output_alone_is_right(backend, cell, missing):
    drawn = Case(cell, T=20).draw()
    drawn[missing] = torch.zeros_like(drawn[missing])
    expected = run(drawn, backend=TRUTH)
    inputs = {name: drawn[name].clone().requires_grad_() for name in NAMES if drawn[name] is not None}
    q, k, v, *_ = inputs.values()
    y, last = delta_rule(q, k, v, **{n: x for n, x in inputs.items() if n not in "qkv"}, backend=backend, chunk=16)
    (last if missing == "dy" else y).backward(drawn["dlast" if missing == "dy" else "dy"])
    for name, x in inputs.items():
        assert relative_error(x.grad, expected[f"d{name}"]) <= limit(f"d{name}", torch.float64), name


@pytest.mark.parametrize("wanted", NAMES)
@pytest.mark.parametrize("backend", OTHERS)
def test_one_input_that_learns_alone_gets_the_same_gradient(backend, wanted):
    drawn = Case("GDN", T=40).draw()
    expected = run(drawn, backend=backend)
    inputs = {name: drawn[name].clone().requires_grad_(name == wanted) for name in NAMES}
    q, k, v, *_ = inputs.values()
    y, last = delta_rule(q, k, v, **{n: x for n, x in inputs.items() if n not in "qkv"}, backend=backend)
    torch.autograd.backward((y, last), (drawn["dy"], drawn["dlast"]))
    assert torch.equal(inputs[wanted].grad, expected[f"d{wanted}"])
    assert all(x.grad is None for name, x in inputs.items() if name != wanted)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", OTHERS)
def test_gradients_scale_exactly_with_the_upstream_gradient(backend, cell):
    drawn = Case(cell, T=40).draw()
    once = run(drawn, backend=backend)
    eight = run(drawn | {"dy": drawn["dy"] * 8, "dlast": drawn["dlast"] * 8}, backend=backend)
    for name in NAMES:
        if drawn[name] is not None:
            assert torch.equal(eight[f"d{name}"], once[f"d{name}"] * 8), name


@pytest.mark.parametrize("cell", ["GDN", "RET", "KDA"])
@pytest.mark.parametrize("backend", [TRUTH, *OTHERS])
def test_gates_of_any_float_dtype_get_a_gradient_in_theirs(backend, cell):
    drawn = Case(cell, T=20, dtype=torch.bfloat16, most=1.0).draw()
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        cast = drawn | {n: drawn[n].to(torch.bfloat16).to(dtype) for n in ("log_decay", "beta") if drawn[n] is not None}
        got, expected = run(cast, backend=backend), run(cast, to=torch.float64, backend=TRUTH)
        for name in ("log_decay", "beta"):
            if drawn[name] is not None:
                assert got[f"d{name}"].dtype == dtype
                error = relative_error(got[f"d{name}"], expected[f"d{name}"])
                assert error <= limit(f"d{name}", torch.bfloat16), (name, dtype)


# ------------------------------------------------------------------------------------------------ decays at their edges
@pytest.mark.parametrize("backend", [TRUTH, *OTHERS])
@pytest.mark.parametrize("decay", [(), (8,)], ids=["head", "channel"])
@pytest.mark.parametrize("erases", [False, True], ids=["adds", "erases"])
def test_a_gate_of_zeros_is_no_gate(backend, decay, erases):
    drawn = Case("DN" if erases else "LA", T=70).draw()
    without = run(drawn, backend=backend)
    zeros = torch.zeros(2, 70, 4, *decay, dtype=torch.float64)
    with_zeros = run(drawn | {"log_decay": zeros}, backend=backend)
    for name, expected in without.items():
        assert relative_error(with_zeros[name], expected) <= limit(name, torch.float64), name


@pytest.mark.parametrize("packing", [None, (0, 3, 3, 40, 75)], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("cell", ["M2", "GDN", "GLA", "KDA"])
@pytest.mark.parametrize("backend", OTHERS)
def test_minus_infinity_resets_and_agrees(backend, cell, dtype, packing):
    drawn = Case(cell, T=75, dtype=dtype, packing=packing).draw()
    resets = torch.zeros(drawn["log_decay"].shape, dtype=torch.bool)
    resets[:, [0, 5, 6, 31, 32, 50, 63, 64, 74]] = True
    if resets.dim() == 4:
        resets[..., 1::2] = False
    drawn["log_decay"] = drawn["log_decay"].masked_fill(resets, -torch.inf)
    packing = list(packing) if packing else None
    got = run(drawn, packing=packing, backend=backend)
    expected = run(drawn, to=torch.float64, packing=packing, backend=TRUTH)
    for name in expected:
        assert relative_error(got[name], expected[name]) <= limit(name, dtype), name
    assert torch.equal(got["dlog_decay"][resets], torch.zeros_like(got["dlog_decay"][resets]))


@pytest.mark.parametrize("cell", ["M2", "GDN", "GLA", "KDA"])
@pytest.mark.parametrize("backend", [TRUTH, *OTHERS])
def test_after_a_reset_nothing_of_the_past_is_left(backend, cell):
    drawn = Case(cell, T=75).draw()
    drawn["log_decay"][:, 40] = -torch.inf
    changed = {n: None if x is None else x.clone() for n, x in drawn.items()}
    for name in "qkv":
        changed[name][:, :40] = torch.randn_like(changed[name][:, :40])
    changed["initial_state"] *= 3
    for one, other in zip(*(delta_rule(*call(d)[0], **call(d)[1], backend=backend) for d in (drawn, changed))):
        after = slice(40, None) if one.shape[1] == 75 else slice(None)
        assert torch.equal(one[:, after], other[:, after])


# -------------------------------------------------------------------------------------------------------------- packing
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", [TRUTH, *OTHERS])
def test_packed_documents_give_what_each_gives_alone(backend, cell):
    offsets = [0, 0, 15, 48, 48, 48, 49, 120, 120]
    drawn = Case(cell, T=120, packing=tuple(offsets)).draw()
    together = run(drawn, packing=offsets, backend=backend)
    for n, (start, end) in enumerate(pairwise(offsets)):
        tensors, gates = call(drawn, slice(start, end))
        alone = dict(zip("qkv", tensors)) | {"log_decay": None, "beta": None} | gates
        alone |= {"initial_state": drawn["initial_state"][n : n + 1]}
        alone |= {"dy": drawn["dy"][:, start:end], "dlast": drawn["dlast"][n : n + 1]}
        for name, expected in run(alone, backend=backend).items():
            got = together[name]
            if name == "dlog_decay" and CELLS[cell][0] == "constant":
                continue  # the sum over all documents
            got = got[n : n + 1] if name in ("last_state", "dinitial_state") else got[:, start:end]
            assert relative_error(got, expected) <= limit(name, torch.float64), (name, n)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", [TRUTH, *OTHERS])
def test_changing_one_packed_document_leaves_all_others_bit_equal(backend, cell, dtype):
    offsets = [0, 9, 40, 75]
    drawn = Case(cell, T=75, packing=tuple(offsets), dtype=dtype).draw()
    changed = {n: None if x is None else x.clone() for n, x in drawn.items()}
    for name in ("q", "k", "v", "dy"):
        changed[name][:, 9:40] *= 1e3
    changed["v"][:, 20] = torch.inf  # even what is not finite stays inside
    changed["initial_state"][1] = torch.nan
    before, after = run(drawn, packing=offsets, backend=backend), run(changed, packing=offsets, backend=backend)
    for name in before:
        if name == "dlog_decay" and CELLS[cell][0] == "constant":
            continue  # the sum over all documents
        pick = [0, 2] if name in ("last_state", "dinitial_state") else [*range(9), *range(40, 75)]
        one, other = (x[pick] if len(pick) == 2 else x[:, pick] for x in (before[name], after[name]))
        assert torch.equal(one, other), name


@pytest.mark.parametrize("backend", [TRUTH, *OTHERS])
@pytest.mark.parametrize("T", [0, 1, 2])
@pytest.mark.parametrize("cell", CELLS)
def test_documents_without_tokens_return_the_state_they_were_given(cell, T, backend):
    drawn = Case(cell, T=T, packing=(0, 0, T, T)).draw()
    got = run(drawn, packing=[0, 0, T, T], backend=backend)
    assert got["y"].shape == (1, T, 4, 6)
    for n in (0, 2) if T else (0, 1, 2):
        assert torch.equal(got["last_state"][n], drawn["initial_state"][n])
        assert torch.equal(got["dinitial_state"][n], drawn["dlast"][n])


@pytest.mark.parametrize("backend", OTHERS)
def test_many_short_documents_take_as_many_steps_as_the_longest(backend):
    from zoo_kernels.delta.layout import packed
    from zoo_kernels.packing import Packing

    packing = Packing.from_offsets([0, *range(100, 1100, 5)])
    assert len(packed(packing, 32, torch.device("cpu")).rows_before) - 1 == 4
    assert packed(packing, 32, torch.device("cpu")) is packed(packing, 32, torch.device("cpu"))
    compare(Case("GDN", T=1095, packing=packing.offsets, H=1, HV=1, K=4, V=4), backend)


# ----------------------------------------------------------------------------------------------------- memory and modes
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", OTHERS)
def test_strides_do_not_matter(backend, cell):
    drawn = Case(cell, T=40).draw()
    twisted = {}
    for name, x in drawn.items():
        if x is None or x.dim() < 3:
            twisted[name] = x
            continue
        wide = x.transpose(1, 2).repeat_interleave(2, dim=-1)
        wide[..., 1::2] = torch.nan  # what lies between the numbers must not be read
        twisted[name] = wide[..., ::2].transpose(1, 2)
    got, expected = run_as_they_are(twisted, backend), run_as_they_are(drawn, backend)
    for name in expected:
        assert torch.equal(got[name], expected[name]), name


def run_as_they_are(drawn: dict, backend: str) -> dict[str, Tensor]:
    """As :func:`run`, without a copy that would straighten the strides."""
    inputs = {name: drawn[name].detach().requires_grad_() for name in NAMES if drawn[name] is not None}
    q, k, v, *_ = inputs.values()
    y, last = delta_rule(q, k, v, **{n: x for n, x in inputs.items() if n not in "qkv"}, backend=backend)
    gradients = torch.autograd.grad((y, last), list(inputs.values()), (drawn["dy"], drawn["dlast"]))
    return {"y": y, "last_state": last, **{f"d{name}": g for name, g in zip(inputs, gradients)}}


@pytest.mark.parametrize("backend", OTHERS)
def test_an_expanded_upstream_gradient_is_right(backend):
    drawn = Case("GDN", T=40).draw()
    spread = drawn | {"dy": torch.ones((), dtype=torch.float64).expand(drawn["dy"].shape)}
    whole = drawn | {"dy": torch.ones_like(drawn["dy"])}
    for name, expected in run_as_they_are(whole, backend).items():
        assert torch.equal(run_as_they_are(spread, backend)[name], expected), name


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", OTHERS)
def test_memory_that_was_never_written_is_never_read(backend, cell, monkeypatch):
    drawn = Case(cell, T=45, dtype=torch.float32).draw()
    clean = run(drawn, backend=backend)

    def poisoned(make):
        return lambda *args, **kwargs: make(*args, **kwargs).fill_(torch.nan)

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
    got = run(drawn, backend=backend)
    monkeypatch.undo()
    for name, expected in clean.items():
        assert torch.equal(got[name], expected), name


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", OTHERS)
def test_repeats_are_bit_equal(backend, cell):
    drawn = Case(cell, T=75, dtype=torch.float32).draw()
    first = run(drawn, backend=backend)
    for _ in range(5):
        again = run(drawn, backend=backend)
        assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize("backend", OTHERS)
def test_large_values_in_half_precision_stay_as_finite_as_the_truth(backend):
    drawn = Case("LA", T=200, dtype=torch.float16, K=16, V=8).draw()
    drawn["v"] = drawn["v"] * 100
    drawn["k"] = drawn["k"] * 8
    _, last = delta_rule(*call(drawn)[0], **call(drawn)[1], scale=1e-3, backend=backend)
    y, _ = delta_rule(*call(drawn)[0], **call(drawn)[1], scale=1e-3, backend=backend)
    assert last.abs().max() > torch.finfo(torch.float16).max / 8  # larger than fp16 sums would like
    assert y.isfinite().all()
    truth, _ = delta_rule(
        *(x.double() for x in call(drawn)[0]), initial_state=drawn["initial_state"].double(), scale=1e-3
    )
    assert relative_error(y, truth) <= limit("y", torch.float16)


@pytest.mark.parametrize("backend", [TRUTH, *OTHERS])
def test_a_nan_comes_out_as_nan(backend):
    drawn = Case("GDN", T=40).draw()
    drawn["beta"][0, 20, 1] = torch.nan
    y, _ = delta_rule(*call(drawn)[0], **call(drawn)[1], backend=backend)
    assert y[0, 20:, 1].isnan().all()
    assert y[1].isfinite().all()
    assert y[0, :, 0].isfinite().all()


@pytest.mark.parametrize("backend", [TRUTH, *OTHERS])
def test_autocast_changes_nothing_inside(backend):
    drawn = Case("GDN", T=40, dtype=torch.float32).draw()
    plain = run(drawn, backend=backend)
    inputs = {name: drawn[name].clone().requires_grad_() for name in NAMES}
    q, k, v, *_ = inputs.values()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, last = delta_rule(q, k, v, **{n: x for n, x in inputs.items() if n not in "qkv"}, backend=backend)
    torch.autograd.backward((y, last), (drawn["dy"], drawn["dlast"]))
    cast = {"y": y, "last_state": last, **{f"d{name}": x.grad for name, x in inputs.items()}}
    for name, expected in plain.items():
        assert torch.equal(cast[name], expected), name


@pytest.mark.parametrize("backend", OTHERS)
def test_a_backward_under_autocast_is_still_exact(backend):
    drawn = Case("GDN", T=40, dtype=torch.float32).draw()
    plain = run(drawn, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = run(drawn, backend=backend)
    for name, expected in plain.items():
        assert torch.equal(cast[name], expected), name


@pytest.mark.parametrize("backend", [TRUTH, *OTHERS])
def test_recomputed_activations_give_the_same_gradients(backend):
    from torch.utils.checkpoint import checkpoint

    offsets = [0, 7, 7, 40]
    drawn = Case("GDN", T=40, packing=tuple(offsets)).draw()
    plain = run(drawn, packing=offsets, backend=backend)
    inputs = {name: drawn[name].clone().requires_grad_() for name in NAMES}

    def op(q, k, v, log_decay, beta, state):
        gates = {"log_decay": log_decay, "beta": beta, "initial_state": state}
        return delta_rule(q, k, v, **gates, packing=offsets, backend=backend)

    y, last = checkpoint(op, *inputs.values(), use_reentrant=False)
    torch.autograd.backward((y, last), (drawn["dy"], drawn["dlast"]))
    for name, x in inputs.items():
        assert torch.equal(x.grad, plain[f"d{name}"]), name


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", OTHERS)
def test_shapes_are_known_on_the_meta_device(backend, cell):
    drawn = replace(Case(cell, T=45), device="meta").draw()
    y, last = delta_rule(*call(drawn)[0], **call(drawn)[1], backend=backend)
    assert y.is_meta
    assert y.shape == drawn["v"].shape
    assert last.shape == drawn["initial_state"].shape


@pytest.mark.parametrize("backend", OTHERS)
def test_nothing_is_kept_for_a_backward_that_cannot_come(backend):
    drawn = Case("GDN", T=40).draw()
    tensors, gates = call(drawn)
    y, _ = delta_rule(*tensors, **gates, backend=backend)
    assert y.grad_fn is None
    tensors[0].requires_grad_()
    with torch.no_grad():
        quiet, _ = delta_rule(*tensors, **gates, backend=backend)
    assert torch.equal(quiet, y)


def test_the_reference_counts_the_flops_of_the_recurrent_form():
    from torch.utils.flop_counter import FlopCounterMode

    T, HV, K, V = 11, 4, 8, 6
    for cell, (_, erases) in CELLS.items():
        drawn = Case(cell, T=T, B=1, H=2, HV=HV, K=K, V=V).draw()
        with FlopCounterMode(display=False) as counter:
            delta_rule(*call(drawn)[0], **call(drawn)[1], backend=TRUTH)
        per_token = 2 + 2 + 2 * erases  # write, read by query, read by key; the decay is elementwise, and not seen
        assert counter.get_total_flops() == per_token * T * HV * K * V, cell


@GRAPH_BREAK
def test_compiled_code_leaves_the_op_as_it_is_for_every_length_and_packing():
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()

    def model(x, offsets):
        y, last = delta_rule(
            x * 2, torch.nn.functional.normalize(x, dim=-1), x, beta=x[..., 0].sigmoid(), packing=offsets
        )
        return y * 3, last

    compiled = torch.compile(model, backend=counter, dynamic=True)
    model(torch.randn(1, 4, 2, 8), [0, 4])  # the door is closed by the first call after the compiler was loaded
    counts = []
    for T in (40, 50, 60, 33, 70):
        x = torch.randn(1, T, 2, 8, requires_grad=True)
        offsets = torch.tensor([0, 3, T // 2, T])
        for got, expected in zip(compiled(x, offsets), model(x, offsets)):
            assert torch.equal(got, expected)
        counts.append(counter.frame_count)
    assert counts[-1] == counts[1], counts


# ------------------------------------------------------------------------------------------------------------------ GPU
@pytest.mark.gpu
@pytest.mark.parametrize("packing", [None, (0, 0, 5, 5, 138, 139, 300, 300)], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", OTHERS)
def test_a_gpu_agrees_with_the_reference(backend, cell, dtype, packing):
    compare(Case(cell, T=300, K=64, V=48, dtype=dtype, packing=packing, most=1.0, device="cuda"), backend)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", OTHERS)
def test_a_gpu_never_makes_the_host_wait(backend, cell, dtype):
    from zoo_kernels.packing import Packing

    offsets = (0, 5, 5, 138, 300)
    drawn = Case(cell, T=300, K=64, V=48, dtype=dtype, packing=offsets, device="cuda").draw()
    run(drawn, packing=list(offsets), backend=backend)  # first calls load libraries
    packing = Packing.from_offsets(offsets).to("cuda", non_blocking=True)
    with no_waits():
        run(drawn, packing=packing, backend=backend)


@pytest.mark.gpu
@pytest.mark.parametrize("cell", ["GDN", "M2", "KDA"])
@pytest.mark.parametrize("backend", OTHERS)
def test_repeats_on_a_gpu_are_bit_equal(backend, cell):
    drawn = Case(cell, T=300, K=64, V=64, dtype=torch.bfloat16, device="cuda").draw()
    first = run(drawn, backend=backend)
    for _ in range(20):
        again = run(drawn, backend=backend)
        assert all(torch.equal(again[name], first[name]) for name in first)


@GRAPH_BREAK
@pytest.mark.gpu
@pytest.mark.parametrize("cell", ["GDN", "KDA"])
def test_compiled_code_on_a_gpu_gives_the_eager_numbers(cell):
    drawn = Case(cell, T=200, K=32, V=32, dtype=torch.bfloat16, device="cuda").draw()

    def model(q, k, v, log_decay, beta):
        y, last = delta_rule(q, k, v, log_decay=log_decay, beta=beta)
        return y.float().square().mean() + last.mean()

    found = []
    for function in (model, torch.compile(model, fullgraph=False)):
        inputs = [drawn[n].clone().requires_grad_() for n in NAMES[:-1]]
        function(*inputs).backward()
        found.append([x.grad for x in inputs])
    for eager, compiled in zip(*found):
        assert relative_error(compiled, eager) <= limit("dq", torch.bfloat16)


@pytest.mark.gpu
def test_values_on_a_gpu_are_looked_at_only_when_asked(monkeypatch):
    drawn = Case("DN", T=20, dtype=torch.float32, device="cuda").draw()
    drawn["beta"][0, 3, 0] = 2.5
    monkeypatch.delenv("ZOO_CHECK", raising=False)
    delta_rule(*call(drawn)[0], **call(drawn)[1])
    monkeypatch.setenv("ZOO_CHECK", "1")
    with pytest.raises(ValueError, match=r"beta must lie in \[0, 2\], got 2.5"):
        delta_rule(*call(drawn)[0], **call(drawn)[1])
