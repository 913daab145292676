"""Compiled graphs, bounded in number.

`mx.compile` keeps a graph for each set of input shapes as long as the compiled function lives, so rows of many lengths
would pile up graphs. Here a compiled function serves one set of shapes, and those used longest ago are dropped, with
their graphs.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

LIMIT = 256  # graphs: about ten a row length for a model whose layers are of two kinds


class Traces:
    """The compiled functions of one model and its adapter, by all that they close over and by their inputs' shapes."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self._compiled: OrderedDict[tuple, Callable] = OrderedDict()

    def __len__(self) -> int:
        return len(self._compiled)

    def __call__(self, key: tuple, function: Callable, *inputs: Any) -> Any:
        """`function(*inputs)`, compiled. Functions with equal keys must compute the same."""
        named: dict[str, mx.array] = tree_flatten(inputs, destination={})  # type: ignore[assignment]
        shapes = tuple((path, array.shape, array.dtype) for path, array in named.items())
        known = self._compiled.pop((key, shapes), None) or mx.compile(function)
        self._compiled[key, shapes] = known
        if len(self._compiled) > self.limit:
            self._compiled.popitem(last=False)
        return known(*inputs)
