"""The doctor finds what is there, missing, broken or computing wrongly, and never stumbles over it."""

import shutil
import sys

import pytest
import torch

from zoo import doctor
from zoo.cli import main
from zoo.doctor import TRIALS, examine, examine_op, probe
from zoo_kernels import backend
from zoo_layers.conformance import REFERENCE


def rows(kind):
    return {row.name: row for row in examine() if row.kind == kind}


def chosen(op):
    """The backend that serves the first trial of an op here."""
    (name,) = [
        row.name.split()[0]
        for row in examine_op(next(trial for trial in TRIALS if trial.op == op), "cpu", torch.float32)
        if row.state == "chosen"
    ]
    return next(found for found in backend.backends(op) if found.name == name)


def replace_run(monkeypatch, op, wrap):
    """Let the backend that serves ``op`` answer ``wrap(its run)(call)``."""
    kind = type(chosen(op))
    run = kind.run
    monkeypatch.setattr(kind, "run", lambda self, call: wrap(lambda: run(self, call)))


def test_every_op_is_tried_against_a_reference():
    assert {trial.op for trial in TRIALS} == set(backend.ops()) == set(REFERENCE)


def test_each_trial_names_one_backend_as_chosen_and_a_reason_for_every_other():
    for trial in TRIALS:
        *found, verdict = examine_op(trial, "cpu", torch.float32)
        assert [row.name.split()[0] for row in found] == [one.name for one in backend.backends(trial.op)]
        assert [row.state for row in found].count("chosen") == 1
        assert all(row.state for row in found)
        assert verdict.name.startswith("self-test (cpu, float32")
        assert verdict.state.startswith("holds; worst of")
        assert not verdict.fault


def test_the_command_prints_every_finding_and_ends_with_0_where_nothing_is_wrong(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for row in examine():
        assert any(line.split() == [*row.name.split(), *row.state.split()] for line in out.splitlines()), row


# ------------------------------------------------------------------------------------------------- wrong computations
def scaled(run):
    y, state = run()
    return y * 1.001, state


def with_doubled_gradients(run):
    y, state = run()
    y.register_hook(lambda gradient: 2 * gradient)
    return y, state


@pytest.mark.parametrize("op", ["delta_rule", "short_conv"])
@pytest.mark.parametrize(
    ("wrong", "figure"),
    [(scaled, "WRONG: y is off by 1.0e-03, 1e-05 is allowed"), (with_doubled_gradients, "WRONG: d")],
)
def test_a_backend_that_computes_wrongly_is_found_and_the_command_ends_with_1(monkeypatch, capsys, op, wrong, figure):
    replace_run(monkeypatch, op, wrong)
    assert rows(op)["self-test (cpu, float32)"].state.startswith(figure)
    assert main(["doctor"]) == 1
    faults = sum(row.fault for row in examine())
    assert f"{faults} of these must be repaired before anything is trained here." in capsys.readouterr().out


def test_a_backend_that_fails_is_shown_with_its_reason_and_the_others_are_still_tried(monkeypatch):
    def failing(run):
        raise RuntimeError("no kernel image is available for execution\nand a page of hints")

    replace_run(monkeypatch, "delta_rule", failing)
    found = rows("delta_rule")
    assert found["self-test (cpu, float32)"].state == "FAILS: RuntimeError: no kernel image is available for execution"
    assert found["torch (cpu, float32)"].state == "chosen"
    assert rows("short_conv")["self-test (cpu, float32)"].state.startswith("holds")


# ------------------------------------------------------------------------------------ what is missing, what is broken
def test_a_broken_plug_in_is_shown(monkeypatch):
    monkeypatch.setattr(doctor, "broken", lambda: {"RWKV7": "their-package (ImportError: no cuda)"})
    found = rows("mixers")
    assert found["RWKV7"].state == "a plug-in that does not load: their-package (ImportError: no cuda)"
    assert "GDN" in found["registered"].state.split()


def test_two_packages_that_claim_one_mixer_are_a_fault_and_no_traceback(monkeypatch):
    def twice():
        raise ValueError("mixer GDN is registered twice: by a and by package b; uninstall one")

    monkeypatch.setattr(doctor, "registered", twice)
    assert rows("mixers")["registered"].fault
    assert "registered twice: by a and by package b" in rows("mixers")["registered"].state


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise ImportError('undefined symbol: _ZN3c10')", "(ImportError: undefined symbol: _ZN3c10)"),
        (
            "raise OSError('libcudart.so.12: cannot open shared object file\\nmore')",
            "(OSError: libcudart.so.12: cannot open",
        ),
        ("1 / 0", "(ZeroDivisionError: division by zero)"),
        ("raise AssertionError", "(AssertionError)"),
    ],
)
def test_a_package_that_is_installed_but_does_not_import_is_shown_with_its_reason(monkeypatch, tmp_path, source, said):
    (tmp_path / "flash_attn.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    state = rows("package")["flash_attn"].state
    assert state.startswith("installed, but does not import ")
    assert said in state
    assert "\n" not in state
    assert not any(row.fault for row in examine())


def test_packages_are_told_apart_installed_unversioned_and_missing(monkeypatch, tmp_path):
    (tmp_path / "a_package_without_a_version.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert probe("pytest") == pytest.__version__
    assert probe("a_package_without_a_version") == "importable, version unknown"
    assert probe("a_package_that_nobody_has") == "not installed"


def test_without_triton_and_without_a_c_compiler_both_are_said_to_be_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = rows("compiler")
    assert found["triton"].state == "none"
    assert found["C"].state.startswith("none found")
    assert rows("package")["triton"].state.startswith("not installed: ")


def test_triton_s_facts_are_unknown_rather_than_an_error_where_a_release_keeps_them_elsewhere(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setitem(sys.modules, "triton.backends", None)
    assert rows("compiler")["triton"].state.startswith("unknown (ModuleNotFoundError: ")


@pytest.mark.gpu
def test_on_a_gpu_every_op_is_tried_in_bfloat16_and_holds():
    found = examine()
    assert any(row.kind == "device" and row.name == "cuda:0" for row in found)
    verdicts = [row for row in found if row.name.startswith("self-test (cuda, bfloat16")]
    assert len(verdicts) == len(TRIALS)
    assert not [row for row in found if row.fault]
    assert "active here: nvidia" in rows("compiler")["triton"].state
