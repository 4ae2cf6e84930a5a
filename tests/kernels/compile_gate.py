"""Compiles the shipped launches of every kernel module for GPUs that need not be here, and says what came out.

    python tests/kernels/compile_gate.py               a table of the rows that the test compiles
    python tests/kernels/compile_gate.py --all         of every row of every module
    python tests/kernels/compile_gate.py --record      of every row, and write what they spill to compile_bounds.json

Each module in ``MODULES`` has ``compile_rows()``, which yields (name, kernel, signature, constants, warps, stages): the
signature maps arguments to "*bf16", "*fp32", "i32", "fp32" and so on; arguments in ``constants`` are constexpr.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

# Module -> how many of its rows are compiled without --all, spread evenly over its list; a row takes up to 5 seconds of
# one core. The chunkwise form is compiled whole: its products are what spills and what needs matrix units.
MODULES = {
    "zoo_kernels.delta.prep": 8,
    "zoo_kernels.delta.scan": 8,
    "zoo_kernels.delta.readout": 8,
    "zoo_kernels.delta.scan_back": 8,
    "zoo_kernels.delta.grads": 10,
    "zoo_kernels.delta.gate_grads": 2,
    "zoo_kernels.delta.channel": 4,
    "zoo_kernels.delta.channel_grads": 4,
    "zoo_kernels.delta.recurrent_triton": 3,
    "zoo_kernels.conv_triton": 3,
    "zoo_kernels.norm_triton": 3,
    "zoo_kernels.selective.scan_triton": 3,
    "zoo_kernels.selective.scan_back_triton": 3,
    "zoo_kernels.scale_triton": 2,
    "zoo_kernels.rotary_triton": 2,
}
MAIN, OTHERS = 90, (80, 100)
BOUNDS = Path(__file__).with_name("compile_bounds.json")
# The largest shared memory of a program: 227 KiB on sm_90 and sm_100, 163 KiB on sm_80.
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
# A product in Triton's own representation: its rows and its operands' type.
DOT = re.compile(r"tt\.dot .*?: tensor<(\d+)x\d+x(\w+)>")
EMPTY = re.compile(r"HGMMA\.\S+ RZ,")
# The same for a GPU: tiles with one buffer, other names of a tile, products that run on, waits for them, and loads.
SINGLE = re.compile(r"%(\S+) = ttg\.local_alloc\s*:\s*\(\) -> !ttg\.memdesc<1x[^>]*mutable>")
VIEW = re.compile(r"%(\S+) = ttg\.memdesc_(?:index|trans|subslice|reinterpret) %([\w#]+)")
RUNS_ON = re.compile(r"ttng\.warp_group_dot %([\w#]+), %([\w#]+), .*isAsync = true")
WAIT = re.compile(r"ttng\.warp_group_dot_wait .*?pendings = (\d+)")
LOAD = re.compile(r"ttg\.async_copy_global_to_local %[\w#]+, %([\w#]+)")


def chosen(count: int, most: int) -> list[int]:
    """Which of ``count`` rows are compiled: at most ``most``, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(step * (count - 1) / (most - 1)) for step in range(most)})


def sources(fn, signature, constants):
    """What ``triton.compile`` takes: a type for each argument, the constants, and what is known of each argument."""
    unknown = sorted({*signature, *constants} - set(fn.arg_names))
    if unknown:
        raise ValueError(f"the row names {', '.join(unknown)}, and the kernel has no such arguments")
    types = {name: "constexpr" if name in constants else signature[name] for name in fn.arg_names}
    # As at run time: pointers are 16-byte aligned, and so are the integers that Triton may specialise, being sizes.
    aligned = [
        types[p.name].startswith("*") or (types[p.name].startswith("i") and not p.do_not_specialize) for p in fn.params
    ]
    known = {(index,): [["tt.divisibility", 16]] for index, yes in enumerate(aligned) if yes}
    return types, dict(constants), known


def compile_row(module: str, index: int, capability: int) -> dict:
    """Compile one row; a failure is a reason and no exception."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    name, fn, signature, constants, warps, stages = list(importlib.import_module(module).compile_rows())[index]
    found = {"module": module, "name": name, "arch": f"sm_{capability}", "warps": warps, "stages": stages}
    start = time.perf_counter()
    try:
        source = ASTSource(fn, *sources(fn, signature, constants))
        # As launched: stages are constants of the kernels' own loops, never an option.
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    except Exception as error:  # whatever a compiler raises is what the gate reports
        text = (str(error).strip().splitlines() or [""])[0]
        return {**found, "error": f"{type(error).__name__}: {text[:200]}"}
    dots = [(int(rows), kind) for rows, kind in DOT.findall(made.asm["ttir"])]
    ptx = made.asm["ptx"]
    return {
        **found,
        **resources(made.asm["cubin"]),
        "overwritten": overwritten(made.asm["ttgir"]),
        "shared": made.metadata.shared,
        "shared_limit": SHARED[capability],
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        # What sm_90's matrix instructions take: 64 rows or more, 16-bit operands, whole groups of 4 warps.
        "needs_wgmma": warps % 4 == 0 and any(rows % 64 == 0 and kind in ("bf16", "f16") for rows, kind in dots),
        "seconds": time.perf_counter() - start,
    }


def overwritten(ttgir: str) -> list[str]:
    """Tiles that a load overwrites while a product may still read them: a pipelined loop that races with itself.

    Triton 3.6 and 3.7.1 give one buffer to a tile that a pipelined loop both multiplies and reads otherwise, and let
    the product run on while the next tile is loaded.
    """
    single, views, running, found = set(SINGLE.findall(ttgir)), {}, [], set()

    def tile(name: str) -> str:
        while name in views:
            name = views[name]
        return name

    for line in ttgir.splitlines():
        if view := VIEW.search(line):
            views[view[1]] = view[2]
        elif product := RUNS_ON.search(line):
            running.append({tile(product[1]), tile(product[2])} & single)
        elif wait := WAIT.search(line):
            running = running[max(0, len(running) - int(wait[1])) :]
        elif load := LOAD.search(line):
            found |= {tile(load[1])} & set().union(*running)
    return sorted(found)


def resources(cubin: bytes) -> dict:
    """Registers; bytes of stack: what was spilled; and products that ptxas left nothing of but an empty instruction."""
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([tools / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "--dump-resource-usage"), ("nvdisasm", "-c"))
        )
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return {"registers": int(registers), "stack": int(stack), "dropped": len(EMPTY.findall(code))}


def tasks(every: bool) -> tuple[list[tuple[str, int, int]], dict[str, str]]:
    """What to compile, as (module, row, architecture), and the modules that have nothing to compile, with the reason.

    Chosen rows are compiled for sm_90, and the first of each module for the other architectures.
    """
    found, lacking = [], {}
    for module, few in MODULES.items():
        try:
            count = len(list(importlib.import_module(module).compile_rows()))
        except Exception as error:  # a module that is absent or broken has no rows, and the reason is the finding
            lacking[module] = f"{type(error).__name__}: {error}"
            continue
        if not count:
            lacking[module] = "compile_rows() yields nothing"
        found += [(module, index, MAIN) for index in chosen(count, count if every else few)]
        found += [(module, 0, capability) for capability in OTHERS if count]
    return found, lacking


def gate(every: bool, jobs: int) -> dict:
    """Compile what is to be compiled."""
    import triton

    todo, lacking = tasks(every)
    # Fresh processes: a fork would inherit the compiler's threads.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        rows = [job.result() for job in [pool.submit(compile_row, *task) for task in todo]]
    return {"triton": triton.__version__, "lacking": lacking, "rows": rows}


def record(found: dict) -> None:
    """Write what each row of sm_90 spills with this version of Triton, and what other architectures refuse, and why.

    Rows that spill nothing are left out: without a line, a row may spill nothing.
    """
    bounds = json.loads(BOUNDS.read_text(encoding="utf-8")) if BOUNDS.exists() else {}
    stacks = {row["name"]: row["stack"] for row in found["rows"] if row["arch"] == f"sm_{MAIN}" and row.get("stack")}
    bounds[found["triton"]] = dict(sorted(stacks.items()))
    refused = {f"{row['arch']} {row['name']}": row["error"] for row in found["rows"] if "error" in row}
    bounds["refused"] = {name: reason for name, reason in sorted(refused.items()) if not name.startswith(f"sm_{MAIN} ")}
    BOUNDS.write_text(json.dumps(dict(sorted(bounds.items())), indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Compile, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="every row; without it, a few of each module")
    parser.add_argument("--record", action="store_true", help="--all, and write its spills to compile_bounds.json")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--out", default=None, help="write what was found as JSON")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 interprets kernels, so none can be compiled; unset it")
    with tempfile.TemporaryDirectory(prefix="compile-gate-") as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # inherited by the processes of the pool
        found = gate(args.all or args.record, args.jobs)
    for module, reason in found["lacking"].items():
        print(f"{module}: {reason}")
    for row in found["rows"]:
        facts = ("registers", "stack", "shared", "wgmma", "mma")
        said = row.get("error") or " ".join(f"{name} {row[name]}" for name in facts) + f"  {row['seconds']:.1f} s"
        print(f"{row['arch']} {row['name']}, {row['warps']} warps, {row['stages']} stages: {said}")
    if args.out is not None:
        Path(args.out).write_text(json.dumps(found, indent=1), encoding="utf-8")
    if args.record:
        record(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
