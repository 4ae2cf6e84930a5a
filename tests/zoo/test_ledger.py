"""The ledger's figures against counted ones, for every preset; its row; what a layer keeps for the backward pass."""

import pytest
import torch

from zoo.activations import _kept, _per_token, activation_bytes, kept_bytes
from zoo.architecture import settle
from zoo.errors import UserError
from zoo.explain import explain
from zoo.ledger import LedgerRow, cost, read_share
from zoo.pattern import expand
from zoo.presets import presets
from zoo_layers.block import Block
from zoo_layers.conformance import Case, counts
from zoo_layers.mixer import registered
from zoo_layers.mlp import SwiGLU, build_mlp

BUILDABLE = [name for name, found in presets().items() if not found.missing()]


@pytest.mark.parametrize("name", BUILDABLE)
def test_every_mixer_of_a_preset_costs_what_is_counted(name):
    found = presets()[name]
    layers = expand(found.pattern, found.n_layers or 12, mixers=found.mixers, mlp=found.mlp or "swiglu")
    # The heads of the preset on a narrow model: a FLOP counter on the reference path, and the bytes of a real cache.
    for spec in dict.fromkeys(layer.spec for layer in layers):
        counts(Case(spec, 64))


@pytest.mark.parametrize("name", BUILDABLE)
def test_the_ledger_counts_what_the_table_sums(name):
    architecture = settle(
        preset=name, **({} if presets()[name].n_layers else {"n_layers": 12, "d_model": 256, "vocab_size": 257})
    )
    own, table = cost(architecture, 4096), explain(architecture, context=4096)
    rows = sum(row.parameters for row in table.rows) + architecture.d_model  # and the final norm
    assert own.non_embedding == rows == table.inner_parameters
    assert own.total == rows + (1 if own.tie else 2) * architecture.d_model * architecture.vocab_size
    assert own.flops == pytest.approx(table.flops, rel=1e-12)
    assert own.state == sum(row.state for row in table.rows)


def row(held="params", tolerance=0.01, own="GDN", **more):
    models = (settle(p, n_layers=2, d_model=64, vocab_size=257) for p in (own, "GA"))
    return LedgerRow(*(cost(model, 100) for model in models), held, tolerance, **more)


def test_a_row_says_what_is_held_and_how_far_the_rest_moved():
    close, far = row(tolerance=0.5), row()
    assert close.agrees
    assert not far.agrees
    deviation = close.own.non_embedding / close.reference.non_embedding - 1
    assert str(close).startswith(f"params (non-embedding) = {deviation:+.2%} (within 50.00%) · tokens = · FLOPs@100 ")
    assert str(far).startswith(f"params (non-embedding) ≠ {deviation:+.2%} (NOT within 1.00%) · tokens = · FLOPs@100 ")
    same = row(own="GA", held="state")
    assert str(same).endswith("state@100 = +0.00% (within 1.00%)")
    assert [same.deviation(q) for q in ("params", "flops", "state")] == [0, 0, 0]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"held": "tokens"}, "cannot be held equal"),
        ({"tolerance": 0}, "a share between 0 and 1"),
        ({"count": "active"}, "count must be one of"),
    ],
)
def test_a_row_that_means_nothing_is_refused(wrong, said):
    with pytest.raises(UserError, match=said):
        row(**wrong)


def test_shares_are_read_with_and_without_a_percent_sign():
    assert read_share("1%") == read_share("0.01") == 0.01
    for text in ("0", "100%", "-1%", "one"):
        with pytest.raises(UserError, match="give a share between 0 and 1"):
            read_share(text)


# --------------------------------------------------------------------------------------------------------- activations
def test_an_mlp_keeps_its_input_both_projections_their_gate_and_their_product():
    mlp = SwiGLU(8, 24)
    x = torch.randn(1, 5, 8, requires_grad=True)
    assert kept_bytes(mlp, x) == 4 * 5 * (8 + 2 * 24 + 24 + 24)
    with torch.no_grad():
        assert kept_bytes(mlp, x) == 0


@pytest.mark.parametrize("name", registered())
def test_what_a_layer_keeps_grows_with_its_tokens_and_with_nothing_else(name):
    block = Block(registered()[name].from_options({}).build(64), build_mlp("swiglu", 64, 96), d_model=64)
    per_token = _per_token(block, 64, mixed=True)
    assert _kept(block, 64, 512, mixed=True) - _kept(block, 64, 256, mixed=True) == 256 * per_token
    # At least what enters norm, projections, MLP and its halves, in bf16.
    assert per_token >= 2 * (64 + 2 * 96)


def test_activations_are_per_layer_and_smaller_in_bf16():
    architecture = settle("GDN,GA/none", n_layers=4, d_model=64, vocab_size=257)
    mixed, full = activation_bytes(architecture), activation_bytes(architecture, mixed=False)
    assert mixed[:2] == mixed[2:]
    assert mixed[0] > mixed[1]
    assert all(a < b for a, b in zip(mixed, full))
