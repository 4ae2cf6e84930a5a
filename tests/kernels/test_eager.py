"""Ops that eager code calls past the dispatcher: who still sees the op, and that nobody can tell the two apart."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from zoo_kernels.eager import operator

FLOPS = {"forward": 3, "backward": 5}
RAN = []


# y = x * weight * factor with what the gradient needs, None where there is no weight; as many ops as the kernels have
def _scaled(x: Tensor, weight: Tensor | None, factor: float) -> tuple[Tensor, Tensor | None]:
    RAN.append("forward")
    y = x.flatten().clone().view(x.shape) * factor
    return (y, None) if weight is None else ((y * weight).view(x.shape), y)


@operator("zoo_tests::scaled", implementation=_scaled)
def scaled(x: Tensor, weight: Tensor | None, factor: float) -> tuple[Tensor, Tensor]:
    y, kept = _scaled(x, weight, factor)
    return y, x.new_empty(0) if kept is None else kept


@operator("zoo_tests::scaled_backward")
def scaled_backward(
    dy: Tensor, kept: list[Tensor | None], weight: Tensor | None, factor: float
) -> tuple[Tensor, Tensor]:
    RAN.append("backward")
    if weight is None or kept[0] is None:
        return dy * factor, dy.new_empty(0)
    return dy * weight * factor, (dy * kept[0]).sum_to_size(weight.shape)


@operator("zoo_tests::add_one", mutates=("x",))
def add_one(x: Tensor, by: float) -> Tensor:
    RAN.append("in place")
    x.data.add_(by)  # uncounted, as a kernel's work is
    return x.clone()


@scaled.register_fake
def _(x, weight, factor):
    return x.new_empty(x.shape), x.new_empty((0,) if weight is None else x.shape)


@scaled_backward.register_fake
def _(dy, kept, weight, factor):
    return dy.new_empty(dy.shape), dy.new_empty((0,) if weight is None else weight.shape)


@add_one.register_fake
def _(x, by):
    return x.new_empty(x.shape)


def _keep(ctx, inputs, output):
    _, weight, ctx.factor = inputs
    ctx.save_for_backward(weight, output[1])
    if output[1] is not None:
        ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dy, _):
    weight, kept = ctx.saved_tensors
    dx, dweight = scaled_backward(dy, [kept], weight, ctx.factor)
    return dx, None if weight is None else dweight, None


scaled.register_autograd(_differentiate, setup_context=_keep)
register_flop_formula(torch.ops.zoo_tests.scaled)(lambda *_, **__: FLOPS["forward"])
register_flop_formula(torch.ops.zoo_tests.scaled_backward)(lambda *_, **__: FLOPS["backward"])


@pytest.fixture
def dispatched(monkeypatch):
    """The names of the ops that went through the dispatcher."""
    names = []
    for one in (scaled, scaled_backward, add_one):
        op = one.op
        monkeypatch.setattr(one, "op", lambda *args, op=op: (names.append(op._name), op(*args))[1])
    return names


def draw(learn=True):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).requires_grad_(learn) for size in ((3, 4), (4,))]


def test_eager_code_goes_past_the_dispatcher_and_gives_the_numbers_of_the_op(dispatched):
    for weighted in (True, False):
        found = []
        for call in (scaled, torch.ops.zoo_tests.scaled):
            x, weight = draw()
            y, _ = call(x, Parameter(weight) if weighted else None, 2.0)
            y.square().sum().backward()
            found.append([y, x.grad])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    with torch.no_grad():
        scaled(x, weight, 2.0)
        add_one(x, 1.0)
    assert dispatched == []


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Heard(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Own(Tensor):
    """A tensor of somebody's own."""


def test_whoever_wants_to_see_ops_sees_them(dispatched):
    x, _ = draw(learn=False)
    fake = FakeTensorMode()
    calls = {
        "a mode of ops": (Seen(), x),
        "a mode of functions": (Heard(), x),
        "fake": (fake, fake.from_tensor(x)),
        "meta": (torch.no_grad(), x.to("meta")),
        "a subclass": (torch.no_grad(), x.as_subclass(Own)),
    }
    for what, (mode, given) in calls.items():
        dispatched.clear()
        with mode:
            scaled(given, None, 2.0)
        assert dispatched == ["scaled"], what


def test_a_number_that_only_the_op_would_cast_is_given_to_the_op(dispatched):
    x, weight = draw(learn=False)
    scaled(x, weight, torch.tensor(2.0).numpy()[()])
    assert dispatched == ["scaled"]


def test_tracers_and_transforms_see_the_op(dispatched):
    x, weight = draw(learn=False)
    graph = make_fx(lambda x, weight: scaled(x, weight, 2.0)[0])(x, weight)
    assert torch.ops.zoo_tests.scaled.default in [node.target for node in graph.graph.nodes]
    dispatched.clear()
    rows = torch.vmap(lambda x: scaled(x, weight, 2.0)[0])(x)
    assert dispatched == ["scaled"]
    assert torch.equal(rows, scaled(x, weight, 2.0)[0])


def test_compiled_code_holds_the_op_and_what_the_compiler_gives_up_does_too(dispatched):
    torch._dynamo.reset()
    targets = []

    def backend(graph, _):
        targets.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    x, weight = draw()
    whole = torch.compile(lambda x: scaled(x, weight, 2.0)[0] + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(whole(x), scaled(x, weight, 2.0)[0] + 1)
    whole(x).sum().backward()
    assert x.grad is not None

    def broken(x):
        torch._dynamo.graph_break()
        return scaled(x, weight, 2.0)[0]

    assert torch.equal(torch.compile(broken, backend=backend)(x), scaled(x, weight, 2.0)[0])
    assert torch.ops.zoo_tests.scaled.default in targets


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("when", [("forward",), ("backward",), ("forward", "backward")])
def test_flops_are_counted_wherever_the_counter_stands(when, weighted):
    x, weight = draw()
    counters = {name: FlopCounterMode(display=False) for name in when}
    with counters.get("forward", torch.enable_grad()):
        y, _ = scaled(x, weight if weighted else None, 2.0)
    with counters.get("backward", torch.enable_grad()):
        y.sum().backward()
    assert {name: counter.get_total_flops() for name, counter in counters.items()} == {n: FLOPS[n] for n in when}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_run_the_forward_again(reentrant):
    x, weight = draw()
    RAN.clear()
    y = checkpoint(lambda *given: scaled(*given, 2.0)[0], x, weight, use_reentrant=reentrant)
    y.sum().backward()
    assert RAN == ["forward", "forward", "backward"]
    again = draw()
    scaled(*again, 2.0)[0].sum().backward()
    assert all(torch.equal(one.grad, other.grad) for one, other in zip((x, weight), again, strict=True))


def test_gradients_of_gradients_are_refused():
    x, weight = draw()
    (dx,) = torch.autograd.grad(scaled(x, weight, 2.0)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        dx.sum().backward()


def test_what_is_kept_has_no_gradient_and_what_is_changed_after_is_noticed():
    x, weight = draw()
    y, kept = scaled(x, weight, 2.0)
    assert [one.requires_grad for one in (y, kept)] == [True, False]
    with torch.no_grad():
        weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("inside", [torch.no_grad, torch.enable_grad])
def test_changes_of_results_in_place_are_taken_and_refused_as_those_of_the_op(learn, inside):
    found = []
    for call in (scaled, torch.ops.zoo_tests.scaled):
        x, weight = draw(learn)
        with inside():
            y, _ = call(x, weight, 2.0)
        try:
            y.mul_(torch.ones(4, requires_grad=True)).sum().backward()
            found.append(y.tolist())
        except RuntimeError:
            found.append("refused")
    assert found[0] == found[1]
    assert (found[0] == "refused") == (learn or inside is torch.no_grad)


def test_what_an_op_changes_counts_its_changes(dispatched):
    counted = []
    for change in (add_one, torch.ops.zoo_tests.add_one):
        x = torch.zeros(3)
        y = change(x, 1.0)
        assert torch.equal(x, y)
        with torch.inference_mode():
            made = torch.zeros(3)
            assert torch.equal(change(made, 1.0), made)
            change(x, 1.0)
        counted.append(x._version)
    assert counted == [2, 2]
    assert dispatched == []


def test_a_change_that_would_need_a_gradient_is_refused_by_the_op(dispatched):
    x = torch.zeros(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        add_one(x * 1, 1.0).sum().backward()
    assert dispatched == ["add_one"]
