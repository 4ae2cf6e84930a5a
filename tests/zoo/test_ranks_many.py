"""FSDP2 on 4 gloo processes and HSDP on 4 and 8 train what one process trains, and 4 go on where 8 were stopped.

Run as a script, this file imports everything once and forks the ranks of one launch after another, since the imports
of 8 processes take longer than their runs. Its argument is a JSON file of (ranks, words of each command) pairs.
"""

import csv
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch

from tests.zoo.conftest import RECIPE
from tests.zoo.ranks import ROOT, environment, free_port, recipe_in
from zoo.checkpoint import load_model, read_checkpoint, read_facts
from zoo.run import read_metrics

STEPS, STOP = 8, 4
CLOSE = 1e-5  # fp32: sums in another order
# 8 rows a step, one for each of 8 ranks. 257 ids, one head and 3 layers: nothing divides by 4 or 8.
SIZES = ["--budget.batch_tokens", "256", "--budget.tokens", str(256 * STEPS), "--model.tie", "true"]
SIZES += ["--model.pattern", "M2,GDN,SWA", "--model.n_layers", "3", "--trainer.gradient_clip_val", "0.3"]
SIZES += ["--checkpoint.every_n_train_steps", str(STOP), "--trainer.limit_val_batches", "0"]
# The last run: 8 processes (HSDP 2 x 4) up to STOP, then 4 (FSDP2).
RUNS = ("fsdp2 on 4", "hsdp 2 x 2", "hsdp 2 x 4, then fsdp2 on 4")


def launch(folder, groups, timeout=200):
    """Fork each of ``groups``, (ranks, commands) pairs, in turn; all ranks must end every command well."""
    (folder / "groups.json").write_text(json.dumps(groups), encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, __file__, str(folder / "groups.json")],
        cwd=folder,
        env=environment() | {"PYTHONPATH": f"{ROOT}{os.pathsep}{environment()['PYTHONPATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=timeout)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-6000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """alone: one process. RUNS: many."""
    folder = tmp_path_factory.mktemp("many")
    words = recipe_in(folder, RECIPE)

    def fit(name, ranks, replicas, *more):
        strategy = f"{{class_path: zoo.sharding.ShardedStrategy, init_args: {{replicas: {replicas}}}}}"
        command = ["fit", *words, str(folder / name), *SIZES, "--trainer.devices", str(ranks), *more]
        return command + ["--trainer.strategy", strategy] * (ranks > 1)

    fsdp, hsdp, stopped = RUNS
    first = [(8, [fit(stopped, 8, 2, "--trainer.max_steps", str(STOP))])]
    then = [(4, [fit(stopped, 4, 1, "--ckpt_path", "last"), fit(fsdp, 4, 1), fit(hsdp, 4, 2)])]
    launch(folder, [(1, [fit("alone", 1, 1)]), *first, *then])
    return folder


def column(folder, metric):
    return torch.tensor([row[metric] for row in read_metrics(folder) if metric in row])


@pytest.mark.dist
@pytest.mark.parametrize("name", RUNS)
def test_many_processes_have_the_losses_norms_and_weights_of_one_that_is_never_stopped(folder, name):
    assert len(column(folder / "alone", "train/loss")) == STEPS
    for metric, limit in (("train/loss", CLOSE), ("grad_norm", 4 * CLOSE), ("lr-AdamW/decay", 0)):
        one, many = (column(folder / run, metric) for run in ("alone", name))
        torch.testing.assert_close(many, one, rtol=limit, atol=limit, msg=lambda text, m=metric: f"{name} {m}: {text}")
    wanted = load_model(folder / "alone").model.state_dict()
    for key, tensor in load_model(folder / name).model.state_dict().items():
        # The first steps of Adam turn the sign of a gradient near zero into a whole step.
        torch.testing.assert_close(
            tensor, wanted[key], rtol=10 * CLOSE, atol=10 * CLOSE, msg=lambda t, k=key: f"{k}: {t}"
        )


@pytest.mark.dist
def test_four_processes_went_on_in_the_middle_and_read_the_same_text(folder):
    logs = sorted((folder / RUNS[-1] / "logs").glob("version_*/metrics.csv"))
    read = [csv.DictReader(log.read_text(encoding="utf-8").splitlines()) for log in logs]
    steps = [{int(row["step"]) for row in rows} for rows in read]
    assert steps == [set(range(STOP)), set(range(STOP, STEPS))]
    stored = [read_checkpoint(folder / "alone" / "last.ckpt"), read_facts(folder / RUNS[-1] / "last.ckpt")]
    one, other = (facts["loops"]["fit_loop"]["state_dict"]["combined_loader"][0] for facts in stored)
    assert one == other
    assert one["step"] == STEPS


def rank_of(ranks, rank, port, commands, output):
    """Be one rank: run ``commands``, with what they print in a file."""
    from lightning.pytorch.utilities import rank_zero_only

    from zoo.verbs.train import run_lightning

    with output.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    status = 1
    try:
        if ranks > 1:  # group rank and local rank, as Lightning's own launcher sets them
            os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            setattr(rank_zero_only, "rank", rank)  # noqa: B010  # read from the environment when it was imported
        for verb, *words in commands:
            run_lightning(verb, words)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # groups of many runs are left as they are


def main(file):
    import zoo.verbs.train  # noqa: F401  # once, before any rank is forked

    torch.set_num_threads(1)
    for number, (ranks, commands) in enumerate(json.loads(file.read_text(encoding="utf-8"))):
        port, children = free_port(), {}
        for rank in range(ranks):
            output = file.with_name(f"{number}-{rank}.txt")
            child = os.fork()
            if child == 0:
                rank_of(ranks, rank, port, commands, output)
            children[child] = output
        for _ in range(ranks):
            child, status = os.wait()
            if status:
                # The others wait for it.
                print(f"{children[child].name}:", children[child].read_text(encoding="utf-8"), flush=True)
                os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
