"""Checkpoints: written whole or not at all, read weights-only, and what a file is if it is none of ours."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from zoo.architecture import Architecture
from zoo.errors import UserError
from zoo.model import HybridLM
from zoo.run import LAST

META = "meta.pt"  # a sharded checkpoint's own record, written last: a folder without it is not complete
UNREADABLE = (
    *(pickle.UnpicklingError, zipfile.BadZipFile),
    *(RuntimeError, EOFError, OSError, ValueError, LookupError, AttributeError),
)


# -------------------------------------------------------------------------------------------------------------- writing
class WholeFiles(TorchCheckpointIO):
    """Checkpoints that a full disk or a kill leaves as they were; folders of another strategy are read as well."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write beside ``path``, then take its place.

        Raises:
            UserError: it could not be written.
        """
        if storage_options is not None:
            raise ValueError("WholeFiles: storage_options mean nothing for a local file; leave them out")
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = part_of(path)
        try:
            with part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
        except (OSError, RuntimeError) as error:  # PyTorch's writer makes a RuntimeError of a full disk
            part.unlink(missing_ok=True)
            raise UserError(unsaved(path, error)) from error
        publish(part, path)

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The content of a file; or of a sharded folder, as one file would hold it. On the CPU, weights-only.

        Raises:
            UserError: it cannot be read.
        """
        return whole_checkpoint(Path(path)) if Path(path).is_dir() else read_checkpoint(Path(path))


def part_of(path: Path) -> Path:
    """Where a checkpoint is written before it takes its place."""
    return path.with_name(path.name + ".part")


def publish(part: Path, path: Path) -> None:
    """Let a finished file or folder take the place of an older one."""
    old = path.with_name(path.name + ".old")
    if part.is_file() and not path.is_dir():
        os.replace(part, path)
        return
    # Folders cannot replace one another: between the two renames the newer one stands complete under its first name,
    # where recover() finds it.
    _remove(old)
    if path.exists():
        path.rename(old)
    part.rename(path)
    _remove(old)


def recover(path: Path) -> bool:
    """Finish a :func:`publish` that a kill interrupted; True where there was something to finish."""
    part, old = part_of(path), path.with_name(path.name + ".old")
    if path.exists() or not old.exists():
        return False
    with contextlib.suppress(OSError):  # another rank was faster
        (part if part.is_file() or (part / META).is_file() else old).rename(path)
    shutil.rmtree(old, ignore_errors=True)
    return True


def unsaved(path: Path, error: BaseException) -> str:
    """What to say of a checkpoint that could not be written."""
    if isinstance(error, CheckpointException):
        error = next((failure[0] for failure in error.failures.values()), error)
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    error = cause or error
    reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
    free = shutil.disk_usage(path.parent).free if path.parent.is_dir() else 0
    return (
        f"checkpoint {path} could not be saved: {reason} ({free / 2**20:,.0f} MiB are free there). The one before it "
        "is as it was; make room and go on with --ckpt_path last"
    )


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# -------------------------------------------------------------------------------------------------------------- reading
def read_checkpoint(file: Path) -> dict[str, Any]:
    """The content of a checkpoint file of ours, on the CPU.

    Raises:
        UserError: a file that cannot be read, or that is none of ours.
    """
    try:
        with zipfile.ZipFile(file) as archive:  # PyTorch's own reader does not look at the checksums
            damaged = archive.testzip()
        if damaged is not None:
            raise UserError(
                f"{file} cannot be read as a checkpoint: {damaged} in it is damaged; go back to an older one"
            )
        stored = torch.load(file, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except UNREADABLE as error:
        raise UserError(
            f"{file} cannot be read as a checkpoint ({type(error).__name__}); it may be cut short or another kind of "
            "file"
        ) from error
    if not isinstance(stored, dict) or not stored.get("zoo") or "state_dict" not in stored:
        raise UserError(f"{file} is not a checkpoint of zoo fit: it does not say what model it holds")
    return stored


def read_facts(folder: Path) -> dict[str, Any]:
    """What a sharded checkpoint holds besides weights and optimizer states; its files are checked for their sizes.

    Raises:
        UserError: a folder that is no checkpoint of ours, or that misses files or parts of them.
    """
    if not (folder / META).is_file():
        raise UserError(f"{folder} is no checkpoint: it holds no {META}; name a .ckpt file or folder of zoo fit")
    try:
        facts = torch.load(folder / META, map_location="cpu", weights_only=True)
        with (folder / ".metadata").open("rb") as file:
            places = _Harmless(file).load().storage_data.values()
    except UNREADABLE as error:
        raise UserError(
            f"{folder} cannot be read as a checkpoint ({type(error).__name__}: {error}); go back to an older one"
        ) from error
    if not isinstance(facts, dict) or not facts.get("zoo"):
        raise UserError(f"{folder} is not a checkpoint of zoo fit: it does not say what model it holds")
    sizes: dict[str, int] = {}
    for place in places:
        sizes[place.relative_path] = max(sizes.get(place.relative_path, 0), place.offset + place.length)
    for name, size in sizes.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if found < size:
            raise UserError(f"{folder} is damaged: {name} has {found:,} bytes of {size:,}; go back to an older one")
    return facts


class _Harmless(pickle.Unpickler):
    """Reads the table of contents that PyTorch pickles, and nothing that could do more than describe tensors."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        places = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
        known = {("torch", "Size"), ("torch", "device"), ("torch.serialization", "_get_layout")}
        path = module.split(".")[0] == "pathlib" and name.endswith("Path")
        if dtype or path or module in places or (module, name) in known:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which describes no tensor")


def _read_sharded(folder: Path, keys: set[str] | None = None) -> dict[str, Any]:
    """The tensors of a sharded checkpoint, whole and on the CPU: all of them, or those below ``keys``."""
    content: dict[str, Any] = {}
    try:
        planner = _EmptyStateDictLoadPlanner(keys=keys)
        _load_state_dict(content, storage_reader=FileSystemReader(folder), planner=planner, no_dist=True)
    except (*UNREADABLE, CheckpointException) as error:
        raise UserError(f"{folder} cannot be read as a checkpoint ({type(error).__name__}); it is damaged") from error
    return content


def whole_checkpoint(folder: Path) -> dict[str, Any]:
    """A sharded checkpoint as one file of the same run would be, optimizer states included.

    Raises:
        UserError: as :func:`read_facts`.
    """
    facts, content = read_facts(folder), _read_sharded(folder)
    optimizers = sorted((name for name in content if name.startswith("optimizer_")), key=lambda n: int(n[10:]))
    states = [by_place(content[name]) for name in optimizers]
    return {**facts, "state_dict": content["state_dict"], "optimizer_states": states}


def by_place(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state with parameters numbered by their place in its groups, as ``state_dict()`` has them."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    place = {name: number for number, name in enumerate(names)}
    return {
        "state": {place[name]: value for name, value in state["state"].items()},
        "param_groups": [{**g, "params": [place[name] for name in g["params"]]} for g in state["param_groups"]],
    }


# ------------------------------------------------------------------------------------------------------------ the model
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
    """Rebuild a model from a checkpoint of ``zoo fit`` or ``zoo consolidate``, without the recipe that made it.

    Args:
        path: a ``.ckpt`` file or folder, a ``.safetensors`` file, or a run's folder, whose ``last.ckpt`` is taken.
        device: where to put it.
        dtype: of the weights; decay parameters stay fp32. None: as stored.

    Raises:
        UserError: no such file, a file that is not a checkpoint of ours, or weights that do not fit.
    """
    file = Path(path)
    if file.is_dir() and (file / LAST).exists():
        file = file / LAST
    if not file.is_file() and not (file / META).is_file():
        raise UserError(f"no checkpoint at {path}; name a .ckpt file, or a run's folder with a {LAST}")
    facts, weights = _read_weights(file)
    architecture = Architecture.from_plain(facts["architecture"])
    model = architecture.build(device="meta")
    _fill_unstored(model)
    try:
        model.load_state_dict(weights, strict=True, assign=True)
    except RuntimeError as error:
        raise UserError(f"{file}: its weights do not fit the model it names: {error}") from error
    if architecture.tie:
        model.head.weight = model.embedding.weight
    model.to(device=device, dtype=dtype).eval()
    return Loaded(model, architecture, facts)


def _read_weights(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A checkpoint's record of itself, and the model's tensors by their names in :class:`zoo.model.HybridLM`."""
    if file.suffix == ".safetensors":
        return _read_safetensors(file)
    sharded = file.is_dir()
    stored = {**read_facts(file), **_read_sharded(file, {"state_dict"})} if sharded else read_checkpoint(file)
    return stored["zoo"], {
        k.removeprefix("model."): v for k, v in stored["state_dict"].items() if k.startswith("model.")
    }


def _fill_unstored(model: HybridLM) -> None:
    """Fill, on the CPU, buffers that no checkpoint holds, as they follow from the settings: RetNet's decay."""
    stored = model.state_dict().keys()
    owners = {name.rpartition(".")[0] for name, _ in model.named_buffers() if name not in stored}
    with torch.random.fork_rng(devices=[]):
        for owner in map(model.get_submodule, owners):
            owner.to_empty(device="cpu", recurse=False)
            owner.reset_parameters()  # type: ignore[operator]  # whatever else it fills is loaded behind


# -------------------------------------------------------------------------------------------------------- consolidation
def consolidate(path: str | Path, out: str | Path, *, dtype: torch.dtype | None = None) -> Loaded:
    """Write a checkpoint's weights as one safetensors file, and what they are as JSON beside it.

    The record stands in the file's own metadata too, under ``zoo``, so the file alone loads again. A tied head is
    stored once.

    Args:
        path: as in :func:`load_model`.
        out: a new file that ends in ``.safetensors``.
        dtype: of the weights; decay parameters stay fp32. None: as stored.

    Raises:
        UserError: as :func:`load_model`; a file that exists, or a name with another ending.
    """
    out = Path(out)
    if out.suffix != ".safetensors":
        raise UserError(f"--out {out}: the file's name must end in .safetensors")
    if out.exists():
        raise UserError(f"--out {out}: it exists already; name a new file")
    safetensors, loaded = _safetensors(), load_model(path, dtype=dtype)
    tensors = {name: tensor.contiguous() for name, tensor in loaded.model.state_dict().items()}
    if loaded.architecture.tie:
        del tensors["head.weight"]
    out.parent.mkdir(parents=True, exist_ok=True)
    part = part_of(out)
    try:
        safetensors.torch.save_file(tensors, part, metadata={"format": "pt", "zoo": json.dumps(loaded.facts)})
        publish(part, out)
        out.with_suffix(".json").write_text(json.dumps(loaded.facts, indent=2) + "\n", encoding="utf-8")
    except (OSError, safetensors.SafetensorError) as error:
        part.unlink(missing_ok=True)
        raise UserError(f"--out {out}: {getattr(error, 'strerror', None) or error}") from error
    return loaded


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise UserError(
            f"safetensors files need a package that is not here ({error}): pip install 'hybrid-zoo[safetensors]'"
        ) from error
    return safetensors


def _read_safetensors(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    safetensors = _safetensors()
    try:
        with safetensors.safe_open(file, framework="pt") as stored:
            record = (stored.metadata() or {}).get("zoo")
            weights = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  # no mapping
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read as safetensors ({error}); it may be cut short") from error
    if record is None:
        raise UserError(f"{file} does not come from zoo consolidate: it does not say what model it holds")
    facts = json.loads(record)
    if facts["architecture"]["tie"]:
        weights["head.weight"] = weights["embedding.weight"]
    return facts, weights
