"""The delta rule's Triton ops in PyTorch's house: registration, compilers, checkpoints, autocast, FLOPs, refusals."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.kernels.delta_cases import DEVICES, INPUTS, MEMBERS, Case, arguments, assert_equal, filled, run
from zoo_kernels import device
from zoo_kernels.accuracy import limit, relative_error
from zoo_kernels.backend import observe
from zoo_kernels.delta import delta_rule

if device.missing(torch.device("cuda" if torch.cuda.is_available() else "cpu")) is not None:
    pytest.skip("Triton kernels cannot run here", allow_module_level=True)

from zoo_kernels.delta import tables, triton_backend

every_device = pytest.mark.parametrize("where", DEVICES)


@every_device
@pytest.mark.parametrize("packing", [None, (0, 3, 3, 66)], ids=["dense", "packed"])
@pytest.mark.parametrize("member", ["LA", "GDN", "KDA"])
def test_the_custom_op_keeps_pytorchs_rules(member, packing, where):
    case = Case(member, T=66, packing=packing, state=member != "LA").on(where)
    with filled(0.0):  # it compares all that is allocated, also what nobody reads
        torch.library.opcheck(torch.ops.zoo_kernels.delta_chunkwise, arguments(case))


@every_device
@pytest.mark.parametrize("save", [False, True], ids=["recomputed", "saved"])
@pytest.mark.parametrize("member", ["LA", "GDN", "KDA"])
def test_fake_outputs_have_the_shapes_of_real_ones(member, save, where, monkeypatch):
    monkeypatch.setattr(tables, "LEAST_CHUNKS", 1)  # a workspace for segments too
    from torch._subclasses.fake_tensor import FakeTensorMode

    case = Case(member, T=100, packing=(0, 0, 3, 68, 68, 100, 100)).on(where)
    given = (*arguments(case)[:-1], save)
    real = torch.ops.zoo_kernels.delta_chunkwise(*given)
    with FakeTensorMode() as mode:
        fake = torch.ops.zoo_kernels.delta_chunkwise(
            *(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in given)
        )
    assert [(x.shape, x.dtype, x.stride()) for x in fake] == [(x.shape, x.dtype, x.stride()) for x in real]


@every_device
@pytest.mark.parametrize("member", MEMBERS)
def test_states_that_were_saved_give_the_gradients_of_states_computed_again(member, where):
    case = Case(member, T=100, group=2).on(where)
    upstream = [case.draw()[name] for name in ("dy", "dlast")]
    found = []
    for save in (False, True):
        given = (*arguments(case)[:-1], save)
        outputs = torch.ops.zoo_kernels.delta_chunkwise(*given)[:2]
        learning = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
        found.append([*outputs, *torch.autograd.grad(outputs, learning, upstream)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@every_device
@pytest.mark.parametrize("least", [1, 8], ids=["segments", "whole"])
@pytest.mark.parametrize("save", [False, True], ids=["recomputed", "saved"])
@pytest.mark.parametrize("member", ["LA", "GDN", "KDA"])
def test_calls_past_the_dispatcher_give_the_bits_of_the_op(member, save, least, where, monkeypatch):
    monkeypatch.setattr(tables, "LEAST_CHUNKS", least)
    case = Case(member, T=100).on(where)
    upstream = [case.draw()[name] for name in ("dy", "dlast")]
    op, past = torch.ops.zoo_kernels.delta_chunkwise, triton_backend.delta_chunkwise
    found = []
    # The last: what the forward kept outside of the dispatcher is given to the op of the backward.
    for call, watcher in ((op, nullcontext()), (past, nullcontext()), (past, FlopCounterMode(display=False))):
        given = (*arguments(case)[:-1], save)
        outputs = call(*given)[:2]
        learning = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
        with watcher:
            found.append([*outputs, *torch.autograd.grad(outputs, learning, upstream)])
    assert all(torch.equal(one, other) for again in found[1:] for one, other in zip(found[0], again, strict=True))


@every_device
@pytest.mark.parametrize("packing", [None, (0, 3, 3, 66)], ids=["dense", "packed"])
@pytest.mark.parametrize("member", ["M2", "GDN", "KDA"])
def test_compiled_code_has_no_break_and_gives_the_eager_numbers(member, packing, where):
    torch._dynamo.reset()
    case = Case(member, T=66, group=2, packing=packing).on(where)
    drawn = case.draw()
    names = [name for name in INPUTS if drawn[name] is not None]
    options = case.options()

    def model(*tensors):
        y, last = delta_rule(**dict(zip(names, tensors)), backend="triton", **options)
        return y * 2.0, last

    found = []
    backend = "inductor" if where.type == "cuda" else "aot_eager"
    for function in (model, torch.compile(model, fullgraph=True, backend=backend)):
        inputs = [drawn[name].detach().requires_grad_() for name in names]
        outputs = function(*inputs)
        found.append([*outputs, *torch.autograd.grad(outputs, inputs, (drawn["dy"], drawn["dlast"]))])
    for got, expected in zip(found[1], found[0]):
        assert relative_error(got, expected) <= limit("y", case.dtype)


@every_device
@pytest.mark.parametrize("member", MEMBERS)
def test_compiled_code_may_hold_sizes_open(member, where):
    torch._dynamo.reset()
    names = [name for name in INPUTS if Case(member).draw()[name] is not None]

    def model(*tensors):
        y, last = delta_rule(**dict(zip(names, tensors)), backend="triton")
        return y * 2.0, last

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for T, H, V in ((66, 2, 16), (40, 3, 20)):
        drawn = Case(member, T=T, B=2, H=H, V=V).on(where, V=4 * V).draw()
        found = []
        for function in (model, compiled):
            inputs = [drawn[name].detach().requires_grad_() for name in names]
            outputs = function(*inputs)
            found.append([*outputs, *torch.autograd.grad(outputs, inputs, (drawn["dy"], drawn["dlast"]))])
        for got, expected in zip(found[1], found[0]):
            assert relative_error(got, expected) <= limit("y", outputs[0].dtype)


@every_device
@pytest.mark.parametrize("member", ["GDN", "KDA"])
def test_recomputed_activations_give_the_same_gradients(member, where):
    case = Case(member, T=66, packing=(0, 3, 3, 66)).on(where)
    drawn = case.draw()
    plain = run(drawn, backend="triton", **case.options())
    inputs = {name: drawn[name].detach().requires_grad_() for name in INPUTS}

    def op(*tensors):
        return delta_rule(**dict(zip(INPUTS, tensors)), backend="triton", **case.options())

    outputs = checkpoint(op, *inputs.values(), use_reentrant=False)
    torch.autograd.backward(outputs, (drawn["dy"], drawn["dlast"]))
    assert_equal({f"d{name}": x.grad for name, x in inputs.items()}, {f"d{name}": plain[f"d{name}"] for name in INPUTS})


@every_device
@pytest.mark.parametrize("member", ["GDN", "KDA"])
def test_autocast_changes_nothing(member, where):
    drawn = Case(member, T=66).on(where, dtype=torch.float32).draw()
    plain = run(drawn, backend="triton")
    with torch.autocast(where.type, dtype=torch.bfloat16):
        cast = run(drawn, backend="triton")
    assert_equal(cast, plain)


@every_device
@pytest.mark.parametrize("member", MEMBERS)
def test_the_flops_of_products_are_counted(member, where):
    case = Case(member, T=64, B=2, group=2, K=16, V=32).on(where)
    drawn, erases = case.draw(), MEMBERS[member][1]
    inputs = {name: drawn[name].requires_grad_() for name in INPUTS if drawn[name] is not None}
    with FlopCounterMode(display=False) as forward:
        outputs = delta_rule(**inputs, backend="triton")
    with FlopCounterMode(display=False) as backward:
        torch.autograd.backward(outputs, (drawn["dy"], drawn["dlast"]))
    scores, states, solves = 2 * 64 * case.K, 2 * case.K * case.V, 2 * 64 * case.V
    tokens = case.B * case.T * case.HV
    # q k^T and k k^T; q S, k^T u and k S; P u and A w.
    ahead = scores * (1 + erases) + states * (2 + erases) + solves * (1 + erases)
    assert forward.get_total_flops() == tokens * ahead
    # q k^T, dP k, dP^T q, and k k^T, (dN + dN^T) k; k dS, q^T dy, the states again, dy S^T, e dS^T, and k S, k^T z,
    # z S^T, k^T u; P^T dy, dy e^T, and A^T du, z e^T, A w.
    back = scores * (3 + 3 * erases) + states * (5 + 4 * erases) + solves * (2 + 3 * erases)
    assert backward.get_total_flops() == tokens * back


@every_device
def test_gradients_of_gradients_are_refused_and_not_wrong(where):
    drawn = Case("GDN", T=5).on(where).draw()
    inputs = {name: drawn[name].requires_grad_() for name in INPUTS}
    y, _ = delta_rule(**inputs, backend="triton")
    (dq,) = torch.autograd.grad(y.sum(), inputs["q"], create_graph=True)
    with pytest.raises(RuntimeError):
        dq.sum().backward()


# ------------------------------------------------------------------------------------------------------------- refusals
def narrow(*size, to=torch.float32):
    return torch.zeros(size, dtype=to)


BAD = {
    "dtypes": ({"q": narrow(1, 3, 1, 4, to=torch.float16)}, r"q, k and v must share one dtype, got torch\.float16"),
    "K": (dict.fromkeys("qk", narrow(1, 3, 1, 257)), "K must be from 1 to 256, got 257"),
    "V": ({"v": narrow(1, 3, 1, 513)}, "V must be from 1 to 512, got 513"),
    "not from 0": ({"packing": [1, 3]}, "offsets must start at 0, got 1"),
    "falling": ({"packing": [0, 2, 1, 3]}, "offsets must never fall, but offset 1 is 2 and the next is 1"),
    "not to T": ({"packing": [0, 2]}, "the offsets end at 2, but there are 3 tokens"),
    "chunk": ({"chunk": 32}, "its chunks have 64 tokens, and 32 were asked for"),
    "float64": ({name: narrow(1, 3, 1, 4, to=torch.float64) for name in "qkv"}, "the inputs are float64"),
    "another device": ({"beta": torch.zeros(1, 3, 1, device="meta")}, "beta is on meta, but v is on cpu"),
    "state": ({"initial_state": narrow(2, 1, 4, 4)}, r"initial_state is \[2, 1, 4, 4\]"),
}
if device.INTERPRETED:
    bf16 = {name: narrow(1, 3, 1, 4, to=torch.bfloat16) for name in "qkv"}
    BAD["bf16"] = (bf16, "interpreter computes bf16 products wrongly")


@pytest.mark.skipif(not device.INTERPRETED, reason="kernels are compiled, and the inputs are on the CPU")
@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused_before_any_launch(what, monkeypatch):
    changed, message = BAD[what]

    def launched(self, call):
        raise AssertionError("it was launched")

    monkeypatch.setattr(triton_backend.Triton, "run", launched)
    good = {name: narrow(1, 3, 1, 4) for name in "qkv"}
    with pytest.raises(ValueError, match=message):
        delta_rule(**(good | changed), backend="triton")
    with pytest.raises(AssertionError, match="it was launched"):
        delta_rule(**good, backend="triton")


@pytest.mark.skipif(not device.INTERPRETED, reason="Triton compiles for the GPU")
def test_kernels_that_are_interpreted_serve_only_when_named():
    seen = []
    drawn = Case("GDN", T=70).draw()
    with observe(lambda op, call, name: seen.append(name)):
        delta_rule(**{name: drawn[name] for name in INPUTS})
    assert seen == ["torch"]
