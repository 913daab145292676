"""Weights that stay in memory: on Metal, what isn't wired may be paged out between two uses, and near the machine's
limit it is, at many times the cost."""

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from segtrain.memory.meter import recommended_bytes


@contextmanager
def wired(budget: int, *, wanted: bool = True) -> Iterator[None]:
    """While the block runs, up to `budget` bytes are wired, at most what Metal recommends (above that mlx refuses).

    Nothing happens on other backends; before macOS 15 mlx does nothing.
    """
    if not wanted or not mx.metal.is_available():
        yield
        return
    before = mx.set_wired_limit(min(budget, recommended_bytes()))
    try:
        yield
    finally:
        mx.set_wired_limit(before)
