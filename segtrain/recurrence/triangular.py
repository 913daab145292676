"""Inverse of a unit lower triangular matrix in plain operations."""

from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np


@lru_cache(maxsize=64)
def triangle(size: int, diagonal: int = 0) -> mx.array:
    """[size, size] of booleans, true up to the `diagonal`-th diagonal (0 the main one, -1 that below)."""
    return mx.array(np.tri(size, k=diagonal, dtype=bool))


@lru_cache(maxsize=64)
def _between(size: int, block: int) -> mx.array:
    """[size, size] of booleans, true where a row of a pair's second block meets a column of its first."""
    row, column = np.arange(size)[:, None], np.arange(size)[None]
    return mx.array((row // (2 * block) == column // (2 * block)) & (row // block > column // block))


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
        below = mx.where(_between(size, block), a, 0)
        inverse = inverse - inverse @ below @ inverse
        block *= 2
    return inverse


@_inverse.vjp
def _inverse_vjp(a: mx.array, cotangent: mx.array, inverse: mx.array) -> mx.array:
    transposed = inverse.swapaxes(-1, -2)
    return -(transposed @ cotangent @ transposed)
