"""Lightning's progress bars with the line of a long run: loss, speed, tokens done of the budget, and the time left."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from lightning.pytorch.trainer.states import TrainerFn

from zoo.callbacks import Throughput

EVERY = 0.5  # seconds between two looks at a run's figures: each makes the host wait for the device
UNITS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))


class TokenLine(ProgressBar):
    """What our bars show while they train: figures that are logged for a bar, and where the run stands in its budget.

    Tokens done follow from the step, so they are exact in a run that goes on. The time left is that of training alone:
    steps that are left, at the pace of the last ones that were timed, validation and saving left out.
    """

    _line: dict[str, Any] | None = None
    _read = 0.0

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """The figures of the bar, name by name; read anew only twice a second."""
        if trainer.state.fn != TrainerFn.FITTING:
            return super().get_metrics(trainer, pl_module)
        now = time.monotonic()
        if self._line is None or now - self._read >= EVERY or trainer.global_step == trainer.max_steps:
            self._line, self._read = self._figures(trainer, super().get_metrics(trainer, pl_module)), now
        return self._line

    @staticmethod
    def _figures(trainer: Any, logged: dict[str, Any]) -> dict[str, Any]:
        logged.pop("v_num", None)
        line = {"loss": f"{loss:.3f}"} if (loss := logged.pop("train/loss", None)) is not None else {}
        if (rate := logged.pop("tok/s", None)) is not None:
            line["tok/s"] = short(rate)
        if (share := logged.pop("mfu", None)) is not None:
            line["mfu"] = f"{share:.1%}"
        per_step = getattr(getattr(trainer, "datamodule", None), "batch_tokens", None)
        if per_step is not None:
            done = short(trainer.global_step * per_step)
            whole = f"/{short(trainer.max_steps * per_step)}" if trainer.max_steps > 0 else ""
            line["tokens"] = f"{done}{whole}"
        pace = next((each.pace for each in trainer.callbacks if isinstance(each, Throughput)), None)
        if pace is not None and trainer.max_steps > 0:
            line["left"] = duration(pace * max(0, trainer.max_steps - trainer.global_step))
        return {**line, **logged}


class RichBar(TokenLine, RichProgressBar):
    """Lightning's RichProgressBar with tokens and the time left; what a run shows unless told otherwise."""

    def _get_train_description(self, current_epoch: int) -> str:
        return f"Epoch {current_epoch}"  # Lightning's says "0/-2" where steps and not epochs end the run


class TQDMBar(TokenLine, TQDMProgressBar):
    """Lightning's TQDMProgressBar with tokens and the time left."""


def short(count: float) -> str:
    """A count in three digits: 655360 as ``655k``."""
    for unit, size in UNITS:
        if count >= 0.9995 * size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def duration(seconds: float) -> str:
    """A time in its two largest units: ``3 d 4 h``, ``2 h 5 min``, ``7 min 30 s``, ``12 s``."""
    whole = round(seconds)
    for large, size, small, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {large} {whole % size // part} {small}"
    return f"{whole} s"
