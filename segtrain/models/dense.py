"""Quantised weights of the running layers expanded once, for dense matrix products.

A quantised product unpacks its weights anew in every call; on a GPU with fast dense products it is several times
slower at training's row counts. So for as long as a segment runs, each of its quantised linear layers works on one
dense copy, shared by the forward pass and its vjp. The copy is in the activations' dtype and is dropped with the
segment.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from segtrain.models.capture import intercept


def quantized_modules(layers: Sequence[nn.Module]) -> list[nn.Module]:
    return [m for layer in layers for _, m in layer.named_modules() if type(m) is nn.QuantizedLinear]


@contextmanager
def dequantized(layers: Sequence[nn.Module]) -> Iterator[None]:
    """While the block runs, quantised linear layers in `layers` multiply by a dense copy of their weights."""
    modules = quantized_modules(layers)
    copies: dict[int, mx.array] = {}

    def handler(i: int, args: tuple, kwargs: dict[str, Any]) -> mx.array:
        (x,) = args
        module = modules[i]
        if i not in copies:
            copies[i] = dense_weight(module, x.dtype)
        y = x @ copies[i].T
        return y + module["bias"] if "bias" in module else y

    with intercept(modules, handler):
        yield


def dense_weight(module: nn.Module, dtype: mx.Dtype) -> mx.array:
    """[out, in] weights of a quantised linear layer."""
    weight = mx.dequantize(
        module["weight"],
        module["scales"],
        module.get("biases"),
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
    )
    return weight.astype(dtype)
