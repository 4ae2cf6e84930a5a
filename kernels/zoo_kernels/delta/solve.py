"""The inverse of a unit lower triangular matrix of 64 rows, in blocks of 16, for use inside kernels.

Both steps are substitution in another order, so they are as stable as it is: what is added is never larger than the
inverse of a part. A Neumann series has the same number of products, but for repeated keys its powers reach 1e6.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def inverse_of_16(L, eye, PREC: tl.constexpr):
    """(I + L)^-1, from blocks of 2, 4, 8 to 16 rows: [[A, 0], [B, D]]^-1 = [[A', 0], [-D' B A', D']].

    Args:
        L: [16, 16] fp32, zero on the diagonal and above it.
        eye: [16, 16] fp32, the identity.
        PREC: input precision of the products.
    """
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    inverse = eye - tl.where((row // 2) == (column // 2), L, 0.0)
    inverse = _join_pairs(L, inverse, 2, PREC)
    inverse = _join_pairs(L, inverse, 4, PREC)
    return _join_pairs(L, inverse, 8, PREC)


@triton.jit
def _join_pairs(L, inverse, HALF: tl.constexpr, PREC: tl.constexpr):
    row, column = tl.arange(0, 16)[:, None] // HALF, tl.arange(0, 16)[None, :] // HALF
    corner = tl.where((row == column + 1) & (row % 2 == 1), L, 0.0)
    corner = tl.dot(corner, inverse, input_precision=PREC)
    return inverse - tl.dot(inverse, corner, input_precision=PREC)


@triton.jit
def invert_blocks(l00, l11, l22, l33, l10, l20, l30, l21, l31, l32, PREC: tl.constexpr):
    """(I + L)^-1 of the blocks l.. of L, [16, 16] fp32 each: X_ij = -X_ii sum_m L_im X_mj.

    Args:
        l00, l11, l22, l33: blocks of the diagonal, zero on their diagonal and above it.
        l10, l20, l30, l21, l31, l32: blocks below it, row block first.
        PREC: input precision of the products.

    Returns:
        (x00, x11, x22, x33, x10, x20, x30, x21, x31, x32), fp32; x00 to x33 have ones on their diagonal.
    """
    eye = tl.where(tl.arange(0, 16)[:, None] == tl.arange(0, 16)[None, :], 1.0, 0.0)
    x00 = inverse_of_16(l00, eye, PREC)
    x11 = inverse_of_16(l11, eye, PREC)
    x22 = inverse_of_16(l22, eye, PREC)
    x33 = inverse_of_16(l33, eye, PREC)
    x10 = -tl.dot(x11, tl.dot(l10, x00, input_precision=PREC), input_precision=PREC)
    x21 = -tl.dot(x22, tl.dot(l21, x11, input_precision=PREC), input_precision=PREC)
    x32 = -tl.dot(x33, tl.dot(l32, x22, input_precision=PREC), input_precision=PREC)
    sum20 = tl.dot(l21, x10, tl.dot(l20, x00, input_precision=PREC), input_precision=PREC)
    x20 = -tl.dot(x22, sum20, input_precision=PREC)
    sum31 = tl.dot(l32, x21, tl.dot(l31, x11, input_precision=PREC), input_precision=PREC)
    x31 = -tl.dot(x33, sum31, input_precision=PREC)
    sum30 = tl.dot(l31, x10, tl.dot(l30, x00, input_precision=PREC), input_precision=PREC)
    sum30 = tl.dot(l32, x20, sum30, input_precision=PREC)
    x30 = -tl.dot(x33, sum30, input_precision=PREC)
    return x00, x11, x22, x33, x10, x20, x30, x21, x31, x32


@triton.jit
def store_blocks(target, c0, c1, c2, c3, valid):
    """Store 16 rows of a [64, 64] matrix, given as four blocks side by side.

    Args:
        target: [16, 16] pointers to the first block.
        valid: [16], which rows there are.
    """
    dtype = target.dtype.element_ty
    tl.store(target, c0.to(dtype), mask=valid[:, None])
    tl.store(target + 16, c1.to(dtype), mask=valid[:, None])
    tl.store(target + 32, c2.to(dtype), mask=valid[:, None])
    tl.store(target + 48, c3.to(dtype), mask=valid[:, None])
