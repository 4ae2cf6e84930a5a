"""The cases: named shapes of each op, how their inputs are drawn, what calls them, and the least work they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.bench.roofline import Work, attention_work, delta_work
from zoo.errors import UserError
from zoo.names import near

Inputs = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape of one op. Subclasses say what is drawn and called; all sizes are fields.

    Attributes:
        name: unique; ``--case`` takes it.
        op: the op's name, as ``--op`` takes it.
        backward: whether forward and backward together are measured too.
        in_place: whether the call changes its inputs, as a decode step does.
        graphed: whether it is so short that the host may be in the way; then replays of CUDA graphs are timed too.
        witness: the backend that computes the truth from float64 inputs.
    """

    name: str
    op: ClassVar[str]
    backward: ClassVar[bool] = True
    in_place: ClassVar[bool] = False
    graphed: ClassVar[bool] = False
    witness: ClassVar[str] = "torch"

    @property
    def shape(self) -> str:
        """The sizes, in words."""
        raise NotImplementedError

    def draw(self, device: torch.device, dtype: torch.dtype) -> Inputs:
        """Random inputs; those that get gradients ask for them."""
        raise NotImplementedError

    def bind(self, inputs: Inputs, backend: str | None) -> Callable[[], Tensor]:
        """A call of the op, with nothing left to prepare; ``backend``: None lets the op choose."""
        raise NotImplementedError

    def work(self, dtype: torch.dtype) -> tuple[Work, Work]:
        """What forward and backward must move and compute at least."""
        raise NotImplementedError

    def small(self) -> Case:
        """The same case, small enough for a CPU and an interpreter."""
        raise NotImplementedError

    def checked(self) -> Case:
        """The same case with few tokens and heads, and nothing else changed: for a check against float64."""
        raise NotImplementedError

    def ours(self, device: torch.device) -> tuple[str | None, ...]:
        """The backends of ours that are measured; the first is the one that peers are compared with."""
        return (None,)

    def results(self, inputs: Inputs, *, exact: bool = False) -> dict[str, Tensor]:
        """Output and gradients under the names of :mod:`zoo_kernels.accuracy`.

        Args:
            exact: ``inputs`` are float64, and PyTorch computes.
        """
        device = next(iter(inputs.values())).device
        leaves = {name: x for name, x in inputs.items() if x.requires_grad and self.backward}
        y = self.bind(inputs, self.witness if exact else self.ours(device)[0])()
        if not leaves:
            return {"y": y.detach()}
        # Halves from -1 to 1: the same numbers in every dtype.
        draw = torch.Generator(device).manual_seed(1)
        upstream = torch.randint(-2, 3, y.shape, generator=draw, device=device).to(y.dtype) / 2
        gradients = torch.autograd.grad(y, list(leaves.values()), upstream)
        return {"y": y.detach(), **{f"d{name}": gradient for name, gradient in zip(leaves, gradients)}}


def _leaf(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.detach().to(dtype).requires_grad_()


# ----------------------------------------------------------------------------------------------- the delta-rule family
# member: its decay (None, "constant", "head" or "channel"), and whether it erases
MEMBERS: dict[str, tuple[str | None, bool]] = {
    "LA": (None, False),
    "RET": ("constant", False),
    "M2": ("head", False),
    "GLA": ("channel", False),
    "DN": (None, True),
    "GDN": ("head", True),
    "KDA": ("channel", True),
}


@dataclass(frozen=True, kw_only=True)
class DeltaCase(Case):
    """A member of the delta-rule family.

    Attributes:
        member: a name of ``MEMBERS``. M2 draws x, dt and A, and gives the op v = dt x and log_decay = dt A.
        steps: M2 only: v and log_decay are computed from dt within the timed call, as mamba_ssm's op does.
    """

    member: str
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    steps: bool = False
    op: ClassVar[str] = "delta_rule"

    @property
    def scale(self) -> float:
        """What multiplies y; Mamba-2 scales nothing."""
        return 1.0 if self.member == "M2" else self.K**-0.5

    @property
    def shape(self) -> str:
        heads = f"H{self.H}" if self.H == self.HV else f"H{self.H} HV{self.HV}"
        sizes = f"D{self.K}" if self.K == self.V else f"K{self.K} V{self.V}"
        return f"{self.member} B{self.B} T{self.T} {heads} {sizes}" + (", dt x and dt A inside" if self.steps else "")

    def draw(self, device: torch.device, dtype: torch.dtype) -> Inputs:
        decay, erases = MEMBERS[self.member]
        by_token = (self.B, self.T, self.HV)

        def normal(*sizes: int) -> Tensor:
            return torch.randn(*sizes, device=device)

        q, k = (normal(self.B, self.T, self.H, self.K) for _ in range(2))
        if self.member == "M2":
            return self._with_steps(q, k, normal(*by_token, self.V), normal(*by_token), dtype)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        inputs = {"q": _leaf(q, dtype), "k": _leaf(k, dtype), "v": _leaf(normal(*by_token, self.V), dtype)}
        if decay == "constant":
            heads = torch.arange(self.HV, device=device, dtype=torch.float32)
            inputs["log_decay"] = torch.log1p(-torch.exp2(-5.0 - heads))
        elif decay is not None:
            each = normal(*by_token, *([self.K] if decay == "channel" else []))
            inputs["log_decay"] = _leaf(F.logsigmoid(each + 3), torch.float32)
        if erases:
            # Rounded to the dtype, so that peers that take it so read the same numbers.
            inputs["beta"] = _leaf(normal(*by_token).sigmoid().to(dtype), torch.float32)
        return inputs

    def _with_steps(self, q: Tensor, k: Tensor, x: Tensor, raw: Tensor, dtype: torch.dtype) -> Inputs:
        steps = {"x": x.to(dtype), "dt": F.softplus(raw - 4), "A": -1 - 8 * torch.rand(self.HV, device=q.device)}
        inputs = {"q": _leaf(q, dtype), "k": _leaf(k, dtype), **steps}
        if self.steps:
            return {name: x.requires_grad_() for name, x in inputs.items()}
        v, log_decay = _discretised(inputs)
        return {**inputs, "v": v.requires_grad_(), "log_decay": log_decay.requires_grad_()}

    def bind(self, inputs: Inputs, backend: str | None) -> Callable[[], Tensor]:
        from zoo_kernels.delta import delta_rule

        def call() -> Tensor:
            v, log_decay = _discretised(inputs) if self.steps else (inputs["v"], inputs.get("log_decay"))
            options = {"log_decay": log_decay, "beta": inputs.get("beta"), "scale": self.scale}
            return delta_rule(inputs["q"], inputs["k"], v, **options, backend=backend)[0]

        return call

    def work(self, dtype: torch.dtype) -> tuple[Work, Work]:
        decay, erases = MEMBERS[self.member]
        gates = {"head": 1, "channel": self.K}.get(decay or "", 0) + erases
        tokens = self.B * self.T
        return delta_work(
            heads=self.H,
            value_heads=self.HV,
            tokens=tokens,
            K=self.K,
            V=self.V,
            gate_bytes=4 * gates * tokens * self.HV,
            erases=erases,
            element=dtype.itemsize,
        )

    def small(self) -> DeltaCase:
        ratio = min(2, self.HV // self.H)
        return replace(self, B=min(self.B, 2), T=70, H=1, HV=ratio, K=16, V=16 if self.V <= self.K else 32)

    def checked(self) -> DeltaCase:
        heads = min(self.H, 2)
        return replace(self, B=min(self.B, 2), T=min(self.T, 500), H=heads, HV=heads * (self.HV // self.H))

    def ours(self, device: torch.device) -> tuple[str | None, ...]:
        return ("triton",) if device.type == "cuda" else (None,)


def _discretised(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """v = dt x and log_decay = dt A, as the mixer M2 makes them."""
    from zoo_kernels.scale import scale_rows

    x, dt = inputs["x"], inputs["dt"]
    return scale_rows(x, dt), dt * inputs["A"]


@dataclass(frozen=True, kw_only=True)
class CurveCase(DeltaCase):
    """A point of the curve of chunkwise against recurrent: forward only, and both of them ours."""

    op: ClassVar[str] = "curve"
    backward: ClassVar[bool] = False

    def small(self) -> CurveCase:
        return replace(self, B=1, T=self.T // 256, H=1, HV=1, K=self.K // 8, V=self.V // 8)

    def ours(self, device: torch.device) -> tuple[str | None, ...]:
        return ("triton", "fused_recurrent") if device.type == "cuda" else (None, "recurrent")


STEP_INPUTS = ("q", "k", "v", "state", "log_decay", "beta", "slots")


@dataclass(frozen=True, kw_only=True)
class StepCase(Case):
    """A decode step of the gated delta rule: one token for each request, states updated in place."""

    requests: int
    HV: int
    K: int
    V: int
    op: ClassVar[str] = "delta_step"
    backward: ClassVar[bool] = False
    in_place: ClassVar[bool] = True

    @property
    def shape(self) -> str:
        return f"{self.requests} request(s), {self.HV} heads of {self.K}x{self.V}, fp32 states"

    def draw(self, device: torch.device, dtype: torch.dtype) -> Inputs:
        q, k = (F.normalize(torch.randn(self.requests, 1, self.HV, self.K, device=device), dim=-1) for _ in range(2))
        gate = torch.randn(self.requests, 1, self.HV, device=device)
        return {
            "q": q.to(dtype),
            "k": k.to(dtype),
            "v": torch.randn(self.requests, 1, self.HV, self.V, device=device, dtype=dtype),
            "state": torch.randn(self.requests, self.HV, self.K, self.V, device=device),
            "log_decay": F.logsigmoid(gate + 3),
            "beta": torch.rand_like(gate).to(dtype).float(),
            "slots": torch.randperm(self.requests, device=device).int(),
        }

    def bind(self, inputs: Inputs, backend: str | None) -> Callable[[], Tensor]:
        from zoo_kernels.delta.step import delta_step

        q, k, v, state, log_decay, beta, slots = (inputs[name] for name in STEP_INPUTS)
        return lambda: delta_step(q, k, v, state, log_decay=log_decay, beta=beta, slots=slots, backend=backend)

    def work(self, dtype: torch.dtype) -> tuple[Work, Work]:
        heads = self.requests * self.HV
        rows = 2 * heads * (self.K + self.V) * dtype.itemsize + 8 * heads
        return Work(2 * 4 * heads * self.K * self.V + rows, 6 * heads * self.K * self.V), Work(0, 0)

    def small(self) -> StepCase:
        return replace(self, requests=min(self.requests, 3), HV=2, K=16, V=16)

    def checked(self) -> StepCase:
        return replace(self, requests=min(self.requests, 8))

    def results(self, inputs: Inputs, *, exact: bool = False) -> dict[str, Tensor]:
        rows = inputs["slots"].long()
        if not exact:
            return {"y": self.bind(inputs, None)(), "last_state": inputs["state"][rows]}
        from zoo_kernels.delta import delta_rule

        y, last_state = delta_rule(
            inputs["q"],
            inputs["k"],
            inputs["v"],
            log_decay=inputs["log_decay"],
            beta=inputs["beta"],
            initial_state=inputs["state"][rows],
            backend=self.witness,
        )
        return {"y": y, "last_state": last_state}


# ------------------------------------------------------------------------------------------------------- the other ops
@dataclass(frozen=True, kw_only=True)
class ConvCase(Case):
    """A short convolution with SiLU."""

    B: int
    T: int
    C: int
    W: int
    op: ClassVar[str] = "short_conv"
    graphed: ClassVar[bool] = True

    @property
    def shape(self) -> str:
        return f"B{self.B} T{self.T} C{self.C} W{self.W}, silu"

    def draw(self, device: torch.device, dtype: torch.dtype) -> Inputs:
        x = torch.randn(self.B, self.T, self.C, device=device)
        weight = torch.randn(self.C, self.W, device=device) / self.W**0.5
        return {"x": _leaf(x, dtype), "weight": _leaf(weight, dtype)}

    def bind(self, inputs: Inputs, backend: str | None) -> Callable[[], Tensor]:
        from zoo_kernels.conv import short_conv

        return lambda: short_conv(inputs["x"], inputs["weight"], activation="silu", backend=backend)[0]

    def work(self, dtype: torch.dtype) -> tuple[Work, Work]:
        one = self.B * self.T * self.C * dtype.itemsize
        # No matrix product: taps are elementwise.
        return Work(2 * one, 0), Work(3 * one, 0)

    def small(self) -> ConvCase:
        return replace(self, B=1, T=20, C=16)

    def checked(self) -> ConvCase:
        return replace(self, B=min(self.B, 2), T=min(self.T, 500))


@dataclass(frozen=True, kw_only=True)
class NormCase(Case):
    """A gated RMS norm of rows."""

    rows: int
    D: int
    op: ClassVar[str] = "gated_rms_norm"
    graphed: ClassVar[bool] = True

    @property
    def shape(self) -> str:
        return f"{self.rows} rows of {self.D}, silu gate"

    def draw(self, device: torch.device, dtype: torch.dtype) -> Inputs:
        x, gate = torch.randn(2, self.rows, self.D, device=device).unbind(0)
        return {
            "x": _leaf(x, dtype),
            "weight": _leaf(1 + torch.randn(self.D, device=device) / 10, dtype),
            "gate": _leaf(gate, dtype),
        }

    def bind(self, inputs: Inputs, backend: str | None) -> Callable[[], Tensor]:
        from zoo_kernels.norm import gated_rms_norm

        return lambda: gated_rms_norm(inputs["x"], inputs["weight"], inputs["gate"])

    def work(self, dtype: torch.dtype) -> tuple[Work, Work]:
        one = self.rows * self.D * dtype.itemsize
        return Work(3 * one, 0), Work(5 * one, 0)

    def small(self) -> NormCase:
        return replace(self, rows=12, D=min(self.D, 32))

    def checked(self) -> NormCase:
        return replace(self, rows=min(self.rows, 1000))


@dataclass(frozen=True, kw_only=True)
class SelectiveCase(Case):
    """Mamba's selective scan: E channels, each with a state of K numbers."""

    B: int
    T: int
    E: int
    K: int
    op: ClassVar[str] = "selective_scan"
    witness: ClassVar[str] = "chunked"

    @property
    def shape(self) -> str:
        return f"B{self.B} T{self.T} E{self.E} K{self.K}, skip"

    def draw(self, device: torch.device, dtype: torch.dtype) -> Inputs:
        x, raw = torch.randn(2, self.B, self.T, self.E, device=device).unbind(0)
        b, c = torch.randn(2, self.B, self.T, self.K, device=device).unbind(0)
        rates = -torch.arange(1.0, self.K + 1, device=device).expand(self.E, self.K)
        exact = {"dt": F.softplus(raw - 4), "A": rates, "D": torch.ones(self.E, device=device)}
        # The steps as a mixer makes them: in fp32, or as exact as the rest.
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        learn = {name: _leaf(tensor, wide) for name, tensor in exact.items()}
        return {"x": _leaf(x, dtype), "B": _leaf(b, dtype), "C": _leaf(c, dtype), **learn}

    def bind(self, inputs: Inputs, backend: str | None) -> Callable[[], Tensor]:
        from zoo_kernels.selective import selective_scan

        return lambda: selective_scan(**inputs, return_state=False, backend=backend)

    def work(self, dtype: torch.dtype) -> tuple[Work, Work]:
        one, step = self.B * self.T * self.E * dtype.itemsize, self.B * self.T * self.E * 4
        # x, dt and y; then x, dt, dy, dx and the gradient of dt. No matrix product: all of it is elementwise.
        return Work(2 * one + step, 0), Work(3 * one + 2 * step, 0)

    def small(self) -> SelectiveCase:
        return replace(self, B=1, T=20, E=16)

    def checked(self) -> SelectiveCase:
        return replace(self, B=min(self.B, 2), T=min(self.T, 500), E=min(self.E, 256))


@dataclass(frozen=True, kw_only=True)
class AttentionCase(Case):
    """Causal attention, full, in a window, or over packed documents of one length."""

    B: int
    T: int
    H: int
    HK: int
    D: int
    window: int | None = None
    documents: int = 1
    op: ClassVar[str] = "attention"
    witness: ClassVar[str] = "math"

    @property
    def shape(self) -> str:
        heads = f"H{self.H}" if self.H == self.HK else f"H{self.H}/{self.HK}"
        more = [f"window {self.window}"] if self.window else []
        more += [f"{self.documents} documents"] if self.documents > 1 else []
        return ", ".join([f"B{self.B} T{self.T} {heads} D{self.D}", *more])

    @property
    def offsets(self) -> list[int] | None:
        """Where documents begin and end; None where nothing is packed. Their lengths differ by a few tokens."""
        if self.documents == 1:
            return None
        each = self.T // self.documents
        return [0, *(each * n + n % 3 for n in range(1, self.documents)), self.T]

    def draw(self, device: torch.device, dtype: torch.dtype) -> Inputs:
        def heads(count: int) -> Tensor:
            return _leaf(torch.randn(self.B, self.T, count, self.D, device=device), dtype)

        return {"q": heads(self.H), "k": heads(self.HK), "v": heads(self.HK)}

    def packing(self, device: torch.device) -> Any:
        """The documents, laid on the device once, as a model does; None where nothing is packed."""
        from zoo_kernels.packing import Packing

        return None if self.offsets is None else Packing.from_offsets(self.offsets).to(device)

    def bind(self, inputs: Inputs, backend: str | None) -> Callable[[], Tensor]:
        from zoo_kernels.attention import attention

        packing = self.packing(inputs["q"].device)
        q, k, v = (inputs[name] for name in ("q", "k", "v"))
        return lambda: attention(q, k, v, window=self.window, packing=packing, backend=backend)

    def work(self, dtype: torch.dtype) -> tuple[Work, Work]:
        bounds = self.offsets or [0, self.T]
        pairs = self.B * sum(_pairs(end - start, self.window) for start, end in pairwise(bounds))
        return attention_work(
            pairs=pairs,
            tokens=self.B * self.T,
            heads=self.H,
            key_heads=self.HK,
            D=self.D,
            element=dtype.itemsize,
        )

    def small(self) -> AttentionCase:
        window = None if self.window is None else 7
        return replace(self, B=1, T=40, H=2, HK=1 if self.HK < self.H else 2, D=16, window=window)

    def checked(self) -> AttentionCase:
        return replace(self, B=1, T=min(self.T, 500), window=self.window and min(self.window, 100))

    def ours(self, device: torch.device) -> tuple[str | None, ...]:
        """The op's own choice, and every other backend that serves, so that the choice can be judged."""
        from zoo_kernels.attention.op import checked_call
        from zoo_kernels.backend import explain

        q, k = (torch.empty(self.B, self.T, heads, self.D, device=device) for heads in (self.H, self.HK))
        if device.type == "cuda":
            q, k = q.bfloat16(), k.bfloat16()
        call = checked_call(q, k, k, window=self.window, packing=self.packing(device))
        # The witness builds all scores; nobody would choose it.
        others = [name for name, state in explain("attention", call) if state == "could serve"]
        return (None, *(name for name in others if name != self.witness))


def _pairs(tokens: int, window: int | None) -> int:
    """How many (query, key) pairs of a document may meet."""
    reach = tokens if window is None else min(window, tokens)
    return reach * (reach + 1) // 2 + (tokens - reach) * reach


# ------------------------------------------------------------------------------------------------------------ the list
def _delta(
    member: str, B: int, T: int, H: int, HV: int, K: int, V: int, *, name: str = "", steps: bool = False
) -> DeltaCase:
    return DeltaCase(name=name or f"{member.lower()}-b{B}", member=member, B=B, T=T, H=H, HV=HV, K=K, V=V, steps=steps)


def _cases() -> tuple[Case, ...]:
    return (
        *(_delta(member, 8, 4096, 16, 16, 128, 128) for member in ("DN", "GDN", "KDA", "GLA", "LA", "RET")),
        _delta("M2", 8, 4096, 1, 64, 128, 64),
        _delta("M2", 8, 4096, 1, 64, 128, 64, name="m2-b8-steps", steps=True),
        *(_delta(member, 1, 32768, 16, 16, 128, 128) for member in ("DN", "GDN", "KDA")),
        _delta("GDN", 4, 4096, 8, 8, 192, 384, name="gdn-192x384"),
        _delta("GDN", 4, 4096, 8, 8, 256, 512, name="gdn-256x512"),
        ConvCase(name="conv-6144", B=8, T=4096, C=6144, W=4),
        NormCase(name="norm-128", rows=8 * 4096 * 16, D=128),
        NormCase(name="norm-2048", rows=32768, D=2048),
        SelectiveCase(name="m1-b8", B=8, T=4096, E=4096, K=16),
        AttentionCase(name="full-b8", B=8, T=4096, H=16, HK=16, D=128),
        AttentionCase(name="window-b8", B=8, T=4096, H=16, HK=16, D=128, window=2048),
        AttentionCase(name="window-packed", B=1, T=32768, H=16, HK=16, D=128, window=2048, documents=8),
        AttentionCase(name="full-grouped", B=8, T=4096, H=32, HK=8, D=64),
        StepCase(name="step-64", requests=64, HV=16, K=128, V=128),
        StepCase(name="step-1", requests=1, HV=16, K=128, V=128),
        *(
            # One width and as many tokens at every point, so that the work is the same and the shape alone differs.
            CurveCase(name=f"curve-d{D}-t{T}", member="DN", B=32768 // T, T=T, H=2048 // D, HV=2048 // D, K=D, V=D)
            for D in (64, 128, 256)
            for T in (2**n for n in range(9, 16))
        ),
    )


CASES = _cases()
OPS = tuple(dict.fromkeys(case.op for case in CASES))


def select(ops: Sequence[str] | None = None, names: Sequence[str] | None = None) -> list[Case]:
    """The cases of some ops, or some cases by name; both: their union. Neither: all but the curve, which is long.

    Raises:
        UserError: an op or a case that is not there, with the nearest.
    """
    for kind, asked, known in (("op", ops, OPS), ("case", names, [case.name for case in CASES])):
        for word in asked or ():
            if word not in known:
                listed = f"Ops: {', '.join(OPS)}." if kind == "op" else "`zoo bench ops --list` shows them all."
                raise UserError(f"bench: there is no {kind} '{word}'{near(word, known)}\n{listed}")
    if not ops and not names:
        return [case for case in CASES if case.op != CurveCase.op]
    return [case for case in CASES if case.op in (ops or ()) or case.name in (names or ())]


def standard_dtype(device: torch.device) -> torch.dtype:
    """bf16 on a GPU; fp32 elsewhere, where bf16 is slow and Triton's interpreter gets it wrong."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32
