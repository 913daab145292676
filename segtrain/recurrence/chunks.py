"""The tokens of a group cut into chunks, and back."""

import mlx.core as mx


def split(x: mx.array, chunk: int, fill: float = 0) -> mx.array:
    """[B, T, H, ...] as float32 [B, N, H, C, ...]: N chunks of `chunk` tokens, the last one filled up with `fill`."""
    missing = -x.shape[1] % chunk
    x = x.astype(mx.float32)
    if missing:
        x = mx.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)
    return x.reshape(x.shape[0], -1, chunk, *x.shape[2:]).swapaxes(2, 3)


def join(x: mx.array, length: int) -> mx.array:
    """The inverse of `split`: the first `length` tokens [B, T, H, ...] of [B, N, H, C, ...]."""
    return x.swapaxes(2, 3).flatten(1, 2)[:, :length]
