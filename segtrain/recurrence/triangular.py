"""Inverse of a unit lower triangular matrix in plain operations."""

from typing import Any

import mlx.core as mx


def unit_lower_inverse(a: mx.array) -> mx.array:
    """(I + a)^{-1} [..., C, C] of a strictly lower triangular `a`, to rounding. Differentiable.

    Blocks on the diagonal double: with inverses X, Y of two neighbours and Z between them, that of [[x, 0], [Z, y]]
    is [[X, 0], [-Y Z X, Y]]. The Neumann series I - a + a^2 - ... has the same cost, and loses all digits where keys
    repeat, as its terms grow before they vanish.
    """
    found: Any = _inverse(a)
    return found


@mx.custom_function
def _inverse(a: mx.array) -> mx.array:
    size = a.shape[-1]
    row, column = mx.arange(size)[:, None], mx.arange(size)[None]
    inverse, block = mx.broadcast_to(mx.eye(size, dtype=a.dtype), a.shape), 1
    while block < size:
        between = (row // (2 * block) == column // (2 * block)) & (row // block > column // block)
        below = mx.where(between, a, 0)
        inverse = inverse - (below if block == 1 else inverse @ below @ inverse)
        block *= 2
    return inverse


@_inverse.vjp
def _inverse_vjp(a: mx.array, cotangent: mx.array, inverse: mx.array) -> mx.array:
    transposed = inverse.swapaxes(-1, -2)
    return -(transposed @ cotangent @ transposed)
