"""What the README says is what there is: its mixers, its presets, its files and its commands."""

import re
from pathlib import Path

import pytest

from zoo.cli import VERBS
from zoo.presets import presets
from zoo_layers.mixer import registered

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_table_of_mixers_is_the_registry():
    section = README.split("## Mixers")[1].split("##")[0]
    assert set(re.findall(r"^\| `([A-Z0-9]+)` \|", section, re.MULTILINE)) == set(registered())


def test_the_table_of_presets_has_every_preset_without_a_size_and_its_pattern():
    section = README.split("## Presets")[1].split("##")[0]
    shown = dict(re.findall(r"\| `([^`]+)` \| `([^`]+)` ", section))
    plain = {name: p for name, p in presets().items() if p.n_layers is None}
    assert shown == {name: p.pattern for name, p in plain.items() if p.why_not() is None}
    for name, preset in plain.items():
        assert preset.why_not() is None or f"`{name}`" in section


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_leads_somewhere_and_every_command_is_a_verb(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page}: {target} is missing"
    for verb in re.findall(r"^(?:\$ )?zoo ([a-z_]+)", text, re.MULTILINE):
        assert verb in VERBS, f"{page}: zoo {verb} is no verb"
    for recipe in re.findall(r"recipes/[\w.]+\.yaml", text):
        assert (ROOT / recipe).is_file(), f"{page}: {recipe} is missing"


def test_no_figure_is_still_to_be_filled_in():
    assert not re.findall(r"\b[A-Z]{3,}_[A-Z_]{3,}\b", README)
