"""In which order the backends of attention are asked: a fixed table from measurements; nothing is timed at run time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zoo_kernels import backend as table
from zoo_kernels.attention.call import AttentionCall, capability

ALL = ("sdpa", "varlen", "flash4", "flash2", "blocks", "math")


@dataclass(frozen=True)
class Order:
    """One line of the table.

    Attributes:
        names: the backends, first asked first; those left out follow in the order of ``ALL``.
        source: where it was measured: GPU, shapes, versions, forward / forward and backward in ms.
        arch: "sm_90" and the like, or "any".
        when: facts that must hold, see :func:`facts`; a tuple means any of its members.
    """

    names: tuple[str, ...]
    source: str
    arch: str = "any"
    when: Mapping[str, object] = field(default_factory=dict)

    def fits(self, arch: str, known: Mapping[str, object]) -> bool:
        """Whether this line speaks about a call."""
        if self.arch not in ("any", arch):
            return False
        return all(known[name] in (want if isinstance(want, tuple) else (want,)) for name, want in self.when.items())


# The first line that fits is taken. A window that no document exceeds never gets here: the op has turned it into None,
# since full attention is then the same function, and between W and 2 W only windowed kernels are right.
ORDERS = (
    Order(
        ("flash4", "sdpa", "varlen"),
        "flash4 4.0.0b36 4.05 / 1.22, cuDNN 4.20 / 1.22, flash2 2.8.3 6.92 / 1.78, torch's flash 6.96 / 1.94 (forward "
        "and backward / forward, H200, B8 T4096 H16 D128 bf16, torch 2.11; H32/8 D64 4.73, 5.20, 7.63, 7.93 / "
        "1.32, 1.38, 1.97, 2.32)",
        arch="sm_90",
        when={"kind": "full", "size": (64, 128)},
    ),
    Order(
        ("flash4", "varlen"),
        "flash4 4.0.0b36 3.28 / 0.86, flash2 2.8.3 5.66 / 1.66, torch's flash 5.70 / 1.85 (forward and backward / "
        "forward, H200, B8 T4096 H16 D128 W2048 bf16, torch 2.11; B1 T32768 in 8 documents 3.71, 8.14, 5.69 / 0.96, "
        "1.59, 1.88)",
        arch="sm_90",
        when={"kind": ("window", "packed"), "size": (64, 128)},
    ),
    Order(
        ("sdpa", "varlen"),
        "heads above 128 are not measured; cuDNN is ahead of torch's flash at 128 and 64",
        arch="sm_90",
        when={"kind": "full"},
    ),
    Order(
        ("varlen",),
        "heads above 128 are not measured; torch's flash is ahead of its dense kernels at 128",
        arch="sm_90",
        when={"kind": ("window", "packed")},
    ),
    Order(ALL, "not measured on this device; fused kernels of torch first"),
)


def facts(call: AttentionCall) -> dict[str, object]:
    """What the table may ask.

    Returns:
        kind: "full" where all documents have one length and no window cuts them, else "window" or "packed".
        size: the head size, 64, 128 or 256, that holds the call's.
        wide: whether a document is longer than two windows.
    """
    longest, size = max(call.lengths), max(call.q.shape[-1], call.v.shape[-1])
    same = all(length == longest for length in call.lengths)
    kind = "window" if call.window is not None else "full" if same else "packed"
    return {
        "kind": kind,
        "size": next((kept for kept in (64, 128) if size <= kept), 256),
        "wide": call.window is not None and longest > 2 * call.window,
    }


def order(call: AttentionCall) -> tuple[tuple[str, ...], str]:
    """The names of all backends, first asked first, and where that was measured."""
    arch = "cpu"
    if call.q.is_cuda:
        major, minor = capability(call.q.device)
        arch = f"sm_{major}{minor}"
    known = facts(call)
    line = next(line for line in ORDERS if line.fits(arch, known))
    return (*line.names, *(name for name in ALL if name not in line.names)), line.source


class Ranked:
    """A backend that leaves a call to those that the table asks before it, unless it is named."""

    name: str

    def declines(self, call: AttentionCall) -> str | None:
        names, source = order(call)
        backends = {backend.name: backend for backend in table.backends("attention")}
        for name in names[: names.index(self.name)]:
            if backends[name].serves(call) is None:
                return f"{name} is asked first ({source})"
        return None
