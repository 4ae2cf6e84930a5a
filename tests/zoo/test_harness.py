"""What tests/conftest.py adds to pytest, in a pytest of its own."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
FAILING = """
import pytest

def test_good():
    pass

@pytest.mark.gpu
def test_bad():
    assert 1 == 2, "one is not two"
"""


def run(tmp_path, *words, **environment):
    """Run pytest over a copy of the conftest and two tests, and give what it said."""
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "test_it.py").write_text(FAILING, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | environment
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    return ran.stdout + ran.stderr


def test_failures_are_written_as_they_happen_by_one_process(tmp_path):
    assert "1 failed, 1 passed" in run(tmp_path, "-n", "2", "--failures", "failures.txt")
    written = (tmp_path / "failures.txt").read_text(encoding="utf-8")
    assert written.count("===") == 1
    assert "test_it.py::test_bad [call]" in written
    assert "one is not two" in written


def test_gpu_tests_without_compiled_kernels_are_one_message(tmp_path):
    said = run(tmp_path, "-m", "gpu", TRITON_INTERPRET="1")
    assert "-m gpu asks for a CUDA GPU" in said
    assert "test_bad" not in said
    assert "kernels: interpreted on the CPU" in run(tmp_path, TRITON_INTERPRET="1")
