"""What M1 promises beyond the conformance matrix: its paper's recurrence, first values, precision, steps in place."""

import pytest
import torch
from torch.nn import functional as F

from zoo_kernels import backend
from zoo_kernels.packing import Packing
from zoo_layers.mixer import SpecError, registered


def spec(**options):
    return registered()["M1"].from_options(options)


def calls_of(mixer, x, *args):
    """(op, call) of all that the mixer asks the kernels for."""
    calls = []
    with backend.observe(lambda op, call, _: calls.append((op, call))):
        mixer(x, *args)
    return calls


def test_it_is_the_recurrence_of_its_paper():
    """h = exp(dt A) h + dt B x;  y = C h + D x, channel by channel, written out for one sequence in float64."""
    torch.manual_seed(5)
    mixer = spec(state=3, dt_rank=2).build(4).double()
    x = torch.randn(1, 9, 4, dtype=torch.float64)
    inner, gate = mixer.to_inner(x)[0].split([8, 8], dim=-1)
    seen = torch.cat([inner.new_zeros(3, 8), inner]).unfold(0, 4, 1)  # [T, channels, taps]
    inner = F.silu((seen * mixer.conv.weight).sum(-1) + mixer.conv.bias)
    steps, b, c = mixer.to_selection(inner).split([2, 3, 3], dim=-1)
    dt = F.softplus(steps @ mixer.to_steps.weight.T + mixer.dt_bias)
    A, D = -mixer.A_log.exp(), mixer.D
    y = torch.zeros(9, 8, dtype=torch.float64)
    for channel in range(8):
        h = torch.zeros(3, dtype=torch.float64)
        for t in range(9):
            h = (dt[t, channel] * A[channel]).exp() * h + dt[t, channel] * b[t] * inner[t, channel]
            y[t, channel] = c[t] @ h + D[channel] * inner[t, channel]
    torch.testing.assert_close(mixer(x)[0], mixer.to_out(y * F.silu(gate)), rtol=1e-10, atol=1e-12)


def test_it_starts_as_its_paper_says():
    torch.manual_seed(3)
    mixer = spec(state=5).build(1024)
    rates = mixer.A_log.exp()
    torch.testing.assert_close(rates, torch.arange(1.0, 6.0).expand(2048, 5), rtol=1e-6, atol=0)
    steps = F.softplus(mixer.dt_bias)
    assert ((steps >= 0.999e-3) & (steps <= 1.001e-1)).all()
    assert steps.median().item() == pytest.approx(1e-2, rel=0.2)
    assert (mixer.D == 1).all()
    assert mixer.to_steps.weight.shape == (2048, 64)
    assert mixer.to_steps.weight.abs().max().item() == pytest.approx(1 / 8, rel=1e-3)
    assert mixer.to_steps.weight.std().item() == pytest.approx(1 / 8 / 3**0.5, rel=0.01)


def test_sizes_out_of_range_are_refused():
    for options, said in (
        ({"state": 257}, "state must be at most 256"),
        ({"dt_rank": 0}, "dt_rank must be at least 1"),
    ):
        with pytest.raises(SpecError, match=said):
            spec(**options)


@pytest.mark.parametrize("way", ["bf16", "autocast"])
def test_steps_and_rates_are_fp32_in_every_precision(way):
    mixer, x = spec(state=4).build(16), torch.randn(2, 6, 16)
    if way == "bf16":
        ((_, call),) = (c for c in calls_of(mixer.bfloat16(), x.bfloat16()) if c[0] == "selective_scan")
    else:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ((_, call),) = (c for c in calls_of(mixer, x) if c[0] == "selective_scan")
    assert (call.dt.dtype, call.A.dtype, call.D.dtype) == (torch.float32,) * 3
    assert call.x.dtype == call.B.dtype == call.C.dtype == torch.bfloat16


def test_steps_rewrite_the_state_where_it_lies():
    mixer, x = spec(state=4).build(16), torch.randn(3, 6, 16)
    cache = mixer.new_cache(3, 9, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        assert [op for op, _ in calls_of(mixer, x, cache)] == ["short_conv", "selective_scan"]
        place = cache["state"].data_ptr()
        assert [op for op, _ in calls_of(mixer, x[:, :1], cache)] == ["short_conv", "selective_step"]
        assert cache["state"].data_ptr() == place
        # Rows of a packing go through the scan, and so does what may need a gradient.
        packed = Packing.from_offsets([0, 1, 1, 2])
        assert [op for op, _ in calls_of(mixer, x[:1, :2], cache, packed)] == ["short_conv", "selective_scan"]
    assert [op for op, _ in calls_of(mixer, x[:, :1], cache)] == ["short_conv", "selective_scan"]
    assert cache.seen == [9, 8, 9]


def test_slow_decays_last_for_thousands_of_steps():
    """The state fades by exactly its rates over 3000 single tokens, in a bf16 model too."""
    torch.manual_seed(0)
    mixer = spec(state=2).build(16).to(torch.bfloat16)
    with torch.no_grad():
        mixer.dt_bias.fill_(-9.0)  # steps of 1.2e-4
        cache = mixer.new_cache(1, 4096, dtype=torch.bfloat16, device="cpu")
        mixer(torch.randn(1, 4, 16, dtype=torch.bfloat16), cache)
        mixer(torch.zeros(1, 4, 16, dtype=torch.bfloat16), cache)  # the convolution forgets
        first = cache["state"].clone()
        for _ in range(3000):
            mixer(torch.zeros(1, 1, 16, dtype=torch.bfloat16), cache)
        rates = F.softplus(mixer.dt_bias.double())[:, None] * mixer.A_log.double().exp()
    expected = first.double() * (-3000 * rates.T).exp()
    torch.testing.assert_close(cache["state"].double(), expected, rtol=1e-3, atol=0)
