"""The residual block, the norms and the MLPs by name."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from zoo_layers import init
from zoo_layers.block import Block
from zoo_layers.mixer import registered
from zoo_layers.mlp import build_mlp, default_d_ff, registered_mlps
from zoo_layers.norm import GatedRMSNorm, RMSNorm


def block(mlp="swiglu", d_model=16, name="GA"):
    built = Block(registered()[name].from_options({}).build(d_model), build_mlp(mlp, d_model), d_model=d_model)
    init.reset(built, seed=4)
    return built


@pytest.mark.parametrize("mlp", registered_mlps())
def test_a_block_adds_mixer_and_mlp_to_the_residual_stream(mlp):
    layer, x = block(mlp).double(), torch.randn(2, 7, 16, dtype=torch.float64)

    def rms(t):
        return t / (t.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()

    expected = x + layer.mixer(rms(x))
    if mlp == "swiglu":
        gate, up = (rms(expected) @ layer.mlp.to_gate_and_up.weight.t()).chunk(2, dim=-1)
        expected = expected + (F.silu(gate) * up) @ layer.mlp.to_down.weight.t()
    elif mlp == "gelu":
        expected = expected + F.gelu(rms(expected) @ layer.mlp.to_up.weight.t()) @ layer.mlp.to_down.weight.t()
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
    norms = [m for m in layer.modules() if isinstance(m, RMSNorm)]
    assert len(norms) == (1 if mlp == "none" else 2)


@pytest.mark.parametrize("name", sorted(registered()))
def test_the_residual_stream_keeps_its_dtype(name):
    layer, x = block(name=name), torch.randn(1, 5, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.float32
        assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert layer.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("d_model", "d_ff"), [(16, 48), (64, 176), (384, 1024), (512, 1536), (1024, 2816), (2048, 5632), (2304, 6144)]
)
def test_the_inner_width_follows_the_width(d_model, d_ff):
    assert default_d_ff(d_model) == d_ff
    mlp = build_mlp("swiglu", d_model)
    assert mlp is not None
    assert sum(p.numel() for p in mlp.parameters()) == 3 * d_model * d_ff


def test_an_unknown_mlp_or_width_is_refused():
    with pytest.raises(ValueError, match=r"unknown MLP 'swigl'; known MLPs: swiglu gelu none"):
        build_mlp("swigl", 16)
    with pytest.raises(ValueError, match=r"d_ff must be at least 1, got 0.*leave it out for 48"):
        build_mlp("swiglu", 16, 0)


def test_block_flops_are_mixer_and_mlp():
    layer = block("swiglu", 16)
    assert layer.flops_per_token(100) == layer.mixer.flops_per_token(100) + 6 * 16 * 48
    assert block("none").flops_per_token(100) == layer.mixer.flops_per_token(100)


@pytest.mark.parametrize(("gate_first", "groups"), [(False, 1), (False, 2), (True, 1), (True, 4)])
def test_gated_norms_have_right_gradients(gate_first, groups):
    norm = GatedRMSNorm(8, gate_first=gate_first, groups=groups).double()
    with torch.no_grad():
        norm.weight.normal_()
    x, gate = (torch.randn(3, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    torch.autograd.gradcheck(
        lambda x, z, w: torch.func.functional_call(norm, {"weight": w}, (x, z)), (x, gate, norm.weight)
    )


def test_a_module_without_reset_parameters_is_refused():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))

    with pytest.raises(TypeError, match=r"inner \(Own\) owns tensors, but has no reset_parameters"):
        init.reset(nn.ModuleDict({"inner": Own()}))


def test_first_values_depend_on_seed_and_name_alone():
    one, two = block(), block(name="GDN")
    init.reset(one, seed=9)
    init.reset(two, seed=9)
    assert torch.equal(one.mlp.to_down.weight, two.mlp.to_down.weight)
    before = torch.random.get_rng_state()
    init.reset(one, seed=9)
    assert torch.equal(torch.random.get_rng_state(), before)
    init.reset(two, seed=10)
    assert not torch.equal(one.mlp.to_down.weight, two.mlp.to_down.weight)
