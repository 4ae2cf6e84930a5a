"""`zoo bench tune`: candidates are checked before they are timed, and the table of launches reads back."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from zoo.bench import tune
from zoo.bench.ops import Case
from zoo_kernels import launch
from zoo_kernels.launch import Launch, Row

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

CPU = torch.device("cpu")
KERNEL = "toy_double"
ROOT = Path(__file__).parents[2]


@triton.jit
def _double(x, y, count, TILE: tl.constexpr, FACTOR: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(y + at, tl.load(x + at, mask=at < count) * FACTOR, mask=at < count)


@dataclass(frozen=True, kw_only=True)
class ToyCase(Case):
    """y = 2 x, by a kernel that computes wrongly with tiles of 128 and fails with tiles of 32."""

    count: int
    op: ClassVar[str] = "toy"
    backward: ClassVar[bool] = False

    @property
    def shape(self):
        return f"{self.count} numbers"

    def draw(self, device, dtype):
        return {"x": torch.randn(self.count, device=device, dtype=dtype)}

    def bind(self, inputs, backend):
        x = inputs["x"]
        arch = "cpu" if x.device.type == "cpu" else "sm_90"

        def call():
            if x.dtype == torch.float64:
                return 2 * x
            one, y = launch.pick(KERNEL, arch, long=self.count > 300, dtype="fp32"), torch.empty_like(x)
            if one.tile == 32:
                raise RuntimeError("out of resources")
            factor = 3 if one.tile == 128 else 2
            _double[(-(-self.count // one.tile),)](x, y, self.count, one.tile, factor, num_warps=one.warps)
            return y

        return call

    def checked(self):
        return ToyCase(name="toy-checked", count=min(self.count, 200))


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setitem(launch.TABLES, KERNEL, (Row(Launch(tile=64, warps=1)),))
    monkeypatch.setitem(tune.CANDIDATES, KERNEL, tune.Candidates((16, 32, 64, 128), (1,), (1,)))
    yield (ToyCase(name="toy-short", count=250), ToyCase(name="toy-long", count=700))
    launch._pick.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the toy kernel is interpreted")
def test_tune_rejects_what_is_wrong_and_its_file_reads_back(toy, tmp_path):
    said = []
    ((kernel, rows),) = tune.tune(toy, CPU, repeats=1, say=said.append)
    assert kernel == KERNEL
    assert [row.when for row in rows] == [{"long": False, "dtype": "fp32"}, {"long": True, "dtype": "fp32"}]
    assert all(row.arch == "cpu" and row.launch.tile in (16, 64) for row in rows)
    assert all("toy-" in row.source and torch.__version__ in row.source for row in rows)
    told = [line.strip() for line in said]
    assert told.count("WRONG: y is off by 5.0e-01, 1e-05 is allowed") == 2
    assert told.count("RuntimeError: out of resources") == 2
    file = tmp_path / "launches.py"
    table = tune.merged({}, kernel, rows)
    tune.write_launches(table, file)
    first = file.read_bytes()
    assert tune.read_launches(file) == table
    # Another kernel's rows stay, and the order in which they came is not seen.
    other = tune.merged(table, "another", [Row(Launch(8, 2, 3), "sm_90", {"K": 128, "idle": True}, "toy " * 40)])
    again = tune.merged(tune.merged({}, "another", other["another"]), kernel, tuple(reversed(rows)))
    assert again == other
    tune.write_launches(other, file)
    assert tune.read_launches(file) == other
    tune.write_launches(table, file)
    assert file.read_bytes() == first


@pytest.mark.parametrize("rows", [{}, {"a": (Row(Launch(8, 2, 3), "sm_90", {"K": 128, "n": None}, "toy " * 40),)}])
def test_a_generated_file_is_laid_out_as_the_formatter_would(rows, tmp_path):
    file = tmp_path / "launches.py"
    tune.write_launches(rows, file)
    for words in (["format", "--check"], ["check"]):
        command = [sys.executable, "-m", "ruff", *words, "--config", str(ROOT / "pyproject.toml"), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_shipped_file_of_launches_reads_and_every_kernel_in_it_has_a_table():
    measured = tune.read_launches(tune.launches_file())
    assert all(row.source for rows in measured.values() for row in rows)


def test_a_fact_that_a_file_cannot_hold_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"launch facts must be numbers, text, bools or None"):
        tune.write_launches({"a": (Row(Launch(8, 2), "any", {"dtype": torch.float32}),)}, tmp_path / "launches.py")


def test_a_file_that_is_no_table_is_not_overwritten(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("x = 1\n")
    with pytest.raises(ValueError, match="holds no MEASURED"):
        tune.read_launches(file)


def test_without_a_list_of_its_own_a_kernel_tries_the_neighbours_of_its_table():
    found = tune.around((Row(Launch(64, 4, 2)), Row(Launch(128, 8, 1))))
    assert found.tiles == (32, 64, 128, 256)
    assert found.warps == (2, 4, 8)
    assert found.stages == (1, 2, 3)
    assert len(list(found)) == 36
