"""HybridLMModule: how a hybrid trains under Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, field, make_dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torchmetrics import Metric

from zoo import __version__
from zoo.architecture import Architecture, settle
from zoo.errors import UserError
from zoo.loss import IGNORED
from zoo.metrics import TokenLoss
from zoo.model import HybridLM
from zoo.optim import BudgetSchedule, WarmupCosine, parameter_groups
from zoo_layers.mixer import registered

# One mapping per registered mixer. A dict of dicts would do, but jsonargparse loses its sibling options on the command
# line: of `--model.mixers.SWA.window 64 --model.mixers.SWA.heads 2` only the last would arrive.
MixerSettings = make_dataclass(
    "MixerSettings",
    [(name, dict[str, bool | int | float | str | None], field(default_factory=dict)) for name in registered()],
    frozen=True,
)
MixerSettings.__doc__ = "Options by mixer, for layers of the pattern that do not give their own."


def default_optimizer(groups: Iterable[Any]) -> Optimizer:
    """AdamW, 1e-3, betas 0.9 and 0.95, decay 0.1."""
    return AdamW(groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


class HybridLMModule(pl.LightningModule):
    """A hybrid language model under training.

    Nothing is allocated before ``configure_model``. The loss is the negative log likelihood per label that counts; what
    validation logs is summed over tokens, never averaged over batches.

    Args:
        pattern: a line such as ``GDN,SWA``, or the list form of docs/patterns.md.
        preset: a name of ``zoo presets``; every setting below overrides the preset's.
        n_layers: depth. None: the preset's, or once through the pattern.
        d_model: width of the residual stream.
        vocab_size: number of token ids; the data module sets it on the command line.
        mlp: the MLP of layers that name none: swiglu, gelu or none.
        d_ff: width of the MLPs. None: the preset's, or 8/3 of d_model, rounded up.
        tie: use the embedding as the head.
        mixers: options by mixer name, for layers that do not give their own.
        optimizer: a class path with settings, or a callable that takes parameter groups. Default: AdamW, 1e-3, betas
            0.9 and 0.95, decay 0.1.
        lr_scheduler: likewise; it is stepped once per optimizer step. Default: WarmupCosine.
        total_steps: optimizer steps that the schedule spans; the budget sets it on the command line. None: the
            trainer's ``max_steps``.

    Raises:
        PatternError, SpecError, ValueError: at construction, before anything is allocated.
    """

    def __init__(
        self,
        pattern: str | list[str | dict[str, Any]] | None = None,
        preset: str | None = None,
        *,
        n_layers: int | None = None,
        d_model: int | None = None,
        vocab_size: int | None = None,
        mlp: str | None = None,
        d_ff: int | None = None,
        tie: bool | None = None,
        mixers: MixerSettings = MixerSettings(),  # noqa: B008  # pyright: ignore[reportInvalidTypeForm]
        optimizer: OptimizerCallable = default_optimizer,
        lr_scheduler: LRSchedulerCallable = WarmupCosine,
        total_steps: int | None = None,
    ):
        super().__init__()
        given = dict(mixers) if isinstance(mixers, Mapping) else asdict(mixers)
        self.architecture: Architecture = settle(
            pattern=pattern,
            preset=preset,
            n_layers=n_layers,
            d_model=d_model,
            vocab_size=vocab_size,
            mlp=mlp,
            d_ff=d_ff,
            tie=tie,
            mixers={name: options for name, options in given.items() if options},
        )
        self.optimizer_of: Callable[..., Optimizer] = optimizer
        self.scheduler_of: Callable[..., Any] = lr_scheduler
        self.total_steps = total_steps
        # Plain types only, so that checkpoints load weights-only; optimizer and schedule are the recipe's to tell.
        self.save_hyperparameters({**self.architecture.to_plain(), "total_steps": total_steps})
        self.model: HybridLM | None = None
        self.tokens_seen = 0
        self.losses: dict[str, Metric] = {stage: TokenLoss() for stage in ("val", "test")}
        self.scores: dict[str, Metric] = {}  # accuracies, where the data is a task

    def setup(self, stage: str) -> None:
        """Take the task's own metric from the data module, where it has one."""
        new_score = getattr(getattr(self.trainer, "datamodule", None), "new_score", None)
        if new_score is not None and not self.scores:
            self.scores = {name: new_score() for name in self.losses}

    # --------------------------------------------------------------------------------------------------------- building
    def configure_model(self) -> None:
        """Build the model; sharded if the strategy has a mesh of devices. Calling it twice is harmless."""
        if self.model is not None:
            return
        # The mesh of ModelParallelStrategy; other strategies have none.
        mesh = getattr(self, "_device_mesh", None)
        if mesh is None:
            self.model = self.architecture.build()
            return
        from zoo.sharding import shard

        if self.architecture.tie:
            raise UserError("tied embeddings cannot be sharded yet: set model.tie to false, or train on one device")
        model = self.architecture.build(device="meta")
        shard(model, mesh["data_parallel"])
        model.materialise(self.device)
        model.reset()
        self.model = model

    def built(self) -> HybridLM:
        """The model.

        Raises:
            RuntimeError: before ``configure_model``.
        """
        if self.model is None:
            raise RuntimeError(
                "HybridLMModule: the model is not built yet; call configure_model(), or let a Trainer do it"
            )
        return self.model

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer over two parameter groups, and its schedule, stepped every optimizer step."""
        optimizer = self.optimizer_of(parameter_groups(self.built().named_parameters()))
        scheduler = self.scheduler_of(optimizer)
        if isinstance(scheduler, BudgetSchedule):
            steps = self.total_steps if self.total_steps is not None else self.trainer.max_steps
            if steps < 1:
                raise UserError(
                    "the schedule needs the length of the run: give budget.tokens, or trainer.max_steps, or total_steps"
                )
            scheduler.begin(steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    # --------------------------------------------------------------------------------------------------------- training
    def forward(self, input_ids: Tensor, packing: Any = None) -> Tensor:
        """Logits [B, T, vocab_size]."""
        return self.built()(input_ids, packing=packing)

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        """Mean negative log likelihood over the labels of one batch that count, in nats."""
        nll, tokens = self.built().nll(batch["input_ids"], batch["labels"], batch.get("packing"))
        # A batch without a label has loss 0 and gradient 0, not 0 / 0.
        loss = nll / tokens.clamp(min=1)
        self.tokens_seen += int(batch["tokens"])
        self.log("train/loss", loss, prog_bar=True, sync_dist=self.trainer.world_size > 1)
        return loss

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Log the norm of the whole gradient before clipping, on steps that are logged."""
        trainer: Any = self.trainer  # its connectors set log_every_n_steps, which no annotation tells
        if trainer.log_every_n_steps and trainer.global_step % trainer.log_every_n_steps == 0:
            norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
            self.log("grad_norm", torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm())

    # ------------------------------------------------------------------------------------------------------- evaluation
    def validation_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def on_validation_epoch_end(self) -> None:
        self._report("val")

    def on_test_epoch_end(self) -> None:
        self._report("test")

    def _evaluate(self, batch: Mapping[str, Any], stage: str) -> None:
        ids, labels, packing = batch["input_ids"], batch["labels"], batch.get("packing")
        nll, tokens = self.built().nll(ids, labels, packing)
        self.losses[stage].to(nll.device).update(nll, tokens, batch.get("bytes"))
        if self.scores:
            answers = self.built()(ids, packing=packing).argmax(-1)
            self.scores[stage].to(nll.device).update(answers, labels, batch["slices"], batch["stale"])

    def _report(self, stage: str) -> None:
        for metric in (self.losses[stage], *([self.scores[stage]] if self.scores else [])):
            for name, value in metric.compute().items():
                self.log(f"{stage}/{name}", value.float(), prog_bar=name in ("loss", "bpb", "accuracy"))
            metric.reset()

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int) -> dict[str, Tensor]:
        """Losses by document (by row, where data has none): ``documents``, ``nll`` in nats, ``tokens``, each [N]."""
        labels, packing = batch["labels"], batch.get("packing")
        logits = self.built()(batch["input_ids"], packing=packing)
        nll = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="none")
        counted = (labels != IGNORED).flatten()
        documents = batch.get("documents")
        if documents is None:
            rows = torch.arange(labels.shape[0], device=labels.device) + batch_idx * labels.shape[0]
            documents = rows.unsqueeze(-1).expand_as(labels)
        names, place = documents.flatten().unique(return_inverse=True)
        empty = nll.new_zeros(len(names))
        return {
            "documents": names,
            "nll": empty.index_add(0, place, nll),
            "tokens": empty.index_add(0, place, counted.to(nll.dtype)).long(),
        }

    # ------------------------------------------------------------------------------------------------------ checkpoints
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what rebuilds the model without this class: plain types only."""
        data = getattr(self.trainer, "datamodule", None) if self._trainer is not None else None
        checkpoint["zoo"] = {
            "version": __version__,
            "architecture": self.architecture.to_plain(),
            "canonical": self.architecture.canonical,
            "layers": self.architecture.table(),
            "tokenizer": getattr(getattr(data, "tokenizer", None), "identity", None),
            "tokens_seen": self.tokens_seen,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another architecture, naming what differs, before any tensor is touched."""
        self.architecture.check_same(checkpoint["zoo"]["architecture"])
        self.tokens_seen = checkpoint["zoo"]["tokens_seen"]
