"""What this installation can do: versions, compilers, devices; who serves each op, and whether it is right."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo_kernels.accuracy import limit, relative_error
from zoo_kernels.attention import attention
from zoo_kernels.backend import explain, observe
from zoo_kernels.conv import short_conv
from zoo_kernels.delta import delta_rule, delta_step
from zoo_kernels.norm import gated_rms_norm, l2_norm, rms_norm
from zoo_kernels.rotary import rotary
from zoo_kernels.scale import scale_rows
from zoo_kernels.selective import selective_scan, selective_step
from zoo_layers.conformance import REFERENCE
from zoo_layers.mixer import broken, registered

# Packages that change what is possible here, and what for. Those marked optional may be absent.
PACKAGES = {
    "torch": "everything",
    "triton": "compiles kernels for GPUs (optional: the PyTorch backends serve without it)",
    "lightning": "fit, validate, test, predict",
    "tokenizers": "tokenizers other than bytes (optional)",
    "flash_attn": "attention (optional: 2.x is the backend flash2, flash-attn-4 the backend flash4)",
}
C_COMPILERS = ("cc", "gcc", "clang")
# Longer than a chunk of the delta rule and than the window, and a multiple of neither, so that every path is taken.
TOKENS, WINDOW = 150, 64
WIDE = ("log_decay", "beta", "initial_state", "dt", "A", "D")


@dataclass(frozen=True)
class Row:
    """One line of the report.

    Attributes:
        kind: groups lines.
        name: what the line is about.
        state: the finding.
        fault: what is installed gives wrong results or none, so that nobody should train here before it is repaired.
            What is merely absent is no fault.
    """

    kind: str
    name: str
    state: str
    fault: bool = False


def examine() -> list[Row]:
    """Look at everything, by trying it; nothing found here raises."""
    return [*_packages(), *_compilers(), *_devices(), *_ops(), *_mixers()]


# -------------------------------------------------------------------------------------------------------- what there is
def _packages() -> Iterator[Row]:
    yield Row("package", "python", platform.python_version())
    for name, purpose in PACKAGES.items():
        yield Row("package", name, f"{probe(name)}: {purpose}")


def probe(name: str) -> str:
    """The version of a package, "not installed", or why it is installed but does not import."""
    try:
        if importlib.util.find_spec(name) is None:
            return "not installed"
        importlib.import_module(name)
    except Exception as error:  # a broken wheel may raise anything; the report must go on
        return f"installed, but does not import ({_in_short(error)})"
    try:
        return version(name.replace("_", "-"))
    except PackageNotFoundError:  # a folder that a package of another name fills, as flash-attn-4 does flash_attn
        owners = sorted(set(packages_distributions().get(name, ())))
        return ", ".join(f"{owner} {version(owner)}" for owner in owners) or "importable, version unknown"


def _compilers() -> Iterator[Row]:
    yield Row("compiler", "triton", _triton())
    named = (os.environ.get("CC"), *C_COMPILERS)
    found = next((path for name in named if name and (path := shutil.which(name))), None)
    yield Row("compiler", "C", found or "none found (CC, cc, gcc, clang); Triton and torch.compile need one")


def _triton() -> str:
    """What Triton compiles for, what of that is here, and with which assembler."""
    try:
        from triton import knobs
        from triton.backends import backends

        active = [name for name, found in backends.items() if found.driver.is_active()]
        return (
            f"for {' and '.join(sorted(backends))}; active here: {', '.join(active) or 'none, without a GPU'}; "
            f"ptxas {knobs.nvidia.ptxas.version}"
        )
    except ModuleNotFoundError as error:
        return "none" if error.name == "triton" else f"unknown ({_in_short(error)})"
    except Exception as error:  # another release may keep these facts elsewhere, and a broken one may raise anything
        return f"unknown ({_in_short(error)})"


def _devices() -> Iterator[Row]:
    yield Row("device", "cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads for PyTorch")
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
        yield Row("device", "cuda", f"no device can be used; PyTorch is {built}")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield Row(
            "device",
            f"cuda:{index}",
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, sm_{properties.major}{properties.minor}, "
            f"{properties.multi_processor_count} multiprocessors",
        )


def _mixers() -> Iterator[Row]:
    try:
        yield Row("mixers", "registered", " ".join(registered()))
    except ValueError as error:  # two packages claim one name
        yield Row("mixers", "registered", _in_short(error), fault=True)
        return
    for name, reason in broken().items():
        yield Row("mixers", name, f"a plug-in that does not load: {reason}")


# -------------------------------------------------------------------------------------------------- whether it is right
@dataclass(frozen=True)
class Trial:
    """An op on a few tokens: who serves it, and whether the one who does gives what the op's reference gives.

    Attributes:
        op: its name in the table of backends.
        name: what sets this trial of the op apart from others.
        operands: draws them in float64 from a generator, under the names of the op's parameters.
        run: (operands, backend) -> outputs, under the names of :mod:`zoo_kernels.accuracy`.
        learns: whether the op has gradients, to be tried too.
    """

    op: str
    name: str
    operands: Callable[[torch.Generator], dict[str, Tensor]]
    run: Callable[[dict[str, Tensor], str | None], dict[str, Tensor]]
    learns: bool = True


def _ops() -> Iterator[Row]:
    dtypes = {"cpu": torch.float32, **({"cuda": torch.bfloat16} if torch.cuda.is_available() else {})}
    for device, dtype in dtypes.items():
        for trial in TRIALS:
            yield from examine_op(trial, device, dtype)


def examine_op(trial: Trial, device: str, dtype: torch.dtype) -> Iterator[Row]:
    """Who serves a call of the trial's op, and how far its outputs and gradients are from the truth."""
    where = ", ".join(filter(None, (device, str(dtype).removeprefix("torch."), trial.name)))
    seen: list[tuple[str, Any, str]] = []
    try:
        with observe(lambda *choice: seen.append(choice)):
            errors = _errors(trial, device, dtype)
    except Exception as error:  # a driver, a compiler or a kernel may fail in any way
        verdict, right = f"FAILS: {_in_short(error)}", False
    else:
        worst = max(errors, key=lambda quantity: errors[quantity] / limit(quantity, dtype))
        figures = f"{worst} is off by {errors[worst]:.1e}, {limit(worst, dtype):.0e} is allowed"
        right = errors[worst] <= limit(worst, dtype)
        verdict = f"holds; worst of {len(errors)} results: {figures}" if right else f"WRONG: {figures}"
    if seen:
        op, call, _ = seen[0]
        yield from (Row(op, f"{name} ({where})", state) for name, state in explain(op, call))
    yield Row(trial.op, f"self-test ({where})", verdict, fault=not right)


def _errors(trial: Trial, device: str, dtype: torch.dtype) -> dict[str, float]:
    """The relative error of each output and gradient of the chosen backend; the truth is the CPU's, in float64."""
    drawn = trial.operands(torch.Generator().manual_seed(0))
    # Gates and states are fp32 in every precision, as the layers give them.
    given = {name: x.to(device, torch.float32 if name in WIDE else dtype) for name, x in drawn.items()}
    got, upstream = _results(trial, given, None)
    given, upstream = ({name: x.cpu().double() for name, x in tensors.items()} for tensors in (given, upstream))
    exact, _ = _results(trial, given, REFERENCE[trial.op], upstream)
    return {name: relative_error(got[name], exact[name]) for name in exact}


def _results(
    trial: Trial, operands: dict[str, Tensor], backend: str | None, upstream: dict[str, Tensor] | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs and gradients by name, and what was propagated back: ``upstream``, or else the outputs themselves."""
    leaves = {name: x.clone().requires_grad_(trial.learns) for name, x in operands.items()}
    outputs = trial.run(leaves, backend)
    if not trial.learns:
        return outputs, {}
    upstream = upstream or {name: y.detach() for name, y in outputs.items()}
    found = torch.autograd.grad(list(outputs.values()), list(leaves.values()), [upstream[name] for name in outputs])
    return {**outputs, **{f"d{name}": gradient for name, gradient in zip(leaves, found)}}, upstream


def _delta_operands(draw: torch.Generator) -> dict[str, Tensor]:
    q, k, v = torch.randn(3, 1, TOKENS, 2, 64, generator=draw, dtype=torch.float64).unbind(0)
    beta, fade = torch.rand(2, 1, TOKENS, 2, generator=draw, dtype=torch.float64).unbind(0)
    return {"q": F.normalize(q, dim=-1), "k": F.normalize(k, dim=-1), "v": v, "log_decay": -fade, "beta": beta}


def _delta(operands: dict[str, Tensor], backend: str | None) -> dict[str, Tensor]:
    q, k, v, log_decay, beta = (operands[name] for name in ("q", "k", "v", "log_decay", "beta"))
    y, last_state = delta_rule(q, k, v, log_decay=log_decay, beta=beta, backend=backend)
    return {"y": y, "last_state": last_state}


def _step_operands(draw: torch.Generator) -> dict[str, Tensor]:
    state = torch.randn(1, 2, 64, 64, generator=draw, dtype=torch.float64)
    return {**{name: x[:, :4] for name, x in _delta_operands(draw).items()}, "initial_state": state}


def _step(operands: dict[str, Tensor], backend: str | None) -> dict[str, Tensor]:
    q, k, v, log_decay, beta = (operands[name] for name in ("q", "k", "v", "log_decay", "beta"))
    state = operands["initial_state"].clone()
    y = delta_step(q, k, v, state, log_decay=log_decay, beta=beta, backend=backend)
    return {"y": y, "last_state": state}


def _attention_operands(draw: torch.Generator) -> dict[str, Tensor]:
    q, k, v = torch.randn(3, 1, TOKENS, 4, 64, generator=draw, dtype=torch.float64).unbind(0)
    return {"q": q, "k": k[:, :, :2], "v": v[:, :, :2]}


def _attention(operands: dict[str, Tensor], backend: str | None, window: int | None) -> dict[str, Tensor]:
    return {"y": attention(operands["q"], operands["k"], operands["v"], window=window, backend=backend)}


def _conv_operands(draw: torch.Generator) -> dict[str, Tensor]:
    x = torch.randn(1, TOKENS, 64, generator=draw, dtype=torch.float64)
    return {"x": x, "weight": torch.randn(64, 4, generator=draw, dtype=torch.float64) / 2}


def _conv(operands: dict[str, Tensor], backend: str | None) -> dict[str, Tensor]:
    y, last_state = short_conv(operands["x"], operands["weight"], activation="silu", backend=backend)
    return {"y": y, "last_state": last_state}


def _norm_operands(draw: torch.Generator) -> dict[str, Tensor]:
    x = torch.randn(1, TOKENS, 128, generator=draw, dtype=torch.float64)
    return {"x": x, "weight": torch.randn(64, generator=draw, dtype=torch.float64)}


def _norm(operands: dict[str, Tensor], backend: str | None, kind: str) -> dict[str, Tensor]:
    # Slices of one tensor, as layers give them. L2 gets a weight: upstream of itself, its gradient would be nearly 0.
    (x, gate), weight = operands["x"].chunk(2, dim=-1), operands["weight"]
    if kind == "gated":
        return {"y": gated_rms_norm(x, weight, gate, backend=backend)}
    return {"y": weight * (rms_norm(x, weight, backend=backend) if kind == "rms" else l2_norm(x, backend=backend))}


def _rotary_operands(draw: torch.Generator) -> dict[str, Tensor]:
    return {"x": torch.randn(1, TOKENS, 4, 64, generator=draw, dtype=torch.float64)}


def _rotary(operands: dict[str, Tensor], backend: str | None) -> dict[str, Tensor]:
    x = operands["x"]
    return {"y": rotary(x, torch.arange(x.shape[1], device=x.device), fraction=0.5, backend=backend)}


def _scale_operands(draw: torch.Generator) -> dict[str, Tensor]:
    x = torch.randn(1, TOKENS, 4, 128, generator=draw, dtype=torch.float64)
    return {"x": x, "weight": torch.randn(1, TOKENS, 4, generator=draw, dtype=torch.float64)}


def _scale(operands: dict[str, Tensor], backend: str | None) -> dict[str, Tensor]:
    x, add = operands["x"].chunk(2, dim=-1)
    return {"y": scale_rows(x, operands["weight"], add, backend=backend)}


def _scan_operands(draw: torch.Generator) -> dict[str, Tensor]:
    x, dt = torch.randn(2, 1, TOKENS, 64, generator=draw, dtype=torch.float64).unbind(0)
    B, C = torch.randn(2, 1, TOKENS, 16, generator=draw, dtype=torch.float64).unbind(0)
    A, D = -4 * torch.rand(64, 16, generator=draw, dtype=torch.float64), torch.randn(64, generator=draw).double()
    return {"x": x, "dt": F.softplus(dt - 2), "A": A, "B": B, "C": C, "D": D}


def _scan(operands: dict[str, Tensor], backend: str | None) -> dict[str, Tensor]:
    x, dt, A, B, C, D = (operands[name] for name in ("x", "dt", "A", "B", "C", "D"))
    y, last_state = selective_scan(x, dt, A, B, C, D, backend=backend)
    return {"y": y, "last_state": last_state}


def _scan_step_operands(draw: torch.Generator) -> dict[str, Tensor]:
    state = torch.randn(1, 16, 64, generator=draw, dtype=torch.float64)
    operands = _scan_operands(draw)
    return {n: x[:, :4] if n in ("x", "dt", "B", "C") else x for n, x in operands.items()} | {"initial_state": state}


def _scan_step(operands: dict[str, Tensor], backend: str | None) -> dict[str, Tensor]:
    tokens = {name: x for name, x in operands.items() if name != "initial_state"}
    state = operands["initial_state"].clone()
    return {"y": selective_step(**tokens, state=state, backend=backend), "last_state": state}


TRIALS = (
    Trial("delta_rule", "", _delta_operands, _delta),
    Trial("delta_step", "", _step_operands, _step, learns=False),
    Trial("selective_scan", "", _scan_operands, _scan),
    Trial("selective_step", "", _scan_step_operands, _scan_step, learns=False),
    Trial("attention", "full", _attention_operands, partial(_attention, window=None)),
    Trial("attention", f"window {WINDOW}", _attention_operands, partial(_attention, window=WINDOW)),
    Trial("short_conv", "", _conv_operands, _conv),
    Trial("rms_norm", "", _norm_operands, partial(_norm, kind="rms")),
    Trial("gated_rms_norm", "", _norm_operands, partial(_norm, kind="gated")),
    Trial("l2_norm", "", _norm_operands, partial(_norm, kind="l2")),
    Trial("scale_rows", "", _scale_operands, _scale),
    Trial("rotary", "", _rotary_operands, _rotary),
)


def _in_short(error: Exception) -> str:
    """The kind of an error and its first line."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:200]}" if first else type(error).__name__
