"""docs/benchmarks/weak_scaling.py: what it asks of `zoo fit`, what it makes of the runs, and that it runs at all."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.zoo.ranks import ROOT, environment
from zoo.data.prepare import prepare
from zoo.errors import UserError

SCRIPTS = ROOT / "docs/benchmarks"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(SCRIPTS)
    import weak_scaling  # pyright: ignore[reportMissingImports]
    import weak_scaling_figures as figures  # pyright: ignore[reportMissingImports]

TINY = ["model.n_layers=2", "model.d_model=32", "model.d_ff=32", "model.mixers.GDN.heads=1", "model.mixers.SWA.heads=2"]
TINY += ["model.mixers.GDN.head_dim=16", "model.mixers.SWA.head_dim=16", "model.mixers.SWA.window=8"]


# ----------------------------------------------------------------------------------------------------------- the traces
def kernel(name, start, end, device=0, stream=7):
    args = {"device": device, "stream": stream}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": end - start, "args": args}


def test_communication_is_exposed_where_no_other_kernel_of_its_gpu_runs():
    gather, reduce = (
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_ReduceScatter_Sum",
    )
    events = [
        kernel("gemm", 0, 10),
        kernel(gather, 5, 25, stream=20),  # 5 to 10 hidden, then 10 to 15 exposed, 15 to 20 hidden, 20 to 25 exposed
        kernel("triton_kernel", 15, 18),
        kernel("gemm", 17, 20, stream=8),  # beside the one before: what two hide counts once
        kernel(reduce, 24, 30, stream=21),  # beside the gathering at 24; exposed to 30
        kernel(gather, 40, 45, stream=20),  # hidden whole
        kernel("gemm", 38, 50),
        kernel("gemm", 0, 100, device=1),  # another GPU hides nothing of the first
        kernel(reduce, 90, 104, device=1),
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 20, "dur": 10, "args": {"device": 0}},
        {"ph": "X", "cat": "cpu_op", "name": "nccl:all_gather", "ts": 60, "dur": 30, "args": {}},
        {"ph": "i", "cat": "kernel", "name": "marker", "ts": 1},
    ]
    found = figures.exposure(reversed(events))
    assert found == {0: figures.Exposure(25 + 5, 5 + 5 + 5), 1: figures.Exposure(14, 4)}
    assert figures.exposure([]) == {}


def test_a_step_has_the_mean_over_the_ranks_traces(tmp_path):
    for rank, late in enumerate((10, 30)):
        steps = [
            {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{n}", "ts": 0, "dur": 100, "args": {}}
            for n in (3, 4)
        ]
        events = [*steps, {**steps[0], "cat": "gpu_user_annotation", "dur": 1}, kernel("nccl", 0, late, device=rank)]
        (tmp_path / f"fit-profile-{rank}.1.pt.trace.json").write_text(json.dumps({"traceEvents": events}))
    found = figures.profiled(tmp_path)
    assert found == {"traces": 2, "communication_ms": 0.01, "exposed_ms": 0.01, "exposed_share": pytest.approx(0.1)}


# ------------------------------------------------------------------------------------------------------------- the runs
class Runs:
    """Stands for `zoo fit`: writes the metrics of a run of a given speed and keeps the words of all."""

    def __init__(self, rates, statuses=None, drift=0.0):
        self.rates, self.statuses, self.drift, self.given = rates, statuses or {}, drift, []

    def __call__(self, words, log, seconds):
        options = dict(zip(words[::2], words[1::2]))
        devices = int(options["--trainer.devices"])
        self.given.append(options)
        if self.statuses.get(devices):
            return self.statuses[devices]
        root = Path(options["--trainer.default_root_dir"])
        begin = 10 if options.get("--ckpt_path") else 0
        end = int(options.get("--trainer.max_steps", 20))
        folder = root / f"logs/version_{begin}"
        folder.mkdir(parents=True)
        rates = [self.rates[devices] * share for share in (0.5, 1.0, 1.1)] + [""] * 17
        lines = [f"{n},{5 - 0.1 * n + (self.drift if begin else 0)},{rates[n]}," for n in range(begin, end)]
        if not begin:
            lines[1] += "31.5"
        (folder / "metrics.csv").write_text("\n".join(["step,train/loss,tok/s,gpu_peak_gib", *lines]))
        (root / "last.ckpt").mkdir(exist_ok=True)
        return weak_scaling.DONE


def call(out, runs, *words):
    status = weak_scaling.main(["--backend", "cpu", "--out", str(out), "--recipes", "a.yaml", *words], runs)
    return status, json.loads((out / "report.json").read_text())


WORDS = ["--devices", "1", "2", "4", "--contexts", "64", "--replicas", "1", "2"]


def test_efficiency_is_over_one_device_and_what_finished_is_not_run_again(tmp_path, capsys):
    runs = Runs({1: 100.0, 2: 190.0, 4: 360.0})
    status, report = call(tmp_path, runs, *WORDS)
    rows = report["rows"]
    assert [row["layout"] for row in rows] == ["one device", "FSDP2", "FSDP2", "HSDP 2 x 2"]
    assert [row["efficiency"] for row in rows] == pytest.approx([1.0, 0.95, 0.9, 0.9])
    assert {row["gpu_peak_gib"] for row in rows} == {31.5}
    assert (
        "| a | 64 x 256 | 2 | FSDP2 | 190 | 95.0% | - | 31.5 | - | profile: 0 traces of 2 devices |"
        in capsys.readouterr().out
    )
    assert status == 1, "profiles without a trace are no success"
    assert (tmp_path / "report.png").exists()
    count = len(runs.given)
    assert count == 4 + 3
    assert call(tmp_path, runs, *WORDS)[1]["rows"] == rows
    assert len(runs.given) == count
    with pytest.raises(UserError, match=r"holds a result of\n.*\n.*\n.*--model\.d_ff 8\nGive another --out"):
        call(tmp_path, runs, *WORDS, "--set", "model.d_ff=8")


def test_each_device_has_the_same_micro_batch_and_the_batch_grows(tmp_path):
    runs = Runs({1: 1.0, 2: 1.0, 4: 1.0})
    call(tmp_path, runs, *WORDS, "--rows", "3", "--steps", "20")
    batches = {
        (o["--trainer.devices"], o["--trainer.accumulate_grad_batches"]): o["--budget.batch_tokens"] for o in runs.given
    }
    assert batches == {("1", "1"): "192", ("2", "1"): "384", ("4", "1"): "768"}
    assert {int(o["--budget.tokens"]) // int(o["--budget.batch_tokens"]) for o in runs.given} == {30}
    assert {o["--model.lr_scheduler.init_args.warmup_steps"] for o in runs.given} == {"10"}


def test_a_run_without_memory_stands_and_another_failure_is_tried_again(tmp_path):
    runs = Runs({1: 100.0, 4: 400.0}, {2: figures.NO_MEMORY, 4: "failed with 1: RuntimeError: no route"})
    words = ["--devices", "1", "2", "4", "--contexts", "64"]
    status, report = call(tmp_path, runs, *words)
    assert status == 1
    assert [row["remark"] for row in report["rows"]] == ["", "out of memory", "failed with 1: RuntimeError: no route"]
    assert [row["efficiency"] for row in report["rows"]] == [1.0, None, None]
    runs.statuses, runs.given = {2: figures.NO_MEMORY}, []
    assert call(tmp_path, runs, *words)[1]["rows"][2]["efficiency"] == 1.0
    assert {options["--trainer.devices"] for options in runs.given} == {"4"}


def test_no_run_begins_when_the_minutes_are_over_and_figures_of_another_machine_are_not_divided(tmp_path, monkeypatch):
    runs = Runs({1: 100.0, 2: 200.0})
    words = ["--devices", "1", "2", "--contexts", "64"]
    status, report = call(tmp_path, runs, *words, "--minutes", "1e-9")
    assert (status, runs.given) == (1, [])
    assert {row["remark"] for row in report["rows"]} == {"no time left (--minutes)"}
    call(tmp_path, runs, *words[:2], *words[3:])
    monkeypatch.setattr(weak_scaling, "versions", lambda device: {"device": "another"})
    row = call(tmp_path, runs, *words)[1]["rows"][1]
    assert row["efficiency"] is None
    assert "another device or other versions" in row["remark"]


@pytest.mark.parametrize(("drift", "remark"), [(0.0, ""), (0.01, "the losses differ by more than 1e-05")])
def test_a_resumed_run_is_held_against_one_that_was_never_stopped(tmp_path, drift, remark):
    runs = Runs({1: 1.0, 8: 1.0, 4: 1.0}, drift=drift)
    status, report = call(tmp_path, runs, "--devices", "1", "--contexts", "64", "--rows", "2", "--resume", "8", "4")
    (found,) = report["resumes"]
    assert (found["first"], found["then"], found["before"], found["remark"]) == (8, 4, 0.0, remark)
    assert found["after"] == pytest.approx(drift / (5 - 1.9), abs=1e-9)
    assert status == (1 if drift else 0)
    straight, stopped, resumed = runs.given[1:]
    assert {o["--budget.batch_tokens"] for o in (straight, stopped, resumed)} == {"1024"}
    assert (resumed["--trainer.devices"], resumed["--trainer.accumulate_grad_batches"]) == ("4", "2")
    assert stopped["--trainer.default_root_dir"] == resumed["--trainer.default_root_dir"]
    assert not list(tmp_path.glob("*-resume-8-4/run/last.ckpt"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rows", "1", "2", "3"], "--rows gives 3 numbers for 2 contexts"),
        (["--replicas", "3"], "--replicas 3: none of --devices 1 2 4 8 is 3 replicas"),
        (["--resume", "8", "3"], "--resume 8 3: one batch needs one of them to be a multiple"),
        (["--steps", "0"], "--steps must be above 0, got 0"),
        (["--set", "model.d_ff"], "--set model.d_ff: give KEY=VALUE"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path, words, message):
    with pytest.raises(UserError, match=message):
        weak_scaling.cases(weak_scaling.read(["--out", str(tmp_path), *words]))


def test_the_reason_of_a_failure_is_found_in_what_it_printed(tmp_path):
    printed = "budget: 5\n[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\nsee the log\n"
    assert weak_scaling.why(printed, 1) == "out of memory"
    printed = "Traceback:\n  x\nRuntimeError: NCCL error\n[W] process group was not destroyed\n"
    assert weak_scaling.why(printed, 1) == "failed with 1: RuntimeError: NCCL error"
    assert (
        weak_scaling.why("a\ntrainer (devices 8): only 1 here\n", 2)
        == "failed with 2: trainer (devices 8): only 1 here"
    )
    begun = time.monotonic()
    assert weak_scaling.fit(["--help"], tmp_path / "log", 0.2) == weak_scaling.NO_TIME
    assert time.monotonic() - begun < 10


@pytest.mark.dist
def test_the_script_measures_one_and_two_processes_as_a_user_would_run_them(tmp_path):
    prepare("excerpt", tmp_path / "shards", val_share=0.1)
    words = ["--backend", "cpu", "--data", str(tmp_path / "shards"), "--out", str(tmp_path / "out"), "--steps", "4"]
    words += ["--devices", "1", "2", "--contexts", "32", "--rows", "2", "--set", *TINY]
    words += ["--recipes", str(ROOT / "recipes/gdn_h1_1.3b.yaml")]
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "weak_scaling.py"), *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = json.loads((tmp_path / "out/report.json").read_text())["rows"]
    assert (one["windows"], two["windows"]) == (4, 4)
    assert two["efficiency"] == pytest.approx(two["tokens_per_second"] / one["tokens_per_second"] / 2)
    assert two["exposed_ms"] is None, "a CPU has no kernels"
    assert not list((tmp_path / "out").rglob("*.ckpt"))
    assert len(list((tmp_path / "out").rglob("*.pt.trace.json"))) == 2
