"""Which parameters decay, and where the learning rate stands at each step."""

import itertools
import math

import pytest
import torch
from torch import nn

from zoo.model import HybridLM
from zoo.optim import WarmupCosine, WarmupLinear, WarmupStableDecay, parameter_groups
from zoo_layers.mixer import registered


def model_of(mixer):
    return HybridLM.from_pattern(mixer, n_layers=1, d_model=32, vocab_size=32, d_ff=32, seed=0)


@pytest.mark.parametrize("mixer", registered())
def test_every_parameter_of_every_mixer_has_a_group_and_only_matrices_decay(mixer):
    model = model_of(mixer)
    groups = {group["name"]: group for group in parameter_groups(model.named_parameters())}
    placed = [p for group in groups.values() for p in group["params"]]
    assert len({id(p) for p in placed}) == len(placed) == len(list(model.parameters()))
    assert groups["no_decay"]["weight_decay"] == 0
    for name, parameter in model.named_parameters():
        decays = any(parameter is p for p in groups["decay"]["params"])
        plain = "norm" in name or "conv" in name or name.split(".")[-1] in ("A_log", "dt_bias", "D", "bias")
        assert decays != plain, name
        assert not decays or parameter.dim() == 2, name


def test_a_tied_head_is_optimised_once():
    model = HybridLM.from_pattern("LA", n_layers=1, d_model=32, vocab_size=32, tie=True, seed=0)
    groups = parameter_groups(model.named_parameters(remove_duplicate=False))
    assert sum(any(p is model.head.weight for p in group["params"]) for group in groups) == 1
    assert sum(p is model.head.weight for group in groups for p in group["params"]) == 1


def test_a_parameter_that_no_rule_names_is_an_error_and_not_a_guess():
    with pytest.raises(ValueError, match=r"no rule .* names the parameter 'mystery'"):
        parameter_groups([("mystery", nn.Parameter(torch.zeros(2, 2)))])


def rates(schedule, steps, **settings):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = schedule(optimizer, **settings)
    scheduler.begin(steps)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"] / 2.0)
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize("schedule", [WarmupCosine, WarmupLinear, WarmupStableDecay])
def test_the_rate_rises_to_the_peak_and_is_at_its_floor_on_the_last_step(schedule):
    seen = rates(schedule, 20, warmup_steps=4, start_factor=0.5, end_factor=0.1)
    assert seen[0] == pytest.approx(0.5)
    assert seen[1] == pytest.approx(0.625)
    assert seen[4] == pytest.approx(1.0)
    assert seen[-1] == pytest.approx(0.1)
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(seen[4:]))


def test_cosine_and_wsd_have_the_shapes_of_their_papers():
    cosine = rates(WarmupCosine, 101, end_factor=0.0)
    assert cosine[25] == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    stable = rates(WarmupStableDecay, 101, decay_share=0.2, end_factor=0.0)
    assert stable[79] == 1.0
    assert stable[90] == pytest.approx(0.5)


def test_a_schedule_without_a_length_refuses_its_second_step():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = WarmupCosine(optimizer)
    optimizer.step()
    with pytest.raises(RuntimeError, match="its length is not known"):
        scheduler.step()


def test_a_resumed_schedule_keeps_the_length_it_began_with():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    first = WarmupCosine(optimizer)
    first.begin(10)
    second = WarmupCosine(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0))
    second.begin(50)
    second.load_state_dict(first.state_dict())
    assert second.total_steps == 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_steps": -1}, "warmup_steps must be at least 0"),
        ({"start_factor": 0.0}, r"start_factor must lie in \(0, 1\]"),
        ({"end_factor": 1.5}, r"end_factor must lie in \[0, 1\]"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        WarmupCosine(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), **settings)


def test_a_warm_up_longer_than_the_run_is_named():
    scheduler = WarmupCosine(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), warmup_steps=10)
    with pytest.raises(ValueError, match="10 warm-up steps do not fit into a run of 10 steps"):
        scheduler.begin(10)
