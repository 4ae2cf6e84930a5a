"""What the kernels of the chunkwise delta rule share: the form of a call, and decays between the tokens of a chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo_kernels.delta import operands
from zoo_kernels.delta.tables import CHUNK, Tables, tables
from zoo_kernels.device import INTERPRETED

# The narrowest tile. Triton 3.6 miscompiles several products of 32-wide tiles with 4 warps on sm_90: wrong numbers in
# one kernel, illegal addresses in two (triton-lang/triton#11366); the interpreter has no such fault, and is slow.
LEAST_BLOCK = 16 if INTERPRETED else 64
LEAST_BETA = tl.constexpr(operands.LEAST_BETA)


@dataclass(frozen=True)
class Form:
    """The shape class of a call: all that decides which kernels are compiled and how they are launched.

    Attributes:
        K, V: sizes of keys and values; BK: K padded to a power of two.
        HV: value heads; R: value heads of one key head.
        dtype: of matrix operands and workspaces: bf16 for bf16 inputs, else fp32, whose range fp16 lacks.
        precision: of products of fp32 operands.
        gate: "none", "head" or "channel".
        erases: whether beta is given.
        arch: "sm_90" and the like.
    """

    K: int
    V: int
    HV: int
    R: int
    dtype: torch.dtype
    precision: str
    gate: str
    erases: bool
    arch: str

    @property
    def BK(self) -> int:
        return max(LEAST_BLOCK, _power_of_2(self.K))

    @property
    def BV(self) -> int:
        """V padded alike, the widest tile of values."""
        return max(LEAST_BLOCK, _power_of_2(self.V))

    @property
    def aligned(self) -> bool:
        """Whether every row of keys and of values starts at a multiple of 32 bytes."""
        return self.K % 16 == 0 and self.V % 16 == 0

    @property
    def operand(self) -> tl.dtype:
        """``dtype`` in Triton's words."""
        return tl.bfloat16 if self.dtype == torch.bfloat16 else tl.float32

    @property
    def half(self) -> bool:
        """Whether matrix operands have 16 bits."""
        return self.dtype == torch.bfloat16


def _power_of_2(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()


def members(group: int) -> int:
    """How many value heads of a group one program takes, one after another, to share what depends on keys alone."""
    return next(count for count in range(min(group, 8), 0, -1) if group % count == 0)


def operand_dtype(inputs: torch.dtype) -> tuple[torch.dtype, str]:
    """The dtype of matrix operands, and the precision of products, for inputs of a dtype.

    fp16 is exact in tf32, which has the range that states need; three tf32 products give fp32.
    """
    if inputs == torch.bfloat16:
        return torch.bfloat16, "tf32"
    if INTERPRETED:
        return torch.float32, "ieee"
    return torch.float32, "tf32" if inputs == torch.float16 else "tf32x3"


@triton.jit
def decay_between(running, row, valid):
    """[64, 64]: what a write at token j keeps until token i, 2^(running_i - running_j) where i >= j, else 0."""
    keep = (row[:, None] >= row[None, :]) & valid[:, None]
    return tl.exp2(tl.where(keep, running[:, None] - running[None, :], float("-inf")))


@triton.jit
def decay_between_transposed(running, row, valid):
    """The transpose of :func:`decay_between`, built as it is."""
    keep = (row[:, None] <= row[None, :]) & valid[None, :]
    return tl.exp2(tl.where(keep, running[None, :] - running[:, None], float("-inf")))


@triton.jit
def within(a, b, WHOLE_A: tl.constexpr, WHOLE_B: tl.constexpr):
    """The mask a[:, None] & b[None, :]; what is known to be whole costs no register."""
    if WHOLE_A and WHOLE_B:
        mask = tl.full([1, 1], 1, tl.int1)
    elif WHOLE_A:
        mask = b[None, :]
    elif WHOLE_B:
        mask = a[:, None]
    else:
        mask = a[:, None] & b[None, :]
    return mask


@dataclass(frozen=True, eq=False)
class Example:
    """A call in bf16 on tensors without memory, of which the compile gate hears what would be launched.

    Attributes:
        form, tables: of the call; 8192 tokens.
        q, k, v, log_decay, beta: as :mod:`zoo_kernels.delta.triton_backend` hands them on, and dy like v.
        decay, solve, bound: as in :class:`zoo_kernels.delta.prep.Prepared`.
        entering: the states that enter chunks.
    """

    form: Form
    tables: Tables
    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    beta: Tensor | None
    decay: Tensor | None
    solve: Tensor | None
    bound: Tensor | None
    entering: Tensor


# Shape classes of the compile gate: K, V, HV, R, the gate, and whether beta is given. GDN, DN and M2 are such mixers.
EXAMPLES = {
    "GDN K128 V128": (128, 128, 16, 1, "head", True),
    "DN K128 V128": (128, 128, 16, 1, "none", True),
    "M2 K128 V64": (128, 64, 64, 64, "head", False),
    "GDN K256 V512": (256, 512, 8, 1, "head", True),
    "DN K128 V384": (128, 384, 16, 1, "none", True),
}
CHANNELED = {
    "KDA K128 V128": (128, 128, 16, 1, "channel", True),
    "GLA K64 V128": (64, 128, 16, 1, "channel", False),
}
# The same for scans, and chunks of a segment; the last is a long sequence alone.
SCANNED = (*((case, 0) for case in EXAMPLES if case != "DN K128 V384"), ("GDN K128 V128", 16))


def example(case: str, piece: int = 0) -> Example:
    """The call of a case in ``EXAMPLES`` or ``CHANNELED``, in segments of ``piece`` chunks; 0: whole."""
    K, V, HV, R, gate, erases = (EXAMPLES | CHANNELED)[case]
    tokens, meta = 8192, torch.device("meta")

    def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=meta)

    layout = tables((1, tokens), False, piece, meta)
    q, k = new(tokens, 2 * HV // R, K).chunk(2, dim=1)  # as layers give them
    gates = new(tokens, HV, dtype=torch.float32)
    decay, beta = gates if gate == "head" else new(tokens, HV, K), gates if erases else None
    decay = None if gate == "none" else decay
    solve = new(tokens, HV, CHUNK) if erases else None
    form = Form(K, V, HV, R, torch.bfloat16, "tf32", gate, erases, "sm_90")
    entering = new(layout.count, HV, K, V)
    return Example(form, layout, q, k, new(tokens, HV, V), decay, beta, decay, solve, decay, entering)
