"""Recurrent layers of the model files, computed by `segtrain.recurrence`, and begun again at a stream's branches.

mlx-lm runs a recurrence a token at a time where a gradient is wanted. Inside `stream_ops` the functions in `DOORS` do
the same in chunks of tokens, and `mx.conv1d`, which short convolutions go through, works block by block.

Where a stream has branches, a layer runs through the prompt once and hands what it holds then to each branch: its
state, and the prompt's last rows to a convolution. So a prompt can be shared wherever everything that looks back goes
through a door: `RESTARTS` names those model files.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn

from segtrain.attention.turns import cut, in_order
from segtrain.engine.layouts import Stream
from segtrain.recurrence.gated_delta import gated_delta
from segtrain.recurrence.short_conv import depthwise

Run: TypeAlias = Callable[[Sequence[mx.array], mx.array | None], tuple[mx.array, mx.array]]
"""(sequences [B, T, ...], state before them) -> (outputs [B, T, ...], state after them)."""
Maker: TypeAlias = Callable[[Stream, Any, Any], Any]
"""(stream, its attention, the original) -> what stands in for it, as in `exceptions`."""


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


def delta_rule(stream: Stream, attend: Any, original: Any) -> Any:
    """`gated_delta_update` with the decay kept as a logarithm, which stays exact where the decay itself is 0."""

    def update(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        a: mx.array,
        b: mx.array,
        A_log: mx.array,
        dt_bias: mx.array,
        state: mx.array | None = None,
        mask: mx.array | None = None,
        *,
        use_kernel: bool = True,
        lower_bound: float | None = None,
        allow_neg_eigval: bool = False,
    ) -> tuple[mx.array, mx.array]:
        beta = mx.sigmoid(b) * (2.0 if allow_neg_eigval else 1.0)
        rate = mx.exp(A_log.astype(mx.float32))
        if lower_bound is None:
            log_decay = -rate * nn.softplus(a + dt_bias)
        else:
            log_decay = lower_bound * mx.sigmoid(rate * (a.astype(mx.float32) + dt_bias))
        if mask is not None:
            beta = mx.where(mask[..., None], beta, 0)
            log_decay = mx.where(mask.reshape(*mask.shape, *[1] * (log_decay.ndim - 2)), log_decay, 0)
        return by_branches(stream, _delta_rule, [q, k, v, log_decay, beta], state)

    return update


def _delta_rule(sequences: Sequence[mx.array], state: mx.array | None) -> tuple[mx.array, mx.array]:
    q, k, v, log_decay, beta = sequences
    return gated_delta(q, k, v, log_decay, beta, state)


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
        return mx.concatenate([depthwise(rows, weight) for rows in _padded_runs(stream, x, tail)], axis=1)

    return conv1d


def _padded_runs(stream: Stream, x: mx.array, tail: int) -> list[mx.array]:
    """x [B, tail + T, C] as the rows of each run behind the `tail` rows that it continues: the prompt's, or padding."""
    if not stream.branches:
        return [x]
    edges = accumulate(stream.branches[:-1], initial=tail + stream.prefix)
    first, *others = cut(x, list(edges)[1:], axis=1)
    before = x[:, stream.prefix : stream.prefix + tail]
    return [first, *(mx.concatenate([before, rows], axis=1) for rows in others)]


_DELTA_RULE = ("qwen3_5", "qwen3_next", "kimi_linear", "olmo_hybrid", "bailing_moe_v3")

DOORS: list[tuple[str, str, Maker]] = [
    *((file, "gated_delta_update", delta_rule) for file in _DELTA_RULE),
]
"""(model file, what is replaced, by what)."""

RESTARTS = {*_DELTA_RULE, "lfm2", "lfm2_moe"}
"""Model files whose recurrent and convolutional layers all go through a door, so that branches begin again there."""


def restarts(layers: Sequence[nn.Module]) -> bool:
    """Whether a prompt can be shared through these recurrent layers."""
    return all(type(layer).__module__.rpartition(".")[2] in RESTARTS for layer in layers)
