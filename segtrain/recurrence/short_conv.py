"""A causal convolution over a few tokens, each channel by itself, as a sum of shifted rows.

MLX's own depthwise convolution holds several copies of its input in the backward pass (on a CPU seven, and takes four
times as long). The gradient of the rows is the same convolution with the taps in reverse order. Either goes block by
block of tokens, so that the products in float32 are never there for all of them.
"""

from typing import Any

import mlx.core as mx

from segtrain.recurrence.grouped import in_turn
from segtrain.recurrence.sizes import Sizes, group_tokens, on_device

SIZES = {
    "cpu": Sizes(chunk=1, group_bytes=1 << 19),
    "cuda": Sizes(chunk=1, group_bytes=32 << 20),
    "metal": Sizes(chunk=1, group_bytes=8 << 20),
}


def depthwise(x: mx.array, taps: mx.array) -> mx.array:
    """`mx.conv1d(x, taps, groups=C)`: x [B, T + K - 1, C], taps [C, K, 1] -> [B, T, C]; sums in float32."""
    found: Any = _depthwise(x, taps)
    return found


@mx.custom_function
def _depthwise(x: mx.array, taps: mx.array) -> mx.array:
    return _shifted(x, taps)


@_depthwise.vjp
def _depthwise_vjp(primals: tuple[mx.array, mx.array], dy: mx.array, output: mx.array) -> tuple[mx.array, mx.array]:
    x, taps = primals
    around = taps.shape[1] - 1
    dx = _shifted(mx.pad(dy, [(0, 0), (around, around), (0, 0)]), taps[:, ::-1])
    rows = [x[:, j : j + dy.shape[1]].astype(mx.float32) for j in range(around + 1)]
    d_taps = [(row * dy).sum(axis=(0, 1)) for row in rows]
    return dx, mx.stack(d_taps, axis=1)[..., None].astype(taps.dtype)


def _shifted(x: mx.array, taps: mx.array) -> mx.array:
    width, count = taps.shape[1], x.shape[1] - taps.shape[1] + 1
    size = group_tokens(on_device(SIZES), x.shape[0] * x.shape[2])
    weights = [taps[:, j, 0].astype(mx.float32) for j in range(width)]
    blocks: list[mx.array] = []
    for lo in range(0, count, size):
        (part,) = in_turn([x[:, lo : min(lo + size, count) + width - 1]], blocks[-1:])
        rows = part.shape[1] - width + 1
        y = part[:, :rows] * weights[0]
        for j in range(1, width):
            y = y + part[:, j : j + rows] * weights[j]
        blocks.append(y.astype(x.dtype))
    return mx.concatenate(blocks, axis=1)
