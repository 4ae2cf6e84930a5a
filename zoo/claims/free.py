"""What needs no training: sums done by hand, forms that must agree, counts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.claims.judge import Finding
from zoo.metrics import TokenLoss
from zoo.model import HybridLM
from zoo_kernels import backend as backends
from zoo_kernels.accuracy import limit, relative_error
from zoo_kernels.delta import delta_rule
from zoo_layers import conformance
from zoo_layers.mixer import MixerSpec, registered

KEYS = {"orthonormal": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0)), "oblique": ((1.0, 0.0, 0.0), (0.6, 0.8, 0.0))}
# rule: (decay of a write, one number or one per channel; beta; what k1 and k2 read then, by kind of keys).
# The writes: 5 under k1, 7 under k2, 9 under k1. The first three rules are the founding document's; the others follow
# from the recurrence by hand. In the sixth, an error taken against the memory before its decay would read 4.5.
TOY: dict[str, tuple[Any, float | None, dict[str, tuple[float, float]]]] = {
    "add only": (None, None, {"orthonormal": (14, 7), "oblique": (18.2, 15.4)}),
    "decay 1/2": (0.5, None, {"orthonormal": (10.25, 3.5), "oblique": (12.35, 9.65)}),
    "delta": (None, 1.0, {"orthonormal": (9, 7), "oblique": (9, 7.96)}),
    "gated delta": (0.5, 1.0, {"orthonormal": (9, 3.5), "oblique": (9, 7.16)}),
    "delta, beta 1/2": (None, 0.5, {"orthonormal": (5.75, 3.5), "oblique": (6.575, 5.705)}),
    "gated delta, beta 1/2": (0.5, 0.5, {"orthonormal": (4.8125, 1.75), "oblique": (5.28125, 4.16875)}),
    "reflection, beta 2": (None, 2.0, {"orthonormal": (8, 14), "oblique": (6.8, 5.36)}),
    "channel decay": ((0.5, 1.0, 1.0), None, {"orthonormal": (10.25, 7)}),
    "channel decay, delta": ((0.5, 1.0, 1.0), 1.0, {"orthonormal": (9, 7)}),
}
SILENT = 200  # zero writes before the toy, so that it spans several chunks
PIECES = (1, 3)  # tokens of the first of two cached calls
WIDTH = 16  # of the mixers whose forms are compared
GROWING = ("GA", "MLA")  # keep something of every token


def device() -> str:
    """Where the checks run: on the GPU, where there is one, as its kernels are what would be trained with."""
    return "cuda" if torch.cuda.is_available() else "cpu"


# ------------------------------------------------------------------------------------------------------------- the toy
def toy() -> list[Finding]:
    """The overwrite toy on every backend that serves it, in every form; one finding a backend."""
    worst: dict[str, float] = {}
    refused: dict[str, str] = {}
    for dtype in (torch.float64, torch.float32):
        for rule, (_, _, reads) in TOY.items():
            for keys, expected in reads.items():
                for name, verdict in _serving(_toy(rule, keys, dtype)):
                    if verdict is not None:
                        refused[f"{name}, {str(dtype)[6:]}"] = verdict
                        continue
                    allowed = limit("y", dtype)
                    for read in _toy_reads(rule, keys, dtype, name):
                        error = relative_error(read, torch.tensor(expected, dtype=torch.float64)) / allowed
                        worst[name] = max(worst.get(name, 0.0), error)
    idle = [f"{name} does not serve: {why}" for name, why in refused.items() if name.split(",")[0] not in worst]
    found = [Finding(f"{name}: error at most {share:.3f} of the allowed", share <= 1) for name, share in worst.items()]
    served = f"{len(TOY)} rules on {device()}, {len(found)} backends serve"
    return [*found, Finding("; ".join([served, *idle]), len(found) > 1)]


def _toy(rule: str, keys: str, dtype: torch.dtype, silent: int = 0) -> dict[str, Tensor]:
    """The arguments of :func:`delta_rule`: ``silent`` zero writes, three writes, and two tokens that only read."""
    decay, beta, _ = TOY[rule]
    k1, k2 = (torch.tensor(key, dtype=dtype) for key in KEYS[keys])
    zero = torch.zeros(3, dtype=dtype)
    writes = torch.tensor([0.0] * silent + [1.0] * 3 + [0.0] * 2, dtype=dtype).view(1, -1, 1)
    call = {
        "q": torch.stack([zero] * (silent + 3) + [k1, k2]).view(1, -1, 1, 3),
        "k": torch.stack([zero] * silent + [k1, k2, k1, zero, zero]).view(1, -1, 1, 3),
        "v": torch.tensor([0.0] * silent + [5.0, 7.0, 9.0, 0.0, 0.0], dtype=dtype).view(1, -1, 1, 1),
    }
    if decay is not None:
        by_write = torch.tensor(decay, dtype=dtype).log()
        call["log_decay"] = writes.unsqueeze(-1) * by_write if by_write.dim() else writes * by_write
    if beta is not None:
        call["beta"] = writes * beta
    return {name: tensor.to(device()) for name, tensor in call.items()}


def _recall(
    call: dict[str, Tensor],
    backend: str | None = None,
    *,
    state: Tensor | None = None,
    packing: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`delta_rule` on tensors by name, with scale 1: what is read is what the memory holds."""
    log_decay, beta = call.get("log_decay"), call.get("beta")
    settings: dict[str, Any] = {"initial_state": state, "packing": packing, "backend": backend, "scale": 1.0}
    return delta_rule(call["q"], call["k"], call["v"], log_decay=log_decay, beta=beta, **settings)


def _serving(call: dict[str, Tensor]) -> list[tuple[str, str | None]]:
    """Every backend of the delta rule: None if it serves the call, else why not."""
    seen: list[Any] = []
    with backends.observe(lambda op, facts, _: seen.append((op, facts))):
        _recall(call)
    verdicts = backends.explain(*seen[0])
    return [(name, None if words in ("chosen", "could serve") else words) for name, words in verdicts]


def _toy_reads(rule: str, keys: str, dtype: torch.dtype, backend: str) -> Iterator[Tensor]:
    """What k1 and k2 read, [2], in every form: whole, behind zero writes, in two cached calls, packed among others."""
    call = _toy(rule, keys, dtype)
    whole, _ = _recall(call, backend)
    late, _ = _recall(_toy(rule, keys, dtype, SILENT), backend)
    yield from (y[0, -2:, 0, 0] for y in (whole, late))
    for cut in PIECES:
        first, rest = ({n: x[:, part] for n, x in call.items()} for part in (slice(cut), slice(cut, None)))
        y, state = _recall(first, backend)
        rest_y, _ = _recall(rest, backend, state=state)
        yield torch.cat([y, rest_y], 1)[0, -2:, 0, 0]
    random = torch.Generator().manual_seed(0)
    noise = {name: torch.rand(1, 40, *x.shape[2:], generator=random, dtype=dtype).to(x) for name, x in call.items()}
    noise |= {"log_decay": -noise["log_decay"]} if "log_decay" in noise else {}
    packed = {name: torch.cat([noise[name][:, :17], x, noise[name][:, 17:]], 1) for name, x in call.items()}
    y, _ = _recall(packed, backend, packing=[0, 0, 17, 22, 45, 45])
    yield y[0, 20:22, 0, 0]


def exact_write() -> list[Finding]:
    """One write with beta = 1 / |k|^2 into a random memory, on every backend that serves it."""
    random = torch.Generator().manual_seed(2)
    k, v = (torch.randn(1, 2, 3, size, generator=random, dtype=torch.float64) for size in (5, 4))
    state = torch.randn(1, 3, 5, 4, generator=random, dtype=torch.float64)
    k = 1.2 * F.normalize(k, dim=-1)  # beta stays below 2
    k[:, 1] = 0.0  # a second token that writes nothing: one alone would take the path of decoding
    beta = torch.zeros(1, 2, 3, dtype=torch.float64)
    beta[:, 0] = 1 / k[:, 0].square().sum(-1)
    found = []
    for dtype in (torch.float64, torch.float32):
        call = {name: x.to(device(), dtype) for name, x in {"q": k, "k": k, "v": v, "beta": beta}.items()}
        for name, refusal in _serving(call):
            if refusal is None:
                _, last = _recall(call, name, state=state.to(device(), dtype))
                read = torch.einsum("hk,hkv->hv", call["k"][0, 0].to(last), last[0])
                share = relative_error(read, v[0, 0]) / limit("last_state", dtype)
                found.append(Finding(f"{name}, {str(dtype)[6:]}: error {share:.3f} of the allowed", share <= 1))
    return found


# --------------------------------------------------------------------------------------------------------------- forms
def _ours() -> dict[str, type[MixerSpec]]:
    """The project's mixers; of those of other packages nothing is claimed."""
    return {name: spec for name, spec in registered().items() if spec.__module__.startswith("zoo_layers.")}


def forms() -> list[Finding]:
    """Every mixer: whole equals pieces and single tokens, packed equals alone, each backend equals the reference."""
    proofs = {
        "in pieces and token by token": conformance.pieces,
        "packed": conformance.packing,
        "on every backend, with gradients": conformance.backends,
    }
    found = []
    for name, spec in _ours().items():
        failures = []
        for what, prove in proofs.items():
            try:
                prove(conformance.Case(spec(), WIDTH, seed=sum(map(ord, name)), device=device()))
            except conformance.ConformanceError as failure:
                failures.append(f"{what}: {failure}")
        words = "; ".join(failures) or f"equal {', '.join(proofs)}"
        found.append(Finding(f"{name} at width {WIDTH}: {words}", not failures))
    return found


def fixed_state() -> list[Finding]:
    """Bytes that decoding keeps, counted at two contexts."""
    short, long = 4096, 262_144  # both longer than any default window
    found = []
    for name in _ours():
        model = HybridLM.from_pattern(name, n_layers=1, d_model=64, vocab_size=257, device="meta")
        near, far = model.state_bytes(short), model.state_bytes(long)
        held = far == near * long // short if name in GROWING else far == near
        found.append(Finding(f"{name}: {near:,} bytes after {short:,} tokens, {far:,} after {long:,}", held))
    return found


def uniform_bits() -> list[Finding]:
    """A hybrid whose head is zero, over part of the shipped text."""
    from zoo.data import TokenData

    data = TokenData("excerpt", seq_len=256, batch_tokens=4096)
    model = HybridLM.from_pattern("GDN,SWA", d_model=32, vocab_size=data.vocab_size, seed=0)
    model.head.weight.data.zero_()
    data.setup("validate")
    batch, metric = next(iter(data.val_dataloader())), TokenLoss()
    with torch.no_grad():
        nll, tokens = model.nll(batch["input_ids"], batch["labels"], batch["packing"])
    metric.update(nll, tokens, batch["bytes"])
    values = metric.compute()
    bits, wanted = float(values["loss"]) / math.log(2), math.log2(data.vocab_size)
    per_byte = float(values["bpb"]) * int(batch["bytes"]) / int(tokens)
    words = f"{bits:.6f} bits per token over {int(tokens):,} tokens, log2 {data.vocab_size} = {wanted:.6f}"
    return [
        Finding(words, abs(bits - wanted) < 1e-5),
        Finding(f"{per_byte:.6f} from bits per byte and bytes per token", abs(per_byte - wanted) < 1e-5),
    ]
