"""What an installation holds, and that it works where a GPU, Triton or a sound flash-attn is missing."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = {"zoo": ROOT / "zoo", "zoo_layers": ROOT / "layers/zoo_layers", "zoo_kernels": ROOT / "kernels/zoo_kernels"}
SOURCE_ROOTS = (ROOT, ROOT / "layers", ROOT / "kernels")
# Distribution -> what it is imported as, where the names differ.
IMPORTED_AS = {"pyyaml": "yaml"}
# Imported for nothing but what jsonargparse or Lightning do with it.
NEVER_IMPORTED_BY_US = {"jsonargparse", "omegaconf", "tensorboard"}

# ------------------------------------------------------------------------------------------------ where much is missing
# Runs commands in one process, as a user would one after another, and prints what became of each.
SESSION = """
import contextlib, importlib, io, json, sys, warnings
for action, message, category in json.loads(sys.argv[1]):
    module, _, name = category.rpartition(".")
    warnings.filterwarnings(action, message, getattr(importlib.import_module(module or "builtins"), name))
exec(sys.argv[2])
from zoo.cli import main
for words in json.loads(sys.argv[3]):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            status = main(words)
        except SystemExit as stop:
            status = stop.code or 0
    print(json.dumps({"words": words, "status": status, "out": said.getvalue()}))
"""
# What it is like where Triton was never installed: it is neither found nor imported.
WITHOUT_TRITON = """
from importlib.machinery import PathFinder
class WithoutTriton(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "triton" else super().find_spec(name, path, target)
sys.meta_path = [WithoutTriton if finder is PathFinder else finder for finder in sys.meta_path]
"""
BROKEN_WHEEL = "raise ImportError('{name}_cuda.so: undefined symbol: _ZN3c105ErrorC2E')\n"
OPTIONAL_WHEELS = ("flash_attn", "flash_attn_2_cuda", "causal_conv1d", "mamba_ssm", "tokenizers")


def allowed_warnings():
    """The filters of pyproject.toml, which name every warning that is not ours to prevent."""
    for line in PYPROJECT["tool"]["pytest"]["ini_options"]["filterwarnings"]:
        if line != "error":
            action, message, category = line.split(":")
            yield action, message, category


def session(setup, commands, folder, path):
    """Run commands in a fresh process without a GPU, in which other warnings are errors; their results in order."""
    path = [*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": ""}
    arguments = [json.dumps(list(allowed_warnings())), setup, json.dumps(commands)]
    # Not from the tree: with -c, Python looks for packages in the current folder first.
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SESSION, *arguments],
        capture_output=True,
        text=True,
        env=env,
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"words"')]


@pytest.mark.parametrize("missing", ["Triton", "sound wheels"])
def test_everything_works_without_a_gpu_and_without_triton_or_with_broken_wheels(missing, recipe, tmp_path):
    wheels = tmp_path / "site"
    wheels.mkdir()
    if missing == "sound wheels":
        for name in OPTIONAL_WHEELS:
            (wheels / f"{name}.py").write_text(BROKEN_WHEEL.format(name=name))
    config = ["--config", str(recipe)]
    explained, printed, trained, examined = session(
        WITHOUT_TRITON if missing == "Triton" else "",
        [
            ["explain", "GDN,SWA", "--d_model", "64"],
            ["fit", *config, "--print_config"],
            ["fit", *config, "--trainer.max_steps", "2"],
            ["doctor"],
        ],
        tmp_path,
        [wheels, *SOURCE_ROOTS],
    )
    assert [done["status"] for done in (explained, printed, trained, examined)] == [0, 0, 0, 0]
    assert "mixers 1 GDN, 1 SWA" in explained["out"]
    assert "pattern: GDN,SWA" in printed["out"]
    assert (tmp_path / "run" / "last.ckpt").is_file()
    found = {line.split()[0]: line for line in examined["out"].splitlines() if line.strip()}
    if missing == "Triton":
        assert "not installed" in re.search(r"^  triton .*", examined["out"], re.MULTILINE).group()
    else:
        assert (
            "installed, but does not import (ImportError: flash_attn_cuda.so: undefined symbol" in found["flash_attn"]
        )
        assert "installed, but does not import" in found["tokenizers"]
    assert "no device can be used" in found["cuda"]
    # What serves, and why not the rest.
    assert re.search(r"^  torch \(cpu, float32\) +chosen$", examined["out"], re.MULTILINE)
    assert re.search(r"^  varlen \(cpu, float32, full\) +it runs on CUDA", examined["out"], re.MULTILINE)


# ---------------------------------------------------------------------------------------------------- what is declared
def declared():
    """Import names of the dependencies in pyproject.toml, those of optional groups for users too."""
    project = PYPROJECT["project"]
    optional = project["optional-dependencies"]
    groups = [project["dependencies"], *(lines for name, lines in optional.items() if name != "dev")]
    names = [re.match(r"[\w-]+", line).group().lower() for lines in groups for line in lines]
    return {IMPORTED_AS.get(name, name) for name in names}


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.partition(".")[0]


def foreign_imports():
    """Top-level name of everything imported from outside -> a file that does, nested imports too."""
    found = {}
    for package in PACKAGES.values():
        for file in package.rglob("*.py"):
            for name in imports(ast.parse(file.read_text(encoding="utf-8"))):
                if name not in sys.stdlib_module_names and name not in PACKAGES:
                    found.setdefault(name, str(file.relative_to(ROOT)))
    return found


def test_every_import_is_a_declared_dependency_and_every_dependency_is_imported():
    found = foreign_imports()
    assert not {name: file for name, file in found.items() if name not in declared()}
    assert declared() - found.keys() == NEVER_IMPORTED_BY_US


def test_the_newest_tried_versions_of_constraints_txt_lie_in_the_declared_ranges():
    pins = dict(
        re.match(r"([\w-]+)==([\w.]+)", line).groups()
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    )
    floors = dict(
        re.match(r"([\w-]+)(?:\[.*\])?>=([\d.]+)", line).groups() for line in PYPROJECT["project"]["dependencies"]
    )
    numbers = {name: tuple(map(int, text.split("."))) for name, text in floors.items()}
    for name, floor in numbers.items():
        if name in pins:
            assert tuple(map(int, pins[name].split("."))) >= floor, name
    assert pins.keys() >= {"torch", "triton", "lightning", "jsonargparse", "omegaconf", "numpy"}


# ----------------------------------------------------------------------------------------------------------- the wheel
@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of the tree, built from a copy, so that no build folder is left in it."""
    setuptools = pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools 77 or newer")
    assert setuptools
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    clutter = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("zoo", "layers", "kernels", "tests", "docs", "recipes"):
        shutil.copytree(ROOT / name, tree / name, ignore=clutter)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    done = subprocess.run([*command, "-w", str(out), str(tree)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = out.glob("*.whl")
    return zipfile.ZipFile(file)


def test_the_wheel_holds_every_module_and_the_excerpt_and_nothing_else(wheel):
    wanted = {
        f"{name}/{file.relative_to(folder)}"
        for name, folder in PACKAGES.items()
        for file in folder.rglob("*")
        if file.suffix in (".py", ".txt") and "__pycache__" not in file.parts
    }
    assert "zoo/data/excerpt.txt" in wanted
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == wanted


def test_the_wheel_s_command_and_its_licence_are_there(wheel):
    by_name = {name.rpartition("/")[2]: name for name in wheel.namelist()}
    entries = wheel.read(by_name["entry_points.txt"]).decode()
    assert "zoo = zoo.cli:main" in entries
    assert "License-Expression: MIT" in wheel.read(by_name["METADATA"]).decode()
    assert "LICENSE" in by_name


def test_an_installed_wheel_serves_without_the_tree(wheel, tmp_path):
    site = tmp_path / "site"
    wheel.extractall(site)
    check = (
        "import zoo, zoo_layers, zoo_kernels\n"
        "places = [module.__file__ for module in (zoo, zoo_layers, zoo_kernels)]\n"
        f"assert all(place.startswith({str(site)!r}) for place in places), places\n"
        "from zoo.data import TokenData\n"
        "assert TokenData('excerpt', seq_len=64, batch_tokens=64).manifest()\n"
    )
    (explained,) = session(check, [["explain", "--preset", "gdn-h1", "--d_model", "64"]], tmp_path, [site])
    assert explained["status"] == 0
    assert "mixers 1 GDN, 1 SWA" in explained["out"]
