"""Reading a recipe: LightningCLI over HybridLMModule, with short errors, and steps that follow from the budget."""

from __future__ import annotations

import difflib
import logging
import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

import zoo.data
import zoo.optim  # noqa: F401
from zoo.callbacks import RunHeader, Throughput, WritePredictions
from zoo.checkpoint import WholeFiles, read_checkpoint, read_facts, recover
from zoo.errors import UserError
from zoo.module import HybridLMModule
from zoo.names import near
from zoo.pattern import misplaced_key
from zoo.progress import RichBar
from zoo.run import BEST, LAST, Budget, refuse_to_overwrite
from zoo.spikes import LossSpikes
from zoo.watch import NonFiniteGuard, SaveOnSignal

INTERRUPTED, TERMINATED = 130, 143


class ZooParser(LightningArgumentParser):
    """A parser that reads no abbreviations, and whose errors are one message, not a page of usage."""

    def __init__(self, *args: Any, **kwargs: Any):
        # `--budget.token 5` would otherwise be taken for budget.tokens, where the same typo in a file is refused.
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UserError(_shorten(message, self)) from ex


class ZooCLI(LightningCLI):
    """LightningCLI with a budget, linked sizes, and runs that are never overwritten."""

    def __init__(self, args: list[str] | None, *, run: bool = True):
        self.given = list(args if args is not None else sys.argv[1:])
        super().__init__(
            HybridLMModule,
            LightningDataModule,
            subclass_mode_data=True,
            args=args,
            run=run,
            save_config_callback=SaveRun if run else None,
            save_config_kwargs={"overwrite": True},
            parser_class=ZooParser,
            parser_kwargs={"parser_mode": "omegaconf+"},
            auto_configure_optimizers=False,
            trainer_defaults={"max_epochs": -1, "log_every_n_steps": 1, "enable_model_summary": False},
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_class_arguments(Budget, "budget")
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.set_defaults(
            {
                "checkpoint.save_last": True,
                "checkpoint.save_top_k": 0,
                "checkpoint.enable_version_counter": False,
                "checkpoint.every_n_train_steps": 100,
            }
        )
        parser.add_lightning_class_args(Throughput, "throughput")
        parser.add_lightning_class_args(NonFiniteGuard, "guard")
        parser.add_lightning_class_args(LossSpikes, "spikes")
        parser.link_arguments(
            "trainer.default_root_dir", "checkpoint.dirpath", compute_fn=lambda root: root or "runs/default"
        )
        parser.link_arguments("budget.batch_tokens", "data.init_args.batch_tokens")
        parser.link_arguments("data.vocab_size", "model.vocab_size", apply_on="instantiate")
        parser.link_arguments("data", "model.decoder", compute_fn=needs_decoder, apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        verb = self.given[0] if self.given and hasattr(self, "_subcommand_parsers") else None
        check_files(self.given, self._subcommand_parsers.get(verb, parser) if verb is not None else parser)
        super().parse_arguments(parser, args)
        seed = (self.config[verb] if verb is not None else self.config).get("seed_everything")
        if isinstance(seed, int) and not 0 <= seed < 2**32:
            raise UserError(f"seed_everything must lie in 0..{2**32 - 1}, got {seed}")

    def _parse_ckpt_path(self) -> None:
        """Leave the configuration as typed: a checkpoint that disagrees with it is refused, not obeyed in silence."""

    # ----------------------------------------------------------------------------------------------- before the classes
    def before_instantiate_classes(self) -> None:
        config = self.config[self.config.subcommand] if "subcommand" in self.config else self.config
        budget, trainer = config.budget, config.trainer
        if trainer.default_root_dir is None:
            trainer.default_root_dir = "runs/default"
        check_numbers(trainer)
        if budget.tokens is not None:
            self._take_budget(config)
        elif trainer.max_steps == -1 and "subcommand" in self.config and self.config.subcommand == "fit":
            raise UserError("how long shall it train? Give budget.tokens (and the steps follow), or trainer.max_steps")
        if config.data is None:
            raise UserError("the recipe has no data; give data.class_path, such as zoo.data.TokenData")
        if trainer.callbacks is None:
            trainer.callbacks = []
        on_gpu = trainer.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
        if trainer.precision is None and trainer.plugins is None and on_gpu:
            trainer.precision = "bf16-mixed"

    def _take_budget(self, config: Any) -> None:
        """Steps follow from the budget; ``--trainer.max_steps`` on the command line may only cut a run short."""
        steps: Any = Budget(
            config.budget.batch_tokens, config.budget.tokens
        ).steps  # tokens are given, so it is a number
        typed = any(re.match(r"--trainer\.max_steps(=|$)", word) for word in self.given)
        asked, spanned = config.trainer.max_steps, config.model.total_steps
        if spanned not in (None, steps):
            raise UserError(
                f"model.total_steps is {spanned}, but budget.tokens makes {steps} steps; leave it to the budget: "
                "--model.total_steps null"
            )
        # The config.yaml of a run that was cut short holds both numbers.
        if asked not in (-1, steps) and not typed and spanned is None:
            raise UserError(
                f"the recipe gives budget.tokens ({config.budget.tokens:,}, which makes {steps} steps) and "
                f"trainer.max_steps ({asked}): "
                "keep one of them; --trainer.max_steps on the command line may cut a run short"
            )
        if asked > steps:
            raise UserError(
                f"--trainer.max_steps {asked}: it may only cut the {steps} steps of the budget short; raise the budget"
            )
        config.model.total_steps = steps
        config.trainer.max_steps = steps if asked == -1 else asked
        if asked not in (-1, steps):
            print(
                f"cut short: {asked} of {steps} steps (--trainer.max_steps); the schedule stays that of the whole run"
            )

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ValueError as error:
            if isinstance(error, UserError):
                raise
            # jsonargparse wraps what a class of ours raised; the message inside is the answer.
            raise UserError(missing_package(str(error)) or _shorten(str(error), self.parser)) from error

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        settings = self._get(self.config_init, "trainer")
        kwargs["logger"] = loggers(settings.logger, settings.default_root_dir)
        callbacks = settings.callbacks if isinstance(settings.callbacks, list) else [settings.callbacks]
        if settings.enable_progress_bar is not False and not any(isinstance(each, ProgressBar) for each in callbacks):
            kwargs["callbacks"] = [*callbacks, RichBar()]
        try:
            trainer: Any = super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, ValueError, TypeError, ImportError) as error:
            named = ("accelerator", "devices", "strategy", "precision")
            given = ", ".join(f"{name} {settings[name]}" for name in named if settings[name] not in (None, "auto"))
            raise UserError(
                f"trainer ({given}): {str(error).rstrip('.!')}. `zoo doctor` shows what serves on this machine."
            ) from error
        if settings.plugins is None:
            trainer.strategy.checkpoint_io = WholeFiles()
        trainer.callbacks += [RunHeader(), WritePredictions(), SaveOnSignal()]
        if trainer.logger is not None:
            trainer.callbacks.append(LearningRateMonitor(logging_interval="step"))
        return trainer

    # --------------------------------------------------------------------------------------------------- before the run
    def before_fit(self) -> None:
        config = self.config.fit
        root = Path(self.trainer.default_root_dir)
        if recover(root / LAST):
            print(f"{root / LAST}: finished what an interrupted save had begun")
        refuse_to_overwrite(root, config.ckpt_path)
        self._check("fit")
        budget = config.budget.tokens
        if budget is not None:
            print(f"budget: {budget:,} tokens, {config.budget.batch_tokens:,} a step, {self.trainer.max_steps} steps")

    def before_validate(self) -> None:
        self._need_checkpoint("validate")

    def before_test(self) -> None:
        self._need_checkpoint("test")

    def before_predict(self) -> None:
        self._need_checkpoint("predict")

    def _need_checkpoint(self, verb: str) -> None:
        path = self.config[verb].ckpt_path
        root = Path(self.trainer.default_root_dir)
        if path is None:
            raise UserError(f"zoo {verb} needs trained weights: --ckpt_path last (in {root}), or --ckpt_path FILE")
        self._check(verb)

    def _check(self, verb: str) -> None:
        """Refuse a checkpoint of another model before any strategy loads it; ``best`` becomes a path."""
        given, root = self.config[verb].ckpt_path, Path(self.trainer.default_root_dir)
        found = resolve_checkpoint(given, root)
        if found is not None:
            self.model.check_stored(found["zoo"], self.trainer.strategy, resumed=verb == "fit")
        if given == "best":
            self.config_init[verb].ckpt_path = str(root / BEST)  # what Lightning calls best, a new process cannot know


def needs_decoder(data: LightningDataModule) -> bool:
    """Whether rows of ``data`` are restored, not continued; only tasks are."""
    return bool(getattr(data, "decoder", False))


def loggers(given: Any, root: str) -> list[Logger]:
    """The loggers of a run: metrics.csv always, and TensorBoard where none is given; none where that is asked for.

    Made here and not in the configuration: a saved one, trained from again, would log into the old folder.

    Args:
        given: ``trainer.logger``: a logger, several, None or True for ours, False for none.
        root: the run's folder.
    """
    if given is not None and not given:
        return []
    csv = CSVLogger(root, name="logs", flush_logs_every_n_steps=10)
    if given is None or given is True:
        return [csv, TensorBoardLogger(root, name="tensorboard")]
    several = [given] if isinstance(given, Logger) else list(given)
    # First, as the folder of the first one is the run's log folder.
    return several if any(isinstance(logger, CSVLogger) for logger in several) else [csv, *several]


def missing_package(message: str) -> str | None:
    """What to do where a class of the recipe, such as a logger, wants a package that is not here; None for all else."""
    named = re.search(r"(?:Requirement|Module not found:|No module named) '([\w-]+)", message)
    if named is None:
        return None
    return (
        f"the recipe needs the package {named[1]}, which is not installed: `pip install {named[1]}`, or leave out what "
        "needs it"
    )


class SaveRun(SaveConfigCallback):
    """Keep, beside the logs, the configuration as resolved and the recipe files as written."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self.folder = trainer.log_dir  # every rank must ask: the answer is broadcast
        if stage == "fit":
            self.config = trained_again(self.config)
        super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        config = self.config[self.config.subcommand] if "subcommand" in self.config else self.config
        for number, path in enumerate(config.get("config") or [] if self.folder is not None else [], start=1):
            name = "recipe.yaml" if number == 1 else f"recipe.{number}.yaml"
            written = Path(os.fspath(path)).read_text(encoding="utf-8")
            Path(str(self.folder), name).write_text(written, encoding="utf-8")


def trained_again(config: Any) -> Any:
    """The configuration of a run that trains it again from its beginning, in another folder too.

    Without what followed from the budget, which would not follow another one, and without ``ckpt_path: last``: the run
    went on from itself, which is no other run than one that was never stopped.
    """
    again = config.clone()
    if again.budget.tokens is not None and again.trainer.max_steps == again.model.total_steps:
        again.trainer.max_steps, again.model.total_steps = -1, None
    if again.ckpt_path == "last":
        again.ckpt_path = None
    return again


def resolve_checkpoint(path: str | None, root: Path) -> dict[str, Any] | None:
    """What the checkpoint to start from says of itself, so that nobody trains from scratch by mistake.

    Raises:
        UserError: it does not exist, or cannot be read.
    """
    if path is None:
        return None
    if path in ("hpc", "registry"):
        raise UserError(f"--ckpt_path {path} means nothing to a new process; give last, best, or the checkpoint's file")
    wanted = {"last": root / LAST, "best": root / BEST}.get(path, Path(path))
    if not wanted.exists():
        raise UserError(f"--ckpt_path {path}: there is no {wanted}; leave the option out to train from scratch")
    return read_checkpoint(wanted) if wanted.is_file() else read_facts(wanted)


def check_numbers(trainer: Any) -> None:
    """Refuse numbers of the trainer that Lightning would stumble over in the middle of a run.

    Raises:
        UserError: with the setting, its value and what to give instead.
    """
    if trainer.max_steps == 0 or trainer.max_steps < -1:
        raise UserError(f"trainer.max_steps is {trainer.max_steps}, but a run has at least 1 step; -1: no limit")
    if trainer.accumulate_grad_batches < 1:
        raise UserError(f"trainer.accumulate_grad_batches is {trainer.accumulate_grad_batches}; give at least 1")
    if trainer.val_check_interval == 0:
        raise UserError("trainer.val_check_interval is 0; --trainer.limit_val_batches 0 leaves validation out")


def check_files(words: Sequence[str], parser: LightningArgumentParser) -> None:
    """Refuse recipe files that are no recipes, before their settings are read.

    Raises:
        UserError: a file that is missing, empty or no YAML mapping; a top-level key that is none, with the nearest.
    """
    known = sorted({action.dest.split(".")[0] for action in parser._actions} - {"help", "print_config"})
    for place, word in enumerate(words):
        name, sign, value = word.partition("=")
        if name not in ("--config", "-c") or not (sign or place + 1 < len(words)):
            continue
        path = Path(value if sign else words[place + 1])
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"recipe {path} cannot be read: {error.strerror}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UserError(f"recipe {path} is not valid YAML: {error}") from error
        if not isinstance(content, dict):
            raise UserError(f"recipe {path} holds no settings; a recipe has the keys budget, model, data and trainer")
        for key in content:
            if key not in known:
                listed = f"Keys: {' '.join(known)}."
                raise UserError(f"recipe {path} has an unknown key '{key}'{near(str(key), known)}\n{listed}")


HELP_LINE = "`zoo fit --help` lists every setting."
# What jsonargparse calls types, in words.
WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}


def _shorten(message: str, parser: LightningArgumentParser) -> str:
    """A jsonargparse message without its page: the setting, what is wrong, and the nearest name."""
    text = str(message).replace(HELP_LINE, "")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reasons = [line.removeprefix("- ") for line in lines if line.startswith("- ") and "NoneType" not in line]
    # The innermost reason is a user's own error where a class of ours raised it; it needs nothing around it.
    if not reasons:
        return _with_near(" ".join(lines), parser)
    key = re.search(r'Parser key "([^"]+)"', text)
    given = re.findall(r"Given value: (.+)", text)
    reason = re.sub(
        r"Expected an? <class '(\w+)'>",
        lambda m: f"expected {WORDS.get(m[1], m[1])}",
        "; ".join(dict.fromkeys(reasons)),
    )
    shown = f", got {given[0]}" if given and reason.startswith("expected") else ""
    return _with_near(f"{key[1] + ': ' if key and reason[:5] != 'data:' else ''}{reason}{shown}", parser)


def _with_near(text: str, parser: LightningArgumentParser) -> str:
    linked = re.search(r'(?:--> |Linked ")(model\.(?:vocab_size|decoder))', text)
    if linked is not None:
        return f"{linked[1]} follows from the data and is never written; leave it out"
    misplaced = re.search(r"does not accept option '(?:model\.)?([^'.]+)'|--model\.(\w+)(?:=|$)", text)
    name = next((word for word in misplaced.groups() if word), "") if misplaced else ""
    error = misplaced_key(name, "...") if name else None
    if error is not None:
        return str(error)
    key = re.search(r"(?:--|option ')([\w.]+)", text)
    known = [action.dest for action in parser._actions if action.dest and action.dest != "help"]
    close = difflib.get_close_matches(key[1], known, n=1, cutoff=0.75) if key and "id you mean" not in text else []
    hint = f" Did you mean {close[0]}?" if close and key and close[0] != key[1] else ""
    return f"{text.rstrip('.')}.{hint} {HELP_LINE}"


def stop_status(stop: SystemExit) -> int | None:
    """The exit status of a run that a signal ended, 128 and the signal as schedulers know it; None for any other exit.

    Lightning turns Ctrl-C into an exit with 1, and SIGTERM into one with 0, which would read as success.
    """
    if isinstance(stop, SIGTERMException):
        return TERMINATED
    if isinstance(stop.__context__, KeyboardInterrupt):
        print("interrupted; what the last checkpoint holds is kept", file=sys.stderr)
        return INTERRUPTED
    return None


def quiet(*, greetings: bool = True) -> None:
    """Silence what says nothing to the user of a run.

    Args:
        greetings: let Lightning tell devices and seeds; a comparison, which makes a Trainer for every arm, does
            without.
    """
    # Runs are refused where they would overwrite one (refuse_to_overwrite), so a folder with logs in it is as it should
    # be.
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
    # The loader packs batches in memory, faster than workers could hand them over.
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    # Lightning and PyTorch's pytree disagree about one of its classes; nothing of ours is concerned.
    warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.*")
    # compare builds its arms through the same command line, from Python.
    warnings.filterwarnings("ignore", "LightningCLI's args parameter is intended")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_no_advice)
    if not greetings:
        for name in ("lightning.pytorch", "lightning.fabric", "lightning_utilities.core.rank_zero"):
            logging.getLogger(name).setLevel(logging.WARNING)


def _no_advice(record: logging.LogRecord) -> bool:
    """Lightning recommends a product of its makers at the start of every run."""
    return "litlogger" not in record.getMessage()
