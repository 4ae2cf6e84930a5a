"""What trained models are measured on besides the validation of their run: other rows, and the loss by position."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from zoo.comparison.arm import instantiate
from zoo.comparison.plan import Reading, Run
from zoo.loss import IGNORED, token_nll
from zoo.module import HybridLMModule
from zoo_kernels.packing import Packing


class PositionLoss(Callback):
    """The loss by how many tokens of its document, the separator too, a label has before it; one device.

    Every batch is read a second time: the module's own metric keeps one sum over all positions.

    Args:
        edges: rising; a bucket reaches from the edge before it, excluded, to its own.
    """

    def __init__(self, edges: Sequence[int]):
        self.edges = tuple(edges)
        self.nll = torch.zeros(len(self.edges), dtype=torch.float64)
        self.tokens = torch.zeros(len(self.edges), dtype=torch.float64)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Add a batch; the third of Lightning's arguments."""
        self._add(trainer, pl_module, args[1])

    def on_test_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """The same for the test split."""
        self._add(trainer, pl_module, args[1])

    def _add(self, trainer: Trainer, module: LightningModule, batch: Any) -> None:
        if not isinstance(module, HybridLMModule):
            raise TypeError(f"PositionLoss reads HybridLMModule, not {type(module).__name__}")
        model, labels, packing = module.built(), batch["labels"], batch.get("packing")
        seen = positions(labels, packing)
        with torch.no_grad(), trainer.precision_plugin.val_step_context():
            hidden = model.hidden(batch["input_ids"], packing=packing)
            for index, (low, high) in enumerate(pairwise((0, *self.edges))):
                own = labels.masked_fill((seen <= low) | (seen > high), IGNORED)
                nll, tokens = token_nll(hidden, model.head.weight, own)
                self.nll[index] += nll.double().cpu()
                self.tokens[index] += tokens.cpu()

    def figures(self) -> dict[str, float]:
        """``loss_to_EDGE`` in nats per token and ``labels_to_EDGE``, of the buckets that hold a label."""
        found: dict[str, float] = {}
        for edge, nll, tokens in zip(self.edges, self.nll.tolist(), self.tokens.tolist()):
            found |= {f"loss_to_{edge}": nll / tokens, f"labels_to_{edge}": tokens} if tokens else {}
        return found


def positions(labels: Tensor, packing: Packing | None) -> Tensor:
    """How many tokens of its own document, its input too, stand before each label: 1 at a document's start; [B, T]."""
    place = torch.arange(labels.shape[1], device=labels.device).expand_as(labels)
    if packing is None:
        return place + 1
    starts = packing.cu_seqlens[:-1].long()
    return place - starts[torch.bucketize(place, packing.cu_seqlens[1:].long(), right=True)] + 1


ROWS = "rows.npz"  # beside a run's status: by reading, the share of its labels that each row has right


def read_rows(folder: Path) -> dict[str, np.ndarray]:
    """What :func:`read` has kept of a run, row by row, by reading; empty where its data is no task."""
    path = folder / ROWS
    if not path.is_file():
        return {}
    with np.load(path) as stored:
        return {name: stored[name] for name in stored.files}


def read_all(cli: Any, run: Run, given: Sequence[str], readings: Sequence[Reading], folder: Path) -> dict[str, float]:
    """Every reading, one after another; rows are kept in the run's folder, where the data is a task.

    Args:
        cli, run, given: as :func:`read`.

    Returns:
        figures by ``READING/METRIC``.
    """
    figures, rows = {}, {}
    for reading in readings:
        figures |= read(cli, run, given, reading)
        if (shares := cli.model.row_shares.get(reading.split)) is not None:
            rows[reading.name] = shares.numpy()
    if rows and cli.trainer.world_size == 1:  # each of several processes has only its own
        np.savez_compressed(folder / ROWS, **rows)
    return figures


def read(cli: Any, run: Run, given: Sequence[str], reading: Reading) -> dict[str, float]:
    """The trained model on the split of other data settings; nothing of the run changes.

    Args:
        cli: of the run, its model trained.
        given: the run's settings.

    Returns:
        figures by ``READING/METRIC``.
    """
    other = instantiate(run.arm.recipe, [*given, "--trainer.logger=false", *reading.settings])
    # Rows of another length have other slices; the module takes the metric of the data that it meets next.
    cli.model.scores, cli.model.row_shares = {}, {}
    tester: Any = other.trainer
    by_position = PositionLoss(reading.edges) if reading.edges else None
    tester.callbacks += [by_position] if by_position is not None else []
    evaluate = tester.validate if reading.split == "val" else tester.test
    (found,) = evaluate(cli.model, datamodule=other.datamodule, verbose=False)
    figures = {name.removeprefix(f"{reading.split}/"): value for name, value in found.items()}
    figures |= by_position.figures() if by_position is not None else {}
    return {f"{reading.name}/{name}": value for name, value in figures.items()}
