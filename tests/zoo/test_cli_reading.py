"""The command line's reading verbs: explain, mixers, presets; how errors leave it, and the table of verbs."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zoo import __version__, cli
from zoo.cli import VERBS, main
from zoo.presets import presets
from zoo_layers.mixer import broken, registered


def said(capsys, *argv, status=0):
    assert main(list(argv)) == status
    return capsys.readouterr()


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_of_the_table_has_a_module_that_serves_it(verb):
    module = importlib.import_module(VERBS[verb].module)
    wanted = ["run_lightning"] if VERBS[verb].lightning else ["add_arguments", "run"]
    assert all(callable(getattr(module, name)) for name in wanted)


def test_help_names_every_verb_and_the_version_is_the_package_s(capsys):
    out = said(capsys, "--help").out
    for name, verb in VERBS.items():
        assert f"  {name} " in out
        assert verb.help in out
    assert said(capsys, "--version").out == f"zoo {__version__}\n"
    assert said(capsys, status=2).out == out


@pytest.mark.parametrize("verb", [name for name, verb in VERBS.items() if not verb.lightning])
def test_a_verb_shows_its_options(capsys, verb):
    assert f"usage: zoo {verb}" in said(capsys, verb, "--help").out


MISTAKES = [
    (["explian"], "unknown verb 'explian'; did you mean 'explain'?"),
    (["explain", "GDN", "--n_layer", "4"], "zoo explain: unknown argument '--n_layer'; did you mean '--n_layers'?"),
    (["explain", "GDN", "--n_layers", "four"], "zoo explain: argument --n_layers: invalid int value: 'four'"),
    (["explain"], "explain needs a pattern, --preset NAME or --recipe FILE"),
    (["explain", "GDN", "--context", "0"], "context must be at least 1, got 0"),
    (["explain", "GND,SWA"], "unknown mixer 'GND'; did you mean 'GDN'?\n  GND,SWA\n  ^^^\n"),
    (["explain", "GDN,GDN,SWA", "--n_layers", "8"], "the cycle of 3 layers does not fill n_layers=8: 2 left over"),
    (["explain", "GDN", "--mlp", "swigl"], "unknown MLP 'swigl'; did you mean 'swiglu'?"),
    (
        ["explain", "GDN,GA:heads=3", "--d_model", "64"],
        "heads must divide d_model, but 3 do not divide 64\n  GDN,GA:heads=3",
    ),
    (["explain", "--preset", "gdn-h3"], "unknown preset 'gdn-h3'; did you mean 'gdn-h"),
    (["explain", "--recipe", "no/such.yaml"], "recipe no/such.yaml cannot be read: No such file or directory"),
    (["explain", "--from", "megatron", "M-E"], "megatron: 'E': experts"),
    (["explain", "--from", "megatron"], "--from megatron needs the text to read"),
    (["explain", "M2,KDA", "--to", "megatron"], "megatron has no symbol for KDA"),
    (["explain", "GDN", "--to", "hf", "--names", "linear"], "--names is a list such as linear=GDN"),
    (["mixers", "GND"], "unknown mixer 'GND'; did you mean 'GDN'?"),
    (["presets", "gdn-h1-04b"], "unknown preset 'gdn-h1-04b'; did you mean 'gdn-h1-0.4b'?"),
]


@pytest.mark.parametrize(("argv", "message"), MISTAKES, ids=[" ".join(m[0]) for m in MISTAKES])
def test_a_user_s_mistake_is_one_message_and_status_2(capsys, argv, message):
    out, err = said(capsys, *argv, status=2)
    assert out == ""
    assert err.startswith(message) or message in err.splitlines()[0]
    assert "Traceback" not in err
    assert "usage:" not in err
    assert len(err.splitlines()) <= 4


def process(code):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)


def test_a_wrong_name_ends_the_process_with_a_caret_and_no_traceback_before_torch_is_loaded():
    done = process(
        "import sys; from zoo.cli import main; status = main(['explain', 'GND,SWA'])\n"
        "print('torch' in sys.modules); sys.exit(status)"
    )
    assert done.returncode == 2
    assert done.stdout == "False\n"
    assert done.stderr.startswith("unknown mixer 'GND'; did you mean 'GDN'?\n  GND,SWA\n  ^^^\nKnown mixers: ")
    assert done.stderr.count("\n") == 4


def test_python_m_zoo_is_the_command_and_explain_loads_no_lightning():
    done = process(
        "import runpy, sys\n"
        "sys.argv = ['zoo', 'explain', 'GDN,SWA', '--d_model', '64']\n"
        "try:\n"
        "    runpy.run_module('zoo', run_name='__main__')\n"
        "except SystemExit as stop:\n"
        "    loaded = {'lightning', 'pytorch_lightning'} & sys.modules.keys()\n"
        "    sys.exit(f'{loaded} was imported' if loaded else stop.code)\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("pattern    GDN,SWA    canonical GDN,SWA    2 layers")


def test_an_interrupted_command_ends_with_130(capsys, monkeypatch):
    def interrupted(words):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_dispatch", interrupted)
    assert said(capsys, "explain", status=130).err == "interrupted\n"


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch):
    def broken_verb(words):
        raise ValueError("not the user's")

    monkeypatch.setattr(cli, "_dispatch", broken_verb)
    with pytest.raises(ValueError, match="not the user's"):
        main(["explain"])


# ---------------------------------------------------------------------------------------------------------- each flag
def test_each_flag_of_explain_changes_what_is_shown(capsys, tmp_path):
    base = ["explain", "GDN,SWA", "--d_model", "64"]
    plain = said(capsys, *base).out
    for more in (
        ["--n_layers", "4"],
        ["--d_model", "128"],
        ["--context", "64"],
        ["--vocab_size", "257"],
        ["--mlp", "none"],
        ["--d_ff", "64"],
        ["--no-tie"],
        ["--full"],
        ["--json"],
    ):
        assert said(capsys, *base, *more).out != plain, more
    assert said(capsys, *base, "--tie").out == plain


def test_a_preset_gives_sizes_and_every_one_can_be_overridden(capsys):
    assert (
        "12 layers    d_model 1536    vocabulary 32,000, tied" in said(capsys, "explain", "--preset", "gdn-h1-0.4b").out
    )
    out = said(capsys, "explain", "GA", "--preset", "gdn-h1-0.4b", "--n_layers", "2", "--d_model", "64", "--no-tie").out
    assert out.startswith(
        "pattern    GA    canonical GA    2 layers    d_model 64    vocabulary 32,000, untied    mixers 2 GA"
    )


RECIPE = """
model: {pattern: "GDN,SWA", n_layers: 4, d_model: 64, d_ff: 176, mixers: {SWA: {window: 64}, GA: {heads: 2}}}
data: {class_path: zoo.data.TokenData, init_args: {seq_len: 128}}
"""


def test_a_recipe_is_explained_as_it_would_be_trained(capsys, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    out, err = said(capsys, "explain", "--recipe", str(file))
    assert "4 layers    d_model 64    vocabulary 257, untied" in out
    assert "window=64" in out
    assert err == "mixers: settings for GA left out, no layer is GA\n"
    out, err = said(capsys, "explain", "GA", "--recipe", str(file), "--d_model", "128")
    assert "canonical GA:heads=2    4 layers    d_model 128" in out


def bpe(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=30, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.train_from_iterator(["some words and some more"], trainer)
    tokenizer.save(str(tmp_path / "bpe.json"))
    return tokenizer.get_vocab_size()


@pytest.mark.parametrize(
    ("model", "data", "vocabulary"),
    [
        ("pattern: GA", "zoo.data.TokenData", "257"),
        ("pattern: GA", "{class_path: zoo.data.TokenData, init_args: {tokenizer: BPE}}", "BPE"),
        ("pattern: GA", "{class_path: zoo.data.TaskData, init_args: {task: parity}}", "3"),
        ("pattern: GA", "{class_path: TaskData, init_args: {profile: gpu, options: {vocab: 512}}}", "512"),
        ("preset: gdn-h1-0.4b, n_layers: 2", "{class_path: zoo.data.TokenData}", "257"),
        ("preset: gdn-h1-0.4b, n_layers: 2", "{class_path: another.Data}", "32,000"),
    ],
)
def test_a_recipe_is_explained_with_the_vocabulary_of_its_data(capsys, tmp_path, model, data, vocabulary):
    size = bpe(tmp_path) if vocabulary == "BPE" else vocabulary
    file = tmp_path / "recipe.yaml"
    file.write_text(f"model: {{{model}, d_model: 64}}\ndata: {data}\n".replace("BPE", str(tmp_path / "bpe.json")))
    assert f"vocabulary {size}, " in said(capsys, "explain", "--recipe", str(file)).out


@pytest.mark.parametrize(("name", "vocabulary"), [("tiny_overwrite", 64), ("tiny_parity", 3), ("tiny_text", 257)])
def test_the_recipes_that_ship_are_explained_as_they_are_trained(capsys, name, vocabulary):
    recipe = Path(__file__).parents[2] / "recipes" / f"{name}.yaml"
    assert f"vocabulary {vocabulary}, untied" in said(capsys, "explain", "--recipe", str(recipe)).out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model: {pattern: GDN,SWA}",
            "'SWA' is a mixer, not a setting of the model\nQuote the pattern: \"GDN,SWA\".\n",
        ),
        ("model: {patern: GDN}", "the model has no key 'patern'; did you mean 'pattern'?"),
        ("model: {pattern: GDN, d_model: '${..width}'}", "d_model is a reference, ${..width}"),
        ("data: {}", "has no model"),
        ("[1, 2]", "has no model"),
        ("model: {pattern: [", "is not valid"),
    ],
)
def test_a_recipe_s_mistakes_are_named(capsys, tmp_path, text, message):
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    assert message in said(capsys, "explain", "--recipe", str(file), status=2).err


def test_options_beside_the_pattern_are_written_or_refused_but_never_dropped(capsys, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    assert (
        said(capsys, "explain", "--recipe", str(file), "--to", "fla").out == '{"layers": [1, 3], "window_size": 64}\n'
    )
    assert "hf cannot say SWA's window" in said(capsys, "explain", "--recipe", str(file), "--to", "hf", status=2).err
    assert said(capsys, "explain", "--preset", "gdn-h1", "--n_layers", "2", "--to", "hf").out.count("attention") == 2


def test_another_notation_is_translated_and_then_explained(capsys):
    out, err = said(capsys, "explain", "--from", "megatron", "G-|*-", "--d_model", "64")
    assert out.splitlines()[0] == "megatron says    GDN,GA    n_layers 2"
    assert "2 layers    d_model 64" in out
    assert err == "megatron: the pipeline cut at character 3 is dropped; a pattern does not say where to cut\n"
    out, _ = said(capsys, "explain", "--from", "megatron", "G-*-", "--to", "hf")
    assert out == '["linear_attention", "full_attention"]\n'
    out, _ = said(capsys, "explain", "GDN,SWA", "--n_layers", "4", "--to", "fla")
    assert out == '{"layers": [1, 3], "window_size": 2048}\n'
    out, _ = said(capsys, "explain", "--from", "hf", '["linear_attention"]', "--names", "linear=GDN", "--d_model", "64")
    assert out.startswith("hf says    GDN    n_layers 1")


# ---------------------------------------------------------------------------------------------------- mixers, presets
def test_mixers_lists_every_mixer_with_its_first_line_and_the_broken_ones(capsys, monkeypatch):
    monkeypatch.setattr("zoo_layers.mixer.broken", lambda: {"RWKV7": "their-package: ImportError: no cuda"})
    lines = said(capsys, "mixers").out.splitlines()
    for name, spec in registered().items():
        assert any(line.split()[0] == name and spec.__doc__.splitlines()[0] in line for line in lines if line)
    assert "RWKV7  could not be loaded: their-package: ImportError: no cuda" in lines
    assert "could not be loaded" in said(capsys, "mixers", "RWKV7", status=2).err


@pytest.mark.parametrize("name", registered())
def test_mixers_shows_every_option_with_type_default_range_and_meaning(capsys, name):
    out = said(capsys, "mixers", name.lower()).out
    for found in registered()[name].options().values():
        row = next(line for line in out.splitlines() if line.split()[:1] == [found.name])
        default = "open" if found.default is None else found.write(found.default)
        assert row.split()[1:3] == [found.kind.__name__, default]
        assert row.endswith(found.help)
        assert found.at_least is None or str(found.at_least) in row


def test_mixers_check_says_of_each_property_whether_it_holds(capsys, monkeypatch):
    from zoo_layers import conformance

    assert set(conformance.PROPERTIES) >= {"causality", "packing"}
    monkeypatch.setattr(
        conformance,
        "check",
        lambda spec, width: [("causality", None), ("packing", conformance.ConformanceError("leaks"))],
    )
    assert said(capsys, "mixers", "--check", "ga", status=1).out == "GA  causality: holds\nGA  packing: leaks\n"
    monkeypatch.setattr(conformance, "check", lambda spec, width: [("causality", None)])
    assert said(capsys, "mixers", "--check", "GA").out == "GA  causality: holds\n"
    assert "--check needs a mixer's name" in said(capsys, "mixers", "--check", status=2).err


def test_presets_lists_all_and_says_why_some_cannot_be_built(capsys):
    lines = said(capsys, "presets").out.splitlines()
    for name, found in presets().items():
        row = next(line for line in lines if line.startswith(f"{name} "))
        assert found.pattern in row
        assert ("not yet: it needs" in row) == bool(found.missing())
    assert broken() == {}


@pytest.mark.parametrize("name", ["gdn-h1-0.4b", "samba-421m", "deltanet-swa"])
def test_a_preset_shows_the_source_of_each_number(capsys, name):
    out = said(capsys, "presets", name).out
    for setting, _, source in presets()[name].settings():
        assert any(line.split()[0] == setting and line.endswith(source) for line in out.splitlines())
