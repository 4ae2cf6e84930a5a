"""The chunkwise delta rule against the loop over tokens, forward and backward, on this machine's CPU.

    OMP_NUM_THREADS=1 python docs/benchmarks/chunkwise_cpu.py

Every timed result is first checked against the loop, by the tolerance table. The two are timed in turns, so that what
else the machine does falls on both; the fastest of several turns counts, as other load can only add.
"""

from __future__ import annotations

import argparse
import platform
import time
from typing import Any

import torch
from torch import Tensor

from zoo_kernels.accuracy import limit, relative_error
from zoo_kernels.delta import delta_rule

CELLS = {
    "GDN": ("head", True),
    "DN": (None, True),
    "M2": ("head", False),
    "LA": (None, False),
    "KDA": ("channel", True),
    "GLA": ("channel", False),
}
# name: B, T, heads, K, V, cells
SHAPES = {
    "T 2048, 4 heads of 64": (1, 2048, 4, 64, 64, tuple(CELLS)),
    "tiny recipe: B 8, T 128, 2 heads of 32/64": (8, 128, 2, 32, 64, ("GDN", "M2")),
}
CHUNKS = (16, 32, 64, None)  # None: left to the op


def draw(cell: str, B: int, T: int, heads: int, K: int, V: int) -> dict[str, Tensor]:
    """Inputs that learn: unit keys, decays of up to 0.1 a token."""
    torch.manual_seed(0)
    decay, erases = CELLS[cell]
    inputs = {"q": torch.randn(B, T, heads, K), "v": torch.randn(B, T, heads, V)}
    inputs["k"] = torch.nn.functional.normalize(torch.randn(B, T, heads, K), dim=-1)
    if decay:
        inputs["log_decay"] = -0.1 * torch.rand(B, T, heads, *([K] if decay == "channel" else []))
    if erases:
        inputs["beta"] = torch.rand(B, T, heads)
    return {name: x.requires_grad_() for name, x in inputs.items()}


def step(inputs: dict[str, Tensor], **options: Any) -> dict[str, Any]:
    """One forward and backward."""
    for x in inputs.values():
        x.grad = None
    y, last = delta_rule(**inputs, **options)
    torch.autograd.backward((y, last), (torch.ones_like(y), torch.ones_like(last)))
    return {"y": y.detach(), "last_state": last.detach(), **{f"d{name}": x.grad for name, x in inputs.items()}}


def check(inputs: dict[str, Tensor], **options: Any) -> None:
    """Stop if a result is wrong: its time would mean nothing."""
    expected, got = step(inputs, backend="recurrent"), step(inputs, **options)
    for name, truth in expected.items():
        error = relative_error(got[name], truth)
        if error > limit(name, truth.dtype):
            raise SystemExit(f"{options}: {name} is off by {error:.1e}")


def fastest(inputs: dict[str, Tensor], turns: int) -> dict[Any, float]:
    """Milliseconds of the fastest step: of the "loop", and of each chunk size, four of each in every turn."""
    best: dict[Any, float] = {}
    for _ in range(turns):
        for key in ("loop", *CHUNKS * 4):
            options = {"backend": "recurrent"} if key == "loop" else {"backend": "torch", "chunk": key}
            start = time.perf_counter()
            step(inputs, **options)
            best[key] = min(best.get(key, float("inf")), 1e3 * (time.perf_counter() - start))
    return best


def main() -> None:
    """Print one table for each shape."""
    parser = argparse.ArgumentParser(description="The chunkwise delta rule against the loop, on the CPU.")
    parser.add_argument("--turns", type=int, default=5, help="turns of the loop")
    turns = parser.parse_args().turns
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), {platform.machine()}, fp32")
    print("forward + backward: times faster than the loop, by chunk size ('-': left to the op); fastest steps in ms\n")
    for name, (B, T, heads, K, V, cells) in SHAPES.items():
        print(f"{name}\n{'cell':>5}{'16':>8}{'32':>8}{'64':>8}{'-':>8}{'loop ms':>11}{'- ms':>9}")
        for cell in cells:
            inputs = draw(cell, B, T, heads, K, V)
            for chunk in CHUNKS:
                check(inputs, backend="torch", chunk=chunk)
            best = fastest(inputs, turns)
            ratios = "".join(f"{best['loop'] / best[chunk]:8.1f}" for chunk in CHUNKS)
            print(f"{cell:>5}{ratios}{best['loop']:11.1f}{best[None]:9.2f}")
        print()


if __name__ == "__main__":
    main()
