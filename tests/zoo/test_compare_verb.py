"""What `zoo compare` reads, and what its options do."""

import json
import sys

import pytest
import yaml

from zoo.cli import main


@pytest.fixture
def compare(monkeypatch, recipe, tmp_path):
    monkeypatch.setattr(sys, "argv", ["zoo"])

    def run(*words):
        return main(["compare", "--recipe", str(recipe), "--out", str(tmp_path / "out"), "--tol", "3%", *words])

    return run


def read(tmp_path):
    return json.loads((tmp_path / "out" / "results.json").read_text())


def test_flops_are_held_where_that_is_asked_for_and_the_command_says_so(compare, tmp_path, capsys):
    assert compare("GA", "GDN,SWA", "--by", "flops") == 0
    results = read(tmp_path)
    assert results["held_quantity"] == "flops"
    assert all(abs(arm["deviation"]) <= 0.03 for arm in results["arms"])
    assert "--by=flops" in results["command"]
    assert "training FLOPs (forward" in capsys.readouterr().out


def test_a_file_says_what_is_held_and_what_is_free(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["zoo"])
    arms = [{"pattern": "GA,SWA:window=64", "name": "window", "free": "SWA.window"}]
    shared = {"model.pattern": "GA,SWA:window=192"}
    spec = {"recipe": recipe.name, "arms": arms, "held": "state", "contexts": [256], "set": shared}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    assert main(["compare", str(tmp_path / "spec.yaml"), "--out", str(tmp_path / "out")]) == 0
    assert read(tmp_path)["arms"][0]["turned"] == "SWA.window 64 -> 192"


def test_an_arm_that_cannot_take_part_is_a_row_and_the_status_says_so(compare, tmp_path, capsys):
    assert compare("GA/none", "GA") == 1
    assert read(tmp_path)["left_out"][0]["name"] == "GA/none"
    said = " ".join(capsys.readouterr().out.split())
    assert "GA/none is left out: it cannot be sized to the budget" in said


def test_lengths_and_steps_are_measured_where_that_is_asked_for(compare, tmp_path):
    assert compare("GA", "--lengths", "1,2", "--measure", "--context", "32,64") == 0
    (arm,) = read(tmp_path)["arms"]
    assert {"1x/loss", "2x/loss"} <= arm["runs"][0]["scores"].keys()
    assert [row["context"] for row in arm["measured"]] == [32, 64]
    assert compare("GA", "--lengths", "1,2", "--context", "32,64") == 0
    assert read(tmp_path)["arms"][0]["measured"] == arm["measured"], "what was measured is kept"


def test_a_run_that_does_not_fit_the_minutes_is_left_for_the_next_call(compare, tmp_path, capsys):
    assert compare("GA", "GDN,SWA", "--minutes", "1e-9") == 1
    assert [arm["runs"][0]["status"] for arm in read(tmp_path)["arms"]] == ["not run", "not run"]
    assert compare("GA", "GDN,SWA", "--minutes", "5") == 0
    assert compare("GA", "--minutes", "0") == 2


def test_devices_share_the_runs(compare, tmp_path, capsys):
    assert compare("GA", "GDN,SWA", "--devices", "cpu,cpu") == 0
    assert "run 2 of 2 on cpu (" in capsys.readouterr().out
    assert all(arm["runs"][0]["status"] == "finished" for arm in read(tmp_path)["arms"])
    assert compare("GA", "--devices", "7") == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["GA", "--by", "seconds"], "Held can be one of params, flops, state"),
        (["GA", "--lengths", "long"], "--lengths long"),
        (["GA", "--lengths", "2,1"], "rising whole numbers"),
    ],
)
def test_wrong_words_are_named(compare, capsys, words, message):
    assert compare(*words) == 2
    assert message in capsys.readouterr().err
