"""A sized model written down as a recipe: the reference's, with this model in it, or a small one that runs anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from zoo.architecture import Architecture
from zoo.errors import UserError

# What of a recipe's model says which model it is; the rest says how it is trained.
ARCHITECTURE = ("pattern", "preset", "n_layers", "d_model", "d_ff", "mlp", "tie", "mixers", "vocab_size")


def write_recipe(
    architecture: Architecture, path: Path, *, like: Path | None, context: int, head: list[str]
) -> dict[str, Any]:
    """Write a recipe that ``zoo fit`` trains.

    Args:
        architecture: the model. Its vocabulary is not written: training takes that from the data.
        path: a file that is not there yet.
        like: a recipe whose data, budget, optimizer and trainer it takes, with a folder of its own for the run. None:
            the Python standard library's sources as bytes, in rows of ``context``, for 1000 steps.
        head: lines of comment at its beginning.

    Returns:
        what was written.

    Raises:
        UserError: the file is there already or cannot be written, or ``like`` cannot be read.
    """
    if path.exists():
        raise UserError(f"{path} exists already, and is not overwritten; name another file, or remove it")
    recipe = _read(like) if like is not None else _small(max(context, 2))
    trained = {key: value for key, value in (recipe.get("model") or {}).items() if key not in ARCHITECTURE}
    recipe["model"] = {**_model(architecture), **trained}
    trainer = recipe.get("trainer") or {}
    recipe["trainer"] = {**trainer, "default_root_dir": f"runs/{path.stem}"}
    text = "".join(f"# {line}".rstrip() + "\n" for line in head) + yaml.safe_dump(
        recipe, sort_keys=False, default_flow_style=None
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; name another file") from error
    return recipe


def _model(architecture: Architecture) -> dict[str, Any]:
    plain = architecture.to_plain()
    if all(layer.mlp == "none" for layer in architecture.layers):
        del plain["d_ff"]
    return {key: plain[key] for key in ARCHITECTURE if key in plain and key != "vocab_size"}


def _read(path: Path) -> dict[str, Any]:
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"recipe {path} cannot be read: {error}") from error
    if not isinstance(recipe, dict):
        raise UserError(f"recipe {path} is no mapping; a recipe has the keys model, data and trainer")
    return recipe


def _small(context: int) -> dict[str, Any]:
    batch = 8 * context
    adam = {"lr": 4e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}
    return {
        "seed_everything": 1,
        "budget": {"tokens": 1000 * batch, "batch_tokens": batch},
        "model": {
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": adam},
            "lr_scheduler": {
                "class_path": "zoo.optim.WarmupCosine",
                "init_args": {"warmup_steps": 50, "end_factor": 0.1},
            },
        },
        "data": {"class_path": "zoo.data.TokenData", "init_args": {"source": "stdlib", "seq_len": context}},
        "trainer": {
            "accelerator": "auto",
            "gradient_clip_val": 1.0,
            "val_check_interval": 200,
            "check_val_every_n_epoch": None,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 10,
        },
    }
