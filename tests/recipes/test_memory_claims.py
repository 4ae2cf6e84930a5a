"""What the update rule of a memory decides, shown by training: the claims of docs/overwrite.md, with the same commands.

Marked slow: half a minute a run on one core. Every run's accuracy on 2048 test rows and its seconds are printed.
"""

import csv
import time
from pathlib import Path

import pytest

from zoo.cli import main

ROOT = Path(__file__).parents[2]
SEEDS = (0, 1)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def accuracy(tmp_path_factory):
    """Train a recipe with another pattern and seed, once, and measure it on the test split."""
    folder, known = tmp_path_factory.mktemp("runs"), {}

    def measure(recipe, pattern, seed):
        if (recipe, pattern, seed) not in known:
            root = folder / str(len(known))
            words = ["--config", str(ROOT / f"recipes/{recipe}.yaml"), "--model.pattern", pattern]
            words += ["--seed_everything", str(seed), "--trainer.default_root_dir", str(root)]
            words += ["--trainer.enable_progress_bar", "false"]
            begun = time.perf_counter()
            assert main(["fit", *words]) == 0
            seconds = time.perf_counter() - begun
            assert main(["test", *words, "--ckpt_path", "last"]) == 0
            known[recipe, pattern, seed] = accuracy_logged_last(root)
            print(f"{recipe}  {pattern}  seed {seed}: {known[recipe, pattern, seed]:.3f} in {seconds:.0f} s")
        return known[recipe, pattern, seed]

    return measure


def accuracy_logged_last(root):
    """The accuracy that `zoo test` logged last."""
    files = sorted(root.glob("logs/version_*/metrics.csv"), key=lambda path: int(path.parent.name.split("_")[1]))
    with files[-1].open(newline="", encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    return float(row["test/accuracy"])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("pattern", ["DN", "GDN"])
def test_a_memory_that_erases_before_it_writes_recalls_what_was_overwritten_and_one_that_only_adds_does_not(
    accuracy, pattern, seed
):
    erases, adds = accuracy("tiny_overwrite", pattern, seed), accuracy("tiny_overwrite", "LA", seed)
    assert erases >= 0.85
    assert erases >= adds + 0.15


@pytest.mark.parametrize("seed", SEEDS)
def test_a_memory_before_a_window_recalls_what_windows_alone_have_lost(accuracy, seed):
    assert accuracy("tiny_overwrite", "DN,SWA", seed) >= accuracy("tiny_overwrite", "2xSWA", seed) + 0.30


@pytest.mark.parametrize("seed", SEEDS)
def test_parity_is_learned_with_write_strengths_up_to_two_and_not_with_those_up_to_one(accuracy, seed):
    assert accuracy("tiny_parity", "DN:negative_eigenvalues=true", seed) >= 0.95
    assert accuracy("tiny_parity", "DN:negative_eigenvalues=false", seed) <= 0.75
