"""The registry: our mixers, those of other packages, and what happens when one of these is broken."""

import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from zoo_layers import mixer as registry
from zoo_layers.conformance import Case, ConformanceError, check, pieces
from zoo_layers.init import Linear
from zoo_layers.mixer import MixerCache, MixerSpec, PluginError, TokenMixer, option
from zoo_layers.mlp import linear_flops

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class RunningSumSpec(MixerSpec):
    """A toy of another package: the fading sum of all earlier tokens."""

    kept: float = option(0.5, "share of the sum that stays per token", at_least=0, at_most=1)

    def resolve(self, d_model):
        return self

    def module(self, d_model):
        return RunningSum(self, d_model)


class RunningSum(TokenMixer):
    def __init__(self, spec: RunningSumSpec, d_model: int):
        super().__init__()
        self.spec, self.to_out = spec, Linear(d_model, d_model)

    def forward(self, x, cache=None, packing=None):
        if cache is not None:
            cache.admit(x, packing)
        documents = list(x) if packing is None else x[0].split(packing.lengths)
        total = x.new_zeros(len(documents), x.shape[-1]) if cache is None else cache["sum"].to(x.dtype)
        sums, lasts = [], []
        for document, carried in zip(documents, total):
            for token in document:
                carried = self.spec.kept * carried + token
                sums.append(carried)
            lasts.append(carried)
        if cache is not None:
            cache.put("sum", torch.stack(lasts))
            cache.advance(x.shape[1] if packing is None else packing)
        return self.to_out(torch.stack(sums).view_as(x))

    def new_cache(self, batch, context, *, dtype, device):
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        return MixerCache({"sum": torch.zeros(batch, self.to_out.in_features, dtype=exact, device=device)})

    def flops_per_token(self, context):
        return linear_flops(self)

    def state_bytes(self, context):
        return 4 * self.to_out.in_features


class Leaky(RunningSum):
    """Forgets that a packing has borders."""

    def forward(self, x, cache=None, packing=None):
        return super().forward(x, cache, None if cache is None else packing)


class LeakySpec(RunningSumSpec):
    def module(self, d_model):
        return Leaky(self, d_model)


@pytest.fixture
def plugins(monkeypatch):
    """A function that makes entry points known; the registry is as before when the test ends."""
    registry.registered()
    for name in ("_SPECS", "_PLUGINS", "_BROKEN"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))

    def offer(**targets):
        entries = [EntryPoint(name, target, registry.ENTRY_POINTS) for name, target in targets.items()]
        monkeypatch.setattr(registry, "_plugins", lambda: iter(entries))
        monkeypatch.setattr(registry, "_DISCOVERED", False)

    return offer


@pytest.fixture
def other_package(tmp_path, monkeypatch):
    """A module `other_package` on the path, that notes its import and holds one spec."""
    (tmp_path / "other_package.py").write_text(
        "from dataclasses import dataclass\n"
        "from zoo_layers.mixers.linear_attention import LinearAttentionSpec\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Spec(LinearAttentionSpec):\n"
        "    'A mixer of another package.'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("other_package", None)


@pytest.mark.usefixtures("other_package")
def test_a_plugins_name_is_known_before_it_is_imported(plugins):
    plugins(RWKV7="other_package:Spec")
    assert "RWKV7" in registry.names()
    assert "other_package" not in sys.modules
    spec = registry.spec_of("RWKV7")
    assert "other_package" in sys.modules
    assert spec.name == "RWKV7"
    assert registry.registered()["RWKV7"] is spec
    assert spec.from_options({"heads": 2}).build(16)(torch.randn(1, 3, 16)).shape == (1, 3, 16)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("no_such_package:Spec", "ModuleNotFoundError"),
        ("zoo_layers.block:NoSuchSpec", "AttributeError"),
        ("zoo_layers.block:Block", "is no MixerSpec"),
    ],
)
def test_a_broken_plugin_is_shown_and_raises_when_asked_for_and_not_before(plugins, target, reason):
    plugins(RWKV7=target)
    assert "RWKV7" not in registry.registered()
    assert "GDN" in registry.registered()
    assert reason in registry.broken()["RWKV7"]
    with pytest.raises(PluginError, match=reason):
        registry.spec_of("RWKV7")


def test_a_plugin_with_a_name_that_yaml_retypes_is_broken(plugins):
    plugins(NO="zoo_layers.mixers.linear_attention:LinearAttentionSpec")
    assert "YAML" in registry.broken()["NO"]


def test_a_name_taken_twice_names_both(plugins):
    plugins(GDN="other_package:Spec")
    with pytest.raises(
        ValueError, match=r"GDN is registered twice: by zoo_layers.mixers.gated_deltanet and by package other"
    ):
        registry.registered()


def test_registering_another_spec_under_a_taken_name_raises(plugins):
    plugins()
    with pytest.raises(ValueError, match=r"GDN is registered twice: by zoo_layers.mixers.gated_deltanet and by"):
        registry.register("GDN")(RunningSumSpec)
    for name in ("gdn", "3X", "A-B", ""):
        with pytest.raises(ValueError, match="upper-case letters and digits only"):
            registry.register(name)
    for name in ("NULL", "ON", "Y"):
        with pytest.raises(ValueError, match="YAML would read it as another type"):
            registry.register(name)


def test_an_unknown_mixer_is_answered_with_the_nearest_name(plugins):
    plugins()
    with pytest.raises(ValueError, match=r"unknown mixer 'GND'; did you mean 'GDN'\?.*Known mixers: DN GA GDN"):
        registry.spec_of("GND")


def test_a_mixer_of_another_package_passes_the_matrix_by_being_registered(plugins):
    plugins()
    registry.register("SUM")(RunningSumSpec)
    results = dict(check(registry.spec_of("SUM")(), 8, seed=2))
    assert {name: str(failure) for name, failure in results.items() if failure is not None} == {}
    assert len(results) >= 12


def test_the_matrix_catches_a_mixer_that_leaks(plugins):
    plugins()
    registry.register("LEAKY")(LeakySpec)
    failed = {name for name, failure in check(registry.spec_of("LEAKY")(), 8) if failure is not None}
    assert "packing" in failed
    assert "pieces" not in failed


def test_a_failure_names_the_mixer_its_settings_and_the_seed(plugins):
    plugins()

    class Forgetful(RunningSum):
        def forward(self, x, cache=None, packing=None):
            if cache is not None:
                cache.tensors["sum"] = torch.zeros_like(cache["sum"])
            return super().forward(x, cache, packing)

    class ForgetfulSpec(RunningSumSpec):
        def module(self, d_model):
            return Forgetful(self, d_model)

    registry.register("LOSES")(ForgetfulSpec)
    with pytest.raises(ConformanceError, match=r"LOSES kept=0.25 at d_model=8, seed=11: pieces of \[.*relative error"):
        pieces(Case(ForgetfulSpec(kept=0.25), 8, seed=11))


def test_importing_the_package_imports_no_mixer():
    code = (
        "import sys; import zoo_layers.mixer, zoo_layers.block; "
        "assert not [m for m in sys.modules if m.startswith('zoo_layers.mixers')]; "
        "assert 'GDN' in zoo_layers.mixer.names()"
    )
    paths = [str(ROOT / "layers"), str(ROOT / "kernels")]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import sys; sys.path[:0] = {paths!r}; {code}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
