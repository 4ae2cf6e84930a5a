"""What ends a run before its time: a gradient that is not finite, and a scheduler that wants the machine back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zoo.model import HybridLM
from zoo.module import HybridLMModule, inputs_of
from zoo.run import LAST
from zoo.sharding import gradient_norm


class NonFiniteError(RuntimeError):
    """A gradient that is NaN or infinite; raised on every rank before the optimizer sees it."""


class NonFiniteGuard(Callback):
    """Stop before a gradient that is not finite reaches the weights, and name the first layer that went wrong.

    The look at the gradient makes the host wait for the device. Where losses are scaled (16-mixed) the scaler skips
    such steps, as it is meant to, and the guard stands aside.

    Args:
        every_n_steps: how often to look. 0: never.

    Attributes:
        norm: of this step's gradient, before the module divides it by the step's tokens; None where there was no look.
    """

    def __init__(self, every_n_steps: int = 1):
        if every_n_steps < 0:
            raise ValueError(f"NonFiniteGuard: every_n_steps must be at least 0, got {every_n_steps}; 0 never looks")
        self.every_n_steps = every_n_steps
        self.norm: Tensor | None = None
        self._step, self._batches = -1, []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self._step:
            self._step, self._batches, self.norm = trainer.global_step, [], None
        self._batches.append(batch)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if not self.every_n_steps or trainer.global_step % self.every_n_steps:
            return
        if getattr(trainer.precision_plugin, "scaler", None) is not None or not isinstance(pl_module, HybridLMModule):
            return
        self.norm = gradient_norm(pl_module, trainer.strategy)
        if torch.isfinite(self.norm):
            return
        rank, _, what = min(self._findings(trainer, pl_module), key=lambda finding: finding[1])
        where = f" on rank {rank}" if trainer.world_size > 1 else ""
        raise NonFiniteError(
            f"step {trainer.global_step}: the gradient is not finite; {what}{where}. The weights are still those of "
            "the step before. Go on from a checkpoint with a lower learning rate or a lower trainer.gradient_clip_val"
        )

    def _findings(self, trainer: Trainer, module: HybridLMModule) -> list[tuple[int, int, str]]:
        """(rank, place, finding) of every rank; places count in the order in which numbers pass the model, and back."""
        mine = (trainer.global_rank, *self._first_bad(trainer, module))
        every: list[Any] = [mine]
        if trainer.world_size > 1:
            every = [None] * trainer.world_size
            dist.all_gather_object(every, mine)
        return every

    @torch.no_grad()
    def _first_bad(self, trainer: Trainer, module: HybridLMModule) -> tuple[int, str]:
        model = module.built()
        parts = list(_parts(model))
        for place, (name, part) in enumerate(parts):
            if not all(_finite(parameter) for parameter in part.parameters()):
                return place, f"first bad layer: {name}, whose weights were not finite before it"
        outputs: dict[int, bool] = {}
        hooks = [part.register_forward_hook(_note(outputs, place)) for place, (_, part) in enumerate(parts)]
        try:
            for batch in self._batches:
                with trainer.precision_plugin.train_step_context():
                    model.nll(*inputs_of(batch))
        finally:
            for hook in hooks:
                hook.remove()
        count = len(parts)
        for place, (name, _) in enumerate(parts):
            if not outputs.get(place, True):
                return count + place, f"first bad layer: {name}, whose output is not finite"
        # Backward passes run from the last layer to the first, and what they spoil stays spoiled.
        for back, (name, part) in enumerate(reversed(parts)):
            if not all(_finite(p.grad) for p in part.parameters() if p.grad is not None):
                return 2 * count + back, f"first bad layer: {name}, in the backward pass; all outputs are finite"
        return 3 * count, "no layer was found alone; the sum of its squares is too large for fp32"


def _parts(model: HybridLM) -> Iterator[tuple[str, nn.Module]]:
    """The parts that a token passes, in order, with names for a reader."""
    yield "the embedding", model.embedding
    for number, (layer, block) in enumerate(zip(model.layers, model.each_block()), start=1):
        yield f"layer {number} ({layer.mixer})", block
    yield "the last norm", model.norm
    if not model.tie:
        yield "the head", model.head


def _note(outputs: dict[int, bool], place: int) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        outputs[place] = outputs.get(place, True) and _finite(output)

    return hook


def _finite(tensor: Tensor) -> bool:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return bool(torch.isfinite(local).all())


class SaveOnSignal(Callback):
    """At SIGTERM, finish the step, save ``last.ckpt``, and end with 143; any rank's signal stops all of them.

    A validation under way is given up. Schedulers send the signal some seconds before they kill. A run that comes to
    its end is saved too, where its last step is none that is saved anyhow.
    """

    def __init__(self) -> None:
        self._asked, self._saved, self._step = False, False, -1
        self._before: Any = None
        self._group: Any = None

    def ask(self) -> bool:
        """As if the signal had come; False: it has."""
        first, self._asked = not self._asked, True
        return first

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._asked, self._saved, self._step = bool(trainer.received_sigterm), False, trainer.global_step
        # A group of the host's own: Lightning's handler talks between ranks wherever the signal finds them, and may
        # meet them inside another exchange.
        self._group = dist.new_group(backend="gloo") if trainer.world_size > 1 else None
        if threading.current_thread() is threading.main_thread():

            def note(number: int, frame: FrameType | None) -> None:
                launcher: Any = trainer.strategy.launcher
                if launcher is not None and not self._asked:
                    launcher.kill(number)  # a scheduler knows of this process only
                self._asked = True

            self._before = signal.signal(signal.SIGTERM, note)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step != self._step:  # not between the micro-batches of a step
            self._step = trainer.global_step
            if self._agreed():
                self._saved = True
                self._save(trainer)
                rank_zero_info(f"SIGTERM: saved step {trainer.global_step}; go on with --ckpt_path last")
            elif trainer.global_step == trainer.max_steps:
                self._save(trainer, but_every=True)

    # Only now has the step been logged.
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._saved:
            self._leave(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._saved:
            self._leave(trainer)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking and self._agreed():
            # Else the resumed run would measure the rest alone, and log that as the whole.
            trainer.fit_loop.epoch_loop.val_loop.increment_progress_to_evaluation_end()
            self._save(trainer)
            rank_zero_info(f"SIGTERM: saved step {trainer.global_step}; go on with --ckpt_path last")
            self._leave(trainer)

    def _agreed(self) -> bool:
        asked = torch.tensor(int(self._asked))
        if self._group is not None:
            dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=self._group)
        return bool(asked)

    def _save(self, trainer: Trainer, *, but_every: bool = False) -> None:
        """Write ``last.ckpt``; ``but_every``: unless the checkpoint callback itself is about to."""
        for keeper in trainer.checkpoint_callbacks:
            if not isinstance(keeper, ModelCheckpoint) or not keeper.save_last or keeper.dirpath is None:
                continue
            every = keeper._every_n_train_steps
            if not (but_every and every and trainer.global_step % every == 0):
                trainer.save_checkpoint(Path(keeper.dirpath) / LAST, weights_only=False)

    def _leave(self, trainer: Trainer) -> NoReturn:
        self._restore()
        environment = getattr(trainer.strategy, "cluster_environment", None)
        if isinstance(environment, LightningEnvironment) and trainer.global_rank > 0:
            # Lightning kills the first process where one that it started ends with anything but 0.
            raise SystemExit(0)
        raise SIGTERMException()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore()

    def _restore(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None
