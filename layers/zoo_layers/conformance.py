"""What every mixer must hold, as functions: our tests, other packages and ``zoo mixers --check NAME`` call them.

Each property takes a :class:`Case`, draws its lengths and numbers from the case's seed, and raises
:class:`ConformanceError` with that seed and the figures when the mixer lacks it. Keep the sizes small: on a CPU each
takes about a second.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from zoo_kernels import backend
from zoo_kernels.accuracy import limit, relative_error
from zoo_kernels.attention.reference import multiplied_context
from zoo_kernels.packing import Packing
from zoo_layers import init
from zoo_layers.attention import mean_context
from zoo_layers.mixer import MixerCache, MixerSpec, Option, SpecError, TokenMixer

# The truth of each op: the backend that all others are compared with.
REFERENCE = {
    "delta_rule": "recurrent",
    "delta_step": "torch",
    "selective_scan": "recurrent",
    "selective_step": "torch",
    "attention": "math",
    **dict.fromkeys(("short_conv", "rms_norm", "gated_rms_norm", "l2_norm", "scale_rows", "rotary"), "reference"),
}


ROUNDING = 1e-6  # of fp32, relative: another order of the same sums


class ConformanceError(AssertionError):
    """A mixer lacks a property that every mixer must have."""


@dataclass
class Case:
    """One mixer under examination: builds it and its inputs from one seed, and names both in every failure.

    Attributes:
        spec, d_model: what is built.
        seed: fixes parameters, inputs, lengths and splits.
        device: where.
    """

    spec: MixerSpec
    d_model: int
    seed: int = 0
    device: str = "cpu"
    draw: random.Random = field(init=False)

    def __post_init__(self):
        self.draw = random.Random(self.seed)
        torch.manual_seed(self.seed)

    def mixer(self, dtype: torch.dtype = torch.float64) -> TokenMixer:
        """The mixer, moved a little off its first values, so that no norm or bias is trivial."""
        mixer = self.spec.build(self.d_model)
        with torch.no_grad():
            for parameter in mixer.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.05)
        return mixer.to(device=self.device, dtype=dtype)

    def x(self, batch: int, tokens: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Random input [batch, tokens, d_model]."""
        return torch.randn(batch, tokens, self.d_model, dtype=torch.float64).to(device=self.device, dtype=dtype)

    def cache(self, mixer: TokenMixer, rows: int, context: int, dtype: torch.dtype = torch.float64) -> MixerCache:
        return mixer.new_cache(rows, context, dtype=dtype, device=self.device)

    def packing(self, lengths: Sequence[int]) -> Packing:
        offsets = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
        return Packing.from_offsets(offsets).to(self.device)

    def require(self, held: bool, failure: str) -> None:
        if not held:
            settings = " ".join(f"{n}={v}" for n, v in self.spec.to_options().items())
            raise ConformanceError(
                f"{self.spec.name} {settings} at d_model={self.d_model}, seed={self.seed}: {failure}"
            )

    def close(self, got: Tensor, expected: Tensor, quantity: str, what: str, dtype: torch.dtype | None = None) -> None:
        """Compare by the table of :mod:`zoo_kernels.accuracy`."""
        self.require(got.shape == expected.shape, f"{what}: the shape is {list(got.shape)}, not {list(expected.shape)}")
        error, most = relative_error(got, expected), limit(quantity, dtype or expected.dtype)
        self.require(error <= most, f"{what}: the relative error is {error:.2e}, the limit {most:.0e}")

    def same(self, got: Tensor, expected: Tensor, what: str) -> None:
        """Compare bit by bit."""
        self.require(torch.equal(got, expected), f"{what}: not bit-equal, {relative_error(got, expected):.2e} apart")

    def same_caches(self, got: MixerCache, expected: MixerCache, what: str) -> None:
        self.require(got.tensors.keys() == expected.tensors.keys(), f"{what}: the caches hold different tensors")
        for name in expected.tensors:
            self.close(got[name], expected[name], "last_state", f"{what}: the cache's {name}")
        self.require(got.seen == expected.seen, f"{what}: tokens seen are {got.seen}, not {expected.seen}")
        self.require(got.lengths.tolist() == got.seen, f"{what}: lengths {got.lengths.tolist()}, but seen {got.seen}")


def gradients(mixer: TokenMixer, x: Tensor, packing: Packing | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """(y, gradients by name) of a fixed, random weighting of the outputs; ``x`` is among the names."""
    x = x.detach().requires_grad_()
    mixer.zero_grad(set_to_none=True)
    y = mixer(x, None, packing)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    (y * weights.to(device=y.device, dtype=y.dtype)).sum().backward()
    found = {name: p.grad for name, p in mixer.named_parameters() if p.grad is not None}
    return y.detach(), {**found, **({"x": x.grad} if x.grad is not None else {})}


# ----------------------------------------------------------------------------------------------------------- in pieces
def pieces(case: Case) -> None:
    """The whole, uneven pieces and single tokens give the same outputs and the same last cache."""
    mixer, tokens = case.mixer(), case.draw.randint(17, 30)
    x = case.x(2, tokens)
    expected, last = mixer(x), case.cache(mixer, 2, tokens)
    case.close(mixer(x, last), expected, "y", "one call with a cache against one without")
    cut = case.draw.randint(1, tokens - 2)
    for split in ([cut, tokens - cut], [1, cut, tokens - cut - 1], [1] * tokens):
        cache = case.cache(mixer, 2, tokens)
        got = torch.cat([mixer(part, cache) for part in x.split(split, dim=1)], dim=1)
        case.close(got, expected, "step", f"pieces of {split} tokens")
        case.same_caches(cache, last, f"pieces of {split} tokens")


def ragged(case: Case) -> None:
    """Prompts of different length, prefilled as one packing into rows, then continued, equal each prompt alone."""
    mixer, rows = case.mixer(), 4
    prompts = [case.draw.randint(2, 12), 0, 1, case.draw.randint(2, 12)]
    more = [case.draw.randint(1, 5), case.draw.randint(1, 5), 0, case.draw.randint(1, 5)]
    steps = 3
    whole = [case.x(1, prompt + extra + steps) for prompt, extra in zip(prompts, more)]
    context = max(t.shape[1] for t in whole)
    cache = case.cache(mixer, rows, context)
    got: list[list[Tensor]] = [[] for _ in range(rows)]
    at = [0] * rows
    for lengths in (prompts, more):
        parts = [t[:, start : start + n] for t, start, n in zip(whole, at, lengths)]
        y = mixer(torch.cat(parts, dim=1), cache, case.packing(lengths))
        for row, document in enumerate(y.split(lengths, dim=1)):
            got[row].append(document)
        at = [start + n for start, n in zip(at, lengths)]
    for _ in range(steps):
        y = mixer(torch.cat([t[:, start : start + 1] for t, start in zip(whole, at)]), cache)
        for row in range(rows):
            got[row].append(y[row : row + 1])
        at = [start + 1 for start in at]
    for row in range(rows):
        alone = case.cache(mixer, 1, context)
        expected = mixer(whole[row], alone)
        what = f"row {row} of prompts {prompts}, continued by {more} and {steps} steps"
        case.close(torch.cat(got[row], dim=1), expected, "step", what)
        case.same_caches(cache.select([row]), alone, what)


def caches(case: Case) -> None:
    """The cache object: counts by row, reset, snapshot and restore, select, a file, the size that was promised."""
    mixer, tokens = case.mixer(), case.draw.randint(9, 14)
    x = case.x(3, tokens)
    cache = case.cache(mixer, 3, tokens)
    case.require(cache.fresh and cache.lengths.tolist() == [0, 0, 0], "a new cache has seen tokens")
    mixer(x[:, :5], cache)
    kept = cache.snapshot()
    content = {name: tensor.clone() for name, tensor in kept["tensors"].items()}
    expected = mixer(x[:, 5:], cache)
    for name, tensor in content.items():
        case.same(kept["tensors"][name], tensor, f"the snapshot's {name}, after the cache went on")
    case.require(cache.lengths.tolist() == [tokens] * 3 and not cache.fresh, "the cache miscounts its tokens")
    after = cache.snapshot()

    file = io.BytesIO()
    torch.save(kept, file)
    file.seek(0)
    cache.restore(torch.load(file, weights_only=True))
    case.require(cache.lengths.tolist() == [5] * 3, "restoring does not restore the counts")
    case.same(mixer(x[:, 5:], cache), expected, "going on from a snapshot that went through a file")
    other = case.cache(mixer, 3, tokens)
    other.load_state_dict(kept)
    order = [2, 0, 0]
    picked = other.select(order)
    case.close(mixer(x[order, 5:], picked), expected[order], "step", "going on from selected rows")
    case.same(mixer(x[:, 5:], other), expected, "rows selected before are copies, so going on from all of them")

    before = after["tensors"]
    cache.reset()
    case.require(cache.fresh and cache.lengths.tolist() == [0, 0, 0], "a reset cache has seen tokens")
    mixer(x, cache)
    for name, tensor in before.items():
        case.close(cache[name], tensor, "last_state", f"after a reset, the cache's {name}")


# ------------------------------------------------------------------------------------------------- what may see what
def causality(case: Case) -> None:
    """Changing tokens from t on leaves outputs before t bit-equal, and changes the output at t.

    On the reference of every op. A kernel may choose how it computes a chunk by all of the chunk's decays, so where
    other backends serve, later tokens may turn the last bits of earlier outputs, however much they change.
    """
    mixer, tokens = case.mixer(torch.float32), case.draw.randint(66, 90)
    x = case.x(2, tokens, torch.float32)
    places = {1, case.draw.randint(2, tokens - 1), 64, tokens - 1}
    for size in (3.0, 300.0):
        later = size * case.x(2, tokens, torch.float32)
        for named in (REFERENCE, {}):
            with backend.prefer(named):
                expected = mixer(x)
                for t in places:
                    got = mixer(torch.cat([x[:, :t], later[:, t:]], dim=1))
                    what = f"outputs before {t}, with tokens from there on changed"
                    if named:
                        case.same(got[:, :t], expected[:, :t], what)
                    error = relative_error(got[:, :t], expected[:, :t])
                    case.require(error <= ROUNDING, f"{what}: {error:.2e} apart, which is no rounding")
                    case.require(
                        not torch.equal(got[:, t], expected[:, t]), f"the output at {t} ignores the token there"
                    )


def packing(case: Case) -> None:
    """A packed document gives what it gives alone, gradients too; a change in one leaves others bit-equal."""
    mixer = case.mixer()
    lengths = [case.draw.randint(1, 9), 0, case.draw.randint(64, 80), 1, case.draw.randint(2, 20)]
    x, packed = case.x(1, sum(lengths)), case.packing(lengths)
    y, found = gradients(mixer, x, packed)
    alone_y, alone_x = [], []
    total: dict[str, Tensor] = {}
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(x.device)
    for part, weight in zip(x.split(lengths, dim=1), weights.split(lengths, dim=1)):
        if not part.shape[1]:
            continue
        part = part.detach().requires_grad_()
        out = mixer(part)
        names, parameters = zip(*mixer.named_parameters())
        grads = torch.autograd.grad((out * weight).sum(), [part, *parameters], allow_unused=True)
        alone_y.append(out.detach())
        alone_x.append(grads[0])
        for name, grad in zip(names, grads[1:]):
            total[name] = total.get(name, torch.zeros(())) + (0 if grad is None else grad)
    case.close(y, torch.cat(alone_y, dim=1), "y", f"documents of {lengths} tokens, packed against alone")
    case.close(found["x"], torch.cat(alone_x, dim=1), "dx", f"gradients of documents of {lengths} tokens")
    for name, grad in total.items():
        case.close(found[name], grad, "dweight", f"the gradient of {name} over documents of {lengths} tokens")

    changed = x.clone()
    start = lengths[0]
    changed[:, start : start + lengths[2]] *= -2
    other_y, other = gradients(mixer, changed, packed)
    for name, one, two in (("outputs", y, other_y), ("gradients", found["x"], other["x"])):
        what = f"{name} of documents beside a changed one"
        case.same(two[:, :start], one[:, :start], what)
        case.same(two[:, start + lengths[2] :], one[:, start + lengths[2] :], what)


# ------------------------------------------------------------------------------------------------------------ numbers
def backends(case: Case, dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32, torch.bfloat16)) -> None:
    """Each backend that serves gives the outputs, last state and gradients of the reference, in each dtype."""
    for dtype in dtypes:
        mixer, tokens = case.mixer(dtype), case.draw.randint(65, 100)
        x = case.x(2, tokens, dtype)
        calls: list[tuple[str, Any]] = []
        with backend.observe(lambda op, call, _, calls=calls: calls.append((op, call))):
            mixer(x)
        used = dict(calls)
        reference = {op: name for op, name in REFERENCE.items() if op in used}
        with backend.prefer(reference):
            expected = _run(case, mixer, x)
        for op, call in used.items():
            for name, verdict in backend.explain(op, call):
                if name == reference.get(op) or verdict not in ("chosen", "could serve"):
                    continue
                with backend.prefer({**reference, op: name}):
                    found = _run(case, mixer, x)
                for quantity, value in expected.items():
                    what = f"{quantity} with {op} on {name} against {reference.get(op)}, {dtype}"
                    case.close(found[quantity], value, _kind(mixer, quantity), what, dtype)


def _run(case: Case, mixer: TokenMixer, x: Tensor) -> dict[str, Tensor]:
    """Outputs, gradients by name, and what a cache holds at the end."""
    y, found = gradients(mixer, x)
    last = case.cache(mixer, x.shape[0], x.shape[1], x.dtype)
    mixer(x, last)
    return {"y": y, **found, **{f"cache.{name}": tensor for name, tensor in last.tensors.items()}}


def _kind(mixer: TokenMixer, quantity: str) -> str:
    """The row of the tolerance table for a result of :func:`_run`."""
    if quantity.startswith("cache."):
        return "last_state"
    # Behind the op, a norm weighs rows alike and two products round again: 3.7e-3 of the delta rule's y in bf16 become
    # 5.2e-3 of the layer's. What stays fp32 are decay parameters, whose gradients are sums of terms that cancel.
    return {"y": "layer", "x": "dx"}.get(quantity, "dlog_decay" if quantity in mixer.FLOAT32 else "dweight")


def gradient(case: Case) -> None:
    """Gradients agree with finite differences, and at the start none is zero or infinite, in fp32 and bf16."""
    mixer = case.mixer()
    names, parameters = zip(*mixer.named_parameters())
    parameters = [p.detach().clone().requires_grad_() for p in parameters]

    def run(x: Tensor, *values: Tensor) -> Any:
        return functional_call(mixer, dict(zip(names, values)), (x,))

    x = case.x(2, 5).requires_grad_()
    held = torch.autograd.gradcheck(run, (x, *parameters), fast_mode=True, raise_exception=False)
    case.require(held, "gradients differ from finite differences")
    for dtype in (torch.float32, torch.bfloat16):
        mixer = case.spec.build(case.d_model).to(device=case.device, dtype=dtype)
        _, found = gradients(mixer, case.x(2, 33, dtype))
        for name, _ in mixer.named_parameters():
            case.require(name in found, f"{name} gets no gradient in {dtype}")
            case.require(bool(found[name].isfinite().all()), f"the gradient of {name} is not finite in {dtype}")
            case.require(bool(found[name].any()), f"the gradient of {name} is zero in {dtype}")


def shapes(case: Case) -> None:
    """Lengths 1, 63, 64, 65 and 1000, batches of 1 and 3: the outputs of the shorter are the first of the longest."""
    mixer = case.mixer()
    x = case.x(3, 1000)
    whole = mixer(x)
    case.require(whole.shape == x.shape, f"x is {list(x.shape)}, but y {list(whole.shape)}")
    with backend.prefer({"delta_rule": "recurrent", "selective_scan": "recurrent", "attention": "math"}):
        case.close(whole[:1], mixer(x[:1]), "y", "1000 tokens against the reference")
    for tokens in (1, 63, 64, 65):
        for batch in (1, 3):
            case.close(mixer(x[:batch, :tokens]), whole[:batch, :tokens], "y", f"{batch} rows of {tokens} tokens")


def precision(case: Case) -> None:
    """bf16 within the table of float64; gates and decays fp32 inside, always; outputs and caches of one dtype."""
    low = torch.bfloat16
    rounded = case.mixer(torch.float32).to(low)
    for name, tensor in [*rounded.named_parameters(), *rounded.named_buffers()]:
        wanted = torch.float32 if name in rounded.FLOAT32 else low
        case.require(tensor.dtype == wanted, f"{name} is {tensor.dtype} after .to(bfloat16), not {wanted}")
    x = case.x(2, 40, low)
    seen: list[Any] = []
    with backend.observe(lambda op, call, _: seen.append(call) if op == "delta_rule" else None):
        y = rounded(x)
        with torch.autocast(case.device, dtype=low):
            rounded(x)
            rounded.float()(x.float())
    for call in seen:
        for gate in (call.log_decay, call.beta):
            case.require(gate is None or gate.dtype != low, "a gate is in bf16")
    case.require(y.dtype == low, f"x is {low}, but y {y.dtype}")
    case.close(y, rounded.double()(x.double()), "layer", "bf16 against float64", low)
    cache = case.cache(rounded.to(low), 2, 40, low)
    stepped = torch.cat([rounded(x[:, :30], cache), rounded(x[:, 30:31], cache)], dim=1)
    case.require(stepped.dtype == low, f"with a cache, x is {low}, but y {stepped.dtype}")
    case.close(stepped, y[:, :31], "layer", "bf16 in pieces against the whole", low)


# ----------------------------------------------------------------------------------------------- building and counting
def meta(case: Case) -> None:
    """Built on meta, laid out in memory full of NaN and reset, a mixer equals one built at once, bit by bit."""
    eager = case.spec.build(case.d_model)
    init.reset(eager, seed=case.seed)
    with torch.device("meta"):
        late = case.spec.build(case.d_model)
    late = late.to_empty(device=case.device)
    tensors = dict([*late.named_parameters(), *late.named_buffers()])
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.fill_(float("nan"))
    init.reset(late, seed=case.seed)
    wanted = dict([*eager.named_parameters(), *eager.named_buffers()])
    case.require(tensors.keys() == wanted.keys(), "the mixer built on meta has other tensors")
    for name, tensor in wanted.items():
        case.same(tensors[name].cpu(), tensor, f"{name}, built on meta and reset")
        case.require(
            tensors[name].dtype == tensor.dtype, f"{name} is {tensors[name].dtype} on meta, not {tensor.dtype}"
        )


def settings(case: Case) -> None:
    """A spec survives YAML and pattern text; an unknown option raises, a known one has an effect."""
    import yaml

    spec, kind = case.spec, type(case.spec)
    for options in (spec.to_options(), spec.all_options()):
        back = kind.from_options(yaml.safe_load(yaml.safe_dump(options)))
        case.require(back == spec, f"through YAML, {spec} becomes {back}")
    known = kind.options()
    text = {name: known[name].write(value) for name, value in spec.to_options().items()}
    case.require(kind.from_options(text) == spec, f"{text} does not give {spec} back")
    resolved = spec.resolve(case.d_model)
    still = [name for name, value in resolved.all_options().items() if value is None]
    case.require(not still, f"resolve() leaves {', '.join(still)} open")
    case.require(resolved.resolve(case.d_model) == resolved, "resolving twice changes the spec")
    kind().resolve(256)
    refused = False
    try:
        kind.from_options({"no_such_option": 1})
    except SpecError:
        refused = True
    case.require(refused, "an unknown option is taken without a word")
    for name, option in known.items():
        _has_effect(case, option, getattr(resolved, name))


def _has_effect(case: Case, option: Option, value: Any) -> None:
    """Other values of the option than ``value`` are refused, or build another mixer: in sizes, counts or outputs."""
    if option.choices is not None:
        others: list[Any] = [choice for choice in option.choices if choice != value]
    elif option.kind is bool:
        others = [not value]
    else:
        others = [2 * value, value * 3, value + 1, value / 2 if option.kind is float else value // 2]
    x, taken = case.x(1, 12, torch.float32), []
    for other in others:
        try:
            changed = type(case.spec).from_options({**case.spec.to_options(), option.name: other}).resolve(case.d_model)
        except SpecError:
            continue
        taken.append(other)
        (numbers, y), (other_numbers, other_y) = (_fingerprint(case, each, x) for each in (case.spec, changed))
        if numbers != other_numbers or not torch.equal(y, other_y):
            return
    case.require(not taken, f"option {option.name} changes nothing, with any of {taken} in the place of {value}")


def _fingerprint(case: Case, spec: MixerSpec, x: Tensor) -> tuple[Any, Tensor]:
    mixer = spec.build(case.d_model).to(case.device)
    init.reset(mixer, seed=case.seed)
    sizes = {name: tuple(tensor.shape) for name, tensor in mixer.state_dict().items()}
    return (sizes, mixer.flops_per_token(4096), mixer.state_bytes(4096)), mixer(x)


def counts(case: Case) -> None:
    """``state_bytes`` is the size of a real cache, ``flops_per_token`` what a FLOP counter sees, both exactly."""
    mixer = case.mixer(torch.float32)
    for context in (1, case.draw.randint(2, 50), 4096):
        real = mixer.new_cache(1, context, dtype=torch.bfloat16, device="meta").nbytes()
        told = mixer.state_bytes(context)
        case.require(told == real, f"state_bytes({context}) is {told}, but a cache of that context holds {real}")
    tokens = case.draw.randint(66, 100)
    counter, calls = FlopCounterMode(display=False), []
    with (
        backend.prefer(REFERENCE),
        backend.observe(lambda op, call, _: calls.append((op, call))),
        torch.no_grad(),
        counter,
    ):
        mixer(case.x(1, tokens, torch.float32))
    counted = counter.get_total_flops() + sum(_unseen(op, call, tokens) for op, call in calls)
    told = tokens * mixer.flops_per_token(tokens)
    # Both are whole numbers; only their means over tokens are not.
    case.require(
        round(told) == round(counted),
        f"{tokens} tokens cost {told:,.0f} FLOPs by flops_per_token, but {counted:,.0f} as counted",
    )


def _unseen(op: str, call: Any, tokens: int) -> float:
    """What model FLOPs have beyond the counter's: elementwise decays, and less attention than whole blocks."""
    if op == "delta_rule" and call.log_decay is not None:
        return tokens * call.v.shape[2] * call.k.shape[3] * call.v.shape[3]
    if op == "selective_scan":
        return 5 * tokens * call.A.numel()  # decay and input, built per number of the state
    if op == "attention":
        per_key = 2 * tokens * call.q.shape[2] * (call.q.shape[3] + call.v.shape[3])
        return per_key * (mean_context(tokens, call.window) - multiplied_context(tokens))
    return 0.0


# In the order of a first reading: the cheap ones that explain a failure of the others come first.
PROPERTIES: dict[str, Callable[[Case], None]] = {
    "settings": settings,
    "meta": meta,
    "counts": counts,
    "shapes": shapes,
    "causality": causality,
    "packing": packing,
    "pieces": pieces,
    "ragged": ragged,
    "caches": caches,
    "backends": backends,
    "gradients": gradient,
    "precision": precision,
}


def check(
    spec: MixerSpec, d_model: int, *, seed: int = 0, device: str = "cpu"
) -> Iterator[tuple[str, ConformanceError | None]]:
    """Try every property on one mixer: (its name, None or what failed), one after another.

    Args:
        spec: what to examine; small sizes.
        d_model: the width, small too.
        seed: fixes everything that is drawn.
        device: where it runs.
    """
    for name, prove in PROPERTIES.items():
        try:
            prove(Case(spec, d_model, seed, device))
        except ConformanceError as failure:
            yield name, failure
        else:
            yield name, None
