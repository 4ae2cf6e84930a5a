"""attention(): every backend against a dense softmax in float64, windows, documents, and what each backend refuses."""

import random
from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.waits import no_waits
from zoo_kernels import backend as table
from zoo_kernels.accuracy import limit, relative_error
from zoo_kernels.attention import attention
from zoo_kernels.attention.blocks import MIN_BLOCK
from zoo_kernels.attention.call import one_kv_head_per_query_head
from zoo_kernels.attention.op import checked_call
from zoo_kernels.attention.reference import multiplied_context
from zoo_kernels.packing import Packing

NAMES = [backend.name for backend in table.backends("attention")]
HALF = [torch.bfloat16, torch.float16]
ON_CPU = [torch.float64, torch.float32, *HALF]


def tensors(batch, tokens, heads, kv_heads, size, v_size, dtype=torch.float64, device="cpu"):
    """q, k, v drawn at random; they ask for gradients."""
    shapes = [(heads, size), (kv_heads, size), (kv_heads, v_size)]
    drawn = [torch.randn(batch, tokens, *shape, dtype=torch.float64).to(device, dtype) for shape in shapes]
    return [tensor.requires_grad_() for tensor in drawn]


def draw(seed):
    """Shapes, a window or none, and offsets or none, from a seed."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kv_heads, tokens = rng.choice([1, 2, 3]), rng.randint(1, 4 * MIN_BLOCK)
    size = rng.choice([1, 4, 8, 20])
    shape = {
        "batch": rng.choice([1, 2, 3]),
        "tokens": tokens,
        "heads": kv_heads * rng.choice([1, 2, 4]),
        "kv_heads": kv_heads,
        "size": size,
        "v_size": rng.choice([size, size + 3, max(1, size // 2)]),
    }
    window = rng.choice([None, 1, 2, rng.randint(1, tokens), tokens, 2 * tokens])
    offsets = None
    if rng.random() < 0.6:
        shape["batch"] = 1
        offsets = sorted([0, tokens, *(rng.randint(0, tokens) for _ in range(rng.randint(0, 6)))])
    return shape, window, offsets


def seen(tokens, window, offsets):
    """bool [T, T]: which key each query sees, written as the definition reads."""
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for start, end in pairwise(offsets):
        for t in range(start, end):
            mask[t, max(start, t - (window or tokens) + 1) : t + 1] = True
    return mask


def truth(q, k, v, window, offsets, scale=None):
    """A dense softmax in float64."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (tensor.double().transpose(1, 2) for tensor in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    mask = seen(q.shape[2], window, offsets or [0, q.shape[2]]).to(q.device)
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def serving(call):
    return [backend.name for backend in table.backends("attention") if backend.serves(call) is None]


def check_against_truth(inputs, window, offsets, name):
    dtype = inputs[0].dtype
    y = attention(*inputs, window=window, packing=offsets, backend=name)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = truth(*exact, window, offsets if not isinstance(offsets, Packing) else offsets.offsets)
    dy = torch.randn_like(expected).to(dtype)
    assert y.dtype == dtype
    assert relative_error(y, expected) < limit("y", dtype), name
    gradients = zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, exact, dy.double()))
    for quantity, (got, wanted) in zip(("dq", "dk", "dv"), gradients):
        # A window of one token makes the softmax constant: its true gradient is zero, ours is rounding.
        if wanted.abs().max() < 1e-12:
            assert got.abs().max() < limit(quantity, dtype) * dy.abs().max().double(), (name, quantity)
        else:
            assert relative_error(got, wanted) < limit(quantity, dtype), (name, quantity)


@pytest.mark.parametrize("dtype", ON_CPU, ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_every_backend_that_serves_equals_a_dense_softmax_in_output_and_each_gradient(seed, dtype):
    shape, window, offsets = draw(seed)
    inputs = tensors(**shape, dtype=dtype)
    names = serving(checked_call(*inputs, window=window, packing=offsets))
    assert {"blocks", "math"} <= set(names)
    for name in [None, *names]:
        check_against_truth(inputs, window, offsets, name)


@pytest.mark.parametrize("window", [None, 1, 7, MIN_BLOCK, MIN_BLOCK + 1, 2 * MIN_BLOCK + 3])
def test_blocks_are_right_at_every_length(window):
    torch.manual_seed(0)
    for tokens in range(1, 2 * MIN_BLOCK + 8):
        q, k, v = tensors(1, tokens, 2, 1, 4, 4)
        with torch.no_grad():
            y = attention(q, k, v, window=window, backend="blocks")
            assert relative_error(y, truth(q, k, v, window, None)) < 1e-10, tokens


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 127, 128, 129])
def test_the_written_out_softmax_is_right_around_its_blocks(tokens):
    torch.manual_seed(0)
    for window in (None, 1, 64, 65):
        check_against_truth(tensors(2, tokens, 2, 1, 4, 3), window, None, "math")


@pytest.mark.parametrize("name", ["blocks", "math"])
@pytest.mark.parametrize("tokens", [5, 20, 21, 90])
def test_a_window_of_w_sees_the_token_and_w_minus_1_before_it(tokens, name):
    torch.manual_seed(0)
    window = 20
    q, k, v = (tensor.detach() for tensor in tensors(1, tokens, 2, 2, 4, 4))
    y = attention(q, k, v, window=window, backend=name)
    for t in {tokens - 1, tokens // 2}:
        for changed in range(tokens):
            other_k, other_v = k.clone(), v.clone()
            other_k[:, changed] += 1.0
            other_v[:, changed] -= 2.0
            again = attention(q, other_k, other_v, window=window, backend=name)
            if t - window < changed <= t:
                assert not torch.equal(again[:, t], y[:, t]), f"token {t} should see {changed}"
            else:
                assert torch.equal(again[:, t], y[:, t]), f"token {t} should not see {changed}"


@pytest.mark.parametrize("seed", range(6))
def test_packed_documents_equal_documents_alone(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    lengths = [rng.choice([0, 1, 2, rng.randint(1, 70)]) for _ in range(6)] + [3]
    offsets = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    window = rng.choice([None, 2, 5, 33])
    inputs = tensors(1, offsets[-1], 4, 2, 8, 6)
    dy = torch.randn(1, offsets[-1], 4, 6, dtype=torch.float64)
    alone = torch.cat([attention(*part, window=window) for part in zip(*(t.split(lengths, 1) for t in inputs))], 1)
    expected = torch.autograd.grad(alone, inputs, dy)
    for name in serving(checked_call(*inputs, window=window, packing=offsets)):
        y = attention(*inputs, window=window, packing=offsets, backend=name)
        assert relative_error(y, alone) < limit("y", torch.float64), name
        for got, wanted in zip(torch.autograd.grad(y, inputs, dy), expected):
            assert relative_error(got, wanted) < limit("dq", torch.float64), name


@pytest.mark.parametrize("poison", [100.0, float("nan")])
@pytest.mark.parametrize(
    ("offsets", "window"),
    [([0, 40, 40, 90, 127], None), ([0, 40, 40, 110, 127], 13), ([0, 40, 40, 90, 127], 45), ([0, 30, 60, 90], None)],
)
def test_changing_one_document_leaves_the_others_bit_equal(offsets, window, poison):
    torch.manual_seed(0)
    inputs = tensors(1, offsets[-1], 4, 2, 8, 8, dtype=torch.float32)
    dy = torch.randn(1, offsets[-1], 4, 8)
    start, end = offsets[-3:-1]
    others = [t for t in range(offsets[-1]) if not start <= t < end]
    changed = [tensor.detach().clone() for tensor in inputs]
    for tensor in changed:
        tensor[:, start:end] = poison
        tensor.requires_grad_()
    other_dy = dy.clone()
    other_dy[:, start:end] = poison
    for name in serving(checked_call(*inputs, window=window, packing=offsets)):
        before = attention(*inputs, window=window, packing=offsets, backend=name)
        after = attention(*changed, window=window, packing=offsets, backend=name)
        assert torch.equal(before[:, others], after[:, others]), name
        before = torch.autograd.grad(before, inputs, dy)
        for one, other in zip(before, torch.autograd.grad(after, changed, other_dy)):
            assert torch.equal(one[:, others], other[:, others]), name


@pytest.mark.parametrize("window", [None, 9, 50])
def test_changing_later_tokens_leaves_earlier_outputs_bit_equal(window):
    torch.manual_seed(0)
    inputs = [tensor.detach() for tensor in tensors(2, 100, 2, 1, 8, 8, dtype=torch.float32)]
    later = [tensor.clone() for tensor in inputs]
    for tensor in later:
        tensor[:, 61:] += 1.0
    for name in serving(checked_call(*inputs, window=window)):
        before = attention(*inputs, window=window, backend=name)
        after = attention(*later, window=window, backend=name)
        assert torch.equal(before[:, :61], after[:, :61]), name
        assert not torch.equal(before[:, 61:], after[:, 61:]), name


def test_empty_documents_change_nothing_anywhere():
    torch.manual_seed(0)
    inputs = tensors(1, 30, 2, 2, 4, 4)
    for window in (None, 4):
        plain = attention(*inputs, window=window, packing=[0, 10, 30])
        crowded = attention(*inputs, window=window, packing=[0, 0, 0, 10, 10, 30, 30])
        assert torch.equal(plain, crowded)


def test_no_tokens_give_no_outputs():
    inputs = tensors(1, 0, 4, 2, 8, 6)
    for packing in (None, [0, 0], [0, 0, 0]):
        y = attention(*inputs, packing=packing)
        assert y.shape == (1, 0, 4, 6)
        y.sum().backward()


@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize("offsets", [None, [0, 13, 50]])
def test_strides_of_inputs_and_upstream_gradients_do_not_matter(window, offsets):
    torch.manual_seed(0)
    plain = [tensor.detach() for tensor in tensors(1, 50, 4, 2, 8, 8)]
    strided = [tensor.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0) for tensor in plain]
    assert not any(tensor.is_contiguous() for tensor in strided)
    for name in serving(checked_call(*plain, window=window, packing=offsets)):
        results = []
        for inputs in (plain, strided):
            inputs = [tensor.detach().requires_grad_() for tensor in inputs]
            y = attention(*inputs, window=window, packing=offsets, backend=name)
            upstream = torch.ones((), dtype=y.dtype).expand_as(y)  # every stride 0
            results.append([y, *torch.autograd.grad(y, inputs, upstream)])
        for got, wanted in zip(*results):
            assert relative_error(got, wanted) < 1e-10, name


def test_query_heads_read_the_key_head_of_their_group():
    torch.manual_seed(0)
    q, k, v = tensors(2, 40, 6, 2, 4, 4)
    for window in (None, 8):
        spread = attention(q, k[:, :, [0, 0, 0, 1, 1, 1]], v[:, :, [0, 0, 0, 1, 1, 1]], window=window)
        assert relative_error(attention(q, k, v, window=window), spread) < 1e-10
    repeated_k, repeated_v = one_kv_head_per_query_head(q, k, v)
    assert torch.equal(repeated_k, k[:, :, [0, 0, 0, 1, 1, 1]])
    assert torch.equal(repeated_v, v[:, :, [0, 0, 0, 1, 1, 1]])


def test_gradients_scale_with_the_upstream_gradient():
    torch.manual_seed(0)
    inputs = tensors(1, 70, 2, 1, 8, 8)
    y = attention(*inputs, window=20, packing=[0, 30, 70])
    dy = torch.randn_like(y)
    once = torch.autograd.grad(y, inputs, dy, retain_graph=True)
    for one, eight in zip(once, torch.autograd.grad(y, inputs, 8 * dy)):
        assert torch.equal(8 * one, eight)


@pytest.mark.parametrize(("window", "offsets"), [(None, None), (3, None), (3, [0, 2, 2, 37, 45]), (None, [0, 20, 45])])
def test_gradcheck_holds_in_float64(window, offsets):
    torch.manual_seed(0)
    inputs = tensors(1, 45, 2, 1, 2, 3)

    def run(*inputs):
        return attention(*inputs, window=window, packing=offsets)

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


def test_the_scale_multiplies_the_scores():
    torch.manual_seed(0)
    inputs = tensors(1, 40, 2, 1, 8, 8)
    for window in (None, 6):
        for name in serving(checked_call(*inputs, window=window)):
            y = attention(*inputs, window=window, scale=0.9, backend=name)
            assert relative_error(y, truth(*inputs, window, None, scale=0.9)) < 1e-10, name


def test_the_inputs_dtype_rules_under_autocast():
    torch.manual_seed(0)
    inputs = tensors(1, 40, 2, 1, 8, 8, dtype=torch.float32)
    for window in (None, 6):
        for name in serving(checked_call(*inputs, window=window)):
            plain = attention(*inputs, window=window, backend=name)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert torch.equal(attention(*inputs, window=window, backend=name), plain), name


def test_a_packing_and_its_raw_offsets_are_the_same():
    torch.manual_seed(0)
    inputs, offsets = tensors(1, 40, 2, 1, 8, 8), [0, 7, 7, 40]
    expected = attention(*inputs, packing=Packing.from_offsets(offsets))
    assert torch.equal(attention(*inputs, packing=offsets), expected)
    assert torch.equal(attention(*inputs, packing=torch.tensor(offsets)), expected)


class LargestTensor(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize(("window", "offsets"), [(None, None), (32, None), (300, None), (32, [0, 100, 1024])])
def test_no_backend_builds_a_mask_or_scores_of_T_by_T(window, offsets):
    tokens = 1024
    inputs = tensors(1, tokens, 1, 1, 4, 4, dtype=torch.float32)
    for name in serving(checked_call(*inputs, window=window, packing=offsets)):
        with LargestTensor() as largest:
            attention(*inputs, window=window, packing=offsets, backend=name).sum().backward()
        assert largest.elements < tokens * tokens / 4, name


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
def test_the_reference_multiplies_what_it_says_so_that_flops_can_be_counted(tokens):
    inputs = tensors(2, tokens, 4, 2, 8, 6)
    for window in (None, 5):
        with FlopCounterMode(display=False) as counter:
            attention(*inputs, window=window, backend="math")
        expected = 2 * 4 * tokens * multiplied_context(tokens) * (2 * 8 + 2 * 6)
        assert counter.get_total_flops() == expected


def chosen(window=None, packing=None, tokens=64, batch=1, dtype=torch.float32):
    q = torch.zeros(batch, tokens, 2, 8, dtype=dtype)
    rows = table.explain("attention", checked_call(q, q, q, window=window, packing=packing))
    assert [name for name, _ in rows] == NAMES
    assert all(verdict for _, verdict in rows)
    return next(name for name, verdict in rows if verdict == "chosen")


def test_the_fused_kernel_serves_whatever_is_full_causal_attention_in_disguise():
    assert chosen() == "sdpa"
    assert chosen(window=64) == "sdpa"
    assert chosen(packing=[0, 64]) == "sdpa"
    assert chosen(packing=[0, 0, 32, 32, 64]) == "sdpa"
    assert chosen(packing=[0, 32, 64], window=32) == "sdpa"
    assert chosen(window=63) == "blocks"
    assert chosen(packing=[0, 31, 64]) == "blocks"


def test_a_named_backend_that_cannot_serve_says_why():
    inputs = tensors(1, 8, 2, 2, 8, 8)
    with pytest.raises(ValueError, match=r"'varlen' cannot serve this call: it runs on CUDA"):
        attention(*inputs, backend="varlen")
    with pytest.raises(ValueError, match=r"'sdpa' cannot serve this call: .* has no window"):
        attention(*inputs, window=3, backend="sdpa")
    with pytest.raises(ValueError, match=r"'sdpa' cannot serve this call: documents of different lengths"):
        attention(*inputs, packing=[0, 3, 8], backend="sdpa")
    with pytest.raises(
        ValueError, match=r"no backend is called 'flash9'; there are sdpa, varlen, flash4, flash2, blocks, math"
    ):
        attention(*inputs, backend="flash9")


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


Q = zeros(2, 6, 4, 8)


@pytest.mark.parametrize(
    ("q", "k", "v", "options", "message"),
    [
        (zeros(6, 4, 8), Q, Q, {}, r"each must be \[batch, tokens, heads, head size\]"),
        (Q, zeros(1, 6, 4, 8), Q, {}, "all must have one batch"),
        (Q, Q, zeros(2, 6, 2, 8), {}, "k and v the same tokens and heads"),
        (Q, zeros(2, 6, 4, 7), Q, {}, "one head size"),
        (Q, zeros(2, 6, 3, 8), zeros(2, 6, 3, 8), {}, "4 query heads are no multiple of 3 key heads"),
        (Q, zeros(2, 7, 4, 8), zeros(2, 7, 4, 8), {}, "q has 6 tokens, k 7; against a cache use cached_attention"),
        (Q, Q, Q.double(), {}, "v torch.float64; give all three one float dtype"),
        (Q.long(), Q.long(), Q.long(), {}, "one float dtype"),
        (Q, Q, Q, {"window": 0}, r"window must be a whole number, at least 1 .*got 0"),
        (Q, Q, Q, {"window": 2.0}, "got 2.0"),
        (Q, Q, Q, {"window": True}, "got True"),
        (Q, Q, Q, {"packing": [0, 6]}, "the batch is 2"),
        (Q[:1], Q[:1], Q[:1], {"packing": [0, 5]}, "offsets end at 5, but there are 6 tokens"),
    ],
)
def test_what_a_user_can_get_wrong_is_named(q, k, v, options, message):
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, **options)


# ------------------------------------------------------------------------------------------------------------- on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("seed", range(10))
def test_every_backend_that_serves_on_cuda_equals_a_dense_softmax(seed, dtype):
    shape, window, offsets = draw(seed)
    inputs = tensors(**shape, dtype=dtype, device="cuda")
    packing = None if offsets is None else Packing.from_offsets(offsets).to("cuda")
    names = serving(checked_call(*inputs, window=window, packing=packing))
    if dtype in HALF:
        assert {"varlen", "blocks", "math"} <= set(names)
    for name in [None, *names]:
        if name != "flash4":  # compiles for seconds for each of these shapes; test_attention_flash.py chooses a few
            check_against_truth(inputs, window, packing, name)


@pytest.mark.gpu
def test_every_backend_on_cuda_is_right_at_the_sizes_of_models():
    torch.manual_seed(0)
    for window, offsets in ((None, None), (256, None), (256, [0, 100, 100, 900, 1500]), (None, [0, 500, 1000, 1500])):
        inputs = tensors(1, 1500, 8, 2, 128, 128, dtype=torch.bfloat16, device="cuda")
        for name in serving(checked_call(*inputs, window=window, packing=offsets)):
            check_against_truth(inputs, window, offsets, name)


@pytest.mark.gpu
def test_the_window_of_the_cuda_kernels_ends_where_it_should():
    torch.manual_seed(0)
    q, k, v = (t.detach() for t in tensors(1, 300, 2, 2, 64, 64, dtype=torch.bfloat16, device="cuda"))
    for name in serving(checked_call(q, k, v, window=100)):
        y = attention(q, k, v, window=100, backend=name)
        for changed, sees in ((199, False), (200, True), (299, True)):
            other = v.clone()
            other[:, changed] += 8.0
            again = attention(q, k, other, window=100, backend=name)
            assert torch.equal(again[:, 299], y[:, 299]) != sees, (name, changed)


@pytest.mark.gpu
def test_no_backend_waits_for_the_device():
    inputs = tensors(1, 300, 4, 2, 64, 64, dtype=torch.bfloat16, device="cuda")
    packing = Packing.from_offsets([0, 100, 100, 170, 300]).to("cuda")
    for window in (None, 50):
        for name in serving(checked_call(*inputs, window=window, packing=packing)):
            attention(*inputs, window=window, packing=packing, backend=name).sum().backward()
            with no_waits():
                attention(*inputs, window=window, packing=packing, backend=name).sum().backward()
