"""Clocks: how long a call takes, what its first call compiles, and how much memory it adds."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

# Long enough for a GPU to leave its idle clocks, and for a median that repeats to a few per cent.
WARM_UP_MS, TIMED_MS = 50.0, 200.0
FEWEST, MOST = 10, 200
ON_CPU = 3
# More than the L2 cache of any GPU so far (B200: 126 MB): each call begins with none of its inputs in there.
FLUSHED_BYTES = 256 << 20


@dataclass(frozen=True)
class Timing:
    """Several timings of one call.

    Attributes:
        median_ms, fastest_ms, slowest_ms: milliseconds.
        repeats: how often it was called for these.
        clock: "CUDA events" or "wall clock".
    """

    median_ms: float
    fastest_ms: float
    slowest_ms: float
    repeats: int
    clock: str


def time_call(call: Callable[[], Any], device: torch.device, repeats: int | None = None) -> Timing:
    """Warm ``call`` up, then time it.

    On a GPU: CUDA events around each call, with the L2 cache emptied before it. Elsewhere: the wall clock.

    Args:
        call: is called with nothing; what it returns is dropped at once.
        repeats: timed calls. None: as many as fill a fifth of a second, 10 to 200; 3 on a CPU.
    """
    if device.type != "cuda":
        call()
        times = [_wall_ms(call) for _ in range(repeats or ON_CPU)]
        return _summary(times, "wall clock")
    spoiled = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=device)
    call()
    guess = max(statistics.median(_event_ms(call, spoiled, 3)), 1e-3)
    _event_ms(call, spoiled, min(MOST, int(WARM_UP_MS / guess)))
    count = repeats or min(MOST, max(FEWEST, int(TIMED_MS / guess)))
    return _summary(_event_ms(call, spoiled, count), "CUDA events")


def _event_ms(call: Callable[[], Any], spoiled: torch.Tensor, count: int) -> list[float]:
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for start, end in pairs:
        spoiled.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def _wall_ms(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def _summary(times: list[float], clock: str) -> Timing:
    return Timing(statistics.median(times), min(times), max(times), len(times), clock)


# --------------------------------------------------------------------------------------------------------- first calls
@dataclass
class Compiled:
    """What Triton did while one looked.

    Attributes:
        fresh: kernels compiled.
        cached: kernels found compiled, on disk.
        seconds: of compilation.
        names: of the kernels compiled.
    """

    fresh: int = 0
    cached: int = 0
    seconds: float = 0.0
    names: list[str] = field(default_factory=list)


@contextmanager
def watch_compilation() -> Iterator[Compiled | None]:
    """Count what Triton compiles inside; None where there is no Triton."""
    try:
        from triton import knobs
    except ImportError:
        yield None
        return
    seen, outer = Compiled(), knobs.compilation.listener

    def hear(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        if outer is not None:
            outer(src=src, metadata=metadata, metadata_group=metadata_group, times=times, cache_hit=cache_hit)
        if cache_hit:
            seen.cached += 1
            return
        seen.fresh += 1
        seen.seconds += times.total / 1e6
        seen.names.append(metadata["name"])

    knobs.compilation.listener = hear
    try:
        yield seen
    finally:
        knobs.compilation.listener = outer


@contextmanager
def empty_kernel_cache() -> Iterator[None]:
    """Inside, Triton keeps compiled kernels in a folder of its own, empty at first, so that first calls compile."""
    before = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="zoo-bench-", ignore_cleanup_errors=True) as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["TRITON_CACHE_DIR"]
            else:
                os.environ["TRITON_CACHE_DIR"] = before


@dataclass(frozen=True)
class FirstCall:
    """A call that nothing was compiled for yet.

    Attributes:
        seconds: by the wall clock, until the device has finished.
        compiled, cached: kernels that Triton compiled for it, and found on disk; None where there is no Triton.
    """

    seconds: float
    compiled: int | None
    cached: int | None


def first_call(call: Callable[[], Any], device: torch.device) -> FirstCall:
    """Make a call, once, and look at what it took."""
    with watch_compilation() as seen:
        start = time.perf_counter()
        call()
        _finish(device)
        seconds = time.perf_counter() - start
    return FirstCall(seconds, None if seen is None else seen.fresh, None if seen is None else seen.cached)


# -------------------------------------------------------------------------------------------------- memory and graphs
def extra_bytes(call: Callable[[], Any], device: torch.device) -> int | None:
    """The peak of memory during a call, above what was allocated before it; None where there is no GPU.

    What the call returns counts: outputs and gradients are alive when it ends.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    kept = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del kept
    return peak


def captured(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """``call`` as a CUDA graph: a function that replays it.

    Raises:
        RuntimeError: the call waits for the device, or does something else that a graph cannot hold.
    """
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def release(device: torch.device) -> None:
    """Give cached memory back, so that one case does not crowd the next."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def on_device(device: torch.device) -> Any:
    """A context in which new CUDA work goes to ``device``."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
