"""Which backend of attention is asked first: what the table may ask, and that whoever is passed over says why."""

import pytest
import torch

from zoo_kernels import backend as table
from zoo_kernels.attention import attention, choice
from zoo_kernels.attention.op import checked_call


def called(lengths, window=None, size=64):
    offsets = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    q = torch.zeros(1, offsets[-1], 1, size)
    return checked_call(q, q, q, window=window, packing=offsets)


def test_the_table_asks_for_the_function_that_is_computed():
    kinds = {
        "full": [called([50]), called([50, 50]), called([50, 50], window=50)],
        "window": [called([50], window=49), called([20, 50], window=30)],
        "packed": [called([20, 50]), called([20, 50], window=50)],
    }
    for kind, calls in kinds.items():
        assert [choice.facts(call)["kind"] for call in calls] == [kind] * len(calls)
    assert [choice.facts(called([n], window=20))["wide"] for n in (40, 41)] == [False, True]
    assert [choice.facts(called([3], size=n))["size"] for n in (64, 65, 128, 129)] == [64, 128, 128, 256]


def test_the_table_names_every_backend_and_its_last_line_fits_everything():
    names = [backend.name for backend in table.backends("attention")]
    assert list(choice.ALL) == names
    for line in choice.ORDERS:
        assert set(line.names) <= set(names)
        assert line.source
    assert not choice.ORDERS[-1].when
    assert choice.ORDERS[-1].arch == "any"
    assert choice.order(called([5]))[0] == choice.ALL


@pytest.mark.parametrize(("arch", "when", "first"), [("cpu", {"kind": "full"}, "blocks"), ("sm_90", {}, "sdpa")])
def test_a_line_speaks_only_for_its_device_and_its_kind_of_call(monkeypatch, arch, when, first):
    monkeypatch.setattr(choice, "ORDERS", (choice.Order(("blocks",), "timed", arch=arch, when=when), *choice.ORDERS))
    assert table.choose("attention", called([5])).name == first


def test_a_backend_that_is_not_first_says_who_is_and_why_and_serves_when_named(monkeypatch):
    rows = dict(table.explain("attention", called([5])))
    assert rows["sdpa"] == "chosen"
    assert rows["blocks"] == f"could serve: sdpa is asked first ({choice.ORDERS[-1].source})"
    monkeypatch.setattr(choice, "ORDERS", (choice.Order(("blocks",), "timed on a bench"), *choice.ORDERS))
    rows = dict(table.explain("attention", called([5])))
    assert rows["blocks"] == "chosen"
    assert rows["sdpa"] == rows["math"] == "could serve: blocks is asked first (timed on a bench)"
    assert rows["varlen"].startswith("it runs on CUDA")
    assert table.choose("attention", called([5]), "sdpa").name == "sdpa"


def test_the_choice_is_no_break_in_a_compiled_graph():
    q = torch.randn(1, 40, 2, 8)
    for window in (None, 7):
        torch._dynamo.reset()
        compiled = torch.compile(lambda q, w=window: attention(q, q, q, window=w), backend="eager", fullgraph=True)
        assert torch.equal(compiled(q), attention(q, q, q, window=window))
