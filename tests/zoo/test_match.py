"""`zoo match`: the published check values, every preset against both references, the rules that block, the recipe."""

import json
import re
from pathlib import Path

import pytest
import yaml

from zoo.architecture import settle
from zoo.cli import VERBS, Verb, main
from zoo.comparison.plan import instantiate
from zoo.errors import UserError
from zoo.knobs import default_size, knob, nearest_depth, spelt_out
from zoo.ledger import cost
from zoo.match import match
from zoo.presets import presets

REFERENCES = {size: settle(preset=f"transformer++-{size}") for size in ("340m", "1.3b")}
GUIDE = (Path(__file__).parents[2] / "docs" / "budgets.md").read_text(encoding="utf-8")
OF_SIZE = {"340m": ("340m", "0.4b", "421m"), "1.3b": ("1.3b",)}


def against(size, pattern, **sizes):
    """A pattern at the sizes of a reference."""
    r = REFERENCES[size]
    return settle(pattern, **{"n_layers": r.n_layers, "d_model": r.d_model, "vocab_size": r.vocab_size, **sizes})


@pytest.fixture
def zoo_match(monkeypatch, capsys):
    """Run the verb: (status, what it printed, what it said on the side)."""
    monkeypatch.setitem(VERBS, "match", Verb("zoo.verbs.match", "one size turned until two models cost the same"))

    def run(*words):
        status = main(["match", *words])
        out, err = capsys.readouterr()
        return status, out, err

    return run


# ---------------------------------------------------------------------------------------------------- the check values
@pytest.mark.parametrize(
    ("size", "pattern", "mixers", "d_ff", "percent"),
    [
        ("340m", "GDN", {"GDN": {"heads": 4, "head_dim": 128}}, 2816, 0.1296),
        ("340m", "GDN", {"GDN": {"heads": 6, "head_dim": 128}}, 2112, -0.3167),
        ("340m", "GDN", {"GDN": {"heads": 3, "head_dim": 256}}, 2112, -0.3626),
        ("1.3b", "GDN,SWA", {"GDN": {"heads": 6, "head_dim": 256}}, 4928, -0.2067),
    ],
)
def test_the_widths_of_the_design_come_out(size, pattern, mixers, d_ff, percent):
    found = match(against(size, pattern, mixers=mixers), REFERENCES[size], by="params")
    assert (found.free, found.best.value) == ("d_ff", d_ff)
    assert 100 * found.best.deviation == pytest.approx(percent, abs=5e-5)


def fitting(size):
    for name, found in presets().items():
        if not found.missing() and (found.n_layers is None or name.endswith(OF_SIZE[size])):
            yield name


@pytest.mark.parametrize(("size", "name"), [(size, name) for size in REFERENCES for name in fitting(size)])
def test_every_preset_is_matched_to_the_transformer_of_its_size(size, name):
    reference = REFERENCES[size]
    sizes = {} if presets()[name].n_layers else {"n_layers": reference.n_layers, "d_model": reference.d_model}
    arm = settle(preset=name, vocab_size=reference.vocab_size, **sizes)
    mamba = presets()[name].mlp == "none"
    found = match(arm, reference, by="params", tolerance=0.011 if mamba else 0.01)
    assert found.free == ("n_layers" if mamba else "d_ff")
    assert found.agrees
    built = found.architecture.build("meta").parameter_counts().non_embedding
    assert built == found.best.row.own.non_embedding
    assert abs(built / cost(reference, 1).non_embedding - 1) <= found.best.row.tolerance


@pytest.mark.parametrize("by", ["params", "flops"])
@pytest.mark.parametrize("free", ["d_ff", "n_layers", "heads", "GDN.expand_v"])
def test_no_other_value_of_the_size_lies_nearer(by, free):
    arm, reference = against("340m", "GDN,SWA"), REFERENCES["340m"]
    found = match(arm, reference, by=by, free=free)
    turned = knob(arm, free)
    wanted = cost(reference, 4096).of(by)
    near = [
        v
        for v in turned.values
        if abs(v - found.best.value) <= (12 if free == "n_layers" else 130) and turned.refuses(v) is None
    ]
    best = min(near, key=lambda value: abs(cost(turned.turn(value), 4096).of(by) - wanted))
    assert found.best.value == best
    assert abs(found.best.deviation) <= min(abs(trial.deviation) for trial in found.others)


# ---------------------------------------------------------------------------------------------------------- the rules
def test_the_width_of_mlps_moves_in_steps_of_64_and_of_16_below_width_512():
    assert match(against("340m", "GDN,SWA"), REFERENCES["340m"], by="flops").best.value % 64 == 0
    small = settle("GDN,SWA", n_layers=2, d_model=256, vocab_size=257)
    assert set(knob(small, "d_ff").values[:3]) == {16, 32, 48}
    assert knob(small, "d_ff", step=256).values[0] == 256
    with pytest.raises(UserError, match="only d_ff and d_model move in steps"):
        knob(small, "heads", step=2)


def test_layers_move_in_whole_cycles_and_the_refused_depths_say_why():
    found = match(against("340m", "M2,GDN,SWA"), REFERENCES["340m"], by="params", free="n_layers")
    assert not found.agrees
    assert [found.best.value, *(trial.value for trial in found.others)] == [21, 24, 18]
    assert found.blocked == ((22, "the cycle of 3 layers does not fill n_layers=22: 1 left over"),)
    assert nearest_depth("M2,GDN,SWA", 16) == 15
    assert nearest_depth("3xGDN,GA,GA@-1", 22) == 22, "a placement on the last layer may cut the cycle"


def test_a_width_that_moves_takes_its_heads_along():
    arm = against("340m", "GDN,SWA:kv_heads=2")
    found = match(arm, REFERENCES["340m"], by="params", free="d_model", tolerance=0.5)
    assert found.best.value == 1024
    assert [value for value, _ in found.blocked] == [960, 896]
    assert "960 is no multiple of SWA's heads of 128" in found.blocked[0][1]
    assert "kv_heads must divide" in found.blocked[1][1]
    wide = knob(arm, "d_model").turn(2048)
    gdn, swa = (layer.resolve(2048) for layer in wide.layers[:2])
    assert (gdn.heads, gdn.head_dim, swa.heads, swa.head_dim, swa.kv_heads) == (12, 128, 16, 128, 2)
    assert wide.d_ff == 2 * arm.d_ff
    assert knob(arm, "d_model", keep_d_ff=True).turn(2048).d_ff == arm.d_ff
    # A number of heads that the width had not settled is the user's own, and stays.
    kept = knob(against("340m", "GDN:heads=4,SWA"), "d_model").turn(2048)
    assert kept.layers[0].resolve(2048).heads == 4


def test_the_default_size_is_the_one_that_leaves_most_alone():
    assert default_size(against("340m", "GDN,SWA"), "params") == "d_ff"
    assert default_size(against("340m", "M2/none"), "flops") == "n_layers"
    states = {"GDN,SWA": "GDN.heads", "SWA": "SWA.window", "GA": "GA.heads", "M2": "M2.state"}
    assert {p: default_size(against("340m", p), "state") for p in states} == states


def test_the_state_is_matched_by_the_heads_of_the_memory():
    found = match(against("340m", "GDN"), settle(preset="deltanet-340m"), by="state", tolerance=0.1)
    assert found.free == "GDN.heads"
    assert found.architecture.layers[0].resolve(1024).head_dim == 128
    assert found.best.row.own.state == pytest.approx(13_025_280, rel=0.1)


@pytest.mark.parametrize(
    ("pattern", "by", "free", "said"),
    [
        ("GDN", "seconds", None, "'seconds' cannot be held equal\nHeld can be one of params, flops, state"),
        ("GDN", "param", None, "did you mean 'params'"),
        ("GA", "state", "d_ff", "d_ff does not change state"),
        ("M2/none", "params", "d_ff", "no layer has an MLP"),
        ("M2", "params", "heads", "no mixer has an option heads"),
        ("GDN,KDA", "params", "heads", "say whose may move: --free GDN.heads"),
        ("GDN", "params", "d_f", "did you mean 'd_ff'"),
        ("GDN", "params", "SWA.window", "nothing that can be turned here"),
        ("GDN:heads=3,GDN", "params", "heads", "GDN.heads differs between layers"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(pattern, by, free, said):
    with pytest.raises(UserError, match=said):
        match(against("340m", pattern), REFERENCES["340m"], by=by, free=free)


@pytest.mark.parametrize("pattern", ["GDN:heads=4,SWA", "DN,GA@2,GA@N/2+1", "GA:kv_heads=2,GA/none,2xM2"])
def test_a_model_spelt_out_is_the_same_model(pattern):
    arm = against("340m", pattern)
    spelt = spelt_out(arm)
    assert spelt.table() == arm.table()
    assert settle(**spelt.to_plain()) == spelt


# ------------------------------------------------------------------------------------------------------------ the verb
@pytest.mark.parametrize("by", ["params", "flops"])
def test_the_verb_sizes_a_hybrid_to_a_transformer(zoo_match, by):
    status, out, _ = zoo_match("gdn-h1", "--to", "transformer++-340m", "--by", by, "--context", "4096")
    assert status == 0
    row = next(line for line in out.splitlines() if line.startswith("ledger"))
    assert row.count("(within 1.00%)") == 1
    assert "tokens =" in row
    assert "1      GDN    heads=6 head_dim=128" in out


def test_a_request_that_no_size_meets_ends_with_3_and_says_what_would_do(zoo_match, tmp_path):
    out_file = tmp_path / "never.yaml"
    words = ("gdn-1.3b", "--to", "transformer++-340m", "--by", "params")
    status, out, err = zoo_match(*words, "--out", str(out_file))
    assert status == 3
    assert "NOT within 1.00%" in out
    assert "the smallest d_ff that the rules allow still costs more" in err
    assert "what would do: --free n_layers (4: -0.07%)" in err
    assert not out_file.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("gdn-h9", "--to", "gdn-1.3b", "--by", "params"), "unknown preset 'gdn-h9'; did you mean"),
        (("GND", "--to", "gdn-1.3b", "--by", "params"), "unknown mixer 'GND'"),
        (("GDN", "--to", "GA", "--by", "params"), "neither GDN nor GA has sizes"),
        (("GDN", "--to", "gdn-1.3b", "--by", "params", "--d_ff", "64"), "d_ff is free to move here"),
        (("GDN", "--to", "gdn-1.3b", "--by", "params", "--tol", "0"), "--tol 0: give a share"),
        (("GDN", "--to", "gdn-1.3b", "--by", "params", "--count", "all"), "count must be one of non-embedding, total"),
        (("GDN", "--to", "no.yaml", "--by", "params"), "recipe no.yaml cannot be read"),
        (("recipes/tiny_text.yaml", "--to", "gdn-1.3b", "--by", "params"), "a recipe can be the reference"),
        (("M2,GDN,SWA", "--to", "gdn-1.3b", "--by", "params"), "does not fill n_layers=16"),
    ],
)
def test_a_users_mistake_is_one_message_and_status_2(zoo_match, words, said):
    status, out, err = zoo_match(*words)
    assert (status, out) == (2, "")
    assert said in err


def test_tied_against_untied_totals_are_warned_about(zoo_match):
    _, out, _ = zoo_match(
        "gdn-h1-0.4b", "--to", "transformer++-340m", "--by", "params", "--count", "total", "--tol", "5%"
    )
    assert "warning: total parameters of a tied and an untied model" in out


def test_the_machines_answer_holds_what_the_table_says(zoo_match):
    status, out, _ = zoo_match(
        "GDN,SWA", "--to", "GA", "--by", "params", "--n_layers", "4", "--d_model", "512", "--json"
    )
    plain = json.loads(out)
    assert status == 0
    assert plain["agrees"]
    assert plain["architecture"]["d_ff"] == plain["value"]
    own, reference = (plain["ledger"][side]["params"]["non_embedding"] for side in ("own", "reference"))
    assert plain["ledger"]["deviations"]["params"] == own / reference - 1


@pytest.mark.parametrize("reference", ["recipe", "pattern"])
def test_the_written_recipe_is_one_that_training_reads(zoo_match, recipe, tmp_path, reference):
    out = tmp_path / "sized.yaml"
    sizes = ("--n_layers", "2", "--d_model", "32", "--context", "32") if reference == "pattern" else ()
    to = str(recipe) if reference == "recipe" else "GDN,SWA"
    words = ("GA", "--to", to, "--by", "params", "--step", "1", *sizes, "--out", str(out))
    assert zoo_match(*words)[0] == 0
    written = yaml.safe_load(out.read_text(encoding="utf-8"))
    cli = instantiate(out, ())
    own = cli.model.architecture
    assert (own.canonical, own.d_ff) == ("GA:head_dim=16:heads=2", written["model"]["d_ff"])
    assert cli.trainer.default_root_dir == "runs/sized"
    if reference == "recipe":
        like = yaml.safe_load(Path(recipe).read_text(encoding="utf-8"))
        assert {key: written[key] for key in ("budget", "data", "checkpoint")} == {
            key: like[key] for key in ("budget", "data", "checkpoint")
        }
        assert written["model"]["optimizer"] == like["model"]["optimizer"]
    status, _, err = zoo_match(*words)
    assert status == 2
    assert "exists already, and is not overwritten" in err


def test_a_recipes_mlp_and_options_serve_the_other_pattern_too(zoo_match, recipe):
    text = recipe.read_text(encoding="utf-8").replace("  d_ff: 32\n", "  d_ff: 32\n  mlp: gelu\n")
    recipe.write_text(text, encoding="utf-8")
    _, out, _ = zoo_match("M2", "--to", str(recipe), "--by", "params", "--step", "1", "--json")
    sized = json.loads(out)["architecture"]
    assert (sized["mlp"], sized["mixers"]["M2"]) == ("gelu", {"head_dim": 16, "state": 16})
    _, out, _ = zoo_match("mamba2", "--to", str(recipe), "--by", "params", "--json")
    assert json.loads(out)["architecture"]["mlp"] == "none"


def test_flops_against_a_recipe_are_those_of_its_rows(zoo_match, recipe):
    _, out, _ = zoo_match("GA", "--to", str(recipe), "--by", "flops", "--step", "1")
    assert "FLOPs@32" in out


# ----------------------------------------------------------------------------------------------------------- the guide
def test_the_guide_shows_what_the_commands_print(zoo_match):
    shown = re.findall(r"```\n\$ zoo match (.*)\n((?:.*\n)*?)```", GUIDE)
    assert len(shown) == 2
    for command, expected in shown:
        _, out, err = zoo_match(*command.split())
        assert out.startswith(expected) or err == expected


@pytest.mark.parametrize("size", REFERENCES)
def test_the_table_of_the_guide_is_what_comes_out(size):
    table = re.findall(
        r"^\| `([^`]+)` \| (\w+) (\d+) \| (\S+) \| (\S+) \| (\S+) \| (\w+) (\d+) \| (.*) \|$", GUIDE, re.M
    )
    plain = {name for name, found in presets().items() if found.n_layers is None and not found.missing()}
    assert {row[0] for row in table} == plain
    reference = REFERENCES[size]
    for name, *cells in table:
        free, value, params, flops, state = cells[:5] if size == "340m" else [*cells[5:7], *cells[7].split(" | ")]
        arm = settle(preset=name, n_layers=24, d_model=reference.d_model, vocab_size=32_000)
        found = match(arm, reference, by="params", free=free)
        assert (found.best.value, found.free) == (int(value), free)
        deviations = [f"{found.best.row.deviation(quantity):+.2%}" for quantity in ("params", "flops", "state")]
        assert deviations == [params, flops, state]
