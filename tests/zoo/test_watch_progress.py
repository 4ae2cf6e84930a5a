"""The bar's line and what is logged beside the loss: speed, tokens done, the time left, memory, and loggers."""

import sys
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar

import zoo.callbacks
import zoo.progress
from tests.zoo.watched import Clock
from zoo.callbacks import Throughput
from zoo.errors import UserError
from zoo.progress import RichBar, duration, short
from zoo.recipe import ZooCLI
from zoo.run import read_metrics

CLOCK = "--trainer.callbacks+=tests.zoo.watched.Clock"
TQDM = "--trainer.callbacks+=zoo.progress.TQDMBar"
SHOWN = ["--trainer.enable_progress_bar", "true", "--throughput.skip", "1"]
LONG = ["--budget.tokens", "2560", "--checkpoint.every_n_train_steps", "4"]  # 20 steps
VALIDATING = ["--trainer.val_check_interval", "6", "--trainer.check_val_every_n_epoch", "null"]


@pytest.fixture
def clock(monkeypatch):
    """Time passes only where the run's Clock says so, and the bar reads its figures at every step."""
    Clock.now = 0.0
    monkeypatch.setattr(zoo.callbacks, "time", SimpleNamespace(perf_counter=lambda: Clock.now))
    monkeypatch.setattr(zoo.progress, "EVERY", 0.0)


@pytest.mark.parametrize(
    ("bar", "every", "accumulate"), [("", "1", "2"), ("", "5", "1"), (TQDM, "5", "2")], ids=["rich", "rarely", "tqdm"]
)
def test_the_line_tells_tokens_of_the_budget_and_the_time_that_training_takes(zoo, clock, bar, every, accumulate):
    words = ["--trainer.log_every_n_steps", every, "--trainer.accumulate_grad_batches", accumulate, *VALIDATING]
    zoo("fit", *LONG, *SHOWN, *words, *([bar] if bar else []), CLOCK)
    lines = Clock.lines
    assert lines[9]["tokens"] == "1.15k/2.56k"
    assert lines[20]["tokens"] == "2.56k/2.56k"
    assert lines[20]["left"] == "0 s"
    # 10 seconds a step, though 1,000 and 5,000 passed with every validation and save.
    assert lines[10]["left"] == "1 min 40 s"
    assert lines[19]["left"] == "10 s"
    assert lines[19]["tok/s"] == "13"  # 128 tokens in 10 seconds
    assert float(lines[19]["loss"]) > 0
    assert "v_num" not in lines[19]


def test_a_run_that_goes_on_shows_where_it_stands(zoo, clock):
    zoo("fit", *LONG, *SHOWN, CLOCK, "--trainer.max_steps", "8")
    assert Clock.lines[8]["tokens"] == "1.02k/1.02k"
    zoo("fit", *LONG, *SHOWN, CLOCK, "--ckpt_path", "last")
    lines = Clock.lines
    assert min(lines) == 9
    assert lines[9]["tokens"] == "1.15k/2.56k"
    assert "left" not in lines[9]  # nothing is timed yet
    assert lines[11]["left"] == "1 min 30 s"


def test_validation_and_saving_are_no_part_of_the_speed(zoo, clock):
    rows = zoo("fit", *LONG, *VALIDATING, "--throughput.skip", "1", "--trainer.log_every_n_steps", "5", CLOCK, *SHOWN)
    assert [row["tok/s"] for row in rows if "tok/s" in row] == pytest.approx([12.8] * 4)


def test_a_share_of_the_peak_is_shown_where_the_peak_is_known(zoo, clock):
    rows = zoo("fit", *LONG, *SHOWN, CLOCK, "--throughput.peak_flops", "1e8")
    logged = [row["mfu"] for row in rows if "mfu" in row]
    assert Clock.lines[19]["mfu"] == f"{logged[-2]:.1%}"


def test_other_bars_and_none_are_the_users_choice(recipe):
    def bar(*words):
        return ZooCLI(["--config", str(recipe), *words], run=False).trainer.progress_bar_callback

    assert bar() is None  # the recipe says enable_progress_bar: false
    assert type(bar(*SHOWN)) is RichBar
    lightning = "--trainer.callbacks+=lightning.pytorch.callbacks.TQDMProgressBar"
    assert type(bar(*SHOWN, lightning)) is TQDMProgressBar


def test_figures_are_read_twice_a_second_and_not_at_every_batch(monkeypatch):
    bar, module = RichBar(), SimpleNamespace()
    fake = SimpleNamespace(
        state=SimpleNamespace(fn="fit"), global_step=1, max_steps=9, callbacks=[], loggers=[], progress_bar_metrics={}
    )
    now = [100.0]
    monkeypatch.setattr(zoo.progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    fake.progress_bar_metrics = {"train/loss": 1.0}
    assert bar.get_metrics(fake, module) == {"loss": "1.000"}
    fake.progress_bar_metrics = {"train/loss": 2.0}
    now[0] += 0.4
    assert bar.get_metrics(fake, module) == {"loss": "1.000"}
    now[0] += 0.2
    assert bar.get_metrics(fake, module) == {"loss": "2.000"}


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (999_600, "1M"), (655_360, "655k"), (1.2e9, "1.2B"), (1e11, "100B"), (1.5e13, "15T")],
)
def test_counts_are_short(count, text):
    assert short(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min 0 s"), (450, "7 min 30 s"), (7_500, "2 h 5 min"), (273_600 + 1_800, "3 d 4 h")],
)
def test_times_have_two_units(seconds, text):
    assert duration(seconds) == text


# ----------------------------------------------------------------------------------------------------------- memory
def test_the_peak_since_the_last_logged_step_is_logged_and_the_run_keeps_the_highest(monkeypatch):
    peaks, logged, resets = iter([3 * 2**30, 2**30]), [], []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    strategy = SimpleNamespace(reduce=lambda own, reduce_op: {"max": own + 1}[reduce_op])  # another rank has 1 GiB more
    device = torch.device("cpu")
    module = SimpleNamespace(
        device=device,
        log=lambda name, value: logged.append((name, float(value))),
        trainer=SimpleNamespace(strategy=strategy),
    )
    timed = Throughput()
    timed._log_peak(module)  # pyright: ignore[reportArgumentType]
    timed._log_peak(module)  # pyright: ignore[reportArgumentType]
    assert logged == [("gpu_peak_gib", 4.0), ("gpu_peak_gib", 2.0)]
    assert resets == [device] * 2
    assert timed.peak_bytes == 3 * 2**30


def test_a_cpu_has_no_peak(zoo):
    assert not any("gpu_peak_gib" in row for row in zoo("fit"))


# ---------------------------------------------------------------------------------------------------------- loggers
def test_another_logger_stands_beside_metrics_csv(zoo, tmp_path):
    other = {"class_path": "lightning.pytorch.loggers.TensorBoardLogger", "init_args": {"save_dir": str(tmp_path)}}
    for form, root in ((other, "one"), ([other], "listed")):
        rows = zoo("fit", f"--trainer.logger={form}", root=root)
        assert sum("train/loss" in row for row in rows) == 6
        assert (tmp_path / root / "logs/version_0/config.yaml").exists()
    assert list(tmp_path.glob("lightning_logs/version_0/events*"))


def test_a_csv_logger_of_the_users_own_is_the_only_one(zoo, tmp_path):
    own = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(tmp_path), "name": "own"}}
    zoo("fit", f"--trainer.logger={own}")
    assert (tmp_path / "own/version_0/metrics.csv").exists()
    assert not (tmp_path / "run/logs").exists()


WANDB = "{class_path: lightning.pytorch.loggers.WandbLogger, init_args: {project: p, offline: true, save_dir: ROOT}}"


@pytest.mark.parametrize("form", [WANDB, f"[{WANDB}]"], ids=["one", "listed"])
def test_a_logger_whose_package_is_missing_is_named_with_the_cure(zoo, tmp_path, monkeypatch, form):
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", Missing())
    with pytest.raises(UserError, match=r"needs the package wandb, which is not installed: `pip install wandb`"):
        zoo("fit", f"--trainer.logger={form.replace('ROOT', str(tmp_path))}")
    assert not (tmp_path / "run").exists()


class Missing:
    """Lightning's answer where wandb is not installed."""

    def __bool__(self):
        return False

    def __str__(self):
        return "Requirement 'wandb>=0.12.10' not met. HINT: Try running `pip install -U 'wandb>=0.12.10'`"


@pytest.mark.filterwarnings("ignore")  # wandb's own
def test_weights_and_biases_writes_offline_beside_metrics_csv(zoo, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    zoo("fit", f"--trainer.logger={WANDB.replace('ROOT', str(tmp_path / 'run'))}")
    wandb.finish()
    assert list((tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb"))
    assert len([row for row in read_metrics(tmp_path / "run") if "train/loss" in row]) == 6
    assert "wandb" in sys.modules
