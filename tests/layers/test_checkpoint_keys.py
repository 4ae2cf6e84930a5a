"""State dict keys, shapes and dtypes of every mixer as they were stored: what old checkpoints hold must still load."""

import json
from pathlib import Path

import pytest
import torch

from zoo_layers.mixer import registered

STORED = Path(__file__).with_name("checkpoint_keys.json")
# Every part that a mixer can have, so that no key escapes the list.
FULL = {
    "GA": {"output_gate": True, "qk_norm": True},
    "SWA": {"output_gate": True, "qk_norm": True},
    "DN": {"output_gate": True},
    "LA": {"output_gate": True, "conv": 4},
    "GLA": {"conv": 4},
    "HGRN2": {"lower_bound": True},
    "MLA": {"output_gate": True},
}


def keys_now() -> dict[str, dict[str, str]]:
    """Mixer -> key -> shape and dtype, at width 32."""
    found = {}
    for name, kind in registered().items():
        with torch.device("meta"):
            state = kind.from_options(FULL.get(name, {})).build(32).state_dict()
        found[name] = {key: f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for key, t in state.items()}
    return found


@pytest.mark.parametrize("name", sorted(registered()))
def test_keys_are_those_of_stored_checkpoints(name):
    stored = json.loads(STORED.read_text())
    assert name in stored, f"add {name} to {STORED.name}"
    assert keys_now()[name] == stored[name], "a changed key needs a conversion for old checkpoints"
