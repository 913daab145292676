"""Interception: while it is active, calls of a model's layers go to a handler instead.

The classes' `__call__` is replaced, not the instances' (Python looks it up there), and the handler is asked only for
the given layers. So is whatever else is replaced while a step runs (`stream_ops`, `exceptions`, `tokenwise`, `dense`):
the classes and modules are the process's, so it holds for every thread, and two models must not be stepped at once
in two threads of one process.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn

Handler: TypeAlias = Callable[[int, tuple, dict[str, Any]], Any]
"""(layer number, positional arguments, keyword arguments) -> what the layer's call returns."""


@contextmanager
def intercept(layers: Sequence[nn.Module], handler: Handler) -> Iterator[None]:
    """Route `layers[i](*args, **kwargs)` to `handler(i, args, kwargs)` while the block runs."""
    numbers = {id(layer): i for i, layer in enumerate(layers)}
    originals = {kind: kind.__call__ for kind in {type(layer) for layer in layers}}

    def replacement(original: Callable) -> Callable:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            number = numbers.get(id(self))
            return original(self, *args, **kwargs) if number is None else handler(number, args, kwargs)

        return call

    try:
        for kind, original in originals.items():
            setattr(kind, "__call__", replacement(original))  # noqa: B010, mypy refuses the plain form
        yield
    finally:
        for kind, original in originals.items():
            setattr(kind, "__call__", original)  # noqa: B010


def map_tree(leaf: Callable[[Any], Any], tree: Any) -> Any:
    """Rebuild nested tuples, lists and dicts with `leaf` applied to everything else."""
    if isinstance(tree, (tuple, list)) and not hasattr(tree, "_fields"):
        return type(tree)(map_tree(leaf, item) for item in tree)
    if isinstance(tree, dict):
        return {key: map_tree(leaf, item) for key, item in tree.items()}
    return leaf(tree)


def leaves(tree: Any) -> list[Any]:
    """Everything in a nested tree that is not a tuple, list or dict, in order."""
    found: list[Any] = []
    map_tree(found.append, tree)
    return found


def arrays(tree: Any) -> list[mx.array]:
    """All arrays in a nested tree, in order."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, mx.array)]
