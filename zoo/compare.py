"""Arms under one budget: same tokens, same order, same schedule, parameters matched; trained one after another."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from zoo.architecture import Architecture
from zoo.budget import TOLERANCE, match_parameters, non_embedding
from zoo.callbacks import ProgressLines, Throughput
from zoo.errors import UserError
from zoo.presets import preset, presets
from zoo.recipe import ZooCLI
from zoo.run import LAST, read_metrics


@dataclass(frozen=True)
class Arm:
    """One architecture of a comparison, sized to the budget.

    Attributes:
        text: as the user wrote it.
        architecture: with its matched ``d_ff``.
        non_embedding: parameters without embedding and head.
        deviation: of these from the reference, as a signed share.
        flops_per_token: of the forward, per token, at the training context.
        state_bytes: what decoding keeps per sequence at the comparison's context.
    """

    text: str
    architecture: Architecture
    total: int
    non_embedding: int
    deviation: float
    flops_per_token: float
    state_bytes: int


@dataclass
class Result:
    """What one arm gave.

    Attributes:
        status: "finished", "diverged" (a loss that is not finite) or "failed" (with ``error``).
        loss, bpb: validation, nats per token and bits per byte, after the last step.
        curve: (tokens, validation bits per byte) pairs.
        train_curve: (tokens, training loss in nats per token) pairs.
    """

    arm: Arm
    status: str
    seed: int | None = None
    loss: float = math.nan
    bpb: float = math.nan
    tokens: int = 0
    seconds: float = math.nan
    tokens_per_second: float = math.nan
    order_hash: str = ""
    error: str = ""
    curve: list[tuple[int, float]] = field(default_factory=list)
    train_curve: list[tuple[int, float]] = field(default_factory=list)

    @property
    def score(self) -> str:
        """The validation's outcome in words; a task has no bytes."""
        return f"{self.bpb:.4f} bits per byte" if math.isfinite(self.bpb) else f"{self.loss:.4f} nats per label"


@dataclass(frozen=True)
class Plan:
    """A comparison, settled before anything trains.

    Attributes:
        recipe: the YAML file that all arms share.
        overrides: further settings for all arms, as on the command line.
        held: what is equal, in words.
        reference: non-embedding parameters that every arm is matched to.
        context: tokens at which the decode state is counted.
        data_hash: names the text; empty where the data is a task, which the recipe names whole.
    """

    arms: tuple[Arm, ...]
    recipe: Path
    overrides: tuple[str, ...]
    reference: int
    reference_text: str
    tolerance: float
    context: int
    data_hash: str = ""

    @property
    def held(self) -> str:
        """The first line of every report."""
        worst = max(abs(arm.deviation) for arm in self.arms)
        return (
            f"held: training tokens and their order (exact); parameters without embedding and head "
            f"({self.reference:,} of {self.reference_text}, within {self.tolerance:.1%}: worst {worst:.2%})"
        )


# ----------------------------------------------------------------------------------------------------------------- plan
def make_plan(
    patterns: Sequence[str],
    recipe: str | Path,
    *,
    overrides: Sequence[str] = (),
    tolerance: float = TOLERANCE,
    context: int = 4096,
) -> Plan:
    """Size every arm to the recipe's own model; nothing is trained or written.

    Args:
        patterns: patterns, or presets by name (their pattern, options and MLP; sizes are the recipe's).
        recipe: a training recipe; its model is the reference that arms are matched to.
        overrides: settings for all arms, as they would follow ``zoo fit``.
        tolerance: the largest deviation in parameters, as a share.
        context: where the decode state is counted, in tokens.

    Raises:
        UserError, PatternError, SpecError: what is wrong with an arm or the recipe.
    """
    if not patterns:
        raise UserError(
            "compare what? Name at least one pattern: zoo compare GA GDN,SWA --recipe recipes/tiny_text.yaml"
        )
    if context < 1:
        raise UserError(f"--context must be at least 1 token, got {context}")
    path = Path(recipe)
    if not path.is_file():
        raise UserError(f"no recipe at {path}; recipes are YAML files, such as recipes/tiny_text.yaml")
    base = instantiate(path, overrides)
    own: Architecture = base.model.architecture
    target = non_embedding(own)
    sized = [(text, match_parameters(_arm_architecture(text, own), target, tolerance=tolerance)) for text in patterns]
    names: dict[tuple[str, str], str] = {}
    for text, match in sized:
        same = names.setdefault((match.architecture.canonical, match.architecture.mlp), text)
        if same != text or list(patterns).count(text) > 1:
            raise UserError(f"{same} and {text} are one model, named twice; compare an arm with another")
    arms = []
    for text, match in sized:
        model = match.architecture.build(device="meta")
        arms.append(
            Arm(
                text,
                match.architecture,
                model.parameter_counts().total,
                match.non_embedding,
                match.deviation,
                model.flops_per_token(base.datamodule.seq_len),
                model.state_bytes(context),
            )
        )
    manifest = getattr(base.datamodule, "manifest", None)
    data_hash = manifest()["content_hash"] if manifest is not None else ""
    return Plan(tuple(arms), path, tuple(overrides), target, str(own.pattern), tolerance, context, data_hash)


def _arm_architecture(text: str, own: Architecture) -> Architecture:
    """The recipe's model with another pattern; a preset brings its options and its MLP too."""
    if text in presets():
        found = preset(text)
        return own.with_pattern(found.pattern, mixers=found.mixers, mlp=found.mlp)
    return own.with_pattern(text)


def instantiate(recipe: Path, overrides: Sequence[str]) -> ZooCLI:
    """Read a recipe with further settings: its trainer, model and data module, ready to run."""
    return ZooCLI(["--config", str(recipe), *overrides], run=False)


# ------------------------------------------------------------------------------------------------------------------ run
def run_plan(plan: Plan, out: str | Path, *, say: Callable[[str], None] = print) -> list[Result]:
    """Train and evaluate every arm, one after another; finished arms of the same plan are not run again.

    Args:
        plan: from :func:`make_plan`.
        out: the comparison's folder: one folder an arm, and the report.
        say: takes lines of progress.

    Raises:
        UserError: ``out`` holds another comparison, or the arms did not read the same tokens in the same order.
    """
    out = Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: the folder cannot be made ({error.strerror}); name another") from error
    results = []
    for number, arm in enumerate(plan.arms, start=1):
        folder = out / f"{number:02d}-{_file_name(arm.text)}"
        say(f"arm {number} of {len(plan.arms)}: {arm.text} (d_ff {arm.architecture.d_ff})")
        results.append(_run_arm(plan, arm, folder, say))
    hashes = {result.order_hash for result in results if result.status == "finished"}
    if len(hashes) > 1:
        raise UserError(f"the arms did not read the same tokens in the same order; the comparison in {out} is void")
    return results


def _run_arm(plan: Plan, arm: Arm, folder: Path, say: Callable[[str], None]) -> Result:
    key = _key(plan, arm)
    status = folder / "status.json"
    stored = json.loads(status.read_text(encoding="utf-8")) if status.is_file() else {}
    if stored and stored["key"] != key:
        raise UserError(
            f"{folder} holds an arm of another comparison (recipe, settings or pattern differ); take another folder: "
            "--out FOLDER"
        )
    if stored.get("status") == "finished":
        result = _read_result(arm, stored)
        say(f"  finished before: {result.score}")
        return result
    folder.mkdir(parents=True, exist_ok=True)
    write_json(status, {"key": key, "status": "running"})
    try:
        result = _train(plan, arm, folder, say)
    except RuntimeError as error:
        # One arm that fails, out of memory for example, does not take the others with it; the table shows it. A user's
        # error concerns the recipe, so it ends the comparison.
        result = Result(arm, "failed", error=f"{type(error).__name__}: {error}".splitlines()[0])
        say(f"  failed: {result.error}")
    if result.status == "finished":
        say(f"  {result.score} after {result.tokens:,} tokens in {result.seconds:.0f} s")
    write_json(status, {"key": key, **plain_result(result)})
    return result


def _train(plan: Plan, arm: Arm, folder: Path, say: Callable[[str], None]) -> Result:
    cli = instantiate(plan.recipe, [*plan.overrides, "--config", str(_write_arm(arm, folder))])
    trainer: Any = cli.trainer
    trainer.callbacks.append(ProgressLines(say))
    (folder / "recipe.yaml").write_text(plan.recipe.read_text(encoding="utf-8"), encoding="utf-8")
    begun = time.perf_counter()
    resume = "last" if (folder / LAST).exists() else None
    trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=resume)
    seconds = time.perf_counter() - begun
    loader: Any = trainer.train_dataloader  # validation below replaces it
    (final,) = trainer.validate(cli.model, datamodule=cli.datamodule, verbose=False)
    rate = next(c.mean_rate for c in trainer.callbacks if isinstance(c, Throughput))
    tokens = trainer.global_step * cli.datamodule.batch_tokens
    loss, bpb = final["val/loss"], final.get("val/bpb", math.nan)
    rows = read_metrics(folder)
    per_step = cli.datamodule.batch_tokens
    return Result(
        arm,
        "finished" if math.isfinite(loss) else "diverged",
        seed=cli.config.get("seed_everything"),
        loss=loss,
        bpb=bpb,
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=rate if rate is not None else math.nan,
        order_hash=loader.order_hash,
        curve=[
            ((int(r["step"]) + 1) * per_step, r["val/bpb"])
            for r in rows
            if "val/bpb" in r and int(r["step"]) < trainer.global_step
        ],
        train_curve=[((int(r["step"]) + 1) * per_step, r["train/loss"]) for r in rows if "train/loss" in r],
    )


def _write_arm(arm: Arm, folder: Path) -> Path:
    """What makes the shared recipe this arm's, as a second file: `zoo fit --config RECIPE --config ARM`."""
    plain = arm.architecture.to_plain()
    content = {
        "model": {name: plain[name] for name in ("pattern", "n_layers", "d_ff", "mlp", "mixers")},
        "trainer": {"default_root_dir": str(folder), "enable_progress_bar": False},
    }
    path = folder / "arm.yaml"
    path.write_text(f"# {arm.text}, sized to the budget\n" + yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path


def _key(plan: Plan, arm: Arm) -> str:
    """Names what an arm is: recipe, overrides, architecture and text. The folder is not part of it."""
    recipe = plan.recipe.read_text(encoding="utf-8")
    content = [recipe, list(plan.overrides), arm.architecture.to_plain(), plan.data_hash]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "_+-." else "_" for c in text)[:60]


def plain_result(result: Result) -> dict[str, Any]:
    plain = {k: v for k, v in asdict(result).items() if k != "arm"}
    arm = result.arm
    plain["arm"] = {
        "text": arm.text,
        "canonical": arm.architecture.canonical,
        "architecture": arm.architecture.to_plain(),
        "parameters": {"total": arm.total, "non_embedding": arm.non_embedding},
        "deviation": arm.deviation,
        "flops_per_token_forward": arm.flops_per_token,
        "state_bytes": arm.state_bytes,
    }
    return plain


def _read_result(arm: Arm, stored: dict[str, Any]) -> Result:
    kept = {k: v for k, v in stored.items() if k not in ("arm", "key") and v is not None}
    kept["curve"], kept["train_curve"] = ([tuple(p) for p in kept[k]] for k in ("curve", "train_curve"))
    return Result(arm, **kept)


def _finite(content: Any) -> Any:
    """JSON knows no NaN: numbers that are not finite become null."""
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def write_json(path: Path, content: Any) -> None:
    """Written whole or not at all: a kill leaves the old file."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(_finite(content), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(path)
