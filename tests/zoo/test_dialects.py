"""Other projects' notations: what they say in ours, what is refused and where, and that writing and reading agree."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.dialects import DIALECTS, read, write
from zoo.errors import PatternError, UserError
from zoo.pattern import arrange, parse

ATTENTION_1_3 = 'attn={"layers": [1, 3], "num_heads": 16, "window_size": 2048}'
# dialect, its text, names, n_layers, ours, how many layers
THREE_TO_ONE = '["linear_attention", "linear_attention", "linear_attention", "full_attention"]'
TWO_GROUPS = '[{"layers": [0], "num_heads": 2}, {"layers": [1], "window_size": 8, "qk_norm": false}]'
TABLE = [
    ("megatron", "M-M*-M-", {}, None, "M2,M2/none,GA,M2", 4),
    (
        "hf",
        '["linear_attention", "linear_attention", "linear_attention", "full_attention"]',
        {"linear": "GDN"},
        None,
        "3xGDN,GA",
        4,
    ),
    ("fla", ATTENTION_1_3, {"base": "GDN"}, 4, "GDN,SWA:heads=16", 4),
    ("fla", "[]", {"base": "GDN"}, 2, "GDN", 2),
    ("kimi", '{"kda_layers": [1, 2, 3], "full_attn_layers": [4]}', {}, None, "3xKDA,MLA", 4),
    ("olmo", 'block_pattern=["gdn", "gdn", "gdn", "attn"]', {"gdn": "GDN", "attn": "GA"}, 8, "3xGDN,GA", 8),
    ("hf", '["mamba", "attention", "sliding_attention"]', {"linear": "m2"}, None, "M2,GA,SWA", 3),
    ("megatron", "G-|G-|*-", {}, None, "2xGDN,GA", 3),
    (
        "fla",
        TWO_GROUPS,
        {"base": "DN"},
        3,
        "GA:heads=2,SWA:window=8,DN",
        3,
    ),
]


ROWS = [f"{row[0]} {row[4]}" for row in TABLE]


@pytest.mark.parametrize(("dialect", "text", "names", "n_layers", "ours", "depth"), TABLE, ids=ROWS)
def test_a_foreign_text_says_this_in_ours(dialect, text, names, n_layers, ours, depth):
    found = read(dialect, text, names=names, n_layers=n_layers)
    assert str(found.pattern) == ours
    assert found.n_layers == depth
    assert len(found.notices) == text.count("|")


def test_every_dialect_is_in_the_table():
    assert {row[0] for row in TABLE} == set(DIALECTS)


# dialect, text, names, n_layers, what the message says, the character under the first caret or None
REFUSED_READING = [
    ("megatron", "M-MD", {}, None, "'D': sparse attention", 3),
    ("megatron", "ME", {}, None, "'E': experts", 1),
    ("megatron", "M/M", {}, None, "'/': extra prediction heads", 1),
    ("megatron", "[M]", {}, None, "'[': groups", 0),
    ("megatron", "MQ", {}, None, "'Q': unknown symbol", 1),
    ("megatron", "-M", {}, None, "no mixer before it", 0),
    ("megatron", "M--", {}, None, "no mixer before it", 2),
    ("megatron", "|", {}, None, "names no mixer", None),
    ("megatron", "", {}, None, "a text of symbols is needed", None),
    ("megatron", "M", {"M": "M2"}, None, "has no use here", None),
    ("megatron", "MM", {}, 3, "holds 2 layers, but n_layers is 3", None),
    ("hf", '["linear_attention"]', {}, None, "does not say which mixer", None),
    ("hf", '["full_attention", "chunked_attention"]', {}, None, "'chunked_attention' has no counterpart", 20),
    ("hf", "[4]", {}, None, "4 has no counterpart", None),
    ("hf", "full_attention", {}, None, "a list is needed", None),
    ("hf", "[" * 500, {}, None, "a list is needed", None),
    ("hf", '["linear_attention"]', {"linear": "GDNN"}, None, "'GDNN', which is no mixer; did you mean 'GDN'?", None),
    ("fla", ATTENTION_1_3, {}, 4, "only where attention stands", None),
    ("fla", ATTENTION_1_3, {"base": "GDN"}, None, "give n_layers", None),
    ("fla", ATTENTION_1_3, {"base": "GDN"}, 3, "layer 3 is outside the model: they count from 0 to 2", None),
    ("fla", '{"layers": [0, 0]}', {"base": "GDN"}, 2, "layer 0 is given twice", None),
    ("fla", '{"layers": [0], "sinks": 4}', {"base": "GDN"}, 2, "sinks=4 has no counterpart", None),
    ("fla", '{"num_heads": 4}', {"base": "GDN"}, 2, "a list of layers", None),
    ("fla", '{"layers": [0], "num_heads": 0}', {"base": "GDN"}, 2, "heads must be at least 1, got 0", None),
    ("kimi", '{"kda_layers": [1, 3], "full_attn_layers": [4]}', {}, None, "layer 2 stands in neither list", None),
    ("kimi", '{"kda_layers": [1, 2], "full_attn_layers": [2]}', {}, None, "layer 2 stands in both", None),
    ("kimi", '{"kda_layers": [0]}', {}, None, "count from 1, got 0", None),
    ("kimi", '{"kda_layers": 4}', {}, None, "must be a list", None),
    ("kimi", '{"kda_layer": [1]}', {}, None, "unknown key 'kda_layer'; did you mean 'kda_layers'?", None),
    ("olmo", '["gdn", "attn"]', {"gdn": "GDN"}, None, "block 'attn' is not said to be a mixer", 9),
    ("olmo", '["gdn", "gdn"]', {"gdn": "GDN"}, 5, "a cut last cycle is refused", None),
    ("elmo", "x", {}, None, "unknown dialect 'elmo'; did you mean 'olmo'?", None),
]


@pytest.mark.parametrize(("dialect", "text", "names", "n_layers", "says", "caret"), REFUSED_READING)
def test_what_has_no_counterpart_is_refused_with_place_and_reason(dialect, text, names, n_layers, says, caret):
    with pytest.raises(UserError) as caught:
        read(dialect, text, names=names, n_layers=n_layers)
    assert says in str(caught.value)
    if caret is None:
        assert not getattr(caught.value, "spans", ())
    else:
        assert caught.value.spans[0][0] == caret


REFUSED_WRITING = [
    ("megatron", "M2,KDA", {}, "no symbol for KDA", (3, 6)),
    ("megatron", "GA:heads=4", {}, "cannot say GA's heads", (3, 8)),
    ("megatron", "M2/gelu", {}, "cannot say the MLP gelu", (3, 7)),
    ("hf", "GDN,KDA,GA", {}, "two linear mixers, GDN and KDA", (4, 7)),
    ("hf", "GA/none", {}, "a layer's MLP", (3, 7)),
    ("hf", "GDN", {"linear": "KDA"}, "linear is to be KDA", (0, 3)),
    ("fla", "M2,GDN,SWA", {}, "one base mixer, M2, and this is GDN", (3, 6)),
    ("fla", "GDN,GA:output_gate=true", {}, "cannot say GA's output_gate", (7, 18)),
    ("fla", "GA", {}, "a base mixer is needed", None),
    ("kimi", "KDA,GA", {}, "no list for GA", (4, 6)),
    ("olmo", "GDN,GA", {"gdn": "GDN"}, "no block's name is given for GA", (4, 6)),
    ("olmo", "GDN", {"a": "GDN", "b": "GDN"}, "named twice", None),
]


@pytest.mark.parametrize(("dialect", "pattern", "names", "says", "span"), REFUSED_WRITING)
def test_what_the_other_side_cannot_say_is_refused_with_a_caret(dialect, pattern, names, says, span):
    with pytest.raises(UserError) as caught:
        write(dialect, pattern, names=names)
    assert says in str(caught.value)
    assert isinstance(caught.value, PatternError) == (span is not None)
    if span is not None:
        assert caught.value.spans == (span,)


NAMES = {"hf": {"linear": "GDN"}, "fla": {"base": "GDN"}, "olmo": {"gdn": "GDN", "attn": "GA", "local": "SWA"}}
LAYERS = {
    "megatron": ["M2", "M2/none", "GA", "GA/none", "GDN", "MLA"],
    "hf": ["GDN", "GA", "SWA"],
    "fla": ["GDN", "GDN", "GA", "SWA", "SWA:heads=2", "GA:heads=2:kv_heads=1:qk_norm=true", "SWA:window=16"],
    "kimi": ["KDA", "MLA"],
    "olmo": ["GDN", "GA", "SWA"],
}


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_reading_what_was_written_gives_the_same_layers(dialect, data):
    layers = data.draw(st.lists(st.sampled_from(LAYERS[dialect]), min_size=1, max_size=16))
    names = NAMES.get(dialect, {})
    text = write(dialect, ",".join(layers), names=names)
    found = read(dialect, text, names=names, n_layers=len(layers))
    assert found.n_layers == len(layers)
    assert arrange(found.pattern, found.n_layers) == arrange(parse(",".join(layers)))


def test_the_model_s_mlp_decides_what_a_bare_mixer_is():
    assert write("megatron", "M2,GA", n_layers=4) == "M-*-M-*-"
    assert write("megatron", "M2,GA/none", n_layers=2) == "M-*"
    assert write("megatron", "M2,GA", n_layers=2, mlp="none") == "M*"
    assert write("fla", "GDN,SWA", n_layers=4) == '{"layers": [1, 3], "window_size": 2048}'
