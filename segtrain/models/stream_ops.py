"""What a stream changes in a model's own forward pass, without touching its code.

mlx-lm's models take positions from `cache.offset`, masks from `cache.make_mask`, and call functions of `mx` for
rotary embedding, attention and convolution. So a stream comes in through four doors:

- a `StreamCache` in the place of each layer's key-value cache, whose mask is a `Causal` (the *string* "causal" with a
  window), so that no `[T, T]` array is ever made, and which hands keys and values to layers that share them;
- `mx.fast.rope`, which gets the positions of the stream's branches or sequences;
- `mx.fast.scaled_dot_product_attention`, which becomes `attention.dispatch.attend` wherever the mask is causal;
- `mx.conv1d`, which starts again at each branch.

What a model file does past these doors is in `exceptions`, its recurrence in `recurrences`. All of it is replaced
only inside `stream_ops` and put back whatever happens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx

from segtrain.attention.dispatch import attend, unmasked
from segtrain.attention.folding import folded, unfolded
from segtrain.engine.layouts import Stream
from segtrain.engine.ragged import Ragged
from segtrain.models.branches import short_convolution
from segtrain.models.causal import Causal
from segtrain.models.exceptions import Replacement, active, replaced

_rope = mx.fast.rope
_sdpa = mx.fast.scaled_dot_product_attention


class StreamCache:
    """Stands in for a key-value cache during one whole-row pass: at offset 0, it keeps what its layer computed.

    Layers that reuse another layer's keys and values find them here (`keys_and_values`, `state`).
    """

    offset = 0

    def __init__(self, stream: Stream):
        self._stream = stream
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.was_read = False

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys, self.values = keys, values
        return keys, values

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        self.was_read = True
        return self.keys, self.values

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None]:
        return self.keys_and_values()

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        window = window_size if window_size and window_size < N else None
        if return_array:
            return dense_mask(self._stream, N, window)
        return Causal(window)


def dense_mask(stream: Stream, rows: int, window: int | None) -> mx.array:
    """Visibility as a [T, T] boolean array, for the few models that do arithmetic on their mask."""
    if stream.ragged is not None:
        raise NotImplementedError("a mask as an array for a ragged batch")
    physical = mx.arange(rows)
    logical, branch = physical, mx.zeros((rows,), mx.int32)
    if stream.branches and rows == len(stream):
        logical = mx.concatenate([mx.arange(first, first + length) for first, length in stream.runs])
        numbers = [mx.full((n,), i + 1, mx.int32) for i, n in enumerate(stream.branches)]
        branch = mx.concatenate([mx.zeros((stream.prefix,), mx.int32), *numbers])
    visible = physical[:, None] >= physical[None]
    visible &= (branch[None] == 0) | (branch[:, None] == branch[None])
    if window:
        visible &= logical[:, None] - logical[None] < window
    return visible


@contextmanager
def stream_ops(stream: Stream, exceptions: Sequence[Replacement]) -> Iterator[None]:
    """Rotary embedding at the stream's positions, attention by its visibility, while the block runs.

    `exceptions`: the model's, see `exceptions_of`.
    """

    def rope(x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        if stream.ragged is None and not stream.branches:
            return _rope(x, *args, **kwargs)
        if x.shape[-2] != len(stream):
            raise NotImplementedError(f"rotary embedding of {x.shape[-2]} rows in a stream of {len(stream)}")
        kwargs.pop("offset", None)
        if stream.ragged is not None:
            return _rope_at(stream.ragged.positions, x, *args, **kwargs)
        parts, at = [], 0
        for first, length in stream.runs:
            parts.append(_rope(x[..., at : at + length, :], *args, offset=first, **kwargs))
            at += length
        return mx.concatenate(parts, axis=-2)

    def attention(q: mx.array, k: mx.array, v: mx.array, **rule: Any) -> mx.array:
        with _original_ops():
            if stream.ragged is not None:
                return _folded_attention(stream.ragged, q, k, v, **rule)
            return attend(q, k, v, prefix=stream.prefix, branches=stream.branches, **rule)

    def sdpa(q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Any = None, sinks: Any = None) -> mx.array:
        if mask is None:
            return unmasked(q, k, v, scale=scale, sinks=sinks)
        if not isinstance(mask, str):
            return _sdpa(q, k, v, scale=scale, mask=mask, sinks=sinks)
        return attention(q, k, v, scale=scale, window=getattr(mask, "window", None), sinks=sinks)

    conv1d = replaced(mx, "conv1d", partial(short_convolution, stream))
    with _fast_ops(rope, sdpa), conv1d, active(exceptions, stream, attention):
        yield


def _rope_at(positions: mx.array, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
    """Rotary embedding of x [..., T, D] at these positions [T]: each token is a batch of its own, with its offset."""
    by_token = mx.moveaxis(x, -2, 0)
    turned = _rope(by_token.reshape(len(positions), -1, 1, x.shape[-1]), *args, offset=positions, **kwargs)
    return mx.moveaxis(turned.reshape(by_token.shape), 0, -2)


def _folded_attention(ragged: Ragged, q: mx.array, k: mx.array, v: mx.array, **rule: Any) -> mx.array:
    """`attend` on the ragged stream's sequences as a batch: causal, so that filler at their ends needs no mask."""
    q, k, v = (folded(x, ragged.tokens, ragged.slots, ragged.held) for x in (q, k, v))
    return unfolded(attend(q, k, v, **rule), ragged.tokens, ragged.own, ragged.slots)


@contextmanager
def _fast_ops(rope: Any, sdpa: Any) -> Iterator[None]:
    before = mx.fast.rope, mx.fast.scaled_dot_product_attention
    try:
        mx.fast.rope, mx.fast.scaled_dot_product_attention = rope, sdpa
        yield
    finally:
        mx.fast.rope, mx.fast.scaled_dot_product_attention = before


def _original_ops() -> Any:
    return _fast_ops(_rope, _sdpa)
