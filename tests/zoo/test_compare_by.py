"""Comparisons that hold FLOPs or decode state, and arms that cannot take part."""

from pathlib import Path

import pytest

from zoo.cli import Parser
from zoo.comparison.plan import Entry, make_plan
from zoo.comparison.report import collect, write_report
from zoo.comparison.run import run_plan
from zoo.comparison.sections import ledger_table, results_table
from zoo.errors import UserError
from zoo.ledger import cost
from zoo.verbs import compare as verb

RECIPES = Path(__file__).parents[2] / "recipes"


def report(plan, outcome, out):
    content = collect(plan, outcome, {}, "zoo compare")
    return content, write_report(content, out)


@pytest.mark.parametrize(("by", "free"), [("flops", None), ("flops", "d_ff"), ("params", "n_layers")])
def test_arms_cost_what_the_recipes_model_costs(recipe, by, free):
    words = ["--model.n_layers=12"] if free == "n_layers" else []
    arms = [Entry("GA", free=free), Entry("M2,GDN", free=free)]
    plan = make_plan(arms, recipe, by=by, tolerance=0.1 if free == "n_layers" else 0.01, overrides=words)
    for arm in plan.arms:
        assert cost(arm.architecture, 32).of(by) == pytest.approx(plan.reference, rel=plan.tolerance)
        assert arm.deviation == pytest.approx(cost(arm.architecture, 32).of(by) / plan.reference - 1)
        assert arm.turned.startswith(free or "d_ff")
    assert {"flops": "training FLOPs", "params": "parameters"}[by] in plan.held
    assert f"within {plan.tolerance:.1%}" in plan.held


def test_a_held_state_turns_what_the_state_depends_on_and_the_run_trains_that_model(recipe, tmp_path):
    window = Entry("GA,SWA:window=64", "window", ("--model.mixers.GA.heads=2",), free="SWA.window")
    words = ["--model.pattern=GA,SWA:window=192", "--budget.tokens=384"]
    plan = make_plan([window], recipe, by="state", contexts=(256, 512), overrides=words)
    (arm,) = plan.arms
    assert arm.turned == "SWA.window 64 -> 192"
    assert arm.deviation == 0
    assert arm.state_bytes == plan.reference == cost(arm.architecture, 256).state
    outcome = run_plan(plan, tmp_path / "out")
    assert outcome.good
    content, files = report(plan, outcome, tmp_path / "out")
    assert content["held_quantity"] == "state"
    table = ledger_table(content)
    (held,) = (index for index, (title, _) in enumerate(table.columns) if title == "state at 256 (held)")
    assert table.rows[0][held] == "= +0.00%"
    assert "SWA.window 64 -> 192" in files["report.md"].read_text()
    assert "decode state (" in plan.held


def test_an_arm_that_cannot_meet_the_state_says_what_would_come_nearest(recipe):
    with pytest.raises(UserError, match=r"no GA.heads makes state agree within 1.00%; the nearest are GA.heads"):
        make_plan(["GA"], recipe, by="state")


def test_what_cannot_be_held_is_refused_with_what_can(recipe):
    with pytest.raises(UserError, match="Held can be one of params, flops, state"):
        make_plan(["GA"], recipe, by="seconds")


def test_arms_that_cannot_be_built_or_sized_are_rows_and_the_others_are_trained(recipe, tmp_path):
    arms = ["GA/none", "GDN,GA,SWA", "GA:heads=5", "GA"]
    plan = make_plan(arms, recipe, tolerance=0.03, leave_out=True, overrides=["--budget.tokens=384"])
    assert [arm.text for arm in plan.arms] == ["GA"]
    outcome = run_plan(plan, tmp_path / "out")
    assert outcome.good
    assert (tmp_path / "out" / "04-GA" / "seed-1" / "status.json").is_file(), "an arm keeps its folder if others return"
    content, files = report(plan, outcome, tmp_path / "out")
    assert not content["green"]
    reasons = {row[0]: row[-1] for row in results_table(content).rows}
    assert reasons["GA"] == "finished"
    assert "cannot be sized to the budget: GA:heads=2/none: no layer has an MLP" in reasons["GA/none"]
    assert "cannot be built: the pattern holds 3 layers, but n_layers is 2" in reasons["GDN,GA,SWA"]
    assert "cannot be built: heads must divide d_model, but 5 do not divide 32" in reasons["GA:heads=5"]
    assert all(len(row) == len(table.columns) for table in (results_table(content),) for row in table.rows)
    assert "GA/none is left out" in files["report.md"].read_text()


@pytest.mark.parametrize("arms", [["GND", "GA"], ["GA:hedas=2", "GA"], ["GA/none", "GDN,GA,SWA"]])
def test_what_is_misspelt_is_no_row_and_without_any_arm_there_is_no_comparison(recipe, arms):
    with pytest.raises(UserError):
        make_plan(arms, recipe, leave_out=True)


def test_without_leave_one_arm_out_ends_the_plan(recipe):
    with pytest.raises(UserError, match="no layer has an MLP"):
        make_plan(["GA/none", "GA"], recipe, tolerance=0.03)


@pytest.mark.parametrize(
    ("name", "seeds", "steps"), [("compare_25m", (1, 2, 3), 305), ("compare_25m_mqar", (1, 2, 3), 2000)]
)
def test_the_comparisons_at_25m_parse_build_and_are_held(name, seeds, steps):
    parser = Parser("zoo compare", "")
    verb.add_arguments(parser)
    request = verb.read_request(parser.read([str(RECIPES / f"{name}.yaml")]))
    here = ["--trainer.accelerator=cpu", "--trainer.precision=32-true"]
    plan = make_plan(
        request.arms,
        request.recipe,
        overrides=[*request.overrides, *here],
        seeds=request.seeds,
        contexts=request.contexts,
    )
    assert [arm.text for arm in plan.arms] == ["GA", "GDN", "GDN,SWA", "M2,GDN,SWA"]
    assert plan.seeds == seeds
    assert plan.tokens == steps * plan.batch_tokens
    for arm in plan.arms:
        assert arm.non_embedding == pytest.approx(25e6, rel=0.02)
        assert abs(arm.deviation) <= 0.01
        arm.architecture.build("meta")
