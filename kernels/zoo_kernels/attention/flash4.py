"""Backend `flash4`: the package flash-attn-4 (flash_attn.cute), kernels for Hopper and Blackwell in CuTe's Python."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import Tensor
from torch.torch_version import TorchVersion

from zoo_kernels.attention import flash
from zoo_kernels.attention.call import AttentionCall, capability, flash_refusal
from zoo_kernels.attention.choice import Ranked
from zoo_kernels.device import constant

OLDEST = "4.0.0b36"  # a pre-release; what was read and compiled
# Each head size is compiled for by itself, for seconds: these are the sizes that the library holds tiles for.
SIZES = (64, 96, 128, 192, 256)
LARGEST = {9: 256, 10: 128}  # by major compute capability


class Flash4(Ranked):
    """Rows in one launch, or packed documents in one; windows, grouped heads, head sizes up to 256 on Hopper.

    The first call of a shape class compiles for seconds: dtype, head size, group size, window or none, packed or not,
    and whether all tokens fit into one tile. Lengths, batch and window sizes are run-time numbers.
    """

    name = "flash4"

    def serves(self, call: AttentionCall) -> str | None:
        if (reason := flash_refusal(call)) is not None:
            return reason
        major, minor = capability(call.q.device)
        if major not in LARGEST:
            return f"it is made for compute capabilities 9 and 10, and this GPU has {major}.{minor}"
        return flash_refusal(call, LARGEST[major]) or missing()

    def run(self, call: AttentionCall) -> Tensor:
        return flash.run(call, self.name, SIZES)


@constant
def missing() -> str | None:
    """None: the package can be used. Otherwise the reason why not."""
    return _found()


@cache
def _found() -> str | None:
    try:
        found = version("flash-attn-4")
    except PackageNotFoundError:
        return "the package flash-attn-4 is not installed"
    if TorchVersion(found) < TorchVersion(OLDEST):
        return f"flash-attn-4 {found} is installed, and {OLDEST} is the first that is used"
    try:
        with _quietly():
            interface = _interface()
    except Exception as error:  # CuTe's libraries are absent, or built for another Python or CUDA
        return f"flash-attn-4 {found} is installed, but does not import: {type(error).__name__}: {error}"
    absent = [name for name in ("_flash_attn_fwd", "_flash_attn_bwd") if not hasattr(interface, name)]
    return f"flash-attn-4 {found} has no {' and no '.join(absent)}; {OLDEST} has" if absent else None


def _interface() -> Any:
    return importlib.import_module("flash_attn.cute.interface")


def _settings(span: flash.Span) -> dict[str, Any]:
    """What both passes are told. The kernels count the tokens before the query; the window counts the query too."""
    longest = None if span.cu_seqlens is None else span.longest
    return {
        "cu_seqlens_q": span.cu_seqlens,
        "cu_seqlens_k": span.cu_seqlens,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "softmax_scale": span.scale,
        "causal": True,
        "window_size_left": None if span.window is None else span.window - 1,
        "window_size_right": None if span.window is None else 0,
    }


def _forward(q: Tensor, k: Tensor, v: Tensor, span: flash.Span) -> tuple[Tensor, Tensor]:
    with _quietly():
        y, lse, *_ = _interface()._flash_attn_fwd(q, k, v, **_settings(span), return_lse=True)
    return y, lse


def _backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, span: flash.Span
) -> tuple[Tensor, Tensor, Tensor]:
    with _quietly():
        return _interface()._flash_attn_bwd(q, k, v, y, dy, lse, **_settings(span), deterministic=True)


@contextmanager
def _quietly() -> Iterator[None]:
    """What the library does to CuTe warns at import and at each compilation; no caller can do anything about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", "Argument aux_data .* cannot be converted", UserWarning)
        yield


flash.LIBRARIES[Flash4.name] = flash.Library(_forward, _backward)
