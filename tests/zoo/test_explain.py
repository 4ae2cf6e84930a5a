"""The table of `zoo explain`: its documented example to the last digit, and what its lines promise."""

import json

import pytest

from zoo.architecture import settle
from zoo.cli import main
from zoo.errors import UserError
from zoo.explain import explain, render
from zoo_layers.mixer import registered

EXAMPLE = """\
pattern    3xGDN,GA    canonical 3xGDN,GA    8 layers    d_model 1024    vocabulary 32,000, tied    mixers 6 GDN, 2 GA
layer  mixer  options (resolved)                         MLP          parameters   FLOPs/token   decode state, bytes
1      GDN    heads=6 head_dim=128 expand_v=2 conv=4     swiglu 2816  14,969,100    31,309,824               804,864
2      GDN    as 1                                       swiglu 2816  14,969,100    31,309,824               804,864
3      GDN    as 1                                       swiglu 2816  14,969,100    31,309,824               804,864
4      GA     heads=8 kv_heads=8 head_dim=128            swiglu 2816  12,847,104    34,080,768            16,777,216
5-8    as 1-4                                                         57,754,404   128,010,240            19,191,808
final norm, embedding and head (tied)                                 32,769,024    65,536,000
total                                                                148,277,832   321,556,480            38,383,616
without embedding and head                                           115,509,832   256,020,480
"""


def table(pattern, n_layers=None, *, context=64, **more):
    sizes = {"d_model": 64, "vocab_size": 257, "tie": True, **more}
    return explain(settle(pattern, n_layers=n_layers, **sizes), context=context)


def test_the_documented_example_comes_out_to_the_last_digit(capsys):
    assert main(["explain", "3xGDN,GA", "--n_layers", "8", "--d_model", "1024", "--context", "4096"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(EXAMPLE)
    assert len(out.splitlines()) == len(EXAMPLE.splitlines()) + 1, "one line below the table says what is counted"
    assert err == ""


def test_two_global_layers_stand_at_2_and_13(capsys):
    assert main(["explain", "DN,GA@2,GA@N/2+1", "--n_layers", "24"]) == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert [number for number, mixer in rows if mixer == "GA"] == ["2", "13"]
    assert ["3-12", "DN"] in rows
    assert ["14-24", "DN"] in rows


@pytest.mark.parametrize("name", registered())
def test_every_mixer_can_be_explained_and_its_state_is_split_without_a_rest(name):
    found = table(name, 2)
    for row in found.rows:
        assert row.memory + row.convolution + row.attention == row.state > 0
        assert row.options.keys() == registered()[name].options().keys()
        assert None not in row.options.values()
    assert name in render(found)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    "pattern", ["GA", "GDN,SWA", "DN,GA@2,GA@N/2+1", "6x(GDN,SWA:window=8),LA/none", "2xGDN,3xLA,7xDN"]
)
def test_the_lines_add_up_to_the_total(pattern, full):
    found = table(pattern, {"GA": 1, "GDN,SWA": 4, "DN,GA@2,GA@N/2+1": 12}.get(pattern))
    lines = [line.replace(",", "") for line in render(found, full=full).splitlines()[2:]]
    end = next(i for i, line in enumerate(lines) if line.startswith("final norm"))
    numbers = [[word for word in line.partition(" = ")[0].split() if word.isdigit()][-3:] for line in lines[:end]]
    sums = [sum(int(row[column]) for row in numbers) for column in range(3)]
    assert sums == [found.parameters - found.outside_parameters, found.inner_flops, found.state]
    numbered = [line.split()[0] for line in lines[:end]]
    assert numbered[-1].split("-")[-1] == str(len(found.rows))
    assert len(numbered) == len(found.rows) if full else len(numbered) <= len(found.rows)


def test_an_untied_head_is_counted_and_said():
    tied, untied = table("GA"), table("GA", tie=False)
    assert untied.parameters - tied.parameters == 64 * 257
    assert untied.inner_parameters == tied.inner_parameters
    assert untied.flops == tied.flops
    assert "(untied)" in render(untied)


def test_a_pattern_with_parentheses_is_shown_quoted():
    assert render(table("2x(GDN,SWA)")).startswith("pattern    '2x(GDN,SWA)'    canonical GDN,SWA ")


def test_options_that_differ_from_the_default_are_said_and_others_are_not():
    shown = table("GA:output_gate=true:rope=false,GDN:heads=1:value_heads=2").rows
    assert shown[0].shown.endswith("rope=false output_gate=true")
    assert "value_heads=2" in shown[1].shown
    assert "rope" not in table("GA").rows[0].shown


def test_a_context_below_one_is_refused():
    with pytest.raises(UserError, match="context must be at least 1, got 0"):
        table("GA", context=0)


def test_json_says_what_the_table_says(capsys):
    assert main(["explain", "GDN,SWA", "--d_model", "64", "--n_layers", "4", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [layer["mixer"] for layer in said["layers"]] == ["GDN", "SWA", "GDN", "SWA"]
    assert said["parameters"] == sum(layer["parameters"] for layer in said["layers"]) + said["outside_parameters"]
    assert said["canonical"] == "GDN,SWA"
