"""Layers that compute the same function of their arrays.

Most layers of a model differ in nothing but the arrays they hold, so one traced (compiled) graph serves them all when
the arrays are its inputs. Two layers are alike when their modules have the same classes, names, plain attributes and
array shapes; anything unknown in a module makes it unlike every other.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn

from segtrain.lora.modules import trains

Place: TypeAlias = tuple[nn.Module, str]
LAYER_NUMBERS = ("layer_idx", "layer_id", "layer_index")
"""Attributes that models store and, once built, do not compute with: layers that differ only here are alike."""


def places(layers: Sequence[nn.Module]) -> list[Place]:
    """Where the frozen arrays of `layers` sit (weights, rotary frequencies), in a fixed order."""
    return [
        (module, key)
        for layer in layers
        for _, module in layer.named_modules()
        for key, value in module.items()
        if isinstance(value, mx.array) and not trains(module, key)
    ]


def fingerprint(layer: nn.Module) -> tuple:
    """A hashable description of all that `layer` computes with, but its arrays' values."""
    return tuple((name, *_described(module)) for name, module in layer.named_modules())


@contextmanager
def holding(where: Sequence[Place], arrays: Sequence[mx.array]) -> Iterator[None]:
    """Put `arrays` in these places, and the old ones back whatever happens."""
    before = [module[key] for module, key in where]
    try:
        for (module, key), array in zip(where, arrays, strict=True):
            module[key] = array
        yield
    finally:
        for (module, key), array in zip(where, before, strict=True):
            module[key] = array


def as_function(module: nn.Module, original: Callable) -> tuple[Callable[..., mx.array], list[mx.array]]:
    """`original(module, x)` as a function of x and the trainable arrays in `module`, and those arrays.

    All other arrays are fixed as they are now: the function may be called when others are in place.
    """
    slots = [(m, key) for _, m in module.named_modules() for key in m if trains(m, key)]
    frozen = places([module])
    weights = [m[key] for m, key in frozen]

    def function(x: mx.array, *values: mx.array) -> mx.array:
        with holding([*frozen, *slots], [*weights, *values]):
            return original(module, x)

    return function, [m[key] for m, key in slots]


def _described(module: nn.Module) -> Iterator[Any]:
    yield type(module)
    for key, value in module.items():
        if isinstance(value, mx.array):
            yield key, value.shape, value.dtype
        elif not _holds_modules(value):
            yield key, plain(value)
    for key, value in vars(module).items():
        if key not in LAYER_NUMBERS and key not in ("_training", "_no_grad"):
            yield key, plain(value)


def _holds_modules(value: Any) -> bool:
    return isinstance(value, nn.Module) or (
        isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, nn.Module) for item in value)
    )


def plain(value: Any) -> Any:
    """The value where equality of values means equality of behaviour; else something equal to itself alone."""
    if value is None or isinstance(value, (bool, int, float, str, mx.Dtype)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(plain(item) for item in value)
    return id(value)
