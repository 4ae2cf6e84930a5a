"""What figures were taken with: the code's commit, libraries, devices."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import torch

from zoo import __version__


def versions() -> dict[str, str]:
    """Of this process: what a report is written with, and its figures too unless runs say otherwise."""
    libraries = {name: importlib.metadata.version(name) for name in ("lightning", "numpy")}
    return {
        "zoo": __version__,
        "code": commit(),
        "torch": torch.__version__,
        **libraries,
        "python": platform.python_version(),
        "device": device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "threads": str(torch.get_num_threads()),
    }


def trained_with(device: torch.device) -> str:
    """Code, torch and device of a run that this process trains, in one line."""
    return f"{commit()}, torch {torch.__version__}, {device_name(device)}"


def device_name(device: torch.device) -> str:
    """A GPU's name, or the kind of processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"


def counted(runs: Iterable[Sequence[str]]) -> list[str]:
    """``trained_with`` of runs, each alike once and with how many there are; of one that went on, all in order."""
    counts = Counter("; then ".join(each) for each in runs if each)
    return [f"{words}: {count} {'run' if count == 1 else 'runs'}" for words, count in counts.items()]


@cache
def commit() -> str:
    """The commit of a working copy when it was first asked for, with a mark where files differ from it."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return "an installed package"
    words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
