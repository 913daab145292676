"""A linear layer's own weights, dense or quantised: their shape, their values, their products."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn

SQUARED_BYTES = 32 << 20  # of weights in float32 whose squares are summed at a time


def dense_shape(linear: nn.Module) -> tuple[int, ...]:
    *outer, inputs = linear.weight.shape
    return (*outer, inputs * 32 // linear.bits if "scales" in linear else inputs)


def dense_weight(
    module: nn.Module, dtype: mx.Dtype, lo: int = 0, hi: int | None = None, *, after: Sequence[mx.array] = ()
) -> mx.array:
    """[hi - lo, in] weights of a linear layer or embedding, computed once `after` is."""
    names = [name for name in ("weight", "scales", "biases") if module.get(name) is not None]
    packed: list[mx.array] = [module[name][lo:hi] for name in names]
    if after:
        packed = list(mx.depends(packed, list(after)))
    if "scales" not in module:
        return packed[0].astype(dtype)
    weight, scales, *biases = packed
    dense: mx.array = mx.dequantize(
        weight,
        scales,
        biases[0] if biases else None,
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
    )
    return dense.astype(dtype)


def product(linear: nn.Module, x: mx.array) -> mx.array:
    """x [..., in] times the transpose of the weights [out, in], without the bias."""
    if "scales" not in linear:
        return x @ linear["weight"].T
    result: mx.array = mx.quantized_matmul(
        x,
        linear["weight"],
        linear["scales"],
        linear.get("biases"),
        transpose=True,
        group_size=linear.group_size,
        bits=linear.bits,
        mode=linear.mode,
    )
    return result


def squared_norms(linear: nn.Module) -> mx.array:
    """[out] in float32: of each row of the weights, evaluated, some rows at a time."""
    outputs, inputs = dense_shape(linear)
    rows = max(1, SQUARED_BYTES // (4 * inputs))
    parts = []
    for lo in range(0, outputs, rows):
        parts.append(mx.square(dense_weight(linear, mx.float32, lo, min(lo + rows, outputs))).sum(axis=-1))
        mx.eval(parts[-1])
    found = mx.concatenate(parts)
    mx.eval(found)
    return found


@contextmanager
def without_bias(linear: nn.Module) -> Iterator[None]:
    """While the block runs, `linear` adds no bias, however it is computed."""
    bias = linear.pop("bias", None)
    try:
        yield
    finally:
        if bias is not None:
            linear["bias"] = bias
