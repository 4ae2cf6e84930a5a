"""Steps whose loss jumps, written down with the data that they were trained on."""

from __future__ import annotations

import csv
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from zoo.data.loader import TrainLoader
from zoo.module import PORTION, HybridLMModule
from zoo.watch import NonFiniteGuard

FILE = "spikes.csv"
COLUMNS = ("step", "loss", "expected", "limit", "grad_norm", "rank", "micro_batch", "first_row", "rows", "documents")
MOST_WAITING = 64  # steps that are looked at together where none is logged: one wait for the device in so many


@dataclass(frozen=True)
class Waiting:
    """A step whose loss is still on the device.

    Attributes:
        step: its number, from 0, as in metrics.csv.
        sums: [2], this rank's negative log-likelihood and tokens.
        norm: of the gradient before it was divided by the step's tokens; None where nobody looked at it.
        row: the first of its rows in the training stream; None where batches do not say.
    """

    step: int
    sums: Tensor
    norm: Tensor | None
    row: int | None


@dataclass(frozen=True)
class Spike:
    """A step whose loss was above the limit; the fields are columns of spikes.csv."""

    step: int
    loss: float
    expected: float
    limit: float
    grad_norm: float | None


class LossSpikes(Callback):
    """Find steps whose loss jumps, and write them to spikes.csv in the run's log folder with what they were trained on.

    A spike is a loss above the median of the ``window`` steps before it by more than ``k`` times their median absolute
    deviation, and by more than ``floor``; or one that is not finite. Spikes enter the window too, so a loss that stays
    up is the expected one after half a window. Every step is judged, but the host waits for the device only at steps
    that are logged, or saved: then for all steps since the last time.

    Args:
        window: steps that the expected loss is taken from; none is judged before there are so many. 0: never look.
        k: median absolute deviations above the median.
        floor: nats above the median that are no spike, however quiet the losses are.
    """

    def __init__(self, window: int = 100, k: float = 8.0, floor: float = 0.1):
        if window < 0 or window in (1, 2):
            raise ValueError(
                f"LossSpikes: window is {window}, but a median needs at least 3 steps; give 100, or 0 to look at none"
            )
        if not k > 0 or not floor >= 0:
            raise ValueError(f"LossSpikes: k must be above 0 and floor at least 0, got k {k} and floor {floor}")
        self.window, self.k, self.floor = window, k, floor
        self._losses: deque[float] = deque(maxlen=window)
        self._waiting: list[Waiting] = []
        self._step, self._row = -1, None
        self._sums: Tensor | None = None
        self._folder = Path()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Every rank must ask: the answer is broadcast.
        self._folder = Path(trainer.log_dir or trainer.default_root_dir)
        self._waiting, self._step, self._row, self._sums = [], -1, None, None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self._row = batch.get("first_row") if isinstance(batch, Mapping) else None

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if not self.window or not isinstance(pl_module, HybridLMModule) or pl_module.window is None:
            return
        # What train/loss is made of; reading the logged one would wait. A copy: the module sums over ranks in place.
        self._sums = pl_module.window.clone()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step or self._sums is None:
            return
        settled: Any = trainer  # its connectors set callbacks and log_every_n_steps, which no annotation tells
        guard = next((each for each in settled.callbacks if isinstance(each, NonFiniteGuard)), None)
        norm = guard.norm if guard is not None else None
        self._waiting.append(Waiting(self._step, self._sums, norm, self._row))
        self._sums = None
        every = settled.log_every_n_steps
        logged = every and trainer.global_step % every == 0
        if logged or len(self._waiting) == MOST_WAITING:
            self._look(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Judge what waits, as a run that goes on from here will not, and keep the window."""
        self._look(trainer)
        checkpoint["callbacks"][self.state_key] = {"losses": list(self._losses)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The window of the run that goes on."""
        self._losses = deque(state_dict["losses"], maxlen=self.window)

    # ---------------------------------------------------------------------------------------------------------- looking
    def _look(self, trainer: Trainer) -> None:
        """Judge the steps that wait; called on every rank at once."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        sums = trainer.strategy.reduce(torch.stack([each.sums for each in waiting]), reduce_op="sum")
        unseen = sums.new_tensor(math.nan)
        norms = torch.stack([unseen if each.norm is None else each.norm.to(unseen) for each in waiting])
        shares = trainer.accumulate_grad_batches * trainer.world_size
        for each, (nll, tokens, norm) in zip(waiting, torch.cat([sums, norms[:, None]], dim=1).tolist()):
            if not tokens:
                continue
            true_norm = None if each.norm is None else norm * PORTION * shares / tokens
            spike = self.judge(each.step, nll / tokens, true_norm)
            if spike is not None and trainer.is_global_zero:
                self._write(spike, shares_of(trainer.train_dataloader, each.row))

    def judge(self, step: int, loss: float, grad_norm: float | None = None) -> Spike | None:
        """The step as a spike, or None; its loss joins the window.

        Args:
            step: its number.
            loss: nats per token.
            grad_norm: of the step, where it is known.
        """
        spike = None
        if self.window and len(self._losses) == self.window:
            past = np.array(self._losses)
            expected = float(np.median(past))
            limit = expected + max(self.k * float(np.median(np.abs(past - expected))), self.floor)
            if not loss <= limit:
                spike = Spike(step, loss, expected, limit, grad_norm)
        if math.isfinite(loss):
            self._losses.append(loss)
        return spike

    def _write(self, spike: Spike, shares: list[tuple[Any, ...]]) -> None:
        path = self._folder / FILE
        new = not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        numbers = [f"{value:.6g}" for value in (spike.loss, spike.expected, spike.limit)]
        numbers.append("" if spike.grad_norm is None else f"{spike.grad_norm:.6g}")
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerows(([COLUMNS] if new else []) + [(spike.step, *numbers, *share) for share in shares])
        rank_zero_info(
            f"step {spike.step}: loss {spike.loss:.3f}, but {spike.expected:.3f} was expected, at most "
            f"{spike.limit:.3f}; what it was trained on: {path}"
        )


def shares_of(loader: Any, row: int | None) -> list[tuple[Any, ...]]:
    """The last five columns of spikes.csv for the step that reads ``row``: a line a rank and micro-batch.

    One line without them where the loader is not ours, and so does not say what a step reads.
    """
    if row is None or not isinstance(loader, TrainLoader):
        return [("",) * 5]
    count = loader.shape.micro_rows
    return [
        (rank, micro, first, count, " ".join(spans(loader.stream.documents(first, count))))
        for rank, micro, first in loader.shares(row)
    ]


def spans(numbers: np.ndarray) -> Iterator[str]:
    """Sorted whole numbers in short: 3 4 5 9 as ``3-5`` and ``9``."""
    for run in np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1):
        if len(run):
            yield str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"
