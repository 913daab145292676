"""A model's forward pass as mlx-lm runs it: the reference that the stack is held to, whole or a layer at a time."""

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from segtrain.attention.reference import visibility
from segtrain.engine.layouts import Stream
from segtrain.models.exceptions import replaced
from segtrain.models.stack import Execution, LayerStack, Tape
from segtrain.recurrence import rwkv7

QUERIES = 64  # rows whose attention scores are live at a time

_sdpa = mx.fast.scaled_dot_product_attention


class PlainForward(LayerStack):
    """A stack whose whole forward pass uses mlx-lm's own caches, masks, attention and positions."""

    def __init__(self, stack: LayerStack):
        vars(self).update(vars(stack))

    def whole(self, stream: Stream) -> mx.array:
        """Logits [1, T, V] of a stream without branches."""
        assert not stream.branches
        with _differentiable_rwkv7():
            return self.model(stream.tokens, cache=make_prompt_cache(self.model))


class PlainLayers(LayerStack):
    """A stack whose layers compute as their model files do, recurrences a token at a time.

    MLX's own attention gets `QUERIES` rows at a time, with their mask as an array, and so does its autodiff: exact, and
    without all scores at once. What a model file writes out itself stays so.
    """

    def __init__(self, stack: LayerStack):
        vars(self).update(vars(stack))
        self._exceptions, self.execution = [], Execution()

    def run(self, tape: Tape, carry: Mapping[str, mx.array], lo: int, hi: int) -> dict[str, mx.array]:
        known = dict(carry)
        with replaced(mx.fast, "scaled_dot_product_attention", lambda _: _by_rows), _differentiable_rwkv7():
            for i in range(lo, hi):
                self._replay(i, tape.calls[i], known)
        return known


def _by_rows(q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Any = None, sinks: Any = None) -> mx.array:
    """MLX's attention, in blocks of rows where the mask is "causal": q [B, Hq, T, D], k and v of T rows too."""
    if not isinstance(mask, str):
        return _sdpa(q, k, v, scale=scale, mask=mask, sinks=sinks)
    window = getattr(mask, "window", None) or k.shape[2]
    tiles = [(lo, min(lo + QUERIES, q.shape[2]), max(0, lo - window + 1)) for lo in range(0, q.shape[2], QUERIES)]

    def block(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        visible = visibility(q.shape[2], k.shape[2], window=window)
        return _sdpa(q, k, v, scale=scale, mask=visible, sinks=sinks)

    @mx.custom_function
    def attention(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        outs: list[mx.array] = []
        for lo, hi, first in tiles:
            rows = mx.depends([q[:, :, lo:hi]], outs[-1:])[0]
            outs.append(block(rows, k[:, :, first:hi], v[:, :, first:hi]))
        return mx.concatenate(outs, axis=2)

    @attention.vjp
    def attention_vjp(inputs: tuple[mx.array, ...], do: mx.array, out: mx.array) -> tuple[mx.array, ...]:
        q, k, v = inputs
        dqs: list[mx.array] = []
        dk, dv = mx.zeros_like(k), mx.zeros_like(v)
        for lo, hi, first in tiles:
            rows, cotangent = mx.depends([q[:, :, lo:hi], do[:, :, lo:hi]], [*dqs[-1:], dk, dv])
            _, found = mx.vjp(lambda *x: [block(*x)], [rows, k[:, :, first:hi], v[:, :, first:hi]], [cotangent])
            dqs.append(found[0])
            dk, dv = dk.at[:, :, first:hi].add(found[1]), dv.at[:, :, first:hi].add(found[2])
        return mx.concatenate(dqs, axis=2), dk, dv

    return attention(q, k, v)  # type: ignore[return-value]  # mlx types a custom function as returning object


def _differentiable_rwkv7() -> AbstractContextManager[None]:
    """On Metal mlx-lm runs RWKV-7 by a kernel without a gradient: the rule a token at a time takes its place."""
    module = sys.modules.get("mlx_lm.models.rwkv7")
    return nullcontext() if module is None else replaced(module, "wkv7_kernel", lambda kernel: rwkv7.reference)
