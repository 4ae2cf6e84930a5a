"""The kernels of a decay per channel: each operand and each gradient against float64, from the definitions."""

import pytest
import torch

from zoo_kernels import device
from zoo_kernels.accuracy import limit, relative_error

if device.missing(torch.device("cuda" if torch.cuda.is_available() else "cpu")) is not None:
    pytest.skip("Triton kernels cannot run here", allow_module_level=True)

from zoo_kernels.delta.channel import prepare_channel
from zoo_kernels.delta.channel_grads import channel_gradients
from zoo_kernels.delta.chunk import Form, operand_dtype
from zoo_kernels.delta.operands import LEAST_BETA
from zoo_kernels.delta.tables import CHUNK, tables

DECAYS = ("none", "weak", "strong", "mixed", "resets")


@pytest.fixture(autouse=True)
def poisoned():
    """What is allocated and not written is NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


class Case:
    """Inputs of one call, their float64 truth, and both as the kernels take them."""

    def __init__(self, ends, *, K, V, H=1, R=1, decay="weak", erases=True, dtype=torch.float32, device="cpu"):
        draw = torch.Generator().manual_seed(K + V + 7 * R + len(ends))
        self.ends, self.tokens, self.H, self.R, self.HV = ends, ends[-1], H, R, H * R
        self.dtype, self.device, self.scale = dtype, device, K**-0.5
        normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
        T, HV = self.tokens, self.HV
        self.q, self.k, self.v, self.dy = normal(T, H, K), normal(T, H, K), normal(T, HV, V), normal(T, HV, V)
        self.q, self.k = (torch.nn.functional.normalize(x, dim=-1) for x in (self.q, self.k))
        self.log_decay = _decays(decay, torch.rand(T, HV, K, generator=draw, dtype=torch.float64))
        self.beta = 1.9 * torch.rand(T, HV, generator=draw, dtype=torch.float64) if erases else None
        if erases:
            self.beta[3::7] = 0.0
        self.state, self.dlast = normal(len(ends) - 1, HV, K, V), normal(len(ends) - 1, HV, K, V)
        rounded = ("q", "k", "v", "dy", "log_decay")
        vars(self).update({name: getattr(self, name).to(dtype).double() for name in rounded})
        if erases:
            self.beta = self.beta.float().clamp(min=LEAST_BETA).double()  # as it is forward and backward alike
        operand, precision = operand_dtype(dtype)
        arch = "sm_90" if device == "cuda" else "cpu"
        self.form = Form(K, V, HV, R, operand, precision, "channel", erases, arch)
        self.tables = tables(tuple(ends), True, 0, torch.device(device))

    def given(self, x, dtype=None):
        """As the kernels take it, in the inputs' dtype or another."""
        return x.to(self.device, dtype or self.dtype)

    def chunks(self):
        """(first token, end) of each."""
        return [(first, first + rows) for first, rows in self.tables.chunks.tolist()]

    def prepared(self):
        """What the prep kernels give."""
        beta = None if self.beta is None else self.given(self.beta, torch.float32)
        inputs = (self.given(self.q), self.given(self.k), self.given(self.log_decay), beta)
        return prepare_channel(self.form, *inputs, self.tables, self.scale)

    def operands(self):
        """The float64 truth of it."""
        q, k = (x.repeat_interleave(self.R, 1) for x in (self.q, self.k))
        found = {name: torch.zeros_like(k) for name in ("q_read", "k_write", "k_read")}
        square = k.new_zeros(self.tokens, self.HV, CHUNK)
        found |= {"scores": square, "solve": square.clone(), "keep": k.new_zeros(len(self.chunks()), *k.shape[1:])}
        for at, (first, end) in enumerate(self.chunks()):
            rows = end - first
            steps = self.log_decay[first:end].clamp(min=-200.0)
            g, cq, ck = steps.cumsum(0), q[first:end], k[first:end]
            found["q_read"][first:end], found["k_read"][first:end] = cq * g.exp(), ck * g.exp()
            found["k_write"][first:end] = ck * (g[-1] - g).exp()
            found["keep"][at] = g[-1].exp()
            between = (g[:, None] - g[None, :]).exp()  # [i, j, HV, K]
            later = torch.ones(rows, rows, dtype=k.dtype).tril()[:, :, None]
            product = torch.einsum("ihd,jhd,ijhd->ijh", cq, ck, between.nan_to_num(posinf=0.0)) * later
            found["scores"][first:end, :, :rows] = self.scale * product.transpose(1, 2)
            if self.beta is not None:
                product = torch.einsum("ihd,jhd,ijhd->hij", ck, ck, between.nan_to_num(posinf=0.0)).tril(-1)
                eye = torch.eye(rows, dtype=k.dtype)
                inverse = torch.linalg.inv(eye + product * self.beta[first:end].T[:, None, :])
                found["solve"][first:end, :, :rows] = inverse.transpose(0, 1)
        return found

    def learned(self):
        """Autograd through the recurrence in float64: gradients, and what the two scans hand over."""
        names = ("q", "k", "v", "log_decay", "beta")
        leaves = [None if x is None else x.clone().requires_grad_() for x in (getattr(self, n) for n in names)]
        q, k, v, log_decay, beta = leaves
        q, k = q.repeat_interleave(self.R, 1), k.repeat_interleave(self.R, 1)
        loss, errors, states, dstates = 0.0, [], [], []
        for document, (begin, end) in enumerate(zip(self.ends, self.ends[1:])):
            S = self.state[document].clone().requires_grad_()
            for t in range(begin, end):
                if (t - begin) % CHUNK == 0:
                    states.append(S)
                S = log_decay[t].exp()[:, :, None] * S
                e = v[t] if beta is None else v[t] - torch.einsum("hkv,hk->hv", S, k[t])
                S = S + k[t][:, :, None] * (e if beta is None else beta[t][:, None] * e)[:, None, :]
                errors.append(e)
                loss = loss + self.scale * torch.einsum("hkv,hk,hv->", S, q[t], self.dy[t])
                if (t - begin) % CHUNK == CHUNK - 1 or t == end - 1:
                    S = S.clone()  # apart from the S that y has read
                    S.retain_grad()
                    dstates.append(S)
            loss = loss + (S * self.dlast[document]).sum()
        loss.backward()
        found = {"d" + n: x.grad for n, x in zip(names, leaves) if x is not None}
        handed = [torch.stack(x).detach() for x in (errors, states, [S.grad for S in dstates])]
        return found, handed

    def gradients(self, errors, entering, leaving, dv):
        """What the kernels give, from what the scans hand over."""
        operand = self.form.dtype
        ready = self.prepared()
        errors = self.given(errors, operand if self.form.erases else self.dtype)
        handed = (errors, *(self.given(x, operand) for x in (dv, entering, leaving)))
        inputs = (self.given(self.q), self.given(self.k), self.given(self.log_decay))
        upstream = (ready.beta, ready.keep, self.given(self.dy))
        names = ("dq", "dk", "dlog_decay", "dbeta")
        return dict(zip(names, channel_gradients(self.form, *inputs, *upstream, *handed, self.tables, self.scale)))


def _decays(kind, random):
    if kind == "none":
        return torch.zeros_like(random)
    if kind == "strong":
        return -8.0 * torch.ones_like(random)
    steps = -0.2 * random
    if kind == "mixed":
        steps = torch.where(random < 0.4, -8.0, steps)
    if kind == "resets":
        steps = torch.where(random < 0.1, -torch.inf, steps)
        steps[5::28] = -torch.inf
    return steps


def check_operands(case):
    """Each operand within the limit of its dtype."""
    got, expected = case.prepared(), case.operands()
    names = [n for n in expected if case.form.erases or n not in ("k_read", "solve")]
    for name in names:
        found = getattr(got, name)
        found = found.exp2() if name == "keep" else found
        truth = torch.where(expected[name].abs() < torch.finfo(torch.float32).tiny, 0.0, expected[name])
        assert relative_error(found, truth) <= limit("y", case.dtype), name
    assert case.form.erases or got.solve is None


def check_gradients(case):
    """Each gradient within the limit of its kind and dtype."""
    expected, handed = case.learned()
    got = case.gradients(*handed, expected.pop("dv"))
    for name, truth in expected.items():
        assert relative_error(got[name], truth) <= limit(name, case.dtype), name
    resets = case.log_decay == -torch.inf
    assert not got["dlog_decay"].cpu()[resets].any(), "exp(-inf) has no slope"
    assert got["dq"].dtype == got["dk"].dtype == case.dtype


SMALL = [
    {"ends": (0, 1), "K": 16, "V": 16},
    {"ends": (0, 70), "K": 20, "V": 24, "H": 2},
    {"ends": (0, 3, 3, 67, 150), "K": 32, "V": 16, "R": 2},
    {"ends": (0, 64), "K": 40, "V": 24, "H": 2, "R": 2, "erases": False},
    {"ends": (0, 17, 96), "K": 32, "V": 40, "dtype": torch.float16},
    {"ends": (0, 65), "K": 16, "V": 16, "erases": False, "dtype": torch.float16},
]
LARGE = [
    {"ends": (0, 130, 200, 500), "K": 128, "V": 128, "H": 2, "dtype": torch.bfloat16},
    {"ends": (0, 65), "K": 64, "V": 64, "H": 2, "R": 2, "dtype": torch.bfloat16},
    {"ends": (0, 150), "K": 100, "V": 192, "erases": False, "dtype": torch.bfloat16},
    {"ends": (0, 100), "K": 256, "V": 64, "dtype": torch.bfloat16},
    {"ends": (0, 130), "K": 128, "V": 128, "dtype": torch.float16},
    {"ends": (0, 130), "K": 128, "V": 64, "R": 2, "dtype": torch.float32},
]


def named(case):
    """A test's name for a case."""
    return "-".join(str(x).removeprefix("torch.").replace(" ", "") for x in case.values())


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("case", SMALL, ids=named)
def test_each_operand_is_what_its_definition_says(case, decay):
    check_operands(Case(**case, decay=decay))


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("case", SMALL, ids=named)
def test_each_gradient_is_that_of_the_recurrence(case, decay):
    check_gradients(Case(**case, decay=decay))


@pytest.mark.parametrize("distance", [0, 1, 2, 3, 5])
def test_a_strong_decay_costs_near_and_far_tokens_no_digits(distance):
    case = Case((0, 64), K=32, V=16, decay="strong")
    got, expected = case.prepared().scores[:, 0], case.operands()["scores"][:, 0]
    assert relative_error(got.diagonal(-distance), expected.diagonal(-distance)) <= limit("y", torch.float32)


def test_nothing_passes_a_reset():
    case = Case((0, 64), K=16, V=16)
    case.log_decay[21] = -torch.inf
    got = case.prepared()
    for square in (got.scores, got.solve):
        assert not square[21:, :, :21].any()
    assert not got.q_read[21:].any()
    assert not got.k_write[:21].any()
    assert not got.keep.exp2().any()


@pytest.mark.parametrize("erases", [False, True], ids=["adds", "erases"])
def test_queries_and_keys_may_be_views_of_wider_rows(erases):
    case = Case((0, 70), K=16, V=16, H=2, erases=erases)
    wide = case.given(torch.cat([case.q, case.k, case.q], 1)).flatten(1)  # the heads of each lie side by side
    views = [x.unflatten(-1, (2, 16)) for x in wide.split(32, -1)[:2]]
    narrow = [x.contiguous() for x in views]
    gates = (case.given(case.log_decay), case.given(case.beta) if erases else None)
    for one, other in zip(
        *(vars(prepare_channel(case.form, *x, *gates, case.tables, 0.5)).values() for x in (views, narrow))
    ):
        assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("case", LARGE, ids=named)
def test_each_operand_is_what_its_definition_says_on_a_gpu(case, decay):
    check_operands(Case(**case, decay=decay, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("case", LARGE, ids=named)
def test_each_gradient_is_that_of_the_recurrence_on_a_gpu(case, decay):
    check_gradients(Case(**case, decay=decay, device="cuda"))


@pytest.mark.gpu
def test_repeats_are_bitwise_equal_on_a_gpu():
    case = Case((0, 130, 200, 500), K=128, V=128, H=2, R=2, dtype=torch.bfloat16, device="cuda")
    expected, handed = case.learned()
    first, *others = (case.gradients(*handed, expected["dv"]) for _ in range(20))
    for other in others:
        for name, truth in first.items():
            assert torch.equal(other[name], truth), name
