"""Shipped launches compile for GPUs that need not be here: within shared memory, spilling little, on matrix units."""

import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GATE = Path(__file__).with_name("compile_gate.py")
BOUNDS = json.loads(GATE.with_name("compile_bounds.json").read_text(encoding="utf-8"))


def loaded():
    """The gate's script as a module."""
    spec = importlib.util.spec_from_file_location("compile_gate", GATE)
    gate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gate)
    return gate


def findings(found, bounds):
    """Each thing that is wrong, as a sentence.

    Args:
        found: what the gate writes.
        bounds: bytes of stack by version of Triton and row, where that is above 0; under "refused", what other
            architectures than sm_90 do not compile, and why.
    """
    yield from (f"{module} ships nothing: {reason}" for module, reason in found["lacking"].items())
    spills = bounds.get(found["triton"], {})
    for row in found["rows"]:
        name = f"{row['arch']} {row['name']}"
        if "error" in row:
            if name not in bounds.get("refused", {}):
                yield f"{name} does not compile: {row['error']}"
            continue
        if row["shared"] > row["shared_limit"]:
            yield f"{name} asks for {row['shared']} bytes of shared memory; a program has {row['shared_limit']}"
        if row["arch"] != "sm_90":
            continue
        if row["overwritten"]:
            yield f"{name} overwrites {', '.join(row['overwritten'])} while products read; sum what products give"
        if row["dropped"]:
            yield f"{name} has lost {row['dropped']} products to its assembler; take no plain minus of a product"
        if row["needs_wgmma"] and not row["wgmma"]:
            yield f"{name} multiplies without sm_90's matrix instructions"
        if found["triton"] in bounds and row["stack"] > spills.get(row["name"], 0):
            yield (
                f"{name} spills {row['stack']} bytes, recorded are {spills.get(row['name'], 0)}; if that is meant, "
                "compile_gate.py --record"
            )


def test_shipped_launches_compile_within_the_limits_of_gpus_that_need_not_be_here(tmp_path):
    """One test, since its compilations serve all that is asked of them, whichever worker runs it."""
    pytest.importorskip("triton")
    out = tmp_path / "found.json"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(str(ROOT / folder) for folder in ("", "layers", "kernels"))
    done = subprocess.run(
        [sys.executable, str(GATE), "--out", str(out)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text(encoding="utf-8"))
    assert {row["arch"] for row in found["rows"]} == {"sm_80", "sm_90", "sm_100"}
    assert any(row.get("needs_wgmma") for row in found["rows"])
    assert not list(findings(found, BOUNDS))


def test_no_module_that_launches_kernels_is_left_out():
    kernels = ROOT / "kernels"
    launching = {
        ".".join(file.relative_to(kernels).with_suffix("").parts)
        for file in (kernels / "zoo_kernels").rglob("*.py")
        if "@triton.jit" in (text := file.read_text(encoding="utf-8")) and "num_warps" in text
    }
    assert launching == set(loaded().MODULES), "a file that launches kernels has compile_rows() and a line in MODULES"


SOUND = {"arch": "sm_90", "name": "a", "overwritten": [], "dropped": 0, "shared": 9, "shared_limit": 9}
SOUND |= {"needs_wgmma": True, "wgmma": 1, "stack": 8}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"shared": 10}, "sm_90 a asks for 10 bytes of shared memory; a program has 9"),
        ({"wgmma": 0}, "sm_90 a multiplies without sm_90's matrix instructions"),
        ({"wgmma": 0, "arch": "sm_80"}, None),
        ({"overwritten": ["k"]}, "sm_90 a overwrites k while products read"),
        ({"dropped": 6}, "sm_90 a has lost 6 products to its assembler"),
        ({"stack": 9}, "sm_90 a spills 9 bytes, recorded are 8"),
        ({"error": "ValueError: no"}, "sm_90 a does not compile: ValueError: no"),
        ({"error": "ValueError: no", "arch": "sm_100"}, None),
    ],
)
def test_the_gate_sees_what_is_wrong(change, said):
    bounds = {"3.7.1": {"a": 8}, "refused": {"sm_100 a": "a reason"}}
    got = list(findings({"triton": "3.7.1", "lacking": {}, "rows": [{**SOUND, **change}]}, bounds))
    assert len(got) == (said is not None)
    assert said is None or got[0].startswith(said)


LOOP = """
%k = ttg.local_alloc : () -> !ttg.memdesc<{buffers}x64x64xbf16, #shared, #smem, mutable>
%first = ttg.async_copy_global_to_local %at, %k_0 mask %m : tensor<64x64x!tt.ptr<bf16>> -> <64x64xbf16>
%k_1 = ttg.memdesc_index %k[%i] : !ttg.memdesc<{buffers}x64x64xbf16> -> !ttg.memdesc<64x64xbf16>
%k_t = ttg.memdesc_trans %k_1 {{order = array<i32: 1, 0>}} : !ttg.memdesc<64x64xbf16> -> !ttg.memdesc<64x64xbf16>
%x = ttng.warp_group_dot %q, %k_t, %acc {{inputPrecision = 0 : i32, isAsync = true}} : tensor<64x64xf32>
%w:2 = ttng.warp_group_dot_wait %x, %k_t {{pendings = {pending} : i32}} : tensor<64x64xf32>
%k_2 = ttg.memdesc_index %k[%j] : !ttg.memdesc<{buffers}x64x64xbf16> -> !ttg.memdesc<64x64xbf16>
%next = ttg.async_copy_global_to_local %at_2, %k_2 mask %m : tensor<64x64x!tt.ptr<bf16>> -> <64x64xbf16>
"""


@pytest.mark.parametrize(("buffers", "pending", "raced"), [(1, 1, ["k"]), (2, 1, []), (1, 0, [])])
def test_the_gate_sees_loads_that_overwrite_what_a_product_still_reads(buffers, pending, raced):
    assert loaded().overwritten(LOOP.format(buffers=buffers, pending=pending)) == raced


def test_the_gate_sees_modules_and_rows_that_are_absent(monkeypatch):
    gate = loaded()
    monkeypatch.setitem(sys.modules, "empty", types.SimpleNamespace(compile_rows=lambda: iter(())))
    monkeypatch.setitem(sys.modules, "rowless", types.SimpleNamespace())
    monkeypatch.setattr(gate, "MODULES", {"empty": 1, "rowless": 1, "zoo_kernels.absent": 1})
    tasks, lacking = gate.tasks(every=True)
    assert not tasks
    assert list(findings({"triton": "3.7.1", "lacking": lacking, "rows": []}, {})) == [
        "empty ships nothing: compile_rows() yields nothing",
        "rowless ships nothing: AttributeError: 'types.SimpleNamespace' object has no attribute 'compile_rows'",
        "zoo_kernels.absent ships nothing: ModuleNotFoundError: No module named 'zoo_kernels.absent'",
    ]


def test_a_module_has_its_first_and_last_row_compiled_and_no_more_than_it_may():
    chosen = loaded().chosen
    assert chosen(3, 4) == [0, 1, 2]
    assert chosen(44, 3) == [0, 22, 43]
    assert chosen(8, 8) == list(range(8))
