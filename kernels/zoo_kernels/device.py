"""Whether Triton kernels can run on a tensor's device, and what they should know about it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

# Read once: `triton.jit` decides at import whether a kernel is compiled or interpreted.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ONLY_NAMED = "interpreted kernels serve only when named"
# Kernels serve by themselves, unless the environment says ZOO_KERNELS=0: then they serve when named.
WANTED = os.environ.get("ZOO_KERNELS", "1") != "0"
UNWANTED = "ZOO_KERNELS=0 leaves it out; it serves when named"

# Without a GPU, launches are planned as for this one; only tests with the interpreter see it.
PLANNED_PROCESSORS = 132

Function = TypeVar("Function", bound=Callable[..., Any])


def constant(function: Function) -> Function:
    """Mark what torch.compile may call once and keep; torch's own mark takes a second, to import the compiler."""
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


class Kernels:
    """What Triton backends share: the name, and when they serve only by name: interpreted, or not wanted."""

    name = "triton"

    def declines(self, call: Any) -> str | None:
        """Why these kernels are not chosen by themselves."""
        return ONLY_NAMED if INTERPRETED else None if WANTED else UNWANTED


class Absent:
    """Stands in a table of backends for one that cannot be imported here, so that its reason can be told."""

    name = "triton"

    def serves(self, call: Any) -> str | None:
        """The reason why not."""
        return triton_missing()

    def run(self, call: Any) -> Any:
        """Never reached, since it serves nothing."""
        raise ValueError(triton_missing())


@constant
def triton_missing() -> str | None:
    """None: Triton can be imported. Otherwise the reason why not."""
    return _triton()


@cache
def _triton() -> str | None:
    try:
        import triton  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except Exception as error:  # absent, or built for another Python or driver
        return f"Triton does not import ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    return None


@constant
def missing(device: torch.device) -> str | None:
    """None: Triton kernels run on ``device``. Otherwise the reason why not, in one sentence."""
    reason = _triton()
    if reason is not None:
        return reason
    if device.type == "cuda":
        return "TRITON_INTERPRET=1 interprets kernels on the CPU; unset it to use the GPU" if INTERPRETED else None
    if device.type == "cpu":
        return None if INTERPRETED else "Triton needs a GPU; on the CPU, TRITON_INTERPRET=1 interprets its kernels"
    return f"Triton kernels run on CUDA devices, not on {device.type}"


def refusal(x: Tensor) -> str | None:
    """None: kernels that compute in fp32 can run on ``x``. Otherwise the reason why not, in one sentence."""
    if (reason := missing(x.device)) is not None:
        return reason
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its kernels compute in fp32, from fp32, bf16 or fp16, and the input is {x.dtype}"
    if INTERPRETED and x.dtype == torch.bfloat16:
        return "Triton's interpreter computes bf16 wrongly; use fp32 or fp16"
    return None


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; of an H200 where kernels are interpreted."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else PLANNED_PROCESSORS
    )


@constant
def memory(device: torch.device) -> int:
    """Bytes of a CUDA device's memory; 128 GiB where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 2**37


@cache
def architecture(device: torch.device) -> str:
    """ "sm_90" and the like; "cpu" where kernels are interpreted."""
    if device.type != "cuda":
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
