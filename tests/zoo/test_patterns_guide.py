"""docs/patterns.md: what it shows is what happens."""

import re
from pathlib import Path

from zoo.cli import main
from zoo.dialects import DIALECTS
from zoo.pattern import canonical, expand

GUIDE = (Path(__file__).parents[2] / "docs" / "patterns.md").read_text(encoding="utf-8")


def test_the_shown_table_is_what_the_command_prints(capsys):
    command, shown = re.search(r"```\n\$ zoo (explain .*)\n(pattern .*\n(?:.*\n)*?)```", GUIDE).groups()
    assert main(command.replace('"', "").split()) == 0
    assert capsys.readouterr().out.startswith(shown)


def test_the_shown_error_is_what_the_command_prints(capsys):
    command, shown = re.search(r"```\n\$ zoo (explain .*)\n(unknown mixer .*\n(?:.*\n)*?)Known", GUIDE).groups()
    assert main(command.replace('"', "").split()) == 2
    assert capsys.readouterr().err.startswith(shown)


def test_the_canonical_forms_of_the_guide_are_right():
    rows = re.findall(r"^\| `([^`]+)` \| [^|]*?(\d+) \| `([^`]+)`", GUIDE, re.MULTILINE)
    assert len(rows) == 4
    for text, n_layers, expected in rows:
        assert canonical(expand(text, int(n_layers))) == expected


def test_the_example_from_python_says_what_comes_out():
    code = GUIDE.split("```python")[1].split("```")[0]
    names = {}
    exec(code, names)
    layers = names["layers"]
    assert (layers[1].mixer, layers[1].spec.heads, layers[1].mlp) == ("GA", 16, "swiglu")
    assert f"'{canonical(layers)}'" in code
    assert layers[1].resolve(d_model=2048).head_dim == 128


def test_every_dialect_has_its_row():
    assert all(f"| `{name}`" in GUIDE for name in DIALECTS)
