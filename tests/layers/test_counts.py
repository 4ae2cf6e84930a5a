"""Parameters, FLOPs and state bytes of every mixer against closed forms written out here, and published integers."""

import random

import pytest
import torch

from zoo_layers.attention import mean_context as mean_of
from zoo_layers.block import Block
from zoo_layers.mixer import registered
from zoo_layers.mlp import build_mlp

SEED = 20


def mean_context(tokens, window=None):
    shown = tokens if window is None else min(window, tokens)
    return (shown * (shown + 1) / 2 + (tokens - shown) * shown) / tokens


# Each: (spec, d, T) -> (parameters, FLOPs per token at T, state bytes at T), from the sizes alone.
def attention(s, d, T):
    H, Hk, dh, window = s.heads, s.kv_heads, s.head_dim, getattr(s, "window", None)
    gate = d * H * dh if s.output_gate else 0
    weights = 2 * d * H * dh + 2 * d * Hk * dh + gate
    slots = T if window is None else min(window, T)
    flops = 4 * d * H * dh + 4 * d * Hk * dh + 2 * gate + 4 * H * dh * mean_context(T, window)
    return weights + (2 * dh if s.qk_norm else 0), flops, 4 * Hk * dh * slots


def sizes(s):
    HV = getattr(s, "value_heads", None) or s.heads
    dv = s.head_dim * s.expand_v
    return s.heads, HV, s.head_dim, dv, s.heads * s.head_dim, HV * dv, getattr(s, "conv", 0)


def state(HV, dk, dv, c, channels):
    return 4 * HV * dk * dv + (2 * (c - 1) * channels if c else 0)


def linear_attention(s, d, T):
    H, HV, dk, dv, K, V, c = sizes(s)
    gate = d * V if s.output_gate else 0
    parameters = 2 * d * K + 2 * d * V + c * (2 * K + V) + gate + (dv if s.output_gate else 0)
    flops = 2 * d * (2 * K + V) + 4 * H * dk * dv + 2 * V * d + 2 * c * (2 * K + V) + 2 * gate
    return parameters, flops, state(HV, dk, dv, c, 2 * K + V)


def retnet(s, d, T):
    H, HV, dk, dv, K, V, _ = sizes(s)
    return 2 * d * K + 3 * d * V + dv, 2 * d * (2 * K + 2 * V) + 5 * H * dk * dv + 2 * V * d, 4 * HV * dk * dv


def gla(s, d, T):
    H, HV, dk, dv, K, V, c = sizes(s)
    r = s.gate_rank
    parameters = 2 * d * K + 3 * d * V + d * r + r * K + K + dv + c * (2 * K + V)
    flops = 2 * d * (2 * K + 2 * V) + 2 * d * r + 2 * r * K + 5 * H * dk * dv + 2 * V * d + 2 * c * (2 * K + V)
    return parameters, flops, state(HV, dk, dv, c, 2 * K + V)


def deltanet(s, d, T):
    H, HV, dk, dv, K, V, c = sizes(s)
    gate = d * V if s.output_gate else 0
    parameters = 2 * d * K + 2 * d * V + d * H + c * (2 * K + V) + dv + gate
    flops = 2 * d * (2 * K + V + H) + 2 * c * (2 * K + V) + 6 * H * dk * dv + 2 * V * d + 2 * gate
    return parameters, flops, state(HV, dk, dv, c, 2 * K + V)


def gated_deltanet(s, d, T):
    _, HV, dk, dv, K, V, c = sizes(s)
    parameters = 2 * d * K + 3 * d * V + 2 * d * HV + c * (2 * K + V) + 2 * HV + dv
    flops = 2 * d * (2 * K + 2 * V + 2 * HV) + 2 * c * (2 * K + V) + 7 * HV * dk * dv + 2 * V * d
    return parameters, flops, state(HV, dk, dv, c, 2 * K + V)


def kda(s, d, T):
    _, HV, dk, dv, K, V, c = sizes(s)
    r = s.gate_rank
    low_rank = 2 * d * r + r * HV * dk + r * V
    parameters = 2 * d * K + 2 * d * V + low_rank + V + d * HV + c * (2 * K + V) + HV + HV * dk + dv
    flops = 2 * d * (2 * K + V + HV) + 2 * low_rank + 2 * c * (2 * K + V) + 7 * HV * dk * dv + 2 * V * d
    return parameters, flops, state(HV, dk, dv, c, 2 * K + V)


def mamba2(s, d, T):
    di, n, g, c = s.expand * d, s.state, s.groups, s.conv
    nh = di // s.head_dim
    parameters = d * (2 * di + 2 * g * n + nh) + (c + 1) * (di + 2 * g * n) + 3 * nh + di + di * d
    flops = 2 * d * (2 * di + 2 * g * n + nh) + 2 * c * (di + 2 * g * n) + 5 * di * n + 2 * di * d
    return parameters, flops, 4 * di * n + 2 * (c - 1) * (di + 2 * g * n)


def mamba1(s, d, T):
    di, n, r, c = s.expand * d, s.state, s.dt_rank, s.conv
    parameters = 2 * d * di + (c + 1) * di + di * (r + 2 * n) + r * di + di + di * n + di + di * d
    flops = 4 * d * di + 2 * c * di + 2 * di * (r + 2 * n) + 2 * r * di + 7 * di * n + 2 * di * d
    return parameters, flops, 4 * di * n + 2 * (c - 1) * di


def hgrn2(s, d, T):
    F, dv = s.heads * s.head_dim, d // s.heads
    parameters = 2 * d * F + 2 * d * d + d + (F if s.lower_bound else 0)
    return parameters, 2 * d * (2 * F + d) + 5 * F * dv + 2 * d * d, 4 * s.heads * s.head_dim * dv


def latent_attention(s, d, T):
    H, r, nope, rope, dv = s.heads, s.rank, s.head_dim, s.rope_dim, s.value_dim
    gate = d * H * dv if s.output_gate else 0
    weights = d * H * (nope + rope) + d * (r + rope) + r * H * (nope + dv) + H * dv * d + gate
    flops = 2 * weights + 2 * H * (nope + rope + dv) * mean_context(T)
    return weights + r, flops, 2 * (r + rope) * T


CLOSED = {
    "GA": attention,
    "SWA": attention,
    "LA": linear_attention,
    "RET": retnet,
    "GLA": gla,
    "DN": deltanet,
    "GDN": gated_deltanet,
    "KDA": kda,
    "M2": mamba2,
    "M1": mamba1,
    "HGRN2": hgrn2,
    "MLA": latent_attention,
}
CHOICES = {  # what a random setting draws from, for each option that is a size or a switch
    "heads": [1, 2, 4],
    "kv_heads": [1],
    "value_heads": [4, 8],
    "head_dim": [8, 16, 24],
    "expand_v": [1, 2, 3],
    "conv": [1, 2, 4],
    "window": [3, 100, 5000],
    "gate_rank": [1, 5, 16],
    "output_gate": [True, False],
    "qk_norm": [True, False],
    "expand": [1, 2, 3],
    "state": [1, 16, 100],
    "groups": [1, 2],
    "dt_rank": [1, 7, 64],
    "rank": [1, 24, 512],
    "rope_dim": [2, 8],
    "value_dim": [8, 40],
    "lower_bound": [True, False],
}


def ours():
    return {name for name, spec in registered().items() if spec.__module__.startswith("zoo_layers.")}


def test_every_mixer_has_a_closed_form():
    assert CLOSED.keys() == ours()


@pytest.mark.parametrize("name", CLOSED)
def test_counts_are_those_of_the_closed_form(name):
    draw, kind = random.Random(SEED), registered()[name]
    for trial in range(12):
        known = kind.options()
        picked = {
            o: draw.choice(values) for o, values in CHOICES.items() if o in known and trial and draw.random() < 0.6
        }
        if "heads" not in picked:
            picked.pop("value_heads", None)  # a multiple of heads, which the width settles
        if isinstance(picked.get("qk_norm"), bool) and known["qk_norm"].kind is not bool:
            del picked["qk_norm"]
        d_model, context = draw.choice([96, 192, 480]), draw.choice([1, 77, 4096])
        spec = kind.from_options(picked).resolve(d_model)
        with torch.device("meta"):
            mixer = spec.build(d_model)
        counted = sum(p.numel() for p in mixer.parameters())
        found = (counted, mixer.flops_per_token(context), mixer.state_bytes(context))
        assert found == pytest.approx(CLOSED[name](spec, d_model, context), rel=1e-15), (spec, d_model, context, SEED)


LAYERS = {  # mixer, options, d_model, d_ff: parameters, FLOPs per token and state bytes at 4096
    "GDN of the explain example": ("GDN", {}, 1024, 2816, 14_969_100, 31_309_824, 804_864),
    "GA of the explain example": ("GA", {}, 1024, 2816, 12_847_104, 34_080_768, 16_777_216),
}


@pytest.mark.parametrize("row", LAYERS)
def test_a_layer_costs_what_the_documents_say(row):
    name, options, d_model, d_ff, parameters, flops, state_bytes = LAYERS[row]
    with torch.device("meta"):
        mixer = registered()[name].from_options(options).build(d_model)
        block = Block(mixer, build_mlp("swiglu", d_model, d_ff), d_model=d_model)
    assert sum(p.numel() for p in block.parameters()) == parameters
    assert block.flops_per_token(4096) == flops
    assert mixer.state_bytes(4096) == state_bytes


MODELS = {  # 24 or so equal layers: pattern of one mixer, layers, d, d_ff; non-embedding parameters, FLOPs, state bytes
    "transformer 340M": ("GA", {"heads": 16}, 24, 1024, 2816, 308_331_520, 883_474_432, 402_653_184),
    "transformer 1B": ("GA", {"heads": 32}, 24, 2048, 5632, 1_233_225_728, 3_000_074_240, 805_306_368),
    "DeltaNet 340M": ("DN", {"heads": 8}, 24, 1024, 2816, 308_826_112, 701_956_096, 13_025_280),
    "DeltaNet 1B": ("DN", {"heads": 16}, 24, 2048, 5632, 1_234_605_056, 2_637_824_000, 26_050_560),
    "GDN 340M, 6 heads": (
        "GDN",
        {"heads": 6, "head_dim": 256},
        21,
        1024,
        2816,
        446_736_124,
        1_074_503_680,
        66_834_432,
    ),
    "GDN 340M, 3 heads": ("GDN", {"heads": 3, "head_dim": 256}, 21, 1024, 2816, 314_228_350, 751_685_632, 33_417_216),
    "Mamba-2 340M": ("M2", {}, 48, 1024, None, 316_851_712, 761_626_624, 50_995_200),
    "Mamba-2 1B": ("M2", {}, 48, 2048, None, 1_240_767_488, 2_737_405_952, 101_916_672),
    "Mamba 1B": ("M1", {}, 48, 2048, None, 1_269_204_992, 2_683_830_272, 13_762_560),
    "HGRN2 340M": ("HGRN2", {"heads": 8, "head_dim": 128}, 24, 1024, 2816, 308_356_096, 697_827_328, 12_582_912),
    "GLA 340M": ("GLA", {"heads": 4}, 24, 1024, 2816, 308_939_776, 699_006_976, 12_582_912),
    "GDN 1B": ("GDN", {"heads": 6, "head_dim": 256}, 21, 2048, 5632, 1_256_276_732, 2_759_032_832, 66_834_432),
    "LLaMA 438M": ("GA", {"heads": 12}, 12, 1536, 4096, 339_777_024, 928_813_056, 301_989_888),
    "GDN 1.3B": ("GDN", {"heads": 9, "head_dim": 200}, 16, 2400, 5888, 1_232_495_488, 2_699_059_200, 46_771_200),
}


@pytest.mark.parametrize("row", MODELS)
def test_a_published_model_costs_what_its_configuration_says(row):
    name, options, layers, d_model, d_ff, parameters, flops, state_bytes = MODELS[row]
    vocabulary = 32_000
    with torch.device("meta"):
        mixer = registered()[name].from_options(options).build(d_model)
        block = Block(mixer, build_mlp("swiglu" if d_ff else "none", d_model, d_ff), d_model=d_model)
    assert layers * sum(p.numel() for p in block.parameters()) + d_model == parameters  # and the final norm
    assert layers * block.flops_per_token(4096) + 2 * d_model * vocabulary == flops
    assert layers * mixer.state_bytes(4096) == state_bytes


GATED_GA = {"heads": 16, "kv_heads": 2, "head_dim": 256, "output_gate": True, "qk_norm": True}
MIXERS = {  # of published models with experts: mixer, options, d_model, parameters of one, and layers with that mixer
    "GDN of Qwen3-Next": (
        "GDN",
        {"heads": 16, "value_heads": 32, "head_dim": 128, "expand_v": 1},
        2048,
        33_718_464,
        36,
    ),
    "GA of Qwen3-Next": ("GA", GATED_GA, 2048, 27_263_488, 12),
    "KDA of Kimi Linear": ("KDA", {"heads": 32, "head_dim": 128, "expand_v": 1}, 2304, 39_518_368, 20),
    "MLA of Kimi Linear": ("MLA", {"heads": 32, "head_dim": 128}, 2304, 29_114_880, 7),
}
CACHES = {  # bytes of all these layers' caches: those that do not depend on the context, and those per token of it
    "GDN of Qwen3-Next": (77_266_944, 0),
    "GA of Qwen3-Next": (0, 24_576),
    "KDA of Kimi Linear": (43_417_600, 0),
    "MLA of Kimi Linear": (0, 8_064),
}


@pytest.mark.parametrize("row", MIXERS)
def test_a_mixer_of_a_published_model_costs_what_its_configuration_says(row):
    name, options, d_model, parameters, layers = MIXERS[row]
    with torch.device("meta"):
        mixer = registered()[name].from_options(options).build(d_model)
    assert sum(p.numel() for p in mixer.parameters()) == parameters
    fixed, per_token = CACHES[row]
    assert [layers * mixer.state_bytes(context) for context in (1, 4096)] == [
        fixed + per_token * context for context in (1, 4096)
    ]


@pytest.mark.parametrize(
    ("lengths", "window", "mean"),
    [
        ([4096], 2048, 1536.25),
        ([32768], 2048, 1984.03125),
        ([1000], 2048, 500.5),
        ([4096], None, 2048.5),
        ([4096], 512, 480.0625),
        ([1000, 3000, 96], None, 1222.328125),
        ([1000, 3000, 96], 512, 437.26171875),
    ],
)
def test_a_query_meets_as_many_keys_as_its_document_and_window_show(lengths, window, mean):
    assert sum(n * mean_of(n, window) for n in lengths) / sum(lengths) == mean
    # The truth: every query counted.
    met = [min(t, window or t) for n in lengths for t in range(1, n + 1)]
    assert sum(met) / len(met) == mean
