"""The launch table made anew: candidates for each kernel, checked against the truth, then timed.

Kernels ask :func:`zoo_kernels.launch.pick` with the facts of a shape class. The cases are run once to hear which
kernel asks what; then each kernel is tried under every candidate, all others as their tables say, and the fastest whose
results hold becomes a row for exactly these facts.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import math
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.bench.measure import leaves_of, trained
from zoo.bench.ops import Case, Inputs, standard_dtype
from zoo.bench.peers import in_short
from zoo.bench.timing import release, time_call
from zoo.errors import UserError
from zoo.names import near
from zoo_kernels import launch
from zoo_kernels.accuracy import KINDS, limit, relative_error
from zoo_kernels.launch import Launch, Row

# Rows of the table by kernel, as the generated file holds them.
Rows = dict[str, tuple[Row, ...]]
Facts = tuple[tuple[str, Any], ...]
# A candidate takes the table's place only if it is faster by more than two runs of one launch differ.
WORTH = 0.98
REPEATS = 15
# Results that the table of limits does not name, and those that they are like.
OTHER_KINDS = {"dgate": "dx", "ddt": "dlog_decay", "dA": "dlog_decay"}
HEADER = '''"""Launches that were measured: written by `zoo bench tune`, and to be changed by it alone."""

from __future__ import annotations

from zoo_kernels.launch import {names}

# kernel -> its rows, each for exactly the facts that the kernel asked with; they go before the kernels' own tables.'''
WIDTH = 120  # of a line of the generated file


@dataclass(frozen=True)
class Candidates:
    """Launches to try: every combination."""

    tiles: tuple[int, ...]
    warps: tuple[int, ...]
    stages: tuple[int, ...]

    def __iter__(self) -> Iterator[Launch]:
        for tile, warps, stages in itertools.product(self.tiles, self.warps, self.stages):
            yield Launch(tile, warps, stages)


# kernel -> what to try; a kernel that is not named here tries the neighbours of its table (see around).
CANDIDATES: dict[str, Candidates] = {
    # Their blocks of 16 are fixed.
    "delta_prep": Candidates((16,), (1, 2, 4, 8), (1,)),
    "delta_channel_solve": Candidates((16,), (1, 2, 4), (1,)),
}


def around(rows: Sequence[Row]) -> Candidates:
    """What a table already holds, and half and twice of it: tiles from 1, 1 to 8 warps, 1 to 4 stages."""
    launches = [row.launch for row in rows]
    tiles = {size for one in launches for size in (one.tile // 2, one.tile, 2 * one.tile) if size}
    warps = {count for one in launches for count in (one.warps // 2, one.warps, 2 * one.warps) if 1 <= count <= 8}
    stages = {depth for one in launches for depth in (one.stages - 1, one.stages, one.stages + 1) if 1 <= depth <= 4}
    return Candidates(tuple(sorted(tiles)), tuple(sorted(warps)), tuple(sorted(stages)))


@dataclass(frozen=True)
class Asked:
    """A kernel's question for its launch: with which facts, and whether the forward asked already."""

    kernel: str
    arch: str
    facts: Facts
    forward: bool


@contextmanager
def listening() -> Iterator[list[tuple[str, str, Facts]]]:
    """Inside, every (kernel, architecture, facts) that a launch is picked for, in order, each once."""
    heard: list[tuple[str, str, Facts]] = []
    pick = launch._pick

    def hear(kernel: str, arch: str, facts: Facts) -> Launch:
        if (kernel, arch, facts) not in heard:
            heard.append((kernel, arch, facts))
        return pick(kernel, arch, facts)

    launch._pick = hear
    try:
        yield heard
    finally:
        launch._pick = pick


def questions(case: Case, device: torch.device) -> list[Asked]:
    """Which kernels the case launches, and what they ask."""
    torch.manual_seed(0)
    inputs = case.draw(device, standard_dtype(device))
    call = case.bind(inputs, case.ours(device)[0])
    with listening() as forward, torch.no_grad():
        call()
    with listening() as every:
        trained(call, leaves_of(case, inputs))
    return [Asked(*one, forward=one in forward) for one in dict.fromkeys([*forward, *every])]


def tune(
    cases: Sequence[Case],
    device: torch.device,
    *,
    kernels: Sequence[str] | None = None,
    repeats: int | None = None,
    say: Callable[[str], None] = print,
) -> Iterator[tuple[str, tuple[Row, ...]]]:
    """Try the candidates of each kernel at each shape class of the cases.

    Args:
        cases: every (kernel, facts) that they launch is tuned; where several share one, for all of them together.
        kernels: only these. None: all that are seen.
        say: is told of each candidate before it runs, since a bad one can end the process, and of its verdict.

    Yields:
        A kernel and its new rows, as soon as they stand.

    Raises:
        UserError: a kernel that has no table of launches.
    """
    seen: dict[tuple[str, str, Facts], list[tuple[Case, bool]]] = {}
    for case in cases:
        try:
            asked = questions(case, device)
        except (ImportError, ValueError, NotImplementedError) as error:
            say(f"{case.name}: not available: {in_short(error)}")
            continue
        for one in asked:
            seen.setdefault((one.kernel, one.arch, one.facts), []).append((case, one.forward))
    for name in kernels or ():
        if name not in launch.TABLES:
            raise UserError(
                f"bench tune: no kernel '{name}' has a table of launches{near(name, launch.TABLES)}\n"
                f"Those of these cases: {', '.join(sorted({kernel for kernel, *_ in seen})) or 'none'}."
            )
    for kernel in dict.fromkeys(kernel for kernel, *_ in seen if not kernels or kernel in kernels):
        rows = []
        for (name, arch, facts), where in seen.items():
            if name == kernel:
                rows.append(_tuned(kernel, arch, facts, where, device, repeats, say))
        yield kernel, tuple(rows)


def _tuned(
    kernel: str,
    arch: str,
    facts: Facts,
    where: list[tuple[Case, bool]],
    device: torch.device,
    repeats: int | None,
    say: Callable[[str], None],
) -> Row:
    """The fastest launch of one kernel for one shape class that gives right results."""
    trials = [_Trial(case, kernel, forward, device, repeats) for case, forward in where]
    table = launch.pick(kernel, arch, **dict(facts))
    say(f"{kernel} {arch} {dict(facts)}: {', '.join(case.name for case, _ in where)}")
    best, before = table, math.prod(trial.milliseconds(table) for trial in trials)
    least = before
    for candidate in CANDIDATES.get(kernel) or around(launch.TABLES[kernel]):
        if candidate == table:
            continue
        say(f"  {candidate}")
        try:
            wrong = next(filter(None, (trial.wrong(candidate) for trial in trials)), None)
            taken = math.inf if wrong else math.prod(trial.milliseconds(candidate) for trial in trials)
        except Exception as error:  # a tile that does not fit, out of shared memory, a compiler that fails
            wrong, taken = in_short(error), math.inf
        verdict = wrong or f"{_mean(taken, trials):.4f} ms, the table's {_mean(before, trials):.4f}"
        say(f"    {verdict}")
        if taken < least and taken < before * WORTH ** len(trials):
            best, least = candidate, taken
    release(device)
    places = ", ".join(case.name for case, _ in where)
    return Row(best, arch, dict(facts), f"{_source(device)}, {places}: {_mean(least, trials):.4f} ms")


def _mean(product: float, trials: Sequence[_Trial]) -> float:
    """The geometric mean of one time for each trial."""
    return product ** (1 / len(trials))


class _Trial:
    """A case under one kernel's candidates: whether results hold, and how long it takes."""

    def __init__(self, case: Case, kernel: str, forward: bool, device: torch.device, repeats: int | None):
        self.case, self.kernel, self.forward, self.device = case, kernel, forward, device
        self.repeats, self.dtype = repeats, standard_dtype(device)
        small = case.checked()
        # The small shape where it launches this kernel: its truth costs little.
        self.checks = small if any(one.kernel == kernel for one in questions(small, device)) else case
        torch.manual_seed(0)
        self.inputs = case.draw(device, self.dtype)
        self.small_inputs = self.checks.draw(device, self.dtype)
        exact = {name: x.detach().double() if x.is_floating_point() else x for name, x in self.small_inputs.items()}
        exact = {name: x.requires_grad_(self.small_inputs[name].requires_grad) for name, x in exact.items()}
        self.truth = self.checks.results(exact, exact=True)
        self.whole = case.results(self._copy(self.inputs))

    def wrong(self, candidate: Launch) -> str | None:
        """None: the candidate's results hold. Otherwise the first that does not."""
        with launch.force(**{self.kernel: candidate}):
            got = self.checks.results(self._copy(self.small_inputs))
            whole = self.case.results(self._copy(self.inputs))
        for name, truth in self.truth.items():
            allowed = limit(quantity_of(name), self.dtype)
            if (error := relative_error(got[name], truth)) > allowed:
                return f"WRONG: {name} is off by {error:.1e}, {allowed:.0e} is allowed"
            # Both are within the limit of the truth, so within twice the limit of each other.
            if not (error := _apart(whole[name], self.whole[name])) <= 2 * allowed:
                return f"WRONG at full size: {name} is {error:.1e} from the table's launch"
        return None

    def milliseconds(self, candidate: Launch) -> float:
        """The median of the forward, or of forward and backward where the kernel belongs to the backward."""
        call, leaves = self.case.bind(self.inputs, self.case.ours(self.device)[0]), leaves_of(self.case, self.inputs)
        run = (lambda: trained(call, [])) if self.forward else (lambda: trained(call, leaves))
        with launch.force(**{self.kernel: candidate}):
            return time_call(run, self.device, self.repeats or REPEATS).median_ms

    def _copy(self, inputs: Inputs) -> Inputs:
        """Inputs that a call may change."""
        return {name: x.detach().clone().requires_grad_(x.requires_grad) for name, x in inputs.items()}


def quantity_of(name: str) -> str:
    """Under which name the table of limits keeps a result."""
    return name if name in KINDS else OTHER_KINDS[name]


def _apart(got: Tensor, other: Tensor) -> float:
    """The relative distance of two large tensors, on their device."""
    got, other = got.float(), other.float()
    return float((got - other).norm() / other.norm().clamp(min=1e-30))


# --------------------------------------------------------------------------------------------------- the generated file
def launches_file() -> Path:
    """The module of measured launches beside the kernels."""
    found = importlib.util.find_spec("zoo_kernels")
    folders = list(found.submodule_search_locations or ()) if found else []
    return Path(folders[0]) / "launches.py"


def read_launches(file: Path) -> Rows:
    """The rows of a generated file; none where it is absent.

    Raises:
        UserError: a file that is not one of ours.
    """
    if not file.exists():
        return {}
    spec = importlib.util.spec_from_file_location("measured_launches", file)
    if spec is None or spec.loader is None:
        raise UserError(f"{file} is no Python file; name one that ends in .py with --out")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    measured = getattr(module, "MEASURED", None)
    if not isinstance(measured, Mapping):
        raise UserError(f"{file} holds no MEASURED, so it is not a table of launches; name another file with --out")
    return dict(measured)


def merged(old: Rows, kernel: str, new: Sequence[Row]) -> Rows:
    """Old rows, those of the same kernel, architecture and facts replaced; in an order that depends on nothing else."""
    told = {(row.arch, _facts_text(row)): row for row in (*old.get(kernel, ()), *new)}
    rows = {**old, kernel: tuple(told[key] for key in sorted(told))}
    return {name: rows[name] for name in sorted(rows)}


def write_launches(rows: Rows, file: Path) -> None:
    """Write the module; the same rows give the same bytes, laid out as the formatter would.

    Raises:
        ValueError: a fact that is no number, text, bool or None, and so would not survive in a file.
    """
    lines = [HEADER.format(names="Launch, Row" if rows else "Row")]
    lines.append("MEASURED: dict[str, tuple[Row, ...]] = {" if rows else "MEASURED: dict[str, tuple[Row, ...]] = {}")
    for kernel, table in rows.items():
        lines.append(f'    "{kernel}": (')
        for row in table:
            one = row.launch
            lines += [
                "        Row(",
                f"            launch=Launch(tile={one.tile}, warps={one.warps}, stages={one.stages}),",
            ]
            lines.append(f'            arch="{row.arch}",')
            if row.when:
                facts = [f'                "{name}": {_literal(row.when[name])},' for name in sorted(row.when)]
                lines += ["            when={", *facts, "            },"]
            lines += [*_source_lines(row.source), "        ),"]
        lines.append("    ),")
    lines += ["}"] if rows else []
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _source_lines(text: str) -> list[str]:
    """On one line where it fits, else in pieces, as the formatter leaves them."""
    whole = f'            source="{text}",'
    if len(whole) <= WIDTH:
        return [whole]
    pieces = textwrap.wrap(text, WIDTH - 20, drop_whitespace=False)
    return ["            source=(", *(f'                "{piece}"' for piece in pieces), "            ),"]


def _literal(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, str):
        return '"' + value + '"'
    raise ValueError(
        f"launch facts must be numbers, text, bools or None, to be written down; got {value!r}. "
        "Pass str(...) of it to launch.pick"
    )


def _facts_text(row: Row) -> str:
    return repr(sorted((name, str(value)) for name, value in row.when.items()))


def _source(device: torch.device) -> str:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, interpreted"
    versions = f"torch {torch.__version__}, Triton {importlib.metadata.version('triton')}"
    return f"{where}, {time.strftime('%Y-%m-%d')}, {versions}"
