"""One case measured: ours, then each peer, on the same inputs in the same process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.bench.ops import Case, Inputs
from zoo.bench.peers import Bound, in_short, peers_of
from zoo.bench.roofline import Work
from zoo.bench.timing import FirstCall, Timing, captured, extra_bytes, first_call, release, time_call
from zoo_kernels.accuracy import relative_error
from zoo_kernels.backend import observe

# Sets a call up; what it raises is a reason, as is what the call raises.
Bind = Callable[[], Bound]
# Outputs are compared at both ends of the first row: the start, and what has forgotten or kept the most.
COMPARED = 1024


@dataclass(frozen=True)
class Measurement:
    """What one library's op took for one case.

    Attributes:
        who: the backend of ours, or the peer with its version.
        peer: whether it is somebody else's.
        reason: why nothing, or not all, was measured; empty where all was.
        forward, both: of the forward without gradients, and of forward and backward together.
        replay, replay_both: of CUDA graphs of the same, where the case has them: the device's time without the host's.
        extra_bytes: the peak above the inputs in forward and backward together, outputs and gradients included.
        work, work_both: the least that must be moved and computed.
        difference: of y from ours, relative, at both ends of the first row; None for the first of ours, and where calls
            change their inputs.
    """

    case: Case
    who: str
    peer: bool
    reason: str = ""
    first: FirstCall | None = None
    forward: Timing | None = None
    both: Timing | None = None
    replay: Timing | None = None
    replay_both: Timing | None = None
    extra_bytes: int | None = None
    work: Work | None = None
    work_both: Work | None = None
    difference: float | None = None


def measure(
    case: Case, device: torch.device, dtype: torch.dtype, *, peers: bool = True, repeats: int | None = None
) -> Iterator[Measurement]:
    """Measure ours and, with ``peers``, everyone else who has an op for the case, on the same inputs.

    Nothing that fails in them is raised: it is the reason in their line.
    """
    torch.manual_seed(0)
    inputs = case.draw(device, dtype)
    truth: Tensor | None = None
    for who, peer, bind in [*_ours(case, inputs, device), *(_peers(case, inputs) if peers else ())]:
        if isinstance(bind, str):
            yield Measurement(case, who, peer, f"not available: {bind}")
            continue
        found, ends = _measured(case, dtype, device, who, peer, bind, truth, repeats)
        truth = ends if truth is None and not peer else truth
        release(device)
        yield found


def _ours(case: Case, inputs: Inputs, device: torch.device) -> Iterator[tuple[str, bool, Bind | str]]:
    leaves = leaves_of(case, inputs)
    for backend in case.ours(device):
        yield f"ours: {backend}" if backend else "ours", False, lambda b=backend: (leaves, case.bind(inputs, b))


def _peers(case: Case, inputs: Inputs) -> Iterator[tuple[str, bool, Bind | str]]:
    for peer in peers_of(case):
        if isinstance(peer, str):
            name, _, reason = peer.partition(": ")
            yield name, True, reason
            continue
        function = peer.load()
        if isinstance(function, str):
            yield peer.label, True, function
        else:
            yield peer.label, True, lambda p=peer, f=function: p.bind(f, case, inputs)


def _measured(
    case: Case,
    dtype: torch.dtype,
    device: torch.device,
    who: str,
    peer: bool,
    bind: Bind,
    truth: Tensor | None,
    repeats: int | None,
) -> tuple[Measurement, Tensor | None]:
    """One line of the table, and both ends of its output."""
    work, backward_work = case.work(dtype)
    facts: dict[str, Any] = {"work": work}
    graphed = device.type == "cuda" and (case.in_place or case.graphed)
    ends = None
    chosen: list[str] = []
    try:
        leaves, call = bind()
        with observe(lambda op, _, name: chosen.append(name)):
            facts["first"] = first_call(lambda: trained(call, leaves), device)
        with torch.no_grad():
            y = call()
        ends = _ends(y)
        upstream = torch.randn_like(y)
        del y
        if truth is not None and not case.in_place:
            facts["difference"] = relative_error(ends, truth)
        if not bool(ends.isfinite().all()):
            raise ArithmeticError("y holds numbers that are not finite")
        with torch.no_grad():
            facts["forward"] = time_call(call, device, repeats)
            if graphed:
                facts["replay"] = time_call(captured(call, device), device, repeats)
        if case.backward:
            facts["work_both"] = work + backward_work
            facts["both"] = time_call(lambda: trained(call, leaves, upstream), device, repeats)
            if graphed:
                step = captured(lambda: trained(call, leaves, upstream), device)
                facts["replay_both"] = time_call(step, device, repeats)
            facts["extra_bytes"] = extra_bytes(lambda: trained(call, leaves, upstream), device)
        else:
            with torch.no_grad():
                facts["extra_bytes"] = extra_bytes(call, device)
        reason = ""
    except ImportError as error:
        reason = f"not available: {in_short(error)}"
    except ValueError as error:  # what our ops say of a call they cannot serve; of peers, the same
        reason = f"refused: {in_short(error)}"
    except Exception as error:  # a compiler, a driver or a kernel may fail in any way
        reason = f"failed: {in_short(error)}"
    if not peer and chosen:
        who = f"ours: {chosen[0]}" + (" (chosen)" if who == "ours" else "")
    return Measurement(case, who, peer, reason, **facts), ends


def leaves_of(case: Case, inputs: Inputs) -> list[Tensor]:
    """The inputs that get gradients; none where the case has no backward."""
    return [x for x in inputs.values() if x.requires_grad] if case.backward else []


def trained(call: Callable[[], Tensor], leaves: list[Tensor], upstream: Tensor | None = None) -> tuple[Any, ...]:
    """One forward, and one backward where there are leaves; returns all that it made."""
    with nullcontext() if leaves else torch.no_grad():
        y = call()
    if not leaves:
        return (y,)
    return (y, *torch.autograd.grad(y, leaves, torch.ones_like(y) if upstream is None else upstream))


def _ends(y: Tensor) -> Tensor:
    """Some tokens, or rows, from the start and from the end."""
    first = y.detach()[0] if y.dim() > 2 else y.detach()
    half = min(COMPARED, math.ceil(first.shape[0] / 2))
    return torch.cat([first[:half], first[-half:]]).float()
