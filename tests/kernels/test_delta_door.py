"""The door of the delta rule: what it refuses, in which words, and whom it lets serve."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import zoo_kernels
from zoo_kernels.backend import backends, explain
from zoo_kernels.delta import delta_rule
from zoo_kernels.delta.call import DeltaCall
from zoo_kernels.packing import Packing

B, T, H, HV, K, V = 2, 5, 2, 4, 8, 6


def inputs(**changed) -> dict:
    """Arguments that are right, but for those given."""
    right = {"q": torch.randn(B, T, H, K), "k": torch.randn(B, T, H, K), "v": torch.randn(B, T, HV, V)}
    right |= {"log_decay": -torch.rand(B, T, HV), "beta": torch.rand(B, T, HV)}
    return right | changed


def call(**arguments):
    return delta_rule(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def half(x):
    return torch.empty(x, dtype=torch.bfloat16)


REFUSED = {
    "q without heads": (
        {"q": torch.zeros(B, T, H * K)},
        r"q is \[2, 5, 16\], but it must be \[B, T, H, K\]; unflatten",
    ),
    "v without heads": ({"v": torch.zeros(B, T, V)}, r"v is \[2, 5, 6\], but it must be \[B, T, HV, V\]; unflatten"),
    "q unlike k": ({"q": torch.zeros(B, T, H, 7)}, r"q is \[2, 5, 2, 7\], but k is \[2, 5, 2, 8\]; both must be"),
    "v of another length": (
        {"v": torch.zeros(B, 4, HV, V)},
        r"v is \[2, 4, 4, 6\], but k is \[2, 5, 2, 8\]; .* B and T",
    ),
    "heads that do not divide": (
        {"v": torch.zeros(B, T, 3, V), "log_decay": None, "beta": None},
        r"HV must be a multiple of H, .* got 3 value heads for 2 key heads; 4 value heads would do",
    ),
    "no heads": (
        {"q": torch.zeros(B, T, 0, K), "k": torch.zeros(B, T, 0, K)},
        r"neither may be 0, got 4 value heads for 0 key heads",
    ),
    "keys too wide": (
        {"q": torch.zeros(B, T, H, 257), "k": torch.zeros(B, T, H, 257)},
        r"K must be from 1 to 256, got 257; use more heads of smaller keys",
    ),
    "keys of no width": (
        {"q": torch.zeros(B, T, H, 0), "k": torch.zeros(B, T, H, 0)},
        r"K must be from 1 to 256, got 0",
    ),
    "values too wide": ({"v": torch.zeros(B, T, HV, 513)}, r"V must be from 1 to 512, got 513; use more heads"),
    "mixed dtypes": (
        {"v": half((B, T, HV, V))},
        r"q, k and v must share one dtype, got torch.float32, torch.float32 and torch.bfloat16; cast them",
    ),
    "whole numbers": (
        {name: torch.zeros(B, T, heads, 4, dtype=torch.int64) for name, heads in (("q", H), ("k", H), ("v", HV))},
        r"q, k and v must be fp16, bf16, fp32 or float64, got torch.int64; cast them",
    ),
    "another device": ({"beta": torch.rand(B, T, HV, device="meta")}, r"beta is on meta, but v is on cpu; move them"),
    "log_decay of another shape": (
        {"log_decay": -torch.rand(B, T, H)},
        r"log_decay is \[2, 5, 2\], but q \[2, 5, 2, 8\] and v \[2, 5, 4, 6\] ask for \[2, 5, 4\] .* \[2, 5, 4, 8\] .* "
        r"or \[4\]",
    ),
    "log_decay of whole numbers": (
        {"log_decay": torch.zeros(B, T, HV, dtype=torch.int64)},
        r"log_decay must hold floating-point numbers, got torch.int64; cast it with log_decay.float\(\)",
    ),
    "log_decay above 0": (
        {"log_decay": torch.full((B, T, HV), 0.25)},
        r"log_decay must be at most 0 everywhere, got 0.25; .* negate it, or pass -F.softplus",
    ),
    "constant log_decay above 0": ({"log_decay": torch.tensor([-1.0, 0.0, 1.0, -2.0])}, r"log_decay must be .* got 1;"),
    "beta with one axis more": (
        {"beta": torch.rand(B, T, HV, 1)},
        r"beta is \[2, 5, 4, 1\], but v \[2, 5, 4, 6\] asks for one value per token and head: \[2, 5, 4\]. Squeeze",
    ),
    "beta below 0": (
        {"beta": torch.full((B, T, HV), -0.5)},
        r"beta must lie in \[0, 2\], got -0.5; pass x.sigmoid\(\)",
    ),
    "beta above 2": ({"beta": torch.full((B, T, HV), 2.5)}, r"beta must lie in \[0, 2\], got 2.5; pass x.sigmoid\(\)"),
    "a chunk of another size": ({"chunk": 48}, r"chunk must be 16, 32 or 64, got 48; leave it out"),
    "an infinite scale": (
        {"scale": float("inf")},
        r"scale must be a finite number, got inf; leave it out for K \*\* -0.5",
    ),
    "a state of another layout": (
        {"initial_state": torch.zeros(B, HV, V, K)},
        r"initial_state is \[2, 4, 6, 8\], but 2 rows of the batch, .* ask for \[N, HV, K, V\] = \[2, 4, 8, 6\]",
    ),
    "a state of another dtype": (
        {"initial_state": half((B, HV, K, V))},
        r"initial_state is torch.bfloat16, but states are kept in torch.float32 where v is torch.float32; cast",
    ),
    "a state on another device": (
        {"initial_state": torch.zeros(B, HV, K, V, device="meta")},
        r"initial_state is on meta, but v is on cpu; move them to one device",
    ),
    "packing of a batch": ({"packing": [0, 5]}, r"delta_rule: packed documents .* but the batch is 2; make it 1"),
    "an unknown backend": ({"backend": "fast"}, r"no backend is called 'fast'; there are .*torch, recurrent"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_refused_with_the_rule_the_value_and_the_cure(case):
    changed, message = REFUSED[case]
    with pytest.raises(ValueError, match=rf"^delta_rule: .*{message.removeprefix('delta_rule: ')}"):
        call(**inputs(**changed))


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 3], r"delta_rule: the offsets end at 3, but there are 5 tokens"),
        ([1, 5], r"packing: offsets must start at 0, got 1"),
        ([0, 4, 3, 5], r"packing: offsets must never fall"),
        (torch.tensor([0.0, 5.0]), r"packing: offsets must be whole numbers"),
    ],
    ids=["wrong end", "wrong start", "falling", "fractions"],
)
def test_offsets_are_checked_before_anything_is_computed(offsets, message):
    one_row = {name: x[:1] for name, x in inputs().items()}
    with pytest.raises(ValueError, match=message):
        call(**one_row, packing=offsets)


def test_a_state_needs_one_row_for_each_document():
    one_row = {name: x[:1] for name, x in inputs().items()}
    with pytest.raises(ValueError, match=r"initial_state is \[1, 4, 8, 6\], but 3 documents"):
        call(**one_row, packing=[0, 2, 2, 5], initial_state=torch.zeros(1, HV, K, V))


def test_the_edges_of_the_ranges_are_allowed():
    edges = torch.tensor([0.0, 2.0]).repeat(B, T, HV // 2)
    y, _ = call(**inputs(beta=edges, log_decay=torch.where(edges > 0, -torch.inf, 0.0)))
    assert y.isfinite().all()


def test_raw_offsets_and_a_packing_mean_the_same():
    one_row = {name: x[:1] for name, x in inputs().items()}
    offsets = [0, 2, 2, 5]
    expected = call(**one_row, packing=Packing.from_offsets(offsets))
    for packing in (offsets, tuple(offsets), torch.tensor(offsets), torch.tensor(offsets, dtype=torch.int32)):
        assert all(torch.equal(a, b) for a, b in zip(call(**one_row, packing=packing), expected))


@pytest.mark.parametrize("backend", [None, "torch", "recurrent"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_output_has_the_dtype_of_the_inputs_and_the_state_is_wide(backend, dtype):
    cast = {name: x.to(dtype) for name, x in inputs().items()}
    y, last = call(**cast, backend=backend)
    assert y.dtype == dtype
    assert last.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert last.shape == (B, HV, K, V)


def test_the_default_scale_is_one_over_the_root_of_the_key_size():
    drawn = inputs()
    assert torch.equal(call(**drawn)[0], call(**drawn, scale=K**-0.5)[0])
    torch.testing.assert_close(call(**drawn, scale=1.0)[0], call(**drawn)[0] * K**0.5)


def test_the_chunkwise_form_is_chosen_before_the_loop_and_named_ones_are_obeyed():
    drawn = inputs()
    rows = explain("delta_rule", DeltaCall(**drawn, initial_state=None, packing=None, scale=1.0, chunk=None))
    assert dict(rows)["torch"] == "chosen"
    assert dict(rows)["recurrent"] == "could serve"
    seen = []
    for backend in backends("delta_rule"):
        y, _ = call(**drawn, backend=backend.name)
        seen.append(y)
    assert all((y - seen[0]).abs().max() < 1e-5 for y in seen)


def test_importing_the_op_loads_neither_triton_nor_the_compiler_and_asks_for_no_gpu():
    script = """
        import sys
        sys.modules["triton"] = None  # as if it were not installed
        import torch
        loaded = "torch._dynamo" in sys.modules
        import zoo_kernels.delta
        y, _ = zoo_kernels.delta.delta_rule(*torch.randn(3, 1, 40, 2, 4).unbind(0))
        assert y.shape == (1, 40, 2, 4)
        assert loaded or "torch._dynamo" not in sys.modules
        assert not torch.cuda.is_initialized()
    """
    root = Path(zoo_kernels.__path__[0]).parent
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script)]
    found = subprocess.run(command, capture_output=True, cwd=root, env=os.environ | {"PYTHONPATH": str(root)})
    assert found.returncode == 0, found.stderr.decode()
