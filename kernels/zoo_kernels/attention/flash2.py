"""Backend `flash2`: the package flash-attn 2.x, FlashAttention-2 kernels for sm_80 and newer."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from zoo_kernels.attention import flash
from zoo_kernels.attention.call import AttentionCall, capability, flash_refusal
from zoo_kernels.attention.choice import Ranked
from zoo_kernels.device import constant

OLDEST = "2.7.0"  # the first whose kernels take both sides of the window as numbers


class Flash2(Ranked):
    """Rows in one launch, or packed documents in one; windows, grouped heads, head sizes up to 256.

    The backward sums dq in a fixed order, at the price of one fp32 copy of dq per sweep over the keys.
    """

    name = "flash2"

    def serves(self, call: AttentionCall) -> str | None:
        if (reason := flash_refusal(call)) is not None:
            return reason
        if capability(call.q.device) < (8, 0):
            return "it needs a GPU of compute capability 8.0 or newer"
        return missing()

    def run(self, call: AttentionCall) -> Tensor:
        return flash.run(call, self.name)


@constant
def missing() -> str | None:
    """None: the package can be used. Otherwise the reason why not."""
    return _found()


@cache
def _found() -> str | None:
    try:
        package = importlib.import_module("flash_attn")
        _interface()
    except ModuleNotFoundError as error:
        if error.name in ("flash_attn", "flash_attn.flash_attn_interface"):  # flash-attn-4 alone leaves a bare folder
            return "the package flash-attn 2.x is not installed"
        return f"flash-attn is installed, but does not import: {error}"
    except Exception as error:  # built for another torch, Python or CUDA
        return f"flash-attn is installed, but does not import: {type(error).__name__}: {error}"
    version = TorchVersion(getattr(package, "__version__", "0"))
    if not TorchVersion(OLDEST) <= version < TorchVersion("3"):
        return f"flash-attn {version} is installed, and versions from {OLDEST} up to 3 are used"
    return None


def _interface() -> Any:
    return importlib.import_module("flash_attn.flash_attn_interface")


def _settings(span: flash.Span) -> dict[str, Any]:
    """What all passes are told. The kernels count the tokens before the query; the window counts the query too."""
    packed = {}
    if span.cu_seqlens is not None:
        packed = {
            "cu_seqlens_q": span.cu_seqlens,
            "cu_seqlens_k": span.cu_seqlens,
            "max_seqlen_q": span.longest,
            "max_seqlen_k": span.longest,
        }
    return {
        **packed,
        "dropout_p": 0.0,
        "softmax_scale": span.scale,
        "causal": True,
        "window_size_left": -1 if span.window is None else span.window - 1,
        "window_size_right": 0,
        "softcap": 0.0,
        "alibi_slopes": None,
    }


def _forward(q: Tensor, k: Tensor, v: Tensor, span: flash.Span) -> tuple[Tensor, Tensor]:
    library = _interface()
    launch = library._flash_attn_forward if span.cu_seqlens is None else library._flash_attn_varlen_forward
    y, lse, *_ = launch(q, k, v, **_settings(span), return_softmax=False)
    return y, lse


def _backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, span: flash.Span
) -> tuple[Tensor, Tensor, Tensor]:
    library = _interface()
    launch = library._flash_attn_backward if span.cu_seqlens is None else library._flash_attn_varlen_backward
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    launch(dy, q, k, v, y, lse, dq, dk, dv, **_settings(span), deterministic=True)
    return dq, dk, dv


flash.LIBRARIES[Flash2.name] = flash.Library(_forward, _backward)
