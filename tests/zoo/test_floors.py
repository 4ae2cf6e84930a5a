"""The house holds: floors look down only, and each optional library stands behind one file."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = {"zoo_kernels": "kernels/zoo_kernels", "zoo_layers": "layers/zoo_layers", "zoo": "zoo"}  # lowest first
FILES = [(floor, file) for floor, folder in FLOORS.items() for file in sorted((ROOT / folder).rglob("*.py"))]
# Library -> the files that may import it. A second file would be a second place to change when the library does.
BEHIND_ONE_DOOR = {
    "matplotlib": {"zoo/plot.py"},
    "rich": {"zoo/console.py"},
    "tokenizers": {"zoo/data/tokenizer.py"},
    "tiktoken": {"zoo/data/tiktoken_tokenizer.py"},
    "pyarrow": {"zoo/data/parquet.py"},
    "zstandard": {"zoo/data/zstd.py"},
    "datasets": {"zoo/data/hub.py"},
    "safetensors": {"zoo/checkpoint.py"},
    "omegaconf": set(),
    "transformers": set(),
    "flash_attn": set(),
}


def imported(file):
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, node.module or ""


def name_of(value):
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else value


def test_every_floor_has_files():
    assert {floor for floor, _ in FILES} == set(FLOORS)


@pytest.mark.parametrize(("floor", "file"), FILES, ids=name_of)
def test_no_file_looks_up(floor, file):
    above = list(FLOORS)[list(FLOORS).index(floor) + 1 :]
    for line, name in imported(file):
        assert name.split(".")[0] not in above, f"{file}:{line} imports {name}; {floor} may look down, never up"


@pytest.mark.parametrize(("floor", "file"), FILES, ids=name_of)
def test_a_library_stands_behind_one_file(floor, file):
    for line, name in imported(file):
        doors = BEHIND_ONE_DOOR.get(name.split(".")[0])
        assert doors is None or name_of(file) in doors, f"{file}:{line} imports {name}, which belongs to {doors}"


@pytest.mark.parametrize(("floor", "file"), FILES, ids=name_of)
def test_nothing_is_imported_by_a_star_and_no_file_lacks_a_docstring(floor, file):
    tree = ast.parse(file.read_text(encoding="utf-8"))
    stars = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]
    assert not stars, f"{file}:{stars[0]} imports *"
    assert not tree.body or ast.get_docstring(tree), f"{file} says nothing of itself"


@pytest.mark.parametrize(("floor", "file"), FILES, ids=name_of)
def test_importing_a_file_asks_for_no_gpu(floor, file):
    """Calls at the top level of a module run at import; one that touches CUDA would fail where there is none."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.If):
            continue
        for node in ast.walk(statement):
            assert not (isinstance(node, ast.Call) and "cuda" in ast.unparse(node.func)), f"{file}:{node.lineno}"
