"""Presets: the patterns and depths they promise, the counted sizes of those that can be built, and sources."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from zoo.architecture import settle
from zoo.budget import match_parameters
from zoo.errors import PatternError, UserError
from zoo.explain import explain
from zoo.module import default_optimizer
from zoo.optim import parameter_groups
from zoo.pattern import arrange, expand
from zoo.presets import Preset, preset, presets
from zoo_kernels.packing import Packing
from zoo_layers.mixer import registered

# Pattern and depths of the language's table; each depth word as a question about n.
DEPTHS = {
    "any": lambda n: True,
    "even": lambda n: n % 2 == 0,
    "even, 4 or more": lambda n: n % 2 == 0 and n >= 4,
    "multiple of 3": lambda n: n % 3 == 0,
    "multiple of 4": lambda n: n % 4 == 0,
}
TABLE = {
    "transformer++": ("GA", "any"),
    "linear": ("LA", "any"),
    "retnet": ("RET", "any"),
    "gla": ("GLA", "any"),
    "mamba": ("M1", "any"),
    "mamba2": ("M2", "any"),
    "hgrn2": ("HGRN2", "any"),
    "deltanet": ("DN", "any"),
    "gdn": ("GDN", "any"),
    "deltanet-swa": ("DN,SWA", "even"),
    "deltanet-global": ("DN,GA@2,GA@N/2+1", "even, 4 or more"),
    "gdn-h1": ("GDN,SWA", "even"),
    "gdn-h2": ("M2,GDN,SWA", "multiple of 3"),
    "samba": ("M1,SWA", "even"),
    "qwen3-next": ("3xGDN,GA:output_gate=true", "multiple of 4"),
    "kimi-linear": ("3xKDA,MLA,MLA@-1", "any"),
}
SIZES = {
    **dict.fromkeys(
        ("transformer++", "mamba2", "gla", "hgrn2", "deltanet", "deltanet-swa", "deltanet-global"), ("340m", "1.3b")
    ),
    **dict.fromkeys(("retnet", "mamba"), ("1.3b",)),
    **dict.fromkeys(("gdn", "gdn-h1", "gdn-h2"), ("0.4b", "1.3b")),
    "samba": ("421m", "1.3b"),
    "kimi-linear": ("340m",),
}
# non-embedding, total, forward FLOPs per token at 4096, decode state in bytes at 4096: counted from the configurations
# that the presets name.
COUNTED = {
    "transformer++-340m": (308_331_520, 373_867_520, 883_474_432, 402_653_184),
    "transformer++-1.3b": (1_233_225_728, 1_364_297_728, 3_000_074_240, 805_306_368),
    "deltanet-340m": (308_826_112, 374_362_112, 701_956_096, 13_025_280),
    "deltanet-1.3b": (1_234_605_056, 1_365_677_056, 2_637_824_000, 26_050_560),
    "mamba2-340m": (316_851_712, 382_387_712, 761_626_624, 50_995_200),
    "mamba2-1.3b": (1_240_767_488, 1_371_839_488, 2_737_405_952, 101_916_672),
    "mamba-1.3b": (1_269_204_992, 1_400_276_992, 2_683_830_272, 13_762_560),
    "gla-340m": (308_939_776, 374_475_776, 699_006_976, 12_582_912),
    "hgrn2-340m": (308_356_096, 373_892_096, 697_827_328, 12_582_912),
    "samba-421m": (372_641_280, 421_793_280, 901_506_048, 76_787_712),
    "samba-1.3b": (1_256_479_488, 1_330_207_488, 2_790_736_128, 172_772_352),
    "gdn-0.4b": (467_685_830, 516_837_830, 1_056_307_200, 13_280_256),
    "gdn-h1-0.4b": (481_612_908, 530_764_908, 1_130_468_352, 82_741_248),
    "gdn-1.3b": (1_232_495_488, 1_309_295_488, 2_699_059_200, 46_771_200),
    "gdn-h1-1.3b": (1_242_880_290, 1_316_608_290, 2_802_265_344, 194_130_432),
    "deltanet-global-1.3b": (1_234_490_112, 1_365_562_112, 2_668_011_520, 90_988_544),
    "deltanet-swa-1.3b": (1_233_915_392, 1_364_987_392, 2_768_592_896, 214_351_872),
    # These by the closed forms of each mixer, since no configuration gives them.
    "deltanet-global-340m": (308_784_896, 374_320_896, 717_082_624, 45_494_272),
    "deltanet-swa-340m": (308_578_816, 374_114_816, 767_537_152, 107_175_936),
    "gdn-h2-0.4b": (482_287_752, 531_439_752, 1_116_624_896, 61_532_160),
    "gdn-h2-1.3b": (1_241_971_800, 1_315_699_800, 2_766_779_904, 146_672_640),
    "kimi-linear-340m": (309_135_760, 374_671_760, 763_067_392, 38_080_512),
}
# Non-embedding parameters that the studies name, in millions.
PUBLISHED_MILLIONS = {
    "gla-1.3b": 1234.4,
    "hgrn2-1.3b": 1233.3,
    "retnet-1.3b": 1220.7,
}
GUIDE = (Path(__file__).parents[2] / "docs/patterns.md").read_text(encoding="utf-8")
SIZED = [name for name, found in presets().items() if found.n_layers]
BUILDABLE = [name for name in SIZED if not presets()[name].missing()]


def test_the_presets_are_those_of_the_table_in_all_their_sizes():
    sized = {f"{family}-{size}" for family, sizes in SIZES.items() for size in sizes}
    assert presets().keys() == TABLE.keys() | sized
    assert set(SIZED) == sized
    assert COUNTED.keys() | PUBLISHED_MILLIONS.keys() == sized, "each size needs a row of counts, and each row a preset"


def test_the_guide_lists_the_sizes_of_every_family():
    rows = re.findall(r"^\| `([\d.]+[mb])` \| (.*) \|$", GUIDE, re.MULTILINE)
    assert {f"{family}-{size}" for size, cell in rows for family in re.findall(r"`([^`]+)`", cell)} == set(SIZED)


@pytest.mark.parametrize("name", TABLE)
def test_a_preset_has_the_pattern_and_fits_the_depths_of_the_table(name):
    found = presets()[name]
    assert (found.pattern, found.depths) == TABLE[name]
    fits = []
    for depth in range(1, 30):
        try:
            arrange(found.parsed(), depth)
        except PatternError:
            continue
        fits.append(depth)
    assert fits == [depth for depth in range(1, 30) if DEPTHS[found.depths](depth)]


@pytest.mark.parametrize("name", SIZED)
def test_a_sized_preset_is_its_family_with_sizes(name):
    sized, family = presets()[name], presets()[name.rsplit("-", 1)[0]]
    assert (sized.pattern, sized.depths, sized.mlp) == (family.pattern, family.depths, family.mlp)
    for mixer, options in family.mixers.items():
        assert options.items() <= sized.mixers[mixer].items()
    assert None not in (sized.n_layers, sized.d_model, sized.tie, sized.vocab_size)
    assert (sized.d_ff is None) == (sized.mlp == "none")
    arrange(sized.parsed(), sized.n_layers)


@pytest.mark.parametrize("name", presets())
def test_every_setting_has_a_source_and_every_source_a_setting(name):
    found = presets()[name]
    settings = {setting: source for setting, _, source in found.settings()}
    assert all(source.startswith(("[paper]", "[config]", "[memory]", "[ours]")) for source in settings.values())
    assert found.sources.keys() <= settings.keys()
    assert {f.name for f in fields(Preset)} >= {key for key in settings if "." not in key}


@pytest.mark.parametrize("name", presets())
def test_options_are_ones_that_the_mixers_have(name):
    found = presets()[name]
    used = {entry.mixer for entry in found.parsed().every_entry()}
    assert found.mixers.keys() <= used
    for mixer in found.mixers.keys() & registered().keys():
        registered()[mixer].from_options(found.mixers[mixer])


@pytest.mark.parametrize("name", BUILDABLE)
def test_a_sized_preset_counts_what_its_configuration_counts(name):
    table = explain(settle(preset=name), context=4096)
    if name in COUNTED:
        assert (table.inner_parameters, table.parameters, table.flops, table.state) == COUNTED[name]
    else:
        assert round(table.inner_parameters / 1e6, 1) == pytest.approx(PUBLISHED_MILLIONS[name], abs=0.051)


@pytest.mark.parametrize(("size", "tolerance"), [("0.4b", 0.002), ("1.3b", 0.001)])
def test_the_tuned_hybrid_has_the_size_of_its_rival(size, tolerance):
    tuned, rival = COUNTED[f"gdn-h2-{size}"][0], COUNTED[f"gdn-h1-{size}"][0]
    assert tuned == pytest.approx(rival, rel=tolerance)
    # No other width of the MLPs comes nearer, in steps of 64.
    own = settle(preset=f"gdn-h2-{size}")
    assert match_parameters(own, rival).architecture.d_ff == own.d_ff


@pytest.mark.parametrize(
    ("name", "context", "flops", "state"),
    [
        ("transformer++-1.3b", 32_768, 5_818_646_528, None),
        ("deltanet-global-1.3b", 32_768, 2_902_892_544, None),
        ("gdn-h1-1.3b", 32_768, 2_839_406_112, None),
        ("transformer++-1.3b", 131_072, None, 25_769_803_776),
        ("deltanet-global-1.3b", 131_072, None, 2_171_363_328),
    ],
)
def test_long_contexts_cost_what_was_counted(name, context, flops, state):
    table = explain(settle(preset=name), context=context)
    if flops is not None:
        assert table.flops == flops
    if state is not None:
        assert table.state == state


def test_an_unknown_preset_is_answered_with_the_nearest():
    with pytest.raises(UserError, match=r"unknown preset 'gdn-h1-0\.4'; did you mean 'gdn-h1-0\.4b'"):
        preset("gdn-h1-0.4")


@pytest.mark.parametrize("name", [name for name, found in presets().items() if found.missing()])
def test_a_preset_whose_mixer_is_not_registered_is_listed_and_refuses_with_that_reason(name):
    missing = presets()[name].missing()
    assert not set(missing) & registered().keys()
    with pytest.raises(UserError, match=f"preset .* cannot be built: it needs {' and '.join(missing)}, which"):
        preset(name)


# What shrinks a preset, by option: each mixer takes those that it has.
SMALL = {
    "heads": 2,
    "head_dim": 16,
    "state": 16,
    "window": 8,
    "rank": 24,
    "rope_dim": 8,
    "value_dim": 16,
    "gate_rank": 8,
}


def shrunk(name):
    """A preset at width 32 and the smallest depth at which every mixer of its pattern has a layer."""
    found = presets()[name]
    used = {entry.mixer for entry in found.parsed().every_entry()}
    mixers = {m: {o: SMALL[o] for o in SMALL if o in registered()[m].options()} for m in used}
    depth = 6 if found.depths == "multiple of 3" else 4
    return settle(preset=name, n_layers=depth, d_model=32, d_ff=48, vocab_size=61, mixers=mixers)


@pytest.mark.parametrize("name", [name for name, found in presets().items() if not found.missing()])
def test_a_preset_trains(name):
    architecture = shrunk(name)
    found = presets()[name]
    assert {layer.mixer for layer in architecture.layers} == {entry.mixer for entry in found.parsed().every_entry()}
    assert (architecture.tie, architecture.mlp) == (bool(found.tie), found.mlp or "swiglu")
    model = architecture.build(seed=1)
    ids = torch.randint(61, (1, 40), generator=torch.Generator().manual_seed(2))
    packing = Packing.from_offsets([0, 13, 14, 40])
    optimizer = default_optimizer(parameter_groups(model.named_parameters()))
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    nll, tokens = model.nll(ids, ids.roll(-1), packing)
    (nll / tokens).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{key} gets no gradient"
        assert parameter.grad.isfinite().all(), f"{key}: the gradient is not finite"
        assert parameter.grad.any(), f"{key}: the gradient is zero"
    optimizer.step()
    assert [key for key, parameter in model.named_parameters() if torch.equal(parameter, before[key])] == []
    after, _ = model.nll(ids, ids.roll(-1), packing)
    assert after < nll


@pytest.mark.parametrize("name", [name for name, found in presets().items() if not found.missing()])
def test_a_preset_that_can_be_built_expands(name):
    found = preset(name)
    layers = expand(found.pattern, found.n_layers or 12, mixers=found.mixers, mlp=found.mlp or "swiglu")
    for layer in layers:
        layer.resolve(found.d_model or 1024)
