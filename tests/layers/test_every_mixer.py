"""Every registered mixer, and the options that change its arithmetic, against the whole conformance matrix."""

import pytest

from zoo_layers.conformance import PROPERTIES, Case
from zoo_layers.mixer import registered

D_MODEL = 16
# One row per registered mixer: its smallest telling sizes. A new mixer adds its line here.
ROWS = {
    "GA": {"heads": 2},
    "SWA": {"heads": 2, "window": 7},
    "DN": {"heads": 2, "expand_v": 2},
    "GDN": {"heads": 2, "head_dim": 5},
    "M2": {"head_dim": 8, "state": 5},
    "M1": {"state": 5},
    "KDA": {"heads": 2, "gate_rank": 3},
    "GLA": {"heads": 2, "gate_rank": 3},
    "RET": {"heads": 2},
    "LA": {"heads": 2},
    "HGRN2": {"heads": 2, "head_dim": 5},
    "MLA": {"heads": 2, "head_dim": 6, "rank": 5, "rope_dim": 3, "value_dim": 4},
}
# Options that change the arithmetic, each with the mixer it belongs to.
VARIANTS = {
    "GA grouped and gated": ("GA", {"heads": 4, "kv_heads": 2, "head_dim": 6, "output_gate": True, "qk_norm": True}),
    "GA without positions": ("GA", {"heads": 2, "kv_heads": 1, "rope": False}),
    "GA turning a part": ("GA", {"heads": 2, "rope_fraction": 0.5, "rope_theta": 100.0}),
    "SWA grouped": ("SWA", {"heads": 4, "kv_heads": 2, "window": 3, "qk_norm": True}),
    "DN of the first paper": ("DN", {"heads": 2, "feature_map": "elu1", "qk_norm": "l1", "conv": 0}),
    "DN gated, negative": (
        "DN",
        {"heads": 2, "output_gate": True, "negative_eigenvalues": True, "feature_map": "relu"},
    ),
    "GDN more values": ("GDN", {"heads": 2, "value_heads": 4, "head_dim": 3, "expand_v": 1, "conv": 0}),
    "GDN negative": ("GDN", {"heads": 1, "head_dim": 6, "negative_eigenvalues": True, "conv": 2}),
    "KDA more values": ("KDA", {"heads": 2, "value_heads": 4, "head_dim": 4, "negative_eigenvalues": True}),
    "M2 in groups": ("M2", {"head_dim": 8, "state": 4, "groups": 2, "conv": 3}),
    "M1 without convolution": ("M1", {"expand": 3, "state": 16, "conv": 1, "dt_rank": 5}),
    "GLA with convolution": ("GLA", {"heads": 1, "conv": 4, "expand_v": 1}),
    "RET without positions": ("RET", {"heads": 2, "rope": False, "expand_v": 1}),
    "LA mapped and gated": ("LA", {"heads": 2, "conv": 4, "qk_norm": "l2", "feature_map": "silu", "output_gate": True}),
    "LA of the first paper": ("LA", {"heads": 2, "feature_map": "elu1", "expand_v": 2}),
    "HGRN2 over floors": ("HGRN2", {"heads": 4, "head_dim": 3, "lower_bound": True}),
    "MLA turned": ("MLA", {"heads": 3, "head_dim": 4, "rope_dim": 4, "rope": True, "rope_theta": 100.0}),
    "MLA gated": ("MLA", {"heads": 1, "rank": 7, "output_gate": True}),
}
CASES = {**{name: (name, options) for name, options in ROWS.items()}, **VARIANTS}


def test_no_mixer_is_left_out():
    ours = {name for name, spec in registered().items() if spec.__module__.startswith("zoo_layers.")}
    assert ROWS.keys() == ours, "each registered mixer needs a row above, and each row a mixer"


@pytest.mark.parametrize("prove", PROPERTIES.values(), ids=PROPERTIES)
@pytest.mark.parametrize("row", CASES)
def test_a_mixer_has_the_property(row, prove):
    name, options = CASES[row]
    # The seed is drawn from the row, so that rows try different lengths; failures print it.
    prove(Case(registered()[name].from_options(options), D_MODEL, seed=sum(map(ord, row))))
