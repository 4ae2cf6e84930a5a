"""Other libraries' kernels for our cases: who serves a case, and the same inputs in the shapes that they take."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.bench.ops import AttentionCase, Case, ConvCase, CurveCase, DeltaCase, Inputs, NormCase, StepCase

# What a peer returns: the tensors that get gradients, and a call that gives y in our shape.
Bound = tuple[list[Tensor], Callable[[], Tensor]]


@dataclass(frozen=True)
class Peer:
    """A function of another library that computes what a case asks for.

    Attributes:
        name: of the library, as tables show it.
        distribution: what its version is looked up under.
        module, function: where it is.
        bind: (function, case, inputs) -> its own leaves and a call, nothing left to convert inside.
        note: what its time includes, or what runs inside it; tables show it behind the version.
    """

    name: str
    distribution: str
    module: str
    function: str
    bind: Callable[[Callable[..., Any], Any, Inputs], Bound]
    note: str = ""

    def load(self) -> Callable[..., Any] | str:
        """The function; or why there is none, in one clause."""
        try:
            # A parent that is no package, or is not there, makes find_spec raise.
            if importlib.util.find_spec(self.module.partition(".")[0]) is None:
                return "not installed"
            return getattr(importlib.import_module(self.module), self.function)
        except Exception as error:  # a wheel for another torch, CUDA or GPU may raise anything
            return f"does not import ({in_short(error)})"

    @property
    def label(self) -> str:
        """Name and version, and the note; the name alone where it is not installed."""
        try:
            version = importlib.metadata.version(self.distribution)
            return f"{self.name} {version}" + (f" ({self.note})" if self.note else "")
        except importlib.metadata.PackageNotFoundError:
            return self.name


def in_short(error: BaseException) -> str:
    """The kind of an error and its first line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:160]}" if first else type(error).__name__


@contextmanager
def undisguised() -> Iterator[None]:
    """Inside, fla runs its own kernels: it would hand its gated delta rule to FlashQLA where that is importable."""
    before = os.environ.get("FLA_FLASH_QLA")
    os.environ["FLA_FLASH_QLA"] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["FLA_FLASH_QLA"]
        else:
            os.environ["FLA_FLASH_QLA"] = before


def peers_of(case: Case) -> list[Peer | str]:
    """The peers that have an op for ``case``; as text those that have one, but not for its sizes, and why."""
    if isinstance(case, CurveCase):
        return []
    if isinstance(case, DeltaCase):
        return _delta_peers(case)
    if isinstance(case, AttentionCase):
        two = Peer("flash-attn", "flash-attn", "flash_attn", "flash_attn_func", _flash_attention)
        if case.documents > 1:
            two = Peer("flash-attn", "flash-attn", "flash_attn", "flash_attn_varlen_func", _flash_attention_packed)
            return [two]
        return [two, Peer("flash-attn-4", "flash-attn-4", "flash_attn.cute", "flash_attn_func", _flash_attention)]
    if isinstance(case, ConvCase):
        return [_fla("fla.modules.causal_conv1d.ops", "causal_conv1d", _fla_conv)]
    if isinstance(case, NormCase):
        return [_fla("fla.modules.norm.fused_norm_gate", "rms_norm_gated", _fla_norm)]
    if isinstance(case, StepCase):
        return [_fla("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule", _fla_step)]
    return []


# ----------------------------------------------------------------------------------------------- the delta-rule family
# member: module and function of fla, and what it takes besides q, k and v
FLA = {
    "DN": ("fla.ops.delta_rule", "chunk_delta_rule", {"beta": "beta"}, {}),
    "GDN": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", {"g": "log_decay", "beta": "beta"}, {}),
    "KDA": ("fla.ops.kda", "chunk_kda", {"g": "log_decay", "beta": "beta"}, {}),
    "GLA": ("fla.ops.gla", "chunk_gla", {"g": "log_decay"}, {}),
    "LA": ("fla.ops.linear_attn", "chunk_linear_attn", {}, {"normalize": False}),
    "RET": ("fla.ops.retention", "chunk_retention", {}, {}),
}


def _delta_peers(case: DeltaCase) -> list[Peer | str]:
    found: list[Peer | str] = []
    square = case.K == case.V == 128
    if case.member in FLA:
        module, function, *_ = FLA[case.member]
        # Where TileLang is importable, fla hands it a kernel of these two members' backward.
        tilelang = case.member in ("GDN", "KDA") and _tilelang()
        found.append(_fla(module, function, _fla_delta, "TileLang in backward" if tilelang else ""))
    if case.member == "GDN":
        qla = Peer("FlashQLA", "flash-qla", "flash_qla", "chunk_gated_delta_rule", _flash_qla)
        found.append(qla if square else "FlashQLA: takes K = V = 128 alone")
    if case.member in ("GDN", "KDA"):
        function = "gated_delta_net" if case.member == "GDN" else "kimi_delta_attention"
        cudnn = Peer("cuDNN", "nvidia-cudnn-frontend", "cudnn.linear_attention", function, _cudnn_delta)
        found.append(cudnn if square else "cuDNN: takes K = V = 128 alone")
    if case.member == "M2":
        # They take x, dt and A alone: without ``steps`` their time holds two products, and gradients, that ours lacks.
        note = "" if case.steps else "dt x and dt A inside"
        module, function = "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined"
        found.append(Peer("mamba_ssm", "mamba-ssm", module, function, _mamba, note))
        found.append(Peer("cuDNN", "nvidia-cudnn-frontend", "cudnn.linear_attention", "mamba2", _cudnn_mamba, note))
    return found


def _tilelang() -> bool:
    """Whether fla would use TileLang."""
    return importlib.util.find_spec("tilelang") is not None and os.environ.get("FLA_TILELANG", "1") != "0"


def _fla(module: str, function: str, bind: Callable[[Callable[..., Any], Any, Inputs], Bound], note: str = "") -> Peer:
    return Peer("fla", "fla-core", module, function, bind, note)


def _leaves(inputs: Inputs, **dtypes: torch.dtype | None) -> dict[str, Tensor]:
    """Copies of some inputs that ask for gradients: name -> dtype, None for their own."""
    return {
        name: inputs[name].detach().clone().to(dtype or inputs[name].dtype).requires_grad_()
        for name, dtype in dtypes.items()
    }


def _bound(leaves: dict[str, Tensor], call: Callable[[], Tensor]) -> Bound:
    return list(leaves.values()), call


def _fla_delta(function: Callable[..., Any], case: DeltaCase, inputs: Inputs) -> Bound:
    *_, gates, options = FLA[case.member]
    # Decays in fp32 as ours, beta in the dtype of q as fla's layers give it.
    dtypes = {"beta": inputs["q"].dtype, "log_decay": torch.float32}
    leaves = _leaves(inputs, q=None, k=None, v=None, **{name: dtypes[name] for name in gates.values()})
    given = {theirs: leaves[ours] for theirs, ours in gates.items()}
    return _bound(
        leaves, lambda: function(leaves["q"], leaves["k"], leaves["v"], **given, **options, scale=case.scale)[0]
    )


def _flash_qla(function: Callable[..., Any], case: DeltaCase, inputs: Inputs) -> Bound:
    leaves = _leaves(inputs, q=None, k=None, v=None, log_decay=torch.float32, beta=inputs["q"].dtype)
    given = {"q": leaves["q"], "k": leaves["k"], "v": leaves["v"], "g": leaves["log_decay"], "beta": leaves["beta"]}
    return _bound(leaves, lambda: function(**given, scale=case.scale)[0])


def _mamba(function: Callable[..., Any], case: DeltaCase, inputs: Inputs) -> Bound:
    leaves = _leaves(inputs, x=None, dt=None, A=None, k=None, q=None)
    given = [leaves[name] for name in ("x", "dt", "A", "k", "q")]
    return _bound(leaves, lambda: function(*given, chunk_size=256))


def _rows(case: DeltaCase, inputs: Inputs) -> Tensor:
    """Where each row of the batch begins and ends in the flattened tokens."""
    return torch.arange(case.B + 1, device=inputs["q"].device, dtype=torch.int32) * case.T


def _cudnn_delta(function: Callable[..., Any], case: DeltaCase, inputs: Inputs) -> Bound:
    flat = {name: inputs[name].detach().flatten(0, 1) for name in ("q", "k", "v", "log_decay", "beta")}
    leaves, rows = _leaves(flat, q=None, k=None, v=None, log_decay=None, beta=None), _rows(case, inputs)
    given = [leaves[name] for name in ("q", "k", "v", "log_decay", "beta")]
    return _bound(leaves, lambda: function(*given, rows, scale=case.scale)[0].unflatten(0, (case.B, case.T)))


def _cudnn_mamba(function: Callable[..., Any], case: DeltaCase, inputs: Inputs) -> Bound:
    flat = {name: x.detach() if name == "A" else x.detach().flatten(0, 1) for name, x in inputs.items()}
    leaves, rows = _leaves(flat, x=None, dt=None, A=None, k=None, q=None), _rows(case, inputs)
    given = [leaves[name] for name in ("x", "dt", "A", "k", "q")]
    return _bound(leaves, lambda: function(*given, rows, dt_softplus=False)[0].unflatten(0, (case.B, case.T)))


# ------------------------------------------------------------------------------------------------------- the other ops
def _flash_attention(function: Callable[..., Any], case: AttentionCase, inputs: Inputs) -> Bound:
    leaves = _leaves(inputs, q=None, k=None, v=None)
    options: dict[str, Any] = {} if case.window is None else {"window_size": (case.window - 1, 0)}

    def call() -> Tensor:
        y = function(leaves["q"], leaves["k"], leaves["v"], causal=True, **options)
        return y[0] if isinstance(y, tuple) else y

    return _bound(leaves, call)


def _flash_attention_packed(function: Callable[..., Any], case: AttentionCase, inputs: Inputs) -> Bound:
    leaves = _leaves({name: x.detach()[0] for name, x in inputs.items()}, q=None, k=None, v=None)
    packing = case.packing(inputs["q"].device)
    bounds = (packing.cu_seqlens, packing.cu_seqlens, packing.max_length, packing.max_length)
    window = (-1, -1) if case.window is None else (case.window - 1, 0)
    given = [leaves[name] for name in ("q", "k", "v")]
    return _bound(leaves, lambda: function(*given, *bounds, causal=True, window_size=window)[None])


def _fla_conv(function: Callable[..., Any], case: ConvCase, inputs: Inputs) -> Bound:
    leaves = _leaves(inputs, x=None, weight=None)
    return _bound(leaves, lambda: function(leaves["x"], leaves["weight"], activation="silu")[0])


def _fla_norm(function: Callable[..., Any], case: NormCase, inputs: Inputs) -> Bound:
    leaves = _leaves(inputs, x=None, weight=None, gate=None)
    return _bound(leaves, lambda: function(leaves["x"], leaves["gate"], leaves["weight"], None, activation="swish"))


def _fla_step(function: Callable[..., Any], case: StepCase, inputs: Inputs) -> Bound:
    given = {"q": inputs["q"], "k": inputs["k"], "v": inputs["v"], "g": inputs["log_decay"], "beta": inputs["beta"]}
    # It returns new states; ours are rows of a pool, in an order of their own.
    state = inputs["state"][inputs["slots"].long()].contiguous()
    return [], lambda: function(**given, initial_state=state, output_final_state=True)[0]
