"""Inverse of a unit lower triangular matrix in plain operations."""

from functools import cache
from typing import Any

import mlx.core as mx


@cache
def lower(size: int, *, strict: bool) -> mx.array:
    """Where a row's number is above (or at) a column's, [C, C]: made once, since every group of a scan needs it."""
    return mx.array([[column < row + (not strict) for column in range(size)] for row in range(size)])


@cache
def _between(size: int, block: int) -> mx.array:
    """Where a row is in the second and a column in the first of two blocks on the diagonal that are to be joined."""
    return mx.array(
        [
            [row // (2 * block) == column // (2 * block) and row // block > column // block for column in range(size)]
            for row in range(size)
        ]
    )


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
    inverse, block = mx.eye(size, dtype=a.dtype) - mx.where(_between(size, 1), a, 0), 2
    while block < size:
        inverse = inverse - inverse @ mx.where(_between(size, block), a, 0) @ inverse
        block *= 2
    return inverse


@_inverse.vjp
def _inverse_vjp(a: mx.array, cotangent: mx.array, inverse: mx.array) -> mx.array:
    transposed = inverse.swapaxes(-1, -2)
    return -(transposed @ cotangent @ transposed)
