"""`zoo bench ops`: what it measures, and what it says of what it cannot measure."""

import json
import math
import os
import sys
import types
from importlib.machinery import ModuleSpec
from itertools import pairwise

import pytest
import torch

from zoo.bench import peers
from zoo.bench.measure import measure
from zoo.bench.ops import CASES, MEMBERS, OPS, AttentionCase, DeltaCase, StepCase, select, standard_dtype
from zoo.bench.peers import FLA, undisguised
from zoo.bench.roofline import Ceilings, Work
from zoo.bench.table import COLUMNS, Report, markdown, ratios
from zoo.bench.timing import Timing, empty_kernel_cache, watch_compilation
from zoo.bench.tune import quantity_of
from zoo.cli import main
from zoo_kernels.accuracy import limit, relative_error

CPU = torch.device("cpu")
BY_NAME = {case.name: case for case in CASES}


def bench(*words):
    return main(["bench", "ops", "--small", "--repeats", "1", *words])


@pytest.fixture
def without_gpu(monkeypatch):
    """As on a machine without a GPU, wherever this runs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


# ----------------------------------------------------------------------------------------------------- the command line
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ops", "--case", "gdn-b9"], "there is no case 'gdn-b9'; did you mean 'gdn-b8'?"),
        (["ops", "--op", "delta_rul"], "there is no op 'delta_rul'; did you mean 'delta_rule'?\nOps: delta_rule, "),
        (["ops", "--smal"], "unknown argument '--smal'; did you mean '--small'?"),
        (["ops", "--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["ops"], "no CUDA GPU here, and these shapes take hours on a CPU.\n--small runs tiny shapes"),
        (["tune"], "no CUDA GPU here, and launches measured on a CPU would mean nothing"),
        (["ops", "--small", "--out", "nowhere/f.json"], "there is no folder nowhere; make it first"),
        (["ops", "--small", "--plot", "f.png"], "no case of the curve was asked for; add --op curve"),
        ([], "the following arguments are required"),
    ],
)
def test_a_mistake_ends_with_2_and_its_cure(without_gpu, capsys, words, said):
    assert main(["bench", *words]) == 2
    assert said in capsys.readouterr().err


def test_the_list_shows_every_case_under_its_op(capsys):
    assert main(["bench", "ops", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == list(OPS)
    assert [line.split()[0] for line in lines if line.startswith(" ")] == [case.name for case in CASES]
    assert "  m2-b8              M2 B8 T4096 H1 HV64 K128 V64" in lines


def test_names_are_unique_and_without_a_choice_everything_but_the_long_curve_runs():
    assert len(BY_NAME) == len(CASES)
    assert {case.op for case in select()} == set(OPS) - {"curve"}
    assert select(["short_conv"], ["step-1"]) == [BY_NAME["conv-6144"], BY_NAME["step-1"]]


# ----------------------------------------------------------------------------------------------------------- end to end
def test_every_op_runs_small_on_a_cpu_and_is_written_down(without_gpu, capsys, tmp_path):
    out, page = tmp_path / "figures.json", tmp_path / "table.md"
    names = ["gdn-b8", "m2-b8-steps", "conv-6144", "norm-128", "full-b8", "window-packed", "step-64"]
    names += ["m1-b8"]
    assert bench("--case", *names, "--out", str(out), "--markdown", str(page)) == 0
    said = capsys.readouterr().out
    assert "these figures say that the command works, and nothing of kernels" in said.replace("\n", " ")
    content = json.loads(out.read_text(encoding="utf-8"))
    assert content["command"].startswith("zoo bench ops --case gdn-b8 m2-b8-steps")
    assert content["versions"]["torch"] == torch.__version__
    ours = {row["case"]: row for row in content["rows"] if not row["peer"]}
    assert list(ours) == [case.name for case in CASES if case.name in names]
    for row in ours.values():
        assert not row["reason"]
        assert row["forward"]["median_ms"] > 0
        assert row["forward"]["clock"] == "wall clock"
        assert (row["both"] is not None) == (row["op"] != "delta_step")
        assert row["extra_bytes"] is None  # there is no GPU to ask
    assert ours["gdn-b8"]["who"] == "ours: torch (chosen)"
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in rows[0].strip("|").split("|")] == [title for title, _ in COLUMNS]
    assert len(rows) == 2 + len(content["rows"])
    assert rows[2].startswith("| gdn-b8: GDN B2 T70 H1 D16 | ours: torch (chosen) |")


def test_the_page_begins_with_the_command_and_the_versions(without_gpu, tmp_path):
    page = tmp_path / "table.md"
    assert bench("--case", "norm-128", "--no-peers", "--markdown", str(page)) == 0
    fence, command, _, _, versions, ceilings, *_ = page.read_text(encoding="utf-8").splitlines()
    assert fence == "```"
    assert command == f"zoo bench ops --case norm-128 --repeats 1 --small --markdown {page} --no-peers"
    assert f"torch {torch.__version__}" in versions
    assert "ceilings, in this run" in ceilings


def test_the_curve_compares_chunkwise_with_recurrent_and_is_drawn(without_gpu, tmp_path):
    out, picture = tmp_path / "curve.json", tmp_path / "curve.png"
    names = [case.name for case in CASES if case.op == "curve" and case.T <= 1024]
    assert bench("--case", *names, "--out", str(out), "--plot", str(picture)) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [row["who"] for row in rows] == ["ours: torch (chosen)", "ours: recurrent"] * len(names)
    # The same function, so that the two times can be compared.
    assert max(row["difference"] for row in rows if row["difference"] is not None) < limit("y", torch.float32)


# ---------------------------------------------------------------------------------------------------------------- peers
def test_a_peer_that_is_absent_or_broken_is_a_reason_in_the_table(without_gpu, monkeypatch, tmp_path):
    (tmp_path / "fla.py").write_text("raise ImportError('libcudart.so: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    found = {row.who: row for row in measure(BY_NAME["gdn-b8"].small(), CPU, torch.float32, repeats=1) if row.peer}
    assert found["fla"].reason == "not available: does not import (ImportError: libcudart.so: no such file)"
    assert found["FlashQLA"].reason == "not available: takes K = V = 128 alone"
    mamba = {row.who: row for row in measure(BY_NAME["m2-b8"].small(), CPU, torch.float32, repeats=1) if row.peer}
    assert mamba["mamba_ssm"].reason == "not available: not installed"
    assert mamba["mamba_ssm"].forward is None


@pytest.fixture
def fake_fla(monkeypatch):
    """fla as a module whose functions are our own op, scaled by ``factor``."""
    from zoo_kernels.delta import delta_rule

    settings = {"factor": 1.0}

    def function(q, k, v, g=None, beta=None, scale=None, normalize=False):
        constant = torch.log1p(-torch.exp2(-5.0 - torch.arange(q.shape[2]))) if settings.get("retention") else g
        y, state = delta_rule(q, k, v, log_decay=constant, beta=beta, scale=scale)
        return settings["factor"] * y, state

    for module, name, *_ in FLA.values():
        parts = module.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            if path not in sys.modules or depth == len(parts):
                made = types.ModuleType(path)
                made.__spec__ = ModuleSpec(path, None, is_package=True)
                monkeypatch.setitem(sys.modules, path, made)
        setattr(sys.modules[module], name, function)
    return settings


@pytest.mark.parametrize("member", FLA)
def test_peers_get_the_same_inputs_and_their_own_gradients(fake_fla, member):
    fake_fla["retention"] = member == "RET"
    case = next(case for case in CASES if isinstance(case, DeltaCase) and case.member == member and case.B == 8).small()
    ours, theirs = (row for row in measure(case, CPU, torch.float32, repeats=1) if row.who.startswith(("ours", "fla")))
    assert not theirs.reason
    assert theirs.difference is not None
    assert theirs.difference < limit("y", torch.float32)
    assert ours.both is not None
    assert theirs.both is not None
    assert ratios([ours, theirs], theirs)[1] == ours.both.median_ms / theirs.both.median_ms


def test_a_peer_that_computes_something_else_is_seen(fake_fla):
    fake_fla["factor"] = 1.5
    case = BY_NAME["gdn-b8"].small()
    (theirs,) = (row for row in measure(case, CPU, torch.float32, repeats=1) if row.who.startswith("fla"))
    assert theirs.difference == pytest.approx(0.5, rel=1e-3)
    report = Report("command", {"device": "toy"}, Ceilings(1e12, 1e14, "bf16", "toy"), (theirs,))
    assert "differs 5.0e-01" in markdown(report)


def test_fla_runs_its_own_kernels_and_the_environment_is_as_it_was(monkeypatch):
    monkeypatch.setenv("FLA_FLASH_QLA", "1")
    with undisguised():
        assert os.environ["FLA_FLASH_QLA"] == "0"
    assert os.environ["FLA_FLASH_QLA"] == "1"


def test_every_peer_of_every_case_has_a_place_to_come_from():
    for case in CASES:
        for peer in peers.peers_of(case):
            assert isinstance(peer, str) or (peer.module and callable(peer.bind))
    assert {name for case in CASES for name in (getattr(peer, "name", None) for peer in peers.peers_of(case))} >= {
        "fla",
        "FlashQLA",
        "cuDNN",
        "mamba_ssm",
        "flash-attn",
    }


# ----------------------------------------------------------------------------------------------------------- least work
def test_the_least_work_of_the_delta_rule_is_what_the_design_counts():
    forward, backward = BY_NAME["gdn-b8"].work(torch.bfloat16)
    chunk_heads = 8 * 4096 // 64 * 16
    tile = 64 * 128 * 2
    # q, k, v and y once each, and two fp32 gates.
    assert forward.bytes == chunk_heads * (4 * tile + 2 * 4 * 64)
    # The scan's 9.5 MFLOP a chunk and head, and k k^T; then the reverse scan's and the gradients' without q k^T again.
    assert forward.flops == chunk_heads * 2 * (3 * 64 * 128 * 128 + 4 * 64 * 64 * 128)
    assert backward.flops == 2 * forward.flops
    assert forward + backward == Work(forward.bytes + backward.bytes, 3 * forward.flops)


def test_pairs_under_a_window_are_counted_one_by_one():
    case = AttentionCase(name="toy", B=2, T=23, H=1, HK=1, D=1, window=5, documents=3)
    bounds = case.offsets
    pairs = sum(
        1 for start, end in pairwise(bounds) for t in range(start, end) for s in range(start, t + 1) if t - s < 5
    )
    assert case.work(torch.float32)[0].flops == 2 * 4 * pairs


def test_time_at_the_ceiling_is_that_of_the_slower_of_moving_and_computing():
    ceilings = Ceilings(bytes_per_second=4e12, flops_per_second=7e14, dtype="bf16", note="")
    assert ceilings.seconds(Work(4 * 10**9, 7 * 10**10)) == pytest.approx(1e-3)
    assert ceilings.seconds(Work(4 * 10**8, 7 * 10**11)) == pytest.approx(1e-3)


def test_ratios_are_ours_over_theirs_and_none_where_a_time_is_missing():
    def line(peer, forward, both):
        times = [None if ms is None else Timing(ms, ms, ms, 1, "toy") for ms in (forward, both)]
        made = next(iter(measure(BY_NAME["norm-128"].small(), CPU, torch.float32, peers=False, repeats=1)))
        return type(made)(made.case, "toy", peer, forward=times[0], both=times[1])

    ours, theirs = line(False, 1.0, 3.0), line(True, 2.0, None)
    assert ratios([ours, theirs], theirs) == (0.5, None)
    assert ratios([ours, theirs], ours) == (None, None)


# ------------------------------------------------------------------------------------------------------------ exactness
@pytest.mark.parametrize("name", [case.name for case in CASES if case.op != "curve"])
def test_results_of_a_small_case_are_those_of_its_witness(name):
    case = BY_NAME[name].small()
    torch.manual_seed(0)
    inputs = case.draw(CPU, torch.float32)
    exact = {key: x.detach().double() if x.is_floating_point() else x for key, x in inputs.items()}
    exact = {key: x.requires_grad_(inputs[key].requires_grad) for key, x in exact.items()}
    truth, got = case.results(exact, exact=True), case.results(inputs)
    assert truth.keys() == got.keys()
    assert ("last_state" if isinstance(case, StepCase) else "y") in got
    for quantity, expected in truth.items():
        assert expected.dtype == torch.float64
        assert relative_error(got[quantity], expected) <= limit(quantity_of(quantity), torch.float32), quantity


def test_members_draw_the_gates_that_make_them():
    for member, (decay, erases) in MEMBERS.items():
        case = next(one for one in CASES if isinstance(one, DeltaCase) and one.member == member and not one.steps)
        inputs = case.small().draw(CPU, torch.float32)
        assert ("log_decay" in inputs) == (decay is not None)
        assert ("beta" in inputs) == erases
        assert inputs["q"].requires_grad
        if decay is not None:
            assert inputs["log_decay"].dim() == {"constant": 1, "head": 3, "channel": 4}[decay]
            assert float(inputs["log_decay"].detach().max()) <= 0


# --------------------------------------------------------------------------------------------------------------- clocks
def test_the_kernel_cache_is_empty_inside_and_as_before_afterwards(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    with empty_kernel_cache():
        assert os.listdir(os.environ["TRITON_CACHE_DIR"]) == []
    assert os.environ["TRITON_CACHE_DIR"] == "elsewhere"


def test_compilations_are_counted_and_an_outer_listener_hears_them_too(monkeypatch):
    from triton import knobs

    heard = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **facts: heard.append(facts["cache_hit"]))
    with watch_compilation() as seen:
        for hit in (False, True):
            knobs.compilation.listener(
                src=None,
                metadata={"name": "toy"},
                metadata_group={},
                times=types.SimpleNamespace(total=2_000_000),
                cache_hit=hit,
            )
    assert (seen.fresh, seen.cached, seen.seconds, seen.names) == (1, 1, 2.0, ["toy"])
    assert heard == [False, True]


def test_a_result_that_is_not_finite_is_a_failure_of_ours(monkeypatch):
    case = BY_NAME["norm-128"].small()
    monkeypatch.setattr(type(case), "bind", lambda self, inputs, backend: lambda: inputs["x"] * math.nan)
    (row,) = measure(case, CPU, torch.float32, peers=False, repeats=1)
    assert row.reason.startswith("failed: ")


# ------------------------------------------------------------------------------------------------------------------ GPU
@pytest.mark.gpu
def test_small_cases_of_ours_run_on_a_gpu_and_compile_nothing_twice(tmp_path):
    device = torch.device("cuda")
    for case in map(BY_NAME.get, ("gdn-b8", "conv-6144", "norm-128", "m1-b8", "step-64")):
        small = case.checked()
        for _ in range(2):
            (row, *_) = measure(small, device, standard_dtype(device), peers=False, repeats=3)
            assert not row.reason
            assert row.forward.clock == "CUDA events"
            assert row.extra_bytes > 0
            assert (row.replay is not None) == (case.graphed or case.in_place)
            assert (row.replay_both is not None) == case.graphed
        assert row.first.compiled == 0
