"""From a checkpoint back to a model: weights only, and an error that says what the file is if it is none of ours."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zoo.architecture import Architecture
from zoo.errors import UserError
from zoo.model import HybridLM
from zoo.run import LAST


@dataclass(frozen=True)
class Loaded:
    """A model from a checkpoint, and what the checkpoint says of itself.

    Attributes:
        model: in eval mode, on the device asked for.
        architecture: what it is made of.
        facts: the checkpoint's own record: code version, tokenizer, tokens seen, layers as resolved.
    """

    model: HybridLM
    architecture: Architecture
    facts: dict[str, Any]


def load_model(path: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Loaded:
    """Rebuild a model from a checkpoint of ``zoo fit``, without the recipe that made it.

    Args:
        path: a ``.ckpt`` file, or a run's folder, whose ``last.ckpt`` is taken.
        device: where to put it.
        dtype: of the weights; decay parameters stay fp32. None: as stored.

    Raises:
        UserError: no such file, a file that is not a checkpoint of ours, or weights that do not fit.
    """
    file = Path(path)
    if file.is_dir() and (file / LAST).is_file():
        file = file / LAST
    if file.is_dir() and (file / "meta.pt").is_file():
        raise UserError(
            f"{file} is a sharded checkpoint, which only the strategy that wrote it reads; train with "
            "save_distributed_checkpoint: false in the strategy's init_args for one file"
        )
    if not file.is_file():
        raise UserError(f"no checkpoint at {path}; name a .ckpt file, or a run's folder with a {LAST}")
    stored = read_checkpoint(file)
    architecture = Architecture.from_plain(stored["zoo"]["architecture"])
    model = architecture.build(device="meta")
    _fill_unstored(model)
    weights = {k.removeprefix("model."): v for k, v in stored["state_dict"].items() if k.startswith("model.")}
    try:
        model.load_state_dict(weights, strict=True, assign=True)
    except RuntimeError as error:
        raise UserError(f"{file}: its weights do not fit the model it names: {error}") from error
    if architecture.tie:
        model.head.weight = model.embedding.weight
    model.to(device=device, dtype=dtype).eval()
    return Loaded(model, architecture, stored["zoo"])


def _fill_unstored(model: HybridLM) -> None:
    """Fill, on the CPU, buffers that no checkpoint holds, as they follow from the settings: RetNet's decay."""
    stored = model.state_dict().keys()
    owners = {name.rpartition(".")[0] for name, _ in model.named_buffers() if name not in stored}
    with torch.random.fork_rng(devices=[]):
        for owner in map(model.get_submodule, owners):
            owner.to_empty(device="cpu", recurse=False)
            owner.reset_parameters()  # type: ignore[operator]  # whatever else it fills is loaded behind


def read_checkpoint(file: Path) -> dict[str, Any]:
    """The content of a checkpoint of ours, on the CPU.

    Raises:
        UserError: a file that cannot be read, or that is none of ours.
    """
    try:
        stored = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, LookupError) as error:
        raise UserError(
            f"{file} cannot be read as a checkpoint ({type(error).__name__}); it may be cut short or another kind of "
            "file"
        ) from error
    if not isinstance(stored, dict) or not stored.get("zoo") or "state_dict" not in stored:
        raise UserError(f"{file} is not a checkpoint of zoo fit: it does not say what model it holds")
    return stored
