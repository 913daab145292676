"""Quantised weights of the running layers expanded once, for dense matrix products.

A quantised product unpacks its weights anew in every call; on a GPU with fast dense products it is several times
slower at training's row counts. So for as long as a segment runs, each of its quantised linear layers works on one
dense copy, shared by the forward pass and its vjp. The copy is in the activations' dtype and is dropped with the
segment.

The vocabulary's projection is too large for that (1 GiB at 128k x 4096): it is expanded a slice of the vocabulary at
a time, one after the other, in the forward pass and again in its vjp.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from segtrain.engine.segments import cuts
from segtrain.lora.frozen import dense_weight
from segtrain.models.capture import intercept

SLICE_BYTES = 128 << 20  # of a dense copy


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


@contextmanager
def dequantized_in_slices(linear: Sequence[nn.Module]) -> Iterator[None]:
    """While the block runs, these quantised linear layers, and tied embeddings, work on slices of dense weights."""
    as_linear = nn.QuantizedEmbedding.as_linear

    def handler(i: int, args: tuple, kwargs: dict[str, Any]) -> mx.array:
        (x,) = args
        y = _in_slices(linear[i], x)
        return y + linear[i]["bias"] if "bias" in linear[i] else y

    try:
        setattr(nn.QuantizedEmbedding, "as_linear", _in_slices)  # noqa: B010, mypy refuses the plain form
        with intercept(linear, handler):
            yield
    finally:
        setattr(nn.QuantizedEmbedding, "as_linear", as_linear)  # noqa: B010


def _in_slices(module: nn.Module, x: mx.array) -> mx.array:
    """x [..., in] times the transpose of `module`'s weights [out, in], in x's dtype; no bias."""
    outputs = module["weight"].shape[0]
    slices = cuts(0, outputs, max(1, SLICE_BYTES // (x.shape[-1] * x.dtype.size)))
    if len(slices) == 1:
        return x @ dense_weight(module, x.dtype).T

    @mx.custom_function
    def product(x: mx.array) -> mx.array:
        parts: list[mx.array] = []
        for lo, hi in slices:
            parts.append(x @ dense_weight(module, x.dtype, lo, hi, after=parts[-1:]).T)
        return mx.concatenate(parts, axis=-1)

    @product.vjp
    def backward(x: mx.array, dy: mx.array, y: mx.array) -> mx.array:
        sums: list[mx.array] = []  # in float32, so that they are rounded once
        for lo, hi in slices:
            part = dy[..., lo:hi] @ dense_weight(module, x.dtype, lo, hi, after=sums[-1:])
            sums.append(part.astype(mx.float32) + sums[-1] if sums else part.astype(mx.float32))
        return sums[-1].astype(x.dtype)

    result: Any = product(x)
    return result
