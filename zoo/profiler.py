"""Lightning's PyTorchProfiler as a recipe can set it, with the layers by name."""

from __future__ import annotations

import torch
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.profilers.pytorch import RegisterRecordFunction

from zoo.errors import UserError


class StepProfiler(PyTorchProfiler):
    """Lightning's PyTorchProfiler for a few batches of training: a table, and a trace for ui.perfetto.dev.

    Args:
        dirpath: the folder of both.
        wait: batches that pass first: compilation and the search for launch settings.
        warmup: batches that are recorded and thrown away, as the profiler is slow at first.
        active: batches that are looked at. A batch is a micro-batch, so as many as a step has show the optimizer too.
        sort_by_key: what the table is sorted by, such as ``self_cuda_memory_usage``. None: time on the GPU with all
            that is called inside, where there is a GPU, else time on the CPU.
        row_limit: lines of the table; -1: all.
    """

    def __init__(
        self,
        dirpath: str,
        *,
        wait: int = 2,
        warmup: int = 1,
        active: int = 3,
        sort_by_key: str | None = None,
        row_limit: int = 40,
    ):
        self._names: RegisterRecordFunction | None = None
        good = wait >= 0 and warmup >= 1 and active >= 1
        super().__init__(
            dirpath,
            "profile",
            row_limit=row_limit,
            sort_by_key=sort_by_key,
            record_module_names=False,
            table_kwargs={"max_name_column_width": 100},
            schedule=torch.profiler.schedule(wait=wait, warmup=warmup, active=active) if good else None,
            profile_memory=True,
            record_shapes=True,
        )
        if not good:  # behind Lightning's part, which its __del__ needs
            raise UserError(
                f"StepProfiler: wait must be at least 0, warmup and active at least 1; got {wait}, {warmup}, {active}"
            )

    def start(self, action_name: str) -> None:
        """Begin an action; at the first batch, name the layers as well."""
        # Lightning names them at the first action of all, when configure_model has not made them yet.
        if self._names is None and action_name == "run_training_batch" and self._lightning_module is not None:
            self._names = RegisterRecordFunction(self._lightning_module)
            self._names.__enter__()
        super().start(action_name)

    def teardown(self, stage: str | None) -> None:
        """Let go of the layers."""
        if self._names is not None:
            self._names.__exit__(None, None, None)
            self._names = None
        super().teardown(stage)
