"""Read before any test is: without a GPU, Triton's kernels are interpreted, which is decided when they are imported."""

import os
from pathlib import Path

import pytest
import torch


def _take_a_gpu() -> None:
    """Processes of -n take the GPUs in turn; told before CUDA is begun, which no count here does."""
    worker, count = os.environ.get("PYTEST_XDIST_WORKER", ""), torch.cuda.device_count()
    if worker and count > 1:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        os.environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[int(worker.removeprefix("gw")) % count]


_take_a_gpu()
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser):
    """Pytest tells failures at its end, which a run that is cut off never reaches."""
    parser.addoption("--failures", metavar="FILE", help="write every failure there as it happens")


class Failures:
    """Appends each failure to a file; under -n, the process that the others report to does."""

    def __init__(self, path):
        self.path = Path(path)
        self.path.write_text("", encoding="utf-8")

    def pytest_runtest_logreport(self, report):
        """Called for every part of every test."""
        if report.failed:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"=== {report.nodeid} [{report.when}]\n{report.longreprtext}\n")


def pytest_configure(config):
    """Where -m gpu cannot be: one message in the place of a thousand failures; a driver may come up late, too."""
    if config.getoption("--failures") is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(config.getoption("--failures")))
    if config.option.markexpr == "gpu" and os.environ.get("TRITON_INTERPRET") == "1":
        raise pytest.UsageError(
            "-m gpu asks for a CUDA GPU and compiled kernels, but TRITON_INTERPRET=1 is set: by you, or because "
            "PyTorch sees no GPU. `zoo doctor` tells what it sees"
        )


def pytest_report_header():
    """What the kernels run on here."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "kernels: interpreted on the CPU"
    return f"kernels: compiled for {torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU'}"
