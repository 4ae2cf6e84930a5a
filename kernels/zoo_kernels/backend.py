"""Who serves a call: backends are asked in order, and each says yes or gives its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol


class Backend(Protocol):
    """One way of computing an op.

    ``call`` is the op's own frozen dataclass of everything that the choice may depend on: tensors, shapes, dtypes,
    device, and which optional arguments are present. Nothing in it may make a backend wait for a device.
    """

    name: str

    def serves(self, call: Any) -> str | None:
        """None: yes. Otherwise the reason why not, in one sentence."""
        ...

    def run(self, call: Any) -> Any:
        """Compute the op."""
        ...


def declines(backend: Backend, call: Any) -> str | None:
    """Why a backend that could serve ``call`` does so only when it is named: what its method ``declines`` says."""
    reason = getattr(backend, "declines", None)
    return None if reason is None else reason(call)


# Set for a stretch of code by prefer() and observe(), for the whole process and not for one context: checkpointing runs
# the forward again in autograd's own threads, and torch.compile cannot read a ContextVar.
_PREFERRED: dict[str, str] = {}
_OBSERVERS: list[Callable[[str, Any, str], None]] = []

# op -> its backends, in the order in which they are asked: a thunk, so that naming the table imports nothing optional.
_TABLES: dict[str, Callable[[], list[Backend]]] = {}


def provide(op: str, backends: Callable[[], list[Backend]]) -> None:
    """Name the backends of ``op``, fastest first; ``backends`` is called when the op is first used."""
    if op in _TABLES:
        raise ValueError(f"op {op!r} already has a table of backends")
    _TABLES[op] = backends


def ops() -> list[str]:
    """The ops that have a table."""
    return list(_TABLES)


def backends(op: str) -> list[Backend]:
    """The backends of ``op``, in the order in which they are asked."""
    return _TABLES[op]()


@contextmanager
def prefer(named: Mapping[str, str]) -> Iterator[None]:
    """Inside, each op of ``named`` runs on the backend named for it, wherever a call names none itself.

    For tests, self-checks and benchmarks, which reach an op only through the layers around it. A preferred backend that
    cannot serve raises like one named in the call. Preferences nest: the inner ones win.

    Args:
        named: op -> backend, for instance ``{"delta_rule": "recurrent", "attention": "math"}``.
    """
    outer = dict(_PREFERRED)
    _PREFERRED.update(named)
    try:
        yield
    finally:
        _PREFERRED.clear()
        _PREFERRED.update(outer)


def preferred(op: str) -> str | None:
    """The backend that :func:`prefer` names for ``op`` here."""
    return _PREFERRED.get(op)


@contextmanager
def observe(see: Callable[[str, Any, str], None]) -> Iterator[None]:
    """Inside, ``see(op, call, backend)`` is told of every choice, just before the call runs: to count, to explain."""
    _OBSERVERS.append(see)
    try:
        yield
    finally:
        _OBSERVERS.pop()


def choose(op: str, call: Any, named: str | None = None) -> Backend:
    """The first backend that serves ``call``, or exactly the one that was named in the call or by :func:`prefer`.

    Raises:
        ValueError: no backend has that name; the named one cannot serve, with its reason; or none serves, with all
            reasons.
    """
    chosen = _choose(op, call, named if named is not None else preferred(op))
    for see in _OBSERVERS:
        see(op, call, chosen.name)
    return chosen


def _choose(op: str, call: Any, named: str | None) -> Backend:
    table = backends(op)
    if named is not None:
        known = {backend.name: backend for backend in table}
        if named not in known:
            raise ValueError(f"{op}: no backend is called {named!r}; there are {', '.join(known)}")
        if (reason := known[named].serves(call)) is not None:
            raise ValueError(
                f"{op}: backend {named!r} cannot serve this call: {reason}. Leave backend out to let the op choose"
            )
        return known[named]
    reasons = []
    for backend in table:
        reason = backend.serves(call) or declines(backend, call)
        if reason is None:
            return backend
        reasons.append(f"{backend.name}: {reason}")
    raise ValueError(f"{op}: no backend serves this call. " + "; ".join(reasons))


def explain(op: str, call: Any) -> list[tuple[str, str]]:
    """(name, "chosen" | "could serve" | the reason why not), for every backend of ``op``, in the order of the table."""
    rows, chosen = [], False
    for backend in backends(op):
        reason = backend.serves(call)
        if reason is not None:
            rows.append((backend.name, reason))
        elif (reason := declines(backend, call)) is not None:
            rows.append((backend.name, f"could serve: {reason}"))
        else:
            rows.append((backend.name, "could serve" if chosen else "chosen"))
            chosen = True
    return rows
