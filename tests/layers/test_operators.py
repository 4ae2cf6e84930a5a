"""What compilers are told of our ops is what they do: shapes, strides and types of every output, gradients' ops too."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from zoo_kernels import backend, device
from zoo_layers.conformance import Case
from zoo_layers.mixer import registered

KERNELS = (
    "delta_rule",
    "short_conv",
    "rms_norm",
    "gated_rms_norm",
    "l2_norm",
    "scale_rows",
    "rotary",
    "selective_scan",
)
OPTIONS = {
    "SWA": {"window": 9},
    "M2": {"head_dim": 8, "state": 8},
    "LA": {"conv": 4, "qk_norm": "l2", "output_gate": True},
    "GLA": {"conv": 4},
    "MLA": {"rope": True},
}
INTERPRETED = pytest.mark.skipif(device.missing(torch.device("cpu")) is not None, reason="Triton compiles for the GPU")
WAYS = [
    pytest.param("cpu", {}, id="cpu"),
    pytest.param("cpu", dict.fromkeys(KERNELS, "triton"), marks=INTERPRETED, id="interpreted"),
    pytest.param("cuda", {}, marks=pytest.mark.gpu, id="cuda"),
]


class Listener(TorchDispatchMode):
    """Keeps every call of an op of ours, and what came of it."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "zoo_kernels":
            given = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs or {}))
            self.calls.append((func, *given, tree_map_only(torch.Tensor, describe, result)))
        return result


def describe(tensor):
    return str((tuple(tensor.shape), tensor.stride() if tensor.numel() else None, tensor.dtype, tensor.device.type))


@pytest.mark.parametrize(("where", "named"), WAYS)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("name", sorted(registered()))
def test_an_ops_fake_gives_what_the_op_gives(name, packed, where, named):
    case = Case(registered()[name].from_options(OPTIONS.get(name, {})), 32, seed=4, device=where)
    mixer, packing = case.mixer(torch.float32), case.packing([7, 0, 12]) if packed else None
    x = case.x(1 if packed else 2, 19, torch.float32).requires_grad_()
    with backend.prefer(named), Listener() as listener:
        mixer(x, None, packing).square().sum().backward()
    if named or where == "cuda":
        assert listener.calls or name in ("GA", "SWA", "MLA")
    for func, args, kwargs, found in listener.calls:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            faked = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
            told = tree_map_only(torch.Tensor, describe, func(*faked[0], **faked[1]))
        assert tree_leaves(told) == tree_leaves(found), func
