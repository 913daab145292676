"""What looks back along a stream, recurrences and short convolutions, begun again at its branches.

A layer runs through the prompt once and hands what it holds then to each branch: its state, and the prompt's last rows
to a convolution.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import mlx.core as mx

from segtrain.attention.turns import cut, in_order
from segtrain.engine.layouts import Stream
from segtrain.recurrence.short_conv import depthwise

Run: TypeAlias = Callable[[Sequence[mx.array], mx.array | None], tuple[mx.array, mx.array]]
"""(sequences [B, T, ...], state before them) -> (outputs [B, T, ...], state after them)."""


def by_branches(
    stream: Stream, run: Run, sequences: Sequence[mx.array], state: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """`run` over the rows of a stream: through its prefix, then through each branch from the state after the prefix.

    The returned state is that of the last branch. Branches take turns, so that one is in memory at a time.
    """
    _check(stream, {x.shape[1] for x in sequences})
    runs = [stream.prefix, *stream.branches] if stream.branches else [len(stream)]
    edges = [edge for edge in accumulate(runs[:-1]) if edge]
    parts = zip(*(cut(x, edges, axis=1) for x in sequences), strict=True)
    outputs: list[mx.array] = []
    for first, *rest in parts:
        if outputs:
            outputs[-1], first = in_order(outputs[-1], first)
        y, after = run([first, *rest], state)
        if not outputs and stream.prefix:
            state = after
        outputs.append(y)
    return mx.concatenate(outputs, axis=1), after


def _check(stream: Stream, lengths: set[int]) -> None:
    if lengths != {len(stream)}:
        raise NotImplementedError(f"a recurrence over {sorted(lengths)} rows in a stream of {len(stream)}")


def short_convolution(stream: Stream, original: Any) -> Any:
    """`mx.conv1d` where it is causal over the stream's rows, padded in front, with a kernel for each channel."""

    def conv1d(
        x: mx.array,
        weight: mx.array,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        groups: int = 1,
        **kwargs: Any,
    ) -> mx.array:
        by_channel = x.ndim == 3 and weight.shape[-1] == 1 and groups == x.shape[-1] == weight.shape[0]
        tail = weight.shape[1] - 1
        if not (by_channel and (stride, padding, dilation) == (1, 0, 1) and x.shape[1] == len(stream) + tail):
            if stream.branches:
                raise NotImplementedError(f"a convolution over {x.shape[1]} rows in a stream of {len(stream)}")
            return original(x, weight, stride, padding, dilation, groups, **kwargs)
        return mx.concatenate([depthwise(rows, weight) for rows in padded_runs(stream, x, tail)], axis=1)

    return conv1d


def padded_runs(stream: Stream, x: mx.array, tail: int) -> list[mx.array]:
    """x [B, tail + T, C] as the rows of each run behind the `tail` rows that it continues: the prompt's, or padding."""
    if not stream.branches:
        return [x]
    edges = accumulate(stream.branches[:-1], initial=tail + stream.prefix)
    first, *others = cut(x, list(edges)[1:], axis=1)
    before = x[:, stream.prefix : stream.prefix + tail]
    return [first, *(mx.concatenate([before, rows], axis=1) for rows in others)]
