"""How a kernel is launched: a fixed table by kernel, architecture and shape class. Nothing is tuned at run time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Launch:
    """Settings of one launch.

    Attributes:
        tile: the width that the kernel is free to choose, in elements; which one, its own file says.
        warps: warps per program.
        stages: software-pipelining depth of the kernel's loop.
    """

    tile: int
    warps: int
    stages: int = 1


@dataclass(frozen=True)
class Row:
    """One line of a kernel's table.

    Attributes:
        launch: the settings.
        arch: "sm_90" and the like, or "any".
        when: facts of the shape class, all of which must hold, for instance ``{"K": 128, "idle": True}``; a tuple
            means any of its members.
        source: where the choice was measured: GPU, shape, date, versions. Empty: not measured, chosen to be safe.
    """

    launch: Launch
    arch: str = "any"
    when: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    def fits(self, arch: str, facts: Mapping[str, Any]) -> bool:
        """Whether this line speaks about ``facts``."""
        if self.arch not in ("any", arch):
            return False
        return all(facts[name] in (want if isinstance(want, tuple) else (want,)) for name, want in self.when.items())


# kernel -> its lines; the first that fits is taken, so special ones stand first. Kernels add theirs by `provide`.
TABLES: dict[str, tuple[Row, ...]] = {}
_FORCED: dict[str, Launch] = {}


def provide(kernel: str, *rows: Row) -> None:
    """Name the launches of ``kernel``; the last row must fit everything.

    Raises:
        ValueError: a kernel named twice, or no row that fits everything.
    """
    if kernel in TABLES:
        raise ValueError(f"kernel {kernel!r} already has a table of launches")
    if not rows or rows[-1].when or rows[-1].arch != "any":
        raise ValueError(f"kernel {kernel!r}: the last row of its table must fit every architecture and shape")
    TABLES[kernel] = rows


def pick(kernel: str, arch: str, **facts: Any) -> Launch:
    """The launch of ``kernel`` for a shape class; the same on every rank, and never measured at run time.

    What `zoo bench tune` has measured (launches.py) is asked before the kernel's own rows.
    """
    if kernel in _FORCED:
        return _FORCED[kernel]
    return _pick(kernel, arch, tuple(facts.items()))


@cache
def _pick(kernel: str, arch: str, facts: tuple[tuple[str, Any], ...]) -> Launch:
    from zoo_kernels.launches import MEASURED

    known = dict(facts)
    rows = (*MEASURED.get(kernel, ()), *TABLES[kernel])
    return next(row.launch for row in rows if row.fits(arch, known))


class force:
    """Inside ``with force(kernel=launch)``, that kernel is launched so: for tuning and for tests of every row.

    Raises:
        ValueError: at the end, a name that no kernel has. Not before: a kernel's file may be imported only inside.
    """

    def __init__(self, **launches: Launch):
        self.launches = launches

    def __enter__(self) -> None:
        self.outer = dict(_FORCED)
        _FORCED.update(self.launches)

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        _FORCED.clear()
        _FORCED.update(self.outer)
        if kind is None and (unknown := self.launches.keys() - TABLES.keys()):
            raise ValueError(f"no kernel is called {', '.join(sorted(unknown))}; there are {', '.join(TABLES)}")


# What the offline compile gate compiles: name, kernel, signature, constants, warps, stages.
CompileRow = tuple[str, Any, dict[str, str], dict[str, Any], int, int]
_POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32"}


@contextmanager
def recorded(case: str, **kernels: Any) -> Iterator[list[CompileRow]]:
    """Inside, ``kernels`` (by the name of their rows) are not launched: each launch becomes a row of the list.

    So the compile gate sees what launchers launch, and needs neither a GPU nor memory: give them meta tensors.

    Raises:
        ValueError: an interpreted kernel, which cannot be compiled.
    """
    rows: list[CompileRow] = []
    if interpreted := [name for name, kernel in kernels.items() if not hasattr(kernel, "params")]:
        raise ValueError(f"{', '.join(interpreted)}: interpreted, so nothing can be compiled; unset TRITON_INTERPRET")
    for name, kernel in kernels.items():
        kernel.run = _recorder(f"{name} {case}", kernel, rows)
    try:
        yield rows
    finally:
        for kernel in kernels.values():
            del kernel.run  # the class's own shows again


def _recorder(name: str, kernel: Any, rows: list[CompileRow]) -> Any:
    def run(*args: Any, grid: Any, warmup: bool, num_warps: int, **named: Any) -> None:
        given = {**dict(zip(kernel.arg_names, args)), **named}
        fixed = [param.name for param in kernel.params if param.is_constexpr]
        constants = {key: value for key, value in given.items() if value is None or key in fixed}
        signature = {key: _type(value) for key, value in given.items() if key not in constants}
        earlier = sum(row[1] is kernel for row in rows)
        own = f"{name}, launch {earlier + 1}" if earlier else name
        rows.append((own, kernel, signature, constants, num_warps, constants.get("STAGES", 1)))

    return run


def _type(value: Tensor | int | float) -> str:
    if isinstance(value, Tensor):
        return _POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"
