"""Inverse of a unit lower triangular matrix in plain operations."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import mlx.core as mx


@lru_cache(maxsize=64)
def triangle(size: int, diagonal: int = 0) -> mx.array:
    """[size, size] of booleans, true up to the `diagonal`-th diagonal (0 the main one, -1 that below)."""
    return _constant(size, lambda row, column: column <= row + diagonal)


@lru_cache(maxsize=64)
def _between(size: int, block: int) -> mx.array:
    """[size, size] of booleans, true where a row of a pair's second block meets a column of its first."""
    return _constant(size, lambda row, column: row // block == column // block + 1 and column // block % 2 == 0)


def _constant(size: int, rule: Callable[[int, int], bool]) -> mx.array:
    """From Python's numbers: what MLX computes in a graph being compiled would be computed in each run of it."""
    return mx.array([[rule(row, column) for column in range(size)] for row in range(size)])


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
