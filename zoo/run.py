"""A training run on disk: one folder, its recipe, its checkpoints, its metrics; and how the budget becomes steps."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from zoo.errors import UserError

LAST, BEST = "last.ckpt", "best.ckpt"


@dataclass(frozen=True)
class Budget:
    """How much a run may read.

    Args:
        batch_tokens: tokens per optimizer step, over all devices.
        tokens: training tokens of the whole run. None: ``trainer.max_steps`` says how long it is.

    Raises:
        UserError: a number below 1.
    """

    batch_tokens: int
    tokens: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("tokens", self.tokens), ("batch_tokens", self.batch_tokens)):
            if value is not None and value < 1:
                raise UserError(f"budget.{name} must be at least 1, got {value}")

    @property
    def steps(self) -> int | None:
        """Optimizer steps that read at least ``tokens`` tokens; None where no tokens are given."""
        return None if self.tokens is None else -(-self.tokens // self.batch_tokens)


def refuse_to_overwrite(folder: Path, resumed: str | None) -> None:
    """Stop before a new run would write over an older one.

    Args:
        folder: where the run keeps its checkpoints.
        resumed: the checkpoint that the run starts from, if any.

    Raises:
        UserError: the folder holds a run, and this is not its continuation.
    """
    if resumed is None and (folder / LAST).exists():
        raise UserError(
            f"{folder} already holds a run ({LAST}). Go on with it: --ckpt_path last. Or keep it and begin another: "
            "--trainer.default_root_dir FOLDER"
        )


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """All logged rows of a run's training, by step, over its interruptions.

    A run that went on wrote a second file. Where both hold a step, the later file counts: its beginning is the
        checkpoint that
    it went on from, and what the earlier one logged behind that is lost work. What ``zoo validate`` and ``zoo test``
    logged stands in files of its own, at step 0 whatever the checkpoint, and is left out.

    Args:
        folder: the run's folder, with ``logs/version_N/metrics.csv`` inside.

    Returns:
        One dictionary a step, from metric to value, ordered by step. Empty where nothing was logged.
    """
    rows: dict[int, dict[str, float]] = {}
    versions = sorted(
        folder.glob("logs/version_*/metrics.csv"), key=lambda p: int(p.parent.name.removeprefix("version_"))
    )
    for path in versions:
        with path.open(newline="", encoding="utf-8") as file:
            read = [{k: float(v) for k, v in row.items() if v not in ("", None)} for row in csv.DictReader(file)]
        if not any("train/loss" in row or int(row["step"]) > 0 for row in read):
            continue
        first = min(int(row["step"]) for row in read)
        rows = {step: row for step, row in rows.items() if step < first}
        for row in read:
            rows.setdefault(int(row["step"]), {}).update(row)
    return [rows[step] for step in sorted(rows)]
