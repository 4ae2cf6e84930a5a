"""The table of backends: who is asked, who is chosen, and what is said of the others."""

import importlib
import subprocess
import sys

import pytest

from zoo_kernels import backend as table


class Backend:
    """Serves calls (numbers) above a bound."""

    def __init__(self, name, above):
        self.name, self.above = name, above

    def serves(self, call):
        return None if call > self.above else f"{call} is not above {self.above}"

    def run(self, call):
        return f"{self.name} ran {call}"


@pytest.fixture
def op(monkeypatch):
    """An op of three backends, forgotten afterwards."""
    monkeypatch.setattr(table, "_TABLES", dict(table._TABLES))
    table.provide("count", lambda: [Backend("fast", 100), Backend("middle", 10), Backend("slow", 0)])
    return "count"


def test_the_first_backend_that_serves_is_chosen(op):
    assert [table.choose(op, call).name for call in (1000, 50, 5)] == ["fast", "middle", "slow"]


def test_explain_gives_every_backend_a_verdict_in_the_order_of_the_table(op):
    assert table.explain(op, 50) == [("fast", "50 is not above 100"), ("middle", "chosen"), ("slow", "could serve")]
    assert [verdict for _, verdict in table.explain(op, -1)] == [f"-1 is not above {n}" for n in (100, 10, 0)]


def test_a_named_backend_runs_or_raises_its_reason_and_is_never_replaced(op):
    assert table.choose(op, 1000, "slow").name == "slow"
    with pytest.raises(ValueError, match="count: backend 'fast' cannot serve this call: 50 is not above 100"):
        table.choose(op, 50, "fast")
    with pytest.raises(ValueError, match="count: no backend is called 'fats'; there are fast, middle, slow"):
        table.choose(op, 50, "fats")


def test_where_nobody_serves_all_reasons_are_given(op):
    with pytest.raises(ValueError, match=r"count: no backend serves .*fast: .*100; middle: .*10; slow: .* above 0"):
        table.choose(op, -1)


def test_an_op_has_one_table_and_the_thunk_waits_for_the_first_use(op):
    with pytest.raises(ValueError, match="'count' already has a table"):
        table.provide(op, list)
    calls = []
    table.provide("lazy", lambda: calls.append(1) or [Backend("only", 0)])
    assert calls == []
    assert "lazy" in table.ops()
    assert table.choose("lazy", 1).name == "only"
    assert calls


def test_a_preference_holds_inside_nests_and_yields_to_a_name_in_the_call(op):
    with table.prefer({op: "slow"}):
        assert table.choose(op, 1000).name == "slow"
        with table.prefer({op: "middle", "another op": "x"}):
            assert table.choose(op, 1000).name == "middle"
            assert table.choose(op, 1000, "fast").name == "fast"
        assert table.choose(op, 1000).name == "slow"
    assert table.choose(op, 1000).name == "fast"


def test_a_preference_ends_with_an_exception_and_refuses_like_a_name(op):
    with pytest.raises(ValueError, match="backend 'fast' cannot serve this call"), table.prefer({op: "fast"}):
        table.choose(op, 50)
    assert table.choose(op, 50).name == "middle"


def test_observers_see_each_choice_while_they_watch(op):
    seen = []
    with table.observe(lambda *choice: seen.append(choice)):
        table.choose(op, 50)
        with table.prefer({op: "slow"}):
            table.choose(op, 60)
    table.choose(op, 70)
    assert seen == [(op, 50, "middle"), (op, 60, "slow")]


def test_every_op_names_its_backends_once():
    for module in ("attention", "conv", "delta"):
        importlib.import_module(f"zoo_kernels.{module}")
    assert {"attention", "delta_rule", "short_conv"} <= set(table.ops())
    for op in table.ops():
        names = [backend.name for backend in table.backends(op)]
        assert names
        assert len(set(names)) == len(names), op


def test_importing_the_kernels_asks_no_gpu_and_loads_no_optional_library():
    program = (
        "import sys, torch\n"
        "def no(*_): raise RuntimeError('a device was asked for')\n"
        "torch.cuda.is_available = torch.cuda.current_device = torch.cuda.get_device_capability = no\n"
        "import zoo_kernels.attention, zoo_kernels.conv, zoo_kernels.norm, zoo_kernels.rotary, zoo_kernels.delta\n"
        "loaded = {'flash_attn', 'lightning', 'transformers', 'fla'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    environment = {"PYTHONPATH": ":".join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
