"""The numbers that can be worked out by hand: the overwrite toy, one write, the WY form."""

import pytest
import torch

from zoo_kernels.accuracy import limit
from zoo_kernels.backend import backends
from zoo_kernels.delta import delta_rule

# Kernels serve no float64; test_the_kernels_read_the_toy_too tries them in fp32.
KERNELS = ("triton", "fused_recurrent")
BACKENDS = [backend.name for backend in backends("delta_rule") if backend.name not in KERNELS]
KEYS = {"orthonormal": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0)), "oblique": ((1.0, 0.0, 0.0), (0.6, 0.8, 0.0))}
# rule: (decay per write, one number or one per channel; beta; reads of k1 and k2 by kind of keys).
# The writes: 5 under k1, 7 under k2, 9 under k1.
TOY = {
    "add only": (None, None, {"orthonormal": (14, 7), "oblique": (18.2, 15.4)}),
    "decay 1/2": (0.5, None, {"orthonormal": (10.25, 3.5), "oblique": (12.35, 9.65)}),
    "delta": (None, 1.0, {"orthonormal": (9, 7), "oblique": (9, 7.96)}),
    "gated delta": (0.5, 1.0, {"orthonormal": (9, 3.5), "oblique": (9, 7.16)}),
    "delta, beta 1/2": (None, 0.5, {"orthonormal": (5.75, 3.5), "oblique": (6.575, 5.705)}),
    # Taken against the memory before its decay, the error would give 4.5 here.
    "gated delta, beta 1/2": (0.5, 0.5, {"orthonormal": (4.8125, 1.75), "oblique": (5.28125, 4.16875)}),
    "reflection": (None, 2.0, {"orthonormal": (8, 14), "oblique": (6.8, 5.36)}),
    "channel decay": ((0.5, 1.0, 1.0), None, {"orthonormal": (10.25, 7)}),
    "channel decay, delta": ((0.5, 1.0, 1.0), 1.0, {"orthonormal": (9, 7)}),
}
ROWS = [(rule, keys) for rule, (_, _, reads) in TOY.items() for keys in reads]


def toy(rule: str, keys: str, *, silent: int = 0, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, dict]:
    """q, k, v [1, T, 1, 3 or 1] stacked in a list, and the gates: ``silent`` zero writes, three writes, two reads."""
    decay, beta, _ = TOY[rule]
    k1, k2 = (torch.tensor(key, dtype=dtype) for key in KEYS[keys])
    zero = torch.zeros(3, dtype=dtype)
    k = torch.stack([zero] * silent + [k1, k2, k1, zero, zero]).view(1, -1, 1, 3)
    q = torch.stack([zero] * (silent + 3) + [k1, k2]).view(1, -1, 1, 3)
    v = torch.tensor([0.0] * silent + [5.0, 7.0, 9.0, 0.0, 0.0], dtype=dtype).view(1, -1, 1, 1)
    writes = torch.tensor([0.0] * silent + [1.0] * 3 + [0.0] * 2, dtype=dtype).view(1, -1, 1)
    gates = {}
    if decay is not None:
        by_write = torch.tensor(decay, dtype=dtype).log()
        gates["log_decay"] = writes.unsqueeze(-1) * by_write if by_write.dim() else writes * by_write
    if beta is not None:
        gates["beta"] = writes * beta
    return [q, k, v], gates


def check(y: torch.Tensor, rule: str, keys: str, dtype: torch.dtype) -> None:
    expected = torch.tensor(TOY[rule][2][keys], dtype=torch.float64)
    assert torch.allclose(y[0, -2:, 0, 0].double(), expected, rtol=limit("y", dtype), atol=0), y[0, -2:, 0, 0]


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(("rule", "keys"), ROWS)
def test_the_kernels_read_the_toy_too(rule, keys, backend):
    (q, k, v), gates = toy(rule, keys, dtype=torch.float32)
    y, _ = delta_rule(q, k, v, **gates, scale=1.0, backend=backend)
    check(y, rule, keys, torch.float32)


# 0.6 and 0.8 are no bf16 numbers.
BY_DTYPE = [(*row, dtype) for row in ROWS for dtype in (torch.float64, torch.float32)]
BY_DTYPE += [(*row, torch.bfloat16) for row in ROWS if row[1] == "orthonormal"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rule", "keys", "dtype"), BY_DTYPE, ids=str)
def test_the_toy_reads_what_the_founding_note_says(rule, keys, backend, dtype):
    tensors, gates = toy(rule, keys, dtype=dtype)
    y, _ = delta_rule(*tensors, **gates, scale=1.0, backend=backend)
    check(y, rule, keys, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rule", "keys"), ROWS)
def test_the_toy_reads_the_same_after_200_zero_writes(rule, keys, backend):
    tensors, gates = toy(rule, keys, silent=200)
    y, _ = delta_rule(*tensors, **gates, scale=1.0, backend=backend)
    check(y, rule, keys, torch.float64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rule", "keys"), ROWS)
def test_the_toy_reads_the_same_as_one_packed_document_among_others(rule, keys, backend):
    tensors, gates = toy(rule, keys)
    noise = torch.Generator().manual_seed(0)

    def among(x):
        others = torch.rand(1, 40, *x.shape[2:], generator=noise, dtype=x.dtype)
        return torch.cat([others[:, :17], x, others[:, 17:]], 1)

    gates = {name: among(gate) if name == "beta" else -among(-gate) for name, gate in gates.items()}
    y, _ = delta_rule(*map(among, tensors), **gates, packing=[0, 0, 17, 22, 45, 45], scale=1.0, backend=backend)
    check(y[:, 17:22], rule, keys, torch.float64)


@pytest.mark.parametrize("first", [1, 2, 3, 4])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rule", "keys"), ROWS)
def test_the_toy_reads_the_same_in_two_cached_calls(rule, keys, backend, first):
    tensors, gates = toy(rule, keys)
    state, ys = None, []
    for part in (slice(None, first), slice(first, None)):
        mine = {name: gate[:, part] for name, gate in gates.items()}
        y, state = delta_rule(*(x[:, part] for x in tensors), **mine, initial_state=state, scale=1.0, backend=backend)
        ys.append(y)
    check(torch.cat(ys, 1), rule, keys, torch.float64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [1.0, 0.7])
def test_one_write_mixes_the_old_value_and_the_new_by_beta_times_the_square_of_the_key(backend, length):
    torch.manual_seed(1)
    k = torch.nn.functional.normalize(torch.randn(1, 2, 3, 5, dtype=torch.float64), dim=-1) * length
    k[:, 1] = 0.0  # a second token that writes nothing, so that no backend may take its path for one token
    v = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    beta = torch.tensor([0.0, 0.7, 2.0], dtype=torch.float64).expand(1, 2, 3)
    state = torch.randn(1, 3, 5, 4, dtype=torch.float64)
    _, last = delta_rule(k, k, v, beta=beta, initial_state=state, backend=backend)
    share = (beta * length**2)[0, 0].unsqueeze(-1)
    old, new = (torch.einsum("hk,hkv->hv", k[0, 0], s[0]) for s in (state, last))
    torch.testing.assert_close(new, (1 - share) * old + share * v[0, 0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_beta_of_one_over_the_square_of_the_key_writes_exactly(backend):
    torch.manual_seed(2)
    k = torch.randn(1, 2, 3, 5, dtype=torch.float64) + 1
    k = k * (0.9 / k.norm(dim=-1, keepdim=True).clamp(max=0.9))  # not shorter than 0.9, so that beta stays below 2
    k[:, 1] = 0.0
    v = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    beta = torch.zeros(1, 2, 3, dtype=torch.float64)
    beta[:, 0] = 1 / k[:, 0].square().sum(-1)
    _, last = delta_rule(k, k, v, beta=beta, initial_state=torch.randn(1, 3, 5, 4).double(), backend=backend)
    torch.testing.assert_close(torch.einsum("hk,hkv->hv", k[0, 0], last[0]), v[0, 0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("gated", [False, True], ids=["no decay", "decay"])
def test_the_wy_form_gives_what_is_written(gated):
    torch.manual_seed(3)
    T, K, V = 23, 8, 6
    k = torch.nn.functional.normalize(torch.randn(T, K, dtype=torch.float64), dim=-1)
    v, state = torch.randn(T, V, dtype=torch.float64), torch.randn(K, V, dtype=torch.float64)
    beta = 2 * torch.rand(T, dtype=torch.float64)
    log_decay = -torch.rand(T, dtype=torch.float64) if gated else torch.zeros(T, dtype=torch.float64)
    running = log_decay.cumsum(0)
    decay = (running[:, None] - running).tril().exp().tril()
    solve = torch.linalg.inv(torch.eye(T) + (beta[:, None] * (k @ k.T) * decay).tril(-1)) * beta
    written = solve @ v - solve @ (running.exp()[:, None] * k) @ state
    wy_state = running[-1].exp() * state + (k * (running[-1] - running).exp()[:, None]).T @ written
    _, last = delta_rule(
        *(x[None, :, None] for x in (k, k, v)),
        log_decay=log_decay[None, :, None] if gated else None,
        beta=beta[None, :, None],
        initial_state=state[None, None],
    )
    torch.testing.assert_close(last[0, 0], wy_state, rtol=1e-10, atol=1e-12)
