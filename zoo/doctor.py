"""What this installation can do: versions, devices, and for every op who serves it and why the others do not."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from zoo_kernels.attention.call import AttentionCall
from zoo_kernels.backend import explain
from zoo_kernels.delta.call import DeltaCall
from zoo_layers.mixer import broken, registered

# Packages that change what is possible here, and what for. Those marked optional may be absent.
PACKAGES = {
    "torch": "everything",
    "triton": "fused kernels (optional: the PyTorch backends serve without it)",
    "lightning": "fit, validate, test, predict",
    "tokenizers": "tokenizers other than bytes (optional)",
    "flash_attn": "attention (optional; no backend here uses it yet)",
}


@dataclass(frozen=True)
class Row:
    """One line of the report: ``kind`` groups lines, ``name`` is what it is about, ``state`` the finding."""

    kind: str
    name: str
    state: str


def examine() -> list[Row]:
    """Look at everything, by trying it; nothing found here raises."""
    return [*_packages(), *_devices(), *_ops(), *_mixers()]


def _packages() -> Iterator[Row]:
    yield Row("package", "python", platform.python_version())
    for name, purpose in PACKAGES.items():
        yield Row("package", name, f"{probe(name)}: {purpose}")


def probe(name: str) -> str:
    """The version of a package, "not installed", or why it is installed but does not import."""
    try:
        if importlib.util.find_spec(name) is None:
            return "not installed"
        importlib.import_module(name)
    except Exception as error:  # a broken wheel may raise anything; the report must go on
        return f"installed, but does not import ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    try:
        return version(name.replace("_", "-"))
    except PackageNotFoundError:
        return "importable, version unknown"


def _devices() -> Iterator[Row]:
    yield Row("device", "cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads for PyTorch")
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
        yield Row("device", "cuda", f"no device can be used; PyTorch is {built}")
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        yield Row(
            "device",
            f"cuda:{index}",
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, sm_{properties.major}{properties.minor}, "
            f"{properties.multi_processor_count} multiprocessors",
        )


def _ops() -> Iterator[Row]:
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for device in devices:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        shown = f"{device}, {str(dtype).removeprefix('torch.')}"
        for name, state in explain("delta_rule", _delta_call(device, dtype)):
            yield Row("delta_rule", f"{name} ({shown})", state)
        for window in (None, 2048):
            span = "full" if window is None else f"window {window}"
            for name, state in explain("attention", _attention_call(device, dtype, window)):
                yield Row("attention", f"{name} ({shown}, {span})", state)


def _delta_call(device: str, dtype: torch.dtype) -> DeltaCall:
    """A gated delta rule as a model of ordinary size would ask for."""
    q, k, v = torch.zeros(3, 1, 256, 4, 128, device=device, dtype=dtype).unbind(0)
    gates = torch.zeros(2, 1, 256, 4, device=device)
    return DeltaCall(
        q=q, k=k, v=v, log_decay=gates[0], beta=gates[1], initial_state=None, packing=None, scale=1.0, chunk=None
    )


def _attention_call(device: str, dtype: torch.dtype, window: int | None) -> AttentionCall:
    """One row of 4096 tokens: longer than the window, so that the window counts."""
    q, k, v = torch.zeros(3, 1, 4096, 4, 128, device=device, dtype=dtype).unbind(0)
    return AttentionCall(q=q, k=k, v=v, window=window, packing=None, scale=1.0)


def _mixers() -> Iterator[Row]:
    yield Row("mixers", "registered", " ".join(registered()))
    for name, reason in broken().items():
        yield Row("mixers", name, f"a plug-in that does not load: {reason}")
