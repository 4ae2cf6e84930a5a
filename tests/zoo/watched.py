"""Callbacks that disturb or listen to the runs of test_watch_*.py; class paths of recipes name them."""

from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback


class Jolt(Callback):
    """Before step ``step``, the head's weights are scaled up, which makes the loss jump; after it they are put back."""

    def __init__(self, step: int):
        self.step = step
        self.kept: torch.Tensor | None = None

    @torch.no_grad()
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        weight = pl_module.built().head.weight
        weight = getattr(weight, "_local_tensor", weight)
        if trainer.global_step == self.step and self.kept is None:
            self.kept = weight.clone()
            weight.mul_(60)
        elif trainer.global_step == self.step + 1 and self.kept is not None:
            weight.copy_(self.kept)
            self.kept = None


class Seen(Callback):
    """Keeps what each micro-batch of step ``step`` was trained on."""

    batches: ClassVar[list[torch.Tensor]] = []

    def __init__(self, step: int):
        self.step = step
        self.batches.clear()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            self.batches.append(batch["input_ids"].clone())


class Clock(Callback):
    """A clock on which a step takes 10 seconds, a validation 1,000, a save 5,000; and the bar's line at each step."""

    now = 0.0
    lines: ClassVar[dict[int, dict[str, Any]]] = {}

    def __init__(self) -> None:
        self.lines.clear()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        Clock.now += 10 / trainer.accumulate_grad_batches

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        Clock.now += 1_000

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        Clock.now += 5_000

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.lines[trainer.global_step] = trainer.progress_bar_callback.get_metrics(trainer, pl_module)
