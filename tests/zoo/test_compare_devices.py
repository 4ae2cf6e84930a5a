"""Arms side by side: processes with the CPU in the place of several GPUs."""

import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console

from zoo.comparison import devices as compare_devices
from zoo.comparison import run as run_module
from zoo.comparison.allowance import Allowance
from zoo.comparison.devices import Pool, Work, read_devices, run_on_devices
from zoo.comparison.plan import Result, Run, make_plan
from zoo.comparison.provenance import trained_with
from zoo.comparison.report import collect
from zoo.comparison.run import folder_of, not_run, run_plan, why
from zoo.comparison.sections import caveats, provenance_table
from zoo.comparison.watch import DeviceLines, DeviceTable
from zoo.errors import UserError
from zoo.module import HybridLMModule


class Heard(DeviceLines):
    """Lines, and what was said."""

    def __init__(self):
        super().__init__()
        self.devices, self.steps = {}, {}

    def take(self, title, device):
        self.devices[title] = device
        super().take(title, device)

    def progress(self, title, done, whole, figures):
        self.steps[title] = (done, whole, figures)
        super().progress(title, done, whole, figures)


class OneStep(Allowance):
    """Over as soon as a run has begun."""

    def handed(self):
        return super().handed() | {"end": 0.0}


class RunsBegun(Allowance):
    """Over after so many runs were begun."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def refuse(self, seconds=0.0):
        self.count -= 1
        return "no time is left" if self.count < 0 else None


def test_two_processes_share_the_runs_and_give_the_numbers_of_one(recipe, tmp_path, capsys):
    words = ["--budget.tokens=2560"]
    plan = make_plan(["GA", "GDN,SWA"], recipe, tolerance=0.03, seeds=1, rates=(0.5, 1.0), overrides=words)
    watch = Heard()
    outcome = run_on_devices(plan, tmp_path / "side", ["cpu", "cpu"], watch=watch)
    alone = run_plan(plan, tmp_path / "alone")
    for found, wanted in ((outcome.results, alone.results), (outcome.trials, alone.trials)):
        assert [(r.arm.text, r.seed, r.loss, r.order_hash, r.learning_rate) for r in found] == [
            (r.arm.text, r.seed, r.loss, r.order_hash, r.learning_rate) for r in wanted
        ]
    assert outcome.good
    # On one CPU they stand in each other's way, and the record says so.
    assert {result.at_once for result in outcome.results} == {2}
    assert {result.at_once for result in alone.results} == {1}
    assert set(watch.devices.values()) == {"cpu (1)", "cpu (2)"}
    assert watch.steps["GA, seed 1"][:2] == (20, 20)
    assert "train/loss" in watch.steps["GA, seed 1"][2]
    assert "GA, seed 1: finished" in capsys.readouterr().out
    again = run_on_devices(plan, tmp_path / "side", ["cpu"])
    assert [r.loss for r in again.results] == [r.loss for r in outcome.results]
    assert "finished before" in capsys.readouterr().out


def test_a_process_that_dies_takes_its_own_run_with_it_and_nothing_begins_once_the_time_is_over(
    recipe, tmp_path, monkeypatch
):
    plan = make_plan(["GA", "GDN,SWA", "SWA"], recipe, tolerance=0.03, overrides=["--budget.tokens=384"])
    take = compare_devices.Lane._send

    def dying(process, content):
        take(process, content)
        if b'"arm": 1' in content:
            process.kill()

    monkeypatch.setattr(compare_devices.Lane, "_send", staticmethod(dying))
    outcome = run_on_devices(plan, tmp_path, ["cpu"], watch=Heard(), allowance=RunsBegun(2))
    assert [result.status for result in outcome.results] == ["finished", "failed", "not run"]
    assert "its process on cpu ended with -9" in outcome.results[1].error
    assert outcome.results[2].error == "no time is left"


def test_a_users_error_in_what_all_share_ends_it(recipe, tmp_path):
    words = ["--model.lr_scheduler.init_args.warmup_steps=50"]
    plan = make_plan(["GA"], recipe, tolerance=0.03, overrides=words)
    with pytest.raises(UserError, match="50 warm-up steps do not fit"):
        run_on_devices(plan, tmp_path, ["cpu"], watch=Heard())


def test_comparisons_share_a_pool_and_one_that_cannot_begin_leaves_the_others_alone(recipe, tmp_path):
    good = make_plan(["GA", "GDN,SWA"], recipe, tolerance=0.03, overrides=["--budget.tokens=384"])
    words = ["--model.lr_scheduler.init_args.warmup_steps=50"]
    bad = make_plan(["GA"], recipe, tolerance=0.03, overrides=words)
    watch = Heard()
    with Pool(["cpu"], tmp_path, watch) as pool:
        with pytest.raises(UserError, match="50 warm-up steps do not fit"):
            pool.run(Work(bad, tmp_path / "bad", name="bad"))
        outcome = pool.run(Work(good, tmp_path / "good", name="good"))
        process = pool._lanes[0].process
        again = pool.run(Work(good, tmp_path / "other"))
        assert pool._lanes[0].process is process, "one process serves all work"
    assert outcome.good
    assert [r.loss for r in again.results] == [r.loss for r in outcome.results]
    assert list(watch.devices) == ["bad: GA, seed 1", "good: GA, seed 1", "good: GDN,SWA, seed 1", *again_titles(good)]
    with pytest.raises(RuntimeError, match="the pool was closed"):
        pool.run(Work(good, tmp_path / "third"))


def again_titles(plan):
    return [Run(arm, seed).title for seed in plan.seeds for arm in plan.arms]


class Memory:
    """Stands for what lanes do on devices of one size: a run fails where all that train there need more than it has."""

    def __init__(self, size, needs):
        self.size, self.needs, self.lock = size, needs, threading.Lock()
        self.here, self.tries = Counter(), Counter()
        self.died, self.rooms, self.crowded = set(), {}, []

    def train_on(self):
        return lambda lane, work, run, at_once: self.train(lane, run, at_once)

    def train(self, lane, run, at_once):
        need = self.needs.get(run.arm.text, 1)
        there = list(lane.pool._under_way[lane.name])
        own = next(turn for turn in there if turn.batch.jobs[turn.index][0] == run)
        self.rooms.setdefault(run.title, []).append(own.room)
        self.crowded += [turn.room for turn in there if turn.room is not None and turn.room < len(there) - 1]
        assert at_once == (lane.at_once if own.room is None else min(lane.at_once, own.room + 1))
        with self.lock:
            self.tries[run.title] += 1
            self.here[lane.name] += need
            if self.here[lane.name] > self.size:
                self.died.add(lane)
        time.sleep(0.05)
        with self.lock:
            self.here[lane.name] -= need
        if lane in self.died:  # what comes last finds none, here
            self.died.remove(lane)
            error = torch.OutOfMemoryError("CUDA out of memory. Tried. Including non-PyTorch memory, others have it.")
            return not_run(run, why(error), "failed")
        return Result(run.arm, "finished", run.seed, loss=1.0)


@pytest.mark.parametrize("devices", [["0"] * 6, ["0", "1"] * 3])
def test_what_finds_no_memory_beside_others_is_tried_again_with_fewer_there(
    recipe, tmp_path, monkeypatch, capsys, devices
):
    patterns = ["GA", "SWA", "GDN,SWA", "DN,SWA", "GLA,SWA", "LA,SWA"]
    plan = make_plan(patterns, recipe, seeds=3, match=False, overrides=["--budget.tokens=384"])
    memory = Memory(12, {"GDN,SWA": 5, "DN,SWA": 5, "GLA,SWA": 11, "LA,SWA": 13})
    monkeypatch.setattr(compare_devices.Lane, "_train", memory.train_on())
    outcome = run_on_devices(plan, tmp_path, devices, watch=Heard())
    for result in outcome.results:
        # Alone on a device, what is larger than it has failed, and is not tried for ever.
        big = result.arm.text == "LA,SWA"
        assert result.status == ("failed" if big else "finished"), result.error
        assert result.error == ("out of memory: CUDA out of memory. Tried." if big else "")
    assert max(memory.tries.values()) <= 4  # beside 5, 2, 1, none
    assert memory.tries["LA,SWA, seed 1"] > 1
    assert not memory.crowded, "more shared a device with a run than it had room for"
    for rooms in memory.rooms.values():
        assert rooms[0] is None
        assert all(before is None or before > after for before, after in itertools.pairwise(rooms))
    said = capsys.readouterr().out
    assert "tried again beside 0 at most" in said
    for beside, room in re.findall(r"no memory beside (\d) others; tried again beside (\d) at most", said):
        assert int(room) == int(beside) // 2
    assert f"of {len(outcome.results)} on" in said
    assert f"run {len(outcome.results) + 1} of" not in said, "a run that is tried again is no other run"


@pytest.mark.parametrize("what", ["take", "back", "over"])
def test_a_watch_that_fails_ends_the_comparison_with_its_error_and_hangs_nobody(recipe, tmp_path, monkeypatch, what):
    """Standard output that was closed, for example: ``zoo compare ... | head -1``."""
    plan = make_plan(["GA", "SWA", "LA,SWA"], recipe, match=False, overrides=["--budget.tokens=384"])
    memory = Memory(2, {"LA,SWA": 3})
    monkeypatch.setattr(compare_devices.Lane, "_train", memory.train_on())

    def fail(*words, **more):
        raise BrokenPipeError("nobody reads")

    watch = Heard()
    monkeypatch.setattr(watch, what, fail)
    with pytest.raises(BrokenPipeError, match="nobody reads"):
        run_on_devices(plan, tmp_path, ["0", "0", "0"], watch=watch)


def test_an_output_that_is_closed_while_a_run_trains_is_no_death_of_its_process(recipe, tmp_path):
    plan = make_plan(["GA"], recipe, tolerance=0.03, overrides=["--budget.tokens=2560"])

    class Closed(Heard):
        def progress(self, title, done, whole, figures):
            raise BrokenPipeError("nobody reads")

    with pytest.raises(BrokenPipeError, match="nobody reads"):
        run_on_devices(plan, tmp_path, ["cpu"], watch=Closed())
    assert run_on_devices(plan, tmp_path, ["cpu"], watch=Heard()).good


def test_what_is_heard_of_a_run_is_in_order_however_often_it_is_tried(recipe, tmp_path, monkeypatch):
    plan = make_plan(["GA", "SWA", "LA,SWA"], recipe, seeds=4, match=False, overrides=["--budget.tokens=384"])
    memory = Memory(5, {"SWA": 3, "LA,SWA": 4})
    monkeypatch.setattr(compare_devices.Lane, "_train", memory.train_on())
    heard = {}

    class Slow(Heard):
        def take(self, title, device):
            heard.setdefault(title, []).append("take")

        def back(self, title, reason):
            time.sleep(0.05)  # another lane could take it meanwhile
            heard[title].append("back")

        def over(self, title, status, score, *, before):
            heard[title].append("over")

    assert run_on_devices(plan, tmp_path, ["0"] * 6, watch=Slow()).good
    for words in heard.values():
        assert words == ["take", "back"] * (len(words) // 2 - 1) + ["take", "over"]
    assert any(len(words) > 2 for words in heard.values())


SCRIPT = """
import sys
from zoo.comparison.plan import Run, make_plan
from zoo.comparison.devices import run_on_devices
from zoo.recipe import stop_status
plan = make_plan(["GA", "GDN,SWA"], sys.argv[1], tolerance=0.03, overrides=["--budget.tokens=12800000"])
try:
    run_on_devices(plan, sys.argv[2], sys.argv[3].split(","))
except SystemExit as stop:
    sys.exit(stop_status(stop))
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_a_signal_lets_every_process_save_its_checkpoint(recipe, tmp_path):
    words = [sys.executable, "-c", SCRIPT, str(recipe), str(tmp_path / "out"), "cpu"]
    plan = make_plan(["GA"], recipe, tolerance=0.03, overrides=["--budget.tokens=12800000"])
    folder = folder_of(Run(plan.arms[0], 1), tmp_path / "out")
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        end = time.monotonic() + 240
        while not (folder / "last.ckpt").exists() and time.monotonic() < end:
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=50)[0]
    finally:
        process.kill()
    assert (folder / "last.ckpt").exists(), said
    assert json.loads((folder / "status.json").read_text())["status"] == "running"
    assert process.returncode == 143
    assert not list((tmp_path / "out").glob("02-*")), "nothing else is begun"


def test_a_second_ctrl_c_waits_for_nobody_and_every_process_saves_all_the_same(recipe, tmp_path):
    out = tmp_path / "out"
    words = [sys.executable, "-c", SCRIPT, str(recipe), str(out), "cpu,cpu"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        end = time.monotonic() + 240  # they are there after 60 s where other tests have the cores
        while len([*out.glob("*/seed-1/**/metrics.csv")]) < 2 and time.monotonic() < end:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        time.sleep(1.0)  # two that are pending at once would arrive as one
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert process.returncode == 130, said
    end = time.monotonic() + 60
    while len([*out.glob("*/seed-1/last.ckpt")]) < 2 and time.monotonic() < end:
        time.sleep(0.2)
    assert len([*out.glob("*/seed-1/last.ckpt")]) == 2


def test_devices_are_read_and_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert read_devices("0,1") == ["0", "1"]
    assert read_devices("cpu,cpu") == ["cpu", "cpu"]
    with pytest.raises(UserError, match="no device '2'; here is GPUs 0 to 1"):
        read_devices("0,2")
    assert read_devices("1,1,01") == ["1", "1", "1"]


def test_every_process_sees_its_own_device(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert compare_devices._environment("1", 2)["CUDA_VISIBLE_DEVICES"] == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert compare_devices._environment("1", 2)["CUDA_VISIBLE_DEVICES"] == "6"
    assert compare_devices._environment("cpu", 2)["CUDA_VISIBLE_DEVICES"] == ""


def test_a_table_higher_than_the_screen_shows_what_is_under_way_and_all_at_the_end():
    screen = io.StringIO()
    titles = [f"run {number:02d}" for number in range(40)]
    with DeviceTable(Console(file=screen, force_terminal=True, width=80, height=20)) as watch:
        watch.begin(titles[:30])
        watch.begin(titles[30:])
        watch.take("run 31", "0 (2)")
        watch.progress("run 31", 5, 10, {})
        before = screen.getvalue()
    assert "50% on 0 (2)" in before
    assert "run 07" not in before
    assert "0 of 40 runs are over" in before
    assert all(title in screen.getvalue()[len(before) :] for title in titles)


def test_the_table_shows_all_devices_at_once():
    screen = io.StringIO()
    with DeviceTable(Console(file=screen, force_terminal=True, width=100)) as watch:
        watch.begin(["GA, seed 1", "GDN, seed 1", "SWA, seed 1"])
        watch.take("GA, seed 1", "0")
        watch.take("GDN, seed 1", "1")
        watch.progress("GDN, seed 1", 8, 16, {"train/loss": 1.25})
        watch.progress("GA, seed 1", 4, 16, {"train/loss": 2.5})
        both = screen.getvalue().rsplit("SWA, seed 1", 1)[0][-400:]
        watch.over("GDN, seed 1", "finished", "2.5000 bits per byte", before=False)
    assert "50% on 1" in both
    assert "25% on 0" in both
    assert "loss 1.250" in both
    assert "1 of 3 runs are over" in screen.getvalue()
    assert "left" in screen.getvalue()


@pytest.mark.parametrize("devices", [[], ["cpu", "cpu"]], ids=["in this process", "side by side"])
def test_what_is_under_way_when_the_time_is_over_is_saved_and_goes_on_to_the_same_numbers(recipe, tmp_path, devices):
    plan = make_plan(["GA", "GDN,SWA"], recipe, tolerance=0.03, overrides=["--budget.tokens=1280"])
    if devices:
        stopped = run_on_devices(plan, tmp_path / "out", devices, watch=Heard(), allowance=OneStep(9.0))
        expected = "--minutes 9: saved at step 1 of 10; the same command goes on from there"
        assert [result.error for result in stopped.results] == [expected] * 2
    else:
        times = iter([0.0] * 5)  # when it is made, before the first run, and after three of its steps
        stopped = run_plan(plan, tmp_path / "out", allowance=Allowance(9.0, clock=lambda: next(times, 1e3)))
        assert [result.error for result in stopped.results] == [
            "--minutes 9: saved at step 4 of 10; the same command goes on from there",
            "--minutes 9: they are over",
        ]
    assert {result.status for result in stopped.results} == {"not run"}
    stored = json.loads((tmp_path / "out" / "01-GA" / "seed-1" / "status.json").read_text(encoding="utf-8"))
    went_on = run_on_devices(plan, tmp_path / "out", devices) if devices else run_plan(plan, tmp_path / "out")
    straight = run_plan(plan, tmp_path / "straight")
    assert [(r.status, r.loss, r.order_hash, r.curve, r.train_curve) for r in went_on.results] == [
        ("finished", r.loss, r.order_hash, r.curve, r.train_curve) for r in straight.results
    ]
    assert went_on.results[0].seconds > stored["seconds"] > 0


@pytest.mark.parametrize("at", [4, 5, 9, 10])
def test_the_time_ends_no_run_before_a_validation_nor_after_its_last_step(recipe, tmp_path, at):
    """A validation every 5 steps of 10: its point would be missing from the curve of the run that goes on."""
    words = ["--budget.tokens=1280", "--trainer.val_check_interval=5"]
    plan = make_plan(["GA"], recipe, tolerance=0.03, overrides=words)
    times = iter([0.0] * (at + 1))  # when it is made, before the run, and after the steps before this one
    stopped = run_plan(plan, tmp_path / "out", allowance=Allowance(9.0, clock=lambda: next(times, 1e3)))
    expected = {4: "saved at step 4 of 10", 5: "saved at step 6 of 10", 9: "saved at step 9 of 10", 10: ""}[at]
    assert expected in stopped.results[0].error
    assert stopped.results[0].status == ("finished" if at == 10 else "not run")
    straight, went_on = (run_plan(plan, tmp_path / name).results[0] for name in ("straight", "out"))
    assert (went_on.loss, went_on.curve, went_on.train_curve) == (straight.loss, straight.curve, straight.train_curve)


def test_a_report_says_which_code_trained_its_runs_and_warns_where_it_was_not_one(recipe, tmp_path, monkeypatch):
    plan = make_plan(["GA", "SWA"], recipe, tolerance=0.03, overrides=["--budget.tokens=1280"])

    def trained_at(commit, allowance=None):
        monkeypatch.setattr(run_module, "trained_with", lambda device: f"{commit}, torch 2, {device.type}")
        outcome = run_plan(plan, tmp_path, allowance=allowance)
        content = collect(plan, outcome, {}, "zoo compare")
        rows = [which for what, which in provenance_table(content).rows if what == "runs trained with"]
        return content, rows, [line for line in caveats(content) if line.startswith("NOT all runs")]

    times = iter([0.0] * 6)
    content, rows, warned = trained_at("aaa", Allowance(9.0, clock=lambda: next(times, 1e3)))
    assert [run["status"] for arm in content["arms"] for run in arm["runs"]] == ["not run", "not run"]
    assert (rows, warned) == (["aaa, torch 2, cpu: 1 run"], []), "the second has taken no step"
    content, rows, warned = trained_at("bbb")
    assert rows == ["aaa, torch 2, cpu; then bbb, torch 2, cpu: 1 run", "bbb, torch 2, cpu: 1 run"]
    assert len(warned) == 1
    assert trained_at("ccc")[1] == rows, "what finished was trained by who trained it"
    status = folder_of(Run(plan.arms[0], 1), tmp_path) / "status.json"
    status.write_text(json.dumps(json.loads(status.read_text()) | {"status": "running"}))
    assert trained_at("ddd")[1][0] == "aaa, torch 2, cpu; then bbb, torch 2, cpu; then ddd, torch 2, cpu: 1 run"


def test_a_run_that_is_killed_has_said_what_trains_it(recipe, tmp_path, monkeypatch):
    plan = make_plan(["GA"], recipe, tolerance=0.03, overrides=["--budget.tokens=1280"])

    class Killed(BaseException):
        pass

    def killing(self, batch, batch_idx):
        raise Killed

    monkeypatch.setattr(HybridLMModule, "training_step", killing)
    with pytest.raises(Killed):
        run_plan(plan, tmp_path)
    stored = json.loads((folder_of(Run(plan.arms[0], 1), tmp_path) / "status.json").read_text(encoding="utf-8"))
    assert stored["status"] == "running"
    assert stored["trained_with"] == [trained_with(torch.device("cpu"))]


def test_a_signal_in_the_step_in_which_the_time_ends_is_a_signal(recipe, tmp_path):
    plan = make_plan(["GA"], recipe, tolerance=0.03, overrides=["--budget.tokens=1280"])
    looks = []

    def clock():
        looks.append(0)
        if len(looks) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
            return 1e3
        return 0.0 if len(looks) < 5 else 1e3

    with pytest.raises(SIGTERMException):
        run_plan(plan, tmp_path / "out", allowance=Allowance(9.0, clock=clock))


def test_a_rate_is_chosen_once_all_its_trials_are_over_and_nothing_is_said_of_it_before(recipe, tmp_path):
    words = ["--budget.tokens=5120"]
    plan = make_plan(["GA"], recipe, tolerance=0.03, rates=(0.5, 1.0), overrides=words)
    outcome = run_plan(plan, tmp_path / "out", allowance=RunsBegun(1))
    assert [trial.status for trial in outcome.trials] == ["finished", "not run"]
    (result,) = outcome.results
    assert result.status == "not run"
    assert result.error == "its learning rate is not chosen: the trial at 0.01 is not run (no time is left)"
    content = collect(plan, outcome, {}, "zoo compare", {})
    assert not any("edge of the grid" in line for line in caveats(content))
