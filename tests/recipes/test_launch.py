"""docs/launch.md and recipes/launch/: every command can be typed, its sizes agree, and two processes train by it."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from zoo.architecture import settle
from zoo.cli import Parser, main
from zoo.data.loader import BatchShape
from zoo.presets import presets
from zoo.run import read_metrics
from zoo.verbs import bench, data

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/launch.md").read_text(encoding="utf-8")
FSDP, SLURM = "recipes/launch/fsdp.yaml", "recipes/launch/slurm.sbatch"
COMMANDS = [
    line for fence in re.findall(r"^```\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL) for line in fence.split("\n")
]
FITS = [command for command in COMMANDS if re.match(r"zoo fit|torchrun", command)]
JOBS = [command for command in COMMANDS if command.startswith("sbatch")]
SHARDS = [command for command in COMMANDS if command.startswith("zoo data")]
BENCHES = [command for command in COMMANDS if command.startswith("zoo bench train")]
STRATEGY = "zoo.sharding.ShardedStrategy"


def settings(capsys, words):
    """What ``zoo fit`` would run with."""
    with pytest.raises(SystemExit) as stop:
        main(["fit", *words, "--print_config"])
    assert not stop.value.code
    return yaml.safe_load(capsys.readouterr().out)


def check_sizes(config):
    """Ranks, replicas and micro-batches share a step's rows equally; returns (devices, nodes)."""
    trainer, strategy = config["trainer"], config["trainer"]["strategy"]
    devices, nodes = int(trainer["devices"]), trainer["num_nodes"]
    world = devices * nodes
    if world > 1:
        assert strategy["class_path"] == STRATEGY
        assert world % strategy["init_args"]["replicas"] == 0
    options = config["data"]["init_args"]
    step, row = config["budget"]["batch_tokens"], options["seq_len"]
    shape = BatchShape(seq_len=row, batch_tokens=step, accumulate=trainer["accumulate_grad_batches"], world=world)
    BatchShape(seq_len=row, batch_tokens=options["val_batch_tokens"], world=world)
    assert row <= shape.micro_rows * row <= 32_768  # what one GPU is asked to hold at once
    return devices, nodes


# ------------------------------------------------------------------------------------------------------------ the guide
def test_every_line_of_the_guide_is_a_command_of_a_kind_that_is_tested():
    assert sorted([*FITS, *JOBS, *BENCHES, *SHARDS, *[""] * COMMANDS.count("")]) == sorted(COMMANDS)
    assert len(FITS) >= 8
    assert len(JOBS) == 2
    assert len(BENCHES) == 5
    assert len(SHARDS) == 2


@pytest.mark.parametrize("command", FITS)
def test_a_training_command_parses_and_its_sizes_agree(monkeypatch, capsys, command):
    monkeypatch.chdir(ROOT)
    launcher, *words = shlex.split(command)
    started = None
    if launcher == "torchrun":
        started = get_args_parser().parse_args(words)
        assert (started.module, started.training_script) == (True, "zoo")
        words = started.training_script_args
    assert words[0] == "fit"
    devices, nodes = check_sizes(settings(capsys, words[1:]))
    if started is not None:
        assert (int(started.nproc_per_node), int(started.nnodes.split(":")[-1])) == (devices, nodes)


@pytest.mark.parametrize("command", BENCHES)
def test_a_bench_command_parses_and_names_presets_that_can_be_built(command):
    parser = Parser("zoo bench", "")
    bench.add_arguments(parser)
    args = parser.read(shlex.split(command)[2:])
    for name in args.presets:
        assert presets()[name].why_not() is None
        assert presets()[name].n_layers


@pytest.mark.parametrize("command", SHARDS)
def test_a_command_for_shards_parses_and_names_a_folder_that_recipes_read(command):
    parser = Parser("zoo data", "")
    data.add_arguments(parser)
    args = parser.read(shlex.split(command)[2:])
    folder = args.out if args.part == "prepare" else args.folder
    recipes = [path.read_text(encoding="utf-8") for path in (ROOT / "recipes").glob("*.yaml")]
    assert any(f"folder: {folder}\n" in recipe for recipe in recipes)


def test_the_table_of_recipes_is_what_the_recipes_are():
    rows = re.findall(
        r"^\| `([\w.]+)` \| `([^`]+)` \| (\d+), (\d+) \| ([\d.]+) M · ([\d.]+) M \| (\d+) B \|", GUIDE, re.MULTILINE
    )
    recipes = {
        path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in (ROOT / "recipes").glob("*.yaml")
    }
    assert {row[0] for row in rows} == {name for name, read in recipes.items() if "preset" in read.get("model", {})}
    for name, pattern, layers, width, inner, total, tokens in rows:
        own = settle(preset=recipes[name]["model"]["preset"])
        counts = own.build("meta").parameter_counts()
        assert (pattern, int(layers), int(width)) == (own.pattern, own.n_layers, own.d_model)
        assert (inner, total) == (f"{counts.non_embedding / 1e6:.1f}", f"{counts.total / 1e6:.1f}")
        assert int(tokens) * 10**9 == recipes[name]["budget"]["tokens"]
    tied = {
        name
        for name, read in recipes.items()
        if "preset" in read.get("model", {}) and settle(preset=read["model"]["preset"]).tie
    }
    assert tied == {name for name, *_ in rows if name.startswith("gdn")}


# ---------------------------------------------------------------------------------------------------- the job of Slurm
@pytest.fixture
def cluster(tmp_path):
    """Start the job script as Slurm would, with a ``srun`` that runs its words, and a ``zoo`` that is this one."""
    commands = tmp_path / "bin"
    commands.mkdir()
    tools = {
        "zoo": f'exec {shlex.quote(sys.executable)} -m zoo "$@"',
        "srun": "while [[ $1 == -* ]]; do [[ $1 == --cpus-per-task ]] && shift; shift; done\n"
        '[ -n "$SAY" ] && { echo "$@"; exit; }\n'
        "for ((i = 0; i < SLURM_NTASKS; i++)); do\n"
        '  SLURM_PROCID=$i SLURM_LOCALID=$i SLURM_NODEID=0 "$@" & tasks+=($!)\ndone\n'
        "for task in ${tasks[@]}; do wait $task || exit; done",
    }
    for name, text in tools.items():
        (commands / name).write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
        (commands / name).chmod(0o755)

    def start(*words, nodes=1, tasks=8, say=True, **more):
        environment = {
            **environment_of_a_run(),
            "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
            "SAY": "1" if say else "",
            "SLURM_NNODES": str(nodes),
            "SLURM_NTASKS_PER_NODE": str(tasks),
            "SLURM_NTASKS": str(nodes * tasks),
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_NAME": "zoo",
            **more,
        }
        return finished(["bash", str(ROOT / SLURM), *words], environment)

    return start


def environment_of_a_run():
    """As subprocesses of a test need it: our sources, one thread, a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "layers"), str(ROOT / "kernels")])
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return {**inherited, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(port)}


def finished(command, environment):
    """The output of a command that ends well."""
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("command", JOBS)
def test_a_job_trains_with_the_sizes_that_slurm_gives_it(monkeypatch, capsys, cluster, command):
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    script = words.index(SLURM)
    asked = dict(zip(words[1:script:2], words[2:script:2]))
    nodes, tasks = int(asked["--nodes"]), int(asked.get("--ntasks-per-node", 8))
    said = shlex.split(cluster(*words[script + 1 :], nodes=nodes, tasks=tasks))
    assert said[:2] == ["zoo", "fit"]
    assert check_sizes(settings(capsys, said[2:])) == (tasks, nodes)
    assert settings(capsys, said[2:])["trainer"]["default_root_dir"] == f"runs/{Path(words[script + 1]).stem}"


def test_a_job_goes_on_where_a_checkpoint_stands_and_begins_where_none_does(cluster, tmp_path):
    run = tmp_path / "run"
    words = ["recipes/gdn_0.4b.yaml"]
    assert "--ckpt_path" not in cluster(*words, RUN=str(run))
    (run / "last.ckpt").mkdir(parents=True)  # of FSDP a folder
    assert cluster(*words, RUN=str(run)).split()[-2:] == ["--ckpt_path", "last"]


def test_the_script_asks_for_the_tasks_that_the_overlay_is_written_for():
    script, overlay = (
        (ROOT / SLURM).read_text(encoding="utf-8"),
        yaml.safe_load((ROOT / FSDP).read_text(encoding="utf-8")),
    )
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script, re.MULTILINE))
    assert asked["ntasks-per-node"] == asked["gpus-per-node"] == str(overlay["trainer"]["devices"])
    assert int(asked["nodes"]) == overlay["trainer"]["num_nodes"]


# -------------------------------------------------------------------------------------------------------- two processes
SMALL = """
seed_everything: 1
budget: {tokens: 512, batch_tokens: 128}
model:
  pattern: GDN,SWA
  d_model: 32
  d_ff: 32
  tie: true
  mixers: {GDN: {heads: 1, head_dim: 16}, SWA: {heads: 2, window: 8}}
data:
  class_path: zoo.data.TokenData
  init_args: {source: excerpt, seq_len: 32, val_tokens: 128}
trainer:
  accelerator: gpu
  limit_val_batches: 1
  val_check_interval: 4
  check_val_every_n_epoch: null
  num_sanity_val_steps: 0
  enable_progress_bar: false
  log_every_n_steps: 1
"""
CPU = ["--trainer.accelerator", "cpu", "--trainer.precision", "32-true"]


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL, encoding="utf-8")
    return path


def losses(folder):
    found = [row["train/loss"] for row in read_metrics(folder) if "train/loss" in row]
    assert len(found) == 4
    return found


@pytest.mark.dist
def test_torchrun_and_slurm_start_two_processes_that_train_as_one(capsys, cluster, recipe, tmp_path):
    """The commands of the guide, with 2 for their numbers and a CPU for the GPU."""
    alone, torchrun, slurm = (tmp_path / name for name in ("alone", "torchrun", "slurm"))
    assert main(["fit", "--config", str(recipe), *CPU, "--trainer.default_root_dir", str(alone)]) == 0
    words = ["--config", str(recipe), "--config", FSDP, "--trainer.devices", "2", *CPU]
    words += ["--trainer.default_root_dir", str(torchrun)]
    started = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port"]
    environment = environment_of_a_run()
    finished([*started, environment["MASTER_PORT"], "-m", "zoo", "fit", *words], environment)
    cluster(str(recipe), *CPU, tasks=2, say=False, RUN=str(slurm))
    for folder in (torchrun, slurm):
        assert losses(folder) == pytest.approx(losses(alone), abs=1e-5)
        assert (folder / "last.ckpt").is_dir()
        shares = sorted(path.name for path in (folder / "last.ckpt").glob("*.distcp"))
        assert len(shares) == 2, json.dumps(shares)
