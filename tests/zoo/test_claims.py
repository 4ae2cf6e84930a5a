"""zoo claims: every claim can be made, what finished is not run again, and nothing is said that was not measured."""

import csv
import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from zoo.claims import claim, free, table
from zoo.claims import run as run_module
from zoo.claims.claim import Claim, Experiment
from zoo.claims.judge import FAILS, HOLDS, NOT_RUN, Bound, Finding, Margin
from zoo.claims.report import charts_of, depths
from zoo.claims.run import NO_GPU, NO_GPU_NAMED, plan_of
from zoo.cli import main
from zoo.comparison.allowance import Allowance
from zoo.comparison.intervals import bootstrap
from zoo.comparison.plan import Entry, Reading, instantiate, make_plan
from zoo.comparison.read import read_rows
from zoo.comparison.run import run_plan
from zoo.data import TaskData
from zoo.errors import UserError
from zoo.module import HybridLMModule
from zoo.plot import chart_svg, draw_chart

EXPERIMENTS = {c.experiment.name: c.experiment for c in table.CLAIMS if c.experiment is not None}
RECIPES = claim.RECIPES
ON_CPU = ("--trainer.accelerator=cpu", "--trainer.precision=32-true")
LONGER = "--data.init_args.seq_len=64"
TINY = Experiment(
    name="tiny",
    recipe="recipe",
    arms=(Entry("GA"), Entry("GDN,SWA")),
    settings=("--budget.tokens=256", "--model.lr_scheduler.init_args.warmup_steps=1"),  # two steps
    readings=(Reading("1x"), Reading("2x", (LONGER,))),
    lengths={"1x": 32, "2x": 64},
    score="1x/bpb",
    seconds=5,
    gpu=False,
)


def tiny_claim(name, *rules, experiment=TINY, **settings):
    words = {"sentence": "s", "source": "s", "expected": "e"}
    return Claim(name=name, tier=1, family="tiny", experiment=experiment, rules=rules, **words, **settings)


SURE = tiny_claim("sure", Bound("GA", "1x/bpb", most=100.0), Bound("GDN,SWA", "2x/bpb", most=100.0))
FALSE = tiny_claim("false", Margin("GA", ("GDN,SWA",), "1x/bpb", 100.0))


@pytest.fixture
def claims(monkeypatch, recipe, tmp_path):
    """Run the verb on some claims over the tiny recipe; its status."""
    monkeypatch.setattr(sys, "argv", ["zoo"])
    monkeypatch.setattr(claim, "RECIPES", tmp_path)

    def call(*chosen, words=()):
        monkeypatch.setattr(table, "CLAIMS", chosen)
        return main(["claims", "--out", str(tmp_path / "out"), *words])

    return call


def read(tmp_path):
    content = json.loads((tmp_path / "out" / "claims.json").read_text(encoding="utf-8"))
    return content, {own["name"]: own for own in content["claims"]}


# ------------------------------------------------------------------------------------------------------------ the table
def test_names_are_unique_and_none_is_a_family_of_others():
    names = [c.name for c in table.CLAIMS]
    assert len(set(names)) == len(names)
    for own in table.CLAIMS:  # else --only could not choose it alone
        assert all(c is own for c in table.CLAIMS if c.family == own.name), own.name


def test_every_claim_says_what_is_claimed_by_whom_and_what_was_expected():
    for own in table.CLAIMS:
        assert all((own.sentence.endswith("."), own.source, own.expected, own.cost)), own.name
        assert (own.tier == 3) == bool(own.needs), own.name


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_can_be_planned_and_its_arms_build_on_meta(name):
    experiment = EXPERIMENTS[name]
    # Which text it is does not matter here, and the excerpt is read sooner.
    text = ("--data.init_args.source=excerpt",) if name == "text" else ()
    plan = plan_of(experiment, settings=(*ON_CPU, *text))
    assert [arm.text for arm in plan.arms] == [entry.title for entry in experiment.arms]
    assert all(arm.total > 0 and arm.state_bytes > 0 for arm in plan.arms)
    if experiment.matched:
        assert all(abs(arm.deviation) <= 0.01 for arm in plan.arms)
    known = {"val/bpb"}
    for reading in experiment.readings:
        data = instantiate(experiment.file, [*experiment.settings, *ON_CPU, *text, *reading.settings]).datamodule
        if experiment.lengths[reading.name] != data.seq_len:  # rows of several lengths, the longest of them the task's
            assert experiment.lengths[reading.name] == data.task.test_max_length
        parts = ("", *(f"{name}/" for name in data.task.slice_names)) if isinstance(data, TaskData) else ()
        known |= {f"{reading.name}/{part}{metric}" for part in parts for metric in ("accuracy", "exact")}
        known |= set() if parts else {f"{reading.name}/loss", f"{reading.name}/bpb"}
    scored = {experiment.score} | {
        score
        for own in table.CLAIMS
        if own.experiment is experiment
        for rule in own.rules
        for score in rule.score.split(" - ")
    }
    assert scored <= known


def test_gla_has_the_state_of_deltanet_and_twice_that():
    own = EXPERIMENTS["recall_64"]
    # The memories alone: without the convolutions, which are as wide as what they run over.
    arms = tuple(replace(entry, text=entry.text.replace(":conv=4", "")) for entry in own.arms[1:6])
    plan = plan_of(replace(own, arms=arms), settings=ON_CPU)
    state = {arm.text: arm.architecture.build(device="meta").state_bytes(256) for arm in plan.arms}
    assert state["GLA, equal state"] == state["GDN, convolution"] == state["DN, convolution"]
    # Mamba-2 has no option that leaves its convolution out: three inputs of x, B and C in each of two layers, in bf16.
    assert state["M2, equal state"] - 2 * 3 * (32 + 2 * 16) * 2 == state["DN, convolution"]
    assert state["GLA, twice the state"] == 2 * state["DN, convolution"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"rules": ()},
        {"needs": "a cluster"},
        {"check": free.toy},
        {"rules": (Bound("M2", "1x/loss", most=1.0),)},
    ],
    ids=["no rule", "two ways", "check too", "unknown arm"],
)
def test_a_claim_that_cannot_be_judged_cannot_be_written(wrong):
    with pytest.raises(ValueError, match="claim sure"):
        replace(SURE, **wrong)


# ---------------------------------------------------------------------------------------------------------- the command
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tier", "4"], "there are tiers 1"),
        (["--only", "paritty"], "did you mean 'parity'"),
        (["--tier", "2", "--free"], "tier 2: no claim of it goes without training"),
        (["--tier", "3", "--only", "toy"], "tier 3 and --only toy: no claim of it is left"),
        (["--minutes", "0"], "--minutes 0: give a number above 0"),
        (["--minutes", "nan"], "give a number above 0"),
        (["--onyl", "toy"], "did you mean '--only'"),
    ],
)
def test_wrong_words_are_one_message(words, message, tmp_path, capsys):
    assert main(["claims", "--out", str(tmp_path / "out"), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_one_message_before_anything_is_tried(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["claims", "--only", "toy", "--out", str(tmp_path / "file" / "out")]) == 2
    assert "the folder cannot be made" in capsys.readouterr().err


def test_the_list_names_every_claim_and_tries_none(capsys, tmp_path):
    assert main(["claims", "--list", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert all(own.name in printed for own in table.CLAIMS)
    assert f"{len(table.CLAIMS)} claims" in printed
    assert main(["claims", "--list", "--only", "mad"]) == 0
    assert "mad_fuzzy" in (printed := capsys.readouterr().out)
    assert "parity" not in printed
    assert not (tmp_path / "out").exists()


def test_what_is_free_holds(tmp_path, capsys):
    assert main(["claims", "--free", "--out", str(tmp_path / "out")]) == 0
    content, own = read(tmp_path)
    assert own.keys() == {"toy", "exact_write", "forms", "fixed_state", "uniform_bits"}
    assert {found["verdict"] for found in own.values()} == {HOLDS}
    assert "5 hold, 0 do not, 0 were not run." in capsys.readouterr().out
    assert any("8.0056" in finding["words"] for finding in own["uniform_bits"]["findings"])
    assert content["good"]
    assert sum(found["seconds"] for found in own.values()) < 120


def test_the_toy_sees_an_error_taken_against_the_memory_before_its_decay(monkeypatch):
    right = free.delta_rule

    def late_decay(q, k, v, *, log_decay=None, beta=None, **others):
        """Read and erase first, then let fade: 4.5 where 4.8125 is right."""
        if log_decay is None or beta is None or log_decay.dim() == 4:
            return right(q, k, v, log_decay=log_decay, beta=beta, **others)
        later = torch.cat([torch.zeros_like(log_decay[:, :1]), log_decay[:, :-1]], 1)
        return right(q, k, v, log_decay=later, beta=beta, **others)

    monkeypatch.setattr(free, "delta_rule", late_decay)
    assert not all(finding.held for finding in free.toy())


def test_tier_three_is_listed_and_not_run(tmp_path):
    assert main(["claims", "--tier", "3", "--out", str(tmp_path / "out")]) == 0
    content, own = read(tmp_path)
    assert {found["verdict"] for found in own.values()} == {NOT_RUN}
    assert all(found["reason"].startswith("needs ") and found["seconds"] is None for found in own.values())
    assert content["counts"] == {HOLDS: 0, FAILS: 0, NOT_RUN: len(own)}


def test_without_a_gpu_its_claims_are_not_run_and_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["claims", "--only", "mad_fuzzy", "--out", str(tmp_path / "out")]) == 0
    _, own = read(tmp_path)
    assert (own["mad_fuzzy"]["verdict"], own["mad_fuzzy"]["seconds"]) == (NOT_RUN, None)
    assert NO_GPU in own["mad_fuzzy"]["reason"]


# ------------------------------------------------------------------------------------------------------------- the runs
def test_runs_are_made_once_for_all_claims_and_not_again(claims, tmp_path, capsys):
    assert claims(SURE, FALSE) == 1
    first, own = read(tmp_path)
    assert (own["sure"]["verdict"], own["false"]["verdict"]) == (HOLDS, FAILS)
    assert "1 hold, 1 do not, 0 were not run." in (printed := capsys.readouterr().out)
    assert printed.count("  finished:") == 2
    run_folder = tmp_path / "out" / "tiny" / "02-GDN_SWA" / "seed-1"  # the recipe's own seed is not what counts
    assert not run_folder.exists()
    stored = json.loads((tmp_path / "out" / "tiny" / "02-GDN_SWA" / "seed-0" / "status.json").read_text())
    assert stored["status"] == "finished"
    assert len(stored["key"]) == 16
    assert (tmp_path / "out" / "tiny" / "02-GDN_SWA" / "seed-0" / "recipe.yaml").is_file()
    assert claims(SURE, FALSE) == 1
    assert capsys.readouterr().out.count("finished before") == 2
    again, _ = read(tmp_path)
    assert again["experiments"] == first["experiments"]


def test_a_reported_claim_that_does_not_hold_decides_nothing(claims, tmp_path, capsys):
    assert claims(SURE, replace(FALSE, gate=False)) == 0
    assert read(tmp_path)[1]["false"]["verdict"] == FAILS
    assert "1 do not (1 of them reported only, which decides nothing)" in capsys.readouterr().out


def test_the_files_hold_lengths_states_and_a_picture(claims, tmp_path):
    claims(SURE)
    out = tmp_path / "out"
    with (out / "lengths.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["arm"], row["trained_on"], row["tokens"]) for row in rows] == [
        (arm, "32", tokens) for arm in ("GA", "GDN,SWA") for tokens in ("32", "64")
    ]
    scores = {arm["name"]: arm["scores"]["0"] for arm in read(tmp_path)[0]["experiments"][0]["arms"]}
    assert [float(row["value"]) for row in rows] == [
        scores[arm][f"{reading}/bpb"] for arm in ("GA", "GDN,SWA") for reading in ("1x", "2x")
    ]
    assert scores["GA"]["1x/bpb"] != scores["GA"]["2x/bpb"]
    with (out / "states.csv").open(newline="", encoding="utf-8") as file:
        states = {row["arm"]: int(row["state_bytes"]) for row in csv.DictReader(file)}
    assert states["GA"] == 2 * 2 * 32 * 32 * 2  # two layers, keys and values, 32 tokens and channels, two bytes
    for name in ("tiny_length.png", "tiny_state.png"):
        assert (out / name).stat().st_size > 5_000
        assert f"({name})" in (out / "claims.md").read_text(encoding="utf-8")


def test_the_report_is_written_anew_from_its_json_alone_and_no_option_changes_it(claims, tmp_path, capsys):
    assert claims(SURE, FALSE) == 1
    out = tmp_path / "out"
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    for name in before.keys() - {"claims.json"}:
        (out / name).unlink()
    assert main(["claims", "--report-only", str(out)]) == 1, "a gate does not hold"
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before
    capsys.readouterr()
    others = (["--tier", "2"], ["--tier", "0"], ["--only", "parity"], ["--free"], ["--out", "elsewhere"])
    for words in (*others, ["--minutes", "5"], ["--minutes", "0"]):
        assert main(["claims", "--report-only", str(out), *words]) == 2
        assert f"{words[0]} changes none of it" in capsys.readouterr().err
    assert main(["claims", "--report-only", str(tmp_path)]) == 2
    assert "cannot be read; name a folder of `zoo claims`" in capsys.readouterr().err
    contents = {'{"schema": 1}': "has the layout 1", "[]": "holds no report", '{"schema": 4}': "is not whole (KeyError"}
    for content, said in contents.items():
        (out / "claims.json").write_text(content)
        assert main(["claims", "--report-only", str(out)]) == 2
        assert said in capsys.readouterr().err
    (out / "claims.json").write_bytes(before["claims.json"])
    (out / "claims.md").unlink()
    (out / "claims.md").mkdir()
    assert main(["claims", "--report-only", str(out)]) == 2
    assert "cannot be written to" in capsys.readouterr().err
    assert (out / "claims.json").read_bytes() == before["claims.json"]


def test_no_run_begins_once_the_time_is_over_and_a_later_call_goes_on(claims, tmp_path, monkeypatch, capsys):
    asked = []

    def only_the_first(self, seconds=0.0):
        asked.append(seconds)
        return None if len(asked) == 1 else "--minutes 5: they are over"

    with monkeypatch.context() as patch:
        patch.setattr(Allowance, "refuse", only_the_first)
        assert claims(SURE, words=["--minutes", "5"]) == 0
    content, own = read(tmp_path)
    assert own["sure"]["verdict"] == NOT_RUN
    assert own["sure"]["reason"] == "GDN,SWA: --minutes 5: they are over"
    runs = {arm["name"]: arm["runs"][0]["status"] for arm in content["experiments"][0]["arms"]}
    assert runs == {"GA": "finished", "GDN,SWA": "not run"}
    capsys.readouterr()
    assert claims(SURE) == 0
    printed = capsys.readouterr().out
    assert printed.count("finished before") == 1
    assert printed.count("  finished:") == 1
    assert read(tmp_path)[1]["sure"]["verdict"] == HOLDS


def test_a_run_killed_after_its_training_is_measured_by_the_next_call(claims, tmp_path, monkeypatch):
    claims(SURE)
    before, _ = read(tmp_path)
    status = tmp_path / "out" / "tiny" / "01-GA" / "seed-0" / "status.json"
    status.write_text(json.dumps({"key": json.loads(status.read_text())["key"], "status": "running"}))
    assert claims(SURE) == 0
    after, _ = read(tmp_path)
    scores = [content["experiments"][0]["arms"][0]["scores"] for content in (before, after)]
    assert scores[0] == scores[1]


def test_a_failed_run_is_reported_and_takes_no_other_down(claims, tmp_path, monkeypatch):
    step = HybridLMModule.training_step

    def failing(self, batch, batch_idx):
        if self.architecture.pattern == "GA":
            raise RuntimeError("out of memory")
        return step(self, batch, batch_idx)

    monkeypatch.setattr(HybridLMModule, "training_step", failing)
    other = tiny_claim("other", Bound("GDN,SWA", "1x/bpb", most=100.0))
    assert claims(SURE, other) == 1
    _, own = read(tmp_path)
    assert (own["sure"]["verdict"], own["other"]["verdict"]) == (NOT_RUN, HOLDS)
    assert "GA: out of memory: out of memory" in own["sure"]["reason"]


def test_an_experiment_that_cannot_begin_leaves_the_others_alone(claims, tmp_path):
    lost = tiny_claim("lost", Bound("GA", "1x/bpb", most=100.0), experiment=replace(TINY, name="lost", recipe="none"))
    assert claims(lost, SURE) == 1
    _, own = read(tmp_path)
    assert (own["lost"]["verdict"], own["sure"]["verdict"]) == (NOT_RUN, HOLDS)
    assert "no recipe at" in own["lost"]["reason"]


def test_side_by_side_gives_the_same_scores_whatever_cannot_begin_and_whatever_needs_a_gpu(claims, tmp_path, capsys):
    lost = tiny_claim("lost", Bound("GA", "1x/bpb", most=100.0), experiment=replace(TINY, name="lost", recipe="none"))
    rates = replace(TINY, name="rates", arms=(Entry("GA"),), rates=(1e-6, 1.0))
    rated = tiny_claim("rated", Bound("GA", "1x/bpb", most=100.0), experiment=rates)
    gpu = tiny_claim("gpu", Bound("GA", "1x/bpb", most=100.0), experiment=replace(TINY, name="gpu", gpu=True))
    assert claims(lost, SURE, rated, gpu, words=["--devices", "cpu,cpu", "--minutes", "30"]) == 1
    printed = capsys.readouterr().out
    assert "tiny: GDN,SWA, seed 0: finished" in printed
    assert "rates, learning rate x 1e-06: GA, seed 0: finished" in printed
    side, own = read(tmp_path)
    verdicts = {name: claim["verdict"] for name, claim in own.items()}
    assert verdicts == {"lost": NOT_RUN, "sure": HOLDS, "rated": HOLDS, "gpu": NOT_RUN}
    assert NO_GPU_NAMED in own["gpu"]["reason"]
    assert "--devices=cpu,cpu" in side["command"]
    runs = [run for experiment in side["experiments"] for arm in experiment["arms"] for run in arm["runs"]]
    assert [run["at_once"] for run in runs] == [2] * 4
    assert claims(SURE, rated, words=["--out", str(tmp_path / "alone")]) == 0
    alone = json.loads((tmp_path / "alone" / "claims.json").read_text(encoding="utf-8"))
    scores = [
        {experiment["name"]: [arm["scores"] for arm in experiment["arms"]] for experiment in content["experiments"]}
        for content in (side, alone)
    ]
    assert scores[0]["tiny"] == scores[1]["tiny"]
    assert scores[0]["rates"] == scores[1]["rates"]


def test_no_recipe_is_read_while_runs_are_under_way(claims, monkeypatch):
    """Reading one changes the folder of the process for a moment, and with it where every relative path leads."""
    pools, planned = [], run_module.plan_of

    class Watched(run_module.Pool):
        def __enter__(self):
            pools.append(self)
            return super().__enter__()

    def plan_of(*args):
        assert not pools
        return planned(*args)

    monkeypatch.setattr(run_module, "Pool", Watched)
    monkeypatch.setattr(run_module, "plan_of", plan_of)
    other = tiny_claim("other", Bound("GA", "1x/bpb", most=100.0), experiment=replace(TINY, name="other"))
    assert claims(SURE, other, words=["--devices", "cpu"]) == 0
    assert len(pools) == 1


def test_leads_are_taken_row_by_row_over_the_rows_that_both_answered(claims, tmp_path):
    text = (RECIPES / "tiny_overwrite.yaml").read_text(encoding="utf-8")
    (tmp_path / "task.yaml").write_text(text, encoding="utf-8")
    settings = (
        "--budget.tokens=11520",
        "--model.lr_scheduler.init_args.warmup_steps=1",
        "--trainer.val_check_interval=10",
    )
    options = "--data.init_args.test_rows=100"
    experiment = replace(
        TINY,
        recipe="task",
        arms=(Entry("LA"), Entry("DN")),
        settings=settings,
        readings=(Reading("test", (options,)),),
        lengths={"test": 36},
        score="test/accuracy",
    )
    rules = (Margin("DN", ("LA",), "test/accuracy", -1.0), Margin("DN", ("LA",), "test/loss", -9.0, lower=True))
    assert claims(tiny_claim("rows", *rules, experiment=experiment)) == 0
    content, _ = read(tmp_path)
    (lead,) = content["leads"]  # of the loss there are no rows
    assert (lead["figure"], lead["better"], lead["worse"], lead["rows"]) == ("test/row_accuracy", "DN", "LA", 100)
    scores = {arm["name"]: arm["scores"]["0"] for arm in content["experiments"][0]["arms"]}
    assert lead["lead"] == pytest.approx(scores["DN"]["test/accuracy"] - scores["LA"]["test/accuracy"], abs=1e-6)
    folders = [tmp_path / "out" / "tiny" / name / "seed-0" for name in ("01-LA", "02-DN")]
    other, stored = (read_rows(folder)["test"] for folder in folders)
    assert (lead["low"], lead["high"]) == bootstrap(stored - other)
    assert lead["low"] < lead["lead"] < lead["high"]
    assert stored.mean() == pytest.approx(scores["DN"]["test/row_accuracy"], abs=1e-6)
    assert "Leads over rows" in (tmp_path / "out" / "claims.md").read_text(encoding="utf-8")
    with (tmp_path / "out" / "leads.csv").open(newline="", encoding="utf-8") as file:
        assert [float(row["lead"]) for row in csv.DictReader(file)] == [lead["lead"]]
    assert claims(tiny_claim("rows", *rules, experiment=experiment)) == 0  # from what is stored
    assert read(tmp_path)[0]["leads"] == content["leads"]


def test_the_bootstrap_of_many_rows_is_the_normal_interval_and_of_equal_rows_a_point():
    draw = np.random.default_rng(3)
    values = draw.integers(0, 5, 4000) / 4 - draw.integers(0, 5, 4000) / 4
    half = 1.959964 * values.std() / np.sqrt(len(values))
    assert bootstrap(values) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.04 * half)
    assert bootstrap(values) == bootstrap(values)
    assert bootstrap(np.full(7, 0.5)) == (0.5, 0.5)


def test_a_check_that_dies_did_not_hold_and_the_others_go_on(claims, tmp_path):
    def dies():
        raise RuntimeError("singular")

    words = {"tier": 1, "family": "free", "sentence": "s", "source": "s", "expected": "e"}
    fine = Claim(name="fine", check=lambda: [Finding("1 = 1", True)], **words)
    assert claims(Claim(name="dies", check=dies, **words), fine) == 1
    _, own = read(tmp_path)
    assert (own["dies"]["verdict"], own["fine"]["verdict"]) == (FAILS, HOLDS)
    assert own["dies"]["reason"] == "RuntimeError: singular"


def test_of_two_rates_an_arm_counts_with_the_lower_validation_loss(claims, tmp_path):
    experiment = replace(TINY, arms=(Entry("GA"),), rates=(1e-6, 1.0))
    assert claims(tiny_claim("rated", Bound("GA", "1x/bpb", most=100.0), experiment=experiment)) == 0
    (arm,) = read(tmp_path)[0]["experiments"][0]["arms"]
    slow, usual = arm["runs"]
    assert "init_args.lr=1e-08" in slow["command"]
    assert "init_args.lr" not in usual["command"]
    assert slow["loss"] > usual["loss"]
    assert (arm["rate"], arm["scores"]["0"]["val/loss"]) == (1.0, usual["loss"])


# --------------------------------------------------------------------------------------------- what comparisons gained
def test_arms_that_are_not_matched_say_so_and_need_no_mlps(recipe):
    plan = make_plan(["GA/none", "GDN,SWA/none"], recipe, match=False)
    assert "NOT parameters, which are what the patterns make them" in plan.held
    assert len({arm.non_embedding for arm in plan.arms}) == 2
    with pytest.raises(UserError, match="no layer has an MLP"):
        make_plan(["GA/none"], recipe)


def test_two_readings_of_one_name_are_refused(recipe):
    with pytest.raises(UserError, match="readings: 1x, 1x; give each a name of its own"):
        make_plan(["GA"], recipe, readings=[Reading("1x"), Reading("1x", (LONGER,))])


def test_other_readings_make_another_run(recipe, tmp_path):
    run_plan(make_plan(["GA"], recipe, tolerance=0.03, readings=[Reading("1x")]), tmp_path / "out")
    with pytest.raises(UserError, match="holds an arm of another comparison"):
        run_plan(make_plan(["GA"], recipe, tolerance=0.03, readings=[Reading("1x", (LONGER,))]), tmp_path / "out")


def test_an_arm_whose_trials_of_rates_were_left_out_is_not_run_rather_than_failed(recipe, tmp_path):
    plan = make_plan(["GA"], recipe, tolerance=0.03, rates=(0.5, 1.0), overrides=["--budget.tokens=5120"])
    now = iter([0.0, 61.0])
    outcome = run_plan(plan, tmp_path / "out", allowance=Allowance(1.0, clock=lambda: next(now, 61.0)))
    (result,) = outcome.results
    assert result.status == "not run"
    assert result.error.endswith("the trial at 0.005 is not run (--minutes 1: they are over)")
    assert not outcome.good
    assert not list((tmp_path / "out").rglob("status.json"))


# ------------------------------------------------------------------------------------------------------------- the time
def test_an_allowance_refuses_what_does_not_fit_and_everything_once_it_is_over():
    now = [0.0]
    own = Allowance(1.0, clock=lambda: now[0])
    assert (own.left, own.refuse(), own.refuse(60.0)) == (60.0, None, None)
    assert own.refuse(61.0) == "--minutes 1: it takes about 61 s, 60 are left"
    now[0] = 60.0
    assert own.refuse() == "--minutes 1: they are over"
    assert Allowance().refuse(1e9) is None


def test_an_allowance_handed_to_another_process_ends_at_the_same_time():
    for minutes in (None, 2.0):
        own = Allowance(minutes)
        other = Allowance.taken(**json.loads(json.dumps(own.handed())))
        assert other.words == own.words
        assert other.left == pytest.approx(own.left, abs=1.0)


def test_needles_are_drawn_by_depth_and_length(tmp_path):
    own = {"name": "needle", "lengths": {"512": 512, "1024": 1024}, "score": "512/exact", "train_context": 512}
    scores = {f"{length}/depth_to_{depth}/exact": depth / 200 for length in (512, 1024) for depth in (10, 100)}
    del scores["1024/depth_to_100/exact"]
    seeds = {"0": scores, "1": {name: value + 0.5 for name, value in scores.items()}}
    own |= {"context": 512, "arms": [{"name": "GA", "state_bytes": 8, "scores": seeds}]}
    assert depths(scores, "512") == {10: 0.05, 100: 0.5}
    (chart,) = charts_of(own)[-1:]
    grid = chart.grid
    assert grid is not None
    assert grid.columns == ("512", "1,024")
    assert grid.rows == ("0 to 10 %", "90 to 100 %")
    assert grid.cells[0] == pytest.approx((0.3, 0.3))
    assert grid.cells[1] == (0.75, None)
    draw_chart(chart, tmp_path / "grid.png")
    assert (tmp_path / "grid.png").stat().st_size > 5_000
    svg = chart_svg(chart)
    assert "0.75" in svg
    assert "none" in svg
