"""Tokens of a ragged stream as a padded batch of sequences, and back.

Shapes: `T` tokens of the stream, `S` sequences of `L` slots, `N` slots at most that hold a token. x [1, H, T, D] is
folded to [S, H, L, D]. Empty slots repeat token 0, and nothing that is computed in them comes back.

Both ways are a look-up by rows of H * D numbers, and so are their gradients: autodiff would scatter them, one by one.
A look-up takes its time by the number of elements, whatever their size: rows are looked up in words of 8 bytes.
"""

from typing import Any

import mlx.core as mx

WORD = mx.uint64


def folded(x: mx.array, tokens: mx.array, slots: mx.array, held: mx.array) -> mx.array:
    """[1, H, T, D] to [S, H, L, D]: slot (s, l) is token `tokens[s, l]`. `slots` [N, T], `held` [N, T]: the inverse."""

    @mx.custom_function
    def fold(x: mx.array) -> mx.array:
        rows = _rows(x.squeeze(0).swapaxes(0, 1), tokens.reshape(-1))
        return rows.reshape(*tokens.shape, *rows.shape[1:]).swapaxes(1, 2)

    @fold.vjp
    def backward(x: mx.array, cotangent: mx.array, _: mx.array) -> mx.array:
        rows = cotangent.swapaxes(1, 2).flatten(0, 1)
        total: Any = 0
        for slot, real in zip(slots, held, strict=True):
            total = total + mx.where(real[:, None, None], _rows(rows, slot), mx.zeros((), rows.dtype))
        return total.swapaxes(0, 1)[None]

    found: Any = fold(x)
    return found


def unfolded(y: mx.array, tokens: mx.array, own: mx.array, slots: mx.array) -> mx.array:
    """[S, H, L, D] to [1, H, T, D]: token t is taken from slot `slots[0, t]`, the one that is its `own`."""

    @mx.custom_function
    def unfold(y: mx.array) -> mx.array:
        return _rows(y.swapaxes(1, 2).flatten(0, 1), slots[0]).swapaxes(0, 1)[None]

    @unfold.vjp
    def backward(y: mx.array, cotangent: mx.array, _: mx.array) -> mx.array:
        rows = _rows(cotangent.squeeze(0).swapaxes(0, 1), tokens.reshape(-1))
        rows = mx.where(own.reshape(-1, 1, 1), rows, mx.zeros((), rows.dtype))
        return rows.reshape(*tokens.shape, *rows.shape[1:]).swapaxes(1, 2)

    found: Any = unfold(y)
    return found


def _rows(x: mx.array, numbers: mx.array) -> mx.array:
    """Rows of x [R, H, D] by their numbers [N]: [N, H, D]."""
    wide = x.shape[-1] * x.dtype.size % WORD.size == 0
    if not wide:
        return mx.take(x, numbers, axis=0)
    return mx.take(x.view(WORD), numbers, axis=0).view(x.dtype)
