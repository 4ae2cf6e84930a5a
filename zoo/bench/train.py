"""Training steps of whole models: how many tokens a second, how much memory, and where the time goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, cast

import torch
import yaml
from torch import Tensor, nn

from zoo.architecture import Architecture, settle
from zoo.bench.peers import in_short
from zoo.bench.timing import FirstCall, Timing, first_call, release, time_call
from zoo.budget import non_embedding
from zoo.errors import UserError, out_of_memory
from zoo.model import HybridLM
from zoo.names import near
from zoo.optim import parameter_groups
from zoo.presets import preset, presets
from zoo_kernels.backend import observe

LENGTHS = ("2048x16", "4096x8", "8192x4", "16384x2", "32768x1")  # 32,768 tokens a step each
BASELINE = "transformer++"
SIZES = ("n_layers", "d_model", "d_ff", "vocab_size")
# A step above this takes minutes on a CPU, and says nothing there.
CPU_FLOPS = 1e12
CLIP = 1.0
PARTS_STEPS = 3
HEAD, OPTIMIZER, REST, STEP = "head and loss", "optimizer", "rest", "step"


@dataclass(frozen=True)
class Shape:
    """A batch of ``rows`` sequences of ``tokens`` tokens."""

    tokens: int
    rows: int

    @classmethod
    def read(cls, text: str) -> Shape:
        """From ``2048x16``.

        Raises:
            UserError: anything else.
        """
        tokens, cross, rows = text.partition("x")
        if not (cross and tokens.isdecimal() and rows.isdecimal() and int(tokens) and int(rows)):
            raise UserError(f"--lengths {text}: write tokens x rows, such as 2048x16")
        return cls(int(tokens), int(rows))

    def __str__(self) -> str:
        return f"{self.tokens}x{self.rows}"


@dataclass(frozen=True)
class Subject:
    """A model to measure.

    Attributes:
        name: of its preset.
        compiled: every block by ``torch.compile``.
        against: the label of the baseline that its speed is held against; None: it is one.
        recompute: what the backward computes again, as ``model.recompute`` of a recipe.
    """

    name: str
    architecture: Architecture
    compiled: bool
    against: str | None = None
    recompute: str = "none"

    @property
    def label(self) -> str:
        mode = "compiled" if self.compiled else "eager"
        return (
            f"{self.name} ({mode})" if self.recompute == "none" else f"{self.name} ({mode}, recompute {self.recompute})"
        )


@dataclass(frozen=True)
class PartTime:
    """Milliseconds a step in the forward and in the backward of one part."""

    forward_ms: float = 0.0
    backward_ms: float = 0.0


@dataclass(frozen=True)
class StepParts:
    """Where an eager step spends its time, the mean of several.

    Attributes:
        parts: mixers by kind, MLP, norms, head and loss; the rest is embedding, residual sums and casts.
        optimizer_ms: clipping and the optimizer.
        step_ms: the whole.
    """

    parts: Mapping[str, PartTime]
    optimizer_ms: float
    step_ms: float

    def shares(self) -> dict[str, float]:
        """Each part's share of the step; they sum to one."""
        found = {name: (part.forward_ms + part.backward_ms) / self.step_ms for name, part in self.parts.items()}
        return found | {"optimizer": self.optimizer_ms / self.step_ms}


@dataclass(frozen=True)
class Row:
    """What training one model with one shape of batch took.

    Attributes:
        reason: why nothing was measured; empty where something was.
        remark: what is missing besides.
        flops_per_token: model FLOPs of the forward at this length; training is three times that.
        first: the first step in this mode, compilation included.
        step: a whole step: forward, backward, clipping, optimizer.
        peak_bytes: allocated at the peak of a step, weights and optimizer states included; None without a GPU.
        parts: an eager step by part.
        backends: who served each op.
    """

    subject: Subject
    shape: Shape
    reason: str = ""
    remark: str = ""
    flops_per_token: float | None = None
    first: FirstCall | None = None
    step: Timing | None = None
    peak_bytes: int | None = None
    parts: StepParts | None = None
    backends: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.step is None else self.shape.tokens * self.shape.rows / (self.step.median_ms / 1e3)

    @property
    def flops_per_second(self) -> float | None:
        """Model FLOPs of training a second; nothing that is computed twice counts twice."""
        rate = self.tokens_per_second
        return None if rate is None or self.flops_per_token is None else 3 * self.flops_per_token * rate


# ------------------------------------------------------------------------------------------------- what to measure
def read_settings(words: Sequence[str]) -> dict[str, Any]:
    """The arguments of :func:`zoo.architecture.settle` in words such as ``d_model=64`` and ``GDN.heads=2``.

    Raises:
        UserError: a word that is no setting, with the nearest that is.
    """
    found: dict[str, Any] = {}
    for word in words:
        key, sign, text = word.partition("=")
        mixer, dot, option = key.partition(".")
        if not sign or not text or (dot and not option):
            raise UserError(f"--set {word}: write KEY=VALUE, such as --set n_layers=2 d_model=64 GDN.heads=2")
        value = yaml.safe_load(text)
        if dot:
            found.setdefault("mixers", {}).setdefault(mixer.upper(), {})[option] = value
        elif key not in SIZES:
            raise UserError(f"--set {word}: there is no size '{key}'{near(key, SIZES)}\nSizes: {' '.join(SIZES)}.")
        elif isinstance(value, bool) or not isinstance(value, int):
            raise UserError(f"--set {word}: {key} is a whole number, got '{text}'")
        else:
            found[key] = value
    return found


def select(
    names: Sequence[str],
    settings: Mapping[str, Any],
    *,
    compiled: bool,
    baseline: bool,
    compiled_baseline: bool,
    recompute: str = "none",
) -> list[Subject]:
    """The models to measure, their baselines first: for each the Transformer++ that is nearest in parameters.

    Args:
        names: presets with a size.
        settings: from :func:`read_settings`; for the baselines too.
        compiled, compiled_baseline: whether models, and baselines, are compiled.
        baseline: whether there are any.
        recompute: what the models' backward computes again; the baselines' nothing.

    Raises:
        UserError: a preset without a size; a setting that no model reads; ``selective`` for compiled blocks.
        PatternError, SpecError: a setting that does not fit a preset.
    """
    if compiled and recompute == "selective":
        raise UserError(
            "--recompute selective chooses among the ops that run, and compiled blocks have none of their own: take "
            "none or full, or leave --compile out"
        )
    own = {name: settle(preset=_sized(name), **settings) for name in names}
    pairs = {name: _nearest_baseline(name) if baseline else None for name in own}
    subjects: dict[str, Subject] = {}
    for name in filter(None, pairs.values()):
        found = Subject(name, settle(preset=name, **settings), compiled_baseline)
        subjects.setdefault(found.label, found)
    labels = {subject.name: subject.label for subject in subjects.values()}
    for name, architecture in own.items():
        found = Subject(name, architecture, compiled, labels.get(pairs[name] or ""), recompute)
        subjects.setdefault(found.label, found)
    read = {layer.mixer for subject in subjects.values() for layer in subject.architecture.layers}
    if unread := sorted(set(settings.get("mixers", {})) - read):
        raise UserError(
            f"--set {unread[0]}.…: no layer of these models is {unread[0]}; they have {' '.join(sorted(read))}"
        )
    return list(subjects.values())


def _sized(name: str) -> str:
    if preset(name).n_layers is None:
        sizes = [sized for sized in presets() if sized.rpartition("-")[0] == name]
        which = f"it has {' '.join(sizes)}" if sizes else "it has none; `zoo presets` lists those that do"
        raise UserError(f"zoo bench train measures presets with a size, and {name} is a pattern: {which}")
    return name


def _nearest_baseline(name: str) -> str:
    known = [sized for sized in presets() if sized.rpartition("-")[0] == BASELINE]
    size = non_embedding(settle(preset=name))
    return min(known, key=lambda other: abs(non_embedding(settle(preset=other)) - size))


def check_affordable(subjects: Sequence[Subject], shapes: Sequence[Shape]) -> None:
    """Refuse steps that a CPU would take minutes for.

    Raises:
        UserError: the first of them, with its FLOPs.
    """
    for subject in subjects:
        model = subject.architecture.build("meta")
        for shape in shapes:
            flops = 3 * model.flops_per_token(shape.tokens) * shape.tokens * shape.rows
            if flops > CPU_FLOPS:
                raise UserError(
                    f"zoo bench train: there is no CUDA GPU here, and a step of {subject.name} at {shape} is "
                    f"{flops / 1e12:,.0f} TFLOP.\nTo try the command: --lengths 64x2 --set n_layers=2 d_model=64"
                )


# ---------------------------------------------------------------------------------------------------- a step, by parts
class PartClock:
    """Notes when parts of a step begin and end: a CUDA event each on a GPU, the wall clock elsewhere."""

    def __init__(self, device: torch.device):
        self.device = device
        self.spans: list[tuple[str, bool, Any, Any]] = []  # part, whether backward, begin, end
        self.open: dict[tuple[str | int, bool], Any] = {}

    def begin(self, key: str | int, backward: bool = False) -> None:
        """Open a span."""
        self.open[key, backward] = self._now()

    def end(self, key: str | int, part: str, backward: bool = False) -> None:
        """Close it: it was spent in ``part``."""
        self.spans.append((part, backward, self.open.pop((key, backward)), self._now()))

    def summary(self, steps: int) -> StepParts:
        """Means a step; on a GPU the device must have finished."""
        sums: dict[str, list[float]] = {}
        for part, backward, begin, end in self.spans:
            passed = begin.elapsed_time(end) if self.device.type == "cuda" else 1e3 * (end - begin)
            sums.setdefault(part, [0.0, 0.0])[backward] += passed / steps
        step, optimizer = (sums.pop(name) for name in (STEP, OPTIMIZER))
        parts = {part: PartTime(*both) for part, both in sums.items()}
        # Of a step that is no part's: the gaps between spans.
        forward = step[0] - optimizer[0] - step[1] - sum(part.forward_ms for part in parts.values())
        backward = step[1] - sum(part.backward_ms for part in parts.values())
        return StepParts({**parts, REST: PartTime(forward, backward)}, optimizer[0], step[0])

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def parts_of(model: HybridLM) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose time is told, by part: mixers by kind, MLPs, norms of the residual stream."""
    for layer, block in zip(model.layers, model.each_block()):
        yield layer.mixer, block.mixer
        yield "norms", block.mixer_norm
        if block.mlp is not None and block.mlp_norm is not None:
            yield "MLP", block.mlp
            yield "norms", block.mlp_norm
    yield "norms", model.norm


@contextmanager
def listening(model: HybridLM, clock: PartClock) -> Iterator[None]:
    """Inside, ``clock`` hears when the model's parts run, forward and backward.

    The head has no module of its own in training: its forward is what follows the last norm's, and its backward what
    comes before the last norm's.
    """
    handles = []
    for part, module in parts_of(model):
        handles += _hooks(part, module, clock)
    handles.append(model.norm.register_forward_hook(lambda *_: clock.begin(HEAD)))
    handles.append(model.norm.register_full_backward_pre_hook(lambda *_: clock.end(HEAD, HEAD, True), prepend=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hooks(part: str, module: nn.Module, clock: PartClock) -> list[Any]:
    key = id(module)
    return [
        module.register_forward_pre_hook(lambda *_: clock.begin(key)),
        module.register_forward_hook(lambda *_: clock.end(key, part)),
        module.register_full_backward_pre_hook(lambda *_: clock.begin(key, True)),
        module.register_full_backward_hook(lambda *_: clock.end(key, part, True)),
    ]


class Trained:
    """A model under training as ``zoo fit`` trains it: bf16 autocast over fp32 weights on a GPU, fp32 on a CPU."""

    def __init__(self, architecture: Architecture, device: torch.device, recompute: str = "none"):
        self.device = device
        self.model = architecture.build(device, seed=0)
        self.model.set_recompute(recompute)
        self.weights = [p for p in self.model.parameters() if p.requires_grad]
        on_gpu = device.type == "cuda"
        groups = parameter_groups(self.model.named_parameters())
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=on_gpu)
        self.ids = self.labels = torch.empty(0)
        self.loss = torch.zeros(())

    def draw(self, shape: Shape) -> None:
        """Take a batch of random ids of this shape."""
        size, generator = (shape.rows, shape.tokens), torch.Generator().manual_seed(0)
        self.ids, self.labels = (
            torch.randint(self.model.vocab_size, size, generator=generator).to(self.device) for _ in range(2)
        )

    def forward(self) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            nll, tokens = self.model.nll(self.ids, self.labels)
        return nll / tokens

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.weights, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        """One optimizer step."""
        loss = self.forward()
        loss.backward()
        self.loss = loss.detach()
        self.update()

    def step_by_parts(self, clock: PartClock) -> None:
        """The same, told to ``clock``, which must be :func:`listening`."""
        clock.begin(STEP)
        loss = self.forward()
        clock.end(HEAD, HEAD)
        clock.begin(STEP, True)
        clock.begin(HEAD, True)
        loss.backward()
        clock.end(STEP, STEP, True)
        clock.begin(OPTIMIZER)
        self.update()
        clock.end(OPTIMIZER, OPTIMIZER)
        clock.end(STEP, STEP)

    def drop_gradients(self) -> None:
        """Free what a step that failed has left behind."""
        self.optimizer.zero_grad(set_to_none=True)
        release(self.device)

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """Inside, every block is compiled, for the shape of its first call alone."""
        eager = list(self.model.blocks)
        torch.compiler.reset()
        for index, block in enumerate(eager):
            self.model.blocks[index] = cast(nn.Module, torch.compile(block, dynamic=False))
        try:
            yield
        finally:
            for index, block in enumerate(eager):
                self.model.blocks[index] = block
            torch.compiler.reset()  # what it keeps would hold on to memory


# ------------------------------------------------------------------------------------------------------------ measuring
def measure(
    subject: Subject, shapes: Sequence[Shape], device: torch.device, *, steps: int | None = None
) -> Iterator[Row]:
    """Train one model with each shape of batch.

    Nothing that fails is raised: it is the reason in its row, running out of memory too.

    Args:
        steps: timed steps. None: 10 or more on a GPU, 3 on a CPU.
    """
    trained: Trained | None = None
    for shape in shapes:
        facts: dict[str, Any] = {}
        reason = ""
        try:
            trained = trained or Trained(subject.architecture, device, subject.recompute)
            trained.draw(shape)
            facts["flops_per_token"] = trained.model.flops_per_token(shape.tokens)
            _measure_shape(facts, trained, compiled=subject.compiled, steps=steps)
        except Exception as error:  # a compiler, a driver or a kernel may fail in any way
            reason = _why(error)
        if trained is not None:
            trained.drop_gradients()
        yield Row(subject, shape, reason, **facts)


def _measure_shape(facts: dict[str, Any], trained: Trained, *, compiled: bool, steps: int | None) -> None:
    """An eager step by parts, then whole steps in the mode that is asked for."""
    device = trained.device
    try:
        facts |= _eager(trained)
    except Exception as error:
        # A compiled step may need less memory.
        if not (compiled and out_of_memory(error)):
            raise
        facts["remark"] = "no parts: an eager step runs out of memory"
    trained.drop_gradients()
    with trained.compiled() if compiled else nullcontext():
        if compiled:
            facts["first"] = first_call(trained.step, device)
        timing = time_call(trained.step, device, steps)
        facts["peak_bytes"] = peak_bytes(trained.step, device)
    if not bool(trained.loss.isfinite()):
        raise ArithmeticError("the loss is not finite")
    facts["step"] = timing


def _eager(trained: Trained) -> dict[str, Any]:
    """The first step, who served its ops, and the parts of some further steps."""
    served: dict[str, set[str]] = {}
    with observe(lambda op, _, name: served.setdefault(op, set()).add(name)):
        first = first_call(trained.step, trained.device)
    clock = PartClock(trained.device)
    with listening(trained.model, clock):
        for _ in range(PARTS_STEPS):
            trained.step_by_parts(clock)
    if trained.device.type == "cuda":
        torch.cuda.synchronize(trained.device)
    return {
        "first": first,
        "backends": {op: sorted(names) for op, names in sorted(served.items())},
        "parts": clock.summary(PARTS_STEPS),
    }


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int | None:
    """The peak of allocated memory during a call, with all that was there before; None where there is no GPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def _why(error: BaseException) -> str:
    return "out of memory" if out_of_memory(error) else f"failed: {in_short(error)}"
