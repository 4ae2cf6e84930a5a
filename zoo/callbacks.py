"""What a run tells while it runs: what it trains, how fast, and how much of the hardware that takes."""

from __future__ import annotations

import csv
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info

from zoo.module import HybridLMModule
from zoo.optim import parameter_groups
from zoo.run import BEST

# Dense bf16 and fp16 matrix FLOP/s by a word of the device's name, from the vendor's datasheets. Lightning's own table
# misses the plain name "NVIDIA H200", which is what the driver says.
HALF_PEAKS = {"B200": 2.25e15, "H200": 9.89e14, "H100": 9.89e14, "A100": 3.12e14, "L40S": 3.62e14}

RECENT = 50  # timings that the pace is taken from: enough to be steady, few enough to follow a change


def known_peak(device_name: str, precision: str) -> float | None:
    """Dense FLOP/s of a device at a precision such as ``bf16-mixed``; None where it is not known.

    fp32 has no entry: its rate depends on whether products run in tf32.
    """
    if not precision.startswith(("bf16", "16")):
        return None
    return next((peak for word, peak in HALF_PEAKS.items() if word in device_name), None)


class RunHeader(Callback):
    """Print, once, what is about to be trained: layers, parameters, optimizer groups, and the run's length."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(pl_module, HybridLMModule):
            return
        model, counts = pl_module.built(), pl_module.built().parameter_counts()
        groups = parameter_groups(model.named_parameters())
        sizes = {group["name"]: sum(p.numel() for p in group["params"]) for group in groups}
        for notice in pl_module.architecture.notices:
            rank_zero_info(notice)
        rank_zero_info(
            f"{pl_module.architecture.canonical}: {len(model.blocks)} layers, d_model {model.d_model}, d_ff "
            f"{model.d_ff}; "
            f"{counts.total:,} parameters, {counts.non_embedding:,} without embedding and head"
            f"{f' and a decoder of {counts.decoder:,}' if counts.decoder else ''}; "
            f"weight decay on {sizes.get('decay', 0):,}, none on {sizes.get('no_decay', 0):,}"
        )


class Throughput(Callback):
    """Log ``tok/s``, ``mfu`` where the device's peak is known, and ``gpu_peak_gib`` on a GPU.

    Tokens are labels that count, so padding does not flatter. MFU is the model's own training FLOPs (three times the
    forward) at the context length of the data, over the dense peak of the compute type. Validating and saving are left
    out of both. ``gpu_peak_gib`` is the most that PyTorch had allocated at once since the step that was logged before,
    validation included, on the rank where it was most.

    Args:
        peak_flops: FLOP/s of the device at the run's precision. None: HALF_PEAKS; on a device that is not in it no MFU
            is logged.
        skip: optimizer steps at the start that are not timed: compilation and warm-up.
    """

    def __init__(self, peak_flops: float | None = None, skip: int = 5):
        if peak_flops is not None and peak_flops <= 0:
            raise ValueError(f"Throughput: peak_flops must be above 0, got {peak_flops}")
        if skip < 0:
            raise ValueError(f"Throughput: skip must be at least 0, got {skip}")
        self.peak_flops, self.skip = peak_flops, skip
        self.tokens = self.seconds = 0.0
        self.total_tokens = self.total_seconds = 0.0
        self.peak_bytes = 0
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._at, self._steps = -1, 0
        self._pending, self._batches, self._mark = 0, 0, None  # tokens and micro-batches of this rank since the mark
        self._flops_per_token = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.peak_flops is None and pl_module.device.type == "cuda":
            name = torch.cuda.get_device_name(pl_module.device)
            self.peak_flops = known_peak(name, str(trainer.strategy.precision_plugin.precision))
        if isinstance(pl_module, HybridLMModule):
            context = int(getattr(getattr(trainer, "datamodule", None), "seq_len", 0) or 1)
            self._flops_per_token = 3 * pl_module.built().flops_per_token(context)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._at = trainer.global_step
        if self._mark is None:
            _wait(pl_module)
            self._mark = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._pending += int(batch["tokens"])
        self._batches += 1
        if trainer.global_step == self._at:  # between the micro-batches of a step
            return
        self._steps += 1
        if self._steps == self.skip:
            self._restart()
        settled: Any = trainer  # its connectors set log_every_n_steps, which no annotation tells
        every = settled.log_every_n_steps
        logged = every and trainer.global_step % every == 0
        if self._steps > self.skip and (logged or trainer.global_step == trainer.max_steps):
            self._take(pl_module)

    def _take(self, pl_module: LightningModule) -> None:
        _wait(pl_module)
        now = time.perf_counter()
        seconds = now - (self._mark if self._mark is not None else now)
        if seconds > 0 and self._pending:
            rate = self._pending * pl_module.trainer.world_size / seconds
            pl_module.log("tok/s", rate, prog_bar=True)
            if self.peak_flops and self._flops_per_token:
                share = rate * self._flops_per_token / (self.peak_flops * pl_module.trainer.world_size)
                pl_module.log("mfu", share, prog_bar=True)
            self.total_tokens += self._pending * pl_module.trainer.world_size
            self.total_seconds += seconds
            self._recent.append((self._batches / pl_module.trainer.accumulate_grad_batches, seconds))
        if pl_module.device.type == "cuda":
            self._log_peak(pl_module)
        self._restart()

    def _log_peak(self, pl_module: LightningModule) -> None:
        peak = torch.cuda.max_memory_allocated(pl_module.device)
        torch.cuda.reset_peak_memory_stats(pl_module.device)
        self.peak_bytes = max(self.peak_bytes, peak)
        own = torch.tensor(peak / 2**30, device=pl_module.device)
        pl_module.log("gpu_peak_gib", pl_module.trainer.strategy.reduce(own, reduce_op="max"))

    def _restart(self) -> None:
        self._pending, self._batches, self._mark = 0, 0, None

    # Validation, checkpoints and whatever else stands between two batches is no training time.
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restart()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._restart()

    @property
    def pace(self) -> float | None:
        """Seconds of an optimizer step over the last timed ones; None before the first."""
        steps = sum(steps for steps, _ in self._recent)
        return sum(seconds for _, seconds in self._recent) / steps if steps else None

    @property
    def mean_rate(self) -> float | None:
        """Tokens per second over all timed steps; None before the first."""
        return self.total_tokens / self.total_seconds if self.total_seconds else None


class WritePredictions(Callback):
    """Write what ``zoo predict`` finds as predictions.csv in the run's folder: one line a document.

    Columns: ``document`` counts on over all batches, ``tokens`` are the labels that count, ``nll`` their sum in nats.
    """

    def __init__(self) -> None:
        self.rows: dict[int, tuple[int, float]] = {}  # a long document comes in several batches

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        for document, tokens, nll in zip(*(outputs[key].tolist() for key in ("documents", "tokens", "nll"))):
            before = self.rows.get(document, (0, 0.0))
            self.rows[document] = (before[0] + tokens, before[1] + nll)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        path = Path(trainer.default_root_dir) / "predictions.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["document", "tokens", "nll"])
            counted = [(name, tokens, nll) for name, (tokens, nll) in sorted(self.rows.items()) if tokens]
            writer.writerows((name, tokens, f"{nll:.6f}") for name, tokens, nll in counted)
        rank_zero_info(f"losses of {len(counted)} documents in {path}")


class Best(ModelCheckpoint):
    """Keep the best checkpoint so far as ``best.ckpt`` in the run's folder, judged at every validation.

    Args:
        metric: a logged metric of the validation.
        mode: min or max, whichever is better.
    """

    def __init__(self, metric: str = "val/loss", mode: str = "min"):
        super().__init__(
            filename=BEST.removesuffix(".ckpt"),
            monitor=metric,
            mode=mode,
            save_top_k=1,
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Without a folder of its own, the run's."""
        self.dirpath = self.dirpath or trainer.default_root_dir
        super().setup(trainer, pl_module, stage)


def _wait(pl_module: LightningModule) -> None:
    if pl_module.device.type == "cuda":
        torch.cuda.synchronize(pl_module.device)
