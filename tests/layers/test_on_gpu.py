"""The conformance matrix on a GPU, and compiled layers."""

from contextlib import nullcontext

import pytest
import torch

from tests.waits import no_waits
from zoo_kernels.accuracy import limit, relative_error
from zoo_layers import init
from zoo_layers.block import Block
from zoo_layers.conformance import PROPERTIES, Case, backends
from zoo_layers.mixer import registered
from zoo_layers.mlp import build_mlp

pytestmark = pytest.mark.gpu
CUDA = "cuda"
OPTIONS = {"SWA": {"window": 33}, "M2": {"state": 32}}  # the rest of the defaults are small at width 128


@pytest.mark.parametrize("prove", PROPERTIES.values(), ids=PROPERTIES)
@pytest.mark.parametrize("name", sorted(registered()))
def test_a_mixer_has_the_property_on_a_gpu(name, prove):
    prove(Case(registered()[name].from_options(OPTIONS.get(name, {})), 128, seed=1, device=CUDA))


@pytest.mark.parametrize("name", sorted(registered()))
def test_backends_agree_on_a_gpu_at_the_default_sizes(name):
    backends(Case(registered()[name](), 256, seed=2, device=CUDA), [torch.bfloat16, torch.float32])


@pytest.mark.parametrize("name", sorted(registered()))
def test_a_compiled_block_gives_the_eager_numbers(name):
    torch.manual_seed(0)
    mixer = registered()[name].from_options(OPTIONS.get(name, {})).build(128)
    block = Block(mixer, build_mlp("swiglu", 128), d_model=128)
    init.reset(block, seed=0)
    block = block.to(CUDA)
    compiled = torch.compile(block, fullgraph=False)
    for tokens in (64, 100):
        one, two = (torch.randn(2, tokens, 128, generator=torch.Generator().manual_seed(1)).to(CUDA) for _ in range(2))
        got, expected = compiled(one.requires_grad_()), block(two.requires_grad_())
        assert relative_error(got, expected) <= limit("layer", torch.float32)
        for y in (got, expected):
            y.square().sum().backward()
        assert relative_error(one.grad, two.grad) <= limit("dx", torch.float32)


@pytest.mark.parametrize("name", sorted(registered()))
def test_no_layer_waits_for_the_device(name):
    """Forward, backward and cached steps never make the host ask the device for a number."""
    case = Case(registered()[name].from_options(OPTIONS.get(name, {})), 128, seed=3, device=CUDA)
    mixer, packed = case.mixer(torch.bfloat16), case.packing([30, 0, 70])
    x, step = case.x(1, 100, torch.bfloat16).requires_grad_(), case.x(3, 1, torch.bfloat16)
    for watched in (nullcontext, no_waits):  # the first round compiles and allocates
        with watched():
            mixer(x, None, packed).sum().backward()
            with torch.no_grad():
                cache = case.cache(mixer, 3, 200, torch.bfloat16)
                mixer(x, cache, packed)
                mixer(step, cache)
                mixer(x, cache, packed)
