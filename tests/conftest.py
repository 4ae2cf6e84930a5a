"""Read before any test is: without a GPU, Triton's kernels are interpreted, which is decided when they are imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config):
    """One message in the place of a thousand failures; a driver that comes up late is a reason too."""
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
