"""The Triton kernels of the delta rule: outputs and gradients against float64, interpreted, and on a GPU in bf16."""

import math
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch

from tests.kernels.delta_cases import (
    DEVICES,
    INPUTS,
    MEMBERS,
    Case,
    arguments,
    assert_equal,
    check,
    errors,
    filled,
    run,
    truth,
)
from zoo_kernels import device
from zoo_kernels.accuracy import limit, relative_error
from zoo_kernels.delta import delta_rule

if device.missing(torch.device("cuda" if torch.cuda.is_available() else "cpu")) is not None:
    pytest.skip("Triton kernels cannot run here", allow_module_level=True)

from zoo_kernels.delta import tables, triton_backend

GATED = ["M2", "GDN", "GLA", "KDA"]
# Leading, middle, double and trailing empty documents, and one longer than a chunk.
DOCUMENTS = (0, 0, 3, 68, 68, 68, 100, 100)

every_device = pytest.mark.parametrize("where", DEVICES)
every_member = pytest.mark.parametrize("member", [member for member in MEMBERS if member != "RET, erasing"])


@pytest.fixture
def short_segments(monkeypatch):
    """Sequences are split at every chunk."""
    monkeypatch.setattr(tables, "LEAST_CHUNKS", 1)


def split(case: Case) -> int:
    """How many segments the case's sequences are cut into."""
    q, _, v, log_decay, beta, _, offsets, chunk_table, *_ = arguments(case)
    return triton_backend.Plan.of(q, v, log_decay, beta, offsets, chunk_table).tables(v, offsets).pieces


# ------------------------------------------------------------------------------------------------------------ agreement
@every_device
@pytest.mark.parametrize("T", [1, 63, 64, 65, 150])
@every_member
def test_outputs_and_gradients_are_those_of_the_recurrence(member, T, where):
    check(Case(member, T=T, H=1 if T == 150 else 2, group=2 if T == 65 else 1, seed=T).on(where))


@every_device
@every_member
def test_half_precision_is_served(member, where):
    check(Case(member, T=70, group=2, dtype=torch.float16).on(where, dtype=torch.float16))


@every_device
@pytest.mark.parametrize("packing", [None, (0, 0, 0)], ids=["dense", "packed"])
@every_member
def test_no_tokens_hand_the_state_on(member, packing, where):
    case = Case(member, T=0, B=2, H=2, packing=packing).on(where)
    drawn = case.draw()
    got = run(drawn, backend="triton", **case.options())
    assert got["y"].shape == drawn["v"].shape
    assert torch.equal(got["last_state"], drawn["initial_state"])
    assert torch.equal(got["dinitial_state"], drawn["dlast"])
    assert not any(got[f"d{name}"].any() for name in INPUTS[:5] if drawn[name] is not None)


@every_device
@pytest.mark.parametrize("outputs", ["y", "last_state"])
@pytest.mark.parametrize("member", ["DN", "M2", "GDN", "KDA"])
def test_a_gradient_of_one_output_alone_is_right(member, outputs, where):
    check(Case(member, T=70).on(where), outputs=outputs)


@every_device
@every_member
def test_no_first_state_is_one_of_zeros(member, where):
    case = Case(member, T=70, group=2, state=False).on(where)
    drawn = case.draw()
    got = check(case, drawn)
    zeros = torch.zeros_like(drawn["dlast"])
    expected = run(drawn | {"initial_state": zeros}, backend="triton")
    del expected["dinitial_state"]
    assert_equal(got, expected)


@every_device
@pytest.mark.parametrize("wanted", INPUTS)
def test_one_input_that_learns_alone_gets_the_same_gradient(wanted, where):
    case = Case("GDN", T=70).on(where)
    drawn = case.draw()
    expected = run(drawn, backend="triton")
    inputs = {name: drawn[name].requires_grad_(name == wanted) for name in INPUTS}
    torch.autograd.backward(delta_rule(**inputs, backend="triton"), (drawn["dy"], drawn["dlast"]))
    assert torch.equal(inputs[wanted].grad, expected[f"d{wanted}"])
    assert all(x.grad is None for name, x in inputs.items() if name != wanted)


@every_device
@pytest.mark.parametrize(("H", "group"), [(1, 4), (2, 2), (3, 1), (1, 12)])
@pytest.mark.parametrize("member", ["LA", "M2", "GDN", "KDA"])
def test_value_heads_share_key_heads(member, H, group, where):
    check(Case(member, T=66 if group < 12 else 7, H=H, group=group).on(where))


@every_device
@pytest.mark.parametrize(("K", "V"), [(1, 1), (20, 12), (16, 40), (33, 16)])
@pytest.mark.parametrize("member", ["DN", "M2", "GDN", "KDA"])
def test_keys_and_values_have_sizes_of_their_own(member, K, V, where):
    # Many heads of single numbers: the error of one says nothing where its sum happens to cancel.
    heads = 16 if K * V == 1 else 1
    check(Case(member, T=66, H=heads, K=K, V=V).on(where, K=K, V=V))


@every_device
@pytest.mark.parametrize("size", [(160, 16), (16, 264)], ids=str)
@pytest.mark.parametrize("member", ["GDN", "KDA"])
def test_wide_keys_and_wide_values_are_served(member, size, where):
    K, V = size
    check(Case(member, T=65, K=K, V=V).on(where, K=K, V=V))


# ---------------------------------------------------------------------------------------------------------------- gates
@every_device
@pytest.mark.parametrize("beta", [(0.0, 0.0), (0.0, 0.01), (0.98, 1.0), (1.99, 2.0)], ids=str)
@pytest.mark.parametrize("member", ["DN", "GDN", "KDA"])
def test_repeated_keys_with_any_beta_agree(member, beta, where):
    check(Case(member, T=100, keys="repeated", beta=beta).on(where))


@every_device
@pytest.mark.parametrize("member", ["DN", "GDN", "KDA"])
def test_keys_that_resemble_each_other_agree(member, where):
    check(Case(member, T=100, keys="positive", beta=(0.0, 2.0)).on(where))


@every_device
@pytest.mark.parametrize(
    "decay", [(0.0, 0.0), (-0.01, 0.0), (-1.0, -1.0), (-8.0, -8.0), (-30.0, -20.0), (-50.0, 0.0)], ids=str
)
@pytest.mark.parametrize("member", ["RET", "RET, erasing", *GATED])
def test_slow_and_violent_decays_agree(member, decay, where):
    check(Case(member, T=70, decay=decay).on(where))


@every_device
@pytest.mark.parametrize("packing", [None, DOCUMENTS], ids=["dense", "packed"])
@pytest.mark.parametrize("member", GATED)
def test_minus_infinity_resets_and_has_no_slope(member, packing, where):
    case = Case(member, T=100, packing=packing).on(where)
    drawn = case.draw()
    resets = torch.zeros_like(drawn["log_decay"], dtype=torch.bool)
    resets[:, [0, 5, 6, 31, 32, 50, 63, 64, 74, 99]] = True
    if resets.dim() == 4:
        resets[..., 1::2] = False
    drawn["log_decay"] = drawn["log_decay"].masked_fill(resets, -torch.inf)
    got = check(case, drawn)
    assert not got["dlog_decay"][resets].any()


@every_device
@pytest.mark.parametrize("member", GATED)
def test_after_a_reset_nothing_of_the_past_is_left(member, where):
    drawn = Case(member, T=100).on(where).draw()
    drawn["log_decay"][:, 70] = -torch.inf
    changed = {name: None if x is None else x.clone() for name, x in drawn.items()}
    for name in "qkv":
        changed[name][:, :70] *= 3.0
    changed["initial_state"] *= 3.0
    one, other = (run(x, backend="triton") for x in (drawn, changed))
    assert torch.equal(one["y"][:, 70:], other["y"][:, 70:])
    assert torch.equal(one["last_state"], other["last_state"])


@every_device
@pytest.mark.parametrize("kind", ["head", "channel"])
@pytest.mark.parametrize("member", ["LA", "DN"])
def test_no_gate_is_a_gate_of_zeros(member, kind, where):
    case = Case(member, T=70, group=2).on(where)
    drawn = case.draw()
    zeros = torch.zeros(1, 70, 2, *[case.K][: kind == "channel"], device=where)
    without, zero = run(drawn, backend="triton"), run(drawn | {"log_decay": zeros}, backend="triton")
    del zero["dlog_decay"]
    assert all(error <= limit(name, case.dtype) for name, error in errors(zero, without).items())


@every_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("member", ["RET", "GDN", "KDA"])
def test_gates_of_any_float_dtype_get_a_gradient_in_theirs(member, dtype, where):
    case = Case(member, T=66, gates=dtype).on(where)
    drawn = case.draw()
    got, expected = run(drawn, backend="triton"), run(drawn, to=torch.float64, backend="recurrent")
    for name in ("dlog_decay", "dbeta"):
        if name in got:
            assert got[name].dtype == dtype
            allowed = limit(name, torch.bfloat16 if dtype != torch.float64 else case.dtype)
            assert relative_error(got[name], expected[name]) <= allowed, name


# ------------------------------------------------------------------------------------------------------------- segments
@every_device
@pytest.mark.parametrize("packing", [None, DOCUMENTS], ids=["dense", "packed"])
@every_member
def test_a_split_scan_gives_what_the_recurrence_gives(member, packing, where, short_segments):
    case = Case(member, T=100 if packing else 150, packing=packing).on(where)
    assert split(case) > (1 if packing is None else len(packing) - 1)
    check(case)


@every_device
@pytest.mark.parametrize("decay", [(-0.01, 0.0), (-8.0, -8.0)], ids=str)
@pytest.mark.parametrize("member", ["GDN", "M2", "KDA"])
def test_a_split_scan_of_several_chunks_a_segment_agrees(member, decay, where, monkeypatch):
    monkeypatch.setattr(tables, "LEAST_CHUNKS", 2)
    case = Case(member, T=300, decay=decay).on(where)
    assert split(case) == 3
    check(case)


@every_device
@pytest.mark.parametrize("outputs", ["y", "last_state"])
@pytest.mark.parametrize("member", ["DN", "LA"])
def test_a_split_scan_needs_neither_a_first_state_nor_both_gradients(member, outputs, where, short_segments):
    check(Case(member, T=130, state=False).on(where), outputs=outputs)


@every_device
def test_a_split_scan_drops_nothing_that_long_keys_keep_alive(where, short_segments, monkeypatch):
    # |1 - beta k.k| is 2.6: what seems to fade by exp(-0.97) a token, 2^-90 a chunk, does not, and must cross segments.
    case = Case("GDN", T=140, decay=(-1.0, -0.95), beta=(1.0, 1.0)).on(where, dtype=torch.float32)
    drawn = case.draw()
    drawn["k"] = drawn["k"][:, :1].expand_as(drawn["k"]) * 1.909
    expected = truth(case, drawn)
    cut = errors(run(drawn, backend="triton"), expected)
    monkeypatch.undo()
    assert split(case) == 1
    whole = errors(run(drawn, backend="triton"), expected)
    assert all(error <= max(limit(name, case.dtype), 2.0 * whole[name]) for name, error in cut.items()), (cut, whole)


# -------------------------------------------------------------------------------------------------------------- packing
@every_device
@every_member
def test_packed_documents_give_what_each_gives_alone(member, where):
    case = Case(member, T=100, packing=DOCUMENTS).on(where)
    drawn = case.draw()
    together = run(drawn, backend="triton", **case.options())
    for n, (start, end) in enumerate(pairwise(DOCUMENTS)):
        if start == end:
            assert torch.equal(together["last_state"][n], drawn["initial_state"][n])
            assert torch.equal(together["dinitial_state"][n], drawn["dlast"][n])
            continue
        own = {name: pick(name, x, n, start, end) for name, x in drawn.items()}
        alone = run(own, backend="triton")
        for name, expected in alone.items():
            if name == "dlog_decay" and member == "RET":
                continue  # the sum over all documents
            error = relative_error(pick(name, together[name], n, start, end), expected)
            assert error <= limit(name, case.dtype), (name, n)


def pick(name: str, x: torch.Tensor | None, document: int, start: int, end: int) -> torch.Tensor | None:
    """What of an input, output or gradient belongs to one document."""
    if x is None or x.dim() == 1:
        return x
    return x[document : document + 1] if name in ("dlast", "last_state") or "initial" in name else x[:, start:end]


@every_device
@pytest.mark.parametrize("t", [1, 34, 64, 100])
@pytest.mark.parametrize("decay", [(-0.5, 0.0), (-4.0, 0.0)])
@every_member
def test_later_tokens_change_no_earlier_output(member, decay, t, where):
    """Not by a bit; under decays by channel by rounding, since those of a whole chunk choose how it is computed."""
    case = Case(member, T=150, decay=decay, seed=t).on(where)
    drawn, other = case.draw(), replace(case, seed=t + 1).draw()
    mixed = {
        name: torch.cat([x[:, :t], 3 * other[name][:, t:]], 1)
        if name in ("q", "k", "v", "log_decay") and x.dim() > 1
        else x
        for name, x in drawn.items()
        if x is not None
    }
    ys = []
    for inputs in (drawn, mixed):
        given = {name: x for name, x in inputs.items() if name in INPUTS and x is not None}
        ys.append(delta_rule(**given, backend="triton")[0])
    assert not torch.equal(ys[0][:, t:], ys[1][:, t:])
    if MEMBERS[member][0] == "channel":
        assert relative_error(ys[1][:, :t], ys[0][:, :t]) < (1e-6 if case.dtype == torch.float32 else 5e-3)
    else:
        assert torch.equal(ys[1][:, :t], ys[0][:, :t])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which the interpreter computes with
@every_device
@every_member
def test_changing_one_packed_document_leaves_all_others_bit_equal(member, where):
    offsets = (0, 9, 80, 100)
    case = Case(member, T=100, packing=offsets).on(where)
    drawn = case.draw()
    changed = {name: None if x is None else x.clone() for name, x in drawn.items()}
    for name in ("q", "k", "v", "dy"):
        changed[name][:, 9:80] *= 1e3
    changed["v"][:, 20] = torch.inf  # even what is not finite stays inside
    changed["initial_state"][1] = torch.nan
    before, after = (run(x, backend="triton", **case.options()) for x in (drawn, changed))
    for name in before:
        if name == "dlog_decay" and member == "RET":
            continue  # the sum over all documents
        for n, (start, end) in ((0, (0, 9)), (2, (80, 100))):
            assert torch.equal(pick(name, before[name], n, start, end), pick(name, after[name], n, start, end)), name


# -------------------------------------------------------------------------------------------------------------- memory
@every_device
@pytest.mark.parametrize("member", ["LA", "GDN", "KDA"])
def test_strides_do_not_matter(member, where):
    case = Case(member, T=20, H=2, group=2).on(where)
    drawn = case.draw()
    twisted = dict(drawn)
    # q and k as halves of one tensor, v with its heads outside, all else with NaN between the numbers.
    twisted["q"], twisted["k"] = torch.cat([drawn["q"], drawn["k"]], -1).chunk(2, -1)
    twisted["v"] = drawn["v"].transpose(1, 2).contiguous().transpose(1, 2)
    for name in ("log_decay", "beta", "initial_state", "dy", "dlast"):
        if drawn[name] is not None:
            wide = drawn[name].unsqueeze(-1).repeat_interleave(2, -1)
            wide[..., 1] = torch.nan
            twisted[name] = wide[..., 0]
    assert_equal(run(twisted, backend="triton"), run(drawn, backend="triton"))
    expanded = drawn | {"dy": torch.ones((), dtype=case.dtype, device=where).expand_as(drawn["dy"])}
    whole = drawn | {"dy": torch.ones_like(drawn["dy"])}
    assert_equal(run(expanded, backend="triton"), run(whole, backend="triton"))


@every_device
def test_queries_and_keys_may_lie_side_by_side_in_wider_rows(where):
    case = Case("GDN", T=20, H=2, group=2).on(where)
    drawn = case.draw()
    sizes = [2 * case.K, 2 * case.K, 4 * case.V]
    rows = torch.cat([drawn[name].flatten(2) for name in "qkv"], -1)
    views = {name: x.unflatten(2, (-1, drawn[name].shape[3])) for name, x in zip("qkv", rows.split(sizes, -1))}
    assert_equal(run(drawn | views, backend="triton"), run(drawn, backend="triton"))


@every_device
@every_member
def test_memory_that_was_never_written_is_never_read(member, where, short_segments):
    case = Case(member, T=100, K=20, V=20, packing=DOCUMENTS).on(where, K=60, V=60)
    drawn = case.draw()
    clean = run(drawn, backend="triton", **case.options())
    with filled(math.nan):
        got = run(drawn, backend="triton", **case.options())
    assert_equal(got, clean)


@every_device
@every_member
def test_repeats_are_bit_equal(member, where):
    drawn = Case(member, T=66, B=2).on(where, T=512).draw()
    assert_equal(run(drawn, backend="triton"), run(drawn, backend="triton"))


@every_device
def test_inputs_are_left_as_they_are_and_outputs_are_new_memory(where):
    drawn = Case("GDN", T=0).on(where).draw()
    before = {name: x.clone() for name, x in drawn.items()}
    y, last = delta_rule(**{name: drawn[name] for name in INPUTS}, backend="triton")
    last.fill_(7.0)
    y.fill_(7.0)
    assert_equal(drawn, before)


@contextmanager
def short_of_memory(allowed: int):
    """Inside, memory is refused after so many tensors; gives the list that counts them."""
    made = []

    def limited(make):
        def allocate(*args, **kwargs):
            if len(made) >= allowed:
                raise torch.OutOfMemoryError("no memory is left")
            made.append(None)
            return make(*args, **kwargs)

        return allocate

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "empty_like"), (torch.Tensor, "new_empty")):
            patch.setattr(owner, name, limited(getattr(owner, name)))
        yield made


@every_device
@pytest.mark.parametrize("share", [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
@pytest.mark.parametrize("member", ["GDN", "KDA"])
def test_running_out_of_memory_leaves_nothing_half_done(member, share, where):
    case = Case(member, T=66).on(where)
    drawn = case.draw()
    before = {name: x.clone() for name, x in drawn.items()}
    clean = run(drawn, backend="triton")
    inputs = {name: drawn[name].detach().requires_grad_() for name in INPUTS}
    outputs = delta_rule(**inputs, backend="triton")
    upstream = (drawn["dy"], drawn["dlast"])

    def refused(call, counted):
        with short_of_memory(10**6) as made:
            counted()
        with short_of_memory(round(share * (len(made) - 1))), pytest.raises(torch.OutOfMemoryError):
            call()

    gradients = partial(torch.autograd.grad, outputs, list(inputs.values()), upstream, retain_graph=True)
    refused(partial(torch.autograd.backward, outputs, upstream, retain_graph=True), gradients)
    forward = partial(delta_rule, **inputs, backend="triton")
    refused(forward, forward)
    assert all(x.grad is None for x in inputs.values())
    assert_equal(drawn, before)
    torch.autograd.backward(outputs, upstream)  # the same graph again, now with memory
    assert_equal({f"d{name}": x.grad for name, x in inputs.items()}, {f"d{name}": clean[f"d{name}"] for name in INPUTS})
