"""What single mixers promise beyond the conformance matrix: defaults, refusals, first values, windows, full caches."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from zoo_kernels import backend
from zoo_kernels.packing import Packing
from zoo_layers import init
from zoo_layers.memory import wide
from zoo_layers.mixer import CacheFullError, SpecError, registered
from zoo_layers.mlp import linear_flops


def spec(name, **options):
    return registered()[name].from_options(options)


# mixer, options, d_model, and what must come out of resolve()
RESOLVED = [
    ("GA", {}, 1024, {"heads": 8, "kv_heads": 8, "head_dim": 128}),
    ("GA", {}, 64, {"heads": 2, "head_dim": 32}),
    ("GA", {"heads": 16}, 1024, {"head_dim": 64, "kv_heads": 16}),
    ("GA", {"heads": 16, "kv_heads": 2, "head_dim": 256}, 2048, {"heads": 16, "kv_heads": 2, "head_dim": 256}),
    ("SWA", {}, 2304, {"heads": 18, "head_dim": 128, "window": 2048}),
    ("GDN", {}, 64, {"heads": 2, "head_dim": 32}),
    ("GDN", {}, 256, {"heads": 2, "head_dim": 128}),
    ("GDN", {}, 1024, {"heads": 6, "value_heads": 6, "head_dim": 128, "expand_v": 2}),
    ("GDN", {}, 1536, {"heads": 9, "head_dim": 128}),
    ("GDN", {"heads": 16, "value_heads": 32, "expand_v": 1}, 2048, {"head_dim": 128, "value_heads": 32}),
    ("DN", {}, 2048, {"heads": 16, "head_dim": 128}),
    ("KDA", {"heads": 32, "head_dim": 128}, 2304, {"heads": 32, "head_dim": 128, "gate_rank": 128}),
    ("GLA", {"heads": 4}, 2048, {"head_dim": 256, "expand_v": 2}),
    ("GLA", {}, 1024, {"heads": 4, "head_dim": 128}),
    ("RET", {"heads": 8}, 2048, {"head_dim": 256, "expand_v": 2}),
    ("M2", {}, 1024, {"head_dim": 64, "state": 128, "groups": 1}),
    ("M1", {}, 1000, {"expand": 2, "state": 16, "conv": 4, "dt_rank": 63}),
    ("HGRN2", {}, 1024, {"heads": 8, "head_dim": 128}),
    ("HGRN2", {"head_dim": 128}, 1100, {"heads": 5, "head_dim": 128}),
    ("HGRN2", {"heads": 4}, 96, {"heads": 4, "head_dim": 24}),
    ("MLA", {}, 1024, {"heads": 8, "head_dim": 128, "rank": 512, "rope_dim": 64, "value_dim": 128}),
    ("MLA", {"heads": 32, "head_dim": 128}, 2304, {"rank": 512, "rope_dim": 64, "value_dim": 128, "rope": False}),
]


@pytest.mark.parametrize(("name", "options", "d_model", "expected"), RESOLVED)
def test_open_sizes_are_settled_by_the_width(name, options, d_model, expected):
    resolved = spec(name, **options).resolve(d_model).all_options()
    assert {key: resolved[key] for key in expected} == expected


# mixer, options, d_model; the option at fault, numbers that the message names, what the cure says, and options that do
REFUSED = [
    ("GA", {"heads": 5}, 64, "heads", "5 do not divide 64", "heads=4", {"heads": 4}),
    ("DN", {"heads": 3}, 64, "heads", "3 do not divide 64", "heads=2", {"heads": 2}),
    (
        "GA",
        {"heads": 8, "kv_heads": 3},
        64,
        "kv_heads",
        "3 does not divide 8",
        "kv_heads=2",
        {"heads": 8, "kv_heads": 2},
    ),
    (
        "GDN",
        {"heads": 2, "value_heads": 3},
        64,
        "value_heads",
        "3 is no multiple of 2",
        "value_heads=4",
        {"heads": 2, "value_heads": 4},
    ),
    (
        "KDA",
        {"heads": 4, "value_heads": 6},
        64,
        "value_heads",
        "6 is no multiple of 4",
        "value_heads=8",
        {"heads": 4, "value_heads": 8},
    ),
    ("GLA", {"heads": 5}, 64, "heads", "5 does not divide 32", "heads=4", {"heads": 4}),
    ("M2", {"head_dim": 48}, 64, "head_dim", "48 does not divide 128", "head_dim=32", {"head_dim": 32}),
    ("M2", {"groups": 3}, 128, "groups", "3 does not divide 4", "groups=2", {"groups": 2}),
    ("M2", {"state": 300}, 64, "state", "at most 256 channels, but 300", "state=256", {"state": 256}),
    ("GDN", {"head_dim": 257}, 1024, "head_dim", "at most 256 channels, but 257", "smaller", {"head_dim": 256}),
    (
        "GDN",
        {"head_dim": 200, "expand_v": 3},
        1024,
        "expand_v",
        "at most 512 channels, but 600",
        "smaller",
        {"head_dim": 200},
    ),
    (
        "GA",
        {"head_dim": 7},
        56,
        "head_dim",
        "even number of channels, but 1 of 7 is 7",
        "rope=false",
        {"head_dim": 7, "rope": False},
    ),
    (
        "RET",
        {"head_dim": 7},
        56,
        "head_dim",
        "even number of channels, but 1 of 7 is 7",
        "rope=false",
        {"head_dim": 7, "rope": False},
    ),
    (
        "GA",
        {"heads": 2, "rope_fraction": 0.4},
        32,
        "rope_fraction",
        "0.4 of 16 is 6.4",
        "0.375",
        {"rope_fraction": 0.375},
    ),
    (
        "GA",
        {"rope": False, "rope_theta": 5e5},
        64,
        "rope_theta",
        "no effect with rope=false",
        "rope=true",
        {"rope_theta": 5e5},
    ),
    ("HGRN2", {"heads": 3, "head_dim": 8}, 64, "heads", "3 does not divide 64", "heads=2", {"heads": 2, "head_dim": 8}),
    ("HGRN2", {"heads": 1}, 300, "head_dim", "at most 256 channels, but 300", "smaller", {"heads": 2}),
    ("HGRN2", {"heads": 1, "head_dim": 8}, 600, "heads", "at most 512 channels, but 600", "more heads", {"heads": 3}),
    (
        "MLA",
        {"rope": True, "rope_dim": 7},
        64,
        "rope_dim",
        "even number of channels, but rope_dim is 7",
        "rope_dim=8, or rope=false",
        {"rope": True, "rope_dim": 8},
    ),
    ("MLA", {"rope_theta": 5e5}, 64, "rope_theta", "no effect with rope=false", "rope=true", {"rope": True}),
    (
        "RET",
        {"rope": False, "rope_theta": 5e5},
        64,
        "rope_theta",
        "no effect with rope=false",
        "Take it out",
        {"rope": False},
    ),
]


@pytest.mark.parametrize(("name", "options", "d_model", "at_fault", "problem", "cure", "would_do"), REFUSED)
def test_sizes_that_do_not_fit_are_refused_with_the_rule_the_value_and_a_cure(
    name, options, d_model, at_fault, problem, cure, would_do
):
    with pytest.raises(SpecError) as caught:
        spec(name, **options).build(d_model)
    assert caught.value.option == at_fault
    assert problem in caught.value.problem
    assert cure in caught.value.cure
    spec(name, **would_do).build(d_model)


@pytest.mark.parametrize(
    ("name", "options", "problem", "cure"),
    [
        ("SWA", {"window": 0}, "window must be at least 1, got 0", "For no window use GA"),
        ("SWA", {"window": "big"}, "window must be a whole number, got 'big'", "The default is 2048"),
        ("SWA", {"win": 4}, "SWA has no option 'win'; did you mean 'window'?", "Options of SWA: heads kv_heads"),
        ("DN", {"feature_map": "silo"}, "feature_map must be one of silu, relu, elu1, none", "silu"),
        ("DN", {"conv": 9}, "conv must be at most 8, got 9", "The default is 4"),
        ("GA", {"output_gate": 1}, "output_gate must be true or false, got 1", "The default is false"),
    ],
)
def test_a_setting_out_of_its_range_says_so(name, options, problem, cure):
    with pytest.raises(SpecError) as caught:
        spec(name, **options)
    assert problem in str(caught.value)
    assert cure in str(caught.value)


def test_every_option_says_what_it_does():
    for name, kind in registered().items():
        for option in kind.options().values():
            assert len(option.help) > 3, f"{name}: {option.name}"


# -------------------------------------------------------------------------------------------------------- first values
@pytest.mark.parametrize(("name", "low", "high"), [("GDN", 0.01, 16.0), ("M2", 1.0, 16.0), ("KDA", 1.0, 16.0)])
def test_decay_parameters_start_in_their_documented_ranges(name, low, high):
    torch.manual_seed(3)
    mixer = spec(name).build(1024)
    rates = mixer.A_log.exp()
    assert ((rates >= low * 0.999) & (rates <= high * 1.001)).all()
    steps = torch.nn.functional.softplus(mixer.dt_bias)
    assert ((steps >= 0.999e-3) & (steps <= 1.001e-1)).all()
    # Log-uniform: the logarithm's mean lies halfway, within four standard errors.
    logs = steps.log()
    halfway, spread = (math.log(1e-3) + math.log(1e-1)) / 2, (math.log(1e-1) - math.log(1e-3)) / math.sqrt(12)
    assert abs(logs.mean().item() - halfway) < 4 * spread / math.sqrt(logs.numel())


def test_retention_fades_by_the_papers_constants():
    mixer = spec("RET", heads=4).build(64)
    kept = torch.tensor([1 - 2**-5, 1 - 2**-6, 1 - 2**-7, 1 - 2**-8])
    torch.testing.assert_close(mixer.log_decay.exp(), kept, rtol=1e-7, atol=0)
    mixer.to(torch.bfloat16)
    assert mixer.log_decay.dtype == torch.float32
    torch.testing.assert_close(mixer.log_decay.exp(), kept, rtol=1e-7, atol=0)
    assert "log_decay" not in mixer.state_dict()


def test_decays_and_skips_are_what_stays_fp32():
    kept = {name: set(spec(name).build(32).FLOAT32) for name in registered()}
    assert {name: names for name, names in kept.items() if names} == {
        "GDN": {"A_log", "dt_bias"},
        "KDA": {"A_log", "dt_bias"},
        "M1": {"A_log", "dt_bias", "D"},
        "M2": {"A_log", "dt_bias", "D"},
        "RET": {"log_decay"},
        "HGRN2": {"floor_bias"},
    }


def test_default_dtype_does_not_reach_decay_parameters():
    torch.set_default_dtype(torch.bfloat16)
    try:
        mixers = {name: spec(name).build(32) for name in registered()}
    finally:
        torch.set_default_dtype(torch.float32)
    for name, mixer in mixers.items():
        own = dict([*mixer.named_parameters(), *mixer.named_buffers()])
        assert all(own[kept].dtype == torch.float32 for kept in mixer.FLOAT32 if kept in own), name
        assert mixer.to_out.weight.dtype == torch.bfloat16, name


# --------------------------------------------------------------------------------------------------------------- rules
def delta_calls(mixer, x):
    calls = []
    with backend.observe(lambda op, call, _: calls.append(call) if op == "delta_rule" else None):
        mixer(x)
    return calls


@pytest.mark.parametrize("name", ["DN", "GDN", "KDA"])
def test_negative_eigenvalues_double_the_write_strength(name):
    torch.manual_seed(0)
    plain, negative = (spec(name, heads=2, negative_eigenvalues=n).build(16) for n in (False, True))
    for mixer in (plain, negative):
        init.reset(mixer, seed=1)
    x = 20 * torch.randn(1, 50, 16)
    (one,), (two,) = (delta_calls(mixer, x) for mixer in (plain, negative))
    torch.testing.assert_close(two.beta, 2 * one.beta)
    assert 1.5 < two.beta.max() <= 2


@pytest.mark.parametrize(("name", "options"), [("DN", {}), ("DN", {"feature_map": "elu1"}), ("GDN", {}), ("KDA", {})])
@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_keys_of_delta_mixers_never_pass_unit_length(name, options, size):
    mixer = spec(name, heads=2, **options).build(16)
    (call,) = delta_calls(mixer, size * torch.randn(2, 20, 16))
    lengths = call.k.norm(dim=-1)
    assert (lengths <= 1 + 1e-6).all()
    if size == 1.0 and options:
        torch.testing.assert_close(lengths, torch.ones_like(lengths), rtol=1e-4, atol=0)


def test_mamba2_is_the_recurrence_of_its_paper():
    """h = exp(dt A) h + dt B x;  y = C h + D x, written out for one sequence in float64."""
    torch.manual_seed(5)
    mixer = spec("M2", head_dim=4, state=3, groups=2).build(8).double()
    x = torch.randn(1, 9, 8, dtype=torch.float64)
    (call,) = delta_calls(mixer, x)
    gate, xbc, steps = mixer.to_inner(x).split(mixer.parts, dim=-1)
    seen = torch.cat([xbc.new_zeros(1, 3, xbc.shape[-1]), xbc], dim=1).unfold(1, 4, 1)
    xbc = torch.nn.functional.silu((seen * mixer.conv.weight).sum(-1) + mixer.conv.bias)
    inner, b, c = xbc.split([16, 6, 6], dim=-1)
    dt, rate = torch.nn.functional.softplus(steps + mixer.dt_bias)[0], -mixer.A_log.exp()
    h, y = torch.zeros(4, 4, 3, dtype=torch.float64), []
    for t in range(9):
        group = [0, 0, 1, 1]
        bt, ct = b[0, t].view(2, 3)[group], c[0, t].view(2, 3)[group]
        xt = inner[0, t].view(4, 4)
        h = (dt[t] * rate).exp()[:, None, None] * h + (dt[t][:, None] * xt)[:, :, None] * bt[:, None]
        y.append(((h * ct[:, None]).sum(-1) + mixer.D[:, None] * xt).flatten())
    gated = torch.stack(y) * torch.nn.functional.silu(gate[0])
    normed = gated.view(9, 2, 8) * (gated.view(9, 2, 8).pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    expected = mixer.to_out(normed.view(9, 16) * mixer.norm.weight)
    torch.testing.assert_close(mixer(x)[0], expected, rtol=1e-10, atol=1e-12)
    assert call.scale == 1.0


@pytest.mark.parametrize("lower_bound", [False, True])
def test_hgrn2_is_the_recurrence_of_its_paper(lower_bound):
    """h = f h + (1 - f) i^T;  y = q h, f the forget gate, written out for one sequence in float64."""
    torch.manual_seed(5)
    mixer = spec("HGRN2", heads=2, head_dim=3, lower_bound=lower_bound).build(8).double()
    x = torch.randn(1, 9, 8, dtype=torch.float64)
    q, f, i = mixer.to_inner(x)[0].split([6, 6, 8], dim=-1)
    f, floor = f.sigmoid(), torch.zeros(6, dtype=torch.float64)
    if lower_bound:
        torch.nn.init.normal_(mixer.floor_bias)
        floor = mixer.floor_bias.sigmoid()
        f = floor + (1 - floor) * f
    q, f, i = (q * q.sigmoid()).view(9, 2, 3), f.view(9, 2, 3), i.view(9, 2, 4)
    h, y = torch.zeros(2, 3, 4, dtype=torch.float64), []
    for t in range(9):
        h = f[t][:, :, None] * h + (1 - f[t])[:, :, None] * i[t][:, None, :]
        y.append(torch.einsum("hk,hkv->hv", q[t], h).flatten())
    y = torch.stack(y) * 3**-0.5
    normed = y * (y.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * mixer.norm.weight
    torch.testing.assert_close(mixer(x)[0], mixer.to_out(normed), rtol=1e-10, atol=1e-12)


def test_a_floor_holds_under_every_forget_gate_and_starts_at_a_half():
    mixer = spec("HGRN2", heads=2, lower_bound=True).build(16)
    assert set(mixer.floor_bias.tolist()) == {0.0}
    for size in (1.0, 1e4):
        (call,) = delta_calls(mixer, size * torch.randn(2, 50, 16))
        assert call.log_decay.exp().min() >= 0.5 - 1e-6
        torch.testing.assert_close(call.k, 1 - call.log_decay.exp().view_as(call.k), rtol=1e-4, atol=1e-6)
    (free,) = delta_calls(spec("HGRN2", heads=2).build(16), 1e4 * torch.randn(2, 50, 16))
    assert free.log_decay.exp().min() < 1e-3


def test_latent_attention_is_the_softmax_of_its_paper():
    """Scores of own and shared key parts, values from the latent, written out for one sequence and two heads."""
    torch.manual_seed(5)
    options = {"heads": 2, "head_dim": 3, "rank": 5, "rope_dim": 4, "value_dim": 6, "rope": True}
    mixer = spec("MLA", **options).build(8).double()
    torch.nn.init.normal_(mixer.norm.weight)
    x = torch.randn(1, 9, 8, dtype=torch.float64)
    q, latent, shared = mixer.to_inner(x)[0].split([14, 5, 4], dim=-1)
    latent = latent * (latent.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * mixer.norm.weight
    angles = torch.arange(9.0, dtype=torch.float64)[:, None] * 10000.0 ** -torch.tensor([0, 0.5], dtype=torch.float64)

    def turned(pairs):
        spun = torch.complex(pairs[..., :2], pairs[..., 2:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([spun.real, spun.imag], dim=-1)

    heads = []
    for own_and_shared, weight in zip(q.split(7, dim=-1), mixer.to_kv.weight.split(9)):
        k, v = latent @ weight[:3].T, latent @ weight[3:].T
        scores = own_and_shared[:, :3] @ k.T + turned(own_and_shared[:, 3:]) @ turned(shared).T
        scores = (scores * 7**-0.5).masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf"))
        heads.append(scores.softmax(-1) @ v)
    torch.testing.assert_close(mixer(x)[0], mixer.to_out(torch.cat(heads, -1)), rtol=1e-10, atol=1e-12)


def test_without_positions_latent_attention_sees_a_set():
    torch.manual_seed(6)
    mixer = spec("MLA", heads=2).build(16).double()
    x = torch.randn(1, 12, 16, dtype=torch.float64)
    mixed = torch.cat([x[:, torch.randperm(11)], x[:, 11:]], dim=1)
    torch.testing.assert_close(mixer(mixed)[:, -1], mixer(x)[:, -1], rtol=1e-10, atol=1e-12)


def test_a_step_of_latent_attention_builds_no_keys_of_heads():
    """What a step costs beside its projections is scores and sums over latents alone, H (2 r + R) a token held."""
    mixer = spec("MLA", heads=4, head_dim=16, rank=8, rope_dim=2).build(64)
    held, x = 500, torch.randn(1, 501, 64)
    cache = mixer.new_cache(1, 501, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        mixer(x[:, :held], cache)
        with FlopCounterMode(display=False) as counter:
            mixer(x[:, held:], cache)
    scored = 2 * 4 * (2 * 8 + 2) * (held + 1)
    assert counter.get_total_flops() <= linear_flops(mixer) + scored


def test_gates_survive_extreme_inputs():
    for name in ("GDN", "KDA", "GLA", "M2", "DN", "HGRN2"):
        mixer = spec(name).build(16)
        for size in (1e-30, 1e4, 1e15):
            (call,) = delta_calls(mixer, size * torch.randn(1, 6, 16))
            for gate in (call.log_decay, call.beta):
                assert gate is None or not gate.isnan().any(), (name, size)


def test_wide_keeps_float64_and_raises_the_rest_to_fp32():
    assert [wide(torch.zeros(1, dtype=d)).dtype for d in (torch.bfloat16, torch.float32, torch.float64)] == [
        torch.float32,
        torch.float32,
        torch.float64,
    ]


# -------------------------------------------------------------------------------------------------- windows and caches
@pytest.mark.parametrize("way", ["at once", "in steps", "packed", "in two pieces"])
@pytest.mark.parametrize("tokens", [3, 5, 6, 17])
def test_a_window_shows_itself_and_the_tokens_just_before_it(way, tokens):
    window = 5
    torch.manual_seed(tokens)
    mixer = spec("SWA", heads=2, window=window, qk_norm=True).build(16).double()

    def run(x):
        if way == "at once":
            return mixer(x)
        if way == "packed":
            other = torch.ones(1, 4, 16, dtype=torch.float64)
            return mixer(torch.cat([other, x], dim=1), None, Packing.from_offsets([0, 4, 4 + tokens]))[:, 4:]
        cache = mixer.new_cache(1, tokens, dtype=torch.float64, device="cpu")
        parts = x.split(1, dim=1) if way == "in steps" else x.split([2, tokens - 2], dim=1)
        return torch.cat([mixer(part, cache) for part in parts], dim=1)

    x = torch.randn(1, tokens, 16, dtype=torch.float64)
    expected = run(x)
    for changed in range(tokens):
        other = x.clone()
        other[:, changed] += 1
        moved = (run(other) - expected).abs().amax(-1)[0] > 1e-9
        shown = [changed <= i < changed + window for i in range(tokens)]
        assert moved.tolist() == shown, f"token {changed}"


def test_a_full_cache_refuses_more_tokens_and_keeps_what_it_has():
    for name, options in (("GA", {"heads": 2}), ("SWA", {"heads": 2, "window": 50}), ("MLA", {"heads": 2})):
        mixer = spec(name, **options).build(16)
        cache = mixer.new_cache(2, 5, dtype=torch.float32, device="cpu")
        mixer(torch.randn(2, 3, 16), cache)
        held = cache.snapshot()
        with pytest.raises(CacheFullError, match=r"row 0 would hold 6 tokens.*context of 5.*context=6"):
            mixer(torch.randn(2, 3, 16), cache)
        assert cache.seen == [3, 3]
        assert all(torch.equal(cache[kept], tensor) for kept, tensor in held["tensors"].items())
        mixer(torch.randn(2, 2, 16), cache)


def test_a_ring_of_the_windows_length_never_fills():
    mixer = spec("SWA", heads=2, window=4).build(16)
    cache = mixer.new_cache(1, 9, dtype=torch.float32, device="cpu")
    mixer(torch.randn(1, 7, 16), cache)
    mixer(torch.randn(1, 20, 16), cache)
    assert cache.seen == [27]


@pytest.mark.parametrize("name", sorted(registered()))
def test_a_cache_of_other_rows_is_refused(name):
    mixer = spec(name).build(16)
    cache = mixer.new_cache(2, 8, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match="holds 2 rows, but 3 sequences came"):
        mixer(torch.randn(3, 2, 16), cache)
    with pytest.raises(ValueError, match="holds 2 rows, but 3 documents came"):
        mixer(torch.randn(1, 3, 16), cache, Packing.from_offsets([0, 1, 2, 3]))
    assert cache.fresh
    with pytest.raises(ValueError, match="build the cache with the same sizes"):
        cache.restore(mixer.new_cache(3, 8, dtype=torch.float32, device="cpu").snapshot())


@pytest.mark.parametrize("name", sorted(registered()))
def test_a_bf16_cache_serves_an_fp32_model(name):
    torch.manual_seed(1)
    mixer, x = spec(name).build(16), torch.randn(2, 12, 16)
    cache = mixer.new_cache(2, 12, dtype=torch.bfloat16, device="cpu")
    got = torch.cat([mixer(part, cache) for part in x.split([4, 1, 7], dim=1)], dim=1)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, mixer(x), rtol=0.05, atol=0.05 * mixer(x).std().item())


def test_slow_decays_last_for_thousands_of_steps():
    """A write fades by exactly its rate over 3000 steps, in a bf16 model too: the memory and its decay are fp32."""
    mixer = spec("RET", heads=8, rope=False).build(64).to(torch.bfloat16)
    cache = mixer.new_cache(1, 4096, dtype=torch.bfloat16, device="cpu")
    mixer(torch.randn(1, 1, 64, dtype=torch.bfloat16), cache)
    first = cache["state"].clone()
    with torch.no_grad():
        for _ in range(30):
            mixer(torch.zeros(1, 100, 64, dtype=torch.bfloat16), cache)
    kept = (1 - 2.0 ** -torch.arange(5, 13, dtype=torch.float64)) ** 3000
    expected = first.double() * kept[:, None, None]
    slow = kept > 1e-20
    torch.testing.assert_close(cache["state"].double()[:, slow], expected[:, slow], rtol=1e-3, atol=0)
