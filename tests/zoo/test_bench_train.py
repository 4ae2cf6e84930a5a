"""`zoo bench train`: what it measures, and what it says of what it cannot measure."""

import json
from functools import partial

import pytest
import torch

from zoo.architecture import settle
from zoo.bench import train
from zoo.bench.roofline import Ceilings
from zoo.bench.table import versions
from zoo.bench.timing import Timing
from zoo.bench.train import (
    PARTS_STEPS,
    PartClock,
    Row,
    Shape,
    StepParts,
    Subject,
    Trained,
    listening,
    measure,
    read_settings,
    select,
)
from zoo.bench.train_table import COLUMNS, TrainReport, cells, where
from zoo.cli import main
from zoo.presets import presets

CPU = torch.device("cpu")
# Dynamo looks at the gradient of each tensor that a block is given.
DYNAMO = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
SIZES = ["n_layers=6", "d_model=32", "d_ff=32", "vocab_size=31", "GA.heads=2", "GA.head_dim=16"]
HYBRID = ["GDN.heads=1", "GDN.head_dim=16", "SWA.heads=2", "SWA.head_dim=16", "M2.head_dim=16", "M2.state=16"]
SMALL = ["--set", *SIZES, *HYBRID, "--lengths", "16x2", "32x1", "--steps", "2"]


@pytest.fixture(autouse=True)
def without_gpu(request, monkeypatch):
    """As on a machine without a GPU, wherever this runs."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def small(name="gdn-h2-0.4b", *, compiled=False):
    return Subject(name, settle(preset=name, **read_settings([*SIZES, *HYBRID])), compiled)


# ----------------------------------------------------------------------------------------------------- the command line
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gdn-h1-1.3"], "unknown preset 'gdn-h1-1.3'; did you mean 'gdn-h1-1.3b'?"),
        (["gdn-h1"], "gdn-h1 is a pattern: it has gdn-h1-0.4b gdn-h1-1.3b"),
        (["gdn-0.4b", "--lengths", "2048"], "--lengths 2048: write tokens x rows, such as 2048x16"),
        (["gdn-0.4b", "--lengths", "0x4"], "--lengths 0x4: write tokens x rows"),
        (["gdn-0.4b", "--steps", "0"], "--steps must be at least 1, got 0"),
        (["gdn-0.4b", "--peak_flops", "0"], "--peak_flops must be above 0, got 0.0"),
        (["gdn-0.4b", "--set", "d_modl=64"], "there is no size 'd_modl'; did you mean 'd_model'?"),
        (["gdn-0.4b", "--set", "d_model"], "--set d_model: write KEY=VALUE"),
        (["gdn-0.4b", "--set", "d_model=wide"], "d_model is a whole number, got 'wide'"),
        (["gdn-0.4b", "--set", "GDN.head=2"], "GDN has no option 'head'; did you mean 'heads'?"),
        (["gdn-0.4b", "--set", "SWA.heads=2"], "no layer of these models is SWA; they have GA GDN"),
        (["gdn-0.4b", "--plot", "f.png", "--no-baseline"], "leave --no-baseline out"),
        (["gdn-0.4b", "--compile", "--recompute", "selective"], "take none or full, or leave --compile out"),
        (["gdn-0.4b", "--recompute", "some"], "invalid choice: 'some'"),
        (["gdn-0.4b", "--out", "nowhere/f.json"], "there is no folder nowhere; make it first"),
        (["gdn-0.4b"], "there is no CUDA GPU here, and a step of transformer++-340m at 2048x16 is 7"),
        ([], "the following arguments are required: PRESET"),
    ],
)
def test_a_mistake_ends_with_2_and_its_cure(capsys, words, said):
    assert main(["bench", "train", *words]) == 2
    assert said in capsys.readouterr().err


def test_every_sized_preset_has_the_transformer_of_its_own_size_as_baseline():
    for name, found in presets().items():
        if found.n_layers is None or found.why_not() or name.startswith("transformer"):
            continue
        baseline, subject = select([name], {}, compiled=False, baseline=True, compiled_baseline=True)
        size = "1.3b" if name.endswith("1.3b") else "340m"
        assert subject.against == baseline.label == f"transformer++-{size} (compiled)"


def test_models_of_one_size_share_a_baseline_and_without_one_there_is_none():
    both = select(["gdn-1.3b", "gdn-h1-1.3b"], {}, compiled=True, baseline=True, compiled_baseline=True)
    assert [subject.name for subject in both] == ["transformer++-1.3b", "gdn-1.3b", "gdn-h1-1.3b"]
    alone = select(["gdn-1.3b"], {}, compiled=False, baseline=False, compiled_baseline=True)
    assert [(subject.label, subject.against) for subject in alone] == [("gdn-1.3b (eager)", None)]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_what_is_computed_again_is_the_models_setting_and_says_so(recompute, tmp_path):
    words = ["gdn-h2-0.4b", *SMALL, "--recompute", recompute, "--out", str(tmp_path / "f.json")]
    assert main(["bench", "train", *words]) == 0
    content = json.loads((tmp_path / "f.json").read_text(encoding="utf-8"))
    assert {(row["preset"][:3], row["recompute"]) for row in content["rows"]} == {("tra", "none"), ("gdn", recompute)}
    assert ("--recompute" in content["command"]) == (recompute != "none")
    _, own = select(["gdn-0.4b"], {}, compiled=False, baseline=True, compiled_baseline=False, recompute=recompute)
    assert own.label == "gdn-0.4b (eager)" if recompute == "none" else f"(eager, recompute {recompute})" in own.label
    small = settle(preset="gdn-0.4b", n_layers=1, d_model=32, d_ff=32, vocab_size=11)
    assert train.Trained(small, torch.device("cpu"), recompute).model.recompute == recompute


# ----------------------------------------------------------------------------------------------------------- end to end
def test_a_hybrid_is_measured_beside_its_baseline_and_written_down(capsys, tmp_path):
    out, page, picture = (tmp_path / name for name in ("f.json", "t.md", "p.png"))
    words = ["gdn-h1-0.4b", "gdn-h2-0.4b", *SMALL, "--peak_flops", "1e12"]
    assert main(["bench", "train", *words, "--out", str(out), "--markdown", str(page), "--plot", str(picture)]) == 0
    assert "these figures say that the command works, and nothing of models" in capsys.readouterr().out
    content = json.loads(out.read_text(encoding="utf-8"))
    assert content["command"].startswith("zoo bench train gdn-h1-0.4b gdn-h2-0.4b --lengths 16x2 32x1 --steps 2 --set")
    rows = content["rows"]
    named = [(row["preset"], row["tokens"], row["rows"]) for row in rows]
    names = ["transformer++-340m", "gdn-h1-0.4b", "gdn-h2-0.4b"]
    assert named == [(name, tokens, count) for name in names for tokens, count in ((16, 2), (32, 1))]
    for row in rows:
        model = settle(**row["architecture"]).build("meta")
        assert row["parameters"] == model.parameter_counts().total
        rate = 32 / (row["step"]["median_ms"] / 1e3)
        assert row["tokens_per_second"] == pytest.approx(rate)
        assert row["mfu"] == pytest.approx(3 * model.flops_per_token(row["tokens"]) * rate / 1e12)
        assert row["step"]["repeats"] == 2
        assert row["peak_bytes"] is None  # there is no GPU to ask
        assert not row["reason"]
        assert sum(row["parts"]["shares"].values()) == pytest.approx(1)
    assert set(rows[4]["parts"]["parts"]) == {"M2", "GDN", "SWA", "MLP", "norms", "head and loss", "rest"}
    assert rows[4]["backends"]["delta_rule"] == ["torch"]
    assert rows[0]["to_baseline"] is None
    assert rows[5]["to_baseline"] == pytest.approx(rows[5]["tokens_per_second"] / rows[1]["tokens_per_second"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    table = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in table[0].strip("|").split("|")] == [title for title, _ in COLUMNS]
    assert len(table) == 2 + len(rows)


def test_what_runs_out_of_memory_is_a_row_that_says_so_and_the_others_are_measured(monkeypatch, capsys, tmp_path):
    step = Trained.step

    def full(self):
        if self.ids.shape[1] == 32:
            raise torch.OutOfMemoryError("CUDA out of memory")
        step(self)

    monkeypatch.setattr(Trained, "step", full)
    out = tmp_path / "f.json"
    words = ["gdn-h1-0.4b", "--no-baseline", "--set", *SIZES[:4], *HYBRID[:4], "--steps", "1", "--out", str(out)]
    assert main(["bench", "train", *words, "--lengths", "32x1", "16x2"]) == 0
    first, second = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert (first["reason"], first["tokens_per_second"]) == ("out of memory", None)
    assert not second["reason"]
    assert second["tokens_per_second"] > 0
    assert "out of memory" in capsys.readouterr().out


@DYNAMO
def test_a_compiled_step_is_measured_where_an_eager_one_runs_out_of_memory(monkeypatch):
    def full(self, clock):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(Trained, "step_by_parts", full)
    (row,) = measure(small(compiled=True), [Shape(16, 1)], CPU, steps=1)
    assert (row.reason, row.remark, row.parts) == ("", "no parts: an eager step runs out of memory", None)
    assert row.tokens_per_second is not None
    (row,) = measure(small(), [Shape(16, 1)], CPU, steps=1)
    assert (row.reason, row.step) == ("out of memory", None)


def test_what_fails_is_told_and_ends_with_1(monkeypatch, capsys):
    monkeypatch.setattr(Trained, "update", lambda self: 1 / 0)
    assert main(["bench", "train", "gdn-h1-0.4b", "--no-baseline", *SMALL]) == 2  # M2 and GA are read by no layer
    words = ["gdn-h1-0.4b", "--no-baseline", "--set", *SIZES[:4], *HYBRID[:4], "--lengths", "16x1", "--steps", "1"]
    assert main(["bench", "train", *words]) == 1
    assert "failed: ZeroDivisionError: division by zero" in capsys.readouterr().out


def test_a_loss_that_is_not_finite_gives_no_figure(monkeypatch):
    forward = Trained.forward
    monkeypatch.setattr(Trained, "forward", lambda self: forward(self) * float("nan"))
    (row,) = measure(small(), [Shape(16, 1)], CPU, steps=1)
    assert (row.reason, row.step) == ("failed: ArithmeticError: the loss is not finite", None)


# ------------------------------------------------------------------------------------------------------------ the parts
def test_every_part_is_heard_in_forward_and_backward_and_a_step_trains_as_without_listening():
    clock, heard, plain = PartClock(CPU), Trained(small().architecture, CPU), Trained(small().architecture, CPU)
    for trained in (heard, plain):
        trained.draw(Shape(16, 2))
    with listening(heard.model, clock):
        heard.step_by_parts(clock)
    plain.step()
    for (name, mine), theirs in zip(heard.model.named_parameters(), plain.model.parameters()):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, msg=name)
    spans = [(part, backward) for part, backward, _, _ in clock.spans]
    counted = {
        "M2": 2,
        "GDN": 2,
        "SWA": 2,
        "MLP": 6,
        "norms": 13,
        "head and loss": 1,
    }  # two norms a layer, and the last
    for part, count in counted.items():
        assert spans.count((part, False)) == spans.count((part, True)) == count
    assert not clock.open
    heard.step()  # nobody listens any more
    assert len(clock.spans) == len(spans)


def test_parts_the_optimizer_and_the_rest_are_the_whole_step():
    clock = PartClock(CPU)
    clock.spans = [
        ("GDN", False, 1.0, 2.0),
        ("head and loss", False, 2.0, 2.5),
        ("GDN", True, 3.5, 5.5),
        ("step", True, 3.0, 6.0),
        ("optimizer", False, 6.0, 7.0),
        ("step", False, 0.0, 8.0),
    ]
    found = clock.summary(steps=2)
    assert isinstance(found, StepParts)
    assert (found.step_ms, found.optimizer_ms) == (4000, 500)
    assert (found.parts["GDN"].forward_ms, found.parts["GDN"].backward_ms) == (500, 1000)
    assert (found.parts["rest"].forward_ms, found.parts["rest"].backward_ms) == (1250, 500)
    assert found.shares()["GDN"] == pytest.approx(0.375)
    assert sum(found.shares().values()) == pytest.approx(1)
    assert where(Row(small(), Shape(1, 1), parts=found)).startswith("rest 44%, GDN 38%")
    assert PARTS_STEPS >= 2


@DYNAMO
def test_compiled_blocks_are_compiled_inside_and_themselves_again_behind(monkeypatch):
    seen = []
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda block, **k: seen.append(block) or real(block, backend="eager", **k))
    subject = small(compiled=True)
    trained = Trained(subject.architecture, CPU)
    before = list(trained.model.blocks)
    with trained.compiled():
        assert [type(block).__name__ for block in trained.model.blocks] == ["OptimizedModule"] * 6
    assert list(trained.model.blocks) == before == seen
    (row,) = measure(subject, [Shape(16, 2)], CPU, steps=1)
    assert row.subject.label == "gdn-h2-0.4b (compiled)"
    assert not row.reason
    assert row.parts is not None
    assert len(seen) == 12


# ------------------------------------------------------------------------------------------------------------ the table
def test_shapes_stand_together_and_a_device_without_a_known_peak_has_no_mfu():
    timing = Timing(10.0, 9.0, 11.0, 3, "wall clock")
    baseline, subject = Subject("transformer++-340m", small("transformer++-340m").architecture, True), small()
    subject = Subject(subject.name, subject.architecture, False, baseline.label)
    report = TrainReport("zoo bench train", versions(CPU), Ceilings(1e9, 1e12, "float32", ""), None)
    for who in (baseline, subject):
        for shape in (Shape(16, 2), Shape(32, 2)):
            report = report.with_row(Row(who, shape, flops_per_token=1e6, step=timing))
    found = cells(report)
    assert [row[0] for row in found] == ["16x2", "16x2", "32x2", "32x2"]
    titles = [title for title, _ in COLUMNS]
    assert [row[titles.index("tokens/s")] for row in found] == ["3,200", "3,200", "6,400", "6,400"]
    assert {row[titles.index("MFU")] for row in found} == {"n/a"}
    assert [row[titles.index("to baseline")] for row in found] == ["-", "1.00", "-", "1.00"]
    # 3 x 1e6 FLOPs x 3200 tokens/s, of 1e12.
    assert found[0][titles.index("of product")] == "1.0%"


@pytest.mark.gpu
def test_a_gpu_is_timed_by_events_in_bf16_with_its_memory(tmp_path):
    out = tmp_path / "f.json"
    words = ["gdn-h1-0.4b", "--set", "n_layers=2", "--lengths", "512x2", "--steps", "2", "--out", str(out)]
    assert main(["bench", "train", *words]) == 0
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [row["compiled"] for row in rows] == [True, False]
    for row in rows:
        assert row["step"]["clock"] == "CUDA events"
        # Weights, and two states of the optimizer, in fp32.
        assert row["peak_bytes"] > 12 * row["parameters"]
        assert row["parts"]["step_ms"] > 0
        assert min(part["forward_ms"] for part in row["parts"]["parts"].values()) >= 0


def test_a_cpu_refuses_a_step_of_more_than_a_teraflop():
    subjects = select(["gdn-0.4b"], {}, compiled=False, baseline=False, compiled_baseline=False)
    train.check_affordable(subjects, [Shape(16, 1)])
    with pytest.raises(ValueError, match=r"a step of gdn-0\.4b at 4096x1 is 13 TFLOP"):
        train.check_affordable(subjects, [Shape(4096, 1)])
