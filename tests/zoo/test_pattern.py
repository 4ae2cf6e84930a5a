"""The pattern language: every error with its caret, canonical forms, the list form, and what holds for any pattern."""

import json
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo import names
from zoo.errors import WIDTH, PatternError
from zoo.names import mixer_names
from zoo.pattern import (
    Layer,
    arrange,
    canonical,
    check_names,
    expand,
    misplaced_key,
    parse,
    unused_mixers,
    unused_notice,
)
from zoo_layers import mixer
from zoo_layers.mixer import MixerSpec, SpecError, option, registered


@dataclass(frozen=True, kw_only=True)
class ToySpec(MixerSpec):
    """A mixer for these tests: an option of every kind."""

    name = "TOY"
    size: int = option(4, "a size", at_least=1)
    share: float = option(0.5, "a share", at_least=0)
    gate: bool = option(False, "a gate")
    kind: str = option("plain", "a word")
    width: int | None = option(None, "settled by the model's width")

    def resolve(self, d_model):
        if d_model % self.size:
            raise SpecError("size", "value", f"size {self.size} does not divide {d_model}", "take 1")
        return self.with_(width=self.width or d_model)

    def module(self, d_model):
        raise NotImplementedError("these tests build no module")


@dataclass(frozen=True, kw_only=True)
class StandInSpec(ToySpec):
    """Stands in for a mixer that a pattern of these tests names and that is not registered."""

    name = "MLA"


def registry():
    return {"MLA": StandInSpec, **registered(), "TOY": ToySpec}


def expanded(text, n_layers=None, **more):
    return expand(text, n_layers, registry=registry(), **more)


def refused(text, n_layers=None, **more) -> PatternError:
    with pytest.raises(PatternError) as caught:
        expanded(text, n_layers, **more)
    return caught.value


# text, n_layers, (first caret from 1, how many), what the message says, what the cure says
CATALOGUE = [
    ("", None, [], "the pattern is empty", "GDN,SWA"),
    ("GDN*3,SWA", None, [(4, 1)], "'*' has no meaning here", "Counts stand in front: 3xGDN"),
    ("GDN SWA", None, [(4, 1)], "' ' has no meaning here", "without spaces"),
    ("0xGDN,SWA", None, [(1, 2)], "a count must be at least 1", "Take the entry out, or say how many"),
    ("3GDN,GA", None, [(1, 1)], "a count is written with an x", "Write 3xGDN"),
    ("GDN,,SWA", None, [(5, 1)], "an entry is missing before ','", "Write a mixer, or drop the comma"),
    ("GDN,SWA,", None, [(9, 1)], "an entry is missing at the end", "Write a mixer, or drop the comma"),
    ("2x(GDN,SWA", None, [(3, 1)], "this parenthesis is never closed", "Close it"),
    ("GDN,SWA)", None, [(8, 1)], "this parenthesis was never opened", "Take it out, or open one"),
    ("SWA:win=2048", None, [(5, 3)], "SWA has no option 'win'; did you mean 'window'?", "window"),
    ("GDN,SWA:window=big", None, [(16, 3)], "window must be a whole number, got 'big'", "The default is 2048"),
    ("GDN,SWA:window=0", None, [(16, 1)], "window must be at least 1, got 0", "For no window use GA"),
    ("SWA:window=512:window=1024", None, [(16, 6)], "option 'window' is given twice", "Keep one"),
    ("GDN,SWA:window", None, [(9, 6)], "option 'window' has no value", "Write window=VALUE, a whole number"),
    ("M2/swigl,GA", None, [(4, 5)], "unknown MLP 'swigl'; did you mean 'swiglu'?", "Leave / out"),
    ("GDN,GDN,SWA", 8, [(1, 11)], "the cycle of 3 layers does not fill n_layers=8: 2 left over", "6 or 9"),
    ("12x(GDN,SWA)", 12, [(1, 12)], "the pattern holds 24 layers, but n_layers is 12", "a multiple of 24"),
    ("GDN,GA@0", 24, [(8, 1)], "positions start at 1", "@1, the last @-1 or @N"),
    ("DN,GA@30", 24, [(7, 2)], "position 30 is outside the model", "1 to 24, or from -24 to -1"),
    ("DN,GA@-25", 24, [(7, 3)], "position -25 is outside the model", "1 to 24, or from -24 to -1"),
    ("DN,GA@2", None, [(7, 1)], "position 2 is outside the model", "n_layers is not given, so the depth is 1"),
    ("DN,GA@N/2+1", 21, [(7, 5)], "N/2 is not whole: n_layers is 21", "@11 or @12"),
    ("GA@2,GA@N/2+1", 24, [(1, 4), (6, 8)], "only placements, and no layers to place them among", "DN,GA@2,"),
    ("DN,3xGA@2", None, [(4, 2)], "a placement stands for one layer and takes no count", "one placement per layer"),
    ("2x(GDN,GA@2)", None, [(8, 4)], "a placement cannot stand inside parentheses", "Move GA@2 behind them"),
    ("DN,GA@", None, [(7, 1)], "a position is missing behind '@'", "2, -1, N, N/2, N/2+1"),
    ("M2,GND,SWA:window=2048", None, [(4, 3)], "unknown mixer 'GND'; did you mean 'GDN'?", "Known mixers: DN GA GDN"),
    ("DN,GA@2,SWA@2", 24, [(4, 4), (9, 5)], "two placements on layer 2", "Keep one of them"),
    # Beyond the catalogue: what else a slip of the hand produces.
    ("  ", None, [], "the pattern is empty", "GDN,SWA"),
    ("3XGDN", None, [(1, 1)], "a count is written with an x", "Write 3xGDN"),
    ("3(GDN,SWA)", None, [(1, 1)], "a count is written with an x", "Write '3x(...)'"),
    ("2x", None, [(3, 1)], "an entry is missing at the end", "drop the count"),
    ("()", None, [(2, 1)], "an entry is missing before ')'", "inside"),
    ("2x(GDN,", None, [(3, 1)], "this parenthesis is never closed", "Close it"),
    ("GDN,)", None, [(5, 1)], "this parenthesis was never opened", "Take it out"),
    ("(GDN)/none", None, [(6, 1)], "'/' has no meaning here", "one layer"),
    ("GA@2:heads=8", 4, [(5, 1)], "':' has no meaning here", "before the '@'"),
    ("SWA/gelu:window=4", None, [(9, 1)], "':' has no meaning here", "right behind the mixer's name"),
    ("SWA:", None, [(5, 1)], "an option is missing behind ':'", "OPTION=VALUE"),
    ("SWA/", None, [(5, 1)], "an MLP is missing behind '/'", "none"),
    ("SWA:window=", None, [(5, 6)], "option 'window' has no value", "Write window=VALUE, a whole number"),
    ("NEW:size", None, [(5, 4)], "option 'size' has no value", "Write size=VALUE."),
    ("DN,GA@n", 4, [(7, 1)], "'n' has no meaning here", "N/2+1"),
    ("DN,GA@N/0", 4, [(7, 3)], "the depth cannot be divided by 0", "N/2+1"),
    ("DN,GA@N/3+9", 6, [(7, 5)], "position 11 is outside the model", "1 to 6"),
    ("GDN\nSWA", None, [(4, 1)], "'\\n' has no meaning here", "without spaces"),
    ("99999xGDN", None, [(1, 6)], "more than 10,000 layers", "smaller count"),
    ("200x(200x(GDN))", None, [(1, 15)], "more than 10,000 layers", "smaller count"),
    ("DN,GA@99999999999", 4, [(7, 11)], "outside any model", "N/2+1"),
]


@pytest.mark.parametrize(("text", "n_layers", "carets", "says", "cure"), CATALOGUE, ids=[c[0] for c in CATALOGUE])
def test_every_error_of_the_catalogue_has_its_caret_its_problem_and_its_cure(text, n_layers, carets, says, cure):
    error = refused(text, n_layers)
    assert says in error.problem
    assert cure in error.cure
    assert error.cure.endswith((".", "?"))
    lines = str(error).splitlines()
    assert lines[0] == error.problem
    assert lines[-1] == error.cure
    if not carets:
        assert len(lines) == 2
        return
    assert len(lines) == 4
    assert lines[1] == "  " + text.replace("\n", "·")
    marks = lines[2][2:]
    expected = [" "] * len(marks)
    for first, count in carets:
        expected[first - 1 : first - 1 + count] = "^" * count
    assert marks == "".join(expected).rstrip()
    assert error.spans == tuple((first - 1, first - 1 + count) for first, count in carets)


def test_the_message_for_an_unknown_mixer_is_the_documented_one():
    assert str(refused("M2,GND,SWA:window=2048")) == (
        "unknown mixer 'GND'; did you mean 'GDN'?\n"
        "  M2,GND,SWA:window=2048\n"
        "     ^^^\n"
        f"Known mixers: {' '.join(sorted(registry()))}. `zoo mixers` lists their options."
    )


def test_an_error_can_be_pickled():
    error = refused("GDN,,SWA")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_long_text_is_cut_round_its_caret():
    for before, after in ((0, 60), (60, 0), (60, 60)):
        text = "GDN," * before + "GND" + ",SWA" * after
        line, marks = str(refused(text)).splitlines()[1:3]
        assert len(line) <= WIDTH + 2
        assert line.startswith("  ...") == (before > 0)
        assert line.endswith("...") == (after > 0)
        assert line[marks.index("^") : marks.index("^") + 3] == "GND"
        assert marks.count("^") == 3
    line, marks = str(refused("GDN," * 60)).splitlines()[1:3]
    assert marks.index("^") == len(line)


@pytest.mark.parametrize("n_layers", [0, -1, 10_001, True, "8", 2.0])
def test_a_depth_that_is_none_is_refused(n_layers):
    assert "n_layers must be a whole number" in refused("GDN", n_layers).problem


# ----------------------------------------------------------------------------------------------- the model's settings
def test_the_table_of_options_is_checked_whether_used_or_not():
    assert refused("GDN", mixers={"SWX": {}}).problem == "unknown mixer 'SWX' in mixers; did you mean 'SWA'?"
    error = refused("GDN", mixers={"SWA": {"win": 4}})
    assert error.problem == "SWA has no option 'win'; did you mean 'window'?"
    assert all(name in error.cure for name in registered()["SWA"].options())
    assert error.text is None
    assert "must be a mapping" in refused("GDN", mixers={"SWA": 4}).problem
    assert "given twice" in refused("GDN", mixers={"SWA": {}, "swa": {}}).problem
    assert "unknown MLP 'swigl'" in refused("GDN", mlp="swigl").problem


def test_an_entry_s_own_option_wins_over_the_table_and_the_table_over_the_default():
    first, second = expanded("SWA:window=4,SWA", mixers={"SWA": {"window": 8, "heads": 2}})
    assert (first.spec.window, second.spec.window) == (4, 8)
    assert first.spec.heads == second.spec.heads == 2
    assert first.options == {"heads": 2, "window": 4}


def test_settings_of_a_mixer_that_no_layer_is_are_named_and_no_error():
    settings = {"SWA": {"window": 512}, "GDN": {"heads": 2}, "GA": {}}
    assert unused_mixers(expanded("GDN", mixers=settings), settings) == ["SWA"]
    assert unused_notice("SWA") == "mixers: settings for SWA left out, no layer is SWA"


def test_a_key_that_is_a_mixer_asks_for_quotes():
    error = misplaced_key("SWA", "GDN")
    assert str(error) == "'SWA' is a mixer, not a setting of the model\nQuote the pattern: \"GDN,SWA\"."
    assert misplaced_key("d_model", "GDN") is None


def test_what_the_width_refuses_has_a_caret_too():
    layer = expanded("GDN,TOY:size=3")[1]
    with pytest.raises(PatternError, match="size 3 does not divide 4") as caught:
        layer.resolve(4)
    assert str(caught.value).splitlines()[1:] == [
        "  GDN,TOY:size=3",
        "               ^",
        "take 1.",
    ]
    assert layer.resolve(6).width == 6
    by_table = expanded("TOY", mixers={"TOY": {"size": 3}})[0]
    with pytest.raises(PatternError) as caught:
        by_table.resolve(4)
    assert caught.value.spans == ((0, 3),)


# ------------------------------------------------------------------------------------------------------------- meaning
@pytest.mark.parametrize(
    ("text", "n_layers", "expected"),
    [
        ("12x(GDN,SWA)", None, "GDN,SWA"),
        ("12x(GDN,SWA)", 24, "GDN,SWA"),
        ("DN,GA@2,GA@N/2+1", 24, "DN,GA,10xDN,GA,11xDN"),
        ("3xKDA,MLA,MLA@-1", 27, ",".join(["3xKDA,MLA"] * 6 + ["2xKDA,MLA"])),
        ("M2/none,swa:window=512/gelu", 8, "M2/none,SWA:window=512/gelu"),
        ("SWA:window=2048", 4, "SWA"),
        ("((GDN),2x(SWA,M2),GA)", None, "GDN,SWA,M2,SWA,M2,GA"),
        ("DN,GA@-1,SWA@-4", 4, "SWA,2xDN,GA"),
        ("DN,GA@N", 3, "2xDN,GA"),
        ("DN,GA@N/3,GA@N-1", 9, "2xDN,GA,4xDN,GA,DN"),
        ("GA/swiglu", 2, "GA"),
        ("3xKDA,MLA,MLA@-1", 2, "KDA,MLA"),
        ("TOY:share=0.25:gate=true:size=4", 1, "TOY:gate=true:share=0.25"),
        ("GA:heads=8/none,GA@2", 2, "GA:heads=8/none,GA"),
    ],
)
def test_the_canonical_form_is_the_shortest_and_says_the_same(text, n_layers, expected):
    layers = expanded(text, n_layers)
    assert canonical(layers) == expected
    assert expanded(expected, len(layers)) == layers


def test_global_attention_stands_where_the_paper_puts_it():
    layers = expanded("DN,GA@2,GA@N/2+1", 24)
    assert [number for number, layer in enumerate(layers, 1) if layer.mixer == "GA"] == [2, 13]
    kimi = expanded("3xKDA,MLA,MLA@-1", 27)
    assert [number for number, layer in enumerate(kimi, 1) if layer.mixer == "MLA"] == [4, 8, 12, 16, 20, 24, 27]


def test_the_model_s_mlp_is_said_only_where_it_differs():
    layers = expanded("M2,GA/swiglu", 4, mlp="none")
    assert [layer.mlp for layer in layers] == ["none", "swiglu", "none", "swiglu"]
    assert canonical(layers, mlp="none") == "M2,GA/swiglu"
    assert canonical(layers) == "M2/none,GA"


def test_the_canonical_form_of_nothing_or_of_what_no_line_holds_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        canonical([])
    with pytest.raises(ValueError, match="kind is 'two words'"):
        canonical([Layer("TOY", ToySpec(kind="two words"), "swiglu")])


# ----------------------------------------------------------------------------------------------------------- list form
def test_the_list_form_says_what_the_line_says():
    listed = parse(
        [
            "3xGDN",
            {"mixer": "GA", "options": {"heads": 16, "output_gate": True}, "mlp": "swiglu"},
            {"mixer": "MLA", "at": [2, "N/2+1"]},
            {"mixer": "swa", "options": {"window": 2048}, "count": 2},
        ]
    )
    line = "3xGDN,GA:heads=16:output_gate=true/swiglu,MLA@2,MLA@N/2+1,2xswa:window=2048"
    assert listed == parse(line)
    assert str(listed) == line
    assert parse(str(listed)) == listed
    assert parse(listed) is listed


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "the pattern is empty"),
        (["GDN", "2x(GDN"], "item 2: this parenthesis is never closed\n  2x(GDN\n    ^\nClose it; YAML splits"),
        (
            ["GDN", {"mixer": "SWA", "options": {"win": 4}}],
            "item 2: SWA has no option 'win'; did you mean 'window'?\n  SWA:win=4\n",
        ),
        (["GDN", {"mixer": "GND"}], "item 2: unknown mixer 'GND'; did you mean 'GDN'?\n  GND\n  ^^^\n"),
        ([{"mixr": "GDN"}], "item 1: unknown key 'mixr'; did you mean 'mixer'?"),
        ([{"mixer": "GDN", "count": 2, "at": 1}], "item 1: 'count' and 'at' exclude each other"),
        ([{"mixer": "GDN", "count": 0}], "item 1: count must be a whole number from 1 to 10,000, got 0"),
        ([{"mixer": "GDN", "count": True}], "item 1: count must be a whole number"),
        ([{"options": {}}], "item 1: mixer must be a mixer's name, got None"),
        ([{"mixer": "GDN", "mlp": "a b"}], "item 1: mlp must be an MLP's name, got 'a b'"),
        ([{"mixer": "GDN", "options": 4}], "item 1: options must be a mapping, got 4"),
        ([{"mixer": "GDN", "options": {1: 2}}], "item 1: an option's name is a word, got 1"),
        (["DN", {"mixer": "GA", "at": "2,GA"}], "item 2: '2,GA' is no position"),
        (["DN", {"mixer": "GA", "at": []}], "item 2: at names no position"),
        (["DN", {"mixer": "GA", "at": [1, 0]}], "item 2: positions start at 1\n  GA@1,GA@0\n          ^\n"),
        (["GDN", 4], "item 2: an item is a text or a mapping, got 4"),
        (["GDN", " "], "item 2: the item is empty"),
        (["DN", "GA@1", "SWA@1"], "two placements on layer 1\n  DN,GA@1,SWA@1\n     ^^^^ ^^^^^\n"),
        (4, "a pattern is a line of text or a list, got 4"),
        (None, "a pattern is a line of text or a list, got None"),
    ],
)
def test_an_error_in_a_list_names_the_item(items, message):
    assert str(refused(items)).startswith(message)


def test_a_value_that_no_line_holds_is_kept_and_has_no_text():
    pattern = parse(["GDN", {"mixer": "TOY", "options": {"kind": "two words", "size": 2}, "count": 2}])
    assert dict(pattern.entries[1].options) == {"kind": "two words", "size": "2"}
    with pytest.raises(ValueError, match="TOY's option kind is 'two words'"):
        str(pattern)
    assert expanded(pattern)[2].spec == ToySpec(kind="two words", size=2)
    error = refused(["GDN", {"mixer": "TOY", "options": {"size": [1, 2]}}])
    assert str(error).splitlines()[:3] == [
        "item 2: size must be a whole number, got [1, 2]",
        "  TOY:size=[1, 2]",
        "           ^^^^^^",
    ]


# --------------------------------------------------------------------------------------------------- what always holds
layer_texts = st.builds(
    lambda mixer, mlp: mixer + mlp,
    st.sampled_from(
        ["GA", "GDN", "gdn", "SWA:window=8", "SWA:window=2048", "SWA", "M2", "TOY:share=1e-05:gate=true", "TOY:size=2"]
    ),
    st.sampled_from(["", "", "/none", "/gelu", "/swiglu"]),
)


@settings(deadline=None, max_examples=200)
@given(st.lists(layer_texts, min_size=1, max_size=24), st.sampled_from(["swiglu", "none"]))
def test_canonical_text_gives_the_layers_back_and_is_its_own_canonical_text(texts, mlp):
    layers = expanded(",".join(texts), mlp=mlp)
    text = canonical(layers, mlp=mlp)
    again = expanded(text, len(layers), mlp=mlp)
    assert again == layers
    assert canonical(again, mlp=mlp) == text
    assert not set(text) & set("()' \"@")


@settings(deadline=None, max_examples=100)
@given(st.lists(layer_texts, min_size=1, max_size=6), st.lists(layer_texts, min_size=1, max_size=6))
def test_different_layers_have_different_canonical_text_and_equal_ones_the_same(one, other):
    first, second = expanded(",".join(one)), expanded(",".join(other))
    same_length = len(first) == len(second)
    if same_length:
        assert (canonical(first) == canonical(second)) == (first == second)


@settings(deadline=None, max_examples=400)
@given(
    st.one_of(st.text(max_size=40), st.text("GDNSWAx123(),:=/@+-N._ window*", max_size=40)),
    st.sampled_from([None, 1, 12]),
)
def test_any_text_gives_layers_or_an_error_whose_carets_lie_in_it(text, n_layers):
    error = None
    try:
        layers = expanded(text, n_layers)
    except PatternError as refusal:
        error = refusal
    if error is None:
        pattern = parse(text)
        assert str(pattern) == text
        assert parse(str(pattern)) == pattern
        assert len(layers) == (n_layers or len(pattern.entries))
    else:
        assert error.problem
        assert error.cure
        assert all(0 <= start < end <= len(text) + 1 for start, end in error.spans)
        assert len(str(error).split("\n")) == (4 if error.spans else 2)


def test_numbers_too_long_for_python_and_parentheses_too_deep_for_a_stack_are_errors_or_layers():
    assert "more than 10,000 layers" in refused("9" * 5000 + "xGDN").problem
    assert "whole number" in refused("SWA:window=" + "9" * 5000).problem
    assert "outside any model" in refused("DN,GA@" + "9" * 5000, 4).problem
    assert len(expanded("(" * 5000 + "GDN" + ")" * 5000)) == 1


def test_each_layer_s_entry_is_known_without_any_registry():
    assert [entry.mixer for entry in arrange(parse("NEW,OLD@2"), 3)] == ["NEW", "OLD", "NEW"]


# ----------------------------------------------------------------------------------------------------- names and speed
def test_the_names_read_from_the_sources_are_those_of_the_registry():
    code = "import json, sys; from zoo.names import mixer_names as m; print(json.dumps([m(), 'torch' in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True, env=_path()
    )
    names_, torch_loaded = json.loads(done.stdout)
    assert names_ == sorted({*registered(), *mixer.broken()}) == mixer_names()
    assert not torch_loaded
    assert names.ENTRY_POINTS == mixer.ENTRY_POINTS


def test_syntax_errors_and_unknown_mixers_are_found_without_importing_torch():
    code = """
import sys
from zoo.pattern import PatternError, check_names, mixer_names, parse
for text in ("GDN,,SWA", "2x(GDN", "DN,GA@", "GND,SWA"):
    try:
        check_names(parse(text), mixer_names())
    except PatternError:
        continue
    sys.exit(f"{text} was not refused")
sys.exit("torch was imported" if "torch" in sys.modules else 0)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, env=_path())


def test_with_no_names_known_nothing_is_refused():
    check_names(parse("NEW"), None)


def test_a_plug_in_that_does_not_load_is_refused_with_its_reason(monkeypatch):
    monkeypatch.setattr(mixer, "broken", lambda: {"RWKV7": "their-package: ImportError: no module named cuda"})
    with pytest.raises(PatternError, match="could not be loaded: their-package: ImportError") as caught:
        expand("GDN,RWKV7")
    assert caught.value.spans == ((4, 9),)


def _path():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
