"""The loss in pieces equals the plain one, in value and in every gradient."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.waits import no_waits
from zoo import loss
from zoo.loss import token_nll


def plain(hidden, weight, labels):
    return F.cross_entropy((hidden @ weight.T).flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")


def inputs(rows=(3, 17), width=8, vocab=11, dtype=torch.float64, ignored=0.4):
    torch.manual_seed(0)
    hidden = torch.randn(*rows, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, width, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, vocab, rows)
    labels[torch.rand(rows) < ignored] = -100
    return hidden, weight, labels


@pytest.mark.parametrize("piece", [1, 11 * 5, 2**24], ids=["a row at a time", "five rows", "all at once"])
def test_pieces_give_the_plain_loss_and_its_gradients(monkeypatch, piece):
    monkeypatch.setattr(loss, "PIECE_LOGITS", piece)
    hidden, weight, labels = inputs()
    nll, tokens = token_nll(hidden, weight, labels)
    grads = torch.autograd.grad(nll * 0.3, (hidden, weight))
    expected = plain(hidden, weight, labels)
    wanted = torch.autograd.grad(expected * 0.3, (hidden, weight))
    torch.testing.assert_close(nll, expected, rtol=1e-12, atol=0)
    assert int(tokens) == int((labels != -100).sum())
    for got, want in zip(grads, wanted):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_a_batch_without_labels_has_loss_and_gradient_zero():
    hidden, weight, labels = inputs()
    nll, tokens = token_nll(hidden, weight, torch.full_like(labels, -100))
    grads = torch.autograd.grad(nll, (hidden, weight))
    assert nll.item() == 0
    assert int(tokens) == 0
    assert all(float(g.abs().max()) == 0 for g in grads)


def test_the_weight_gradient_is_summed_in_fp32_when_the_head_is_bf16(monkeypatch):
    """512 rows of one sign: summed in bf16, the total would stop growing at 256 times a row."""
    monkeypatch.setattr(loss, "PIECE_LOGITS", 4)
    hidden = torch.ones(2048, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    nll, _ = token_nll(hidden, weight, torch.zeros(2048, dtype=torch.long))
    (grad,) = torch.autograd.grad(nll, weight)
    torch.testing.assert_close(grad.float(), torch.tensor([[-1024.0], [1024.0]]), rtol=1e-2, atol=0)


def test_autocast_computes_logits_in_its_dtype_and_the_sum_in_fp32():
    hidden, weight, labels = inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        nll, _ = token_nll(hidden, weight, labels)
    assert nll.dtype == torch.float32
    torch.testing.assert_close(nll, plain(hidden, weight, labels), rtol=2e-2, atol=0)


@pytest.mark.parametrize("label", [11, -1])
def test_a_label_outside_the_vocabulary_is_named(label):
    hidden, weight, labels = inputs()
    labels[0, 0] = label
    with pytest.raises(ValueError, match=rf"label {label} is outside 0\.\.10"):
        token_nll(hidden, weight, labels)


def test_shapes_that_disagree_are_named():
    hidden, weight, labels = inputs()
    with pytest.raises(ValueError, match="one per token"):
        token_nll(hidden, weight, labels[:2])
    with pytest.raises(ValueError, match="width 8"):
        token_nll(hidden, weight[:, :4], labels)


def test_more_labels_than_were_announced_are_named():
    hidden, weight, labels = inputs()
    have = int((labels != -100).sum())
    token_nll(hidden, weight, labels, have)
    with pytest.raises(ValueError, match=f"at_most is {have - 1}, but {have} labels count"):
        token_nll(hidden, weight, labels, have - 1)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_more_labels_than_were_announced_are_no_quiet_loss_of_some(device, monkeypatch):
    """A GPU does not raise, for it would have to wait: loss and gradients are NaN, which no step is made with."""
    monkeypatch.setattr(loss, "_check_labels", lambda *_: None)
    hidden, weight, labels = (each.detach().to(device) for each in inputs(rows=(5, 40), ignored=0.8))
    hidden.requires_grad_(), weight.requires_grad_()
    if device == "cpu":
        found, kept = loss._labelled(hidden.flatten(0, 1), labels.flatten(), 3)
        assert (found.shape[0], int((kept != -100).sum())) == (3, 3)
        return
    nll, _ = token_nll(hidden, weight, labels, int((labels != -100).sum()) - 1)
    assert nll.isnan()
    d_hidden, d_weight = torch.autograd.grad(nll, (hidden, weight))
    assert d_weight.isnan().all()
    asked = (labels != -100).flatten().nonzero().squeeze(-1)
    assert d_hidden.flatten(0, 1)[asked[:-1]].isnan().all()  # the last was left out, and has no gradient, as fillers


class Rows(TorchDispatchMode):
    """Notes how many rows each product has."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.mm:
            self.seen.append(args[0].shape[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("spare", [0, 7], ids=["exact", "bound"])
@pytest.mark.parametrize("ignored", [0.9, 0.2, 1.0])
def test_the_head_takes_few_labels_alone_and_no_one_waits(device, ignored, spare):
    """All positions where most have labels: then nothing would be saved."""
    hidden, weight, labels = inputs(rows=(5, 40), ignored=ignored)
    wanted = torch.autograd.grad(plain(hidden, weight, labels), (hidden, weight))
    have = int((labels != -100).sum())
    hidden, weight, labels = (each.detach().to(device) for each in (hidden, weight, labels))
    hidden.requires_grad_(), weight.requires_grad_()
    token_nll(hidden, weight, labels, have + spare)  # libraries are loaded
    with no_waits() if device == "cuda" else nullcontext(), Rows() as rows:
        nll, tokens = token_nll(hidden, weight, labels, have + spare)
    grads = torch.autograd.grad(nll, (hidden, weight))
    assert int(tokens) == have
    most = have + spare if device == "cuda" else have
    assert set(rows.seen) <= {most if most * 2 <= labels.numel() else labels.numel(), weight.shape[0]}
    for got, want in zip(grads, wanted):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-10, atol=1e-12)
