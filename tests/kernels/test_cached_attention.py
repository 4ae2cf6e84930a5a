"""cached_attention(): decoding and prefill in pieces equal the whole, whatever the order of the slots."""

import random
from itertools import pairwise

import pytest
import torch

from tests.waits import no_waits
from zoo_kernels.accuracy import limit, relative_error
from zoo_kernels.attention import attention, cached, cached_attention


def reference(q, k, v, q_positions, k_positions, window=None, scale=None):
    """One query of one row and head at a time, in float64, over the slots that it may see."""
    rows, queries, heads, size = q.shape
    group = heads // k.shape[2]
    scale = size**-0.5 if scale is None else scale
    y = torch.zeros(rows, queries, heads, v.shape[3], dtype=torch.float64, device=q.device)
    for n in range(rows):
        for t in range(queries):
            at = int(q_positions[n, t])
            first = 0 if window is None else max(0, at - window + 1)
            slots = [s for s, held in enumerate(k_positions[n].tolist()) if first <= held <= at]
            for h in range(heads if slots else 0):
                keys, values = k[n, slots, h // group].double(), v[n, slots, h // group].double()
                y[n, t, h] = (scale * keys @ q[n, t, h].double()).softmax(0) @ values
    return y


def draw(seed, dtype=torch.float64, device="cpu"):
    """Ragged rows whose slots stand in any order, with empty ones between, and a padded query here and there."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rows, slots, queries = rng.randint(1, 3), rng.randint(1, 40), rng.choice([1, 1, rng.randint(2, 12)])
    kv_heads, size = rng.choice([1, 2]), rng.choice([1, 8, 12])
    heads, v_size = kv_heads * rng.choice([1, 3]), rng.choice([size, size + 4])
    if dtype in (torch.bfloat16, torch.float16):
        # The error of a handful of rounded numbers, differences among them, says little: draw enough to average.
        rows, queries, slots, size, v_size = 3, 12, slots + 20, 16, 16
    k_positions = torch.full((rows, slots), -1)
    q_positions = torch.full((rows, queries), -1)
    for n in range(rows):
        held = rng.randint(0, slots)
        places = rng.sample(range(slots), held)
        oldest = rng.randint(0, 50)
        k_positions[n, places] = torch.arange(oldest, oldest + held)
        real = min(queries, held)
        q_positions[n, :real] = torch.arange(oldest + held - real, oldest + held)
    shapes = [(queries, heads, size), (slots, kv_heads, size), (slots, kv_heads, v_size)]
    tensors = [torch.randn(rows, *shape).to(device, dtype).requires_grad_() for shape in shapes]
    window = rng.choice([None, 1, 2, rng.randint(1, 40)])
    return tensors, q_positions.to(device), k_positions.to(device), window


def check(seed, dtype, device="cpu"):
    tensors, q_positions, k_positions, window = draw(seed, dtype, device)
    y = cached_attention(*tensors, q_positions=q_positions, k_positions=k_positions, window=window)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = reference(*exact, q_positions, k_positions, window)
    assert y.dtype == dtype
    assert relative_error(y, expected) < limit("step", dtype)
    if not expected.requires_grad:
        return  # no query saw any key
    dy = torch.randn_like(y)
    gradients = zip(torch.autograd.grad(y, tensors, dy), torch.autograd.grad(expected, exact, dy.double()))
    for quantity, (got, wanted) in zip(("dq", "dk", "dv"), gradients):
        if wanted.abs().max() < 1e-12:  # one visible key: the softmax is constant
            assert got.abs().max() < limit(quantity, dtype) * dy.abs().max(), quantity
        else:
            assert relative_error(got, wanted) < limit(quantity, dtype), quantity


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_it_equals_one_query_at_a_time_in_output_and_each_gradient(seed, dtype):
    check(seed, dtype)


@pytest.mark.parametrize("window", [None, 1, 5, 200])
@pytest.mark.parametrize("seed", range(4))
def test_any_split_into_pieces_equals_the_whole(seed, window):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tokens = rng.randint(2, 60)
    cuts = sorted({0, tokens, *(rng.randint(1, tokens) for _ in range(rng.randint(0, 8)))})
    pieces = [end - start for start, end in pairwise(cuts)]
    q, k, v = (torch.randn(2, tokens, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    positions, outputs, done = torch.arange(tokens).expand(2, -1), [], 0
    for part in (q.split(pieces, 1), q.split(1, 1)):
        outputs, done = [], 0
        for piece in part:
            end = done + piece.shape[1]
            k_positions = torch.where(positions < end, positions, -1)  # later slots are still empty
            outputs.append(
                cached_attention(
                    piece, k, v, q_positions=positions[:, done:end], k_positions=k_positions, window=window
                )
            )
            done = end
        whole = attention(q, k, v, window=window)
        assert relative_error(torch.cat(outputs, 1), whole) < limit("step", torch.float64), pieces


def test_a_ring_of_window_slots_decodes_like_the_whole():
    torch.manual_seed(0)
    window, tokens = 7, 25
    q, k, v = (torch.randn(1, tokens, heads, 4, dtype=torch.float64) for heads in (4, 2, 2))
    whole = attention(q, k, v, window=window)
    ring_k, ring_v = torch.zeros(2, 1, window, 2, 4, dtype=torch.float64)
    held = torch.full((1, window), -1)
    for t in range(tokens):
        slot = t % window
        ring_k[:, slot], ring_v[:, slot], held[:, slot] = k[:, t], v[:, t], t
        at = torch.tensor([[t]])
        y = cached_attention(q[:, t : t + 1], ring_k, ring_v, q_positions=at, k_positions=held, window=window)
        assert relative_error(y, whole[:, t : t + 1]) < limit("step", torch.float64), t


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_the_slots_does_not_matter(seed):
    (q, k, v), q_positions, k_positions, window = draw(seed)
    order = torch.randperm(k.shape[1])
    y = cached_attention(q, k, v, q_positions=q_positions, k_positions=k_positions, window=window)
    again = cached_attention(
        q, k[:, order], v[:, order], q_positions=q_positions, k_positions=k_positions[:, order], window=window
    )
    assert relative_error(again, y) < 1e-12


def test_the_edge_of_the_window_is_where_it_should_be():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 4) for n in (1, 30, 30))
    where = {"q_positions": torch.tensor([[25]]), "k_positions": torch.arange(30)[None], "window": 10}
    y = cached_attention(q, k, v, **where)
    for changed in range(30):
        other = v.clone()
        other[:, changed] += 1.0
        assert torch.equal(cached_attention(q, k, other, **where), y) != (16 <= changed <= 25), changed


def test_what_empty_slots_hold_does_not_matter():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 2, 4) for n in (3, 20, 20))
    q_positions = torch.tensor([[4, 5, 6], [0, 1, 2]])
    k_positions = torch.where(torch.arange(20) < torch.tensor([[7], [3]]), torch.arange(20), -1)
    y = cached_attention(q, k, v, q_positions=q_positions, k_positions=k_positions)
    empty = (k_positions < 0)[..., None, None]
    k, v = k.masked_fill(empty, 1e4), v.masked_fill(empty, -1e4)
    assert torch.equal(cached_attention(q, k, v, q_positions=q_positions, k_positions=k_positions), y)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_query_that_sees_no_key_gives_zeros_and_finite_gradients(dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 2, 4).to(dtype).requires_grad_() for n in (3, 6, 6))
    q_positions = torch.tensor([[-1, -1, 0], [-1, -1, -1]])
    k_positions = torch.tensor([[-1, 0, -1, -1, -1, -1], [-1] * 6])
    y = cached_attention(q, k, v, q_positions=q_positions, k_positions=k_positions)
    assert not y[0, :2].any()
    assert not y[1].any()
    assert torch.equal(y[0, 2], v[0, 1])
    for gradient in torch.autograd.grad(y.sum(), (q, k, v)):
        assert gradient.isfinite().all()
        assert not gradient[1].any()


def test_long_pieces_go_in_blocks_with_the_same_result(monkeypatch):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 2, 4, dtype=torch.float64) for n in (20, 30, 30))
    where = {"q_positions": torch.arange(10, 30).expand(2, -1), "k_positions": torch.arange(30).expand(2, -1)}
    whole = cached_attention(q, k, v, **where)
    monkeypatch.setattr(cached, "MASK_ELEMENTS", 2 * 30 * 3)
    assert relative_error(cached_attention(q, k, v, **where), whole) < 1e-12


def test_the_inputs_dtype_rules_under_autocast():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 4) for n in (2, 6, 6))
    where = {"q_positions": torch.tensor([[4, 5]]), "k_positions": torch.arange(6)[None]}
    plain = cached_attention(q, k, v, **where)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(cached_attention(q, k, v, **where), plain)


@pytest.mark.parametrize(
    ("q_positions", "k_positions", "window", "message"),
    [
        (torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 6, dtype=torch.long), None, r"q_positions is \[1, 3\]"),
        (torch.zeros(1, 2, dtype=torch.long), torch.zeros(6, dtype=torch.long), None, r"k_positions is \[6\]"),
        (torch.zeros(1, 2), torch.zeros(1, 6, dtype=torch.long), None, "q_positions must be integers, got torch.float"),
        (torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 6, dtype=torch.long), 0, "window must be a whole number"),
    ],
)
def test_what_a_user_can_get_wrong_is_named(q_positions, k_positions, window, message):
    q, k = torch.zeros(1, 2, 2, 4), torch.zeros(1, 6, 2, 4)
    with pytest.raises(ValueError, match=message):
        cached_attention(q, k, k, q_positions=q_positions, k_positions=k_positions, window=window)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_it_equals_one_query_at_a_time_on_cuda(seed, dtype):
    check(seed, dtype, "cuda")


@pytest.mark.gpu
def test_a_step_does_not_wait_for_the_device():
    (q, k, v), q_positions, k_positions, window = draw(0, torch.bfloat16, "cuda")
    with no_waits():
        cached_attention(q, k, v, q_positions=q_positions, k_positions=k_positions, window=window)
