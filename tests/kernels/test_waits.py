"""The proof that nothing waits proves it, and leaves no trace in the process."""

import warnings
from pathlib import Path

import pytest
import torch

from tests.waits import no_waits


def test_it_leaves_the_mode_as_it_was_whatever_pytorch_warns_of_and_the_code_raises(monkeypatch):
    modes = []

    def set_mode(mode):
        modes.append(mode)
        if mode == "error":  # PyTorch warns once in a process, with the mode set already
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: modes.append("done"))
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with pytest.raises(KeyError), no_waits():
        raise KeyError
    assert modes == ["done", "error", "default"]


@pytest.mark.gpu
def test_a_wait_is_an_error_inside_and_none_behind():
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="synchronizing"), no_waits():
        x.sum().item()
    assert x.sum().item() == 3.0


def test_no_test_sets_the_mode_by_itself():
    tests = Path(__file__).parents[1]
    call = "torch.cuda." + "set_sync_debug_mode("  # not itself
    assert {path.name for path in tests.rglob("*.py") if call in path.read_text(encoding="utf-8")} == {"waits.py"}
