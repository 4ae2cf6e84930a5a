"""HybridLMModule: how a hybrid trains under Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, field, make_dataclass
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.strategies import FSDPStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torchmetrics import Metric

from zoo import __version__
from zoo.architecture import Architecture, settle
from zoo.errors import UserError
from zoo.loss import IGNORED
from zoo.metrics import TaskScore, TokenLoss
from zoo.model import HybridLM
from zoo.optim import BudgetSchedule, WarmupCosine, parameter_groups
from zoo.sharding import ShardedStrategy, clip_gradients, gradient_norm, scale_gradients, shard
from zoo_layers.mixer import registered

# One mapping per registered mixer. A dict of dicts would do, but jsonargparse loses its sibling options on the command
# line: of `--model.mixers.SWA.window 64 --model.mixers.SWA.heads 2` only the last would arrive.
MixerSettings = make_dataclass(
    "MixerSettings",
    [(name, dict[str, bool | int | float | str | None], field(default_factory=dict)) for name in registered()],
    frozen=True,
)
MixerSettings.__doc__ = "Options by mixer, for layers of the pattern that do not give their own."

# A micro-batch's gradient is that of its summed loss over so many tokens, until the tokens of the whole step are known.
# A power of two, so that scaling rounds nothing; near a micro-batch's size, so that half precision does not overflow.
PORTION = 1024.0


def default_optimizer(groups: Iterable[Any]) -> Optimizer:
    """AdamW, 1e-3, betas 0.9 and 0.95, decay 0.1."""
    return AdamW(groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


def inputs_of(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, Any, int | None]:
    """What :meth:`zoo.model.HybridLM.nll` takes of a batch; of ``tokens`` a plain integer only, a tensor would wait."""
    count = batch.get("tokens")
    return batch["input_ids"], batch["labels"], batch.get("packing"), count if isinstance(count, int) else None


class HybridLMModule(pl.LightningModule):
    """A hybrid language model under training.

    Nothing is allocated before ``configure_model``. The loss is the negative log likelihood per label that counts, over
    all micro-batches and ranks of an optimizer step; what validation logs is summed over tokens likewise. Neither is
    ever a mean of means.

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
        decoder: restore whole rows from their last position instead of predicting next tokens; the data module sets it
            on the command line.
        optimizer: a class path with settings, or a callable that takes parameter groups. Default: AdamW, 1e-3, betas
            0.9 and 0.95, decay 0.1.
        lr_scheduler: likewise; it is stepped once per optimizer step. Default: WarmupCosine.
        total_steps: optimizer steps that the schedule spans; the budget sets it on the command line. None: the
            trainer's ``max_steps``.
        recompute: what the backward pass computes again instead of keeping it in memory. ``none``; ``selective``:
            norms, convolutions, gates and activations; ``full``: all of a block but its input.
        compile: compile every block with ``torch.compile``.

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
        decoder: bool = False,
        optimizer: OptimizerCallable = default_optimizer,
        lr_scheduler: LRSchedulerCallable = WarmupCosine,
        total_steps: int | None = None,
        recompute: Literal["none", "selective", "full"] = "none",
        compile: bool = False,  # the word that users look for
    ):
        super().__init__()
        if compile and recompute == "selective":
            raise UserError(
                "model.recompute selective chooses among the ops that run, and compiled blocks have none of their own: "
                "take none or full, or leave model.compile out"
            )
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
            decoder=decoder,
        )
        self.optimizer_of: Callable[..., Optimizer] = optimizer
        self.scheduler_of: Callable[..., Any] = lr_scheduler
        self.total_steps, self.recompute, self.compiled = total_steps, recompute, compile
        # Plain types only, so that checkpoints load weights-only; optimizer and schedule are the recipe's to tell.
        self.save_hyperparameters({**self.architecture.to_plain(), "total_steps": total_steps})
        self.model: HybridLM | None = None
        self.tokens_seen: int | Tensor = 0  # over all ranks
        self.window: Tensor | None = None  # summed loss and tokens of this rank's micro-batches since the last step
        self.losses: dict[str, Metric] = {stage: TokenLoss() for stage in ("val", "test")}
        self.scores: dict[str, TaskScore] = {}  # accuracies, where the data is a task
        self.row_shares: dict[str, Tensor] = {}  # of the last pass over a split, row by row, where the data is a task

    def setup(self, stage: str) -> None:
        """Take the task's own metric from the data module, where it has one.

        Raises:
            UserError: data that is to be restored and a model without a decoder, or the other way round.
        """
        data = getattr(self.trainer, "datamodule", None)
        wanted = getattr(data, "decoder", False)
        if data is not None and wanted != self.architecture.decoder:
            raise UserError(
                f"model.decoder is {self.architecture.decoder}, but the data asks for {wanted}: a decoder restores "
                "rows that it has seen whole, and everything else predicts what it has not seen; set it to "
                f"{wanted}, or take other data"
            )
        new_score = getattr(data, "new_score", None)
        if new_score is not None and not self.scores:
            self.scores = {name: new_score() for name in self.losses}

    # --------------------------------------------------------------------------------------------------------- building
    def configure_model(self) -> None:
        """Build the model; sharded if the strategy has a mesh of devices. Calling it twice is harmless.

        Raises:
            UserError: a strategy that cannot hold the model: Lightning's own ModelParallelStrategy; FSDP1 with weights
                of two types.
        """
        if self.model is not None:
            return
        strategy = self.trainer.strategy if self._trainer is not None else None
        # The mesh of ModelParallelStrategy; other strategies have none.
        sharded = getattr(self, "_device_mesh", None) is not None
        if sharded and not isinstance(strategy, ShardedStrategy):
            raise UserError(
                f"{type(strategy).__name__} numbers optimizer states in another order than one device does, so they "
                "would be resumed for other parameters; take --trainer.strategy fsdp2, which is the same and does not"
            )
        model = self.architecture.build(device="meta" if sharded else None)
        model.set_recompute(self.recompute)
        if self.compiled:
            model.compile_blocks()
        if isinstance(strategy, ShardedStrategy):
            low = torch.bfloat16 if self.trainer.precision == "bf16-mixed" else None
            shard(model, strategy.mesh, compute=low, reshard=strategy.reshard)
            model.materialise(self.device)
            model.reset()
        elif isinstance(strategy, FSDPStrategy) and len({p.dtype for p in model.parameters()}) > 1:
            raise UserError(
                f"FSDP1 flattens weights of one type only, and {self.trainer.precision} keeps decay rates in fp32; "
                "take --trainer.precision bf16-mixed, or --trainer.strategy fsdp2"
            )
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

    def on_train_start(self) -> None:
        """Forget the micro-batches of a step that an error ended."""
        self.window = None

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        """The summed loss of a micro-batch over ``PORTION``, of which ``on_before_optimizer_step`` makes a mean."""
        nll, tokens = self.built().nll(*inputs_of(batch))
        sums = torch.stack([nll.detach().double(), tokens.double()])
        self.window = sums if self.window is None else self.window + sums
        return nll / PORTION

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Divide the gradient by the tokens of the step, over all its micro-batches and ranks; log its loss."""
        trainer, window = self.trainer, self.window
        if window is None:
            raise RuntimeError("HybridLMModule: an optimizer step without a training step before it")
        nll, tokens = trainer.strategy.reduce(window, reduce_op="sum").unbind()
        self.window = None
        # A step without a label has loss 0 and gradient 0, not 0 / 0.
        counted = tokens.clamp(min=1)
        # Lightning has divided by the micro-batches of a step, and the strategy by the ranks.
        shares = trainer.accumulate_grad_batches * trainer.world_size
        scale_gradients(self.parameters(), PORTION * shares / counted)
        self.tokens_seen = self.tokens_seen + tokens.long()
        self.log("train/loss", (nll / counted).float(), prog_bar=True)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the whole gradient, alike for every strategy; log its norm before that, on steps that are logged."""
        trainer: Any = self.trainer  # its connectors set log_every_n_steps, which no annotation tells
        limit = gradient_clip_val or 0
        # Where losses are scaled (16-mixed), Lightning knows which optimizers see true gradients.
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        by_norm = limit > 0 and gradient_clip_algorithm in (None, "norm") and not scaled
        logged = trainer.log_every_n_steps and trainer.global_step % trainer.log_every_n_steps == 0
        if by_norm or logged:
            norm = gradient_norm(self, trainer.strategy)
            if logged:
                self.log("grad_norm", norm)
            if by_norm:
                clip_gradients(self, trainer.strategy, limit, norm)
        if limit > 0 and not by_norm:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

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
        if self.scores:
            nll, tokens, answers = self.built().answered(*inputs_of(batch))
            self.scores[stage].to(nll.device).update(answers, batch["labels"], batch["slices"], batch["stale"])
        else:
            nll, tokens = self.built().nll(*inputs_of(batch))
        self.losses[stage].to(nll.device).update(nll, tokens, batch.get("bytes"))

    def _report(self, stage: str) -> None:
        if self.scores:
            self.row_shares[stage] = self.scores[stage].row_shares().cpu()
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
        for logger in self.trainer.loggers if self._trainer is not None else ():
            logger.save()  # a run that goes on from here has no other record of the steps before
        checkpoint["zoo"] = {
            "version": __version__,
            "architecture": self.architecture.to_plain(),
            "canonical": self.architecture.canonical,
            "layers": self.architecture.table(),
            "tokenizer": getattr(getattr(data, "tokenizer", None), "identity", None),
            "tokens_seen": int(self.tokens_seen),
            "fsdp1": self._trainer is not None and isinstance(self.trainer.strategy, FSDPStrategy),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another model, naming what differs."""
        fitting = self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        self.check_stored(checkpoint["zoo"], self.trainer.strategy if fitting else None, resumed=fitting)
        self.tokens_seen = checkpoint["zoo"]["tokens_seen"]

    def check_stored(self, facts: Mapping[str, Any], strategy: Strategy | None, *, resumed: bool) -> None:
        """Compare with what a checkpoint says of itself.

        Args:
            facts: its record, as ``on_save_checkpoint`` makes it.
            strategy: of the run that goes on from it.
            resumed: its optimizer states are to be read too.

        Raises:
            UserError: another model; or optimizer states that only FSDP1 can read, or that FSDP1 cannot.
        """
        self.architecture.check_same(facts["architecture"])
        # Lightning numbers the states of FSDP1 in an order of its own, so that they would go to other parameters.
        if resumed and facts.get("fsdp1", False) != isinstance(strategy, FSDPStrategy):
            one, other = ("with", "without") if facts.get("fsdp1", False) else ("without", "with")
            raise UserError(
                f"the checkpoint was trained {one} FSDP1 and cannot go on {other} it; set trainer.strategy back. fsdp2 "
                "and a single device read each other's"
            )
