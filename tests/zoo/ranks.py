"""Commands on several gloo processes of one launch, since imports cost more than small runs.

Run as a script, this file is one of the processes: its argument is a JSON file with the words of each command.
"""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.fsdp import FullyShardedDataParallel

from zoo.data import TokenData
from zoo_layers.block import Block

FSYNC = os.fsync
ROOT = Path(__file__).parents[2]
ONE_FILE = "{class_path: zoo.sharding.ShardedStrategy, init_args: {save_distributed_checkpoint: false}}"


class Uneven(TokenData):
    """Text of which some labels count and others do not; in some rows none."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        rows = batch["input_ids"].reshape(-1, self.seq_len)
        silent = ((rows < 105) | (rows[:, :1] % 3 == 0)).reshape(batch["labels"].shape)
        return {**batch, "labels": batch["labels"].masked_fill(silent, -100)}


def blocks_of(module: Any):
    return module.built().each_block()


class KillAt(Callback):
    """Ends its process without a word, behind the backward pass of a step."""

    def __init__(self, step: int):
        self.step = step

    def on_after_backward(self, trainer, pl_module):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class SignalAt(Callback):
    """Sends its process, the first rank's, SIGTERM: inside a step, or in the validation behind it."""

    def __init__(self, step: int, during: str):
        self.step, self.during = step, during

    def _send(self, trainer, step):
        if trainer.global_step == step and trainer.global_rank == 0 and step >= 0:
            self.step = -1
            os.kill(os.getpid(), signal.SIGTERM)

    def on_after_backward(self, trainer, pl_module):
        if self.during == "step":
            self._send(trainer, self.step)

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if self.during == "validation":
            self._send(trainer, self.step + 1)


class Poison(Callback):
    """At step 2, on the last rank alone: NaN from a layer's forward, into its gradient, or in its weights."""

    def __init__(self, where: str, layer: int = 1):
        self.where, self.layer = where, layer

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step != 2 or trainer.global_rank != trainer.world_size - 1:
            return
        mlp = list(blocks_of(pl_module))[self.layer].mlp
        if self.where == "weights":
            with torch.no_grad():
                getattr(mlp.to_down.weight, "_local_tensor", mlp.to_down.weight).fill_(float("nan"))
        elif self.where == "forward":
            mlp.register_forward_hook(lambda module, args, output: output * float("nan"))
        else:
            mlp.register_forward_hook(lambda module, args, output: _spoil(output))


class GatheredTypes(Callback):
    """Under bf16-mixed, weights of linear layers come as bf16; norms, convolutions and decay parameters as fp32."""

    def on_train_start(self, trainer, pl_module):
        for block in blocks_of(pl_module):
            for module in block.modules():
                module.register_forward_pre_hook(self.look)

    @staticmethod
    def look(module, args):
        wanted = torch.bfloat16 if isinstance(module, torch.nn.Linear) else torch.float32
        found = {name: parameter.dtype for name, parameter in module.named_parameters(recurse=False)}
        assert set(found.values()) <= {wanted}, (module, found)


def _spoil(output):
    if output.requires_grad:
        output.register_hook(lambda grad: grad * float("inf"))
    return output


class FullDisk(Callback):
    """From step 2 on, the last rank's disk takes nothing more."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 2 and trainer.global_rank == trainer.world_size - 1:
            os.fsync = self.refuse

    def on_exception(self, trainer, pl_module, exception):
        os.fsync = FSYNC

    @staticmethod
    def refuse(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FSDP1OnCPU(FSDPStrategy):
    """Lightning offers FSDP1 on GPUs only; the rest of it works here as well."""

    def __init__(self):
        super().__init__(auto_wrap_policy={Block}, state_dict_type="sharded")

    def _setup_model(self, model):
        return FullyShardedDataParallel(
            model,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            device_id=torch.device("cpu"),
            **self.kwargs,
        )


def recipe_in(folder, recipe):
    """The shared recipe over forty short documents in ``folder``; returns the words that begin a command."""
    (folder / "text").mkdir()
    for number in range(40):
        words = " ".join(f"word{(number * 7 + i) % 23}" for i in range(5 + number % 9))
        (folder / "text" / f"{number:02d}.txt").write_text(f"document {number}: {words}\n", encoding="utf-8")
    text = recipe.replace("SOURCE", str(folder / "text")).replace("ROOT", str(folder / "run"))
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    return recipe_words(folder)


def recipe_words(folder):
    return ["--config", str(folder / "recipe.yaml"), "--trainer.default_root_dir"]


def environment():
    """What a process of ours needs to import the packages from the tree, on one core."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "layers"), str(ROOT / "kernels")])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def launch(folder, commands, *, ranks=2, timeout=240, status=0):
    """Run ``commands`` one after another on ``ranks`` processes; returns what each rank answered to each.

    An answer is "done", or the text of the UserError that ended the command. ``status`` is how the processes end.
    """
    (folder / "commands.json").write_text(json.dumps(commands))
    shared = environment() | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}
    # Group rank and local rank, as Lightning's own launcher sets them.
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder / "commands.json")],
            cwd=folder,
            env=shared | {"WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "ZOO_TEST_RANKS": str(ranks)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    answers = [[json.loads(x[7:]) for x in output.splitlines() if x.startswith("ANSWER ")] for output in outputs]
    for process, output, answer in zip(processes, outputs, answers):
        assert process.returncode == status, output[-6000:]
        assert len(answer) == len(commands) or status, output[-6000:]
    return list(zip(*answers))


def main(commands):
    from zoo.errors import UserError
    from zoo.verbs.train import run_lightning

    sys.path.insert(0, str(ROOT))  # for class paths below tests
    torch.set_num_threads(1)
    for verb, *words in json.loads(Path(commands).read_text()):
        try:
            run_lightning(verb, [*words, "--trainer.devices", os.environ["ZOO_TEST_RANKS"]])
            answer = "done"
        except UserError as error:
            answer = str(error)
        print("ANSWER " + json.dumps(answer), flush=True)
    os._exit(0)  # groups of many runs are left as they are


if __name__ == "__main__":
    main(sys.argv[1])
